"""Endpoints with a limited rate: what is sent in any second, by however many dispatchers."""

from __future__ import annotations

import asyncio
import bisect
import random
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import endpoints, event_claims
from ipn_gateway.workers import Loop, run_forever
from tests.dispatching import Subscribers, dispatching
from tests.loopback import OK, serving
from tests.make import TENANT

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.event_claims import Claimed
    from tests.loopback import Server
    from tests.make import Make


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


async def claim(db: Database, limit: int = 100) -> list[Claimed]:
    async with db.transaction("test.claim") as tx:
        return await event_claims.claim(tx, limit=limit, lease_seconds=45)


async def limited(subscribers: Subscribers, rate: float | None, *, due: int = 500, **given: Any) -> UUID:
    """An endpoint with a rate, and so many event deliveries due."""
    endpoint_id = await subscribers.endpoint("http://localhost:1/", rate_per_second=rate, max_in_flight=100, **given)
    await subscribers.backlog(endpoint_id, due)
    return endpoint_id


async def ended(subscribers: Subscribers) -> None:
    """What was claimed is delivered."""
    await subscribers.run("UPDATE event_deliveries SET status = 'delivered', next_attempt_at = NULL WHERE lease_expires_at IS NOT NULL")


def most_in(seconds: float, times: list[float]) -> int:
    """The most that any span of so many seconds holds; the span's end does not belong to it."""
    times = sorted(times)
    return max(bisect.bisect_left(times, start + seconds) - number for number, start in enumerate(times))


@pytest.mark.parametrize("rate", [0.5, 1, 2.5, 5, 20, 200, 1000])
async def test_no_second_sees_more_than_the_rate(clock: Clock, db: Database, subscribers: Subscribers, rate: float) -> None:
    """Whenever is claimed, one after the other, after a rest or in a hurry; and over time it is nearly the rate."""
    await limited(subscribers, rate, due=1500)
    steps = random.Random(7)
    times: list[datetime] = []
    for _ in range(80):
        times += [delivery.claimed_at for delivery in await claim(db)]
        await ended(subscribers)
        clock.advance(seconds=steps.choice([0, 0, 0.1, 0.3, 1, 2.5]) / rate if rate < 20 else steps.choice([0, 0.001, 0.02, 0.03]))

    seconds = [moment.timestamp() for moment in times]
    whole = rate if rate < 1 else int(rate)
    assert most_in(1, seconds) <= max(1, rate)
    assert most_in(1 / rate, seconds) <= max(1, event_claims.AT_ONCE * rate + 1)
    assert len(times) <= max(1, event_claims.AT_ONCE * rate) + event_claims.PACE * whole * (seconds[-1] - seconds[0]) + 1
    assert len(times) >= min(1500, 0.5 * whole * (seconds[-1] - seconds[0]))


async def test_what_waits_goes_out_at_nearly_the_rate(db: Database, subscribers: Subscribers) -> None:
    """As the subscriber sees it: never more than 20 in a second, and 25 of them before long."""
    times: list[float] = []

    async def note(server: Server, writer: asyncio.StreamWriter) -> None:
        times.append(asyncio.get_running_loop().time())
        writer.write(OK)

    wake, stop = asyncio.Event(), asyncio.Event()
    async with serving(note) as server, dispatching(db, wake=wake.set) as running:
        endpoint_id = await subscribers.endpoint(server, rate_per_second=20)
        await subscribers.backlog(endpoint_id, 25)
        loop = asyncio.create_task(run_forever(Loop("dispatcher", running.dispatcher.run_once, wake), stop))
        async with asyncio.timeout(10):
            while len(times) < 25:
                await running.free()
        stop.set()
        wake.set()
        await loop
        assert await running.slots.drained(seconds=10)

    assert await subscribers.statuses(endpoint_id) == {"delivered": 25}
    assert most_in(1, times) <= 20
    assert 24 / 20 < times[-1] - times[0] < 4


async def test_an_endpoint_without_a_rate_costs_nothing(db: Database, subscribers: Subscribers) -> None:
    """No state is written for it; what may be in flight is its only limit."""
    await limited(subscribers, None)

    assert len(await claim(db)) == 100
    assert await subscribers.rows("endpoint_states", order="endpoint_id") == []


async def test_a_rate_holds_up_no_other_endpoint(db: Database, subscribers: Subscribers) -> None:
    """While one has to wait, the slots are the others'."""
    slow, quick = await limited(subscribers, 1), await limited(subscribers, None)
    assert {delivery.endpoint_id for delivery in await claim(db, limit=10)} == {slow, quick}

    assert {delivery.endpoint_id for delivery in await claim(db, limit=10)} == {quick}


async def test_what_waited_for_enabling_goes_out_within_the_rate(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """And disabling and enabling it in a hurry lets nothing more through."""
    endpoint_id = await limited(subscribers, 2)
    counts = []
    for _ in range(2):
        counts.append(len(await claim(db)))
        async with db.transaction("test.disable") as tx:
            await endpoints.disable(tx, TENANT, endpoint_id, "gone")
        await endpoints.enable(db, TENANT, endpoint_id, actor="test")
    clock.advance(seconds=0.6)
    counts.append(len(await claim(db)))

    assert counts == [1, 0, 1]


async def test_a_higher_rate_holds_from_now_on(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """What was sent under a rate of one an hour does not keep the next one waiting for an hour, and does not let two go at once."""
    endpoint_id = await limited(subscribers, 0.001)
    assert len(await claim(db)) == 1
    await endpoints.patch(db, TENANT, endpoint_id, {"rate_per_second": 2}, actor="test")
    counts = [len(await claim(db))]
    clock.advance(seconds=1.1)
    counts.append(len(await claim(db)))
    clock.advance(seconds=0.6)
    counts.append(len(await claim(db)))

    assert counts == [0, 1, 1]


async def test_redeliveries_keep_to_the_rate_too(db: Database, subscribers: Subscribers) -> None:
    """Whatever an event is sent for, it is one of the sends of its second."""
    endpoint_id = await limited(subscribers, 1, due=2)
    await subscribers.run("UPDATE event_deliveries SET next_trigger = 'redelivery' WHERE endpoint_id = %(id)s", id=endpoint_id)

    assert [len(await claim(db)), len(await claim(db))] == [1, 0]
