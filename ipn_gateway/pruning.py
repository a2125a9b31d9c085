"""The pruner: enforces how long things are kept, in bounded batches with a pause of random length between them.

An event is deleted together with its event deliveries, and only when none of them is pending, is being sent, or was asked for again by a
person. A dead one is kept for the whole window after its last attempt, so that a person has time for it. An event that announced a
notification delivery which still waits is kept: else a copy would announce it again. What somebody has locked is left to the next pass.

Up to where events were deleted is kept by type (`event_horizons`), so that the pull can tell a reader who missed some.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import ids, logs, old_partitions, retention
from ipn_gateway.retention import PARTITIONED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from ipn_gateway.db import Database
    from ipn_gateway.old_partitions import Past
    from ipn_gateway.retention import Windows

EVENTS_AT_ONCE: Final = 500
SECRETS_AT_ONCE: Final = 500
LOOKED_AT_MAX: Final = 200
"""Of each tenant so many of the oldest events are looked at to say how late the pruner is."""

COUNTED_MAX: Final = 100_000
CLOCKS_OFF_SECONDS_MAX: Final = 3600.0
PAUSE_SECONDS: Final = 0.1
"""The pause after a batch, times a draw between 0.5 and 1.5."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """How much one run deleted."""

    partitions: int = 0
    events: int = 0
    event_deliveries: int = 0
    dead: int = 0
    secrets: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        """Two runs together."""
        return Pruned(
            self.partitions + other.partitions,
            self.events + other.events,
            self.event_deliveries + other.event_deliveries,
            self.dead + other.dead,
            self.secrets + other.secrets,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Up to which event a pass has come with a tenant."""

    tenant_id: str
    at: datetime = ids.EPOCH
    event_id: str = ""


@dataclass(slots=True)
class Pruner:
    """What the pruner works with, how far its pass is, and what it deleted so far. `chance` draws from 0 to 1."""

    db: Database
    windows: Windows
    chance: Callable[[], float] = random.random
    total: Pruned = field(default_factory=Pruned)
    _places: deque[_Place] = field(default_factory=deque)
    _within_pass: bool = False

    async def run_once(self) -> int:
        """Partitions and secrets at the beginning of a pass, then one batch of events; 0 at the end of the pass."""
        if not self._within_pass:
            self._places = deque(await self._begin())
            self._within_pass = True
        if self._places:
            place = self._places.popleft()
            if behind := await self._batch(place):
                self._places.appendleft(behind)
        if self._places:
            await asyncio.sleep(PAUSE_SECONDS * (0.5 + self.chance()))
            return 1
        self._within_pass = False
        return 0

    async def _begin(self) -> Sequence[_Place]:
        if not await self._clocks_agree():
            return []
        self._count(Pruned(partitions=await old_partitions.drop(self.db, self.windows)))
        async with self.db.autocommit("retention.secrets") as tx:
            given = {"days": retention.EXPIRED_SECRET_DAYS, "most": SECRETS_AT_ONCE}
            self._count(Pruned(secrets=sum([await tx.execute(statement, given) for statement in _EXPIRED_SECRETS])))
        async with self.db.autocommit("retention.tenants") as tx:
            rows = await tx.all(dict, _WITH_OLD_EVENTS, {"days": self.windows.event_days})
        return [_Place(row["id"]) for row in rows]

    async def _clocks_agree(self) -> bool:
        """Whether the database's clock is near the host's: what a clock that is years ahead lets go cannot be brought back."""
        async with self.db.autocommit("retention.clock") as tx:
            theirs: datetime = await tx.value("SELECT ipn_now()")
        off = (self.db.clock.now() - theirs).total_seconds()
        if abs(off) > CLOCKS_OFF_SECONDS_MAX:
            logs.count("retention.clock_off")
            logs.get("retention").error("retention.clock_off", seconds=round(off), why="nothing is pruned until the clocks agree")
        return abs(off) <= CLOCKS_OFF_SECONDS_MAX

    async def _batch(self, place: _Place) -> _Place | None:
        """Delete what can be deleted of a tenant's next events; the place behind them, None when there are no more."""
        looked, pruned = await self.db.rerun(_prune_events, self.db, place, self.windows)
        self._count(pruned)
        if pruned.events:
            logs.get("retention").info("events.pruned", tenant_id=place.tenant_id, events=pruned.events, dead=pruned.dead)
        last = looked[-1] if len(looked) == EVENTS_AT_ONCE else None
        return _Place(place.tenant_id, last["created_at"], last["id"]) if last else None

    def _count(self, pruned: Pruned) -> None:
        self.total += pruned
        logs.count("retention.events_deleted", pruned.events)
        logs.count("retention.dead_letters_deleted", pruned.dead)
        logs.count("retention.secrets_deleted", pruned.secrets)


