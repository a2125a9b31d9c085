"""Partitions are there before they are needed: intake never meets a missing one."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import errors as pg

from ipn_gateway import ids, retention
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from ipn_gateway.retention import PARTITIONED


async def attached(db: Database) -> dict[str, list[str]]:
    """The months for which each table has a partition."""
    async with db.autocommit("test.attached") as tx:
        rows = await tx.all(
            dict,
            """SELECT inhparent::regclass::text AS parent, inhrelid::regclass::text AS name
                 FROM pg_inherits WHERE inhparent = ANY(%(parents)s::regclass[]) ORDER BY name""",
            {"parents": list(PARTITIONED)},
        )
    return {table: [row["name"].removeprefix(f"{table}_") for row in rows if row["parent"] == table] for table in PARTITIONED}


async def test_three_months_ahead_are_attached(db, clock):
    """A migrated database has the last month, this one and the next three, for both tables, and no default one."""
    expected = [name for name, _, _ in retention.months(clock.now())]

    assert len(expected) == 5
    assert await attached(db) == dict.fromkeys(PARTITIONED, expected)
    assert await retention.days_ahead(db) > 89


async def test_making_them_again_makes_none(db):
    """What is there is left alone."""
    assert await retention.ensure_partitions(db) == 0


async def test_time_goes_on(db, clock):
    """Two months later two more of each are made, and the old ones stay until retention takes them."""
    before = await attached(db)
    clock.advance(days=62)

    assert await retention.ensure_partitions(db) == 2 * len(PARTITIONED)
    after = await attached(db)
    assert all(len(after[table]) == 7 and set(before[table]) < set(after[table]) for table in PARTITIONED)


async def test_several_make_them_at_once(db, clock, database_url):
    """Every process makes them at its start: none of them fails, and each partition is made by exactly one."""
    clock.advance(days=365)
    async with AsyncExitStack() as processes:
        others = [await processes.enter_async_context(Database(database_url, clock=clock, faults=Faults())) for _ in range(4)]
        made = await asyncio.gather(*(retention.ensure_partitions(each) for each in (db, *others)))

    assert sum(made) == 5 * len(PARTITIONED)
    assert [name for name, _, _ in retention.months(clock.now())] == (await attached(db))[PARTITIONED[0]][-5:]


async def test_one_that_was_made_but_not_attached_is_attached(db, clock):
    """A process that ended between the two steps leaves a table that the next one takes up."""
    clock.advance(days=62)
    month = retention.months(clock.now())[-1][0]
    async with db.autocommit("test.half") as tx:
        await tx.execute(f"CREATE TABLE delivery_attempts_{month} (LIKE delivery_attempts INCLUDING ALL)")

    assert await retention.ensure_partitions(db) == 2 * len(PARTITIONED)
    assert month in (await attached(db))["delivery_attempts"]


@pytest.mark.parametrize("table", PARTITIONED)
async def test_a_missing_one_is_seen_in_time(db, clock, table):
    """`days_ahead` counts to the first month that either table lacks: less than 7 is what readiness refuses."""
    this_month = retention.months(clock.now())[1]
    async with db.autocommit("test.drop") as tx:
        for month, start, _ in retention.months(clock.now())[2:]:
            assert start > clock.now()
            await tx.execute(f"DROP TABLE {table}_{month}")

    days = await retention.days_ahead(db)

    assert days == pytest.approx((this_month[2] - clock.now()) / timedelta(days=1), abs=0.01)
    clock.advance(days=days - 1)
    assert await retention.days_ahead(db) < retention.DAYS_AHEAD_MIN
    assert await retention.ensure_partitions(db) > 0
    assert await retention.days_ahead(db) > 89


async def test_without_one_a_row_is_refused(db, make, clock):
    """No partition, no row: SQLSTATE 23514, which receiving answers with a 503."""
    clock.advance(days=365)

    with pytest.raises(pg.CheckViolation, match="no partition"):
        await make.notification_delivery()

    await retention.ensure_partitions(db)
    assert await make.notification_delivery()


async def test_making_one_does_not_stop_intake(db, database_url, make, clock):
    """A partition is attached while another transaction has written to the table and is still open."""
    clock.advance(days=62)
    async with await psycopg.AsyncConnection.connect(database_url) as writing:
        await writing.execute("LOCK TABLE notification_deliveries IN ROW EXCLUSIVE MODE")  # as an INSERT does
        async with asyncio.timeout(5):
            assert await retention.ensure_partitions(db) == 2 * len(PARTITIONED)

    assert await make.notification_delivery()


@pytest.mark.parametrize(
    ("now", "names"),
    [
        (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), ["2026_11", "2026_12", "2027_01", "2027_02", "2027_03"]),
        (datetime(2027, 1, 1, tzinfo=UTC), ["2026_12", "2027_01", "2027_02", "2027_03", "2027_04"]),
        (datetime(2028, 2, 29, 12, tzinfo=UTC), ["2028_01", "2028_02", "2028_03", "2028_04", "2028_05"]),
    ],
)
def test_months_follow_each_other_without_a_gap(now, names):
    """Over the turn of a year and a leap day, each month ends where the next one begins."""
    months = retention.months(now)

    assert [name for name, _, _ in months] == names
    assert all(end == start for (_, _, end), (_, start, _) in itertools.pairwise(months))


@pytest.mark.parametrize("moment", [datetime(2026, 11, 30, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)])
def test_ids_lie_in_the_partition_of_their_moment(moment):
    """A bound is the smallest id of its millisecond, so that no id falls on the wrong side of it."""
    assert retention.lower_bound(moment) <= ids.new(moment)
    assert ids.new(moment - timedelta(milliseconds=1)) < retention.lower_bound(moment)
    assert Clock().now().tzinfo is UTC
