"""The sweep: unpaid orders are asked for at their provider on a published schedule and at their expiry, and close at the latest then."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from psycopg import errors as pg
from structlog.testing import capture_logs

from ipn_gateway import reconciliation
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.world import World


async def asked_at(world: World, moments: Sequence[float]) -> list[float]:
    """At which of these seconds after now a question is asked; each moment is looked at just before, and then exactly."""
    asked: list[float] = []
    now = 0.0
    for moment in moments:
        for at in (moment - 5, moment):  # more than the test itself lasts
            world.rt.clock.advance(seconds=at - now)
            now = at
            before = world.questions
            await world.sweep()
            if world.questions > before:
                asked.append(at)
    return asked


# When


async def test_an_unpaid_order_is_asked_for_on_the_published_schedule(world: World) -> None:
    """5 minutes, 15 minutes, 1 hour, 6 hours and 24 hours after its creation, and then no more."""
    await world.order("ORD-1")
    schedule = [300, 900, 3600, 21600, 86400]

    asked = await asked_at(world, [60, *schedule, 100_000, 1_000_000])

    assert list(world.rt.settings.sweep_schedule) == schedule
    assert asked == schedule
    assert await world.value("SELECT count(*) FROM sweeps") == 0
    assert await world.status("ORD-1") == "pending"


async def test_it_is_asked_for_at_its_expiry_too(world: World) -> None:
    """Between two moments of the schedule, and on the second."""
    await _expiring(world, minutes=30)

    assert await asked_at(world, [300, 900, 1800, 3600]) == [300, 900, 1800, 3600]


async def test_an_expiry_before_the_first_moment_comes_first(world: World) -> None:
    """An order that is short-lived is not asked for only after its life."""
    await _expiring(world, minutes=2)

    assert await asked_at(world, [120, 300]) == [120, 300]
    assert await world.status("ORD-1") == "expired"


async def test_moments_that_were_missed_are_asked_for_once(world: World) -> None:
    """Maintenance was away for two hours: one question, then on with the schedule."""
    await world.order("ORD-1")
    world.rt.clock.advance(hours=2)
    await world.sweep()
    assert world.questions == 1

    world.rt.clock.advance(hours=4, seconds=-1)
    await world.sweep()
    assert world.questions == 1

    world.rt.clock.advance(seconds=1)
    await world.sweep()
    assert world.questions == 2


async def test_an_answer_that_says_nothing_is_asked_for_again_soon(world: World) -> None:
    """Ten minutes later at the latest, also behind the last moment of the schedule, until the answer is clear."""
    await world.order("ORD-1")
    world.rt.clock.advance(hours=24)
    world.fault("query", "status500", times=3)
    await world.sweep()

    assert await asked_at(world, [600, 1200, 1800, 2400, 3000]) == [600, 1200, 1800]
    assert await world.value("SELECT count(*) FROM sweeps") == 0


async def test_an_answer_that_stays_unclear_is_asked_for_ever_more_rarely(world: World) -> None:
    """A word that nobody knows, for a month: from the third day on each wait is a tenth of the order's age, and never the last."""
    await world.order("ORD-1")
    world.pay("ORD-1", status="HALTED")
    world.rt.clock.advance(days=3)
    await world.sweep()
    waits: list[float] = []
    while sum(waits) < timedelta(days=27).total_seconds():
        waits.append(float(await world.value("SELECT extract(epoch FROM due_at - ipn_now()) FROM sweeps")))
        world.rt.clock.advance(seconds=waits[-1])
        await world.sweep()

    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(timedelta(days=0.3).total_seconds(), rel=0.01)
    assert len(waits) < 40


# What it finds


