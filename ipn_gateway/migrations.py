"""Bringing a database's schema up to date: Alembic, run by `migrate` and by `serve` on its own embedded server.

A database of somebody else's, in which the Idempotency-Key layer works alone, gets its one table by `install_keys`.
"""
# ruff: noqa: PLC0415 - Alembic and SQLAlchemy take a second to import, and nearly every process finds nothing to apply

from __future__ import annotations

import asyncio
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ipn_gateway import event_log, logs, retention

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from alembic.config import Config
    from sqlalchemy import Connection

    from ipn_gateway.db import Database

_LOCK: Final = 0x69706E  # several processes may start at once; one migrates, the others wait and find nothing to do

_NAMES: Final = re.compile(r'^(revision|down_revision) = "(\w+)"$', re.MULTILINE)

_IPN_NOW: Final = """
CREATE OR REPLACE FUNCTION ipn_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT statement_timestamp() + coalesce(nullif(current_setting('ipn.clock_offset', true), ''), '0')::interval $$
"""


def scripts() -> Path:
    """The folder of the migrations: in the wheel beside this file, in a checkout beside the package."""
    packaged = Path(__file__).parent / "alembic"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "alembic"


@cache
def revisions() -> tuple[str, ...]:
    """Every revision of this version, oldest first, as the scripts name them. They follow each other in one line."""
    named = [dict(_NAMES.findall(script.read_text(encoding="utf-8"))) for script in (scripts() / "versions").glob("*.py")]
    next_of = {names.get("down_revision"): names["revision"] for names in named}
    line = []
    newest = None
    while newest := next_of.get(newest):
        line.append(newest)
    return tuple(line)


def config() -> Config:
    """Alembic's configuration, for our scripts."""
    from alembic.config import Config

    made = Config()
    made.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    return made


async def applied(db: Database) -> list[str]:
    """The newest revision that the database has; none in an empty one."""
    async with db.autocommit("migrations.applied") as tx:
        if await tx.value("SELECT to_regclass('alembic_version')") is None:
            return []
        return [row["version_num"] for row in await tx.all(dict, "SELECT version_num FROM alembic_version")]


async def pending(db: Database) -> list[str]:
    """The revisions that the database lacks, oldest first; none where a newer version has migrated it."""
    return _lacking(await applied(db))


async def migrate(url: str, db: Database) -> list[str]:
    """Apply what is pending, continue the log of events, make the partitions ahead; the revisions that were applied."""
    done = await asyncio.to_thread(_upgrade, url) if await pending(db) else []
    await event_log.ensure_continued(db)
    await retention.ensure_partitions(db)
    return done


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
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateIndex, CreateTable
    from sqlmodel import SQLModel

    from ipn_gateway import models

    table = SQLModel.metadata.tables[str(models.IdempotencyKey.__tablename__)]
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy has no types there
    yield _IPN_NOW
    yield str(CreateTable(table).compile(dialect=dialect))
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        yield str(CreateIndex(index).compile(dialect=dialect))


def _lacking(current: Iterable[str]) -> list[str]:
    ours = revisions()
    if newer := set(current) - set(ours):
        logs.get("migrations").warning("schema.newer", revisions=sorted(newer))  # as in the middle of an upgrade: migrations only add
        return []
    return list(ours[max((ours.index(revision) + 1 for revision in current), default=0) :])


def _upgrade(url: str) -> list[str]:
    from sqlalchemy import create_engine, make_url, pool

    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"), poolclass=pool.NullPool)
    try:
        with engine.connect() as connection:
            return _upgrade_alone(connection)
    finally:
        engine.dispose()


def _upgrade_alone(connection: Connection) -> list[str]:
    from alembic import command
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import text

    connection.execute(text(f"SELECT pg_advisory_lock({_LOCK})"))
    waiting = _lacking(MigrationContext.configure(connection).get_current_heads())
    if waiting:
        made = config()
        made.attributes["connection"] = connection
        command.upgrade(made, "head")
        connection.commit()
    connection.execute(text(f"SELECT pg_advisory_unlock({_LOCK})"))
    connection.commit()
    return waiting
