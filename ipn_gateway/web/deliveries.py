"""`/v1/notification-deliveries`, `/v1/events`, `/v1/event-deliveries`: what came in, what it led to, and where that was brought."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from ipn_gateway import custom_events, ids, objects, pull, redeliveries, replays, resolutions, views
from ipn_gateway.db import Transaction
from ipn_gateway.errors import NotFound, ValidationFailed
from ipn_gateway.events import is_type
from ipn_gateway.operations import STARTED, Finished, Phase, Work
from ipn_gateway.paging import CURSOR_LENGTH_MAX, LIMIT_DEFAULT, LIMIT_MAX
from ipn_gateway.states import DeliveryOutcome, EventDeliveryStatus
from ipn_gateway.tenants import Principal
from ipn_gateway.web import bodies, keyed, schemas
from ipn_gateway.web.deps import Cashier, Reader, RuntimeDep, Since, Text, Until, WantedDep, Writer
from ipn_gateway.web.keyed import KeyedCall

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
    waiting: Annotated[bool, Query(description="true: only what waits for a person; resolved ones do not any more")] = False,
) -> objects.Page[objects.NotificationDelivery]:
    """What providers posted, newest first. `order_id` is what was asserted, on forged ones too.

    `waiting=true` lists what a person has to resolve: held, in conflict or dead, and not resolved yet.
    """
    filters: dict[str, Any] = {"order_id": order_id, "source": source, "outcome": outcome, "provider_delivery_id": provider_delivery_id}
    bounds = {"since": since, "until": until}
    async with rt.db.autocommit("notification_deliveries.list") as tx:
        return await views.notification_deliveries(
            tx, caller.tenant_id, wanted, raw=_sees_raw(caller), waiting=waiting, **bounds, **filters
        )


@inbound.get("/{delivery_id}")
async def get_notification_delivery(caller: Reader, rt: RuntimeDep, delivery_id: str) -> objects.NotificationDelivery:
    """One inbound request, as received, and what became of it."""
    async with rt.db.autocommit("notification_deliveries.get") as tx:
        return await views.notification_delivery(tx, caller.tenant_id, delivery_id, raw=_sees_raw(caller))


@inbound.post("/replay", response_model=objects.Replay, openapi_extra=schemas.Replay.documented())
async def replay_notification_deliveries(
    caller: Writer, call: Annotated[KeyedCall, keyed.of(replays.REPLAY_MANY)], request: Request, rt: RuntimeDep
) -> Response:
    """Run again the deliveries of a source with one outcome, oldest first, each authenticated anew.

    One call looks at 2,000 of them; while `next_cursor` is set, repeat it with that as `cursor`.
    """
    wanted = await bodies.read(request, schemas.Replay)
    selection = replays.Selection(wanted.source, wanted.outcome, wanted.since, wanted.until)
    replay = partial(
        replays.replay_many,
        rt.db,
        rt.sources,
        caller.tenant_id,
        selection,
        actor=caller.actor,
        reason=wanted.reason,
        dry_run=wanted.dry_run,
        cursor=wanted.cursor,
    )

    async def shown(tx: Transaction, replayed: replays.Replayed) -> Finished:  # noqa: ARG001 - what was done says it all
        return Finished.shown(objects.Replay(**asdict(selection), dry_run=wanted.dry_run, **asdict(replayed)))

    answer = await call.around("notification_deliveries.replayed_many", replay, shown)
    rt.wakes.inbox.set()
    return answer


@inbound.post("/{delivery_id}/replay", response_model=objects.NotificationDelivery, openapi_extra=schemas.Act.documented(required=False))
async def replay_notification_delivery(
    caller: Writer, call: Annotated[KeyedCall, keyed.of(replays.REPLAY)], request: Request, rt: RuntimeDep, delivery_id: str
) -> Response:
    """Run it again, whatever became of it: authenticated anew, asked about anew, and still with one effect at most."""
    await get_notification_delivery(caller, rt, delivery_id)
    act = await bodies.read(request, schemas.Act, optional=True)
    known = ids.read(ids.NOTIFICATION_DELIVERY, delivery_id)
    replay = partial(replays.replay, rt.db, rt.sources, caller.tenant_id, known, actor=caller.actor, reason=act.reason)
    answer = await call.around("notification_deliveries.replayed_one", replay, _shown(caller.tenant_id, delivery_id))
    rt.wakes.inbox.set()
    return answer


@inbound.post(
    "/{delivery_id}/resolve",
    response_model=objects.NotificationDelivery,
    responses=schemas.CONFLICT,
    openapi_extra=schemas.Resolution.documented(),
)
async def resolve_notification_delivery(
    caller: Cashier, call: Annotated[KeyedCall, keyed.of(resolutions.RESOLVE)], request: Request, rt: RuntimeDep, delivery_id: str
) -> Response:
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
    resolve = partial(resolutions.resolve, rt.db, act, rt.effect)
    answer = await call.around("notification_deliveries.resolved", resolve, _shown(caller.tenant_id, delivery_id))
    rt.wakes.dispatcher.set()
    return answer


def _shown(tenant_id: str, delivery_id: str) -> Callable[[Transaction, Any], Awaitable[Finished]]:
    """The answer of an act on a delivery: without the raw body, since a repeat may come from a key that must not see it."""

    async def shown(tx: Transaction, _: Any) -> Finished:
        return Finished.shown(await views.notification_delivery(tx, tenant_id, delivery_id, raw=False))

    return shown


@events.get("", responses=schemas.CONFLICT)
async def pull_events(
    caller: Reader,
    rt: RuntimeDep,
    *,
    after: Annotated[str | None, Query(max_length=CURSOR_LENGTH_MAX, description="`next_cursor` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT_DEFAULT,
    type: Text = None,  # noqa: A002 - its name on the wire
    order_id: Text = None,
) -> objects.EventPage:
    """Events, oldest first and without a gap: ask again with `after` = `next_cursor`, which is never null, to follow them.

    On 409 start again without `after`, and deduplicate by event id: the database was restored, or events behind the cursor were deleted.
    """
    if type is not None and not is_type(type):
        sentence = "must be an event type, of the gateway or your own"
        raise ValidationFailed(f"type: {sentence}", errors=[{"parameter": "type", "detail": sentence}])
    async with rt.db.autocommit("events.pull") as tx:
        return await pull.pull(tx, caller.tenant_id, after, limit, event_type=type, order_id=order_id)


@events.post("", status_code=201, response_model=objects.Event, openapi_extra=schemas.NewEvent.documented())
async def publish_event(
    caller: Writer, call: Annotated[KeyedCall, keyed.of(custom_events.PUBLISH)], request: Request, rt: RuntimeDep
) -> Response:
    """Send an event of a type of your own to the endpoints whose filter takes it, signed, tried again and logged as ours are.

    The same key again is the same event.
    """
    wanted = await bodies.read(request, schemas.NewEvent)
    new = custom_events.NewCustomEvent(wanted.type, wanted.data, wanted.order_id)

    async def commit(tx: Transaction, work: Work, _: Any) -> Finished:
        assert work.key_id is not None  # noqa: S101 - this operation needs a key
        event_id = await custom_events.publish(tx, rt.clock, caller.tenant_id, new, key_id=work.key_id)
        return Finished.shown(await views.event(tx, caller.tenant_id, event_id), 201, Location=f"/v1/events/{event_id}")

    answer = await call.drive({STARTED: Phase("events.publish", commit)})
    rt.wakes.dispatcher.set()
    return answer


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


@outbound.post(
    "/{delivery_id}/redeliver",
    response_model=objects.EventDelivery,
    responses=schemas.CONFLICT,
    openapi_extra=schemas.Act.documented(required=False),
)
async def redeliver_event(
    caller: Writer, call: Annotated[KeyedCall, keyed.of(redeliveries.REDELIVER)], request: Request, rt: RuntimeDep, delivery_id: str
) -> Response:
    """Make one more attempt now, with the same event id and bytes. What is delivered stays delivered; what is dead is pending again."""
    await get_event_delivery(caller, rt, delivery_id)
    act = await bodies.read(request, schemas.Act, optional=True)
    known = ids.read(ids.EVENT_DELIVERY, delivery_id)

    async def commit(tx: Transaction) -> Finished:
        await redeliveries.redeliver_in(tx, rt.clock, caller.tenant_id, known, actor=caller.actor, reason=act.reason)
        return Finished.shown(await views.event_delivery(tx, caller.tenant_id, delivery_id))

    answer = await call.once("event_deliveries.redeliver", commit)
    rt.wakes.dispatcher.set()
    return answer
