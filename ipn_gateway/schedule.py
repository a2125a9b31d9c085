"""When the next attempt is due. Pure: the draw (`chance`) and the time arrive; all waits are in seconds."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

JITTER: Final = 0.10
"""The largest part of a published gap that is added to it, never taken from it."""

HINT_MAX_SECONDS: Final = 86_400
"""The longest wait that a receiver can ask for by `Retry-After`."""

_SECONDS = re.compile(r"[0-9]+")
_DAY = re.compile(r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\s*,", re.IGNORECASE)
"""The one comma that belongs to a date (RFC 9110, 5.6.7); `parsedate_to_datetime` reads a date without it as well."""

_DIGITS_MAX = len(str(HINT_MAX_SECONDS))


def wait_of(schedule: Sequence[float], number: int) -> float | None:
    """The published wait before try `number` (1 is the first), without jitter; None when the schedule is exhausted.

    Raises ValueError for a number below 1.
    """
    if number < 1:
        raise ValueError(f"tries are counted from 1, not {number}")
    return schedule[number - 1] if number <= len(schedule) else None


def next_wait(attempt: int, *, schedule: Sequence[float], chance: float, hint: float | None = None) -> float | None:
    """The wait before attempt `attempt` (1 is the first); None when the schedule is exhausted.

    max(gap, min(hint, 24 h)), plus `chance` (0 to 1) times the jitter, which is 10 % of the gap. `hint` is the receiver's `Retry-After`.
    """
    gap = wait_of(schedule, attempt)
    if gap is None:
        return None
    hinted = min(hint or 0.0, HINT_MAX_SECONDS)
    if hinted > gap:
        return hinted + gap * JITTER * chance
    return gap * (1 + JITTER * chance)


def parse_retry_after(values: Sequence[str], now: datetime) -> float | None:
    """The seconds that `Retry-After` asks for, 0 to 24 h: a number or an HTTP date (RFC 9110, 10.2.3); None if nothing can be read.

    Of several values the largest that can be read counts, also where a proxy joined them with commas. `now` is aware; a date in the past
    is 0.
    """
    parts = [part.strip() for value in values for part in _DAY.sub(r"\1 ", value).split(",")]
    waits = [wait for part in parts if (wait := _wait_in(part, now)) is not None]
    return max(waits, default=None)


def _is_numbers(value: str) -> bool:
    return not any(character.isalpha() for character in value)


def _wait_in(part: str, now: datetime) -> float | None:
    if _SECONDS.fullmatch(part):
        digits = part.lstrip("0") or "0"
        return float(HINT_MAX_SECONDS if len(digits) > _DIGITS_MAX else min(int(digits), HINT_MAX_SECONDS))
    try:
        date = parsedate_to_datetime(part) if not _is_numbers(part) else None
        aware = date and (date if date.tzinfo else date.replace(tzinfo=UTC))  # the asctime form names no zone and means UTC
        return min(max((aware - now).total_seconds(), 0.0), float(HINT_MAX_SECONDS)) if aware else None
    except (ValueError, OverflowError):
        return None
