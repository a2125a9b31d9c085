"""Partitions that are past their time: detached concurrently, then dropped. Intake never waits for that.

1. The partition is marked with a comment, which says that this worker detaches it and what its range is.
2. `DETACH PARTITION … CONCURRENTLY`: no lock that a write waits for. Where a long reader makes it wait for too long, it is given up and
   the partition stays half detached; the next run ends that with `FINALIZE`.
3. When it is detached, open work is looked for once more: nothing can come any more, and what came while it was detached is there. If
   there is some, the partition is attached again, else it is dropped.

Only what carries the mark is dropped: what a person detached, to keep it elsewhere, is left alone. Every step may be the last one of a
killed process, and may be done by two processes at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import UUID

import psycopg
from psycopg import errors as pg
from psycopg import sql

from ipn_gateway import ids, logs
from ipn_gateway.retention import PARTITIONED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.retention import Windows

MARK: Final = "past its retention: detached to be dropped;"
_MARKED: Final = re.compile(rf"{re.escape(MARK)} (\w+) from ([0-9a-f-]{{36}}) to ([0-9a-f-]{{36}})")

_ANOTHER_WAS_FIRST: Final = (pg.ObjectNotInPrerequisiteState, pg.UndefinedTable, pg.UndefinedObject, pg.WrongObjectType)


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition, attached or (`attached` is false) waiting to be dropped. `waits`: open work is in its range."""

    table: str
    name: str
    lower: UUID
    upper: UUID
    attached: bool
    detaching: bool
    waits: bool
    rows: int
    size_bytes: int

    @property
    def begins_at(self) -> datetime:
        """The first moment of its range."""
        return _moment(self.lower)

    @property
    def ends_at(self) -> datetime:
        """The first moment after its range."""
        return _moment(self.upper)


@dataclass(frozen=True, slots=True)
class Past:
    """The partitions that are past their time: to be dropped now, and kept because something in them still waits."""

    now: datetime
    droppable: Sequence[Partition]
    kept: Sequence[Partition]

    def overdue_seconds(self, table: str, windows: Windows) -> float:
        """For how long the oldest partition of a table that can be dropped could have been dropped."""
        ends = [partition.ends_at for partition in self.droppable if partition.table == table]
        return max(0.0, (self.now - _last_end(min(ends), windows)).total_seconds()) if ends else 0.0


def _moment(bound: UUID) -> datetime:
    return ids.EPOCH + timedelta(milliseconds=bound.int >> 80)


def _last_end(ends_at: datetime, windows: Windows) -> datetime:
    """From when on a partition that ends then is past its time: its window is over, and it is not the month before this one any more."""
    window = ends_at + timedelta(days=windows.delivery_days)
    years, month = divmod(ends_at.month, 12)
    return max(window, datetime(ends_at.year + years, month + 1, 1, tzinfo=UTC))


# Open work is asked for by tenant, along the primary key. Only notification deliveries have any: attempts are history.
_WAITS: Final = """
({table} = 'notification_deliveries' AND EXISTS (
    SELECT FROM tenants AS t CROSS JOIN LATERAL (
        SELECT FROM inbox AS i WHERE i.tenant_id = t.id AND i.notification_delivery_id >= {lower} AND i.notification_delivery_id < {upper}
         LIMIT 1) AS open))
"""

_ATTACHED: Final = f"""
SELECT found.*, {_WAITS.format(table="found.table", lower="found.lower", upper="found.upper")} AS waits
  FROM (SELECT p.relname::text AS table, c.relname::text AS name, (bound.of_it)[1]::uuid AS lower, (bound.of_it)[2]::uuid AS upper,
               true AS attached, i.inhdetachpending AS detaching, greatest(c.reltuples, 0)::bigint AS rows,
               coalesce(pg_total_relation_size(c.oid), 0) AS size_bytes
          FROM pg_inherits AS i JOIN pg_class AS p ON p.oid = i.inhparent JOIN pg_class AS c ON c.oid = i.inhrelid
         CROSS JOIN LATERAL (
               SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), $$FROM \\('(.{{36}})'\\) TO \\('(.{{36}})'\\)$$)) AS bound (of_it)
         WHERE i.inhparent = ANY(%(tables)s::regclass[]) AND bound.of_it IS NOT NULL) AS found
 ORDER BY found.upper, found.name
"""

