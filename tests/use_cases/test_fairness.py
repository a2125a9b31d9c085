"""Who gets the slots: no source, endpoint or tenant keeps the others out, whatever its name, its queue, or how long it hangs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import claims, event_claims, event_deliveries, ids, inbox, reconciliation, source_states
from ipn_gateway.event_claims import Chosen, share_out
from tests.dispatching import Hanging, Subscribers, dispatching
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway.db import Database
    from tests.make import Make

CAPS = {"per_source": claims.LEASED_PER_SOURCE, "per_tenant": claims.LEASED_PER_TENANT}
CLAIMING = CAPS | {"probing_from": source_states.PROBING_FROM, "lease": 45, "unproved": 1, "parking": 72}


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


async def run(db: Database, statement: str, **values: Any) -> None:
    async with db.transaction("test.run") as tx:
        await tx.execute(statement, values)


async def notified(db: Database, tenant: str, source: str, count: int, *, proved: bool = True, leased: int = 0) -> None:
    """So many deliveries are due at a source, and `leased` of them are being worked on."""
    await run(
        db,
        """WITH n AS (SELECT gen_random_uuid() AS id, n FROM generate_series(1, %(count)s) AS n), d AS (
               INSERT INTO notification_deliveries (tenant_id, id, source_id, provider, via, headers, raw_body, sha256, proof)
               SELECT %(tenant)s, overlay(id::text placing %(today)s from 1 for 13)::uuid, %(source)s, 'sslcommerz', 'ipn', '[]', '', '',
                      'proved' FROM n RETURNING id)
           INSERT INTO inbox (tenant_id, notification_delivery_id, source_id, proved, due_at, lease_expires_at)
           SELECT %(tenant)s, id, %(source)s, %(proved)s, ipn_now() - interval '1 minute',
                  CASE WHEN row_number() OVER () <= %(leased)s THEN ipn_now() + interval '1 minute' END FROM d""",
        tenant=tenant,
        source=source,
        count=count,
        today=str(ids.new(db.clock.now()))[:13],
        proved=proved,
        leased=leased,
    )


async def unpaid(db: Database, tenant: str, source: str, count: int) -> None:
    """So many orders of a source are due to be asked for."""
    await run(
        db,
        """INSERT INTO sweeps (tenant_id, order_id, source_id, due_at)
           SELECT %(tenant)s, %(source)s || '-' || n, %(source)s, ipn_now() - interval '1 minute'
             FROM generate_series(1, %(count)s) AS n""",
        tenant=tenant,
        source=source,
        count=count,
    )


async def notifications(db: Database, limit: int) -> Counter[str]:
    """Claim; how many of each source."""
    return Counter(row.source_id for row in await claims.proved(db, limit=limit, lease_seconds=45, parking_hours=72))


async def orders(db: Database, limit: int) -> Counter[str]:
    """Claim; how many of each source."""
    return Counter(row.source_id for row in await reconciliation.claim(db, limit=limit, lease_seconds=45))


# Notifications


async def test_no_tenant_holds_more_than_half_of_the_slots(db: Database) -> None:
    """Four sources whose names come first, with long queues and a provider that hangs, do not starve the last one, another tenant's."""
    for source in ("aa-slow", "ab-slow", "ac-slow", "ad-slow", "ae-slow"):
        await notified(db, "acme", source, 100)
    await notified(db, "beta", "zz-good", 1)

    first = await notifications(db, inbox.SLOTS)
    again = await notifications(db, inbox.SLOTS - first.total())
    await notified(db, "beta", "zz-good", 1)

    assert first["zz-good"] == 1
    assert first.total() - 1 == claims.LEASED_PER_TENANT == inbox.SLOTS / 2
    assert again.total() == 0
    assert await notifications(db, inbox.SLOTS - first.total()) == {"zz-good": 1}


async def test_sources_of_a_tenant_share_alike(db: Database) -> None:
    """Whatever their names; a smaller number of slots is shared in the same way."""
    for source in ("aa", "mm", "zz"):
        await notified(db, "acme", source, 20)
    await notified(db, "beta", "other", 20)

    assert await notifications(db, 12) == {"aa": 2, "mm": 2, "zz": 2, "other": 6}


async def test_a_source_with_nothing_to_take_takes_up_no_place(db: Database) -> None:
    """All that it has is being worked on: the one free slot goes to a tenant with more in flight that has work."""
    await notified(db, "beta", "aa-busy", 1, leased=1)
    await notified(db, "acme", "mm", 10, leased=5)

    assert await notifications(db, 1) == {"mm": 1}


