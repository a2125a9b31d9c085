"""What a confirmed operation means for an order: a pure function of the locked order, the ledger and the provider's answer.

Rank decides, never the time of arrival: pending 0, failed 1, cancelled and expired 2, paid_on_hold 3, paid 4. Only a higher rank is
applied; an equal or lower one is stale. Money is compared exactly. A second payment is never stale: it is booked as unapplied. Refunds
have no rank: they are summed, up to what was paid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime  # noqa: TC003 - fields of rows
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID  # noqa: TC003

from ipn_gateway.providers.base import NEGATIVE, Confirmed, Effect
from ipn_gateway.states import DeliveryOutcome, OrderStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

RANK: Final[Mapping[str, int]] = {
    OrderStatus.PENDING: 0,
    OrderStatus.FAILED: 1,
    OrderStatus.CANCELLED: 2,
    OrderStatus.EXPIRED: 2,
    OrderStatus.PAID_ON_HOLD: 3,
    OrderStatus.PAID: 4,
    OrderStatus.PARTIALLY_REFUNDED: 4,
    OrderStatus.REFUNDED: 4,
}

NOTHING_REFUNDABLE: Final = Decimal()

_CLOSES: Final[Mapping[Effect, tuple[OrderStatus, str]]] = {
    Effect.FAILED: (OrderStatus.FAILED, "order.payment_failed"),
    Effect.CANCELLED: (OrderStatus.CANCELLED, "order.cancelled"),
    Effect.EXPIRED: (OrderStatus.EXPIRED, "order.expired"),
}


@dataclass(frozen=True, slots=True)
class LockedOrder:
    """An order whose row this transaction holds, and the time."""

    tenant_id: str
    order_id: str
    source_id: str
    status: str
    reason: str | None
    amount: Decimal
    currency: str
    amount_paid: Decimal
    amount_refunded: Decimal
    expires_at: datetime | None
    metadata: dict[str, Any]
    event_count: int
    now: datetime


@dataclass(frozen=True, slots=True)
class Booked:
    """What the books hold already about an operation: a ledger row, or a payment with the same provider transaction id."""

    kind: str  # "ledger" or "payment"
    order_id: str
    amount: Decimal | None
    currency: str | None
    writer_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """The order moves: ledger row, new state, one event; with `paid`, a payment, and with `refunded`, a refund.

    A part that a person books moves no state and tells nobody (`event_type` None); more than is due is told by `overpaid` as well.
    """

    status: OrderStatus
    reason: str | None
    event_type: str | None
    paid: bool
    overpaid: bool = False
    refunded: bool = False

    @property
    def event_types(self) -> list[str]:
        """The events of the change, in their order."""
        return [event_type for event_type in (self.event_type, "order.overpaid" if self.overpaid else None) if event_type]


@dataclass(frozen=True, slots=True)
class SecondPayment:
    """Real money for an order that is paid: booked as unapplied, announced, and a person refunds it."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """No order changes: the notification delivery ends here. `announced` is the event type that tells a person."""

    outcome: DeliveryOutcome
    reason: str | None = None
    announced: str | None = None
    alert: str | None = None


Decision = Change | SecondPayment | Nothing


def held(reason: str) -> Nothing:
    """Confirmed, yet it does not fit: a person decides."""
    return Nothing(DeliveryOutcome.HELD, reason, "notification.held")


def decide(  # noqa: PLR0911 - one an effect
    order: LockedOrder, verdict: Confirmed, source_id: str, booked: Booked | None, refundable: Decimal = NOTHING_REFUNDABLE
) -> Decision:
    """What happens to the order. `booked` is what an earlier write for the same operation left, None if there is nothing.

    `refundable` is what the payment that a refund is of still holds, in its currency.
    """
    if verdict.effect is Effect.UNKNOWN:
        return held("unknown_status")
    if verdict.effect is Effect.INFORMATIVE:
        return Nothing(DeliveryOutcome.STALE)
    if booked is not None:
        return _booked_before(order, verdict, booked)
    if order.source_id != source_id:
        return held("source_mismatch")
    if verdict.effect is Effect.PAID:
        return _payment(order, verdict)
    if verdict.effect is Effect.REFUNDED:
        return _refund(order, verdict, refundable)
    return _negative(order, verdict)


def _booked_before(order: LockedOrder, verdict: Confirmed, booked: Booked) -> Decision:
    same = booked.order_id == order.order_id and (booked.amount, booked.currency) == (verdict.amount, verdict.currency)
    if same or (booked.kind == "ledger" and verdict.effect in NEGATIVE):
        return Nothing(DeliveryOutcome.DUPLICATE)
    if booked.kind == "payment":
        return held("payment_reference_reused")
    return Nothing(DeliveryOutcome.CONFLICT, "amount", "notification.conflict", "other money for an applied operation")


def _payment(order: LockedOrder, verdict: Confirmed) -> Decision:
    if RANK[order.status] >= RANK[OrderStatus.PAID_ON_HOLD]:
        return SecondPayment()
    if verdict.currency != order.currency:
        return held("currency")
    if verdict.amount != order.amount or order.amount_paid:
        return held("amount")  # also what comes after a part that a person booked
    return _paid(order, verdict)


def _refund(order: LockedOrder, verdict: Confirmed, refundable: Decimal) -> Change | Nothing:
    """Money that went back at the provider: the sum says whether that was all of it. More than the payment holds is no refund of it."""
    if verdict.currency != order.currency:
        return held("currency")
    if verdict.amount is None or not 0 < verdict.amount <= refundable:
        return held("amount")
    is_all = order.amount_refunded + verdict.amount == order.amount_paid
    status = OrderStatus.REFUNDED if is_all else OrderStatus.PARTIALLY_REFUNDED
    return Change(status, None, "order.refunded", paid=False, refunded=True)


def _paid(order: LockedOrder, verdict: Confirmed) -> Change:
    """The order has its money: paid, unless a person has to look at it first."""
    if verdict.risk:
        return Change(OrderStatus.PAID_ON_HOLD, "risk", "order.paid_on_hold", paid=True)
    if _closed_by_us(order) or _paid_after_expiry(order, verdict):
        return Change(OrderStatus.PAID_ON_HOLD, "late_payment", "order.paid_on_hold", paid=True)
    return Change(OrderStatus.PAID, None, "order.paid", paid=True)


def resolve(order: LockedOrder, verdict: Confirmed, booked: Booked | None) -> Change | Nothing:  # noqa: PLR0911 - one a rule
    """What becomes of the order when a person applies a held operation: its money is added, and paid is what has all that is due.

    Amount and source are what the person decided on. `Nothing` says by its reason why it can only be dismissed.
    """
    if booked is not None:
        return Nothing(DeliveryOutcome.DUPLICATE, "booked")
    if verdict.effect in NEGATIVE:
        return _negative(order, verdict)
    if verdict.effect is not Effect.PAID or verdict.amount is None:
        return held("unknown_status")
    if RANK[order.status] >= RANK[OrderStatus.PAID_ON_HOLD]:
        return Nothing(DeliveryOutcome.CONFLICT, "second_payment")
    if verdict.currency != order.currency:
        return held("currency")
    surplus = order.amount_paid + verdict.amount - order.amount
    if surplus < 0:
        return Change(OrderStatus(order.status), order.reason, None, paid=True)
    return replace(_paid(order, verdict), overpaid=surplus > 0)


def _closed_by_us(order: LockedOrder) -> bool:
    return order.status in {OrderStatus.CANCELLED, OrderStatus.EXPIRED} and order.reason in {"merchant", "expired"}


def _paid_after_expiry(order: LockedOrder, verdict: Confirmed) -> bool:
    return bool(order.expires_at and verdict.paid_at and verdict.paid_at > order.expires_at)


def _negative(order: LockedOrder, verdict: Confirmed) -> Change | Nothing:
    status, event_type = _CLOSES[verdict.effect]
    if RANK[status] <= RANK[order.status]:
        return Nothing(DeliveryOutcome.STALE)
    return Change(status, "provider", event_type, paid=False)
