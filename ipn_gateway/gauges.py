"""What is late, what is stuck and what runs out, read from the database for monitoring.

Late is what is past its due time: work that waits for its next attempt on a schedule is not. Work under a lease counts, so that what is
taken again and again without an end shows. No count is by tenant, and none goes on beyond `COUNT_MAX`, so that reading stays cheap
while the tables are large: each is found through an index, by source, endpoint or tenant.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg

from ipn_gateway import logs, pruning, retention
from ipn_gateway.errors import GatewayError
from ipn_gateway.event_log import HORIZON

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.db import Database
    from ipn_gateway.retention import Windows

COUNT_MAX: Final = 100_000
READ_SECONDS_MAX: Final = 2.0


@dataclass(frozen=True, slots=True)
class Gauge:
    """What a gauge means; `label` is the name of its label, if it has one."""

    meaning: str
    label: str | None = None


CATALOGUE: Final[Mapping[str, Gauge]] = {
    "database_up": Gauge("1 when the database answered, 0 when not; then the gauges below are missing, not zero"),
    "past_due_rows": Gauge(f"open work whose due time is past, up to {COUNT_MAX}; not of disabled endpoints", "work"),
    "past_due_oldest_seconds": Gauge("for how long the oldest of it has been due", "work"),
    "events_pull_lag_seconds": Gauge(
        "how old the oldest event is that the pull cannot show yet, because a transaction that began before it still writes on the server"
    ),
    "partitions_ahead_days": Gauge("for how many days from now on notifications and attempts have partitions"),
    "retention_overdue_seconds": Gauge("for how long the oldest that retention can take of a table could have been gone", "table"),
    "retention_kept_partitions": Gauge("partitions past their time that are kept because a notification in them still waits", "table"),
    "idempotency_keys_open": Gauge(f"keys without an answer yet, up to {COUNT_MAX}", "state"),
    "idempotency_keys_abandoned": Gauge("of those in progress, the ones whose lease is over; the next repeat takes them over"),
    "idempotency_keys_indeterminate_oldest_seconds": Gauge("how long ago the oldest of the indeterminate ones became that"),
    "notifications_open": Gauge(f"notifications that wait for their order (parked) or for a person, together up to {COUNT_MAX}", "state"),
}
"""Every gauge that is read here."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a gauge; of one of them, when it has a label."""

    gauge: str
    label: str | None
    value: float


# ORDER BY beside LIMIT keeps each look at the first entries of one index, whatever the statistics say.
_LATE: Final = """
SELECT 'past_due_rows' AS gauge, '{work}' AS label, count(*)::float8 AS value FROM (
    SELECT FROM {owners} CROSS JOIN LATERAL (
        SELECT FROM {rows} AND {due} <= ipn_now() ORDER BY {due} LIMIT %(most)s) AS late LIMIT %(most)s) AS counted
UNION ALL
SELECT 'past_due_oldest_seconds', '{work}', coalesce(extract(epoch FROM ipn_now() - min(first.due)), 0)::float8
  FROM {owners} CROSS JOIN LATERAL (SELECT {due} AS due FROM {rows} AND {due} <= ipn_now() ORDER BY {due} LIMIT 1) AS first
"""

_WORK: Final = (
    ("inbox", "sources AS s", "inbox AS i WHERE i.source_id = s.name AND i.proved", "i.due_at"),
    ("inbox_unproved", "sources AS s", "inbox AS i WHERE i.source_id = s.name AND NOT i.proved", "i.due_at"),
    ("sweeps", "sources AS s", "sweeps AS i WHERE i.source_id = s.name", "i.due_at"),
    (
        "event_deliveries",
        "(SELECT tenant_id, id FROM endpoints WHERE status = 'enabled' AND deleted_at IS NULL) AS e",
        "event_deliveries AS d WHERE d.tenant_id = e.tenant_id AND d.endpoint_id = e.id",
        "d.next_attempt_at",
    ),
    ("refunds", "(VALUES (true)) AS every", "refunds AS r WHERE true", "r.due_at"),
)

