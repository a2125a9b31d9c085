"""The published waits, their jitter, and what a receiver may ask for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipn_gateway.schedule import HINT_MAX_SECONDS, JITTER, next_wait, parse_retry_after, wait_of

SCHEDULE = (0, 5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.case("S118")
@given(attempt=st.integers(1, len(SCHEDULE)), chance=st.floats(0, 1))
def test_wait_stays_within_the_published_band(attempt: int, chance: float) -> None:
    """Whatever the draw, the wait is the published one plus at most 10 %; with no hint from the receiver."""
    base = SCHEDULE[attempt - 1]

    wait = next_wait(attempt, schedule=SCHEDULE, chance=chance)

    assert wait is not None
    assert base <= wait <= base * (1 + JITTER)


@pytest.mark.case("S118")
@given(attempt=st.integers(1, len(SCHEDULE)), chance=st.floats(0, 1), hint=st.floats(0, 10**9))
def test_wait_with_a_hint_is_the_larger_of_gap_and_hint(attempt: int, chance: float, hint: float) -> None:
    """The wait is max(gap, min(hint, 24 h)) plus at most 10 % of the gap, never less."""
    gap = SCHEDULE[attempt - 1]
    least = max(gap, min(hint, HINT_MAX_SECONDS))

    wait = next_wait(attempt, schedule=SCHEDULE, chance=chance, hint=hint)

    assert wait is not None
    assert least <= wait <= least + gap * JITTER + 1e-6


def test_the_first_attempt_is_due_at_once() -> None:
    """A gap of zero has no jitter."""
    assert next_wait(1, schedule=SCHEDULE, chance=1.0) == 0


def test_an_exhausted_schedule_has_no_next_attempt() -> None:
    """After the last published attempt comes none, hint or no hint."""
    after_the_last = len(SCHEDULE) + 1

    assert next_wait(after_the_last, schedule=SCHEDULE, chance=0.5) is None
    assert next_wait(after_the_last, schedule=SCHEDULE, chance=0.5, hint=60) is None
    assert wait_of(SCHEDULE, after_the_last) is None


def test_the_whole_schedule_is_about_three_days() -> None:
    """Ten attempts without jitter end after about 75.5 hours, as published."""
    total = sum(next_wait(number, schedule=SCHEDULE, chance=0) or 0 for number in range(1, len(SCHEDULE) + 1))

    assert total / 3600 == pytest.approx(75.5, abs=0.1)


@pytest.mark.parametrize("number", [0, -1])
def test_tries_are_counted_from_one(number: int) -> None:
    """A number below 1 is a bug of the caller, not the last entry of the schedule."""
    with pytest.raises(ValueError, match="counted from 1"):
        wait_of(SCHEDULE, number)


@pytest.mark.case("S118")
@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        (["120"], 120),
        (["0"], 0),
        ([" 7 "], 7),
        (["0000000000000005"], 5),
        (["86400"], 86400),
        (["86401"], 86400),
        (["9" * 5000], 86400),  # too long for int()
        (["5", "60", "7"], 60),
        (["5, 60"], 60),  # joined by a proxy
        (["garbage", "9"], 9),
        (["garbage, 9"], 9),
        (["20, Sun, 01 Mar 2026 12:00:30 GMT"], 30),
        (["Sun, 01 Mar 2026 12:00:30 GMT, 20"], 30),
        (["Sun, 01 Mar 2026 12:00:30 GMT, Sun, 01 Mar 2026 12:00:10 GMT"], 30),
        (["Sunday, 01-Mar-26 12:00:10 GMT,sun, 01 Mar 2026 12:00:30 GMT"], 30),
        (["Sun, 01 Mar 2026 12:00:30 GMT"], 30),
        (["Sunday, 01-Mar-26 12:00:30 GMT"], 30),  # the obsolete form of RFC 850
        (["Sun Mar  1 12:00:30 2026"], 30),  # the form of asctime
        (["Sun, 01 Mar 2026 12:00:30 GMT", "10"], 30),
        (["Tue, 01 Mar 2126 12:00:30 GMT"], 86400),
        (["Sun, 01 Mar 2026 11:00:00 GMT"], 0),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(values: list[str], seconds: float) -> None:
    """RFC 9110, 10.2.3; the largest of several; at most 24 h; a date in the past asks for nothing."""
    assert parse_retry_after(values, NOW) == seconds


@pytest.mark.parametrize(
    "value",
    ["", "-5", "+5", "1.5", "1e3", "soon", "٣", "5 minutes", "Sun, 99 Mar 2026 12:00:30 GMT", "GMT", "\x00", "1;2"],
)
def test_an_unreadable_retry_after_asks_for_nothing(value: str) -> None:
    """What is neither a number nor a date counts as no hint."""
    assert parse_retry_after([value], NOW) is None
    assert parse_retry_after([], NOW) is None


@given(value=st.text(max_size=60))
def test_no_text_breaks_the_reader(value: str) -> None:
    """The header comes from a stranger: whatever it says, the result is none or 0 to 24 h."""
    wait = parse_retry_after([value], NOW)

    assert wait is None or 0 <= wait <= HINT_MAX_SECONDS


@given(seconds=st.integers(1, HINT_MAX_SECONDS), zone=st.integers(-12, 12))
def test_a_date_means_the_same_in_every_time_zone(seconds: int, zone: int) -> None:
    """What counts is the instant, also where the gateway's own time is written in another zone."""
    there = NOW.astimezone(timezone(timedelta(hours=zone)))

    wait = parse_retry_after([format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)], there)

    assert wait == seconds
