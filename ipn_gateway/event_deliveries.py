"""The dispatcher: brings events to endpoints. Claim, send, record; only the first and the last hold a transaction.

What is due is claimed under a lease, each event delivery is sent in a slot of its own that nobody waits for, and what became of the
attempt is written only if the lease is still ours. A dispatcher that dies leaves its leases to expire: then the event is sent again, under
the same id. So an event arrives at least once.

Who gets the slots: an endpoint at most `max_in_flight`, and one that fails again and again a single one until it succeeds; the failing
endpoints of a tenant at most half of what the tenant may hold; a tenant at most half of all. So endpoints that hang delay no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import ids, logs, signing
from ipn_gateway.attempts import Attempt, Recorded, Recorder, decide
from ipn_gateway.errors import LeaseLost
from ipn_gateway.models import EventDeliveryStatus
from ipn_gateway.transport import DeliveryRequest, Outcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.settings import Settings
    from ipn_gateway.slots import Slots
    from ipn_gateway.transport import Transport
    from ipn_gateway.vault import Vault

IN_FLIGHT_PER_TENANT: Final = 256
SLOTS: Final = 2 * IN_FLIGHT_PER_TENANT
"""Attempts at once in this process: waiting for an endpoint is cheap, and no tenant holds more than half."""

FAILING_PER_TENANT: Final = IN_FLIGHT_PER_TENANT // 2
"""What a tenant's failing endpoints may hold together; the other half is for those that work."""

TRYING_FROM: Final = 5
"""After so many failures in a row an endpoint is tried with one event delivery at a time, until one succeeds."""

LATECOMERS_MAX: Final = 100
"""Leased rows are looked for among an endpoint's oldest due ones. So many that committed late may come before them unnoticed."""

SECRETS_KEPT: Final = 1024
"""Signing secrets that a dispatcher keeps unsealed."""


@dataclass(frozen=True, slots=True, eq=False)
class Claimed:
    """An event delivery under a lease, with all that an attempt needs. `claimed_at` is database time: the time of the attempt."""

    tenant_id: str
    id: UUID
    endpoint_id: UUID
    event_id: str
    event_type: str
    attempt_count: int
    trigger: str
    fence: int
    due_at: datetime
    claimed_at: datetime
    url: str = field(repr=False)
    body: bytes = field(repr=False)
    sealed_secrets: list[bytes] = field(repr=False)


