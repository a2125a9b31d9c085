"""`/v1/notification-deliveries`, `/v1/events`, `/v1/event-deliveries`: what came in, what it led to, and where that was brought."""

import re
from dataclasses import asdict
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request

from ipn_gateway import ids, objects, pull, redeliveries, replays, resolutions, views
from ipn_gateway.errors import NotFound, ValidationFailed
from ipn_gateway.events import CATALOGUE
from ipn_gateway.models import DeliveryOutcome, EventDeliveryStatus
from ipn_gateway.paging import CURSOR_LENGTH_MAX, LIMIT_DEFAULT, LIMIT_MAX
from ipn_gateway.tenants import Principal
from ipn_gateway.web import bodies, schemas
from ipn_gateway.web.deps import Cashier, Reader, RuntimeDep, Since, Text, Until, WantedDep, Writer

inbound = APIRouter(prefix="/v1/notification-deliveries", tags=["notification deliveries"])
events = APIRouter(prefix="/v1/events", tags=["events"])
outbound = APIRouter(prefix="/v1/event-deliveries", tags=["event deliveries"])

_EVENT_ID = re.compile(r"evt_[a-z2-7]{32}")


def _sees_raw(caller: Principal) -> bool:
    return "audit:raw" in caller.scopes


@inbound.get("")
async def list_notification_deliveries(
    caller: Reader,
    rt: RuntimeDep,
    wanted: WantedDep,
    *,
    order_id: Text = None,
    source: Text = None,
    outcome: Annotated[DeliveryOutcome | None, Query()] = None,
    provider_delivery_id: Text = None,
    since: Since = None,
    until: Until = None,
) -> objects.Page[objects.NotificationDelivery]:
    """What providers posted, newest first. `order_id` is what was asserted, on forged ones too."""
    filters: dict[str, Any] = {"order_id": order_id, "source": source, "outcome": outcome, "provider_delivery_id": provider_delivery_id}
    async with rt.db.autocommit("notification_deliveries.list") as tx:
        return await views.notification_deliveries(tx, caller.tenant_id, wanted, raw=_sees_raw(caller), since=since, until=until, **filters)


@inbound.get("/{delivery_id}")
async def get_notification_delivery(caller: Reader, rt: RuntimeDep, delivery_id: str) -> objects.NotificationDelivery:
    """One inbound request, as received, and what became of it."""
    async with rt.db.autocommit("notification_deliveries.get") as tx:
        return await views.notification_delivery(tx, caller.tenant_id, delivery_id, raw=_sees_raw(caller))


@inbound.post("/replay", openapi_extra=schemas.Replay.documented())
async def replay_notification_deliveries(caller: Writer, request: Request, rt: RuntimeDep) -> objects.Replay:
    """Run again all deliveries of a source with one outcome, oldest first, each authenticated anew. Repeat it while `next_since` is set."""
    wanted = await bodies.read(request, schemas.Replay)
    selection = replays.Selection(wanted.source, wanted.outcome, wanted.since, wanted.until)
    replayed = await replays.replay_many(
        rt.db, rt.sources, caller.tenant_id, selection, actor=caller.actor, reason=wanted.reason, dry_run=wanted.dry_run
    )
    rt.wakes.inbox.set()
    return objects.Replay(**asdict(selection), dry_run=wanted.dry_run, **asdict(replayed))


@inbound.post("/{delivery_id}/replay", openapi_extra=schemas.Act.documented(required=False))
async def replay_notification_delivery(caller: Writer, request: Request, rt: RuntimeDep, delivery_id: str) -> objects.NotificationDelivery:
    """Run it again, whatever became of it: authenticated anew, asked about anew, and still with one effect at most."""
    await get_notification_delivery(caller, rt, delivery_id)
    act = await bodies.read(request, schemas.Act, optional=True)
    known = ids.read(ids.NOTIFICATION_DELIVERY, delivery_id)
    await replays.replay(rt.db, rt.sources, caller.tenant_id, known, actor=caller.actor, reason=act.reason)
    rt.wakes.inbox.set()
    return await get_notification_delivery(caller, rt, delivery_id)


