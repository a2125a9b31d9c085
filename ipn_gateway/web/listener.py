"""`POST /ipn/{source}`: the only route that a provider calls. A 2xx is a promise that we have it; nothing else has been decided yet.

Checked in this order: 404, 405, 413, 415, 400, 401. The answer to whatever was stored carries `X-Delivery-Id`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from ipn_gateway import ids, logs, notifications
from ipn_gateway.errors import GatewayError, MethodNotAllowed, NotFound
from ipn_gateway.providers.base import InboundRequest
from ipn_gateway.web import problems
from ipn_gateway.web.deps import client_address, read_body, runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ipn_gateway.notifications import Receipt
    from ipn_gateway.providers.base import Ack
    from ipn_gateway.sources import SourceAccount


class Plain(APIRoute):
    """A route whose function is given the request as it came: FastAPI parses and checks nothing for it, which takes half of its time."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function takes the source's name and the request."""

        async def handle(request: Request) -> Response:
            response: Response = await self.endpoint(request.path_params["source"], request)
            return response

        return handle


router = APIRouter(route_class=Plain)

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
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
    return InboundRequest(method, request.scope["query_string"].decode("latin-1"), headers, body)


def _answer(receipt: Receipt, ack: Ack) -> Response:
    """Ours, or the exact bytes that the provider demands; a problem document for what is refused."""
    shown = ids.show(ids.NOTIFICATION_DELIVERY, receipt.delivery_id) if receipt.delivery_id else None
    headers = {"X-Delivery-Id": shown} if shown else {}
    if receipt.error:
        return problems.respond(receipt.error, headers)
    if ack.body is not None:
        return Response(ack.body, ack.status, headers, ack.media_type)
    return JSONResponse({"delivery_id": shown, "status": "received"}, ack.status, headers)
