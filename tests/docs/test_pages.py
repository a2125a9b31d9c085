"""Every page works: its commands run as they are printed beside a `serve` and a simulated provider, and its code does what it says."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from standardwebhooks import Webhook

from ipn_gateway.clock import Clock
from ipn_gateway.simulator.app import SimulatorConfig, create_app
from ipn_gateway.simulator.serving import serving
from tests.cli import command
from tests.docs import pages

if TYPE_CHECKING:
    from pathlib import Path

    from ipn_gateway.db import Database

DOCS = pages.ROOT / "docs"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OWN_TABLES = {"IPN_EFFECT": "shop:book", "PYTHONPATH": os.pathsep.join([str(DOCS / "examples/own_tables"), str(pages.ROOT)])}

pytestmark = pytest.mark.timeout(120)


async def shown(page: str, folder: Path, settings: dict[str, str]) -> command.Done:
    """Run a page beside everything that it speaks of. Nothing may fail."""
    provider = create_app(SimulatorConfig(store_id="testbox", store_passwd="qwerty", seed=1))
    async with serving(provider) as simulator, command.serving("serve", "--port", "0", **settings) as gateway:
        text = (DOCS / page).read_text(encoding="utf-8")
        done = await pages.run(text, folder, settings, {pages.GATEWAY: gateway.url, pages.SIMULATOR: simulator})
        await provider.state.simulator.sender.drained()
        await gateway.stopped()
    assert (done.code, "Traceback" in done.err) == (0, False), done.err
    return done


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


async def test_rotating_secrets_works_as_printed(tmp_path: Path, database_url: str, db: Database):
    """The store password, the replay afterwards, and an endpoint that signs with two secrets."""
    settings = command.given_database(database_url)
    await command.source(db, settings, "shop")

    done = await shown("howto/rotate-a-secret.md", tmp_path, settings)
    endpoints = (await command.run("endpoints", "list", "--json", **settings)).json["items"]

    assert "whsec_" in done.out
    assert [len(endpoint["secrets"]) for endpoint in endpoints] == [2]


async def test_own_tables_are_written_as_printed(tmp_path: Path, database_url: str):
    """The tables are made and the order is there; that a payment is booked is shown by the tests of the examples."""
    settings = command.given_database(database_url) | OWN_TABLES

    await shown("howto/own-tables.md", tmp_path, settings)

    async with await psycopg.AsyncConnection.connect(database_url) as merchant:
        found = await (await merchant.execute("SELECT count(*) FROM shop.deposits")).fetchone()
    assert found == (0,)


def test_the_effect_shown_is_the_one_of_the_example():
    """The page shows the heart of the file that the tests of the examples run."""
    (block,) = pages.blocks((DOCS / "howto/own-tables.md").read_text(encoding="utf-8"), "python")
    example = (DOCS / "examples/own_tables/shop.py").read_text(encoding="utf-8")
    statement = re.search(r'"INSERT INTO shop.deposits .*?"', block)

    assert statement
    assert statement[0] in example


@pytest.mark.parametrize(
    ("altered", "genuine"),
    [
        ({}, True),
        ({"webhook-id": "evt_2"}, False),
        ({"webhook-timestamp": "soon"}, False),
        ({"webhook-signature": "v1,ü v2,x"}, False),
    ],
)
def test_a_webhook_is_verified_as_shown(altered: dict[str, str], genuine: bool):
    """With the standard library alone: what the gateway signs is genuine, and what anybody changed is not."""
    (source,) = pages.blocks((DOCS / "howto/verify-a-webhook.md").read_text(encoding="utf-8"), "python")
    code: dict[str, Any] = {}
    exec(compile(source, "verify-a-webhook.md", "exec"), code)
    now = Clock().now()
    body = b'{"id":"evt_1","type":"order.paid"}'
    headers = {"webhook-id": "evt_1", "webhook-timestamp": str(int(now.timestamp()))}
    headers["webhook-signature"] = "v1,AAAA " + Webhook(SECRET).sign("evt_1", now, body.decode())

    event = code["verify"](SECRET, headers | altered, body, now.timestamp())
    late = code["verify"](SECRET, headers, body, now.timestamp() + 301)

    assert (event == {"id": "evt_1", "type": "order.paid"}) is genuine
    assert late is None


def test_every_page_that_shows_steps_is_run():
    """A page with runnable blocks has a test here; the README has its own."""
    with_steps = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if "```sh runnable" in page.read_text(encoding="utf-8")}

    assert with_steps == {"quickstart.md", "howto/connect-sslcommerz.md", "howto/rotate-a-secret.md", "howto/own-tables.md"}
