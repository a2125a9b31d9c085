"""Booking: the ledger rows of decided operations, and with each its payment or refund and the new state of its order, in one statement.

The ledger comes first and the rest is joined to what it returned, so that an operation that is booked already changes nothing. A set of
bookings is written by the same statement as one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import columns, decisions, outbox
from ipn_gateway.decisions import Booked, Change, LockedOrder, SecondPayment
from ipn_gateway.outcomes import Claimed
from ipn_gateway.providers.base import Confirmed, Effect
from ipn_gateway.states import DeliveryOutcome, OrderStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from psycopg import errors as pg

    from ipn_gateway.db import Transaction
    from ipn_gateway.events import NewEvent

_SAYS_BOOKED: Final = {
    ("processed_notifications", "processed_notifications_pkey"),
    ("payments", "payments_provider_transaction_key"),
}


def says_booked(error: pg.UniqueViolation) -> bool:
    """Whether it is the ledger or the payments that know the operation, and not a table of the merchant's."""
    return (error.diag.table_name, error.diag.constraint_name) in _SAYS_BOOKED


class BookedBefore(Exception):
    """The ledger knows the operation: run again and read what is booked."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who writes: a notification delivery under its lease (`claimed`) or because a person applied it (`manual`), or the sweep."""

    tenant_id: str
    source_id: str
    provider: str
    writer_id: UUID
    claimed: Claimed | None = None
    asserted_effect: Effect | None = None
    parking_over: bool = False
    alerts: Mapping[DeliveryOutcome, str] = field(default_factory=dict)  # what is odd about it, if it ends as that
    manual: bool = False

    @property
    def finding(self) -> Claimed:
        """The delivery to write about: the claimed one, or one to file what the sweep found."""
        return self.claimed or Claimed(self.tenant_id, self.writer_id, self.source_id, fence=0, questions=1)

    @property
    def kind(self) -> str:
        """The ledger's word for it."""
        return "manual" if self.manual else "notification" if self.claimed else "sweep"


@dataclass(frozen=True, slots=True)
class Booking:
    """What was decided about a locked order, and the id of the payment or refund that it makes."""

    origin: Origin
    verdict: Confirmed
    order: LockedOrder
    decision: Change | SecondPayment
    new_id: UUID
    after: LockedOrder = field(init=False)
    """The order with the status, reason and sums that it has after the decision."""

    def __post_init__(self) -> None:
        """Work out what is read several times."""
        object.__setattr__(self, "after", _after(self.order, self.verdict, self.decision))

    @property
    def event_types(self) -> list[str]:
        """The events of the ledger row, in their order."""
        return self.decision.event_types if isinstance(self.decision, Change) else ["order.overpaid"]

    def events(self) -> list[NewEvent]:
        """The events of the ledger row: their cause is its key."""
        order, before = self.after, self.order.status
        cause = (self.origin.source_id, self.verdict.operation_id, str(self.verdict.effect))
        staged: list[NewEvent] = []
        for event_type in self.event_types:
            if staged:
                order, before = replace(order, event_count=order.event_count + 1), order.status
            staged.append(
                outbox.order_event(
                    order, event_type, cause, status=order.status, reason=order.reason, previous_status=before, verdict=self.verdict
                )
            )
        return staged


def _after(order: LockedOrder, verdict: Confirmed, decision: Change | SecondPayment) -> LockedOrder:
    if isinstance(decision, SecondPayment):
        return order
    amount = verdict.amount or Decimal()
    return replace(
        order,
        status=str(decision.status),
        reason=decision.reason,
        amount_paid=order.amount_paid + amount * decision.paid,
        amount_refunded=order.amount_refunded + amount * decision.refunded,
    )


async def booked_before(tx: Transaction, origin: Origin, verdict: Confirmed) -> Booked | None:
    """What is booked for the operation, read after the lock: its ledger row, else a payment or refund that the provider calls the same."""
    return await tx.one(
        Booked,
        """(SELECT 'ledger' AS kind, order_id, amount, currency, writer_id FROM processed_notifications
             WHERE tenant_id = %(tenant_id)s AND source_id = %(source_id)s AND operation_id = %(operation_id)s AND effect = %(effect)s)
           UNION ALL
           (SELECT 'payment', order_id, amount, currency, NULL FROM payments
             WHERE tenant_id = %(tenant_id)s AND provider = %(provider)s AND account_id = %(account_id)s AND %(effect)s = 'paid'
               AND provider_transaction_id = %(provider_transaction_id)s)
           UNION ALL
           (SELECT 'refund', order_id, amount, currency, NULL FROM refunds
             WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND %(effect)s = 'refunded'
               AND provider_refund_id = %(operation_id)s AND status <> 'failed')
           LIMIT 1""",
        _operation(origin, verdict),
    )


async def refundable(tx: Transaction, origin: Origin, verdict: Confirmed) -> Decimal:
    """What is left of the order's money in the payment that a refund is of. Under the order's lock."""
    if verdict.effect is not Effect.REFUNDED:
        return decisions.NOTHING_REFUNDABLE
    found = await tx.value(
        """SELECT amount - amount_refunded - amount_reserved FROM payments
            WHERE tenant_id = %(tenant_id)s AND provider = %(provider)s AND account_id = %(account_id)s AND order_id = %(order_id)s
              AND provider_transaction_id = %(provider_transaction_id)s AND currency = %(currency)s AND status = 'applied'""",
        _operation(origin, verdict),
    )
    return found or decisions.NOTHING_REFUNDABLE


