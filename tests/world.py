"""A whole gateway in one process, on a database of its own, beside a simulated SSLCOMMERZ on a loopback socket.

The workers do not loop here: `drain` runs each of them until nothing is due, so that a test says when time passes.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import event_deliveries, ids, inbox, notifications, orders, reconciliation, runtime, settings, sources, tenants
from ipn_gateway.providers.base import InboundRequest
from ipn_gateway.simulator.app import Simulator, SimulatorConfig, create_app
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.simulator.faults import Fault
from ipn_gateway.simulator.serving import serving
from ipn_gateway.simulator.sslcommerz import encode, sign
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from ipn_gateway.notifications import Receipt
    from ipn_gateway.runtime import Runtime

TENANT, SOURCE = "acme", "shop"
STORE, PASSWORD = "demo01", "Demo@Pass1"
FORM = (("content-type", "application/x-www-form-urlencoded"),)


@dataclass
class World:
    """What a test of the flow works with. `settle` is `drain` for both sides."""

    rt: Runtime
    simulator: Simulator
    provider_url: str
    worker: inbox.Worker = field(init=False)
    sweeper: reconciliation.Sweeper = field(init=False)
    dispatcher: event_deliveries.Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        rt = self.rt
        self.worker = inbox.Worker(rt.inbox_db, rt.sources, rt.transport, rt.settings, Slots(16), lambda: None, rt.effect)
        self.sweeper = reconciliation.Sweeper(rt.maintenance_db, rt.sources, rt.transport, rt.settings, Slots(8), lambda: None, rt.effect)
        self.dispatcher_slots = Slots(16)
        self.dispatcher = event_deliveries.Dispatcher(
            rt.dispatcher_db, rt.transport, rt.vault, self.dispatcher_slots, rt.settings, chance=lambda: 0.0
        )

    # What a merchant does

    async def source(self, name: str = SOURCE, *, tenant: str = TENANT, **config: Any) -> None:
        """A source at the simulator."""
        await tenants.create_key(self.rt.db, tenant)
        given = {"store_id": STORE, "store_passwd": PASSWORD, "mode": "sandbox", "base_url": self.provider_url} | config
        await sources.create(self.rt.db, self.rt.vault, tenant, name, provider="sslcommerz", given=given, actor="test")

    async def order(self, order_id: str, amount: str = "1000.00", currency: str = "BDT", *, source: str = SOURCE, **given: Any) -> None:
        """A registered order."""
        new = orders.NewOrder(order_id, source, Decimal(amount), currency, **given)
        await orders.create(self.rt.db, TENANT, new, sweep_schedule=self.rt.settings.sweep_schedule)

    # What a customer and the provider do

    def pay(self, order_id: str, amount: str = "1000.00", currency: str = "BDT", *, status: str = "VALID", **given: Any) -> dict[str, str]:
        """An attempt at the provider; the signed fields of its notification, which is not sent."""
        asked = PaymentRequest(tran_id=order_id, amount=Decimal(amount), currency=currency, status=status, send_ipn=False, **given)
        return self.simulator.control.pay(asked)

    def fault(self, path: str, kind: str, times: int | None = 1, **given: Any) -> None:
        """The provider's next answers on a path go wrong."""
        self.simulator.api.faults.add(Fault(path=path, kind=kind, times=times, **given))

    async def notify(self, fields: dict[str, str] | bytes, *, source: str = SOURCE, headers: Any = FORM) -> Receipt:
        """One notification arrives at the listener's use case."""
        account = await self.rt.sources.get(source)
        assert account is not None
        body = fields if isinstance(fields, bytes) else encode(fields)
        request = InboundRequest("POST", "", headers, body)
        return await notifications.receive(self.rt.intake, account, request, remote_address="127.0.0.1")

    def signed(self, fields: dict[str, str], password: str = PASSWORD, **changed: str) -> dict[str, str]:
        """The fields with changes, signed anew."""
        return sign({name: value for name, value in (fields | changed).items() if not name.startswith("verify_")}, password)

    # What the workers do

    async def drain(self) -> int:
        """Run the inbox worker until nothing is due; how many deliveries were worked on."""
        worked = 0
        while claimed := await inbox.run_once(self.worker):
            worked += claimed
            await self.worker.slots.drained()
        return worked

    async def sweep(self) -> int:
        """Run the sweep until nothing is due."""
        worked = 0
        while claimed := await reconciliation.run_once(self.sweeper):
            worked += claimed
            await self.sweeper.slots.drained()
        return worked

    async def dispatch(self) -> int:
        """Run the dispatcher until nothing is due."""
        worked = 0
        while claimed := await self.dispatcher.run_once():
            worked += claimed
            await self.dispatcher_slots.drained()
        return worked

    # What is in the database

    async def rows(self, sql: str, **parameters: Any) -> list[dict[str, Any]]:
        """Rows of a query."""
        async with self.rt.db.autocommit("test.rows") as tx:
            return await tx.all(dict, sql, parameters)

    async def value(self, sql: str, **parameters: Any) -> Any:
        """The first column of the first row."""
        async with self.rt.db.autocommit("test.value") as tx:
            return await tx.value(sql, parameters)

    async def status(self, order_id: str) -> str:
        """An order's status."""
        return str(await self.value("SELECT status FROM orders WHERE order_id = %(id)s", id=order_id))

    async def outcome(self, receipt: Receipt) -> tuple[str, str | None]:
        """How a notification delivery ended: outcome and reason."""
        row = (await self.rows("SELECT outcome, reason FROM notification_deliveries WHERE id = %(id)s", id=receipt.delivery_id))[0]
        return row["outcome"], row["reason"]

    async def outcomes(self) -> list[str]:
        """The outcomes of all deliveries, oldest first."""
        return [row["outcome"] for row in await self.rows("SELECT outcome FROM notification_deliveries ORDER BY id")]

    async def counts(self) -> dict[str, int]:
        """How many rows each table has that an effect may write."""
        tables = ("notification_deliveries", "inbox", "processed_notifications", "payments", "events", "event_deliveries", "sweeps")
        return {table: await self.value(f"SELECT count(*) FROM {table}") for table in tables}

    async def event_types(self, order_id: str | None = None) -> list[str]:
        """The types of the events, in the order of their sequence."""
        found = await self.rows(
            "SELECT type FROM events WHERE %(id)s::text IS NULL OR order_id = %(id)s ORDER BY sequence NULLS LAST, created_at", id=order_id
        )
        return [row["type"] for row in found]

    @property
    def questions(self) -> int:
        """How many questions the provider got: validations and queries."""
        return self.simulator.api.validations.total() + self.simulator.api.queries.total()


