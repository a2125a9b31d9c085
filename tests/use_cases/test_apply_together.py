"""Apply in sets: fifty at once are fifty effects, each once; what is not plain leaves the set and harms nobody in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import bookings, claims, endpoints, inbox, logs
from ipn_gateway.bookings import Origin
from ipn_gateway.errors import LeaseLost
from ipn_gateway.faults import Faults
from ipn_gateway.inbox_batches import InboxBatches
from ipn_gateway.providers.base import Confirmed
from ipn_gateway.slots import Slots
from tests import world as worlds
from tests.proxy import Proxy, proxying
from tests.world import SOURCE, STORE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from ipn_gateway.clock import Clock
    from tests.proxy import Moment
    from tests.world import World

    Item = tuple[Origin, Confirmed]

FIFTY = [f"ORD-{number:02}" for number in range(50)]
FEW = FIFTY[:6]
ODD = FIFTY[25]
ROWS = ("processed_notifications", "payments", "events", "event_deliveries")


@dataclass(slots=True)
class Counting(Faults):
    """Counts the statements of each transaction."""

    statements: Counter[str] = field(default_factory=Counter)

    async def at(self, point: str) -> None:
        """As its parent does."""
        name, _, where = point.partition(":")
        self.statements[name] += where.startswith("statement_")
        await Faults.at(self, point)


@pytest.fixture
def faults() -> Counting:
    return Counting()


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Counting) -> AsyncIterator[World]:
    """A whole gateway with one source, one subscriber and room for fifty at once."""
    async with worlds.opened(database_url, clock, faults) as opened:
        await furnish(opened)
        yield opened


async def furnish(world: World) -> None:
    world.worker = replace(world.worker, slots=Slots(64))
    everything = endpoints.NewEndpoint("https://subscriber.example/hook", ("*",))
    await endpoints.create(world.rt.db, world.rt.vault, TENANT, everything, secret_bytes=bytes(64), actor="test")


async def registered(world: World, order_ids: Sequence[str], **given: Any) -> None:
    """So many orders, in one statement."""
    async with world.rt.db.transaction("test.orders") as tx:
        await tx.execute(
            """INSERT INTO orders (tenant_id, order_id, source_id, amount, currency, expires_at)
               SELECT %(tenant)s, id, %(source)s, 1000, 'BDT', %(expires_at)s::timestamptz FROM unnest(%(ids)s::text[]) AS id""",
            {"tenant": TENANT, "source": SOURCE, "ids": list(order_ids), "expires_at": given.get("expires_at")},
        )


async def claimed(world: World, order_ids: Sequence[str]) -> dict[str, Item]:
    """Each order is paid and notified, and its delivery claimed and confirmed."""
    bodies = [world.pay(order_id) for order_id in order_ids]
    await asyncio.gather(*(world.notify(body) for body in bodies))
    account = await world.rt.sources.get(SOURCE)
    assert account is not None
    items = {}
    for row in await claims.proved(world.rt.inbox_db, limit=64, lease_seconds=45, parking_hours=72):
        said = account.provider.assertions(row.request())[0]  # type: ignore[index]
        origin = Origin(TENANT, SOURCE, "sslcommerz", row.notification_delivery_id, row.claimed(questions=1), said.effect)
        transaction = f"BT-{said.order_id}"
        items[said.order_id] = (
            origin,
            Confirmed(said.order_id, str(said.operation_id), said.effect, "VALID", STORE, Decimal(1000), "BDT", transaction),
        )
    return items


async def bring(together: InboxBatches, item: Item) -> Any:
    """What the worker does with what is confirmed; the outcome, or what it raises."""
    try:
        return await together.applied.put(item) or await together.alone.put(item)
    except Exception as error:  # noqa: BLE001 - what it got
        return error


async def brought(world: World, items: dict[str, Item]) -> dict[str, Any]:
    """All at once: one set. What became of each order's delivery."""
    got = await asyncio.gather(*(bring(world.worker.together, item) for item in items.values()))
    return dict(zip(items, got, strict=True))


async def applied_once(world: World, order_ids: Sequence[str]) -> bool:
    """Whether these orders and no others are paid, each once and whole, and by its own delivery."""
    paid = await world.rows("SELECT order_id FROM orders WHERE status = 'paid' AND amount_paid = amount AND event_count = 1 ORDER BY 1")
    touched = await world.value("SELECT count(*) FROM orders WHERE event_count > 0 OR amount_paid > 0")
    whole = await world.value(
        """SELECT count(*) FROM processed_notifications p
             JOIN notification_deliveries d ON d.id = p.writer_id AND d.order_id = p.order_id AND d.outcome = 'applied'
             JOIN payments ON payments.order_id = p.order_id AND payments.operation_id = p.operation_id
             JOIN events e ON e.order_id = p.order_id
             JOIN event_deliveries ed ON ed.event_id = e.id"""
    )
    counts = await world.counts()
    assert {table: counts[table] for table in ROWS} == dict.fromkeys(ROWS, len(order_ids))
    return [row["order_id"] for row in paid] == sorted(order_ids) and touched == whole == len(order_ids)


