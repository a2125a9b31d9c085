"""Resolving: a person applies or dismisses a notification delivery that waits for one (held, conflict or dead), and all copies of it.

To apply books what the provider confirmed when the delivery was held. Where it confirmed no payment (dead, a disabled source, a word that
is not known) the person gives the evidence. A second payment, and anything that is booked already, can only be dismissed.
Locks are taken in the order of the workers: the order, its open deliveries, then what is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID  # noqa: TC003 - field of a row

from psycopg import errors as pg

from ipn_gateway import audit, bookings, confirmations, decisions, effects, ids, logs, money, orders, outbox, outcomes, validation
from ipn_gateway.bookings import BookedBefore, Booking, Origin
from ipn_gateway.effects import EffectFailed
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.operations import Downstream, Operation
from ipn_gateway.providers.base import NEGATIVE, Confirmed, Effect
from ipn_gateway.states import DeliveryOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from decimal import Decimal

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.decisions import LockedOrder
    from ipn_gateway.effects import EffectHook

RESOLVE: Final = Operation(
    name="POST /v1/notification-deliveries/{delivery_id}/resolve",
    fields={"decision": "json", "reason": "json", "evidence": "json"},
    downstream=Downstream.IDEMPOTENT,  # the same decision again changes nothing
    money=True,
)

Decision = Literal["apply", "dismiss"]

_BOOKED: Final = "The books hold this operation or its payment already; the delivery can only be dismissed."
_ONLY_DISMISSED: Final = {
    "booked": _BOOKED,
    "second_payment": "The order is paid already, so this would be a second payment: replay the delivery, which books the money as"
    " unapplied, then dismiss it and refund the money by its payment_id.",
    "currency": "The money is in another currency than the order's; the delivery can only be dismissed.",
    "unknown_status": "The provider confirmed no payment; the delivery can only be dismissed.",
    None: "The order is further along than this operation would bring it; the delivery can only be dismissed.",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a person saw at the provider: a payment of `amount` (> 0, in the currency's decimals), by the provider's transaction id."""

    amount: Decimal
    currency: str
    provider_transaction_id: str


