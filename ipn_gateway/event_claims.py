"""Claiming event deliveries: which are due, how many of each endpoint, and the leases.

Who gets the slots: an endpoint at most `max_in_flight`; the failing endpoints of a tenant at most half of what the tenant may hold; a
tenant at most half of all. So endpoints that hang delay no other. Beyond that three things of an endpoint decide, all of them under its
lock, so that no number of dispatchers gets past them: its breaker, its rate, and for an ordered one the sequence of each order's events.

The breaker is `endpoint_states.open_until`. While that is ahead the endpoint rests; once it is past, one event delivery at a time tries
it, until a success takes it away. With that one go those that another rest would hold up for more than 60 s in all: once the endpoint has
been failing for half a minute, all that is due, oldest first, within `max_in_flight`. So the breaker delays an attempt by up to 60 s, while
no more than `max_in_flight` of its endpoint are due; of more, so many go between two rests. A redelivery is claimed all the same: a person
asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import ordering
from ipn_gateway.attempts import REST_SECONDS_MAX, REST_SECONDS_MIN, TRYING_FROM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.db import Database, Transaction

IN_FLIGHT_PER_TENANT: Final = 256
FAILING_PER_TENANT: Final = IN_FLIGHT_PER_TENANT // 2
"""What a tenant's failing endpoints may hold together; the other half is for those that work."""

LATECOMERS_MAX: Final = 100
"""So many more than `max_in_flight` of an endpoint's oldest due rows are looked at: some are leased, or it is not their turn."""

PACE: Final = 0.94
"""Of a limited rate this part is used, so that sends that the network delays unevenly do not arrive faster than the limit."""

AT_ONCE: Final = 0.04
"""This part of a second's sends may go at once. With `PACE` that is less than the rate in whatever second one looks at."""


@dataclass(slots=True, eq=False)  # not frozen: one for every event, and that takes twice as long to make
class Claimed:
    """An event delivery under a lease, with all that an attempt needs. `claimed_at` is database time: the time of the attempt.

    `free_seconds` is of an endpoint with a limited rate: the wait until its next one may be claimed.
    """

    tenant_id: str
    id: UUID
    endpoint_id: UUID
    event_id: str
    event_type: str
    attempt_count: int
    tries: int  # those of them that are on the schedule, which redeliveries are not
    resumes: bool  # a redelivery of what is pending: when it fails, the schedule goes on where it was
    trigger: str
    fence: int
    due_at: datetime
    claimed_at: datetime
    ordered: bool
    free_seconds: float | None
    url: str = field(repr=False)
    body: bytes = field(repr=False)
    sealed_keys: list[bytes] = field(repr=False)  # secrets, then private keys, the newest of each first


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
    ordered: bool = False


# An endpoint and how it stands. A rate is paced: each send moves `paced_until` on by its share of a second, and may be made while that is
# ahead by no more than what may go at once. What is no whole number per second is taken as the next lower one, since nobody sends parts.
# What waits since `pressing_from` or longer, all that time because of the breaker, would wait longer than the longest rest if the next
# failure began another one.
_ENDPOINT: Final = """
SELECT e.url, e.max_in_flight, e.ordered, s.paced_until, rate.pace, rate.at_once, coalesce(s.consecutive_failures, 0) > 0 AS failing,
       coalesce(s.open_until > ipn_now(), false) AS resting,
       coalesce(s.open_until IS NOT NULL OR s.consecutive_failures >= %(trying_from)s, false) AS trying,
       CASE WHEN s.failing_since <= next_rest.covers_since THEN next_rest.covers_since END AS pressing_from,
       CASE WHEN rate.pace IS NOT NULL THEN
         greatest(0, floor(rate.at_once + 1e-6 - rate.pace * greatest(0, extract(epoch FROM s.paced_until - ipn_now())::float8)))::int
       END AS free{more}
  FROM endpoints AS e
  LEFT JOIN endpoint_states AS s ON s.tenant_id = e.tenant_id AND s.endpoint_id = e.id
 CROSS JOIN LATERAL (
        SELECT %(pace)s * whole.rate AS pace, CASE WHEN whole.rate IS NOT NULL THEN greatest(1, %(at_once)s * whole.rate) END AS at_once
          FROM (SELECT CASE WHEN e.rate_per_second < 1 THEN e.rate_per_second ELSE floor(e.rate_per_second) END::float8 AS rate) AS whole
       ) AS rate CROSS JOIN LATERAL (
        SELECT ipn_now() - interval '1 second' * %(rest_max)s
               + least(interval '1 second' * %(rest_max)s, greatest(interval '1 second' * %(rest_min)s, ipn_now() - s.failing_since))
               AS covers_since
       ) AS next_rest
 WHERE e.tenant_id = {of}.tenant_id AND e.id = {of}.endpoint_id AND e.status = 'enabled' AND e.deleted_at IS NULL LIMIT 1
"""

