"""Attempts: what each HTTP try makes of its event delivery, and writing that down.

An attempt counts only while the lease under which it was made is still ours. Attempts that end together are written together.

With it goes the health of the endpoint. Failures in a row open its breaker: it rests as long as it has been failing, 1 to 60 s, so each
rest is about twice the one before, and between two rests one event delivery tries it. A refusal by 429, 502, 503 or 504 says that it is
too much for the endpoint, not for one event: it rests at once, as long as its `Retry-After` says, up to 60 s. A success closes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import endpoint_health, ordering
from ipn_gateway.batches import Batches
from ipn_gateway.columns import arrays
from ipn_gateway.errors import LeaseLost
from ipn_gateway.schedule import next_wait
from ipn_gateway.states import EventDeliveryStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.transport import Outcome

TRYING_FROM: Final = 5
"""After so many failures in a row the breaker of an endpoint opens."""

REST_SECONDS_MIN: Final = 1
REST_SECONDS_MAX: Final = 60
"""The longest rest: what the breaker adds at most to the wait of an event delivery."""

TOO_MUCH: Final = frozenset(
    {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)
"""What a server that is overloaded, or away behind its proxy, answers whatever it is sent."""

TOGETHER_MAX: Final = 200
"""How many attempts are written in one transaction; bounds how long its row locks are held."""

WAITING_MAX: Final = 10_000
"""Attempts that wait to be written. A dispatcher has far fewer slots, so this is never reached."""


@dataclass(slots=True)  # not frozen: one for every event, and that takes twice as long to make
class After:
    """What an attempt makes of its event delivery. `wait_seconds`, until the next attempt, is set while it stays pending.

    `rest_seconds`, 0 to 60, is set where the endpoint as a whole is to rest.
    """

    status: EventDeliveryStatus
    wait_seconds: float | None = None
    endpoint_gone: bool = False
    rest_seconds: float | None = None


@dataclass(slots=True)
class Attempt:
    """One HTTP try that was made, under the lease that `fence` names. `started_at` is database time.

    Its id is made before it is written, so that a write of unknown outcome can be recognised. `ordered` is its endpoint.
    """

    id: UUID
    tenant_id: str
    event_delivery_id: UUID
    endpoint_id: UUID
    fence: int
    trigger: str
    started_at: datetime
    url: str
    outcome: Outcome
    after: After
    ordered: bool = False


@dataclass(slots=True)
class Recorded:
    """What the database says after an attempt was written. Attempts of an event delivery are numbered from 1 without gaps.

    `rests_until` is of the endpoint, if the attempt changed how it stands.
    """

    attempt_id: UUID
    number: int
    status: str
    next_attempt_at: datetime | None
    rests_until: datetime | None = None
    ordered: bool = False  # whether its endpoint is by now


def decide(tries: int, outcome: Outcome, *, schedule: Sequence[float], chance: float, resumes: bool | None = None) -> After:
    """What becomes of an event delivery after the try that follows `tries` on its schedule. Pure; `chance` is between 0 and 1.

    Only 2xx is success. 410 means that the endpoint is gone (Standard Webhooks 1.0.0): its event deliveries stay pending, unsent, until it
    is enabled. Everything else is tried again on the schedule, later if the receiver's `Retry-After` says so, and at its end is dead.

    `resumes` is of a redelivery, which is no try on the schedule: whether that goes on where it was, though not before `Retry-After`.
    """
    if outcome.kind == "delivered":
        return After(EventDeliveryStatus.DELIVERED)
    if outcome.status_code == HTTPStatus.GONE:
        return After(EventDeliveryStatus.PENDING, 0.0, endpoint_gone=True)
    if resumes is None:
        wait = next_wait(tries + 2, schedule=schedule, chance=chance, hint=outcome.retry_after_seconds)
    else:
        wait = (outcome.retry_after_seconds or 0.0) if resumes else None
    rest = min(outcome.retry_after_seconds or 0.0, float(REST_SECONDS_MAX)) if outcome.status_code in TOO_MUCH else None
    return After(EventDeliveryStatus.DEAD if wait is None else EventDeliveryStatus.PENDING, wait, rest_seconds=rest)


class Recorder:
    """Writes attempts. Those that end while others are being written go together next: one connection, however many end at once."""

    def __init__(self, db: Database) -> None:
        self._attempts = Batches(partial(_record_together, db), name="attempts", most=TOGETHER_MAX, waiting_max=WAITING_MAX)

    async def record(self, attempt: Attempt) -> Recorded:
        """Returns when the attempt is committed. Raises `LeaseLost` when somebody else holds its event delivery now."""
        return await self._attempts.put(attempt)


async def _record_together(db: Database, attempts: Sequence[Attempt]) -> list[Recorded | Exception]:
    recorded = await db.rerun(record, db, attempts)
    return [recorded.get(attempt.id) or LeaseLost(event_delivery=attempt.event_delivery_id) for attempt in attempts]


BEFORE_ALL_DUE: Final = """
least(ipn_now(), (SELECT first.next_attempt_at - interval '1 microsecond' FROM event_deliveries AS first
                   WHERE first.tenant_id = d.tenant_id AND first.endpoint_id = d.endpoint_id AND first.next_attempt_at IS NOT NULL
                   ORDER BY first.next_attempt_at LIMIT 1))
