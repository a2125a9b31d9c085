"""Duplicates: a storm of repeats ÷ fresh notifications, from the first request until the last is decided; no repeat is asked about."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.bench import house
from ipn_gateway.bench.comparison import Broken, Comparison, ratio, told
from ipn_gateway.bench.house import LOOK_AGAIN_SECONDS, SETTLE_SECONDS_MAX
from ipn_gateway.bench.stage import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import psycopg

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.house import House
    from ipn_gateway.bench.stage import Stage

COPIES: Final = 4


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """Fresh ones, then each of them `COPIES` times again."""
    async with house.opened(stage) as home:

        async def both() -> dict[str, float]:
            return await measured(home, stage.size.count)

        yield [both]


async def measured(home: House, count: int) -> dict[str, float]:
    """The rates of fresh ones and of repeats. Raises `Broken` for a question about a repeat, and unless all end as duplicates."""
    provider = home.stage.provider
    async with await connected(home.url) as connection:
        began = await _now(connection)
        run = await home.run(count)
        fresh = count / await _seconds(connection, began)
        chosen = run.notifications[: max(1, count // COPIES)]
        asked, began = (await provider.ask("calls"))["calls"], await _now(connection)
        answers = await home.post([one for _ in range(COPIES) for one in chosen])
        await _decided(connection)
        repeated = COPIES * len(chosen) / await _seconds(connection, began)
    if questions := (await provider.ask("calls"))["calls"] - asked:
        raise Broken(f"The provider was asked {questions} times about repeats.")
    outwards = len(chosen) * len(home.merchants[0].paths)
    await home.check(chosen, deliveries=outwards, copies=1 + COPIES, resent=run.answers.resent + answers.resent)
    home.stage.cut_logs()
    return {"fresh": fresh, "repeats": repeated, "questions": questions}


async def _now(connection: psycopg.AsyncConnection[Any]) -> Any:
    row = await (await connection.execute("SELECT clock_timestamp()")).fetchone()
    return row and row[0]


async def _seconds(connection: psycopg.AsyncConnection[Any], began: Any) -> float:
    """From `began` to the last decision."""
    query = """SELECT extract(epoch FROM max(decided_at) - %(began)s)::float8 FROM notification_deliveries WHERE decided_at > %(began)s"""
    row = await (await connection.execute(query, {"began": began})).fetchone()
    assert row is not None  # noqa: S101 - an aggregate gives a row
    return float(row[0])


async def _decided(connection: psycopg.AsyncConnection[Any]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while (await (await connection.execute("SELECT count(*) FROM inbox")).fetchone()) != (0,):
        if time.monotonic() > deadline:
            raise Broken("Repeats are not decided.")
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


COMPARISON: Final = Comparison(
    "duplicates",
    "a storm of repeats, received and decided, ÷ fresh notifications",
    [
        ratio("repeats ÷ fresh", "repeats", "fresh", at_least=1.5),
        told("questions about repeats", "questions", "", at_most=0),
        told("fresh", "fresh", "/s"),
        told("repeats", "repeats", "/s"),
    ],
    sides,
)