# In flight = unexpired leases, wherever their rows are: a redelivery, or enabling the endpoint, puts any number of others before them.
_OLDEST: Final = """
SELECT first.free + leased.in_flight AS due, leased.in_flight, first.by_hand, first.pressing
  FROM (SELECT count(*) AS in_flight FROM event_deliveries AS d
         WHERE d.tenant_id = {of}.tenant_id AND d.endpoint_id = {of}.endpoint_id AND d.lease_expires_at > ipn_now()) AS leased
 CROSS JOIN (
        SELECT count(*) FILTER (WHERE by_hand OR NOT endpoint.resting) AS free, count(*) FILTER (WHERE by_hand) AS by_hand,
               count(*) FILTER (WHERE NOT by_hand AND next_attempt_at <= endpoint.pressing_from) AS pressing
          FROM (SELECT lease_expires_at > ipn_now() AS leased, next_trigger = 'redelivery' AS by_hand, next_attempt_at
                  FROM event_deliveries AS d
                 WHERE d.tenant_id = {of}.tenant_id AND d.endpoint_id = {of}.endpoint_id AND d.next_attempt_at <= ipn_now()
                 ORDER BY d.next_attempt_at LIMIT endpoint.max_in_flight + %(latecomers)s) AS oldest
         WHERE leased IS NOT TRUE) AS first
"""

_MOST: Final = """
least(endpoint.max_in_flight, oldest.in_flight + endpoint.free,
      CASE WHEN endpoint.resting THEN oldest.in_flight + oldest.by_hand
           WHEN endpoint.trying THEN greatest(1, oldest.in_flight + oldest.by_hand + oldest.pressing) END)
"""

# Endpoints with something due. The index of due rows is read from one endpoint's first entry to the next endpoint's, so the cost is by
# endpoint, whatever the number of rows; of one that rests no more than its first, where a redelivery is put.
# A free slot goes to the tenant, then to the endpoint, with the fewest in flight, then to the oldest row; an endpoint takes at most half
# of what its tenant has left, so that the first ones to hang, not known as failing yet, leave something to the tenant's others.
# LATERAL and LIMIT keep the plans at index look-ups, also while statistics are missing or tell of one endpoint only.
_CHOOSE: Final = f"""
WITH RECURSIVE waiting AS (
    (SELECT tenant_id, endpoint_id, next_attempt_at, next_trigger FROM event_deliveries
      WHERE next_attempt_at IS NOT NULL ORDER BY tenant_id, endpoint_id, next_attempt_at LIMIT 1)
    UNION ALL
    SELECT following.* FROM waiting CROSS JOIN LATERAL (
        SELECT tenant_id, endpoint_id, next_attempt_at, next_trigger FROM event_deliveries AS d
         WHERE next_attempt_at IS NOT NULL AND (d.tenant_id, d.endpoint_id) > (waiting.tenant_id, waiting.endpoint_id)
         ORDER BY tenant_id, endpoint_id, next_attempt_at LIMIT 1) AS following
), counted AS (
    SELECT waiting.tenant_id, waiting.endpoint_id, waiting.next_attempt_at, endpoint.failing, endpoint.ordered,
           oldest.due, oldest.in_flight, {_MOST} AS most
      FROM waiting CROSS JOIN LATERAL ({_ENDPOINT.format(of="waiting", more="")}) AS endpoint
     CROSS JOIN LATERAL ({_OLDEST.format(of="waiting")}) AS oldest
     WHERE waiting.next_attempt_at <= ipn_now() AND (NOT endpoint.resting OR waiting.next_trigger = 'redelivery')
), held AS (
    SELECT counted.*, sum(in_flight) OVER (PARTITION BY tenant_id) AS of_tenant,
           coalesce(sum(in_flight) FILTER (WHERE failing) OVER (PARTITION BY tenant_id), 0) AS failing_of_tenant
      FROM counted
), placed AS (
    SELECT tenant_id, endpoint_id, next_attempt_at, in_flight, due, failing, ordered, of_tenant, failing_of_tenant,
           least(most, greatest(1, (%(per_tenant)s - of_tenant + in_flight) / 2)) AS most,
           of_tenant + row_number() OVER (PARTITION BY tenant_id ORDER BY in_flight, next_attempt_at, endpoint_id) AS place
      FROM held WHERE in_flight < least(most, due) AND NOT (failing AND failing_of_tenant >= %(failing_per_tenant)s)
)
SELECT placed.tenant_id, placed.endpoint_id, placed.in_flight, placed.due, placed.most::int, placed.failing,
       placed.of_tenant::int, placed.failing_of_tenant::int, placed.ordered
  FROM (SELECT * FROM placed WHERE in_flight < most AND place <= %(per_tenant)s ORDER BY place, next_attempt_at) AS placed
 CROSS JOIN LATERAL (
        SELECT FROM endpoints AS e
         WHERE e.tenant_id = placed.tenant_id AND e.id = placed.endpoint_id AND e.status = 'enabled' AND e.deleted_at IS NULL
         LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) AS free
 ORDER BY placed.place, placed.next_attempt_at LIMIT %(limit)s
"""

