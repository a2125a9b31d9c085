"""What attempts make of event deliveries, and writing them down whatever happens to the connection."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import structlog

from ipn_gateway import attempts, endpoints, ids, logs
from ipn_gateway.attempts import After, Attempt, Recorded, Recorder, decide
from ipn_gateway.errors import LeaseLost, Overloaded
from ipn_gateway.states import EventDeliveryStatus
from ipn_gateway.transport import Outcome
from tests.dispatching import Hanging, Subscribers, dispatching, received, refuses
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago, ahead

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults
    from tests.loopback import Answering
    from tests.make import Make


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


@pytest.fixture(autouse=True)
def _counters_from_zero() -> None:
    logs.counters.clear()


def after(delivery: dict[str, Any], outcome: Outcome, decided: After) -> Attempt:
    """An attempt under the lease that the row says."""
    return Attempt(
        id=ids.new(datetime.now(UTC)),
        tenant_id=TENANT,
        event_delivery_id=delivery["id"],
        endpoint_id=delivery["endpoint_id"],
        fence=delivery["fence"],
        trigger="initial",
        started_at=delivery["now"],
        url="http://localhost/",
        outcome=outcome,
        after=decided,
    )


DELIVERED = (Outcome("delivered", 200), After(EventDeliveryStatus.DELIVERED))
REFUSED = (Outcome("refused", 500), After(EventDeliveryStatus.PENDING, 5.0))


@pytest.mark.parametrize(
    ("outcome", "wanted"),
    [
        (Outcome("delivered", 200), After(EventDeliveryStatus.DELIVERED)),
        (Outcome("delivered", 299, retry_after_seconds=60), After(EventDeliveryStatus.DELIVERED)),
        (Outcome("refused", 410, retry_after_seconds=60), After(EventDeliveryStatus.PENDING, 0.0, endpoint_gone=True)),
        (Outcome("refused", 302), After(EventDeliveryStatus.PENDING, 5.0)),
        (Outcome("timeout"), After(EventDeliveryStatus.PENDING, 5.0)),
        (Outcome("blocked"), After(EventDeliveryStatus.PENDING, 5.0)),
    ],
)
def test_only_2xx_ends_it_and_only_410_stops_it(outcome: Outcome, wanted: After) -> None:
    """Everything else is tried again."""
    assert decide(0, outcome, schedule=(0, 5), chance=0.0) == wanted


def test_a_last_attempt_that_fails_is_dead_unless_the_endpoint_is_gone() -> None:
    """What is sent to an endpoint that is gone waits for it, however often it was tried."""
    assert decide(1, Outcome("timeout"), schedule=(0, 5), chance=0.0) == After(EventDeliveryStatus.DEAD)
    assert decide(1, Outcome("refused", 410), schedule=(0, 5), chance=0.0).status == EventDeliveryStatus.PENDING
    assert decide(7, Outcome("timeout"), schedule=(0, 5), chance=0.0) == After(EventDeliveryStatus.DEAD)


@pytest.mark.parametrize(
    ("answer", "outcome"), [(None, "connect_failed"), (says(b"SSH-2.0\r\n", close=True), "protocol_error"), (Hanging(), "timeout")]
)
async def test_every_kind_of_failure_is_an_attempt(db: Database, subscribers: Subscribers, answer: Answering | None, outcome: str) -> None:
    """It is named, counted against the endpoint's health and tried again."""
    async with serving(answer or says(OK)) as server:
        url = server.url if answer else "http://localhost:1/hook"
        endpoint_id = await subscribers.endpoint(url)
        (delivery_id,) = await subscribers.deliver(endpoint_id)
        async with dispatching(db, delivery_timeout_seconds=0.3) as running:
            assert await running.run_once() == 1

    (attempt,) = await subscribers.attempts(delivery_id)
    (state,) = await subscribers.rows("endpoint_states", order="endpoint_id")
    assert (attempt["outcome"], attempt["status_code"]) == (outcome, None)
    assert attempt["error"]
    assert (state["endpoint_id"], state["consecutive_failures"]) == (endpoint_id, 1)
    assert (await subscribers.delivery(delivery_id))["status"] == "pending"


