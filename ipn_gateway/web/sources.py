"""`/v1/sources`: merchant accounts at providers."""

from typing import Annotated

from fastapi import APIRouter, Request, Response

from ipn_gateway import objects, sources, views
from ipn_gateway.db import Transaction
from ipn_gateway.errors import NotFound
from ipn_gateway.operations import Finished
from ipn_gateway.web import bodies, keyed, schemas
from ipn_gateway.web.deps import Admin, AdminReader, RuntimeDep, WantedDep
from ipn_gateway.web.keyed import KeyedCall

router = APIRouter(prefix="/v1/sources", tags=["sources"])


@router.post("", status_code=201, response_model=objects.Source, responses=schemas.CONFLICT, openapi_extra=schemas.NewSource.documented())
async def create_source(caller: Admin, call: Annotated[KeyedCall, keyed.of(sources.CREATE)], request: Request, rt: RuntimeDep) -> Response:
    """Register a merchant account. Its `listener_url` is what the provider is told as IPN URL."""
    new = await bodies.read(request, schemas.NewSource)
    config = sources.checked(new.name, new.provider, new.config)
    now = rt.clock.now()

    async def commit(tx: Transaction) -> Finished:
        await sources.create_in(tx, rt.vault, caller.tenant_id, new.name, provider=new.provider, config=config, actor=caller.actor, now=now)
        shown = await views.source(tx, caller.tenant_id, new.name, public_url=rt.public_url)
        return Finished.shown(shown, 201, Location=f"/v1/sources/{new.name}")

    answer = await call.once("sources.create", commit)
    rt.sources.forget(new.name)
    return answer


@router.get("")
async def list_sources(caller: AdminReader, rt: RuntimeDep, wanted: WantedDep) -> objects.Page[objects.Source]:
    """Merchant accounts, newest first."""
    async with rt.db.autocommit("sources.list") as tx:
        return await views.sources(tx, caller.tenant_id, wanted, public_url=rt.public_url)


@router.get("/{name}")
async def get_source(caller: AdminReader, rt: RuntimeDep, name: str) -> objects.Source:
    """One merchant account."""
    return await _shown(rt, caller.tenant_id, name)


@router.patch("/{name}", openapi_extra=schemas.SourceChange.documented())
async def change_source(caller: Admin, request: Request, rt: RuntimeDep, name: str) -> objects.Source:
    """Merge `config` into the configuration. A replaced secret still authenticates for seven days."""
    await _shown(rt, caller.tenant_id, name)
    change = await bodies.read(request, schemas.SourceChange)
    await sources.patch(rt.db, rt.vault, caller.tenant_id, name, change.config, actor=caller.actor)
    rt.sources.forget(name)
    return await _shown(rt, caller.tenant_id, name)


@router.delete("/{name}", status_code=204)
async def disable_source(caller: Admin, rt: RuntimeDep, name: str) -> None:
    """Stop applying what comes: it is still received, and held. The name stays taken."""
    await _shown(rt, caller.tenant_id, name)
    await sources.disable(rt.db, caller.tenant_id, name, actor=caller.actor)
    rt.sources.forget(name)


async def _shown(rt: RuntimeDep, tenant_id: str, name: str) -> objects.Source:
    if not sources.NAME.fullmatch(name):
        raise NotFound
    async with rt.db.autocommit("sources.get") as tx:
        return await views.source(tx, tenant_id, name, public_url=rt.public_url)
