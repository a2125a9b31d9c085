"""Retention: what is past its time goes in small batches, what is still to be done stays, and what was applied is known for ever."""

from __future__ import annotations

import asyncio
import contextvars
import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlmodel import SQLModel

from ipn_gateway import (
    gauges,
    ids,
    paging,
    pruning,
    pull,
    recoveries,
    replays,
    retention,
    timeline,
    views,
    workers,
)
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.faults import Faults
from ipn_gateway.retention import KEPT, Windows
from ipn_gateway.settings import Settings
from ipn_gateway.web.contract import described
from tests.make import TENANT, Make, ago, ahead
from tests.pulling import all_in_view
from tests.world import shown

if TYPE_CHECKING:
    from tests.world import World

WINDOWS = Windows(delivery_days=400, event_days=400)
OLD, YOUNG = ago(days=401), ago(days=399)


async def prune(db: Database, windows: Windows = WINDOWS) -> pruning.Pruned:
    """One pass; what it deleted. Draws no pause."""
    pruner = pruning.Pruner(db, windows, chance=lambda: -0.5)
    while await pruner.run_once():
        pass
    return pruner.total


async def left(db: Database, table: str, column: str = "id") -> set[Any]:
    async with db.autocommit("test.left") as tx:
        return {row["found"] for row in await tx.all(dict, f"SELECT {column} AS found FROM {table}")}


async def event(make: Make, **given: Any) -> str:
    """An event past its window, of a tenant that exists."""
    return str((await make.event(**{"created_at": OLD} | given))["id"])


@pytest.fixture
async def rows(make: Make) -> Make:
    """`make`, with the tenant of its rows."""
    await make.tenant()
    return make


# Which events go


async def test_events_past_their_window_go_with_their_deliveries(db: Database, rows: Make) -> None:
    """Delivered and cancelled ones, and events that nobody subscribed to; the younger ones stay."""
    old, lonely = await event(rows), await event(rows)
    for status in ("delivered", "cancelled"):
        await rows.event_delivery(event_id=old, status=status)
    young = await event(rows, created_at=YOUNG)
    kept = await rows.event_delivery(event_id=young, status="delivered")

    pruned = await prune(db)

    assert lonely != old
    assert (pruned.events, pruned.event_deliveries, pruned.dead) == (2, 2, 0)
    assert await left(db, "events") == {young}
    assert await left(db, "event_deliveries") == {kept["id"]}


@pytest.mark.parametrize(
    "given",
    [
        {"status": "pending", "next_attempt_at": OLD},
        {"status": "pending", "next_attempt_at": ahead(days=30)},
        {"status": "delivered", "next_attempt_at": ago(seconds=1), "next_trigger": "redelivery"},
        {"status": "delivered", "lease_expires_at": ahead(seconds=30)},
    ],
    ids=["pending, due", "pending, waits", "asked for again", "being sent"],
)
async def test_what_is_still_to_be_sent_is_never_deleted(db: Database, rows: Make, given: dict[str, Any]) -> None:
    """However old: the event stays with all its deliveries, until that one has ended."""
    old = await event(rows)
    await rows.event_delivery(event_id=old, status="delivered")
    open_one = await rows.event_delivery(event_id=old, **given)

    assert (await prune(db)).events == 0
    assert open_one["id"] in await left(db, "event_deliveries")

    async with db.autocommit("test.end") as tx:
        await tx.execute("UPDATE event_deliveries SET status = 'delivered', next_attempt_at = NULL, lease_expires_at = NULL")
    assert (await prune(db)).event_deliveries == 2


async def test_a_dead_letter_is_kept_for_its_window_after_its_last_attempt(db: Database, rows: Make, clock: Clock) -> None:
    """Not after its creation: one that died today waits for a person as long as any. What goes then is counted apart."""
    old = await event(rows)
    dead = await rows.event_delivery(event_id=old, status="dead", attempt_count=10)
    await rows.delivery_attempt(event_delivery_id=dead["id"], number=10, outcome="timeout")

    assert (await prune(db)).events == 0
    clock.advance(days=399)
    assert (await prune(db)).events == 0
    clock.advance(days=2)
    assert (await prune(db)).dead == 1
    assert await left(db, "events") == await left(db, "event_deliveries") == set()