@pytest.mark.case("S107", "S141")
async def test_a_payment_whose_notification_never_came_is_found(world: World) -> None:
    """Applied by the same path under the same key; the order is not asked for again, and a late notification is a duplicate."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    world.rt.clock.advance(seconds=300)
    await world.sweep()

    assert await world.status("ORD-1") == "paid"
    assert await world.event_types() == ["order.paid"]
    assert await world.rows("SELECT origin, operation_id FROM processed_notifications") == [
        {"origin": "sweep", "operation_id": fields["val_id"]}
    ]
    assert await world.value("SELECT count(*) FROM sweeps") == 0

    receipt = await world.notify(fields)
    await world.drain()

    assert await world.outcome(receipt) == ("duplicate", None)


async def test_a_paid_order_is_not_asked_for(world: World) -> None:
    """Its sweep leaves with the payment; no question, no event."""
    await world.order("ORD-1")
    await world.notify(world.pay("ORD-1"))
    await world.drain()
    asked = world.questions

    assert await asked_at(world, [300, 900, 3600]) == []
    assert world.questions == asked


@pytest.mark.case("S113")
async def test_a_negative_that_the_query_lists_closes_the_order_and_it_is_asked_for_still(world: World) -> None:
    """The customer may try again: the next question finds the payment."""
    await world.order("ORD-1")
    world.pay("ORD-1", status="FAILED")
    world.rt.clock.advance(seconds=300)
    await world.sweep()
    assert await world.status("ORD-1") == "failed"

    world.pay("ORD-1")
    world.rt.clock.advance(seconds=600)
    await world.sweep()

    assert await world.status("ORD-1") == "paid"
    assert await world.event_types() == ["order.payment_failed", "order.paid"]


@pytest.mark.case("S113", "B133")
async def test_two_payments_under_one_order_are_both_found(world: World) -> None:
    """The first pays, the second is booked beside it."""
    await world.order("ORD-1")
    world.pay("ORD-1")
    world.pay("ORD-1")
    world.rt.clock.advance(seconds=300)
    await world.sweep()

    assert sorted((row["status"], row["amount"]) for row in await world.rows("SELECT status, amount FROM payments")) == [
        ("applied", Decimal("1000.00")),
        ("unapplied", Decimal("1000.00")),
    ]
    assert await world.event_types() == ["order.paid", "order.overpaid", "notification.conflict"]
    assert await world.outcomes() == ["conflict"]


@pytest.mark.case("S106")
async def test_other_money_is_not_applied_and_alarms(world: World) -> None:
    """What does not fit is no payment of the order; a person hears of it, and the notification, when it comes, waits for that person."""
    await world.order("ORD-1")
    world.pay("ORD-1", "400.00")
    world.rt.clock.advance(seconds=300)
    with capture_logs() as lines:
        await world.sweep()

    assert await world.status("ORD-1") == "pending"
    assert await world.value("SELECT count(*) FROM payments") == 0
    assert [(line["log_level"], line["outcome"], line["reason"]) for line in lines if line["event"] == "sweep.found"] == [
        ("error", "held", "amount")
    ]


# The expiry


async def _expiring(world: World, order_id: str = "ORD-1", **after: float) -> None:
    now = await world.value("SELECT ipn_now()")
    await world.order(order_id, expires_at=now + timedelta(**after))


async def test_an_order_expires_only_after_the_provider_was_asked(world: World) -> None:
    """No payment is known there: expired, with our reason, its event, and an entry of who did it."""
    await _expiring(world, minutes=10)
    world.rt.clock.advance(minutes=10)
    await world.sweep()

    assert world.questions == 1
    assert await world.rows("SELECT status, reason, event_count FROM orders") == [
        {"status": "expired", "reason": "expired", "event_count": 1}
    ]
    assert await world.event_types() == ["order.expired"]
    assert await world.rows("SELECT actor, action, target FROM audit_log WHERE action LIKE 'order.%%'") == [
        {"actor": "maintenance", "action": "order.expire", "target": "ORD-1"}
    ]


async def test_a_payment_that_is_found_at_the_expiry_pays(world: World) -> None:
    """The customer paid in time and the notification was lost: asking first saves the order."""
    world.simulator.bank.clock = world.rt.clock.now
    await _expiring(world, minutes=10)
    world.pay("ORD-1")
    world.rt.clock.advance(minutes=10)
    await world.sweep()

    assert await world.status("ORD-1") == "paid"
    assert await world.event_types() == ["order.paid"]


async def test_no_answer_expires_nothing(world: World) -> None:
    """An order is closed on knowledge: the provider is asked again, and then it expires."""
    await _expiring(world, minutes=10)
    world.fault("query", "html", times=2)
    world.rt.clock.advance(minutes=10)
    await world.sweep()
    assert await world.status("ORD-1") == "pending"

    assert await asked_at(world, [300, 900]) == [300, 900]
    assert await world.status("ORD-1") == "expired"


@pytest.mark.case("S113")
async def test_an_open_session_expires_with_its_order(world: World) -> None:
    """A session that answers PROCESSING for ever does not keep an order open."""
    await _expiring(world, minutes=10)
    world.pay("ORD-1", status="PROCESSING")
    world.rt.clock.advance(minutes=10)
    await world.sweep()

    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "expired", "reason": "expired"}]


async def test_an_order_that_the_provider_closed_keeps_its_reason(world: World) -> None:
    """Only a pending order expires."""
    await _expiring(world, minutes=10)
    await world.notify(world.pay("ORD-1", status="FAILED"))
    await world.drain()
    world.rt.clock.advance(minutes=10)
    await world.sweep()

    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "failed", "reason": "provider"}]
    assert await world.event_types() == ["order.payment_failed"]


@pytest.mark.case("B135")
@pytest.mark.parametrize("found_by", ["notification", "sweep"])
async def test_money_after_the_expiry_waits_for_a_person(world: World, found_by: str) -> None:
    """Recorded, not fulfilled by itself and not dropped: paid_on_hold, reason late_payment."""
    world.simulator.bank.clock = world.rt.clock.now
    await _expiring(world, minutes=10)
    world.rt.clock.advance(minutes=10)
    await world.sweep()
    world.rt.clock.advance(minutes=5)
    fields = world.pay("ORD-1")
    if found_by == "sweep":
        await world.sweep()
    else:
        await world.notify(fields)
        await world.drain()

    assert await world.rows("SELECT status, reason, amount_paid FROM orders") == [
        {"status": "paid_on_hold", "reason": "late_payment", "amount_paid": Decimal("1000.00")}
    ]
    assert await world.event_types() == ["order.expired", "order.paid_on_hold"]


@pytest.mark.case("B135")
async def test_money_for_an_order_that_the_merchant_cancelled_waits_for_a_person(world: World) -> None:
    """The stock is released: a person releases or refunds."""
    await world.order("ORD-1006")
    async with world.rt.db.transaction("test.cancel") as tx:
        await tx.execute("UPDATE orders SET status = 'cancelled', reason = 'merchant'")

    receipt = await world.notify(world.pay("ORD-1006"))
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "paid_on_hold", "reason": "late_payment"}]


async def test_money_that_was_paid_after_an_expiry_nobody_has_noticed_yet_is_late_too(world: World) -> None:
    """The order is still pending here; what counts is when the customer paid."""
    world.simulator.bank.clock = world.rt.clock.now
    await _expiring(world, minutes=10)
    world.rt.clock.advance(minutes=11)

    await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "paid_on_hold", "reason": "late_payment"}]


# Who sweeps


async def test_two_sweepers_ask_once(world: World) -> None:
    """A due order is leased before it is asked for."""
    await world.order("ORD-1")
    world.rt.clock.advance(seconds=300)
    other = replace(world.sweeper, slots=Slots(4))

    claimed = await reconciliation.run_once(world.sweeper) + await reconciliation.run_once(other)
    await world.sweeper.slots.drained()

    assert claimed == 1
    assert world.questions == 1


@pytest.mark.case("S141")
async def test_a_sweeper_that_lost_its_lease_changes_nothing(world: World) -> None:
    """It slept with an answer from before the payment: the order is neither expired nor given back to the schedule."""
    await _expiring(world, minutes=10)
    world.rt.clock.advance(minutes=10)
    other = replace(world.sweeper, slots=Slots(4))

    async def oversleep() -> None:
        del world.rt.faults.on["transport.ask:after"]
        world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)
        world.fault("query", "html")
        await reconciliation.run_once(other)
        await other.slots.drained()

    world.rt.faults.on["transport.ask:after"] = oversleep
    await reconciliation.run_once(world.sweeper)
    await world.sweeper.slots.drained()

    assert await world.rows("SELECT due_at > ipn_now() AS later, lease_expires_at, fence FROM sweeps") == [
        {"later": True, "lease_expires_at": None, "fence": 2}
    ]
    assert await world.status("ORD-1") == "pending"


async def test_an_effect_that_fails_in_a_sweep_is_tried_again_on_the_schedule(world: World) -> None:
    """The provider is not asked again each time that a lease ends."""

    async def effect(*_: object) -> None:
        raise pg.UniqueViolation

    world.sweeper = replace(world.sweeper, effect=effect)
    await world.order("ORD-1")
    world.pay("ORD-1")
    world.rt.clock.advance(seconds=300)
    await world.sweep()
    assert await world.status("ORD-1") == "pending"
    asked = world.questions

    world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)
    await world.sweep()
    assert world.questions == asked

    world.sweeper = replace(world.sweeper, effect=None)
    world.rt.clock.advance(seconds=600)
    await world.sweep()
    assert await world.status("ORD-1") == "paid"


async def test_money_that_only_the_sweep_finds_and_that_does_not_fit_waits_for_a_person(world: World) -> None:
    """It is kept as a delivery that is held, announced once, and no timer closes the order while the provider has money for it."""
    async with world.rt.db.autocommit("test.now") as tx:
        soon = await tx.value("SELECT ipn_now() + interval '10 minutes'")
    await world.order("ORD-1", "500.00", expires_at=soon)
    world.pay("ORD-1", "499.00")
    for _ in range(3):
        world.rt.clock.advance(seconds=600)
        await world.sweep()

    held = await world.rows("SELECT via, outcome, reason, order_id FROM notification_deliveries")
    assert held == [{"via": "sweep", "outcome": "held", "reason": "amount", "order_id": "ORD-1"}]
    assert await world.status("ORD-1") == "pending"
    assert await world.event_types() == ["notification.held"]
    assert await world.value("SELECT state FROM inbox") == "held"
