"""The plain way: the same notifications through a service as most teams would write it, until each event has arrived."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench import house, load, plain_way, wire
from ipn_gateway.bench.comparison import Broken, Comparison, ratio, told
from ipn_gateway.bench.stage import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.stage import Stage

OF_COUNT: Final = 4
"""It gets the fourth part of the notifications: it takes so much longer."""


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """A gateway, and the other one on a database of its own."""
    async with house.opened(stage) as home, stage.database() as url, await connected(url) as connection:
        await plain_way.prepare(url)
        async with stage.program("plain", url, stage.provider.url, stage.receiver.url) as program:

            async def ours() -> dict[str, float]:
                return {"ours": (await home.run(stage.size.count)).rate}

            async def plain() -> dict[str, float]:
                made = await home.notifications(max(1, stage.size.count // OF_COUNT))
                async with connection.cursor() as cursor, cursor.copy("COPY plain_orders (order_id, amount, status) FROM STDIN") as copy:
                    for one in made:
                        await copy.write_row((one.order_id, wire.AMOUNT, "pending"))
                await stage.receiver.ask("forget")
                answers = await load.at_once([program.url], [one.request for one in made])
                answers.all_accepted()
                arrived = await house.arrivals(stage, len(made))
                row = await (await connection.execute(_PAID, {"ids": [one.order_id for one in made]})).fetchone()
                if row != (len(made),):
                    raise Broken(f"Of {len(made)} payments the plain way booked {row and row[0]}.")
                return {"plain": len(made) / (max(arrived.values()) - answers.began)}

            await plain()
            yield [ours, plain]


_PAID: Final = """
SELECT count(*) FROM plain_payments JOIN plain_orders USING (order_id) WHERE status = 'paid' AND order_id = ANY(%(ids)s)
"""

COMPARISON: Final = Comparison(
    "plain",
    "the whole way ÷ the same job as most teams would write it (FastAPI, SQLModel, httpx, four statements, validate inline)",
    [ratio("× the plain way", "ours", "plain", at_least=5), told("ours", "ours", "/s"), told("plain way", "plain", "/s")],
    sides,
)