def shown(receipt: Receipt) -> str:
    """The public id of a delivery."""
    assert receipt.delivery_id is not None
    return ids.show(ids.NOTIFICATION_DELIVERY, receipt.delivery_id)


@dataclass(frozen=True)
class Provider:
    """A simulated SSLCOMMERZ on a loopback socket, which outlives the gateways beside it."""

    simulator: Simulator
    url: str


@asynccontextmanager
async def providing(**given: Any) -> AsyncIterator[Provider]:
    """A provider with one store."""
    app = create_app(SimulatorConfig(store_id=STORE, store_passwd=PASSWORD, seed=1), **given)
    async with serving(app) as url:
        yield Provider(app.state.simulator, url)
        app.state.simulator.api.faults.clear()


@asynccontextmanager
async def beside(provider: Provider, database_url: str, clock: Clock, faults: Faults, **given: Any) -> AsyncIterator[World]:
    """A gateway on a database as it is; `given` are settings. At the end what its workers still do is broken off."""
    chosen = {"secret_key": Fernet.generate_key().decode(), "allow_loopback_endpoints": True} | given
    loaded = settings.load(database_url=SecretStr(database_url), **chosen)
    async with runtime.opened(loaded, database_url, clock=clock, faults=faults) as rt:
        world = World(rt, provider.simulator, provider.url)
        try:
            yield world
        finally:
            world.simulator.api.faults.clear()
            for slots in (world.worker.slots, world.sweeper.slots, world.dispatcher_slots):
                await slots.cancel()
            await world.worker.together.drained()


@asynccontextmanager
async def opened(database_url: str, clock: Clock, faults: Faults, **given: Any) -> AsyncIterator[World]:
    """A world with one source and no order; `given` are settings."""
    async with providing() as provider, beside(provider, database_url, clock, faults, **given) as world:
        await world.source()
        yield world
