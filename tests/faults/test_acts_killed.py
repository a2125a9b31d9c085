"""kill -9 in what people and timers do: the repeat of the call, or the next process, ends it, and it is there once."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import ids, migrations, refunds, tenants
from tests import processes
from tests.make import ago, ahead
from tests.world import PASSWORD, SOURCE, STORE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults
    from tests.make import Make
    from tests.processes import Process, Site

WHY = {"reason": "a test"}
NOBODY = "http://127.0.0.1:9/webhooks"  # nobody listens there
AT_ONCE = 3


@dataclass(frozen=True)
class Call:
    """One request, and a query that counts what it does."""

    method: str
    path: str
    body: dict[str, Any] | None
    counted: str


@dataclass
class Desk:
    """Where calls come from, and what they are about."""

    site: Site
    make: Make
    key: str
    survivor: Process

    async def send(self, process: Process, call: Call, key: str) -> httpx.Response | None:
        """One request; None where no answer came."""
        headers = {"Authorization": f"Bearer {self.key}"} | ({"Idempotency-Key": key} if call.method == "POST" else {})
        try:
            return await self.site.http.request(call.method, f"{process.url}{call.path}", json=call.body, headers=headers)
        except httpx.TransportError:
            return None

    async def endpoint(self, tag: str) -> str:
        """A new endpoint's id."""
        made = await self.send(self.survivor, Call("POST", "/v1/endpoints", {"url": NOBODY}, ""), f"endpoint-{tag}")
        assert made is not None
        return str(made.json()["id"])

    async def order(self, tag: str, **given: Any) -> None:
        """A row of that name."""
        await self.make.order(tenant_id=TENANT, source_id=SOURCE, order_id=tag, **given)

    async def stored(self, tag: str, **given: Any) -> str:
        """A genuine notification that ended as given; its id."""
        await self.order(tag)
        body = self.site.pay(tag)
        row = await self.make.notification_delivery(tenant_id=TENANT, source_id=SOURCE, order_id=tag, raw_body=body, **given)
        return ids.show(ids.NOTIFICATION_DELIVERY, row["id"])


async def create_order(_: Desk, tag: str) -> Call:
    body = {"order_id": tag, "amount": "10.00", "currency": "BDT", "source": SOURCE}
    return Call("POST", "/v1/orders", body, f"SELECT count(*) FROM orders WHERE order_id = '{tag}'")


async def refuse_order(desk: Desk, tag: str) -> Call:
    await desk.order(tag)
    body = {"order_id": tag, "amount": "10.00", "currency": "BDT", "source": SOURCE}
    return Call("POST", "/v1/orders", body, f"SELECT count(*) FROM orders WHERE order_id = '{tag}'")


async def release(desk: Desk, tag: str) -> Call:
    await desk.order(tag, status="paid_on_hold", reason="risk")
    return Call("POST", f"/v1/orders/{tag}/release", WHY, f"SELECT count(*) FROM events WHERE order_id = '{tag}' AND type = 'order.paid'")


async def cancel(desk: Desk, tag: str) -> Call:
    await desk.order(tag)
    counted = f"SELECT count(*) FROM events WHERE order_id = '{tag}' AND type = 'order.cancelled'"
    return Call("POST", f"/v1/orders/{tag}/cancel", WHY, counted)


def config(store: str = STORE) -> dict[str, Any]:
    return {"store_id": store, "store_passwd": PASSWORD, "mode": "sandbox"}


async def create_source(_: Desk, tag: str) -> Call:
    body = {"name": tag, "provider": "sslcommerz", "config": config(tag)}
    return Call("POST", "/v1/sources", body, f"SELECT count(*) FROM sources WHERE name = '{tag}'")


async def made_source(desk: Desk, tag: str) -> None:
    assert await desk.send(desk.survivor, await create_source(desk, tag), f"source-{tag}")


