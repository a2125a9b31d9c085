"""What a person decides about deliveries that wait: what the provider confirmed is booked, or nothing is, once for all copies."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import orders, replays, resolutions, sources
from ipn_gateway.errors import NotFound, StateConflict, ValidationFailed
from ipn_gateway.resolutions import Evidence
from tests.world import SOURCE, TENANT, shown

if TYPE_CHECKING:
    from ipn_gateway.effects import EffectNotification
    from ipn_gateway.notifications import Receipt
    from tests.world import World

EVIDENCE = Evidence(Decimal("1000.00"), "BDT", "BANK-1")


async def resolve(
    world: World, receipt: Receipt, decision: resolutions.Decision = "apply", evidence: Evidence | None = None, tenant: str = TENANT
) -> None:
    assert receipt.delivery_id is not None
    act = resolutions.Act(tenant, receipt.delivery_id, decision, "test", "looked at", evidence)
    await resolutions.resolve(world.rt.db, act, world.rt.effect)


async def held(world: World, amount: str = "400.00", order_id: str = "ORD-1", **given: Any) -> Receipt:
    """A payment of another amount, held."""
    receipt = await world.notify(world.pay(order_id, amount, **given))
    await world.drain()
    return receipt


async def dead(world: World, order_id: str = "ORD-1") -> Receipt:
    """A notification that the provider says nothing about for the whole schedule."""
    fields = world.pay(order_id)
    world.fault("validator", "status500", times=None)
    receipt = await world.notify(fields)
    await world.value("UPDATE inbox SET asked = 1000 RETURNING 1")
    await world.drain()
    world.simulator.api.faults.clear()
    assert await world.outcome(receipt) == ("dead", "no_verdict")
    return receipt


async def order(world: World) -> tuple[str, str | None, str]:
    row = (await world.rows("SELECT status, reason, amount_paid FROM orders WHERE order_id = 'ORD-1'"))[0]
    return row["status"], row["reason"], f"{row['amount_paid']:.2f}"


async def told(world: World) -> list[str]:
    """The types of the order's events."""
    return [name for name in await world.event_types("ORD-1") if name.startswith("order.")]


async def resolution(world: World, receipt: Receipt) -> str | None:
    found: str | None = await world.value("SELECT resolution FROM notification_deliveries WHERE id = %(id)s", id=receipt.delivery_id)
    return found


async def audited(world: World) -> list[dict[str, Any]]:
    return await world.rows("SELECT * FROM audit_log WHERE action = 'notification_delivery.resolve' ORDER BY id")


@pytest.mark.case("B141")
@pytest.mark.parametrize(("second", "events"), [("600.00", ["order.paid"]), ("700.00", ["order.paid", "order.overpaid"])])
async def test_parts_are_summed_and_pay_the_order_when_all_is_there(world: World, second: str, events: list[str]) -> None:
    """A part moves no state and tells nobody; the last one pays, and what is more than due is told after it."""
    await world.order("ORD-1")
    first = await held(world, "400.00")
    await resolve(world, first)
    assert await order(world) == ("pending", None, "400.00")
    assert await world.outcome(first) == ("applied", None)
    assert await told(world) == []
    assert await world.value("SELECT count(*) FROM sweeps") == 1

    rest = await held(world, second)
    assert await world.outcome(rest) == ("held", "amount")
    await resolve(world, rest)

    paid = f"{Decimal(400) + Decimal(second):.2f}"
    assert await order(world) == ("paid", None, paid)
    assert await told(world) == events
    assert await world.rows("SELECT origin, booked FROM processed_notifications") == [{"origin": "manual", "booked": "applied"}] * 2
    rows = await world.rows("SELECT body FROM events WHERE sequence IS NOT NULL ORDER BY sequence")
    bodies = [json.loads(row["body"])["data"] for row in rows]
    assert [(body["sequence"], body["amount_paid"]) for body in bodies] == [(number + 1, paid) for number in range(len(events))]
    assert bodies[-1]["previous_status"] == ("paid" if len(events) == 2 else "pending")
    assert await world.value("SELECT event_count FROM orders") == len(events)
    assert await world.value("SELECT count(*) FROM inbox") + await world.value("SELECT count(*) FROM sweeps") == 0