async def test_fifty_are_applied_in_four_statements(world: World, faults: Counting) -> None:
    """Lock, book, end, stage: one transaction, and each delivery knows that it was the writer."""
    await registered(world, FIFTY)
    items = await claimed(world, FIFTY)
    faults.statements.clear()

    got = await brought(world, items)

    assert got == dict.fromkeys(got, "applied")
    assert faults.statements["effects.apply_together"] == 4
    assert faults.statements["effects.apply"] == 0
    assert await applied_once(world, FIFTY)
    assert await world.value("SELECT count(*) FROM inbox") == 0


async def test_three_statements_are_enough_for_a_notification(world: World, faults: Counting) -> None:
    """Receive, claim, look up, apply: of fifty that arrive at once, all statements of all transactions, divided."""
    await registered(world, FIFTY)
    bodies = [world.pay(order_id) for order_id in FIFTY]
    await world.notify(world.pay("ORD-other"))  # what is cached is read
    await world.drain()
    faults.statements.clear()
    await asyncio.gather(*(world.notify(body) for body in bodies))
    await world.drain()

    assert Counter(await world.outcomes())["applied"] == 50
    assert faults.statements.total() <= 3 * 50


# One among fifty


async def _refused_by_the_database(world: World, items: dict[str, Item]) -> None:
    """A character that jsonb does not hold."""
    origin, verdict = items[ODD]
    items[ODD] = origin, replace(verdict, answer={"note": "\0"})


async def _raises(world: World, items: dict[str, Item]) -> None:
    """A moment without a zone, which cannot be compared with the order's."""
    origin, verdict = items[ODD]
    items[ODD] = origin, replace(verdict, paid_at=datetime(2026, 1, 1))  # noqa: DTZ001 - that is the fault


async def _lease_lost(world: World, items: dict[str, Item]) -> None:
    async with world.rt.db.transaction("test.taken") as tx:
        await tx.execute("UPDATE inbox SET fence = fence + 1 WHERE order_id = %(id)s", {"id": ODD})


async def _applied_before(world: World, items: dict[str, Item]) -> None:
    """By another delivery of the same operation."""
    origin, verdict = items[ODD]
    earlier = (await claimed(world, [ODD]))[ODD]
    assert await bring(world.worker.together, (earlier[0], verdict)) == "applied"
    assert origin.writer_id != earlier[0].writer_id


async def _payment_used_elsewhere(world: World, items: dict[str, Item]) -> None:
    """The provider calls another order's payment the same."""
    await registered(world, ["ORD-x"])
    other = (await claimed(world, ["ORD-x"]))["ORD-x"]
    assert await bring(world.worker.together, other) == "applied"
    origin, verdict = items[ODD]
    items[ODD] = origin, replace(verdict, provider_transaction_id=other[1].provider_transaction_id)


async def _order_missing(world: World, items: dict[str, Item]) -> None:
    origin, verdict = items[ODD]
    items[ODD] = origin, replace(verdict, order_id="ORD-missing")


async def _other_amount(world: World, items: dict[str, Item]) -> None:
    origin, verdict = items[ODD]
    items[ODD] = origin, replace(verdict, amount=Decimal(1))


POISON: dict[str, tuple[Callable[[World, dict[str, Item]], Awaitable[None]], Any]] = {
    "refused by the database": (_refused_by_the_database, "UntranslatableCharacter"),
    "raises": (_raises, "TypeError"),
    "lease lost": (_lease_lost, "LeaseLost"),
    "applied before": (_applied_before, "duplicate"),
    "payment used elsewhere": (_payment_used_elsewhere, "held"),
    "order missing": (_order_missing, "parked"),
    "other amount": (_other_amount, "held"),
}


