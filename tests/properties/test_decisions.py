"""Whatever comes, in whatever order and however often: the decisions lead to the same order and count money once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipn_gateway.decisions import RANK, Booked, Change, LockedOrder, Nothing, decide
from ipn_gateway.providers.base import Confirmed, Effect
from ipn_gateway.states import DeliveryOutcome

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
AMOUNT = Decimal("1000.00")


@dataclass
class Books:
    """An order, the ledger and the payments, kept as the database keeps them, with each decision written into them."""

    order: LockedOrder = field(
        default_factory=lambda: LockedOrder(
            "acme", "ORD-1", "shop", "pending", None, AMOUNT, "BDT", Decimal(0), Decimal(0), None, {}, 0, NOW
        )
    )
    ledger: dict[tuple[str, Effect], Booked] = field(default_factory=dict)
    payments: dict[str, Booked] = field(default_factory=dict)
    applied: list[Confirmed] = field(default_factory=list)
    outcomes: list[DeliveryOutcome] = field(default_factory=list)

    def take(self, verdict: Confirmed) -> None:
        """Decide with what is booked, and write what was decided."""
        booked = self.ledger.get((verdict.operation_id, verdict.effect))
        if booked is None and verdict.effect is Effect.PAID:
            booked = self.payments.get(verdict.provider_transaction_id or "")
        decision = decide(self.order, verdict, "shop", booked)
        if isinstance(decision, Nothing):
            self.outcomes.append(decision.outcome)
            return
        row = Booked("ledger", verdict.order_id, verdict.amount, verdict.currency)
        self.ledger[verdict.operation_id, verdict.effect] = row
        if verdict.effect is Effect.PAID:
            self.payments[verdict.provider_transaction_id or ""] = replace(row, kind="payment")
        if isinstance(decision, Change):
            added = verdict.amount if decision.paid and verdict.amount else Decimal(0)
            self.order = replace(self.order, status=decision.status, reason=decision.reason, amount_paid=self.order.amount_paid + added)
            self.applied.append(verdict)
        self.outcomes.append(DeliveryOutcome.APPLIED if isinstance(decision, Change) else DeliveryOutcome.CONFLICT)

    @property
    def state(self) -> tuple[str, str | None, Decimal]:
        return self.order.status, self.order.reason, self.order.amount_paid


def taken(verdicts: list[Confirmed] | tuple[Confirmed, ...]) -> Books:
    books = Books()
    for verdict in verdicts:
        books.take(verdict)
    return books


def payment(name: str, amount: Decimal = AMOUNT, *, risk: bool = False) -> Confirmed:
    return Confirmed("ORD-1", f"V-{name}", Effect.PAID, "VALID", "demo01", amount, "BDT", f"BT-{name}", risk=risk, paid_at=NOW)


def word(effect: Effect) -> Confirmed:
    return Confirmed("ORD-1", f"ORD-1/{effect.name}", effect, effect.name, "demo01", None, None)


FAILED, CANCELLED, PENDING = word(Effect.FAILED), word(Effect.CANCELLED), word(Effect.INFORMATIVE)
ALL_SORTS = [
    *map(word, sorted(set(Effect) - {Effect.PAID})),
    *(payment(name, risk=risk) for name, risk in (("A", False), ("B", False), ("C", True))),
    *(payment(name, Decimal(amount)) for name, amount in (("D", "999.99"), ("E", "400"), ("F", "2000.001"))),
]


@pytest.mark.case("B16", "S112")
def test_every_order_of_one_payment_and_three_pendings_is_paid() -> None:
    """All 24 permutations: paid, and each PENDING is stale whenever it comes."""
    books = [taken(order) for order in permutations([PENDING, PENDING, payment("A"), PENDING])]

    assert len(books) == 24
    assert {one.state for one in books} == {("paid", None, AMOUNT)}
    assert all(sorted(one.outcomes) == ["applied", "stale", "stale", "stale"] for one in books)


@pytest.mark.case("S112", "S113")
@given(st.permutations([FAILED, CANCELLED, PENDING, payment("A")]), st.lists(st.integers(0, 3), max_size=8))
def test_one_payment_wins_in_every_order_and_with_every_repeat(order: list[Confirmed], repeated: list[int]) -> None:
    """Failures, cancellations and pendings around a payment, shuffled and repeated, all end in the same paid order."""
    books = taken([*order, *(order[index] for index in repeated)])

    assert books.state == ("paid", None, AMOUNT)
    assert [verdict for verdict in books.applied if verdict.effect is Effect.PAID] == [payment("A")]


@pytest.mark.case("S112", "S113")
@given(st.lists(st.sampled_from([FAILED, CANCELLED, PENDING]), min_size=1, max_size=10).flatmap(lambda some: st.permutations(some * 2)))
def test_negatives_alone_converge_too(order: list[Confirmed]) -> None:
    """The highest rank that was said is what remains, whoever said it first."""
    books = taken(order)

    expected = "cancelled" if CANCELLED in order else "failed" if FAILED in order else "pending"
    assert books.state[0] == expected
    assert books.order.amount_paid == 0


@pytest.mark.case("S110", "S113", "B03")
@given(st.lists(st.sampled_from(ALL_SORTS), max_size=30))
def test_money_is_counted_once_and_never_made_up(verdicts: list[Confirmed]) -> None:
    """An order holds one payment at most, of exactly its amount; every further one is booked beside it, once."""
    books = taken(verdicts)

    paid = [verdict for verdict in books.applied if verdict.effect is Effect.PAID]
    booked = {operation for operation, effect in books.ledger if effect is Effect.PAID}
    assert len(paid) <= 1
    assert [verdict.amount for verdict in paid] == [AMOUNT] * len(paid)
    assert books.order.amount_paid == AMOUNT * len(paid)
    assert booked == {verdict.operation_id for verdict in verdicts[_first_whole(verdicts) :] if verdict.effect is Effect.PAID}


@given(st.lists(st.sampled_from(ALL_SORTS), max_size=30))
def test_an_order_never_goes_down_in_rank(verdicts: list[Confirmed]) -> None:
    """Whatever is said afterwards, what is known stays known."""
    books = Books()
    ranks = []
    for verdict in verdicts:
        books.take(verdict)
        ranks.append(RANK[books.order.status])

    assert ranks == sorted(ranks)


@given(st.lists(st.sampled_from(ALL_SORTS), min_size=1, max_size=30))
def test_saying_everything_twice_changes_nothing(verdicts: list[Confirmed]) -> None:
    """A second round of the same news finds the books as they are: no change, and no second booking."""
    books = taken(verdicts)
    once = books.state, dict(books.ledger), dict(books.payments)
    late = [verdict for verdict in verdicts if (verdict.operation_id, verdict.effect) in books.ledger or verdict.effect is not Effect.PAID]
    for verdict in late:
        books.take(verdict)

    assert (books.state, books.ledger, books.payments) == once
    assert set(books.outcomes[len(verdicts) :]) <= {DeliveryOutcome.DUPLICATE, DeliveryOutcome.STALE, DeliveryOutcome.HELD}


def _first_whole(verdicts: list[Confirmed]) -> int:
    """Where the first payment of the whole sum stands, behind the last verdict when there is none."""
    whole = (index for index, verdict in enumerate(verdicts) if verdict.effect is Effect.PAID and verdict.amount == AMOUNT)
    return next(whole, len(verdicts))
