"""`/v1/endpoints`: subscribers' URLs."""

import secrets

from fastapi import APIRouter, Request, Response

from ipn_gateway import addresses, endpoints, ids, objects, signing, views
from ipn_gateway.endpoints import CreatedSecret
from ipn_gateway.web import bodies, schemas
from ipn_gateway.web.deps import Admin, AdminReader, RuntimeDep, WantedDep

router = APIRouter(prefix="/v1/endpoints", tags=["endpoints"])


@router.post("", status_code=201, openapi_extra=schemas.NewEndpoint.documented())
async def create_endpoint(caller: Admin, request: Request, response: Response, rt: RuntimeDep) -> objects.EndpointWithSecret:
    """Subscribe a URL to events. The answer is the only one that shows the signing secret."""
    new = await bodies.read(request, schemas.NewEndpoint)
    addresses.check_endpoint_url(new.url, allow_loopback=rt.settings.allow_loopback_endpoints)
    made = await endpoints.create(
        rt.db, rt.vault, caller.tenant_id, endpoints.NewEndpoint(**dict(new)), secret_bytes=_random(), actor=caller.actor
    )
    response.headers["Location"] = f"/v1/endpoints/{ids.show(ids.ENDPOINT, made.endpoint_id)}"
    return await _shown_once(rt, caller.tenant_id, made, response)


@router.get("")
async def list_endpoints(caller: AdminReader, rt: RuntimeDep, wanted: WantedDep) -> objects.Page[objects.Endpoint]:
    """Subscriptions, newest first."""
    async with rt.db.autocommit("endpoints.list") as tx:
        return await views.endpoints(tx, caller.tenant_id, wanted)


@router.get("/{endpoint_id}")
async def get_endpoint(caller: AdminReader, rt: RuntimeDep, endpoint_id: str) -> objects.Endpoint:
    """One subscription, without its secrets."""
    return await _shown(rt, caller.tenant_id, endpoint_id)


@router.patch("/{endpoint_id}", openapi_extra=schemas.EndpointChange.documented())
async def change_endpoint(caller: Admin, request: Request, rt: RuntimeDep, endpoint_id: str) -> objects.Endpoint:
    """Change the members that are given. Events that were staged before go where they were to go, by the new URL and limits."""
    await _shown(rt, caller.tenant_id, endpoint_id)
    changes = (await bodies.read(request, schemas.EndpointChange)).changes()
    if "url" in changes:
        addresses.check_endpoint_url(changes["url"], allow_loopback=rt.settings.allow_loopback_endpoints)
    await endpoints.patch(rt.db, caller.tenant_id, ids.read(ids.ENDPOINT, endpoint_id), changes, actor=caller.actor)
    return await _shown(rt, caller.tenant_id, endpoint_id)


@router.delete("/{endpoint_id}", status_code=204)
async def delete_endpoint(caller: Admin, rt: RuntimeDep, endpoint_id: str) -> None:
    """End the subscription for good; what was not delivered yet is cancelled."""
    await endpoints.delete(rt.db, caller.tenant_id, ids.read(ids.ENDPOINT, endpoint_id), actor=caller.actor)


@router.post("/{endpoint_id}/enable", openapi_extra=schemas.Act.documented(required=False))
async def enable_endpoint(caller: Admin, request: Request, rt: RuntimeDep, endpoint_id: str) -> objects.Endpoint:
    """Send to a disabled endpoint again: what waited is due at once, oldest first."""
    await _shown(rt, caller.tenant_id, endpoint_id)
    act = await bodies.read(request, schemas.Act, optional=True)
    await endpoints.enable(rt.db, caller.tenant_id, ids.read(ids.ENDPOINT, endpoint_id), actor=caller.actor, reason=act.reason)
    rt.wakes.dispatcher.set()
    return await _shown(rt, caller.tenant_id, endpoint_id)


@router.post("/{endpoint_id}/rotate-secret", openapi_extra=schemas.Rotation.documented(required=False))
async def rotate_endpoint_secret(
    caller: Admin, request: Request, response: Response, rt: RuntimeDep, endpoint_id: str
) -> objects.EndpointWithSecret:
    """Make a new signing secret, shown in this answer only; the old ones sign beside it for `overlap_seconds`."""
    await _shown(rt, caller.tenant_id, endpoint_id)
    rotation = await bodies.read(request, schemas.Rotation, optional=True)
    made = await endpoints.rotate_secret(
        rt.db,
        rt.vault,
        caller.tenant_id,
        ids.read(ids.ENDPOINT, endpoint_id),
        overlap_seconds=rotation.overlap_seconds,
        secret_bytes=_random(),
        actor=caller.actor,
    )
    return await _shown_once(rt, caller.tenant_id, made, response)


def _random() -> bytes:
    return secrets.token_bytes(signing.SECRET_BYTES)


async def _shown(rt: RuntimeDep, tenant_id: str, endpoint_id: str) -> objects.Endpoint:
    known = ids.read(ids.ENDPOINT, endpoint_id)
    async with rt.db.autocommit("endpoints.get") as tx:
        return await views.endpoint(tx, tenant_id, known)


async def _shown_once(rt: RuntimeDep, tenant_id: str, made: CreatedSecret, response: Response) -> objects.EndpointWithSecret:
    response.headers["Cache-Control"] = "no-store"
    async with rt.db.autocommit("endpoints.get") as tx:
        shown = await views.endpoint(tx, tenant_id, made.endpoint_id)
    return objects.EndpointWithSecret(**dict(shown), secret=made.secret)
