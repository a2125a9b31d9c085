"""The load generator: bare HTTP over kept connections, requests that were made before.

`at_once` keeps all connections busy (a closed loop, for finding the highest rate). `at_rate` offers each request at its intended time,
whatever became of those before, and counts its latency from that time on: what has to wait for a connection waits in the measurement
(an open loop, without coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ipn_gateway.bench.comparison import Broken
from ipn_gateway.bench.wire import END_OF_HEAD, LENGTH
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LANES: Final = 64
LANES_OF_OPEN_LOOP: Final = 256
STATUS: Final = slice(9, 12)
TIMER_SECONDS: Final = 0.001
"""What the loop's timers are rounded to; half of it more, and nothing is sent before its time."""

RESENT_MAX_PART: Final = 10
"""One of so many may be answered 503 and be sent again; more of them are refusals."""

STALLED_SECONDS: Final = 60.0
"""With no answer for so long something is broken."""


def request(path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A POST as it goes over the wire."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Length: {len(body)}",
        *(f"{key}: {value}" for key, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + END_OF_HEAD + body


@dataclass(slots=True)
class Answers:
    """When each request was due (in a closed loop: sent) and when it was answered, in monotonic seconds, and with what.

    `resent` is how many were answered 503 and sent again, as a provider does; the time of that is in their own.
    """

    due: array[float]
    answered: array[float]
    resent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def began(self) -> float:
        """When the first one was due."""
        return min(self.due)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.answered) / (max(self.answered) - self.began)

    def all_accepted(self) -> None:
        """Raises `Broken` unless all were answered 2xx."""
        if refused := {status: count for status, count in self.statuses.items() if status // 100 != 2}:  # noqa: PLR2004 - 2xx
            raise Broken(f"Of {len(self.answered)} requests some were refused, by status: {refused}.")


class _Lane(asyncio.Protocol):
    """One connection: a request, its answer, and the next request."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._data = b""
        self._number: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def send(self, number: int, request: bytes) -> None:
        self._number = number
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(END_OF_HEAD)
        if end < 0 or self._number is None:
            return
        length = LENGTH.search(self._data, 0, end + 2)
        if len(self._data) >= end + len(END_OF_HEAD) + (int(length[1]) if length else 0):
            number, status = self._number, int(self._data[STATUS])
            self._number, self._data = None, b""
            self._load.answered(self, number, status)

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent; a server ends a connection that is idle for some seconds."""
        return not self._transport.is_closing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._number is not None:
            self._load.fail(Broken(f"A connection broke before its answer: {error}"))
        else:
            self._load.lost(self)

    def close(self) -> None:
        self._transport.close()


class _Load:
    def __init__(self, requests: Sequence[bytes]) -> None:
        self.answers = Answers(array("d", bytes(8 * len(requests))), array("d", bytes(8 * len(requests))))
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._left = len(requests)
        self._waiting: deque[int] = deque()
        self._lanes: dict[_Lane, str] = {}
        self._idle: list[_Lane] = []
        self._opening = Slots(LANES_OF_OPEN_LOOP)

    async def open(self, urls: Sequence[str], lanes: int) -> None:
        for number in range(lanes):
            await self._open(urls[number % len(urls)])

    async def _open(self, url: str) -> None:
        address: Any = urlsplit(url)
        _, lane = await asyncio.get_running_loop().create_connection(lambda: _Lane(self), address.hostname, address.port)
        self._lanes[lane] = url
        self._free(lane)

    def lost(self, lane: _Lane) -> None:
        """An idle connection was ended: another one takes its place."""
        url = self._lanes.pop(lane, None)
        if lane in self._idle:
            self._idle.remove(lane)
        if url is not None and not self.over.done():
            self._opening.start(self._open(url), name="lane")

    async def close(self) -> None:
        await self._opening.cancel()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes:
            lane.close()

    def offer(self, number: int, due: float = 0) -> None:
        """Send it on a free connection or, without one, as soon as one is free. Without `due` its time is that of sending."""
        self.answers.due[number] = due
        self._waiting.append(number)
        while self._idle and self._waiting:
            self._free(self._idle.pop())

    def _send(self, lane: _Lane, number: int) -> None:
        if not self.answers.due[number]:
            self.answers.due[number] = time.monotonic()
        lane.send(number, self._requests[number])

    def answered(self, lane: _Lane, number: int, status: int) -> None:
        if status == HTTPStatus.SERVICE_UNAVAILABLE and self.answers.resent < len(self._requests) // RESENT_MAX_PART:
            self.answers.resent += 1
            self._waiting.append(number)
        else:
            self.answers.answered[number] = time.monotonic()
            self.answers.statuses[status] += 1
            self._left -= 1
        self._free(lane)
        if not self._left and not self.over.done():
            self.over.set_result(None)

    def _free(self, lane: _Lane) -> None:
        if not lane.is_open:
            return  # `lost` is about to be called
        if self._waiting:
            self._send(lane, self._waiting.popleft())
        else:
            self._idle.append(lane)

    def fail(self, error: Broken) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    async def ended(self) -> Answers:
        """Wait for the last answer. Raises `Broken` when none comes for `STALLED_SECONDS`."""
        left = self._left + 1
        while not self.over.done():
            if self._left == left:
                raise Broken(f"{left} requests were not answered within {STALLED_SECONDS:g} s.")
            left = self._left
            await asyncio.wait([self.over], timeout=STALLED_SECONDS)
        await self.over
        return self.answers


async def at_once(urls: Sequence[str], requests: Sequence[bytes], *, lanes: int = LANES) -> Answers:
    """Send all as fast as they are answered, `lanes` at a time, spread over the `urls`."""
    load = _Load(requests)
    await load.open(urls, lanes)
    try:
        for number in range(len(requests)):
            load.offer(number)
        return await load.ended()
    finally:
        await load.close()


async def at_rate(urls: Sequence[str], requests: Sequence[bytes], *, per_second: float, lanes: int = LANES_OF_OPEN_LOOP) -> Answers:
    """Send each at its intended time, evenly spread."""
    load = _Load(requests)
    await load.open(urls, lanes)
    try:
        began = time.monotonic()
        for number in range(len(requests)):
            due = began + number / per_second
            await asyncio.sleep(max(0.0, due - time.monotonic() + TIMER_SECONDS / 2))
            load.offer(number, due)
        return await load.ended()
    finally:
        await load.close()
