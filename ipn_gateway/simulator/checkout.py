"""The hosted payment page: what the customer sees, and what each button does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ipn_gateway.simulator import pages
from ipn_gateway.simulator.connections import form_of
from ipn_gateway.simulator.payments import Wanted
from ipn_gateway.simulator.sslcommerz import ipn_fields, sign

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from ipn_gateway.simulator.bank import Bank
    from ipn_gateway.simulator.sender import Sender
    from ipn_gateway.simulator.sessions import Session

# Button -> status of the attempt, and where the browser goes. Who leaves has no browser to send anywhere.
OUTCOMES: Final = {
    "pay": ("VALID", "success_url"),
    "risky": ("VALID", "success_url"),
    "fail": ("FAILED", "fail_url"),
    "cancel": ("CANCELLED", "cancel_url"),
    "unattempted": ("UNATTEMPTED", ""),
    "expire": ("EXPIRED", "fail_url"),
}
_SHOWN_MAX: Final = 50


@dataclass(slots=True)
class Checkout:
    """The pages for people; a button sends the notification and the browser on their separate ways."""

    bank: Bank
    sender: Sender
    ipn_url: str

    def routes(self) -> list[Route]:
        """The payment page and an index of what happened."""
        return [
            Route("/", self.index, methods=["GET"]),
            Route("/pay/{key}", self.show, methods=["GET"]),
            Route("/pay/{key}", self.act, methods=["POST"]),
        ]

    async def index(self, _: Request) -> Response:
        """The newest sessions and attempts."""
        sessions = islice(reversed(self.bank.sessions.values()), _SHOWN_MAX)
        attempts = [payment.attempt for payment in self.bank.payments[: -_SHOWN_MAX - 1 : -1]]
        return pages.index_page(sessions, attempts)

    async def show(self, request: Request) -> Response:
        """The payment page of a session."""
        session = self._session(request)
        return pages.payment_page(session) if session and not session.closed else pages.closed_page(session)

    async def act(self, request: Request) -> Response:
        """What the customer did: an attempt, its notification, and the way back to the merchant."""
        session = self._session(request)
        if session is None or session.closed:
            return pages.closed_page(session)
        action = (await form_of(request)).get("action", "")
        if action not in OUTCOMES:
            return PlainTextResponse(f"action must be one of {', '.join(OUTCOMES)}", status_code=400)
        status, way_back = OUTCOMES[action]
        attempt = self.bank.attempt(_wanted(session, status, risky=action == "risky"), session)
        fields = sign(ipn_fields(attempt), self.bank.stores[session.store_id])
        if ipn_url := session.urls["ipn_url"] or self.ipn_url:
            self.sender.send(ipn_url, fields)
        url = session.urls.get(way_back, "")
        return pages.return_page(url, fields) if url else pages.finished_page(attempt)

    def _session(self, request: Request) -> Session | None:
        return self.bank.sessions.get(request.path_params["key"])


def _wanted(session: Session, status: str, *, risky: bool) -> Wanted:
    return Wanted(
        store_id=session.store_id,
        tran_id=session.tran_id,
        amount=session.amount,
        currency=session.currency,
        status=status,
        risky=risky,
        values=session.values,
    )
