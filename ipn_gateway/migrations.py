"""Bringing a database's schema up to date: Alembic, run by `migrate` and by `serve` on its own embedded server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, make_url, pool, text

from ipn_gateway import retention

if TYPE_CHECKING:
    from collections.abc import Callable

    from ipn_gateway.db import Database

_LOCK: Final = 0x69706E  # several processes may start at once; one migrates, the others wait and find nothing to do


def scripts() -> Path:
    """The folder of the migrations: in the wheel beside this file, in a checkout beside the package."""
    packaged = Path(__file__).parent / "alembic"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "alembic"


def config() -> Config:
    """Alembic's configuration, for our scripts."""
    made = Config()
    made.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    return made


async def pending(url: str) -> list[str]:
    """The revisions that the database lacks, oldest first."""
    return await asyncio.to_thread(_with_connection, url, _pending)


async def migrate(url: str, db: Database | None = None) -> list[str]:
    """Apply what is pending, and make the partitions ahead when `db` is given; the revisions that were applied."""
    applied = await asyncio.to_thread(_with_connection, url, _upgrade)
    if db is not None:
        await retention.ensure_partitions(db)
    return applied


def _pending(connection: Connection) -> list[str]:
    current = MigrationContext.configure(connection).get_current_heads()
    directory = ScriptDirectory.from_config(config())
    known = {revision.revision for head in current for revision in directory.iterate_revisions(head, "base")}
    return [revision.revision for revision in reversed(list(directory.walk_revisions())) if revision.revision not in known]


def _upgrade(connection: Connection) -> list[str]:
    connection.execute(text(f"SELECT pg_advisory_lock({_LOCK})"))
    waiting = _pending(connection)
    made = config()
    made.attributes["connection"] = connection
    command.upgrade(made, "head")
    connection.commit()
    connection.execute(text(f"SELECT pg_advisory_unlock({_LOCK})"))
    return waiting


def _with_connection(url: str, work: Callable[[Connection], list[str]]) -> list[str]:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"), poolclass=pool.NullPool)
    try:
        with engine.connect() as connection:
            result = work(connection)
            connection.commit()
            return result
    finally:
        engine.dispose()
