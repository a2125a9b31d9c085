"""Replay: run stored notification deliveries again, one or many, whatever became of them. Each is read and authenticated anew.

One that passes is `received` again and due: the inbox worker asks the provider, and the ledger lets it have one effect at most. One that is
refused again stays as it is. So does one that wrote the ledger itself: nothing could come of it.
Many are put back in batches, oldest first, and become due one after the other, so that they hold up nothing that comes in meanwhile.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

from ipn_gateway import audit, ids, logs, notifications, retention, validation
from ipn_gateway.errors import NotFound
from ipn_gateway.operations import Downstream, Operation
from ipn_gateway.providers.base import InboundRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.notifications import Reading
    from ipn_gateway.sources import Sources

REPLAY: Final = Operation(
    name="POST /v1/notification-deliveries/{delivery_id}/replay", fields={"reason": "json"}, downstream=Downstream.IDEMPOTENT
)
REPLAY_MANY: Final = Operation(
    name="POST /v1/notification-deliveries/replay",
    fields={
        "source": "json",
        "outcome": "json",
        "reason": "json",
        "since": "time",
        "until": "time",
        "dry_run": "json",
        "cursor": "json",
    },
    downstream=Downstream.IDEMPOTENT,
)

BATCH: Final = 100
LOOKED_AT_MAX: Final = 2_000
"""Deliveries that one call looks at, which takes it about a second; more take another call."""

COUNTED_MAX: Final = 1_000_000

PER_SECOND: Final = 50
"""How many of one act become due each second, over all its calls."""

_CURSOR: Final = re.compile(rf"({ids.NOTIFICATION_DELIVERY}_[0-9a-f]{{32}})\.([0-9]{{1,9}})")
"""The delivery that was looked at last, and how many were put back up to it."""

HOST_CLOCK_OFF: Final = timedelta(days=1)
"""Ids carry host time, rows database time: how far apart they may be."""

Result = Literal["put_back", "refused", "settled", "waiting"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Deliveries of one source with one outcome, received from `since` on and before `until`."""

    source: str
    outcome: str
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many were put back (in a dry run: would be), refused again, or left since they wrote the ledger.

    `next_cursor` is set when there may be more: the act is to be gone on with from there.
    """

    count: int
    refused: int
    settled: int
    next_cursor: str | None

    def __add__(self, later: Replayed) -> Replayed:
        """Two calls of one act together."""
        counts = (self.count + later.count, self.refused + later.refused, self.settled + later.settled)
        return Replayed(*counts, later.next_cursor)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A delivery as it was received."""

    id: UUID
    source_id: str
    via: str
    query: str
    headers: list[list[str]]
    raw_body: bytes
    received_at: datetime

    def request(self) -> InboundRequest:
        """The request."""
        return InboundRequest.stored(self.via, self.query, self.headers, self.raw_body)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who asks for it, and for whose deliveries. `outcome` is the one that they must still have; None takes any."""

    tenant_id: str
    actor: str
    reason: str | None
    outcome: str | None = None
    dry_run: bool = False


async def replay(db: Database, sources: Sources, tenant_id: str, delivery_id: UUID, *, actor: str, reason: str | None = None) -> Result:
    """Run one delivery again. One that is due already is left to the worker. Raises `NotFound`."""
    key = {"tenant_id": tenant_id, "id": delivery_id}
    async with db.autocommit("notification_deliveries.read") as tx:
        stored = await tx.one(_Stored, f"{_STORED} AND id = %(id)s", key)
    if stored is None:
        raise NotFound
    account = await sources.reload(stored.source_id)
    if account is None:
        raise NotFound  # cannot be: sources are never deleted
    readings = {stored.id: notifications.read(account, stored.request())}
    results = await db.rerun(_put_back_once, db, _Asked(tenant_id, actor, reason), readings, 0)
    return results[stored.id]


async def replay_many(
    db: Database,
    sources: Sources,
    tenant_id: str,
    selection: Selection,
    *,
    actor: str,
    reason: str,
    dry_run: bool = False,
    cursor: str | None = None,
) -> Replayed:
    """Run again those that fit, from `cursor` on and at most 2,000 looked at; a dry run changes nothing.

    Each batch commits by itself. Repeating it is safe: what was put back does not fit any more.
    Raises `ValidationFailed` for a source of nobody's, and for a cursor that no such call gave.
    """
    account = await sources.reload(selection.source)
    if account is None or account.tenant_id != tenant_id:
        raise validation.refused("must be the name of one of your sources", "source")
    validation.check_span(selection.since, selection.until)
    after, before = (_first_id(selection), 0) if cursor is None else _place(cursor)
    asked = _Asked(tenant_id, actor, reason, selection.outcome, dry_run)
    counts: Counter[Result] = Counter()
    looked_at, stored = 0, list[_Stored]()
    while looked_at < LOOKED_AT_MAX:
        stored = await _fitting(db, tenant_id, selection, after)
        readings = {one.id: notifications.read(account, one.request()) for one in stored}
        counts.update((await db.rerun(_put_back_once, db, asked, readings, before + counts["put_back"])).values())
        looked_at += len(stored)
        if len(stored) < BATCH:
            break
        after = stored[-1].id
    place = f"{ids.show(ids.NOTIFICATION_DELIVERY, after)}.{before + counts['put_back']}"
    replayed = Replayed(counts["put_back"], counts["refused"], counts["settled"], place if len(stored) == BATCH else None)
    await _note(db, asked, selection, replayed)
    return replayed


async def how_many(db: Database, tenant_id: str, selection: Selection) -> int | None:
    """How many fit, to tell a person how far it is; None for more than a million, which take long to count."""
    statement = f"SELECT count(*) FROM (SELECT FROM notification_deliveries WHERE tenant_id = %(tenant_id)s {_FITS} LIMIT %(limit)s) AS fit"
    parameters = _fits(tenant_id, selection, _first_id(selection)) | {"limit": COUNTED_MAX + 1}
    async with db.autocommit("notification_deliveries.how_many") as tx:
        count = int(await tx.value(statement, parameters))
    return count if count <= COUNTED_MAX else None


def _place(cursor: str) -> tuple[UUID, int]:
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise validation.refused("must be the next_cursor of the call before", "cursor")
    return ids.read(ids.NOTIFICATION_DELIVERY, found[1]), int(found[2])


_STORED = """
SELECT id, source_id, via, query, headers, raw_body, received_at FROM notification_deliveries WHERE tenant_id = %(tenant_id)s
"""


def _first_id(selection: Selection) -> UUID:
    """Below every id that can fit; spares the partitions before it."""
    if selection.since is None:
        return UUID(int=0)
    return retention.lower_bound(max(selection.since, ids.EPOCH + HOST_CLOCK_OFF) - HOST_CLOCK_OFF)


_FITS = """
AND outcome = %(outcome)s AND source_id = %(source)s AND id > %(after)s
AND (%(since)s::timestamptz IS NULL OR received_at >= %(since)s)
AND (%(until)s::timestamptz IS NULL OR received_at < %(until)s)
"""


def _fits(tenant_id: str, selection: Selection, after: UUID) -> dict[str, Any]:
    return {"tenant_id": tenant_id, **asdict(selection), "after": after}


async def _fitting(db: Database, tenant_id: str, selection: Selection, after: UUID) -> list[_Stored]:
    """The next batch, in the order of ids: a time would not do to go on from, since many may have the same."""
    async with db.autocommit("notification_deliveries.fitting") as tx:
        statement = f"{_STORED} {_FITS} ORDER BY id LIMIT %(limit)s"
        return await tx.all(_Stored, statement, _fits(tenant_id, selection, after) | {"limit": BATCH})


async def _put_back_once(db: Database, asked: _Asked, readings: Mapping[UUID, Reading], before: int) -> dict[UUID, Result]:
    """What became of each. `before` is how many of the same act were put back already: these are due after them."""
    if not readings:
        return {}
    async with db.transaction("notification_deliveries.replay") as tx:
        results = await _judged(tx, asked, readings)
        back = [delivery_id for delivery_id, result in results.items() if result == "put_back"]
        if asked.dry_run:
            return results
        await tx.execute(_PUT_BACK, _rows(asked, {delivery_id: readings[delivery_id] for delivery_id in back}, before))
        # Of many only those that change have an entry of their own; of one, whatever comes of it.
        noted = [one for one, result in results.items() if result != "waiting" and (asked.outcome is None or result == "put_back")]
        shown = [ids.show(ids.NOTIFICATION_DELIVERY, one) for one in noted]
        now = db.clock.now()
        await audit.record_each(
            tx, asked.tenant_id, shown, actor=asked.actor, action="notification_delivery.replay", now=now, reason=asked.reason
        )
    logs.count("notifications.replayed", len(back))
    return results


# Locked in the order of the workers: open work before its delivery. What is in `waiting` is due already, or worked on at this moment.
_LOCK_WORK = """
SELECT notification_delivery_id AS id,
       state = 'received' AND (due_at <= ipn_now() OR coalesce(lease_expires_at > ipn_now(), false)) AS waiting
  FROM inbox WHERE tenant_id = %(tenant_id)s AND notification_delivery_id = ANY(%(ids)s)
 ORDER BY notification_delivery_id FOR UPDATE
