"""Partitions past their time are detached and dropped, and intake never waits for that."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import db as database
from ipn_gateway import old_partitions, retention
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from ipn_gateway.retention import PARTITIONED, Windows
from ipn_gateway.slots import Slots
from ipn_gateway.states import InboxState
from tests.make import Make
from tests.migrations.test_partitions import attached

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID


WINDOWS = Windows(delivery_days=400, event_days=400)
DAYS = 450  # by then this month and the one before are past their window, and those to come are not all
WAITING = """SELECT count(*) FROM pg_stat_activity
              WHERE datname = current_database() AND query LIKE '%%DETACH PARTITION%%' AND wait_event_type = 'Lock'
                AND pid <> pg_backend_pid()"""


@pytest.fixture
async def old(db: Database, clock: Clock, make: Make) -> dict[str, list[str]]:
    """A database that is 450 days old, with a row in each table from its first day; the months that are past their window."""
    await make.notification_delivery(outcome="applied")
    await make.delivery_attempt()
    before = await attached(db)
    clock.advance(days=DAYS)
    await retention.ensure_partitions(db)
    now = clock.now()
    past = [name for name, _, end in retention.months(now - timedelta(days=DAYS)) if end + timedelta(days=400) <= now]
    assert 2 <= len(past) < len(before[PARTITIONED[0]])
    return dict.fromkeys(PARTITIONED, past)


async def value(db: Database, sql: str) -> object:
    async with db.autocommit("test.value") as tx:
        return await tx.value(sql)


async def tables(db: Database) -> set[str]:
    """All tables with the name of a partition, attached or not."""
    async with db.autocommit("test.tables") as tx:
        found = await tx.all(dict, "SELECT relname::text AS name FROM pg_class WHERE relkind = 'r' AND relname ~ '_[0-9]{4}_[0-9]{2}$'")
    return {row["name"] for row in found}


def named(months: dict[str, list[str]]) -> set[str]:
    return {f"{table}_{month}" for table in months for month in months[table]}


async def test_what_is_past_its_window_is_dropped(db: Database, old: dict[str, list[str]]) -> None:
    """Whole months, of both tables, with their rows; the others stay, and a second run finds nothing to do."""
    every = named(await attached(db))

    assert await old_partitions.drop(db, WINDOWS) == len(named(old))

    assert named(await attached(db)) == every - named(old) == await tables(db)
    assert await value(db, "SELECT count(*) FROM notification_deliveries") == 0
    assert await value(db, "SELECT count(*) FROM delivery_attempts") == 0
    assert await old_partitions.drop(db, WINDOWS) == 0
    assert await retention.ensure_partitions(db) == 0


async def test_nothing_is_dropped_before_its_time(db: Database, clock: Clock) -> None:
    """On the day before the oldest month is past its window all are there; on that day it goes."""
    _, _, end = retention.months(clock.now())[0]
    clock.offset += end + timedelta(days=400) - clock.now() - timedelta(hours=1)

    assert await old_partitions.drop(db, WINDOWS) == 0
    clock.advance(hours=1)
    assert await old_partitions.drop(db, WINDOWS) == len(PARTITIONED)


@pytest.mark.parametrize(
    ("ends_at", "days", "last"),
    [
        (datetime(2026, 12, 1, tzinfo=UTC), 1, datetime(2027, 1, 1, tzinfo=UTC)),
        (datetime(2027, 1, 1, tzinfo=UTC), 1, datetime(2027, 2, 1, tzinfo=UTC)),
        (datetime(2028, 3, 1, tzinfo=UTC), 30.5, datetime(2028, 4, 1, tzinfo=UTC)),
        (datetime(2027, 3, 1, tzinfo=UTC), 31, datetime(2027, 4, 1, tzinfo=UTC)),
        (datetime(2027, 3, 1, tzinfo=UTC), 31.5, datetime(2027, 4, 1, 12, tzinfo=UTC)),  # no hour is lost where clocks are put forward
        (datetime(2027, 4, 1, tzinfo=UTC), 400, datetime(2028, 5, 5, tzinfo=UTC)),  # over a leap day
    ],
)
def test_this_month_and_the_last_one_are_never_dropped(ends_at: datetime, days: float, last: datetime) -> None:
    """However short the window: a writer whose clock is late still finds the month of its ids, over turns of years and leap days."""
    windows = Windows(delivery_days=days, event_days=days)

    assert old_partitions._last_end(ends_at, windows) == last


async def test_with_the_shortest_window_making_and_dropping_do_not_undo_each_other(db: Database, clock: Clock) -> None:
    """A day's window keeps last month, which is made ahead; so nothing is dropped that would be made again."""
    shortest = Windows(delivery_days=1, event_days=1)
    for _ in range(3):
        clock.advance(days=31)
        await retention.ensure_partitions(db)
        await old_partitions.drop(db, shortest)

        assert await retention.ensure_partitions(db) == 0
        assert (await attached(db))[PARTITIONED[0]] == [name for name, _, _ in retention.months(clock.now())]


