"""The command of retention: shown first, then done; what still waits is kept, and said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ipn_gateway import retention
from tests.cli import command
from tests.cli.command import here
from tests.make import Make, ago

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database

pytestmark = pytest.mark.timeout(120)


async def years_old(db: Database, clock: Clock) -> None:
    """A database that has been there for long: months of which one has a row that waits, events of which one is pending, an expired key."""
    clock.advance(days=-450)
    await retention.ensure_partitions(db)
    make = Make(db, clock)
    await make.tenant()
    await make.inbox(state="held", due_at=None)
    clock.advance(days=450)
    await make.event_delivery(event_id=(await make.event(created_at=ago(days=401)))["id"], status="delivered")
    await make.event_delivery(event_id=(await make.event(created_at=ago(days=401)))["id"], status="pending")
    await make.idempotency_key(state="completed", expires_at=ago(hours=1))


async def test_what_is_past_its_time_is_shown_then_done(database_url: str, db: Database, clock: Clock) -> None:
    """A dry run changes nothing and says what becomes of each, and why something is kept; doing it does just that, and once."""
    settings = command.given_database(database_url)
    assert (await here("retention", "--dry-run", **settings)).out == "Nothing is past its time.\n"
    await years_old(db, clock)

    looked = [(await here("retention", "--dry-run", "--json", **settings)).json for _ in range(2)]
    told = await here("retention", "--dry-run", **settings)
    done = (await here("retention", "--json", **settings)).json
    again = await here("retention", **settings)

    assert looked[0]["dry_run"]
    assert looked[0]["items"] == looked[1]["items"]
    would = [(item["table"], item["then"]) for item in looked[0]["items"]]
    assert would.count(("notification_deliveries", "keep")) == 1
    assert [entry for entry in would if entry[0] not in {"notification_deliveries", "delivery_attempts"}] == [
        ("events", "delete"),
        ("events", "keep"),
        ("idempotency_keys", "delete"),
    ]
    assert looked[0]["overdue_seconds"]["events"] == pytest.approx(86400, abs=60)
    assert "a notification in it still waits" in told.out
    assert done == {"dry_run": False, "events": 1, "event_deliveries": 1, "dead": 0, "secrets": 0, "idempotency_keys": 1} | {
        "partitions": sum(then == "drop" for _, then in would)
    }
    assert again.out == "0 partitions, 0 events, 0 event deliveries, 0 dead, 0 secrets, 0 idempotency keys\n"
