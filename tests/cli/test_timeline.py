"""`ipn-gateway timeline`: an order's story on a terminal, in a pipe, and as JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ipn_gateway import ids
from tests.cli import command
from tests.make import TENANT, Make, ago

if TYPE_CHECKING:
    from ipn_gateway.db import Database

pytestmark = pytest.mark.timeout(120)


async def test_a_story_is_drawn_line_by_line(make: Make, db: Database, database_url: str) -> None:
    """The day once, then time, kind and sentence; in a pipe nothing wraps, and the pages follow each other."""
    await make.order(order_id="INV-1", created_at=ago(minutes=3))
    delivery = await make.notification_delivery(order_id="INV-1", outcome="rejected", reason="signature", proof="refused")
    settings = command.given_database(database_url) | {"COLUMNS": "60"}

    drawn = await command.run("timeline", "INV-1", **settings)
    first = await command.run("timeline", "INV-1", "--limit", "1", "--json", **settings)
    rest = await command.run("timeline", "INV-1", "--cursor", first.json["next_cursor"], "--json", **settings)

    lines = [line.strip() for line in drawn.out.splitlines()]
    assert drawn.code == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", lines[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} +● order +The order was registered: 100\.00 BDT at shop-main\.", lines[1])
    assert lines[-1].endswith("Decided as rejected (signature): not believed.")
    assert [item["kind"] for item in first.json["items"]] == ["order"]
    assert {item["id"] for item in rest.json["items"]} == {ids.show(ids.NOTIFICATION_DELIVERY, delivery["id"])}
    assert rest.json["next_cursor"] is None


async def test_an_order_that_is_not_there_is_named(make: Make, db: Database, database_url: str) -> None:
    """The sentence says what was looked for, and whose."""
    await make.tenant()

    done = await command.run("timeline", "INV-9", **command.given_database(database_url))

    assert (done.code, done.out) == (1, "")
    assert done.sentence == f"There is no order INV-9 of the tenant {TENANT}."
