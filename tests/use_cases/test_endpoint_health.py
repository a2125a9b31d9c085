"""Endpoints that have been failing for days: warned of, then disabled, and told about."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from ipn_gateway import endpoint_health, endpoints, ids, logs, views
from tests.dispatching import Subscribers, dispatching, received, refuses
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago, ahead

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.objects import Endpoint
    from tests.make import Make


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


@pytest.fixture(autouse=True)
def _counters_from_zero() -> None:
    logs.counters.clear()


async def shown(db: Database, endpoint_id: UUID) -> Endpoint:
    async with db.autocommit("test") as tx:
        return await views.endpoint(tx, TENANT, endpoint_id)


async def audited(subscribers: Subscribers) -> list[dict[str, Any]]:
    names = ("actor", "action", "target", "reason", "details")
    return [{name: row[name] for name in names} for row in await subscribers.rows("audit_log")]


async def failing(subscribers: Subscribers, *, hours: int, retry: bool = True, **given: Any) -> UUID:
    """An endpoint that has been failing for so long, and with `retry` an event delivery that waits for its next attempt."""
    endpoint_id = await subscribers.endpoint("http://localhost:1/", **given)
    await subscribers.make.endpoint_state(endpoint_id=endpoint_id, consecutive_failures=50, failing_since=ago(hours=hours))
    if retry:
        await subscribers.deliver(endpoint_id, attempt_count=3, next_attempt_at=ahead(hours=5))
    return endpoint_id


async def test_five_days_of_nothing_but_failure(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """Warned of after one and after three, disabled after five; the others are told, and what waits is sent when it is enabled."""
    async with serving(refuses()) as server, serving(says(OK)) as other, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=1)
        await subscribers.run("UPDATE endpoints SET url = url || %(rest)s", rest="?key=for-its-owner-only")
        await subscribers.endpoint(other, events=["endpoint.disabled"])
        (first,) = await subscribers.deliver(endpoint_id)
        done = []
        for day in range(6):
            await subscribers.deliver(endpoint_id)
            await running.drain()
            done.append((day, await endpoint_health.run_once(db), await endpoint_health.run_once(db)))
            clock.advance(days=1, minutes=1)
        await running.drain()
        disabled, since = await shown(db, endpoint_id), (await subscribers.rows("endpoint_states", order="endpoint_id"))[0]["failing_since"]
        server.answer = says(OK)
        before = len(server.requests)
        await endpoints.enable(db, TENANT, endpoint_id, actor="test")
        await running.drain()

    assert done == [(0, 0, 0), (1, 1, 0), (2, 0, 0), (3, 1, 0), (4, 0, 0), (5, 1, 0)]
    assert (disabled.status, disabled.disabled_reason, disabled.failing_since) == ("disabled", "failing", since)
    (told,) = received(other)
    wanted = {"endpoint_id": ids.show("ep", endpoint_id), "url": server.url.removesuffix("/hook"), "reason": "failing"}
    assert (json.loads(told.body)["type"], json.loads(told.body)["data"]) == ("endpoint.disabled", wanted)
    assert len(server.requests) - before == 7
    assert (await subscribers.delivery(first))["status"] == "delivered"
    assert (await shown(db, endpoint_id)).failing_since is None


async def test_warnings_are_told_everywhere(db: Database, subscribers: Subscribers) -> None:
    """In the log, as a counter, in the audit log, and in the endpoint itself."""
    endpoint_id = await failing(subscribers, hours=25)
    with structlog.testing.capture_logs() as lines:
        assert await endpoint_health.run_once(db) == 1

    since = (await shown(db, endpoint_id)).failing_since
    assert since is not None
    details = {"failing_since": since.isoformat(timespec="milliseconds").replace("+00:00", "Z"), "days": 1, "disabled_after_days": 5}
    assert [line for line in lines if line["event"] == "endpoint.failing"] == [
        {
            "event": "endpoint.failing",
            "log_level": "warning",
            "component": "endpoint_health",
            "tenant_id": TENANT,
            "endpoint_id": ids.show("ep", endpoint_id),
            **details,
        }
    ]
    assert logs.counters["endpoints.warned"] == 1
    wanted = {"actor": "maintenance", "action": "endpoint.warn", "target": ids.show("ep", endpoint_id), "reason": None}
    assert await audited(subscribers) == [{**wanted, "details": details}]


@pytest.mark.parametrize(("hours", "acts"), [(23, 0), (48, 1), (96, 1), (121, 1)])
async def test_whoever_looks_late_acts_once(db: Database, subscribers: Subscribers, hours: int, acts: int) -> None:
    """Of the longest time that has passed, not of each."""
    await failing(subscribers, hours=hours)

    assert [await endpoint_health.run_once(db), await endpoint_health.run_once(db)] == [acts, 0]


async def test_many_that_look_at_once_act_once(db: Database, subscribers: Subscribers) -> None:
    """One entry, one event, whoever was first."""
    await failing(subscribers, hours=48)
    gone = await failing(subscribers, hours=144)
    await subscribers.endpoint("http://localhost:2/", events=["endpoint.disabled"])
    await asyncio.gather(*(endpoint_health.run_once(db) for _ in range(5)))

    assert sorted((entry["action"], entry["reason"]) for entry in await audited(subscribers)) == [
        ("endpoint.disable", "failing"),
        ("endpoint.warn", None),
    ]
    assert len(await subscribers.rows("events", "type = 'endpoint.disabled'")) == 1
    assert (await shown(db, gone)).status == "disabled"
    assert (logs.counters["endpoints.disabled"], logs.counters["endpoints.warned"]) == (1, 1)


async def test_nobody_is_disabled_for_what_is_over(db: Database, subscribers: Subscribers) -> None:
    """Nothing waits for the endpoint: its last event is dead, and whether it still fails, nobody knows. The next event will tell."""
    endpoint_id = await failing(subscribers, retry=False, hours=144)
    assert await endpoint_health.run_once(db) == 1
    (fresh,) = await subscribers.deliver(endpoint_id)
    assert await endpoint_health.run_once(db) == 0
    await subscribers.run(
        "UPDATE event_deliveries SET attempt_count = 1, next_attempt_at = ipn_now() + interval '5 s' WHERE id = %(id)s", id=fresh
    )
    assert await endpoint_health.run_once(db) == 1

    assert [entry["action"] for entry in await audited(subscribers)] == ["endpoint.warn", "endpoint.disable"]


async def test_a_success_begins_it_anew(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """After four days of failing one event arrives: the warnings come again a day after the next failure."""
    async with serving(says(OK, b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")) as server, dispatching(db) as running:
        endpoint_id = await failing(subscribers, hours=96)
        await subscribers.run("UPDATE endpoints SET url = %(url)s", url=server.url)
        assert await endpoint_health.run_once(db) == 1
        await subscribers.deliver(endpoint_id)
        await running.drain()
        counts = [await endpoint_health.run_once(db)]
        await subscribers.deliver(endpoint_id)
        await running.drain()
        clock.advance(hours=23)
        counts.append(await endpoint_health.run_once(db))
        clock.advance(hours=2)
        counts.append(await endpoint_health.run_once(db))

    assert counts == [0, 0, 1]


@pytest.mark.parametrize(
    "endpoint", [{"status": "disabled", "disabled_reason": "gone", "disabled_at": ago(days=1)}, {"deleted_at": ago(days=1)}]
)
async def test_what_is_not_sent_to_is_left_alone(db: Database, subscribers: Subscribers, endpoint: dict[str, Any]) -> None:
    """Disabled or deleted: there is nothing to warn of."""
    await failing(subscribers, hours=144, **endpoint)

    assert await endpoint_health.run_once(db) == 0
    assert await audited(subscribers) == []


async def test_an_endpoint_that_is_gone_is_in_the_audit_log_and_told_to_the_others_only(db: Database, subscribers: Subscribers) -> None:
    """The dispatcher did it; the endpoint itself, which wants every event, gets none about that, also not when it is enabled."""
    async with serving(refuses(410)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        other = await subscribers.endpoint("http://localhost:1/")
        await subscribers.deliver(endpoint_id)
        await running.run_once()

    wanted = {"actor": "dispatcher", "action": "endpoint.disable", "target": ids.show("ep", endpoint_id), "reason": "gone", "details": {}}
    assert await audited(subscribers) == [wanted]
    told = await subscribers.rows("event_deliveries", "event_type = 'endpoint.disabled'")
    assert [row["endpoint_id"] for row in told] == [other]
    assert logs.counters["endpoints.disabled"] == 1
