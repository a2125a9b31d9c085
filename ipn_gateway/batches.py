"""Batches: what is in flight together goes to the database together, and each item still gets its own answer, after the commit.

A lone item is written at once, so batching costs it nothing. Items that come while a write is under way wait for its end and go together
next; so the size of a batch follows the load, and there is no timer. One that fails because of one of its items is written again one by
one: a bad item never fails its neighbours. Receive, apply, end and record write this way, and the inbox looks up this way.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import cache
from operator import attrgetter
from struct import Struct
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar
from uuid import UUID

import psycopg
from psycopg.adapt import Dumper, PyFormat
from psycopg.pq import Format
from psycopg.types.json import Jsonb

from ipn_gateway.deadlines import Deadlines
from ipn_gateway.errors import GatewayError, Overloaded
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence

    from psycopg.abc import DumperKey

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches(Generic[Item, Result]):
    """One kind of write, and the items that wait for it."""

    def __init__(
        self,
        write: Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]],
        *,
        name: str,
        most: int,
        waiting_max: int,
        writers: int = 1,
        apart: Callable[[Item], Hashable] | None = None,
    ) -> None:
        """`write` owns its transaction and gives one result for each item, in their order; an exception is raised to that item alone.

        A batch has at most `most` items, no two with the same `apart`; `writers` batches are written at once. With `waiting_max` items
        waiting the next one is refused.
        """
        self._write = write
        self._name = name
        self._most = most
        self._waiting_max = waiting_max
        self._apart = apart
        self._idle = writers  # counted here: a slot is given back only some turns of the loop after its task has looked for work in vain
        self._writers = Slots(writers)
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._deadlines: Deadlines[asyncio.Future[Result]] = Deadlines(_give_up)

    async def put(self, item: Item, *, within_seconds: float | None = None) -> Result:
        """Returns when the item is committed. Raises what its write raised, and `Overloaded` when too many wait or the time is over.

        A caller that is cancelled or waits no longer takes nothing back: its item is written all the same.
        """
        if len(self._waiting) >= self._waiting_max:
            raise Overloaded
        settled: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, settled))
        if self._idle:
            self._idle -= 1
            self._writers.start(self._write_what_waits(), name=self._name)
        if within_seconds is None:
            return await settled
        self._deadlines.begin(settled, within_seconds)
        try:
            return await settled
        finally:
            self._deadlines.end(settled)

    async def drained(self, *, seconds: float | None = None) -> bool:
        """Wait until nothing is being written, at most `seconds`; whether that came true."""
        return await self._writers.drained(seconds=seconds)

    async def _write_what_waits(self) -> None:
        try:
            while batch := self._next():
                try:
                    await self._settle(batch)
                finally:
                    for _, settled in batch:
                        settled.cancel()  # does nothing to what is settled
        finally:
            self._idle += 1

    def _next(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        later: list[tuple[Item, asyncio.Future[Result]]] = []
        taken: set[Hashable] = set()
        while self._waiting and len(batch) < self._most:
            one = self._waiting.popleft()
            key = self._apart(one[0]) if self._apart else id(one)
            (later if key in taken else batch).append(one)
            taken.add(key)
        self._waiting.extendleft(reversed(later))
        return batch

    async def _settle(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results: Sequence[Result | Exception] = await self._write([item for item, _ in batch])
        except GatewayError as error:  # the database could take none of them
            results = [error] * len(batch)
        except Exception as error:  # noqa: BLE001 - whatever one item does must not fail the others
            if len(batch) > 1:
                for one in batch:
                    await self._settle([one])
                return
            results = [error]
        for (_, settled), result in zip(batch, results, strict=True):
            if settled.done():
                continue
            if isinstance(result, Exception):
                settled.set_exception(result)
            else:
                settled.set_result(result)


def _give_up(settled: asyncio.Future[Any]) -> None:
    if not settled.done():
        settled.set_exception(Overloaded())


def given(**columns: str) -> str:
    """SQL for the rows of a set: the table `given` with these columns, each with its type, from the parameters of `arrays`."""
    parameters = ", ".join(f"%({name})b::{kind}[]" for name, kind in columns.items())
    return f"unnest({parameters}) AS given ({', '.join(columns)})"


def arrays(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """The parameters for rows that all have the same keys: an array for each column. At least one row, no column of mixed types."""
    return {name: _column([row[name] for row in rows]) for name in rows[0]}


# The arrays are written here as they go over the wire. The driver's own way with a list takes several times as long; and it chooses the
# type by the values (an empty column, a small number), so that a statement had to be prepared anew for many combinations of columns.
# What has no simple form in binary goes as text, and the cast of `given` reads it.


class _Form(NamedTuple):
    """How values of a Python type are sent: the types of an element and of the array (pg_type.oid), and the bytes of an element."""

    element: int
    array: int
    encode: Callable[[Any], bytes]


_FORMS: Final[Mapping[type, _Form]] = {
    str: _Form(25, 1009, str.encode),
    Decimal: _Form(25, 1009, lambda value: str(value).encode()),
    datetime: _Form(25, 1009, lambda value: value.isoformat().encode()),
    Jsonb: _Form(25, 1009, lambda value: json.dumps(value.obj).encode()),
    UUID: _Form(2950, 2951, attrgetter("bytes")),
    bytes: _Form(17, 1001, bytes),
    bool: _Form(16, 1000, lambda value: b"\1" if value else b"\0"),
    int: _Form(20, 1016, Struct("!q").pack),
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