"""

_LOCK_DELIVERIES = """
SELECT id, outcome FROM notification_deliveries WHERE tenant_id = %(tenant_id)s AND id = ANY(%(ids)s) ORDER BY id FOR UPDATE
"""

# A new statement after the locks. An operation's ledger row is on the order that its delivery names: any other ends as rejected.
_SETTLED = """
SELECT d.id FROM notification_deliveries AS d
 WHERE d.tenant_id = %(tenant_id)s AND d.id = ANY(%(ids)s)
   AND EXISTS (SELECT FROM processed_notifications AS p
                WHERE p.tenant_id = d.tenant_id AND p.order_id = d.order_id AND p.writer_id = d.id)
"""


async def _judged(tx: Transaction, asked: _Asked, readings: Mapping[UUID, Reading]) -> dict[UUID, Result]:
    """What is to become of each that still fits, under locks."""
    key = {"tenant_id": asked.tenant_id, "ids": list(readings)}
    waiting = {row["id"] for row in await tx.all(dict, _LOCK_WORK, key) if row["waiting"]}
    outcomes = {row["id"]: row["outcome"] for row in await tx.all(dict, _LOCK_DELIVERIES, key)}
    settled = {row["id"] for row in await tx.all(dict, _SETTLED, key)}
    results: dict[UUID, Result] = {}
    for delivery_id, reading in readings.items():
        if asked.outcome not in {None, outcomes.get(delivery_id)}:
            continue
        if delivery_id in waiting:
            results[delivery_id] = "waiting"
        elif delivery_id in settled:
            results[delivery_id] = "settled"
        else:
            results[delivery_id] = "refused" if reading.outcome != "received" else "put_back"
    return results


# The fence of new work begins above any that the delivery has had: a worker that comes back late must not pass for the new one.
_PUT_BACK = """
WITH given AS (
    SELECT * FROM unnest(%(ids)s::uuid[], %(places)s::int[], %(proofs)s::text[], %(provider_delivery_ids)s::text[], %(order_ids)s::text[],
                         %(operation_ids)s::text[], %(effects)s::text[], %(statuses)s::text[])
             AS given (id, place, proof, provider_delivery_id, order_id, operation_id, effect, asserted_status)
), back AS (
    UPDATE notification_deliveries AS d
       SET outcome = 'received', reason = NULL, decided_at = NULL, resolution = NULL, confirmed = NULL, proof = given.proof,
           provider_delivery_id = given.provider_delivery_id, order_id = given.order_id, operation_id = given.operation_id,
           effect = given.effect, asserted_status = given.asserted_status
      FROM given WHERE d.tenant_id = %(tenant_id)s AND d.id = given.id
    RETURNING d.tenant_id, d.id, d.source_id, d.order_id, d.operation_id, d.proof, d.received_at, d.attempts, given.place
)
INSERT INTO inbox AS i
       (tenant_id, notification_delivery_id, source_id, order_id, operation_id, proved, received_at, due_at, questions, fence)
