"""A provider on a loopback socket that counts what it did by our key, and pauses, loses its answers or fails as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests import loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class Plan:
    """How one call is answered. `reached` is set when its effect is there; the answer waits for `go`."""

    status: int = 200
    effect: bool = True
    lost: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Provider:
    """`/charges` takes our key and does a thing once for each; `/payouts` does it again with every call."""

    url: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    effects: Counter[tuple[str, str]] = field(default_factory=Counter)
    plans: deque[Plan] = field(default_factory=deque)
    held: list[Plan] = field(default_factory=list)

    def will(self, *, status: int = 200, effect: bool = True, lost: bool = False, times: int = 1) -> None:
        """The next calls are answered so; `lost` closes the connection instead of answering."""
        for _ in range(times):
            plan = Plan(status, effect, lost)
            plan.go.set()
            self.plans.append(plan)

    def hold(self, *, status: int = 200, lost: bool = False) -> Plan:
        """The next call has its effect at once, and its answer when the test says so."""
        plan = Plan(status, lost=lost)
        self.plans.append(plan)
        self.held.append(plan)
        return plan

    @property
    def done(self) -> int:
        """How many effects there were, whatever was answered."""
        return self.effects.total()

    @property
    def keys(self) -> list[str]:
        """Our keys as they came, in order."""
        return [key for _, key in self.calls]

    async def answer(self, server: loopback.Server, writer: asyncio.StreamWriter) -> None:
        """One call."""
        path, key = _read(server.requests[-1])
        self.calls.append((path, key))
        plan = self.plans.popleft() if self.plans else _at_once()
        known = path == "/charges" and (path, key) in self.effects
        if plan.effect and not known:
            self.effects[path, key] += 1
        plan.reached.set()
        await plan.go.wait()
        if plan.lost:
            writer.transport.abort()
            return
        body = json.dumps({"reference": f"ref-{len(self.calls)}"}).encode()
        with contextlib.suppress(ConnectionError):
            writer.write(
                b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (plan.status, len(body), body)
            )
            await writer.drain()


def _at_once() -> Plan:
    plan = Plan()
    plan.go.set()
    return plan


def _read(request: bytes) -> tuple[str, str]:
    head = request.partition(b"\r\n\r\n")[0].decode()
    line, *headers = head.split("\r\n")
    named = {name.lower(): value for name, _, value in (header.partition(": ") for header in headers)}
    return line.split(" ")[1], named["idempotency-key"]


@contextlib.asynccontextmanager
async def providing() -> AsyncIterator[Provider]:
    """The provider; what is held at the end is let go."""
    provider = Provider()
    async with loopback.serving(provider.answer) as server:
        provider.url = f"http://127.0.0.1:{server.port}"
        try:
            yield provider
        finally:
            for plan in provider.held:
                plan.go.set()
