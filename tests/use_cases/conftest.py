"""The fixture of the flow's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import world as worlds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[worlds.World]:
    """A whole gateway beside a simulated provider, with one source and no order."""
    async with worlds.opened(database_url, clock, faults) as opened:
        yield opened