SELECT tenant_id, id, source_id, order_id, operation_id, proof = 'proved', received_at,
       ipn_now() + place * interval '1 second' / %(per_second)s, attempts, (extract(epoch FROM clock_timestamp()) * 1000)::bigint
  FROM back
ON CONFLICT ON CONSTRAINT inbox_pkey DO UPDATE
   SET state = 'received', order_id = excluded.order_id, operation_id = excluded.operation_id, proved = excluded.proved,
       due_at = excluded.due_at, asked = 0, refuted = 0, parked_at = NULL, lease_expires_at = NULL, fence = i.fence + 1
"""


def _rows(asked: _Asked, readings: Mapping[UUID, Reading], before: int) -> dict[str, Any]:
    asserted = [notifications.asserted(reading) for reading in readings.values()]
    return {
        "tenant_id": asked.tenant_id,
        "ids": list(readings),
        "places": list(range(before, before + len(readings))),
        "per_second": PER_SECOND,
        "proofs": _column(asserted, "proof"),
        "provider_delivery_ids": _column(asserted, "provider_delivery_id"),
        "order_ids": _column(asserted, "order_id"),
        "operation_ids": _column(asserted, "operation_id"),
        "effects": [None if row["effect"] is None else str(row["effect"]) for row in asserted],
        "statuses": _column(asserted, "asserted_status"),
    }


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


async def _note(db: Database, asked: _Asked, selection: Selection, replayed: Replayed) -> None:
    """One entry for the act on many, beside those of the deliveries that it put back. A dry run is none."""
    counted = {"count": replayed.count, "refused": replayed.refused, "settled": replayed.settled}
    logs.get("inbox").info(
        "notifications.replayed", source=selection.source, outcome=selection.outcome, dry_run=asked.dry_run, actor=asked.actor, **counted
    )
    if asked.dry_run:
        return
    bounds = {name: moment.isoformat() for name in ("since", "until") if (moment := getattr(selection, name))}
    async with db.transaction("notification_deliveries.replayed") as tx:
        await audit.record(
            tx,
            asked.tenant_id,
            actor=asked.actor,
            action="source.replay",
            target=selection.source,
            now=db.clock.now(),
            reason=asked.reason,
            details={"outcome": selection.outcome, **bounds, **counted},
        )