@pytest.mark.parametrize("state", list(InboxState))
async def test_a_month_in_which_something_waits_is_kept(db: Database, make: Make, clock: Clock, state: InboxState) -> None:
    """Whatever it waits for: the partition is kept until it is decided. Attempts of the same month are history, and go."""
    delivery = await make.notification_delivery(outcome="received" if state == "received" else state)
    await make.tenant()
    await make.inbox(notification_delivery_id=delivery["id"], state=state, due_at=None)
    clock.advance(days=DAYS)
    await retention.ensure_partitions(db)

    await old_partitions.drop(db, WINDOWS)
    past = await old_partitions.past(db, WINDOWS)
    assert [partition.table for partition in past.kept] == ["notification_deliveries"]
    assert await value(db, "SELECT count(*) FROM notification_deliveries") == 1

    async with db.autocommit("test.decide") as tx:
        await tx.execute("DELETE FROM inbox")
    assert await old_partitions.drop(db, WINDOWS) == 1
    assert await value(db, "SELECT count(*) FROM notification_deliveries") == 0


@asynccontextmanager
async def reading(database_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A long reader: an open transaction with a snapshot and a lock on both tables and all their partitions."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await connection.execute("SELECT count(*) FROM notification_deliveries, delivery_attempts")
        yield connection


async def insert_without_waiting(db: Database, make: Make) -> None:
    """A row into each table, where nobody may make us wait for more than a moment."""
    async with db.autocommit("test.patience") as tx:
        await tx.execute("SET lock_timeout = '500ms'")
    try:
        delivery = await make.notification_delivery()
        await make.delivery_attempt(event_delivery_id=delivery["id"])
    finally:
        async with db.autocommit("test.patience") as tx:
            await tx.execute(f"SET lock_timeout = '{database.LOCK_TIMEOUT_SECONDS}s'")


async def waiting(db: Database) -> None:
    """Until a detaching waits."""
    async with asyncio.timeout(10):
        while not await value(db, WAITING):
            pass


@pytest.fixture
async def intake(database_url: str, clock: Clock) -> AsyncIterator[Database]:
    """Intake's share: one connection."""
    async with Database(database_url, clock=clock, faults=Faults(), connections_max=1) as share:
        yield share


@pytest.mark.usefixtures("old")
async def test_intake_goes_on_while_a_detaching_waits_for_a_long_reader(
    db: Database, intake: Database, database_url: str, clock: Clock
) -> None:
    """The reader keeps what it sees; rows are written meanwhile without waiting; when it has ended, all is dropped."""
    slots = Slots(1)
    async with reading(database_url) as reader:
        slots.start(old_partitions.drop(db, WINDOWS), name="drop")
        await waiting(intake)
        for _ in range(5):
            await insert_without_waiting(intake, Make(intake, clock))
        seen = await (await reader.execute("SELECT count(*) FROM notification_deliveries")).fetchone()

        assert seen == (1,)
        assert await value(intake, WAITING)  # it still waits, and kept nobody
    await slots.drained()

    assert (await old_partitions.past(db, WINDOWS)).droppable == []
    assert await value(db, "SELECT count(*) FROM notification_deliveries") == 5


async def test_one_that_waits_for_too_long_is_finished_later(
    database_url: str, clock: Clock, old: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a reader that does not end the detaching is given up half way, intake goes on, and the next run ends it."""
    monkeypatch.setattr(database, "LOCK_TIMEOUT_SECONDS", 0.2)
    async with Database(database_url, clock=clock, faults=Faults()) as db:
        async with reading(database_url):
            assert await old_partitions.drop(db, WINDOWS) == 0
            half = [partition for partition in (await old_partitions.past(db, WINDOWS)).droppable if partition.detaching]
            assert {partition.table for partition in half} == set(PARTITIONED)
            assert await old_partitions.drop(db, WINDOWS) == 0
            assert await Make(db, clock).notification_delivery()
            assert await retention.ensure_partitions(db) == 0

        dropped = await old_partitions.drop(db, WINDOWS)
        assert dropped == len(named(old))
        assert await value(db, "SELECT count(*) FROM pg_inherits WHERE inhdetachpending") == 0


@pytest.mark.parametrize("others", [1, 3])
async def test_several_processes_drop_at_once(
    db: Database, database_url: str, clock: Clock, old: dict[str, list[str]], others: int
) -> None:
    """None of them fails, and each partition is dropped by one."""
    every = named(await attached(db))
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(Database(database_url, clock=clock, faults=Faults())) for _ in range(others)]
        dropped = sum(await asyncio.gather(*(old_partitions.drop(each, WINDOWS) for each in (db, *processes))))
        for _ in range(3):  # who came second to one leaves it to a later run
            dropped += await old_partitions.drop(db, WINDOWS)

    assert dropped == len(named(old))
    assert await tables(db) == every - named(old)


class Killed(Exception):
    """The process ends here."""


async def killed() -> None:
    raise Killed


@pytest.mark.parametrize("step", ["retention.detach:statement_1", "retention.detach:statement_2", "retention.drop:statement_1"])
async def test_who_was_killed_on_the_way_is_followed(db: Database, faults: Faults, old: dict[str, list[str]], step: str) -> None:
    """Marked, detached, or looked at once more: the next run goes on from there, and intake has all it needs meanwhile."""
    faults.on[step] = killed
    with pytest.raises(Killed):
        await old_partitions.drop(db, WINDOWS)
    faults.on.clear()
    assert await retention.days_ahead(db) > 89

    assert await old_partitions.drop(db, WINDOWS) == len(named(old))
    assert not named(old) & await tables(db)


@pytest.mark.usefixtures("old")
async def test_what_is_put_back_to_work_just_before_is_attached_again(db: Database, faults: Faults, make: Make) -> None:
    """A replay that came between the look and the detaching: its row is not lost, and the month is kept."""
    row: Any = await value(db, "SELECT id FROM notification_deliveries")

    async def replayed() -> None:
        faults.on.clear()
        async with await psycopg.AsyncConnection.connect(db._url) as other:
            await other.execute("INSERT INTO tenants (id) VALUES ('shop') ON CONFLICT DO NOTHING")
            await other.execute(
                "INSERT INTO inbox (tenant_id, notification_delivery_id, source_id, due_at) VALUES ('shop', %s, 'shop-main', ipn_now())",
                (row,),
            )

    async def when_of_deliveries() -> None:
        if await _detached_holds(db, row):
            await replayed()

    faults.on["retention.detach:statement_2"] = when_of_deliveries
    await old_partitions.drop(db, WINDOWS)

    assert await value(db, "SELECT id FROM notification_deliveries") == row
    assert [partition.waits for partition in (await old_partitions.past(db, WINDOWS)).kept] == [True]
    async with db.autocommit("test.decide") as tx:
        await tx.execute("DELETE FROM inbox")
    assert await old_partitions.drop(db, WINDOWS) == 1
    assert await make.notification_delivery()


async def _detached_holds(db: Database, row: UUID) -> bool:
    async with await psycopg.AsyncConnection.connect(db._url) as other:
        found = await (await other.execute("SELECT count(*) FROM notification_deliveries WHERE id = %s", (row,))).fetchone()
    return found == (0,)


@pytest.mark.usefixtures("old")
async def test_what_a_person_detached_is_left_alone(db: Database, old: dict[str, list[str]]) -> None:
    """To keep a month elsewhere it is detached by hand: without our mark it is not dropped."""
    month = f"notification_deliveries_{old['notification_deliveries'][0]}"
    async with db.autocommit("test.archive") as tx:
        await tx.execute(f"ALTER TABLE notification_deliveries DETACH PARTITION {month} CONCURRENTLY")

    assert await old_partitions.drop(db, WINDOWS) == len(named(old)) - 1
    assert await tables(db) >= {month}


class YearsAhead(Clock):
    """A host whose clock is ten years ahead of the database's."""

    def now(self) -> datetime:
        return datetime.fromtimestamp(Clock().now().timestamp(), UTC) + timedelta(days=3650)


async def test_the_database_s_time_decides(db: Database, database_url: str) -> None:
    """A host with a wrong clock drops nothing: what is past its window is a matter of the database's time."""
    every = await tables(db)
    async with Database(database_url, clock=YearsAhead(), faults=Faults(), connections_max=1) as ahead:
        assert await old_partitions.drop(ahead, WINDOWS) == 0

    assert await tables(db) == every
