"""Acts of a whole gateway, each about an order of its own, and what came of them: for tests in which its database fails.

Who asks is told 2xx, which is true, or 503, and asks again; workers are brought back by the lease. Nobody restarts the gateway.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx
import psycopg

from ipn_gateway import endpoints, tenants
from ipn_gateway.errors import CommitUnknown, GatewayError
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.web.app import create_app
from tests import loopback
from tests import world as worlds
from tests.loopback import OK, says
from tests.world import FORM, SOURCE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from tests.world import World

ACTS: Final = ("notify", "apply", "deliver", "create", "refund")
UNAVAILABLE: Final = 503
WORKED: Final = 200


@dataclass
class Gateway:
    """Acts of the gateway, each about a thing of its own, and what came of them. `told` is every answer that was given."""

    world: World
    client: httpx.AsyncClient
    key: str
    direct_url: str
    direct: psycopg.AsyncConnection[Any] | None = None
    told: list[int] = field(default_factory=list)
    made: int = 0

    async def prepared(self, act: str) -> Thing:
        """What the act is done to; it is not done yet."""
        self.made += 1
        thing = Thing(self, act, f"ORD-{act}-{self.made}")
        await thing.prepare()
        return thing

    async def post(self, path: str, **given: Any) -> int:
        answer = await self.client.post(path, **given)
        assert answer.status_code != UNAVAILABLE or "retry-after" in answer.headers
        return answer.status_code

    async def work(self, run: Callable[[], Awaitable[Any]]) -> int:
        """A worker's turn. What its loop goes on after is nothing that anybody is told."""
        with contextlib.suppress(GatewayError, CommitUnknown, psycopg.Error):
            await run()
        return WORKED

    async def count(self, statement: str, **named: Any) -> int:
        """Asked beside the gateway; its server may have been started again."""
        if self.direct is None or await _is_gone(self.direct):
            self.direct = await psycopg.AsyncConnection.connect(self.direct_url, autocommit=True)
        row = await (await self.direct.execute(statement, named)).fetchone()
        assert row is not None
        return int(row[0])


@dataclass
class Thing:
    """An order, and what the act does to it."""

    gateway: Gateway
    act: str
    order_id: str
    fields: dict[str, str] = field(default_factory=dict)
    accepted: int = 0

    async def prepare(self) -> None:
        world = self.gateway.world
        if self.act == "create":
            return
        await world.order(self.order_id)
        self.fields = world.pay(self.order_id)
        if self.act == "notify":
            return
        await world.notify(self.fields)
        if self.act == "apply":
            return
        await world.drain()
        if self.act == "refund":
            await world.dispatch()

    async def do(self) -> int:
        """Once; what was told."""
        gateway, world = self.gateway, self.gateway.world
        keyed = {"Authorization": f"Bearer {gateway.key}", "Idempotency-Key": f"key-{self.order_id}"}
        match self.act:
            case "notify":
                status = await gateway.post(f"/ipn/{SOURCE}", content=encode(self.fields), headers=dict(FORM))
            case "apply":
                status = await gateway.work(world.drain)
            case "deliver":
                status = await gateway.work(world.dispatch)
            case "create":
                body = {"order_id": self.order_id, "amount": "1000.00", "currency": "BDT", "source": SOURCE}
                status = await gateway.post("/v1/orders", json=body, headers=keyed)
            case _:
                body = {"reference": "R-1", "amount": "400.00", "reason": "so"}
                status = await gateway.post(f"/v1/orders/{self.order_id}/refunds", json=body, headers=keyed)
        gateway.told.append(status)
        self.accepted += status == WORKED
        return status

    async def until_done(self) -> None:
        """As a sender, a client and the lease do: again, until it is done."""
        for _ in range(8):
            if await self.do() < UNAVAILABLE and await self.times() == 1:
                return
            self.gateway.world.rt.clock.advance(seconds=61)

    async def times(self) -> int:
        """How often the effect is there. Of a notification: whether each that was acknowledged is stored, and one was."""
        if self.act == "notify":
            statement = "SELECT count(*) FROM notification_deliveries WHERE order_id = %(id)s"
            return int(0 < self.accepted <= await self.gateway.count(statement, id=self.order_id))
        statement = {
            "apply": "SELECT count(*) FROM payments JOIN events USING (order_id) WHERE order_id = %(id)s AND type = 'order.paid'",
            "deliver": "SELECT count(*) FROM delivery_attempts AS a JOIN event_deliveries AS d ON d.id = a.event_delivery_id"
            " WHERE order_id = %(id)s AND a.outcome = 'delivered' AND d.status = 'delivered'",
            "create": "SELECT count(*) FROM orders JOIN sweeps USING (order_id) WHERE order_id = %(id)s",
            "refund": "SELECT count(*) FROM refunds WHERE order_id = %(id)s AND status IN ('processing', 'indeterminate')",
        }[self.act]
        return await self.gateway.count(statement, id=self.order_id)


@contextlib.asynccontextmanager
async def opened(url: str, direct_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Gateway]:
    """A gateway on the database behind `url`, with a subscriber and a client; `direct_url` is for looking at it."""
    async with loopback.serving(says(OK)) as subscriber, worlds.opened(url, clock, faults) as world:
        everything = endpoints.NewEndpoint(subscriber.url, ("order.paid",))
        await endpoints.create(world.rt.db, world.rt.vault, TENANT, everything, secret_bytes=bytes(64), actor="test")
        app = create_app(world.rt)
        made = await tenants.create_key(world.rt.db, TENANT)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            gateway = Gateway(world, client, made.key, direct_url)
            try:
                yield gateway
            finally:
                if gateway.direct:
                    await gateway.direct.close()
        await app.state.slots.drained()
        await app.state.idempotency.drained(seconds=10)


async def _is_gone(connection: psycopg.AsyncConnection[Any]) -> bool:
    try:
        await connection.execute("SELECT 1")
    except psycopg.OperationalError:
        await connection.close()
        return True
    return False


def definite(told: list[int]) -> bool:
    """Whether each answer was a definite one. 409 is what a key is told whose outcome is being found out, or is not known."""
    return set(told) <= {200, 201, 202, 409, UNAVAILABLE}
