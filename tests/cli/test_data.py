"""The commands that make and show things, on the embedded server and on a given one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx
import pytest

from ipn_gateway import tenants
from tests.cli import command

if TYPE_CHECKING:
    from pathlib import Path

    from ipn_gateway.db import Database

pytestmark = pytest.mark.timeout(120)

PASSWORD = "Qwerty@NotShown1"
CONFIG = f'{{"store_id":"testbox","store_passwd":"{PASSWORD}","mode":"sandbox"}}'


async def test_commands_work_without_and_beside_a_serve(tmp_path: Path):
    """One data directory, first by commands alone, then shared with a `serve`: what the ones make the other one knows."""
    settings = command.embedded(tmp_path / "data")

    made = await command.run("keys", "create", "--tenant", "acme", "--json", **settings)
    async with command.serving("serve", "--port", "0", **settings) as gateway:
        added = await command.run("sources", "add", "shop", "--config", CONFIG, "--json", **settings)
        headers = {"Authorization": f"Bearer {made.json['key']}", "Idempotency-Key": "order-1"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
            order = {"order_id": "INV-1", "amount": "100.00", "currency": "BDT", "source": "shop"}
            registered = await client.post("/v1/orders", json=order)
            forged = await client.post("/ipn/shop", data={"tran_id": "INV-1", "status": "VALID"})
        shown = await command.run("orders", "show", "INV-1", "--json", **settings)
        listed = await command.run("deliveries", "list", "--order-id", "INV-1", **settings)
        stopped = await gateway.stopped()

    assert made.code == added.code == 0
    assert set(made.json) == {"tenant", "key_id", "key"}
    assert re.fullmatch(r"key_[0-9a-f]{32}", made.json["key_id"])
    assert added.json["listener_url"] == f"{gateway.url}/ipn/shop"
    assert (registered.status_code, forged.status_code) == (201, 401)
    assert shown.json["order_id"] == "INV-1"
    assert [forged.headers["x-delivery-id"], "shop", "INV-1", "VALID", "rejected", "signature"] == [
        cell for cell in listed.out.splitlines()[1].split() if not cell.startswith("20")
    ]
    assert stopped.code == 0
    assert PASSWORD not in "".join(done.out + done.err for done in (added, shown, listed, stopped))


async def test_the_only_tenant_need_not_be_named(database_url: str, db: Database):
    """With one tenant it is meant, with none the way to one is shown, and with several each is offered."""
    settings = command.given_database(database_url)

    none = await command.run("sources", "list", **settings)
    await tenants.create_key(db, "acme")
    one = await command.run("sources", "list", "--json", **settings)
    await tenants.create_key(db, "zen")
    several = await command.run("sources", "list", **settings)

    assert none.code == 1
    assert "keys create" in none.sentence
    assert one.json == {"items": [], "next_cursor": None}
    assert several.code == 2
    assert "acme, zen" in several.sentence


async def test_what_is_not_there_is_named(database_url: str, db: Database):
    """The sentence says what was looked for, and whose."""
    await tenants.create_key(db, "acme")

    done = await command.run("orders", "show", "INV-9", **command.given_database(database_url))

    assert (done.code, done.out) == (1, "")
    assert done.sentence == "There is no order INV-9 of the tenant acme."


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("keys", "create", "--tenant", "acme", "--scopes", "everything"), "everything is none"),
        (("sources", "add", "shop", "--config", '{"store_id":"testbox"}'), "config.store_passwd: is required"),
    ],
)
async def test_values_that_cannot_be_are_named(database_url: str, db: Database, arguments: tuple[str, ...], hint: str):
    """Each field that is wrong is named, with exit code 2."""
    await tenants.create_key(db, "acme")

    done = await command.run(*arguments, **command.given_database(database_url))

    assert (done.code, done.out) == (2, "")
    assert hint in done.sentence


async def test_a_guessed_listener_url_is_called_a_guess(database_url: str, db: Database):
    """On a database that a `serve` elsewhere may use, nothing says where that is reached; set, it may have a path, and nothing is said."""
    settings = command.given_database(database_url)
    await tenants.create_key(db, "acme")

    none = await command.here("sources", "list", **settings)
    guessed = await command.here("sources", "add", "shop", "--config", CONFIG, "--json", **settings)
    listed = await command.here("sources", "list", **settings)
    told = await command.here("sources", "list", "--json", IPN_PUBLIC_URL="https://shop.example/payments/", **settings)

    assert none.err == ""
    assert guessed.json["listener_url"] == "http://127.0.0.1:8000/ipn/shop"
    assert all("listener_url is a guess" in done.err and "IPN_PUBLIC_URL" in done.err for done in (guessed, listed))
    assert (told.json["items"][0]["listener_url"], told.err) == ("https://shop.example/payments/ipn/shop", "")


async def test_lists_are_paged(database_url: str, db: Database):
    """`--limit` cuts, `--cursor` goes on, and ids are never cut off."""
    settings = command.given_database(database_url)
    for name in ("first", "second"):
        await command.source(db, settings, name)

    page = await command.run("sources", "list", "--limit", "1", "--json", **settings)
    rest = await command.run("sources", "list", "--cursor", page.json["next_cursor"], **settings)

    assert [item["name"] for item in page.json["items"]] == ["second"]
    assert [line.split()[0] for line in rest.out.splitlines()] == ["name", "first"]
