"""Races between processes: two gateways on one database, requests released from a barrier, real commits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests import processes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

ROUNDS = 50


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[processes.Site]:
    """A database, a provider and a subscriber; gateways are started by the test."""
    async with processes.opened(database_url) as opened:
        yield opened


async def released(*calls: Awaitable[int]) -> list[int]:
    """Run the calls at the same moment: each waits at a barrier until all are there."""
    barrier = asyncio.Barrier(len(calls))

    async def one(call: Awaitable[int]) -> int:
        await barrier.wait()
        return await call

    return list(await asyncio.gather(*(one(call) for call in calls)))


@pytest.mark.timeout(90)
@pytest.mark.case("S108", "S112", "B01", "B05")
async def test_the_same_notification_to_two_processes_has_one_effect_each_round(site: processes.Site) -> None:
    """Fifty rounds: both senders get a 2xx, the order has one ledger row, one payment and one event, the other delivery is a duplicate."""
    first, second = await asyncio.gather(site.start(), site.start())
    statuses = []
    for number in range(ROUNDS):
        await site.order(f"ORD-{number}")
        body = site.pay(f"ORD-{number}")
        statuses += await released(site.notify(first, body), site.notify(second, body))
    await site.until("SELECT count(*) FROM inbox", 0)
    await site.until("SELECT count(*) FROM event_deliveries WHERE status = 'delivered'", ROUNDS)

    assert statuses == [200] * 2 * ROUNDS
    assert await site.value("SELECT count(*) FROM notification_deliveries WHERE outcome = 'applied'") == ROUNDS
    assert await site.value("SELECT count(*) FROM notification_deliveries WHERE outcome = 'duplicate'") == ROUNDS
    assert await site.value("SELECT count(*) FROM processed_notifications") == ROUNDS
    assert await site.value("SELECT count(*) FROM payments") == ROUNDS
    assert await site.value("SELECT count(*) FROM events") == ROUNDS
    assert await site.value("SELECT count(*) FROM orders WHERE status = 'paid' AND amount_paid = amount AND event_count = 1") == ROUNDS


@pytest.mark.timeout(90)
@pytest.mark.case("S141", "B09")
async def test_creation_and_notification_at_once_are_paid_every_time(site: processes.Site) -> None:
    """Two hundred rounds: whichever commits first, the order is paid and nothing is left parked."""
    process = await site.start()
    rounds = 200
    for number in range(rounds):
        body = site.pay(f"ORD-{number}")

        async def create(order_id: str = f"ORD-{number}") -> int:
            await site.order(order_id)
            return 201

        assert await released(site.notify(process, body), create()) == [200, 201]
    await site.until("SELECT count(*) FROM orders WHERE status = 'paid'", rounds)

    assert await site.value("SELECT count(*) FROM inbox") == 0
    assert await site.value("SELECT count(*) FROM notification_deliveries WHERE outcome = 'applied'") == rounds
