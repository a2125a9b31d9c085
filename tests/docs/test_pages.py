"""Every page works: its commands run as they are printed beside a `serve` and a simulated provider, and its code does what it says."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from pydantic import SecretStr

from ipn_gateway import ids, sources, tenants
from ipn_gateway.simulator.app import SimulatorConfig, create_app
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.simulator.serving import serving
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.vault import Vault
from tests import loopback
from tests.cli import command
from tests.docs import pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ipn_gateway.db import Database
    from ipn_gateway.simulator.app import Simulator
    from tests.conftest import Server
    from tests.make import Make

DOCS = pages.ROOT / "docs"
OWN_TABLES = {"IPN_EFFECT": "shop:book", "PYTHONPATH": os.pathsep.join([str(DOCS / "examples/own_tables"), str(pages.ROOT)])}

pytestmark = pytest.mark.timeout(120)


@dataclass
class Stage:
    """A gateway and a simulated provider that run, and what is needed to prepare what a page speaks of."""

    settings: dict[str, str]
    gateway: str
    provider_url: str
    provider: Simulator

    async def shown(self, page: str, folder: Path) -> command.Done:
        """Run a page. Nothing may fail."""
        text = (DOCS / page).read_text(encoding="utf-8")
        done = await pages.run(text, folder, self.settings, {pages.GATEWAY: self.gateway, pages.SIMULATOR: self.provider_url})
        await self.provider.sender.drained()
        assert (done.code, "Traceback" in done.err) == (0, False), done.err
        return done

    def client(self, key: str) -> httpx.AsyncClient:
        """A caller of the API."""
        return httpx.AsyncClient(base_url=self.gateway, headers={"Authorization": f"Bearer {key}"})

    async def paid(self, order_id: str, key: str) -> dict[str, str]:
        """Register an order and have it paid at the provider; the notification, which is not sent."""
        order = {"order_id": order_id, "amount": "1250.00", "currency": "BDT", "source": "shop"}
        async with self.client(key) as client:
            registered = await client.post("/v1/orders", json=order, headers={"Idempotency-Key": f"order-{order_id}"})
        assert registered.status_code == 201, registered.text
        return self.provider.control.pay(PaymentRequest(tran_id=order_id, amount=Decimal("1250.00"), currency="BDT", send_ipn=False))


@asynccontextmanager
async def stage(settings: dict[str, str]) -> AsyncIterator[Stage]:
    """Everything that pages speak of, running."""
    provider = create_app(SimulatorConfig(store_id="testbox", store_passwd="qwerty", seed=1))
    async with serving(provider) as provider_url, command.serving("serve", "--port", "0", **settings) as gateway:
        yield Stage(settings, gateway.url, provider_url, provider.state.simulator)
        await gateway.stopped()


async def shown(page: str, folder: Path, settings: dict[str, str]) -> command.Done:
    """Run a page beside everything that it speaks of. Nothing may fail."""
    async with stage(settings) as beside:
        return await beside.shown(page, folder)


async def settled(settings: dict[str, str], order_id: str) -> dict[str, Any]:
    """The order, as soon as it is not pending any more."""
    async with asyncio.timeout(30):
        while True:
            order: dict[str, Any] = (await command.run("orders", "show", order_id, "--json", **settings)).json
            if order["status"] != "pending":
                return order


async def test_the_quickstart_leads_to_a_paid_order(tmp_path: Path, database_url: str):
    """From the first key to one order, paid once by two notifications."""
    settings = command.given_database(database_url)

    done = await shown("quickstart.md", tmp_path, settings)
    async with command.serving("serve", "--port", "0", **settings):
        order = await settled(settings, "INV-1001")
    listed = (await command.run("deliveries", "list", "--order-id", "INV-1001", "--json", **settings)).json["items"]

    assert "listener_url" in done.out
    assert (order["status"], order["amount_paid"]) == ("paid", "1250.00")
    assert "applied" in {delivery["outcome"] for delivery in listed}
    assert len(listed) == 2


async def test_connecting_sslcommerz_works_as_printed(tmp_path: Path, database_url: str):
    """The source is there, the order is registered, and the file with the password is gone."""
    done = await shown("howto/connect-sslcommerz.md", tmp_path, command.given_database(database_url))

    assert re.search(r"^listener_url +http\S+/ipn/shop$", done.out, re.MULTILINE)
    assert re.search(r"^status +pending$", done.out, re.MULTILINE)
    assert not (tmp_path / "shop.json").exists()


async def test_a_payment_is_taken_as_printed(tmp_path: Path, database_url: str):
    """From the order by way of the provider's page to a payment, and back again for a part of it."""
    settings = command.given_database(database_url) | {"IPN_REFUND_POLL_SCHEDULE": "1,1,1"}

    done = await shown("howto/checkout.md", tmp_path, settings)
    order = (await command.run("orders", "show", "INV-1001", "--json", **settings)).json

    assert re.search(r'"redirect_url":"http://127.0.0.1:\d+/pay/\w+"', done.out)
    assert (order["status"], order["amount_paid"], order["amount_refunded"]) == ("partially_refunded", "1250.00", "400.00")


