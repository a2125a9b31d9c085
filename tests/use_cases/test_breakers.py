"""The breaker of an endpoint: it rests after failures, is tried with one event delivery at a time, and a success closes it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import attempts, endpoints, ids, redeliveries, views
from ipn_gateway.attempts import REST_SECONDS_MAX, TRYING_FROM, Attempt, decide
from ipn_gateway.paging import Wanted
from ipn_gateway.transport import Outcome
from tests.dispatching import Hanging, Subscribers, dispatching, received, refuses
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago, ahead

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.objects import EventDelivery
    from tests.make import Make

NO = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
SLOW = b"HTTP/1.1 429 Slow\r\nRetry-After: 20\r\nContent-Length: 0\r\n\r\n"
TOO_MANY = Outcome("refused", 429, retry_after_seconds=40)


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


async def state(subscribers: Subscribers) -> dict[str, Any]:
    (row,) = await subscribers.rows("endpoint_states", order="endpoint_id")
    return row


async def rest(subscribers: Subscribers) -> float:
    """How long the endpoint rests from now on, in seconds; 0 when it does not."""
    row = await state(subscribers)
    return max(0.0, (row["open_until"] - row["now"]).total_seconds()) if row["open_until"] else 0.0


async def ended(subscribers: Subscribers, outcomes: dict[UUID, Outcome], *, started_at: datetime | None = None) -> None:
    """Record attempts of these event deliveries that end so, together, under leases of their own."""
    made = []
    for delivery_id, outcome in outcomes.items():
        await subscribers.run(
            "UPDATE event_deliveries SET lease_expires_at = ipn_now() + interval '45 seconds', fence = fence + 1 WHERE id = %(id)s",
            id=delivery_id,
        )
        row = await subscribers.delivery(delivery_id)
        made.append(
            Attempt(
                id=ids.new(subscribers.db.clock.now()),
                tenant_id=TENANT,
                event_delivery_id=delivery_id,
                endpoint_id=row["endpoint_id"],
                fence=row["fence"],
                trigger="initial",
                started_at=started_at or row["now"],
                url="http://localhost/",
                outcome=outcome,
                after=decide(row["attempt_count"], outcome, schedule=(0, 5, 300), chance=0),
            )
        )
    await attempts.record(subscribers.db, made)


async def test_failures_in_a_row_open_it_and_each_rest_is_about_twice_the_one_before(
    clock: Clock, db: Database, subscribers: Subscribers
) -> None:
    """While it rests nothing is sent; between the rests one event delivery tries it, and in the end all that could not wait for another."""
    rests, tries = [], []
    async with serving(refuses()) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=TRYING_FROM)
        await subscribers.backlog(endpoint_id, 50)
        await running.run_once()
        for _ in range(10):
            rests.append(await rest(subscribers))
            clock.advance(seconds=rests[-1] - 0.2)
            assert await running.run_once() == 0
            clock.advance(seconds=0.21)
            tries.append(await running.run_once())

    assert rests[0] == pytest.approx(1, abs=0.3)
    assert all(before <= after <= max(1.5, 2.2 * before + 0.5) for before, after in itertools.pairwise([*rests[:6]]))
    assert rests[-3:] == [pytest.approx(REST_SECONDS_MAX, abs=0.5)] * 3
    assert tries == [1 if at < 5 else TRYING_FROM for at in range(10)]


async def test_fewer_failures_open_nothing(db: Database, subscribers: Subscribers) -> None:
    """And a success between them begins the count anew."""
    async with serving(says(*[NO] * 4, OK, *[NO] * 4)) as server, dispatching(db) as running:
        await subscribers.backlog(await subscribers.endpoint(server, max_in_flight=1), 9)
        await running.drain()

    row = await state(subscribers)
    assert len(server.requests) == 9
    assert (row["consecutive_failures"], row["open_until"]) == (4, None)


async def test_a_success_closes_it_and_what_waits_goes_out(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """At once and all of it; retries keep their published times."""
    async with serving(says(*[NO] * 5, OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=5)
        await subscribers.backlog(endpoint_id, 20)
        assert await running.drain() == 5
        clock.advance(seconds=1.5)
        counts = [await running.run_once() for _ in range(4)]

    assert counts == [1, 5, 5, 4]
    assert await subscribers.statuses(endpoint_id) == {"delivered": 15, "pending": 5}
    assert (await state(subscribers))["open_until"] is None


async def test_only_one_at_a_time_tries_it(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """However long that takes, and whoever looks."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db) as running, dispatching(db) as other:
        endpoint_id = await subscribers.endpoint(server)
        await subscribers.make.endpoint_state(
            endpoint_id=endpoint_id, consecutive_failures=7, failing_since=ago(seconds=10), open_until=ago(seconds=1)
        )
        await subscribers.backlog(endpoint_id, 10)
        counts = [await running.start_all(), await other.start_all()]
        await hanging.has(1)
        counts += [await running.start_all(), await other.start_all()]
        hanging.let_go()
        assert await running.slots.drained(seconds=10)
        counts.append(await other.run_once())

    assert counts == [1, 0, 0, 0, 9]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize(("hint", "waits"), [(None, (1, 5)), (30, (30, 30)), (3600, (60, 3600)), (0, (1, 5))])
