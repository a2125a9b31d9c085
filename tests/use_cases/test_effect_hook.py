"""`IPN_EFFECT`: the merchant's own tables, written in the transaction of the ledger row, all or nothing."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors as pg

from ipn_gateway import effects
from ipn_gateway.errors import ConfigurationError
from tests.world import SOURCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ipn_gateway.effects import EffectNotification
    from tests.world import World

    Hook = Callable[[psycopg.AsyncConnection[Any], EffectNotification], Awaitable[None]]

CREDITS = """
CREATE TABLE credits (order_id text PRIMARY KEY, amount numeric NOT NULL);
CREATE TABLE invoices (number int CONSTRAINT invoices_number_key UNIQUE DEFERRABLE INITIALLY DEFERRED);
INSERT INTO invoices VALUES (1)
"""


@pytest.fixture
async def shop(world: World) -> World:
    """A world whose merchant has tables of its own in the same database, and an order."""
    async with await psycopg.AsyncConnection.connect(world.rt.url, autocommit=True) as merchant:
        await merchant.execute(CREDITS)
    await world.order("ORD-1", metadata={"basket": 7})
    return world


def calls(world: World, hook: Hook) -> World:
    """The world with this effect."""
    world.worker = replace(world.worker, effect=hook)
    world.sweeper = replace(world.sweeper, effect=hook)
    return world


async def credit(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    """What a merchant's effect is like."""
    await connection.execute("INSERT INTO credits VALUES (%s, %s)", (told.order_id, told.amount))


async def nothing_happened(world: World) -> bool:
    """Neither we nor the merchant wrote anything that an effect writes."""
    counts = await world.counts()
    written = ("processed_notifications", "payments", "events", "event_deliveries")
    return (
        [counts[table] for table in written] == [0, 0, 0, 0]
        and await world.status("ORD-1") == "pending"
        and await world.value("SELECT count(*) FROM credits") == 0
    )


@pytest.mark.case("S107")
async def test_an_effect_commits_with_the_ledger_row(shop: World) -> None:
    """It is told what was validated and writes its own tables in the same transaction."""
    told: list[EffectNotification] = []
    transactions: list[int] = []

    async def effect(connection: psycopg.AsyncConnection[Any], notification: EffectNotification) -> None:
        told.append(notification)
        cursor = await connection.execute("SELECT pg_current_xact_id()::text::bigint AS xid")
        transactions.append((await cursor.fetchone() or {})["xid"])
        await credit(connection, notification)

    fields = shop.pay("ORD-1")
    receipt = await calls(shop, effect).notify(fields)
    await shop.drain()

    assert await shop.outcome(receipt) == ("applied", None)
    assert told == [
        effects.EffectNotification(
            order_id="ORD-1",
            effect="paid",
            status="paid",
            previous_status="pending",
            amount=Decimal("1000.00"),
            currency="BDT",
            operation_id=fields["val_id"],
            source=SOURCE,
            metadata={"basket": 7},
        )
    ]
    assert await shop.value("SELECT amount FROM credits") == Decimal("1000.00")
    assert await shop.value("SELECT xmin::text::bigint FROM processed_notifications") == transactions[0]


@pytest.mark.case("S107", "S110")
async def test_an_effect_is_called_once_per_applied_operation(shop: World) -> None:
    """Not for a repeat, not for what is stale or held, and never for money that is booked as unapplied."""
    told: list[tuple[str, str]] = []

    async def effect(_: object, notification: EffectNotification) -> None:
        told.append((notification.effect, notification.status))

    async def arrives(fields: dict[str, str]) -> None:
        await shop.notify(fields)
        await shop.drain()

    calls(shop, effect)
    failure = shop.pay("ORD-1", status="FAILED")
    await arrives(failure)
    payment = shop.pay("ORD-1")
    for fields in (payment, payment, failure):
        await arrives(fields)
    for order_id, status in (("ORD-1", "PENDING"), ("ORD-1", "VALID"), ("ORD-9", "VALID")):
        await arrives(shop.pay(order_id, status=status))

    assert await shop.outcomes() == ["applied", "applied", "duplicate", "stale", "stale", "conflict", "parked"]
    assert told == [("failed", "failed"), ("paid", "paid")]


@pytest.mark.case("S107")
async def test_the_sweep_calls_the_effect_too(shop: World) -> None:
    """What is found without a notification has the same effect, the merchant's part included."""
    shop.pay("ORD-1")
    shop.rt.clock.advance(seconds=301)
    await calls(shop, credit).sweep()

    assert await shop.status("ORD-1") == "paid"
    assert await shop.value("SELECT amount FROM credits") == Decimal("1000.00")


# What goes wrong in it


