"""What the provider does not confirm: asked again on a short schedule, then rejected, and an alarm when it becomes a habit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ipn_gateway import logs

if TYPE_CHECKING:
    from tests.world import World


@pytest.mark.case("B52")
async def test_a_refuted_payment_is_asked_about_three_times_more(world: World) -> None:
    """At once, then after 60, 300 and 540 seconds, and not before; the fourth refutation rejects."""
    await world.order("ORD-1")
    world.fault("validator", "invalid_transaction", times=None)
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()
    assert world.questions == 1

    for number, wait in enumerate((60, 300, 540), start=2):
        assert await world.outcome(receipt) == ("received", None)
        world.rt.clock.advance(seconds=wait - 1)
        await world.drain()
        assert world.questions == number - 1
        world.rt.clock.advance(seconds=1)
        await world.drain()
        assert world.questions == number

    assert await world.outcome(receipt) == ("rejected", "refuted")
    assert await world.value("SELECT attempts FROM notification_deliveries") == 4
    assert await world.status("ORD-1") == "pending"


async def test_a_payment_that_the_provider_knows_a_moment_later_is_applied(world: World) -> None:
    """Its own databases may lag: the first refutations are no verdict."""
    await world.order("ORD-1")
    world.fault("validator", "invalid_transaction", times=3)
    receipt = await world.notify(world.pay("ORD-1"))
    for wait in (60, 300, 540):
        await world.drain()
        world.rt.clock.advance(seconds=wait)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)


@pytest.mark.case("S106")
async def test_another_store_is_final_at_once(world: World) -> None:
    """Asking again cannot change whose money it is."""
    await world.order("ORD-1")
    world.fault("validator", "fields", times=None, fields={"store_id": "evil01"})

    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert await world.outcome(receipt) == ("rejected", "store_mismatch")
    assert world.questions == 1


@pytest.mark.case("B52")
async def test_a_run_of_refutations_alarms_for_the_source(world: World) -> None:
    """Wrong credentials or the wrong mode look like this: an alarm from the fifth in a row on, and no order is failed."""
    before = logs.counters["sources.refuted_alarm"]
    world.fault("validator", "invalid_transaction", times=None)
    for number in range(5):
        await world.order(f"ORD-{number}")
        await world.notify(world.pay(f"ORD-{number}"))
    alarms = []
    for wait in (60, 300, 540, 0):
        await world.drain()
        alarms.append(logs.counters["sources.refuted_alarm"] - before)
        world.rt.clock.advance(seconds=wait)

    assert alarms == [0, 0, 0, 1]
    assert await world.outcomes() == ["rejected"] * 5
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'pending'") == 5


async def test_a_confirmed_payment_ends_the_run(world: World) -> None:
    """Refutations count in a row."""
    world.fault("validator", "invalid_transaction", times=4)
    await world.order("ORD-1")
    await world.notify(world.pay("ORD-1"))
    for wait in (60, 300, 540, 0):
        await world.drain()
        world.rt.clock.advance(seconds=wait)
    assert await world.value("SELECT refuted_streak FROM source_states") == 1

    await world.order("ORD-2")
    await world.notify(world.pay("ORD-2"))
    await world.drain()

    assert await world.value("SELECT refuted_streak FROM source_states") == 0


# Negatives


NEGATIVES = {
    "FAILED": ("failed", "order.payment_failed"),
    "CANCELLED": ("cancelled", "order.cancelled"),
    "UNATTEMPTED": ("cancelled", "order.cancelled"),
    "EXPIRED": ("expired", "order.expired"),
}


@pytest.mark.case("S113", "B17")
async def test_a_negative_closes_its_order_and_a_later_payment_opens_it(world: World) -> None:
    """Confirmed by query, with reason `provider`; it stays payable, and the customer who tries again pays it."""
    for status, (becomes, event_type) in NEGATIVES.items():
        order = "SELECT status, reason FROM orders WHERE order_id = %(id)s"
        await world.order(f"ORD-{status}")
        first = await world.notify(world.pay(f"ORD-{status}", status=status))
        await world.drain()

        assert await world.outcome(first) == ("applied", None)
        assert await world.rows(order, id=f"ORD-{status}") == [{"status": becomes, "reason": "provider"}]
        assert await world.event_types(f"ORD-{status}") == [event_type]
        assert await world.value("SELECT count(*) FROM sweeps") == 1

        second = await world.notify(world.pay(f"ORD-{status}"))
        await world.drain()

        assert await world.outcome(second) == ("applied", None)
        assert await world.rows(order, id=f"ORD-{status}") == [{"status": "paid", "reason": None}]
        assert await world.event_types(f"ORD-{status}") == [event_type, "order.paid"]


@pytest.mark.case("S113")
@pytest.mark.parametrize("applied_before", [False, True])
async def test_a_negative_whose_query_lists_a_payment_brings_it_in(world: World, applied_before: bool) -> None:
    """The failed try of an order that was paid in the next one: the payment is applied, or the news is stale."""
    await world.order("ORD-1")
    failed, paid = world.pay("ORD-1", status="FAILED"), world.pay("ORD-1")
    if applied_before:
        await world.notify(paid)
        await world.drain()

    receipt = await world.notify(failed)
    await world.drain()

    assert await world.outcome(receipt) == (("stale" if applied_before else "applied"), None)
    assert await world.status("ORD-1") == "paid"
    assert await world.rows("SELECT effect FROM processed_notifications") == [{"effect": "paid"}]
    if not applied_before:
        assert await world.value("SELECT effect FROM notification_deliveries") == "paid"


@pytest.mark.case("S113")
async def test_a_negative_of_an_open_session_is_rejected_after_an_hour_without_alarm(world: World) -> None:
    """A session that answers PROCESSING for ever: the order stays payable, and the sweep and its expiry close it."""
    before = logs.counters["sources.refuted_alarm"]
    await world.order("ORD-1")
    world.fault("query", "processing", times=None)
    receipt = await world.notify(world.pay("ORD-1", status="FAILED"))
    asked = []
    for wait in (5, 30, 120, 600, 1800, 1045, 1):
        await world.drain()
        asked.append(world.questions)
        assert await world.outcome(receipt) == ("received", None)
        world.rt.clock.advance(seconds=wait)
    await world.drain()

    assert asked == [1, 2, 3, 4, 5, 6, 6]
    assert await world.outcome(receipt) == ("rejected", "unconfirmed")
    assert await world.status("ORD-1") == "pending"
    assert await world.event_types() == []
    assert logs.counters["sources.refuted_alarm"] == before


@pytest.mark.case("S113")
async def test_a_failure_that_is_not_the_listed_one_is_unconfirmed(world: World) -> None:
    """A FAILED whose query lists only another attempt says nothing about this one."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1", status="FAILED")

    receipt = await world.notify(world.signed(fields, bank_tran_id="BT-OTHER"))
    await world.drain()
    world.rt.clock.advance(hours=1, seconds=1)
    await world.drain()

    assert await world.outcome(receipt) == ("rejected", "unconfirmed")
    assert await world.status("ORD-1") == "pending"