"""
"""When a redelivery of the row `d` is due: a person need not wait behind a backlog, or while the endpoint's breaker is open."""

# A row is written only under its fence and while leased, so that a late writer, or a re-run after a COMMIT that did arrive, writes nothing.
# `delivered` is true whatever happened meanwhile, and never reverts; only what was cancelled with its endpoint stays so. The attempt is
# written all the same. A redelivery that was asked for during the attempt comes next, whatever that came to. What a redelivery interrupted
# goes on at its time. One success among an endpoint's attempts of a batch ends its failing; rows of healthy endpoints are not touched.
# Locks: event deliveries sorted by id, then states, as `endpoints` takes them.
# A success closes the breaker unless its attempt began before the failing did, and so says nothing about the rest that was begun since.
# Failures of attempts that began before a rest do not prolong it.
_RECORD: Final = f"""
WITH given AS (
    SELECT * FROM unnest(
        %(tenant_ids)b::text[], %(ids)b::uuid[], %(fences)b::bigint[], %(statuses)b::text[], %(waits)b::float8[], %(rests)b::float8[],
        %(attempt_ids)b::uuid[], %(triggers)b::text[], %(started)b::timestamptz[], %(durations)b::int[], %(addresses)b::text[],
        %(codes)b::smallint[], %(outcomes)b::text[], %(errors)b::text[], %(excerpts)b::text[]
    ) AS given (tenant_id, id, fence, status, wait_seconds, rest_seconds,
                attempt_id, trigger, started_at, duration_ms, address, status_code, outcome, error, response_excerpt)
), won AS (
    UPDATE event_deliveries AS d
       SET status = CASE WHEN d.status = 'cancelled' THEN d.status
                         WHEN given.status = 'dead' AND d.asked_again AND d.status = 'pending' THEN d.status
                         WHEN d.status = 'pending' OR given.status = 'delivered' THEN given.status ELSE d.status END,
           delivered_at = CASE WHEN given.status = 'delivered' AND d.status <> 'cancelled' THEN coalesce(d.delivered_at, ipn_now())
                               ELSE d.delivered_at END,
           next_attempt_at = CASE WHEN d.status = 'cancelled' OR d.next_attempt_at IS NULL THEN NULL
                                  WHEN d.asked_again THEN {BEFORE_ALL_DUE}
                                  WHEN d.status = 'pending' AND given.wait_seconds IS NOT NULL
                                  THEN greatest(d.scheduled_at, ipn_now() + given.wait_seconds * interval '1 second') END,
           scheduled_at = CASE WHEN d.asked_again AND d.status = 'pending' AND given.wait_seconds IS NOT NULL
                               THEN greatest(d.scheduled_at, ipn_now() + given.wait_seconds * interval '1 second') END,
           next_trigger = CASE WHEN d.asked_again AND d.next_attempt_at IS NOT NULL THEN 'redelivery'
                               WHEN d.attempt_count = d.redelivery_count AND given.trigger = 'redelivery' THEN 'initial' ELSE 'retry' END,
           attempt_count = d.attempt_count + 1, redelivery_count = d.redelivery_count + (given.trigger = 'redelivery')::int,
           asked_again = false, lease_expires_at = NULL
      FROM given
     WHERE d.tenant_id = given.tenant_id AND d.id = given.id AND d.fence = given.fence AND d.lease_expires_at IS NOT NULL
    RETURNING given.*, d.endpoint_id, d.attempt_count AS number, d.status AS new_status, d.next_attempt_at, d.sequence
), written AS (
    INSERT INTO delivery_attempts (tenant_id, id, event_delivery_id, number, trigger, started_at, duration_ms, address, status_code,
                                   outcome, error, response_excerpt)
    SELECT tenant_id, attempt_id, id, number, trigger, started_at, duration_ms, address, status_code, outcome, error, response_excerpt
      FROM won
), health AS (
    SELECT tenant_id, endpoint_id, count(*)::int AS attempts, max(rest_seconds) AS rest_seconds,
           max(started_at) FILTER (WHERE outcome = 'delivered') AS healthy_at
      FROM won GROUP BY tenant_id, endpoint_id
), changed AS (
    INSERT INTO endpoint_states AS s (tenant_id, endpoint_id, consecutive_failures, failing_since, open_until)
    SELECT tenant_id, endpoint_id, CASE WHEN healthy_at IS NULL THEN attempts ELSE 0 END, CASE WHEN healthy_at IS NULL THEN ipn_now() END,
           CASE WHEN rest_seconds IS NOT NULL OR healthy_at IS NULL AND attempts >= %(trying_from)s
                THEN ipn_now() + greatest(rest_seconds, %(rest_min)s) * interval '1 second' END
      FROM health
     WHERE healthy_at IS NULL OR rest_seconds IS NOT NULL OR EXISTS (
        SELECT FROM endpoint_states AS s
         WHERE s.tenant_id = health.tenant_id AND s.endpoint_id = health.endpoint_id
           AND (s.consecutive_failures > 0 OR s.open_until IS NOT NULL))
     ORDER BY tenant_id, endpoint_id
    ON CONFLICT (tenant_id, endpoint_id) DO UPDATE SET (consecutive_failures, failing_since, warned_at, open_until) = (
        SELECT CASE WHEN h.healthy_at IS NULL THEN s.consecutive_failures + h.attempts ELSE 0 END,
               CASE WHEN h.healthy_at IS NULL THEN coalesce(s.failing_since, ipn_now()) END,
               CASE WHEN h.healthy_at IS NULL THEN s.warned_at END,
               CASE WHEN h.rest_seconds IS NOT NULL THEN greatest(s.open_until, ipn_now() + greatest(own.rest, h.rest_seconds * second))
                    WHEN s.open_until > ipn_now() AND (h.healthy_at IS NULL OR h.healthy_at >= s.failing_since IS NOT TRUE)
                    THEN s.open_until
                    WHEN h.healthy_at IS NULL AND (s.open_until IS NOT NULL OR s.consecutive_failures + h.attempts >= %(trying_from)s)
                    THEN ipn_now() + own.rest END
          FROM health AS h CROSS JOIN (SELECT interval '1 second' AS second) AS unit CROSS JOIN LATERAL (
            SELECT least(%(rest_max)s * second, greatest(%(rest_min)s * second, ipn_now() - s.failing_since)) AS rest) AS own
         WHERE h.tenant_id = s.tenant_id AND h.endpoint_id = s.endpoint_id)
    RETURNING tenant_id, endpoint_id, open_until
)
SELECT won.attempt_id, won.number, won.new_status AS status, won.next_attempt_at, changed.open_until AS rests_until,
       won.sequence IS NOT NULL AND won.new_status <> 'pending' AND coalesce((
            SELECT e.ordered FROM endpoints AS e WHERE e.tenant_id = won.tenant_id AND e.id = won.endpoint_id), false) AS ordered
  FROM won LEFT JOIN changed ON changed.tenant_id = won.tenant_id AND changed.endpoint_id = won.endpoint_id
"""

