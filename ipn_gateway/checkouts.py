"""Checkout: the provider's payment page of an order, opened under an Idempotency-Key.

The order is looked at, the provider is asked with no transaction open, and the order is looked at again: whoever was first keeps the page,
and what was paid or closed meanwhile gets none. A second session at the provider moves no money, so that a lost answer is asked for again.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import logs, objects, orders
from ipn_gateway.errors import NotFound, Overloaded, StateConflict
from ipn_gateway.operations import STARTED, Advance, Downstream, Finished, Operation, Phase, Retry
from ipn_gateway.providers.base import Declined, NoOutcome, SessionRequest
from ipn_gateway.states import UNPAID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.db import Transaction
    from ipn_gateway.decisions import LockedOrder
    from ipn_gateway.operations import Step, Work
    from ipn_gateway.providers.base import SessionAnswer
    from ipn_gateway.sources import SourceAccount
    from ipn_gateway.transport import Transport

ASKING: Final = "asking"

CHECKOUT: Final = Operation(
    name="POST /v1/orders/{order_id}/checkout",
    fields={"customer": "json", "product": "json"},
    downstream=Downstream.IDEMPOTENT,
    key_required=True,
    money=True,
    phases=(STARTED, ASKING),
    intents=frozenset({ASKING}),
)

PAGE_MINUTES: Final = 15
"""How long the same page is given, from when it was opened."""

RETRY_SECONDS: Final = 5  # what a 503 asks for: the provider was unclear a moment ago


def session_request(order: objects.Order, customer: Mapping[str, str], product: Mapping[str, str], *, public_url: str) -> SessionRequest:
    """What the provider is asked for. Amount and currency of an order never change; `public_url` is where the service is reached."""
    return SessionRequest(
        order_id=order.order_id,
        amount=Decimal(order.amount),
        currency=order.currency,
        customer=customer,
        product=product,
        success_url=f"{public_url}/return/{order.source}/success",
        fail_url=f"{public_url}/return/{order.source}/fail",
        cancel_url=f"{public_url}/return/{order.source}/cancel",
        notification_url=f"{public_url}/ipn/{order.source}",
    )


def refusal(order: LockedOrder) -> str | None:
    """Why nobody should be sent to pay this order, as a sentence; None when a payment of its amount would be booked without a person."""
    if order.status not in UNPAID:
        return "This order is paid."
    if order.reason in {"merchant", "expired"} or (order.expires_at is not None and order.expires_at <= order.now):
        return "This order is closed: it was cancelled here, or its expires_at has passed."
    if order.amount_paid:
        return "A part of this order is paid, and the provider would ask for all of it again."
    return None


class Checkout:
    """One request for a payment page of an order, at the account that the order names."""

    def __init__(self, account: SourceAccount, request: SessionRequest, transport: Transport, *, timeout_seconds: float) -> None:
        """`timeout_seconds` is the total limit of the question to the provider."""
        self._account = account
        self._request = request
        self._transport = transport
        self._timeout_seconds = timeout_seconds

    def phases(self) -> dict[str, Phase]:
        """The phases of `CHECKOUT`."""
        return {STARTED: Phase("checkouts.start", self._start), ASKING: Phase("checkouts.settle", self._settle, self._ask)}

    async def _start(self, tx: Transaction, _: Work, __: None) -> Step:
        """Nobody is asked for a page that there is, or that the provider would refuse."""
        if page := await self._standing(tx):
            return Finished.shown(page)
        if problem := self._account.provider.order_amount_problem(self._request.amount, self._request.currency):
            raise StateConflict(f"The amount of this order {problem}.")
        return Advance(ASKING)

    async def _ask(self, _: Work) -> SessionAnswer:
        logs.count("provider.sessions")
        ask = self._transport.ask_for(timeout_seconds=self._timeout_seconds)
        return await self._account.provider.open_session(ask, self._account.config, self._request)

    async def _settle(self, tx: Transaction, _: Work, answer: SessionAnswer) -> Step:
        """What is true of the order now comes before what the provider said."""
        if page := await self._standing(tx):
            return Finished.shown(page)
        if isinstance(answer, Declined):
            sentence = f"The provider opened no payment page ({answer.code}). Send a corrected request with a new key."
            raise StateConflict(sentence, members={"provider_code": answer.code})
        if isinstance(answer, NoOutcome):
            sentence = "The provider gave no clear answer, so there is no payment page yet. Send the same request with the same key again."
            return Retry(STARTED, Overloaded(sentence, retry_after_seconds=RETRY_SECONDS, provider_cause=answer.cause))
        return Finished.shown(await self._kept(tx, answer.redirect_url))

    async def _standing(self, tx: Transaction) -> objects.Checkout | None:
        """The page that there is, or None; the order is locked. Raises `StateConflict` for one that nobody should be sent to pay."""
        order = await orders.lock(tx, self._account.tenant_id, self._request.order_id)
        if order is None:
            raise NotFound
        if sentence := refusal(order):
            raise StateConflict(sentence)
        row = await tx.one(dict, _STANDING, self._order())
        assert row is not None  # noqa: S101 - it is locked
        if row["disabled"]:
            raise StateConflict("The source of this order is disabled; what is paid there now is held.")
        return objects.Checkout(redirect_url=row["url"], expires_at=row["expires_at"]) if row["is_open"] else None

    async def _kept(self, tx: Transaction, redirect_url: str) -> objects.Checkout:
        row = await tx.one(dict, _KEEP, self._order() | {"url": redirect_url, "minutes": PAGE_MINUTES})
        assert row is not None  # noqa: S101 - it is locked
        logs.get("checkouts").info("checkout.opened", order_id=self._request.order_id, source=self._account.name)
        return objects.Checkout(redirect_url=redirect_url, expires_at=row["expires_at"])

    def _order(self) -> dict[str, Any]:
        return {"tenant_id": self._account.tenant_id, "order_id": self._request.order_id}


_STANDING: Final = """
SELECT o.checkout_url AS url, o.checkout_expires_at AS expires_at, coalesce(o.checkout_expires_at > ipn_now(), false) AS is_open,
       s.disabled_at IS NOT NULL AS disabled
  FROM orders AS o JOIN sources AS s ON s.tenant_id = o.tenant_id AND s.name = o.source_id
 WHERE o.tenant_id = %(tenant_id)s AND o.order_id = %(order_id)s"""

_KEEP: Final = """
UPDATE orders SET checkout_url = %(url)s, checkout_expires_at = ipn_now() + %(minutes)s * interval '1 minute'
 WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s
RETURNING checkout_expires_at AS expires_at"""
