"""The limit: our whole way ÷ what its parts allow, each measured bare in the same run and composed, since they share the processors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench import house, load, rows
from ipn_gateway.bench.comparison import Comparison, Finding, ratio, told

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.house import House
    from ipn_gateway.bench.stage import Stage

AT_A_TIME: Final = 50
PARTS: Final = ("form", "provider_client", "delivery_client", "rows_together")


def composed(figures: Mapping[str, float]) -> float:
    """1 ÷ the sum of what each part takes."""
    return 1 / sum(1 / figures[part] for part in PARTS)


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """One process, the parts, two processes."""
    async with house.opened(stage) as one, house.opened(stage, gateways=2) as two, stage.program("form") as form:

        async def ours() -> dict[str, float]:
            postgres, gateway = stage.postgres_cpu_seconds(), one.gateways[0].cpu_seconds
            run = await one.run(stage.size.count)
            return {
                "one_process": run.rate,
                "postgres_cpu": 1e6 * (stage.postgres_cpu_seconds() - postgres) / stage.size.count,
                "gateway_cpu": 1e6 * (one.gateways[0].cpu_seconds - gateway) / stage.size.count,
            }

        async def parts() -> dict[str, float]:
            requests = [made.request for made in await one.notifications(stage.size.count)]
            answers = await load.at_once([form.url], requests)
            answers.all_accepted()
            return {
                "form": answers.rate,
                "provider_client": await client(stage, "ask", stage.provider.url),
                "delivery_client": await client(stage, "post", stage.receiver.url),
                "rows_together": await _rows(stage, AT_A_TIME, 10),
            }

        async def one_by_one() -> dict[str, float]:
            return {"rows_one_by_one": await _rows(stage, 1, 1)}

        async def two_processes() -> dict[str, float]:
            return {"two_processes": (await two.run(stage.size.count)).rate}

        yield [ours, parts, one_by_one, two_processes]


async def client(stage: Stage, program: str, url: str) -> float:
    """What a bare client makes, in a process of its own."""
    async with stage.program(program, url, str(2 * stage.size.count)) as started:
        return float(await started.rest())


async def _rows(stage: Stage, at_a_time: int, times: int) -> float:
    async with stage.database() as url:
        merchants = await house.settled(stage, url)
        emptied: House = house.House(stage, url, [], merchants)
        return await rows.pgbench(emptied, at_a_time=at_a_time, count=times * stage.size.count)


COMPARISON: Final = Comparison(
    "limit",
    "received → applied → delivered ÷ 1/(1/form parse + 1/provider client + 1/delivery client + 1/rows 50 at a time)",
    [
        Finding("÷ composed limit", lambda figures: figures["one_process"] / composed(figures), at_least=0.7),
        Finding("composed limit", composed, "/s"),
        told("one process", "one_process", "/s"),
        told("two processes", "two_processes", "/s"),
        ratio("÷ pgbench one by one", "one_process", "rows_one_by_one"),
        ratio("two processes ÷ pgbench one by one", "two_processes", "rows_one_by_one"),
        told("PostgreSQL, CPU a notification", "postgres_cpu", "µs"),
        told("gateway, CPU a notification", "gateway_cpu", "µs"),
        told("form parse", "form", "/s"),
        told("provider client", "provider_client", "/s"),
        told("delivery client", "delivery_client", "/s"),
        told("rows 50 at a time", "rows_together", "/s"),
        told("rows one by one", "rows_one_by_one", "/s"),
    ],
    sides,
)
