"""Deadlines: what has not ended in its time is given up, on one timer for all."""

from __future__ import annotations

import asyncio

from ipn_gateway.deadlines import Deadlines


class Waits:
    """Waits that are noted when they are given up."""

    def __init__(self) -> None:
        self.given_up: list[str] = []
        self.changed = asyncio.Event()
        self.deadlines: Deadlines[str] = Deadlines(self._note, seconds=0.02)

    def _note(self, wait: str) -> None:
        self.given_up.append(wait)
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.given_up) < count:
                self.changed.clear()
                await self.changed.wait()


async def test_each_is_given_up_in_its_time() -> None:
    """Once, and none before its time, whatever the timer was set for."""
    waits, loop = Waits(), asyncio.get_running_loop()
    waits.deadlines.begin("first")
    await waits.until(1)
    began = loop.time()
    waits.deadlines.begin("second")
    waits.deadlines.begin("third")
    await waits.until(3)

    assert waits.given_up == ["first", "second", "third"]
    assert loop.time() - began >= 0.02


async def test_what_has_ended_is_not_given_up() -> None:
    """Nor does it keep the others: the timer goes on to them."""
    waits = Waits()
    for wait in ("ends", "stays", "ends too"):
        waits.deadlines.begin(wait)
    waits.deadlines.end("ends")
    waits.deadlines.end("ends too")
    await waits.until(1)
    waits.deadlines.begin("later")
    await waits.until(2)

    assert waits.given_up == ["stays", "later"]


async def test_to_end_twice_is_to_end() -> None:
    """Who was given up ends as well."""
    waits = Waits()
    waits.deadlines.begin("slow")
    await waits.until(1)
    waits.deadlines.end("slow")

    assert waits.given_up == ["slow"]
