"""`/v1/endpoints`: subscribers' URLs."""

import secrets
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from ipn_gateway import addresses, endpoint_health, endpoint_tests, endpoints, ids, objects, recoveries, signing, views
from ipn_gateway.db import Transaction
from ipn_gateway.endpoints import CreatedSecret
from ipn_gateway.operations import STARTED, Finished, Phase, Work
from ipn_gateway.web import bodies, keyed, schemas
from ipn_gateway.web.deps import Admin, AdminReader, RuntimeDep, WantedDep
from ipn_gateway.web.keyed import KeyedCall

router = APIRouter(prefix="/v1/endpoints", tags=["endpoints"])


@router.post("", status_code=201, response_model=objects.EndpointWithSecret, openapi_extra=schemas.NewEndpoint.documented())
async def create_endpoint(
    caller: Admin, call: Annotated[KeyedCall, keyed.of(endpoints.CREATE)], request: Request, rt: RuntimeDep
) -> Response:
    """Subscribe a URL to events. The answer is the only one that shows the signing secret."""
    new = await bodies.read(request, schemas.NewEndpoint)
    addresses.check_endpoint_url(new.url, allow_loopback=rt.settings.allow_loopback_endpoints)
    now = rt.clock.now()
    made = CreatedSecret(ids.new(now), signing.new_keys(secrets.token_bytes(signing.RANDOM_BYTES)))

    async def commit(tx: Transaction) -> Finished:
        new_endpoint = endpoints.NewEndpoint(**dict(new))
        await endpoints.create_in(tx, rt.vault, caller.tenant_id, new_endpoint, made, actor=caller.actor, now=now)
        return await _shown_once(tx, caller.tenant_id, made, 201, Location=f"/v1/endpoints/{ids.show(ids.ENDPOINT, made.endpoint_id)}")

    return await call.once("endpoints.create", commit)


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


@router.post("/{endpoint_id}/enable", response_model=objects.Endpoint, openapi_extra=schemas.Act.documented(required=False))
async def enable_endpoint(
    caller: Admin, call: Annotated[KeyedCall, keyed.of(endpoints.ENABLE)], request: Request, rt: RuntimeDep, endpoint_id: str
) -> Response:
    """Send to a disabled endpoint again: what waited is due at once, oldest first."""
    await _known(rt, caller.tenant_id, endpoint_id)
    act = await bodies.read(request, schemas.Act, optional=True)
    known = ids.read(ids.ENDPOINT, endpoint_id)

    async def shown(tx: Transaction, _: None) -> Finished:
        return Finished.shown(await views.endpoint(tx, caller.tenant_id, known))

    enable = partial(endpoints.enable, rt.db, caller.tenant_id, known, actor=caller.actor, reason=act.reason)
    answer = await call.around("endpoints.enabled", enable, shown)
    rt.wakes.dispatcher.set()
    return answer


@router.post("/{endpoint_id}/disable", response_model=objects.Endpoint, openapi_extra=schemas.Act.documented(required=False))
async def disable_endpoint(
    caller: Admin, call: Annotated[KeyedCall, keyed.of(endpoint_health.DISABLE)], request: Request, rt: RuntimeDep, endpoint_id: str
) -> Response:
    """Send nothing to an endpoint until it is enabled: what is for it stays pending. Others are told, with `endpoint.disabled`."""
    await _known(rt, caller.tenant_id, endpoint_id)
    act = await bodies.read(request, schemas.Act, optional=True)
    known = ids.read(ids.ENDPOINT, endpoint_id)

    async def commit(tx: Transaction) -> Finished:
        await endpoint_health.disable_by_hand_in(tx, rt.clock, caller.tenant_id, known, actor=caller.actor, reason=act.reason)
        return Finished.shown(await views.endpoint(tx, caller.tenant_id, known))

    answer = await call.once("endpoints.disable", commit)
    rt.wakes.dispatcher.set()
    return answer


@router.post(
    "/{endpoint_id}/rotate-secret",
    response_model=objects.EndpointWithSecret,
    responses=schemas.CONFLICT,
    openapi_extra=schemas.Rotation.documented(required=False),
)
async def rotate_endpoint_secret(
    caller: Admin, call: Annotated[KeyedCall, keyed.of(endpoints.ROTATE)], request: Request, rt: RuntimeDep, endpoint_id: str
) -> Response:
    """Make a new signing secret, shown in this answer only; the old ones sign beside it for `overlap_seconds`."""
    await _known(rt, caller.tenant_id, endpoint_id)
    rotation = await bodies.read(request, schemas.Rotation, optional=True)
    now = rt.clock.now()
    made = CreatedSecret(ids.read(ids.ENDPOINT, endpoint_id), signing.new_keys(secrets.token_bytes(signing.RANDOM_BYTES)))

    async def commit(tx: Transaction) -> Finished:
        await endpoints.rotate_secret_in(
            tx, rt.vault, caller.tenant_id, made, overlap_seconds=rotation.overlap_seconds, actor=caller.actor, now=now
        )
        return await _shown_once(tx, caller.tenant_id, made)

    return await call.once("endpoints.rotate_secret", commit)