async def test_the_full_amount_after_a_part_waits_for_a_person(world: World) -> None:
    """Once a part is booked, the order's exact amount is more than is due."""
    await world.order("ORD-1")
    await resolve(world, await held(world))

    full = await held(world, "1000.00")

    assert await world.outcome(full) == ("held", "amount")
    await resolve(world, full)
    assert await order(world) == ("paid", None, "1400.00")
    assert await told(world) == ["order.paid", "order.overpaid"]


async def test_what_was_confirmed_is_booked_as_it_was_confirmed(world: World) -> None:
    """Account, settled amount, the provider's ids and times: the payment of an applied delivery lacks nothing."""
    await world.order("ORD-1")
    await world.order("ORD-2")
    await resolve(world, await held(world, "1200.00"))
    await world.notify(world.pay("ORD-2"))
    await world.drain()

    payments = await world.rows("SELECT * FROM payments ORDER BY order_id")

    assert [row["status"] for row in payments] == ["applied", "applied"]
    assert [sorted(name for name, value in row.items() if value is None) for row in payments] == [[], []]
    assert len({row["account_id"] for row in payments}) == 1


async def test_deciding_one_decides_all_copies(world: World) -> None:
    """Of what was held, one is applied and the others are duplicates; one that comes later is a duplicate too. One entry names them."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1", "400.00")
    receipts = [await world.notify(fields) for _ in range(3)]
    await world.drain()
    other = await held(world, "500.00")

    await resolve(world, receipts[1])
    late = await world.notify(fields)
    await world.drain()

    assert [await world.outcome(receipt) for receipt in receipts] == [("duplicate", None), ("applied", None), ("duplicate", None)]
    assert [await resolution(world, receipt) for receipt in receipts] == ["apply"] * 3
    assert await world.outcome(late) == ("duplicate", None)
    assert await world.outcome(other) == ("held", "amount")
    assert await world.value("SELECT count(*) FROM payments") == 1
    (entry,) = await audited(world)
    assert (entry["actor"], entry["target"], entry["reason"]) == ("test", shown(receipts[1]), "looked at")
    assert entry["details"]["copies"] == [shown(receipts[0]), shown(receipts[2])]
    assert (entry["details"]["amount"], entry["details"]["was"]) == ("400.00", {"outcome": "held", "reason": "amount"})
    before = await world.counts()
    await resolve(world, receipts[0])
    assert await world.counts() == before
    assert len(await audited(world)) == 1


async def test_a_dismissed_one_keeps_its_outcome_and_waits_no_more(world: World) -> None:
    """`held` stays true; its open work is gone, and a copy that comes later is dismissed with it. Nobody can apply it afterwards."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1", "400.00")
    receipt = await world.notify(fields)
    await world.drain()

    await resolve(world, receipt, "dismiss")
    await resolve(world, receipt, "dismiss")
    copy = await world.notify(fields)
    await world.drain()

    assert await world.outcome(receipt) == await world.outcome(copy) == ("held", "amount")
    assert await resolution(world, receipt) == await resolution(world, copy) == "dismiss"
    assert await world.value("SELECT count(*) FROM inbox") == 0
    assert await order(world) == ("pending", None, "0.00")
    assert len(await audited(world)) == 1
    with pytest.raises(StateConflict):
        await resolve(world, receipt)
    assert await world.event_types() == ["notification.held"]


@pytest.mark.case("S110", "B133")
async def test_a_second_payment_is_only_dismissed(world: World) -> None:
    """As a conflict, and as one that was held before the order was paid otherwise; its money stays unapplied."""
    await world.order("ORD-1")
    early = await held(world, "400.00")
    for _ in range(2):
        second = await held(world, "1000.00")
    assert await world.outcome(second) == ("conflict", "second_payment")

    for receipt in (early, second):
        with pytest.raises(StateConflict):
            await resolve(world, receipt)
        await resolve(world, receipt, "dismiss")

    assert await order(world) == ("paid", None, "1000.00")
    assert await world.outcome(second) == ("conflict", "second_payment")
    assert await world.value("SELECT count(*) FROM inbox") == 0
    assert await world.value("SELECT count(*) FROM payments WHERE status = 'unapplied'") == 1


