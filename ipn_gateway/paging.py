"""Pages of lists: newest first, and an opaque cursor that stays where it is while new rows come in before it."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.errors import ValidationFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ipn_gateway.db import Transaction

LIMIT_DEFAULT: Final = 50
LIMIT_MAX: Final = 200
CURSOR_LENGTH_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller asks of a list: at most `limit` (1 to 200) items after `cursor`, which is a `next_cursor` of the same list."""

    cursor: str | None = None
    limit: int = LIMIT_DEFAULT


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the key that a list is sorted by. `read` makes its value from the cursor's text, or raises ValueError."""

    name: str
    read: Callable[[str], Any]
    cast: str = ""  # where PostgreSQL would take the parameter for something else

    def write(self, row: Mapping[str, Any]) -> str:
        """The row's value as the cursor's text."""
        value = row[self.name]
        return value.isoformat() if isinstance(value, datetime) else str(value)


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of one tenant's rows: `select` ends inside its WHERE, `filters` narrow it, `key` (unique, ascending with time) sorts it.

    Newest first, unless `oldest_first`: for what is read as a story.
    """

    name: str
    select: str
    key: tuple[Column, ...]
    filters: Mapping[str, str]
    oldest_first: bool = False

    async def page(self, tx: Transaction, wanted: Wanted, given: Mapping[str, Any]) -> tuple[Sequence[dict[str, Any]], str | None]:
        """The rows, and the cursor of the next page or None. `given` has the statement's parameters; a filter that is None is none.

        Raises `ValidationFailed` for a cursor that this list did not give.
        """
        after = None if wanted.cursor is None else self._read(wanted.cursor)
        statement = self._statement([name for name in self.filters if given.get(name) is not None], continued=after is not None)
        rows = await tx.all(dict, statement, {**given, **(after or {}), "page_limit": wanted.limit + 1})
        if len(rows) <= wanted.limit:
            return rows, None
        page = rows[: wanted.limit]
        return page, self._write(page[-1])

    def _statement(self, filtered_by: Sequence[str], *, continued: bool) -> str:
        conditions = [f" AND {self.filters[name]}" for name in filtered_by]
        if continued:
            names = ", ".join(column.name for column in self.key)
            places = ", ".join(f"%(after_{column.name})s{column.cast}" for column in self.key)
            conditions.append(f" AND ({names}) {'>' if self.oldest_first else '<'} ({places})")
        order = ", ".join(f"{column.name} {'ASC' if self.oldest_first else 'DESC'}" for column in self.key)
        return f"SELECT * FROM ({self.select}) AS listed WHERE true{''.join(conditions)} ORDER BY {order} LIMIT %(page_limit)s"

    def _write(self, row: Mapping[str, Any]) -> str:
        text = json.dumps([self.name, *(column.write(row) for column in self.key)], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def _read(self, cursor: str) -> dict[str, Any]:
        try:
            found = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
            ours = found[0] == self.name
            values = {f"after_{column.name}": column.read(part) for column, part in zip(self.key, found[1:], strict=True)}
        except (binascii.Error, ValueError, TypeError, AttributeError, LookupError, RecursionError):
            ours, values = False, {}
        if not ours:
            sentence = "The cursor is not one that this list gave; start again without it."
            raise ValidationFailed(sentence, errors=[{"parameter": "cursor", "detail": sentence}])
        return values


def plain(text: str) -> str:
    """Text that PostgreSQL takes: no NUL, no lone surrogate. Raises ValueError for other text."""
    if not isinstance(text, str) or "\0" in text:
        raise ValueError("text without NUL is needed")
    text.encode()  # UnicodeEncodeError is a ValueError
    return text


def moment(text: str) -> datetime:
    """An aware time. Raises ValueError for anything else."""
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("a time with its offset is needed")
    return found
