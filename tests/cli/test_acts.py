"""The commands of manual acts, beside a running gateway or without one: the same use cases, named after who ran them."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import ids, replays
from tests.cli import command
from tests.cli.command import here
from tests.make import Make, ago

if TYPE_CHECKING:
    from ipn_gateway.db import Database

pytestmark = pytest.mark.timeout(120)

SHOP = "shop"
CONFIRMED = {"order_id": "ORD-3", "operation_id": "V-1", "effect": "paid", "status": "VALID", "account": "testbox", "amount": "100.00"} | {
    "currency": "BDT",
    "provider_transaction_id": "BANK-1",
    "risk": False,
    "settled_amount": None,
    "settled_currency": None,
    "net_amount": None,
    "paid_at": None,
}


async def audited(db: Database) -> list[dict[str, Any]]:
    async with db.autocommit("test") as tx:
        return await tx.all(dict, "SELECT actor, action, target, reason FROM audit_log WHERE actor <> 'test' ORDER BY id")


async def delivery(make: Make, outcome: str, **given: Any) -> str:
    row = {
        "tenant_id": "acme",
        "source_id": SHOP,
        "order_id": "ORD-3",
        "operation_id": "V-1",
        "outcome": outcome,
        "reason": "amount",
    } | given
    made = await make.notification_delivery(**row)
    if outcome != "rejected":
        of = {"tenant_id": "acme", "source_id": SHOP, "order_id": row["order_id"], "operation_id": row["operation_id"]}
        await make.inbox(notification_delivery_id=made["id"], state=outcome, **of)
    return ids.show(ids.NOTIFICATION_DELIVERY, made["id"])


async def test_orders_are_released_and_cancelled(database_url: str, db: Database, make: Make) -> None:
    """The order is printed; the audit log has the user and the reason; what cannot be is one sentence and exit code 1."""
    settings = command.given_database(database_url)
    await command.source(db, settings, SHOP)
    of = {"tenant_id": "acme", "source_id": SHOP}
    await make.order(order_id="ORD-1", status="paid_on_hold", reason="risk", **of)
    await make.order(order_id="ORD-2", **of)

    released = await command.run("release", "ORD-1", "--reason", "checked", "--json", **settings)
    cancelled = await here("cancel", "ORD-2", "--reason", "sold out", **settings)
    refused = await here("release", "ORD-2", "--reason", "x", **settings)
    silent = await here("cancel", "ORD-1", "--reason", " ", **settings)
    lost = await here("cancel", "ORD-9", "--reason", "x", **settings)

    assert [done.code for done in (released, cancelled, refused, silent, lost)] == [0, 0, 1, 2, 1]
    assert released.json["status"] == "paid"
    assert "cancelled" in cancelled.out
    assert "paid_on_hold" in refused.sentence
    assert "ORD-9" in lost.sentence
    user = f"cli:{getpass.getuser()}"
    assert await audited(db) == [
        {"actor": user, "action": "order.release", "target": "ORD-1", "reason": "checked"},
        {"actor": user, "action": "order.cancel", "target": "ORD-2", "reason": "sold out"},
    ]


async def test_what_waits_is_resolved(database_url: str, db: Database, make: Make) -> None:
    """Applied as confirmed, applied with evidence, dismissed; evidence that cannot be is named."""
    settings = command.given_database(database_url)
    await command.source(db, settings, SHOP)
    of = {"tenant_id": "acme", "source_id": SHOP}
    for order_id in ("ORD-3", "ORD-4"):
        await make.order(order_id=order_id, amount=Decimal(100), **of)
    held = await delivery(make, "held", confirmed=CONFIRMED)
    dead = await delivery(make, "dead", order_id="ORD-4", operation_id="V-2", reason="no_verdict")
    other = await delivery(make, "held", operation_id="V-3", confirmed=CONFIRMED | {"operation_id": "V-3"})
    waiting = await here("deliveries", "list", "--waiting", "--json", **settings)
    evidence = ["--amount", "100.00", "--currency", "BDT", "--provider-transaction-id", "BANK-2"]

    applied = await here("resolve", held, "apply", "--reason", "agreed", "--json", **settings)
    bare = await here("resolve", dead, "apply", "--reason", "seen", "--json", **settings)
    part = await here("resolve", dead, "apply", "--reason", "seen", *evidence[:2], "--json", **settings)
    seen = await here("resolve", dead, "apply", "--reason", "seen", *evidence, "--json", **settings)
    dismissed = await here("resolve", other, "dismiss", "--reason", "refunded", **settings)

    assert [done.code for done in (applied, bare, part, seen, dismissed)] == [0, 2, 2, 0, 0]
    assert (applied.json["outcome"], seen.json["outcome"]) == ("applied", "applied")
    assert "evidence" in bare.sentence
    assert "evidence.currency" in part.sentence
    assert "dismiss" in dismissed.out
    assert [item["id"] for item in waiting.json["items"]] == [other, dead, held]
    assert (await here("deliveries", "list", "--waiting", "--json", **settings)).json["items"] == []
    assert [entry["target"] for entry in await audited(db)] == [held, dead, other]


async def test_deliveries_are_replayed_one_or_many(database_url: str, db: Database, make: Make) -> None:
    """Many need a source, an outcome and a reason; a dry run needs no reason and changes nothing."""
    settings = command.given_database(database_url)
    await command.source(db, settings, SHOP)
    forged = await delivery(make, "rejected", reason="signature", proof="refused")
    many = ["replay", "--source", SHOP, "--outcome", "rejected"]

    one = await here("replay", forged, "--json", **settings)
    dry = await here(*many, "--since", "2020-01-01T00:00:00Z", "--dry-run", "--json", **settings)
    counted = await here(*many, "--reason", "new password", "--json", **settings)
    wrong = [
        await here(*arguments, **settings)
        for arguments in (["replay"], many, [*many, "--dry-run", "--until", "now"], ["replay", forged, "--dry-run"])
    ]

    assert (one.code, one.json["id"], one.json["outcome"]) == (0, forged, "rejected")
    assert [(done.code, done.json["count"], done.json["refused"], done.json["dry_run"]) for done in (dry, counted)] == [
        (0, 0, 1, True),
        (0, 0, 1, False),
    ]
    assert [done.code for done in wrong] == [2] * 4
    assert [(entry["action"], entry["reason"]) for entry in await audited(db)] == [
        ("notification_delivery.replay", None),
        ("source.replay", "new password"),
    ]


async def test_a_long_replay_goes_on_to_its_end(database_url: str, db: Database, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls it takes, what is printed is all of them together."""
    monkeypatch.setattr(replays, "BATCH", 2)
    monkeypatch.setattr(replays, "LOOKED_AT_MAX", 2)
    settings = command.given_database(database_url)
    await command.source(db, settings, SHOP)
    for _ in range(5):
        await delivery(make, "rejected", reason="signature", proof="refused")
    many = ["replay", "--source", SHOP, "--outcome", "rejected", "--reason", "new password"]

    told = await here(*many, **settings)
    counted = await here(*many, "--json", **settings)

    assert (told.code, told.err) == (counted.code, counted.err) == (0, "")
    assert "refused  5" in told.out
    assert (counted.json["refused"], counted.json["next_cursor"]) == (5, None)


