"""What the database does in the worst moment: each transaction is done once and whole, or not at all, and says which."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors as pg

from ipn_gateway import claims, endpoints, inbox, logs
from ipn_gateway.errors import CommitUnknown, OrderExists, Overloaded
from tests import world as worlds
from tests.proxy import Proxy, proxying
from tests.world import TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ipn_gateway.clock import Clock
    from ipn_gateway.effects import EffectNotification
    from ipn_gateway.faults import Faults
    from tests.proxy import Moment
    from tests.world import World


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[World]:
    """A whole gateway beside a simulated provider, with one source, one order and one subscriber."""
    async with worlds.opened(database_url, clock, faults) as opened:
        await furnish(opened)
        yield opened


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    """What stands between the gateway and its database."""
    async with proxying(database_url) as opened:
        yield opened


@pytest.fixture
async def cuttable(proxy: Proxy, clock: Clock, faults: Faults) -> AsyncIterator[World]:
    """The same world, whose every connection to the database goes through the proxy."""
    async with worlds.opened(proxy.url, clock, faults) as opened:
        await furnish(opened)
        yield opened


async def furnish(world: World) -> None:
    await world.order("ORD-1")
    everything = endpoints.NewEndpoint("https://subscriber.example/hook", ("*",))
    await endpoints.create(world.rt.db, world.rt.vault, TENANT, everything, secret_bytes=bytes(64), actor="test")


WRITTEN = ("processed_notifications", "payments", "events", "event_deliveries")
MOMENTS: tuple[Moment, ...] = ("before", "while", "after")


async def written(world: World) -> dict[str, int]:
    """How many rows each table has that an effect writes; the subscriber makes it one event delivery an event."""
    counts = await world.counts()
    return {table: counts[table] for table in WRITTEN}


async def applied_once(world: World, *order_ids: str) -> bool:
    """Whether these orders and no others were paid, each once and whole."""
    paid = await world.rows("SELECT order_id FROM orders WHERE status = 'paid' AND amount_paid = amount AND event_count = 1 ORDER BY 1")
    touched = await world.value("SELECT count(*) FROM orders WHERE event_count > 0 OR amount_paid > 0")
    ones = dict.fromkeys(WRITTEN, len(order_ids))
    return [row["order_id"] for row in paid] == sorted(order_ids) and touched == len(order_ids) and await written(world) == ones


async def work(world: World) -> None:
    """What is due is claimed and worked on, one transaction after the other, so that what goes wrong is what is meant."""
    while rows := await claims.proved(world.rt.inbox_db, limit=1, lease_seconds=45, parking_hours=72):
        await inbox.work(world.worker, rows[0])


def once(world: World, point: str, action: Callable[[], Awaitable[None]]) -> None:
    """Do something the first time that a point is passed."""

    async def act() -> None:
        del world.rt.faults.on[point]
        await action()

    world.rt.faults.on[point] = act


def failing(error: BaseException, times: int = 1) -> Callable[[], Awaitable[None]]:
    left = [error] * times

    async def fail() -> None:
        if left:
            raise left.pop()

    return fail


# All or nothing

STATEMENTS = {"effects.apply_together": 4, "effects.apply": 6}  # lock, book, end, stage; two around IPN_EFFECT, with which all go alone
both = pytest.mark.parametrize("transaction", list(STATEMENTS))


def apply_by(world: World, transaction: str) -> None:
    """Plain ones are applied together; those of a worker with an effect alone."""

    async def nothing(*_: Any) -> None: ...

    if transaction == "effects.apply":
        world.worker = replace(world.worker, effect=nothing)


@both
@pytest.mark.case("S107")
async def test_a_crash_behind_any_statement_of_apply_leaves_nothing(world: World, transaction: str) -> None:
    """Ledger, order, payment, event and its delivery are there together or not at all; afterwards it is applied once."""
    apply_by(world, transaction)
    points = [*(f"statement_{number}" for number in range(1, STATEMENTS[transaction] + 1)), "before_commit"]
    receipt = await world.notify(world.pay("ORD-1"))
    for point in points:
        world.rt.faults.on[f"{transaction}:{point}"] = failing(asyncio.CancelledError())
        await world.drain()

        assert await applied_once(world), point
        assert await world.outcome(receipt) == ("received", None)
        assert await world.value("SELECT count(*) FROM sweeps") == 1
        world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)

    await world.drain()

    assert await applied_once(world, "ORD-1")
    assert await world.outcome(receipt) == ("applied", None)


@both
@pytest.mark.case("S107")
async def test_those_are_all_statements_of_apply(world: World, transaction: str) -> None:
    """A statement that is added has its crash tested above."""
    apply_by(world, transaction)
    seen: list[int] = []

    for number in range(1, 10):

        async def pass_by(number: int = number) -> None:
            seen.append(number)

        world.rt.faults.on[f"{transaction}:statement_{number}"] = pass_by
    await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert seen == list(range(1, STATEMENTS[transaction] + 1))


@pytest.mark.case("S107")
async def test_an_effect_that_raises_takes_everything_with_it(world: World) -> None:
    """What IPN_EFFECT does is part of the same commit."""

    async def effect(connection: psycopg.AsyncConnection[Any], _: EffectNotification) -> None:
        await connection.execute("CREATE TABLE of_the_merchant ()")
        raise ZeroDivisionError

    world.worker = replace(world.worker, effect=effect)
    await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert await applied_once(world)
    assert await world.value("SELECT to_regclass('of_the_merchant')") is None


@pytest.mark.case("S107", "S115")
async def test_a_crash_in_receive_stores_nothing(world: World) -> None:
    """Delivery and open work are one: without the commit there is neither, and no 2xx."""
    for point in ("statement_1", "before_commit"):
        world.rt.faults.on[f"notifications.receive:{point}"] = failing(RuntimeError("crash"))
        with pytest.raises(RuntimeError, match="crash"):
            await world.notify(world.pay("ORD-1"))

        assert await world.value("SELECT count(*) FROM notification_deliveries") == 0
        assert await world.value("SELECT count(*) FROM inbox") == 0


@pytest.mark.case("S107")
async def test_a_crash_in_creating_an_order_creates_nothing(world: World) -> None:
    """Order, sweep and the adoption of what is parked: together or not at all."""
    receipt = await world.notify(world.pay("ORD-2"))
    await world.drain()
    for point in ("statement_1", "statement_2", "statement_3", "before_commit"):
        world.rt.faults.on[f"orders.create:{point}"] = failing(RuntimeError("crash"))
        with pytest.raises(RuntimeError, match="crash"):
            await world.order("ORD-2")

        assert await world.value("SELECT count(*) FROM orders") == 1
        assert await world.value("SELECT count(*) FROM sweeps") == 1
        assert await world.rows("SELECT state FROM inbox") == [{"state": "parked"}]

    await world.order("ORD-2")
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)


# Run again: deadlocks, lost connections and demoted servers

RERUN = [
    pg.SerializationFailure("40001"),
    pg.DeadlockDetected("40P01"),
    pg.AdminShutdown("57P01"),
    pg.CrashShutdown("57P02"),
    pg.CannotConnectNow("57P03"),
    pg.ConnectionFailure("08006"),
    psycopg.OperationalError("no SQLSTATE"),
    pg.ReadOnlySqlTransaction("25006"),
]


@both
@pytest.mark.case("S101", "S103", "S104")
@pytest.mark.parametrize("point", ["statement_1", "statement_2", "before_commit"])
async def test_what_is_no_fault_of_the_transaction_is_run_again_whole(world: World, transaction: str, point: str) -> None:
    """Deadlock, serialization failure, lost connection, read-only server: a new run, without another question to the provider."""
    apply_by(world, transaction)
    for number, error in enumerate(RERUN):
        order_id = f"ORD-{number + 2}"
        await world.order(order_id)
        world.rt.faults.on[f"{transaction}:{point}"] = failing(error)
        asked = world.questions

        receipt = await world.notify(world.pay(order_id))
        await world.drain()

        assert await world.outcome(receipt) == ("applied", None), error
        assert world.questions == asked + 1

    assert await written(world) == dict.fromkeys(WRITTEN, len(RERUN))


@pytest.mark.case("S104")
async def test_a_connection_to_a_demoted_server_is_not_used_again(world: World) -> None:
    """25006 says that this server only reads now: the connection goes, and the next one may lead to the primary."""
    backends: list[int] = []

    async def effect(connection: psycopg.AsyncConnection[Any], _: EffectNotification) -> None:
        backends.append(connection.info.backend_pid)
        if len(backends) == 1:
            await connection.execute("SET TRANSACTION READ ONLY")
            await connection.execute("CREATE TABLE of_the_merchant ()")

    world.worker = replace(world.worker, effect=effect)
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert len(set(backends)) == 2
    assert await world.value("SELECT count(*) FROM pg_stat_activity WHERE pid = %(pid)s", pid=backends[0]) == 0


@pytest.mark.case("S101")
async def test_what_never_gets_through_is_left_to_its_lease(world: World) -> None:
    """Five runs, then the row waits; the schedule counts no question against it, and later it is applied."""
    runs = 0

    async def fail() -> None:
        nonlocal runs
        runs += 1
        raise pg.DeadlockDetected

    world.rt.faults.on["effects.apply_together:before_commit"] = fail
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert runs == 5
    assert await world.outcome(receipt) == ("received", None)
    assert await world.rows("SELECT asked, lease_expires_at > ipn_now() AS leased FROM inbox") == [{"asked": 0, "leased": True}]

    world.rt.faults.on.clear()
    world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)
    await world.drain()

    assert await applied_once(world, "ORD-1")


@pytest.mark.case("S103")
async def test_a_terminated_backend_costs_a_run_and_nothing_else(world: World) -> None:
    """The connection goes in mid-transaction: the same on a new one, once."""

    async def terminate() -> None:
        async with await psycopg.AsyncConnection.connect(world.rt.url, autocommit=True) as other:
            await other.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND state = 'idle in transaction'"
            )

    points = [f"effects.apply_together:statement_{number}" for number in (1, 2, 4)]
    points += ["notifications.receive:statement_1", "orders.create:statement_2"]
    for number, point in enumerate(points):
        once(world, point, terminate)
        await world.order(f"ORD-T{number}")
        receipt = await world.notify(world.pay(f"ORD-T{number}"))
        await work(world)

        assert point not in world.rt.faults.on
        assert await world.outcome(receipt) == ("applied", None), point

    assert await applied_once(world, *(f"ORD-T{number}" for number in range(len(points))))


@pytest.mark.case("S100")
async def test_a_unique_violation_of_another_table_is_no_duplicate(world: World) -> None:
    """Only the ledger's key and the payments' key say that something is booked; any other one is a failure, and no loop."""
    async with world.rt.db.transaction("test.schema") as tx:
        await tx.execute("CREATE SCHEMA merchant")
        await tx.execute("CREATE TABLE merchant.payments (id int CONSTRAINT payments_provider_transaction_key UNIQUE)")
    runs = 0

    async def effect(connection: psycopg.AsyncConnection[Any], _: EffectNotification) -> None:
        nonlocal runs
        runs += 1
        await connection.execute("INSERT INTO merchant.payments VALUES (1), (1)")

    world.worker = replace(world.worker, effect=effect)
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert runs == 1
    assert await applied_once(world)
    assert await world.outcome(receipt) == ("received", None)
    assert await world.rows("SELECT asked, lease_expires_at FROM inbox") == [{"asked": 1, "lease_expires_at": None}]


@pytest.mark.case("S100")
async def test_another_key_of_ours_says_nothing_about_the_operation(world: World) -> None:
    """A number that an event has already is a fault of ours: one run, nothing written, counted against the schedule."""
    async with world.rt.db.transaction("test.fault") as tx:
        await tx.execute(
            "INSERT INTO events (tenant_id, id, type, order_id, sequence, body) VALUES (%(tenant)s, 'evt_x', 'order.paid', 'ORD-1', 1, '')",
            {"tenant": TENANT},
        )
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1

    world.rt.faults.on["effects.apply_together:statement_1"] = run
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert runs == 1
    assert await world.status("ORD-1") == "pending"
    assert await world.outcome(receipt) == ("received", None)
    assert await world.rows("SELECT asked, lease_expires_at FROM inbox") == [{"asked": 1, "lease_expires_at": None}]


@pytest.mark.case("S100")
async def test_a_trigger_of_the_merchants_is_told_from_our_keys(world: World) -> None:
    """A constraint of the same table and name in another schema, violated inside our own statement, is no duplicate either."""
    async with world.rt.db.transaction("test.schema") as tx:
        await tx.execute("CREATE SCHEMA merchant")
        await tx.execute("CREATE TABLE merchant.payments (id int CONSTRAINT payments_provider_transaction_key UNIQUE)")
        await tx.execute(
            "CREATE FUNCTION merchant.copy() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN INSERT INTO merchant.payments VALUES (1), (1); RETURN NEW; END $$"
        )
        await tx.execute("CREATE TRIGGER copy AFTER INSERT ON payments FOR EACH ROW EXECUTE FUNCTION merchant.copy()")
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert await applied_once(world)
    assert await world.outcome(receipt) == ("received", None)
    assert await world.rows("SELECT asked, lease_expires_at FROM inbox") == [{"asked": 1, "lease_expires_at": None}]


# Whether a COMMIT happened


@both
@pytest.mark.case("S102")
async def test_apply_finds_out_what_became_of_its_commit(cuttable: World, proxy: Proxy, transaction: str) -> None:
    """The connection is lost around COMMIT: exactly one effect, and the delivery ends `applied`, not `duplicate`."""
    world = cuttable
    apply_by(world, transaction)
    lost = logs.counters["inbox.lease_lost"]
    for moment in MOMENTS:
        await world.order(f"ORD-{moment}")
        receipt = await world.notify(world.pay(f"ORD-{moment}"))
        once(world, f"{transaction}:before_commit", cut(proxy, moment))
        await work(world)

        assert await world.outcome(receipt) == ("applied", None), moment

    assert proxy.cuts == len(MOMENTS)
    assert await applied_once(world, *(f"ORD-{moment}" for moment in MOMENTS))
    assert world.questions == len(MOMENTS)
    assert await world.value("SELECT count(*) FROM inbox") == 0
    assert logs.counters["inbox.lease_lost"] == lost  # it found its own end, and knows that it did


ENDS: dict[str, tuple[tuple[str, str | None], int, int]] = {  # how it ends, with how many new ledger rows and events
    "negative": (("applied", None), 1, 1),
    "second payment": (("conflict", "second_payment"), 1, 2),
    "held": (("held", "amount"), 0, 1),
    "parked": (("parked", None), 0, 0),
    "rejected": (("rejected", "order_mismatch"), 0, 0),
    "duplicate": (("duplicate", None), 0, 0),
}


@pytest.mark.case("S102")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_every_end_survives_a_lost_commit(cuttable: World, proxy: Proxy, moment: Moment) -> None:
    """Whatever a delivery ends as, it ends as that once, with its events."""
    world = cuttable
    paid = world.pay("ORD-1")
    await world.notify(paid)
    await work(world)
    for kind, (end, ledger_rows, events) in ENDS.items():
        order_id = f"ORD-{kind.replace(' ', '-')}"
        if kind != "parked":
            await world.order(order_id)
        fields = _fields_of(world, kind, order_id, paid)
        before, lost = await written(world), logs.counters["inbox.lease_lost"]
        receipt = await world.notify(fields)
        apply = "effects.apply_together" if kind == "negative" else "effects.apply"
        for transaction in (apply, "inbox.end"):
            once(world, f"{transaction}:before_commit", cut(proxy, moment))
        await work(world)
        world.rt.faults.on.clear()

        after = await written(world)
        grown = {table: after[table] - before[table] for table in WRITTEN}
        assert await world.outcome(receipt) == end, kind
        assert (grown["processed_notifications"], grown["events"], grown["event_deliveries"]) == (ledger_rows, events, events), kind
        assert await world.value("SELECT count(*) FROM inbox WHERE state = 'received'") == 0
        assert logs.counters["inbox.lease_lost"] - lost <= (kind in {"held", "parked"}), kind

    assert proxy.cuts == len(ENDS)


def _fields_of(world: World, kind: str, order_id: str, paid: dict[str, str]) -> dict[str, str]:
    match kind:
        case "negative":
            return world.pay(order_id, status="FAILED")
        case "second payment":
            return world.pay("ORD-1")
        case "held":
            return world.pay(order_id, "1.00")
        case "rejected":
            return world.signed(paid, tran_id=order_id)
        case "duplicate":
            return paid
        case _:
            return world.pay(order_id)


@pytest.mark.case("S102", "S115")
async def test_receive_finds_out_what_became_of_its_commit(cuttable: World, proxy: Proxy) -> None:
    """The sender gets its 2xx, and the delivery is stored once."""
    world = cuttable
    receipts = []
    for moment in MOMENTS:
        once(world, "notifications.receive:before_commit", cut(proxy, moment))
        receipts.append(await world.notify(world.pay("ORD-1", status="PENDING")))

    assert proxy.cuts == len(MOMENTS)
    assert {receipt.error for receipt in receipts} == {None}
    stored = [{"id": receipt.delivery_id} for receipt in receipts]
    assert await world.rows("SELECT id FROM notification_deliveries ORDER BY id") == stored
    assert await world.rows("SELECT notification_delivery_id AS id FROM inbox ORDER BY 1") == stored


@pytest.mark.case("S102")
async def test_creating_an_order_finds_its_own(cuttable: World, proxy: Proxy) -> None:
    """201 and not 409: the order that is there is the one of this call; what waited for it is adopted. Anybody else's is a 409."""
    world = cuttable
    for moment in MOMENTS:
        receipt = await world.notify(world.pay(f"ORD-{moment}"))
        await work(world)
        once(world, "orders.create:before_commit", cut(proxy, moment))

        await world.order(f"ORD-{moment}")
        await work(world)

        assert await world.outcome(receipt) == ("applied", None), moment
        with pytest.raises(OrderExists):
            await world.order(f"ORD-{moment}")

    assert proxy.cuts == len(MOMENTS)
    assert await applied_once(world, *(f"ORD-{moment}" for moment in MOMENTS))


