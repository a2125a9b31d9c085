"""Claiming due notification deliveries: a lease and a higher fence, a cap for each source, in one statement.

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

IN_FLIGHT_PER_SOURCE: Final = 16
UNPROVED_SECONDS: Final = 1.0


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
    query: str
    headers: list[list[str]]
    raw_body: bytes
    now: datetime

    def claimed(self, *, questions: int = 0) -> Claimed:
        """The lease, with so many more questions asked."""
        return Claimed(self.tenant_id, self.notification_delivery_id, self.source_id, self.fence, self.questions + questions)

    def request(self) -> InboundRequest:
        """The request as it was received."""
        return InboundRequest("POST", self.query, tuple((name, value) for name, value in self.headers), self.raw_body)


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
       d.via, d.query, d.headers, d.raw_body, ipn_now() AS now
  FROM leased l
  JOIN notification_deliveries d ON d.tenant_id = l.tenant_id AND d.id = l.notification_delivery_id
  LEFT JOIN source_states s ON s.source_id = l.source_id
"""

# The sources with proved work are found by jumping through the index, however much is due; each has its own cap, and a free slot goes to
# the one with the fewest in flight, so that no long queue starves another source.
_PROVED = """
WITH RECURSIVE working AS (
    (SELECT source_id FROM inbox WHERE proved AND due_at IS NOT NULL ORDER BY source_id LIMIT 1)
    UNION ALL
    SELECT (SELECT i.source_id FROM inbox i WHERE i.proved AND i.due_at IS NOT NULL AND i.source_id > w.source_id
             ORDER BY i.source_id LIMIT 1)
      FROM working w WHERE w.source_id IS NOT NULL
), caps AS (
    SELECT w.source_id, leased.count AS in_flight,
           CASE WHEN coalesce(s.unknown_streak, 0) < %(probing_from)s THEN %(per_source)s
                WHEN s.probe_at IS NULL OR s.probe_at <= ipn_now() THEN 1 ELSE 0 END - leased.count AS free
      FROM working w LEFT JOIN source_states s ON s.source_id = w.source_id CROSS JOIN LATERAL (
        SELECT count(*) FROM inbox i WHERE i.source_id = w.source_id AND i.proved AND i.lease_expires_at IS NOT NULL
           AND i.lease_expires_at > ipn_now()) AS leased
     WHERE w.source_id IS NOT NULL
     ORDER BY in_flight
), due AS (
    SELECT picked.tenant_id, picked.notification_delivery_id
      FROM caps CROSS JOIN LATERAL (
        SELECT i.tenant_id, i.notification_delivery_id, i.due_at FROM inbox i
         WHERE i.source_id = caps.source_id AND i.proved AND i.due_at <= ipn_now()
           AND (i.lease_expires_at IS NULL OR i.lease_expires_at <= ipn_now())
         ORDER BY i.due_at LIMIT greatest(caps.free, 0) FOR UPDATE SKIP LOCKED
      ) AS picked
     LIMIT %(limit)s
)
"""

_UNPROVED = """
WITH waiting AS (
    SELECT DISTINCT source_id FROM inbox i LEFT JOIN source_states s USING (source_id)
     WHERE NOT i.proved AND i.due_at <= ipn_now() AND (s.unproved_at IS NULL OR s.unproved_at <= ipn_now())
     LIMIT %(limit)s
), budget AS (
    INSERT INTO source_states (source_id, unproved_at)
    SELECT source_id, ipn_now() + %(unproved)s * interval '1 second' FROM waiting ORDER BY source_id
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
        "per_source": IN_FLIGHT_PER_SOURCE,
        "probing_from": source_states.PROBING_FROM,
        "unproved": UNPROVED_SECONDS,
    }
    async with db.transaction(name) as tx:
        return await tx.all(Row, due + _LEASE, parameters)