class Dispatcher:
    """Claims, sends and records. `slots` are its own; `chance` draws between 0 and 1 for the jitter."""

    def __init__(
        self, db: Database, transport: Transport, vault: Vault, slots: Slots, settings: Settings, *, chance: Callable[[], float]
    ) -> None:
        self._db = db
        self._transport = transport
        self._unseal = lru_cache(SECRETS_KEPT)(vault.unseal)  # which of them are active each claim reads anew
        self._slots = slots
        self._settings = settings
        self._chance = chance
        self._recorder = Recorder(db)
        self._sending: dict[Claimed, asyncio.Task[Any]] = {}
        self._stopping = False
        self._log = logs.get("event_deliveries")

    async def run_once(self) -> int:
        """Claim what is due, no more than slots are free, and start each in a slot; how many. Waits for none of them."""
        limit = 0 if self._stopping else self._slots.free
        if limit <= 0:
            return 0
        async with self._db.transaction("event_deliveries.claim") as tx:
            claimed = await claim(tx, limit=limit, lease_seconds=self._settings.dispatch_lease_seconds)
        if self._stopping:
            await give_back(self._db, claimed)
            return 0
        for delivery in claimed:
            self._sending[delivery] = self._slots.start(self._send_and_record(delivery), name="event_delivery")
        return len(claimed)

    async def stop(self, *, seconds: float) -> None:
        """Claim no more, let what runs end within `seconds`, then break off what is still being sent and give back its leases."""
        self._stopping = True
        await self._slots.drained(seconds=seconds)
        unsent = dict(self._sending)
        for task in unsent.values():
            task.cancel()
        await self._slots.drained()  # what was sent is recorded
        await give_back(self._db, list(unsent))

    async def _send_and_record(self, delivery: Claimed) -> None:
        """What goes wrong in here is logged by the slot and left to the lease."""
        try:
            outcome = await self._send(delivery)
        finally:
            self._sending.pop(delivery, None)
        if outcome is None:
            return
        attempt = self._made(delivery, outcome)
        try:
            self._tell(delivery, attempt, await self._recorder.record(attempt))
        except LeaseLost:
            logs.count("event_deliveries.lease_lost")
            self._log.info("event_delivery.lease_lost", event_delivery_id=ids.show(ids.EVENT_DELIVERY, delivery.id), fence=delivery.fence)

    async def _send(self, delivery: Claimed) -> Outcome | None:
        """None when nothing was sent: an event is never sent unsigned, and the lease is its wait until the next look."""
        secrets = [self._unseal(sealed).decode() for sealed in delivery.sealed_secrets]
        if not secrets:
            self._log.error("event_delivery.unsigned", endpoint_id=ids.show(ids.ENDPOINT, delivery.endpoint_id))
            return None
        signed = signing.headers(delivery.event_id, int(delivery.claimed_at.timestamp()), delivery.body, secrets)
        headers = {"Content-Type": "application/json", **signed}
        return await self._transport.send(DeliveryRequest(delivery.url, delivery.body, headers, delivery.claimed_at))

    def _made(self, delivery: Claimed, outcome: Outcome) -> Attempt:
        return Attempt(
            id=ids.new(self._db.clock.now()),
            tenant_id=delivery.tenant_id,
            event_delivery_id=delivery.id,
            endpoint_id=delivery.endpoint_id,
            fence=delivery.fence,
            trigger=delivery.trigger,
            started_at=delivery.claimed_at,
            url=delivery.url,
            outcome=outcome,
            after=decide(delivery.attempt_count, outcome, schedule=self._settings.retry_schedule, chance=self._chance()),
        )

    def _tell(self, delivery: Claimed, attempt: Attempt, recorded: Recorded) -> None:
        outcome, after = attempt.outcome, attempt.after.status
        logs.count(f"event_deliveries.{'retried' if after is EventDeliveryStatus.PENDING else after}")
        self._log.info(
            "event_delivery.attempted",
            event_delivery_id=ids.show(ids.EVENT_DELIVERY, delivery.id),
            event_id=delivery.event_id,
            event_type=delivery.event_type,
            tenant_id=delivery.tenant_id,
            endpoint_id=ids.show(ids.ENDPOINT, delivery.endpoint_id),
            attempt=recorded.number,
            attempts_max=len(self._settings.retry_schedule),
            trigger=delivery.trigger,
            outcome=outcome.kind,
            http_status=outcome.status_code,
            error=outcome.error,
            address=outcome.address,
            duration_ms=outcome.duration_ms,
            status=recorded.status,
            next_attempt_at=recorded.next_attempt_at and recorded.next_attempt_at.isoformat(),
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """An endpoint with something due, locked; `most` may be in flight now, `of_tenant` and `failing_of_tenant` are those of its tenant."""

    tenant_id: str
    endpoint_id: UUID
    in_flight: int
    due: int
    most: int
    failing: bool
    of_tenant: int
    failing_of_tenant: int


# Endpoints with something due. The index of due rows is read from one endpoint's first entry to the next endpoint's, so the cost is by
# endpoint, whatever the number of rows. In flight = unexpired leases, found among the oldest due rows, since claiming takes the oldest.
# A free slot goes to the tenant, then to the endpoint, with the fewest in flight, then to the oldest row; an endpoint takes at most half
# of what its tenant has left, so that the first ones to hang, not known as failing yet, leave something to the tenant's others.
# LATERAL and LIMIT keep the plans at index look-ups, also while statistics are missing or tell of one endpoint only.
_CHOOSE: Final = """
WITH RECURSIVE waiting AS (
    (SELECT tenant_id, endpoint_id, next_attempt_at FROM event_deliveries
      WHERE next_attempt_at IS NOT NULL ORDER BY tenant_id, endpoint_id, next_attempt_at LIMIT 1)
    UNION ALL
    SELECT following.* FROM waiting CROSS JOIN LATERAL (
        SELECT tenant_id, endpoint_id, next_attempt_at FROM event_deliveries AS d
         WHERE next_attempt_at IS NOT NULL AND (d.tenant_id, d.endpoint_id) > (waiting.tenant_id, waiting.endpoint_id)
         ORDER BY tenant_id, endpoint_id, next_attempt_at LIMIT 1) AS following
), counted AS (
    SELECT waiting.*, endpoint.most, endpoint.failing, oldest.due, oldest.in_flight
      FROM waiting CROSS JOIN LATERAL (
        SELECT e.max_in_flight, coalesce(s.consecutive_failures, 0) > 0 AS failing,
               CASE WHEN coalesce(s.consecutive_failures, 0) < %(trying_from)s THEN e.max_in_flight ELSE 1 END AS most
          FROM endpoints AS e LEFT JOIN endpoint_states AS s ON s.tenant_id = e.tenant_id AND s.endpoint_id = e.id
         WHERE e.tenant_id = waiting.tenant_id AND e.id = waiting.endpoint_id AND e.status = 'enabled' AND e.deleted_at IS NULL
           AND (s.open_until IS NULL OR s.open_until <= ipn_now())
         LIMIT 1) AS endpoint CROSS JOIN LATERAL (
        SELECT count(*) AS due, count(*) FILTER (WHERE lease_expires_at > ipn_now()) AS in_flight FROM (
            SELECT lease_expires_at FROM event_deliveries AS d
             WHERE d.tenant_id = waiting.tenant_id AND d.endpoint_id = waiting.endpoint_id AND d.next_attempt_at <= ipn_now()
             ORDER BY d.next_attempt_at LIMIT endpoint.max_in_flight + %(latecomers)s) AS first) AS oldest
     WHERE waiting.next_attempt_at <= ipn_now()
), held AS (
    SELECT counted.*, sum(in_flight) OVER (PARTITION BY tenant_id) AS of_tenant,
           coalesce(sum(in_flight) FILTER (WHERE failing) OVER (PARTITION BY tenant_id), 0) AS failing_of_tenant
      FROM counted
), placed AS (
    SELECT tenant_id, endpoint_id, next_attempt_at, in_flight, due, failing, of_tenant, failing_of_tenant,
           least(most, greatest(1, (%(per_tenant)s - of_tenant + in_flight) / 2)) AS most,
           of_tenant + row_number() OVER (PARTITION BY tenant_id ORDER BY in_flight, next_attempt_at, endpoint_id) AS place
      FROM held WHERE in_flight < least(most, due) AND NOT (failing AND failing_of_tenant >= %(failing_per_tenant)s)
)
SELECT placed.tenant_id, placed.endpoint_id, placed.in_flight, placed.due, placed.most::int, placed.failing,
       placed.of_tenant::int, placed.failing_of_tenant::int
  FROM (SELECT * FROM placed WHERE in_flight < most AND place <= %(per_tenant)s ORDER BY place, next_attempt_at) AS placed
 CROSS JOIN LATERAL (
        SELECT FROM endpoints AS e
         WHERE e.tenant_id = placed.tenant_id AND e.id = placed.endpoint_id AND e.status = 'enabled' AND e.deleted_at IS NULL
         LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) AS free
 ORDER BY placed.place, placed.next_attempt_at LIMIT %(limit)s
"""

_CLAIM: Final = """
WITH chosen AS (
    SELECT * FROM unnest(%(tenant_ids)s::text[], %(endpoint_ids)s::uuid[], %(shares)s::int[], %(mosts)s::int[])
             AS chosen (tenant_id, endpoint_id, share, most)
), picked AS MATERIALIZED (
    SELECT chosen.tenant_id, due.id, event.body, endpoint.url,
           ARRAY(SELECT ciphertext FROM endpoint_secrets AS s
                  WHERE s.tenant_id = chosen.tenant_id AND s.endpoint_id = chosen.endpoint_id
                    AND (s.expires_at IS NULL OR s.expires_at > ipn_now()) ORDER BY s.created_at DESC, s.id DESC) AS sealed_secrets
      FROM chosen CROSS JOIN LATERAL (
        SELECT url, max_in_flight FROM endpoints AS e WHERE e.tenant_id = chosen.tenant_id AND e.id = chosen.endpoint_id LIMIT 1
      ) AS endpoint CROSS JOIN LATERAL (
        SELECT count(*) AS in_flight FROM (
            SELECT lease_expires_at FROM event_deliveries AS d
             WHERE d.tenant_id = chosen.tenant_id AND d.endpoint_id = chosen.endpoint_id AND d.next_attempt_at <= ipn_now()
             ORDER BY d.next_attempt_at LIMIT endpoint.max_in_flight + %(latecomers)s) AS first
         WHERE lease_expires_at > ipn_now()
      ) AS oldest CROSS JOIN LATERAL (
        SELECT id, event_id FROM event_deliveries AS d
         WHERE d.tenant_id = chosen.tenant_id AND d.endpoint_id = chosen.endpoint_id AND d.next_attempt_at <= ipn_now()
           AND (d.lease_expires_at IS NULL OR d.lease_expires_at <= ipn_now())
         ORDER BY d.next_attempt_at LIMIT greatest(0, least(chosen.share, chosen.most - oldest.in_flight))
           FOR UPDATE SKIP LOCKED
      ) AS due CROSS JOIN LATERAL (
        SELECT body FROM events WHERE events.tenant_id = chosen.tenant_id AND events.id = due.event_id LIMIT 1) AS event
     LIMIT %(limit)s
)
UPDATE event_deliveries AS d
   SET lease_expires_at = ipn_now() + %(lease_seconds)s * interval '1 second', fence = fence + 1
  FROM picked
 WHERE d.tenant_id = picked.tenant_id AND d.id = picked.id
RETURNING d.tenant_id, d.id, d.endpoint_id, d.event_id, d.event_type, d.attempt_count, d.next_trigger AS trigger, d.fence,
          d.next_attempt_at AS due_at, ipn_now() AS claimed_at, picked.url, picked.body, picked.sealed_secrets
"""


async def claim(tx: Transaction, *, limit: int, lease_seconds: float) -> list[Claimed]:
    """Take leases on due event deliveries of enabled endpoints, at most `limit`, oldest first; `share_out` says how many of each.

    The chosen endpoints stay locked until the commit, and their leases are counted once more under that lock: no number of dispatchers
    takes more than `max_in_flight` of one endpoint. An endpoint that another dispatcher has locked is passed over.
    """
    bound = {"latecomers": LATECOMERS_MAX, "limit": limit}
    limits = {"per_tenant": IN_FLIGHT_PER_TENANT, "failing_per_tenant": FAILING_PER_TENANT, "trying_from": TRYING_FROM}
    chosen = await tx.all(Chosen, _CHOOSE, bound | limits)
    if not chosen:
        return []
    dealt = {
        "tenant_ids": [endpoint.tenant_id for endpoint in chosen],
        "endpoint_ids": [endpoint.endpoint_id for endpoint in chosen],
        "shares": share_out(chosen, limit),
        "mosts": [endpoint.most for endpoint in chosen],
    }
    claimed = await tx.all(Claimed, _CLAIM, bound | dealt | {"lease_seconds": lease_seconds})
    return sorted(claimed, key=lambda delivery: delivery.due_at)


def share_out(chosen: Sequence[Chosen], limit: int) -> list[int]:
    """How many slots each endpoint gets, in all at most `limit`. Pure.

    One after the other goes to the tenant, then to its endpoint, with the fewest in flight, and where these are equal to the first in
    `chosen`; within the limits of the endpoint, of the tenant's failing endpoints together, and of the tenant. An endpoint takes at most
    half of what its tenant has left.
    """
    shares = [0] * len(chosen)
    held = {endpoint.tenant_id: endpoint.of_tenant for endpoint in chosen}
    failing = {endpoint.tenant_id: endpoint.failing_of_tenant for endpoint in chosen}
    queues: dict[str, list[tuple[int, int]]] = {}
    for number, endpoint in enumerate(chosen):
        queues.setdefault(endpoint.tenant_id, []).append((endpoint.in_flight, number))
    turns = [(held[tenant], queue[0][1], tenant) for tenant, queue in queues.items()]
    heapify(turns)
    for queue in queues.values():
        heapify(queue)
    while turns and limit > 0:
        _, _, tenant = heappop(turns)
        in_flight, number = heappop(queues[tenant])
        endpoint = chosen[number]
        half_of_the_rest = max(1, (IN_FLIGHT_PER_TENANT - held[tenant] + in_flight) // 2)
        may = not (endpoint.failing and failing[tenant] >= FAILING_PER_TENANT)
        if may and in_flight < min(endpoint.most, endpoint.due, half_of_the_rest):
            shares[number] += 1
            held[tenant] += 1
            failing[tenant] += endpoint.failing
            limit -= 1
            heappush(queues[tenant], (in_flight + 1, number))
        if queues[tenant] and held[tenant] < IN_FLIGHT_PER_TENANT:
            heappush(turns, (held[tenant], queues[tenant][0][1], tenant))
    return shares


async def give_back(db: Database, unsent: Sequence[Claimed]) -> None:
    """End leases before their time, where they are still ours: others may claim those event deliveries at once."""
    if not unsent:
        return
    async with db.transaction("event_deliveries.give_back") as tx:
        await tx.execute(
            """
            UPDATE event_deliveries AS d SET lease_expires_at = NULL
              FROM unnest(%(tenant_ids)s::text[], %(ids)s::uuid[], %(fences)s::bigint[]) AS given (tenant_id, id, fence)
             WHERE d.tenant_id = given.tenant_id AND d.id = given.id AND d.fence = given.fence
            """,
            {
                "tenant_ids": [delivery.tenant_id for delivery in unsent],
                "ids": [delivery.id for delivery in unsent],
                "fences": [delivery.fence for delivery in unsent],
            },
        )
