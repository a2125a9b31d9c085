"""Growth: the same on a database that has years in it. The empty one and the grown one take turns."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench import duplicates, house, outbound, rows
from ipn_gateway.bench.comparison import Comparison, ratio, told

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.house import House
    from ipn_gateway.bench.stage import Stage

MEASURED: Final = ("whole", "repeats", "outbound")


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """Both, with all roles in one process each."""
    async with house.opened(stage) as empty, house.opened(stage) as grown:
        stage.say(f"growth: loading {stage.size.ledger_rows:,} ledger rows and {stage.size.deliveries:,} event deliveries")
        seconds = await rows.history(grown, ledger_rows=stage.size.ledger_rows, deliveries=stage.size.deliveries)
        stage.say(f"growth: loaded in {seconds:.0f} s")
        await grown.run(min(house.WARM_UP, stage.size.count))
        yield [lambda: _measured(empty, "empty"), lambda: _measured(grown, "grown")]


async def _measured(home: House, how: str) -> dict[str, float]:
    whole = (await home.run(home.stage.size.count)).rate
    repeats = (await duplicates.measured(home, home.stage.size.count))["repeats"]
    await home.stage.receiver.ask("forget")
    count = await rows.due(home, home.merchants, home.stage.size.count)
    outwards = await outbound.between(home.stage, count, outbound.WAVE)
    return {f"{name}_{how}": value for name, value in zip(MEASURED, (whole, repeats, outwards), strict=True)}


COMPARISON: Final = Comparison(
    "growth",
    "the whole way, repeats and event deliveries with years of rows ÷ with none",
    [
        *(ratio(f"{name}, grown ÷ empty", f"{name}_grown", f"{name}_empty", at_least=0.9) for name in MEASURED),
        *(told(f"{name} {how}", f"{name}_{how}", "/s") for name in MEASURED for how in ("empty", "grown")),
    ],
    sides,
)
