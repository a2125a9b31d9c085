"""`/v1/idempotency-keys`: what became of a keyed request, without executing anything; and what a person found out."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from ipn_gateway import idempotency_acts, ids, objects
from ipn_gateway.db import Transaction
from ipn_gateway.operations import Finished
from ipn_gateway.web import bodies, keyed, schemas
from ipn_gateway.web.deps import Cashier, OrderReader, RuntimeDep, Text, WantedDep
from ipn_gateway.web.keyed import KeyedCall

router = APIRouter(prefix="/v1/idempotency-keys", tags=["idempotency keys"])


@router.get("")
async def list_idempotency_keys(
    caller: OrderReader,
    rt: RuntimeDep,
    wanted: WantedDep,
    *,
    state: Annotated[Literal["in_progress", "completed", "indeterminate"] | None, Query()] = None,
    key: Text = None,
    operation: Text = None,
) -> objects.Page[objects.IdempotencyKey]:
    """Your keys, newest first. `operation` is method and route template, such as `POST /v1/orders`."""
    async with rt.db.autocommit("idempotency_keys.list") as tx:
        return await idempotency_acts.page(tx, caller.tenant_id, wanted, state=state, key=key, operation=operation)


@router.get("/{key_id}")
async def get_idempotency_key(caller: OrderReader, rt: RuntimeDep, key_id: str) -> objects.IdempotencyKey:
    """One key; its id is also the `reconciliation_id` of an unknown outcome."""
    known = ids.read(ids.IDEMPOTENCY_KEY, key_id)
    async with rt.db.autocommit("idempotency_keys.get") as tx:
        return await idempotency_acts.shown(tx, caller.tenant_id, known)


@router.post(
    "/{key_id}/resolve",
    response_model=objects.IdempotencyKey,
    responses=schemas.CONFLICT,
    openapi_extra=schemas.KeyResolution.documented(),
)
async def resolve_idempotency_key(
    caller: Cashier, call: Annotated[KeyedCall, keyed.of(idempotency_acts.RESOLVE)], request: Request, rt: RuntimeDep, key_id: str
) -> Response:
    """Say what became of a request whose outcome is not known: repeats of its key are answered with it, or may execute again."""
    await get_idempotency_key(caller, rt, key_id)
    wanted = await bodies.read(request, schemas.KeyResolution)
    resolution = idempotency_acts.Resolution(
        tenant_id=caller.tenant_id,
        key_id=ids.read(ids.IDEMPOTENCY_KEY, key_id),
        decision=wanted.decision,
        actor=caller.actor,
        reason=wanted.reason,
        evidence=wanted.evidence,
        response=wanted.answer(),
    )

    async def commit(tx: Transaction) -> Finished:
        await idempotency_acts.resolve(tx, rt.clock, request.app.state.idempotency.operations, resolution)
        return Finished.shown(await idempotency_acts.shown(tx, resolution.tenant_id, resolution.key_id))

    answer = await call.once("idempotency_keys.resolve", commit)
    rt.wakes.dispatcher.set()
    return answer
