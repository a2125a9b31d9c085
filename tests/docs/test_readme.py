"""What the README shows works: its commands run, its code verifies, its links lead somewhere."""

from __future__ import annotations

import json
import re
import sqlite3
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook

from ipn_gateway.clock import Clock
from ipn_gateway.states import DeliveryOutcome, OrderStatus
from tests.cli import command
from tests.docs import pages

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text(encoding="utf-8")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.mark.timeout(120)
async def test_the_steps_work_one_after_the_other(tmp_path: Path, database_url: str):
    """From the first key to looking at an order: each step is run as it is printed, beside a `serve`."""
    settings = command.given_database(database_url)
    async with command.serving("serve", "--port", "0", **settings) as gateway:
        done = await pages.run(TEXT, tmp_path, settings, {pages.GATEWAY: gateway.url})
        await gateway.stopped()

    printed = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]

    assert (done.code, "Traceback" in done.err) == (0, False), done.err
    assert printed[0]["order_id"] == "INV-1001"
    assert printed[1]["secret"].startswith("whsec_")
    assert printed[2]["items"] == []
    assert re.search(r"^listener_url +http\S+/ipn/shop$", done.out, re.MULTILINE)
    assert not (tmp_path / "shop.json").exists()


@pytest.mark.case("S120")
def test_the_subscriber_verifies_and_acts_once():
    """A webhook with a good signature is acted on once, however often it comes; a bad one is refused."""
    (source,) = pages.blocks(TEXT, "python")
    shown: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec"), shown)
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE received (id text PRIMARY KEY)")
    acted: list[tuple[str, Any]] = []
    now = Clock().now().astimezone(UTC)
    body = b'{"id":"evt_1","type":"order.paid","timestamp":"2026-07-14T06:02:58Z","data":{"order_id":"INV-1001"}}'
    signature = Webhook(SECRET).sign("evt_1", now, body.decode())
    headers = {"webhook-id": "evt_1", "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": signature}

    statuses = [
        shown["receive"](SECRET, headers, sent, database, lambda _, kind, data: acted.append((kind, data)))
        for sent in (body, body, body.replace(b"1001", b"1002"))
    ]
    database.close()

    assert statuses == [200, 200, 401]
    assert acted == [("order.paid", {"order_id": "INV-1001"})]


@pytest.mark.case("S120", "S132")
def test_the_beginning_says_what_it_is():
    """The first forty lines hold the promise, what is not promised, the two commands and five links."""
    beginning = "\n".join(TEXT.splitlines()[:40])

    assert "applied exactly once" in beginning
    assert "at least once" in beginning
    assert "does **not** promise exactly-once\n*delivery*" in beginning
    assert {"make demo", "make test"} <= set(re.findall(r"^(make \w+)", beginning, re.MULTILINE))
    assert len(re.findall(r"^- \[[^]]+\]\([^)]+\)$", beginning, re.MULTILINE)) == 5


def test_links_lead_somewhere():
    """Every link to a file of this project leads to one."""
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)

    assert links
    assert [link for link in links if not (README.parent / link).is_file()] == []


@pytest.mark.parametrize("words", [OrderStatus, DeliveryOutcome], ids=["orders", "notifications"])
def test_every_status_is_explained(words: type[OrderStatus | DeliveryOutcome]):
    """No order or notification is ever in a state that the README does not tell."""
    assert {word.value for word in words} - set(re.findall(r"`([a-z_]+)`", TEXT)) == set()
