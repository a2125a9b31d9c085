"""How a notification delivery ends: decided once, only under a lease that still holds, and announced when a person is needed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from psycopg.types.json import Jsonb

from ipn_gateway import audit, columns, confirmations, events, ids, logs, money
from ipn_gateway.errors import LeaseLost
from ipn_gateway.states import DeliveryOutcome, InboxState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from decimal import Decimal
    from uuid import UUID

    from ipn_gateway.db import Transaction
    from ipn_gateway.providers.base import Confirmed

WAITING_FOR_A_PERSON: Final = frozenset({DeliveryOutcome.HELD, DeliveryOutcome.CONFLICT, DeliveryOutcome.DEAD})
_ANNOUNCED: Final = {DeliveryOutcome.HELD: "notification.held", DeliveryOutcome.CONFLICT: "notification.conflict"}


@dataclass(frozen=True, slots=True)
class Claimed:
    """The lease on one notification delivery: its ids, the fence, and how often the provider was asked."""

    tenant_id: str
    delivery_id: UUID
    source_id: str
    fence: int
    questions: int


@dataclass(frozen=True, slots=True)
class Ending:
    """What a notification delivery ends as, and what was found out about it."""

    outcome: DeliveryOutcome
    reason: str | None = None
    order_id: str | None = None
    operation_id: str | None = None
    effect: str | None = None
    amount: Decimal | None = None
    currency: str | None = None
    expected_amount: Decimal | None = None
    expected_currency: str | None = None
    answer: Mapping[str, Any] | None = None
    alert: str | None = None
    confirmed: Confirmed | None = None

    def because(self, outcome: DeliveryOutcome, reason: str | None = None, alert: str | None = None) -> Ending:
        """The same findings with another end."""
        return replace(self, outcome=outcome, reason=reason, alert=alert)


# What waits for a person keeps its inbox row; every other end removes it. Without a lease that is ours nothing is touched.
_END = f"""
WITH mine AS (
    SELECT given.* FROM {
    columns.given(
        tenant_id="text",
        delivery_id="uuid",
        fence="bigint",
        questions="int",
        kept="bool",
        state="text",
        outcome="text",
        reason="text",
        order_id="text",
        operation_id="text",
        effect="text",
        answer="jsonb",
        alert="text",
        confirmed="jsonb",
        resolution="text",
    )
}
      JOIN inbox ON inbox.tenant_id = given.tenant_id AND inbox.notification_delivery_id = given.delivery_id
                AND inbox.fence = given.fence AND inbox.lease_expires_at IS NOT NULL
     ORDER BY inbox.tenant_id, inbox.notification_delivery_id FOR UPDATE OF inbox
), gone AS (
    DELETE FROM inbox USING mine WHERE NOT mine.kept
       AND inbox.tenant_id = mine.tenant_id AND inbox.notification_delivery_id = mine.delivery_id
), waiting AS (
    UPDATE inbox SET state = mine.state, due_at = NULL, lease_expires_at = NULL, questions = mine.questions,
                     order_id = coalesce(mine.order_id, inbox.order_id), operation_id = coalesce(mine.operation_id, inbox.operation_id)
      FROM mine WHERE mine.kept
       AND inbox.tenant_id = mine.tenant_id AND inbox.notification_delivery_id = mine.delivery_id
)
UPDATE notification_deliveries AS d
   SET outcome = mine.outcome, reason = mine.reason, decided_at = ipn_now(), attempts = mine.questions,
       operation_id = coalesce(mine.operation_id, d.operation_id), effect = coalesce(mine.effect, d.effect),
       provider_answer = coalesce(mine.answer, d.provider_answer), confirmed = mine.confirmed, resolution = mine.resolution,
       alerts = CASE WHEN mine.alert IS NULL THEN d.alerts ELSE coalesce(d.alerts, '[]'::jsonb) || to_jsonb(mine.alert) END
  FROM mine WHERE d.tenant_id = mine.tenant_id AND d.id = mine.delivery_id
RETURNING d.id
"""


async def end(tx: Transaction, claimed: Claimed, ending: Ending) -> None:
    """Decide the delivery. Raises `LeaseLost` when the lease is not ours any more; the caller's transaction rolls back."""
    if not await end_all(tx, [(claimed, ending)]):
        raise LeaseLost(notification_delivery=str(claimed.delivery_id))


