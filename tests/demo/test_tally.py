"""The demo's check can fail: whatever is lost, doubled or believed wrongly makes the accounts differ."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway.tally import Booked, Heard, Sent, differences, settled, tally

if TYPE_CHECKING:
    from collections.abc import Callable

    Accounts = dict[str, Any]


def _order(order_id: str, status: str, *payments: tuple[str, str]) -> dict[str, Any]:
    booked = [{"operation_id": val_id, "amount": amount} for val_id, amount in payments]
    paid = str(sum((Decimal(amount) for _, amount in payments), Decimal("0.00")))
    return {"order_id": order_id, "status": status, "amount_paid": paid, "payments": booked}


def _delivery(number: int, outcome: str, operation_id: str | None = None) -> dict[str, Any]:
    return {"id": f"ndl_{number}", "outcome": outcome, "operation_id": operation_id}


def _event(order_id: str, kind: str) -> dict[str, Any]:
    return {"type": kind, "order_id": order_id, "data": {"order_id": order_id}}


def accounts() -> Accounts:
    """Two payments, one told twice and one found by asking; a risky one; a declined order; two forgeries. All is well."""
    events = [_event("A", "order.paid"), _event("B", "order.paid"), _event("C", "order.paid_on_hold"), _event("D", "order.payment_failed")]
    return {
        "sent": Sent(
            paid={"v-a": ("A", Decimal("10.00")), "v-b": ("B", Decimal("20.00"))},
            risky={"v-c": ("C", Decimal("30.00"))},
            notifications=6,
            duplicates=1,
            forged={"ndl_5", "ndl_6"},
        ),
        "orders": [
            _order("A", "paid", ("v-a", "10.00")),
            _order("B", "paid", ("v-b", "20.00")),
            _order("C", "paid_on_hold", ("v-c", "30.00")),
            _order("D", "failed"),
        ],
        "notification_deliveries": [
            _delivery(1, "applied", "v-a"),
            _delivery(2, "duplicate", "v-a"),
            _delivery(3, "applied", "v-c"),
            _delivery(4, "applied", "D/FAILED"),
            _delivery(5, "rejected"),
            _delivery(6, "malformed"),
        ],
        "events": events,
        "event_deliveries": [{"status": "delivered"} for _ in events],
        "heard": Heard(events=deepcopy(events), repeats=1, refused=0, altered=0),
    }


def _booked(given: Accounts) -> Booked:
    return Booked(**{name: given[name] for name in ("orders", "notification_deliveries", "events", "event_deliveries")})


def _wrong(given: Accounts, *, payments: int = 2) -> list[str]:
    return differences(tally(given["sent"], _booked(given), given["heard"]), payments=payments)


def test_accounts_that_agree_have_no_differences():
    """Payments, effects, paid orders and delivered events are equal; what is beside them is counted apart."""
    given = accounts()

    summary = tally(given["sent"], _booked(given), given["heard"])

    assert differences(summary, payments=2) == []
    assert (summary.payments, summary.applied, summary.orders_paid, summary.events, summary.events_delivered) == (2, 2, 2, 2, 2)
    assert (summary.lost, summary.doubled, summary.found_by_sweep, summary.duplicates, summary.rejected) == (0, 0, 1, 1, 1)
    assert (summary.orders_on_hold, summary.orders_failed, summary.other_events, summary.forgeries_sent) == (1, 1, 2, 2)
    assert summary.amount_paid == summary.amount_booked == "60.00"


def _lose_a_booking(given: Accounts) -> None:
    given["orders"][1] = _order("B", "pending")


def _lose_an_event(given: Accounts) -> None:
    given["heard"].events.pop(0)


def _stage_no_event(given: Accounts) -> None:
    given["events"].pop(0)
    given["heard"].events.pop(0)


def _book_twice(given: Accounts) -> None:
    given["orders"][0]["payments"] *= 2


def _tell_twice(given: Accounts) -> None:
    given["events"].append(_event("A", "order.paid"))
    given["heard"].events.append(_event("A", "order.paid"))


def _book_on_another_order(given: Accounts) -> None:
    given["orders"][0]["payments"], given["orders"][1]["payments"] = given["orders"][1]["payments"], given["orders"][0]["payments"]


def _book_too_little(given: Accounts) -> None:
    given["orders"][0] = _order("A", "paid", ("v-a", "1.00"))


def _pay_less_often(given: Accounts) -> None:
    given["sent"] = replace(given["sent"], paid={"v-a": ("A", Decimal("10.00"))})


def _believe_a_forgery(given: Accounts) -> None:
    given["notification_deliveries"][4]["outcome"] = "applied"


def _refuse_the_genuine(given: Accounts) -> None:
    given["notification_deliveries"][0]["outcome"] = "rejected"


def _forget_a_notification(given: Accounts) -> None:
    given["notification_deliveries"].pop()


def _take_no_duplicate(given: Accounts) -> None:
    given["notification_deliveries"][1]["outcome"] = "stale"


def _decide_nothing(given: Accounts) -> None:
    given["notification_deliveries"][0]["outcome"] = "received"


def _release_the_risky(given: Accounts) -> None:
    given["orders"][2]["status"] = "paid"


def _sign_badly(given: Accounts) -> None:
    given["heard"] = replace(given["heard"], refused=1)


def _alter_a_body(given: Accounts) -> None:
    given["heard"] = replace(given["heard"], altered=1)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_lose_a_booking, "1 payments or their events were lost."),
        (_lose_an_event, "1 payments or their events were lost."),
        (_stage_no_event, "2 payments led to 1 events order.paid."),
        (_book_twice, "1 payments or their events count more than once."),
        (_tell_twice, "2 payments or their events count more than once."),
        (_book_on_another_order, "Of 2 payments 0 were applied."),
        (_book_too_little, "60.00 was paid, 51.00 was booked."),
        (_pay_less_often, "2 payments were to be made, the provider knows 1."),
        (_believe_a_forgery, "1 forgeries were believed."),
        (_refuse_the_genuine, "1 genuine notifications were not taken for what they are."),
        (_forget_a_notification, "6 notifications were sent, 5 are stored."),
        (_take_no_duplicate, "1 repeats were sent, 0 ended as duplicates."),
        (_decide_nothing, "1 notifications are not decided yet."),
        (_release_the_risky, "1 risky payments hold 0 orders."),
        (_sign_badly, "1 webhooks did not verify."),
        (_alter_a_body, "1 events came again with other bytes."),
    ],
)
def test_every_fault_makes_the_accounts_differ(spoil: Callable[[Accounts], None], sentence: str):
    """One thing wrong in one of the three accounts is found and said."""
    given = accounts()
    spoil(given)

    assert sentence in _wrong(given)


def test_work_that_is_left_is_seen():
    """The demo waits while a notification is undecided or an event is on its way, and no longer."""
    given = accounts()
    busy = deepcopy(given)
    busy["event_deliveries"][0]["status"] = "pending"

    assert settled(_booked(given))
    assert not settled(_booked(busy))