@pytest.mark.parametrize("kind", POISON)
async def test_one_among_fifty_harms_no_other(world: World, kind: str) -> None:
    """Forty-nine are applied, each once; the odd one ends as it would by itself, or fails alone."""
    poison, expected = POISON[kind]
    moment = await world.value("SELECT ipn_now() + interval '1 day'")
    await registered(world, FIFTY, expires_at=moment)
    items = await claimed(world, FIFTY)
    await poison(world, items)

    got = await brought(world, items)

    odd = got.pop(ODD)
    assert (type(odd).__name__ if isinstance(odd, Exception) else odd) == expected
    assert got == dict.fromkeys(got, "applied")
    paid = await world.rows("SELECT order_id FROM orders WHERE status = 'paid' AND amount_paid = amount AND event_count = 1")
    assert {row["order_id"] for row in paid} >= set(got)
    assert (ODD in {row["order_id"] for row in paid}) == (kind == "applied before")
    assert await world.value("SELECT count(*) FROM payments WHERE order_id = ANY(%(ids)s)", ids=list(got)) == 49


async def test_an_order_that_somebody_holds_keeps_no_other_waiting(world: World) -> None:
    """The set passes over it; it is applied when it is free."""
    await registered(world, FEW)
    items = await claimed(world, FEW)
    async with await psycopg.AsyncConnection.connect(world.rt.url) as other:
        await other.execute("SELECT FROM orders WHERE order_id = %s FOR UPDATE", (FEW[2],))
        tasks = {order_id: asyncio.ensure_future(bring(world.worker.together, item)) for order_id, item in items.items()}
        await asyncio.wait([task for order_id, task in tasks.items() if order_id != FEW[2]])
        held_back = [order_id for order_id, task in tasks.items() if not task.done()]
        await other.rollback()

    assert held_back == [FEW[2]]
    assert [str(await task) for task in tasks.values()] == ["applied"] * len(FEW)
    assert await applied_once(world, FEW)


async def test_one_order_that_is_held_takes_no_transaction_from_what_is_applied_alone(world: World, database_url: str) -> None:
    """Sixteen payments of an order that somebody holds give way; what has no order yet is parked meanwhile, and then all are applied."""
    await registered(world, FEW[:1])
    bodies = [world.pay(FEW[0]) for _ in range(16)]
    async with await psycopg.AsyncConnection.connect(database_url) as other:
        await other.execute("SELECT FROM orders WHERE order_id = %s FOR UPDATE", (FEW[0],))
        await asyncio.gather(*(world.notify(body) for body in [*bodies, *(world.pay(order_id) for order_id in FEW[1:])]))
        before = logs.counters["inbox.order_locked"]

        await inbox.run_once(world.worker)
        await world.worker.slots.drained()

        held = await world.outcomes()
        await other.rollback()
    world.rt.clock.advance(seconds=inbox.LOCKED_WAIT_SECONDS)
    await world.drain()

    assert Counter(held) == {"received": 16, "parked": 5}
    assert logs.counters["inbox.order_locked"] - before == 16
    assert Counter(await world.outcomes()) == {"applied": 1, "conflict": 15, "parked": 5}
    assert await world.value("SELECT count(*) FROM inbox WHERE lease_expires_at IS NOT NULL") == 0


# Twice in one set


async def test_two_notifications_of_one_order_in_one_claim(world: World) -> None:
    """Two payments: one pays, the other is booked beside it. They are never in one set."""
    await registered(world, FEW)
    for order_id in [*FEW, FEW[0]]:
        await world.notify(world.pay(order_id))
    await world.drain()

    assert sorted(await world.outcomes()) == ["applied"] * len(FEW) + ["conflict"]
    assert await world.rows("SELECT status, count(*) FROM payments GROUP BY 1 ORDER BY 1") == [
        {"status": "applied", "count": len(FEW)},
        {"status": "unapplied", "count": 1},
    ]
    assert await world.value("SELECT amount_paid FROM orders WHERE order_id = %(id)s", id=FEW[0]) == 1000


async def test_one_operation_under_two_orders_in_one_set(world: World) -> None:
    """The provider contradicts itself: the ledger's key lets one of them through, and a person decides about the other."""
    await registered(world, FEW)
    items = await claimed(world, FEW)
    origin, verdict = items[FEW[1]]
    items[FEW[1]] = origin, replace(verdict, operation_id=items[FEW[0]][1].operation_id)

    got = await brought(world, items)

    assert got[FEW[0]] == "applied"
    assert got[FEW[1]] == "conflict"
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'paid'") == len(FEW) - 1


# When it breaks off


POINTS = [*(f"statement_{number}" for number in range(1, 5)), "before_commit", "after_commit"]


