"""Races in one process: tasks released from a barrier, real commits, and every table counted afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import claims, effects, ids, inbox, logs, notifications, reconciliation
from ipn_gateway.bookings import Origin
from ipn_gateway.providers.base import Confirmed, Effect, InboundRequest
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.slots import Slots
from tests import world as worlds
from tests.world import FORM, SOURCE, STORE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Coroutine

    import psycopg

    from ipn_gateway.clock import Clock
    from ipn_gateway.effects import EffectNotification
    from ipn_gateway.faults import Faults
    from tests.world import World

ROUNDS = 200
TOGETHER = claims.IN_FLIGHT_PER_SOURCE


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[World]:
    """A whole gateway beside a simulated provider; at the end no transaction had to be run again, for there was no deadlock."""
    before = logs.counters["transactions.rerun"]
    async with worlds.opened(database_url, clock, faults) as opened:
        yield opened
    assert logs.counters["transactions.rerun"] == before


def hold_verdicts(world: World, parties: int) -> None:
    """Nobody applies before so many have their verdict."""
    barrier = asyncio.Barrier(parties)

    async def wait() -> None:
        await barrier.wait()

    world.rt.faults.on["transport.ask:after"] = wait


async def released(*calls: Awaitable[Any]) -> None:
    """Run the calls at the same moment: each waits at a barrier until all are there."""
    barrier = asyncio.Barrier(len(calls))

    async def one(call: Awaitable[Any]) -> None:
        await barrier.wait()
        await call

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(one(call))


@pytest.mark.case("S108", "S109")
async def test_fifty_copies_at_once_have_one_effect(world: World) -> None:
    """All are stored and answered 2xx; sixteen of them hold the same verdict before anybody applies, and the ledger's key decides."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    hold_verdicts(world, TOGETHER)

    receipts = await asyncio.gather(*(world.notify(fields) for _ in range(50)))
    await world.drain()

    assert {receipt.error for receipt in receipts} == {None}
    assert sorted(await world.outcomes()) == ["applied"] + ["duplicate"] * 49
    assert world.questions == TOGETHER
    assert await world.counts() == {
        "notification_deliveries": 50,
        "inbox": 0,
        "processed_notifications": 1,
        "payments": 1,
        "events": 1,
        "event_deliveries": 0,
        "sweeps": 0,
    }
    assert await world.rows("SELECT status, amount_paid, event_count FROM orders") == [
        {"status": "paid", "amount_paid": Decimal("1000.00"), "event_count": 1}
    ]


@pytest.mark.case("S107", "S108", "B01")
async def test_the_listener_and_the_return_page_at_once_are_one_effect(world: World) -> None:
    """Fifty rounds of the same payment by both ways: one effect and one event a round, and the loser is a duplicate."""
    account = await world.rt.sources.get(SOURCE)
    assert account is not None
    for number in range(50):
        await world.order(f"ORD-{number}")
        fields = world.pay(f"ORD-{number}")
        request = InboundRequest("POST", "", FORM, encode(fields))
        browser = notifications.receive(world.rt.intake, account, request, via="return/success")
        await released(world.notify(fields), browser)
        hold_verdicts(world, 2)
        await world.drain()

    assert await world.rows("SELECT via, count(*) FROM notification_deliveries GROUP BY via ORDER BY via") == [
        {"via": "ipn", "count": 50},
        {"via": "return/success", "count": 50},
    ]
    assert sorted(await world.outcomes()) == ["applied"] * 50 + ["duplicate"] * 50
    counts = await world.counts()
    assert (counts["processed_notifications"], counts["payments"], counts["events"]) == (50, 50, 50)
    assert await world.value("SELECT count(*) FROM orders WHERE amount_paid <> amount OR event_count <> 1") == 0


