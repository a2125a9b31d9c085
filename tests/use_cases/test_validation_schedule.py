"""No verdict: asked again on the published schedule, for 72 hours, without help from the sender; then visible to a person."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import claims, inbox
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from ipn_gateway.notifications import Receipt
    from tests.world import World

UNCLEAR: list[tuple[str, dict[str, Any]]] = [
    ("html", {}),
    ("empty", {}),
    ("status500", {}),
    ("reset", {}),
    ("record_then_reset", {}),
    ("apiconnect", {"value": "FAILED"}),
    ("apiconnect", {"value": "INVALID_REQUEST"}),
    ("apiconnect", {"value": "INACTIVE"}),
    ("apiconnect", {"value": "REQUEST_FROM_INVALID_SOURCE 192.0.2.1"}),
    ("processing", {}),
    ("pending", {}),
    ("fields", {"fields": {"status": ""}}),
    ("fields", {"fields": {"status": None}}),
]


async def waiting(world: World, order_id: str = "ORD-1") -> Receipt:
    """A genuine payment whose questions go wrong until the faults are cleared."""
    await world.order(order_id)
    receipt = await world.notify(world.pay(order_id))
    await world.drain()
    return receipt


@pytest.mark.case("B41", "B43", "B46", "B52")
async def test_an_answer_that_is_not_clear_is_no_verdict(world: World) -> None:
    """Never invalid and never failed: the order stays as it is, and the next clear answer pays it."""
    for number, (kind, given) in enumerate(UNCLEAR):
        world.fault("validator", kind, **given)
        receipt = await waiting(world, f"ORD-{number}")

        assert await world.outcome(receipt) == ("received", None), kind
        assert await world.status(f"ORD-{number}") == "pending"
        assert await world.value("SELECT unknown_streak FROM source_states") == 1

        world.rt.clock.advance(seconds=5)
        await world.drain()

        assert await world.outcome(receipt) == ("applied", None), kind
        assert await world.status(f"ORD-{number}") == "paid"
        assert await world.value("SELECT unknown_streak FROM source_states") == 0


@pytest.mark.case("B43")
async def test_a_question_that_takes_too_long_is_ended_and_asked_again(world: World) -> None:
    """One total limit; the delivery is in our retry although the sender got its 2xx."""
    settings = world.worker.settings.model_copy(update={"provider_timeout_seconds": 0.2})
    world.worker = replace(world.worker, settings=settings)
    world.fault("validator", "hang")
    receipt = await waiting(world)
    assert await world.outcome(receipt) == ("received", None)

    world.rt.clock.advance(seconds=5)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)


@pytest.mark.case("S141")
async def test_the_questions_follow_the_published_schedule(world: World) -> None:
    """At once, then after 5 s, 30 s, 2 min, 10 min and each half hour for 72 hours; then it is dead, and nobody asks any more."""
    world.fault("validator", "status500", times=None)
    waits = world.rt.settings.validation_schedule
    receipt = await waiting(world)
    started = world.rt.clock.offset
    asked = [0.0]
    for wait in waits[1:]:
        world.rt.clock.advance(seconds=wait - 1)
        assert await world.drain() == 0
        world.rt.clock.advance(seconds=1)
        assert await world.drain() == 1
        asked.append((world.rt.clock.offset - started).total_seconds())

    assert waits[:5] == (0, 5, 30, 120, 600)
    assert waits[5:] == (1800,) * 144
    assert asked == list(accumulate(waits))
    assert world.questions == len(waits)
    assert await world.outcome(receipt) == ("dead", "no_verdict")
    assert await world.value("SELECT attempts FROM notification_deliveries") == len(waits)
    assert await world.rows("SELECT state, due_at FROM inbox") == [{"state": "dead", "due_at": None}]
    assert await world.status("ORD-1") == "pending"

    world.simulator.api.faults.clear()
    world.rt.clock.advance(hours=1)
    assert await world.drain() == 0


@pytest.mark.case("S141")
async def test_a_provider_that_is_away_for_ten_minutes_costs_nothing(world: World) -> None:
    """Sent once, never again: applied exactly once after the recovery."""
    world.fault("validator", "reset", times=None)
    receipt = await waiting(world)
    for _ in range(10):
        world.rt.clock.advance(minutes=1)
        await world.drain()
    assert await world.outcome(receipt) == ("received", None)

    world.simulator.api.faults.clear()
    world.rt.clock.advance(minutes=10)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert (await world.counts())["processed_notifications"] == 1
    assert await world.event_types() == ["order.paid"]


async def test_after_five_unknown_answers_one_delivery_at_a_time_probes(world: World) -> None:
    """A provider that is down is not hammered: one question a second, whatever waits; others' sources are asked as ever."""
    world.fault("validator", "status500", times=None)
    for number in range(5):
        await world.order(f"ORD-{number}")
        await world.notify(world.pay(f"ORD-{number}"))
    await world.drain()
    for number in range(5, 20):
        await world.order(f"ORD-{number}")
        await world.notify(world.pay(f"ORD-{number}"))

    asked = []
    for _ in range(5):
        before = world.questions
        await world.drain()
        asked.append(world.questions - before)
        world.rt.clock.advance(seconds=1)

    assert asked == [0, 1, 1, 1, 1]
    assert await world.value("SELECT unknown_streak FROM source_states") == 9


