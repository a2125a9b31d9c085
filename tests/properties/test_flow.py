"""The whole flow under every order of arrival: shuffled, repeated and parallel notifications lead to the same state."""

from __future__ import annotations

import asyncio
from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from tests import world as worlds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from tests.world import World


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[World]:
    """A whole gateway beside a simulated provider, with one source and no order."""
    async with worlds.opened(database_url, clock, faults) as opened:
        yield opened


@pytest.mark.case("B16", "S112")
async def test_every_order_of_three_pendings_and_a_payment_is_paid(world: World) -> None:
    """All 24 permutations, the last two on parallel connections: paid, and every PENDING is stale whenever it comes."""
    orders = list(permutations(("PENDING", "PENDING", "VALID", "PENDING")))
    for number, statuses in enumerate(orders):
        await world.order(f"ORD-{number}")
        first, second, *last = (world.pay(f"ORD-{number}", status=status) for status in statuses)
        for fields in (first, second):
            await world.notify(fields)
            await world.drain()
        await asyncio.gather(*(world.notify(fields) for fields in last))
        await world.drain()

    assert len(orders) == 24
    assert await world.rows("SELECT DISTINCT status, amount_paid = amount AS whole, event_count FROM orders") == [
        {"status": "paid", "whole": True, "event_count": 1}
    ]
    assert await world.rows("SELECT asserted_status, outcome, count(*) FROM notification_deliveries GROUP BY 1, 2 ORDER BY 1") == [
        {"asserted_status": "PENDING", "outcome": "stale", "count": 72},
        {"asserted_status": "VALID", "outcome": "applied", "count": 24},
    ]


@pytest.mark.case("S112", "S113", "B17")
@pytest.mark.parametrize("drained", ["after each", "at the end"])
async def test_a_payment_among_negatives_and_repeats_pays_in_every_order(world: World, drained: str) -> None:
    """FAILED, CANCELLED and VALID, then all of them again: every order of arrival ends paid, with one payment and events without a gap."""
    for number, statuses in enumerate(permutations(("FAILED", "CANCELLED", "VALID"))):
        await world.order(f"ORD-{number}")
        sent = []
        for status in statuses:
            sent.append(world.pay(f"ORD-{number}", status=status))
            await world.notify(sent[-1])
            if drained == "after each":
                await world.drain()
        for fields in reversed(sent):
            await world.notify(fields)
            if drained == "after each":
                await world.drain()
    await world.drain()

    assert await world.rows("SELECT DISTINCT status, reason, amount_paid = amount AS whole FROM orders") == [
        {"status": "paid", "reason": None, "whole": True}
    ]
    assert (await world.counts())["payments"] == 6
    assert set(await world.outcomes()) <= {"applied", "duplicate", "stale"}
    gaps = "SELECT count(*) FROM orders o WHERE event_count <> (SELECT count(*) FROM events e WHERE e.order_id = o.order_id)"
    assert await world.value(gaps) == 0


@pytest.mark.case("S113")
async def test_negatives_alone_end_in_the_highest_rank(world: World) -> None:
    """FAILED and CANCELLED in both orders: cancelled, since it ranks higher; and both stay payable."""
    for number, statuses in enumerate(permutations(("FAILED", "CANCELLED"))):
        await world.order(f"ORD-{number}")
        for status in statuses:
            await world.notify(world.pay(f"ORD-{number}", status=status))
            await world.drain()

    assert await world.rows("SELECT order_id, status FROM orders ORDER BY order_id") == [
        {"order_id": "ORD-0", "status": "cancelled"},
        {"order_id": "ORD-1", "status": "cancelled"},
    ]
    assert await world.outcomes() == ["applied", "applied", "applied", "stale"]
