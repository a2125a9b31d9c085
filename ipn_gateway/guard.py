"""How connections out are made, and used for a request: the resolver with the guard in it, the connector behind it, its connections.

The two clients that stand on it are in `posting` and `asking`. Nothing here follows a redirect, keeps a cookie, unpacks an answer, reads
a proxy from the environment or sends anything again; TLS is verified always.

Each policy has a connector of its own, because a kept connection is used again without asking the resolver: what one policy opened the
other must not get.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp
import certifi
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError

from ipn_gateway import __version__
from ipn_gateway.addresses import AddressBlocked, is_allowed, is_localhost, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiohttp import StreamReader
    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage
    from aiohttp.tracing import Trace

HEADERS: Final = MappingProxyType({"User-Agent": f"ipn-gateway/{__version__}", "Accept-Encoding": "identity"})
CONNECT_TIMEOUT_SECONDS: Final = 5.0
"""Limit of the look-up, the connection and the TLS handshake together; the total deadline holds beside it."""

LOOKUPS_MAX: Final = 512
"""How many names are looked up at once: as many as attempts run, so that names whose servers hang hold up nobody else's attempts."""


UNSEEN_BYTES_MAX: Final = 64 * 1024
"""So much of a request the system takes at once."""

HEAD_BYTES_MAX: Final = 64 * 1024
"""How much is read before the head of an answer has ended, interim answers (1xx, RFC 9110, 15.2) and all."""


@dataclass(slots=True)
class Seen:
    """What there was to see on the way to an answer. Times are the loop's, in seconds; None where it did not come to that.

    `addresses` are those that may be called; `refused` is how many the name leads to when it is refused for one of them.
    """

    began_at: float = 0.0
    addresses: list[str] = field(default_factory=list)
    refused: int = 0
    resolved_at: float | None = None
    connected_at: float | None = None
    tls_version: str | None = None
    certificate_ends: str | None = None
    ended_at: float = 0.0


noted: ContextVar[Seen | None] = ContextVar("noted", default=None)
"""Where it is noted, if somebody wants to know."""


class TooLate(Exception):
    """What was to be sent may not be sent any more; nothing was."""


class NotHttp(aiohttp.ClientError):
    """What came is no answer."""


class Garbled(aiohttp.ClientError):
    """What follows the head of an answer is not what the head says."""


