"""Claiming due work: which rows get the free slots, and the leases of notification deliveries. One statement each.

`fair_share` deals slots out: to the tenant with the fewest in flight, then to its source with the fewest, then to the oldest due row. A
source has a cap, and a tenant never holds more than its share, so that neither a long queue nor a provider that hangs starves others.
Proved deliveries are claimed as they become due. Those that prove nothing are claimed one a second and source, after the proved ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - field of a row
from typing import TYPE_CHECKING, Final
from uuid import UUID  # noqa: TC003 - field of a row

from ipn_gateway import source_states
from ipn_gateway.outcomes import Claimed
from ipn_gateway.providers.base import InboundRequest

if TYPE_CHECKING:
    from ipn_gateway.db import Database

IN_FLIGHT_PER_SOURCE: Final = 16  # questions at once, of each process
LEASED_PER_SOURCE: Final = 64  # deliveries being worked on; more than are asked about at once, so that sets are worth their statements
LEASED_PER_TENANT: Final = 256
UNPROVED_SECONDS: Final = 1.0
UNPROVED_IN_FLIGHT: Final = 4  # of a source, beyond its cap: a long queue of proved ones does not keep them waiting for ever


@dataclass(frozen=True, slots=True)
class Row:
    """A claimed row of the inbox with the bytes of its delivery."""

    tenant_id: str
    notification_delivery_id: UUID
    source_id: str
    fence: int
    proved: bool
    questions: int
    asked: int
    refuted: int
    age_seconds: float
    parking_over: bool
    unknown_streak: int
    refuted_streak: int
    via: str
    copy_id: str | None
    query: str
    headers: list[list[str]]
    raw_body: bytes
    received_at: datetime
    now: datetime
    unproved_waits: bool  # whether the inbox has any open delivery that proves nothing

    def claimed(self, *, questions: int = 0) -> Claimed:
        """The lease, with so many more questions asked."""
        return Claimed(self.tenant_id, self.notification_delivery_id, self.source_id, self.fence, self.questions + questions)

    def request(self) -> InboundRequest:
        """The request as it was received."""
        return InboundRequest.stored(self.via, self.query, self.headers, self.raw_body)


_LEASE = """
, leased AS (
    UPDATE inbox SET lease_expires_at = ipn_now() + %(lease)s * interval '1 second', fence = inbox.fence + 1
      FROM due
     WHERE inbox.tenant_id = due.tenant_id AND inbox.notification_delivery_id = due.notification_delivery_id
    RETURNING inbox.*
)
SELECT l.tenant_id, l.notification_delivery_id, l.source_id, l.fence, l.proved, l.questions, l.asked, l.refuted,
       extract(epoch FROM ipn_now() - l.received_at)::float8 AS age_seconds,
       coalesce(l.parked_at + %(parking)s * interval '1 hour' <= ipn_now(), false) AS parking_over,
       coalesce(s.unknown_streak, 0) AS unknown_streak, coalesce(s.refuted_streak, 0) AS refuted_streak,
       d.via, d.copy_id, d.query, d.headers, d.raw_body, d.received_at, ipn_now() AS now,
       (SELECT i.due_at FROM inbox AS i WHERE NOT i.proved AND i.due_at IS NOT NULL
         ORDER BY i.source_id, i.due_at LIMIT 1) IS NOT NULL AS unproved_waits
  FROM leased l
  JOIN notification_deliveries d ON d.tenant_id = l.tenant_id AND d.id = l.notification_delivery_id
  LEFT JOIN source_states s ON s.source_id = l.source_id
