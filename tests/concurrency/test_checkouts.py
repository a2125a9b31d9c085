"""Checkout while others do the same: repeats and other keys at once, a client that gives up, processes that die."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from ipn_gateway import runtime, tenants
from ipn_gateway.operations import KEY_HEADER, REPLAYED_HEADER
from ipn_gateway.simulator.faults import Fault
from ipn_gateway.simulator.serving import serving
from ipn_gateway.web.app import create_app
from tests import processes
from tests import world as worlds
from tests.world import TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from fastapi import FastAPI

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from ipn_gateway.simulator.app import Simulator
    from tests.processes import Process, Site
    from tests.world import World

BODY = {
    "customer": {
        "name": "Rahima Begum",
        "email": "rahima@example.test",
        "phone": "+8801700000000",
        "address": "12 Lake Road",
        "city": "Dhaka",
        "postcode": "1207",
        "country": "Bangladesh",
    },
    "product": {"name": "Tea", "category": "grocery", "profile": "physical-goods"},
}
REPEATS = 25
SLOW = 10
LEASE_SECONDS = 90


@dataclass
class Shop:
    """A merchant's backend in front of two gateways on one database, each on a socket of its own."""

    world: World
    apps: list[FastAPI]
    clients: list[httpx.AsyncClient]

    async def checkout(self, order_id: str = "ORD-1", *, key: str = "k-1", at: int = 0) -> httpx.Response:
        return await self.clients[at].post(f"/v1/orders/{order_id}/checkout", json=BODY, headers={KEY_HEADER: key})

    def start(self, order_id: str = "ORD-1", **given: Any) -> asyncio.Task[httpx.Response]:
        """A call that is not waited for yet."""
        return asyncio.ensure_future(self.checkout(order_id, **given))

    async def hanging(self, count: int = 1) -> None:
        """Wait until so many sessions are being opened at the provider."""
        await hanging(self.world.simulator, count)

    def release(self) -> None:
        """The provider answers what hangs."""
        self.world.simulator.api.faults.clear()

    async def drained(self) -> None:
        """Wait until nothing runs in the gateways."""
        for app in self.apps:
            assert await app.state.slots.drained(seconds=10)
            assert await app.state.idempotency.drained(seconds=10)

    @property
    def asked(self) -> int:
        """How many sessions the provider was asked for."""
        return self.world.simulator.api.inits.total()


async def hanging(simulator: Simulator, count: int) -> None:
    async with asyncio.timeout(10):
        while simulator.api.faults.hanging != count:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)


@asynccontextmanager
async def opened(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Shop]:
    """A shop with the order ORD-1."""
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(worlds.opened(database_url, clock, faults))
        other = await stack.enter_async_context(runtime.opened(world.rt.settings, database_url, clock=clock, faults=faults))
        headers = {"Authorization": f"Bearer {(await tenants.create_key(world.rt.db, TENANT)).key}"}
        apps = [create_app(world.rt), create_app(other)]
        urls = [await stack.enter_async_context(serving(app)) for app in apps]
        made = [httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30) for url in urls]
        shop = Shop(world, apps, [await stack.enter_async_context(client) for client in made])
        await world.order("ORD-1")
        try:
            yield shop
        finally:
            shop.release()
            await shop.drained()


@pytest.fixture
async def shop(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Shop]:
    async with opened(database_url, clock, faults) as shop:
        yield shop


def is_outstanding(answer: httpx.Response) -> bool:
    """Whether the answer is the 409 of a key that is worked on; then it says when to come back."""
    if answer.status_code != 409 or answer.json()["type"] != "/problems/idempotency-in-progress":
        return False
    assert answer.json()["title"] == "A request is outstanding for this Idempotency-Key"
    assert "same key" in answer.json()["detail"]
    assert 1 <= int(answer.headers["Retry-After"]) <= LEASE_SECONDS
    return True


async def patient(call: Callable[[], Awaitable[httpx.Response]], wait: Callable[[int], Awaitable[None]]) -> httpx.Response:
    """A client as it should be: while its key is worked on, it waits as long as it is told and sends the same request again."""
    while is_outstanding(answer := await call()):
        await wait(int(answer.headers["Retry-After"]))
    return answer


