"""The commands that look things up or change an endpoint, on a given database and without a server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from ipn_gateway import console, ids
from tests.cli import command

if TYPE_CHECKING:
    from collections.abc import Callable

    from ipn_gateway.db import Database
    from tests.make import Make

pytestmark = pytest.mark.timeout(120)

URL = "https://shop.example/webhooks"
BODY = b'{"id":"evt_1","type":"order.paid","timestamp":"2026-07-14T06:02:58Z","data":{"order_id":"INV-1"}}'


async def test_an_endpoint_from_beginning_to_end(database_url: str, db: Database):
    """Added, disabled, listed, enabled again, rotated, shown without its secret and deleted; the audit log has each as the command's."""
    settings = command.given_database(database_url)
    await command.source(db, settings, "shop")

    added = await command.run("endpoints", "add", URL, "--events", "order.*,notification.held", "--json", **settings)
    endpoint = added.json["id"]
    off = await command.run("endpoints", "disable", endpoint, "--reason", "their service moves", "--json", **settings)
    disabled = await command.run("endpoints", "list", **settings)
    enabled = await command.run("endpoints", "enable", endpoint, "--reason", "is back", "--json", **settings)
    rotated = await command.run("endpoints", "rotate-secret", endpoint, "--overlap-seconds", "60", "--json", **settings)
    shown = await command.run("endpoints", "show", endpoint, **settings)
    deleted = await command.run("endpoints", "delete", endpoint, "--json", **settings)
    gone = await command.run("endpoints", "show", endpoint, **settings)
    async with db.autocommit("test.audit") as tx:
        acts = await tx.all(dict, "SELECT actor, action, reason FROM audit_log WHERE target = %(target)s ORDER BY id", {"target": endpoint})

    assert added.json["secret"].startswith("whsec_")
    assert rotated.json["secret"] not in {added.json["secret"], None}
    assert disabled.out.splitlines()[1].split()[1:] == [URL, "disabled", "manual"]
    assert (off.json["status"], off.json["disabled_reason"]) == ("disabled", "manual")
    assert enabled.json["status"] == "enabled"
    assert len(rotated.json["secrets"]) == 2
    assert "whsec_" not in shown.out
    assert deleted.json == {"id": endpoint, "cancelled": 0}
    assert (gone.code, gone.sentence) == (1, f"There is no endpoint {endpoint} of the tenant acme.")
    assert {act["actor"] for act in acts} == {"command"}
    assert [act["action"] for act in acts] == [f"endpoint.{verb}" for verb in ("create", "disable", "enable", "rotate_secret", "delete")]
    assert [act["reason"] for act in acts] == [None, "their service moves", "is back", None, None]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("endpoints", "add", "http://shop.example"), "https"),
        (("endpoints", "add", "https://127.0.0.1/x"), "url"),
        (("endpoints", "add", URL, "--events", "order.bought"), "events.0: must be an event type"),
        (("endpoints", "add", URL, "--max-in-flight", "0"), "max_in_flight"),
        (("endpoints", "rotate-secret", "ep_1", "--overlap-seconds", "-1"), "--overlap-seconds"),
        (("events", "list", "--type", "order.bought"), "--type"),
        (("tail", "--only", "sideways"), "--only"),
    ],
)
async def test_values_that_cannot_be_are_named(database_url: str, db: Database, arguments: tuple[str, ...], hint: str):
    """By the same checks as the API's, with exit code 2."""
    settings = command.given_database(database_url)
    await command.source(db, settings, "shop")

    done = await command.run(*arguments, **settings)

    assert (done.code, done.out) == (2, "")
    assert hint in done.err


async def test_an_order_is_shown_with_its_payments_and_refunds_in_tables(database_url: str, make: Make):
    """A line for each, under a head that says what the columns are; with --json they are whole."""
    settings = command.given_database(database_url)
    await make.order(order_id="INV-1", metadata={"basket": 7})
    paid = await make.payment(order_id="INV-1", amount=Decimal(100), provider_transaction_id="BANK-1")
    await make.refund(payment_id=paid["id"], order_id="INV-1", reference="R-1", amount=Decimal(40), status="succeeded")

    shown = await command.run("orders", "show", "INV-1", **settings)
    whole = (await command.run("orders", "show", "INV-1", "--json", **settings)).json
    await make.order(order_id="INV-2")
    unpaid = await command.run("orders", "show", "INV-2", **settings)

    members, payments, refunds = (part.splitlines() for part in re.split(r"\n\n(?:payments|refunds):\n", shown.out))
    assert ["metadata", '{"basket":', "7}"] in [line.split() for line in members]
    assert payments[0].split() == ["amount", "currency", "status", "provider_transaction_id", "payment_id"]
    assert payments[1].split() == ["100.00", "BDT", "applied", "BANK-1", ids.show(ids.PAYMENT, paid["id"])]
    assert refunds[0].split() == ["amount", "currency", "status", "created_at", "reference", "refund_id"]
    assert refunds[1].split()[:3] == ["40.00", "BDT", "succeeded"]
    assert (len(whole["payments"]), len(whole["refunds"])) == (1, 1)
    assert re.search(r"^order_id +INV-2$", unpaid.out, re.MULTILINE)
    assert "payments" not in unpaid.out