"""

# Sources with work, and sources with leases, are found by jumping through their indexes from one source to the next: the cost is by source,
# however much is due. A source counts only with a row that can be taken now, so that none takes up a place and uses no slot. LATERAL and
# LIMIT keep the plans at index look-ups, also while statistics are missing. What LIMIT cuts has an order everywhere. Two that claim at
# once choose the same rows, and one of them passes over what the other has locked: together they stay within the caps.
_RANKED = """
WITH RECURSIVE holding AS (
    (SELECT tenant_id, source_id FROM {table} WHERE lease_expires_at IS NOT NULL ORDER BY source_id, lease_expires_at LIMIT 1)
    UNION ALL
    SELECT following.* FROM holding CROSS JOIN LATERAL (
        SELECT tenant_id, source_id FROM {table} WHERE lease_expires_at IS NOT NULL AND source_id > holding.source_id
         ORDER BY source_id, lease_expires_at LIMIT 1) AS following
), held AS (
    SELECT holding.tenant_id, holding.source_id, leased.count FROM holding CROSS JOIN LATERAL (
        SELECT count(*) FROM (
            SELECT FROM {table} AS i WHERE i.source_id = holding.source_id AND i.lease_expires_at > ipn_now()
             ORDER BY i.lease_expires_at LIMIT %(per_tenant)s) AS first) AS leased
), held_by_tenant AS (
    SELECT tenant_id, sum(count) AS count FROM held GROUP BY tenant_id
), working AS (
    (SELECT tenant_id, source_id, due_at FROM {table} AS i WHERE {which} AND due_at IS NOT NULL ORDER BY source_id, due_at LIMIT 1)
    UNION ALL
    SELECT following.* FROM working CROSS JOIN LATERAL (
        SELECT tenant_id, source_id, due_at FROM {table} AS i WHERE {which} AND due_at IS NOT NULL AND source_id > working.source_id
         ORDER BY source_id, due_at LIMIT 1) AS following
), counted AS (
    SELECT w.tenant_id, w.source_id, coalesce(t.count, 0) AS of_tenant, coalesce(h.count, 0) AS in_flight,
           CASE WHEN coalesce(s.unknown_streak, 0) < %(probing_from)s THEN %(per_source)s + {spare}
                WHEN s.probe_at IS NULL OR s.probe_at <= ipn_now() THEN 1 ELSE 0 END - coalesce(h.count, 0) AS free
      FROM working w
      LEFT JOIN held h ON h.source_id = w.source_id
      LEFT JOIN held_by_tenant t ON t.tenant_id = w.tenant_id
      LEFT JOIN source_states s ON s.source_id = w.source_id
     WHERE w.due_at <= ipn_now() AND {only}
), ranked AS (
    SELECT c.*, oldest.due_at, c.of_tenant + row_number() OVER (
               PARTITION BY c.tenant_id ORDER BY c.in_flight, oldest.due_at, c.source_id) AS place
      FROM counted c CROSS JOIN LATERAL (
        SELECT i.due_at FROM {table} AS i
         WHERE i.source_id = c.source_id AND {which} AND i.due_at <= ipn_now()
           AND (i.lease_expires_at IS NULL OR i.lease_expires_at <= ipn_now())
         ORDER BY i.due_at LIMIT 1) AS oldest
     WHERE c.free > 0
), served AS (
    SELECT * FROM ranked WHERE place <= %(per_tenant)s ORDER BY place, in_flight, due_at, source_id LIMIT %(limit)s
)"""

_DEALT = """, candidates AS (
    SELECT served.tenant_id, own.{key}, own.due_at, served.of_tenant, served.in_flight + own.number AS nth
      FROM served CROSS JOIN LATERAL (
        SELECT first.*, row_number() OVER (ORDER BY first.due_at, first.{key}) AS number FROM (
            SELECT i.{key}, i.due_at FROM {table} AS i
             WHERE i.source_id = served.source_id AND {which} AND i.due_at <= ipn_now()
               AND (i.lease_expires_at IS NULL OR i.lease_expires_at <= ipn_now())
             ORDER BY i.due_at LIMIT least(served.free, %(limit)s)) AS first) AS own
), dealt AS (
    SELECT tenant_id, {key}, nth, due_at, of_tenant + row_number() OVER (PARTITION BY tenant_id ORDER BY nth, due_at, {key}) AS place
      FROM candidates
), chosen AS (
    SELECT tenant_id, {key} FROM dealt WHERE place <= %(per_tenant)s ORDER BY place, nth, due_at, {key} LIMIT %(limit)s
), due AS (
    SELECT locked.* FROM chosen CROSS JOIN LATERAL (
        SELECT i.tenant_id, i.{key} FROM {table} AS i
         WHERE i.tenant_id = chosen.tenant_id AND i.{key} = chosen.{key} AND i.due_at <= ipn_now()
           AND (i.lease_expires_at IS NULL OR i.lease_expires_at <= ipn_now())
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS locked
)
"""


def fair_share(table: str, key: str, *, which: str = "true") -> str:
    """The CTEs of a claim that end in `due`: tenant_id and `key` of at most `%(limit)s` due rows, locked. For constant texts only.

    `table` has tenant_id, source_id, due_at and lease_expires_at, an index on (source_id, due_at) of the rows `which`, called `i`, and one
    on (source_id, lease_expires_at) of the leased ones. Takes the parameters limit, per_source, per_tenant and probing_from too.
    """
    return (_RANKED + _DEALT).format(table=table, key=key, which=which, only="true", spare=0)


_PROVED = fair_share("inbox", "notification_delivery_id", which="i.proved")

_UNPROVED = (
    _RANKED.format(
        table="inbox", which="NOT i.proved", only="(s.unproved_at IS NULL OR s.unproved_at <= ipn_now())", spare=UNPROVED_IN_FLIGHT
    )
    + """, budget AS (
    INSERT INTO source_states (source_id, unproved_at)
    SELECT source_id, ipn_now() + %(unproved)s * interval '1 second' FROM served ORDER BY source_id
    ON CONFLICT ON CONSTRAINT source_states_pkey DO UPDATE SET unproved_at = excluded.unproved_at
     WHERE source_states.unproved_at IS NULL OR source_states.unproved_at <= ipn_now()
    RETURNING source_id
), due AS (
    SELECT picked.tenant_id, picked.notification_delivery_id
      FROM budget CROSS JOIN LATERAL (
        SELECT i.tenant_id, i.notification_delivery_id FROM inbox i
         WHERE i.source_id = budget.source_id AND NOT i.proved AND i.due_at <= ipn_now()
           AND (i.lease_expires_at IS NULL OR i.lease_expires_at <= ipn_now())
         ORDER BY i.due_at LIMIT 1 FOR UPDATE SKIP LOCKED
      ) AS picked
)
"""
)


async def proved(db: Database, *, limit: int, lease_seconds: float, parking_hours: float) -> list[Row]:
    """Claim at most `limit` due deliveries whose local proof held. `parking_hours` tells which have waited long enough for their order."""
    return await _claim(db, "inbox.claim", _PROVED, limit, lease_seconds, parking_hours)


async def unproved(db: Database, *, limit: int, lease_seconds: float, parking_hours: float) -> list[Row]:
    """Claim one due delivery that proves nothing for each source whose second is over, at most `limit`."""
    return await _claim(db, "inbox.claim_unproved", _UNPROVED, limit, lease_seconds, parking_hours)


async def _claim(db: Database, name: str, due: str, limit: int, lease_seconds: float, parking_hours: float) -> list[Row]:  # noqa: PLR0917
    if limit <= 0:
        return []
    parameters = {
        "limit": limit,
        "lease": lease_seconds,
        "parking": parking_hours,
        "per_source": LEASED_PER_SOURCE,
        "per_tenant": LEASED_PER_TENANT,
        "probing_from": source_states.PROBING_FROM,
        "unproved": UNPROVED_SECONDS,
    }
    async with db.transaction(name) as tx:
        return await tx.all(Row, due + _LEASE, parameters)