# Looked up once for an endpoint, not for each of what is claimed of it.
_KEYS: Final = """,
       ARRAY(SELECT sealed.key FROM endpoint_secrets
              CROSS JOIN LATERAL (VALUES (1, ciphertext), (2, seed_ciphertext)) AS sealed (place, key)
              WHERE tenant_id = e.tenant_id AND endpoint_id = e.id AND sealed.key IS NOT NULL
                AND (expires_at IS NULL OR expires_at > ipn_now())
              ORDER BY sealed.place, created_at DESC, id DESC) AS sealed_keys"""

# How an endpoint stands is read again under its lock. Only what is claimed of one with a limited rate writes its state.
_CLAIM: Final = f"""
WITH chosen AS (
    SELECT * FROM unnest(%(tenant_ids)b::text[], %(endpoint_ids)b::uuid[], %(shares)b::int[], %(mosts)b::int[])
             AS chosen (tenant_id, endpoint_id, share, most)
), picked AS MATERIALIZED (
    SELECT chosen.tenant_id, chosen.endpoint_id, due.id, event.body, endpoint.url, endpoint.ordered,
           endpoint.pace, endpoint.at_once, endpoint.paced_until, endpoint.sealed_keys
      FROM chosen CROSS JOIN LATERAL ({_ENDPOINT.format(of="chosen", more=_KEYS)}) AS endpoint
     CROSS JOIN LATERAL ({_OLDEST.format(of="chosen")}) AS oldest
     CROSS JOIN LATERAL (
        SELECT first.id, first.event_id FROM (
            SELECT id, event_id, order_id, sequence, next_trigger, next_attempt_at, lease_expires_at FROM event_deliveries AS d
             WHERE d.tenant_id = chosen.tenant_id AND d.endpoint_id = chosen.endpoint_id AND d.next_attempt_at <= ipn_now()
             ORDER BY d.next_attempt_at LIMIT endpoint.max_in_flight + %(latecomers)s) AS first
         WHERE (first.lease_expires_at IS NULL OR first.lease_expires_at <= ipn_now())
           AND (first.lease_expires_at IS NULL OR first.id <> ALL(%(held)b::uuid[]))
           AND (first.next_trigger = 'redelivery' OR NOT endpoint.resting AND (
                NOT endpoint.trying OR oldest.in_flight = 0 OR first.next_attempt_at <= endpoint.pressing_from))
           AND (NOT endpoint.ordered OR first.sequence IS NULL OR ({ordering.ITS_TURN}))
         ORDER BY first.next_attempt_at LIMIT greatest(0, least(chosen.share, least(chosen.most, {_MOST}) - oldest.in_flight))
      ) AS due CROSS JOIN LATERAL (
        SELECT FROM event_deliveries AS d
         WHERE d.tenant_id = chosen.tenant_id AND d.id = due.id AND d.next_attempt_at <= ipn_now()
           AND (d.lease_expires_at IS NULL OR d.lease_expires_at <= ipn_now())
         LIMIT 1 FOR UPDATE SKIP LOCKED
      ) AS free CROSS JOIN LATERAL (
        SELECT body FROM events WHERE events.tenant_id = chosen.tenant_id AND events.id = due.event_id LIMIT 1) AS event
     LIMIT %(limit)s
), paced AS (
    INSERT INTO endpoint_states (tenant_id, endpoint_id, paced_until)
    SELECT tenant_id, endpoint_id, greatest(paced_until, ipn_now()) + count(*) / pace * interval '1 second'
      FROM picked WHERE pace IS NOT NULL GROUP BY tenant_id, endpoint_id, paced_until, pace ORDER BY tenant_id, endpoint_id
    ON CONFLICT (tenant_id, endpoint_id) DO UPDATE SET paced_until = excluded.paced_until
    RETURNING tenant_id, endpoint_id, paced_until
)
UPDATE event_deliveries AS d
   SET lease_expires_at = ipn_now() + %(lease_seconds)s * interval '1 second', fence = fence + 1
  FROM picked LEFT JOIN paced ON paced.tenant_id = picked.tenant_id AND paced.endpoint_id = picked.endpoint_id
 WHERE d.tenant_id = picked.tenant_id AND d.id = picked.id
RETURNING d.tenant_id, d.id, d.endpoint_id, d.event_id, d.event_type, d.attempt_count, d.fence,
          d.attempt_count - d.redelivery_count AS tries, d.scheduled_at IS NOT NULL AS resumes, d.next_trigger AS trigger,
          d.next_attempt_at AS due_at, ipn_now() AS claimed_at, picked.ordered,
          extract(epoch FROM paced.paced_until - ipn_now())::float8 - (picked.at_once - 1) / picked.pace AS free_seconds,
          picked.url, picked.body, picked.sealed_keys
"""

