"""The rows of a set as parameters of one statement: an array for each column, as it goes over the wire.

The driver's own way with a list takes several times as long; and it chooses the type by the values (a small number, a large one), so that a
statement had to be prepared anew for many combinations of columns. What has no simple form in binary goes as text, as does a column without
values, and the cast of `given` reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from operator import attrgetter
from struct import Struct
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

import psycopg
from psycopg.adapt import Dumper, PyFormat
from psycopg.pq import Format
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from psycopg.abc import DumperKey


def given(**columns: str) -> str:
    """SQL for the rows of a set: the table `given` with these columns, each with its type, from the parameters of `arrays`."""
    parameters = ", ".join(f"%({name})b::{kind}[]" for name, kind in columns.items())
    return f"unnest({parameters}) AS given ({', '.join(columns)})"


def arrays(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """The parameters for rows that all have the same keys: an array for each column. At least one row, no column of mixed types."""
    return {name: _column([row[name] for row in rows]) for name in rows[0]}


class _Form(NamedTuple):
    """How values of a Python type are sent: the types of an element and of the array (pg_type.oid), and the bytes of an element."""

    element: int
    array: int
    encode: Callable[[Any], bytes]


_LONG: Final = Struct("!q")
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

_FORMS: Final[Mapping[type, _Form]] = {
    str: _Form(25, 1009, str.encode),
    Decimal: _Form(25, 1009, lambda value: str(value).encode()),
    datetime: _Form(1184, 1185, lambda value: _LONG.pack((value - _EPOCH) // _MICROSECOND)),
    Jsonb: _Form(25, 1009, lambda value: json.dumps(value.obj).encode()),
    UUID: _Form(2950, 2951, attrgetter("bytes")),
    bytes: _Form(17, 1001, bytes),
    bool: _Form(16, 1000, lambda value: b"\1" if value else b"\0"),
    int: _Form(20, 1016, _LONG.pack),
    float: _Form(701, 1022, Struct("!d").pack),
}
_HEAD: Final = Struct("!5i")  # dimensions, whether there are nulls, the element's type, how many, the first one's number
_LENGTH: Final = Struct("!i")
_NULL: Final = _LENGTH.pack(-1)


@dataclass(frozen=True, slots=True)
class Column:
    """An array of values of one type, as it goes over the wire; `of` is their type in Python."""

    of: type
    data: bytes = field(repr=False)


@cache
def _kind(given: type) -> type:
    """The type, or the first of those it is made from, that has a form: a word of ours is text."""
    for kind in given.__mro__:
        if kind in _FORMS:
            return kind
    raise TypeError(f"a column cannot hold {given.__name__}")


def _column(values: list[Any]) -> Column:
    given = set(map(type, values))
    has_nulls = NoneType in given
    kinds = {_kind(one) for one in given if one is not NoneType} or {str}
    if len(kinds) > 1:
        raise TypeError("a column has values of several types")
    (kind,) = kinds
    form = _FORMS[kind]
    encode, length = form.encode, _LENGTH.pack
    elements = [_NULL if value is None else length(len(data := encode(value))) + data for value in values]
    return Column(kind, _HEAD.pack(1, has_nulls, form.element, len(values), 1) + b"".join(elements))


class _ColumnDumper(Dumper):
    """Tells the driver that there is nothing left to do."""

    format = Format.BINARY

    def get_key(self, obj: Column, format: PyFormat) -> DumperKey:  # noqa: A002, ARG002 - the driver's names
        return self.cls, obj.of

    def upgrade(self, obj: Column, format: PyFormat) -> _ColumnDumper:  # noqa: A002, ARG002 - the driver's names
        dumper = _ColumnDumper(self.cls)
        dumper.oid = _FORMS[obj.of].array
        return dumper

    def dump(self, obj: Column) -> bytes:
        return obj.data


psycopg.adapters.register_dumper(Column, _ColumnDumper)