async def test_what_says_that_it_is_too_much_slows_the_endpoint(
    db: Database, subscribers: Subscribers, status: int, hint: int | None, waits: tuple[float, float]
) -> None:
    """One such answer is enough, and the rest is as long as it says, up to a minute; the event delivery waits as long as it says."""
    async with serving(refuses(status, "" if hint is None else f"Retry-After: {hint}\r\n")) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=1)
        (delivery_id,) = await subscribers.deliver(endpoint_id)
        await subscribers.deliver(endpoint_id, 3)
        assert await running.drain() == 1
        seconds = await rest(subscribers)

    row = await subscribers.delivery(delivery_id)
    assert (seconds, (row["next_attempt_at"] - row["now"]).total_seconds()) == pytest.approx(waits, abs=0.8)


async def test_another_refusal_with_a_wait_slows_the_event_only(db: Database, subscribers: Subscribers) -> None:
    """A 500 says something about the event; the others go out."""
    async with serving(refuses(500, "Retry-After: 30\r\n")) as server, dispatching(db) as running:
        await subscribers.deliver(await subscribers.endpoint(server, max_in_flight=1), 3)

        assert await running.drain() == 3


async def test_after_a_rest_that_was_asked_for_one_tries_it(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """And its success lets the others go."""
    async with (
        serving(says(SLOW, OK)) as server,
        dispatching(db) as running,
    ):
        await subscribers.deliver(await subscribers.endpoint(server, max_in_flight=1), 1)
        await running.drain()
        await subscribers.run("UPDATE endpoints SET max_in_flight = 10")
        await subscribers.deliver((await subscribers.rows("endpoints"))[0]["id"], 4)
        clock.advance(seconds=19)
        counts = [await running.run_once()]
        clock.advance(seconds=1.5)
        counts += [await running.run_once(), await running.run_once()]

    assert counts == [0, 1, 4]


async def test_what_was_on_its_way_when_the_rest_began_changes_nothing_about_it(
    clock: Clock, db: Database, subscribers: Subscribers
) -> None:
    """Neither its success, which was no answer to the rest, nor its failure, which is none more."""
    endpoint_id = await subscribers.endpoint("http://localhost:1/")
    first, second, third = await subscribers.deliver(endpoint_id, 3)
    before = (await subscribers.delivery(first))["now"]
    await ended(subscribers, {first: TOO_MANY})
    until = (await state(subscribers))["open_until"]
    clock.advance(seconds=10)
    await ended(subscribers, {second: Outcome("refused", 500)}, started_at=before)
    after_failure = await state(subscribers)
    await ended(subscribers, {third: Outcome("delivered", 200)}, started_at=before)
    after_success = await state(subscribers)

    assert after_failure["open_until"] == after_success["open_until"] == until
    assert (after_failure["consecutive_failures"], after_success["consecutive_failures"]) == (2, 0)


async def test_a_success_and_a_refusal_that_end_together_leave_the_rest(db: Database, subscribers: Subscribers) -> None:
    """An endpoint that takes some and refuses some by 429 is slowed by these, though it does not fail."""
    endpoint_id = await subscribers.endpoint("http://localhost:1/")
    one, other = await subscribers.deliver(endpoint_id, 2)
    await ended(subscribers, {one: TOO_MANY, other: Outcome("delivered", 200)})

    row = await state(subscribers)
    assert await rest(subscribers) == pytest.approx(40, abs=0.8)
    assert (row["consecutive_failures"], row["failing_since"]) == (0, None)


async def test_a_redelivery_passes_it(db: Database, subscribers: Subscribers) -> None:
    """At once and before any backlog; it is the same event, sent once, and its success ends the rest."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=2)
        await subscribers.make.endpoint_state(
            endpoint_id=endpoint_id, consecutive_failures=9, failing_since=ago(hours=1), open_until=ahead(seconds=50)
        )
        for event_id in ("evt_old", "evt_dead"):
            await subscribers.make.event(id=event_id)
        (old,) = await subscribers.deliver(endpoint_id, 1, event_id="evt_old", status="delivered", delivered_at=ago(days=1))
        (dead,) = await subscribers.deliver(endpoint_id, 1, event_id="evt_dead", status="dead", attempt_count=10)
        await subscribers.backlog(endpoint_id, 500)
        assert await running.run_once() == 0
        for delivery_id in (old, dead, dead):
            await redeliveries.redeliver(db, TENANT, delivery_id, actor="test")
        assert await running.run_once() == 2
        sent = sorted(message.id for message in received(server))
        closed = (await state(subscribers))["open_until"]
        events = await subscribers.rows("event_deliveries", "event_id IN ('evt_old', 'evt_dead')")

    assert sent == ["evt_dead", "evt_old"]
    assert len(events) == 2
    assert closed is None


async def test_a_redelivery_that_fails_leaves_it_open_and_lets_nothing_else_through(db: Database, subscribers: Subscribers) -> None:
    """Also beside the one that tries the endpoint: a person's wish counts for itself."""
    hanging = Hanging(then=NO)
    async with serving(hanging) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        await subscribers.make.endpoint_state(
            endpoint_id=endpoint_id, consecutive_failures=9, failing_since=ago(seconds=20), open_until=ago(seconds=1)
        )
        (old,) = await subscribers.deliver(endpoint_id, 1, status="delivered", delivered_at=ago(days=1))
        await subscribers.backlog(endpoint_id, 50)
        counts = [await running.start_all()]
        await hanging.has(1)
        await redeliveries.redeliver(db, TENANT, old, actor="test")
        counts.append(await running.start_all())
        await hanging.has(1)
        hanging.let_go()
        assert await running.slots.drained(seconds=10)
        counts.append(await running.run_once())

    assert counts == [1, 1, 0]
    assert await rest(subscribers) == pytest.approx(20, abs=2)


async def test_no_second_rest_delays_an_attempt(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """At an endpoint that fails for long, all that is due when a rest ends goes out, oldest first, within its `max_in_flight`."""
    async with serving(refuses()) as server, dispatching(db, retry_schedule=(0, 1000)) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=4)
        await subscribers.make.endpoint_state(
            endpoint_id=endpoint_id, consecutive_failures=9, failing_since=ago(minutes=5), open_until=ago(seconds=1)
        )
        late = await subscribers.deliver(endpoint_id, 6, next_attempt_at=ago(seconds=50))
        counts = [await running.run_once(), await running.run_once()]
        (new,) = await subscribers.deliver(endpoint_id, 1)
        counts.append(await running.run_once())
        clock.advance(seconds=await rest(subscribers) + 0.1)
        counts.append(await running.run_once())
        started = {row["event_delivery_id"]: row["started_at"] for row in await subscribers.rows("delivery_attempts")}
        row = await subscribers.delivery(new)

    assert counts == [4, 0, 0, 3]
    assert set(started) == {*late, new}
    assert (started[new] - row["created_at"]).total_seconds() <= REST_SECONDS_MAX + 1


async def test_what_was_late_before_the_failing_began_does_not_hurry(db: Database, subscribers: Subscribers) -> None:
    """It is not the breaker that made it wait: an endpoint that has just begun to fail is tried by one."""
    async with serving(refuses()) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        await subscribers.make.endpoint_state(
            endpoint_id=endpoint_id, consecutive_failures=9, failing_since=ago(seconds=25), open_until=ago(seconds=1)
        )
        await subscribers.backlog(endpoint_id, 10)

        assert await running.run_once() == 1


async def test_redeliveries_stay_within_what_an_endpoint_takes_at_once(db: Database, subscribers: Subscribers) -> None:
    """However many are asked for, each before all that is due, while the first ones are being sent; and when it is enabled again."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=2)
        asked = await subscribers.deliver(endpoint_id, 230, status="delivered", delivered_at=ago(hours=1))
        counts: list[int] = []
        for delivery_id in asked:
            await redeliveries.redeliver(db, TENANT, delivery_id, actor="test")
            counts.append(await running.start_all() if len(counts) % 10 == 0 else 0)
        await subscribers.run("UPDATE endpoints SET status = 'disabled'")
        await subscribers.deliver(endpoint_id, 120, created_at=ago(days=1), next_attempt_at=ahead(hours=1))
        await endpoints.enable(db, TENANT, endpoint_id, actor="test")
        counts.append(await running.start_all())
        in_flight = await subscribers.in_flight(endpoint_id)

    assert sum(counts) == in_flight == len(server.requests) == 2


async def shown(db: Database) -> list[EventDelivery]:
    async with db.autocommit("test") as tx:
        return (await views.event_deliveries(tx, TENANT, Wanted())).items


async def test_the_next_attempt_that_is_shown_includes_the_rest(db: Database, subscribers: Subscribers) -> None:
    """Of what is pending; never earlier than the schedule says, null while it is disabled, and a redelivery does not wait."""
    endpoint_id = await subscribers.endpoint("http://localhost:1/")
    row = await subscribers.make.endpoint_state(endpoint_id=endpoint_id, consecutive_failures=9, open_until=ahead(seconds=50))
    late = await subscribers.make.event_delivery(endpoint_id=endpoint_id, next_attempt_at=ahead(hours=1))
    await subscribers.make.event_delivery(endpoint_id=endpoint_id)
    asked = await subscribers.make.event_delivery(endpoint_id=endpoint_id, next_trigger="redelivery")
    await subscribers.make.event_delivery(endpoint_id=endpoint_id, status="delivered")
    other = await subscribers.make.event_delivery()
    times = [item.next_attempt_at for item in reversed(await shown(db))]
    await subscribers.run("UPDATE endpoints SET status = 'disabled'")

    assert times == [late["next_attempt_at"], row["open_until"], asked["next_attempt_at"], None, other["next_attempt_at"]]
    assert {item.next_attempt_at for item in await shown(db)} == {None}
