"""Staging: an event and one event delivery per subscribed endpoint, in the transaction of their cause.

Who is subscribed is fixed at that moment. An event that is there already (the same fact, in again after a loss) stages nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ipn_gateway import columns, endpoints, events, ids, money

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Transaction
    from ipn_gateway.decisions import LockedOrder
    from ipn_gateway.events import NewEvent

SUBSCRIBERS_MAX = endpoints.ENDPOINTS_MAX
"""Endpoints that one event can go to: all of a tenant's."""


def wants(events_column: str, type_column: str) -> str:
    """SQL for whether the filter of an endpoint takes a type: all, the type by name, or a family that it belongs to."""
    return f"""EXISTS (SELECT FROM unnest({events_column}) AS wanted
                    WHERE wanted = '*' OR wanted = {type_column}
                       OR (right(wanted, 2) = '.*' AND starts_with({type_column}, left(wanted, -1))))"""


# The last twelve digits of a delivery's id come from the endpoint, so that one new id an event is enough for all of its deliveries.
_STAGE = f"""
WITH given AS (
    SELECT * FROM {columns.given(tenant_id="text", id="text", type="text", order_id="text", sequence="int", body="bytea", new_id="uuid")}
), staged AS (
    INSERT INTO events (tenant_id, id, type, order_id, sequence, body)
    SELECT tenant_id, id, type, order_id, sequence, body FROM given
    ON CONFLICT ON CONSTRAINT events_pkey DO NOTHING
    RETURNING tenant_id, id, type, order_id, sequence
), subscribed AS (
    SELECT staged.*, given.new_id::text AS new_id, endpoints.id AS endpoint_id,
           row_number() OVER (PARTITION BY staged.tenant_id, staged.id ORDER BY endpoints.id) AS place
      FROM staged
      JOIN given ON given.tenant_id = staged.tenant_id AND given.id = staged.id
      JOIN endpoints ON endpoints.tenant_id = staged.tenant_id AND endpoints.deleted_at IS NULL
                    AND endpoints.id IS DISTINCT FROM %(but_to)s::uuid
     WHERE {wants("endpoints.events", "staged.type")}
)
INSERT INTO event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, order_id, sequence, next_attempt_at)
SELECT tenant_id, overlay(new_id PLACING left(md5(new_id || endpoint_id::text), 12) FROM 25)::uuid, id, endpoint_id, type, order_id,
       sequence, ipn_now() + %(first_wait)s * interval '1 second'
  FROM subscribed WHERE place <= {SUBSCRIBERS_MAX}
"""


async def stage(
    tx: Transaction, clock: Clock, tenant_id: str, staged: Sequence[NewEvent], *, first_wait: float = 0, but_to: UUID | None = None
) -> int:
    """Insert events and their event deliveries; how many event deliveries were made. `first_wait` is in seconds.

    The endpoint `but_to` gets none, whatever it wants: the events are about it.
    """
    return await stage_all(tx, clock, [(tenant_id, event) for event in staged], first_wait=first_wait, but_to=but_to)


async def stage_all(
    tx: Transaction, clock: Clock, staged: Sequence[tuple[str, NewEvent]], *, first_wait: float = 0, but_to: UUID | None = None
) -> int:
    """The same for events of several tenants, each with its own. The same event twice is one."""
    now = clock.now()
    rows = {
        (tenant_id, event.id): {
            "tenant_id": tenant_id,
            "id": event.id,
            "type": event.type,
            "order_id": event.order_id,
            "sequence": event.sequence,
            "body": event.body,
            "new_id": ids.new(now),
        }
        for tenant_id, event in staged
    }
    if not rows:
        return 0
    return await tx.execute(_STAGE, columns.arrays(list(rows.values())) | {"first_wait": first_wait, "but_to": but_to})


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
    previous_status: str | None = None,
    verdict: Named | None = None,
) -> NewEvent:
    """The event of a change of a locked order, whose sums are those after it; `verdict` is what the provider confirmed.

    Without `previous_status` it is that of `order`.
    """
    data = events.OrderData(
        order_id=order.order_id,
        status=status,
        previous_status=previous_status or order.status,
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