async def test_unproved_ones_are_dealt_out_in_the_same_way(db: Database) -> None:
    """One of each source, first those of the tenant with the fewest in flight, of either kind."""
    await notified(db, "acme", "aa", 10, leased=5)
    await notified(db, "acme", "ab", 1, proved=False)
    await notified(db, "beta", "zz", 2, proved=False)

    claimed = await claims.unproved(db, limit=1, lease_seconds=45, parking_hours=72)

    assert [row.source_id for row in claimed] == ["zz"]


async def test_a_long_queue_leaves_unproved_ones_their_own_slots(db: Database) -> None:
    """A source that is at its cap for ever still has them asked about, a few at a time."""
    await notified(db, "acme", "busy", 100, leased=claims.LEASED_PER_SOURCE)
    await notified(db, "acme", "busy", 10, proved=False)
    assert (await notifications(db, 64)).total() == 0

    claimed = 0
    for _ in range(6):
        claimed += len(await claims.unproved(db, limit=64, lease_seconds=45, parking_hours=72))
        db.clock.advance(seconds=1)

    assert claimed == claims.UNPROVED_IN_FLIGHT


async def test_a_claim_locks_what_it_takes_and_no_more(db: Database) -> None:
    """The other rows are free for others at the same time."""
    await notified(db, "acme", "one", 10)
    async with db.transaction("test.claim") as tx:
        due = await tx.all(dict, claims._PROVED + "SELECT * FROM due", CLAIMING | {"limit": 3})
        async with db._pool.connection() as other:
            rows = await (await other.execute("SELECT FROM inbox FOR UPDATE SKIP LOCKED")).fetchall()

    assert (len(due), len(rows)) == (3, 7)


# Sweeps


async def test_a_provider_that_hangs_keeps_no_other_from_being_asked(db: Database) -> None:
    """Its orders in flight count, however often is claimed; those of other sources go on."""
    await unpaid(db, "acme", "hangs", 300)
    assert await orders(db, 32) == {"hangs": reconciliation.IN_FLIGHT_PER_SOURCE}
    await unpaid(db, "beta", "works", 2)

    assert await orders(db, 28) == {"works": 2}
    assert (await orders(db, 26)).total() == 0


async def test_no_tenant_holds_more_than_half_of_the_sweep(db: Database) -> None:
    """With ever so many sources."""
    for number in range(10):
        await unpaid(db, "acme", f"a{number}", 10)
    await unpaid(db, "beta", "z", 1)

    claimed = await orders(db, reconciliation.SLOTS)

    assert claimed["z"] == 1
    assert claimed.total() - 1 == reconciliation.SLOTS // 2


async def test_a_source_that_is_probed_gets_one_at_a_time(db: Database, make: Make) -> None:
    """Of the sweep as of the inbox."""
    await make.source_state(source_id="mute", unknown_streak=source_states.PROBING_FROM)
    await unpaid(db, "acme", "mute", 10)
    await notified(db, "acme", "mute", 10)

    assert (await orders(db, 8), await notifications(db, 8)) == ({"mute": 1}, {"mute": 1})
    assert (await orders(db, 8)).total() + (await notifications(db, 8)).total() == 0


# What claiming costs


async def test_claiming_reads_the_indexes(db: Database) -> None:
    """Of twenty thousand due rows a few are read, without statistics and with them."""
    await notified(db, "acme", "proved", 20_000, leased=10)
    await notified(db, "acme", "unproved", 20_000, proved=False)
    await unpaid(db, "acme", "swept", 20_000)
    read: list[int] = []
    await _explain(db, read)
    async with db.autocommit("test.analyze") as tx:
        await tx.execute("ANALYZE inbox, sweeps, notification_deliveries")
    await _explain(db, read)

    assert len(read) == 6
    assert max(read) < 1000


async def _explain(db: Database, read: list[int]) -> None:
    """Claim, add how many rows each statement read, and undo it."""
    async with db.transaction("test.explain") as tx:
        for statement in (claims._PROVED + claims._LEASE, claims._UNPROVED + claims._LEASE, reconciliation._CLAIM):
            plan = await tx.value(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", CLAIMING | {"limit": 10})
            read.append(_read(plan[0]["Plan"]))
        raise psycopg.Rollback


def _read(node: dict[str, Any]) -> int:
    own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] if "Relation Name" in node else 0
    return int(own) + sum(_read(child) for child in node.get("Plans", []))


# Endpoints


async def staged(db: Database, tenant: str, endpoint_id: UUID, count: int) -> None:
    """So many event deliveries of an endpoint are due."""
    await run(
        db,
        """WITH staged AS (
               INSERT INTO event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, next_attempt_at)
               SELECT %(tenant)s, gen_random_uuid(), %(endpoint)s || '-' || n, %(endpoint)s::uuid, 'order.paid',
                      ipn_now() - interval '1 hour'
                 FROM generate_series(1, %(count)s) AS n RETURNING tenant_id, event_id)
           INSERT INTO events (tenant_id, id, type, body) SELECT tenant_id, event_id, 'endpoint.test', '{}' FROM staged""",
        tenant=tenant,
        endpoint=str(endpoint_id),
        count=count,
    )