@pytest.mark.parametrize(("arguments", "drawn"), [((), True), (("--json",), False)])
async def test_a_long_replay_shows_how_far_it_is(
    database_url: str, db: Database, make: Make, arguments: tuple[str, ...], drawn: bool
) -> None:
    """A bar on a terminal, of what there is to do; none with --json, and standard output stays what it is in a pipe."""
    settings = command.given_database(database_url) | {"TERM": "xterm"}
    await command.source(db, settings, SHOP)
    await delivery(make, "rejected", reason="signature", proof="refused")
    master, terminal = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(*command.OURS, "replay", "--source", SHOP, "--outcome", "rejected", "--reason", "new password", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=terminal,
        env=os.environ | settings,
    )
    os.close(terminal)
    (out, _), shown = await asyncio.gather(process.communicate(), asyncio.to_thread(_said_to, master))
    os.close(master)

    assert (process.returncode, b"Running again" in out) == (0, False)
    assert (b"Running again" in shown, b"1/1" in shown) == (drawn, drawn)


def _said_to(terminal: int) -> bytes:
    """All that is written to it until the last writer has gone, which is an error to read."""
    said = b""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 4096):
            said += piece
    return said


async def test_events_are_redelivered(database_url: str, db: Database, make: Make) -> None:
    """The event delivery is printed, due at once."""
    settings = command.given_database(database_url)
    await command.source(db, settings, SHOP)
    made = await make.event_delivery(tenant_id="acme", status="delivered", attempt_count=1, delivered_at=ago(hours=1))
    shown = ids.show(ids.EVENT_DELIVERY, made["id"])

    done = await here("redeliver", shown, "--reason", "they lost it", "--json", **settings)
    lost = await here("redeliver", "edl_1", **settings)

    assert (done.code, done.json["status"], done.json["id"]) == (0, "delivered", shown)
    assert done.json["next_attempt_at"] is not None
    assert lost.code == 1
    assert [(entry["action"], entry["reason"]) for entry in await audited(db)] == [("event_delivery.redeliver", "they lost it")]
