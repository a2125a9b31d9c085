"""Arrivals that are in flight together are written together; each sender is answered for his own, after its commit."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors as pg

from ipn_gateway import logs, notifications
from ipn_gateway.errors import Overloaded
from ipn_gateway.notifications import WAITING_MAX, Receipt
from ipn_gateway.providers.base import InboundRequest
from ipn_gateway.simulator.sslcommerz import encode
from tests import world as worlds
from tests.proxy import Proxy, proxying
from tests.world import FORM, SOURCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from tests.proxy import Moment
    from tests.world import World

TRANSACTION = "transactions.notifications.receive"


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    """What stands between the gateway and its database."""
    async with proxying(database_url) as opened:
        yield opened


@pytest.fixture
async def cuttable(proxy: Proxy, clock: Clock, faults: Faults) -> AsyncIterator[World]:
    """A world whose every connection to the database goes through the proxy."""
    async with worlds.opened(proxy.url, clock, faults) as opened:
        yield opened


class Held:
    """A transaction that stops before its COMMIT until it is let go."""

    def __init__(self, world: World) -> None:
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()
        world.rt.faults.on["notifications.receive:before_commit"] = self._hold

    async def _hold(self) -> None:
        self.reached.set()
        await self.let_go.wait()


def bodies_of(world: World, count: int) -> list[bytes]:
    """Notifications of so many orders."""
    return [encode(world.pay(f"ORD-{number}", status="PENDING")) for number in range(count)]


async def together(world: World, bodies: Sequence[bytes]) -> list[Receipt | BaseException]:
    """All of them are in flight at once; what each sender gets."""
    account = await world.rt.sources.get(SOURCE)
    assert account is not None
    arriving = [notifications.receive(world.rt.intake, account, InboundRequest("POST", "", FORM, body)) for body in bodies]
    return await asyncio.gather(*arriving, return_exceptions=True)


async def kept(world: World) -> dict[Any, bytes]:
    """What is stored, by id, each with open work."""
    rows = await world.rows(
        """SELECT d.id, d.sha256 FROM notification_deliveries AS d
             JOIN inbox AS i ON i.tenant_id = d.tenant_id AND i.notification_delivery_id = d.id"""
    )
    assert len(rows) == await world.value("SELECT count(*) FROM notification_deliveries")
    return {row["id"]: bytes(row["sha256"]) for row in rows}


def promised(receipts: Sequence[Receipt | BaseException], bodies: Sequence[bytes]) -> dict[Any, bytes]:
    """What the senders were told that we have: their own bytes under the id that they were given."""
    return {
        receipt.delivery_id: hashlib.sha256(body).digest()
        for receipt, body in zip(receipts, bodies, strict=True)
        if isinstance(receipt, Receipt)
    }


@pytest.mark.case("S115")
async def test_fifty_in_flight_share_statements_and_commits(world: World) -> None:
    """A few commits of one statement each, and everyone has his own bytes stored under his own id."""
    statements = 0
    began = logs.counters[TRANSACTION]

    async def counted() -> None:
        nonlocal statements
        statements += 1

    for number in (1, 2, 3):
        world.rt.faults.on[f"notifications.receive:statement_{number}"] = counted
    bodies = bodies_of(world, 50)
    receipts = await together(world, bodies)

    assert 1 <= logs.counters[TRANSACTION] - began <= 3
    assert statements == logs.counters[TRANSACTION] - began
    assert len(promised(receipts, bodies)) == 50
    assert await kept(world) == promised(receipts, bodies)


@pytest.mark.case("S115")
async def test_one_that_cannot_be_stored_fails_no_other(world: World) -> None:
    """The database refuses one of fifty: its sender hears of it, the forty-nine are stored, once."""
    await world.rt.db.rerun(_refuse_one, world)
    bodies = bodies_of(world, 50)
    receipts = await together(world, bodies)

    assert [type(receipt) for receipt in receipts if not isinstance(receipt, Receipt)] == [pg.CheckViolation]
    assert isinstance(receipts[13], pg.CheckViolation)
    assert len(promised(receipts, bodies)) == 49
    assert await kept(world) == promised(receipts, bodies)


async def _refuse_one(world: World) -> None:
    async with world.rt.db.transaction("test.refuse") as tx:
        await tx.execute("ALTER TABLE notification_deliveries ADD CONSTRAINT no_thirteen CHECK (order_id <> 'ORD-13')")


async def test_odd_ones_are_stored_beside_plain_ones(world: World) -> None:
    """Malformed, forged and foreign ones, with nothing in the fields that others have: each keeps its own outcome, in one set."""
    paid = encode(world.pay("ORD-1"))
    bodies = [paid, b"\x00\xff", b"tran_id=ORD-1&tran_id=ORD-2", paid.replace(b"1000", b"1001"), "name=\u2400&status=x".encode(), b""]
    await together(world, bodies)

    outcomes = await world.rows("SELECT outcome, reason FROM notification_deliveries ORDER BY outcome, reason")
    assert [tuple(row.values()) for row in outcomes] == [
        ("malformed", "unreadable"),
        ("malformed", "unreadable"),
        ("malformed", "unreadable"),
        ("malformed", "unreadable"),
        ("received", None),
        ("rejected", "signature"),
    ]
    assert await world.value("SELECT count(*) FROM inbox") == 1


@pytest.mark.case("S102", "S115")
@pytest.mark.parametrize("moment", ["before", "while", "after"])
async def test_a_set_finds_out_what_became_of_its_commit(cuttable: World, proxy: Proxy, moment: Moment) -> None:
    """The connection is lost around the COMMIT of a set: every sender gets his 2xx, and each delivery is stored once."""
    proxy.cut_next(moment)
    bodies = bodies_of(cuttable, 30)
    receipts = await together(cuttable, bodies)

    assert proxy.cuts == 1
    assert len(promised(receipts, bodies)) == 30
    assert await kept(cuttable) == promised(receipts, bodies)


@pytest.mark.case("S115")
async def test_a_set_that_cannot_be_stored_is_acknowledged_to_nobody(world: World) -> None:
    """The database is away for longer than we try: every sender is told 503, and nothing was kept."""

    async def gone() -> None:
        raise psycopg.OperationalError

    world.rt.faults.on["notifications.receive:before_commit"] = gone
    receipts = await together(world, bodies_of(world, 20))

    assert {type(receipt) for receipt in receipts} == {Overloaded}
    assert await kept(world) == {}


async def test_who_is_cut_off_loses_nothing_and_leaves_nothing_behind(world: World) -> None:
    """A caller that is cancelled while its set commits, and one while it waits: both are stored, as are their neighbours."""
    held = Held(world)
    bodies = bodies_of(world, 200)  # more than the sets that are written at once
    everyone = asyncio.ensure_future(together(world, bodies))
    await held.reached.wait()
    everyone.cancel()
    await asyncio.wait([everyone])
    held.let_go.set()
    await world.rt.intake.drained()

    assert everyone.cancelled()
    assert sorted((await kept(world)).values()) == sorted(hashlib.sha256(body).digest() for body in bodies)


async def test_too_many_that_wait_are_turned_away_at_once(world: World) -> None:
    """The queue is bounded: beyond it a sender is told 503 at once, and who waits is stored."""
    held = Held(world)
    body = encode(world.pay("ORD-1", status="PENDING"))
    everyone = asyncio.ensure_future(together(world, [body] * (WAITING_MAX + 20)))
    await held.reached.wait()
    held.let_go.set()
    receipts = await everyone

    turned_away = [receipt for receipt in receipts if isinstance(receipt, Overloaded)]
    assert 1 <= len(turned_away) <= 20
    assert len(await kept(world)) == len(receipts) - len(turned_away)


async def test_a_sender_waits_no_longer_than_it_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database says nothing: the sender is told 503 in time. What was on its way is stored when it comes back, and once."""
    monkeypatch.setattr(world.rt.intake._arrivals._deadlines, "_seconds", 0.2)
    held = Held(world)
    receipts = await together(world, bodies_of(world, 3))
    held.let_go.set()
    await world.rt.intake.drained()

    assert {type(receipt) for receipt in receipts} == {Overloaded}
    assert len(await kept(world)) == 3
