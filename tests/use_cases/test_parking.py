"""Parked: a confirmed notification whose order is not known yet waits for it, and neither side can miss the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ipn_gateway import inbox, workers

if TYPE_CHECKING:
    from tests.world import World


async def release(world: World) -> int:
    """What maintenance does each minute."""
    return await inbox.release_parked(world.rt.maintenance_db, parking_hours=world.rt.settings.parking_hours)


@pytest.mark.case("B09", "S141")
async def test_a_notification_before_its_order_pays_it_when_it_comes(world: World) -> None:
    """Parked durably, validated first; the transaction that creates the order makes it due, and nothing more is sent."""
    receipt = await world.notify(world.pay("ORD-1002"))
    await world.drain()

    assert await world.outcome(receipt) == ("parked", None)
    assert world.questions == 1
    assert await world.rows("SELECT state, due_at, order_id FROM inbox") == [{"state": "parked", "due_at": None, "order_id": "ORD-1002"}]
    assert await world.drain() == 0

    world.rt.clock.advance(seconds=2)
    await world.order("ORD-1002")
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert await world.status("ORD-1002") == "paid"
    assert await world.value("SELECT count(*) FROM inbox") == 0


@pytest.mark.case("B09")
async def test_all_that_waited_are_adopted_and_only_theirs(world: World) -> None:
    """Copies and negatives of the same order become due; what waits for another order, tenant or person does not."""
    fields = world.pay("ORD-1")
    for other in (fields, fields, world.pay("ORD-2")):
        await world.notify(other)
    await world.drain()
    assert await world.outcomes() == ["parked"] * 3

    await world.order("ORD-1")
    await world.drain()

    assert sorted(await world.outcomes()) == ["applied", "duplicate", "parked"]
    assert await world.value("SELECT amount_paid FROM orders") == 1000


async def test_what_never_gets_its_order_is_held_after_the_parking_time(world: World) -> None:
    """72 hours: then a person is told, and an order that comes after all is not paid by itself."""
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()
    world.rt.clock.advance(hours=72, seconds=-1)
    assert await release(world) == 0

    world.rt.clock.advance(seconds=1)
    assert await release(world) == 1
    await world.drain()

    assert await world.outcome(receipt) == ("held", "order_unknown")
    assert await world.event_types() == ["notification.held"]

    await world.order("ORD-1")
    await world.drain()

    assert await world.outcome(receipt) == ("held", "order_unknown")
    assert await world.status("ORD-1") == "pending"


async def test_an_order_that_comes_in_the_last_moment_is_paid(world: World) -> None:
    """The parking time is over and the row is due: apply looks for the order once more."""
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()
    world.rt.clock.advance(hours=73)
    await release(world)
    await world.order("ORD-1")
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)


async def test_a_parked_one_that_loses_its_verdict_on_the_way_is_not_lost(world: World) -> None:
    """Adopted while the provider is away: asked again on the schedule, then applied."""
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()
    world.fault("validator", "status500")
    await world.order("ORD-1")
    await world.drain()
    assert await world.status("ORD-1") == "pending"

    world.rt.clock.advance(seconds=5)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)


async def test_a_refuted_one_is_not_parked(world: World) -> None:
    """An unknown order is no reason to keep what the provider does not confirm."""
    world.fault("validator", "invalid_transaction", times=None)
    receipt = await world.notify(world.pay("ORD-1"))
    for wait in (60, 300, 540):
        await world.drain()
        world.rt.clock.advance(seconds=wait)
    await world.drain()

    assert await world.outcome(receipt) == ("rejected", "refuted")
    assert await world.value("SELECT count(*) FROM order_slots") == 0


@pytest.mark.case("S141")
async def test_maintenance_finds_what_is_parked_beside_its_order(world: World) -> None:
    """The belt: however a row came to be left parked, a minute later it is due."""
    receipt = await world.notify(world.pay("ORD-1"))
    await world.drain()
    await world.order("ORD-1")
    async with world.rt.db.transaction("test.forget") as tx:
        await tx.execute("UPDATE inbox SET state = 'parked', due_at = NULL")

    assert await release(world) == 1
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert workers.MAINTENANCE_SECONDS == 60