async def end_all(tx: Transaction, ends: Sequence[tuple[Claimed, Ending]]) -> set[UUID]:
    """Decide a set of deliveries; those that were, which are those whose leases are still ours. At least one, each once."""
    rows = [await _end_row(tx, claimed, ending) for claimed, ending in ends]
    return {row["id"] for row in await tx.all(dict, _END, columns.arrays(rows))}


async def _end_row(tx: Transaction, claimed: Claimed, ending: Ending) -> dict[str, Any]:
    waits = ending.outcome in WAITING_FOR_A_PERSON
    dismissed = waits and await _dismissed_before(tx, claimed, ending)
    kept = waits and not dismissed
    return _row(claimed, ending) | {
        "kept": kept,
        "state": str(InboxState(ending.outcome)) if kept else None,
        "outcome": str(ending.outcome),
        "reason": ending.reason,
        "effect": ending.effect,
        "alert": ending.alert,
        "confirmed": Jsonb(confirmations.frozen(ending.confirmed)) if kept and ending.confirmed else None,
        "resolution": "dismiss" if dismissed else None,
    }


async def _dismissed_before(tx: Transaction, claimed: Claimed, ending: Ending) -> bool:
    """Whether a person dismissed another copy of this notification: deciding one decides all, those that are still to come too.

    One that a person had replayed is theirs to decide anew.
    """
    if ending.confirmed is None:
        return False
    found = await tx.value(
        """SELECT EXISTS (SELECT FROM notification_deliveries
                           WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND source_id = %(source_id)s
                             AND operation_id = %(operation_id)s AND outcome = %(outcome)s AND reason = %(reason)s
                             AND resolution = 'dismiss' AND id <> %(delivery_id)s)""",
        {
            "tenant_id": claimed.tenant_id,
            "order_id": ending.order_id,
            "source_id": claimed.source_id,
            "operation_id": ending.operation_id,
            "outcome": str(ending.outcome),
            "reason": ending.reason,
            "delivery_id": claimed.delivery_id,
        },
    )
    shown = ids.show(ids.NOTIFICATION_DELIVERY, claimed.delivery_id)
    return bool(found) and not await audit.known(tx, claimed.tenant_id, action="notification_delivery.replay", target=shown)


_PARK = """
WITH parked AS (
    UPDATE inbox SET state = 'parked', due_at = NULL, lease_expires_at = NULL, parked_at = coalesce(parked_at, ipn_now()),
                     order_id = %(order_id)s, operation_id = %(operation_id)s, questions = %(questions)s
     WHERE tenant_id = %(tenant_id)s AND notification_delivery_id = %(delivery_id)s AND fence = %(fence)s AND lease_expires_at IS NOT NULL
    RETURNING 1
), shown AS (
    UPDATE notification_deliveries SET outcome = 'parked', attempts = %(questions)s, provider_answer = %(answer)s,
                                       operation_id = %(operation_id)s
     WHERE tenant_id = %(tenant_id)s AND id = %(delivery_id)s AND EXISTS (SELECT FROM parked)
)
SELECT count(*) FROM parked
"""


async def park(tx: Transaction, claimed: Claimed, ending: Ending) -> None:
    """Its order is not known yet. The caller holds the order's slot, so who creates the order comes after us and makes it due."""
    if await tx.value(_PARK, _row(claimed, ending)) != 1:
        raise LeaseLost(notification_delivery=str(claimed.delivery_id))


_FILE = """
WITH filed AS (
    INSERT INTO notification_deliveries
           (tenant_id, id, source_id, provider, via, headers, raw_body, sha256, proof, order_id, operation_id, effect, outcome, reason,
            decided_at, attempts, provider_answer, confirmed)
    SELECT %(tenant_id)s, %(delivery_id)s, %(source_id)s, %(provider)s, 'sweep', '[]'::jsonb, %(body)s, sha256(%(body)s), 'none',
           %(order_id)s, %(operation_id)s, %(effect)s, %(outcome)s, %(reason)s, ipn_now(), %(questions)s, %(answer)s,
           %(confirmed)s
     WHERE NOT EXISTS (SELECT FROM notification_deliveries d
                        WHERE d.tenant_id = %(tenant_id)s AND d.order_id = %(order_id)s AND d.source_id = %(source_id)s
                          AND d.operation_id = %(operation_id)s AND d.outcome NOT IN ('received', 'parked'))
    RETURNING tenant_id, id, source_id, order_id, operation_id, outcome
)
INSERT INTO inbox (tenant_id, notification_delivery_id, source_id, order_id, operation_id, state, proved)
SELECT tenant_id, id, source_id, order_id, operation_id, outcome, true FROM filed
"""


