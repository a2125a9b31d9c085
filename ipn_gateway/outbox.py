"""Staging: an event and one event delivery per subscribed endpoint, in the transaction of their cause.

Who is subscribed is fixed at that moment. An event that is there already (the same fact, in again after a loss) stages nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ipn_gateway import events, ids, money

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Transaction
    from ipn_gateway.decisions import LockedOrder
    from ipn_gateway.events import NewEvent

SUBSCRIBERS_MAX = 100
"""Endpoints of one tenant that one event can go to; bounds the length of the transaction."""


def wants(events_column: str, type_column: str) -> str:
    """SQL for whether the filter of an endpoint takes a type: all, the type by name, or a family that it belongs to."""
    return f"""EXISTS (SELECT FROM unnest({events_column}) AS wanted
                    WHERE wanted = '*' OR wanted = {type_column}
                       OR (right(wanted, 2) = '.*' AND starts_with({type_column}, left(wanted, -1))))"""


_STAGE = f"""
WITH given AS (
    SELECT * FROM unnest(%(ids)s::text[], %(types)s::text[], %(orders)s::text[], %(sequences)s::int[], %(bodies)s::bytea[])
             AS given (id, type, order_id, sequence, body)
), staged AS (
    INSERT INTO events (tenant_id, id, type, order_id, sequence, body)
    SELECT %(tenant_id)s, id, type, order_id, sequence, body FROM given
    ON CONFLICT ON CONSTRAINT events_pkey DO NOTHING
    RETURNING id, type, order_id, sequence
), subscribed AS (
    SELECT staged.id, staged.type, staged.order_id, staged.sequence, endpoints.id AS endpoint_id,
           row_number() OVER (ORDER BY staged.id, endpoints.id) AS place
      FROM staged JOIN endpoints ON endpoints.tenant_id = %(tenant_id)s AND endpoints.deleted_at IS NULL
                                AND endpoints.id IS DISTINCT FROM %(but_to)s::uuid
     WHERE {wants("endpoints.events", "staged.type")}
)
INSERT INTO event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, order_id, sequence, next_attempt_at)
SELECT %(tenant_id)s, (%(delivery_ids)s::uuid[])[place], id, endpoint_id, type, order_id, sequence,
       ipn_now() + %(first_wait)s * interval '1 second'
  FROM subscribed WHERE place <= cardinality(%(delivery_ids)s::uuid[])
"""


async def stage(
    tx: Transaction, clock: Clock, tenant_id: str, staged: Sequence[NewEvent], *, first_wait: float = 0, but_to: UUID | None = None
) -> int:
    """Insert events and their event deliveries; how many event deliveries were made. `first_wait` is in seconds.

    The endpoint `but_to` gets none, whatever it wants: the events are about it.
    """
    if not staged:
        return 0
    now = clock.now()
    return await tx.execute(
        _STAGE,
        {
            "tenant_id": tenant_id,
            "ids": [event.id for event in staged],
            "types": [event.type for event in staged],
            "orders": [event.order_id for event in staged],
            "sequences": [event.sequence for event in staged],
            "bodies": [event.body for event in staged],
            "delivery_ids": [ids.new(now) for _ in range(SUBSCRIBERS_MAX * len(staged))],
            "first_wait": first_wait,
            "but_to": but_to,
        },
    )


class Named(Protocol):
    """What the provider calls an operation, and the payment that it is about; None where it has no name for it."""

    @property
    def operation_id(self) -> str | None:
        """The operation's name."""

    @property
    def provider_transaction_id(self) -> str | None:
        """The payment's name."""


def order_event(
    order: LockedOrder,
    event_type: str,
    cause: tuple[str, ...],
    *,
    status: str,
    reason: str | None,
    verdict: Named | None = None,
) -> NewEvent:
    """The event of a change of a locked order, whose sums are those after it; `verdict` is what the provider confirmed."""
    data = events.OrderData(
        order_id=order.order_id,
        status=status,
        previous_status=order.status,
        reason=reason,
        amount=money.show(order.amount, order.currency),
        currency=order.currency,
        amount_paid=money.show(order.amount_paid, order.currency),
        amount_refunded=money.show(order.amount_refunded, order.currency),
        sequence=order.event_count + 1,
        source=order.source_id,
        operation_id=verdict.operation_id if verdict else None,
        provider_transaction_id=verdict.provider_transaction_id if verdict else None,
        metadata=order.metadata,
    )
    return events.new(ids.event_id(order.tenant_id, event_type, *cause), event_type, order.now, data)
