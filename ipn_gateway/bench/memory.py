"""Memory: the resident size of the gateway over a soak at 70 % of the peak, and with a long backlog of event deliveries that are due.

The soak runs in parts of some seconds; after each its notifications are checked and the size is read. It is judged from the second fifth
on, since caches and pools fill first: the median of the last fifth ÷ that of the second. The backlog is dealt with while it is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from statistics import median
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench import house, rows
from ipn_gateway.bench.comparison import Comparison, ratio, told

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.house import House
    from ipn_gateway.bench.stage import Stage

PART_OF_PEAK: Final = 0.7
PART_SECONDS_MAX: Final = 20.0
PARTS_MIN: Final = 10
ENDPOINTS: Final = 25
BACKLOG_SECONDS_MAX: Final = 60.0
FLAT: Final = 1.05
MEBIBYTE: Final = 2**20


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """The soak and the backlog, each with a gateway of its own."""

    async def soak() -> dict[str, float]:
        async with house.opened(stage) as home:
            sizes = await _soaked(home)
        fifth = max(1, len(sizes) // 5)
        return {"soak_began": median(sizes[fifth : 2 * fifth]), "soak_ended": median(sizes[-fifth:]), "soak_most": max(sizes)}

    async def backlog() -> dict[str, float]:
        async with house.opened(stage, endpoints=ENDPOINTS) as home:
            await home.run(stage.size.count)
            without = home.gateways[0].resident_bytes / MEBIBYTE
            await stage.receiver.ask("forget")
            count = await rows.due(home, home.merchants, stage.size.backlog)
            sizes = await _watched(home, seconds=min(BACKLOG_SECONDS_MAX, stage.size.soak_seconds))
            left = count - (await stage.receiver.ask("count"))["count"]
        return {"without": without, "backlog": max(sizes), "left": left}

    yield [soak, backlog]


async def _soaked(home: House) -> list[float]:
    """The size in MiB after each part."""
    size = home.stage.size
    rate = PART_OF_PEAK * (await home.run(size.count)).rate
    seconds = min(PART_SECONDS_MAX, size.soak_seconds / PARTS_MIN)
    sizes: list[float] = []
    deadline = time.monotonic() + size.soak_seconds
    while len(sizes) < PARTS_MIN // 2 or time.monotonic() < deadline:
        await home.run(max(1, round(rate * seconds)), per_second=rate)
        sizes.append(home.gateways[0].resident_bytes / MEBIBYTE)
    return sizes


async def _watched(home: House, *, seconds: float) -> list[float]:
    sizes, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        await asyncio.sleep(1)
        sizes.append(home.gateways[0].resident_bytes / MEBIBYTE)
        home.stage.cut_logs()
    return sizes


COMPARISON: Final = Comparison(
    "memory",
    "resident size of the gateway over a soak at 70 % of the peak, and with a backlog of due event deliveries",
    [
        ratio("soak: last fifth ÷ second fifth", "soak_ended", "soak_began", at_most=FLAT),
        ratio("with a backlog ÷ without", "backlog", "without", at_most=FLAT),
        told("after the soak", "soak_ended", "MiB"),
        told("with a backlog", "backlog", "MiB"),
        told("left of the backlog", "left", ""),
    ],
    sides,
    once=True,
)
