"""What a set asks about is looked up row by row, while there are no statistics of the tables yet."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ipn_gateway import columns, inbox_batches
from tests.make import SOURCE, TENANT, Make

if TYPE_CHECKING:
    from ipn_gateway.db import Database

ROWS = 3000
ASKED = 20
FILL = (
    """INSERT INTO orders (tenant_id, order_id, source_id, amount, currency)
       SELECT %(tenant)s, 'order-' || n, %(source)s, 100, 'BDT' FROM generate_series(1, %(rows)s) AS n""",
    """INSERT INTO processed_notifications (tenant_id, source_id, operation_id, effect, order_id, amount, currency, origin, writer_id)
       SELECT %(tenant)s, %(source)s, 'operation-' || n, 'paid', 'order-' || n, 100, 'BDT', 'notification', gen_random_uuid()
         FROM generate_series(1, %(rows)s) AS n""",
)


async def test_a_set_reads_its_own_rows_of_the_ledger_only(db: Database, make: Make) -> None:
    """Of thousands of ledger rows those that the set names are read, not the whole table."""
    await make.source()
    async with db.transaction("test.fill") as tx:
        for fill in FILL:
            await tx.execute(fill, {"tenant": TENANT, "source": SOURCE, "rows": ROWS})
    rows = [
        {
            "place": place,
            "tenant_id": TENANT,
            "source_id": SOURCE,
            "operation_id": f"operation-{place + 1}",
            "order_id": f"order-{place + 1}",
            "amount": Decimal(100),
            "currency": "BDT",
        }
        for place in range(ASKED)
    ]

    async with db.transaction("test.explain") as tx:
        plan = await tx.value(f"EXPLAIN (ANALYZE, FORMAT JSON) {inbox_batches._KNOWN}", columns.arrays(rows))

    assert _read(plan[0]["Plan"]) == ASKED


def _read(node: dict[str, Any]) -> int:
    own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] if "Relation Name" in node else 0
    return int(own) + sum(_read(child) for child in node.get("Plans", []))