async def test_health_counts_failures_and_forgets_them_at_the_first_success(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """The start of failing is kept over all failures; a healthy endpoint has no row at all, so that nothing waits for one."""
    bad = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
    async with serving(says(bad, bad, OK)) as server, serving(says(OK)) as healthy, dispatching(db) as running:
        await subscribers.deliver(await subscribers.endpoint(server))
        await subscribers.deliver(await subscribers.endpoint(healthy))
        await running.drain()
        (first,) = await subscribers.rows("endpoint_states", order="endpoint_id")
        clock.advance(seconds=6)
        await running.drain()
        (second,) = await subscribers.rows("endpoint_states", order="endpoint_id")
        clock.advance(seconds=301)
        await running.drain()
        (third,) = await subscribers.rows("endpoint_states", order="endpoint_id")

    assert (first["consecutive_failures"], second["consecutive_failures"], third["consecutive_failures"]) == (1, 2, 0)
    assert first["failing_since"] is not None
    assert first["failing_since"] == second["failing_since"]
    assert third["failing_since"] is None


# When writing goes wrong


@pytest.mark.case("S102")
async def test_a_write_whose_commit_is_unknown_is_not_made_twice(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """The connection is lost after COMMIT arrived: run again, it finds its own attempt and leaves it at one."""
    lost = iter([psycopg.OperationalError("lost")])

    async def lose() -> None:
        for error in lost:
            raise error

    faults.on["event_deliveries.record:after_commit"] = lose
    async with serving(refuses()) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        (delivery_id,) = await subscribers.deliver(endpoint_id)
        with structlog.testing.capture_logs() as lines:
            await running.run_once()

    (state,) = await subscribers.rows("endpoint_states", order="endpoint_id")
    assert [attempt["number"] for attempt in await subscribers.attempts(delivery_id)] == [1]
    assert (await subscribers.delivery(delivery_id))["attempt_count"] == state["consecutive_failures"] == 1
    assert [line["attempt"] for line in lines if line["event"] == "event_delivery.attempted"] == [1]
    assert logs.counters["transactions.rerun"] == 1


@pytest.mark.case("S103")
async def test_a_write_that_was_lost_before_its_commit_is_made_once_more(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """Nothing of the first try is there, so the second writes it."""
    lost = iter([psycopg.errors.DeadlockDetected("deadlock")])

    async def lose() -> None:
        for error in lost:
            raise error

    faults.on["event_deliveries.record:before_commit"] = lose
    async with serving(says(OK)) as server, dispatching(db) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        await running.run_once()

    assert [attempt["number"] for attempt in await subscribers.attempts(delivery_id)] == [1]
    assert len(server.requests) == 1


async def test_a_write_that_never_succeeds_is_left_to_the_lease(
    clock: Clock, db: Database, faults: Faults, subscribers: Subscribers
) -> None:
    """The event is sent again when the lease is over, as the same event."""
    failures = iter([psycopg.OperationalError("down")] * 5)

    async def fail() -> None:
        for error in failures:
            raise error

    faults.on["event_deliveries.record:before_commit"] = fail
    async with serving(says(OK)) as server, dispatching(db) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        with structlog.testing.capture_logs() as lines:
            await running.run_once()
        assert await running.drain() == 0
        clock.advance(seconds=46)
        assert await running.drain() == 1

    assert [line["error_class"] for line in lines if line["event"] == "task.failed"] == [Overloaded.__name__]
    assert [attempt["number"] for attempt in await subscribers.attempts(delivery_id)] == [1]
    assert len({message.id for message in received(server)}) == 1


async def leased(subscribers: Subscribers, count: int, **given: Any) -> list[dict[str, Any]]:
    """Event deliveries under a lease, fence 1."""
    endpoint_id = await subscribers.endpoint("http://localhost:1/")
    made = await subscribers.deliver(endpoint_id, count, lease_expires_at=ahead(seconds=45), fence=1, **given)
    return [await subscribers.delivery(delivery_id) for delivery_id in made]


async def test_one_attempt_that_cannot_be_stored_keeps_no_other_from_it(db: Database, subscribers: Subscribers) -> None:
    """Three attempts end together, one with a text that PostgreSQL refuses: that one fails alone."""
    recorder = Recorder(db)
    good, bad, last = await leased(subscribers, 3)
    poisoned = after(bad, Outcome("refused", 500, excerpt="\0"), REFUSED[1])
    written = await asyncio.gather(
        *(recorder.record(attempt) for attempt in (after(good, *DELIVERED), poisoned, after(last, *DELIVERED))), return_exceptions=True
    )

    assert [isinstance(result, psycopg.DataError) for result in written] == [False, True, False]
    assert [type(result) for result in written if not isinstance(result, psycopg.DataError)] == [Recorded, Recorded]
    assert (await subscribers.delivery(bad["id"]))["attempt_count"] == 0
    assert [(await subscribers.delivery(row["id"]))["status"] for row in (good, last)] == ["delivered", "delivered"]


async def test_waits_of_every_length_are_written_together(db: Database, subscribers: Subscribers) -> None:
    """Hints within the limits and beyond them, and none: they are one set, which need not be taken apart."""
    recorder = Recorder(db)
    hints = (None, 5.0, 3600.0, 1e9)
    refused = [Outcome("refused", 503, retry_after_seconds=hint) for hint in hints]
    made = [
        after(row, outcome, decide(0, outcome, schedule=(0.0, 5.0), chance=0.5))
        for row, outcome in zip(await leased(subscribers, len(hints)), refused, strict=True)
    ]
    written = await asyncio.gather(*(recorder.record(attempt) for attempt in made))

    assert [type(result) for result in written] == [Recorded] * len(hints)
    assert logs.counters["transactions.event_deliveries.record"] == 1


async def test_whoever_lost_the_lease_writes_nothing(db: Database, subscribers: Subscribers) -> None:
    """Neither the attempt nor the state nor the endpoint's health, while its neighbours in the same transaction are written."""
    recorder = Recorder(db)
    ours, lost = await leased(subscribers, 2)
    await subscribers.run("UPDATE event_deliveries SET fence = 2 WHERE id = %(id)s", id=lost["id"])
    written = await asyncio.gather(recorder.record(after(ours, *DELIVERED)), recorder.record(after(lost, *REFUSED)), return_exceptions=True)

    assert isinstance(written[1], LeaseLost)
    assert await subscribers.attempts(lost["id"]) == []
    assert await subscribers.rows("endpoint_states", order="endpoint_id") == []
    row = await subscribers.delivery(lost["id"])
    assert (row["status"], row["attempt_count"], row["fence"]) == ("pending", 0, 2)
    assert len(await subscribers.attempts(ours["id"])) == 1


async def test_an_endpoint_that_says_gone_many_times_at_once_is_disabled_once(db: Database, subscribers: Subscribers) -> None:
    """One event tells of it, even if the last of those attempts had lost its lease."""
    watching = await subscribers.endpoint("http://localhost:2/", events=["endpoint.disabled"])
    rows = await leased(subscribers, 3)
    await subscribers.run("UPDATE event_deliveries SET fence = 2 WHERE id = %(id)s", id=rows[-1]["id"])
    gone = Outcome("refused", 410), After(EventDeliveryStatus.PENDING, 0.0, endpoint_gone=True)
    written = await attempts.record(db, [after(row, *gone) for row in rows])

    (endpoint,) = await subscribers.rows("endpoints", "id = %(id)s", id=rows[0]["endpoint_id"])
    assert len(written) == 2
    assert (endpoint["status"], endpoint["disabled_reason"]) == ("disabled", "gone")
    assert await subscribers.statuses(watching) == {"pending": 1}
    assert len(await subscribers.rows("events", "type = 'endpoint.disabled'")) == 1


async def test_delivered_never_reverts(db: Database, subscribers: Subscribers) -> None:
    """A failure after a success is an attempt more, and nothing else."""
    (row,) = await leased(subscribers, 1, status="delivered", delivered_at=ago(hours=1), attempt_count=1)
    await attempts.record(db, [after(row, *REFUSED)])

    later = await subscribers.delivery(row["id"])
    assert (later["status"], later["next_attempt_at"], later["attempt_count"]) == ("delivered", None, 2)
    assert later["delivered_at"] == row["delivered_at"]
    assert [attempt["number"] for attempt in await subscribers.attempts(row["id"])] == [2]


@pytest.mark.parametrize("then", [OK, b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"])
async def test_an_endpoint_deleted_while_an_attempt_runs_gets_no_more(db: Database, subscribers: Subscribers, then: bytes) -> None:
    """Its event deliveries are cancelled and stay so; the attempt that was made is written all the same, once."""
    hanging = Hanging(then)
    async with serving(hanging) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        sent, waiting = await subscribers.deliver(endpoint_id, 2)
        await running.dispatcher.run_once()
        await hanging.has(2)
        await subscribers.run("UPDATE event_deliveries SET lease_expires_at = NULL WHERE id = %(id)s", id=waiting)
        await endpoints.delete(db, TENANT, endpoint_id, actor="key_1")
        hanging.let_go()
        await running.drain()

    assert await subscribers.statuses(endpoint_id) == {"cancelled": 2}
    row, (made,) = await subscribers.delivery(sent), await subscribers.attempts(sent)
    assert (row["attempt_count"], row["next_attempt_at"], row["delivered_at"], row["lease_expires_at"]) == (1, None, None, None)
    assert (made["number"], made["status_code"]) == (1, 200 if then == OK else 500)
    assert await subscribers.attempts(waiting) == []
    assert logs.counters["event_deliveries.lease_lost"] == 1


async def test_enabling_and_recording_take_their_locks_in_one_order(db: Database, faults: Faults, subscribers: Subscribers) -> None:
    """A late attempt, of a lease that has ended, waits for the enabling that holds its event delivery; neither is broken off."""
    endpoint_id = await subscribers.endpoint("http://localhost:1/", status="disabled", disabled_reason="gone", disabled_at=ago(hours=1))
    await subscribers.make.endpoint_state(endpoint_id=endpoint_id, consecutive_failures=3, failing_since=ago(hours=2))
    (delivery_id,) = await subscribers.deliver(endpoint_id, next_attempt_at=ahead(hours=1), lease_expires_at=ago(seconds=1), fence=1)
    delivery = await subscribers.delivery(delivery_id)
    holds, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        holds.set()
        await go_on.wait()

    faults.on["endpoints.enable:statement_2"] = hold
    enabling = asyncio.create_task(endpoints.enable(db, TENANT, endpoint_id, actor="test"))
    await holds.wait()
    recording = asyncio.create_task(attempts.record(db, [after(delivery, *REFUSED)]))
    async with asyncio.timeout(10):
        while not await subscribers.rows("pg_stat_activity", "datname = current_database() AND wait_event_type = 'Lock'", "pid"):
            assert not recording.done()
    go_on.set()
    recorded = await recording
    await enabling

    assert [row.number for row in recorded.values()] == [1]
    assert logs.counters["transactions.rerun"] == 0
    assert (await subscribers.rows("endpoints"))[0]["status"] == "enabled"
