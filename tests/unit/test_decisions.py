"""What a confirmed operation means for an order: the table of ranks, and money compared exactly."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway.decisions import RANK, Booked, Change, LockedOrder, Nothing, SecondPayment, decide
from ipn_gateway.providers.base import NEGATIVE, Confirmed, Effect
from ipn_gateway.states import DeliveryOutcome, OrderStatus

if TYPE_CHECKING:
    from ipn_gateway.decisions import Decision

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
PENDING = LockedOrder(
    tenant_id="acme",
    order_id="ORD-1",
    source_id="shop",
    status="pending",
    reason=None,
    amount=Decimal("1000.00"),
    currency="BDT",
    amount_paid=Decimal(0),
    amount_refunded=Decimal(0),
    expires_at=None,
    metadata={},
    event_count=0,
    now=NOW,
)
PAYMENT = Confirmed(
    order_id="ORD-1",
    operation_id="V-1",
    effect=Effect.PAID,
    status="VALID",
    account="demo01",
    amount=Decimal("1000.00"),
    currency="BDT",
    provider_transaction_id="BT-1",
    paid_at=NOW,
)
CLOSES = {Effect.FAILED: OrderStatus.FAILED, Effect.CANCELLED: OrderStatus.CANCELLED, Effect.EXPIRED: OrderStatus.EXPIRED}
SETTLED = [OrderStatus.PAID_ON_HOLD, OrderStatus.PAID, OrderStatus.PARTIALLY_REFUNDED, OrderStatus.REFUNDED]
UNPAID = [OrderStatus.PENDING, OrderStatus.FAILED, OrderStatus.CANCELLED, OrderStatus.EXPIRED]


def order(**changed: Any) -> LockedOrder:
    return replace(PENDING, **changed)


def payment(**changed: Any) -> Confirmed:
    return replace(PAYMENT, **changed)


def negative(effect: Effect) -> Confirmed:
    word = effect.name
    return Confirmed("ORD-1", f"ORD-1/{word}/BT-9", effect, word, "demo01", None, None)


def decided(order: LockedOrder, verdict: Confirmed, booked: Booked | None = None, source_id: str = "shop") -> Decision:
    return decide(order, verdict, source_id, booked)


@pytest.mark.case("S113")
def test_the_ranks_are_the_published_ones() -> None:
    """Rank decides, never the time of arrival; an order whose money was given back ranks as paid."""
    assert RANK == {
        "pending": 0,
        "failed": 1,
        "cancelled": 2,
        "expired": 2,
        "paid_on_hold": 3,
        "paid": 4,
        "partially_refunded": 4,
        "refunded": 4,
    }


# Negatives


@pytest.mark.case("S113")
@pytest.mark.parametrize("effect", sorted(NEGATIVE))
@pytest.mark.parametrize("status", list(OrderStatus))
def test_a_negative_is_applied_only_when_it_ranks_higher(status: OrderStatus, effect: Effect) -> None:
    """An equal or lower one is stale: it never takes back what ranks higher, and no order is closed twice."""
    decision = decided(order(status=status), negative(effect))

    if RANK[CLOSES[effect]] > RANK[status]:
        event_type = "order.payment_failed" if effect is Effect.FAILED else f"order.{effect}"
        assert decision == Change(CLOSES[effect], "provider", event_type, paid=False)
    else:
        assert decision == Nothing(DeliveryOutcome.STALE)


@pytest.mark.case("S113", "B14")
@pytest.mark.parametrize("status", list(OrderStatus))
def test_an_informative_word_is_stale_whatever_the_order_is(status: OrderStatus) -> None:
    """PENDING and PROCESSING say nothing that an order does not know."""
    assert decided(order(status=status), negative(Effect.INFORMATIVE)) == Nothing(DeliveryOutcome.STALE)


@pytest.mark.parametrize("status", list(OrderStatus))
def test_a_word_that_is_not_known_is_held_whatever_the_order_is(status: OrderStatus) -> None:
    """A person decides what it means; nothing is guessed."""
    decision = decided(order(status=status), negative(Effect.UNKNOWN))

    assert decision == Nothing(DeliveryOutcome.HELD, "unknown_status", announced="notification.held")


# Money


@pytest.mark.case("S113", "B17")
@pytest.mark.parametrize("status", UNPAID)
def test_money_pays_an_order_that_the_provider_closed(status: OrderStatus) -> None:
    """A negative of the provider never closes an order against money."""
    decision = decided(order(status=status, reason=None if status == "pending" else "provider"), payment())

    assert decision == Change(OrderStatus.PAID, None, "order.paid", paid=True)


@pytest.mark.parametrize(("status", "reason"), [("cancelled", "merchant"), ("expired", "expired")])
def test_money_for_an_order_that_we_closed_waits_for_a_person(status: str, reason: str) -> None:
    """The goods may be gone: the money is recorded, and a person releases or refunds."""
    decision = decided(order(status=status, reason=reason), payment())

    assert decision == Change(OrderStatus.PAID_ON_HOLD, "late_payment", "order.paid_on_hold", paid=True)


@pytest.mark.parametrize(("seconds", "status"), [(-1, "paid"), (0, "paid"), (1, "paid_on_hold")])
def test_money_is_late_when_it_was_paid_after_the_expiry(seconds: int, status: str) -> None:
    """What counts is when the customer paid, to the second, not when the notification came."""
    late = payment(paid_at=NOW + timedelta(seconds=seconds))

    decision = decided(order(expires_at=NOW), late)

    assert isinstance(decision, Change)
    assert (decision.status, decision.reason) == (status, "late_payment" if status == "paid_on_hold" else None)


@pytest.mark.case("B49")
@pytest.mark.parametrize("status", UNPAID)
def test_risky_money_is_recorded_and_held(status: OrderStatus) -> None:
    """The money is real and the goods must wait."""
    decision = decided(order(status=status), payment(risk=True))

    assert decision == Change(OrderStatus.PAID_ON_HOLD, "risk", "order.paid_on_hold", paid=True)


@pytest.mark.case("S106", "B23")
@pytest.mark.parametrize("amount", ["999.99", "1000.01", "1000.001", "400", "2000", "0.01"])
def test_an_amount_that_differs_is_held(amount: str) -> None:
    """Without a tolerance, in either direction, and no part of the sum counts as the sum."""
    assert decided(order(), payment(amount=Decimal(amount))) == Nothing(DeliveryOutcome.HELD, "amount", "notification.held")


@pytest.mark.case("B23")
@pytest.mark.parametrize("written", ["1000", "1000.0", "1000.00", "1000.000", "01000.00"])
def test_amounts_are_compared_as_numbers(written: str) -> None:
    """How a number is written changes nothing."""
    assert isinstance(decided(order(), payment(amount=Decimal(written))), Change)


@pytest.mark.case("S106")
def test_another_currency_is_held_even_for_the_same_number() -> None:
    """1000.00 USD is no payment of 1000.00 BDT."""
    assert decided(order(), payment(currency="USD")) == Nothing(DeliveryOutcome.HELD, "currency", "notification.held")


@pytest.mark.case("S113", "B133")
@pytest.mark.parametrize("risk", [False, True])
@pytest.mark.parametrize("status", SETTLED)
def test_a_second_payment_is_booked_whatever_it_is_worth(status: OrderStatus, risk: bool) -> None:
    """It is never stale, lifts no hold, and is real money also when its amount is another one."""
    second = payment(operation_id="V-2", provider_transaction_id="BT-2", amount=Decimal("12.34"), risk=risk)

    assert decided(order(status=status, amount_paid=Decimal(1000)), second) == SecondPayment()


@pytest.mark.case("S106", "B63")
@pytest.mark.parametrize("verdict", [payment(), payment(amount=Decimal(1)), *map(negative, sorted(NEGATIVE))])
@pytest.mark.parametrize("status", ["pending", "paid"])
def test_what_another_source_of_the_tenant_confirms_is_held(status: str, verdict: Confirmed) -> None:
    """The order names its source; money that came in elsewhere is shown to a person."""
    decision = decided(order(status=status), verdict, source_id="other")

    assert decision == Nothing(DeliveryOutcome.HELD, "source_mismatch", "notification.held")


# What is in the books already

LEDGER = Booked("ledger", "ORD-1", Decimal(1000), "BDT")


@pytest.mark.case("S110")
@pytest.mark.parametrize("kind", ["ledger", "payment"])
@pytest.mark.parametrize("status", ["pending", "paid", "paid_on_hold", "refunded"])
def test_the_same_money_again_is_a_duplicate(kind: str, status: str) -> None:
    """Same operation or same movement of money, same order, same sum: nothing is done."""
    assert decided(order(status=status), payment(), replace(LEDGER, kind=kind)) == Nothing(DeliveryOutcome.DUPLICATE)


@pytest.mark.case("B08")
def test_the_same_money_through_another_source_is_a_duplicate() -> None:
    """The books come before the question whose source it is: one credit, and no alarm about it."""
    assert decided(order(), payment(), replace(LEDGER, kind="payment"), source_id="other") == Nothing(DeliveryOutcome.DUPLICATE)


@pytest.mark.case("S110")
@pytest.mark.parametrize("changed", [{"amount": Decimal(999)}, {"currency": "USD"}, {"order_id": "ORD-2"}])
def test_other_money_for_an_applied_operation_is_a_conflict(changed: dict[str, Any]) -> None:
    """The provider says two things about one operation: an alarm, and a person decides."""
    decision = decided(order(status="paid"), payment(), replace(LEDGER, **changed))

    assert decision == Nothing(
        DeliveryOutcome.CONFLICT, "amount", announced="notification.conflict", alert="other money for an applied operation"
    )


@pytest.mark.case("S100")
@pytest.mark.parametrize("changed", [{"amount": Decimal(999)}, {"currency": "USD"}, {"order_id": "ORD-2"}])
def test_a_reused_payment_reference_is_held(changed: dict[str, Any]) -> None:
    """The provider's transaction id under another operation, with another order or sum: neither booked nor thrown away."""
    decision = decided(order(), payment(), replace(LEDGER, kind="payment", **changed))

    assert decision == Nothing(DeliveryOutcome.HELD, "payment_reference_reused", "notification.held")


@pytest.mark.parametrize("effect", sorted(NEGATIVE))
def test_a_negative_that_is_booked_is_a_duplicate(effect: Effect) -> None:
    """Negatives carry no money that could differ."""
    booked = Booked("ledger", "ORD-1", None, None)

    assert decided(order(status="failed"), negative(effect), booked) == Nothing(DeliveryOutcome.DUPLICATE)