@pytest.mark.case("S90", "S39", "S41", "S42", "S36")
async def test_a_client_that_gives_up_and_comes_back_gets_the_one_page(shop: Shop) -> None:
    """The provider takes longer than the client waits. The call goes on, its repeat is told to wait, and then gets what was stored."""
    shop.world.fault("init", "record_then_hang", seconds=600)
    impatient = shop.start()
    await shop.hanging()

    impatient.cancel()  # its connection is closed
    await asyncio.wait([impatient])
    waits: list[int] = []

    async def wait(seconds: int) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            shop.release()
            await shop.drained()

    answer = await patient(shop.checkout, wait)

    assert impatient.cancelled()
    assert len(waits) == 3
    assert (answer.status_code, answer.headers[REPLAYED_HEADER]) == (200, "true")
    (session,) = shop.world.simulator.bank.sessions.values()
    assert answer.json()["redirect_url"].endswith(session.key)
    assert shop.asked == 1
    assert (await shop.checkout(at=1)).content == answer.content


@pytest.mark.case("S37", "S39", "S40")
async def test_of_many_repeats_at_two_gateways_one_asks_the_provider(shop: Shop) -> None:
    """All others are told at once that it is outstanding, while it hangs; afterwards all get the same bytes."""
    shop.world.fault("init", "hang", seconds=600)
    calls = [shop.start(at=number % 2) for number in range(REPEATS)]
    await shop.hanging()
    done: set[asyncio.Task[httpx.Response]] = set()
    async with asyncio.timeout(10):
        while len(done) < REPEATS - 1:
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
            done = {call for call in calls if call.done()}

    assert all(is_outstanding(call.result()) for call in done)
    (winner,) = set(calls) - done
    shop.release()
    assert (await winner).status_code == 200
    assert REPLAYED_HEADER not in winner.result().headers
    again = await asyncio.gather(*(shop.checkout(at=number % 2) for number in range(REPEATS)))
    assert {(one.status_code, one.content, one.headers[REPLAYED_HEADER]) for one in again} == {(200, winner.result().content, "true")}
    assert shop.asked == 1


@pytest.mark.case("S31")
async def test_two_keys_at_once_lead_to_one_page(shop: Shop) -> None:
    """Both ask, as neither knows of the other; the first that is answered keeps its page, and the second gives that one too."""
    shop.world.fault("init", "hang", times=2, seconds=600)
    calls = [shop.start(key="k-1", at=0), shop.start(key="k-2", at=1)]
    await shop.hanging(2)

    shop.release()
    first, second = await asyncio.gather(*calls)

    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json() == second.json()
    assert shop.asked == 2
    kept = await shop.world.value("SELECT checkout_url FROM orders")
    assert kept == first.json()["redirect_url"]
    assert [(await shop.checkout(key=key)).headers[REPLAYED_HEADER] for key in ("k-1", "k-2")] == ["true", "true"]


