"""Idempotency: what a key costs a POST, and what a repeat costs beside an execution.

`POST /v1/endpoints`, the same body with and without an Idempotency-Key, and then the keyed ones again. So many tenants take turns that
nobody meets the limit of 200 calls a second, or that of 100 endpoints.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench import house, load
from ipn_gateway.bench.comparison import Broken, Comparison, ratio, told
from ipn_gateway.bench.stage import connected
from ipn_gateway.endpoints import ENDPOINTS_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.house import House
    from ipn_gateway.bench.stage import Stage

TENANTS_MIN: Final = 20
OF_COUNT: Final = 4
LANES: Final = 16
BODY: Final = json.dumps({"url": "http://127.0.0.1:9/hooks", "events": ["order.paid"]}).encode()


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """Without a key, with one, and with the same ones again."""
    count = max(1, stage.size.count // OF_COUNT)
    of_each = (ENDPOINTS_MAX - 1) // (2 * stage.size.turns)  # what a tenant may make in each measurement; it has one already
    async with house.opened(stage, roles="web", tenants=max(TENANTS_MIN, -(-count // of_each))) as home:
        run = iter(stage.numbers)
        keys: list[str] = []

        async def without() -> dict[str, float]:
            return {"without": await _rate(home, count, [])}

        async def execution() -> dict[str, float]:
            turn = next(run)
            keys[:] = [f"bench-{turn}-{number}" for number in range(count)]
            return {"execution": await _rate(home, count, keys)}

        async def replay() -> dict[str, float]:
            return {"replay": await _rate(home, count, keys, made=0)}

        yield [without, execution, replay]


async def _rate(home: House, count: int, keys: Sequence[str], *, made: int | None = None) -> float:
    """Calls per second. Raises `Broken` unless so many endpoints came of it, by default as many as calls."""
    before = await _endpoints(home)
    answers = await load.at_once(home.urls, [_call(home, number, keys) for number in range(count)], lanes=LANES)
    answers.all_accepted()
    expected = count if made is None else made
    if (found := await _endpoints(home) - before) != expected:
        raise Broken(f"{count} calls made {found} endpoints instead of {expected}.")
    home.stage.cut_logs()
    return answers.rate


def _call(home: House, number: int, keys: Sequence[str]) -> bytes:
    merchant = home.merchants[number % len(home.merchants)]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {merchant.key}"}
    return load.request("/v1/endpoints", BODY, headers | ({"Idempotency-Key": keys[number]} if keys else {}))


async def _endpoints(home: House) -> int:
    async with await connected(home.url) as connection:
        row = await (await connection.execute("SELECT count(*) FROM endpoints")).fetchone()
    return int(row[0]) if row else 0


COMPARISON: Final = Comparison(
    "idempotency",
    "POST /v1/endpoints with an Idempotency-Key beside the same without, and a repeat beside an execution",
    [
        ratio("cost of a key: with ÷ without", "without", "execution"),
        ratio("repeats ÷ executions", "replay", "execution"),
        *(told(name, name, "/s") for name in ("without", "execution", "replay")),
    ],
    sides,
)