_KEYS: Final = """
WITH indeterminate AS MATERIALIZED (
    SELECT own.indeterminate_at FROM tenants AS t CROSS JOIN LATERAL (
        SELECT i.indeterminate_at FROM idempotency_keys AS i WHERE i.tenant_id = t.id AND i.state = 'indeterminate' LIMIT %(most)s) AS own
     LIMIT %(most)s
)
SELECT 'idempotency_keys_open' AS gauge, 'in_progress' AS label, count(*)::float8 AS value FROM (
    SELECT FROM idempotency_keys WHERE state = 'in_progress' ORDER BY lease_expires_at LIMIT %(most)s) AS counted
UNION ALL
SELECT 'idempotency_keys_open', 'indeterminate', count(*)::float8 FROM indeterminate
UNION ALL
SELECT 'idempotency_keys_abandoned', NULL, count(*)::float8 FROM (
    SELECT FROM idempotency_keys
     WHERE state = 'in_progress' AND lease_expires_at <= ipn_now() AND NOT (recovery_point = 'started' AND generation > 0)
     ORDER BY lease_expires_at LIMIT %(most)s) AS counted
UNION ALL
SELECT 'idempotency_keys_indeterminate_oldest_seconds', NULL, coalesce(extract(epoch FROM ipn_now() - min(indeterminate_at)), 0)::float8
  FROM indeterminate
"""

_OPEN: Final = """
WITH waiting AS MATERIALIZED (
    (SELECT state FROM inbox WHERE state = 'parked' LIMIT %(most)s)
    UNION ALL
    (SELECT state FROM inbox WHERE state IN ('held', 'conflict', 'dead') AND due_at IS NULL LIMIT %(most)s)
)
SELECT 'notifications_open' AS gauge, s.state AS label, (SELECT count(*) FROM waiting WHERE waiting.state = s.state)::float8 AS value
  FROM (VALUES ('parked'), ('held'), ('conflict'), ('dead')) AS s (state)
"""

_PULL: Final = f"""
SELECT 'events_pull_lag_seconds' AS gauge, NULL AS label,
       greatest(0, extract(epoch FROM ipn_now() - min(hidden.created_at)))::float8 AS value
  FROM tenants AS t CROSS JOIN LATERAL (
    SELECT e.created_at FROM events AS e WHERE e.tenant_id = t.id AND e.position >= {HORIZON} ORDER BY e.position, e.id LIMIT 1) AS hidden
"""

_LATE_OF_ALL: Final = "UNION ALL".join(_LATE.format(work=work, owners=owners, rows=rows, due=due) for work, owners, rows, due in _WORK)


async def read(db: Database, windows: Windows | None = None) -> list[Reading]:
    """All gauges, within two seconds; those of retention only with its `windows`.

    Those that could not be read by then are missing; a database that is away raises nothing.
    """
    found: list[Reading] = []
    try:
        async with asyncio.timeout(READ_SECONDS_MAX):
            async with db.autocommit("gauges.read", seconds_max=2 * READ_SECONDS_MAX) as tx:
                for statement in (_LATE_OF_ALL, _KEYS, _OPEN, _PULL):
                    found += await tx.all(Reading, statement, {"most": COUNT_MAX})
            found.append(Reading("partitions_ahead_days", None, await retention.days_ahead(db)))
            if windows:
                found += await _retention(db, windows)
    except (psycopg.Error, GatewayError, TimeoutError) as error:
        logs.count("gauges.not_read")
        logs.get("gauges").warning("gauges.not_read", error_class=type(error).__name__, read=len(found))
    return [Reading("database_up", None, float(bool(found))), *found]


async def _retention(db: Database, windows: Windows) -> list[Reading]:
    late, past = await pruning.overdue(db, windows)
    kept = [partition.table for partition in past.kept]
    return [
        *(Reading("retention_overdue_seconds", each.table, each.seconds) for each in late),
        Reading("retention_kept_partitions", "notification_deliveries", float(len(kept))),
    ]
