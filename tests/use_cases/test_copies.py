"""One signed negative posted over and over: its copies must not become as many questions to the provider."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ipn_gateway.inbox import COPY_WAIT_SECONDS
from ipn_gateway.inbox_batches import COPIES_ASKING, COPY_SECONDS

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from tests.world import World

COPIES = 30


@pytest.mark.case("S109", "S113")
async def test_a_storm_of_one_cancelled_notification_asks_a_few_times(world: World, clock: Clock) -> None:
    """The first few copies are asked about; all the others end as those did, and a payment is not kept waiting."""
    await world.order("ORD-1")
    await world.order("ORD-2")
    cancelled = world.pay("ORD-1", status="CANCELLED")
    for _ in range(COPIES):
        await world.notify(cancelled)
    paid = await world.notify(world.pay("ORD-2"))
    for _ in range(COPIES):
        await world.drain()
        clock.advance(seconds=COPY_WAIT_SECONDS)

    outcomes = await world.outcomes()
    assert await world.outcome(paid) == ("applied", None)
    assert sorted(outcomes) == ["applied", "applied"] + ["duplicate"] * (COPIES - 1)
    assert world.simulator.api.queries.total() <= 3 * COPIES_ASKING


async def test_a_copy_that_comes_later_is_asked_about_again(world: World, clock: Clock) -> None:
    """What the provider says may have changed: after a minute the same bytes bring in the payment that it lists now."""
    await world.order("ORD-1")
    cancelled = world.pay("ORD-1", status="CANCELLED")
    for _ in range(2 * COPIES_ASKING):
        await world.notify(cancelled)
        await world.drain()
    world.pay("ORD-1")
    clock.advance(seconds=COPY_SECONDS)

    receipt = await world.notify(cancelled)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert await world.status("ORD-1") == "paid"