@pytest.mark.case("S102")
@pytest.mark.parametrize("transaction", ["effects.apply", "sweeps.record", "sweeps.claim"])
async def test_the_sweep_finds_out_what_became_of_its_commit(cuttable: World, proxy: Proxy, transaction: str) -> None:
    """A payment that it found is booked once, and an order that expired expired once."""
    world = cuttable
    for moment in MOMENTS:
        await world.order(f"ORD-paid-{moment}")
        world.pay(f"ORD-paid-{moment}")
        await world.order(f"ORD-late-{moment}", expires_at=await world.value("SELECT ipn_now() + interval '5 minutes'"))
        world.rt.clock.advance(seconds=300)
        once(world, f"{transaction}:before_commit", cut(proxy, moment))
        for _ in range(2):
            with contextlib.suppress(CommitUnknown):  # of a claim: the loop goes on, and the lease brings it back
                await world.sweep()
            world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)

    assert proxy.cuts == len(MOMENTS)
    assert await world.rows("SELECT status, event_count, count(*) FROM orders WHERE order_id <> 'ORD-1' GROUP BY 1, 2 ORDER BY 1") == [
        {"status": "expired", "event_count": 1, "count": 3},
        {"status": "paid", "event_count": 1, "count": 3},
    ]
    assert await written(world) == {"processed_notifications": 3, "payments": 3, "events": 6, "event_deliveries": 6}