@pytest.mark.case("S107")
@pytest.mark.parametrize("point", POINTS)
async def test_a_set_is_written_whole_or_not_at_all(world: World, faults: Counting, point: str) -> None:
    """A crash at any point of the transaction; afterwards each is applied once, and as applied."""

    async def crash() -> None:
        del faults.on[f"effects.apply_together:{point}"]
        raise asyncio.CancelledError

    await registered(world, FEW)
    for order_id in FEW:
        await world.notify(world.pay(order_id))
    faults.on[f"effects.apply_together:{point}"] = crash
    await world.drain()
    written = await world.value("SELECT count(*) FROM processed_notifications")
    assert await applied_once(world, FEW if point == "after_commit" else FIFTY[:written])
    assert written in ({len(FEW)} if point == "after_commit" else {0, *range(1, len(FEW))})

    world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)
    await world.drain()

    assert await applied_once(world, FEW)
    assert await world.outcomes() == ["applied"] * len(FEW)


@pytest.mark.case("S102")
@pytest.mark.parametrize("moment", ["before", "while", "after"])
async def test_a_set_finds_out_what_became_of_its_commit(database_url: str, clock: Clock, moment: Moment) -> None:
    """The connection is lost around COMMIT: each is applied once and ends `applied`, and no lease is thought lost."""
    faults, lost = Counting(), logs.counters["inbox.lease_lost"]
    async with proxying(database_url) as proxy, worlds.opened(proxy.url, clock, faults) as world:
        await furnish(world)
        await registered(world, FEW)
        items = await claimed(world, FEW)
        faults.on["effects.apply_together:before_commit"] = _cut(proxy, faults, moment)

        got = await brought(world, items)

        assert proxy.cuts == 1
        assert got == dict.fromkeys(FEW, "applied")
        assert await applied_once(world, FEW)
        assert await world.value("SELECT count(*) FROM inbox") == 0
    assert logs.counters["inbox.lease_lost"] == lost


def _cut(proxy: Proxy, faults: Faults, moment: Moment) -> Callable[[], Awaitable[None]]:
    async def arm() -> None:
        faults.on.clear()
        proxy.cut_next(moment)

    return arm


@pytest.mark.case("S108")
async def test_two_workers_with_the_same_leases_have_one_effect(world: World) -> None:
    """Both write at once: the inbox rows decide, and who comes second finds what is written."""
    await registered(world, FIFTY)
    items = await claimed(world, FIFTY)
    other = InboxBatches(world.rt.dispatcher_db, None)

    got = await asyncio.gather(*(bring(at, item) for item in items.values() for at in (world.worker.together, other)))

    assert {str(outcome) for outcome in got if not isinstance(outcome, LeaseLost)} == {"applied"}
    assert await applied_once(world, FIFTY)


# Repeats


@pytest.mark.case("S109", "S142")
async def test_a_storm_of_repeats_asks_nobody_and_touches_no_order(world: World, faults: Counting) -> None:
    """Fifty repeats are looked up and ended together, with no question, and not one order row is written or locked."""
    await registered(world, FEW)
    bodies = [world.pay(order_id) for order_id in FEW]
    for body in bodies:
        await world.notify(body)
    await world.drain()
    rows = "SELECT order_id, xmin::text, xmax::text, ctid::text FROM orders ORDER BY 1"
    before, asked = await world.rows(rows), world.questions
    await asyncio.gather(*(world.notify(bodies[number % len(bodies)]) for number in range(50)))
    faults.statements.clear()

    await inbox.run_once(world.worker)
    await world.worker.slots.drained()

    assert Counter(await world.outcomes()) == {"applied": len(FEW), "duplicate": 50}
    assert world.questions == asked
    assert await world.rows(rows) == before
    # One each; two when the source had to be read from the database for the first of them.
    assert faults.statements["inbox.known"] <= 2
    assert faults.statements["inbox.end"] <= 2


async def test_a_row_that_cannot_be_read_harms_none_of_its_claim(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted against the schedule by itself; the others are applied."""
    await registered(world, FEW)
    bodies = [world.pay(order_id) for order_id in FEW]
    receipts = [await world.notify(body) for body in bodies]
    account = await world.rt.sources.get(SOURCE)
    assert account is not None
    read = type(account.provider).assertions

    def stumble(self: Any, request: Any) -> Any:
        if FEW[2].encode() in request.body:
            raise ZeroDivisionError
        return read(self, request)

    monkeypatch.setattr(type(account.provider), "assertions", stumble)
    await inbox.run_once(world.worker)
    await world.worker.slots.drained()

    assert await world.outcome(receipts[2]) == ("received", None)
    assert await world.rows("SELECT order_id, asked, lease_expires_at FROM inbox") == [
        {"order_id": FEW[2], "asked": 1, "lease_expires_at": None}
    ]
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'paid'") == len(FEW) - 1


def test_the_set_and_the_single_one_are_one_statement() -> None:
    """There is no second way to book: `book` is a set of one."""
    assert bookings.book.__code__.co_names.count("book_all") == 1
