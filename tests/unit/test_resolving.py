"""What a person's decision means for an order: a pure function, like that of the workers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipn_gateway.decisions import RANK, Booked, Change, LockedOrder, Nothing, decide, resolve
from ipn_gateway.providers.base import Confirmed, Effect
from ipn_gateway.states import UNPAID, DeliveryOutcome, OrderStatus

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ORDER = LockedOrder("acme", "ORD-1", "shop", "pending", None, Decimal(1000), "BDT", Decimal(), Decimal(), None, {}, 0, NOW)
PAID = Confirmed("ORD-1", "V-1", Effect.PAID, "VALID", "demo01", Decimal(400), "BDT", "BT-1", paid_at=NOW)

amounts = st.decimals(min_value="0.01", max_value="5000", places=2)


@given(parts=st.lists(amounts, min_size=1, max_size=6))
def test_paid_is_what_has_all_that_is_due(parts: list[Decimal]) -> None:
    """Whatever the parts: pending and silent below the amount, paid from there on, overpaid above it; then nothing more is applied."""
    order = ORDER
    for number, part in enumerate(parts):
        decision = resolve(order, replace(PAID, operation_id=f"V-{number}", amount=part), None)
        if order.status == "paid":
            assert decision == Nothing(DeliveryOutcome.CONFLICT, "second_payment")
            continue
        assert isinstance(decision, Change)
        total = order.amount_paid + part
        assert decision.status == ("paid" if total >= ORDER.amount else "pending")
        assert decision.event_types == [
            *(["order.paid"] if total >= ORDER.amount else []),
            *(["order.overpaid"] if total > ORDER.amount else []),
        ]
        order = replace(order, status=decision.status, amount_paid=total)


@pytest.mark.parametrize("status", UNPAID)
def test_a_part_leaves_the_order_as_it_is(status: OrderStatus) -> None:
    """Status and reason, whatever they are."""
    order = replace(ORDER, status=status, reason="merchant")

    assert resolve(order, PAID, None) == Change(status, "merchant", None, paid=True)


@pytest.mark.parametrize("status", [status for status in RANK if status not in UNPAID])
def test_money_for_a_paid_order_is_a_second_payment(status: str) -> None:
    """On hold and refunded ones too."""
    assert resolve(replace(ORDER, status=status), replace(PAID, amount=Decimal(1000)), None) == Nothing(
        DeliveryOutcome.CONFLICT, "second_payment"
    )


def test_risk_and_late_money_stay_on_hold() -> None:
    """A person who applies decides about the amount, not about these."""
    full = replace(PAID, amount=Decimal(1100))
    late = replace(ORDER, expires_at=NOW - timedelta(hours=1))

    assert resolve(ORDER, replace(full, risk=True), None) == Change(
        OrderStatus.PAID_ON_HOLD, "risk", "order.paid_on_hold", paid=True, overpaid=True
    )
    assert resolve(late, full, None) == Change(OrderStatus.PAID_ON_HOLD, "late_payment", "order.paid_on_hold", paid=True, overpaid=True)


def test_what_cannot_be_applied_says_why() -> None:
    """Booked before, another currency, a word that is no payment, a negative that the order has left behind."""
    failed = replace(PAID, effect=Effect.FAILED, amount=None, currency=None)

    assert resolve(ORDER, PAID, Booked("ledger", "ORD-1", Decimal(400), "BDT")) == Nothing(DeliveryOutcome.DUPLICATE, "booked")
    assert resolve(ORDER, replace(PAID, currency="USD"), None) == Nothing(DeliveryOutcome.HELD, "currency", "notification.held")
    assert resolve(ORDER, replace(PAID, effect=Effect.UNKNOWN), None) == Nothing(
        DeliveryOutcome.HELD, "unknown_status", "notification.held"
    )
    assert resolve(replace(ORDER, status="paid"), failed, None) == Nothing(DeliveryOutcome.STALE)
    assert resolve(ORDER, failed, None) == Change(OrderStatus.FAILED, "provider", "order.payment_failed", paid=False)


@given(amount=amounts)
def test_after_a_part_whatever_comes_waits_for_a_person(amount: Decimal) -> None:
    """Also the order's exact amount, and exactly what is missing."""
    order = replace(ORDER, amount_paid=Decimal(400))

    for part in (amount, Decimal(1000), Decimal(600)):
        assert decide(order, replace(PAID, amount=part), "shop", None) == Nothing(DeliveryOutcome.HELD, "amount", "notification.held")