@pytest.mark.case("S102")
async def test_a_commit_that_is_lost_each_time_ends_as_overloaded(cuttable: World, proxy: Proxy) -> None:
    """Bounded: the sender is told 503 and nothing is stored."""
    world = cuttable
    world.rt.faults.on["notifications.receive:before_commit"] = cut(proxy, "before")
    with pytest.raises(Overloaded):
        await world.notify(world.pay("ORD-1"))

    assert proxy.cuts == 5
    assert await world.value("SELECT count(*) FROM notification_deliveries") == 0


@pytest.mark.case("S102")
async def test_a_worker_whose_bookkeeping_is_cut_loses_nothing(cuttable: World, proxy: Proxy) -> None:
    """Claiming and postponing are put right by the lease at the latest."""
    world = cuttable
    transactions = ["inbox.claim", "inbox.postpone", "source_states.unknown_answer", "source_states.clear_answer"]
    orders = [f"ORD-{number}-{moment}" for number in range(len(transactions)) for moment in MOMENTS]
    for order_id, transaction in zip(orders, [name for name in transactions for _ in MOMENTS], strict=True):
        if transaction != "inbox.claim":
            world.fault("validator", "status500")
        await world.order(order_id)
        receipt = await world.notify(world.pay(order_id))
        once(world, f"{transaction}:before_commit", cut(proxy, order_id.rpartition("-")[2]))  # type: ignore[arg-type]
        for _ in range(3):
            with contextlib.suppress(CommitUnknown):
                await work(world)
            world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)

        assert await world.outcome(receipt) == ("applied", None), order_id

    assert proxy.cuts == len(orders)
    assert await applied_once(world, *orders)


def cut(proxy: Proxy, moment: Moment) -> Callable[[], Awaitable[None]]:
    """Arm the proxy, right before the COMMIT that it shall cut."""

    async def arm() -> None:
        proxy.cut_next(moment)

    return arm
