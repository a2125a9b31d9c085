"""Gateways in processes of their own that are started in no time, killed, frozen and started again; `doomed` is what they run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping

ROLES: Final = ("web", "inbox", "dispatcher", "maintenance")
START_SECONDS_MAX: Final = 60.0
END_SECONDS_MAX: Final = 30.0


@dataclass(slots=True)
class Gateway:
    """A process: `url` when it listens, `status` (of waitpid) when it has ended. `at_work` is set by either."""

    number: int
    process: int = 0
    url: str = ""
    said: str = ""
    status: int | None = None
    at_work: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def ended(self, *, seconds: float = END_SECONDS_MAX) -> int:
        """Wait for its end; 0 or the exit code, or minus the signal that killed it. Raises `TimeoutError`."""
        async with asyncio.timeout(seconds):
            await self.gone.wait()
        assert self.status is not None  # noqa: S101 - it has ended
        return os.waitstatus_to_exitcode(self.status)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self.process and not self.gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, number)

    async def kill(self) -> int:
        """SIGKILL; what `ended` gives."""
        self.signal(signal.SIGKILL)
        return await self.ended()

    def hears(self, news: Mapping[str, Any]) -> None:
        """What its parent tells of it."""
        self.process = news.get("process", self.process)
        if "says" in news:
            self.said = news["says"]
            self.url = self.said.rpartition(" ")[2] if " listens on " in self.said else ""
            self.at_work.set()
        if (status := news.get("status")) is None:
            return
        if os.WIFSTOPPED(status):
            self.frozen.set()
        elif os.WIFCONTINUED(status):
            self.frozen.clear()
        else:
            self.status = status
            self.at_work.set()
            self.gone.set()


@dataclass(slots=True)
class Nursery:
    """Where they are started. `gateways` are all that ever were."""

    parent: Process
    gateways: dict[int, Gateway] = field(default_factory=dict)

    async def start(
        self,
        *,
        roles: Collection[str] = ROLES,
        at: str | None = None,
        passes: int = 1,
        frozen: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Gateway:
        """A gateway, when it is at work or has died; at the point `at` it dies, or with `frozen` stops, when it passes for the nth time."""
        assert self.parent.stdin is not None  # noqa: S101 - it was started with pipes
        number = len(self.gateways)
        gateway = self.gateways[number] = Gateway(number)
        asked = {"number": number, "roles": list(roles), "at": at, "passes": passes, "signal": "STOP" if frozen else "KILL"}
        self.parent.stdin.write(json.dumps(asked | {"environment": dict(environment or {})}).encode() + b"\n")
        async with asyncio.timeout(START_SECONDS_MAX):
            await gateway.at_work.wait()
        return gateway

    async def listen(self) -> None:
        """Hear what the parent tells, until it ends."""
        assert self.parent.stdout is not None  # noqa: S101 - it was started with pipes
        async for line in self.parent.stdout:
            news = json.loads(line)
            self.gateways[news["number"]].hears(news)


@contextlib.asynccontextmanager
async def opened(environment: Mapping[str, str], *, errors: Any = None, level: str = "ERROR") -> AsyncIterator[Nursery]:
    """The process to fork from; nothing that it started outlives the block. `errors` is where the gateways' logs go."""
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ipn_gateway.proof.doomed", level),
        stdin=PIPE,
        stdout=PIPE,
        stderr=errors,
        env=dict(environment),
        start_new_session=True,  # ^C is meant for us
    )
    nursery = Nursery(parent)
    listening = asyncio.create_task(nursery.listen())  # noqa: TID251 - one task, awaited at the end of the block
    try:
        yield nursery
    finally:
        assert parent.stdin is not None  # noqa: S101 - as above
        parent.stdin.close()
        await listening
        await parent.wait()
