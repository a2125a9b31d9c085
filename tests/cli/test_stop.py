"""How a `serve` ends: nothing new is taken, what is worked on is finished or given back, and it takes a bounded time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest

from ipn_gateway.simulator.app import SimulatorConfig, create_app
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.simulator.faults import Fault
from ipn_gateway.simulator.serving import serving
from tests.cli import command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.simulator.app import Simulator

SHORT = {"IPN_PROVIDER_TIMEOUT_SECONDS": "1", "IPN_INBOX_LEASE_SECONDS": "30"}
LEASED = "SELECT count(*) FROM inbox WHERE lease_expires_at IS NOT NULL"

pytestmark = [pytest.mark.timeout(120), pytest.mark.case("S141")]


@asynccontextmanager
async def provider() -> AsyncIterator[tuple[Simulator, str]]:
    """A simulated provider; what hangs in it at the end is let go."""
    app = create_app(SimulatorConfig(store_id="testbox", store_passwd="qwerty", seed=1))
    async with serving(app) as url:
        yield app.state.simulator, url
        app.state.simulator.api.faults.clear()


async def begin(gateway: str, url: str, simulator: Simulator, settings: dict[str, str]) -> int:
    """Let one payment's notification arrive; the status of its answer."""
    key = (await command.run("keys", "create", "--tenant", "acme", "--json", **settings)).json["key"]
    config = f'{{"store_id":"testbox","store_passwd":"qwerty","mode":"sandbox","base_url":"{url}"}}'
    await command.run("sources", "add", "shop", "--config", config, **settings)
    order = {"order_id": "INV-1", "amount": "100.00", "currency": "BDT", "source": "shop"}
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "one"}
    async with httpx.AsyncClient() as client:
        (await client.post(f"{gateway}/v1/orders", json=order, headers=headers)).raise_for_status()
        fields = simulator.control.pay(PaymentRequest(tran_id="INV-1", amount=Decimal("100.00"), currency="BDT", send_ipn=False))
        return (await client.post(f"{gateway}/ipn/shop", data=fields)).status_code


async def value(database_url: str, query: str) -> Any:
    """One value, read beside the gateway."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        return (await (await connection.execute(query)).fetchone() or (None,))[0]


async def test_what_is_being_worked_on_is_given_back(database_url: str):
    """A question that hangs ends at its limit, not at that of the lease: the delivery is free for the next process, which applies it."""
    settings = command.given_database(database_url) | SHORT
    async with provider() as (simulator, url):
        simulator.api.faults.add(Fault(path="validator", kind="hang"))
        async with command.serving("serve", "--port", "0", **settings) as gateway:
            answer = await begin(gateway.url, url, simulator, settings)
            while simulator.api.faults.hanging == 0:
                await value(database_url, "SELECT 1")
            stopped = await gateway.stopped()
        leased = await value(database_url, LEASED)
        simulator.api.faults.clear()
        async with command.serving("serve", "--port", "0", **settings) as following:
            while await value(database_url, "SELECT count(*) FROM processed_notifications") == 0:
                pass
            await following.stopped()
        status = await value(database_url, "SELECT status FROM orders")

    assert answer == 200
    assert (stopped.code, "Traceback" in stopped.err) == (0, False)
    assert leased == 0
    assert status == "paid"


async def test_what_is_nearly_done_is_finished(database_url: str):
    """An answer that comes within the limit is applied by the process that asked, although it was told to stop meanwhile."""
    settings = command.given_database(database_url) | SHORT
    async with provider() as (simulator, url):
        simulator.api.faults.add(Fault(path="validator", kind="hang", seconds=0.6))
        async with command.serving("serve", "--port", "0", **settings) as gateway:
            await begin(gateway.url, url, simulator, settings)
            while simulator.api.faults.hanging == 0:
                await value(database_url, "SELECT 1")
            stopped = await gateway.stopped()
        status = await value(database_url, "SELECT status FROM orders")

    assert stopped.code == 0
    assert status == "paid"
