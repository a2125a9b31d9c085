"""The outermost layer: every request in a task of its own, which goes on when the client is gone, and one line in the log.

A request takes one of the process's slots when its body has arrived, so that bodies that come slowly, or never, keep nobody out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request

from ipn_gateway import ids, logs
from ipn_gateway.deadlines import Deadlines
from ipn_gateway.errors import Overloaded
from ipn_gateway.web import deps, problems

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ipn_gateway.clock import Clock
    from ipn_gateway.slots import Slots

REQUESTS_MAX: Final = 1000
"""Requests at once in this process; more are answered 503 at once, except how it is."""

READING_MAX: Final = 5000
READING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Requests whose body is on its way, and what has come of those bodies; beyond either the one that has taken longest is broken off."""

_ALWAYS: Final = ("/healthz", "/metrics")


@dataclass(slots=True, eq=False)
class _Reading:
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    messages: list[Message] = field(default_factory=list)
    size_bytes: int = 0


class Bodies:
    """Reads what comes before a slot is taken. Those that take long make room for those that come: genuine ones take milliseconds."""

    def __init__(self) -> None:
        self._reading: OrderedDict[_Reading, None] = OrderedDict()  # oldest first, which a plain dict is slow to give
        self._size_bytes = 0
        self._deadlines: Deadlines[_Reading] = Deadlines(_break_off, seconds=deps.BODY_SECONDS_MAX)

    async def read(self, scope: Scope, receive: Receive) -> list[Message]:
        """The messages up to the end of the body; of one that is too large, so many as show it.

        What does not arrive in time ends with `http.disconnect`: the routes answer that after what they check before the body.
        """
        if deps.is_too_large(scope):
            return []
        reading = _Reading()
        self._deadlines.begin(reading)
        try:
            async with reading.limit:
                self._reading[reading] = None
                await self._read(reading, receive)
        except TimeoutError:
            logs.count("requests.body_not_arrived")
            reading.messages.append({"type": "http.disconnect"})
        finally:
            self._deadlines.end(reading)
            self._forget(reading)
        return reading.messages

    async def _read(self, reading: _Reading, receive: Receive) -> None:
        more = True
        while more and reading.size_bytes <= deps.BODY_BYTES_MAX:
            self._make_room()
            message = await receive()
            reading.messages.append(message)
            size_bytes = len(message.get("body", b""))
            reading.size_bytes += size_bytes
            if reading in self._reading:
                self._size_bytes += size_bytes
            more = message.get("more_body", False)

    def _make_room(self) -> None:
        while self._reading and (len(self._reading) > READING_MAX or self._size_bytes > READING_BYTES_MAX):
            slowest = next(iter(self._reading))
            self._forget(slowest)
            _break_off(slowest)

    def _forget(self, reading: _Reading) -> None:
        if reading in self._reading:
            del self._reading[reading]
            self._size_bytes -= reading.size_bytes


def _break_off(reading: _Reading) -> None:
    if not reading.limit.expired():
        reading.limit.reschedule(0)


def _replayed(arrived: list[Message], receive: Receive) -> Receive:
    """What has arrived, again, and then what comes after it."""
    left = list(reversed(arrived))

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


class Shield:
    """A pure ASGI layer. A use case that has begun to write is never cut off by a disconnect: it commits, and nobody hears of it."""

    def __init__(self, app: ASGIApp, slots: Slots, clock: Clock) -> None:
        self._app = app
        self._slots = slots
        self._clock = clock
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; other than HTTP is passed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = await self._bodies.read(scope, receive)
        if self._slots.free <= 0 and scope["path"] not in _ALWAYS:
            await problems.respond(Overloaded())(scope, receive, send)
        else:
            await asyncio.shield(self._slots.start(self._serve(scope, _replayed(arrived, receive), send), name="request"))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = self._clock.monotonic_seconds()
        status = 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if standing := scope.get("state", {}).get("standing"):
                    standing.write(MutableHeaders(scope=message))
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception as error:  # noqa: BLE001 - raised again by the framework after it was answered and logged as an incident
            if not status:
                response = await problems.anything_else(Request(scope), error)
                await response(scope, receive, note_status)
        finally:
            self._report(scope, status, self._clock.monotonic_seconds() - began)

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        logs.count(f"requests.{status}")
        principal = scope.get("state", {}).get("principal")
        if principal is not None:
            logs.get("web").info(
                "request.answered",
                method=scope["method"],
                route=problems.route_of(scope),
                status=status,
                tenant_id=principal.tenant_id,
                key_id=ids.show(ids.API_KEY, principal.key_id),
                duration_ms=round(seconds * 1000, 1),
            )