_EXPIRED_SECRETS: Final = (
    """DELETE FROM endpoint_secrets WHERE (tenant_id, id) IN (
           SELECT tenant_id, id FROM endpoint_secrets WHERE expires_at <= ipn_now() - %(days)s * interval '1 day'
            LIMIT %(most)s FOR UPDATE SKIP LOCKED)""",
    """DELETE FROM source_secrets WHERE id IN (
           SELECT id FROM source_secrets WHERE expires_at <= ipn_now() - %(days)s * interval '1 day'
            LIMIT %(most)s FOR UPDATE SKIP LOCKED)""",
)

_OLD: Final = "created_at < ipn_now() - %(days)s * interval '1 day'"

_WITH_OLD_EVENTS: Final = f"""
SELECT t.id FROM tenants AS t CROSS JOIN LATERAL (
    SELECT FROM events AS e WHERE e.tenant_id = t.id AND e.{_OLD} ORDER BY e.created_at LIMIT 1) AS old
 ORDER BY t.id
"""

# Locked, so that a recovery stages nothing for them meanwhile: it shares the lock (`recoveries._STAGE`).
_LOOK: Final = f"""
SELECT id, created_at FROM events
 WHERE tenant_id = %(tenant_id)s AND (created_at, id) > (%(at)s, %(after)s) AND {_OLD}
 ORDER BY created_at, id LIMIT %(most)s FOR UPDATE SKIP LOCKED
"""

_ENDED: Final = """
d.status <> 'pending' AND d.next_attempt_at IS NULL AND (d.lease_expires_at IS NULL OR d.lease_expires_at <= ipn_now())
AND (d.status <> 'dead' OR NOT EXISTS (
    SELECT FROM delivery_attempts AS a WHERE a.tenant_id = d.tenant_id AND a.event_delivery_id = d.id
       AND a.started_at >= ipn_now() - %(days)s * interval '1 day'))
"""

_LOCK_ENDED: Final = f"""
SELECT d.id FROM event_deliveries AS d WHERE d.tenant_id = %(tenant_id)s AND d.event_id = ANY(%(ids)s) AND {_ENDED}
   FOR UPDATE OF d SKIP LOCKED
"""

_ANNOUNCES_WHAT_WAITS: Final = """
(e.type LIKE 'notification.%%' AND EXISTS (
    SELECT FROM inbox AS i WHERE i.tenant_id = e.tenant_id AND i.notification_delivery_id =
           substring(convert_from(e.body, 'UTF8') FROM '"notification_delivery_id": ?"ndl_([0-9a-f]{32})"')::uuid))
"""

_DELETE: Final = f"""
WITH gone AS MATERIALIZED (
    SELECT e.id, e.type, e.position FROM events AS e
     WHERE e.tenant_id = %(tenant_id)s AND e.id = ANY(%(ids)s) AND NOT {_ANNOUNCES_WHAT_WAITS}
       AND NOT EXISTS (SELECT FROM event_deliveries AS d
                        WHERE d.tenant_id = e.tenant_id AND d.event_id = e.id AND d.id <> ALL(%(ended)s::uuid[]))
), obligations AS (
    DELETE FROM event_deliveries AS d USING gone WHERE d.tenant_id = %(tenant_id)s AND d.event_id = gone.id RETURNING d.status
), facts AS (
    DELETE FROM events AS e USING gone WHERE e.tenant_id = %(tenant_id)s AND e.id = gone.id RETURNING e.id
), horizons AS (
    INSERT INTO event_horizons AS h (tenant_id, type, position, event_id, deleted_by)
    SELECT DISTINCT ON (type) %(tenant_id)s, type, position, id, (SELECT event_position()) FROM gone ORDER BY type, position DESC, id DESC
    ON CONFLICT ON CONSTRAINT event_horizons_pkey DO UPDATE
       SET (position, event_id) = (SELECT v.position, v.id FROM (VALUES (h.position, h.event_id), (excluded.position, excluded.event_id))
                                       AS v (position, id) ORDER BY v.position DESC, v.id DESC LIMIT 1),
           deleted_by = greatest(h.deleted_by, excluded.deleted_by)
)
SELECT (SELECT count(*) FROM facts) AS events, (SELECT count(*) FROM obligations) AS event_deliveries,
       (SELECT count(*) FROM obligations WHERE status = 'dead') AS dead
"""