class SystemResolver(AbstractResolver):
    """`getaddrinfo` in threads of its own, once at a time for a name: names whose servers hang must not hold up everybody's."""

    def __init__(self, look_up: Callable[..., list[Any]] = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self._threads = ThreadPoolExecutor(LOOKUPS_MAX, thread_name_prefix="resolver")
        self._running: dict[tuple[str, int, int], asyncio.Future[list[Any]]] = {}

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        """The numeric addresses of a name. Raises OSError where there are none."""
        infos = await asyncio.shield(self._shared(host, port, family))
        return [
            ResolveResult(hostname=host, host=address[0], port=address[1], family=kind, proto=proto, flags=socket.AI_NUMERICHOST)
            for kind, _, proto, _, address in infos
        ]

    def _shared(self, host: str, port: int, family: socket.AddressFamily) -> asyncio.Future[list[Any]]:
        key = (host, port, family)
        if (running := self._running.get(key)) is None:
            arguments = (host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, *arguments)
            self._running[key] = running
            running.add_done_callback(lambda done: self._ended(key, done))
        return running

    def _ended(self, key: tuple[str, int, int], done: asyncio.Future[list[Any]]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # nobody may be waiting any more: then it is nobody's

    async def close(self) -> None:
        """Let the threads end; one that hangs in the system is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Guard(AbstractResolver):
    """Passes a name's addresses on if the policy allows them all: one that does not belong there means a name that is not to be trusted.

    The connector connects to what comes out of here: vetted is connected.
    """

    def __init__(self, resolver: AbstractResolver, *, allow_loopback: bool) -> None:
        self._resolver = resolver
        self._allow_loopback = allow_loopback

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        """The addresses of a name. Raises AddressBlocked, which is no OSError, if one of them may not be called."""
        try:
            found = await self._resolver.resolve(host, port, family)
        except UnicodeError as error:  # getaddrinfo's word for a name that cannot be encoded
            raise socket.gaierror(socket.EAI_NONAME, "not a name") from error
        addresses = list(dict.fromkeys(result["host"] for result in found))
        allowed = all(self._is_allowed(host, address) for address in addresses)
        if seen := noted.get():
            seen.addresses, seen.refused = (addresses, 0) if allowed else ([], len(addresses))
            seen.resolved_at = asyncio.get_running_loop().time()
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        if not allowed:
            raise AddressBlocked(host=host)
        return found

    def _is_allowed(self, host: str, address: str) -> bool:
        """`localhost` may be called in cleartext, so it must not lead anywhere else, whatever a resolver says."""
        return is_allowed(address, allow_loopback=self._allow_loopback) and (is_loopback(address) or not is_localhost(host))

    async def close(self) -> None:
        """The resolver behind is its owner's to close."""


_END_OF_HEAD: Final = b"\r\n\r\n"

_fresh: ContextVar[bool] = ContextVar("fresh", default=False)


@contextmanager
def fresh() -> Iterator[None]:
    """Within it a connector gives out no connection that it has kept."""
    token = _fresh.set(True)
    try:
        yield
    finally:
        _fresh.reset(token)


def is_interim(status: int) -> bool:
    """Whether an answer is still to come (1xx, RFC 9110, 15.2); who switches protocols has answered."""
    return status // 100 == 1 and status != HTTPStatus.SWITCHING_PROTOCOLS


class NotSent(aiohttp.ClientConnectionResetError):
    """The connection had ended before anything of the request was sent."""


class Protocol(ResponseHandler):
    """One connection, which takes one answer for each request. Who says more, or never comes to the point, is hung up on.

    aiohttp itself would read interim answers without end. And what came unasked, however long before, it would take for the answer to the
    next request: an event that is refused would count as delivered.
    """

    address: str | None = None
    """Of whom it is connected to."""

    _is_due = False
    _head_bytes = 0
    _request_bytes = 0
    _requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is connected, and where there is TLS, that is agreed on."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else None

    def note(self, seen: Seen) -> None:
        """Write down how it is connected."""
        seen.connected_at = asyncio.get_running_loop().time()
        if self.transport is not None and (tls := self.transport.get_extra_info("ssl_object")):
            seen.tls_version = tls.version()
            seen.certificate_ends = (tls.getpeercert() or {}).get("notAfter")

    @property
    def was_kept_in_vain(self) -> bool:
        """Whether it had served a request before, and gave not one byte of an answer to this one."""
        return self._requests > 1 and self._head_bytes == 0

    def send(self, data: bytes, *, before: float = math.inf) -> None:
        """Send a request, all at once: what is not taken at once waits in memory, where it was anyway, and its answer is read meanwhile.

        Raises `TooLate` at the loop's time `before` or after it, however long the connection took, or the process was frozen; and
        `NotSent`.
        """
        if asyncio.get_running_loop().time() >= before:
            raise TooLate
        self.set_response_params(read_until_eof=True, auto_decompress=False)
        self._request_bytes = len(data)
        if self.transport is None or self.transport.is_closing():
            raise NotSent
        self.transport.write(data)

    @property
    def has_a_rest(self) -> bool:
        """Whether something of the request may be unsent, or of the answer unread. Over TLS nobody sees what waits below it to be sent."""
        if self.transport is None or self.should_close:
            return True
        is_secret = self.transport.get_extra_info("ssl_object") is not None
        return self.transport.get_write_buffer_size() > 0 or (is_secret and self._request_bytes > UNSEEN_BYTES_MAX)

    async def answer(self) -> tuple[RawResponseMessage, StreamReader]:
        """The head of the answer, behind interim ones, and what follows it. Raises `NotHttp`, and whatever broke the connection."""
        try:
            message, content = await self.read()
            while is_interim(message.code):
                message, content = await self.read()
        except HttpProcessingError as error:
            raise NotHttp from error
        return message, content

    def set_response_params(self, **given: Any) -> None:
        """A request is about to be sent."""
        self._is_due, self._head_bytes = True, 0
        self._requests += 1
        super().set_response_params(**given)

    def data_received(self, data: bytes) -> None:
        """Head by head, so that an answer is known before what follows it breaks, such as a body where there must be none."""
        if not data:
            super().data_received(data)  # aiohttp's own: the parser goes on with what it kept back
        begun, found = 0, 0
        while begun < len(data) and self.exception() is None:
            ended = len(data)
            if self._is_due:
                if begun >= found >= 0:  # once for each head, not for each line of one: who answers with lines alone costs nothing
                    found = data.find(_END_OF_HEAD, begun)
                # By lines where it does not end as it should, or in another piece.
                ended = found + len(_END_OF_HEAD) if found >= begun else data.find(b"\n", begun) + 1 or len(data)
            super().data_received(data[begun:ended])
            self._head_bytes += ended - begun
            if self._is_due and self._head_bytes > HEAD_BYTES_MAX:
                self._hang_up("no end of the head")
            begun = ended
        if self.exception() is not None and self._payload is not None and not self._payload.is_eof():
            self._payload.set_exception(Garbled())  # or its reader would wait for a rest that never comes

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """The head of an answer was read."""
        if not self._is_due:
            self._hang_up("more answers than requests")
            return
        self._is_due = is_interim(data[0].code)
        super().feed_data(data, size)

    def _hang_up(self, why: str) -> None:
        self.set_exception(HttpProcessingError(message=why))
        if self.transport is not None:
            self.transport.close()


class Connector(aiohttp.TCPConnector):
    """Any number of connections, since slots limit what is in flight; no name is remembered."""

    def __init__(self, tls: ssl.SSLContext, guard: Guard) -> None:
        super().__init__(resolver=guard, use_dns_cache=False, ssl=tls, limit=0)
        protocol: type[ResponseHandler] = Protocol
        self._factory = partial(protocol, loop=self._loop)

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        """A kept connection, unless it must be a fresh one."""
        return None if _fresh.get() else await super()._get(key, traces)


def give_back(connection: Connection) -> None:
    """To be used again, unless there is a rest of the request or of the answer."""
    if cast("Protocol", connection.protocol).has_a_rest:
        end(connection)
    else:
        connection.release()


def end(connection: Connection) -> None:
    """What was not sent yet is not sent any more, and nothing is waited for: a polite end of TLS would read on for half a minute."""
    if connection.transport is not None:
        connection.transport.abort()
    connection.close()


@cache
def trusted() -> ssl.SSLContext:
    """The system's certificates and certifi's: a slim image may have none, and a company's own are in the system's.

    They are read once in the life of a process.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context
