"""A person asks for an event again: same id and bytes, one attempt more, whatever became of the event delivery."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import attempts, endpoints, ids, redeliveries
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.event_claims import claim
from ipn_gateway.transport import Outcome
from tests.make import TENANT, Make, ago, ahead

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.event_claims import Claimed

SCHEDULE = (0, 5, 300)


async def redeliver(db: Database, delivery_id: UUID, tenant: str = TENANT) -> None:
    await redeliveries.redeliver(db, tenant, delivery_id, actor="test", reason="lost by them")


async def claimed(db: Database) -> list[Claimed]:
    async with db.transaction("test.claim") as tx:
        return await claim(tx, limit=10, lease_seconds=45)


async def attempt(db: Database, delivery: Claimed, kind: Any, *, retry_after: float | None = None) -> None:
    """Record what came of one attempt."""
    outcome = Outcome(kind, 200 if kind == "delivered" else 500, duration_ms=1, retry_after_seconds=retry_after)
    made = attempts.Attempt(
        id=ids.new(db.clock.now()),
        tenant_id=delivery.tenant_id,
        event_delivery_id=delivery.id,
        endpoint_id=delivery.endpoint_id,
        fence=delivery.fence,
        trigger=delivery.trigger,
        started_at=delivery.claimed_at,
        url=delivery.url,
        outcome=outcome,
        after=attempts.decide(
            delivery.tries, outcome, schedule=SCHEDULE, chance=0, resumes=delivery.resumes if delivery.trigger == "redelivery" else None
        ),
    )
    await attempts.record(db, [made])


async def row(db: Database, delivery_id: UUID) -> dict[str, Any]:
    async with db.autocommit("test") as tx:
        found = await tx.one(dict, "SELECT * FROM event_deliveries WHERE id = %(id)s", {"id": delivery_id})
    assert found is not None
    return found


async def audited(db: Database) -> list[dict[str, Any]]:
    async with db.autocommit("test") as tx:
        return await tx.all(dict, "SELECT actor, target, reason, details FROM audit_log ORDER BY id")


@pytest.mark.parametrize("kind", ["delivered", "refused"])
async def test_what_is_delivered_is_sent_again_and_stays_delivered(db: Database, make: Make, kind: str) -> None:
    """Also when the new attempt fails; a failure of it is not tried again."""
    made = await make.event_delivery(status="delivered", attempt_count=1, delivered_at=ago(hours=1))

    await redeliver(db, made["id"])
    (delivery,) = await claimed(db)
    assert (delivery.trigger, delivery.event_id) == ("redelivery", made["event_id"])
    await attempt(db, delivery, kind)

    after = await row(db, made["id"])
    assert (after["status"], after["attempt_count"], after["next_attempt_at"]) == ("delivered", 2, None)
    assert after["delivered_at"] == made["delivered_at"]
    assert await claimed(db) == []


@pytest.mark.parametrize(("kind", "status"), [("delivered", "delivered"), ("refused", "dead")])
async def test_what_is_dead_has_one_more_attempt(db: Database, make: Make, kind: str, status: str) -> None:
    """Pending until then; its schedule is over, so another failure makes it dead again."""
    made = await make.event_delivery(status="dead", attempt_count=3)

    await redeliver(db, made["id"])
    assert (await row(db, made["id"]))["status"] == "pending"
    (delivery,) = await claimed(db)
    await attempt(db, delivery, kind)

    assert ((await row(db, made["id"]))["status"], delivery.trigger) == (status, "redelivery")
    assert await audited(db) == [
        {
            "actor": "test",
            "target": ids.show(ids.EVENT_DELIVERY, made["id"]),
            "reason": "lost by them",
            "details": {"event_id": made["event_id"], "status": "dead"},
        }
    ]


async def test_what_waits_for_its_next_attempt_is_due_now_and_then_goes_on(db: Database, make: Make) -> None:
    """The attempt has its number; after a failure the retry that was to come comes at its time."""
    made = await make.event_delivery(attempt_count=1, next_trigger="retry", next_attempt_at=ahead(hours=1))

    await redeliver(db, made["id"])
    (delivery,) = await claimed(db)
    await attempt(db, delivery, "refused")

    after = await row(db, made["id"])
    assert (delivery.trigger, after["status"], after["next_trigger"], after["attempt_count"]) == ("redelivery", "pending", "retry", 2)
    assert after["next_attempt_at"] == made["next_attempt_at"]


async def test_no_number_of_redeliveries_moves_the_schedule(db: Database, make: Make, clock: Clock) -> None:
    """Nine that fail leave all ten automatic attempts, each at its time; the attempts are numbered without gaps."""
    made = await make.event_delivery()
    for _ in range(9):
        await redeliver(db, made["id"])
        (delivery,) = await claimed(db)
        await attempt(db, delivery, "refused")
    clock.advance(seconds=61)  # past the rest of its endpoint
    (first,) = await claimed(db)
    await attempt(db, first, "refused")
    first_wait = await row(db, made["id"])
    await redeliver(db, made["id"])
    (second,) = await claimed(db)
    clock.advance(seconds=6)
    await attempt(db, second, "refused")
    clock.advance(seconds=301)
    triggers = []
    while delivered := await claimed(db):
        triggers.append(delivered[0].trigger)
        await attempt(db, delivered[0], "refused")
        clock.advance(seconds=301)

    after = await row(db, made["id"])
    assert (first.trigger, second.trigger, triggers) == ("initial", "redelivery", ["retry", "retry"])
    assert (first_wait["status"], first_wait["attempt_count"]) == ("pending", 10)
    assert (after["status"], after["attempt_count"], after["redelivery_count"]) == ("dead", 13, 10)
    async with db.autocommit("test") as tx:
        numbers = [found["number"] for found in await tx.all(dict, "SELECT number FROM delivery_attempts ORDER BY number")]
    assert numbers == list(range(1, 14))


async def test_a_later_time_that_the_receiver_asks_for_counts_after_a_redelivery_too(db: Database, make: Make) -> None:
    """`Retry-After` is obeyed on any refusal: the attempt that was to come comes no earlier."""
    made = await make.event_delivery(attempt_count=1, next_trigger="retry", next_attempt_at=ahead(seconds=10))
    await redeliver(db, made["id"])
    (delivery,) = await claimed(db)

    await attempt(db, delivery, "refused", retry_after=100)

    assert (await row(db, made["id"]))["next_attempt_at"] > made["next_attempt_at"] + timedelta(seconds=80)


async def test_a_redelivery_that_succeeds_ends_the_schedule(db: Database, make: Make) -> None:
    """Nothing is due any more."""
    made = await make.event_delivery(attempt_count=1, next_trigger="retry", next_attempt_at=ahead(hours=1))
    await redeliver(db, made["id"])
    (delivery,) = await claimed(db)

    await attempt(db, delivery, "delivered")

    after = await row(db, made["id"])
    assert (after["status"], after["next_attempt_at"], after["scheduled_at"]) == ("delivered", None, None)


@pytest.mark.parametrize("kind", ["delivered", "refused"])
@pytest.mark.parametrize("tries", [0, 2])
async def test_asked_for_while_an_attempt_runs_another_one_follows(db: Database, make: Make, kind: str, tries: int) -> None:
    """At once, whatever the running one comes to, also where that was the last on the schedule; that it fails moves nothing."""
    made = await make.event_delivery(attempt_count=tries, next_attempt_at=ago(minutes=1))
    (running,) = await claimed(db)
    await redeliver(db, made["id"])
    await redeliver(db, made["id"])
    assert await claimed(db) == []
    await attempt(db, running, kind)
    between = await row(db, made["id"])
    (asked,) = await claimed(db)
    await attempt(db, asked, "refused")

    after = await row(db, made["id"])
    assert (running.trigger, asked.trigger, asked.attempt_count) == ("initial", "redelivery", tries + 1)
    assert between["status"] == ("delivered" if kind == "delivered" else "pending")
    assert after["status"] == ("delivered" if kind == "delivered" else "dead" if tries else "pending")
    assert after["next_attempt_at"] == between["scheduled_at"]
    assert (after["next_attempt_at"] is not None) == (after["status"] == "pending")
    assert await claimed(db) == []


async def test_asked_for_during_an_attempt_it_passes_backlog_and_breaker(db: Database, make: Make) -> None:
    """It is claimed next, although its endpoint rests."""
    made = await make.event_delivery(next_attempt_at=ago(hours=1))
    (running,) = await claimed(db)
    await redeliver(db, made["id"])
    for _ in range(3):
        await make.event_delivery(endpoint_id=made["endpoint_id"], next_attempt_at=ago(minutes=30))
    await make.endpoint_state(endpoint_id=made["endpoint_id"], consecutive_failures=9, open_until=ahead(seconds=50))

    await attempt(db, running, "refused")

    assert [(one.id, one.trigger) for one in await claimed(db)] == [(made["id"], "redelivery")]


async def test_asked_twice_before_an_attempt_it_is_one_attempt(db: Database, make: Make) -> None:
    """Asked during it, or after it, it is another one. Who asked and why is kept each time."""
    made = await make.event_delivery(status="delivered", attempt_count=1)
    await redeliver(db, made["id"])
    await redeliver(db, made["id"])
    (delivery,) = await claimed(db)
    await redeliver(db, made["id"])
    await attempt(db, delivery, "delivered")
    (another,) = await claimed(db)
    await attempt(db, another, "delivered")
    assert await claimed(db) == []
    asked = await audited(db)
    assert [act["details"].get("answered_by") for act in asked] == [None, "the redelivery that was asked for before", None]
    assert {(act["actor"], act["reason"]) for act in asked} == {("test", "lost by them")}

    await redeliver(db, made["id"])

    assert [one.attempt_count for one in await claimed(db)] == [3]
    assert len(await audited(db)) == 4


async def test_an_attempt_whose_sender_died_does_not_stand_in_the_way(db: Database, make: Make, clock: Clock) -> None:
    """Its lease is over: the redelivery is due, and the late sender writes nothing."""
    made = await make.event_delivery(attempt_count=0)
    (lost,) = await claimed(db)
    clock.advance(seconds=60)

    await redeliver(db, made["id"])
    await attempt(db, lost, "delivered")

    assert (await row(db, made["id"]))["attempt_count"] == 0
    assert [one.trigger for one in await claimed(db)] == ["redelivery"]


async def test_nothing_is_sent_where_nothing_may_be_sent(db: Database, make: Make) -> None:
    """Cancelled, to a disabled endpoint, to a deleted one, another tenant's, or not there."""
    cancelled = await make.event_delivery(status="cancelled")
    off = await make.endpoint(status="disabled")
    waiting = await make.event_delivery(endpoint_id=off["id"], status="dead")
    gone = await make.endpoint(deleted_at=ago(hours=1))
    orphan = await make.event_delivery(endpoint_id=gone["id"], status="delivered")

    for made in (cancelled, waiting, orphan):
        with pytest.raises(StateConflict):
            await redeliver(db, made["id"])
        assert await row(db, made["id"]) == made
    with pytest.raises(NotFound):
        await redeliver(db, waiting["id"], "other")
    with pytest.raises(NotFound):
        await redeliver(db, ids.new(db.clock.now()))
    assert await audited(db) == []


async def test_deleting_an_endpoint_leaves_what_was_delivered_delivered(db: Database, make: Make) -> None:
    """A redelivery that was asked for ends with the endpoint; what it had is not taken back."""
    made = await make.event_delivery(status="delivered", attempt_count=1, delivered_at=ago(hours=1))
    pending = await make.event_delivery(endpoint_id=made["endpoint_id"])
    await redeliver(db, made["id"])

    assert await endpoints.delete(db, TENANT, made["endpoint_id"], actor="test") == 1

    assert [(await row(db, one["id"]))["status"] for one in (made, pending)] == ["delivered", "cancelled"]
    assert (await row(db, made["id"]))["next_attempt_at"] is None
