"""The two ways out, with one guard: `send` brings an event to an endpoint (aiohttp), `ask` asks a provider (httpx's API over aiohttp).

Both have a total deadline, read a bounded part of the answer and turn every failure of the other side into a value.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Literal, Self

import aiohttp
import httpx

from ipn_gateway.addresses import AddressBlocked, refusal
from ipn_gateway.asking import Question, provider_client
from ipn_gateway.guard import (
    CONNECT_TIMEOUT_SECONDS,
    HEADERS,
    Guard,
    NotSent,
    SystemResolver,
    TooLate,
    noted,
    trusted,
)
from ipn_gateway.posting import Exchange, Poster
from ipn_gateway.providers.base import Answer, Ask, NoAnswer
from ipn_gateway.schedule import parse_retry_after

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from aiohttp.abc import AbstractResolver

    from ipn_gateway.faults import Faults
    from ipn_gateway.guard import Seen
    from ipn_gateway.settings import Settings

RECEIVED_BYTES_MAX: Final = 64 * 1024
"""How much of a receiver's answer is read; then the connection is closed."""

EXCERPT_BYTES: Final = 1024
"""How much of a receiver's answer is kept."""

URLS_KEPT: Final = 2048
"""Of so many URLs is remembered whether they may be called at all; where their names lead is looked up for each connection."""

ANSWER_BYTES_MAX: Final = 1024 * 1024
"""How much of a provider's answer is read; a longer one is no answer."""

SUCCESS: Final = range(HTTPStatus.OK, HTTPStatus.MULTIPLE_CHOICES)
"""What says that an event was taken."""

Kind = Literal["delivered", "refused", "timeout", "connect_failed", "tls_failed", "disconnected", "protocol_error", "blocked"]

NEVER_CONNECTED: Final[frozenset[Kind]] = frozenset({"connect_failed", "tls_failed", "blocked"})
"""These kinds prove that the request never left."""


# From the class of a failure to the attempt's outcome and its error. Narrow classes first: they inherit from the wide ones.
FAILURES: Final[tuple[tuple[type[Exception], Kind, str], ...]] = (
    (AddressBlocked, "blocked", "address_not_allowed"),
    (aiohttp.InvalidURL, "blocked", "url_not_allowed"),
    (aiohttp.NonHttpUrlClientError, "blocked", "url_not_allowed"),
    (httpx.InvalidURL, "blocked", "url_not_allowed"),
    (UnicodeError, "blocked", "url_not_allowed"),
    (aiohttp.ClientConnectorDNSError, "connect_failed", "name_not_resolved"),
    (aiohttp.ClientConnectorCertificateError, "tls_failed", "certificate_refused"),
    (aiohttp.ClientSSLError, "tls_failed", "handshake_failed"),
    (aiohttp.ClientConnectorError, "connect_failed", "not_connected"),
    (aiohttp.ConnectionTimeoutError, "connect_failed", "connect_timeout"),
    (TimeoutError, "timeout", "total_timeout"),
    (httpx.TimeoutException, "timeout", "total_timeout"),
    (aiohttp.ClientPayloadError, "disconnected", "answer_cut"),
    (aiohttp.ClientConnectionError, "disconnected", "connection_lost"),
    (httpx.TransportError, "disconnected", "connection_lost"),
    (aiohttp.ClientError, "protocol_error", "not_http"),
)


@dataclass(slots=True)  # not frozen: one for every event, and that takes twice as long to make
class DeliveryRequest:
    """One attempt: the bytes and headers to post. `sent_at` is database time; a date in `Retry-After` is read against it.

    `ends_by` is the loop's time at which the attempt must be over, whatever becomes of it: where its lease ends.
    """

    url: str = field(repr=False)  # paths of endpoints may be secret
    body: bytes = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    sent_at: datetime
    ends_by: float = math.inf


@dataclass(slots=True)
class Outcome:
    """What became of one attempt; `delivered` is any 2xx, and nothing else is.

    `status_code` is None where no answer came; `error` is a short code, with a word of the system after a colon; `address` is the
    one connected to, None where nothing was; `retry_after_seconds` is what a refusal asked for, 0 to 24 h.
    """

    kind: Kind
    status_code: int | None = None
    error: str | None = None
    excerpt: str | None = None
    address: str | None = None
    duration_ms: int = 0
    retry_after_seconds: float | None = None


