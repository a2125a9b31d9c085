"""Two people act at once, at two gateways on one database: one of them decides, the other gets the same or is told that it is too late."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import ids, runtime, tenants
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.web.app import create_app
from tests import processes
from tests import world as worlds
from tests.world import TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults

ROUNDS = 20

pytestmark = pytest.mark.timeout(60)

Act = tuple[str, dict[str, Any]]


async def at_once(gateways: list[httpx.AsyncClient], *acts: Act) -> list[int]:
    """One act at each gateway, released from a barrier; the statuses."""
    barrier = asyncio.Barrier(len(acts))

    async def one(gateway: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
        await barrier.wait()
        return (await gateway.post(f"/v1{path}", json=body, headers={"Idempotency-Key": secrets.token_hex(8)})).status_code

    return list(await asyncio.gather(*(one(gateway, *act) for gateway, act in zip(gateways, acts, strict=True))))


class Desks:
    """Two gateways with connections of their own, and a person at each."""

    def __init__(self, world: worlds.World, gateways: list[httpx.AsyncClient]) -> None:
        self.world = world
        self._gateways = gateways

    async def at_once(self, *acts: Act) -> list[int]:
        return await at_once(self._gateways, *acts)

    async def notified(self, *bodies: bytes) -> None:
        for body in bodies:
            await self.world.notify(body)
        await self.world.drain()

    def pay(self, order_id: str, amount: str = "1000.00", **given: Any) -> bytes:
        return encode(self.world.pay(order_id, amount, **given))

    async def deliveries(self) -> dict[str, list[str]]:
        """The ids of the deliveries that wait, by their order."""
        found: dict[str, list[str]] = {}
        for row in await self.world.rows("SELECT order_id, notification_delivery_id AS id FROM inbox ORDER BY order_id, id"):
            found.setdefault(row["order_id"], []).append(ids.show(ids.NOTIFICATION_DELIVERY, row["id"]))
        return found


@pytest.fixture
async def desks(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Desks]:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(worlds.opened(database_url, clock, faults))
        other = await stack.enter_async_context(runtime.opened(world.rt.settings, database_url, clock=clock, faults=faults))
        headers = {"Authorization": f"Bearer {(await tenants.create_key(world.rt.db, TENANT)).key}"}
        apps = [create_app(world.rt), create_app(other)]
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test", headers=headers)
            )
            for app in apps
        ]
        yield Desks(world, clients)
        for app in apps:
            await app.state.slots.drained()


@pytest.mark.timeout(90)
async def test_two_people_at_two_processes_decide_once(database_url: str) -> None:
    """Real processes: of apply and dismiss one is a 200 and the other a 409, every time."""
    async with processes.opened(database_url) as site:
        started = await asyncio.gather(site.start(), site.start())
        headers = {"Authorization": f"Bearer {(await tenants.create_key(site.db, TENANT)).key}"}
        for number in range(ROUNDS):
            await site.order(f"ORD-{number}")
            await site.notify(started[0], site.pay(f"ORD-{number}", "1100.00"))
        await site.until("SELECT count(*) FROM inbox WHERE state = 'held'", ROUNDS)
        async with site.db.autocommit("test.rows") as tx:
            rows = await tx.all(dict, "SELECT notification_delivery_id AS id FROM inbox")
        async with AsyncExitStack() as stack:
            made = [httpx.AsyncClient(base_url=process.url, headers=headers, trust_env=False) for process in started]
            gateways = [await stack.enter_async_context(client) for client in made]
            for row in rows:
                path = f"/notification-deliveries/{ids.show(ids.NOTIFICATION_DELIVERY, row['id'])}/resolve"
                acts = [(path, {"decision": decision, "reason": "ours"}) for decision in ("apply", "dismiss")]
                assert sorted(await at_once(gateways, *acts)) == [200, 409]

        applied = await site.value("SELECT count(*) FROM notification_deliveries WHERE resolution = 'apply' AND outcome = 'applied'")
        assert await site.value("SELECT count(*) FROM payments") == applied
        assert await site.value("SELECT count(*) FROM orders WHERE status = 'paid' AND amount_paid = 1100") == applied
        assert (
            await site.value("SELECT count(*) FROM notification_deliveries WHERE resolution = 'dismiss' AND outcome = 'held'")
            == ROUNDS - applied
        )


async def test_an_order_is_released_once(desks: Desks) -> None:
    """Both are told that it is paid; there is one event and one entry in the audit log."""
    for number in range(ROUNDS):
        await desks.world.order(f"ORD-{number}")
    await desks.notified(*(desks.pay(f"ORD-{number}", risk=True) for number in range(ROUNDS)))

    for number in range(ROUNDS):
        act = (f"/orders/ORD-{number}/release", {"reason": "fine"})
        assert await desks.at_once(act, act) == [200, 200]

    assert await desks.world.value("SELECT count(*) FROM orders WHERE status = 'paid' AND event_count = 2") == ROUNDS
    assert await desks.world.value("SELECT count(*) FROM events WHERE type = 'order.paid'") == ROUNDS
    assert await desks.world.value("SELECT count(*) FROM audit_log WHERE action = 'order.release'") == ROUNDS


async def test_of_two_decisions_one_holds(desks: Desks) -> None:
    """One applies and one dismisses: whoever is first decides, the other gets a 409, and the books are those of the first."""
    for number in range(ROUNDS):
        await desks.world.order(f"ORD-{number}")
    await desks.notified(*(desks.pay(f"ORD-{number}", "1100.00") for number in range(ROUNDS)))

    for (delivery,) in (await desks.deliveries()).values():
        path = f"/notification-deliveries/{delivery}/resolve"
        statuses = await desks.at_once(
            (path, {"decision": "apply", "reason": "ours"}), (path, {"decision": "dismiss", "reason": "not ours"})
        )
        assert sorted(statuses) == [200, 409]

    decided = await desks.world.rows(
        """SELECT d.resolution, d.outcome, o.status, o.amount_paid::float8, o.event_count,
                  (SELECT count(*) FROM payments p WHERE p.order_id = o.order_id) AS payments
             FROM orders o JOIN notification_deliveries d USING (tenant_id, order_id)"""
    )
    ends = {
        "apply": {"outcome": "applied", "status": "paid", "amount_paid": 1100, "event_count": 2, "payments": 1},
        "dismiss": {"outcome": "held", "status": "pending", "amount_paid": 0, "event_count": 0, "payments": 0},
    }
    assert [row for row in decided if row != {"resolution": row["resolution"], **ends[row["resolution"]]}] == []
    assert (
        len(decided) == await desks.world.value("SELECT count(*) FROM audit_log WHERE action = 'notification_delivery.resolve'") == ROUNDS
    )
    assert await desks.world.value("SELECT count(*) FROM inbox") == 0


async def test_two_copies_are_applied_once(desks: Desks) -> None:
    """Each person applies another copy: both are told that it is done, and the money is booked once."""
    for number in range(ROUNDS):
        await desks.world.order(f"ORD-{number}")
    bodies = [desks.pay(f"ORD-{number}", "400.00") for number in range(ROUNDS)]
    await desks.notified(*bodies, *bodies)

    for first, second in (await desks.deliveries()).values():
        body = {"decision": "apply", "reason": "a part"}
        acts = [(f"/notification-deliveries/{delivery}/resolve", body) for delivery in (first, second)]
        assert await desks.at_once(*acts) == [200, 200]

    assert await desks.world.value("SELECT count(*) FROM payments") == ROUNDS
    assert (
        await desks.world.value("SELECT count(*) FROM orders WHERE status = 'pending' AND amount_paid = 400 AND event_count = 0") == ROUNDS
    )
    counts = await desks.world.rows("SELECT outcome, count(*) FROM notification_deliveries GROUP BY outcome ORDER BY outcome")
    assert counts == [{"outcome": "applied", "count": ROUNDS}, {"outcome": "duplicate", "count": ROUNDS}]


async def test_two_different_parts_are_summed(desks: Desks) -> None:
    """Applied at once, they pay the order together: neither sum is lost, and it is told once."""
    for number in range(ROUNDS):
        await desks.world.order(f"ORD-{number}")
        await desks.notified(desks.pay(f"ORD-{number}", "400.00"), desks.pay(f"ORD-{number}", "600.00"))

    for first, second in (await desks.deliveries()).values():
        body = {"decision": "apply", "reason": "a part"}
        acts = [(f"/notification-deliveries/{delivery}/resolve", body) for delivery in (first, second)]
        assert await desks.at_once(*acts) == [200, 200]

    assert await desks.world.value("SELECT count(*) FROM orders WHERE status = 'paid' AND amount_paid = 1000 AND event_count = 1") == ROUNDS


async def test_a_replay_and_a_decision_at_once_lose_nothing(desks: Desks) -> None:
    """Whoever is first: in the end the delivery is decided, or waits for a person as before; what is booked is booked once."""
    for number in range(ROUNDS):
        await desks.world.order(f"ORD-{number}")
    await desks.notified(*(desks.pay(f"ORD-{number}", "1100.00") for number in range(ROUNDS)))

    for (delivery,) in (await desks.deliveries()).values():
        path = f"/notification-deliveries/{delivery}"
        statuses = await desks.at_once((f"{path}/resolve", {"decision": "apply", "reason": "ours"}), (f"{path}/replay", {}))
        assert statuses in ([200, 200], [409, 200])
    await desks.world.drain()

    ends = await desks.world.rows(
        """SELECT DISTINCT d.outcome, d.resolution, o.status, i.state
             FROM orders o JOIN notification_deliveries d USING (tenant_id, order_id)
             LEFT JOIN inbox i ON i.tenant_id = d.tenant_id AND i.notification_delivery_id = d.id"""
    )
    applied = {"outcome": "applied", "resolution": "apply", "status": "paid", "state": None}
    waiting = {"outcome": "held", "resolution": None, "status": "pending", "state": "held"}
    assert [row for row in ends if row not in (applied, waiting)] == []
    assert await desks.world.value("SELECT count(*) FROM payments") == await desks.world.value(
        "SELECT count(*) FROM orders WHERE status = 'paid'"
    )


async def test_a_cancellation_and_its_payment_at_once_end_held_or_paid(desks: Desks) -> None:
    """Whichever commits first: paid and no cancellation, or cancelled and then on hold for a person. The money is never lost."""
    for number in range(ROUNDS):
        await desks.world.order(f"ORD-{number}")
        notified = asyncio.ensure_future(desks.notified(desks.pay(f"ORD-{number}")))
        act = (f"/orders/ORD-{number}/cancel", {"reason": "closed"})
        statuses = await desks.at_once(act, act)
        await notified
        end = (await desks.world.rows(f"SELECT status, reason, amount_paid::int FROM orders WHERE order_id = 'ORD-{number}'"))[0]
        if 200 in statuses:
            assert end == {"status": "paid_on_hold", "reason": "late_payment", "amount_paid": 1000}
        else:
            assert end == {"status": "paid", "reason": None, "amount_paid": 1000}
