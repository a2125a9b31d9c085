"""`/v1/orders/{order_id}/checkout`: the payment page that a customer is sent to."""

from typing import Annotated

from fastapi import APIRouter, Request, Response

from ipn_gateway import checkouts, objects
from ipn_gateway.web import bodies, keyed, schemas
from ipn_gateway.web.deps import Cashier, RuntimeDep
from ipn_gateway.web.keyed import KeyedCall
from ipn_gateway.web.orders import get_order

router = APIRouter(prefix="/v1/orders", tags=["orders"])


@router.post(
    "/{order_id}/checkout", response_model=objects.Checkout, responses=schemas.CONFLICT, openapi_extra=schemas.NewCheckout.documented()
)
async def open_checkout(
    caller: Cashier, call: Annotated[KeyedCall, keyed.of(checkouts.CHECKOUT)], request: Request, rt: RuntimeDep, order_id: str
) -> Response:
    """Open the provider's payment page for a customer. While a page is younger than 15 minutes, the same one is given."""
    order = await get_order(caller, rt, order_id)
    asked = await bodies.read(request, schemas.NewCheckout)
    request.state.members = asked.model_dump(exclude_unset=True)  # compared is what is read: unknown members inside are ignored too
    account = await rt.sources.reload(order.source)  # not a second old: a refused password would be this key's answer
    assert account is not None  # noqa: S101 - an order has its source
    wanted = checkouts.session_request(order, asked.customer.model_dump(), asked.product.model_dump(), public_url=rt.public_url)
    timeout_seconds = rt.settings.provider_money_timeout_seconds
    return await call.drive(checkouts.Checkout(account, wanted, rt.transport, timeout_seconds=timeout_seconds).phases())
