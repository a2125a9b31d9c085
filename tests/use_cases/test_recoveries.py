"""Recovery: what an endpoint did not get of a span of time it gets after all, in order, once, and no faster than it can take it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import endpoints, ids, recoveries
from ipn_gateway.errors import NotFound, StateConflict, ValidationFailed
from ipn_gateway.recoveries import Recovered, Span
from tests.dispatching import Subscribers, dispatching, received, refuses
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago, ahead

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults
    from tests.make import Make

    Row = dict[str, Any]


@pytest.fixture
async def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


def span(db: Database, endpoint_id: UUID, *, hours: float = 24, until: float | None = None) -> Span:
    now = db.clock.now()
    return Span(TENANT, endpoint_id, now - timedelta(hours=hours), None if until is None else now - timedelta(hours=until))


async def recover(db: Database, endpoint_id: UUID, **given: Any) -> Recovered:
    named = {name: given.pop(name) for name in ("hours", "until") if name in given}
    return await recoveries.recover(db, span(db, endpoint_id, **named), actor="test", reason="is back", **given)


async def event(make: Make, hours: float, *, to: UUID | None = None, **given: Any) -> Row:
    """An event of some hours ago, and its event delivery in a state, if one is given."""
    status = given.pop("status", None)
    row = await make.event(created_at=ago(hours=hours), **given)
    if to is not None and status is not None:
        of = {"event_id": row["id"], "order_id": row["order_id"], "event_type": row["type"], "endpoint_id": to}
        row["delivery"] = await make.event_delivery(**of, status=status, attempt_count=10 if status == "dead" else 0)
    return row


async def due(subscribers: Subscribers, endpoint_id: UUID) -> list[Row]:
    """What is pending there, in the order in which it becomes due."""
    return await subscribers.rows("event_deliveries", "endpoint_id = %(id)s AND status = 'pending'", "next_attempt_at, id", id=endpoint_id)


async def test_dead_ones_are_pending_again_and_missing_ones_are_made(db: Database, make: Make, subscribers: Subscribers) -> None:
    """In the order of the events, as recoveries, and their attempts go on being counted; what is delivered or pending is left alone."""
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook")
    missing = await event(make, 3)
    dead = await event(make, 2, to=endpoint_id, status="dead")
    delivered = await event(make, 1, to=endpoint_id, status="delivered")
    pending = await event(make, 1, to=endpoint_id, status="pending")

    found = await recover(db, endpoint_id)

    rows = [row for row in await due(subscribers, endpoint_id) if row["event_id"] != pending["id"]]
    assert (found.matched, found.recovered, found.dead, found.missing, found.skipped) == (4, 2, 1, 1, 2)
    assert [row["event_id"] for row in rows] == [missing["id"], dead["id"]]
    assert {row["next_trigger"] for row in rows} == {"recovery"}
    assert [row["attempt_count"] for row in rows] == [0, 10]
    assert [(row["order_id"], row["sequence"], row["event_type"]) for row in rows[:1]] == [(missing["order_id"], 1, "order.paid")]
    assert (await subscribers.delivery(delivered["delivery"]["id"]))["status"] == "delivered"
    assert (await subscribers.delivery(pending["delivery"]["id"]))["next_trigger"] == "initial"


async def test_only_what_fits_is_recovered(db: Database, make: Make, subscribers: Subscribers) -> None:
    """By time, from `since` on and before `until`; by filter, wildcards too; of this tenant; and nothing about endpoints."""
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook", events=["order.*", "endpoint.*", "invoice.*"])
    fits = [await event(make, 5), await event(make, 4, type="invoice.sent")]
    await event(make, 25)
    await event(make, 2)
    await event(make, 4, type="notification.held")
    await event(make, 4, type="endpoint.disabled")
    await event(make, 4, type="invoices.sent")
    await event(make, 4, tenant_id="rival")

    found = await recover(db, endpoint_id, hours=24, until=3)

    assert [row["event_id"] for row in await due(subscribers, endpoint_id)] == [row["id"] for row in fits]
    assert (found.matched, found.recovered) == (2, 2)


@pytest.mark.parametrize(("rate", "seconds"), [(None, 0.02), (4, 0.25), (0.5, 2)])
async def test_they_become_due_at_the_endpoint_s_rate(
    db: Database, make: Make, subscribers: Subscribers, rate: float | None, seconds: float
) -> None:
    """Or fifty each second: what comes in meanwhile is not held up by what is old."""
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook", rate_per_second=rate)
    for hours in (9, 8, 7):
        await event(make, hours, to=endpoint_id, status="dead")
        await event(make, hours - 0.5)

    await recover(db, endpoint_id)

    times = [row["next_attempt_at"] for row in await due(subscribers, endpoint_id)]
    assert len(times) == 6
    assert [(time - times[0]).total_seconds() for time in times] == pytest.approx([seconds * place for place in range(6)])


async def test_a_dry_run_counts_and_changes_nothing(db: Database, make: Make, subscribers: Subscribers) -> None:
    """The same numbers, no row, no entry; it may be asked of a disabled endpoint too."""
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook", status="disabled")
    await event(make, 3)
    dead = await event(make, 2, to=endpoint_id, status="dead")

    found = await recover(db, endpoint_id, dry_run=True)

    assert (found.matched, found.dead, found.missing) == (2, 1, 1)
    assert await due(subscribers, endpoint_id) == []
    assert (await subscribers.delivery(dead["delivery"]["id"]))["status"] == "dead"
    assert await subscribers.rows("audit_log") == []


async def test_asked_again_it_changes_nothing(db: Database, make: Make, subscribers: Subscribers) -> None:
    """What was recovered is pending, or delivered by then; many at once recover each once."""
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook")
    for hours in range(1, 7):
        await event(make, hours, to=endpoint_id, status="dead" if hours % 2 else None)

    found = await asyncio.gather(*(recover(db, endpoint_id) for _ in range(4)))
    before = await due(subscribers, endpoint_id)
    again = await recover(db, endpoint_id)

    assert sum(one.recovered for one in found) == 6
    assert len(before) == 6
    assert (again.matched, again.recovered, again.skipped) == (6, 0, 6)
    assert [row["next_attempt_at"] for row in await due(subscribers, endpoint_id)] == [row["next_attempt_at"] for row in before]


async def test_one_call_is_bounded_and_goes_on_with_its_cursor(
    db: Database, make: Make, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch commits with its own entry in the audit log; the rate holds over all calls of the act."""
    monkeypatch.setattr(recoveries, "BATCH", 2)
    monkeypatch.setattr(recoveries, "LOOKED_AT_MAX", 4)
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook", rate_per_second=1)
    rows = [await event(make, 9 - number) for number in range(6)]
    rows.append(await event(make, 2))

    first = await recover(db, endpoint_id)
    second = await recover(db, endpoint_id, cursor=first.next_cursor)

    made = await due(subscribers, endpoint_id)
    acts = await subscribers.rows("audit_log")
    assert (first.looked_at, first.recovered, second.recovered, second.next_cursor) == (4, 4, 3, None)
    assert (first + second).recovered == 7
    assert [row["event_id"] for row in made] == [row["id"] for row in rows]
    waits = [(row["next_attempt_at"] - made[0]["next_attempt_at"]).total_seconds() for row in made]
    assert waits == pytest.approx(range(7), abs=0.9)
    assert [(act["action"], act["reason"], act["details"]["missing"]) for act in acts] == [
        ("endpoint.recover", "is back", missing) for missing in (2, 2, 2, 1)
    ]
    assert {act["target"] for act in acts} == {ids.show(ids.ENDPOINT, endpoint_id)}
    assert await recoveries.how_many(db, span(db, endpoint_id)) == 7


