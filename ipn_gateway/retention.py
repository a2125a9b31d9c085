"""How long each table is kept, and the partitions of the bulky ones: made three months ahead, so that intake never meets a missing one.

A partition covers one month of ids (UUIDv7 begins with milliseconds). It is made with LIKE and attached, which does not stop intake;
`CREATE TABLE … PARTITION OF` would. There is no DEFAULT partition, which would forbid detaching concurrently. What is past its time is
dropped by `old_partitions` and deleted by `pruning`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID

from psycopg import errors as pg

from ipn_gateway import logs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.settings import Settings

PARTITIONED: Final = ("notification_deliveries", "delivery_attempts")
MONTHS_AHEAD: Final = 3
DAYS_AHEAD_MIN: Final = 7
EXPIRED_SECRET_DAYS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Windows:
    """For how many days what is pruned is kept at least: notification deliveries and attempts; events and event deliveries."""

    delivery_days: float
    event_days: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Those of the settings."""
        return cls(settings.delivery_retention_days, settings.event_retention_days)


@dataclass(frozen=True, slots=True)
class Kept:
    """How long the rows of a table are kept: for ever, for the time of a setting, or until something has happened (`until`)."""

    setting: str | None = None
    until: str | None = None
    starts: str | None = None
    note: str | None = None

    def told(self, settings: Settings) -> dict[str, Any]:
        """The same with the numbers of these settings."""
        unit, value = ("hours" if self.setting.endswith("_hours") else "days", getattr(settings, self.setting)) if self.setting else ("", 0)
        period = f"{value:g} {unit}" if self.setting else self.until or "for ever"
        return {"kept": period} | {name: text for name in ("starts", "note") if (text := getattr(self, name))}


_MONTHS: Final = "whole months are dropped, never this month or the last one, so it may be longer by a month or two"

KEPT: Final[Mapping[str, Kept]] = {
    "tenants": Kept(),
    "api_keys": Kept(note="revoked ones too: the audit log names them"),
    "sources": Kept(note="a name is never free again"),
    "source_secrets": Kept(
        until=f"until {EXPIRED_SECRET_DAYS:g} day after it expired", note="a replaced one authenticates for 7 days, and expires then"
    ),
    "source_states": Kept(note="one row for each source"),
    "notification_deliveries": Kept(
        "delivery_retention_days",
        starts="its receipt",
        note=f"{_MONTHS}; a month in which one still waits (received, parked, held, conflict or dead) is kept until that one is decided",
    ),
    "inbox": Kept(until="until the notification delivery is decided", note="one that waits for a person waits for ever"),
    "processed_notifications": Kept(note="the ledger: what was applied once is known for ever"),
    "orders": Kept(),
    "order_slots": Kept(note="one narrow row for each order, and for each id that a confirmed payment named before there was an order"),
    "sweeps": Kept(until="until the order is paid or the schedule has ended"),
    "payments": Kept(),
    "refunds": Kept(note="a reference refunds once for ever"),
    "events": Kept(
        "event_retention_days",
        starts="its creation",
        note="one with a pending event delivery is kept, and one that announced a notification delivery that still waits",
    ),
    "event_log": Kept(note="one row"),
    "event_horizons": Kept(note="one row for each tenant and type of event: up to where events were deleted"),
    "endpoints": Kept(note="a deleted one is only marked as deleted"),
    "endpoint_secrets": Kept(until=f"until {EXPIRED_SECRET_DAYS:g} day after it expired"),
    "endpoint_states": Kept(note="one row for each endpoint"),
    "event_deliveries": Kept(
        "event_retention_days",
        starts="the creation of its event, of a dead one its last attempt",
        note="deleted with its event; a pending one never, however long its endpoint is disabled; attempts count as long as they are kept",
    ),
    "delivery_attempts": Kept("delivery_retention_days", starts="the attempt", note=_MONTHS),
    "idempotency_keys": Kept(
        "idempotency_retention_hours", starts="first submission", note="one that is in progress or indeterminate is never pruned"
    ),
    "audit_log": Kept(note="who did what by hand, with the reason"),
}
"""Every table of `models`, and how long its rows are kept."""


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
