"""Time and chance, as the simulator is given them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from random import Random

Clock = Callable[[], datetime]
"""Gives the present as an aware datetime."""

Chance = Random

BANGLADESH = timezone(timedelta(hours=6))
"""The provider's wall clock: UTC+6 without daylight saving. Its texts carry no zone."""


def host_time() -> datetime:
    """The host's clock: what a simulator run by hand uses."""
    return datetime.now(UTC)  # noqa: TID251 - the default only; tests pass their own clock


def seeded(seed: int | None) -> Chance:
    """Repeatable chance; with None it differs from run to run."""
    return Random(seed)


def text_of(moment: datetime) -> str:
    """A moment as the provider writes it, such as `2026-07-14 12:02:58`, in Bangladesh time."""
    return moment.astimezone(BANGLADESH).strftime("%Y-%m-%d %H:%M:%S")


def stamp_of(moment: datetime) -> str:
    """The twelve digits with which the provider's identifiers begin."""
    return moment.astimezone(BANGLADESH).strftime("%y%m%d%H%M%S")