async def test_what_did_not_fit_is_looked_at_too(
    db: Database, make: Make, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is bounded by what it looks at, so that a narrow filter does not make it long; the cursor goes on behind it."""
    monkeypatch.setattr(recoveries, "BATCH", 2)
    monkeypatch.setattr(recoveries, "LOOKED_AT_MAX", 2)
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook", events=["order.*"])
    for hours in (9, 8):
        await event(make, hours, type="notification.held")
    wanted = await event(make, 7)

    first = await recover(db, endpoint_id)
    second = await recover(db, endpoint_id, cursor=first.next_cursor)

    assert (first.matched, first.next_cursor is None) == (0, False)
    assert [row["event_id"] for row in await due(subscribers, endpoint_id)] == [wanted["id"]]
    assert second.matched == 1


async def test_a_process_that_dies_leaves_whole_batches(
    db: Database, make: Make, subscribers: Subscribers, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again it finds what is left."""
    monkeypatch.setattr(recoveries, "BATCH", 2)
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook")
    for hours in (9, 8, 7):
        await event(make, hours)

    async def die() -> None:
        raise asyncio.CancelledError

    faults.on["endpoints.recover:after_commit"] = die
    with pytest.raises(asyncio.CancelledError):
        await recover(db, endpoint_id)
    faults.on.clear()
    half = await due(subscribers, endpoint_id)
    found = await recover(db, endpoint_id)

    assert (len(half), found.recovered, found.skipped) == (2, 1, 2)
    assert len(await due(subscribers, endpoint_id)) == 3


@pytest.mark.parametrize(
    "cursor", ["", "x", "1.evt_1.0", *(f"{at}.evt_{'a' * 32}.{n}" for at, n in (("9" * 18, 0), (-1, 0), (1, "\u0663")))]
)
async def test_a_text_that_is_no_cursor_is_refused(db: Database, subscribers: Subscribers, cursor: str) -> None:
    """With a sentence."""
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook")

    with pytest.raises(ValidationFailed, match="cursor"):
        await recover(db, endpoint_id, cursor=cursor)


async def test_nothing_is_recovered_where_nothing_is_sent(db: Database, make: Make, subscribers: Subscribers) -> None:
    """To a disabled endpoint, which is to be enabled first; to a deleted one; to somebody else's."""
    disabled = await subscribers.endpoint("https://subscriber.example/hook", status="disabled")
    gone = await subscribers.endpoint("https://subscriber.example/hook", deleted_at=ago(hours=1))
    theirs = await subscribers.endpoint("https://subscriber.example/hook", tenant_id="rival")
    await event(make, 1)

    with pytest.raises(StateConflict):
        await recover(db, disabled)
    for endpoint_id in (gone, theirs, ids.new(db.clock.now())):
        with pytest.raises(NotFound):
            await recover(db, endpoint_id)
    assert await subscribers.rows("event_deliveries") == []


async def test_what_is_recovered_is_delivered(db: Database, make: Make, subscribers: Subscribers, clock: Clock) -> None:
    """Oldest first, with the same id and bytes as ever, and the attempt says why it was made."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, max_in_flight=1)
        rows = [await event(make, 3), await event(make, 2, to=endpoint_id, status="dead"), await event(make, 1)]
        await recover(db, endpoint_id)
        clock.advance(seconds=10)
        await running.drain()

    attempts = await subscribers.rows("delivery_attempts")
    assert [message.id for message in received(server)] == [row["id"] for row in rows]
    assert [message.body for message in received(server)] == [bytes(row["body"]) for row in rows]
    assert {attempt["trigger"] for attempt in attempts} == {"recovery"}
    assert sorted(attempt["number"] for attempt in attempts) == [1, 1, 11]
    assert await subscribers.statuses(endpoint_id) == {"delivered": 3}


async def test_what_was_dead_has_one_attempt_more(db: Database, make: Make, subscribers: Subscribers, clock: Clock) -> None:
    """Its schedule is over, so another failure makes it dead again; one that had none begins its schedule."""
    async with serving(refuses(500)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        await event(make, 2, to=endpoint_id, status="dead")
        await event(make, 1)
        await recover(db, endpoint_id)
        clock.advance(seconds=2)
        await running.run_once()

    assert await subscribers.statuses(endpoint_id) == {"dead": 1, "pending": 1}


async def test_a_recovery_and_a_deletion_at_once_leave_nothing_pending(db: Database, make: Make, subscribers: Subscribers) -> None:
    """Whichever is first: what was recovered before is cancelled, and afterwards nothing is."""
    for _ in range(5):
        endpoint_id = await subscribers.endpoint("https://subscriber.example/hook")
        await event(make, 1, to=endpoint_id, status="dead")
        await event(make, 1)
        await asyncio.gather(recover(db, endpoint_id), endpoints.delete(db, TENANT, endpoint_id, actor="test"), return_exceptions=True)

        assert await due(subscribers, endpoint_id) == []


async def test_what_is_due_is_in_order_after_enabling_too(db: Database, make: Make, subscribers: Subscribers) -> None:
    """An endpoint that is disabled while it recovers goes on in the order of the events when it is enabled."""
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook")
    rows = [await event(make, 9 - number) for number in range(5)]
    await recover(db, endpoint_id)
    await subscribers.run("UPDATE event_deliveries SET next_attempt_at = next_attempt_at + interval '1 hour'")
    async with db.transaction("test.disable") as tx:
        await endpoints.disable(tx, TENANT, endpoint_id, "gone")
    await endpoints.enable(db, TENANT, endpoint_id, actor="test")

    assert [row["event_id"] for row in await due(subscribers, endpoint_id)] == [row["id"] for row in rows]


async def test_what_lies_ahead_is_no_event_yet(db: Database, make: Make, subscribers: Subscribers) -> None:
    """A span that begins in the future is empty."""
    endpoint_id = await subscribers.endpoint("https://subscriber.example/hook")
    await make.event(created_at=ahead(hours=-1))

    assert await recover(db, endpoint_id, hours=-1) == Recovered()
