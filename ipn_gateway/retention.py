"""Partitions of the bulky tables: made three months ahead, so that intake never meets a missing one.

A partition covers one month of ids (UUIDv7 begins with milliseconds). It is made with LIKE and attached, which does not stop intake;
`CREATE TABLE … PARTITION OF` would. There is no DEFAULT partition, which would forbid detaching concurrently.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import UUID

from psycopg import errors as pg

from ipn_gateway import logs

if TYPE_CHECKING:
    from ipn_gateway.db import Database, Transaction

PARTITIONED: Final = ("notification_deliveries", "delivery_attempts")
MONTHS_AHEAD: Final = 3
DAYS_AHEAD_MIN: Final = 7


def lower_bound(moment: datetime) -> UUID:
    """The smallest UUIDv7 of that millisecond."""
    return UUID(int=int(moment.timestamp() * 1000) << 80)


def months(now: datetime, ahead: int = MONTHS_AHEAD) -> list[tuple[str, datetime, datetime]]:
    """The month before `now`, its own and those ahead: name, first moment, first moment after it."""
    starts = [_month(now, offset) for offset in range(-1, ahead + 2)]
    return [(f"{start:%Y_%m}", start, end) for start, end in itertools.pairwise(starts)]


def _month(now: datetime, offset: int) -> datetime:
    years, month = divmod(now.month - 1 + offset, 12)
    return datetime(now.year + years, month + 1, 1, tzinfo=UTC)


async def ensure_partitions(db: Database) -> int:
    """Attach the partitions of last month, this one and three months ahead; how many were made. Safe to run at once anywhere."""
    made = 0
    async with db.autocommit("retention.ensure_partitions") as tx:
        attached = await _attached(tx)
        for table in PARTITIONED:
            for month, start, end in months(db.clock.now()):
                if f"{table}_{month}" not in attached:
                    made += await _attach(tx, table, month, start, end)
    return made


async def _attached(tx: Transaction) -> set[str]:
    rows = await tx.all(
        dict, "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = ANY(%(t)s::regclass[])", {"t": list(PARTITIONED)}
    )
    return {row["name"] for row in rows}


async def _attach(tx: Transaction, table: str, month: str, start: datetime, end: datetime) -> int:
    name = f"{table}_{month}"
    try:
        await tx.execute(f"CREATE TABLE IF NOT EXISTS {name} (LIKE {table} INCLUDING ALL)")
        await tx.execute(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{lower_bound(start)}') TO ('{lower_bound(end)}')")
    except (pg.DuplicateTable, pg.DuplicateObject, pg.UniqueViolation, pg.WrongObjectType, pg.InvalidObjectDefinition):
        return 0  # another process was first
    logs.get("retention").info("partition.attached", table=table, month=month)
    return 1


async def days_ahead(db: Database) -> float:
    """For how many days from now on both tables have partitions."""
    async with db.autocommit("retention.days_ahead") as tx:
        attached = await _attached(tx)
    now = db.clock.now()
    covered = now
    for month, _, end in months(now, ahead=12)[1:]:
        if not all(f"{table}_{month}" in attached for table in PARTITIONED):
            break
        covered = end
    return (covered - now) / timedelta(days=1)