async def patch_source(desk: Desk, tag: str) -> Call:
    await made_source(desk, tag)
    changed = {"config": {"base_url": "http://127.0.0.1:9"}}
    return Call("PATCH", f"/v1/sources/{tag}", changed, f"SELECT count(*) FROM sources WHERE name = '{tag}' AND config ? 'base_url'")


async def disable_source(desk: Desk, tag: str) -> Call:
    await made_source(desk, tag)
    return Call("DELETE", f"/v1/sources/{tag}", None, f"SELECT count(*) FROM sources WHERE name = '{tag}' AND disabled_at IS NOT NULL")


async def create_endpoint(_: Desk, tag: str) -> Call:
    url = f"{NOBODY}/{tag}"
    return Call("POST", "/v1/endpoints", {"url": url}, f"SELECT count(*) FROM endpoints WHERE url = '{url}'")


async def patch_endpoint(desk: Desk, tag: str) -> Call:
    path = f"/v1/endpoints/{await desk.endpoint(tag)}"
    return Call("PATCH", path, {"description": tag}, f"SELECT count(*) FROM endpoints WHERE description = '{tag}'")


async def delete_endpoint(desk: Desk, tag: str) -> Call:
    public_id = await desk.endpoint(tag)
    known = ids.read(ids.ENDPOINT, public_id)
    return Call(
        "DELETE", f"/v1/endpoints/{public_id}", None, f"SELECT count(*) FROM endpoints WHERE id = '{known}' AND deleted_at IS NOT NULL"
    )


async def enable_endpoint(desk: Desk, tag: str) -> Call:
    public_id = await desk.endpoint(tag)
    known = ids.read(ids.ENDPOINT, public_id)
    async with desk.site.db.autocommit("test.disable") as tx:
        await tx.execute(
            "UPDATE endpoints SET status = 'disabled', disabled_reason = 'gone', disabled_at = ipn_now() WHERE id = %(id)s", {"id": known}
        )
    return Call(
        "POST", f"/v1/endpoints/{public_id}/enable", WHY, f"SELECT count(*) FROM endpoints WHERE id = '{known}' AND status = 'enabled'"
    )


async def disable_endpoint(desk: Desk, tag: str) -> Call:
    public_id = await desk.endpoint(tag)
    known = ids.read(ids.ENDPOINT, public_id)
    return Call(
        "POST", f"/v1/endpoints/{public_id}/disable", WHY, f"SELECT count(*) FROM endpoints WHERE id = '{known}' AND status = 'disabled'"
    )


async def rotate_secret(desk: Desk, tag: str) -> Call:
    public_id = await desk.endpoint(tag)
    counted = f"SELECT count(*) - 1 FROM endpoint_secrets WHERE endpoint_id = '{ids.read(ids.ENDPOINT, public_id)}'"
    return Call("POST", f"/v1/endpoints/{public_id}/rotate-secret", {}, counted)


async def send_test(desk: Desk, tag: str) -> Call:
    public_id = await desk.endpoint(tag)
    known = ids.read(ids.ENDPOINT, public_id)
    counted = f"SELECT count(*) FROM event_deliveries WHERE endpoint_id = '{known}' AND event_type = 'endpoint.test'"
    return Call("POST", f"/v1/endpoints/{public_id}/test", WHY, counted)


async def recover(desk: Desk, tag: str) -> Call:
    public_id = await desk.endpoint(tag)
    known = ids.read(ids.ENDPOINT, public_id)
    event = await desk.make.event(tenant_id=TENANT, order_id=tag)
    counted = f"SELECT count(*) FROM event_deliveries WHERE endpoint_id = '{known}' AND event_id = '{event['id']}'"
    return Call("POST", f"/v1/endpoints/{public_id}/recover", WHY | {"since": "2020-01-01T00:00:00Z"}, counted)


async def publish(_: Desk, tag: str) -> Call:
    return Call("POST", "/v1/events", {"type": f"test.{tag}", "data": {}}, f"SELECT count(*) FROM events WHERE type = 'test.{tag}'")


