"""Refunds in a world of a test: paid orders, keyed requests through the layer, polls that the test runs, and what the provider did."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx

from ipn_gateway import effects, idempotency_acts, ids, refund_polls, refunds, sources, tenants, views
from ipn_gateway.bookings import Origin
from ipn_gateway.errors import GatewayError
from ipn_gateway.idempotency import Idempotency, KeyedRequest
from ipn_gateway.idempotency_acts import Resolution
from ipn_gateway.providers.base import Confirmed, Effect
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.slots import Slots
from tests.world import SOURCE, STORE, TENANT

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway import objects
    from ipn_gateway.db import Database
    from ipn_gateway.idempotency import Answer
    from ipn_gateway.idempotency_acts import Decision
    from tests.processes import Process, Site
    from tests.world import World

ORDER = "ORD-1"
NO_ANSWER = 599


@dataclass
class Desk:
    """Who refunds: one process of the gateway, over `db` where it is not the world's own."""

    world: World
    db: Database | None = None
    layer: Idempotency = field(init=False)
    poller: refund_polls.Poller = field(init=False)

    def __post_init__(self) -> None:
        rt = self.world.rt
        settings = rt.settings
        self.layer = Idempotency(
            self.db or rt.db,
            [refunds.CREATE],
            lease_seconds=settings.idempotency_lease_seconds,
            retention_hours=settings.idempotency_retention_hours,
        )
        self.poller = refund_polls.Poller(rt.maintenance_db, rt.sources, rt.transport, settings, Slots(16), lambda: None)

    # What is asked for

    async def paid(self, order_id: str = ORDER, amount: str = "1000.00", currency: str = "BDT", **given: Any) -> dict[str, str]:
        """A paid order; the fields of its notification."""
        await self.world.order(order_id, amount, currency, **given)
        return await self.payment(order_id, amount, currency)

    async def payment(self, order_id: str, amount: str, currency: str = "BDT") -> dict[str, str]:
        """One more payment of an order."""
        fields = self.world.pay(order_id, amount, currency)
        await self.world.notify(fields)
        await self.world.drain()
        return fields

    async def refund(
        self,
        key: str,
        reference: str = "R-1",
        amount: str = "400.00",
        *,
        order_id: str = ORDER,
        payment: UUID | None = None,
    ) -> Answer:
        """One request; raises what it is refused with where that is not stored."""
        body = {"reference": reference, "amount": amount, "reason": "sent back"}
        if payment:
            body["payment_id"] = ids.show(ids.PAYMENT, payment)
        new = refunds.NewRefund(order_id, reference, Decimal(amount), "sent back", payment)
        rt = self.world.rt
        refunder = refunds.Refunder(self.db or rt.db, rt.sources, rt.transport, rt.settings)
        asked = KeyedRequest(TENANT, key, body, path={"order_id": order_id})
        return await self.layer.run(refunds.CREATE, asked, refunds.Refunding(refunder, TENANT, new).phases())

    async def refused(self, key: str, *given: Any, **named: Any) -> GatewayError:
        """What a request is refused with."""
        try:
            answer = await self.refund(key, *given, **named)
        except GatewayError as error:
            return error
        raise AssertionError(f"{answer.status} {answer.body!r}")

    async def resolve(self, decision: Decision, **evidence: Any) -> None:
        """A person found out what became of the one request whose outcome is not known."""
        key_id = await self.world.value("SELECT id FROM idempotency_keys ORDER BY state = 'indeterminate' DESC LIMIT 1")
        resolution = Resolution(TENANT, key_id, decision, actor="test", reason="the provider's panel", evidence=evidence)
        async with self.world.rt.db.transaction("test.resolve") as tx:
            await idempotency_acts.resolve(tx, self.world.rt.clock, self.layer.operations, resolution)

    # What the workers do

    async def poll(self) -> int:
        """Ask about refunds until none is due; how many questions that were."""
        asked = 0
        while claimed := await refund_polls.run_once(self.poller):
            asked += claimed
            await self.poller.slots.drained()
        return asked

    async def finish(self) -> None:
        """Ask until nothing is to be asked any more."""
        while await self.world.value("SELECT count(*) FROM refunds WHERE due_at IS NOT NULL"):
            self.world.rt.clock.advance(days=1)
            await self.poll()

    # What is true

    @property
    def calls(self) -> dict[str, int]:
        """How often the provider was asked for a refund, by our key."""
        return dict(self.world.simulator.api.refund_calls)

    @property
    def moved(self) -> list[Decimal]:
        """The refunds that the provider accepted and did not cancel."""
        return [refund.amount for refund in self.world.simulator.api.refunds.by_ref_id.values() if refund.status != "cancelled"]

    async def order(self, order_id: str = ORDER) -> objects.Order:
        """The order as the API shows it."""
        async with self.world.rt.db.autocommit("test.order") as tx:
            return await views.order(tx, TENANT, order_id)

    async def sums(self, order_id: str = ORDER) -> tuple[str, str]:
        """The order's status, and what was refunded."""
        order = await self.order(order_id)
        return order.status, order.amount_refunded

    async def refunds(self) -> list[tuple[str, str]]:
        """Reference and status of every refund, oldest first."""
        return [(row["reference"], row["status"]) for row in await self.world.rows("SELECT reference, status FROM refunds ORDER BY id")]

    async def holds(self) -> list[tuple[str, str]]:
        """What is reserved and what is refunded of each payment, oldest first."""
        rows = await self.world.rows("SELECT amount_reserved, amount_refunded FROM payments ORDER BY recorded_at, id")
        return [(f"{row['amount_reserved']:.2f}", f"{row['amount_refunded']:.2f}") for row in rows]

    async def key(self) -> tuple[str, str]:
        """State and recovery point of the one key."""
        (row,) = await self.world.rows("SELECT state, recovery_point FROM idempotency_keys")
        return row["state"], row["recovery_point"]

    async def told(self, event_type: str) -> list[dict[str, Any]]:
        """The data of the events of a type, in their order."""
        rows = await self.world.rows("SELECT body FROM events WHERE type = %(type)s ORDER BY sequence", type=event_type)
        return [json.loads(row["body"])["data"] for row in rows]

    # What goes wrong

    def unclear(self, kind: str, **given: Any) -> None:
        """The provider's next answer about a refund goes wrong."""
        self.world.fault("refund", kind, **given)

    async def move_provider(self, url: str) -> None:
        """The source's provider is at another address from now on."""
        await sources.patch(self.world.rt.db, self.world.rt.vault, TENANT, SOURCE, {"base_url": url}, actor="test")
        self.world.rt.sources.forget(SOURCE)

    async def hanging(self, count: int = 1) -> None:
        """Wait until so many answers of the provider hang."""
        while self.world.simulator.api.faults.hanging < count:  # noqa: ASYNC110 - it has no event, and the test has a limit
            await asyncio.sleep(0)


