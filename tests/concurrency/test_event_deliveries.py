"""Several dispatchers at once, in one process and in others that are stopped or killed: one attempt at a time, and none lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import attempts, event_claims, ids, logs
from ipn_gateway.attempts import Attempt
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from ipn_gateway.transport import Outcome
from tests import forkserver
from tests.dispatching import KEY, Hanging, Subscribers, dispatching, received
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago, ahead

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from tests.dispatching import Running
    from tests.loopback import Server
    from tests.make import Make

ROOT = Path(__file__).parents[2]


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


@contextlib.asynccontextmanager
async def several(count: int, url: str, clock: Clock, *, slots: int = 50, **given: Any) -> AsyncIterator[list[Running]]:
    """Dispatchers with connections of their own, as in processes of their own."""
    async with contextlib.AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(Database(url, clock=clock, faults=Faults(), name="dispatcher")) for _ in range(count)]
        yield [await stack.enter_async_context(dispatching(pool, slots=slots, **given)) for pool in pools]


async def test_no_event_delivery_is_sent_by_two_dispatchers(database_url: str, clock: Clock, subscribers: Subscribers) -> None:
    """Four that claim at the same moment, again and again, share the work: each event arrives once, with one attempt."""
    async with serving(says(OK)) as server, several(4, database_url, clock, slots=7) as dispatchers:
        endpoint_ids = [await subscribers.endpoint(server) for _ in range(5)]
        for endpoint_id in endpoint_ids:
            await subscribers.deliver(endpoint_id, 30)
        while await subscribers.rows("event_deliveries", "status = 'pending'"):
            await asyncio.gather(*(running.run_once() for running in dispatchers))

    sent = [message.id for message in received(server)]
    rows = await subscribers.rows("event_deliveries")
    attempts = await subscribers.rows("delivery_attempts")
    assert len(sent) == len(set(sent)) == len(rows) == len(attempts) == 150
    assert {(row["status"], row["attempt_count"], row["fence"]) for row in rows} == {("delivered", 1, 1)}
    assert {attempt["number"] for attempt in attempts} == {1}
    assert await subscribers.rows("endpoint_states", order="endpoint_id") == []


@pytest.mark.parametrize("max_in_flight", [1, 3])
async def test_no_number_of_dispatchers_exceeds_an_endpoints_limit(
    database_url: str, clock: Clock, subscribers: Subscribers, max_in_flight: int
) -> None:
    """What one has in flight counts for all; a limit of 1 means one at a time."""
    hanging = Hanging()
    async with serving(hanging) as server, several(4, database_url, clock) as dispatchers:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=max_in_flight)
        await subscribers.deliver(endpoint_id, 12, next_attempt_at=ago(minutes=1))
        most = 0
        for _ in range(12):
            for _ in range(3):
                await asyncio.gather(*(running.dispatcher.run_once() for running in dispatchers))
                most = max(most, await subscribers.in_flight(endpoint_id))
            await hanging.has(1)
            hanging.let_one_go()
            await one_is_free(dispatchers)

    assert most == max_in_flight
    assert len(server.requests) == 12


@pytest.mark.case("S123")
async def test_a_dispatcher_that_dies_in_mid_attempt_is_followed_by_another(
    database_url: str, clock: Clock, db: Database, subscribers: Subscribers
) -> None:
    """Its process is killed when the request has arrived: within the lease nobody sends, after it the same event is sent again."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        async with process(database_url) as victim:
            await hanging.has(1)
            victim.kill()
            await victim.wait()
        hanging.let_go()
        clock.advance(seconds=43)
        assert await running.drain() == 0
        clock.advance(seconds=3)
        assert await running.drain() == 1

    row = await subscribers.delivery(delivery_id)
    first, second = received(server)
    assert (row["status"], row["fence"], row["attempt_count"]) == ("delivered", 2, 1)
    assert [attempt["number"] for attempt in await subscribers.attempts(delivery_id)] == [1]
    assert (first.id, first.body) == (second.id, second.body)


