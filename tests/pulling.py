"""The pull ends below the oldest transaction that still writes anywhere on the server; other tests write on it too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ipn_gateway.event_log import HORIZON

if TYPE_CHECKING:
    from ipn_gateway.db import Database

_IN_VIEW = f"SELECT NOT EXISTS (SELECT FROM events WHERE position >= {HORIZON})"


async def all_in_view(db: Database, *, seconds: float = 15) -> None:
    """Wait until every committed event can be pulled, at most `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            async with db.autocommit("test.in_view") as tx:
                if await tx.value(_IN_VIEW):
                    return
