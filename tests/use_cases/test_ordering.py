"""Ordered endpoints: an order's events one by one and in their sequence, and other orders not held up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import endpoints, event_claims, ordering, redeliveries, views
from ipn_gateway.paging import Wanted
from tests.dispatching import Hanging, Subscribers, dispatching, received, refuses
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago, ahead

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults
    from tests.loopback import Answering, Server
    from tests.make import Make

NO = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


async def numbered(subscribers: Subscribers, endpoint_id: UUID, *names: str, **given: Any) -> dict[str, UUID]:
    """Event deliveries named after order and sequence, such as A1, due in this order; by name."""
    made = {}
    for place, name in enumerate(names):
        row = {"endpoint_id": endpoint_id, "order_id": name[0], "sequence": int(name[1:]), "event_id": f"{name}-{endpoint_id}"} | given
        await subscribers.make.event(id=row["event_id"])
        row.setdefault("next_attempt_at", ago(minutes=len(names) - place))
        made[name] = (await subscribers.make.event_delivery(**row, created_at=ago(minutes=len(names) - place)))["id"]
    return made


def names(server: Server) -> list[str]:
    return [message.id.partition("-")[0] for message in received(server)]


def by_event(answers: Mapping[str, bytes]) -> Answering:
    """What is answered to an event of this name; to others a 200."""

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.get(names(server)[-1], OK))

    return answer


async def test_an_event_waits_for_those_before_it_and_for_nothing_else(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """A1 fails: A2 and A3 wait until it is delivered, then go out in their sequence; B's and what has no sequence go out meanwhile."""
    answers = {"A1": NO}
    async with serving(by_event(answers)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, ordered=True)
        made = await numbered(subscribers, endpoint_id, "A1", "A2", "B1", "A3", "B2")
        await subscribers.deliver(endpoint_id, 1)
        await running.drain()
        first = names(server)
        rows = {name: await subscribers.delivery(delivery_id) for name, delivery_id in made.items()}
        answers.clear()
        clock.advance(seconds=6)
        await running.drain()

    assert first[0] == "A1"
    assert [name for name in first if name[0] == "B"] == ["B1", "B2"]
    assert len(first) == 4
    assert rows["A1"]["next_attempt_at"] > rows["A1"]["now"]
    assert {rows[name]["attempt_count"] for name in ("A2", "A3")} == {0}
    assert rows["A2"]["next_attempt_at"] >= rows["A1"]["next_attempt_at"]
    assert names(server)[4:] == ["A1", "A2", "A3"]


async def test_an_endpoint_that_is_not_ordered_gets_what_is_due(db: Database, subscribers: Subscribers) -> None:
    """It puts the events in order itself, by their sequence."""
    async with serving(by_event({"A1": NO})) as server, dispatching(db) as running:
        await numbered(subscribers, await subscribers.endpoint(server), "A1", "A2", "A3")
        await running.drain()

    assert sorted(names(server)) == ["A1", "A2", "A3"]