_DETACHED: Final = """
SELECT c.relname::text AS name, obj_description(c.oid, 'pg_class') AS mark, greatest(c.reltuples, 0)::bigint AS rows,
       coalesce(pg_total_relation_size(c.oid), 0) AS size_bytes
  FROM pg_class AS c
 WHERE c.relkind = 'r' AND NOT c.relispartition AND starts_with(obj_description(c.oid, 'pg_class'), %(mark)s)
   AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'inbox'::regclass)
"""

_STILL_WAITS: Final = f"SELECT {_WAITS.format(table='%(table)s', lower='%(lower)s', upper='%(upper)s')}"


async def past(db: Database, windows: Windows) -> Past:
    """What is past its time now, by the database's time. Changes nothing."""
    async with db.autocommit("retention.past") as tx:
        now: datetime = await tx.value("SELECT ipn_now()")
        attached = await tx.all(Partition, _ATTACHED, {"tables": list(PARTITIONED)})
        detached = await _detached(tx)
    over = [partition for partition in attached if _last_end(partition.ends_at, windows) <= now]
    kept = [partition for partition in over if partition.waits and not partition.detaching]
    return Past(now, [*detached, *(partition for partition in over if partition not in kept)], kept)


async def _detached(tx: Transaction) -> list[Partition]:
    """What was detached, and not dropped yet."""
    found = []
    for row in await tx.all(dict, _DETACHED, {"mark": MARK}):
        if marked := _MARKED.fullmatch(row["mark"]):
            table, lower, upper = marked[1], UUID(marked[2]), UUID(marked[3])
            found.append(Partition(table, row["name"], lower, upper, False, False, False, row["rows"], row["size_bytes"]))
    return found


async def drop(db: Database, windows: Windows) -> int:
    """Detach and drop what is past its time; how many were dropped. What cannot be done now is left to the next run."""
    found = await past(db, windows)
    for partition in found.kept:
        logs.get("retention").warning("partition.kept", partition=partition.name, why="something in it still waits: decide it")
    dropped = 0
    for partition in found.droppable:
        try:
            dropped += await _drop(db, partition)
        except _ANOTHER_WAS_FIRST as error:
            logs.get("retention").info("partition.taken", partition=partition.name, sqlstate=error.sqlstate)
        except psycopg.Error as error:  # used by somebody for too long, most of the time; the others are not kept waiting
            logs.count("retention.postponed")
            logs.get("retention").warning("partition.postponed", partition=partition.name, sqlstate=error.sqlstate)
    return dropped


async def _drop(db: Database, partition: Partition) -> bool:
    if partition.attached:
        await _detach(db, partition)
    async with db.autocommit("retention.drop") as tx:
        bounds = {"table": partition.table, "lower": partition.lower, "upper": partition.upper}
        if await tx.value(_STILL_WAITS, bounds):
            await tx.execute(_filled("ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ({lower}) TO ({upper})", partition))
            await tx.execute(_filled("COMMENT ON TABLE {name} IS NULL", partition))
            logs.get("retention").warning("partition.attached_again", partition=partition.name)
            return False
        await tx.execute(_filled("DROP TABLE {name}", partition))
    logs.count("retention.partitions_dropped")
    logs.get("retention").info("partition.dropped", partition=partition.name, rows=partition.rows, size_bytes=partition.size_bytes)
    return True


async def _detach(db: Database, partition: Partition) -> None:
    """No write waits for any of it. Waits for what uses the partition, at most `db.LOCK_TIMEOUT_SECONDS` for each."""
    mark = f"{MARK} {partition.table} from {partition.lower} to {partition.upper}"
    how = "FINALIZE" if partition.detaching else "CONCURRENTLY"
    async with db.autocommit("retention.detach") as tx:
        await tx.execute(_filled("COMMENT ON TABLE {name} IS {mark}", partition, mark=mark))
        await tx.execute(_filled(f"ALTER TABLE {{table}} DETACH PARTITION {{name}} {how}", partition))


def _filled(statement: str, partition: Partition, **literals: str) -> str:
    """Names and literals, quoted: such statements take no parameters."""
    names = {"table": sql.Identifier(partition.table), "name": sql.Identifier(partition.name)}
    values = {"lower": str(partition.lower), "upper": str(partition.upper), **literals}
    filled = sql.SQL(statement).format(**names, **{name: sql.Literal(value) for name, value in values.items()})
    return filled.as_string()
