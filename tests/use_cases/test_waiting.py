"""The list of what waits for a person, beside a large audit and much work that waits for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import ids, paging, views
from tests.make import TENANT

if TYPE_CHECKING:
    from ipn_gateway.db import Database, Transaction
    from tests.make import Make

DELIVERIES, WAITING = 20_000, 40

# One delivery in two is open work, and one in five hundred waits for a person.
_FILL = """
WITH received AS (
    INSERT INTO notification_deliveries (tenant_id, id, source_id, provider, via, headers, raw_body, sha256, proof, outcome, decided_at)
    SELECT d.tenant_id, (left(d.id::text, 24) || lpad(to_hex(n), 12, '0'))::uuid, d.source_id, d.provider, d.via, d.headers, d.raw_body,
           d.sha256, 'proved', CASE WHEN n %% %(every)s = 0 THEN 'held' ELSE 'rejected' END, ipn_now()
      FROM notification_deliveries AS d, generate_series(1, %(count)s) AS n WHERE d.id = %(id)s
    RETURNING tenant_id, id, source_id, outcome
)
INSERT INTO inbox (tenant_id, notification_delivery_id, source_id, state, proved, due_at)
SELECT tenant_id, id, source_id, CASE WHEN outcome = 'held' THEN 'held' ELSE 'received' END, true,
       CASE WHEN outcome = 'held' THEN NULL ELSE ipn_now() END
  FROM received WHERE outcome = 'held' OR ('x' || right(id::text, 1))::bit(4)::int %% 2 = 1
"""


@pytest.fixture
async def filled(db: Database, make: Make) -> Database:
    """A database with a large audit."""
    one = await make.notification_delivery(outcome="rejected")
    async with db.transaction("test.fill") as tx:
        await tx.execute(_FILL, one | {"count": DELIVERIES, "every": DELIVERIES // WAITING})
    return db


async def test_what_waits_is_found_in_the_narrow_table(filled: Database) -> None:
    """One statement begins at what waits, and looks up no more of the wide table than that, with statistics and without."""
    given = {"tenant_id": TENANT, "page_limit": 11}
    read: list[int] = []
    async with filled.autocommit("test.waiting") as tx:
        read.append(await _looked_up(tx, given, continued=False))
        await tx.execute("ANALYZE inbox, notification_deliveries")
        read.append(await _looked_up(tx, given, continued=False))
        page = await views.notification_deliveries(tx, TENANT, paging.Wanted(None, 10), raw=False, waiting=True)
        last = ids.read(ids.NOTIFICATION_DELIVERY, page.items[-1].id)
        read.append(await _looked_up(tx, given | {"after_open_id": last}, continued=True))

    assert all(11 <= rows <= WAITING for rows in read), read


async def _looked_up(tx: Transaction, given: dict[str, Any], *, continued: bool) -> int:
    statement = views._WAITING._statement([], continued=continued)
    return _read((await tx.value(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", given))[0]["Plan"])


def _read(node: dict[str, Any]) -> int:
    """Rows of the wide table that a plan reads."""
    wide = node.get("Relation Name", "").startswith("notification_deliveries")
    own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] if wide else 0
    return int(own) + sum(_read(child) for child in node.get("Plans", []))


async def test_a_cursor_is_good_for_both_lists(filled: Database) -> None:
    """Somebody who leaves the filter away in the middle goes on from the same place."""
    async with filled.autocommit("test.waiting") as tx:
        waiting = await views.notification_deliveries(tx, TENANT, paging.Wanted(None, 5), raw=False, waiting=True)
        every = await views.notification_deliveries(tx, TENANT, paging.Wanted(waiting.next_cursor, 1), raw=False)

    last = ids.read(ids.NOTIFICATION_DELIVERY, waiting.items[-1].id)
    assert ids.read(ids.NOTIFICATION_DELIVERY, every.items[0].id).int == last.int - 1
