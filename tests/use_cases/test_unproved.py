"""A hash that matches and proves nothing: answered 2xx, asked about from a small budget, after everything that is proved."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ipn_gateway import inbox, logs
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from ipn_gateway.notifications import Receipt
    from tests.world import World


async def odd(world: World, order_id: str) -> Receipt:
    """A genuine payment under a `verify_key` that names a field twice."""
    await world.order(order_id)
    return await world.notify(encode(FORGERIES["odd_key"](world.pay(order_id))))


@pytest.mark.case("S105")
async def test_the_provider_decides_about_what_proves_nothing(world: World) -> None:
    """2xx, and what it confirms is applied all the same."""
    receipt = await odd(world, "ORD-1")
    await world.drain()

    assert receipt.error is None
    assert await world.value("SELECT proof FROM notification_deliveries") == "unproved"
    assert await world.outcome(receipt) == ("applied", None)


async def test_one_question_a_second_and_source_is_asked_about_them(world: World) -> None:
    """Whoever can make them cannot use us to flood the provider; another source has a budget of its own."""
    await world.source("second")
    for number in range(4):
        await odd(world, f"ORD-{number}")
    other = await world.notify(encode(FORGERIES["odd_key"](world.pay("ORD-0"))), source="second")

    asked = []
    for _ in range(5):
        before = world.questions
        await world.drain()
        await world.drain()
        asked.append(world.questions - before)
        world.rt.clock.advance(seconds=1)

    assert asked == [2, 1, 1, 1, 0]
    assert (await world.outcome(other))[0] in {"duplicate", "held"}
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'paid'") == 4


async def test_proved_ones_do_not_wait_for_them(world: World) -> None:
    """With one free slot and a queue of unproved ones in front, the proved one goes first."""
    for number in range(3):
        await odd(world, f"ORD-{number}")
    await world.order("ORD-9")
    proved = await world.notify(world.pay("ORD-9"))

    world.worker = replace(world.worker, slots=Slots(1))
    await inbox.run_once(world.worker)
    await world.worker.slots.drained()

    assert await world.outcome(proved) == ("applied", None)
    assert await world.value("SELECT count(*) FROM inbox") == 3


@pytest.mark.case("S105")
async def test_one_refutation_is_enough(world: World) -> None:
    """What proves nothing by itself and is not confirmed either is rejected without a second question, and raises no alarm."""
    before = logs.counters["sources.refuted_alarm"]
    await world.order("ORD-1")
    folded = FORGERIES["folded_status"](world.pay("ORD-1", status="CANCELLED"))
    for _ in range(6):
        await world.notify(encode(folded))
        await world.drain()
        world.rt.clock.advance(seconds=1)

    assert await world.outcomes() == ["rejected"] * 6
    assert world.questions == 6
    assert await world.status("ORD-1") == "pending"
    assert logs.counters["sources.refuted_alarm"] == before  # strangers cannot make a source look misconfigured


async def test_an_unproved_one_without_an_answer_is_asked_again(world: World) -> None:
    """No answer is no refutation."""
    receipt = await odd(world, "ORD-1")
    world.fault("validator", "html")
    await world.drain()
    assert await world.outcome(receipt) == ("received", None)

    world.rt.clock.advance(seconds=5)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)


@pytest.mark.case("S105")
@pytest.mark.parametrize("workers", [4])
async def test_several_workers_share_the_budget(world: World, workers: int) -> None:
    """The budget is a row of the database: four workers at once ask one question."""
    for number in range(4):
        await odd(world, f"ORD-{number}")
    crowd = [replace(world.worker, slots=Slots(4)) for _ in range(workers)]

    claimed = await asyncio.gather(*(inbox.run_once(worker) for worker in crowd))
    for worker in crowd:
        await worker.slots.drained()

    assert sum(claimed) == 1
    assert world.questions == 1
