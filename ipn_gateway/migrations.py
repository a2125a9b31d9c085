"""Bringing a database's schema up to date: Alembic, run by `migrate` and by `serve` on its own embedded server.

A database of somebody else's, in which the Idempotency-Key layer works alone, gets its one table by `install_keys`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, make_url, pool, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlmodel import SQLModel

from ipn_gateway import logs, models, retention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ipn_gateway.db import Database

_LOCK: Final = 0x69706E  # several processes may start at once; one migrates, the others wait and find nothing to do

_IPN_NOW: Final = """
CREATE OR REPLACE FUNCTION ipn_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT statement_timestamp() + coalesce(nullif(current_setting('ipn.clock_offset', true), ''), '0')::interval $$
"""


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
    """The revisions that the database lacks, oldest first; none where a newer version has migrated it."""
    return await asyncio.to_thread(_with_connection, url, _pending)


async def migrate(url: str, db: Database | None = None) -> list[str]:
    """Apply what is pending, and make the partitions ahead when `db` is given; the revisions that were applied."""
    applied = await asyncio.to_thread(_with_connection, url, _upgrade)
    if db is not None:
        await retention.ensure_partitions(db)
    return applied


async def install_keys(db: Database) -> bool:
    """Make `idempotency_keys` and the function `ipn_now()` in a database that is not the gateway's; whether they were missing.

    A table that is there stays as it is. Several processes may do this at once.
    """
    async with db.transaction("key_store.install") as tx:
        await tx.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if await tx.value("SELECT to_regclass('idempotency_keys')"):
            return False
        for statement in _key_store():
            await tx.execute(statement)
        return True


def _key_store() -> Iterator[str]:
    table = SQLModel.metadata.tables[str(models.IdempotencyKey.__tablename__)]
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy has no types there
    yield _IPN_NOW
    yield str(CreateTable(table).compile(dialect=dialect))
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        yield str(CreateIndex(index).compile(dialect=dialect))


def _pending(connection: Connection) -> list[str]:
    current = MigrationContext.configure(connection).get_current_heads()
    directory = ScriptDirectory.from_config(config())
    ours = [revision.revision for revision in reversed(list(directory.walk_revisions()))]
    if newer := set(current) - set(ours):
        logs.get("migrations").warning("schema.newer", revisions=sorted(newer))  # as in the middle of an upgrade: migrations only add
        return []
    known = {revision.revision for head in current for revision in directory.iterate_revisions(head, "base")}
    return [revision for revision in ours if revision not in known]


def _upgrade(connection: Connection) -> list[str]:
    connection.execute(text(f"SELECT pg_advisory_lock({_LOCK})"))
    waiting = _pending(connection)
    if waiting:
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