@pytest.mark.case("S113")
async def test_a_negative_that_is_confirmed_within_the_hour_is_applied(world: World) -> None:
    """The session ends a little later."""
    await world.order("ORD-1")
    world.fault("query", "processing", times=3)
    receipt = await world.notify(world.pay("ORD-1", status="CANCELLED"))
    for wait in (5, 30, 120):
        await world.drain()
        world.rt.clock.advance(seconds=wait)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert await world.status("ORD-1") == "cancelled"


@pytest.mark.case("S113")
async def test_posts_cannot_mint_ledger_rows(world: World) -> None:
    """Any number of made-up failures of one listed attempt lead to one operation, that of the provider's list."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1", status="CANCELLED")
    for number in range(4):
        await world.notify(world.signed(fields, tran_date=f"2026-03-01 13:05:0{number}", value_a=str(number)))
    await world.drain()

    assert sorted(await world.outcomes()) == ["applied", "duplicate", "duplicate", "duplicate"]
    assert await world.value("SELECT count(*) FROM processed_notifications") == 1


@pytest.mark.case("B14", "S113")
async def test_an_informative_word_is_stale_without_a_question(world: World) -> None:
    """Before the payment, after it in the same bytes, and for an order that nobody knows; each has its 2xx, since none needs a retry."""
    await world.order("ORD-1")
    pending = world.pay("ORD-1", status="PENDING")
    receipts = [await world.notify(pending), await world.notify(world.pay("ORD-1"))]
    await world.drain()
    receipts += [await world.notify(pending), await world.notify(world.pay("ORD-NEVER", status="PROCESSING"))]
    await world.drain()

    assert [receipt.error for receipt in receipts] == [None] * 4
    assert await world.outcomes() == ["stale", "applied", "stale", "stale"]
    assert world.questions == 1
    assert await world.status("ORD-1") == "paid"
