"""From a stored notification delivery to its end: validated with the provider, then applied, once."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.world import World


@pytest.mark.case("S107", "B33")
async def test_a_genuine_notification_pays_its_order(world: World) -> None:
    """The order is paid, the ledger, the payment and the event are written, and no open work is left."""
    await world.order("ORD-1001")
    receipt = await world.notify(world.pay("ORD-1001"))

    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert await world.status("ORD-1001") == "paid"
    assert await world.value("SELECT amount_paid FROM orders") == Decimal("1000.00")
    assert await world.event_types() == ["order.paid"]
    assert await world.counts() == {
        "notification_deliveries": 1,
        "inbox": 0,
        "processed_notifications": 1,
        "payments": 1,
        "events": 1,
        "event_deliveries": 0,
        "sweeps": 0,
    }


@pytest.mark.case("S109", "S142")
async def test_a_repeat_ends_as_duplicate_without_a_question(world: World) -> None:
    """The read of the ledger short-cuts: no provider call, and nothing but the audit row changes."""
    await world.order("ORD-1001")
    fields = world.pay("ORD-1001")
    await world.notify(fields)
    await world.drain()
    before, asked = await world.counts(), world.questions

    receipt = await world.notify(fields)
    await world.drain()

    assert await world.outcome(receipt) == ("duplicate", None)
    assert world.questions == asked
    assert await world.counts() == before | {"notification_deliveries": 2}


async def test_a_notification_before_its_order_is_parked_and_adopted(world: World) -> None:
    """The transaction that creates the order makes it due."""
    receipt = await world.notify(world.pay("ORD-1002"))
    await world.drain()

    assert await world.outcome(receipt) == ("parked", None)

    await world.order("ORD-1002")
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert await world.status("ORD-1002") == "paid"