class Transport:
    """Opened once per process. `assert_no_transaction` raises where this task holds a transaction: that is a bug, never an outcome."""

    _deliveries: Poster
    _new_poster: Callable[[], Poster]
    _questions: httpx.AsyncClient  # noqa: TID251 - asking.py makes it

    def __init__(
        self,
        settings: Settings,
        faults: Faults,
        *,
        assert_no_transaction: Callable[[], None],
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`resolver` and `tls` replace the system's resolver and certificates; the guard and the verification stay."""
        self._settings = settings
        self._faults = faults
        self._assert_no_transaction = assert_no_transaction
        self._resolver = resolver
        self._tls = tls
        self._closing = contextlib.AsyncExitStack()
        self._refusal = lru_cache(URLS_KEPT)(partial(refusal, allow_loopback=settings.allow_loopback_endpoints))
        self._limits = aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS, ceil_threshold=math.inf)

    async def open(self) -> None:
        """Make both clients; call inside the event loop that will use them."""
        tls = await asyncio.to_thread(trusted) if self._tls is None else self._tls
        resolver = self._resolver or SystemResolver()
        self._closing.push_async_callback(resolver.close)
        guard = Guard(resolver, allow_loopback=self._settings.allow_loopback_endpoints)
        self._new_poster = partial(Poster, tls, guard, HEADERS | {"Accept": "*/*"}, self._limits)
        self._deliveries = self._new_poster()
        self._closing.push_async_callback(self._deliveries.close)
        self._questions = provider_client(tls, Guard(resolver, allow_loopback=True))
        self._closing.push_async_callback(self._questions.aclose)

    async def close(self) -> None:
        """Close every connection."""
        await self._closing.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, request: DeliveryRequest, *, seen: Seen | None = None) -> Outcome:
        """Post an event to an endpoint, within `IPN_DELIVERY_TIMEOUT_SECONDS`; every failure of the other side is an outcome.

        The status line decides. What happens to the body after it, the deadline included, changes nothing: a receiver that
        said 2xx has the event, and one that said anything else has refused it. With `seen` the connection is a new one, and what
        there is to see on the way is noted there. A kept connection that had ended costs nothing: the same bytes go out once more.

        Raises `TooLate`, with nothing sent, when the whole of `IPN_DELIVERY_TIMEOUT_SECONDS` does not fit in before `ends_by`.
        """
        self._assert_no_transaction()
        await self._faults.at("transport.send:before")
        loop = asyncio.get_running_loop()
        started = loop.time()
        over = started + self._settings.delivery_timeout_seconds
        if over > request.ends_by:
            raise TooLate
        exchange, failure = Exchange(), None
        try:
            async with asyncio.timeout_at(over):
                await (
                    self._post(self._deliveries, request, exchange, over) if seen is None else self._watched(seen, request, exchange, over)
                )
        except (AddressBlocked, aiohttp.ClientError, TimeoutError) as error:
            failure = error
        outcome = _outcome(request, exchange, failure, duration_ms=round((loop.time() - started) * 1000))
        await self._faults.at("transport.send:after")
        return outcome

    async def _watched(self, seen: Seen, request: DeliveryRequest, exchange: Exchange, over: float) -> None:
        loop, token = asyncio.get_running_loop(), noted.set(seen)
        seen.began_at = loop.time()
        try:
            async with self._new_poster() as own:
                try:
                    await self._post(own, request, exchange, over)
                finally:
                    seen.ended_at = loop.time()
        finally:
            noted.reset(token)

    async def _post(self, poster: Poster, request: DeliveryRequest, exchange: Exchange, over: float) -> None:
        if self._refusal(request.url):
            raise aiohttp.InvalidURL(request.url)
        await poster.post(request.url, request.headers, request.body, exchange, before=over, body_bytes_max=RECEIVED_BYTES_MAX)

    def ask_for(self, *, timeout_seconds: float) -> Ask:
        """The way to a provider that an adapter is given for one verdict.

        `timeout_seconds` is the total limit of all its questions, counted from the first, so that a verdict never outlives a lease.
        """
        deadline: float | None = None

        async def ask(
            method: Literal["GET", "POST"],
            url: str,
            *,
            params: Mapping[str, str] | None = None,
            form: Mapping[str, str] | bytes | None = None,
            headers: Mapping[str, str] | None = None,
        ) -> Answer | NoAnswer:
            nonlocal deadline
            now = asyncio.get_running_loop().time()
            deadline = now + timeout_seconds if deadline is None else deadline
            return await self.ask(method, url, params=params, form=form, headers=headers, timeout_seconds=max(0.0, deadline - now))

        return ask

    async def ask(
        self,
        method: Literal["GET", "POST"],
        url: str,
        *,
        timeout_seconds: float,
        params: Mapping[str, str] | None = None,
        form: Mapping[str, str] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer | NoAnswer:
        """One question to a provider, sent at most once. The cause of a `NoAnswer` is an outcome's kind, `too_large` or `encoded`."""
        self._assert_no_transaction()
        await self._faults.at("transport.ask:before")
        over = asyncio.get_running_loop().time() + timeout_seconds
        try:
            async with asyncio.timeout_at(over):
                answer = await self._asked(method, url, params, form, headers, before=over)
        except (TooLate, NotSent) as error:
            answer = NoAnswer("timeout" if isinstance(error, TooLate) else "disconnected", sent=False)
        except (AddressBlocked, httpx.HTTPError, httpx.InvalidURL, aiohttp.ClientError, TimeoutError, UnicodeError) as error:
            kind, _ = failure_of(error)
            answer = NoAnswer(kind, sent=kind not in NEVER_CONNECTED)
        await self._faults.at("transport.ask:after")
        return answer

    async def _asked(
        self,
        method: str,
        url: str,
        params: Mapping[str, str] | None,
        form: Mapping[str, str] | bytes | None,
        headers: Mapping[str, str] | None,
        *,
        before: float,
    ) -> Answer | NoAnswer:
        if (address := _vetted(url)) is None:
            return NoAnswer("blocked", sent=False)
        response = await self._questions.send(Question(method, address, params, form, headers, before=before))
        assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101 - our transport's, or a test's
        try:
            return await _answer(response, response.stream)
        finally:
            await response.stream.aclose()


@lru_cache(URLS_KEPT)
def _vetted(url: str) -> httpx.URL | None:
    """The URL as httpx reads it, None when it may not be called. The query that a question adds leads nowhere else."""
    address = httpx.URL(url)
    return None if refusal(str(address), allow_loopback=True, any_port=True) else address


def failure_of(error: BaseException | None) -> tuple[Kind, str]:
    """The outcome that a failure means, and its error: a code, and the system's own word where there is one."""
    kind, code = next(((kind, code) for failure, kind, code in FAILURES if isinstance(error, failure)), ("protocol_error", "unknown"))
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
    word = (
        getattr(inner, "verify_message", None) or getattr(inner, "reason", None) or errno.errorcode.get(getattr(inner, "errno", None) or 0)
    )
    return kind, f"{code}: {word}"[:200] if word else code


def _outcome(request: DeliveryRequest, exchange: Exchange, failure: Exception | None, *, duration_ms: int) -> Outcome:
    """The status line decides: what failed after it changes nothing."""
    if (status := exchange.status) is None:
        kind, code = failure_of(failure)
        return Outcome(kind, error=code, address=exchange.address, duration_ms=duration_ms)
    excerpt = exchange.body[:EXCERPT_BYTES].decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    if status in SUCCESS:
        return Outcome("delivered", status, excerpt=excerpt, address=exchange.address, duration_ms=duration_ms)
    wait = parse_retry_after(exchange.values("Retry-After"), request.sent_at)
    return Outcome("refused", status, None, excerpt, exchange.address, duration_ms, wait)


async def _answer(response: httpx.Response, stream: httpx.AsyncByteStream) -> Answer | NoAnswer:
    response.headers.encoding = "latin-1"  # or httpx would look for one
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        return NoAnswer("encoded")  # we asked for none, and nothing here unpacks it
    body = bytearray()
    async for chunk in stream:
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            return NoAnswer("too_large")
    media_type, _, _ = response.headers.get("Content-Type", "").partition(";")
    return Answer(response.status_code, media_type.strip().lower(), bytes(body))
