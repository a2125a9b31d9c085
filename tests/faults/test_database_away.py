"""The database is away: whoever asks hears so at once, whatever is asked at the same time, and all is well when it is back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.web.app import create_app
from tests import world as worlds
from tests.proxy import proxying
from tests.world import SOURCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults

SENDERS = 25
CALLERS = 600
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
async def away(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[tuple[worlds.World, httpx.AsyncClient, object]]:
    """A world whose way to the database can be closed, and a client of its application."""
    async with proxying(database_url) as proxy, worlds.opened(proxy.url, clock, faults) as world:
        app = create_app(world.rt)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            yield world, client, proxy
        await app.state.slots.drained()


@pytest.mark.case("S115", "S45")
async def test_nobody_queues_behind_another_for_a_database_that_is_away(away) -> None:
    """Each sender gets a 503 with Retry-After from a failure that all share; nothing is stored, and afterwards everything works."""
    world, client, proxy = away
    await world.order("ORD-1")
    body = encode(world.pay("ORD-1"))
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    async with proxy.closed():
        answers = await asyncio.gather(*(client.post(f"/ipn/{SOURCE}", content=body, headers=FORM) for _ in range(SENDERS)))
        ready = await client.get("/readyz")
    took = loop.time() - began
    async with asyncio.timeout(15):
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - only an answer can tell
            await asyncio.sleep(0)
    back = await client.post(f"/ipn/{SOURCE}", content=body, headers=FORM)
    await world.drain()

    assert {(answer.status_code, "retry-after" in answer.headers) for answer in answers} == {(503, True)}
    assert ready.status_code == 503
    assert took < SENDERS  # one wait after the other would take two seconds each
    assert back.status_code == 200
    assert await world.outcomes() == ["applied"]


@pytest.mark.case("S115")
async def test_however_many_asked_while_it_was_away_all_is_well_when_it_is_back(away) -> None:
    """More callers than may wait, each with something of his own to load: those who gave up do not stand in the way afterwards."""
    world, client, proxy = away
    await world.order("ORD-1")
    body = encode(world.pay("ORD-1"))
    keys = [f"ipn_{number:043d}" for number in range(CALLERS)]
    answers = []
    async with proxy.closed():
        for _ in range(3):  # longer than the pool looks for the server by itself
            asked = (client.get("/v1/orders", headers={"Authorization": f"Bearer {key}"}) for key in keys)
            answers += await asyncio.gather(*asked, client.get("/readyz"))
    async with asyncio.timeout(15):
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - only an answer can tell
            await asyncio.sleep(0)
    back = await client.post(f"/ipn/{SOURCE}", content=body, headers=FORM)
    await world.drain()

    assert {answer.status_code for answer in answers} == {503}
    assert back.status_code == 200
    assert await world.outcomes() == ["applied"]
