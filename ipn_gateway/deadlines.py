"""One timer for many waits: nearly all of them end long before their time, and a timer for each costs more than most of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Wait = TypeVar("Wait", bound="Hashable")


class Deadlines(Generic[Wait]):
    """Calls `give_up` with each wait that has not ended in its time."""

    def __init__(self, give_up: Callable[[Wait], None]) -> None:
        self._give_up = give_up
        self._due: dict[Wait, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def begin(self, wait: Wait, seconds: float) -> None:
        """A wait begins. It may take `seconds`."""
        due = self._due[wait] = asyncio.get_running_loop().time() + seconds
        if self._timer is None or due < self._timer_due:
            self._look_at(due)

    def end(self, wait: Wait) -> None:
        """A wait has ended, or was given up."""
        self._due.pop(wait, None)

    def _look_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._look)
        self._timer_due = due

    def _look(self) -> None:
        """Give up what is overdue. The timer was that of a wait which has ended by now, more often than not."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        for wait in [wait for wait, due in self._due.items() if due <= now]:
            self.end(wait)
            self._give_up(wait)
        if self._due:
            self._look_at(min(self._due.values()))
