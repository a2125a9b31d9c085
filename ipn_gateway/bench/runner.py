"""Runs comparisons one after the other, the sides of each in turn, and makes their findings."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import httpx
import psycopg

from ipn_gateway import __version__
from ipn_gateway.bench import stage
from ipn_gateway.bench.comparison import Broken, Found, Result, rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ipn_gateway.bench.comparison import Comparison, Figures
    from ipn_gateway.bench.stage import Size, Stage

SHOWN_MAX: Final = 6


async def run(comparisons: Sequence[Comparison], size: Size, say: Callable[[str], None]) -> list[Result]:
    """All of them. One that is broken does not keep the others from being run. SIGTERM ends it as ^C does, with all that was started."""
    work = asyncio.current_task()
    assert work is not None  # noqa: S101 - a coroutine runs in a task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    async with stage.opened(size, say) as opened:
        return [await _result(comparison, opened) for comparison in comparisons]


async def _result(comparison: Comparison, opened: Stage) -> Result:
    began = time.monotonic()
    turns: list[Figures] = []
    try:
        await _measure(comparison, opened, turns)
    except (Broken, OSError, psycopg.Error, httpx.HTTPError) as error:  # OSError: also what took too long
        broken = str(error) or type(error).__name__
        opened.say(f"{comparison.name}: broken: {broken}")
        return Result(comparison, time.monotonic() - began, turns=turns, broken=broken)
    found = [Found(finding, [finding.of(turn) for turn in turns]) for finding in comparison.findings]
    return Result(comparison, time.monotonic() - began, found, turns)


async def _measure(comparison: Comparison, opened: Stage, turns: list[Figures]) -> None:
    count = 1 if comparison.once else opened.size.turns
    opened.say(f"{comparison.name}: {comparison.compares}")
    async with comparison.sides(opened) as sides:
        for turn in range(1, count + 1):
            figures: dict[str, float] = {}
            for side in sides:
                measured = await side()
                figures |= measured
                opened.say(f"{comparison.name}: turn {turn} of {count}: {_shown(measured)}")
            turns.append(figures)


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rounded(value):g}" for name, value in list(figures.items())[:SHOWN_MAX])


def report(results: Sequence[Result], size: Size, seconds: float) -> dict[str, Any]:
    """All of it as JSON. `ok` is that nothing is broken; `met` that all targets are."""
    judged = [found.finding.met(found.value) for result in results for found in result.found if found.finding.judged]
    return {
        "ok": not any(result.broken for result in results),
        "met": all(judged) and not any(result.broken for result in results),
        "seconds": round(seconds, 1),
        "version": __version__,
        "machine": {"processors": _processors(), "python": platform.python_version(), "system": platform.system()},
        "size": {name: getattr(size, name) for name in size.__slots__},
        "comparisons": [result.shown() for result in results],
    }


def _processors() -> int:
    return len(os.sched_getaffinity(0))
