"""Recovery: an endpoint gets after all what it did not get of a span of time. What it got, or is about to get, is left alone.

A dead event delivery is pending again; an event that has none, since the endpoint was not there or did not want it, gets one. Both in the
order of the events and no faster than the endpoint's rate, so that they hold up nothing that comes meanwhile. One attempt each: where the
schedule was at its end, another failure makes it dead again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID  # noqa: TC003 - field of a row

from ipn_gateway import audit, ids, logs, objects, outbox, validation
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.operations import Downstream, Operation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ipn_gateway.db import Database, Transaction

RECOVER: Final = Operation(
    name="POST /v1/endpoints/{endpoint_id}/recover",
    fields={"since": "time", "until": "time", "dry_run": "json", "reason": "json", "cursor": "json"},
    downstream=Downstream.IDEMPOTENT,
)

BATCH: Final = 200
LOOKED_AT_MAX: Final = 2_000
"""Events that one call looks at; more take another call."""

COUNTED_MAX: Final = 1_000_000

PER_SECOND: Final = 50
"""How many become due each second at an endpoint without a rate of its own."""

_CURSOR: Final = re.compile(r"([0-9]{1,18})\.(evt_[a-z2-7]{32})\.([0-9]{1,9})")
"""Time and id of the event that was looked at last, and how many were recovered up to it."""

_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Span:
    """The events of one endpoint's tenant that were written from `since` on and before `until`."""

    tenant_id: str
    endpoint_id: UUID
    since: datetime
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Recovered:
    """How many events fit the filter, and what became of their event deliveries; `next_cursor` is set when there may be more."""

    looked_at: int = 0
    matched: int = 0
    dead: int = 0
    missing: int = 0
    next_cursor: str | None = None

    @property
    def recovered(self) -> int:
        """How many become due; of a dry run: would."""
        return self.dead + self.missing

    @property
    def skipped(self) -> int:
        """How many are delivered or pending."""
        return self.matched - self.recovered

    def __add__(self, later: Recovered) -> Recovered:
        """Two calls, or two batches, of one act together."""
        counts = (self.looked_at + later.looked_at, self.matched + later.matched, self.dead + later.dead, self.missing + later.missing)
        return Recovered(*counts, later.next_cursor)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who asks for what."""

    span: Span
    actor: str
    reason: str
    dry_run: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """The event that was looked at last, and how many were recovered up to it."""

    at: datetime
    event_id: str = ""
    before: int = 0

    def __str__(self) -> str:
        return f"{(self.at - ids.EPOCH) // _MICROSECOND}.{self.event_id}.{self.before}"


@dataclass(frozen=True, slots=True)
class _Looked:
    """An event, whether it is for the endpoint, and how its event delivery stands, if there is one."""

    id: str
    created_at: datetime
    fits: bool
    delivery_id: UUID | None
    status: str | None


async def recover(db: Database, span: Span, *, actor: str, reason: str, dry_run: bool = False, cursor: str | None = None) -> Recovered:
    """Make due what the endpoint did not get, from `cursor` on and at most 2,000 events looked at; a dry run changes nothing.

    Each batch commits by itself, with its entry in the audit log. Repeating it is safe: what was recovered is pending or delivered.
    Events about endpoints are never recovered. Raises `NotFound`, `StateConflict` for a disabled endpoint unless it is a dry run, and
    `ValidationFailed` for a span that ends before it begins, and for a cursor that no such call gave.
    """
    asked = _Asked(span, actor, reason, dry_run)
    place, total = _begin(span, cursor), Recovered()
    while total.looked_at < LOOKED_AT_MAX:
        looked, found = await db.rerun(_recover_batch, db, asked, place)
        total += found
        if looked:
            place = _Place(looked[-1].created_at, looked[-1].id, place.before + found.recovered)
        if len(looked) < BATCH:
            break
    else:
        total += Recovered(next_cursor=str(place))
    _tell(asked, total)
    return total


def shown(span: Span, recovered: Recovered, *, dry_run: bool) -> objects.Recovery:
    """What it came to, for who asked."""
    return objects.Recovery(
        endpoint_id=ids.show(ids.ENDPOINT, span.endpoint_id),
        since=span.since,
        until=span.until,
        dry_run=dry_run,
        matched=recovered.matched,
        recovered=recovered.recovered,
        dead=recovered.dead,
        missing=recovered.missing,
        skipped=recovered.skipped,
        next_cursor=recovered.next_cursor,
    )


async def how_many(db: Database, span: Span) -> int | None:
    """How many events there are to look at, to tell a person how far it is; None for more than a million."""
    statement = f"SELECT count(*) FROM ({_SPAN} LIMIT %(limit)s) AS looked"
    async with db.autocommit("endpoints.how_many") as tx:
        count = int(await tx.value(statement, _values(span, _begin(span, None)) | {"limit": COUNTED_MAX + 1}))
    return count if count <= COUNTED_MAX else None


def _begin(span: Span, cursor: str | None) -> _Place:
    """An empty id comes before every other one. Raises `ValidationFailed` for a span without any time in it, too."""
    validation.check_span(span.since, span.until)
    if cursor is None:
        return _Place(span.since)
    if (found := _CURSOR.fullmatch(cursor)) is None:
        raise validation.refused("must be the next_cursor of the call before", "cursor")
    try:
        at = ids.EPOCH + int(found[1]) * _MICROSECOND
    except OverflowError:
        raise validation.refused("must be the next_cursor of the call before", "cursor") from None
    return _Place(at, found[2], int(found[3]))


# By time and not by transaction: after a restore the numbers of transactions begin anew, and then most of all nothing may be left out.
_SPAN: Final = """
SELECT id, type, order_id, sequence, created_at FROM events
 WHERE tenant_id = %(tenant_id)s AND (created_at, id) > (%(at)s, %(after)s)
   AND created_at >= %(since)s AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)
 ORDER BY created_at, id