@inbound.post("/{delivery_id}/resolve", responses=schemas.CONFLICT, openapi_extra=schemas.Resolution.documented())
async def resolve_notification_delivery(
    caller: Cashier, request: Request, rt: RuntimeDep, delivery_id: str
) -> objects.NotificationDelivery:
    """Apply or dismiss one that is held, in conflict or dead, and all copies of it. The same decision again changes nothing."""
    await get_notification_delivery(caller, rt, delivery_id)
    wanted = await bodies.read(request, schemas.Resolution)
    act = resolutions.Act(
        caller.tenant_id,
        ids.read(ids.NOTIFICATION_DELIVERY, delivery_id),
        wanted.decision,
        actor=caller.actor,
        reason=wanted.reason,
        evidence=wanted.proof(),
    )
    await resolutions.resolve(rt.db, act, rt.effect)
    rt.wakes.dispatcher.set()
    return await get_notification_delivery(caller, rt, delivery_id)


@events.get("")
async def pull_events(
    caller: Reader,
    rt: RuntimeDep,
    *,
    after: Annotated[str | None, Query(max_length=CURSOR_LENGTH_MAX, description="`next_cursor` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT_DEFAULT,
    type: Text = None,  # noqa: A002 - its name on the wire
    order_id: Text = None,
) -> objects.Page[objects.Event]:
    """Events, oldest first and without a gap: ask again with `after` = `next_cursor`, which is never null, to follow them."""
    if type is not None and type not in CATALOGUE:
        sentence = "must be an event type"
        raise ValidationFailed(f"type: {sentence}", errors=[{"parameter": "type", "detail": sentence}])
    async with rt.db.autocommit("events.pull") as tx:
        return await pull.pull(tx, caller.tenant_id, after, limit, event_type=type, order_id=order_id)


@events.get("/{event_id}")
async def get_event(caller: Reader, rt: RuntimeDep, event_id: str) -> objects.Event:
    """One event, as it was frozen."""
    if not _EVENT_ID.fullmatch(event_id):
        raise NotFound
    async with rt.db.autocommit("events.get") as tx:
        return await views.event(tx, caller.tenant_id, event_id)


@outbound.get("")
async def list_event_deliveries(
    caller: Reader,
    rt: RuntimeDep,
    wanted: WantedDep,
    *,
    status: Annotated[EventDeliveryStatus | None, Query()] = None,
    endpoint_id: Text = None,
    event_id: Text = None,
    order_id: Text = None,
) -> objects.Page[objects.EventDelivery]:
    """Event deliveries with their attempts, newest first; `status=dead` lists the dead letters."""
    filters: dict[str, Any] = {"status": status, "event_id": event_id, "order_id": order_id}
    filters["endpoint_id"] = None if endpoint_id is None else _endpoint(endpoint_id)
    async with rt.db.autocommit("event_deliveries.list") as tx:
        return await views.event_deliveries(tx, caller.tenant_id, wanted, **filters)


def _endpoint(endpoint_id: str) -> UUID:
    try:
        return ids.read(ids.ENDPOINT, endpoint_id)
    except NotFound:
        sentence = "must be the id of an endpoint, ep_…"
        raise ValidationFailed(f"endpoint_id: {sentence}", errors=[{"parameter": "endpoint_id", "detail": sentence}]) from None


@outbound.get("/{delivery_id}")
async def get_event_delivery(caller: Reader, rt: RuntimeDep, delivery_id: str) -> objects.EventDelivery:
    """One event delivery with its attempts."""
    async with rt.db.autocommit("event_deliveries.get") as tx:
        return await views.event_delivery(tx, caller.tenant_id, delivery_id)


@outbound.post("/{delivery_id}/redeliver", responses=schemas.CONFLICT, openapi_extra=schemas.Act.documented(required=False))
async def redeliver_event(caller: Writer, request: Request, rt: RuntimeDep, delivery_id: str) -> objects.EventDelivery:
    """Make one more attempt now, with the same event id and bytes. What is delivered stays delivered; what is dead is pending again."""
    await get_event_delivery(caller, rt, delivery_id)
    act = await bodies.read(request, schemas.Act, optional=True)
    await redeliveries.redeliver(rt.db, caller.tenant_id, ids.read(ids.EVENT_DELIVERY, delivery_id), actor=caller.actor, reason=act.reason)
    rt.wakes.dispatcher.set()
    return await get_event_delivery(caller, rt, delivery_id)