async def _raises(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    await credit(connection, told)
    raise ZeroDivisionError


async def _violates_its_own_key(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    await credit(connection, told)
    await credit(connection, told)


async def _violates_a_deferred_key(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    await credit(connection, told)
    await connection.execute("INSERT INTO invoices VALUES (1)")  # refused only when the transaction would commit


async def _swallows_its_failure(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    await credit(connection, told)
    try:
        await credit(connection, told)
    except pg.UniqueViolation:
        return  # and leaves a transaction that can only be rolled back


async def _commits(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    await credit(connection, told)
    await connection.commit()


async def _rolls_back(connection: psycopg.AsyncConnection[Any], _: EffectNotification) -> None:
    await connection.execute("ROLLBACK")


async def _ends_the_transaction_in_sql(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    await connection.execute("ROLLBACK")
    await credit(connection, told)
    await connection.execute("DELETE FROM credits")


async def _takes_too_long(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    await credit(connection, told)
    await connection.execute("SET LOCAL statement_timeout = '1ms'")  # the limit itself is five seconds
    await connection.execute("SELECT pg_sleep(5)")


async def _dawdles_without_a_statement(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    await credit(connection, told)
    await connection.execute("SET LOCAL idle_in_transaction_session_timeout = '1ms'")  # the limit itself is thirty seconds
    async with await psycopg.AsyncConnection.connect(connection.info.dsn, password=connection.info.password, autocommit=True) as other:
        ended = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        while (await (await other.execute(ended, (connection.info.backend_pid,))).fetchone() or (0,))[0]:
            pass
    await credit(connection, told)


FAILING: list[Hook] = [
    _raises,
    _violates_its_own_key,
    _violates_a_deferred_key,
    _swallows_its_failure,
    _commits,
    _rolls_back,
    _ends_the_transaction_in_sql,
    _takes_too_long,
    _dawdles_without_a_statement,
]


@pytest.mark.case("S100", "S107")
async def test_an_effect_that_fails_takes_everything_back(shop: World) -> None:
    """However it fails: nothing is written, it is no duplicate, it is tried again on the schedule and dead in the end."""
    short = shop.worker.settings.model_copy(update={"validation_schedule": (0.0, 5.0)})
    shop.worker = replace(shop.worker, settings=short)
    for effect in FAILING:
        receipt = await calls(shop, effect).notify(shop.pay("ORD-1"))
        await shop.drain()

        assert await nothing_happened(shop), effect
        assert await shop.outcome(receipt) == ("received", None), effect
        assert await shop.rows("SELECT asked, lease_expires_at FROM inbox WHERE state = 'received'") == [
            {"asked": 1, "lease_expires_at": None}
        ], effect

        shop.rt.clock.advance(seconds=5)
        await shop.drain()

        assert await nothing_happened(shop), effect
        assert await shop.outcome(receipt) == ("dead", "effect_failed"), effect


@pytest.mark.case("S107")
async def test_an_effect_that_works_the_next_time_is_applied_once(shop: World) -> None:
    """Its database was busy, its code was mended: the schedule brings it back."""
    receipt = await calls(shop, _raises).notify(shop.pay("ORD-1"))
    await shop.drain()
    shop.rt.clock.advance(seconds=5)
    await calls(shop, credit).drain()

    assert await shop.outcome(receipt) == ("applied", None)
    assert await shop.rows("SELECT * FROM credits") == [{"order_id": "ORD-1", "amount": Decimal("1000.00")}]


@pytest.mark.case("S101")
async def test_a_deadlock_with_the_merchants_own_writers_is_run_again(shop: World) -> None:
    """Not the merchant's failure: the whole transaction runs again at once, without another question."""
    failures = [pg.SerializationFailure(), pg.DeadlockDetected()]

    async def effect(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
        await credit(connection, told)
        if failures:
            raise failures.pop()

    receipt = await calls(shop, effect).notify(shop.pay("ORD-1"))
    await shop.drain()

    assert await shop.outcome(receipt) == ("applied", None)
    assert await shop.rows("SELECT order_id FROM credits") == [{"order_id": "ORD-1"}]
    assert shop.questions == 1


async def test_an_effect_may_use_a_savepoint(shop: World) -> None:
    """A failure that the merchant expects and undoes by itself is none."""

    async def effect(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
        await credit(connection, told)
        try:
            async with connection.transaction():
                await credit(connection, told)
        except pg.UniqueViolation:
            await connection.execute("UPDATE credits SET amount = amount + 1")

    receipt = await calls(shop, effect).notify(shop.pay("ORD-1"))
    await shop.drain()

    assert await shop.outcome(receipt) == ("applied", None)
    assert await shop.value("SELECT amount FROM credits") == Decimal("1001.00")


async def test_a_savepoint_that_is_left_open_is_kept(shop: World) -> None:
    """The commit takes it along; one that the effect rolls back to leaves what was before it."""

    async def effect(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
        await credit(connection, told)
        await connection.execute("SAVEPOINT first")
        await connection.execute("DELETE FROM credits")
        await connection.execute("ROLLBACK TO SAVEPOINT first")
        await connection.execute("SAVEPOINT second")

    receipt = await calls(shop, effect).notify(shop.pay("ORD-1"))
    await shop.drain()

    assert await shop.outcome(receipt) == ("applied", None)
    assert await shop.value("SELECT amount FROM credits") == Decimal("1000.00")


@pytest.mark.case("S114")
async def test_an_effect_cannot_begin_a_transaction_of_ours_or_call_out(shop: World) -> None:
    """Inside it the doors to our database and to the network refuse."""
    refused: list[str] = []

    async def effect(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
        await credit(connection, told)
        for attempt in (shop.status("ORD-1"), shop.rt.transport.ask_for(timeout_seconds=1)("GET", shop.provider_url)):
            with pytest.raises(RuntimeError, match=r"inside .*effects\.apply"):
                await attempt
            refused.append(told.order_id)

    receipt = await calls(shop, effect).notify(shop.pay("ORD-1"))
    await shop.drain()

    assert await shop.outcome(receipt) == ("applied", None)
    assert refused == ["ORD-1", "ORD-1"]


# How it is named


def test_an_effect_is_loaded_by_its_name() -> None:
    """`module:object`; without the setting there is none."""
    assert effects.load_effect(f"{__name__}:credit").__name__ == "credit"  # type: ignore[union-attr]
    assert effects.load_effect(None) is None


@pytest.mark.parametrize("name", ["credit", "no_such_module:credit", f"{__name__}:no_such_name", f"{__name__}:CREDITS", ":", "a:b:c", ""])
def test_an_effect_that_cannot_be_loaded_stops_the_start(name: str) -> None:
    """With a sentence that says how to write it."""
    with pytest.raises(ConfigurationError, match=r"IPN_EFFECT=.*write"):
        effects.load_effect(name)