"""

_LOOK: Final = f"""
WITH looked AS MATERIALIZED ({_SPAN} LIMIT %(limit)s)
SELECT looked.id, looked.created_at, looked.type NOT LIKE 'endpoint.%%' AND {outbox.wants("e.events", "looked.type")} AS fits,
       d.id AS delivery_id, d.status
  FROM looked JOIN endpoints AS e ON e.tenant_id = %(tenant_id)s AND e.id = %(endpoint_id)s
  LEFT JOIN LATERAL (
        SELECT id, status FROM event_deliveries AS d
         WHERE d.tenant_id = %(tenant_id)s AND d.event_id = looked.id AND d.endpoint_id = %(endpoint_id)s LIMIT 1) AS d ON true
 ORDER BY looked.created_at, looked.id
"""

# Held against being deleted, as deleting takes it: the endpoint before its event deliveries.
_LOCK_ENDPOINT: Final = """
SELECT status, coalesce(rate_per_second, %(per_second)s)::float8 AS per_second, ipn_now() AS now FROM endpoints
 WHERE tenant_id = %(tenant_id)s AND id = %(endpoint_id)s AND deleted_at IS NULL FOR KEY SHARE
"""

_LOCK_DEAD: Final = """
SELECT FROM event_deliveries WHERE tenant_id = %(tenant_id)s AND id = ANY(%(ids)s) AND status = 'dead' ORDER BY id FOR NO KEY UPDATE
"""

_REVIVE: Final = """
UPDATE event_deliveries AS d
   SET status = 'pending', next_trigger = 'recovery', lease_expires_at = NULL,
       next_attempt_at = %(now)s + given.place * interval '1 second' / %(per_second)s
  FROM unnest(%(ids)s::uuid[], %(places)s::int[]) AS given (id, place)
 WHERE d.tenant_id = %(tenant_id)s AND d.id = given.id AND d.status = 'dead'
"""

# Made a microsecond after each other: enabling an endpoint sends what waits in the order in which it was made.
_STAGE: Final = """
INSERT INTO event_deliveries
       (tenant_id, id, event_id, endpoint_id, event_type, order_id, sequence, next_trigger, next_attempt_at, created_at)
