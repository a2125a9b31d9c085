"""How connections out are made: the resolver with the guard in it, and one client per policy.

A client follows no redirect, keeps no cookie, unpacks nothing, reads no proxy from the environment and verifies TLS always. One for
providers repeats nothing by itself. One for endpoints sends the same bytes once more, on a fresh connection, where a kept one turns out to
have ended: a receiver may end an idle connection whenever it likes (RFC 9112, 9.3.1), and it knows an event again by its `webhook-id`.

Each policy has a connector of its own, because a kept connection is used again without asking the resolver: what one policy opened the
other must not get.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import certifi
import httpx
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from httpx_aiohttp import AiohttpTransport

from ipn_gateway import __version__
from ipn_gateway.addresses import AddressBlocked, is_allowed, is_localhost, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Broken(aiohttp.ClientConnectionError):
    """The connection broke after it was made; the request may have been received."""


class TooLate(Exception):
    """What was to be sent may not be sent any more; nothing was."""


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


peer_addresses: ContextVar[list[str]] = ContextVar("peer")
"""Where a response notes whom it is connected to; read also when no answer comes."""


class _Response(aiohttp.ClientResponse):
    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        peer = connection.transport.get_extra_info("peername") if connection.transport else None
        if peer and (peers := peer_addresses.get(None)) is not None:
            peers.append(peer[0])
        if connection.transport and (seen := noted.get()):
            seen.connected_at = asyncio.get_running_loop().time()
            if tls := connection.transport.get_extra_info("ssl_object"):
                seen.tls_version = tls.version()
                seen.certificate_ends = (tls.getpeercert() or {}).get("notAfter")
        return await super().start(connection)


_END_OF_HEAD: Final = b"\r\n\r\n"

send_before: ContextVar[float] = ContextVar("send_before", default=math.inf)
"""The time of the loop from which on a request must not leave any more, however long its connection took, or its process was frozen."""

_used: ContextVar[_Protocol | None] = ContextVar("used", default=None)
_fresh: ContextVar[bool] = ContextVar("fresh", default=False)


class _Request(aiohttp.ClientRequest):
    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        if asyncio.get_running_loop().time() >= send_before.get():
            raise TooLate
        return await super().send(conn)


class _Protocol(ResponseHandler):
    """One connection, which takes one answer for each request. Who says more, or never comes to the point, is hung up on.

    aiohttp itself would read interim answers without end. And what came unasked, however long before, it would take for the answer to the
    next request: an event that is refused would count as delivered.
    """

    _is_due = False
    _head_bytes = 0
    _requests = 0

    @property
    def was_kept_in_vain(self) -> bool:
        """Whether it had served a request before, and gave not one byte of an answer to this one."""
        return self._requests > 1 and self._head_bytes == 0

    def set_response_params(self, **given: Any) -> None:
        """A request is about to be sent."""
        self._is_due, self._head_bytes = True, 0
        self._requests += 1
        _used.set(self)
        super().set_response_params(**given)

    def data_received(self, data: bytes) -> None:
        """Head by head, so that an answer is known before what follows it breaks, such as a body where there must be none."""
        begun = 0
        while begun < len(data) and self.exception() is None:
            found = data.find(_END_OF_HEAD, begun) if self._is_due else -1
            ended = len(data) if found < 0 else found + len(_END_OF_HEAD)
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
        status = data[0].code
        self._is_due = status // 100 == 1 and status != HTTPStatus.SWITCHING_PROTOCOLS
        super().feed_data(data, size)

    def _hang_up(self, why: str) -> None:
        self.set_exception(HttpProcessingError(message=why))
        if self.transport is not None:
            self.transport.close()


class _Connector(aiohttp.TCPConnector):
    """Any number of connections, since slots limit what is in flight; no name is remembered."""

    def __init__(self, tls: ssl.SSLContext, guard: Guard) -> None:
        super().__init__(resolver=guard, use_dns_cache=False, ssl=tls, limit=0)
        protocol: type[ResponseHandler] = _Protocol
        self._factory = partial(protocol, loop=self._loop)

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        """A kept connection, unless it must be a fresh one."""
        return None if _fresh.get() else await super()._get(key, traces)


async def _never_repeat(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A GET is sent once more by aiohttp when the connection breaks, even if the first was received; some providers refund by GET."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise Broken from error


async def _repeat_on_a_fresh_connection(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Once, within the same deadline, where a kept connection ended or was reset before the first byte of an answer."""
    _used.set(None)
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, TimeoutError):
        raise
    except aiohttp.ClientConnectionError:
        if (used := _used.get()) is None or not used.was_kept_in_vain:
            raise
    token = _fresh.set(True)
    try:
        return await handler(request)
    finally:
        _fresh.reset(token)


def delivery_session(tls: ssl.SSLContext, guard: Guard, *, repeats: bool = True) -> aiohttp.ClientSession:  # noqa: TID251 - its home
    """A client for endpoints; without `repeats` whatever is sent is sent at most once."""
    return aiohttp.ClientSession(  # noqa: TID251 - its home
        connector=_Connector(tls, guard),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=HEADERS,
        auto_decompress=False,
        trust_env=False,
        request_class=_Request,
        response_class=_Response,
        middlewares=(_repeat_on_a_fresh_connection, _never_repeat) if repeats else (_never_repeat,),
    )


def provider_client(tls: ssl.SSLContext, guard: Guard) -> httpx.AsyncClient:  # noqa: TID251 - its home
    """A client for providers: httpx's API over a session like the above. Its total deadline is the caller's."""
    logging.getLogger("httpx").addFilter(_without_query)
    return httpx.AsyncClient(  # noqa: TID251 - its home
        transport=AiohttpTransport(verify=tls, client=delivery_session(tls, guard, repeats=False)),
        headers=HEADERS,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS, pool=CONNECT_TIMEOUT_SECONDS),
        follow_redirects=False,
        trust_env=False,
    )


@cache
def trusted() -> ssl.SSLContext:
    """The system's certificates and certifi's: a slim image may have none, and a company's own are in the system's.

    They are read once in the life of a process.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


def _without_query(record: logging.LogRecord) -> bool:
    """The URL of each request is logged by httpx; ours carry credentials in the query."""
    if isinstance(record.args, tuple):
        record.args = tuple(part.copy_with(query=None) if isinstance(part, httpx.URL) else part for part in record.args)
    return True