@dataclass
class Client:
    """A merchant with a paid order, who calls gateways in processes of their own."""

    site: Site
    order_id: str
    key: str

    @classmethod
    async def paid(cls, site: Site, order_id: str, amount: str = "1000.00") -> Client:
        """The order is registered and paid beside the gateways."""
        await site.order(order_id, amount)
        asked = PaymentRequest(tran_id=order_id, amount=Decimal(amount), currency="BDT", send_ipn=False)
        fields = site.simulator.control.pay(asked)
        origin = Origin(TENANT, SOURCE, "sslcommerz", ids.new(site.db.clock.now()))
        verdict = Confirmed(
            order_id=order_id,
            operation_id=fields["val_id"],
            effect=Effect.PAID,
            status="VALID",
            account=STORE,
            amount=Decimal(amount),
            currency="BDT",
            provider_transaction_id=fields["bank_tran_id"],
        )
        await effects.apply(site.db, origin, verdict)
        return cls(site, order_id, (await tenants.create_key(site.db, TENANT)).key)

    async def refund(self, process: Process, key: str, reference: str, amount: str) -> httpx.Response:
        """One request; status 599 where no answer came."""
        body = {"reference": reference, "amount": amount, "reason": "sent back"}
        return await self._post(process, f"/v1/orders/{self.order_id}/refunds", key, body)

    async def settle(self, process: Process, reconciliation_id: str) -> None:
        """A person looks into the provider's panel, and says what is there."""
        found = [refund.ref_id for refund in self.site.simulator.api.refunds.by_ref_id.values()]
        said = {"decision": "applied", "evidence": {"provider_refund_id": found[0]}} if found else {"decision": "not_applied"}
        path = f"/v1/idempotency-keys/{reconciliation_id}/resolve"
        answer = await self._post(process, path, "resolve-1", said | {"reason": "the panel"})
        assert answer.status_code == 200, answer.text

    async def _post(self, process: Process, path: str, key: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}", "Idempotency-Key": key}
        try:
            return await self.site.http.post(f"{process.url}{path}", json=body, headers=headers)
        except httpx.TransportError:
            return httpx.Response(NO_ANSWER)


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Status and slug of a problem document; the whole answer where it is none."""
    is_problem = answer.headers.get("content-type") == "application/problem+json"
    return answer.status_code, answer.json()["type"].removeprefix("/problems/") if is_problem else answer.text


def nowhere() -> str:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def members(answer: Answer) -> dict[str, Any]:
    """The JSON of an answer."""
    read: dict[str, Any] = json.loads(answer.body)
    return read
