"""A foreign application on the layer beside our own API, and who is paid through it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from tests.idempotency import foreign
from tests.idempotency.provider import Provider, providing
from tests.idempotency.service import LEASE_SECONDS, Points, Service, client_of
from tests.web.conftest import api, app, http, rt, shop, stranger  # noqa: F401 - the fixtures of our own API

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock


@pytest.fixture
def faults() -> Points:
    """Points at which the test makes things go wrong, and the list of those that were passed."""
    return Points()


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    """Who is paid."""
    async with providing() as opened:
        yield opened


@pytest.fixture
async def service(database_url: str, provider: Provider, clock: Clock, faults: Points) -> AsyncIterator[Service]:
    """The foreign application."""
    async with AsyncExitStack() as stack:
        foreign_app, db = await stack.enter_async_context(
            foreign.opened(database_url, provider.url, clock, faults, lease_seconds=LEASE_SECONDS)
        )
        async with db.transaction("test.schema") as tx:
            await tx.execute(foreign.ACTS)
        client = await stack.enter_async_context(client_of(foreign_app))
        yield Service(foreign_app, db, client, provider, clock, faults, database_url)
