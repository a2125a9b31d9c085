"""Refunds in two processes at once: the payment is never exceeded, and each refund is asked about by one of them."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from tests import processes, refunding

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[processes.Site]:
    """A database, a provider and a subscriber; leases outlast a machine that is busy with other tests."""
    async with processes.opened(database_url) as opened:
        opened.environment |= {
            "IPN_INBOX_LEASE_SECONDS": "60",
            "IPN_PROVIDER_TIMEOUT_SECONDS": "10",
            "IPN_REFUND_POLL_SCHEDULE": "0.1*50",
        }
        yield opened


@pytest.mark.case("S37", "S61")
@pytest.mark.timeout(90)
async def test_two_processes_refund_a_payment_once(site: processes.Site) -> None:
    """Thirty of 50 from a payment of 1000, each sent to both under one key: twenty are accepted, each once, and brought to their end."""
    client = await refunding.Client.paid(site, "ORD-1")
    both = await asyncio.gather(site.start(), site.start())
    calls = [client.refund(process, f"key-{number}", f"R-{number}", "50.00") for number in range(30) for process in both]
    answers = await asyncio.gather(*calls)
    await site.until("SELECT count(*) FROM refunds WHERE status = 'succeeded'", 20)

    statuses = [answer.status_code for answer in answers]
    refunds = site.simulator.api.refunds
    assert len(statuses) == 60
    assert set(statuses) <= {202, 409}
    assert list(refunds.accepted().values()) == [1] * 20
    assert sum(refund.amount for refund in refunds.by_ref_id.values()) == 1000
    assert await site.value("SELECT count(*) FROM refunds") == 20
    assert await site.value("SELECT amount_refunded FROM orders WHERE status = 'refunded'") == Decimal("1000.00")
    assert await site.value("SELECT amount_refunded FROM payments WHERE amount_reserved = 0") == Decimal("1000.00")
    assert await site.value("SELECT count(*) FROM events WHERE type = 'order.refunded'") == 20
    assert await site.value("SELECT event_count FROM orders") == 21
    assert set(site.simulator.api.refund_queries.values()) == {2}
