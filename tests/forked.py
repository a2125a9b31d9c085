"""Dispatchers in processes of their own that start in no time: forked from one that has imported everything. As a program, that one.

It reads what to run as lines of JSON and writes a process id for each, then, when that process has ended, its wait status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ipn_gateway import db as database
from ipn_gateway import logs
from ipn_gateway.clock import Clock
from ipn_gateway.faults import Faults
from tests.dispatching import dispatching

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.dispatching import Running

ROOT = Path(__file__).parents[1]
SCHEDULE = (0, *[5] * 50)


@dataclass
class Forks:
    """One process at a time."""

    handle: asyncio.subprocess.Process
    url: str
    key: str

    async def start(self, clock: Clock, *, crash_at: str | None = None) -> int:
        """A dispatcher that sends what is due by this clock; its process id. It kills itself at the fault point `crash_at`."""
        assert self.handle.stdin is not None
        line = {"url": self.url, "key": self.key, "offset": clock.offset.total_seconds(), "crash_at": crash_at}
        self.handle.stdin.write(json.dumps(line).encode() + b"\n")
        return await self._read()

    async def ended(self) -> int:
        """Wait for its end: 0, or the signal that killed it."""
        return os.WTERMSIG(await self._read())

    async def _read(self) -> int:
        assert self.handle.stdout is not None
        async with asyncio.timeout(15):
            return int(await self.handle.stdout.readline())


@contextlib.asynccontextmanager
async def forking(url: str, key: str) -> AsyncIterator[Forks]:
    """The process to fork from; nothing that it started outlives the block."""
    handle = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.forked", cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Forks(handle, url, key)
    finally:
        assert handle.stdin is not None
        handle.stdin.close()
        await handle.wait()


async def _deliver(url: str, key: str, offset: float, crash_at: str | None) -> None:
    async def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    faults = Faults({crash_at: die} if crash_at else {})
    clock = Clock(timedelta(seconds=offset))
    async with (
        database.Database(url, clock=clock, faults=faults, name="dispatcher") as db,
        dispatching(db, key=key, faults=faults, retry_schedule=SCHEDULE) as running,
    ):
        await _all(running)


async def _all(running: Running) -> None:
    while await running.dispatcher.run_once() or running.slots.free < 50:
        await running.free()


def _main() -> None:
    logs.configure(level="ERROR", json=True)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            asyncio.run(_deliver(**asked))
            os._exit(0)
        print(pid, flush=True)  # noqa: T201 - the parent reads it
        print(os.waitpid(pid, 0)[1], flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
