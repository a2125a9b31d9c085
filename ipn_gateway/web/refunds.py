"""`/v1/orders/{order_id}/refunds`: money that goes back."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response

from ipn_gateway import ids, objects, refunds, validation
from ipn_gateway.web import bodies, keyed, schemas
from ipn_gateway.web.deps import Cashier, RuntimeDep
from ipn_gateway.web.keyed import KeyedCall
from ipn_gateway.web.orders import get_order

router = APIRouter(prefix="/v1/orders", tags=["orders"])

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    201: {"model": objects.Refund, "description": "The provider declined: the refund is there, and failed"},
    202: {"description": "The provider accepted: its order shows how far the refund is"},
    **schemas.CONFLICT,
}


@router.post(
    "/{order_id}/refunds",
    status_code=202,
    response_model=objects.AcceptedRefund,
    responses=_ANSWERS,
    openapi_extra=schemas.NewRefund.documented(),
)
async def create_refund(
    caller: Cashier, call: Annotated[KeyedCall, keyed.of(refunds.CREATE)], request: Request, rt: RuntimeDep, order_id: str
) -> Response:
    """Give money back. The provider is asked for it once, then about it until it is final: `order.refunded` or `order.refund_failed`."""
    order = await get_order(caller, rt, order_id)
    asked = await bodies.read(request, schemas.NewRefund)
    payment = _payment(order, asked.payment_id)
    new = refunds.NewRefund(
        order_id=order_id,
        reference=asked.reference,
        amount=asked.money(payment.currency if payment else order.currency),
        reason=asked.reason,
        payment_id=ids.read(ids.PAYMENT, payment.payment_id) if payment else None,
    )
    refunder = refunds.Refunder(rt.db, rt.sources, rt.transport, rt.settings)
    answer = await call.drive(refunds.Refunding(refunder, caller.tenant_id, new).phases())
    rt.wakes.dispatcher.set()  # one that was declined has its event
    return answer


def _payment(order: objects.Order, payment_id: str | None) -> objects.Payment | None:
    """The payment that is named; its currency may be another one than the order's, when it is unapplied."""
    if payment_id is None:
        return None
    for payment in order.payments:
        if payment.payment_id == payment_id:
            return payment
    raise validation.refused("must be one of the order's payments", "payment_id")
