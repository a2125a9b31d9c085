"""Isolation: what an endpoint that hangs does to the others of its tenant.

One tenant with ten endpoints, each event goes to all of them, in an open loop at 30 % of the rate that is possible so. Once all ten
answer. Once the tenth takes connections and answers nothing for 15 s, which is the time that it is given, and 10,000 event deliveries to
it are due.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.bench import house, rows
from ipn_gateway.bench.comparison import Broken, Comparison, ratio, told
from ipn_gateway.bench.latency import percentile
from ipn_gateway.bench.stage import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.house import House, Run
    from ipn_gateway.bench.stage import Stage

ENDPOINTS: Final = 10
PART_OF_PEAK: Final = 0.3
HANG_SECONDS: Final = 15.0


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """The peak, all ten well, then the tenth hanging; the same gateway, the same nine."""
    async with house.opened(stage, tenants=1, endpoints=ENDPOINTS) as home:
        hanging = home.merchants[0].paths[-1]
        rate = 0.0

        def count() -> int:
            return max(1, round(rate * stage.size.hanging_seconds))

        async def highest() -> dict[str, float]:
            nonlocal rate
            peak = (await home.run(max(1, stage.size.count // ENDPOINTS))).rate
            rate = PART_OF_PEAK * peak
            return {"peak": peak, "rate": rate}

        async def well() -> dict[str, float]:
            run = await home.run(count(), per_second=rate)
            return {f"{name}_well": value for name, value in _of_others(run, hanging).items()}

        async def hung() -> dict[str, float]:
            await stage.receiver.ask("hang", path=hanging, seconds=HANG_SECONDS)
            await rows.due(home, home.merchants, stage.size.hanging_due, paths={hanging})
            try:
                run = await home.run(count(), per_second=rate, deaf={hanging})
                if not (held := (await stage.receiver.ask("count"))["held"]):
                    raise Broken("Nothing was sent to the endpoint that hangs.")
            finally:
                await _relieve(home)
            return {"held": held} | {f"{name}_hung": value for name, value in _of_others(run, hanging).items()}

        yield [highest, well, hung]


def _of_others(run: Run, hanging: str) -> dict[str, float]:
    accepted = {one.order_id: at for one, at in zip(run.notifications, run.answers.answered, strict=True)}
    waits = [at - accepted[order_id] for (path, order_id), at in run.arrived.items() if path != hanging]
    return {"p50": percentile(waits, 50), "p99": percentile(waits, 99)}


async def _relieve(home: House) -> None:
    """Take away what is due for the tenth, let go what hangs, and forget that it failed, as if it had not been."""
    given: dict[str, Any] = {"tenant": home.merchants[0].tenant, "endpoint": home.merchants[0].endpoint_ids[-1]}
    async with await connected(home.url) as connection:
        await connection.execute(_CANCEL, given)
        await home.stage.receiver.ask("release")
        await connection.execute("DELETE FROM endpoint_states WHERE tenant_id = %(tenant)s AND endpoint_id = %(endpoint)s", given)
        await connection.execute("VACUUM event_deliveries")


_CANCEL: Final = """
UPDATE event_deliveries SET status = 'cancelled', next_attempt_at = NULL, lease_expires_at = NULL, fence = fence + 1
 WHERE tenant_id = %(tenant)s AND endpoint_id = %(endpoint)s AND status = 'pending'
"""

COMPARISON: Final = Comparison(
    "isolation",
    "p99 accepted → delivered of nine endpoints with the tenth hanging and 10,000 due ÷ without",
    [
        ratio("p99, one hanging ÷ none", "p99_hung", "p99_well", at_most=1.2),
        told("attempts that hung", "held", ""),
        told("notifications, ten endpoints each", "rate", "/s"),
        *(
            told(f"{name} {how}", f"{name}_{short}", "ms")
            for name in ("p99", "p50")
            for how, short in (("with all well", "well"), ("with one hanging", "hung"))
        ),
    ],
    sides,
)