async def redeliver(desk: Desk, tag: str) -> Call:
    known = ids.read(ids.ENDPOINT, await desk.endpoint(tag))
    event = await desk.make.event(tenant_id=TENANT, order_id=tag)
    row = await desk.make.event_delivery(tenant_id=TENANT, endpoint_id=known, event_id=event["id"], order_id=tag, status="dead")
    path = f"/v1/event-deliveries/{ids.show(ids.EVENT_DELIVERY, row['id'])}/redeliver"
    return Call("POST", path, WHY, f"SELECT count(*) FROM event_deliveries WHERE id = '{row['id']}' AND status = 'pending'")


async def replay(desk: Desk, tag: str) -> Call:
    public_id = await desk.stored(tag, outcome="rejected", reason="refuted")
    counted = f"SELECT count(*) FROM inbox WHERE order_id = '{tag}'"
    return Call("POST", f"/v1/notification-deliveries/{public_id}/replay", WHY, counted)


async def replay_many(desk: Desk, tag: str) -> Call:
    await desk.stored(tag, outcome="dead", reason="no_verdict")
    body = WHY | {"source": SOURCE, "outcome": "dead"}
    return Call("POST", "/v1/notification-deliveries/replay", body, f"SELECT count(*) FROM inbox WHERE order_id = '{tag}'")


async def dismiss(desk: Desk, tag: str) -> Call:
    public_id = await desk.stored(tag, outcome="held", reason="amount")
    known = ids.read(ids.NOTIFICATION_DELIVERY, public_id)
    await desk.make.inbox(tenant_id=TENANT, source_id=SOURCE, notification_delivery_id=known, order_id=tag, state="held")
    counted = f"SELECT count(*) FROM notification_deliveries WHERE order_id = '{tag}' AND resolution = 'dismiss'"
    return Call("POST", f"/v1/notification-deliveries/{public_id}/resolve", WHY | {"decision": "dismiss"}, counted)


CALLS: dict[str, Callable[[Desk, str], Awaitable[Call]]] = {
    "orders.create": create_order,
    "idempotency.refuse": refuse_order,
    "orders.release": release,
    "orders.cancel": cancel,
    "sources.create": create_source,
    "sources.patch": patch_source,
    "sources.disable": disable_source,
    "endpoints.create": create_endpoint,
    "endpoints.patch": patch_endpoint,
    "endpoints.delete": delete_endpoint,
    "endpoints.disable": disable_endpoint,
    "endpoints.enable": enable_endpoint,
    "endpoints.enabled": enable_endpoint,
    "endpoints.rotate_secret": rotate_secret,
    "endpoints.test": send_test,
    "endpoints.tested": send_test,
    "endpoints.recover": recover,
    "endpoints.recovered": recover,
    "events.publish": publish,
    "event_deliveries.redeliver": redeliver,
    "notification_deliveries.replay": replay,
    "notification_deliveries.replayed_one": replay,
    "notification_deliveries.replayed": replay_many,
    "notification_deliveries.replayed_many": replay_many,
    "notification_deliveries.resolve": dismiss,
    "notification_deliveries.resolved": dismiss,
}
"""The transactions of the API, and the call that leads to each."""

UNKEPT = {"secret": "shown in the first answer only"}
REFUSED = {"idempotency.refuse:before": 409, "idempotency.refuse:after": 409, "endpoints.delete:after": 404}
"""Repeats that are no success, as the act is a refusal or done."""


@pytest.fixture
async def desk(database_url: str, make: Make) -> AsyncIterator[Desk]:
    """A database, and a process that lives."""
    async with processes.opened(database_url) as site:
        yield Desk(site, make, (await tenants.create_key(site.db, TENANT)).key, await site.start(roles="web"))