@pytest.mark.case("S110", "B03")
async def test_two_bodies_of_one_operation_at_once_are_one_payment(world: World) -> None:
    """Other header order and a field more: identity is the provider's movement of money, since the bodies differ."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    hold_verdicts(world, 2)

    one = world.notify(fields, headers=(*FORM, ("user-agent", "SSLCOMMERZ")))
    other = world.notify(encode([("attempt", "2"), *reversed(fields.items())]), headers=(("user-agent", "SSLCOMMERZ"), *FORM))
    await released(one, other)
    await world.drain()

    assert sorted(await world.outcomes()) == ["applied", "duplicate"]
    assert world.questions == 2
    assert await world.value("SELECT amount_paid FROM orders") == Decimal("1000.00")
    assert (await world.counts())["payments"] == 1


@pytest.mark.case("S141", "B09")
async def test_an_order_and_its_notification_at_once_are_paid_every_time(world: World) -> None:
    """Two hundred rounds, the creation beside the receipt and beside the apply in turn: paid, and nothing is left parked."""
    parked = logs.counters["notifications.parked"]
    for number in range(ROUNDS):
        order_id = f"ORD-{number}"
        fields = world.pay(order_id)
        if number % 2:
            await released(world.order(order_id), world.notify(fields))
            await world.drain()
        else:
            await world.notify(fields)
            await _drain_beside(world, world.order(order_id), lag=number // 2 % 10 * 20)

    assert await world.rows("SELECT status, count(*) FROM orders GROUP BY status") == [{"status": "paid", "count": ROUNDS}]
    assert await world.rows("SELECT outcome, count(*) FROM notification_deliveries GROUP BY outcome") == [
        {"outcome": "applied", "count": ROUNDS}
    ]
    counts = await world.counts()
    assert (counts["inbox"], counts["processed_notifications"], counts["payments"], counts["events"]) == (0, ROUNDS, ROUNDS, ROUNDS)
    assert await world.value("SELECT count(*) FROM orders WHERE amount_paid <> amount OR event_count <> 1") == 0
    assert 0 < logs.counters["notifications.parked"] - parked < ROUNDS  # both sides came first at times


async def _drain_beside(world: World, creation: Coroutine[Any, Any, None], *, lag: int) -> None:
    """Create the order in the moment in which the verdict is there, some turns of the event loop later."""

    async def create() -> None:
        for _ in range(lag):
            await asyncio.sleep(0)
        await creation

    async with asyncio.TaskGroup() as group:

        async def verdict() -> None:
            del world.rt.faults.on["transport.ask:after"]
            group.create_task(create())

        world.rt.faults.on["transport.ask:after"] = verdict
        await world.drain()
    await world.drain()


@pytest.mark.case("S107", "S110", "B133")
async def test_different_payments_of_one_order_at_once_are_one_and_the_rest_beside_it(world: World) -> None:
    """Sixteen real payments in the same instant: one pays, fifteen are booked as unapplied, and no sum is lost or made up."""
    await world.order("ORD-1")
    hold_verdicts(world, TOGETHER)
    await asyncio.gather(*(world.notify(world.pay("ORD-1")) for _ in range(TOGETHER)))
    await world.drain()

    assert sorted(await world.outcomes()) == ["applied"] + ["conflict"] * (TOGETHER - 1)
    assert await world.rows("SELECT status, count(*), sum(amount) FROM payments GROUP BY status ORDER BY status") == [
        {"status": "applied", "count": 1, "sum": Decimal("1000.00")},
        {"status": "unapplied", "count": TOGETHER - 1, "sum": Decimal("1000.00") * (TOGETHER - 1)},
    ]
    assert await world.rows("SELECT amount_paid, event_count FROM orders") == [{"amount_paid": Decimal("1000.00"), "event_count": TOGETHER}]
    assert [row["sequence"] for row in await world.rows("SELECT sequence FROM events WHERE sequence IS NOT NULL ORDER BY 1")] == list(
        range(1, TOGETHER + 1)
    )


@pytest.mark.case("S112", "S113")
async def test_negatives_and_a_payment_at_once_end_paid(world: World) -> None:
    """Whichever commits first, in sixty rounds: rank decides, and each change has its event."""
    for number in range(60):
        order_id = f"ORD-{number}"
        await world.order(order_id)
        await released(
            effects.apply(world.rt.db, sweep_of(world), negative(order_id, Effect.FAILED)),
            effects.apply(world.rt.inbox_db, sweep_of(world), payment(order_id)),
            effects.apply(world.rt.maintenance_db, sweep_of(world), negative(order_id, Effect.CANCELLED)),
            effects.apply(world.rt.dispatcher_db, sweep_of(world), payment(order_id)),
        )

    assert await world.rows("SELECT status, reason, count(*) FROM orders GROUP BY 1, 2") == [
        {"status": "paid", "reason": None, "count": 60}
    ]
    assert (await world.counts())["payments"] == 60
    assert await world.value("SELECT count(*) FROM orders WHERE amount_paid <> amount") == 0
    changes = "SELECT count(*) FROM processed_notifications p WHERE p.order_id = o.order_id"
    assert await world.value(f"SELECT count(*) FROM orders o WHERE event_count <> ({changes})") == 0
    assert await world.value("SELECT sum(event_count) FROM orders") == (await world.counts())["events"]


def sweep_of(world: World) -> Origin:
    return Origin(TENANT, SOURCE, "sslcommerz", ids.new(world.rt.clock.now()))


def payment(order_id: str) -> Confirmed:
    return Confirmed(order_id, f"V-{order_id}", Effect.PAID, "VALID", STORE, Decimal("1000.00"), "BDT", f"BT-{order_id}")


def negative(order_id: str, effect: Effect) -> Confirmed:
    return Confirmed(order_id, f"{order_id}/{effect.name}", effect, effect.name, STORE, None, None)


@pytest.mark.case("S107", "S108")
async def test_the_sweep_and_the_notification_at_once_are_one_effect(world: World) -> None:
    """They use the same key, so racing is safe: fifty rounds."""
    for number in range(50):
        await world.order(f"ORD-{number}")
    world.rt.clock.advance(seconds=300)
    for number in range(50):
        fields = world.pay(f"ORD-{number}")
        await world.notify(fields)
    await released(world.drain(), world.sweep())
    await released(world.drain(), world.sweep())

    assert await world.rows("SELECT status, count(*) FROM orders GROUP BY status") == [{"status": "paid", "count": 50}]
    assert set(await world.outcomes()) <= {"applied", "duplicate"}
    counts = await world.counts()
    assert (counts["processed_notifications"], counts["payments"], counts["events"], counts["sweeps"]) == (50, 50, 50, 0)
    assert await world.value("SELECT count(*) FROM orders WHERE amount_paid <> amount OR event_count <> 1") == 0


@pytest.mark.case("S108", "S112")
async def test_workers_share_the_inbox_without_meeting(world: World) -> None:
    """Three workers, sixty orders, each notified three times: every delivery is worked on by one of them."""
    for number in range(60):
        await world.order(f"ORD-{number}")
    bodies = [world.pay(f"ORD-{number}") for number in range(60)]
    for fields in bodies * 3:
        await world.notify(fields)
    crowd = [replace(world.worker, slots=Slots(8)) for _ in range(3)]

    async def drain(worker: inbox.Worker) -> None:
        while await inbox.run_once(worker) or await world.value("SELECT count(*) FROM inbox WHERE due_at <= ipn_now()"):
            await worker.slots.drained()

    await released(*(drain(worker) for worker in crowd))

    assert await world.rows("SELECT outcome, count(*) FROM notification_deliveries GROUP BY outcome ORDER BY outcome") == [
        {"outcome": "applied", "count": 60},
        {"outcome": "duplicate", "count": 120},
    ]
    assert await world.value("SELECT count(*) FROM orders WHERE amount_paid <> amount OR event_count <> 1") == 0


@pytest.mark.case("S107", "B79")
@pytest.mark.parametrize("account_exists", [True, False])
async def test_sums_of_the_merchant_add_up(world: World, account_exists: bool) -> None:
    """Sixteen orders of one account paid in the same instant, each adding 100: every amount counts once, also when the account is new."""
    async with world.rt.db.transaction("test.accounts") as tx:
        await tx.execute("CREATE TABLE accounts (id int PRIMARY KEY, credit int NOT NULL)")
        if account_exists:
            await tx.execute("INSERT INTO accounts VALUES (1, 50)")

    async def credit(connection: psycopg.AsyncConnection[Any], _: EffectNotification) -> None:
        await connection.execute("INSERT INTO accounts VALUES (1, 100) ON CONFLICT (id) DO UPDATE SET credit = accounts.credit + 100")

    world.worker = replace(world.worker, effect=credit)
    for number in range(TOGETHER):
        await world.order(f"ORD-{number}")
        await world.notify(world.pay(f"ORD-{number}"))
    hold_verdicts(world, TOGETHER)
    await world.drain()

    assert await world.value("SELECT credit FROM accounts") == 100 * TOGETHER + 50 * account_exists


async def test_sweepers_share_the_orders_without_meeting(world: World) -> None:
    """Three sweepers: each due order is asked for once."""
    for number in range(40):
        await world.order(f"ORD-{number}")
        world.pay(f"ORD-{number}")
    world.rt.clock.advance(seconds=300)
    crowd = [replace(world.sweeper, slots=Slots(8)) for _ in range(3)]

    async def drain(sweeper: reconciliation.Sweeper) -> None:
        while await reconciliation.run_once(sweeper):
            await sweeper.slots.drained()

    await released(*(drain(sweeper) for sweeper in crowd))
    await world.sweep()

    assert set(world.simulator.api.queries.values()) == {1}
    assert await world.rows("SELECT status, count(*) FROM orders GROUP BY status") == [{"status": "paid", "count": 40}]