@pytest.mark.parametrize("answer", ["paid", "refuted"])
async def test_the_first_clear_answer_makes_all_that_wait_due(world: World, answer: str) -> None:
    """Recovery is noticed by one probe, whatever it says, and then nobody waits for the rest of the schedule."""
    world.fault("validator", "status500", times=8)
    for number in range(8):
        await world.order(f"ORD-{number}")
        await world.notify(world.pay(f"ORD-{number}"))
    await world.drain()
    world.rt.clock.advance(seconds=1)
    assert await world.outcomes() == ["received"] * 8

    if answer == "refuted":
        world.fault("validator", "invalid_transaction")
    probe = await waiting(world, "ORD-8")

    assert await world.outcome(probe) == ("applied" if answer == "paid" else "received", None)
    assert (await world.outcomes())[:8] == ["applied"] * 8
    assert await world.value("SELECT unknown_streak FROM source_states") == 0


@pytest.mark.case("S141")
@pytest.mark.parametrize("point", ["transport.ask:before", "transport.ask:after", "effects.apply_together:before_commit"])
async def test_a_delivery_whose_worker_died_is_taken_over_after_its_lease(world: World, point: str) -> None:
    """Between the 2xx and the effect nothing can lose it; before the lease ends nobody else touches it."""

    async def die() -> None:
        raise asyncio.CancelledError

    world.rt.faults.on[point] = die
    receipt = await waiting(world)
    world.rt.faults.on.clear()
    world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds - 1)
    assert await world.drain() == 0
    assert await world.outcome(receipt) == ("received", None)

    world.rt.clock.advance(seconds=1)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert (await world.counts())["processed_notifications"] == 1


@pytest.mark.case("S141")
@pytest.mark.parametrize("first_answer", ["true", "status500", "invalid_transaction"])
async def test_a_worker_that_lost_its_lease_writes_nothing(world: World, first_answer: str) -> None:
    """It slept through its lease and another one applied: whatever it learned, the decided delivery stays as it is."""
    await world.order("ORD-1")
    receipt = await world.notify(world.pay("ORD-1"))
    if first_answer != "true":
        world.fault("validator", first_answer)
    other = replace(world.worker, slots=Slots(4))
    decided: list[dict[str, Any]] = []

    async def oversleep() -> None:
        del world.rt.faults.on["transport.ask:after"]
        world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)
        await inbox.run_once(other)
        await other.slots.drained()
        decided.extend(await world.rows("SELECT * FROM notification_deliveries"))

    world.rt.faults.on["transport.ask:after"] = oversleep
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert await world.rows("SELECT * FROM notification_deliveries") == decided
    assert await world.value("SELECT count(*) FROM inbox") == 0
    assert (await world.counts())["processed_notifications"] == 1


@pytest.mark.case("S141")
@pytest.mark.parametrize("answer", ["true", "status500", "invalid_transaction", "store_id"])
async def test_a_worker_whose_lease_was_taken_over_stays_out_of_the_way(world: World, answer: str) -> None:
    """The other one is still at it: the first neither decides nor gives back what is not its own any more."""
    await world.order("ORD-1")
    receipt = await world.notify(world.pay("ORD-1"))
    if answer == "store_id":
        world.fault("validator", "fields", fields={"store_id": "evil01"})
    elif answer != "true":
        world.fault("validator", answer)
    taken_over: list[claims.Row] = []

    async def oversleep() -> None:
        del world.rt.faults.on["transport.ask:after"]
        world.rt.clock.advance(seconds=world.rt.settings.inbox_lease_seconds)
        taken_over.extend(await claims.proved(world.rt.inbox_db, limit=1, lease_seconds=45, parking_hours=72))

    world.rt.faults.on["transport.ask:after"] = oversleep
    await world.drain()

    assert await world.outcome(receipt) == ("received", None)
    assert (await world.counts())["processed_notifications"] == 0
    assert await world.rows("SELECT fence, asked, refuted, questions, lease_expires_at > ipn_now() AS leased FROM inbox") == [
        {"fence": 2, "asked": 0, "refuted": 0, "questions": 0, "leased": True}
    ]

    await inbox.work(world.worker, taken_over[0])

    assert await world.outcome(receipt) == ("applied", None)


async def test_a_fault_of_ours_ends_as_dead_and_not_as_a_loop(world: World) -> None:
    """What fails in the same way each time is counted against the schedule; its neighbours are applied."""

    async def fail() -> None:
        if await world.value("SELECT count(*) FROM inbox WHERE order_id = 'ORD-1' AND lease_expires_at IS NOT NULL"):
            raise ZeroDivisionError

    world.worker = replace(world.worker, settings=world.worker.settings.model_copy(update={"validation_schedule": (0.0, 5.0)}))
    world.rt.faults.on["transport.ask:after"] = fail
    poisoned = await waiting(world, "ORD-1")
    neighbour = await waiting(world, "ORD-2")
    world.rt.clock.advance(seconds=5)
    await world.drain()

    assert await world.outcome(poisoned) == ("dead", "no_verdict")
    assert await world.outcome(neighbour) == ("applied", None)
