"""Statements and bytes: what the database is asked and what it keeps, for a notification and for an event delivery, amortised at load.

Counted in a database of its own, by pg_stat_statements: statements without BEGIN, COMMIT and settings; and by pg_stat_database: commits,
those of single reads too. A notification is received and applied by a gateway without dispatcher; event deliveries that are due are sent
by one with nothing else, so the event and what is owed are in the notification's bytes. Polls are in, and the few statements of stopping:
only what has ended has told all that it counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.bench import house, rows
from ipn_gateway.bench.comparison import Broken, Comparison, told
from ipn_gateway.bench.house import House
from ipn_gateway.bench.stage import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import psycopg

    from ipn_gateway.bench.comparison import Side
    from ipn_gateway.bench.stage import Stage

LOOK_AGAIN_SECONDS: Final = 0.2  # each look is a commit too
PER: Final = ("notification", "event")
_NAMES: Final = ("statements", "commits", "bytes", "wal_bytes")


@contextlib.asynccontextmanager
async def sides(stage: Stage) -> AsyncIterator[list[Side]]:
    """Both, each on a new database in every turn."""

    async def notification() -> dict[str, float]:
        async with stage.database() as url, counted(url) as connection:
            async with house.opened(stage, roles="web,inbox", url=url) as home:
                made = await home.notifications(stage.size.count)
                before = await _state(connection)
                await home.post(made)
                await _until(connection, "SELECT count(*) = 0 FROM inbox")
            after = await _state(connection)
            await _applied(connection, len(made))
        return _each(before, after, len(made), "notification")

    async def event() -> dict[str, float]:
        async with stage.database() as url, counted(url) as connection:
            merchants = await house.settled(stage, url)
            await stage.receiver.ask("forget")
            count = await rows.due(House(stage, url, [], merchants), merchants, stage.size.count)
            before = await _state(connection)
            async with stage.gateway(url, roles="dispatcher"):
                await house.arrivals(stage, count)
                await _until(connection, "SELECT count(*) = 0 FROM event_deliveries WHERE status = 'pending'")
            after = await _state(connection)
        return _each(before, after, count, "event")

    yield [notification, event]


@contextlib.asynccontextmanager
async def counted(url: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """Count what is asked of a database by those that connect from now on; a connection to look with, which is not counted."""
    async with await connected(url) as connection:
        await connection.execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET pg_stat_statements.track = top', current_database()); END $$"
        )
        yield connection


async def _state(connection: psycopg.AsyncConnection[Any]) -> dict[str, float]:
    row = await (await connection.execute(_STATE)).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM gives a row
    return dict(zip(_NAMES, map(float, row), strict=True))


_STATE: Final = """
SELECT coalesce(sum(calls) FILTER (WHERE query !~* '^(BEGIN|START|COMMIT|ROLLBACK|SET|SELECT set_config)'), 0),
       (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()),
       (SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
         WHERE n.nspname = 'public' AND c.relkind = 'r'),
       pg_current_wal_insert_lsn() - '0/0'::pg_lsn
  FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def _each(before: dict[str, float], after: dict[str, float], count: int, per: str) -> dict[str, float]:
    return {f"{name}_{per}": (after[name] - before[name]) / count for name in _NAMES}


async def _until(connection: psycopg.AsyncConnection[Any], question: str) -> None:
    deadline = time.monotonic() + house.SETTLE_SECONDS_MAX
    while (await (await connection.execute(question.encode())).fetchone()) != (True,):
        if time.monotonic() > deadline:
            raise Broken(f"This does not come true: {question}")
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


async def _applied(connection: psycopg.AsyncConnection[Any], count: int) -> None:
    row = await (await connection.execute("SELECT count(*) FROM notification_deliveries WHERE outcome = 'applied'")).fetchone()
    if row != (count,):
        raise Broken(f"Of {count} notifications {row and row[0]} were applied.")


COMPARISON: Final = Comparison(
    "statements",
    "statements, commits and bytes of PostgreSQL for each notification and each event delivery, amortised at load",
    [
        *(told(f"statements a {per}", f"statements_{per}", "", at_most=3) for per in PER),
        *(told(f"commits a {per}", f"commits_{per}", "") for per in PER),
        *(told(f"bytes of tables and indexes a {per}", f"bytes_{per}", "B") for per in PER),
        *(told(f"bytes of WAL a {per}", f"wal_bytes_{per}", "B") for per in PER),
    ],
    sides,
)
