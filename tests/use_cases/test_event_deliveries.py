"""The dispatcher on a real database, with subscribers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import standardwebhooks
import structlog

from ipn_gateway import attempts, endpoints, event_claims, events, ids, logs, outbox, schedule, settings, views
from ipn_gateway.db import Database
from ipn_gateway.event_deliveries import STARTED_A_TURN
from ipn_gateway.faults import Faults
from ipn_gateway.paging import Wanted
from ipn_gateway.transport import Outcome
from tests.dispatching import Hanging, Subscribers, dispatching, received, refuses
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago, ahead

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from tests.loopback import Server
    from tests.make import Make

SCHEDULE = settings.Settings.model_fields["retry_schedule"].default
FOREIGN_KEY = "b25lLWtleS10aGF0LW5vYm9keS1oYXMtYW55LW1vcmU="


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


@pytest.fixture(autouse=True)
def _counters_from_zero() -> None:
    logs.counters.clear()


# What arrives


@pytest.mark.case("S117", "B85")
async def test_every_attempt_to_every_endpoint_carries_the_same_event(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """Header, body and bytes are the event's, whichever endpoint it goes to and however often."""
    body = json.dumps({"id": "evt_one", "type": "order.paid", "data": {"é": 1.0}}, ensure_ascii=False, indent=1).encode()
    async with serving(says(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", OK)) as first, serving(says(OK)) as second:
        await subscribers.make.event(id="evt_one", body=body)
        for server in (first, second):
            await subscribers.deliver(await subscribers.endpoint(server), event_id="evt_one")
        async with dispatching(db) as running:
            await running.drain()
            clock.advance(seconds=6)
            await running.drain()

    messages = received(first) + received(second)
    assert [message.id for message in messages] == ["evt_one"] * 3
    assert {message.body for message in messages} == {body}
    assert {message.headers["content-type"] for message in messages} == {"application/json"}


async def test_each_attempt_is_signed_anew_with_every_active_secret(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """A library of Standard Webhooks verifies each attempt with either of two secrets; an expired one does not sign."""
    async with serving(refuses()) as server:
        endpoint_id = await subscribers.endpoint(server, secrets=2)
        old = await subscribers.secret(endpoint_id, expires_at=ago(seconds=1))
        await subscribers.deliver(endpoint_id)
        async with dispatching(db) as running:
            await running.drain()
            clock.advance(seconds=6)
            await running.drain()

    one, two = received(server)
    *active, _ = subscribers.secrets[endpoint_id]
    assert int(two.headers["webhook-timestamp"]) - int(one.headers["webhook-timestamp"]) >= 6
    for message in (one, two):
        for secret in active:
            assert standardwebhooks.Webhook(secret).verify(message.body, message.headers) == {"type": "order.paid"}
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(old).verify(message.body, message.headers)


async def test_what_was_done_is_written_down(db: Database, subscribers: Subscribers) -> None:
    """The attempt has what was sent where and answered what; the event delivery is delivered and free."""
    async with serving(says(b"HTTP/1.1 202 Accepted\r\nContent-Length: 5\r\n\r\ndone!")) as server, dispatching(db) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        await running.drain()

    delivery, (attempt,) = await subscribers.delivery(delivery_id), await subscribers.attempts(delivery_id)
    assert (delivery["status"], delivery["attempt_count"], delivery["next_attempt_at"]) == ("delivered", 1, None)
    assert delivery["lease_expires_at"] is None
    assert attempt["started_at"] <= delivery["delivered_at"] <= delivery["now"]
    assert attempt["duration_ms"] >= 0
    wanted = {"number": 1, "trigger": "initial", "outcome": "delivered", "status_code": 202, "error": None, "address": "127.0.0.1"}
    assert {name: attempt[name] for name in wanted} == wanted
    assert attempt["response_excerpt"] == "done!"


async def test_one_canonical_line_per_attempt(db: Database, subscribers: Subscribers) -> None:
    """The line names what was tried, what came of it and what comes next; the counters agree with it."""
    async with serving(refuses(503)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        (delivery_id,) = await subscribers.deliver(endpoint_id)
        with structlog.testing.capture_logs() as lines:
            await running.drain()

    (line,) = [line for line in lines if line["event"] == "event_delivery.attempted"]
    delivery = await subscribers.delivery(delivery_id)
    wanted = {
        "event_delivery_id": ids.show("edl", delivery_id),
        "endpoint_id": ids.show("ep", endpoint_id),
        "event_type": "order.paid",
        "attempt": 1,
        "attempts_max": 10,
        "trigger": "initial",
        "outcome": "refused",
        "http_status": 503,
        "next_attempt_at": delivery["next_attempt_at"].isoformat(),
    }
    assert {name: line[name] for name in wanted} == wanted
    assert line["duration_ms"] >= 0
    assert logs.counters["event_deliveries.retried"] == 1


# When it is tried again


@pytest.mark.case("S118")
@pytest.mark.parametrize("chance", [0.0, 1.0])
async def test_attempts_follow_the_published_schedule_and_then_it_is_dead(
    clock: Clock, db: Database, subscribers: Subscribers, chance: float
) -> None:
    """Nothing is sent a second before its time; each wait is the published one plus the jitter; after the last a person is needed."""
    async with serving(refuses()) as server, dispatching(db, chance=chance) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        assert await running.drain() == 1
        for _ in SCHEDULE[1:]:
            row = await subscribers.delivery(delivery_id)
            clock.offset += row["next_attempt_at"] - row["now"] - timedelta(seconds=1)
            assert await running.drain() == 0
            clock.advance(seconds=1)
            assert await running.drain() == 1
        clock.advance(days=30)
        assert await running.drain() == 0

    made = await subscribers.attempts(delivery_id)
    waits = [(later["started_at"] - earlier["started_at"]).total_seconds() for earlier, later in itertools.pairwise(made)]
    assert waits == [pytest.approx(gap * (1 + 0.1 * chance), abs=1.5) for gap in SCHEDULE[1:]]
    assert [attempt["number"] for attempt in made] == list(range(1, 11))
    assert [attempt["trigger"] for attempt in made] == ["initial", *["retry"] * 9]
    assert len(server.requests) == 10
    delivery = await subscribers.delivery(delivery_id)
    assert (delivery["status"], delivery["next_attempt_at"], delivery["attempt_count"]) == ("dead", None, 10)
    assert (logs.counters["event_deliveries.retried"], logs.counters["event_deliveries.dead"]) == (9, 1)


@pytest.mark.case("S118")
@pytest.mark.parametrize(
    ("hint_seconds", "wait_seconds"), [(1, 5), (120, 120), (86_400, 86_400), (200_000, 86_400), (10**30, 86_400), (None, 5)]
)
@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_a_receiver_may_ask_for_a_longer_wait(
    db: Database, subscribers: Subscribers, form: str, hint_seconds: int | None, wait_seconds: int
) -> None:
    """The wait is max(gap, min(hint, 24 h)), given as seconds or as a date; what cannot be read is no hint."""
    hint = str(hint_seconds)
    if form == "date" and hint_seconds is not None and hint_seconds < 10**6:
        hint = format_datetime(datetime.now(UTC) + timedelta(seconds=hint_seconds), usegmt=True)
    async with serving(refuses(429, f"Retry-After: {hint}\r\n")) as server, dispatching(db) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        await running.drain()

    row = await subscribers.delivery(delivery_id)
    assert (row["next_attempt_at"] - row["now"]).total_seconds() == pytest.approx(wait_seconds, abs=2)


@pytest.mark.case("B87")
async def test_an_endpoint_that_is_gone_is_disabled_and_told_about(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """410 stops everything to it; what waits stays pending, unsent, and goes on with its count once a person enables it."""
    async with serving(says(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n", OK)) as server, serving(says(OK)) as other:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=1, events=["order.paid"])
        await subscribers.endpoint(other, events=["endpoint.disabled"])
        first, second = await subscribers.deliver(endpoint_id, 2)
        async with dispatching(db) as running:
            await running.drain()
            clock.advance(days=2)
            assert await running.drain() == 0
            (disabled,) = await subscribers.rows("endpoints", "id = %(id)s", id=endpoint_id)
            waiting = await subscribers.delivery(first)
            await endpoints.enable(db, TENANT, endpoint_id, actor="key_1")
            assert await running.drain() == 2

    assert (disabled["status"], disabled["disabled_reason"]) == ("disabled", "gone")
    assert (waiting["status"], waiting["attempt_count"]) == ("pending", 1)
    assert [attempt["number"] for attempt in await subscribers.attempts(first)] == [1, 2]
    assert [attempt["number"] for attempt in await subscribers.attempts(second)] == [1]
    assert await subscribers.statuses(endpoint_id) == {"delivered": 2}
    (told,) = received(other)
    data = json.loads(told.body)
    assert (data["id"], data["type"]) == (told.id, "endpoint.disabled")
    assert data["data"] == {"endpoint_id": ids.show("ep", endpoint_id), "url": server.url.removesuffix("/hook"), "reason": "gone"}


@pytest.mark.case("B87")
@pytest.mark.parametrize("end", ["gone", "disabled", "deleted"])
async def test_nothing_is_sent_to_where_it_ended_while_a_retry_was_pending(
    clock: Clock, db: Database, subscribers: Subscribers, end: str
) -> None:
    """Gone (410), disabled or deleted: no attempt follows; the first two stay pending without a next attempt, the last is cancelled."""
    answers = [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n"]
    async with serving(says(*answers)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=1)
        await subscribers.deliver(endpoint_id)
        await running.drain()
        if end == "gone":
            await subscribers.deliver(endpoint_id)
            await running.drain()
        elif end == "disabled":
            async with db.transaction("test.disable") as tx:
                await endpoints.disable(tx, TENANT, endpoint_id, "asked")
        else:
            await endpoints.delete(db, TENANT, endpoint_id, actor="test")
        before = len(server.requests)
        clock.advance(days=30)
        assert await running.drain() == 0
        async with db.autocommit("test.shown") as tx:
            shown = (await views.event_deliveries(tx, TENANT, Wanted())).items

    assert len(server.requests) == before
    assert {(item.status, item.next_attempt_at) for item in shown} == {("cancelled" if end == "deleted" else "pending", None)}


@pytest.mark.case("B93")
@pytest.mark.parametrize("status", [301, 302, 303, 304, 307, 308])
async def test_a_redirect_is_a_failed_attempt(db: Database, subscribers: Subscribers, status: int) -> None:
    """It is not followed, not even to a page that says 200, and its owner sees what was answered."""
    async with serving(says(OK)) as page, dispatching(db) as running:
        body = "" if status == 304 else "Content-Length: 0\r\n"
        answer = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {page.url}\r\n{body}\r\n".encode()
        async with serving(says(answer)) as server:
            (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
            await running.drain()
        async with db.autocommit("test.shown") as tx:
            (shown,) = (await views.event_deliveries(tx, TENANT, Wanted())).items

    assert page.requests == []
    assert (await subscribers.delivery(delivery_id))["status"] == "pending"
    assert [(attempt.outcome, attempt.status_code) for attempt in shown.attempts] == [("refused", status)]


@pytest.mark.case("B93")
@pytest.mark.parametrize("status", [200, 201, 202, 204, 226])
async def test_every_2xx_is_a_success(db: Database, subscribers: Subscribers, status: int) -> None:
    """With a body or without."""
    body = b"" if status == 204 else b"Content-Length: 0\r\n"
    async with serving(says(f"HTTP/1.1 {status} Yes\r\n".encode() + body + b"\r\n")) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        await subscribers.deliver(endpoint_id)
        await running.drain()

    assert await subscribers.statuses(endpoint_id) == {"delivered": 1}


@pytest.mark.case("B83")
async def test_what_failed_in_one_moment_does_not_come_back_in_one(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """A thousand fail together: their second attempts lie all over the published band, and the endpoint sees no more than it may."""
    hanging = Hanging()
    draws = random.Random(83)
    async with serving(hanging) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=20)
        await subscribers.backlog(endpoint_id, 1000)
        await subscribers.run("UPDATE event_deliveries SET fence = 1, lease_expires_at = ipn_now() + interval '45 s'")
        rows = await subscribers.rows("event_deliveries")
        failed = [failure(row, chance=draws.random()) for row in rows]
        for start in range(0, 1000, attempts.TOGETHER_MAX):
            await attempts.record(db, failed[start : start + attempts.TOGETHER_MAX])
        made = await subscribers.rows("delivery_attempts")
        after = await subscribers.rows("event_deliveries")
        waits = sorted((row["next_attempt_at"] - rows[0]["now"]).total_seconds() for row in after)
        clock.advance(seconds=10)
        at_once = [await running.start_all()]
        await hanging.has(1)
        hanging.let_one_go()
        await running.free()
        at_once.append(await running.start_all())

    took = (max(row["now"] for row in after) - rows[0]["now"]).total_seconds()
    assert len(made) == 1000
    assert waits[0] >= SCHEDULE[1]
    assert waits[-1] <= SCHEDULE[1] * (1 + schedule.JITTER) + took
    assert max(sum(start <= wait < start + 0.05 for wait in waits) for start in waits) < 250
    assert at_once == [1, 20]


def failure(row: dict[str, Any], *, chance: float) -> attempts.Attempt:
    """What is recorded when the first attempt of this event delivery is refused."""
    outcome = Outcome("refused", 500)
    after = attempts.decide(0, outcome, schedule=SCHEDULE, chance=chance)
    names = {"tenant_id": TENANT, "event_delivery_id": row["id"], "endpoint_id": row["endpoint_id"], "fence": row["fence"]}
    attempt_id = ids.new(datetime.now(UTC))
    return attempts.Attempt(
        id=attempt_id, trigger="initial", started_at=row["now"], url="http://localhost/", outcome=outcome, after=after, **names
    )


# What is chosen


@pytest.mark.case("S119")
async def test_what_was_staged_is_delivered_by_a_dispatcher_that_comes_later(
    clock: Clock, database_url: str, db: Database, subscribers: Subscribers
) -> None:
    """The event is a row of its cause's transaction; nothing else has to survive."""
    async with serving(says(OK)) as server:
        await subscribers.endpoint(server, events=["endpoint.test"])
        data = events.EndpointData(endpoint_id="ep_1", url="https://subscriber.example")
        staged = events.new("evt_staged", "endpoint.test", clock.now(), data)
        async with db.transaction("test.cause") as tx:
            await outbox.stage(tx, clock, TENANT, [staged])
        async with Database(database_url, clock=clock, faults=Faults(), name="dispatcher") as later, dispatching(later) as running:
            await running.drain()

    (message,) = received(server)
    assert (message.id, message.body) == ("evt_staged", staged.body)


@pytest.mark.case("S124")
async def test_what_commits_late_is_not_passed_over(database_url: str, clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """An event delivery with an older id and an older due time, committed after a newer one was delivered, is delivered too."""
    statement = """INSERT INTO event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, next_attempt_at)
                   VALUES (%(tenant_id)s, %(id)s, %(event_id)s, %(endpoint_id)s, 'order.paid', ipn_now())"""
    older, newer = ids.new(clock.now()), ids.new(clock.now() + timedelta(seconds=1))
    async with (
        serving(says(OK)) as server,
        Database(database_url, clock=clock, faults=Faults()) as slow,
        Database(database_url, clock=clock, faults=Faults()) as quick,
        dispatching(db) as running,
    ):
        endpoint_id = await subscribers.endpoint(server)
        for event_id in ("evt_older", "evt_newer"):
            await subscribers.make.event(id=event_id)
        row = {"tenant_id": TENANT, "endpoint_id": endpoint_id}
        begun, end = asyncio.Event(), asyncio.Event()

        async def commit_late() -> None:
            async with slow.transaction("test.slow") as tx:
                await tx.execute(statement, {**row, "id": older, "event_id": "evt_older"})
                begun.set()
                await end.wait()

        late = asyncio.create_task(commit_late())
        await begun.wait()
        async with quick.transaction("test.quick") as tx:
            await tx.execute(statement, {**row, "id": newer, "event_id": "evt_newer"})
        assert await running.drain() == 1
        end.set()
        await late
        assert await running.drain() == 1

    assert [message.id for message in received(server)] == ["evt_newer", "evt_older"]


@pytest.mark.parametrize(
    ("endpoint", "state"),
    [
        ({"status": "disabled", "disabled_reason": "gone", "disabled_at": ago(hours=1)}, None),
        ({"deleted_at": ago(hours=1)}, None),
        ({}, {"open_until": ahead(minutes=1)}),
    ],
)
async def test_nothing_is_sent_to_an_endpoint_that_may_not_be_called(
    db: Database, subscribers: Subscribers, endpoint: dict[str, Any], state: dict[str, Any] | None
) -> None:
    """Disabled, deleted or resting after failures: its event deliveries stay pending and untouched."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, **endpoint)
        if state:
            await subscribers.make.endpoint_state(endpoint_id=endpoint_id, **state)
        (delivery_id,) = await subscribers.deliver(endpoint_id)
        count = await running.drain()

    row = await subscribers.delivery(delivery_id)
    assert count == len(server.requests) == 0
    assert (row["status"], row["fence"], row["lease_expires_at"]) == ("pending", 0, None)


async def test_an_endpoint_whose_rest_is_over_is_called(db: Database, subscribers: Subscribers) -> None:
    """And its success ends the rest."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        await subscribers.make.endpoint_state(endpoint_id=endpoint_id, open_until=ago(seconds=1), consecutive_failures=5)
        await subscribers.deliver(endpoint_id)
        await running.drain()

    (state,) = await subscribers.rows("endpoint_states", order="endpoint_id")
    assert await subscribers.statuses(endpoint_id) == {"delivered": 1}
    assert (state["open_until"], state["consecutive_failures"]) == (None, 0)


async def test_slots_are_shared_among_endpoints_then_given_to_the_oldest(db: Database, subscribers: Subscribers) -> None:
    """With four slots, an endpoint with the twenty oldest event deliveries does not get them all."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db, slots=4) as running:
        busy, second, third = [await subscribers.endpoint(server) for _ in range(3)]
        await subscribers.deliver(busy, 20, next_attempt_at=ago(hours=1))
        oldest = await subscribers.deliver(second, 1, next_attempt_at=ago(minutes=2))
        await subscribers.deliver(second, 3, next_attempt_at=ago(minutes=1))
        await subscribers.deliver(third, 3)
        started = await running.start_all()
        counts = [await subscribers.in_flight(endpoint_id) for endpoint_id in (busy, second, third)]
        first = await subscribers.delivery(oldest[0])
        hanging.let_go()
        await running.drain()

    assert (started, counts) == (4, [2, 1, 1])
    assert first["lease_expires_at"] is not None
    assert len(server.requests) == 27


async def test_slots_are_shared_among_tenants(db: Database, subscribers: Subscribers) -> None:
    """A slot that becomes free goes to the tenant with the fewest in flight, however old the backlog of one with many endpoints."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db, slots=6) as running:
        for _ in range(12):
            await subscribers.deliver(await subscribers.endpoint(server), 2, next_attempt_at=ago(hours=1))
        assert await running.start_all() == 6
        await hanging.has(6)
        late = await subscribers.endpoint(server, tenant_id="late")
        await subscribers.deliver(late, 5, tenant_id="late")
        shares = []
        for _ in range(3):
            hanging.let_one_go()
            await running.free()
            await running.start_all()
            shares.append(await subscribers.in_flight(late))
        hanging.let_go()
        await running.drain()

    assert shares == [1, 2, 3]
    assert len(server.requests) == 29


@pytest.mark.case("S122", "B91")
async def test_an_endpoint_that_hangs_delays_no_other(database_url: str, clock: Clock, subscribers: Subscribers) -> None:
    """It holds its own slots only, no connection, and what comes for others meanwhile is delivered first."""
    hanging = Hanging()
    async with (
        serving(hanging) as slow,
        serving(says(OK)) as quick,
        Database(database_url, clock=clock, faults=Faults(), connections_max=1) as only,
        dispatching(only, slots=20) as running,
    ):
        hung = await subscribers.endpoint(slow, max_in_flight=3)
        healthy = await subscribers.endpoint(quick)
        await subscribers.backlog(hung, 500)
        await subscribers.deliver(healthy, 5)
        await running.start_all()
        await hanging.has(3)
        for _ in range(3):
            async with asyncio.timeout(10):
                while (await subscribers.statuses(healthy)).get("pending"):
                    await running.dispatcher.run_once()
            await subscribers.deliver(healthy, 5)
        attempts_made = await subscribers.rows("delivery_attempts")
        async with only.transaction("test.free") as tx:
            free = await tx.value("SELECT true")
        in_flight = await subscribers.in_flight(hung)

    assert {attempt["outcome"] for attempt in attempts_made} == {"delivered"}
    assert (len(attempts_made), len(slow.requests), in_flight, free) == (15, 3, 3, True)
    assert await subscribers.statuses(hung) == {"pending": 500}
    assert await subscribers.statuses(healthy) == {"delivered": 15, "pending": 5}


@pytest.mark.case("B105", "B91")
async def test_an_endpoint_that_drips_is_a_timeout_and_gives_its_slots_back(db: Database, subscribers: Subscribers) -> None:
    """A byte now and then does not keep an attempt alive; others are sent meanwhile, and the slots are free at the deadline."""

    async def drip(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await server.drip(writer, b"X-A: b\r\n", seconds=0.05)

    async with serving(drip) as slow, serving(says(OK)) as quick, dispatching(db, slots=6, delivery_timeout_seconds=2) as running:
        dripping, healthy = await subscribers.endpoint(slow, max_in_flight=3), await subscribers.endpoint(quick)
        await subscribers.deliver(dripping, 3, next_attempt_at=ago(hours=1))
        await subscribers.deliver(healthy, 5)
        await running.start_all()
        while (await subscribers.statuses(healthy)).get("pending"):
            await running.free()
            await running.dispatcher.run_once()
        before = await subscribers.rows("delivery_attempts")
        await running.drain()

    assert [attempt["outcome"] for attempt in before] == ["delivered"] * 5
    assert [attempt["outcome"] for attempt in await subscribers.rows("delivery_attempts", "outcome <> 'delivered'")] == ["timeout"] * 3
    assert running.slots.free == 6


async def test_many_that_end_at_once_need_one_connection(database_url: str, clock: Clock, subscribers: Subscribers) -> None:
    """Attempts that end together are written together: with a pool of one, none of a hundred fails for want of a connection."""
    hanging = Hanging()
    async with (
        serving(hanging) as server,
        Database(database_url, clock=clock, faults=Faults(), connections_max=1) as only,
        dispatching(only, slots=100) as running,
    ):
        endpoint_id = await subscribers.endpoint(server, max_in_flight=100)
        await subscribers.deliver(endpoint_id, 100)
        assert await running.start_all() == 100
        await hanging.has(100)
        before = logs.counters["transactions.event_deliveries.record"]
        hanging.let_go()
        assert await running.slots.drained(seconds=10)

    assert await subscribers.statuses(endpoint_id) == {"delivered": 100}
    assert len(await subscribers.rows("delivery_attempts")) == 100
    assert logs.counters["transactions.event_deliveries.record"] - before < 50


async def test_without_a_secret_nothing_is_sent(db: Database, subscribers: Subscribers) -> None:
    """An event is never sent unsigned: it stays pending, no attempt was made, and the log says so."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server, secrets=0))
        with structlog.testing.capture_logs() as lines:
            await running.run_once()

    row = await subscribers.delivery(delivery_id)
    assert server.requests == []
    assert (row["status"], row["attempt_count"]) == ("pending", 0)
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["event_delivery.unsigned"]


async def test_a_secret_that_cannot_be_read_stops_its_own_endpoint_only(db: Database, subscribers: Subscribers) -> None:
    """With the key of one secret lost, everybody else's events go out; this one's stay pending."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        broken = await subscribers.endpoint(server, secrets=0)
        await subscribers.secret(broken, FOREIGN_KEY)
        intact = await subscribers.endpoint(server)
        for endpoint_id in (broken, intact):
            await subscribers.deliver(endpoint_id)
        with structlog.testing.capture_logs() as lines:
            await running.drain()

    assert await subscribers.statuses(intact) == {"delivered": 1}
    assert await subscribers.statuses(broken) == {"pending": 1}
    assert [line["error_class"] for line in lines if line["event"] == "task.failed"] == ["ConfigurationError"]


async def test_what_waited_too_long_for_its_turn_is_not_sent(clock: Clock, db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """The process stood still between claim and send: no attempt fits into what is left of the lease, after which it is claimed again."""

    async def freeze() -> None:
        faults.on.clear()
        over = time.monotonic() + 0.35
        while time.monotonic() < over:  # the whole process stands still
            pass

    short: dict[str, Any] = {"delivery_timeout_seconds": 0.2, "dispatch_lease_seconds": 0.5}
    async with serving(says(OK)) as server, dispatching(db, **short) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        faults.on["event_deliveries.claim:after_commit"] = freeze
        before = logs.counters["event_deliveries.too_late"]
        await running.run_once()
        row = await subscribers.delivery(delivery_id)
        seen, too_late = len(server.requests), logs.counters["event_deliveries.too_late"] - before
        clock.advance(seconds=1)
        await running.drain()

    assert (seen, too_late) == (0, 1)
    assert (row["status"], row["attempt_count"]) == ("pending", 0)
    assert row["lease_expires_at"] is not None
    assert [attempt["number"] for attempt in await subscribers.attempts(delivery_id)] == [1]
    assert len(server.requests) == 1


async def test_what_is_not_recorded_yet_is_not_claimed_again(clock: Clock, db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """The recorder is late and the lease is over: this dispatcher does not send the event again, and the attempt counts."""
    recording, go_on = asyncio.Event(), asyncio.Event()
    put = attempts.Recorder.record

    class Late(attempts.Recorder):
        async def record(self, attempt: attempts.Attempt) -> attempts.Recorded:
            recording.set()
            await go_on.wait()
            return await put(self, attempt)

    short: dict[str, Any] = {"delivery_timeout_seconds": 0.2, "dispatch_lease_seconds": 0.4}
    async with serving(says(OK)) as server, dispatching(db, **short) as running:
        running.dispatcher._recorder = Late(db)
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        await running.dispatcher.run_once()
        await recording.wait()
        (ends_by,) = running.dispatcher._held.values()
        clock.advance(seconds=1)
        while asyncio.get_running_loop().time() < ends_by - 0.1:
            await subscribers.delivery(delivery_id)
        counts = [await running.dispatcher.run_once() for _ in range(3)]
        go_on.set()
        assert await running.slots.drained(seconds=10)

    row = await subscribers.delivery(delivery_id)
    assert counts == [0, 0, 0]
    assert (len(server.requests), row["status"], row["attempt_count"]) == (1, "delivered", 1)
    assert running.dispatcher._held == {}


# Stopping


async def test_stopping_lets_attempts_end_and_gives_back_the_rest(
    database_url: str, clock: Clock, db: Database, subscribers: Subscribers
) -> None:
    """What ends in time is recorded; what hangs is free at once for another dispatcher; nothing more is claimed."""
    hanging = Hanging()
    async with serving(hanging) as slow, serving(says(OK)) as quick, dispatching(db) as running:
        hung = await subscribers.endpoint(slow)
        (unfinished,) = await subscribers.deliver(hung)
        done = await subscribers.endpoint(quick)
        await subscribers.deliver(done)
        await running.start_all()
        await hanging.has(1)
        await running.dispatcher.stop(seconds=0.3)
        await subscribers.deliver(done)
        assert await running.run_once() == 0
        row = await subscribers.delivery(unfinished)
        hanging.let_go()
        async with Database(database_url, clock=clock, faults=Faults()) as other, dispatching(other) as next_one:
            assert await next_one.drain() == 2

    assert (row["status"], row["lease_expires_at"], row["attempt_count"]) == ("pending", None, 0)
    assert await subscribers.statuses(hung) == {"delivered": 1}
    assert await subscribers.statuses(done) == {"delivered": 2}
    assert [attempt["number"] for attempt in await subscribers.attempts(unfinished)] == [1]


async def test_stopping_ends_well_while_the_database_is_away(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """What cannot be given back is left to its lease, and whoever stops goes on."""

    async def away() -> None:
        raise psycopg.OperationalError

    hanging = Hanging()
    async with serving(hanging) as slow, dispatching(db, faults=faults) as running:
        (unfinished,) = await subscribers.deliver(await subscribers.endpoint(slow))
        await running.start_all()
        await hanging.has(1)
        faults.on["event_deliveries.give_back:before_commit"] = away
        await running.dispatcher.stop(seconds=0.1)
        row = await subscribers.delivery(unfinished)
        hanging.let_go()

    assert (row["status"], row["fence"], row["lease_expires_at"] is None) == ("pending", 1, False)


async def test_what_is_claimed_while_stopping_is_not_sent(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """A claim that commits after the stop began gives its leases back."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        faults.on["event_deliveries.claim:before_commit"] = lambda: running.dispatcher.stop(seconds=1)
        assert await running.run_once() == 0

    row = await subscribers.delivery(delivery_id)
    assert (row["status"], row["fence"], row["lease_expires_at"]) == ("pending", 1, None)
    assert server.requests == []


async def test_a_stop_while_a_set_begins_gives_back_what_has_not_begun(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """Those that have begun end; nothing is sent after the stop, and no lease is left."""
    async with serving(says(OK)) as server, dispatching(db, faults=faults, slots=100) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=100)
        await subscribers.deliver(endpoint_id, 3 * STARTED_A_TURN)
        stopping: list[asyncio.Task[None]] = []

        async def stop() -> None:
            if not stopping:
                stopping.append(asyncio.create_task(running.dispatcher.stop(seconds=5)))

        faults.on["transport.send:before"] = stop
        begun = await running.dispatcher.run_once()
        await stopping[0]

    assert STARTED_A_TURN <= begun < 3 * STARTED_A_TURN
    assert len(server.requests) == begun
    assert await subscribers.in_flight(endpoint_id) == 0
    assert await subscribers.statuses(endpoint_id) == {"delivered": begun, "pending": 3 * STARTED_A_TURN - begun}


async def test_a_claim_that_is_broken_off_leaves_no_lease(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """Whoever stops the dispatcher twice cancels it while a set begins: what has not begun is given back all the same."""
    async with serving(says(OK)) as server, dispatching(db, faults=faults, slots=100) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=100)
        await subscribers.deliver(endpoint_id, 3 * STARTED_A_TURN)
        claiming = asyncio.create_task(running.dispatcher.run_once())

        async def cancel() -> None:
            claiming.cancel()

        faults.on["transport.send:before"] = cancel
        with contextlib.suppress(asyncio.CancelledError):
            await claiming
        await running.dispatcher.stop(seconds=5)

    assert claiming.cancelled()
    assert await subscribers.in_flight(endpoint_id) == 0


# What it costs


async def test_a_set_begins_a_few_at_a_time(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """In one turn of the event loop no more than so many are signed and sent: whatever is claimed at once holds up no answer to others."""
    turn, turns = 0, []
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def tick() -> None:
        nonlocal turn
        turn += 1
        if not over.is_set():
            loop.call_soon(tick)

    async def begins() -> None:
        turns.append(turn)

    faults.on["transport.send:before"] = begins
    async with serving(says(OK)) as server, dispatching(db, faults=faults, slots=100) as running:
        await subscribers.deliver(await subscribers.endpoint(server, max_in_flight=100), 3 * STARTED_A_TURN)
        loop.call_soon(tick)
        assert await running.run_once() == 3 * STARTED_A_TURN
        over.set()

    assert max(turns.count(number) for number in turns) == STARTED_A_TURN
    assert len(server.requests) == 3 * STARTED_A_TURN


@pytest.mark.parametrize(("given", "statements"), [({}, (2, 1)), ({"rate_per_second": 10_000}, (2, 1)), ({"ordered": True}, (3, 3))])
async def test_a_delivered_event_costs_three_statements(
    db: Database, faults: Faults, subscribers: Subscribers, given: dict[str, Any], statements: tuple[int, int]
) -> None:
    """Two that claim and one that records, for one event as for many, also with a limited rate; order costs three more."""
    claiming, recording = statements
    seen = []

    def watch(point: str) -> Any:
        async def note() -> None:
            seen.append(point)

        return note

    for name in ("claim", "record"):
        for number in range(1, 6):
            point = f"event_deliveries.{name}:statement_{number}"
            faults.on[point] = watch(point)
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_ids = [await subscribers.endpoint(server, **given) for _ in range(3)]
        for endpoint_id in endpoint_ids:
            await subscribers.deliver(endpoint_id, 3)
        assert await running.run_once() == 9

    assert [point for point in seen if ".claim:" in point] == [f"event_deliveries.claim:statement_{n + 1}" for n in range(claiming)]
    assert f"event_deliveries.record:statement_{recording}" in seen
    assert f"event_deliveries.record:statement_{recording + 1}" not in seen


@pytest.mark.parametrize("kind", ["plain", "limited", "ordered", "resting", "trying"])
async def test_claiming_reads_the_index_of_due_rows(db: Database, subscribers: Subscribers, kind: str) -> None:
    """Its cost is by endpoint: of twenty thousand due rows of one it reads a few hundred, without statistics and with one-sided ones."""
    endpoint_id = await subscribers.endpoint(
        "http://localhost:1/", ordered=kind == "ordered", rate_per_second=100 if kind == "limited" else None
    )
    if kind in {"resting", "trying"}:
        until = ahead(minutes=1) if kind == "resting" else ago(minutes=1)
        await subscribers.make.endpoint_state(endpoint_id=endpoint_id, consecutive_failures=9, open_until=until)
    await subscribers.run(
        """WITH staged AS (
               INSERT INTO event_deliveries
                      (tenant_id, id, event_id, endpoint_id, event_type, order_id, sequence, next_attempt_at)
               SELECT %(tenant_id)s, gen_random_uuid(), 'evt_' || n, %(endpoint_id)s, 'order.paid', 'order-' || n, 1,
                      ipn_now() - n * interval '1 second'
                 FROM generate_series(1, 20000) AS n RETURNING tenant_id, event_id)
           INSERT INTO events (tenant_id, id, type, body) SELECT tenant_id, event_id, 'endpoint.test', '' FROM staged""",
        endpoint_id=endpoint_id,
    )
    read: list[int] = []
    await _explain(db, endpoint_id, read)
    async with db.autocommit("test.analyze") as tx:
        await tx.execute("ANALYZE event_deliveries, events, endpoints")
    await _explain(db, endpoint_id, read)

    assert len(read) == 4
    assert max(read) < 1000


async def _explain(db: Database, endpoint_id: UUID, read: list[int]) -> None:
    """Claim, add how many rows each statement read, and undo it."""
    given = event_claims._CONSTANTS | {"limit": 10, "lease_seconds": 45.0}
    values = given | {"tenant_ids": [TENANT], "endpoint_ids": [endpoint_id], "shares": [10], "mosts": [10]}
    async with db.transaction("test.explain") as tx:
        for statement in (event_claims._CHOOSE, event_claims._CLAIM):
            plan = await tx.value(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values)
            read.append(_read(plan[0]["Plan"]))
        raise psycopg.Rollback


def _read(node: dict[str, Any]) -> int:
    own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] if "Relation Name" in node else 0
    return int(own) + sum(_read(child) for child in node.get("Plans", []))