async def test_money_of_another_currency_is_only_dismissed(world: World) -> None:
    """It cannot be added to what is due."""
    await world.order("ORD-1")
    receipt = await held(world, "1000.00", currency="USD")
    assert await world.outcome(receipt) == ("held", "currency")

    with pytest.raises(StateConflict, match="currency"):
        await resolve(world, receipt)
    assert await world.outcome(receipt) == ("held", "currency")


async def test_risk_and_late_money_are_held_also_when_a_person_applies(world: World) -> None:
    """The person decided about the amount; the order is on hold until somebody releases it."""
    await world.order("ORD-1")
    await orders.cancel(world.rt.db, TENANT, "ORD-1", actor="test", reason="closed")
    await resolve(world, await held(world, "1100.00"))

    assert await order(world) == ("paid_on_hold", "late_payment", "1100.00")
    assert await told(world) == ["order.cancelled", "order.paid_on_hold", "order.overpaid"]


async def test_a_dead_one_is_applied_with_evidence(world: World) -> None:
    """Without it nothing is booked. With it the payment carries the provider's id, and the notification is a duplicate afterwards."""
    await world.order("ORD-1")
    receipt = await dead(world)
    with pytest.raises(ValidationFailed, match="evidence"):
        await resolve(world, receipt)

    await resolve(world, receipt, evidence=EVIDENCE)

    assert await order(world) == ("paid", None, "1000.00")
    assert await world.outcome(receipt) == ("applied", None)
    assert await world.value("SELECT provider_transaction_id FROM payments") == "BANK-1"
    assert (await audited(world))[0]["details"]["evidence"] == {"provider_transaction_id": "BANK-1"}
    assert await told(world) == ["order.paid"]


async def test_evidence_has_no_place_where_the_provider_confirmed(world: World) -> None:
    """What it confirmed is what is booked."""
    await world.order("ORD-1")
    receipt = await held(world)

    with pytest.raises(ValidationFailed, match="evidence"):
        await resolve(world, receipt, evidence=EVIDENCE)
    assert await order(world) == ("pending", None, "0.00")


async def test_evidence_of_a_payment_that_is_booked_is_refused(world: World) -> None:
    """The same provider transaction pays nothing twice, whichever order it is said to be for."""
    await world.order("ORD-1")
    await world.order("ORD-2")
    await world.notify(world.pay("ORD-2"))
    await world.drain()
    booked = await world.value("SELECT provider_transaction_id FROM payments")
    receipt = await dead(world)

    with pytest.raises(StateConflict):
        await resolve(world, receipt, evidence=Evidence(Decimal("1000.00"), "BDT", booked))
    assert await order(world) == ("pending", None, "0.00")


async def test_what_came_to_a_disabled_source_is_applied_with_evidence(world: World) -> None:
    """The provider was never asked."""
    await world.order("ORD-1")
    await sources.disable(world.rt.db, TENANT, SOURCE, actor="test")
    world.rt.sources.forget(SOURCE)
    receipt = await held(world, "1000.00")
    assert await world.outcome(receipt) == ("held", "source_disabled")

    await resolve(world, receipt, evidence=EVIDENCE)

    assert await order(world) == ("paid", None, "1000.00")


async def test_one_that_waited_for_its_order_in_vain_is_applied_once_the_order_is_there(world: World) -> None:
    """Before that there is nothing to book it on."""
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()
    world.rt.clock.advance(hours=73)
    await world.value("UPDATE inbox SET state = 'received', due_at = ipn_now() RETURNING 1")
    await world.drain()
    assert await world.outcome(receipt) == ("held", "order_unknown")
    with pytest.raises(StateConflict, match="order"):
        await resolve(world, receipt)
    await world.order("ORD-1")

    await resolve(world, receipt)

    assert await order(world) == ("paid", None, "1000.00")


