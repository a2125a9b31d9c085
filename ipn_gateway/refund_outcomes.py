"""What becomes of a refund: accepted, then succeeded or failed, each with its money and its event in one transaction.

The caller holds the order's lock; all that changes payments and refunds holds it, so that sums and reservations always fit. A refund that
the provider tells of by a notification is booked by `effects`: one movement of money that comes both ways counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal  # noqa: TC003 - fields of rows
from typing import TYPE_CHECKING, Final
from uuid import UUID  # noqa: TC003

from ipn_gateway import ids, logs, outbox
from ipn_gateway.providers.base import RefundRequest
from ipn_gateway.states import OrderStatus

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Transaction
    from ipn_gateway.decisions import LockedOrder


ONCE_PAID: Final = (OrderStatus.PAID, OrderStatus.PAID_ON_HOLD, OrderStatus.PARTIALLY_REFUNDED, OrderStatus.REFUNDED)


@dataclass(frozen=True, slots=True)
class LockedRefund:
    """A refund whose row this transaction holds, and the payment that it is of."""

    tenant_id: str
    id: UUID
    order_id: str
    reference: str
    amount: Decimal
    currency: str
    reason: str | None
    status: str
    provider_refund_id: str | None
    polled: int
    fence: int
    payment_id: UUID
    payment_status: str
    payment_amount: Decimal
    settled_amount: Decimal | None
    settled_currency: str | None
    provider_transaction_id: str
    source_id: str

    @property
    def public_id(self) -> str:
        """How it is named outside."""
        return ids.show(ids.REFUND, self.id)

    @property
    def operation_id(self) -> str | None:
        """What the provider calls it, once it said so."""
        return self.provider_refund_id

    def request(self, key: str) -> RefundRequest:
        """What the provider is asked for, under our `key`."""
        return RefundRequest(
            key=key,
            order_id=self.order_id,
            provider_transaction_id=self.provider_transaction_id,
            amount=self.amount,
            currency=self.currency,
            payment_amount=self.payment_amount,
            settled_amount=self.settled_amount,
            settled_currency=self.settled_currency,
            remarks=self.reason or "",
        )


async def lock(tx: Transaction, tenant_id: str, refund_id: UUID) -> LockedRefund:
    """The refund, locked; there is one, as none is ever deleted that has a name outside."""
    found = await tx.one(
        LockedRefund,
        """SELECT r.tenant_id, r.id, r.order_id, r.reference, r.amount, r.currency, r.reason, r.status, r.provider_refund_id, r.polled,
                  r.fence, r.payment_id, p.status AS payment_status, p.amount AS payment_amount, p.settled_amount, p.settled_currency,
                  p.provider_transaction_id, p.source_id
             FROM refunds AS r JOIN payments AS p ON p.tenant_id = r.tenant_id AND p.id = r.payment_id
            WHERE r.tenant_id = %(tenant_id)s AND r.id = %(id)s FOR UPDATE OF r""",
        {"tenant_id": tenant_id, "id": refund_id},
    )
    assert found is not None, refund_id  # noqa: S101 - a foreign key's worth
    return found


# --- accepted

_TWIN: Final = """
SELECT id, writer_id IS NULL AND amount = %(amount)s AND payment_id = %(payment_id)s AND status = 'succeeded' AS is_same
  FROM refunds
 WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND id <> %(id)s AND provider_refund_id = %(provider_refund_id)s"""

_ACCEPTED: Final = """
UPDATE refunds SET status = 'processing', provider_refund_id = %(provider_refund_id)s, polled = 0, updated_at = ipn_now(),
                   due_at = ipn_now() + %(wait)s::float8 * interval '1 second'
 WHERE tenant_id = %(tenant_id)s AND id = %(id)s"""

# The notification booked the money and told the subscribers; its row goes, and ours, which the client knows by name, stands for both.
_MERGED: Final = """
WITH gone AS (
    DELETE FROM refunds WHERE tenant_id = %(tenant_id)s AND id = %(twin)s
), given_back AS (
    UPDATE payments SET amount_reserved = amount_reserved - %(amount)s WHERE tenant_id = %(tenant_id)s AND id = %(payment_id)s
)
UPDATE refunds SET status = 'succeeded', provider_refund_id = %(provider_refund_id)s, updated_at = ipn_now()
 WHERE tenant_id = %(tenant_id)s AND id = %(id)s"""


async def accept(tx: Transaction, refund: LockedRefund, provider_refund_id: str, *, first_poll_seconds: float) -> bool:
    """The provider has it under this id, and is asked about it in so many seconds; a notification of it may have come before.

    False, and nothing changes, where another refund of the order has this id: then it says nothing about this one.
    """
    row = _row(refund) | {"provider_refund_id": provider_refund_id, "wait": first_poll_seconds}
    twin = await tx.one(dict, _TWIN, row)
    if twin is None:
        await tx.execute(_ACCEPTED, row)
        _report(replace(refund, provider_refund_id=provider_refund_id), "processing")
    elif twin["is_same"]:
        await tx.execute(_MERGED, row | {"twin": twin["id"]})
        _report(replace(refund, provider_refund_id=provider_refund_id), "succeeded")
    return twin is None or twin["is_same"]


# --- ended

_SUCCEEDED: Final = """
WITH ended AS (
    UPDATE refunds SET status = 'succeeded', due_at = NULL, lease_expires_at = NULL, polled = polled + 1, updated_at = ipn_now()
     WHERE tenant_id = %(tenant_id)s AND id = %(id)s
), moved AS (
    UPDATE payments SET amount_reserved = amount_reserved - %(amount)s, amount_refunded = amount_refunded + %(amount)s
     WHERE tenant_id = %(tenant_id)s AND id = %(payment_id)s
)
UPDATE orders SET status = %(status)s, reason = %(order_reason)s, amount_refunded = %(amount_refunded)s,
                  event_count = event_count + 1, updated_at = ipn_now()
 WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s"""

_FAILED: Final = """
WITH ended AS (
    UPDATE refunds SET status = 'failed', failure = %(failure)s, due_at = NULL, lease_expires_at = NULL, polled = polled + %(polled)s,
                       updated_at = ipn_now()
     WHERE tenant_id = %(tenant_id)s AND id = %(id)s
), given_back AS (
    UPDATE payments SET amount_reserved = amount_reserved - %(amount)s WHERE tenant_id = %(tenant_id)s AND id = %(payment_id)s
)
UPDATE orders SET event_count = event_count + 1, updated_at = ipn_now()
 WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s"""


def after(order: LockedOrder, refund: LockedRefund) -> LockedOrder:
    """The order when the money has gone back. Unapplied money was never part of its sums; one that is not paid stays what it is."""
    if refund.payment_status == "unapplied":
        return order
    amount_refunded = order.amount_refunded + refund.amount
    if order.status not in ONCE_PAID:
        return replace(order, amount_refunded=amount_refunded)
    is_all = amount_refunded == order.amount_paid
    status = OrderStatus.REFUNDED if is_all else OrderStatus.PARTIALLY_REFUNDED
    return replace(order, status=str(status), reason=None, amount_refunded=amount_refunded)


async def succeed(tx: Transaction, clock: Clock, order: LockedOrder, refund: LockedRefund) -> None:
    """The money went back: what was reserved is refunded, the order's sum and state follow, and `order.refunded` is sent."""
    now = after(order, refund)
    sums = {"status": now.status, "order_reason": now.reason, "amount_refunded": now.amount_refunded}
    await tx.execute(_SUCCEEDED, _row(refund) | sums)
    await _tell(tx, clock, refund, "succeeded", before=order, now=now)