@router.post(
    "/{endpoint_id}/test",
    response_model=objects.EndpointTest,
    responses=schemas.CONFLICT,
    openapi_extra=schemas.Act.documented(required=False),
)
async def test_endpoint(
    caller: Admin, call: Annotated[KeyedCall, keyed.of(endpoint_tests.TEST)], request: Request, rt: RuntimeDep, endpoint_id: str
) -> Response:
    """Send one `endpoint.test` to this endpoint alone, now, also when it is disabled, and say what each step of it said.

    It is signed and sent as any other event is, kept with its attempt, and never tried again. `failed_check` names the step that failed.
    """
    await _known(rt, caller.tenant_id, endpoint_id)
    act = await bodies.read(request, schemas.Act, optional=True)
    known = ids.read(ids.ENDPOINT, endpoint_id)

    async def send(work: Work) -> endpoint_tests.Tested:
        cause = (work.key_id or ids.new(rt.clock.now())).hex
        asked = endpoint_tests.Asked(caller.tenant_id, known, cause, caller.actor, act.reason)
        return await endpoint_tests.send(rt.db, rt.transport, rt.vault, asked)

    async def commit(tx: Transaction, _: Work, tested: Any) -> Finished:
        return Finished.shown(await endpoint_tests.record(tx, tested))

    return await call.drive({STARTED: Phase("endpoints.tested", commit, send)})


@router.post(
    "/{endpoint_id}/recover", response_model=objects.Recovery, responses=schemas.CONFLICT, openapi_extra=schemas.Recovery.documented()
)
async def recover_endpoint(
    caller: Admin, call: Annotated[KeyedCall, keyed.of(recoveries.RECOVER)], request: Request, rt: RuntimeDep, endpoint_id: str
) -> Response:
    """Give the endpoint what it did not get of a span of time: dead event deliveries are pending again, missing ones are made.

    They become due in the order of their events, at the endpoint's rate or 50 each second. One call looks at 2,000 events; while
    `next_cursor` is set, repeat it with that as `cursor`. Events about endpoints are left out.
    """
    await _known(rt, caller.tenant_id, endpoint_id)
    wanted = await bodies.read(request, schemas.Recovery)
    span = recoveries.Span(caller.tenant_id, ids.read(ids.ENDPOINT, endpoint_id), wanted.since, wanted.until)
    recover = partial(
        recoveries.recover, rt.db, span, actor=caller.actor, reason=wanted.reason, dry_run=wanted.dry_run, cursor=wanted.cursor
    )

    async def shown(tx: Transaction, recovered: recoveries.Recovered) -> Finished:  # noqa: ARG001 - what was done says it all
        return Finished.shown(recoveries.shown(span, recovered, dry_run=wanted.dry_run))

    answer = await call.around("endpoints.recovered", recover, shown)
    rt.wakes.dispatcher.set()
    return answer


async def _known(rt: RuntimeDep, tenant_id: str, endpoint_id: str) -> None:
    """Another tenant's endpoint is a 404 whatever the body; one that was deleted is looked at by the act itself, behind its key."""
    known = ids.read(ids.ENDPOINT, endpoint_id)
    async with rt.db.autocommit("endpoints.known") as tx:
        await endpoints.known(tx, tenant_id, known)


async def _shown(rt: RuntimeDep, tenant_id: str, endpoint_id: str) -> objects.Endpoint:
    known = ids.read(ids.ENDPOINT, endpoint_id)
    async with rt.db.autocommit("endpoints.get") as tx:
        return await views.endpoint(tx, tenant_id, known)


async def _shown_once(tx: Transaction, tenant_id: str, made: CreatedSecret, status: int = 200, **headers: str) -> Finished:
    shown = await views.endpoint(tx, tenant_id, made.endpoint_id)
    return Finished.shown(
        objects.EndpointWithSecret(**dict(shown), secret=made.secret, public_key=made.keys.public_key),
        status,
        Cache_Control="no-store",
        **headers,
    )
