"""The outermost layer: every request in a task of its own, which goes on when the client is gone, and one line in the log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from ipn_gateway import ids, logs
from ipn_gateway.errors import Overloaded
from ipn_gateway.web import problems

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ipn_gateway.clock import Clock
    from ipn_gateway.slots import Slots

REQUESTS_MAX: Final = 1000
"""Requests at once in this process; more are answered 503 at once, except whether it is alive."""

_ALWAYS: Final = "/healthz"


class Shield:
    """A pure ASGI layer. A use case that has begun to write is never cut off by a disconnect: it commits, and nobody hears of it."""

    def __init__(self, app: ASGIApp, slots: Slots, clock: Clock) -> None:
        self._app = app
        self._slots = slots
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; other than HTTP is passed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._slots.free <= 0 and scope["path"] != _ALWAYS:
            await problems.respond(Overloaded())(scope, receive, send)
        else:
            await asyncio.shield(self._slots.start(self._serve(scope, receive, send), name="request"))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = self._clock.monotonic_seconds()
        status = 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
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