def _operation(origin: Origin, verdict: Confirmed) -> dict[str, Any]:
    return {
        "tenant_id": origin.tenant_id,
        "source_id": origin.source_id,
        "provider": origin.provider,
        "account_id": verdict.account,
        "operation_id": verdict.operation_id,
        "effect": str(verdict.effect),
        "order_id": verdict.order_id,
        "amount": verdict.amount,
        "currency": verdict.currency,
        "provider_transaction_id": verdict.provider_transaction_id or verdict.operation_id,
    }


_BOOK = f"""
WITH given AS (
    SELECT * FROM {
    columns.given(
        tenant_id="text",
        source_id="text",
        provider="text",
        account_id="text",
        operation_id="text",
        effect="text",
        order_id="text",
        amount="numeric",
        currency="text",
        provider_transaction_id="text",
        origin="text",
        writer_id="uuid",
        booked="text",
        new_id="uuid",
        settled_amount="numeric",
        settled_currency="text",
        net_amount="numeric",
        paid_at="timestamptz",
        status="text",
        reason="text",
        amount_added="numeric",
        amount_refunded="numeric",
        events="int",
        settled="bool",
    )
}
), ledger AS (
    INSERT INTO processed_notifications
           (tenant_id, source_id, operation_id, effect, order_id, amount, currency, booked, origin, writer_id)
    SELECT tenant_id, source_id, operation_id, effect, order_id, amount, currency, booked, origin, writer_id FROM given
    ON CONFLICT ON CONSTRAINT processed_notifications_pkey DO NOTHING
    RETURNING writer_id
), written AS (
    SELECT given.* FROM given JOIN ledger ON ledger.writer_id = given.writer_id
), payment AS (
    INSERT INTO payments (tenant_id, id, order_id, source_id, provider, account_id, provider_transaction_id, operation_id, status, amount,
                          currency, settled_amount, settled_currency, net_amount, paid_at)
    SELECT tenant_id, new_id, order_id, source_id, provider, account_id, provider_transaction_id, operation_id, booked, amount,
           currency, settled_amount, settled_currency, net_amount, paid_at
      FROM written WHERE effect = 'paid'
), refunded AS (
    UPDATE payments SET amount_refunded = payments.amount_refunded + written.amount_refunded
      FROM written WHERE written.effect = 'refunded' AND payments.tenant_id = written.tenant_id AND payments.provider = written.provider
       AND payments.account_id = written.account_id AND payments.provider_transaction_id = written.provider_transaction_id
    RETURNING payments.id, written.*
), refund AS (
    INSERT INTO refunds (tenant_id, id, order_id, payment_id, reference, amount, currency, status, provider_refund_id)
    SELECT tenant_id, new_id, order_id, id, 'provider:' || operation_id, amount, currency, 'succeeded', operation_id FROM refunded
), changed AS (
    UPDATE orders SET status = written.status, reason = written.reason, amount_paid = orders.amount_paid + written.amount_added,
                      amount_refunded = orders.amount_refunded + written.amount_refunded,
                      event_count = orders.event_count + written.events, updated_at = ipn_now()
      FROM written WHERE orders.tenant_id = written.tenant_id AND orders.order_id = written.order_id
), swept AS (
    DELETE FROM sweeps USING written WHERE written.settled AND sweeps.tenant_id = written.tenant_id AND sweeps.order_id = written.order_id
)
SELECT writer_id FROM ledger
"""


async def book(tx: Transaction, booking: Booking) -> None:
    """Ledger row, payment or refund, and order. Raises `BookedBefore` when the ledger knows the operation."""
    if not await book_all(tx, [booking]):
        raise BookedBefore


async def book_all(tx: Transaction, bookings: Sequence[Booking]) -> set[UUID]:
    """The same for a set, of whose orders none comes twice; the writers of those whose operation the ledger did not know. At least one."""
    rows = await tx.all(dict, _BOOK, columns.arrays([_row(booking) for booking in bookings]))
    return {row["writer_id"] for row in rows}


def _row(booking: Booking) -> dict[str, Any]:
    order, after, verdict = booking.order, booking.after, booking.verdict
    return _operation(booking.origin, verdict) | {
        "origin": booking.origin.kind,
        "writer_id": booking.origin.writer_id,
        "booked": "applied" if isinstance(booking.decision, Change) else "unapplied",
        "new_id": booking.new_id,
        "settled_amount": verdict.settled_amount,
        "settled_currency": verdict.settled_currency,
        "net_amount": verdict.net_amount,
        "paid_at": verdict.paid_at,
        "status": after.status,
        "reason": after.reason,
        "amount_added": after.amount_paid - order.amount_paid,
        "amount_refunded": after.amount_refunded - order.amount_refunded,
        "events": len(booking.event_types),
        "settled": decisions.RANK[after.status] >= decisions.RANK[OrderStatus.PAID_ON_HOLD],
    }