async def _prune_events(db: Database, place: _Place, windows: Windows) -> tuple[list[dict[str, Any]], Pruned]:
    """One batch: what was looked at, and what was deleted of it."""
    given = {"tenant_id": place.tenant_id, "at": place.at, "after": place.event_id, "days": windows.event_days, "most": EVENTS_AT_ONCE}
    async with db.transaction("retention.events") as tx:
        looked = await tx.all(dict, _LOOK, given)
        if not looked:
            return [], Pruned()
        given["ids"] = [row["id"] for row in looked]
        given["ended"] = [row["id"] for row in await tx.all(dict, _LOCK_ENDED, given)]
        deleted = await tx.one(dict, _DELETE, given) or {}
    return looked, Pruned(**deleted)


# --- what would go, and how late it is


@dataclass(frozen=True, slots=True)
class Overdue:
    """How late the pruner is with a table, in seconds: since when the oldest that can go could have gone."""

    table: str
    seconds: float


_OLDEST_THAT_CAN_GO: Final = f"""
SELECT coalesce(extract(epoch FROM ipn_now() - %(days)s * interval '1 day' - min(oldest.created_at)), 0)::float8
  FROM tenants AS t CROSS JOIN LATERAL (
    SELECT min(e.created_at) AS created_at FROM (
        SELECT tenant_id, id, type, body, created_at FROM events WHERE tenant_id = t.id AND {_OLD}
         ORDER BY created_at LIMIT %(looked_at)s) AS e
     WHERE NOT {_ANNOUNCES_WHAT_WAITS}
       AND NOT EXISTS (SELECT FROM event_deliveries AS d WHERE d.tenant_id = e.tenant_id AND d.event_id = e.id AND NOT ({_ENDED}))
  ) AS oldest
"""

_HOW_MANY: Final = f"""
WITH found AS MATERIALIZED (
    SELECT e.tenant_id, e.id, e.created_at, length(e.body) AS bytes FROM events AS e
     WHERE e.{_OLD} AND NOT {_ANNOUNCES_WHAT_WAITS}
       AND NOT EXISTS (SELECT FROM event_deliveries AS d WHERE d.tenant_id = e.tenant_id AND d.event_id = e.id AND NOT ({_ENDED}))
     LIMIT %(counted)s
)
SELECT (SELECT count(*) FROM found) AS rows, (SELECT coalesce(sum(bytes), 0)::bigint FROM found) AS bytes,
       (SELECT min(created_at) FROM found) AS oldest_at,
       (SELECT count(*) FROM found JOIN event_deliveries AS d ON d.tenant_id = found.tenant_id AND d.event_id = found.id) AS deliveries,
       (SELECT count(*) FROM (SELECT FROM events AS e WHERE e.{_OLD} LIMIT %(counted)s) AS old) AS old
"""


@dataclass(frozen=True, slots=True)
class EventsPast:
    """Events past their window that would be deleted, up to `COUNTED_MAX`, with their event deliveries and the bytes of their bodies.

    `kept` are those past it about which something is still to be done.
    """

    events: int
    event_deliveries: int
    size_bytes: int
    oldest_at: datetime | None
    kept: int


async def events_past(db: Database, windows: Windows) -> EventsPast:
    """What the pruner would delete now. Changes nothing."""
    async with db.autocommit("retention.events_past") as tx:
        row = await tx.one(dict, _HOW_MANY, {"days": windows.event_days, "counted": COUNTED_MAX})
    assert row is not None  # noqa: S101 - a SELECT without FROM gives a row
    return EventsPast(row["rows"], row["deliveries"], row["bytes"], row["oldest_at"], row["old"] - row["rows"])


async def overdue(db: Database, windows: Windows) -> tuple[list[Overdue], Past]:
    """How late the pruner is with each table, and the partitions that are past their time."""
    past = await old_partitions.past(db, windows)
    async with db.autocommit("retention.overdue") as tx:
        late = await tx.value(_OLDEST_THAT_CAN_GO, {"days": windows.event_days, "looked_at": LOOKED_AT_MAX})
    of_partitions = [Overdue(table, past.overdue_seconds(table, windows)) for table in PARTITIONED]
    return [*of_partitions, Overdue("events", max(0.0, late))], past
