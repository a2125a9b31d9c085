"""Claiming: who gets the free slots, how many, and that a claim is worked on whatever happens beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from ipn_gateway import claims, inbox
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from tests.world import World


async def waiting(world: World, source: str, count: int) -> None:
    """So many proved deliveries are due at a source."""
    await world.source(source)
    for number in range(count):
        await world.notify(world.pay(f"{source}-{number}"), source=source)


async def in_flight(world: World) -> dict[str, int]:
    rows = await world.rows("SELECT source_id, count(*) FROM inbox WHERE lease_expires_at > ipn_now() GROUP BY 1")
    return {row["source_id"]: row["count"] for row in rows}


async def claim(world: World, limit: int) -> int:
    """Leases are taken, and nobody works."""
    return len(await claims.proved(world.rt.inbox_db, limit=limit, lease_seconds=45, parking_hours=72))


async def test_a_source_has_a_cap_and_the_others_get_the_rest(world: World) -> None:
    """A source with a long queue takes a quarter of its tenant's share at most."""
    await waiting(world, "busy", claims.LEASED_PER_SOURCE + 4)
    await waiting(world, "calm", 2)

    assert await claim(world, 100) == claims.LEASED_PER_SOURCE + 2
    assert await in_flight(world) == {"busy": claims.LEASED_PER_SOURCE, "calm": 2}
    assert claims.LEASED_PER_TENANT == 4 * claims.LEASED_PER_SOURCE


async def test_a_free_slot_goes_to_the_source_with_the_fewest_in_flight(world: World) -> None:
    """Two sources with long queues and a slow provider do not starve a third one, whatever their names are."""
    for source in ("a-busy", "b-busy"):
        await waiting(world, source, 20)
    await waiting(world, "z-calm", 2)
    assert await claim(world, 24) == 24

    assert await claim(world, 3) == 3

    assert (await in_flight(world))["z-calm"] == 2


async def test_the_oldest_due_goes_first(world: World) -> None:
    """Within a source the queue is one."""
    for number in range(3):
        await world.order(f"ORD-{number}")
        await world.notify(world.pay(f"ORD-{number}"))
        world.rt.clock.advance(seconds=1)
    world.worker = replace(world.worker, slots=Slots(1))

    await inbox.run_once(world.worker)
    await world.worker.slots.drained()

    assert await world.outcomes() == ["applied", "received", "received"]


async def test_never_more_is_claimed_than_slots_are_free(world: World) -> None:
    """Proved and unproved ones together: what is claimed is worked on at once, under a running lease."""
    for source in ("one", "two", "three"):
        await waiting(world, source, 1)
        await world.notify(encode(FORGERIES["odd_key"](world.pay(f"{source}-unproved"))), source=source)

    assert await claim(world, 0) == 0
    unproved = await claims.unproved(world.rt.inbox_db, limit=2, lease_seconds=45, parking_hours=72)
    rest = await claims.unproved(world.rt.inbox_db, limit=2, lease_seconds=45, parking_hours=72)

    assert (len(unproved), len(rest)) == (2, 1)
    assert len({row.source_id for row in unproved + rest}) == 3


@pytest.mark.case("S141")
async def test_what_is_claimed_is_worked_on_although_the_next_claim_fails(world: World) -> None:
    """The database goes between two claims: the first one's deliveries do not wait for their lease to end."""

    async def gone() -> None:
        raise psycopg.OperationalError

    await world.order("ORD-1")
    world.rt.faults.on["inbox.claim_unproved:statement_1"] = gone
    await world.notify(encode(FORGERIES["odd_key"](world.pay("ORD-2"))))
    receipt = await world.notify(world.pay("ORD-1"))
    with pytest.raises(psycopg.OperationalError):
        await inbox.run_once(world.worker)
    await world.worker.slots.drained()

    assert await world.outcome(receipt) == ("applied", None)


async def test_a_lease_that_ended_is_taken_over_with_a_higher_fence(world: World) -> None:
    """A live one is not; the fence only grows."""
    await waiting(world, "one", 1)
    first = await claims.proved(world.rt.inbox_db, limit=8, lease_seconds=45, parking_hours=72)
    world.rt.clock.advance(seconds=44)
    assert await claim(world, 8) == 0

    world.rt.clock.advance(seconds=1)
    second = await claims.proved(world.rt.inbox_db, limit=8, lease_seconds=45, parking_hours=72)

    assert [row.fence for row in first + second] == [1, 2]
