"""Payments and refunds that meet on one account of the merchant's: every amount counts once, and two lock orders end in no lost effect."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from ipn_gateway import effects, ids, logs
from ipn_gateway.bookings import Origin
from ipn_gateway.providers.base import Confirmed, Effect
from tests import world as worlds
from tests.world import SOURCE, STORE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from ipn_gateway.clock import Clock
    from ipn_gateway.effects import EffectNotification
    from ipn_gateway.faults import Faults
    from tests.world import World

ROUNDS = 500
TOGETHER = 10
CREDIT, BACK = 100, 30
CREATE = "CREATE TABLE accounts (id int PRIMARY KEY, credit int NOT NULL, refunds int NOT NULL DEFAULT 0)"


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[World]:
    """A gateway whose merchant has accounts in the same database; a deadlock is found after 5 ms there, not after a second."""
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as admin:
        await admin.execute(CREATE)
        name = sql.Identifier(admin.info.dbname)
        await admin.execute(sql.SQL("ALTER DATABASE {} SET deadlock_timeout = '5ms'").format(name))
    async with worlds.opened(database_url, clock, faults) as opened:
        opened.worker = replace(opened.worker, effect=credit)
        yield opened


async def credit(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    """The merchant's effect: the order is locked by then, the account comes second. A payment adds, a refund takes away."""
    amount = -CREDIT if told.effect == "refunded" else CREDIT
    await connection.execute(
        "INSERT INTO accounts VALUES (%(id)s, %(amount)s) ON CONFLICT (id) DO UPDATE SET credit = accounts.credit + excluded.credit",
        {"id": told.metadata["account"], "amount": amount},
    )


async def released(*calls: Awaitable[Any]) -> None:
    """Run the calls at the same moment: each waits at a barrier until all are there."""
    barrier = asyncio.Barrier(len(calls))

    async def one(call: Awaitable[Any]) -> None:
        await barrier.wait()
        await call

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(one(call))


def hold_verdicts(world: World, parties: int) -> asyncio.Barrier:
    """Nobody applies before so many are at the barrier, those that have their verdict and others."""
    barrier = asyncio.Barrier(parties)

    async def wait() -> None:
        await barrier.wait()

    world.rt.faults.on["transport.ask:after"] = wait
    return barrier


def payment(order_id: str) -> Confirmed:
    return Confirmed(order_id, f"V-{order_id}", Effect.PAID, "VALID", STORE, Decimal("1000.00"), "BDT", f"BT-{order_id}")


def refund(order_id: str, reference: str, amount: str = "1000.00") -> Confirmed:
    return Confirmed(order_id, reference, Effect.REFUNDED, "REFUNDED", STORE, Decimal(amount), "BDT", f"BT-{order_id}")


async def apply(world: World, verdict: Confirmed) -> None:
    origin = Origin(TENANT, SOURCE, "sslcommerz", ids.new(world.rt.clock.now()))
    await effects.apply(world.rt.inbox_db, origin, verdict, credit)


@pytest.mark.case("B79")
@pytest.mark.parametrize("account_exists", [True, False])
async def test_payments_and_refunds_of_one_account_at_once_all_count(world: World, account_exists: bool) -> None:
    """Two orders paid in the same instant, then one refunded beside the payment of a third: two hundred of credit, in twenty rounds."""
    before = logs.counters["transactions.rerun"]
    for account in range(20):
        if account_exists:
            await world.value("INSERT INTO accounts VALUES (%(id)s, 0) RETURNING id", id=account)
        first, second, third = (f"ORD-{account}-{number}" for number in range(3))
        for order_id in (first, second, third):
            await world.order(order_id, metadata={"account": account})

        await released(apply(world, payment(first)), apply(world, payment(second)))
        assert await world.value("SELECT credit FROM accounts WHERE id = %(id)s", id=account) == 2 * CREDIT
        back = refund(first, f"R-{account}")
        await released(apply(world, back), apply(world, payment(third)), apply(world, back))

    assert await world.rows("SELECT credit, count(*) FROM accounts GROUP BY credit") == [{"credit": 2 * CREDIT, "count": 20}]
    assert await world.rows("SELECT status, count(*) FROM orders GROUP BY status ORDER BY status") == [
        {"status": "paid", "count": 40},
        {"status": "refunded", "count": 20},
    ]
    assert logs.counters["transactions.rerun"] == before