@pytest.mark.case("S36", "S50", "S69", "S107")
@pytest.mark.timeout(150)  # two processes for each call, some at once
async def test_a_process_killed_in_any_call_leaves_one_effect_and_one_answer(desk: Desk) -> None:
    """Killed before its commit and behind it: the same call at another process, when the lease is over, is answered as if once."""
    points = [f"{name}:{side}_commit" for name in CALLS for side in ("before", "after")]
    calls = {point: await CALLS[point.partition(":")[0]](desk, f"t{number}") for number, point in enumerate(points)}
    turns = asyncio.Semaphore(AT_ONCE)

    async def kill(point: str) -> tuple[httpx.Response | None, int]:
        async with turns:
            doomed = await desk.site.start(crash_at=point, roles="web")
            answer = await desk.send(doomed, calls[point], point)
            return answer, await doomed.ended() if answer is None else 0

    ends = dict(zip(points, await asyncio.gather(*map(kill, points)), strict=True))

    assert {point: end for point, end in ends.items() if end != (None, -signal.SIGKILL)} == {}

    async with desk.site.db.autocommit("test.time") as tx:
        await tx.execute("UPDATE idempotency_keys SET lease_expires_at = ipn_now() WHERE lease_expires_at IS NOT NULL")
    answers = {point: await desk.send(desk.survivor, call, point) for point, call in calls.items()}
    repeats = {point: await desk.send(desk.survivor, call, point) for point, call in calls.items() if call.method == "POST"}

    for point, answer in answers.items():
        assert answer is not None, point
        assert answer.is_success or answer.status_code == REFUSED.get(point.removesuffix("_commit")), (point, answer.text)
        assert await desk.site.value(calls[point].counted) == 1, point
    for point, repeat in repeats.items():
        assert repeat is not None, point
        assert repeat.headers.get("idempotent-replayed") == "true", point
        assert repeat.json() | UNKEPT == answers[point].json() | UNKEPT, point  # type: ignore[union-attr]


# --- timers


async def failing(desk: Desk, tag: str) -> str:
    """An endpoint that has failed for long, and one that has failed for very long; how often both are told of and ended."""
    for days in (3, 6):
        known = ids.read(ids.ENDPOINT, await desk.endpoint(f"{tag}-{days}"))
        async with desk.site.db.autocommit("test.fail") as tx:
            await tx.execute(
                """INSERT INTO endpoint_states (tenant_id, endpoint_id, consecutive_failures, failing_since)
                   VALUES (%(tenant)s, %(id)s, 50, ipn_now() - %(days)s * interval '1 day')
                   ON CONFLICT ON CONSTRAINT endpoint_states_pkey DO UPDATE SET failing_since = EXCLUDED.failing_since""",
                {"tenant": TENANT, "id": known, "days": days},
            )
        await desk.make.event_delivery(tenant_id=TENANT, endpoint_id=known, next_attempt_at=ahead(hours=1))
    return """SELECT (SELECT count(*) FROM endpoints WHERE disabled_reason = 'failing') +
                     (SELECT count(*) FROM endpoint_states WHERE warned_at IS NOT NULL AND failing_since > ipn_now() - interval '5 days')"""


async def left_over(desk: Desk, _: str) -> str:
    """A pending delivery of an endpoint that is deleted."""
    endpoint = await desk.make.endpoint(
        tenant_id=TENANT, deleted_at=ago(hours=1), status="disabled", disabled_reason="gone", disabled_at=ago(hours=1)
    )
    await desk.make.event_delivery(tenant_id=TENANT, endpoint_id=endpoint["id"])
    return "SELECT count(*) FROM event_deliveries WHERE status <> 'pending'"


async def parked(desk: Desk, _: str) -> str:
    """A notification that has waited for its order too long."""
    await desk.make.inbox(tenant_id=TENANT, source_id=SOURCE, state="parked", due_at=None, parked_at=ago(hours=100))
    return "SELECT count(*) FROM inbox WHERE state = 'received'"


