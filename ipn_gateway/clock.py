"""Host time. What is compared with rows is database time (`ipn_now()` in SQL); ids alone carry host time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta


@dataclass(slots=True)
class Clock:
    """UTC plus an offset, which is zero in production; tests move the offset, and `Database` adds it to SQL's time."""

    offset: timedelta = timedelta()

    def now(self) -> datetime:
        """The host's time plus the offset, aware, in UTC."""
        return datetime.now(UTC) + self.offset  # noqa: TID251 - its home

    def advance(self, **parts: float) -> None:
        """Move the offset forward by `timedelta(**parts)`."""
        self.offset += timedelta(**parts)

    @staticmethod
    def monotonic_seconds() -> float:
        """A steady counter in seconds, for durations only."""
        return time.monotonic()
