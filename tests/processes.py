"""Several gateway processes on one database, beside a simulated provider and a subscriber: started, killed, looked at."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import endpoints, orders, sources, tenants
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from ipn_gateway.proof import nursery
from ipn_gateway.proof.nursery import Gateway
from ipn_gateway.simulator.app import Simulator, SimulatorConfig, create_app
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.simulator.serving import serving
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.simulator.subscriber import create_subscriber
from ipn_gateway.vault import Vault
from tests.world import PASSWORD, SOURCE, STORE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from ipn_gateway.proof.nursery import Nursery

FORM = {"content-type": "application/x-www-form-urlencoded"}
SHORT = {  # a crash is picked up after its lease, so leases are short here
    "IPN_PROVIDER_TIMEOUT_SECONDS": "1",
    "IPN_INBOX_LEASE_SECONDS": "2",
    "IPN_DELIVERY_TIMEOUT_SECONDS": "1",
    "IPN_DISPATCH_LEASE_SECONDS": "2",
    "IPN_RETRY_SCHEDULE": "0,0.2*50",
    "IPN_VALIDATION_SCHEDULE": "0,0.2*50",
    "IPN_ALLOW_LOOPBACK_ENDPOINTS": "true",
}


Process = Gateway
"""A gateway in a process of its own."""


@dataclass
class Site:
    """One database, one provider, one subscriber, any number of gateways."""

    database_url: str
    db: Database
    simulator: Simulator
    subscriber: FastAPI
    nursery: Nursery
    environment: dict[str, str]
    http: httpx.AsyncClient

    async def start(self, *, crash_at: str | None = None, frozen: bool = False, roles: str = "web,inbox,dispatcher,maintenance") -> Process:
        """Start a gateway and wait until it listens, or until it has died at the fault point `crash_at`; with `frozen` it stops there."""
        given = self.environment | {"IPN_DATABASE_URL": self.database_url}
        process = await self.nursery.start(roles=roles.split(","), at=crash_at, frozen=frozen, environment=given)
        assert process.url or process.gone.is_set() or "web" not in roles, process.said
        return process

    async def order(self, order_id: str, amount: str = "1000.00", *, asked_after: float = 300, **given: Any) -> None:
        """A registered order, made beside the gateways; so many seconds later the provider is asked about it."""
        new = orders.NewOrder(order_id, SOURCE, Decimal(amount), "BDT", **given)
        await orders.create(self.db, TENANT, new, sweep_schedule=(asked_after,))

    def pay(self, order_id: str, amount: str = "1000.00", **given: Any) -> bytes:
        """An attempt at the provider; the body of its notification, which is not sent."""
        asked = PaymentRequest(tran_id=order_id, amount=Decimal(amount), currency="BDT", send_ipn=False, **given)
        return encode(self.simulator.control.pay(asked))

    async def notify(self, process: Process, body: bytes) -> int:
        """Post a notification; the status, or 0 where no answer came."""
        try:
            return (await self.http.post(f"{process.url}/ipn/{SOURCE}", content=body, headers=FORM)).status_code
        except httpx.TransportError:
            return 0

    async def come_back(self, process: Process, body: bytes, end: str = "success") -> str:
        """A customer's browser is posted back; the address that it is sent to."""
        answer = await self.http.post(f"{process.url}/return/{SOURCE}/{end}", content=body, headers=FORM)
        assert answer.status_code == 303, answer.text
        return str(answer.headers["location"])

    async def value(self, sql: str, **parameters: Any) -> Any:
        """The first column of the first row."""
        async with self.db.autocommit("test.value") as tx:
            return await tx.value(sql, parameters)

    async def until(self, sql: str, expected: Any, *, seconds: float = 20) -> None:
        """Await that a query gives the expected value; fails with what it gave last."""
        found = None
        try:
            async with asyncio.timeout(seconds):
                while (found := await self.value(sql)) != expected:  # noqa: ASYNC110 - other processes write; only the database tells
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{sql} gave {found}, not {expected}, within {seconds} s") from None


@asynccontextmanager
async def opened(database_url: str) -> AsyncIterator[Site]:
    """A site with one source and one endpoint, and no gateway yet. All gateways are killed at the end."""
    key = Fernet.generate_key().decode()
    async with AsyncExitStack() as stack:
        provider = create_app(SimulatorConfig(store_id=STORE, store_passwd=PASSWORD, seed=1))
        provider_url = await stack.enter_async_context(serving(provider))
        subscriber = create_subscriber()
        subscriber_url = await stack.enter_async_context(serving(subscriber))
        db = await stack.enter_async_context(Database(database_url, clock=Clock(), faults=Faults(), name="test"))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
        await tenants.create_key(db, TENANT)
        vault = Vault([SecretStr(key)])
        given = {"store_id": STORE, "store_passwd": PASSWORD, "mode": "sandbox", "base_url": provider_url}
        await sources.create(db, vault, TENANT, SOURCE, provider="sslcommerz", given=given, actor="test")
        new = endpoints.NewEndpoint(url=f"{subscriber_url}/webhooks", events=["*"])
        made = await endpoints.create(db, vault, TENANT, new, secret_bytes=os.urandom(64), actor="test")
        subscriber.state.subscriber.secrets = [made.secret]
        forks = await stack.enter_async_context(nursery.opened(os.environ))
        yield Site(database_url, db, provider.state.simulator, subscriber, forks, SHORT | {"IPN_SECRET_KEY": key}, http)
