"""Intake: notifications accepted (stored and committed) ÷ the same framework that only parses the form."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench import house, load
from ipn_gateway.bench.comparison import Broken, Comparison, ratio, told
from ipn_gateway.bench.stage import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.stage import Stage


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """A gateway with the role web alone, so that nothing else is measured."""
    async with house.opened(stage, roles="web") as home, stage.program("form") as form, await connected(home.url) as connection:
        accepted = 0

        async def ours() -> dict[str, float]:
            nonlocal accepted
            answers = await home.post(await home.notifications(stage.size.count))
            accepted += len(answers.answered)
            row = await (await connection.execute("SELECT count(DISTINCT order_id) FROM inbox WHERE state = 'received'")).fetchone()
            if row != (accepted,):
                raise Broken(f"{accepted} notifications were accepted, {row and row[0]} are there.")
            stage.cut_logs()
            return {"accepted": answers.rate}

        async def bare() -> dict[str, float]:
            answers = await load.at_once([form.url], [made.request for made in await home.notifications(stage.size.count)])
            answers.all_accepted()
            return {"form": answers.rate}

        await home.post(await home.notifications(min(house.WARM_UP, stage.size.count)))
        accepted = min(house.WARM_UP, stage.size.count)
        yield [ours, bare]


COMPARISON: Final = Comparison(
    "intake",
    "accepted ÷ bare form parse of the same framework, one process each",
    [ratio("÷ form parse", "accepted", "form", at_least=0.5), told("accepted", "accepted", "/s"), told("form parse", "form", "/s")],
    sides,
)
