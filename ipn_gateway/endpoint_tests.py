"""Testing an endpoint: one signed event, sent to it alone and at once, outside of the queue, and what each step of that said.

It is sent as any other one is, by the same transport behind the same guard, also while the endpoint is disabled, and never again by
itself: one that fails is cancelled, so that no test becomes a dead letter, and the endpoint's health is not touched. Event, event delivery
and attempt are kept. A sample of another type is kept as what it is, an `endpoint.test`: nobody who pulls events takes it for a real one.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

from ipn_gateway import audit, diagnosis, events, ids, logs, objects, outbox, samples, signing, views
from ipn_gateway.errors import NotFound, RateLimited, StateConflict
from ipn_gateway.guard import Seen, TooLate
from ipn_gateway.operations import Downstream, Operation
from ipn_gateway.states import EventDeliveryStatus, Trigger
from ipn_gateway.transport import DeliveryRequest, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.diagnosis import Check
    from ipn_gateway.transport import Transport
    from ipn_gateway.vault import Vault

TEST: Final = Operation(name="POST /v1/endpoints/{endpoint_id}/test", fields={"reason": "json"}, downstream=Downstream.IDEMPOTENT)

EVENT_TYPE: Final = "endpoint.test"

AT_ONCE_MAX: Final = 5
"""Tests of one tenant that run at once in this process: each may take as long as an attempt, and holds a keyed call meanwhile."""

_running: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Asked:
    """Who tests which endpoint. The `cause` is in the event's id: the same one again is the same event. `sample_of` is what is sent."""

    tenant_id: str
    endpoint_id: UUID
    cause: str
    actor: str
    reason: str | None = None
    sample_of: str = EVENT_TYPE


@dataclass(frozen=True, slots=True)
class Tested:
    """A test that was made and is to be recorded. Its ids are made before, so that a repeated write is recognised."""

    tenant_id: str
    endpoint_id: UUID
    event_id: str
    delivery_id: UUID
    attempt_id: UUID
    started_at: datetime
    outcome: Outcome
    checks: Sequence[Check]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A stored event on its way. `now` is database time: the time of the attempt."""

    event_id: str
    body: bytes = field(repr=False)
    url: str = field(repr=False)
    sealed_keys: list[bytes] = field(repr=False)
    now: datetime


async def send(db: Database, transport: Transport, vault: Vault, asked: Asked) -> Tested:
    """Store the event, send it, and say what became of it; `record` writes that down.

    Raises `NotFound`, `StateConflict` for an endpoint that nothing can be signed for, and `RateLimited` for too many at once.
    """
    with _one_more(asked.tenant_id):
        prepared = await db.rerun(_prepare, db, asked)
        keys = [signing.signing_key(vault.unseal(sealed).decode()) for sealed in prepared.sealed_keys]
        if not keys:
            raise StateConflict("The endpoint has no signing secret that is active; rotate it.")
        signed = signing.headers(prepared.event_id, int(prepared.now.timestamp()), prepared.body, keys)
        headers = {"Content-Type": "application/json", **signed}
        seen = Seen()
        try:
            outcome = await transport.send(DeliveryRequest(prepared.url, prepared.body, headers, prepared.now), seen=seen)
        except TooLate:  # this process stood still while it connected
            outcome = Outcome("timeout", error="total_timeout")
    now = db.clock.now()
    tested = Tested(
        tenant_id=asked.tenant_id,
        endpoint_id=asked.endpoint_id,
        event_id=prepared.event_id,
        delivery_id=ids.new(now),
        attempt_id=ids.new(now),
        started_at=prepared.now,
        outcome=outcome,
        checks=diagnosis.checks(prepared.url, outcome, seen),
    )
    _tell(asked, tested)
    return tested


@contextmanager
def _one_more(tenant_id: str) -> Iterator[None]:
    if _running[tenant_id] >= AT_ONCE_MAX:
        raise RateLimited(f"{AT_ONCE_MAX} tests are running; wait for one of them.", retry_after_seconds=1)
    _running[tenant_id] += 1
    try:
        yield
    finally:
        _running[tenant_id] -= 1
        if not _running[tenant_id]:
            del _running[tenant_id]


_TAKERS: Final = f"""
SELECT id FROM endpoints
 WHERE tenant_id = %(tenant_id)s AND status = 'enabled' AND deleted_at IS NULL AND {outbox.wants("events", "%(type)s::text")} ORDER BY id
"""


async def takers(db: Database, tenant_id: str, event_type: str) -> list[UUID]:
    """The enabled endpoints that an event of this type would go to."""
    async with db.autocommit("endpoints.takers") as tx:
        rows = await tx.all(dict, _TAKERS, {"tenant_id": tenant_id, "type": event_type})
    return [row["id"] for row in rows]


_TARGET: Final = """
SELECT e.url, ipn_now() AS now,
       ARRAY(SELECT sealed.key FROM endpoint_secrets AS s
               CROSS JOIN LATERAL (VALUES (1, s.ciphertext), (2, s.seed_ciphertext)) AS sealed (place, key)
              WHERE s.tenant_id = e.tenant_id AND s.endpoint_id = e.id AND sealed.key IS NOT NULL
                AND (s.expires_at IS NULL OR s.expires_at > ipn_now())
              ORDER BY sealed.place, s.created_at DESC, s.id DESC) AS sealed_keys
  FROM endpoints AS e WHERE e.tenant_id = %(tenant_id)s AND e.id = %(id)s AND e.deleted_at IS NULL