async def test_only_what_waits_is_resolved(world: World) -> None:
    """Neither what was applied, nor another tenant's, nor what is not there."""
    await world.order("ORD-1")
    receipt = await held(world, "1000.00")

    with pytest.raises(StateConflict):
        await resolve(world, receipt)
    with pytest.raises(StateConflict):
        await resolve(world, receipt, "dismiss")
    with pytest.raises(NotFound):
        await resolve(world, receipt, tenant="other")


async def test_a_replay_of_a_dismissed_one_asks_again(world: World) -> None:
    """A dismissal is not for ever: replayed, it waits for a person as before, whatever was decided about its copies."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1", "400.00")
    receipt, copy = await world.notify(fields), await world.notify(fields)
    await world.drain()
    await resolve(world, receipt, "dismiss")
    assert receipt.delivery_id is not None

    await replays.replay(world.rt.db, world.rt.sources, TENANT, receipt.delivery_id, actor="test")
    await world.drain()

    assert (await world.outcome(receipt), await resolution(world, receipt)) == (("held", "amount"), None)
    assert await resolution(world, copy) == "dismiss"
    await resolve(world, receipt)
    assert await order(world) == ("pending", None, "400.00")


async def test_the_merchant_s_own_effect_commits_with_it_or_nothing_does(world: World) -> None:
    """It is told of the applied operation; when it raises, nothing was changed and the delivery waits as before."""
    heard: list[EffectNotification] = []
    await world.order("ORD-1")
    receipt = await held(world, "1200.00")
    assert receipt.delivery_id is not None
    act = resolutions.Act(TENANT, receipt.delivery_id, "apply", "test", "looked at")

    async def refuse(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
        await connection.execute("SELECT 1/0")

    async def hear(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
        heard.append(told)

    with pytest.raises(StateConflict, match="IPN_EFFECT"):
        await resolutions.resolve(world.rt.db, act, refuse)
    assert (await order(world), await world.outcome(receipt)) == (("pending", None, "0.00"), ("held", "amount"))
    assert await audited(world) == []
    await resolutions.resolve(world.rt.db, act, hear)
    await resolutions.resolve(world.rt.db, act, hear)

    assert [(told.order_id, told.status, told.previous_status, told.amount) for told in heard] == [
        ("ORD-1", "paid", "pending", Decimal("1200.00"))
    ]


@pytest.mark.parametrize("point", ["before_commit", *(f"statement_{number}" for number in range(1, 10))])
async def test_a_crash_anywhere_in_it_changes_nothing(world: World, point: str) -> None:
    """Ledger, payment, order, events, outcome and audit entry come together; tried again, it is done once."""
    await world.order("ORD-1")
    receipt = await held(world, "1200.00")
    before, deliveries = await world.counts(), await world.rows("SELECT * FROM notification_deliveries")

    async def crash() -> None:
        raise RuntimeError(point)

    world.rt.faults.on[f"notification_deliveries.resolve:{point}"] = crash
    with pytest.raises(RuntimeError, match=point):
        await resolve(world, receipt)
    assert (await world.counts(), await world.rows("SELECT * FROM notification_deliveries")) == (before, deliveries)
    assert (await order(world), await audited(world)) == (("pending", None, "0.00"), [])
    world.rt.faults.on.clear()
    await resolve(world, receipt)

    assert await order(world) == ("paid", None, "1200.00")
    assert await told(world) == ["order.paid", "order.overpaid"]


async def test_a_lost_commit_is_found_done(world: World) -> None:
    """Run again on a new connection, the act finds its own decision."""
    await world.order("ORD-1")
    receipt = await held(world, "1200.00")
    left = [psycopg.OperationalError("lost")]

    async def lose() -> None:
        if left:
            raise left.pop()

    world.rt.faults.on["notification_deliveries.resolve:after_commit"] = lose
    await resolve(world, receipt)

    assert len(await audited(world)) == await world.value("SELECT count(*) FROM payments") == 1