async def fail(tx: Transaction, clock: Clock, order: LockedOrder, refund: LockedRefund, *, failure: str, polled: bool = False) -> None:
    """The money stays: what was reserved is free again, and `order.refund_failed` is sent. `failure` is a short code."""
    await tx.execute(_FAILED, _row(refund) | {"failure": failure, "polled": int(polled)})
    await _tell(tx, clock, refund, "failed", before=order, now=order)


async def doubt(tx: Transaction, refund: LockedRefund) -> None:
    """Nobody knows whether the money went back. What was reserved stays so, until a person has found out."""
    await tx.execute(
        """UPDATE refunds SET status = 'indeterminate', due_at = NULL, lease_expires_at = NULL, updated_at = ipn_now()
            WHERE tenant_id = %(tenant_id)s AND id = %(id)s""",
        _row(refund),
    )
    _report(refund, "indeterminate")


_EVENT_OF: Final = {"succeeded": "order.refunded", "failed": "order.refund_failed"}


async def _tell(tx: Transaction, clock: Clock, refund: LockedRefund, status: str, *, before: LockedOrder, now: LockedOrder) -> None:
    """The event; its cause is the refund and what it ended as."""
    with_sums = replace(before, amount_refunded=now.amount_refunded)
    cause = (refund.public_id, status)
    event = outbox.order_event(with_sums, _EVENT_OF[status], cause, status=now.status, reason=now.reason, verdict=refund)
    await outbox.stage(tx, clock, refund.tenant_id, [event])
    _report(refund, status)


def _row(refund: LockedRefund) -> dict[str, object]:
    return {
        "tenant_id": refund.tenant_id,
        "id": refund.id,
        "order_id": refund.order_id,
        "payment_id": refund.payment_id,
        "amount": refund.amount,
    }


def _report(refund: LockedRefund, status: str) -> None:
    logs.count(f"refunds.{status}")
    log = logs.get("refunds")
    write = log.error if status == "indeterminate" else log.info
    write(
        "refund.changed",
        refund_id=refund.public_id,
        order_id=refund.order_id,
        source=refund.source_id,
        provider_refund_id=refund.provider_refund_id,
        status=status,
    )
