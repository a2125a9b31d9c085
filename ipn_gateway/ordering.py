"""Ordered endpoints: an order's events go out one by one, in their sequence.

An event that comes after one that is still pending is held back: it is not due before that one's next attempt, and is due again as soon as
that one has ended (delivered or dead). So what is due stays short of what cannot go out yet, and other orders are not held up, however
long one waits. A redelivery goes out of turn, but never beside another attempt of its order. Events without a sequence are not ordered.

Holding back and letting go happen under the endpoint's lock, so neither misses the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from ipn_gateway.db import Transaction

HELD_BACK_MAX: Final = 200
"""So many of an endpoint's oldest due event deliveries are looked at together."""

ROUNDS_MAX: Final = 10
"""How often that is done within one claim while most of them have to be held back."""

# The first pending event of an order, or of a later one when it has none. Compared as a row and sorted so that, whatever the statistics
# say, it is one look at `event_deliveries_sequence_idx`.
_FIRST_PENDING: Final = """
SELECT {columns} FROM event_deliveries AS h
 WHERE h.status = 'pending' AND h.sequence IS NOT NULL
   AND (h.tenant_id, h.endpoint_id, h.order_id, h.sequence) >= ({endpoint}.tenant_id, {endpoint}.endpoint_id, {order}.order_id, 0)
 ORDER BY h.tenant_id, h.endpoint_id, h.order_id, h.sequence LIMIT 1
"""

# What comes first is asked first: then only one event of an order is looked at beside all others of it.
ITS_TURN: Final = f"""
(first.next_trigger = 'redelivery' OR first.sequence = ({_FIRST_PENDING.format(columns="h.sequence", endpoint="chosen", order="first")}))
AND NOT EXISTS (
    SELECT FROM event_deliveries AS o
     WHERE o.tenant_id = chosen.tenant_id AND o.order_id = first.order_id AND o.endpoint_id = chosen.endpoint_id
       AND o.sequence IS NOT NULL AND o.id <> first.id
       AND (o.lease_expires_at > ipn_now()
            OR (o.next_trigger = 'redelivery' AND o.next_attempt_at <= ipn_now()
                AND (first.next_trigger <> 'redelivery' OR o.sequence < first.sequence))))
"""
"""Whether the row `first` of the endpoint `chosen` may be claimed now: none of its order is being sent, and none comes before it."""

# One that was tried before had its turn once, and only an act of a person put another one before it again: it waits a lease's time only.
_HOLD_BACK: Final = f"""
WITH chosen AS (
    SELECT * FROM unnest(%(tenant_ids)s::text[], %(endpoint_ids)s::uuid[]) AS chosen (tenant_id, endpoint_id)
), behind AS MATERIALIZED (
    SELECT chosen.tenant_id, late.id,
           CASE WHEN late.attempt_count = 0 THEN greatest(head.lease_expires_at, head.next_attempt_at, ipn_now() + held.back)
                ELSE ipn_now() + held.back END AS until
      FROM chosen CROSS JOIN (SELECT %(lease_seconds)s * interval '1 second' AS back) AS held
     CROSS JOIN LATERAL (
        SELECT id, order_id, sequence, status, attempt_count, next_trigger, lease_expires_at FROM event_deliveries AS d
         WHERE d.tenant_id = chosen.tenant_id AND d.endpoint_id = chosen.endpoint_id AND d.next_attempt_at <= ipn_now()
         ORDER BY d.next_attempt_at LIMIT %(looked_at)s
      ) AS late CROSS JOIN LATERAL (
        {_FIRST_PENDING.format(columns="sequence, next_attempt_at, lease_expires_at", endpoint="chosen", order="late")}
      ) AS head CROSS JOIN LATERAL (
        SELECT FROM event_deliveries AS d
         WHERE d.tenant_id = chosen.tenant_id AND d.id = late.id AND d.next_attempt_at <= ipn_now()
         LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
      ) AS free
     WHERE late.status = 'pending' AND late.sequence > 1 AND late.sequence > head.sequence AND late.next_trigger <> 'redelivery'
       AND (late.lease_expires_at IS NULL OR late.lease_expires_at <= ipn_now())
)
UPDATE event_deliveries AS d SET next_attempt_at = behind.until FROM behind WHERE d.tenant_id = behind.tenant_id AND d.id = behind.id
"""

_LET_GO: Final = f"""
WITH ended AS MATERIALIZED (
    SELECT DISTINCT d.tenant_id, d.endpoint_id, d.order_id
      FROM unnest(%(tenant_ids)s::text[], %(ids)s::uuid[]) AS given (tenant_id, id)
      JOIN event_deliveries AS d ON d.tenant_id = given.tenant_id AND d.id = given.id
     WHERE d.status <> 'pending' AND d.sequence IS NOT NULL
), head AS MATERIALIZED (
    SELECT ended.tenant_id, first.id FROM ended CROSS JOIN LATERAL (
        {_FIRST_PENDING.format(columns="id, tenant_id, endpoint_id, order_id", endpoint="ended", order="ended")}) AS first
     WHERE (first.tenant_id, first.endpoint_id, first.order_id) = (ended.tenant_id, ended.endpoint_id, ended.order_id)
)
UPDATE event_deliveries AS d SET next_attempt_at = created_at
  FROM head WHERE d.tenant_id = head.tenant_id AND d.id = head.id AND d.attempt_count = 0 AND d.next_attempt_at > ipn_now()
"""


async def hold_back(tx: Transaction, chosen: Sequence[tuple[str, UUID]], *, lease_seconds: float) -> int:
    """Put off what is due at these endpoints (tenant and id, locked) and comes after a pending event of its order; how many."""
    given = {
        "tenant_ids": [tenant_id for tenant_id, _ in chosen],
        "endpoint_ids": [endpoint_id for _, endpoint_id in chosen],
        "looked_at": HELD_BACK_MAX,
        "lease_seconds": lease_seconds,
    }
    total = 0
    for _ in range(ROUNDS_MAX):
        total += (held_back := await tx.execute(_HOLD_BACK, given))
        if held_back < HELD_BACK_MAX / 2:
            break
    return total


async def let_go(tx: Transaction, deliveries: Sequence[tuple[str, UUID]]) -> int:
    """Make due what waited for these event deliveries (tenant and id) and may go now; how many. Their endpoints are locked."""
    given = {"tenant_ids": [tenant_id for tenant_id, _ in deliveries], "ids": [delivery_id for _, delivery_id in deliveries]}
    return await tx.execute(_LET_GO, given)