"""

_STORE: Final = """
INSERT INTO events (tenant_id, id, type, body) VALUES (%(tenant_id)s, %(event_id)s, %(type)s, %(body)s)
ON CONFLICT ON CONSTRAINT events_pkey DO NOTHING
"""


async def _prepare(db: Database, asked: Asked) -> _Prepared:
    """The event is there before anybody gets it, and who asked for it is in the audit log."""
    shown = ids.show(ids.ENDPOINT, asked.endpoint_id)
    event_id = ids.event_id(asked.tenant_id, EVENT_TYPE, shown, asked.cause)
    key = {"tenant_id": asked.tenant_id, "id": asked.endpoint_id, "event_id": event_id}
    async with db.transaction("endpoints.test") as tx:
        target = await tx.one(dict, _TARGET, key)
        if target is None:
            raise NotFound
        data = samples.sample(asked.sample_of, event_id[-6:].upper(), endpoint_id=shown, url=target["url"])
        body = events.frozen(event_id, asked.sample_of, target["now"], data.model_dump(mode="json"))
        if await tx.execute(_STORE, key | {"type": EVENT_TYPE, "body": body}):
            details = {"event_id": event_id, "sample_of": asked.sample_of}
            now = db.clock.now()
            await audit.record(
                tx, asked.tenant_id, actor=asked.actor, action="endpoint.test", target=shown, now=now, reason=asked.reason, details=details
            )
        else:
            body = await tx.value("SELECT body FROM events WHERE tenant_id = %(tenant_id)s AND id = %(event_id)s", key)
    return _Prepared(event_id, body, **target)


_RECORD: Final = """
WITH delivery AS (
    INSERT INTO event_deliveries
           (tenant_id, id, event_id, endpoint_id, event_type, status, attempt_count, next_trigger, delivered_at)
    SELECT %(tenant_id)s, %(delivery_id)s, %(event_id)s, %(endpoint_id)s, %(type)s, %(status)s, 1, %(trigger)s,
           CASE WHEN %(status)s = 'delivered' THEN ipn_now() END
    ON CONFLICT ON CONSTRAINT event_deliveries_pkey DO NOTHING
    RETURNING tenant_id, id
)
INSERT INTO delivery_attempts (tenant_id, id, event_delivery_id, number, trigger, started_at, duration_ms, address, status_code, outcome,
                               error, response_excerpt)
SELECT tenant_id, %(attempt_id)s, id, 1, %(trigger)s, %(started_at)s, %(duration_ms)s, %(address)s, %(status_code)s, %(kind)s, %(error)s,
       %(excerpt)s
  FROM delivery
"""


async def record(tx: Transaction, tested: Tested) -> objects.EndpointTest:
    """Write the attempt and its event delivery, and show them; done already, it changes nothing."""
    outcome = tested.outcome
    delivered = outcome.kind == "delivered"
    await tx.execute(
        _RECORD,
        {
            "tenant_id": tested.tenant_id,
            "delivery_id": tested.delivery_id,
            "attempt_id": tested.attempt_id,
            "event_id": tested.event_id,
            "endpoint_id": tested.endpoint_id,
            "type": EVENT_TYPE,
            "status": (EventDeliveryStatus.DELIVERED if delivered else EventDeliveryStatus.CANCELLED).value,
            "trigger": Trigger.TEST.value,
            "started_at": tested.started_at,
            "duration_ms": outcome.duration_ms,
            "address": outcome.address,
            "status_code": outcome.status_code,
            "kind": outcome.kind,
            "error": outcome.error,
            "excerpt": outcome.excerpt,
        },
    )
    return await _shown(tx, tested)


async def _shown(tx: Transaction, tested: Tested) -> objects.EndpointTest:
    delivery = await views.event_delivery(tx, tested.tenant_id, ids.show(ids.EVENT_DELIVERY, tested.delivery_id))
    return objects.EndpointTest(
        endpoint_id=delivery.endpoint_id,
        event_id=delivery.event_id,
        event_delivery_id=delivery.id,
        delivered=tested.outcome.kind == "delivered",
        failed_check=next((check.check for check in tested.checks if check.status == "failed"), None),
        checks=[objects.Check(**asdict(check)) for check in tested.checks],
        attempt=delivery.attempts[0],
    )


def _tell(asked: Asked, tested: Tested) -> None:
    logs.count(f"endpoint_tests.{tested.outcome.kind}")
    logs.get("endpoints").info(
        "endpoint.tested",
        endpoint_id=ids.show(ids.ENDPOINT, asked.endpoint_id),
        event_id=tested.event_id,
        tenant_id=asked.tenant_id,
        actor=asked.actor,
        sample_of=asked.sample_of,
        outcome=tested.outcome.kind,
        http_status=tested.outcome.status_code,
        error=tested.outcome.error,
        address=tested.outcome.address,
        duration_ms=tested.outcome.duration_ms,
    )


async def run(db: Database, transport: Transport, vault: Vault, asked: Asked) -> objects.EndpointTest:
    """The whole of it, for who asks without a key."""
    tested = await send(db, transport, vault, asked)

    async def write() -> objects.EndpointTest:
        async with db.transaction("endpoints.tested") as tx:
            return await record(tx, tested)

    return await db.rerun(write)
