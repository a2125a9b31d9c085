"""At most N tasks at once, started and never joined by who starts them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from ipn_gateway import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Slots:
    """The home of `asyncio.create_task`. A task gives its slot back when it ends, whatever became of it."""

    def __init__(self, count: int, *, freed: Callable[[], None] | None = None) -> None:
        """`count` is the number of tasks at once, at least 1; `freed` is called each time a slot becomes free."""
        self._count = count
        self._freed = freed
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def free(self) -> int:
        """How many tasks may be started now."""
        return self._count - len(self._tasks)

    def start(self, work: Coroutine[Any, Any, object], *, name: str) -> asyncio.Task[Any]:
        """Run `work` in a slot. What it raises is logged and ends there."""
        task = asyncio.create_task(work, name=name)  # noqa: TID251 - its home
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logs.get("slots").error("task.failed", task=task.get_name(), error_class=type(error).__name__, exc_info=error)
        if self._freed:
            self._freed()

    async def drained(self, *, seconds: float | None = None) -> bool:
        """Wait until nothing runs, at most `seconds`; whether that came true."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
        return not self._tasks

    async def cancel(self) -> None:
        """Cancel what still runs and wait for it to end."""
        for task in self._tasks:
            task.cancel()
        await self.drained()
