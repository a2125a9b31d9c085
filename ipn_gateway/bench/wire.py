"""The other sides, bare: a provider that confirms what it is asked about, and a receiver that answers 200. As little work as can be.

Paths that begin with `/_` are the benchmark's own way to steer them. Times are of the system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qs, urlsplit

from ipn_gateway.simulator import sslcommerz
from ipn_gateway.simulator.sslcommerz import Attempt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Write = Callable[[bytes], None]

STORE: Final = {"store_id": "benchbox", "store_passwd": "qwerty"}
AMOUNT: Final = Decimal("1250.00")
PREFIX: Final = "V-"
"""A payment's val_id is this and its order's id."""

END_OF_HEAD: Final = b"\r\n\r\n"
LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_VAL_ID: Final = re.compile(rb"[?&]val_id=([\w.-]+)")
_EVENT_ID: Final = re.compile(rb"(?i)\r\nwebhook-id: *([^\r\n]+)")
_ORDER_ID: Final = re.compile(rb'"order_id": ?"([^"]+)"')


def attempt(order_id: str) -> Attempt:
    """The payment of an order, in full."""
    return Attempt(
        status="VALID",
        store_id=STORE["store_id"],
        tran_id=order_id,
        tran_date="2026-01-02 03:04:05",
        amount=AMOUNT,
        currency_type="BDT",
        currency_amount=AMOUNT,
        currency_rate=Decimal(1),
        val_id=PREFIX + order_id,
        bank_tran_id=f"BANK-{order_id}",
        store_amount=AMOUNT,
        card=sslcommerz.CARDS["bkash"],
    )


def http(body: bytes, media_type: str = "application/json") -> bytes:
    """An answer, 200."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (media_type.encode(), len(body), body)


def _said(data: Any) -> bytes:
    return http(json.dumps(data).encode())


class OtherSide(Protocol):
    """Who answers requests. `write` may be called later."""

    def answer(self, head: bytes, body: bytes, write: Write, /) -> None:
        """One request."""


class Provider:
    """Confirms every payment that it is asked about, and counts the questions."""

    def __init__(self) -> None:
        self.calls = 0
        answer = sslcommerz.validator_answer(attempt("@order@"), status="VALID", validated_on="2026-01-02 03:04:06")
        self._answer = json.dumps(answer).encode()

    def answer(self, head: bytes, _: bytes, write: Write) -> None:
        """One request."""
        if asked := _VAL_ID.search(head):
            self.calls += 1
            write(http(self._answer.replace(b"@order@", asked[1].removeprefix(PREFIX.encode()))))
        else:
            write(_said({"calls": self.calls}))


class Receiver:
    """Takes every event, notes when each came to which path, and hangs on a path where it is told to."""

    def __init__(self) -> None:
        self._hanging: dict[bytes, float] = {}
        self._held: list[tuple[asyncio.TimerHandle, Write]] = []
        self._forget()

    def _forget(self) -> None:
        self._arrived: dict[tuple[bytes, bytes], tuple[float, bytes]] = {}
        self._repeats = 0

    def answer(self, head: bytes, body: bytes, write: Write) -> None:
        """One request."""
        path = head.split(b" ", 2)[1]
        if path.startswith(b"/_"):
            write(_said(self._steer(path.decode())))
        elif seconds := self._hanging.get(path):
            self._held.append((asyncio.get_running_loop().call_later(seconds, write, _OK), write))
        else:
            self._take(path, head, body)
            write(_OK)

    def _take(self, path: bytes, head: bytes, body: bytes) -> None:
        event = _EVENT_ID.search(head)
        key = (path, event[1] if event else body)
        if key in self._arrived:
            self._repeats += 1
        else:
            self._arrived[key] = (time.monotonic(), body)

    def _steer(self, target: str) -> Any:
        asked = urlsplit(target)
        given = {name: values[0] for name, values in parse_qs(asked.query).items()}
        if asked.path == "/_forget":
            self._forget()
        elif asked.path == "/_hang":
            self._hanging[given["path"].encode()] = float(given["seconds"])
        elif asked.path == "/_release":
            self._release()
        elif asked.path == "/_arrivals":
            return [[path.decode(), _order(body), at] for (path, _), (at, body) in self._arrived.items()]
        times = [at for at, _ in self._arrived.values()]
        return {
            "count": len(times),
            "repeats": self._repeats,
            "first": min(times, default=0),
            "last": max(times, default=0),
            "held": len(self._held),
        }

    def _release(self) -> None:
        self._hanging.clear()
        for timer, write in self._held:
            if not timer.cancelled() and timer.when() > asyncio.get_running_loop().time():
                timer.cancel()
                write(_OK)
        self._held.clear()


_OK: Final = http(b"{}")


def _order(body: bytes) -> str:
    found = _ORDER_ID.search(body)
    return found[1].decode() if found else ""


class _Connection(asyncio.Protocol):
    def __init__(self, other_side: OtherSide) -> None:
        self._other_side = other_side
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(END_OF_HEAD)) >= 0:
            head = bytes(self._data[:end])
            length = LENGTH.search(head)
            begin, size = end + len(END_OF_HEAD), int(length[1]) if length else 0
            if len(self._data) < begin + size:
                return
            body = bytes(self._data[begin : begin + size])
            del self._data[: begin + size]
            self._other_side.answer(head, body, self._write)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


@contextlib.asynccontextmanager
async def listening(other_side: OtherSide) -> AsyncIterator[str]:
    """Answer on any free port; its URL."""
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(other_side), "127.0.0.1", 0, backlog=1024)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def serve(other_side: OtherSide) -> None:
    """Listen, say where, and answer until the process ends."""
    async with listening(other_side) as url:
        print(f"listens on {url}", flush=True)  # noqa: T201 - what its starter waits for
        await asyncio.Event().wait()