@dataclass(frozen=True, slots=True)
class Act:
    """What a person decides about which delivery, and why."""

    tenant_id: str
    delivery_id: UUID
    decision: Decision
    actor: str
    reason: str
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A delivery as it is now. `state` is that of its open work, None when it has none."""

    id: UUID
    source_id: str
    provider: str
    account_id: str
    order_id: str | None
    operation_id: str | None
    outcome: str
    reason: str | None
    confirmed: dict[str, Any] | None
    provider_answer: dict[str, Any] | None
    resolution: str | None
    state: str | None

    @property
    def shown(self) -> str:
        """Its public id."""
        return ids.show(ids.NOTIFICATION_DELIVERY, self.id)


async def resolve(db: Database, act: Act, effect: EffectHook | None = None) -> None:
    """Decide a delivery that waits, and its copies. The same decision again changes nothing.

    Raises `NotFound`; `StateConflict` when nothing waits, when somebody decided otherwise, when it can only be dismissed, and when
    IPN_EFFECT raised; `ValidationFailed` when evidence is missing or has no place.
    """
    try:
        await db.rerun(_resolve_once, db, act, effect)
    except BookedBefore:
        raise StateConflict(_BOOKED) from None
    except pg.UniqueViolation as error:
        if not bookings.says_booked(error):
            raise
        raise StateConflict(_BOOKED) from None
    except EffectFailed as error:
        logs.get("inbox").error(
            "effect.failed", notification_delivery_id=ids.show(ids.NOTIFICATION_DELIVERY, act.delivery_id), **error.context
        )
        raise StateConflict("IPN_EFFECT raised, so nothing was changed; the log has the error's class.") from error


async def _resolve_once(db: Database, act: Act, effect: EffectHook | None) -> None:
    async with db.transaction("notification_deliveries.resolve") as tx:
        waiting = await _look(tx, act)
        if _is_decided(waiting, act):
            return
        verdict = _verdict(waiting, act) if act.decision == "apply" else None
        order = await orders.lock(tx, act.tenant_id, verdict.order_id) if verdict else None
        copies = await _lock_copies(tx, act, waiting)
        waiting = await _look(tx, act)  # a new statement: it sees what was decided while we waited for the locks
        if _is_decided(waiting, act):
            return
        booking = await _apply(tx, db.clock, act, waiting, verdict, order) if verdict else None
        await _decide(tx, act, verdict, copies)
        await _note(tx, db.clock, act, waiting, verdict, copies)
        if booking:
            await outbox.stage(tx, db.clock, act.tenant_id, booking.events())
            if effect:
                await effects.merchant_effect(tx, effect, effects.told(booking))
    logs.count(f"notifications.resolved.{act.decision}")
    logs.get("inbox").info(
        "notification.resolved",
        notification_delivery_id=waiting.shown,
        source=waiting.source_id,
        order_id=waiting.order_id,
        decision=act.decision,
        was=waiting.outcome,
        copies=len(copies) - 1,
        actor=act.actor,
    )


async def _look(tx: Transaction, act: Act) -> _Waiting:
    waiting = await tx.one(
        _Waiting,
        """SELECT d.id, d.source_id, d.provider, s.account_id, d.order_id, d.operation_id, d.outcome, d.reason, d.confirmed,
                  d.provider_answer, d.resolution, i.state
             FROM notification_deliveries AS d JOIN sources AS s ON s.name = d.source_id
             LEFT JOIN inbox AS i ON i.tenant_id = d.tenant_id AND i.notification_delivery_id = d.id
            WHERE d.tenant_id = %(tenant_id)s AND d.id = %(id)s""",
        {"tenant_id": act.tenant_id, "id": act.delivery_id},
    )
    if waiting is None:
        raise NotFound
    return waiting


def _is_decided(waiting: _Waiting, act: Act) -> bool:
    """Whether this very decision was made before. Raises `StateConflict` for another one, and when nothing waits for a person."""
    if waiting.resolution == act.decision:
        return True
    if waiting.resolution is not None:
        raise StateConflict("A person decided otherwise about this delivery; the audit log says who.")
    if waiting.state not in outcomes.WAITING_FOR_A_PERSON:
        raise StateConflict("Only a delivery that is held, in conflict or dead can be resolved.")
    return False


def _verdict(waiting: _Waiting, act: Act) -> Confirmed:
    """What is booked: what the provider confirmed, else what the person saw there."""
    if waiting.outcome == DeliveryOutcome.CONFLICT:
        raise StateConflict("A conflict is only dismissed; the money of a second payment is refunded by its payment_id.")
    confirmed = confirmations.thawed(waiting.confirmed, waiting.provider_answer) if waiting.confirmed else None
    if confirmed and confirmed.effect is Effect.REFUNDED:
        raise StateConflict("A refund that the books have no money for is only dismissed; it is put right at the provider.")
    if confirmed and (confirmed.effect is Effect.PAID or confirmed.effect in NEGATIVE):
        if act.evidence:
            raise validation.refused("has no place here: the provider confirmed the operation itself", "evidence")
        return confirmed
    if act.evidence is None:
        raise validation.refused("is required: the provider confirmed no payment", "evidence")
    if waiting.order_id is None:
        raise StateConflict("The delivery names no order; it can only be dismissed.")
    return Confirmed(
        order_id=waiting.order_id,
        operation_id=waiting.operation_id or act.evidence.provider_transaction_id,
        effect=Effect.PAID,
        status="evidence",
        account=waiting.account_id,
        amount=act.evidence.amount,
        currency=act.evidence.currency,
        provider_transaction_id=act.evidence.provider_transaction_id,
    )


# Copies are found among the open work, by what the provider confirmed: nothing that was only asserted makes a copy.
_LOCK_COPIES = """
SELECT i.notification_delivery_id AS id
  FROM inbox AS i JOIN notification_deliveries AS d ON d.tenant_id = i.tenant_id AND d.id = i.notification_delivery_id
 WHERE i.tenant_id = %(tenant_id)s
   AND (i.notification_delivery_id = %(id)s
        OR (i.order_id = %(order_id)s AND i.source_id = %(source_id)s AND i.operation_id = %(operation_id)s AND i.state = %(state)s
            AND d.reason = %(reason)s AND d.confirmed IS NOT NULL AND %(confirmed)s))
 ORDER BY i.notification_delivery_id FOR UPDATE OF i
