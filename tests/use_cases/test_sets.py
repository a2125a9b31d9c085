"""The rows of a set as parameters of one statement."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from psycopg.types.json import Jsonb

from ipn_gateway import columns
from ipn_gateway.states import OrderStatus

if TYPE_CHECKING:
    from ipn_gateway.db import Transaction

GIVEN = f"""SELECT * FROM {
    columns.given(
        text="text",
        id="uuid",
        raw="bytea",
        yes="bool",
        long="bigint",
        short="int",
        real="float8",
        money="numeric",
        at="timestamptz",
        json="jsonb",
    )
}"""
ROW = {
    "text": '\u0986\u09b2\u09c0 {"x", NULL}',
    "id": UUID(int=7),
    "raw": b"\0\xff\\",
    "yes": False,
    "long": -(2**40),
    "short": 3,
    "real": 0.25,
    "money": Decimal("1250.00"),
    "at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    "json": {"a": ["\u00e9", None, 1]},
}
NOTHING = dict.fromkeys(ROW)


@pytest.mark.parametrize("rows", [[ROW], [ROW, NOTHING], [NOTHING, NOTHING]], ids=["all there", "some missing", "nothing at all"])
async def test_what_goes_in_as_a_set_is_read_as_it_was(tx: Transaction, rows: list[dict[str, Any]]) -> None:
    """Each type that a column may have, with and without values."""
    sent = [row | {"json": Jsonb(row["json"]) if row["json"] else None} for row in rows]

    assert await tx.all(dict, GIVEN, columns.arrays(sent)) == rows


async def test_a_word_of_ours_is_text(tx: Transaction) -> None:
    """Beside text as well."""
    rows: list[dict[str, Any]] = [{"said": OrderStatus.PAID}, {"said": "pending"}, {"said": None}]

    assert await tx.all(dict, f"SELECT * FROM {columns.given(said='text')}", columns.arrays(rows)) == [
        {"said": "paid"},
        {"said": "pending"},
        {"said": None},
    ]


@pytest.mark.parametrize("values", [[1, "1"], [object()]], ids=["mixed", "unknown"])
def test_a_column_is_of_one_type_that_is_known(values: list[Any]) -> None:
    """Anything else is a fault of ours, and told at once."""
    with pytest.raises(TypeError, match="column"):
        columns.arrays([{"value": value} for value in values])
