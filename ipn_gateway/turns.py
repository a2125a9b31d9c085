"""Turns: how many questions one provider account is asked at the same time by this process, and who waits for the next.

More deliveries of a source are claimed than are asked about at once, so that what comes before and after the question is done in sets.
Nobody waits for a turn for so long that the answer would come after the lease, nor at a source that does not answer any more: what is given
back is due again, and the claim knows which sources are probed.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(slots=True, weakref_slot=True, eq=False)
class Line:
    """The line before one source; it is there as long as somebody asks or waits."""

    free: asyncio.Semaphore
    unanswered: int = 0  # in a row


class Turns:
    """The lines of all sources."""

    def __init__(self, at_once: int, *, unanswered_max: int) -> None:
        """`at_once` questions a source; after `unanswered_max` in a row that got no clear answer those who wait are sent away."""
        self._at_once = at_once
        self._unanswered_max = unanswered_max
        self._lines: WeakValueDictionary[str, Line] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, source_id: str, *, seconds: float) -> AsyncIterator[Line | None]:
        """A turn to ask, or None when there is none within `seconds`. Who asked says in `unanswered` what came of it."""
        line = self._lines.get(source_id)
        if line is None:
            line = self._lines[source_id] = Line(asyncio.Semaphore(self._at_once))
        if waited := line.free.locked():
            try:
                async with asyncio.timeout(seconds):
                    await line.free.acquire()
            except TimeoutError:
                yield None
                return
        else:
            await line.free.acquire()  # at once
        try:
            yield None if waited and line.unanswered >= self._unanswered_max else line
        finally:
            line.free.release()
