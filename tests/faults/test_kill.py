"""kill -9 at every boundary of the notification's way: after a restart nothing accepted is lost and nothing is applied twice."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from ipn_gateway.simulator.faults import Fault
from ipn_gateway.simulator.sslcommerz import encode, sign
from tests import processes
from tests.world import PASSWORD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.processes import Site

    Trigger = Callable[[Site, str], Awaitable[bytes | None]]


async def told(site: Site, order_id: str) -> bytes | None:
    """An order that is paid; its notification."""
    await site.order(order_id)
    return site.pay(order_id)


async def doubted(site: Site, order_id: str) -> bytes | None:
    """The same, and the provider fails at the first question about it."""
    site.simulator.api.faults.add(Fault(path="validator", kind="status500", tran_id=order_id))
    return await told(site, order_id)


async def denied(site: Site, order_id: str) -> bytes | None:
    """The same, and the provider does not know of it until the notification is rejected; asked about the order, it does."""
    site.simulator.api.faults.add(Fault(path="validator", kind="invalid_transaction", tran_id=order_id, times=4))
    return await told(site, order_id)


async def misnamed(site: Site, order_id: str) -> bytes | None:
    """The same, and the notification names another order: it is rejected, and the one that it is about is asked for."""
    await told(site, order_id)
    attempt = site.simulator.bank.attempts(tran_id=order_id)[0]
    return encode(sign(site.simulator.control.fields_of(attempt) | {"tran_id": "ORD-OTHER"}, PASSWORD))


async def untold(site: Site, order_id: str) -> bytes | None:
    """An order that is paid, of which no notification tells."""
    await site.order(order_id, asked_after=0.05)
    site.pay(order_id)
    return None


def sides(*transactions: str) -> tuple[str, ...]:
    return tuple(f"{name}:{side}_commit" for name in transactions for side in ("before", "after"))


POINTS: dict[Trigger, tuple[str, ...]] = {
    told: (
        *sides("notifications.receive", "inbox.claim", "inbox.claim_unproved", "effects.apply_together"),
        *("transport.ask:before", "transport.ask:after", "effects.apply_together:statement_2"),
        *sides("event_deliveries.claim", "event_deliveries.record"),
        *("transport.send:before", "transport.send:after"),
    ),
    doubted: sides("source_states.unknown_answer", "inbox.postpone", "source_states.clear_answer"),
    denied: sides("source_states.refuted_answer"),
    misnamed: sides("inbox.end"),
    untold: sides("sweeps.claim", "effects.apply", "sweeps.record"),
}
"""What leads a process to a point, and the points that it dies at then."""

PAYMENTS = 2


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[processes.Site]:
    """A database, a provider and a subscriber; gateways are started by the test."""
    async with processes.opened(database_url) as opened:
        opened.environment |= {"IPN_REFUTED_SCHEDULE": "0.2*3", "IPN_SWEEP_SCHEDULE": "0.05,0.5*20"}
        yield opened


@pytest.mark.case("S107", "S115", "S119", "S123", "S141")
@pytest.mark.timeout(120)  # a process for each point
@pytest.mark.parametrize("trigger", POINTS, ids=lambda trigger: trigger.__name__)
async def test_processes_killed_between_any_two_transactions_lose_and_double_nothing(site: Site, trigger: Trigger) -> None:
    """One after the other: what was answered 2xx is applied once by those that follow, and its event is delivered."""
    orders, unheard = 0, []
    await site.order("ORD-OTHER")
    for number, point in enumerate(POINTS[trigger]):
        bodies = [await trigger(site, f"ORD-{number}-{place}") for place in range(PAYMENTS)]
        orders += PAYMENTS
        doomed = await site.start(crash_at=point)
        unheard += [body for body in bodies if body and await site.notify(doomed, body) == 0]

        assert await doomed.ended() == -signal.SIGKILL, point

    survivor = await site.start()
    again = [await site.notify(survivor, body) for body in unheard]
    async with site.db.autocommit("test.sweep") as tx:
        await tx.execute("UPDATE sweeps SET due_at = ipn_now() WHERE order_id <> 'ORD-OTHER' AND lease_expires_at IS NULL")
    await site.until("SELECT count(*) FROM orders WHERE status = 'paid'", orders, seconds=40)
    await site.until("SELECT count(*) FROM event_deliveries WHERE status = 'delivered'", orders)
    await site.until("SELECT count(*) FROM inbox", 0)

    assert set(again) <= {200}
    assert await site.value("SELECT count(*) FROM processed_notifications") == orders
    assert await site.value("SELECT sum(amount_paid) FROM orders WHERE status = 'paid'") == 1000 * orders
    assert await site.value("SELECT count(*) FROM payments") == orders
    ends = {"applied", "duplicate"} | ({"rejected"} if trigger in {misnamed, denied} else set())
    assert await site.value("SELECT count(*) FROM notification_deliveries WHERE outcome <> ALL(%(ends)s)", ends=list(ends)) == 0
    received = site.subscriber.state.subscriber.received
    assert (received.unique, received.altered, received.bad_signature) == (orders, 0, 0)
