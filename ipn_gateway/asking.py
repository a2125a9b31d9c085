"""Asking providers: httpx's API, over connections that the guard's connector has made or kept.

Of httpx are the words (client, request, answer), so that what stands in for a provider in a test can stand in here. Of aiohttp are the
connections (vetted addresses, TLS, keeping them open) and the parser of answers. What the client of the one and the session of the other
do around a request (redirects, cookies, authentication, proxies, bodies of every kind, sending it again) a question must not have or does
not need, and it takes more time than the rest together.
"""

from __future__ import annotations

import asyncio
import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote_plus

import aiohttp
import httpx
from yarl import URL

from ipn_gateway.guard import CONNECT_TIMEOUT_SECONDS, HEADERS, Connector, end, give_back

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

    from aiohttp import StreamReader
    from aiohttp.connector import Connection

    from ipn_gateway.guard import Guard, Protocol

ORIGINS_KEPT: Final = 2048
"""Of so many schemes, hosts and ports is remembered where to connect; the addresses behind a name are looked up for each connection."""

_LIMITS: Final = aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS)
_FORM: Final = {"Content-Type": "application/x-www-form-urlencoded"}
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.~-]*")
_EVERY: Final = {"Accept": "*/*", "Connection": "keep-alive", **HEADERS}
_HEADERS: Final = [(name.lower().encode(), f"{name}: {value}\r\n".encode()) for name, value in _EVERY.items()]


def provider_client(tls: ssl.SSLContext, guard: Guard) -> httpx.AsyncClient:  # noqa: TID251 - its home
    """A client for providers. It logs nothing, since the queries of ours carry credentials.

    Its total deadline, and whether a URL may be called at all, are the caller's. Failures of the network are aiohttp's, of which
    `ClientConnectorError` and `ConnectionTimeoutError` mean that nothing was sent, and `AddressBlocked`, `NotSent` and `TooLate`.
    """
    return _Client(transport=_Transport(Connector(tls, guard)), trust_env=False)


class Question(httpx.Request):
    """A request to an address that was vetted, with the query that it adds.

    httpx parses the whole URL where somebody wants to read it, which is only where a test stands in for a provider.
    """

    def __init__(
        self,
        method: str,
        address: httpx.URL,
        params: Mapping[str, str] | None = None,
        form: Mapping[str, str] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        before: float = math.inf,
    ) -> None:
        """A form that is bytes is sent as it is; of the headers one that is given replaces one of ours.

        At the loop's time `before` and after it nothing is sent any more.
        """
        self.before = before
        self.query = ""
        self.body = form if isinstance(form, bytes) else _urlencoded(form or {}).encode()
        super().__init__(method, address, headers=_FORM if form or isinstance(form, bytes) else None, stream=httpx.ByteStream(self.body))
        if headers:
            self.headers.update(headers)
        self.query = _urlencoded(params or {})

    def __repr__(self) -> str:
        return f"Question({self.method!r}, {str(self.address)!r})"

    @property
    def url(self) -> httpx.URL:
        """The whole of it."""
        return httpx.URL(f"{self.address}{self._joint}{self.query}") if self.query else self.address

    @url.setter
    def url(self, address: httpx.URL) -> None:
        self.address = address

    @property
    def target(self) -> bytes:
        """What of the URL goes over the wire."""
        return self.address.raw_path + f"{self._joint}{self.query}".encode() if self.query else self.address.raw_path

    @property
    def _joint(self) -> str:
        return "&" if self.address.query else "?"


def _urlencoded(fields: Mapping[str, str]) -> str:
    return "&".join([f"{_quoted(name)}={_quoted(value)}" for name, value in fields.items()])


def _quoted(text: str) -> str:
    """The same as `quote_plus`, which takes its time over what needs no quotes."""
    return text if _PLAIN.fullmatch(text) else quote_plus(text)


class _Client(httpx.AsyncClient):  # noqa: TID251 - its home
    """Of httpx's client only the choice of a transport, which is where a test puts its own."""

    async def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
        assert isinstance(request, Question)  # noqa: S101 - a programming error
        return await self._transport_for_url(request.address).handle_async_request(request)


class _Transport(httpx.AsyncBaseTransport):
    """One request and its answer, sent at most once."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._origin = lru_cache(ORIGINS_KEPT)(_origin)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request, Question)  # noqa: S101 - a programming error
        data = _written(request)
        connection = await self._connected(self._origin(request.address.scheme, request.address.netloc))
        try:
            protocol = cast("Protocol", connection.protocol)
            protocol.send(data, before=request.before)
            message, content = await protocol.answer()
        except BaseException:
            end(connection)
            raise
        return httpx.Response(message.code, headers=message.raw_headers, stream=_Body(connection, content), request=request)

    async def _connected(self, origin: aiohttp.ClientRequest) -> Connection:
        try:
            return await self._connector.connect(origin, [], _LIMITS)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError from error

    async def aclose(self) -> None:
        """Close every connection."""
        await self._connector.close()


class _Body(httpx.AsyncByteStream):
    """What follows the head of an answer, as it comes."""

    def __init__(self, connection: Connection, content: StreamReader) -> None:
        self._connection = connection
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self._content.readany():
            yield chunk

    async def aclose(self) -> None:
        """Whether or not all of it was read."""
        give_back(self._connection)


def _origin(scheme: str, netloc: bytes) -> aiohttp.ClientRequest:
    """What a connector wants to know of where to connect. It is never sent."""
    return aiohttp.ClientRequest("GET", URL(f"{scheme}://{netloc.decode()}"), loop=asyncio.get_running_loop())


def _written(request: Question) -> bytes:
    """The request as it goes over the wire: its own headers, and those of every question that it does not replace.

    Raises ValueError for a header that would begin a line of its own.
    """
    own = request.headers.raw
    names = {name.lower() for name, _ in own}
    ours = [(b"host", b"Host: %b\r\n" % request.address.netloc), *_HEADERS]
    if request.body or request.method != "GET":
        ours.append((b"content-length", b"Content-Length: %d\r\n" % len(request.body)))
    lines = [line for name, line in ours if name not in names] + [b"%b: %b\r\n" % header for header in own]
    head = b"%b %b HTTP/1.1\r\n%b" % (request.method.encode(), request.target, b"".join(lines))
    if not head.count(b"\r") == head.count(b"\n") == len(lines) + 1 or b"\0" in head:
        raise ValueError("a header is one line of text")
    return b"%b\r\n%b" % (head, request.body)
