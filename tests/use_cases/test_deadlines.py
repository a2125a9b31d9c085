"""Deadlines: what has not ended in its time is given up, on one timer for all."""

from __future__ import annotations

import asyncio

from ipn_gateway.deadlines import Deadlines


class Waits:
    """Waits that are noted when they are given up."""

    def __init__(self) -> None:
        self.given_up: list[str] = []
        self.changed = asyncio.Event()
        self.deadlines: Deadlines[str] = Deadlines(self._note)

    def _note(self, wait: str) -> None:
        self.given_up.append(wait)
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.given_up) < count:
                self.changed.clear()
                await self.changed.wait()


async def test_each_is_given_up_in_its_time() -> None:
    """Once, and the shorter one first although it began later."""
    waits = Waits()
    waits.deadlines.begin("long", 0.1)
    waits.deadlines.begin("longest", 0.2)
    waits.deadlines.begin("short", 0.01)

    await waits.until(3)

    assert waits.given_up == ["short", "long", "longest"]


async def test_what_has_ended_is_not_given_up() -> None:
    """Nor does it keep the others: the timer goes on to them."""
    waits = Waits()
    for wait in ("ends", "stays", "ends too"):
        waits.deadlines.begin(wait, 0.02)
    waits.deadlines.end("ends")
    waits.deadlines.end("ends too")
    await waits.until(1)
    waits.deadlines.begin("later", 0.01)
    await waits.until(2)

    assert waits.given_up == ["stays", "later"]


async def test_to_end_twice_is_to_end() -> None:
    """Who was given up ends as well."""
    waits = Waits()
    waits.deadlines.begin("slow", 0.01)
    await waits.until(1)
    waits.deadlines.end("slow")

    assert waits.given_up == ["slow"]