@pytest.mark.case("S66", "S40")
async def test_no_transaction_and_no_connection_waits_for_the_provider(
    database_url: str, clock: Clock, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one connection, many sessions may be opened at once, and everything else is still served."""
    monkeypatch.setitem(runtime.CONNECTIONS, "web", 1)
    async with opened(database_url, clock, faults) as shop:
        for number in range(SLOW):
            await shop.world.order(f"SLOW-{number}")
        shop.world.fault("init", "hang", times=SLOW, seconds=600)
        calls = [shop.start(f"SLOW-{number}", key=f"k-{number}") for number in range(SLOW)]
        await shop.hanging(SLOW)

        assert {row["state"] for row in await _connections(database_url)} == {"idle"}
        assert (await shop.clients[0].get("/v1/orders/ORD-1")).status_code == 200
        repeats = await asyncio.gather(*(shop.checkout(f"SLOW-{number}", key=f"k-{number}") for number in range(SLOW)))
        assert all(is_outstanding(repeat) for repeat in repeats)
        assert (await shop.checkout("ORD-1", key="quick")).status_code == 200
        assert {row["state"] for row in await _connections(database_url)} == {"idle"}
        shop.release()
        answers = await asyncio.gather(*calls)

        assert [answer.status_code for answer in answers] == [200] * SLOW
        assert len({answer.json()["redirect_url"] for answer in answers}) == SLOW


async def _connections(database_url: str) -> list[dict[str, Any]]:
    """What the gateways' connections are doing, as the server sees it."""
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        cursor = await connection.cursor(row_factory=dict_row).execute(
            """SELECT application_name, state FROM pg_stat_activity
                WHERE datname = current_database() AND application_name LIKE 'ipn-gateway web%'"""
        )
        return await cursor.fetchall()


# --- processes that die

POINTS = {
    "idempotency.claim:statement_1": 1,
    "checkouts.start:before_commit": 1,
    "checkouts.start:after_commit": 1,
    "transport.ask:before": 1,
    "transport.ask:after": 2,
    "checkouts.settle:before_commit": 2,
    "checkouts.settle:after_commit": 1,
}
"""Where the first process dies, and how many sessions the provider is asked for in all: a second one moves no money."""


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    """A database and a provider; gateways are started by the test."""
    async with processes.opened(database_url) as site:
        key = (await tenants.create_key(site.db, TENANT)).key
        site.http.headers["Authorization"] = f"Bearer {key}"
        await site.order("ORD-1")
        yield site


async def checkout(site: Site, process: Process, key: str = "k-1") -> httpx.Response | None:
    """One call; None where no answer came."""
    try:
        return await site.http.post(f"{process.url}/v1/orders/ORD-1/checkout", json=BODY, headers={KEY_HEADER: key})
    except httpx.TransportError:
        return None


async def answered(site: Site, process: Process) -> httpx.Response:
    """One call to a process that lives."""
    answer = await checkout(site, process)
    assert answer is not None
    return answer


@pytest.mark.timeout(60)
@pytest.mark.case("S50", "S58", "S64", "S69", "S82")
@pytest.mark.parametrize("point", POINTS)
async def test_a_process_killed_in_any_phase_leaves_a_key_that_goes_on(site: Site, point: str) -> None:
    """Until the lease is over the repeat is told to wait; then it takes over where the dead one was, and one page comes of it."""
    doomed, survivor = await asyncio.gather(site.start(crash_at=point, roles="web"), site.start(roles="web"))
    assert await checkout(site, doomed) is None
    assert await doomed.ended() == -signal.SIGKILL

    async def lease_over(_: int) -> None:
        async with site.db.autocommit("test.time") as tx:
            await tx.execute("UPDATE idempotency_keys SET lease_expires_at = ipn_now() WHERE lease_expires_at IS NOT NULL")

    is_done = point == "checkouts.settle:after_commit"
    assert is_outstanding(await answered(site, survivor)) is not is_done
    answer = await patient(lambda: answered(site, survivor), lease_over)

    assert answer.status_code == 200
    assert answer.headers.get(REPLAYED_HEADER) == ("true" if is_done else None)
    assert await site.value("SELECT checkout_url FROM orders") == answer.json()["redirect_url"]
    repeat = await answered(site, survivor)
    assert (repeat.content, repeat.headers[REPLAYED_HEADER]) == (answer.content, "true")
    assert site.simulator.api.inits.total() == POINTS[point]
    assert await site.value("SELECT count(*) FROM idempotency_keys WHERE state = 'completed'") == 1


@pytest.mark.timeout(60)
@pytest.mark.case("S50", "S90")
async def test_a_key_of_a_killed_process_is_free_when_its_lease_is_over(site: Site) -> None:
    """Killed from outside while the provider is asked: nobody has to do anything but wait for that, and it is not long."""
    site.environment |= {"IPN_PROVIDER_MONEY_TIMEOUT_SECONDS": "1", "IPN_IDEMPOTENCY_LEASE_SECONDS": "1.5"}
    site.simulator.api.faults.add(Fault(path="init", kind="hang", seconds=600))
    first, second = await asyncio.gather(site.start(roles="web"), site.start(roles="web"))
    asked = asyncio.ensure_future(checkout(site, first))
    await hanging(site.simulator, 1)

    await first.kill()
    await asked

    async def lease_over(_: int) -> None:
        await site.until("SELECT lease_expires_at <= ipn_now() FROM idempotency_keys", expected=True)

    answer = await patient(lambda: answered(site, second), lease_over)
    assert answer.status_code == 200
    assert site.simulator.api.inits.total() == 2
    assert len(site.simulator.bank.sessions) == 1