async def abandoned(desk: Desk, _: str) -> str:
    """A refund that was asked for, whose process died and whose client does not come back."""
    refund = await desk.make.refund(tenant_id=TENANT)
    await desk.make.idempotency_key(
        tenant_id=TENANT,
        id=refund["id"],
        operation=refunds.CREATE.name,
        recovery_point="asking",
        progress={"refund_id": ids.show(ids.REFUND, refund["id"]), "order_id": refund["order_id"]},
        lease_expires_at=ago(hours=1),
    )
    return "SELECT count(*) FROM idempotency_keys WHERE state = 'indeterminate'"


async def old(desk: Desk, _: str) -> str:
    """An event that is kept no longer."""
    event = await desk.make.event(tenant_id=TENANT, created_at=ago(days=500))
    await desk.make.event_delivery(tenant_id=TENANT, event_id=event["id"], status="delivered", delivered_at=ago(days=500))
    return "SELECT 2 - count(*) FROM events WHERE created_at < ipn_now() - interval '499 days'"


TIMERS: dict[str, tuple[Callable[[Desk, str], Awaitable[str]], int]] = {
    "endpoint_health.warn": (failing, 2),
    "endpoint_health.disable": (failing, 2),
    "endpoints.cancel_deliveries": (left_over, 1),
    "inbox.release_parked": (parked, 1),
    "idempotency.doubt": (abandoned, 1),
    "retention.events": (old, 1),
}
"""The transactions of the maintenance role, what gives it something to do, and how much comes of that."""


@pytest.mark.case("S107")
@pytest.mark.timeout(60)
async def test_a_timer_that_is_killed_is_made_up_for_by_the_next_process(desk: Desk) -> None:
    """What was due is still due, or done: once."""
    expected: Counter[str] = Counter()
    for number, point in enumerate(f"{name}:{side}_commit" for name in TIMERS for side in ("before", "after")):
        prepare, most = TIMERS[point.partition(":")[0]]
        expected[await prepare(desk, f"t{number}")] += most
        doomed = await desk.site.start(crash_at=point, roles="maintenance")

        async with asyncio.timeout(20):
            await doomed.gone.wait()
        assert await doomed.ended() == -signal.SIGKILL, point

    await desk.site.start(roles="maintenance")
    for sql, most in expected.items():
        await desk.site.until(sql, most)


# --- commands: one transaction of a process that ends with it

COMMANDS = ("tenants.create_key", "tenants.revoke_key", "key_store.install")


@pytest.mark.case("S107")
async def test_a_command_that_dies_has_done_all_or_nothing(db: Database, faults: Faults, clock: Clock) -> None:
    """Before its commit there is nothing, behind it everything. In this process: the kinds that are killed above, without a server."""
    made = await tenants.create_key(db, TENANT)
    acts: dict[str, tuple[Callable[[], Awaitable[Any]], str]] = {
        "tenants.create_key": (lambda: tenants.create_key(db, "other"), "SELECT count(*) FROM api_keys WHERE tenant_id = 'other'"),
        "tenants.revoke_key": (
            lambda: tenants.revoke_key(db, TENANT, made.key_id),
            "SELECT count(*) FROM api_keys WHERE revoked_at IS NOT NULL",
        ),
        "key_store.install": (lambda: migrations.install_keys(db), "SELECT count(*) FROM pg_class WHERE relname = 'idempotency_keys'"),
    }
    async with db.autocommit("test.drop") as tx:
        await tx.execute("DROP TABLE idempotency_keys")

    async def die() -> None:
        raise asyncio.CancelledError

    assert tuple(acts) == COMMANDS
    for name, (act, counted) in acts.items():
        for side, found in (("before", 0), ("after", 1)):
            faults.on = {f"{name}:{side}_commit": die}
            with pytest.raises(asyncio.CancelledError):
                await act()
            faults.on = {}
            async with db.autocommit("test.count") as tx:
                assert await tx.value(counted) == found, (name, side)
