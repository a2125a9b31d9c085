"""Dispatchers that are killed while they send, again and again: nothing is lost, and what repeats is the same event."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.dispatching import KEY, Subscribers, received
from tests.forked import forking
from tests.loopback import OK, serving

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from ipn_gateway.db import Database
    from tests.dispatching import Message
    from tests.loopback import Server
    from tests.make import Make

ROUNDS = 20
EVENTS = 6
POINTS = (
    "transport.send:before",
    "transport.send:after",
    "event_deliveries.claim:before_commit",
    "event_deliveries.claim:after_commit",
    "event_deliveries.record:statement_1",
    "event_deliveries.record:before_commit",
    "event_deliveries.record:after_commit",
)
NO = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.case("S117", "S119", "S123", "B85", "B89")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("ordered", "seed"), [(False, 1), (True, 2)])
async def test_dispatchers_that_are_killed_lose_nothing(database_url: str, db: Database, make: Make, ordered: bool, seed: int) -> None:
    """Twenty are, at a point of theirs or when a request has reached the subscriber: every event arrives, as itself, and is told right."""
    chance, clock, subscribers = random.Random(seed), db.clock, Subscribers(db, make)
    on_request: list[Callable[[], None]] = []

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        if on_request and chance.random() < 0.3:
            on_request.pop()()
        writer.write(NO if chance.random() < 0.2 else OK)

    killed = 0
    async with serving(answer) as server, forking(database_url, KEY) as forks:
        endpoint_id = await subscribers.endpoint(server, ordered=ordered)
        for number in range(ROUNDS):
            for place in range(EVENTS):
                event_id = f"evt_{number}_{place}"
                await make.event(id=event_id, body=f'{{"id":"{event_id}","data":{{"n":{chance.random()}}}}}'.encode())
                sequence = number * 2 + place // 3 + 1
                await make.event_delivery(endpoint_id=endpoint_id, event_id=event_id, order_id=f"{place % 3}", sequence=sequence)
            point = chance.choice([*POINTS, None, None, None])
            victim = await forks.start(clock, crash_at=point)
            if point is None:
                on_request.append(partial(os.kill, victim, signal.SIGKILL))
            killed += await forks.ended() == signal.SIGKILL
            on_request.clear()
            clock.advance(seconds=50)
        while await subscribers.rows("event_deliveries", "status = 'pending'"):
            await forks.start(clock)
            await forks.ended()
            clock.advance(seconds=70)
        messages = received(server)

    rows = await subscribers.rows("event_deliveries")
    attempts = await subscribers.rows("delivery_attempts", order="event_delivery_id, number")
    bodies = {row["id"]: row["body"] for row in await subscribers.rows("events")}
    assert killed >= ROUNDS * 2 / 3
    assert {row["status"] for row in rows} == {"delivered"}
    assert {message.id for message in messages} == {row["event_id"] for row in rows}
    assert all(message.body == bodies[message.id] for message in messages)
    for row in rows:
        mine = [attempt for attempt in attempts if attempt["event_delivery_id"] == row["id"]]
        assert [attempt["number"] for attempt in mine] == list(range(1, row["attempt_count"] + 1))
        assert [attempt["outcome"] for attempt in mine][-1:] == ["delivered"]
        assert sum(attempt["outcome"] == "delivered" for attempt in mine) == 1
    assert len(messages) >= len(attempts)
    if ordered:
        for order in range(3):
            sequences = [sequence for of, sequence in map(_place, messages) if of == order]
            assert sequences == sorted(sequences)


def _place(message: Message) -> tuple[int, int]:
    """The order and the sequence of an event."""
    _, number, place = message.id.split("_")
    return int(place) % 3, int(number) * 2 + int(place) // 3 + 1
