"""Turns: one provider account is asked so much at once and no more, and nobody waits for a turn that comes too late."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from ipn_gateway import claims, inbox, source_states
from ipn_gateway.slots import Slots
from ipn_gateway.turns import Turns

if TYPE_CHECKING:
    from tests.world import World

COUNT = claims.IN_FLIGHT_PER_SOURCE + 8


async def leased(world: World) -> int:
    return int(await world.value("SELECT count(*) FROM inbox WHERE lease_expires_at > ipn_now()"))


async def claimed(world: World) -> asyncio.Semaphore:
    """More are claimed than may be asked about at once; each question gives the semaphore one, and hangs."""
    asking = asyncio.Semaphore(0)

    async def ask() -> None:
        asking.release()

    world.rt.faults.on["transport.ask:before"] = ask
    world.worker = replace(world.worker, slots=Slots(64))
    for number in range(COUNT):
        await world.order(f"ORD-{number}")
        await world.notify(world.pay(f"ORD-{number}"))
    assert await inbox.run_once(world.worker) == COUNT
    return asking


async def test_a_source_is_asked_sixteen_questions_at_once(world: World) -> None:
    """The others have their leases and wait; each answer lets the next one ask, and in the end all are applied."""
    world.fault("validator", "hang", times=None)
    asking = await claimed(world)
    for _ in range(claims.IN_FLIGHT_PER_SOURCE):
        await asking.acquire()
    beyond, held = not asking.locked(), await leased(world)
    world.simulator.api.faults.clear()
    await world.worker.slots.drained()

    assert (beyond, held) == (False, COUNT)
    assert await world.outcomes() == ["applied"] * COUNT
    assert world.questions == COUNT


async def test_a_source_that_does_not_answer_sends_those_who_wait_away(world: World) -> None:
    """After five unknown answers in a row they give their leases back unasked, so that the source is probed by one at a time."""
    world.fault("validator", "status500", times=None)
    await claimed(world)
    await world.worker.slots.drained()

    asked = await world.value("SELECT count(*) FROM inbox WHERE asked = 1 AND questions = 1")
    sent_away = await world.value("SELECT count(*) FROM inbox WHERE asked = 0 AND questions = 0 AND due_at <= ipn_now()")
    assert asked + sent_away == COUNT
    assert claims.IN_FLIGHT_PER_SOURCE <= asked <= claims.IN_FLIGHT_PER_SOURCE + source_states.PROBING_FROM
    assert await leased(world) == 0

    world.simulator.api.faults.clear()
    for _ in range(3):
        world.rt.clock.advance(seconds=5)
        await world.drain()

    assert await world.outcomes() == ["applied"] * COUNT


async def test_who_waits_too_long_is_sent_away() -> None:
    """The answer would come after the lease."""
    turns = Turns(1, unanswered_max=5)
    async with turns.turn("shop", seconds=1) as first, turns.turn("shop", seconds=0.01) as second, turns.turn("other", seconds=1) as other:
        lines = first, second, other

    assert [line is not None for line in lines] == [True, False, True]


async def test_a_line_is_there_as_long_as_somebody_stands_in_it() -> None:
    """What is remembered of a source does not outlive its questions."""
    turns = Turns(1, unanswered_max=1)
    async with turns.turn("shop", seconds=1) as line:
        assert line is not None
        line.unanswered = 1
    del line
    async with turns.turn("shop", seconds=1) as line:
        assert line is not None
        assert line.unanswered == 0
