"""Evidence is kept by a transaction of its own: whatever its length, and whatever becomes of the effect."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway.simulator.sslcommerz import encode

if TYPE_CHECKING:
    import psycopg

    from ipn_gateway.clock import Clock
    from ipn_gateway.effects import EffectNotification
    from tests.world import World

LONG = "e" * 5000


@pytest.mark.case("B129", "S111")
async def test_a_long_body_and_a_long_answer_of_a_rejected_one_are_kept(world: World, clock: Clock) -> None:
    """5 KB of fields, and 5 KB of what the provider says when it refutes them: the bytes are there, and what it said."""
    await world.order("ORD-1")
    fields = world.signed(world.pay("ORD-1"), error=LONG)
    world.fault("validator", "fields", times=None, fields={"status": "INVALID_TRANSACTION", "error": LONG})
    receipt = await world.notify(fields)

    for minutes in (2, 6, 10, 10):
        await world.drain()
        clock.advance(minutes=minutes)

    row = (await world.rows("SELECT outcome, reason, raw_body, provider_answer FROM notification_deliveries"))[0]
    assert (row["outcome"], row["reason"]) == await world.outcome(receipt) == ("rejected", "refuted")
    assert row["raw_body"] == encode(fields)
    assert len(row["raw_body"]) > 5000
    assert row["provider_answer"]["status"] == "INVALID_TRANSACTION"
    assert await world.status("ORD-1") == "pending"


@pytest.mark.case("B129")
async def test_evidence_stays_where_the_effect_was_rolled_back(world: World, clock: Clock) -> None:
    """The merchant's effect writes a row of its own, then raises 5 KB of text: nothing of it is left, and all of the delivery is."""
    await world.order("ORD-1")
    async with world.rt.db.autocommit("test.table") as tx:
        await tx.execute("CREATE TABLE credits (order_id text)")

    async def fails(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
        await connection.execute("INSERT INTO credits VALUES (%s)", (told.order_id,))
        raise ValueError(LONG)

    world.worker = replace(world.worker, effect=fails, settings=world.rt.settings.model_copy(update={"validation_schedule": (0, 5)}))
    fields = world.signed(world.pay("ORD-1"), error=LONG)
    receipt = await world.notify(fields)
    for _ in range(3):
        await world.drain()
        clock.advance(minutes=1)

    counts = await world.counts()
    assert await world.outcome(receipt) == ("dead", "effect_failed")
    assert await world.value("SELECT raw_body FROM notification_deliveries") == encode(fields)
    assert await world.value("SELECT count(*) FROM credits") == 0
    assert (counts["processed_notifications"], counts["payments"], counts["events"]) == (0, 0, 0)
    assert await world.status("ORD-1") == "pending"
