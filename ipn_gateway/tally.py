"""The demo's accounts: what the provider says it sent, what the gateway says it did, what the subscriber got. Pure.

Each of the three counts for itself; `differences` compares them. All of them must agree, or the demo has failed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    Shown = Mapping[str, Any]
    """An object as the gateway's API shows it."""

GENUINE_ENDS: Final = frozenset({"applied", "duplicate", "stale"})
FORGED_ENDS: Final = frozenset({"rejected", "malformed", "duplicate", "stale"})
OPEN_ENDS: Final = frozenset({"received", "parked"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The provider's account. `paid` and `risky` map the `val_id` of each payment to its order and amount."""

    paid: Mapping[str, tuple[str, Decimal]]
    risky: Mapping[str, tuple[str, Decimal]]
    notifications: int
    duplicates: int
    forged: Collection[str]
    """The delivery ids that the forgeries were answered with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Booked:
    """The gateway's account, as its API lists it."""

    orders: Sequence[Shown]
    notification_deliveries: Sequence[Shown]
    events: Sequence[Shown]
    event_deliveries: Sequence[Shown]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The subscriber's account. `events` has each verified event once; `refused` counts requests whose signature did not match."""

    events: Sequence[Shown]
    repeats: int
    refused: int
    altered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the demo counted. The first block is about the payments of paid orders alone, so that its numbers must be equal."""

    payments: int
    """Payments that the provider confirms, without risk."""
    applied: int
    """Of these, how many the gateway booked on their order, in full."""
    orders_paid: int
    events: int
    """`order.paid` in the gateway's log."""
    events_delivered: int
    """`order.paid` that the subscriber verified, each counted once."""
    lost: int
    """Payments that were not booked, or whose event did not arrive."""
    doubled: int
    """Bookings, or `order.paid` events, beyond one for each payment."""

    notifications_sent: int
    notifications_stored: int
    duplicates: int
    duplicates_sent: int
    stale: int
    rejected: int
    malformed: int
    undecided: int
    unexpected: int
    """Genuine notifications that ended otherwise than applied, duplicate or stale."""
    forgeries_sent: int
    forgeries_applied: int
    found_by_sweep: int
    """Payments that no notification told of in time."""

    amount_paid: str
    amount_booked: str
    orders_on_hold: int
    orders_on_hold_expected: int
    orders_failed: int
    orders_cancelled: int
    other_events: int
    other_events_delivered: int
    event_repeats: int
    """Events that the subscriber got again, by design: it had refused them or its answer was lost."""
    signatures_refused: int
    bodies_altered: int


def tally(sent: Sent, booked: Booked, heard: Heard) -> Summary:
    """Count all three accounts."""
    statuses = Counter(order["status"] for order in booked.orders)
    forged = [one for one in booked.notification_deliveries if one["id"] in sent.forged]
    genuine = [one for one in booked.notification_deliveries if one["id"] not in sent.forged]
    outcomes = Counter(one["outcome"] for one in booked.notification_deliveries)
    bookings = _bookings(booked.orders)
    paid_orders = {order_id for order_id, _ in sent.paid.values()}
    events = [event["order_id"] for event in booked.events if event["type"] == "order.paid"]
    arrived = [event["data"]["order_id"] for event in heard.events if event["type"] == "order.paid"]
    told = {one["operation_id"] for one in genuine if one["outcome"] == "applied"}
    return Summary(
        payments=len(sent.paid),
        applied=sum(bookings[booking] > 0 for booking in _payments(sent.paid)),
        orders_paid=statuses["paid"],
        events=len(events),
        events_delivered=len(arrived),
        lost=sum(bookings[booking] == 0 for booking in _payments(sent.paid)) + len(paid_orders - set(arrived)),
        doubled=_beyond_one(bookings) + _beyond_one(Counter(events)) + _beyond_one(Counter(arrived)),
        notifications_sent=sent.notifications,
        notifications_stored=len(booked.notification_deliveries),
        duplicates=outcomes["duplicate"],
        duplicates_sent=sent.duplicates,
        stale=outcomes["stale"],
        rejected=outcomes["rejected"],
        malformed=outcomes["malformed"],
        undecided=sum(outcomes[end] for end in OPEN_ENDS),
        unexpected=sum(one["outcome"] not in GENUINE_ENDS | OPEN_ENDS for one in genuine),
        forgeries_sent=len(sent.forged),
        forgeries_applied=sum(one["outcome"] not in FORGED_ENDS | OPEN_ENDS for one in forged),
        found_by_sweep=len(set(sent.paid) - told),
        amount_paid=str(_total(sent.paid) + _total(sent.risky)),
        amount_booked=str(sum((Decimal(order["amount_paid"]) for order in booked.orders), Decimal("0.00"))),
        orders_on_hold=statuses["paid_on_hold"],
        orders_on_hold_expected=len(sent.risky),
        orders_failed=statuses["failed"],
        orders_cancelled=statuses["cancelled"],
        other_events=len(booked.events) - len(events),
        other_events_delivered=len(heard.events) - len(arrived),
        event_repeats=heard.repeats,
        signatures_refused=heard.refused,
        bodies_altered=heard.altered,
    )


def _payments(payments: Mapping[str, tuple[str, Decimal]]) -> Iterable[tuple[str, str, Decimal]]:
    return ((val_id, order_id, amount) for val_id, (order_id, amount) in payments.items())


def _bookings(orders: Sequence[Shown]) -> Counter[tuple[str, str, Decimal]]:
    """How often each payment was booked, by what it is: operation, order and amount."""
    return Counter(
        (payment["operation_id"], order["order_id"], Decimal(payment["amount"])) for order in orders for payment in order["payments"]
    )


def _beyond_one(counts: Counter[Any]) -> int:
    return sum(count - 1 for count in counts.values() if count > 1)


def _total(payments: Mapping[str, tuple[str, Decimal]]) -> Decimal:
    return sum((amount for _, amount in payments.values()), Decimal("0.00"))


def settled(booked: Booked) -> bool:
    """Whether the gateway has nothing left to do: everything that came is decided, every event is where it should be."""
    return not any(one["outcome"] in OPEN_ENDS for one in booked.notification_deliveries) and all(
        one["status"] != "pending" for one in booked.event_deliveries
    )


def differences(summary: Summary, *, payments: int) -> list[str]:
    """Where the accounts differ, a sentence each; none when all is well. `payments` is how many were asked for."""
    return [sentence for differs, sentence in _comparisons(summary, payments) if differs]


def _comparisons(it: Summary, payments: int) -> Iterable[tuple[bool, str]]:
    yield it.payments != payments, f"{payments} payments were to be made, the provider knows {it.payments}."
    yield it.applied != it.payments, f"Of {it.payments} payments {it.applied} were applied."
    yield it.orders_paid != it.payments, f"{it.payments} payments made {it.orders_paid} orders paid."
    yield it.events != it.payments, f"{it.payments} payments led to {it.events} events order.paid."
    yield it.events_delivered != it.events, f"Of {it.events} events order.paid {it.events_delivered} were delivered."
    yield it.other_events_delivered != it.other_events, f"Of {it.other_events} other events {it.other_events_delivered} were delivered."
    yield it.lost > 0, f"{it.lost} payments or their events were lost."
    yield it.doubled > 0, f"{it.doubled} payments or their events count more than once."
    yield it.amount_booked != it.amount_paid, f"{it.amount_paid} was paid, {it.amount_booked} was booked."
    yield it.orders_on_hold != it.orders_on_hold_expected, (f"{it.orders_on_hold_expected} risky payments hold {it.orders_on_hold} orders.")
    yield (
        it.notifications_stored != it.notifications_sent,
        (f"{it.notifications_sent} notifications were sent, {it.notifications_stored} are stored."),
    )
    yield it.duplicates < it.duplicates_sent, f"{it.duplicates_sent} repeats were sent, {it.duplicates} ended as duplicates."
    yield it.undecided > 0, f"{it.undecided} notifications are not decided yet."
    yield it.unexpected > 0, f"{it.unexpected} genuine notifications were not taken for what they are."
    yield it.forgeries_applied > 0, f"{it.forgeries_applied} forgeries were believed."
    yield it.signatures_refused > 0, f"{it.signatures_refused} webhooks did not verify."
    yield it.bodies_altered > 0, f"{it.bodies_altered} events came again with other bytes."
