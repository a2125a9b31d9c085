"""What happens when something goes wrong around a request: faults of ours, a database that is busy or gone, a client that leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import psycopg
import pytest
from psycopg import errors as pg

from ipn_gateway.errors import ConfigurationError, PoolExhausted
from ipn_gateway.slots import Slots
from ipn_gateway.web import deps, shield
from ipn_gateway.web.app import create_app
from tests.web.conftest import ENDPOINT, ORDER, Caller, problem

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Message

    from ipn_gateway.faults import Faults
    from ipn_gateway.runtime import Runtime


def raising(error: Exception):
    async def fault() -> None:
        raise error

    return fault


async def test_a_fault_of_ours_is_a_500_with_an_incident_and_no_detail(
    shop: Caller, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client gets a name to ask about, the log says where it was; nothing was written."""
    faults.on["orders.create:before_commit"] = raising(RuntimeError("store_passwd=s3cr3t"))

    answer = await shop.post("/v1/orders", ORDER)

    assert problem(answer) == (500, "internal-error")
    incident = answer.json()["incident"]
    assert incident in answer.json()["detail"]
    assert "RuntimeError" not in answer.text
    assert "s3cr3t" not in answer.text
    logged = capsys.readouterr().out
    assert incident in logged
    assert "RuntimeError" in logged
    assert (await shop.get("/v1/orders/ORD-1")).status_code == 404


