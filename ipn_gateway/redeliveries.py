"""Redelivery: a person asks for one more attempt of an event delivery, whatever became of it. Same event id, same bytes.

Who asked and why is in the audit log each time, also where an attempt that was there already is the answer.

What is delivered stays delivered, also when the new attempt fails. What is dead is pending again: another failure makes it dead again.
What is pending keeps its place on the schedule, and its next attempt on it the time that it had, however many redeliveries fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID  # noqa: TC003 - field of a row

from ipn_gateway import attempts, audit, ids, logs
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.operations import Downstream, Operation
from ipn_gateway.states import EventDeliveryStatus

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction


REDELIVER: Final = Operation(
    name="POST /v1/event-deliveries/{delivery_id}/redeliver", fields={"reason": "json"}, downstream=Downstream.LOCAL
)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """An event delivery, and whether an attempt of it is running."""

    endpoint_id: UUID
    event_id: str
    status: str
    in_flight: bool


async def redeliver(db: Database, tenant_id: str, delivery_id: UUID, *, actor: str, reason: str | None = None) -> None:
    """Make an event delivery due now; while an attempt runs, after it. Asked twice before an attempt, it is one attempt.

    Raises `NotFound`, and `StateConflict` when the event delivery is cancelled, or its endpoint disabled or deleted.
    """

    async def once() -> None:
        async with db.transaction("event_deliveries.redeliver") as tx:
            await redeliver_in(tx, db.clock, tenant_id, delivery_id, actor=actor, reason=reason)

    await db.rerun(once)


async def redeliver_in(tx: Transaction, clock: Clock, tenant_id: str, delivery_id: UUID, *, actor: str, reason: str | None) -> None:
    """The same as part of a transaction."""
    delivery = await _lock(tx, tenant_id, delivery_id)
    if delivery.status == EventDeliveryStatus.CANCELLED:
        raise StateConflict("This event delivery was cancelled with its endpoint; it is never sent again.")
    made_due = await (_make_next if delivery.in_flight else _make_due)(tx, tenant_id, delivery_id)
    shown = ids.show(ids.EVENT_DELIVERY, delivery_id)
    details = {"event_id": delivery.event_id, "status": delivery.status}
    if not made_due:
        details["answered_by"] = "the redelivery that was asked for before"
    await audit.record(
        tx, tenant_id, actor=actor, action="event_delivery.redeliver", target=shown, now=clock.now(), reason=reason, details=details
    )
    logs.get("event_deliveries").info(
        "event_delivery.redelivery_asked", event_delivery_id=shown, event_id=delivery.event_id, status=delivery.status, actor=actor
    )


async def _lock(tx: Transaction, tenant_id: str, delivery_id: UUID) -> _Delivery:
    """The event delivery, locked, and before it its endpoint against being deleted: in the order that deleting one takes."""
    key = {"tenant_id": tenant_id, "id": delivery_id}
    endpoint = await tx.one(
        dict,
        """SELECT e.status, e.deleted_at IS NOT NULL AS deleted FROM event_deliveries AS d
             JOIN endpoints AS e ON e.tenant_id = d.tenant_id AND e.id = d.endpoint_id
            WHERE d.tenant_id = %(tenant_id)s AND d.id = %(id)s FOR KEY SHARE OF e""",
        key,
    )
    delivery = await tx.one(
        _Delivery,
        """SELECT endpoint_id, event_id, status, coalesce(lease_expires_at > ipn_now(), false) AS in_flight FROM event_deliveries
            WHERE tenant_id = %(tenant_id)s AND id = %(id)s FOR UPDATE""",
        key,
    )
    if delivery is None:
        raise NotFound
    if endpoint is None or endpoint["deleted"]:
        raise StateConflict("The endpoint was deleted; nothing is sent to it any more.")
    if endpoint["status"] == "disabled":
        raise StateConflict("The endpoint is disabled: enable it, and what waits is sent.")
    return delivery


async def _make_next(tx: Transaction, tenant_id: str, delivery_id: UUID) -> bool:
    """Whether it was not asked for already during the attempt that is running: recording that one makes it due."""
    changed = await tx.execute(
        "UPDATE event_deliveries SET asked_again = true WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND NOT asked_again",
        {"tenant_id": tenant_id, "id": delivery_id},
    )
    return changed > 0


async def _make_due(tx: Transaction, tenant_id: str, delivery_id: UUID) -> bool:
    """Whether it was not asked for already: one that is still to come stays the one attempt. It comes before all that is due."""
    changed = await tx.execute(
        f"""UPDATE event_deliveries AS d
              SET status = CASE WHEN status = 'delivered' THEN status ELSE 'pending' END,
                  scheduled_at = CASE WHEN status = 'pending' THEN next_attempt_at END,
                  next_trigger = 'redelivery', asked_again = false, lease_expires_at = NULL, next_attempt_at = {attempts.BEFORE_ALL_DUE}
            WHERE tenant_id = %(tenant_id)s AND id = %(id)s
              AND NOT (next_trigger = 'redelivery' AND next_attempt_at IS NOT NULL AND next_attempt_at <= ipn_now())""",
        {"tenant_id": tenant_id, "id": delivery_id},
    )
    return changed > 0