async def test_what_is_dead_holds_nothing_up(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """After the last attempt of one the next one goes out at once."""
    async with serving(by_event({"A1": NO})) as server, dispatching(db, retry_schedule=(0, 5)) as running:
        made = await numbered(subscribers, await subscribers.endpoint(server, ordered=True), "A1", "A2")
        await running.drain()
        clock.advance(seconds=6)
        await running.drain()

    assert names(server) == ["A1", "A1", "A2"]
    assert (await subscribers.delivery(made["A1"]))["status"] == "dead"


async def test_only_one_event_of_an_order_is_on_its_way(db: Database, subscribers: Subscribers) -> None:
    """However long that takes; the events of other orders go beside it."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db) as running:
        await numbered(subscribers, await subscribers.endpoint(server, ordered=True), "A1", "A2", "B1", "B2", "C1")
        assert await running.start_all() == 3
        await hanging.has(3)
        assert await running.start_all() == 0
        hanging.let_go()
        await running.drain()

    assert sorted(names(server)[:3]) == ["A1", "B1", "C1"]
    assert sorted(names(server)[3:]) == ["A2", "B2"]


@pytest.mark.parametrize("old", [{"status": "delivered", "delivered_at": ago(hours=1)}, {"status": "dead"}])
async def test_an_old_event_may_be_asked_for_again_at_any_time(db: Database, subscribers: Subscribers, old: dict[str, Any]) -> None:
    """While a later one waits for its retry; but never beside one of its order that is on its way."""
    hanging = Hanging()
    async with serving(by_event({"A2": NO})) as server, serving(hanging) as slow, dispatching(db) as running:
        for to in (server, slow):
            endpoint_id = await subscribers.endpoint(to, ordered=True)
            made = await numbered(subscribers, endpoint_id, "A1", next_attempt_at=None, **old)
            await numbered(subscribers, endpoint_id, "A2")
            await running.dispatcher.run_once()
            if to is server:
                assert await running.slots.drained(seconds=10)
            await redeliveries.redeliver(db, TENANT, made["A1"], actor="test")
        await hanging.has(1)
        await running.start_all()
        in_flight = await subscribers.in_flight(endpoint_id)
        hanging.let_go()
        await running.drain()

    assert names(server) == ["A2", "A1"]
    assert in_flight == 1
    assert names(slow) == ["A2", "A1"]


async def test_a_later_event_may_be_asked_for_out_of_turn(db: Database, subscribers: Subscribers) -> None:
    """A person decides that A2 goes out although A1 is not delivered; A3 still waits for A1."""
    async with serving(by_event({"A1": NO})) as server, dispatching(db) as running:
        made = await numbered(subscribers, await subscribers.endpoint(server, ordered=True), "A1", "A2", "A3")
        await running.drain()
        await redeliveries.redeliver(db, TENANT, made["A2"], actor="test")
        await running.drain()

    assert names(server) == ["A1", "A2"]


async def test_what_failed_out_of_turn_waits_for_its_turn_again(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """A2 was asked for while A1 was not delivered, and failed: its retry comes after A1, and not much later than it could."""
    answers = {"A1": NO, "A2": NO}
    async with serving(by_event(answers)) as server, dispatching(db, retry_schedule=(0, 100, 100)) as running:
        made = await numbered(subscribers, await subscribers.endpoint(server, ordered=True), "A1", "A2")
        await running.drain()
        clock.advance(seconds=1)
        await redeliveries.redeliver(db, TENANT, made["A2"], actor="test")
        await running.drain()
        await subscribers.run("UPDATE event_deliveries SET next_attempt_at = ipn_now() WHERE id = %(id)s", id=made["A2"])
        assert await running.drain() == 0
        answers.clear()
        clock.advance(seconds=100)
        await running.drain()
        clock.advance(seconds=45)
        await running.drain()

    assert names(server) == ["A1", "A2", "A1", "A2"]


async def test_holding_back_and_ending_do_not_miss_each_other(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """A1 ends while a claim holds A2 back behind it: the record waits for the claim, and A2 is due afterwards."""
    hanging = Hanging()
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        held.set()
        await go_on.wait()

    async with serving(hanging) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, ordered=True)
        await numbered(subscribers, endpoint_id, "A1")
        await running.dispatcher.run_once()
        await hanging.has(1)
        await numbered(subscribers, endpoint_id, "A2")
        faults.on["event_deliveries.claim:statement_2"] = hold
        claiming = asyncio.create_task(running.dispatcher.run_once())
        await held.wait()
        hanging.let_go()
        async with asyncio.timeout(10):
            while not await subscribers.rows("pg_stat_activity", "datname = current_database() AND wait_event_type = 'Lock'", "pid"):
                assert running.slots.free == 49
        faults.on.clear()
        go_on.set()
        assert await claiming == 0
        await running.drain()

    assert names(server) == ["A1", "A2"]


async def test_without_the_order_nothing_is_held_back_any_more(db: Database, subscribers: Subscribers) -> None:
    """Once `ordered` is false, what waited behind another goes out at once; what was tried, or spread by a recovery, keeps its time."""
    async with serving(by_event({"A1": NO})) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, ordered=True)
        await numbered(subscribers, endpoint_id, "A1", "A2", "A3", "B1")
        await numbered(subscribers, endpoint_id, "A4", next_trigger="recovery", next_attempt_at=ahead(minutes=1))
        await running.drain()
        before = names(server)
        for _ in range(2):
            await endpoints.patch(db, TENANT, endpoint_id, {"ordered": False}, actor="test")
        await running.drain()

    assert before == ["A1", "B1"]
    assert names(server)[2:] == ["A2", "A3"]


async def test_what_was_claimed_without_the_order_lets_its_followers_go_too(db: Database, subscribers: Subscribers) -> None:
    """The endpoint is ordered by the time A1 ends, and A2 was held back behind it meanwhile."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        await numbered(subscribers, endpoint_id, "A1")
        await running.dispatcher.run_once()
        await hanging.has(1)
        await endpoints.patch(db, TENANT, endpoint_id, {"ordered": True}, actor="test")
        made = await numbered(subscribers, endpoint_id, "A2")
        assert await running.start_all() == 0
        row = await subscribers.delivery(made["A2"])
        assert row["next_attempt_at"] > row["now"]
        hanging.let_go()
        assert await running.slots.drained(seconds=10)
        await running.drain()

    assert names(server) == ["A1", "A2"]


async def test_enabling_sends_what_waited_in_sequence(db: Database, subscribers: Subscribers) -> None:
    """Also of an order whose first event had been tried in vain."""
    async with serving(says(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n", OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, ordered=True, max_in_flight=1)
        await numbered(subscribers, endpoint_id, "A1", "A2", "B1", "A3")
        await running.drain()
        await endpoints.enable(db, TENANT, endpoint_id, actor="test")
        await running.drain()

    assert [name for name in names(server) if name[0] == "A"] == ["A1", "A1", "A2", "A3"]


async def test_what_is_held_back_shows_when_its_turn_may_come(db: Database, subscribers: Subscribers) -> None:
    """Not before the next attempt of the one before it."""
    async with serving(refuses()) as server, dispatching(db) as running:
        made = await numbered(subscribers, await subscribers.endpoint(server, ordered=True), "A1", "A2")
        await running.drain()
        await running.drain()
        async with db.autocommit("test") as tx:
            shown = (await views.event_deliveries(tx, TENANT, Wanted(limit=10), order_id="A")).items

    times = {item.event_id[:2]: item.next_attempt_at for item in shown if item.next_attempt_at}
    assert times["A2"] >= times["A1"] > (await subscribers.delivery(made["A1"]))["now"]


async def test_any_number_of_events_that_wait_holds_no_other_order_up(db: Database, subscribers: Subscribers) -> None:
    """Ten thousand of one order behind its first, which waits for a retry: another order's event goes out, and claiming reads little."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, ordered=True)
        made = await numbered(subscribers, endpoint_id, "A1")
        await subscribers.run("UPDATE event_deliveries SET attempt_count = 1, next_attempt_at = ipn_now() + interval '1 hour'")
        await subscribers.run(
            """INSERT INTO event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, order_id, sequence, next_attempt_at)
               SELECT %(tenant_id)s, gen_random_uuid(), 'evt_' || n, %(endpoint_id)s, 'order.paid', 'A', n + 1,
                      ipn_now() - interval '1 hour'
                 FROM generate_series(1, 10000) AS n""",
            endpoint_id=endpoint_id,
        )
        await numbered(subscribers, endpoint_id, "B1")
        read: list[int] = []
        await _explain(db, endpoint_id, read)
        passes = 0
        while names(server) != ["B1"]:
            await running.run_once()
            passes += 1
            assert passes <= 10_000 / (ordering.HELD_BACK_MAX * ordering.ROUNDS_MAX) + 1
        await _explain(db, endpoint_id, read)
        due = await subscribers.rows("event_deliveries", "next_attempt_at <= ipn_now()")

    assert len(read) == 8
    assert max(read) < 2000
    assert due == []
    assert (await subscribers.delivery(made["A1"]))["attempt_count"] == 1


async def _explain(db: Database, endpoint_id: UUID, read: list[int]) -> None:
    """Claim of an ordered endpoint and let go, add how many rows each statement read, and undo it."""
    numbers = event_claims._CONSTANTS | {"limit": 10, "lease_seconds": 45.0, "looked_at": ordering.HELD_BACK_MAX}
    values = {**numbers, "tenant_ids": [TENANT], "endpoint_ids": [endpoint_id], "shares": [10], "mosts": [10], "ids": [endpoint_id]}
    async with db.transaction("test.explain") as tx:
        for statement in (event_claims._CHOOSE, ordering._HOLD_BACK, event_claims._CLAIM, ordering._LET_GO):
            plan = await tx.value(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values)
            read.append(_read(plan[0]["Plan"]))
        raise psycopg.Rollback


def _read(node: dict[str, Any]) -> int:
    own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] if "Relation Name" in node else 0
    return int(own) + sum(_read(child) for child in node.get("Plans", []))
