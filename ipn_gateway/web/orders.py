"""`/v1/orders`: what is owed, and what was paid for it."""

import re
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from ipn_gateway import ids, objects, orders, timeline, validation, views
from ipn_gateway.db import Transaction
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.operations import Finished
from ipn_gateway.sources import SourceAccount
from ipn_gateway.states import OrderStatus
from ipn_gateway.web import bodies, keyed, schemas
from ipn_gateway.web.deps import Cashier, OrderReader, RuntimeDep, Since, Text, WantedDep
from ipn_gateway.web.keyed import KeyedCall

router = APIRouter(prefix="/v1/orders", tags=["orders"])

_ORDER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@router.post("", status_code=201, response_model=objects.Order, responses=schemas.CONFLICT, openapi_extra=schemas.NewOrder.documented())
async def create_order(caller: Cashier, call: Annotated[KeyedCall, keyed.of(orders.CREATE)], request: Request, rt: RuntimeDep) -> Response:
    """Register an order. Notifications that came before it are applied at once."""
    new = await bodies.read(request, schemas.NewOrder)
    amount = new.money()
    source = await _source(rt, caller.tenant_id, new)
    order = orders.NewOrder(
        order_id=new.order_id,
        source=source.name,
        amount=amount,
        currency=new.currency,
        return_url=new.return_url,
        expires_at=new.expires_at,
        metadata=new.metadata,
    )
    writer_id = ids.new(rt.clock.now())

    async def commit(tx: Transaction) -> Finished:
        if source.disabled:
            raise StateConflict("This source is disabled; register the order at another one.")
        await orders.create_in(tx, caller.tenant_id, order, writer_id, sweep_schedule=rt.settings.sweep_schedule)
        shown = await views.order(tx, caller.tenant_id, new.order_id)
        return Finished.shown(shown, 201, Location=f"/v1/orders/{new.order_id}")

    answer = await call.once("orders.create", commit)
    rt.wakes.inbox.set()  # parked deliveries may be due now
    return answer


async def _source(rt: RuntimeDep, tenant_id: str, new: schemas.NewOrder) -> SourceAccount:
    """The tenant's source that the order names; what is refused here is refused for ever, so that no repeat meets it."""
    account = await rt.sources.get(new.source) or await rt.sources.reload(new.source)  # it may have been made a moment ago
    if account is None or account.tenant_id != tenant_id:
        raise validation.refused("must be the name of one of your sources", "source")
    longest = account.provider.order_id_length_max
    if len(new.order_id) > longest:
        raise validation.refused(f"must have at most {longest} characters, as {account.provider.name} takes no more", "order_id")
    return account


@router.get("")
async def list_orders(
    caller: OrderReader,
    rt: RuntimeDep,
    wanted: WantedDep,
    *,
    status: Annotated[OrderStatus | None, Query()] = None,
    source: Text = None,
    since: Since = None,
) -> objects.Page[objects.Order]:
    """Orders, newest first; `since` is the earliest creation."""
    async with rt.db.autocommit("orders.list") as tx:
        return await views.orders(tx, caller.tenant_id, wanted, status=status, source=source, since=since)


@router.get("/{order_id}")
async def get_order(caller: OrderReader, rt: RuntimeDep, order_id: str) -> objects.Order:
    """One order, with its payments and refunds."""
    if not _ORDER_ID.fullmatch(order_id):
        raise NotFound
    return await _shown(rt, caller.tenant_id, order_id)


@router.post(
    "/{order_id}/release", response_model=objects.Order, responses=schemas.CONFLICT, openapi_extra=schemas.ReasonedAct.documented()
)
async def release_order(
    caller: Cashier, call: Annotated[KeyedCall, keyed.of(orders.RELEASE)], request: Request, rt: RuntimeDep, order_id: str
) -> Response:
    """Let an order on hold be paid. Releasing it again changes nothing."""
    return await _act(caller, call, request, rt, order_id=order_id, transaction="orders.release", act=orders.release_in)


@router.post("/{order_id}/cancel", response_model=objects.Order, responses=schemas.CONFLICT, openapi_extra=schemas.ReasonedAct.documented())
async def cancel_order(
    caller: Cashier, call: Annotated[KeyedCall, keyed.of(orders.CANCEL)], request: Request, rt: RuntimeDep, order_id: str
) -> Response:
    """Close an order that nobody has paid: money that still comes is held for you. Cancelling it again changes nothing."""
    return await _act(caller, call, request, rt, order_id=order_id, transaction="orders.cancel", act=orders.cancel_in)


async def _act(
    caller: Cashier,
    call: KeyedCall,
    request: Request,
    rt: RuntimeDep,
    *,
    order_id: str,
    transaction: str,
    act: Callable[..., Awaitable[None]],
) -> Response:
    await get_order(caller, rt, order_id)
    said = await bodies.read(request, schemas.ReasonedAct)

    async def commit(tx: Transaction) -> Finished:
        await act(tx, rt.clock, caller.tenant_id, order_id, actor=caller.actor, reason=said.reason)
        return Finished.shown(await views.order(tx, caller.tenant_id, order_id))

    answer = await call.once(transaction, commit)
    rt.wakes.dispatcher.set()
    return answer


@router.get("/{order_id}/timeline")
async def get_timeline(caller: OrderReader, rt: RuntimeDep, wanted: WantedDep, order_id: str) -> objects.Page[objects.TimelineItem]:
    """Every delivery, verdict, effect, event, attempt and manual act about an order, oldest first, each with a sentence."""
    if not _ORDER_ID.fullmatch(order_id):
        raise NotFound
    async with rt.db.autocommit("orders.timeline") as tx:
        return await timeline.of(tx, caller.tenant_id, order_id, wanted)


async def _shown(rt: RuntimeDep, tenant_id: str, order_id: str) -> objects.Order:
    async with rt.db.autocommit("orders.get") as tx:
        return await views.order(tx, tenant_id, order_id)
