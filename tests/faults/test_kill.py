"""kill -9 at every boundary between transactions: after a restart nothing accepted is lost and nothing is applied twice."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests import processes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POINTS = [
    "notifications.receive:before_commit",
    "notifications.receive:after_commit",
    "inbox.claim:before_commit",
    "inbox.claim:after_commit",
    "transport.ask:before",
    "transport.ask:after",
    "effects.apply:statement_2",
    "effects.apply:before_commit",
    "effects.apply:after_commit",
    "event_deliveries.claim:before_commit",
    "event_deliveries.claim:after_commit",
    "transport.send:before",
    "transport.send:after",
    "event_deliveries.record:before_commit",
    "event_deliveries.record:after_commit",
]
PAYMENTS = 3


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[processes.Site]:
    """A database, a provider and a subscriber; gateways are started by the test."""
    async with processes.opened(database_url) as opened:
        yield opened


@pytest.mark.case("S107", "S115", "S119", "S123", "S141")
@pytest.mark.timeout(90)
@pytest.mark.parametrize("point", POINTS)
async def test_a_process_killed_between_any_two_transactions_loses_and_doubles_nothing(site: processes.Site, point: str) -> None:
    """What was answered 2xx is applied once by the next process, and its event is delivered; what got no answer is sent again."""
    bodies = []
    for number in range(PAYMENTS):
        await site.order(f"ORD-{number}")
        bodies.append(site.pay(f"ORD-{number}"))
    doomed = await site.start(crash_at=point)
    accepted = [await site.notify(doomed, body) for body in bodies]

    assert await doomed.ended() == -signal.SIGKILL

    survivor = await site.start()
    again = [await site.notify(survivor, body) for body, status in zip(bodies, accepted, strict=True) if status == 0]
    await site.until("SELECT count(*) FROM event_deliveries WHERE status = 'delivered'", PAYMENTS)
    await site.until("SELECT count(*) FROM inbox", 0)

    assert set(again) <= {200}
    assert await site.value("SELECT count(*) FROM processed_notifications") == PAYMENTS
    assert await site.value("SELECT sum(amount_paid) FROM orders WHERE status = 'paid'") == 1000 * PAYMENTS
    assert await site.value("SELECT count(*) FROM payments") == PAYMENTS
    assert await site.value("SELECT count(*) FROM notification_deliveries WHERE outcome NOT IN ('applied', 'duplicate')") == 0
    received = site.subscriber.state.subscriber.received
    assert (received.unique, received.altered, received.bad_signature) == (PAYMENTS, 0, 0)