async def test_events_are_listed_and_shown(database_url: str, make: Make):
    """By order and by type; one that is not there is named."""
    settings = command.given_database(database_url)
    await make.tenant()
    event = await make.event(type="order.paid", body=BODY)
    await make.event(type="order.cancelled", body=BODY)

    listed = await command.run("events", "list", "--type", "order.paid", "--json", **settings)
    shown = await command.run("events", "show", event["id"], "--json", **settings)
    missing = await command.run("events", "show", "evt_none", **settings)

    assert [item["id"] for item in listed.json["items"]] == [event["id"]]
    assert shown.json["type"] == "order.paid"
    assert (missing.code, "There is no event evt_none" in missing.sentence) == (1, True)


async def test_more_events_are_promised_only_behind_a_full_page(database_url: str, make: Make):
    """What is printed is taken as it is; JSON always has the cursor, from which a puller goes on."""
    settings = command.given_database(database_url)
    await make.tenant()
    for _ in range(2):
        await make.event(type="order.paid", body=BODY)

    full = await command.here("events", "list", "--limit", "1", **settings)
    rest = await command.here("events", "list", *full.err.split()[1:], **settings)
    as_json = await command.here("events", "list", "--json", **settings)

    assert full.err.startswith("More: --after ")
    assert (len(rest.out.splitlines()), rest.err) == (2, "")
    assert (len(as_json.json["items"]), as_json.err) == (2, "")
    assert as_json.json["next_cursor"]


async def test_the_contract_needs_no_server_and_no_database():
    """It is what `/v1/contract` says under the same settings."""
    done = await command.run("contract", "--json", IPN_RETRY_SCHEDULE="0,7")
    pretty = await command.run("contract")

    assert done.json["outbound"]["schedule_seconds"] == [0, 7]
    assert json.loads(pretty.out)["version"] == done.json["version"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_shells_can_complete(shell: str):
    """The script that a shell loads is printed, and asks the command for its words."""
    done = await command.run("--help", _IPN_GATEWAY_COMPLETE=f"source_{shell}")

    assert done.code == 0
    assert "_IPN_GATEWAY_COMPLETE" in done.out


async def test_tail_shows_what_comes_in_until_it_is_stopped(database_url: str, make: Make, db: Database):
    """Only what is new, as it is decided, filtered; ^C is its usual end."""
    settings = command.given_database(database_url)
    await make.tenant()
    before = await make.notification_delivery(order_id="INV-0")
    process = await command.start("tail", "--only", "in", "--order", "INV-1", "--json", **settings)
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(30):
        ready = (await process.stderr.readline()).decode()
        await make.notification_delivery(order_id="INV-2")
        arrived = await make.notification_delivery(order_id="INV-1")
        first = json.loads(await process.stdout.readline())
        async with db.transaction("test.decide") as tx:
            await tx.execute(
                "UPDATE notification_deliveries SET outcome = 'rejected', reason = 'signature', decided_at = ipn_now() WHERE id = %(id)s",
                arrived,
            )
        second = json.loads(await process.stdout.readline())
    process.send_signal(signal.SIGINT)
    done = await command.ended(process)

    assert "^C ends" in ready
    assert before["id"] != arrived["id"]
    assert (first["direction"], first["order_id"], first["outcome"]) == ("in", "INV-1", "received")
    assert (second["id"], second["outcome"], second["reason"]) == (first["id"], "rejected", "signature")
    assert (done.code, done.out, done.err) == (0, "", "")


async def test_tail_shows_attempts_with_their_orders(database_url: str, make: Make):
    """What goes out is shown once, with event, order and answer."""
    settings = command.given_database(database_url)
    await make.order(order_id="INV-1")
    process = await command.start("tail", "--only", "out", "--outcome", "refused", **settings)
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(30):
        await process.stderr.readline()
        await make.delivery_attempt(outcome="delivered")
        await make.delivery_attempt(outcome="refused", status_code=503)
        line = (await process.stdout.readline()).decode()
    process.send_signal(signal.SIGTERM)
    done = await command.ended(process)

    assert line.split()[1] == "←"
    assert line.split()[-2:] == ["refused", "503"]
    assert (done.code, done.out) == (0, "")


ROWS = [["id", "url", "status"], ["ep_1", "https://shop.example/a/long/path", "enabled"]]


@pytest.mark.parametrize(
    ("width", "holds"),
    [
        (None, lambda lines: lines[1] == "ep_1  https://shop.example/a/long/path  enabled"),
        (80, lambda lines: "…" not in "".join(lines)),
        (30, lambda lines: max(map(len, lines)) <= 30 and lines[1].startswith("ep_1  https://shop") and "…" in lines[1]),
        (5, lambda lines: lines[1].startswith("ep_1  ")),
    ],
)
def test_tables_fit_the_terminal(width: int | None, holds: Callable[[list[str]], bool]):
    """In a pipe nothing is cut off; on a terminal the widest columns are shortened, the one that names the object never."""
    assert holds(console.laid_out(ROWS, width))