SELECT %(tenant_id)s, given.id, e.id, %(endpoint_id)s, e.type, e.order_id, e.sequence, 'recovery',
       %(now)s + given.place * interval '1 second' / %(per_second)s, %(now)s - given.behind * interval '1 microsecond'
  FROM unnest(%(event_ids)s::text[], %(ids)s::uuid[], %(places)s::int[], %(behind)s::int[]) AS given (event_id, id, place, behind)
  JOIN events AS e ON e.tenant_id = %(tenant_id)s AND e.id = given.event_id FOR KEY SHARE OF e  -- against being pruned
ON CONFLICT ON CONSTRAINT event_deliveries_once_key DO NOTHING
"""


async def _recover_batch(db: Database, asked: _Asked, place: _Place) -> tuple[Sequence[_Looked], Recovered]:
    """The next events, and what was made of them."""
    span = asked.span
    key = {"tenant_id": span.tenant_id, "endpoint_id": span.endpoint_id}
    async with db.transaction("endpoints.recover") as tx:
        endpoint = await tx.one(dict, _LOCK_ENDPOINT, key | {"per_second": PER_SECOND})
        if endpoint is None:
            raise NotFound
        if endpoint["status"] == "disabled" and not asked.dry_run:
            raise StateConflict("The endpoint is disabled: enable it first, and what waits for it is sent.")
        looked = await tx.all(_Looked, _LOOK, _values(span, place) | {"limit": BATCH})
        due = [event for event in looked if event.fits and event.status in {None, "dead"}]
        found = Recovered(len(looked), sum(event.fits for event in looked), *_counted(due))
        if due and not asked.dry_run:
            rate = {"now": endpoint["now"], "per_second": endpoint["per_second"]}
            written = await _write(tx, key | rate, due, place.before, host_now=db.clock.now())
            found = replace(found, dead=written.dead, missing=written.missing)
            await _note(tx, asked, found, now=db.clock.now())
    return looked, found


def _counted(due: Sequence[_Looked]) -> tuple[int, int]:
    dead = sum(event.status is not None for event in due)
    return dead, len(due) - dead


async def _write(tx: Transaction, key: Mapping[str, Any], due: Sequence[_Looked], before: int, *, host_now: datetime) -> Recovered:
    """Make them due, each in its place after those `before`; how many that were, since others may have been quicker."""
    places = list(enumerate(due, before))
    dead = [(event.delivery_id, place) for place, event in places if event.status is not None]
    missing = [(event.id, place) for place, event in places if event.status is None]
    of_dead = {"ids": [delivery_id for delivery_id, _ in dead], "places": [place for _, place in dead]}
    of_missing = {
        "event_ids": [event_id for event_id, _ in missing],
        "ids": [ids.new(host_now) for _ in missing],
        "places": [place for _, place in missing],
        "behind": list(range(len(missing), 0, -1)),
    }
    await tx.execute(_LOCK_DEAD, {**key, **of_dead})
    return Recovered(dead=await tx.execute(_REVIVE, {**key, **of_dead}), missing=await tx.execute(_STAGE, {**key, **of_missing}))


async def _note(tx: Transaction, asked: _Asked, found: Recovered, *, now: datetime) -> None:
    span, until = asked.span, asked.span.until
    target = ids.show(ids.ENDPOINT, span.endpoint_id)
    details = {"since": span.since.isoformat(), "until": until and until.isoformat(), "dead": found.dead, "missing": found.missing}
    await audit.record(
        tx, span.tenant_id, actor=asked.actor, action="endpoint.recover", target=target, now=now, reason=asked.reason, details=details
    )


def _values(span: Span, place: _Place) -> dict[str, Any]:
    return {
        "tenant_id": span.tenant_id,
        "endpoint_id": span.endpoint_id,
        "since": span.since,
        "until": span.until,
        "at": place.at,
        "after": place.event_id,
    }


def _tell(asked: _Asked, total: Recovered) -> None:
    if not asked.dry_run:
        logs.count("event_deliveries.recovered", total.recovered)
    logs.get("endpoints").info(
        "endpoint.recovered",
        endpoint_id=ids.show(ids.ENDPOINT, asked.span.endpoint_id),
        tenant_id=asked.span.tenant_id,
        dry_run=asked.dry_run,
        actor=asked.actor,
        matched=total.matched,
        dead=total.dead,
        missing=total.missing,
        skipped=total.skipped,
    )
