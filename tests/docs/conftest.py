"""A gateway without a process of its own, for examples that call it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import runtime, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from ipn_gateway.runtime import Runtime


@pytest.fixture
async def rt(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Runtime]:
    """What an application is made from."""
    chosen = settings.load(database_url=SecretStr(database_url), secret_key=Fernet.generate_key().decode())
    async with runtime.opened(chosen, database_url, public_url="https://pay.example", clock=clock, faults=faults) as opened:
        yield opened
