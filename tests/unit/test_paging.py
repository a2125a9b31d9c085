"""Cursors: what a list gave is understood, anything else is refused, and none of it reaches the database unread."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipn_gateway.errors import ValidationFailed
from ipn_gateway.paging import Column, Listing, moment, plain

LIST = Listing("things", "SELECT 1", key=(Column("created_at", moment), Column("name", plain)), filters={})

times = st.datetimes(timezones=st.just(UTC))
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(created_at=times, name=names)
def test_a_cursor_is_read_as_it_was_written(created_at: datetime, name: str) -> None:
    """To the microsecond, whatever the name."""
    cursor = LIST._write({"created_at": created_at, "name": name})

    assert LIST._read(cursor) == {"after_created_at": created_at, "after_name": name}
    assert cursor.isascii()
    assert "=" not in cursor


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@given(
    st.one_of(
        st.text(),
        st.binary().map(lambda data: base64.urlsafe_b64encode(data).decode()),
        st.recursive(st.none() | st.text(), st.lists).map(encoded),
    )
)
def test_anything_else_is_refused(cursor: str) -> None:
    """Never an error of another kind."""
    with pytest.raises(ValidationFailed) as refused:
        LIST._read(cursor)

    assert refused.value.errors[0]["parameter"] == "cursor"


@pytest.mark.parametrize(
    "parts",
    [
        ["others", "2026-07-01T00:00:00+00:00", "a"],
        ["things", "2026-07-01T00:00:00", "a"],
        ["things", "2026-07-01T00:00:00+00:00"],
        ["things", "2026-07-01T00:00:00+00:00", "a", "b"],
        ["things", "2026-07-01T00:00:00+00:00", "a\0"],
        ["things", "2026-07-01T00:00:00+00:00", "\ud800"],
        ["things", "2026-07-01T00:00:00+00:00", 1],
        ["things", None, "a"],
        {"things": 1},
        "things",
        None,
    ],
)
def test_a_cursor_of_another_list_or_form_is_refused(parts: object) -> None:
    """Also one that was made by hand with care."""
    with pytest.raises(ValidationFailed):
        LIST._read(encoded(parts))


def test_a_deeply_nested_cursor_is_refused() -> None:
    """It does not overflow anything."""
    with pytest.raises(ValidationFailed):
        LIST._read(base64.urlsafe_b64encode(b"[" * 100_000).decode())


def test_an_id_column_writes_the_whole_id() -> None:
    """As text that it reads again."""
    column = Column("id", UUID)
    value = UUID(int=7)

    assert column.read(column.write({"id": value})) == value
