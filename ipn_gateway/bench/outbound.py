"""Outbound: event deliveries that are due, posted by one dispatcher process, ÷ the bare client and × job queues against the same receiver.

Each worker begins with its work there. The time is the receiver's, so no start is in it: from the last arrival of the first wave, which is
what is in flight at once and costs nothing but claiming, to the last of all.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench import house, rows
from ipn_gateway.bench.clients import IN_FLIGHT
from ipn_gateway.bench.comparison import Comparison, ratio, told
from ipn_gateway.bench.house import House

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.stage import Stage

WAVE: Final = house.TENANTS * house.IN_FLIGHT
"""What our endpoints allow at once."""

OF_COUNT: Final = 4
"""A job queue gets the fourth part."""


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """The dispatcher, the client, the queues."""

    async def ours() -> dict[str, float]:
        async with stage.database() as url:
            merchants = await house.settled(stage, url)
            home = House(stage, url, [], merchants)
            await stage.receiver.ask("forget")
            count = await rows.due(home, merchants, stage.size.count)
            async with stage.gateway(url, roles="dispatcher"):
                return {"ours": await between(stage, count, WAVE)}

    async def client() -> dict[str, float]:
        await stage.receiver.ask("forget")
        async with stage.program("post", stage.receiver.url, str(stage.size.count)):
            return {"client": await between(stage, stage.size.count)}

    async def queue(name: str) -> dict[str, float]:
        count = max(2, stage.size.count // OF_COUNT)
        async with stage.database() as url:
            await stage.receiver.ask("forget")
            async with stage.program(name, url, stage.receiver.url, str(count)):
                return {name: await between(stage, count)}

    yield [ours, client, lambda: queue("procrastinate"), lambda: queue("pgqueuer")]


async def between(stage: Stage, count: int, wave: int = IN_FLIGHT) -> float:
    """Events per second after the first wave (if that is not most of them). Raises `Broken` when they do not come, or come twice."""
    times = sorted((await house.arrivals(stage, count)).values())
    stage.cut_logs()
    first = wave if 2 * wave < len(times) else 1
    return (len(times) - first) / (times[-1] - times[first - 1])


COMPARISON: Final = Comparison(
    "outbound",
    "events delivered, signed and recorded, by one process ÷ bare client, × job queues that post the same",
    [
        ratio("÷ bare client", "ours", "client", at_least=0.4),
        ratio("× procrastinate", "ours", "procrastinate", at_least=3),
        ratio("× pgqueuer", "ours", "pgqueuer", at_least=1.5),
        *(told(name, name, "/s") for name in ("ours", "client", "procrastinate", "pgqueuer")),
    ],
    sides,
)
