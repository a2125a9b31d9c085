"""The redirect and the notification of one payment, at the same moment, at two processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests import processes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

ROUNDS = 50
SHOP = "https://shop.example/thanks"


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[processes.Site]:
    """A database, a provider and a subscriber; gateways are started by the test."""
    async with processes.opened(database_url) as opened:
        yield opened


async def released(*calls: Awaitable[Any]) -> list[Any]:
    """Run the calls at the same moment: each waits at a barrier until all are there."""
    barrier = asyncio.Barrier(len(calls))

    async def one(call: Awaitable[Any]) -> Any:
        await barrier.wait()
        return await call

    return list(await asyncio.gather(*(one(call) for call in calls)))


@pytest.mark.timeout(90)
@pytest.mark.case("B01", "B11")
async def test_redirect_and_notification_at_once_have_one_effect_each_round(site: processes.Site) -> None:
    """Fifty rounds: the customer sees paid, the sender gets its 2xx, and there is one ledger row, one payment and one paid event."""
    first, second = await asyncio.gather(site.start(), site.start())
    answers = []
    for number in range(ROUNDS):
        await site.order(f"ORD-{number}", return_url=SHOP)
        body = site.pay(f"ORD-{number}")
        at = (first, second) if number % 2 else (second, first)
        answers.append(await released(site.notify(at[0], body), site.come_back(at[1], body)))
    await site.until("SELECT count(*) FROM inbox", 0)
    await site.until("SELECT count(*) FROM event_deliveries WHERE status = 'delivered'", ROUNDS)

    assert answers == [[200, f"{SHOP}?order_id=ORD-{number}&status=paid"] for number in range(ROUNDS)]
    for via in ("ipn", "return/success"):
        assert await site.value("SELECT count(*) FROM notification_deliveries WHERE via = %(via)s", via=via) == ROUNDS
    assert await site.value("SELECT count(*) FROM notification_deliveries WHERE outcome = 'applied'") == ROUNDS
    assert await site.value("SELECT count(*) FROM notification_deliveries WHERE outcome = 'duplicate'") == ROUNDS
    assert await site.value("SELECT count(*) FROM processed_notifications") == ROUNDS
    assert await site.value("SELECT count(*) FROM payments") == ROUNDS
    assert await site.value("SELECT count(*) FROM events WHERE type = 'order.paid'") == ROUNDS
    assert await site.value("SELECT count(*) FROM events") == ROUNDS
    assert await site.value("SELECT count(*) FROM orders WHERE status = 'paid' AND amount_paid = amount AND event_count = 1") == ROUNDS
    assert await site.value("SELECT count(*) FROM sweeps") == 0
