"""Latency: from accepted to delivered, at parts of the highest rate that this run finds, in an open loop.

Requests are sent at their intended times, evenly spread, whatever became of those before. What is judged begins with the answer to the
sender; what is told beside it begins with the intended time, so that waiting for a connection and for the answer is in it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench import house
from ipn_gateway.bench.comparison import Comparison, told

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ipn_gateway.bench.comparison import Finding, Side
    from ipn_gateway.bench.house import Run
    from ipn_gateway.bench.stage import Stage

PARTS: Final = (25, 50, 75)
JUDGED: Final = 50
TARGET_MS: Final = 250


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """The peak, then the parts of it."""
    async with house.opened(stage) as home:
        peak = 0.0

        async def highest() -> dict[str, float]:
            nonlocal peak
            peak = (await home.run(stage.size.count)).rate
            return {"peak": peak}

        async def at(part: int) -> dict[str, float]:
            rate = peak * part / 100
            run = await home.run(max(1, round(rate * stage.size.seconds)), per_second=rate)
            return {f"{name}_{part}": value for name, value in percentiles(run).items()}

        def side(part: int) -> Side:
            return lambda: at(part)

        yield [highest, *map(side, PARTS)]


def percentiles(run: Run) -> dict[str, float]:
    """p50 and p99 in ms, of accepted → delivered and of due → delivered."""
    orders = [one.order_id for one in run.notifications]
    accepted, due = dict(zip(orders, run.answers.answered, strict=True)), dict(zip(orders, run.answers.due, strict=True))
    waits = [at - accepted[order_id] for (_, order_id), at in run.arrived.items()]
    whole = [at - due[order_id] for (_, order_id), at in run.arrived.items()]
    return {"p50": percentile(waits, 50), "p99": percentile(waits, 99), "whole_p99": percentile(whole, 99)}


def percentile(seconds: Sequence[float], percent: float) -> float:
    """In ms: the smallest that so many percent are not above."""
    ordered = sorted(seconds)
    return 1000 * ordered[max(0, -(-len(ordered) * percent // 100).__floor__() - 1)]


def _findings(part: int) -> list[Finding]:
    return [
        told(f"p99 at {part} %", f"p99_{part}", "ms", at_most=TARGET_MS if part == JUDGED else None),
        told(f"p50 at {part} %", f"p50_{part}", "ms"),
        told(f"p99 at {part} %, from the intended time", f"whole_p99_{part}", "ms"),
    ]


COMPARISON: Final = Comparison(
    "latency",
    "accepted → delivered at 25, 50 and 75 % of the peak, open loop",
    [*(finding for part in PARTS for finding in _findings(part)), told("peak", "peak", "/s")],
    sides,
)
