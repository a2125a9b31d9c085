"""Posting to endpoints: one request and its answer, over a connection that the guard's connector has made or kept.

Of aiohttp this takes the connections (vetted addresses, TLS, keeping them open) and the parser of answers. What its session adds for all
that a client may want (redirects, cookies, proxies, bodies of every kind, each written by a task of its own) no event needs, and it takes
more time than the rest together.

Where a kept connection turns out to have ended, the same bytes go out once more, on a fresh one: a receiver may end an idle connection
whenever it likes (RFC 9112, 9.3.1), and it knows an event again by its `webhook-id`.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Self, cast

import aiohttp
from yarl import URL

from ipn_gateway.addresses import AddressBlocked
from ipn_gateway.guard import Connector, NotSent, TooLate, end, fresh, give_back, noted

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping, Sequence

    from aiohttp.connector import Connection
    from multidict import CIMultiDictProxy

    from ipn_gateway.guard import Guard, Protocol

TARGETS_KEPT: Final = 2048
"""Of so many URLs is remembered how a request to them begins."""


@dataclass(slots=True)
class Exchange:
    """What came of a request, as far as it got. An answer is there from its `status` on; its body may have broken off anywhere."""

    address: str | None = None  # connected to
    status: int | None = None
    headers: CIMultiDictProxy[str] | None = None
    body: bytearray = field(default_factory=bytearray)

    def values(self, name: str) -> Sequence[str]:
        """Of the answer's headers, those of this name."""
        return () if self.headers is None else self.headers.getall(name, ())


@dataclass(frozen=True, slots=True)
class _Target:
    """How every request to a URL begins. `request` is never sent: it is what a connector wants to know of where to connect."""

    request: aiohttp.ClientRequest
    start: str = field(repr=False)  # paths of endpoints may be secret


class Poster:
    """Posts, and keeps connections; open it in the event loop that uses it."""

    def __init__(self, tls: ssl.SSLContext, guard: Guard, headers: Mapping[str, str], limits: aiohttp.ClientTimeout) -> None:
        """`headers` go with every request. Of `limits` those of connecting count; the whole is under the caller's deadline."""
        self.connector = Connector(tls, guard)
        self._limits = limits
        self._target = lru_cache(TARGETS_KEPT)(partial(_target, "".join(_lines(headers))))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self.connector.close()

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, exchange: Exchange, *, before: float, body_bytes_max: int
    ) -> None:
        """Post `body`, with `headers` beside the client's own, and note in `exchange` what comes of it.

        Of an answer's body at most `body_bytes_max` are read: a rest that is left closes the connection, and that it breaks off is no
        failure. Raises `TooLate` instead of sending anything at the loop's time `before` or after it, `AddressBlocked`, `NotHttp`, and
        the failures of aiohttp, of which `ClientConnectorError` and `ConnectionTimeoutError` mean that nothing was sent.
        """
        target = self._target(url)
        data = _request(target.start, headers, body)
        connection = await self._connected(target)
        protocol = cast("Protocol", connection.protocol)
        try:
            await _exchange(connection, data, exchange, before, body_bytes_max)
        except aiohttp.ClientConnectionError as error:
            if not protocol.was_kept_in_vain:
                raise
            first = error
        else:
            return
        try:
            with fresh():
                connection = await self._connected(target)
            await _exchange(connection, data, exchange, before, body_bytes_max)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, AddressBlocked, TooLate):
            if isinstance(first, NotSent):
                raise
            raise first from None  # the first copy may have arrived

    async def _connected(self, target: _Target) -> Connection:
        try:
            return await self.connector.connect(target.request, [], self._limits)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError from error


def _target(fixed: str, url: str) -> _Target:
    try:
        parsed = URL(url)
        request = aiohttp.ClientRequest("POST", parsed, loop=asyncio.get_running_loop())
    except ValueError as error:
        raise aiohttp.InvalidURL(url) from error
    return _Target(request, f"POST {parsed.raw_path_qs} HTTP/1.1\r\nHost: {parsed.host_port_subcomponent}\r\n{fixed}")


def _lines(headers: Mapping[str, str]) -> list[str]:
    """Raises ValueError for what would begin a line of its own."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    text = "".join(lines)
    if not text.count("\r") == text.count("\n") == len(lines) or "\0" in text:
        raise ValueError("a header is one line of text")
    return lines


def _request(start: str, headers: Mapping[str, str], body: bytes) -> bytes:
    return "".join([start, *_lines(headers), f"Content-Length: {len(body)}\r\n\r\n"]).encode() + body


async def _exchange(connection: Connection, data: bytes, exchange: Exchange, before: float, body_bytes_max: int) -> None:
    """Ends with the connection given back, or ended where it cannot be used again."""
    protocol = cast("Protocol", connection.protocol)
    try:
        exchange.address = protocol.address
        if seen := noted.get():
            protocol.note(seen)
        protocol.send(data, before=before)
        message, content = await protocol.answer()
        exchange.status, exchange.headers = message.code, message.headers
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while len(exchange.body) < body_bytes_max and not content.at_eof():
                exchange.body += await content.read(body_bytes_max - len(exchange.body))
    except BaseException:
        end(connection)
        raise
    give_back(connection)
