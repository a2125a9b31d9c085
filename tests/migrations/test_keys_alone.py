"""The one table of the Idempotency-Key layer, in a database that is somebody else's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ipn_gateway import migrations
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from tests.migrations.test_schema import CATALOGUE, catalogue

if TYPE_CHECKING:
    from sqlalchemy import Connection


def of_the_table(connection: Connection, kind: str) -> list[tuple[object, ...]]:
    return [row for row in catalogue(connection, kind) if str(row[0]).startswith("idempotency_keys")]


@pytest.mark.parametrize("kind", CATALOGUE)
async def test_the_table_alone_is_the_one_of_the_migrations(kind, foreign, empty_database_url, database_url, connect):
    """Column by column, constraint by constraint, index by index; and `ipn_now()` is the same function."""
    now = "SELECT pg_get_functiondef('ipn_now'::regproc)"

    assert await migrations.install_keys(foreign)

    with connect(database_url) as migrated, connect(empty_database_url) as alone:
        assert of_the_table(alone, kind) == of_the_table(migrated, kind)
        assert catalogue(alone, kind) == of_the_table(alone, kind)
        assert alone.exec_driver_sql(now).scalar_one() == migrated.exec_driver_sql(now).scalar_one()


async def test_what_is_there_stays(foreign):
    """Asked again, and in the gateway's own database, it changes nothing and says so."""
    await migrations.install_keys(foreign)
    async with foreign.transaction("test") as tx:
        await tx.execute("ALTER TABLE idempotency_keys ADD COLUMN mine text")

    assert not await migrations.install_keys(foreign)
    async with foreign.autocommit("test") as tx:
        assert await tx.value("SELECT count(mine) FROM idempotency_keys") == 0


async def test_several_processes_install_at_once(foreign):
    """One makes the table, the others wait for it and find it there."""
    made = await asyncio.gather(*(migrations.install_keys(foreign) for _ in range(5)))

    assert sorted(made) == [False, False, False, False, True]


async def test_nothing_is_left_of_half_an_installation(foreign, empty_database_url):
    """It is one transaction: a process that dies in the middle leaves nothing behind."""

    async def die() -> None:
        raise RuntimeError("died")

    broken = Faults({"key_store.install:statement_4": die})
    async with Database(empty_database_url, clock=Clock(), faults=broken) as db:
        with pytest.raises(RuntimeError, match="died"):
            await migrations.install_keys(db)

    assert await migrations.install_keys(foreign)
