"""One timer for many waits: nearly all of them end long before their time, and a timer for each costs more than most of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Wait = TypeVar("Wait", bound="Hashable")


class Deadlines(Generic[Wait]):
    """Calls `give_up`, which must not raise, with each wait that has not ended within `seconds`."""

    def __init__(self, give_up: Callable[[Wait], None], *, seconds: float) -> None:
        self._give_up = give_up
        self._seconds = seconds
        self._due: OrderedDict[Wait, float] = OrderedDict()  # the first is due first, since all may take equally long
        self._timer_runs = False

    def begin(self, wait: Wait) -> None:
        """A wait begins."""
        self._due[wait] = asyncio.get_running_loop().time() + self._seconds
        self._look_at_the_first()

    def end(self, wait: Wait) -> None:
        """A wait has ended, or was given up."""
        self._due.pop(wait, None)

    def _look_at_the_first(self) -> None:
        if self._due and not self._timer_runs:
            self._timer_runs = True
            asyncio.get_running_loop().call_at(next(iter(self._due.values())), self._look)

    def _look(self) -> None:
        """Give up what is overdue. The timer was that of a wait which has ended by now, more often than not."""
        self._timer_runs = False
        now = asyncio.get_running_loop().time()
        while self._due and next(iter(self._due.values())) <= now:
            wait, _ = self._due.popitem(last=False)
            self._give_up(wait)
        self._look_at_the_first()