@pytest.mark.case("B81")
async def test_payments_and_refunds_lock_in_one_order(world: World) -> None:
    """Two refunds of an order beside the payment of another one of the account: the order first, then the account; nothing is run again."""
    before = logs.counters["transactions.rerun"]
    for number in range(0, ROUNDS // 5, TOGETHER):
        calls = []
        for place in range(number, number + TOGETHER):
            paid, refunded = f"PAID-{place}", f"BACK-{place}"
            for order_id in (paid, refunded):
                await world.order(order_id, metadata={"account": place % 2})
            await apply(world, payment(refunded))
            calls += [apply(world, payment(paid))]
            calls += [apply(world, refund(refunded, f"{half}-{place}", "500.00")) for half in ("R1", "R2")]
        await released(*calls)

    assert logs.counters["transactions.rerun"] == before
    assert await world.value("SELECT sum(credit) FROM accounts") == 0  # two payments and two refunds a round
    assert await world.rows("SELECT status, count(*) FROM orders GROUP BY status ORDER BY status") == [
        {"status": "paid", "count": ROUNDS // 5},
        {"status": "refunded", "count": ROUNDS // 5},
    ]
    assert await world.value("SELECT sum(amount_refunded) FROM payments") == Decimal("1000.00") * ROUNDS // 5


@pytest.mark.timeout(90)
@pytest.mark.case("B81")
async def test_a_merchant_who_locks_the_other_way_round_loses_no_effect(world: World) -> None:
    """Ours lock the order, then the account, the merchant's own refunds the other way round: what 40P01 ends is run again."""
    before = logs.counters["transactions.rerun"]
    async with AsyncExitStack() as stack:
        merchants = [await stack.enter_async_context(await _merchant(world)) for _ in range(TOGETHER)]
        for account in range(TOGETHER):
            await world.value("INSERT INTO accounts VALUES (%(id)s, 0) RETURNING id", id=account)
        for number in range(0, ROUNDS, TOGETHER):
            orders = [f"ORD-{number + account}" for account in range(TOGETHER)]
            for account, order_id in enumerate(orders):
                await world.order(order_id, metadata={"account": account})
                assert (await world.notify(world.pay(order_id))).error is None
            barrier = hold_verdicts(world, 2 * TOGETHER)  # until as many refunds are asked for
            refunds = [_refund_the_other_way_round(merchants[place], barrier, place, order_id) for place, order_id in enumerate(orders)]
            await asyncio.gather(world.drain(), *refunds)

    assert logs.counters["transactions.rerun"] > before
    assert await world.outcomes() == ["applied"] * ROUNDS
    assert await world.rows("SELECT credit, refunds, count(*) FROM accounts GROUP BY 1, 2") == [
        {"credit": (CREDIT - BACK) * ROUNDS // TOGETHER, "refunds": ROUNDS // TOGETHER, "count": TOGETHER}
    ]
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'paid' AND amount_paid = amount AND event_count = 1") == ROUNDS
    assert world.questions == ROUNDS  # what is run again is the transaction, never the question


async def _merchant(world: World) -> psycopg.AsyncConnection[Any]:
    """A connection of the merchant's own, which waits long, so that it is always our transaction that a deadlock ends."""
    return await psycopg.AsyncConnection.connect(world.rt.url, options="-c deadlock_timeout=10s", autocommit=True)


async def _refund_the_other_way_round(own: psycopg.AsyncConnection[Any], barrier: asyncio.Barrier, account: int, order_id: str) -> None:
    await barrier.wait()
    async with own.transaction():
        await own.execute("UPDATE accounts SET credit = credit - %s, refunds = refunds + 1 WHERE id = %s", (BACK, account))
        await own.execute("SELECT FROM orders WHERE order_id = %s FOR UPDATE", (order_id,))