_WRITTEN_BEFORE: Final = """
SELECT a.id AS attempt_id, a.number, d.status, d.next_attempt_at
  FROM unnest(%(tenant_ids)b::text[], %(attempt_ids)b::uuid[]) AS given (tenant_id, attempt_id)
  JOIN delivery_attempts AS a ON a.tenant_id = given.tenant_id AND a.id = given.attempt_id
  JOIN event_deliveries AS d ON d.tenant_id = a.tenant_id AND d.id = a.event_delivery_id
"""


_BREAKER: Final[dict[str, Any]] = {"trying_from": TRYING_FROM, "rest_min": REST_SECONDS_MIN, "rest_max": REST_SECONDS_MAX}


async def record(db: Database, attempts: Sequence[Attempt]) -> dict[UUID, Recorded]:
    """Write attempts and what they make of their event deliveries, in one transaction; by attempt id, those that are written now.

    One whose lease was lost is not among them and has written nothing. Run again after an unknown COMMIT, it finds its own attempts.
    """
    gone = [attempt for attempt in attempts if attempt.after.endpoint_gone]
    ordered = [attempt for attempt in attempts if attempt.ordered]
    async with db.transaction("event_deliveries.record") as tx:
        await _lock_endpoints(tx, [*gone, *ordered])
        recorded = {row.attempt_id: row for row in await tx.all(Recorded, _RECORD, _rows(attempts))}
        for attempt in {attempt.endpoint_id: attempt for attempt in gone if attempt.id in recorded}.values():
            await endpoint_health.disable(
                tx, db.clock, attempt.tenant_id, attempt.endpoint_id, url=attempt.url, reason="gone", actor="dispatcher"
            )
        if over := [(attempt.tenant_id, attempt.event_delivery_id) for attempt in ordered if attempt.id in recorded]:
            await ordering.let_go(tx, over)
        by_now = {row.attempt_id for row in recorded.values() if row.ordered}
        late = [attempt for attempt in attempts if by_now and not attempt.ordered and attempt.id in by_now]
        if len(recorded) < len(attempts):
            others = [attempt for attempt in attempts if attempt.id not in recorded]
            recorded |= {row.attempt_id: row for row in await tx.all(Recorded, _WRITTEN_BEFORE, _rows(others))}
    if late:
        await db.rerun(_let_go_late, db, late)
    return recorded


