"""The receiver behind `ipn-gateway listen`: takes webhooks, verifies them, and hands them on to a service on this machine."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from ipn_gateway import receiver
from ipn_gateway.clock import Clock
from ipn_gateway.errors import GatewayError
from ipn_gateway.guard import CONNECT_TIMEOUT_SECONDS, HEADERS, Guard, SystemResolver, TooLate, trusted
from ipn_gateway.posting import Exchange, Poster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from starlette.requests import Request

BODY_BYTES_MAX: Final = 1024 * 1024
FORWARD_SECONDS: Final = 12
"""Less than the gateway waits for our answer by default."""

_HANDED_ON: Final = ("content-type", "user-agent", receiver.HEADER_ID, receiver.HEADER_TIMESTAMP, receiver.HEADER_SIGNATURE)
_HANDED_BACK: Final = ("content-type", "retry-after", "location")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gateway is told."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Listener:
    """Takes webhooks. Without `keys` nothing is verified, and what comes is called unverified; `say` gets a line about each."""

    keys: Sequence[str]
    say: Callable[[dict[str, Any]], None]
    clock: Clock = field(default_factory=Clock)
    forward_to: str | None = None
    poster: Poster | None = None

    async def take(self, headers: Mapping[str, str], body: bytes) -> Answer:
        """One webhook: what is not genuine is refused (401) and not handed on; what is handed on is answered as it is there."""
        said: dict[str, Any] = {"webhook_id": headers.get(receiver.HEADER_ID), "verified": None if not self.keys else False}
        try:
            if self.keys:
                receiver.verify(headers, body, self.keys, now=self.clock.now().timestamp())
                said["verified"] = True
            answer = await self._handed_on(headers, body)
        except receiver.Rejected as error:
            said["rejected"] = error.reason
            answer = Answer(401, str(error).encode())
        self.say(said | {"status": answer.status, "event": _event(body)})
        return answer

    async def _handed_on(self, headers: Mapping[str, str], body: bytes) -> Answer:
        """A service that cannot be reached is a 502: the gateway tries again."""
        if self.forward_to is None or self.poster is None:
            return Answer(200)
        kept = {"user-agent": HEADERS["User-Agent"]} | {name: headers[name] for name in _HANDED_ON if name in headers}
        over, exchange = asyncio.get_running_loop().time() + FORWARD_SECONDS, Exchange()
        try:
            async with asyncio.timeout_at(over):
                await self.poster.post(self.forward_to, kept, body, exchange, before=over, body_bytes_max=BODY_BYTES_MAX)
        except (aiohttp.ClientError, TimeoutError, TooLate, GatewayError) as error:
            if exchange.status is None:  # what fails after it changes nothing
                return Answer(502, f"{self.forward_to} did not answer: {type(error).__name__}".encode())
        back = {name: values[-1] for name in _HANDED_BACK if (values := exchange.values(name))}
        return Answer(exchange.status or 502, bytes(exchange.body), back)

    def app(self) -> Starlette:
        """The listener as an application; every path is the same to it."""

        async def receive(request: Request) -> Response:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    return Response(status_code=413)
            answer = await self.take(dict(request.headers), bytes(body))
            return Response(answer.body, answer.status, dict(answer.headers))

        return Starlette(routes=[Route("/{path:path}", receive, methods=["POST"])])


def _event(body: bytes) -> Any:
    """What the body says, if it is an object in JSON."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def line(said: Mapping[str, Any]) -> str:
    """What one webhook was, for people: a line about it, and its data below."""
    event = said["event"] or {}
    proved = {True: "verified", False: f"REJECTED ({said.get('rejected')})", None: "unverified"}[said["verified"]]
    texts = (event.get("timestamp"), event.get("type"), said["webhook_id"], proved, said["status"])
    head = _printable("  ".join("-" if text is None else str(text) for text in texts))
    return f"{head}\n  {_printable(json.dumps(event['data'], ensure_ascii=False))}" if "data" in event else head


def _printable(text: str) -> str:
    """Anybody may post here: what would steer the terminal is marked instead."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@asynccontextmanager
async def poster() -> AsyncIterator[Poster]:
    """The way on: this machine and public addresses, nothing in between."""
    resolver = SystemResolver()
    limits = aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS)
    headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
    try:
        async with Poster(trusted(), Guard(resolver, allow_loopback=True), headers, limits) as opened:
            yield opened
    finally:
        await resolver.close()