@pytest.mark.case("S123", "S55")
async def test_a_dispatcher_that_wakes_after_its_lease_writes_nothing(
    database_url: str, clock: Clock, db: Database, subscribers: Subscribers
) -> None:
    """Its process is stopped in mid-attempt, another delivers, and what the first one comes back with is not written."""
    hanging = Hanging(then=b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n")
    async with serving(hanging) as slow, serving(says(OK)) as quick, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(slow)
        (delivery_id,) = await subscribers.deliver(endpoint_id)
        async with process(database_url) as sleeper:
            await hanging.has(1)
            sleeper.send_signal(signal.SIGSTOP)
            clock.advance(seconds=46)
            await subscribers.run("UPDATE endpoints SET url = %(url)s", url=quick.url)
            assert await running.drain() == 1
            before = await subscribers.delivery(delivery_id)
            hanging.let_go()
            sleeper.send_signal(signal.SIGCONT)
            said, _ = await sleeper.communicate()

    now = await subscribers.delivery(delivery_id)
    (endpoint,) = await subscribers.rows("endpoints", "id = %(id)s", id=endpoint_id)
    assert json.loads(said)["event_deliveries.lease_lost"] == 1
    assert {**now, "now": None} == {**before, "now": None}
    assert (now["status"], now["fence"]) == ("delivered", 2)
    assert [attempt["outcome"] for attempt in await subscribers.attempts(delivery_id)] == ["delivered"]
    assert endpoint["status"] == "enabled"
    assert await subscribers.rows("endpoint_states", order="endpoint_id") == []


@pytest.mark.case("S119")
async def test_what_was_never_sent_by_a_dead_dispatcher_is_sent(
    database_url: str, clock: Clock, db: Database, subscribers: Subscribers
) -> None:
    """A dispatcher dies between its claim and its first send; the leases end and another delivers all."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        await subscribers.deliver(endpoint_id, 3)
        faults = Faults()
        faults.on["event_deliveries.claim:after_commit"] = die
        async with Database(database_url, clock=clock, faults=faults) as other, dispatching(other) as dying:
            with pytest.raises(Died):
                await dying.run_once()
        assert await running.drain() == 0
        clock.advance(seconds=46)
        assert await running.drain() == 3

    assert await subscribers.statuses(endpoint_id) == {"delivered": 3}
    assert len(server.requests) == 3


async def test_many_writers_of_one_endpoints_health_lose_no_failure(
    database_url: str, clock: Clock, db: Database, subscribers: Subscribers
) -> None:
    """Dispatchers that record failures of the same endpoints at once, in whatever order, count them all; none is broken off."""
    logs.counters.clear()
    endpoint_ids = [await subscribers.endpoint("http://localhost:1/") for _ in range(4)]
    lease: dict[str, Any] = {"lease_expires_at": ahead(seconds=45), "fence": 1}
    made = [delivery_id for _ in range(15) for each in endpoint_ids for delivery_id in await subscribers.deliver(each, **lease)]
    random.Random(1).shuffle(made)
    failed = [failure(await subscribers.delivery(delivery_id)) for delivery_id in made]
    async with contextlib.AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(Database(database_url, clock=clock, faults=Faults())) for _ in range(3)]
        await asyncio.gather(*(attempts.record(pools[start // 5 % 3], failed[start : start + 5]) for start in range(0, 60, 5)))

    states = await subscribers.rows("endpoint_states", order="endpoint_id")
    assert [state["consecutive_failures"] for state in states] == [15] * 4
    assert len(await subscribers.rows("delivery_attempts")) == 60
    assert logs.counters["transactions.rerun"] == 0


def failure(row: dict[str, Any]) -> Attempt:
    """What is recorded of a first attempt that was refused."""
    outcome = Outcome("refused", 500)
    names = {"tenant_id": TENANT, "event_delivery_id": row["id"], "endpoint_id": row["endpoint_id"], "fence": row["fence"]}
    after = attempts.decide(0, outcome, schedule=(0, 5), chance=0)
    return Attempt(
        id=ids.new(row["now"]), trigger="initial", started_at=row["now"], url="http://localhost/", outcome=outcome, after=after, **names
    )


async def test_no_number_of_dispatchers_exceeds_an_endpoints_rate(database_url: str, clock: Clock, subscribers: Subscribers) -> None:
    """Four that claim in a hurry, without a pause: fifteen a second, and nearly that."""
    async with contextlib.AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(Database(database_url, clock=clock, faults=Faults())) for _ in range(4)]
        endpoint_id = await subscribers.endpoint("http://localhost:1/", rate_per_second=15, max_in_flight=100)
        await subscribers.backlog(endpoint_id, 100)
        times: list[float] = []

        async def claim(pool: Database) -> None:
            while len(times) < 40:
                async with pool.transaction("test.claim") as tx:
                    claimed = await event_claims.claim(tx, limit=100, lease_seconds=45)
                times.extend(delivery.claimed_at.timestamp() for delivery in claimed)

        await asyncio.gather(*map(claim, pools))

    times.sort()
    assert max(sum(start <= moment < start + 1 for moment in times) for start in times) <= 15
    assert 39 / 15 < times[39] - times[0] < 3 * 39 / 15


async def test_no_number_of_dispatchers_breaks_the_order(database_url: str, clock: Clock, subscribers: Subscribers) -> None:
    """Four of them and a subscriber that fails now and then: of each order one at a time, and none before those it follows."""
    chance = random.Random(4)
    seen: list[tuple[str, int, bool]] = []
    busy: set[str] = set()

    async def sometimes(server: Server, writer: asyncio.StreamWriter) -> None:
        order, _, number = received(server)[-1].id.partition("-")
        assert order not in busy
        busy.add(order)
        await asyncio.sleep(0)
        busy.discard(order)
        seen.append((order, int(number), well := chance.random() < 0.7))
        writer.write(OK if well else b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")

    given: dict[str, Any] = {"retry_schedule": (0, *[5] * 20)}
    async with serving(sometimes) as server, several(4, database_url, clock, **given) as dispatchers:
        endpoint_id = await subscribers.endpoint(server, ordered=True, max_in_flight=20)
        for number in range(1, 6):
            for order in "ABCDEFGH":
                await subscribers.make.event(id=f"{order}-{number}")
                row = {"event_id": f"{order}-{number}", "order_id": order, "sequence": number}
                await subscribers.make.event_delivery(endpoint_id=endpoint_id, **row)
        while await subscribers.rows("event_deliveries", "status = 'pending'"):
            await asyncio.gather(*(running.run_once() for running in dispatchers))
            clock.advance(seconds=10)

    for order in "ABCDEFGH":
        tried = [(number, well) for name, number, well in seen if name == order]
        assert [number for number, well in tried if well] == [1, 2, 3, 4, 5]
        assert [number for number, _ in tried] == sorted(number for number, _ in tried)
    assert await subscribers.statuses(endpoint_id) == {"delivered": 40}


async def test_no_number_of_dispatchers_tries_a_failing_endpoint_twice_at_once(
    database_url: str, clock: Clock, subscribers: Subscribers
) -> None:
    """Its rest is over: one event delivery tries it, whoever claims at that moment."""
    hanging = Hanging()
    async with serving(hanging) as server, several(4, database_url, clock) as dispatchers:
        endpoint_id = await subscribers.endpoint(server)
        await subscribers.make.endpoint_state(endpoint_id=endpoint_id, consecutive_failures=9, open_until=ago(seconds=1))
        await subscribers.backlog(endpoint_id, 20)
        counts = [sum(await asyncio.gather(*(running.dispatcher.run_once() for running in dispatchers))) for _ in range(5)]

    assert counts == [1, 0, 0, 0, 0]


@pytest.mark.case("B89", "S123")
async def test_two_processes_share_what_is_due_and_one_is_killed_in_mid_send(
    database_url: str, clock: Clock, db: Database, subscribers: Subscribers
) -> None:
    """A hundred due, a slow receiver: each is sent once; what the killed one had goes out again after its lease, under the same ids."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db, slots=100) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=100)
        await subscribers.deliver(endpoint_id, 100)
        async with process(database_url) as victim, process(database_url) as survivor:
            await hanging.has(100)
            rows = await subscribers.rows("event_deliveries")
            sent = Counter(message.id for message in received(server))
            victim.kill()
            await victim.wait()
            hanging.let_go()
            await survivor.communicate()
        half = await subscribers.statuses(endpoint_id)
        assert await running.drain() == 0
        clock.advance(seconds=46)
        again = await running.drain()

    repeated = {event_id for event_id, count in Counter(message.id for message in received(server)).items() if count == 2}
    assert (len(sent), set(sent.values())) == (100, {1})
    assert {(row["fence"], row["lease_expires_at"] > row["now"]) for row in rows} == {(1, True)}
    assert half == {"delivered": 50, "pending": 50}
    assert again == len(repeated) == 50
    assert await subscribers.statuses(endpoint_id) == {"delivered": 100}
    assert {row["attempt_count"] for row in await subscribers.rows("event_deliveries")} == {1}


async def one_is_free(dispatchers: list[Running]) -> None:
    """Wait until an attempt of any of them has ended."""
    waits = [asyncio.create_task(running.free()) for running in dispatchers]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


class Died(BaseException):
    """What a test makes a dispatcher die of."""


async def die() -> None:
    raise Died


@contextlib.asynccontextmanager
async def process(url: str) -> AsyncIterator[forkserver.Process]:
    """A dispatcher in a process of its own, which makes one pass."""
    started = await forkserver.start("tests.dispatching", url, KEY, environment=os.environ)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()
