"""What tests stand on holds: rows are real, databases are apart, nothing leaves this machine and nothing is left behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket

import psycopg
import pytest
from sqlmodel import SQLModel

from tests.make import NOW, Make, ago

FACTORIES = {name: made for name, made in inspect.getmembers(Make, inspect.iscoroutinefunction) if not name.startswith("_")}


@pytest.mark.parametrize("name", FACTORIES)
async def test_factories_make_rows_that_are_valid_by_default(make, name):
    """Every factory works without an argument, twice, with all that its row refers to."""
    row = await getattr(make, name)()

    assert row
    if name not in {"tenant", "source", "source_secret", "source_state"}:  # the deployment's one account is made once
        assert await getattr(make, name)() != row


def test_every_table_has_its_factory():
    """A new table comes with its factory, of at most 15 lines."""
    lengths = {name: len(inspect.getsource(made).splitlines()) for name, made in FACTORIES.items()}

    assert len(FACTORIES) == len(set(SQLModel.metadata.tables) - {"event_log"})  # its one row is there from the start
    assert {name: length for name, length in lengths.items() if length > 15} == {}


@pytest.mark.parametrize("status", ["paid", "paid_on_hold", "partially_refunded", "refunded"])
async def test_settled_orders_come_with_their_money(make, tx, status):
    """The money of an order fits its status without being spelt out, and rows of `make` are in the test's own transaction."""
    order = await make.order(status=status)

    assert order["amount_paid"] == order["amount"]
    assert await tx.value("SELECT count(*) FROM orders") == 1


@pytest.mark.parametrize("turn", [1, 2])
async def test_a_transaction_is_rolled_back(make, tx, turn):
    """What one test writes in `tx` is gone for the next one."""
    await make.tenant()

    assert await tx.value("SELECT count(*) FROM tenants") == 1


async def test_a_database_is_the_test_s_own(make, db, database_url):
    """What `make` puts into `db` is committed: another connection sees it."""
    await make.order()

    async with await psycopg.AsyncConnection.connect(database_url) as other:
        cursor = await other.execute("SELECT count(*) FROM orders")
        assert await cursor.fetchone() == (1,)


async def test_the_clock_moves_the_database_too(db, clock, make):
    """`clock.advance` moves `ipn_now()`, from which the factories' times come."""
    clock.advance(hours=2)
    sweep = await make.sweep(due_at=NOW)
    earlier = await make.sweep(due_at=ago(hours=3))

    async with db.autocommit("test") as tx:
        assert 119 < await tx.value("SELECT extract(epoch FROM %(at)s - now()) / 60", {"at": sweep["due_at"]}) < 121
        assert -61 < await tx.value("SELECT extract(epoch FROM %(at)s - now()) / 60", {"at": earlier["due_at"]}) < -59


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("10.0.0.1", 5432), ("::2", 80, 0, 0)])
def test_sockets_lead_nowhere_else(address):
    """A connection to an address that is not loopback is refused before a packet leaves."""
    with (
        socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as to_elsewhere,
        pytest.raises(RuntimeError, match=r"socket\.connect"),
    ):
        to_elsewhere.connect(address)


async def test_names_are_not_looked_up():
    """A look-up fails loudly, however it is made; only `localhost` is known."""
    assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
    with pytest.raises(RuntimeError, match="getaddrinfo"):
        await asyncio.get_running_loop().getaddrinfo("provider.example", 443)


def test_the_environment_says_nothing():
    """No setting of the machine reaches a test: what it needs it says itself."""
    assert [name for name in os.environ if name.startswith(("IPN_", "PG"))] == []
