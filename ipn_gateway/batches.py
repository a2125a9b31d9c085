"""Batches: what is in flight together goes to the database together, and each item still gets its own answer, after the commit.

A lone item is written at once, so batching costs it nothing. Items that come while a write is under way wait for its end and go together
next; so the size of a batch follows the load, and there is no timer. One that fails because of one of its items is written again one by
one: a bad item never fails its neighbours. Receive, apply, end and record write this way, and the inbox looks up this way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ipn_gateway import logs
from ipn_gateway.deadlines import Deadlines
from ipn_gateway.errors import GatewayError, Overloaded
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence


Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches(Generic[Item, Result]):
    """One kind of write, and the items that wait for it."""

    def __init__(
        self,
        write: Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]],
        *,
        name: str,
        most: int,
        waiting_max: int,
        writers: int = 1,
        apart: Callable[[Item], Hashable] | None = None,
        within_seconds: float | None = None,
    ) -> None:
        """`write` owns its transaction and gives one result for each item, in their order; an exception is raised to that item alone.

        A batch has at most `most` items, no two with the same `apart`; `writers` batches are written at once. With `waiting_max` items
        waiting the next one is refused, and no caller waits for longer than `within_seconds`.
        """
        self._write = write
        self._name = name
        self._most = most
        self._waiting_max = waiting_max
        self._apart = apart
        self._idle = writers  # counted here: a slot is given back only some turns of the loop after its task has looked for work in vain
        self._writers = Slots(writers)
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._deadlines: Deadlines[asyncio.Future[Result]] | None = None
        if within_seconds is not None:
            self._deadlines = Deadlines(_give_up, seconds=within_seconds)

    async def put(self, item: Item) -> Result:
        """Returns when the item is committed. Raises what its write raised, and `Overloaded` when too many wait or the time is over.

        A caller that is cancelled or waits no longer takes nothing back: its item is written all the same.
        """
        if len(self._waiting) >= self._waiting_max:
            raise Overloaded
        settled: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, settled))
        if self._idle:
            self._idle -= 1
            self._writers.start(self._write_what_waits(), name=self._name)
        if self._deadlines is None:
            return await settled
        self._deadlines.begin(settled)
        try:
            return await settled
        finally:
            self._deadlines.end(settled)

    async def drained(self, *, seconds: float | None = None) -> bool:
        """Wait until nothing is being written, at most `seconds`; whether that came true."""
        return await self._writers.drained(seconds=seconds)

    async def _write_what_waits(self) -> None:
        try:
            while batch := self._next():
                try:
                    await self._settle(batch)
                finally:
                    for _, settled in batch:
                        settled.cancel()  # does nothing to what is settled
        finally:
            self._idle += 1

    def _next(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        later: list[tuple[Item, asyncio.Future[Result]]] = []
        taken: set[Hashable] = set()
        while self._waiting and len(batch) < self._most:
            one = self._waiting.popleft()
            key = self._apart(one[0]) if self._apart else id(one)
            (later if key in taken else batch).append(one)
            taken.add(key)
        self._waiting.extendleft(reversed(later))
        return batch

    async def _settle(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results: Sequence[Result | Exception] = await self._write([item for item, _ in batch])
        except GatewayError as error:  # the database could take none of them
            results = [error] * len(batch)
        except Exception as error:  # noqa: BLE001 - whatever one item does must not fail the others
            if len(batch) > 1:
                logs.count("batches.taken_apart")
                for one in batch:
                    await self._settle([one])
                return
            results = [error]
        for (_, settled), result in zip(batch, results, strict=True):
            if settled.done():
                continue
            if isinstance(result, Exception):
                settled.set_exception(result)
            else:
                settled.set_result(result)


def _give_up(settled: asyncio.Future[Any]) -> None:
    if not settled.done():
        settled.set_exception(Overloaded())