@pytest.mark.case("S122")
async def test_a_tenants_endpoints_that_hang_delay_no_other(db: Database, subscribers: Subscribers) -> None:
    """Seven that take all that they may: another tenant's event, and one of the same tenant's, arrive while all of those hang."""
    hanging = Hanging()
    async with (
        serving(hanging) as slow,
        serving(says(OK)) as quick,
        dispatching(db, slots=event_deliveries.SLOTS) as running,
    ):
        hung = [await subscribers.endpoint(slow, max_in_flight=100) for _ in range(7)]
        for endpoint_id in hung:
            await staged(db, TENANT, endpoint_id, 100)
        held = await running.start_all()
        await hanging.has(held)
        others = await subscribers.endpoint(quick, tenant_id="other"), await subscribers.endpoint(quick)
        await staged(db, "other", others[0], 1)
        await staged(db, TENANT, others[1], 1)
        await running.dispatcher.run_once()
        async with asyncio.timeout(10):
            while not all([await subscribers.statuses(endpoint_id) == {"delivered": 1} for endpoint_id in others]):
                await running.free()
        in_flight = [await subscribers.in_flight(endpoint_id) for endpoint_id in hung]

    assert sum(in_flight) == held < event_claims.IN_FLIGHT_PER_TENANT
    assert max(in_flight) - min(in_flight) <= 1


async def test_an_endpoint_that_fails_again_and_again_is_tried_one_by_one(db: Database, subscribers: Subscribers) -> None:
    """Five failures in a row leave it one slot; a success gives it back the others."""
    hanging = Hanging()
    async with serving(hanging) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        await subscribers.make.endpoint_state(endpoint_id=endpoint_id, consecutive_failures=5, failing_since=ago(seconds=10))
        await staged(db, TENANT, endpoint_id, 10)
        failing = await running.start_all()
        await hanging.has(1)
        hanging.let_one_go()
        await running.free()
        recovered = await running.start_all()

    assert (failing, recovered) == (1, 9)


async def test_failing_endpoints_together_leave_half_to_those_that_work(db: Database, subscribers: Subscribers) -> None:
    """Of what their tenant may hold."""
    for _ in range(3):
        endpoint_id = await subscribers.endpoint("http://localhost:1/", max_in_flight=100)
        await subscribers.make.endpoint_state(endpoint_id=endpoint_id, consecutive_failures=1, failing_since=ago(minutes=1))
        await staged(db, TENANT, endpoint_id, 100)
    working = await subscribers.endpoint("http://localhost:1/", max_in_flight=100)

    async def claim() -> Counter[UUID]:
        async with db.transaction("test.claim") as tx:
            return Counter(row.endpoint_id for row in await event_claims.claim(tx, limit=512, lease_seconds=45))

    assert (await claim()).total() == event_claims.FAILING_PER_TENANT
    await staged(db, TENANT, working, 100)
    assert (await claim()) == {working: 64}


def endpoint(tenant: str, **given: Any) -> Chosen:
    return Chosen(**{"tenant_id": tenant, "endpoint_id": None, "in_flight": 0, "due": 500, "most": 100, "failing": False}
        | {"of_tenant": 0, "failing_of_tenant": 0} | given)  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "limit", "shares"),
    [
        ([endpoint("a"), endpoint("a"), endpoint("b")], 4, [1, 1, 2]),
        ([endpoint("a", due=1), endpoint("b")], 8, [1, 7]),
        ([endpoint("a", most=1), endpoint("b")], 8, [1, 7]),
        ([endpoint("a", in_flight=3, of_tenant=3), endpoint("b")], 3, [0, 3]),
        ([endpoint("a", of_tenant=255), endpoint("a", of_tenant=255)], 9, [1, 0]),
        (
            [endpoint("a", failing=True, of_tenant=127, failing_of_tenant=127), endpoint("a", of_tenant=127, failing_of_tenant=127)],
            9,
            [1, 8],
        ),
        ([endpoint("a")], 512, [100]),
        ([endpoint("a") for _ in range(7)], 512, [32] * 7),
        ([endpoint("a")], 0, [0]),
    ],
)
def test_slots_are_dealt_out_one_by_one(chosen: list[Chosen], limit: int, shares: list[int]) -> None:
    """To the tenant with the fewest, then to its endpoint with the fewest, within every limit."""
    given = share_out(chosen, limit)

    assert sum(given) == sum(shares)
    assert given == shares