async def test_the_event_that_announced_what_still_waits_is_kept(db: Database, rows: Make) -> None:
    """Else a copy of the held notification would announce it once more; when it is decided the event goes."""
    delivery = await rows.notification_delivery(outcome="held", reason="amount")
    await rows.inbox(notification_delivery_id=delivery["id"], state="held")
    data = {"notification_delivery_id": ids.show(ids.NOTIFICATION_DELIVERY, delivery["id"])}
    held = await event(rows, type="notification.held", body=json.dumps({"data": data}).encode())
    other = await event(rows, type="notification.held", body=json.dumps({"data": data | {"notification_delivery_id": None}}).encode())

    assert (await prune(db)).events == 1
    assert other not in await left(db, "events") == {held}

    async with db.autocommit("test.decide") as tx:
        await tx.execute("DELETE FROM inbox")
    assert (await prune(db)).events == 1


# How


@pytest.mark.case("S99")
async def test_batches_are_bounded_and_each_waits_before_the_next(db: Database, rows: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No transaction touches more than a batch, whatever can go of it; the pause between two is drawn."""
    monkeypatch.setattr(pruning, "EVENTS_AT_ONCE", 3)
    for number in range(10):
        old = await event(rows, created_at=ago(days=500 - number))
        if number % 3 == 0:
            await rows.event_delivery(event_id=old, status="pending")
    draws: list[float] = []

    def chance() -> float:
        draws.append(-0.5)
        return -0.5

    pruner, counts = pruning.Pruner(db, WINDOWS, chance=chance), []
    while await pruner.run_once():
        counts.append(len(await left(db, "events")))

    assert counts == [8, 6, 4]
    assert len(draws) == 3
    assert (pruner.total.events, await pruner.run_once()) == (6, 1)  # a new pass begins at the oldest again


@pytest.mark.case("S99")
async def test_what_somebody_has_locked_is_left_to_the_next_pass(db: Database, rows: Make, database_url: str) -> None:
    """An event delivery that is worked on, or an event that a recovery looks at: the pruner waits for neither."""
    first, second, third = [await event(rows) for _ in range(3)]
    delivery = await rows.event_delivery(event_id=first, status="delivered")
    async with await psycopg.AsyncConnection.connect(database_url) as working:
        await working.execute("SELECT FROM event_deliveries WHERE id = %s FOR NO KEY UPDATE", (delivery["id"],))
        await working.execute("SELECT FROM events WHERE id = %s FOR KEY SHARE", (second,))
        async with asyncio.timeout(3):
            pruned = await prune(db)

        assert pruned.events == 1
        assert third not in await left(db, "events") == {first, second}

    assert (await prune(db)).events == 2


async def test_several_pruners_delete_each_thing_once(db: Database, rows: Make, database_url: str, clock: Clock, faults: Faults) -> None:
    """Any number of processes has the maintenance role: together they delete everything, and count it once."""
    for number in range(40):
        await rows.event_delivery(event_id=await event(rows, created_at=ago(days=500 - number)), status="delivered")
    async with Database(database_url, clock=clock, faults=faults) as other:
        pruned = await asyncio.gather(*(prune(each) for each in (db, other, db)))
    pruned.append(await prune(db))

    assert sum(each.events for each in pruned) == sum(each.event_deliveries for each in pruned) == 40


async def test_a_recovery_stages_nothing_for_an_event_that_goes(db: Database, rows: Make, faults: Faults) -> None:
    """Both at once: the event is there with its new event delivery, or neither is. An obligation without its event would never be met."""
    endpoint = await rows.endpoint(events=["*"])
    old = await event(rows)
    span = recoveries.Span(TENANT, endpoint["id"], since=db.clock.now() - timedelta(days=450))

    async def recover() -> None:
        faults.on.clear()
        recovering.append(asyncio.get_running_loop().create_task(recoveries.recover(db, span, actor="test", reason="test")))
        while not await _waits_for_a_lock(db):
            pass

    recovering: list[asyncio.Task[Any]] = []
    faults.on["retention.events:statement_3"] = lambda: asyncio.get_running_loop().create_task(recover(), context=contextvars.Context())
    pruned = await prune(db)
    recovered = await recovering[0]

    assert (pruned.events, recovered.missing) == (1, 0)
    assert old not in await left(db, "events")
    assert await left(db, "event_deliveries") == set()


async def _waits_for_a_lock(db: Database) -> bool:
    async with await psycopg.AsyncConnection.connect(db._url) as other:
        found = await other.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
        return await found.fetchone() != (0,)


async def test_expired_secrets_go_a_day_later(db: Database, rows: Make) -> None:
    """Of sources and of endpoints; the current ones, and those that still authenticate or sign, stay."""
    for made in (rows.source_secret, rows.endpoint_secret):
        for expires_at in (ago(days=2), ago(hours=23), ahead(days=7), None):
            await made(**{} if expires_at is None else {"expires_at": expires_at})

    assert (await prune(db)).secrets == 2
    assert len(await left(db, "source_secrets")) == len(await left(db, "endpoint_secrets")) == 3


class OffByTwoHours(Clock):
    """A host whose clock is not the database's."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=2)


async def test_while_clocks_disagree_nothing_is_pruned(db: Database, rows: Make, database_url: str) -> None:
    """Either may be wrong, and what is gone cannot be brought back."""
    await event(rows)
    async with Database(database_url, clock=OffByTwoHours(), faults=Faults()) as off:
        assert await prune(off) == pruning.Pruned()

    assert (await prune(db)).events == 1


# The pull


async def pulled(db: Database, after: str | None = None, **filters: Any) -> tuple[list[str], str]:
    async with db.autocommit("test.pull") as tx:
        page = await pull.pull(tx, TENANT, after, 2, **filters)
    return [item.id for item in page.items], page.next_cursor or ""


@pytest.mark.case("S124")
async def test_a_reader_who_missed_events_is_told(db: Database, rows: Make) -> None:
    """Its cursor is before what was deleted: 409, never a gap that it does not see. Without one it begins at the oldest that is kept."""
    await event(rows, order_id="O-1", body=_frozen())
    await all_in_view(db)
    _, behind_first = await pulled(db)
    await event(rows, order_id="O-2", body=_frozen())
    await all_in_view(db)
    _, behind_second = await pulled(db, behind_first)
    young = await event(rows, order_id="O-3", created_at=YOUNG, body=_frozen())
    await all_in_view(db)

    await prune(db)

    with pytest.raises(StateConflict, match="deleted after their retention"):
        await pulled(db, behind_first)
    assert (await pulled(db, behind_second))[0] == (await pulled(db))[0]  # their cursors may differ: other databases go on
    assert (await pulled(db))[0] == [young]


@pytest.mark.case("S124")
async def test_a_reader_who_missed_nothing_reads_on(db: Database, rows: Make) -> None:
    """One that follows a type of which nothing was deleted, or one order, or that waits behind everything, is not sent away."""
    _, at_the_beginning = await pulled(db)
    await event(rows, type="endpoint.test", body=_frozen())
    await all_in_view(db)
    (_, cursor), (_, at_the_end) = await pulled(db, event_type="order.paid"), await pulled(db)
    await prune(db)

    assert await pulled(db, cursor, event_type="order.paid") == ([], cursor)
    assert await pulled(db, cursor, order_id="O-1") == ([], cursor)
    assert await pulled(db, at_the_end) == ([], at_the_end)
    with pytest.raises(StateConflict):
        await pulled(db, at_the_beginning, event_type="endpoint.test")
    with pytest.raises(StateConflict):
        await pulled(db, at_the_beginning)
    assert await pulled(db, at_the_beginning, event_type="order.paid") == ([], at_the_beginning)


def _frozen() -> bytes:
    return json.dumps({"timestamp": "2026-07-01T12:00:00.000Z", "data": {}}).encode()


# What is late, and what would go


async def test_how_late_it_is_is_told_by_table(db: Database, rows: Make, clock: Clock) -> None:
    """Nothing is late on a new database; what can go and is still there is; what is kept because of open work is counted, not late."""

    async def told() -> dict[tuple[str, str | None], float]:
        found = await gauges.read(db, WINDOWS)
        return {(reading.gauge, reading.label): reading.value for reading in found if reading.gauge.startswith("retention_")}

    assert set((await told()).values()) == {0}
    await event(rows, created_at=ago(days=410))
    await rows.event_delivery(event_id=await event(rows, created_at=ago(days=420)), status="pending")
    assert (await told())["retention_overdue_seconds", "events"] == pytest.approx(10 * 86400, abs=60)

    await rows.inbox()
    clock.advance(days=450)
    late = await told()
    assert late["retention_overdue_seconds", "delivery_attempts"] > 18 * 86400
    assert late["retention_kept_partitions", "notification_deliveries"] == 1

    await prune(db)
    after = await told()
    assert after["retention_overdue_seconds", "events"] == after["retention_overdue_seconds", "delivery_attempts"] == 0
    assert after["retention_kept_partitions", "notification_deliveries"] == 1


async def test_what_would_go_is_what_goes(db: Database, rows: Make) -> None:
    """Looking changes nothing, and says what the next pass does."""
    await rows.event_delivery(event_id=await event(rows), status="delivered")
    await rows.event_delivery(event_id=await event(rows), status="pending")

    looked = await pruning.events_past(db, WINDOWS)
    assert (looked.events, looked.event_deliveries, looked.kept) == (1, 1, 1)
    assert looked.oldest_at is not None
    assert await pruning.events_past(db, WINDOWS) == looked

    pruned = await prune(db)
    assert (pruned.events, pruned.event_deliveries) == (looked.events, looked.event_deliveries)


@pytest.mark.case("S97", "S116")
def test_every_table_says_how_long_it_is_kept() -> None:
    """None is forgotten, each setting exists, and what decides about money is kept for ever."""
    for_ever = {table for table, kept in KEPT.items() if kept.setting is None and kept.until is None}

    assert set(KEPT) == set(SQLModel.metadata.tables)
    assert {kept.setting for kept in KEPT.values()} - {None} == {
        "delivery_retention_days",
        "event_retention_days",
        "idempotency_retention_hours",
    }
    assert all(kept.setting is None or kept.setting in Settings.model_fields for kept in KEPT.values())
    assert for_ever >= {"processed_notifications", "orders", "payments", "refunds", "audit_log"}


@pytest.mark.case("S93")
def test_the_contract_says_so_with_the_numbers_in_force() -> None:
    """Every table, from the list that the pruner's page is made of, with the windows of the running gateway."""
    published = described(Settings(event_retention_days=30), [])["retention"]

    assert set(published["tables"]) == set(SQLModel.metadata.tables)
    assert published["tables"]["events"]["kept"] == published["tables"]["event_deliveries"]["kept"] == "30 days"
    assert published["events_days"] == published["event_deliveries_days"] == 30
    assert published["tables"]["processed_notifications"]["kept"] == published["processed_notifications"] == "for ever"


@pytest.mark.case("S116")
async def test_what_decides_about_money_is_never_pruned(world: World, clock: Clock) -> None:
    """After many windows: ledger, order, payment and the audit of acts are there to the last row."""
    await world.order("ORD-1")
    await world.notify(world.pay("ORD-1"))
    await world.drain()
    tables = [table for table, kept in KEPT.items() if kept.setting is None and kept.until is None and table != "event_horizons"]
    before = {table: await world.rows(f"SELECT * FROM {table}") for table in tables}
    clock.advance(days=5000)
    await retention.ensure_partitions(world.rt.db)

    pruned = await prune(world.rt.maintenance_db)

    assert pruned.partitions > 0
    assert pruned.events == 1
    assert {table: await world.rows(f"SELECT * FROM {table}") for table in tables} == before


@pytest.mark.case("S116")
async def test_the_maintenance_role_does_it_by_itself(world: World, clock: Clock) -> None:
    """Nobody has to ask: the role's loop drops and deletes what is past its time, as soon as it is started."""
    await world.order("ORD-1")
    await world.notify(world.pay("ORD-1"))
    await world.drain()
    clock.advance(days=450)
    await retention.ensure_partitions(world.rt.db)

    async with workers.running(world.rt, ["maintenance"]), asyncio.timeout(15):
        while (await world.counts())["events"] or (await world.counts())["notification_deliveries"]:
            pass

    assert (await world.counts())["processed_notifications"] == 1


# Afterwards


async def paid_and_pruned(world: World, clock: Clock) -> tuple[dict[str, str], str]:
    """An order that was paid, more than a window ago; its notification, and the id of its delivery."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    receipt = await world.notify(fields)
    await world.drain()
    assert await world.outcome(receipt) == ("applied", None)
    clock.advance(days=450)
    await retention.ensure_partitions(world.rt.db)
    await prune(world.rt.maintenance_db)
    assert await world.counts() == dict.fromkeys(await world.counts(), 0) | {"processed_notifications": 1, "payments": 1}
    return fields, shown(receipt)


async def effects(world: World) -> tuple[list[dict[str, Any]], ...]:
    """Everything that an effect could change."""
    return tuple([await world.rows(f"SELECT * FROM {table}") for table in ("processed_notifications", "payments", "orders", "events")])


@pytest.mark.case("B125")
@pytest.mark.parametrize(
    ("says", "amount", "outcome"),
    [
        ("VALIDATED", "1000.00", ("duplicate", None)),
        ("INVALID_TRANSACTION", "1000.00", ("duplicate", None)),
        ("VALIDATED", "999.00", ("duplicate", None)),
        ("INVALID_TRANSACTION", "999.00", ("rejected", "refuted")),
    ],
)
async def test_a_copy_after_the_cleanup_has_no_second_effect(
    world: World, clock: Clock, says: str, amount: str, outcome: tuple[str, str | None]
) -> None:
    """The ledger knows what was applied, whatever the provider says about it now, and whether it has to be asked: no state changes."""
    fields, _ = await paid_and_pruned(world, clock)
    before = await effects(world)
    if says == "INVALID_TRANSACTION":
        world.fault("validator", "invalid_transaction", times=None)
    receipts = [await world.notify(world.signed(fields, amount=amount, currency_amount=amount)) for _ in range(2)]

    for minutes in (2, 6, 10, 10):
        await world.drain()
        clock.advance(minutes=minutes)

    assert [await world.outcome(receipt) for receipt in receipts] == [outcome] * 2
    assert await effects(world) == before


@pytest.mark.case("B127")
async def test_bodies_expire_and_the_guard_stays(world: World, clock: Clock) -> None:
    """Many bodies of 4 KB go with their partition, its space too; a copy of the oldest one is a duplicate."""
    size = "SELECT sum(pg_total_relation_size(inhrelid))::bigint FROM pg_inherits WHERE inhparent = 'notification_deliveries'::regclass"
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    empty = await world.value(size)
    async with world.rt.db.transaction("test.many") as tx:
        await tx.execute(
            """INSERT INTO notification_deliveries (tenant_id, id, source_id, provider, via, headers, raw_body, sha256, proof, outcome,
                                                    decided_at)
               SELECT tenant_id, gen_random_uuid_like, source_id, provider, via, headers, body, sha256(body), proof, 'duplicate', decided_at
                 FROM notification_deliveries CROSS JOIN LATERAL (
                   SELECT (left(id::text, 24) || lpad(to_hex(number), 12, '0'))::uuid AS gen_random_uuid_like,
                          (SELECT string_agg(sha256((number || '-' || part)::text::bytea), '') FROM generate_series(1, 128) AS part) AS body
                     FROM generate_series(1, 3000) AS number) AS many"""
        )
    full = await world.value(size)
    clock.advance(days=450)
    await retention.ensure_partitions(world.rt.db)

    assert (await prune(world.rt.maintenance_db)).partitions > 0

    assert full - empty > 3000 * 4096
    assert await world.value(size) < empty * 3
    again = await world.notify(fields)
    await world.drain()
    assert await world.outcome(again) == ("duplicate", None)
    assert await world.value("SELECT count(*) FROM processed_notifications") == 1


async def test_an_order_is_shown_without_what_was_pruned(world: World, clock: Clock) -> None:
    """Its timeline has order, effect, payment and what a person did about it; the delivery is not found; lists are empty."""
    fields, delivery = await paid_and_pruned(world, clock)
    await Make(world.rt.db).audit_entry(tenant_id="acme", action="notification_delivery.resolve", target=delivery)
    wanted = paging.Wanted(None, 50)
    async with world.rt.db.autocommit("test.view") as tx:
        kinds = [item.kind for item in (await timeline.of(tx, "acme", "ORD-1", wanted)).items]
        order = await views.order(tx, "acme", "ORD-1")
        deliveries = await views.notification_deliveries(tx, "acme", wanted, raw=True, order_id="ORD-1")
        with pytest.raises(NotFound):
            await views.notification_delivery(tx, "acme", delivery, raw=False)
    with pytest.raises(NotFound):
        await replays.replay(world.rt.db, world.rt.sources, "acme", ids.read(ids.NOTIFICATION_DELIVERY, delivery), actor="test")

    assert kinds == ["order", "effect", "payment", "act"]
    assert (order.status, len(order.payments), deliveries.items) == ("paid", 1, [])
    again = await world.notify(fields)
    await world.drain()
    assert await world.outcome(again) == ("duplicate", None)