async def test_a_payment_is_refunded_as_printed(tmp_path: Path, database_url: str, db: Database):
    """One request is one refund, and no key waits for a person."""
    settings = command.given_database(database_url)
    key = (await tenants.create_key(db, "acme")).key
    async with stage(settings) as beside:
        await command.source(db, settings, "shop", base_url=beside.provider_url)
        genuine = await beside.paid("INV-1001", key)
        async with httpx.AsyncClient() as provider:
            await provider.post(f"{beside.gateway}/ipn/shop", data=genuine)
        await settled(settings, "INV-1001")
        await beside.shown("howto/refund.md", tmp_path)
        order = (await command.run("orders", "show", "INV-1001", "--json", **settings)).json

    assert [(refund["reference"], refund["amount"], refund["status"]) for refund in order["refunds"]] == [
        ("RMA-2041", "400.00", "processing")
    ]


async def test_rotating_secrets_works_as_printed(tmp_path: Path, database_url: str, db: Database):
    """The store password, the replay afterwards, and an endpoint that signs with two secrets."""
    settings = command.given_database(database_url)
    await command.source(db, settings, "shop")

    done = await shown("howto/rotate-a-secret.md", tmp_path, settings)
    endpoints = (await command.run("endpoints", "list", "--json", **settings)).json["items"]

    assert "whsec_" in done.out
    assert [len(endpoint["secrets"]) for endpoint in endpoints] == [2]


async def test_notifications_are_run_again_as_printed(tmp_path: Path, database_url: str, db: Database):
    """Two that were refused, since the gateway had another password: one is replayed by its id and one among many, and both count."""
    settings = command.given_database(database_url)
    key = (await tenants.create_key(db, "acme")).key
    async with stage(settings) as beside:
        await command.source(db, settings, "shop", base_url=beside.provider_url, store_passwd="not told yet")
        async with httpx.AsyncClient() as provider:
            posts = [await provider.post(f"{beside.gateway}/ipn/shop", data=await beside.paid(f"INV-{n}", key)) for n in (1001, 1002)]
        changed = {"store_passwd": "qwerty"}
        await sources.patch(db, Vault([SecretStr(settings["IPN_SECRET_KEY"])]), "acme", "shop", changed, actor="test")
        done = await beside.shown("howto/replay.md", tmp_path)
        orders = [await settled(settings, order_id) for order_id in ("INV-1001", "INV-1002")]

    assert [post.status_code for post in posts] == [401, 401]
    assert re.findall(r"^count +(\d)$", done.out, re.MULTILINE) == ["1", "1"]
    assert "replay" in done.out
    assert [(order["status"], len(order["payments"])) for order in orders] == [("paid", 1)] * 2


CONFIRMED = {"operation_id": "V-1", "effect": "paid", "status": "VALID", "account": "testbox", "amount": "1300.00", "currency": "BDT"} | {
    "provider_transaction_id": "BANK-1",
    "risk": False,
    **dict.fromkeys(("settled_amount", "settled_currency", "net_amount", "paid_at")),
}


async def test_dead_letters_are_drained_as_printed(tmp_path: Path, database_url: str, db: Database, make: Make):
    """One of each kind waits, and two events are dead: afterwards nothing waits, and both events have arrived."""
    settings = command.given_database(database_url) | {"IPN_ALLOW_LOOPBACK_ENDPOINTS": "true"}
    key = (await tenants.create_key(db, "acme")).key
    async with loopback.serving(loopback.says(loopback.OK)) as service, stage(settings) as beside:
        for name in ("shop", "shop-2"):
            await command.source(db, settings, name, base_url=beside.provider_url)
        genuine = await beside.paid("INV-1001", key)
        await waiting(make, "dead", "INV-1001", reason="no_verdict", raw_body=encode(genuine))
        await waiting(make, "held", "INV-1002", reason="amount", confirmed=CONFIRMED | {"order_id": "INV-1002"})
        await waiting(make, "dead", "INV-1003", reason="no_verdict", source_id="shop-2")
        await waiting(make, "conflict", "INV-1004", reason="second_payment")
        subscribed = {"url": service.url, "events": ["endpoint.test"]}
        async with beside.client(key) as client:
            endpoint = ids.read(ids.ENDPOINT, (await client.post("/v1/endpoints", json=subscribed)).json()["id"])
            for _ in range(2):
                await make.event_delivery(tenant_id="acme", endpoint_id=endpoint, status="dead", attempt_count=10)
            await beside.shown("howto/dead-letters.md", tmp_path)
            orders = [await settled(settings, f"INV-{number}") for number in (1001, 1002, 1003)]
            async with asyncio.timeout(30):
                while (found := await outbound(client)) != ["delivered", "delivered"]:
                    assert set(found) <= {"pending", "delivered"}
            left = (await client.get("/v1/notification-deliveries", params={"waiting": "true"})).json()["items"]

    assert [(order["status"], order["amount_paid"]) for order in orders] == [("paid", paid) for paid in ("1250.00", "1300.00", "1250.00")]
    assert left == []
    assert len(service.requests) == 2


