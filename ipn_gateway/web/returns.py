"""`GET|POST /return/{source}/{success|fail|cancel}`: the provider sends a customer's browser back.

The posts come from another site, without a cookie of ours and without a token, so they are exempt from CSRF checks as `/ipn` is: they are
stored and proved like a notification, which no cookie could do. Nobody is sent anywhere but to the return_url that the merchant registered.
Answers are for people: a redirect or a page, never a problem document.
"""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from ipn_gateway import ids, logs, notifications, reconciliation, returns
from ipn_gateway.errors import MethodNotAllowed, NotFound, PayloadTooLarge
from ipn_gateway.states import OrderStatus
from ipn_gateway.web import pages, problems
from ipn_gateway.web.deps import BODY_BYTES_MAX, client_address, runtime
from ipn_gateway.web.listener import account_of, inbound, whole_body
from ipn_gateway.web.shield import REQUESTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ipn_gateway.notifications import Receipt
    from ipn_gateway.returns import Standing
    from ipn_gateway.runtime import Runtime
    from ipn_gateway.sources import SourceAccount

WAITING_MAX: Final = 200
"""With more requests than this at once in the process nobody waits any more: browsers are told what is known and go."""

_ENDS: Final = frozenset({"success", "fail", "cancel"})
_OTHERS: Final = ["HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"]
_HEADERS: Final = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_KEPT: Final = ("Allow", "Connection", "Retry-After")
_SENTENCES: Final = {
    OrderStatus.PENDING: ("Your payment is being confirmed", "The shop is told as soon as it is. You need not pay again."),
    OrderStatus.PAID: ("Your payment was received", "The shop has been told."),
    OrderStatus.PAID_ON_HOLD: ("Your payment was received and is being checked", "The shop has been told. You need not pay again."),
    OrderStatus.FAILED: ("The payment did not succeed", "No money was taken by this attempt. You can go back to the shop and try again."),
    OrderStatus.CANCELLED: ("The payment was cancelled", "You can go back to the shop and try again."),
    OrderStatus.EXPIRED: ("The time to pay has run out", "Go back to the shop to order again."),
    OrderStatus.PARTIALLY_REFUNDED: ("Your payment was received, and a part of it refunded", "The shop has been told."),
    OrderStatus.REFUNDED: ("Your payment was refunded", "The shop has been told."),
}


class ForPeople(APIRoute):
    """A route whose problems are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, around which nothing is raised."""
        handle = super().get_route_handler()

        async def handle_for_people(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:  # noqa: BLE001 - as the application's own handlers do, in another form
                return _problem_page(await problems.answer(request, error))

        return handle_for_people


router = APIRouter(route_class=ForPeople)

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "a page, when the order has no return_url", "content": {"text/html": {}}},
    303: {"description": "to the order's return_url, with `order_id` and `status` in its query"},
    404: {"description": "no such source, as a page", "content": {"text/html": {}}},
    413: {"description": "over 64 KiB, as a page", "content": {"text/html": {}}},
    503: {"description": "could not be stored; as a page", "content": {"text/html": {}}},
}


@router.get("/return/{source}/{end}/", include_in_schema=False)
@router.get("/return/{source}/{end}", tags=["listener"], response_model=None, responses=_ANSWERS, status_code=303)
async def get_return(source: str, end: str, request: Request) -> Response:
    """Take a customer's return in, with its fields in the query. `end` is success, fail or cancel, and proves nothing."""
    account = await _account(request, source, end)
    if len(request.scope["query_string"]) > BODY_BYTES_MAX:
        logs.count("notifications.not_read")
        raise PayloadTooLarge
    return await _returned(request, account, end, b"")


@router.post("/return/{source}/{end}/", include_in_schema=False)
@router.post("/return/{source}/{end}", tags=["listener"], response_model=None, responses=_ANSWERS, status_code=303)
async def post_return(source: str, end: str, request: Request) -> Response:
    """Take a customer's return in. It is stored as a notification is, and the browser is sent on with the order's status."""
    account = await _account(request, source, end)
    return await _returned(request, account, end, await whole_body(request))


@router.api_route("/return/{source}/{end}/", methods=_OTHERS, include_in_schema=False, response_model=None)
@router.api_route("/return/{source}/{end}", methods=_OTHERS, include_in_schema=False, response_model=None)
async def refuse_other_return_methods(source: str, end: str, request: Request) -> Response:
    """A source that is unknown is a 404 whatever the method."""
    await _account(request, source, end)
    logs.count("notifications.method_not_allowed")
    return _problem_page(problems.respond(MethodNotAllowed(), {"Allow": "GET, POST"}))


async def _account(request: Request, source: str, end: str) -> SourceAccount:
    if end not in _ENDS:
        raise NotFound("A browser returns to success, fail or cancel.")
    return await account_of(request, source)


async def _returned(request: Request, account: SourceAccount, end: str, body: bytes) -> Response:
    """Store it, then tell the customer: at once when it proves nothing, else as soon as it is decided or the wait is over."""
    rt = runtime(request)
    given = inbound(request, body, "POST" if body else "GET")
    receipt = await notifications.receive(rt.intake, account, given, via=f"return/{end}", remote_address=client_address(request))
    if receipt.error:
        await _ask_soon(rt, account, receipt)
        standing = await returns.told_at_once(rt.db, account.tenant_id, receipt.order_id)
    else:
        rt.wakes.inbox.set()
        busy = REQUESTS_MAX - request.app.state.slots.free > WAITING_MAX
        wait_seconds = 0 if busy else rt.settings.return_wait_seconds
        standing = await returns.told_in_time(rt.db, account.tenant_id, receipt.order_id, receipt.delivery_id, wait_seconds=wait_seconds)
    return _answer(standing, receipt)


async def _ask_soon(rt: Runtime, account: SourceAccount, receipt: Receipt) -> None:
    """It may be genuine all the same, after a change of password: the provider is asked about the order, if that costs little."""
    if receipt.order_id and await reconciliation.ask_soon(rt.db, account.tenant_id, receipt.order_id):
        rt.wakes.sweep.set()


def _answer(standing: Standing, receipt: Receipt) -> Response:
    headers = dict(_HEADERS)
    if receipt.delivery_id:
        headers["X-Delivery-Id"] = ids.show(ids.NOTIFICATION_DELIVERY, receipt.delivery_id)
    if standing.location:
        return RedirectResponse(standing.location, 303, headers)
    title, sentence = _SENTENCES[OrderStatus(standing.status)]
    order = f"Order <code>{escape(standing.order_id)}</code>, status" if standing.order_id else "Status"
    return pages.page(title, f"<p>{escape(sentence)}</p><p>{order} <code>{escape(standing.status)}</code></p>", headers=headers)


def _problem_page(problem: Response) -> Response:
    """A problem document as a page, with the headers that its status asks for."""
    said = json.loads(bytes(problem.body))
    headers = _HEADERS | {name: problem.headers[name] for name in _KEPT if name in problem.headers}
    return pages.page(said["title"], f"<p>{escape(said['detail'])}</p>", status=problem.status_code, headers=headers)
