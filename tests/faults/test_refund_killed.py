"""kill -9 in each phase of a refund: the provider gives the money back at most once, and no refund is forgotten."""

from __future__ import annotations

import signal
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from tests import processes, refunding

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SHORT = {
    "IPN_PROVIDER_MONEY_TIMEOUT_SECONDS": "1",
    "IPN_IDEMPOTENCY_LEASE_SECONDS": "2",
    "IPN_REFUND_POLL_SCHEDULE": "0.1*50",
}
FIRST, UNKNOWN, REPLAYED = "executed by the repeat", "a person decides", "answered from storage"
PHASES = [
    ("refunds.reserve:before_commit", FIRST, 1),
    ("refunds.reserve:after_commit", UNKNOWN, 0),
    ("transport.ask:before", UNKNOWN, 0),
    ("transport.ask:after", UNKNOWN, 1),
    ("refunds.record:before_commit", UNKNOWN, 1),
    ("refunds.record:after_commit", REPLAYED, 1),
]
POLLS = [
    "refund_polls.claim:before_commit",
    "refund_polls.claim:after_commit",
    "transport.ask:after",
    "refund_polls.record:before_commit",
    "refund_polls.record:after_commit",
]


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[processes.Site]:
    """A database, a provider and a subscriber; gateways are started by the test."""
    async with processes.opened(database_url) as opened:
        opened.environment |= SHORT
        yield opened


async def agree(site: processes.Site, *, moved: int) -> None:
    """The refund is final, and books, subscriber and provider say the same about it."""
    await site.until("SELECT count(*) FROM refunds WHERE status NOT IN ('succeeded', 'failed')", 0)
    await site.until("SELECT count(*) FROM event_deliveries WHERE status <> 'delivered'", 0)

    assert list(site.simulator.api.refunds.accepted().values()) == [1] * moved
    assert await site.value("SELECT count(*) FROM refunds") == 1
    assert await site.value("SELECT sum(amount_refunded) FROM orders") == Decimal("400.00") * moved
    assert await site.value("SELECT sum(amount_refunded) FROM payments") == Decimal("400.00") * moved
    assert await site.value("SELECT sum(amount_reserved) FROM payments") == 0
    assert await site.value("SELECT count(*) FROM events WHERE type = 'order.refunded'") == moved
    assert await site.value("SELECT count(*) FROM events WHERE type = 'order.refund_failed'") == 1 - moved


@pytest.mark.case("S58", "S59", "S60", "S61", "S62", "S64", "S86")
@pytest.mark.timeout(90)
@pytest.mark.parametrize(("point", "then", "moved"), PHASES)
async def test_a_process_killed_in_any_phase_refunds_at_most_once(site: processes.Site, point: str, then: str, moved: int) -> None:
    """Before the intent the repeat refunds. Behind it the refund waits for a person, whether or not its client comes back.

    When that person has said what the provider did, books and provider agree.
    """
    client = await refunding.Client.paid(site, "ORD-1")
    doomed = await site.start(crash_at=point, roles="web")
    await client.refund(doomed, "key-1", "R-1", "400.00")

    assert await doomed.ended() == -signal.SIGKILL

    survivor = await site.start()
    await site.until("SELECT count(*) FROM idempotency_keys WHERE lease_expires_at > ipn_now()", 0)
    if then == UNKNOWN:
        await site.until("SELECT status FROM refunds", "indeterminate")
    answers = [await client.refund(survivor, "key-1", "R-1", "400.00")]
    if then == UNKNOWN:
        assert refunding.problem(answers[0]) == (409, "idempotency-indeterminate")
        await client.settle(survivor, answers[0].json()["reconciliation_id"])
        answers.append(await client.refund(survivor, "key-1", "R-1", "400.00"))

    replayed = "true" if then != FIRST and moved else None  # what did not happen is asked for again, and refused by its reference
    assert (answers[-1].status_code, answers[-1].headers.get("idempotent-replayed")) == (202 if moved else 409, replayed)
    await agree(site, moved=moved)


@pytest.mark.case("S64", "S86")
@pytest.mark.timeout(90)
@pytest.mark.parametrize("point", POLLS)
async def test_a_process_killed_while_polling_counts_a_refund_once(site: processes.Site, point: str) -> None:
    """The next process asks when the lease is over, and the sums and the event are there once."""
    client = await refunding.Client.paid(site, "ORD-1")
    web = await site.start(roles="web")
    answer = await client.refund(web, "key-1", "R-1", "400.00")
    (ref_id,) = site.simulator.api.refunds.by_ref_id
    site.simulator.api.refunds.decide(ref_id, "refunded")
    doomed = await site.start(crash_at=point, roles="maintenance")

    assert await doomed.ended() == -signal.SIGKILL

    await site.start()

    assert answer.status_code == 202
    await agree(site, moved=1)
