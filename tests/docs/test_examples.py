"""The examples of `docs/examples/` run as they are printed: the shop's own tables, and the gateway inside the shop's own application."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest

from ipn_gateway.simulator.app import SimulatorConfig, create_app
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.simulator.serving import serving
from tests.cli import command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.simulator.app import Simulator

EXAMPLE = Path(__file__).parents[2] / "docs/examples/own_tables"
EFFECT = {"IPN_EFFECT": "shop:book", "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(EXAMPLE.parents[2])])}
WAIT_SECONDS = 30

pytestmark = [pytest.mark.timeout(120), pytest.mark.case("S107")]


@pytest.fixture
async def merchant(database_url: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """The shop's own connection to its own tables."""
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        await connection.execute((EXAMPLE / "tables.sql").read_text())
        yield connection


@pytest.fixture
async def provider() -> AsyncIterator[tuple[Simulator, str]]:
    """A simulated provider, and its URL."""
    app = create_app(SimulatorConfig(store_id="testbox", store_passwd="qwerty", seed=1))
    async with serving(app) as url:
        yield app.state.simulator, url


@asynccontextmanager
async def shop_of_its_own(settings: dict[str, str]) -> AsyncIterator[str]:
    """The application of the example, run as its docstring says, on any free port; its URL. It has to end in order."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "uvicorn", "existing_app:app", "--port", "0"),
        stdin=DEVNULL,
        stderr=PIPE,
        env=os.environ | settings,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not (listens := re.search(rb"running on (http://\S+)", line := await process.stderr.readline())):
                assert line, "the example ended before it listened"
        yield listens[1].decode()
        process.terminate()
        async with asyncio.timeout(WAIT_SECONDS):
            _, errors = await process.communicate()
        assert b"Traceback" not in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def pay(
    gateway: str, key: str, provider: tuple[Simulator, str], order_id: str, *, metadata: dict[str, Any], risk: bool = False
) -> None:
    """Register an order, have it paid at the provider, and let the notification come twice."""
    simulator, _ = provider
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": f"order-{order_id}"}
    order = {"order_id": order_id, "amount": "250.00", "currency": "BDT", "source": "shop", "metadata": metadata}
    async with httpx.AsyncClient(headers=headers) as client:
        (await client.post(f"{gateway}/v1/orders", json=order)).raise_for_status()
        asked = PaymentRequest(tran_id=order_id, amount=Decimal("250.00"), currency="BDT", risk=risk, send_ipn=False)
        fields = simulator.control.pay(asked)
        for _ in range(2):
            (await client.post(f"{gateway}/ipn/shop", data=fields)).raise_for_status()


async def settled(gateway: str, key: str, order_id: str) -> str:
    """The status that the order ends in."""
    headers = {"Authorization": f"Bearer {key}"}
    async with asyncio.timeout(WAIT_SECONDS), httpx.AsyncClient(headers=headers) as client:
        while True:
            status: str = (await client.get(f"{gateway}/v1/orders/{order_id}")).json()["status"]
            if status != "pending":
                return status


async def open_for_business(settings: dict[str, str], provider_url: str) -> str:
    """An API key of a tenant whose source asks the simulated provider."""
    made = await command.run("keys", "create", "--tenant", "acme", "--json", **settings)
    config = f'{{"store_id":"testbox","store_passwd":"qwerty","mode":"sandbox","base_url":"{provider_url}"}}'
    added = await command.run("sources", "add", "shop", "--config", config, **settings)
    assert added.code == 0, added.err
    return str(made.json["key"])


async def rows(connection: psycopg.AsyncConnection[Any], query: str) -> list[Any]:
    """What the shop's own tables hold."""
    return await (await connection.execute(query)).fetchall()


async def test_a_payment_is_booked_in_the_shops_own_tables(database_url: str, merchant: Any, provider: tuple[Simulator, str]):
    """Once, however often it is told; a risky one is on hold and not spendable; one that the shop cannot book stays unpaid."""
    settings = command.given_database(database_url) | EFFECT
    key = await open_for_business(settings, provider[1])

    async with command.serving("serve", "--port", "0", **settings) as gateway:
        await pay(gateway.url, key, provider, "INV-1", metadata={"email": "a@shop.example"})
        await pay(gateway.url, key, provider, "INV-2", metadata={"email": "a@shop.example"}, risk=True)
        await pay(gateway.url, key, provider, "INV-3", metadata={"nobody": "knows whose"})
        statuses = [await settled(gateway.url, key, order_id) for order_id in ("INV-1", "INV-2")]
        await gateway.stopped()
    unbooked = await command.run("orders", "show", "INV-3", "--json", **settings)

    assert statuses == ["paid", "paid_on_hold"]
    assert await rows(merchant, "SELECT email, balance FROM shop.customers") == [("a@shop.example", Decimal("250.00"))]
    assert await rows(merchant, "SELECT order_id, on_hold FROM shop.deposits ORDER BY 1") == [("INV-1", False), ("INV-2", True)]
    assert (unbooked.json["status"], unbooked.json["payments"]) == ("pending", [])


async def test_the_whole_gateway_runs_inside_an_existing_application(database_url: str, merchant: Any, provider: tuple[Simulator, str]):
    """Mounted below a path, with its workers in the shop's lifespan: the listener, the API and the effect work, and so does the shop."""
    settings = command.given_database(database_url) | EFFECT | {"IPN_PUBLIC_URL": "https://shop.example/payments/"}
    key = await open_for_business(settings, provider[1])

    async with shop_of_its_own(settings) as url, httpx.AsyncClient() as client:
        front = await client.get(url)
        ready = await client.get(f"{url}/payments/readyz")
        source = await client.get(f"{url}/payments/v1/sources/shop", headers={"Authorization": f"Bearer {key}"})
        missing = await client.get(f"{url}/payments/v1/nothing")
        await pay(f"{url}/payments", key, provider, "INV-1", metadata={"email": "a@shop.example"})
        status = await settled(f"{url}/payments", key, "INV-1")

    assert front.json() == {"shop": "open"}
    assert (ready.status_code, missing.status_code) == (200, 404)
    assert missing.headers["content-type"] == "application/problem+json"
    assert source.json()["listener_url"] == "https://shop.example/payments/ipn/shop"
    assert status == "paid"
    assert await rows(merchant, "SELECT email, balance FROM shop.customers") == [("a@shop.example", Decimal("250.00"))]