async def _let_go_late(db: Database, attempts: Sequence[Attempt]) -> None:
    """Of endpoints that became ordered during the attempt: these are locked before their event deliveries, so by a transaction of its own.

    Were it lost, what waits would be looked at again when it is due.
    """
    async with db.transaction("event_deliveries.let_go") as tx:
        await _lock_endpoints(tx, attempts)
        await ordering.let_go(tx, [(attempt.tenant_id, attempt.event_delivery_id) for attempt in attempts])


async def _lock_endpoints(tx: Transaction, attempts: Sequence[Attempt]) -> None:
    """Endpoints before their event deliveries, as deleting and claiming do: the other order could deadlock with them."""
    if attempts:
        await tx.execute(
            """
            SELECT FROM endpoints
              JOIN unnest(%(tenant_ids)b::text[], %(endpoint_ids)b::uuid[]) AS given (tenant_id, id) USING (tenant_id, id)
             ORDER BY tenant_id, id FOR NO KEY UPDATE OF endpoints
            """,
            _rows(attempts),
        )


def _rows(attempts: Sequence[Attempt]) -> dict[str, Any]:
    attempts = sorted(attempts, key=lambda attempt: (attempt.tenant_id, attempt.event_delivery_id.int))  # UUIDs compare slowly
    return _BREAKER | arrays([_row(attempt) for attempt in attempts])


def _row(attempt: Attempt) -> dict[str, Any]:
    outcome, after = attempt.outcome, attempt.after
    return {
        "tenant_ids": attempt.tenant_id,
        "ids": attempt.event_delivery_id,
        "endpoint_ids": attempt.endpoint_id,
        "fences": attempt.fence,
        "statuses": after.status.value,
        "waits": after.wait_seconds,
        "rests": after.rest_seconds,
        "attempt_ids": attempt.id,
        "triggers": attempt.trigger,
        "started": attempt.started_at,
        "durations": outcome.duration_ms,
        "addresses": outcome.address,
        "codes": outcome.status_code,
        "outcomes": outcome.kind,
        "errors": outcome.error,
        "excerpts": outcome.excerpt,
    }
