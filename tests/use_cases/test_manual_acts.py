"""What a person does to an order: release and cancel, each once however often it is asked, each in the audit log, each told."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import orders
from ipn_gateway.errors import NotFound, StateConflict
from tests.world import TENANT

if TYPE_CHECKING:
    from tests.world import World


async def release(world: World, order_id: str = "ORD-1", actor: str = "test") -> None:
    await orders.release(world.rt.db, TENANT, order_id, actor=actor, reason="looked at")


async def cancel(world: World, order_id: str = "ORD-1") -> None:
    await orders.cancel(world.rt.db, TENANT, order_id, actor="test", reason="out of stock")


async def on_hold(world: World, order_id: str = "ORD-1") -> None:
    await world.order(order_id)
    await world.notify(world.pay(order_id, risk=True))
    await world.drain()
    assert await world.status(order_id) == "paid_on_hold"


async def audited(world: World, action: str) -> list[dict[str, Any]]:
    return await world.rows("SELECT actor, target, reason, details FROM audit_log WHERE action = %(action)s ORDER BY id", action=action)


async def last_event(world: World) -> dict[str, Any]:
    body = await world.value("SELECT body FROM events ORDER BY sequence DESC LIMIT 1")
    return dict(json.loads(body)["data"])


async def test_a_release_pays_the_order_and_tells_it_once(world: World) -> None:
    """The hold's reason goes, order.paid follows order.paid_on_hold, and asking again changes nothing."""
    await on_hold(world)

    await release(world)
    before = await world.counts()
    await release(world, actor="somebody else")

    order = (await world.rows("SELECT status, reason, amount_paid, event_count FROM orders"))[0]
    assert (order["status"], order["reason"], str(order["amount_paid"]), order["event_count"]) == ("paid", None, "1000.00", 2)
    assert await world.event_types("ORD-1") == ["order.paid_on_hold", "order.paid"]
    told = await last_event(world)
    assert (told["status"], told["previous_status"], told["reason"], told["sequence"], told["operation_id"]) == (
        *("paid", "paid_on_hold", None, 2),
        None,
    )
    assert await audited(world, "order.release") == [
        {
            "actor": "test",
            "target": "ORD-1",
            "reason": "looked at",
            "details": {"previous_status": "paid_on_hold", "previous_reason": "risk"},
        }
    ]
    assert await world.counts() == before


async def test_only_an_order_on_hold_is_released(world: World) -> None:
    """Neither one that nobody paid, nor one that was paid without a hold, nor one that is not there."""
    await world.order("ORD-1")
    with pytest.raises(StateConflict):
        await release(world)
    await world.notify(world.pay("ORD-1"))
    await world.drain()

    with pytest.raises(StateConflict):
        await release(world)
    with pytest.raises(NotFound):
        await release(world, "ORD-2")
    with pytest.raises(NotFound):
        await orders.release(world.rt.db, "other", "ORD-1", actor="test", reason="x")
    assert await audited(world, "order.release") == []


@pytest.mark.case("B49")
async def test_a_copy_after_a_release_is_a_duplicate(world: World) -> None:
    """A second copy neither releases an order on hold nor holds a released one again."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1", risk=True)
    await world.notify(fields)
    await world.drain()
    held_copy = await world.notify(fields)
    await world.drain()
    assert await world.status("ORD-1") == "paid_on_hold"

    await release(world)
    copy = await world.notify(fields)
    await world.drain()

    assert await world.status("ORD-1") == "paid"
    assert await world.outcome(held_copy) == await world.outcome(copy) == ("duplicate", None)


@pytest.mark.parametrize("status", [None, "FAILED", "CANCELLED"])
async def test_an_unpaid_order_is_cancelled_for_the_merchant_s_reason(world: World, status: str | None) -> None:
    """Pending, failed, and one that the provider cancelled, which would stay payable; asking again changes nothing."""
    await world.order("ORD-1")
    if status:
        await world.notify(world.pay("ORD-1", status=status))
        await world.drain()

    await cancel(world)
    before = await world.counts()
    await cancel(world)

    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "cancelled", "reason": "merchant"}]
    assert (await world.event_types("ORD-1"))[-1] == "order.cancelled"
    assert (await last_event(world))["reason"] == "merchant"
    assert [entry["reason"] for entry in await audited(world, "order.cancel")] == ["out of stock"]
    assert await world.counts() == before


@pytest.mark.case("B135")
async def test_money_after_a_cancellation_is_held_and_can_be_released(world: World) -> None:
    """Late money is booked, not dropped and not fulfilled by itself; cancelling is no way back then."""
    await world.order("ORD-1")
    await cancel(world)
    await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "paid_on_hold", "reason": "late_payment"}]
    with pytest.raises(StateConflict):
        await cancel(world)
    await release(world)
    assert await world.event_types("ORD-1") == ["order.cancelled", "order.paid_on_hold", "order.paid"]


async def test_a_paid_order_is_not_cancelled(world: World) -> None:
    """Its money goes back by a refund."""
    await world.order("ORD-1")
    await world.notify(world.pay("ORD-1"))
    await world.drain()

    with pytest.raises(StateConflict):
        await cancel(world)
    with pytest.raises(NotFound):
        await cancel(world, "ORD-2")


async def test_an_act_whose_commit_was_lost_is_found_done(world: World) -> None:
    """The connection breaks after COMMIT: the act is run again, finds its own work, and leaves one event and one entry."""
    await on_hold(world)
    left = [psycopg.OperationalError("lost")]

    async def lose() -> None:
        if left:
            raise left.pop()

    world.rt.faults.on["orders.release:after_commit"] = lose
    await release(world)

    assert await world.event_types("ORD-1") == ["order.paid_on_hold", "order.paid"]
    assert len(await audited(world, "order.release")) == 1


async def test_an_expiry_is_in_the_audit_log_and_happens_once(world: World) -> None:
    """At expires_at the maintenance role closes a pending order in its own name; another look changes nothing."""
    await world.order("ORD-1", expires_at=world.rt.clock.now() + timedelta(minutes=1))
    world.rt.clock.advance(minutes=2)
    await world.sweep()
    await world.sweep()

    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "expired", "reason": "expired"}]
    assert await world.event_types("ORD-1") == ["order.expired"]
    assert [(entry["actor"], entry["reason"]) for entry in await audited(world, "order.expire")] == [("maintenance", "expires_at")]