_CONSTANTS: Final[dict[str, Any]] = {
    "held": [],
    "latecomers": LATECOMERS_MAX,
    "trying_from": TRYING_FROM,
    "rest_min": REST_SECONDS_MIN,
    "rest_max": REST_SECONDS_MAX,
    "pace": PACE,
    "at_once": AT_ONCE,
    "per_tenant": IN_FLIGHT_PER_TENANT,
    "failing_per_tenant": FAILING_PER_TENANT,
}


async def claim(tx: Transaction, *, limit: int, lease_seconds: float, held: Sequence[UUID] = ()) -> list[Claimed]:
    """Take leases on due event deliveries of enabled endpoints, at most `limit`, oldest first; `share_out` says how many of each.

    The chosen endpoints stay locked until the commit, and their leases are counted once more under that lock: no number of dispatchers
    takes more than `max_in_flight` of one endpoint. An endpoint that another dispatcher has locked is passed over.

    `held` are those that the caller has not done with although their leases may be over: only others may take these from it.
    """
    bound = _CONSTANTS | {"limit": limit, "lease_seconds": lease_seconds, "held": list(held)}
    chosen = await tx.all(Chosen, _CHOOSE, bound)
    if not chosen:
        return []
    if ordered := [(endpoint.tenant_id, endpoint.endpoint_id) for endpoint in chosen if endpoint.ordered]:
        await ordering.hold_back(tx, ordered, lease_seconds=lease_seconds)
    dealt = {
        "tenant_ids": [endpoint.tenant_id for endpoint in chosen],
        "endpoint_ids": [endpoint.endpoint_id for endpoint in chosen],
        "shares": share_out(chosen, limit),
        "mosts": [endpoint.most for endpoint in chosen],
    }
    claimed = await tx.all(Claimed, _CLAIM, bound | dealt)
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
              FROM unnest(%(tenant_ids)b::text[], %(ids)b::uuid[], %(fences)b::bigint[]) AS given (tenant_id, id, fence)
             WHERE d.tenant_id = given.tenant_id AND d.id = given.id AND d.fence = given.fence
            """,
            {
                "tenant_ids": [delivery.tenant_id for delivery in unsent],
                "ids": [delivery.id for delivery in unsent],
                "fences": [delivery.fence for delivery in unsent],
            },
        )