async def file(tx: Transaction, finding: Claimed, provider: str, ending: Ending) -> bool:
    """Keep what the sweep found and a person must decide, as a delivery of its own (`via` sweep); whether one was made.

    None is made for what needs nobody, nor for an operation that a delivery was decided about. Under the order's lock.
    """
    if ending.outcome not in WAITING_FOR_A_PERSON:
        return False
    row = _row(finding, ending) | {
        "source_id": finding.source_id,
        "provider": provider,
        "confirmed": Jsonb(confirmations.frozen(ending.confirmed)) if ending.confirmed else None,
        "body": json.dumps(dict(ending.answer or {}), ensure_ascii=False).encode(),
        "effect": ending.effect,
        "outcome": str(ending.outcome),
        "reason": ending.reason,
    }
    return await tx.execute(_FILE, row) == 1


def _row(claimed: Claimed, ending: Ending) -> dict[str, Any]:
    return {
        "tenant_id": claimed.tenant_id,
        "delivery_id": claimed.delivery_id,
        "fence": claimed.fence,
        "questions": claimed.questions,
        "order_id": ending.order_id,
        "operation_id": ending.operation_id,
        "answer": Jsonb(dict(ending.answer)) if ending.answer is not None else None,
    }


async def recorded(tx: Transaction, claimed: Claimed) -> DeliveryOutcome | None:
    """What the delivery ended as already: a writer whose COMMIT was lost on the way back finds its own end here."""
    outcome = await tx.value(
        "SELECT outcome FROM notification_deliveries WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND decided_at IS NOT NULL",
        {"tenant_id": claimed.tenant_id, "id": claimed.delivery_id},
    )
    return DeliveryOutcome(outcome) if outcome else None


def announcement(claimed: Claimed, ending: Ending, now: datetime) -> list[events.NewEvent]:
    """The event that tells a person, if this end needs one. Its cause is (source, operation, reason): copies announce nothing again."""
    event_type = _ANNOUNCED.get(ending.outcome)
    if event_type is None:
        return []
    shown = ids.show(ids.NOTIFICATION_DELIVERY, claimed.delivery_id)
    data = events.NotificationData(
        notification_delivery_id=shown,
        order_id=ending.order_id,
        source=claimed.source_id,
        outcome=str(ending.outcome),
        reason=ending.reason,
        operation_id=ending.operation_id,
        amount=money.show(ending.amount, ending.currency) if ending.amount is not None and ending.currency else None,
        currency=ending.currency,
        expected_amount=money.show(ending.expected_amount, ending.expected_currency or "") if ending.expected_amount is not None else None,
        expected_currency=ending.expected_currency,
    )
    cause = (claimed.source_id, ending.operation_id or shown, ending.reason or "")
    return [events.new(ids.event_id(claimed.tenant_id, event_type, *cause), event_type, now, data)]


def report(claimed: Claimed, ending: Ending) -> None:
    """The canonical line of a decided delivery; what waits for a person is an error line, so that it alarms."""
    logs.count(f"notifications.{ending.outcome}")
    log = logs.get("inbox")
    write = log.error if ending.outcome in WAITING_FOR_A_PERSON or ending.alert else log.info
    write(
        "notification.decided",
        notification_delivery_id=ids.show(ids.NOTIFICATION_DELIVERY, claimed.delivery_id),
        source=claimed.source_id,
        order_id=ending.order_id,
        operation_id=ending.operation_id,
        effect=ending.effect,
        outcome=str(ending.outcome),
        reason=ending.reason,
        alert=ending.alert,
        questions=claimed.questions,
    )