"""


async def _lock_copies(tx: Transaction, act: Act, waiting: _Waiting) -> list[UUID]:
    """The delivery and its open copies, locked."""
    rows = await tx.all(
        dict,
        _LOCK_COPIES,
        {
            "tenant_id": act.tenant_id,
            "id": waiting.id,
            "order_id": waiting.order_id,
            "source_id": waiting.source_id,
            "operation_id": waiting.operation_id,
            "state": waiting.state,
            "reason": waiting.reason,
            "confirmed": waiting.confirmed is not None,
        },
    )
    return [row["id"] for row in rows]


def _origin(act: Act, waiting: _Waiting) -> Origin:
    return Origin(act.tenant_id, waiting.source_id, waiting.provider, waiting.id, manual=True)


async def _apply(  # noqa: PLR0917
    tx: Transaction, clock: Clock, act: Act, waiting: _Waiting, verdict: Confirmed, order: LockedOrder | None
) -> Booking:
    """Book it. Raises `StateConflict` when it can only be dismissed, or when there is no order to book it on."""
    if order is None:
        raise StateConflict("Its order is not registered: create the order first, then apply this again.")
    origin = _origin(act, waiting)
    decision = decisions.resolve(order, verdict, await bookings.booked_before(tx, origin, verdict))
    if not isinstance(decision, decisions.Change):
        raise StateConflict(_ONLY_DISMISSED[decision.reason])
    booking = Booking(origin, verdict, order, decision, ids.new(clock.now()))
    await bookings.book(tx, booking)
    return booking


# What was dismissed keeps its outcome, which stays true; `resolution` says that nobody waits for a decision any more.
_DECIDE = """
WITH gone AS (
    DELETE FROM inbox WHERE tenant_id = %(tenant_id)s AND notification_delivery_id = ANY(%(copies)s)
)
UPDATE notification_deliveries
   SET resolution = %(decision)s,
       outcome = CASE WHEN NOT %(applied)s THEN outcome WHEN id = %(id)s THEN 'applied' ELSE 'duplicate' END,
       reason = CASE WHEN NOT %(applied)s THEN reason END,
       decided_at = CASE WHEN %(applied)s THEN ipn_now() ELSE decided_at END,
       operation_id = coalesce(%(operation_id)s, operation_id), effect = coalesce(%(effect)s, effect)
 WHERE tenant_id = %(tenant_id)s AND id = ANY(%(copies)s)
"""


async def _decide(tx: Transaction, act: Act, verdict: Confirmed | None, copies: Sequence[UUID]) -> None:
    await tx.execute(
        _DECIDE,
        {
            "tenant_id": act.tenant_id,
            "id": act.delivery_id,
            "copies": list(copies),
            "decision": act.decision,
            "applied": verdict is not None,
            "operation_id": verdict.operation_id if verdict else None,
            "effect": str(verdict.effect) if verdict else None,
        },
    )


async def _note(  # noqa: PLR0917
    tx: Transaction, clock: Clock, act: Act, waiting: _Waiting, verdict: Confirmed | None, copies: Sequence[UUID]
) -> None:
    shows_money = verdict is not None and verdict.amount is not None and verdict.currency is not None
    details = {
        "decision": act.decision,
        "was": {"outcome": waiting.outcome, "reason": waiting.reason},
        "order_id": waiting.order_id,
        "operation_id": verdict.operation_id if verdict else waiting.operation_id,
        "amount": money.show(verdict.amount, verdict.currency) if shows_money else None,  # type: ignore[union-attr, arg-type]
        "currency": verdict.currency if verdict else None,
        "evidence": {"provider_transaction_id": act.evidence.provider_transaction_id} if act.evidence and verdict else None,
        "copies": [ids.show(ids.NOTIFICATION_DELIVERY, copy) for copy in copies if copy != waiting.id],
    }
    await audit.record(
        tx,
        act.tenant_id,
        actor=act.actor,
        action="notification_delivery.resolve",
        target=waiting.shown,
        now=clock.now(),
        reason=act.reason,
        details=details,
    )