async def waiting(make: Make, outcome: str, order_id: str, **given: Any) -> None:
    """A notification of the order that waits for a person."""
    of = {"tenant_id": "acme", "source_id": given.pop("source_id", "shop"), "order_id": order_id}
    if order_id != "INV-1001":
        await make.order(amount=Decimal("1250.00"), **of)
    delivery = await make.notification_delivery(outcome=outcome, **of, **given)
    await make.inbox(notification_delivery_id=delivery["id"], state=outcome, **of)


async def outbound(client: httpx.AsyncClient) -> list[str]:
    """The statuses of all event deliveries."""
    return [item["status"] for item in (await client.get("/v1/event-deliveries")).json()["items"]]


async def test_an_upgrade_works_as_printed(tmp_path: Path, database_url: str, db: Database, server: Server):
    """Backed up and migrated beside a gateway that goes on; what was backed up is there again in another database."""
    settings = command.given_database(database_url)
    await command.source(db, settings, "shop")
    text = pages.section((DOCS / "howto/upgrade.md").read_text(encoding="utf-8"), "On a PostgreSQL of your own")

    with server.database() as empty:
        async with command.serving("serve", "--port", "0", **settings) as gateway:
            done = await pages.run(text, tmp_path, settings | {"NEW_DATABASE_URL": empty}, {pages.GATEWAY: gateway.url})
            await gateway.stopped()
        listed = await command.run("sources", "list", "--json", **settings | {"IPN_DATABASE_URL": empty})

    assert (done.code, done.err) == (0, "")
    assert "Nothing was pending." in done.out
    assert '"status":"ready"' in done.out
    assert [item["name"] for item in listed.json["items"]] == ["shop"]


async def test_the_embedded_server_is_upgraded_as_printed(tmp_path: Path):
    """Its directory is copied while nobody uses it, and works in another place, the key included."""
    settings = command.embedded(tmp_path / "data") | {"IPN_PUBLIC_URL": "https://pay.example"}
    config = '{"store_id": "testbox", "store_passwd": "qwerty", "mode": "sandbox"}'
    await command.run("keys", "create", "--tenant", "acme", **settings)
    added = await command.run("sources", "add", "shop", "--config", config, **settings)
    text = pages.section((DOCS / "howto/upgrade.md").read_text(encoding="utf-8"), "On the embedded PostgreSQL")
    (tmp_path / "page").mkdir()

    done = await pages.run(text, tmp_path / "page", settings, {})
    again = await command.run("sources", "list", "--json", **command.embedded(tmp_path / "page/restored"))

    assert (added.code, done.code, done.err) == (0, 0, "")
    assert len(re.findall(r"^shop +sslcommerz", done.out, re.MULTILINE)) == 2
    assert [item["name"] for item in again.json["items"]] == ["shop"]
    assert (tmp_path / "page/restored/secret.key").read_text() == (tmp_path / "data/secret.key").read_text()


async def test_own_tables_are_written_as_printed(tmp_path: Path, database_url: str):
    """The tables are made and the order is there; that a payment is booked is shown by the tests of the examples."""
    settings = command.given_database(database_url) | OWN_TABLES

    await shown("howto/own-tables.md", tmp_path, settings)

    async with await psycopg.AsyncConnection.connect(database_url) as merchant:
        found = await (await merchant.execute("SELECT count(*) FROM shop.deposits")).fetchone()
    assert found == (0,)


def test_the_effect_shown_is_the_one_of_the_example():
    """The page shows the function of the file that the tests of the examples run, whole."""
    (block,) = pages.blocks((DOCS / "howto/own-tables.md").read_text(encoding="utf-8"), "python")
    example = (DOCS / "examples/own_tables/shop.py").read_text(encoding="utf-8")
    function = re.search(r"^async def book\(.*", example, re.MULTILINE | re.DOTALL)

    assert function
    assert block == function[0]


HOWTOS = ("checkout", "connect-sslcommerz", "dead-letters", "own-tables", "refund", "replay", "rotate-a-secret", "upgrade")


def test_every_page_that_shows_steps_is_run():
    """A page with runnable blocks has a test here; the README has its own."""
    with_steps = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if "```sh runnable" in page.read_text(encoding="utf-8")}

    assert with_steps == {
        "quickstart.md",
        *(f"howto/{name}.md" for name in HOWTOS),
    }
