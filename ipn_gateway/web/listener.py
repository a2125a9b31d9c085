"""`POST /ipn/{source}`: the only route that a provider calls. A 2xx is a promise that we have it; nothing else has been decided yet.

Checked in this order: 404, 405, 413, 415, 400, 401. The answer to whatever was stored carries `X-Delivery-Id`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, Request, Response

from ipn_gateway import ids, logs, notifications
from ipn_gateway.errors import GatewayError, MethodNotAllowed, NotFound
from ipn_gateway.providers.base import InboundRequest
from ipn_gateway.web import problems
from ipn_gateway.web.deps import client_address, read_body, runtime

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from ipn_gateway.notifications import Receipt
    from ipn_gateway.providers.base import Ack
    from ipn_gateway.sources import SourceAccount


router = APIRouter()

_OTHERS = ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"]


@router.post("/ipn/{source}/", include_in_schema=False)
@router.post(
    "/ipn/{source}",
    tags=["listener"],
    response_model=None,
    responses={
        200: {"description": "stored, whatever it turns out to be", "content": {"application/json": {}}},
        400: {"description": "stored as `malformed`"},
        401: {"description": "stored as `rejected`: the hash is missing or wrong"},
        404: {"description": "no such source"},
        413: {"description": "over 64 KiB"},
        415: {"description": "stored as `malformed`: a Content-Type or Content-Encoding that the provider's adapter cannot read"},
        503: {"description": "could not be stored; send it again after `Retry-After`"},
    },
)
async def post_notification(source: str, request: Request) -> Response:
    """Take a payment notification in. It is stored and committed before the answer; the provider is asked afterwards."""
    account = await account_of(request, source)
    body = await whole_body(request)
    rt = runtime(request)
    receipt = await notifications.receive(rt.intake, account, inbound(request, body), remote_address=client_address(request))
    rt.wakes.inbox.set()
    return _answer(receipt, account.provider.ack)


@router.api_route("/ipn/{source}/", methods=_OTHERS, include_in_schema=False, response_model=None)
@router.api_route("/ipn/{source}", methods=_OTHERS, include_in_schema=False, response_model=None)
async def refuse_other_methods(source: str, request: Request) -> Response:
    """A source that is unknown is a 404 whatever the method."""
    await account_of(request, source)
    logs.count("notifications.method_not_allowed")
    return problems.respond(MethodNotAllowed(), {"Allow": "POST"})


class Ahead:
    """The innermost layer that is added to the framework: it answers what is sent to a listener before routes are looked for.

    The routes above, which the API's description is made from, answer just the same; but the framework's way to them takes longer than to
    parse the form and to check its hash. Layers that anybody else adds stand outside of this one; what follows the framework's own choice
    of a route, as its tracing does, sees none of these requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on what is none of ours."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        match = _PATH.fullmatch(path)
        if match is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        request = Request(scope, receive)
        answer = post_notification if request.method == "POST" else refuse_other_methods
        try:
            response = await answer(match[1], request)
        except Exception as error:  # noqa: BLE001 - as the application's own handlers do
            response = await problems.answer(request, error)
        await response(scope, receive, send)


_PATH: Final = re.compile(r"/ipn/([^/]+)/?")
_ROUTE: Final = router.routes[0]


async def account_of(request: Request, source: str) -> SourceAccount:
    """The source that is posted to. Raises `NotFound`."""
    account = await runtime(request).sources.get(source)
    if account is None:
        logs.count("notifications.unknown_source")
        raise NotFound("There is no source of this name.")
    return account


async def whole_body(request: Request) -> bytes:
    """The body, as far as it is taken in. Raises `PayloadTooLarge` and `RequestTimeout`."""
    try:
        return await read_body(request)
    except GatewayError:
        logs.count("notifications.not_read")
        raise


def inbound(request: Request, body: bytes, method: str = "POST") -> InboundRequest:
    """The request for the provider's adapter, with the query's bytes as they were sent."""
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.scope["headers"])
    return InboundRequest(method, request.scope["query_string"].decode("latin-1"), headers, body)


def _answer(receipt: Receipt, ack: Ack) -> Response:
    """Ours, or the exact bytes that the provider demands; a problem document for what is refused."""
    shown = ids.show(ids.NOTIFICATION_DELIVERY, receipt.delivery_id) if receipt.delivery_id else None
    headers = {"X-Delivery-Id": shown} if shown else {}
    if receipt.error:
        return problems.respond(receipt.error, headers)
    body = f'{{"delivery_id":"{shown}","status":"received"}}'.encode() if ack.body is None else ack.body
    return Response(body, ack.status, headers, ack.media_type)
