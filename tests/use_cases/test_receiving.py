"""The receiver's module in a receiver's own database: which event is new."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway.receiver import TABLE, first_time, first_time_sync

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
async def connections(database_url: str) -> Any:
    """Two connections of a receiver to its own database, with the table in it."""
    async with await psycopg.AsyncConnection.connect(database_url) as one, await psycopg.AsyncConnection.connect(database_url) as two:
        await one.execute(TABLE)
        await one.commit()
        yield one, two


async def test_an_event_is_new_once(connections: Any) -> None:
    """For ever, and on every connection; making the table again keeps what is in it."""
    one, two = connections

    assert [await first_time(one, event_id) for event_id in ("evt_1", "evt_1", "evt_2")] == [True, False, True]
    await one.commit()
    assert not await first_time(two, "evt_1")
    await two.execute(TABLE)
    assert not await first_time(two, "evt_2")


async def test_an_event_that_was_not_acted_on_is_new_again(connections: Any) -> None:
    """A transaction that rolls back leaves nothing: the repeat is then the first time."""
    one, two = connections
    assert await first_time(one, "evt_1")
    await one.rollback()

    assert await first_time(two, "evt_1")


@pytest.mark.parametrize(("ending", "new"), [("commit", False), ("rollback", True)])
async def test_a_repeat_at_the_same_time_waits_for_the_first(connections: Any, database_url: str, ending: str, new: bool) -> None:
    """Two deliveries at once are never both new, and never both not."""
    one, two = connections
    assert await first_time(one, "evt_1")

    second = asyncio.ensure_future(first_time(two, "evt_1"))
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as observer:
        while not await (
            await observer.execute("SELECT pid FROM pg_locks WHERE NOT granted AND pid = %s", (two.info.backend_pid,))
        ).fetchall():
            assert not second.done()
    await getattr(one, ending)()

    assert await second is new


def test_a_connection_without_async_works_too(tmp_path: Path) -> None:
    """PEP 249: here SQLite's, whose mark for a parameter is another."""
    first, second = sqlite3.connect(tmp_path / "shop.db"), sqlite3.connect(tmp_path / "shop.db")
    first.execute(TABLE)

    assert [first_time_sync(first, event_id, mark="?") for event_id in ("evt_1", "evt_1")] == [True, False]
    first.rollback()
    assert first_time_sync(first, "evt_1", mark="?")
    first.commit()
    assert not first_time_sync(second, "evt_1", mark="?")
    first.close()
    second.close()


def test_a_synchronous_connection_of_the_same_driver_works_too(database_url: str) -> None:
    """psycopg's, with its own mark."""
    with psycopg.connect(database_url) as connection:
        connection.execute(TABLE)

        assert [first_time_sync(connection, event_id) for event_id in ("evt_1", "evt_1")] == [True, False]