@pytest.mark.parametrize("kind", [pg.UniqueViolation, pg.DataError, pg.UndefinedTable, ValueError, KeyError, RecursionError])
async def test_no_fault_shows_its_message(api: Caller, faults: Faults, capsys: pytest.CaptureFixture[str], kind: type[Exception]) -> None:
    """Drivers quote values; their messages stay out of the answer, and those of the database out of the log."""
    faults.on["endpoints.create:before_commit"] = raising(kind("Key (digest)=(v4lue) exists"))

    answer = await api.post("/v1/endpoints", ENDPOINT)

    assert problem(answer) == (500, "internal-error")
    assert "v4lue" not in answer.text
    if issubclass(kind, psycopg.Error):
        assert "v4lue" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [
        pg.LockNotAvailable("55P03"),
        pg.QueryCanceled("57014"),
        pg.DeadlockDetected("40P01"),
        pg.TooManyConnections("53300"),
        pg.DiskFull("53100"),
        pg.AdminShutdown("57P01"),
        psycopg.OperationalError("the connection is lost"),
        PoolExhausted(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_database_that_cannot_now_is_a_503(api: Caller, faults: Faults, error: Exception) -> None:
    """Busy, shutting down, or gone: the client may come again, and is told when."""
    faults.on["endpoints.create:before_commit"] = raising(error)

    answer = await api.post("/v1/endpoints", ENDPOINT)

    assert problem(answer) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_commit_with_an_unknown_end_is_a_503(api: Caller, faults: Faults) -> None:
    """It may have happened: the client asks or tries again."""
    faults.on["endpoints.create:after_commit"] = raising(psycopg.OperationalError("the connection is lost"))

    assert problem(await api.post("/v1/endpoints", ENDPOINT)) == (503, "overloaded")


@pytest.mark.case("S90")
async def test_a_client_that_leaves_does_not_stop_what_has_begun(shop: Caller, app: FastAPI, faults: Faults) -> None:
    """The order is registered although nobody waits for the answer any more."""
    at_commit, may_commit = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        at_commit.set()
        await may_commit.wait()

    faults.on["orders.create:before_commit"] = hold
    request = Slots(1).start(shop.post("/v1/orders", ORDER), name="client")
    await at_commit.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    may_commit.set()

    assert await app.state.slots.drained(seconds=10)
    assert (await shop.get("/v1/orders/ORD-1")).status_code == 200


async def test_a_process_with_all_its_hands_full_says_so_at_once(shop: Caller, app: FastAPI, faults: Faults) -> None:
    """503, without waiting; only whether it lives is answered still."""
    app.state.slots._count = 1
    at_commit, may_commit = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        at_commit.set()
        await may_commit.wait()

    faults.on["orders.create:before_commit"] = hold
    request = Slots(1).start(shop.post("/v1/orders", ORDER), name="client")
    await at_commit.wait()

    assert problem(await shop.get("/v1/orders")) == (503, "overloaded")
    assert (await shop.get("/healthz")).status_code == 200
    may_commit.set()
    assert (await request).status_code == 201


class Slow:
    """A request to the application whose body comes in pieces, as the test sends them."""

    def __init__(self, app: FastAPI, path: str = "/ipn/shop-main") -> None:
        self.sent: list[Message] = []
        self.reading = asyncio.Event()
        self._pieces: asyncio.Queue[Message] = asyncio.Queue()
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
        self.task = asyncio.ensure_future(
            app(scope | {"http_version": "1.1", "scheme": "http", "client": ("192.0.2.1", 1)}, self._receive, self._send)
        )

    async def _receive(self) -> Message:
        self.reading.set()
        return await self._pieces.get()

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def piece(self, body: bytes, *, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def status(self) -> int:
        async with asyncio.timeout(10):
            await self.task
        return int(self.sent[0]["status"])


async def test_bodies_that_come_slowly_keep_nobody_out(shop: Caller, app: FastAPI) -> None:
    """More of them than there are slots: a notification that comes meanwhile is taken in, and so are they when they are complete."""
    app.state.slots._count = 2
    slow = [Slow(app) for _ in range(5)]
    for one in slow:
        one.piece(b"a=")
        await one.reading.wait()

    quick = await shop("POST", "/ipn/shop-main", content=b"a=1")
    for one in slow:
        one.piece(b"1", more=False)
        assert await one.status() == 400

    assert quick.status_code == 400
    assert "x-delivery-id" in quick.headers
    bodies = (await shop.get("/v1/notification-deliveries")).json()["items"]
    assert len(bodies) == 6


@pytest.mark.parametrize("limit", ["READING_MAX", "READING_BYTES_MAX"])
async def test_of_too_many_slow_bodies_the_slowest_makes_room(
    shop: Caller, app: FastAPI, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Their number and their bytes are bounded; the one that has taken longest is answered 408, and who comes next is served."""
    monkeypatch.setattr(shield, limit, {"READING_MAX": 2, "READING_BYTES_MAX": 2500}[limit])
    slow = [Slow(app) for _ in range(3)]
    for one in slow:
        one.piece(b"a" * 1000)
        await one.reading.wait()

    assert await slow[0].status() == 408
    assert (await shop("POST", "/ipn/shop-main", content=b"a=1" * 500)).status_code == 400
    slow[2].piece(b"", more=False)
    assert await slow[2].status() == 400
    slow[1].piece(b"", more=False)
    assert await slow[1].status() == 408


async def test_an_unknown_route_is_a_404_although_its_body_never_comes(shop: Caller, rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked before the body is answered before it."""
    monkeypatch.setattr(deps, "BODY_SECONDS_MAX", 0.05)
    app = create_app(rt)

    assert await Slow(app, "/ipn/nobody").status() == 404
    assert await Slow(app).status() == 408


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "address"),
    [
        ((), "192.0.2.1", "198.51.100.7", "192.0.2.1"),
        (("10.0.0.0/8",), "192.0.2.1", "198.51.100.7", "192.0.2.1"),
        (("10.0.0.0/8",), "10.0.0.1", "198.51.100.7", "198.51.100.7"),
        (("10.0.0.0/8",), "::ffff:10.0.0.1", "198.51.100.7", "198.51.100.7"),
        (("10.0.0.0/8",), "10.0.0.1", "1.2.3.4, 198.51.100.7, 10.0.0.2", "198.51.100.7"),
        (("10.0.0.0/8",), "10.0.0.1", "1.2.3.4, unknown, 10.0.0.2", "10.0.0.2"),
        (("10.0.0.0/8", "2001:db8::1"), "2001:db8::1", "10.0.0.2", "10.0.0.2"),
        (("10.0.0.1",), "10.0.0.1", "", "10.0.0.1"),
    ],
)
async def test_the_address_is_that_in_front_of_our_own_proxies(
    shop: Caller, rt: Runtime, *, trusted: tuple[str, ...], peer: str, forwarded: str, address: str
) -> None:
    """Nobody else's X-Forwarded-For is read, and of ours only what our proxies wrote."""
    app = create_app(replace(rt, settings=rt.settings.model_copy(update={"trusted_proxies": trusted})))
    transport = httpx.ASGITransport(app=app, client=(peer, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.test") as client:
        await client.post("/ipn/shop-main", content=b"a=1", headers={"X-Forwarded-For": forwarded})

    assert (await shop.get("/v1/notification-deliveries")).json()["items"][0]["remote_address"] == address


def test_proxies_that_are_no_addresses_stop_the_start(rt: Runtime) -> None:
    """With a sentence that names the setting."""
    with pytest.raises(ConfigurationError, match="IPN_TRUSTED_PROXIES"):
        create_app(replace(rt, settings=rt.settings.model_copy(update={"trusted_proxies": ("proxy.example",)})))


async def test_origins_that_are_set_may_call_from_a_browser(rt: Runtime) -> None:
    """No other origin, and none at all by default."""
    chosen = rt.settings.model_copy(update={"cors_origins": ("https://admin.example",)})
    app = create_app(replace(rt, settings=chosen))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,idempotency-key"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as client:
        allowed = await client.options("/v1/orders", headers={"Origin": "https://admin.example"} | asked)
        refused = await client.options("/v1/orders", headers={"Origin": "https://evil.example"} | asked)
        notified = await client.post("/ipn/nobody", headers={"Origin": "null"})

    assert allowed.headers["access-control-allow-origin"] == "https://admin.example"
    assert "access-control-allow-origin" not in refused.headers
    assert notified.status_code == 404
