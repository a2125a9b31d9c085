"""A server of the test's own is restored from a backup, and its events are followed across that: no gap that nobody is told of."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import event_log, postgres, pull, runtime, settings
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.errors import StateConflict
from ipn_gateway.faults import Faults
from tests.conftest import MEMORY
from tests.make import TENANT, Make
from tests.pulling import all_in_view

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

BODY = json.dumps({"timestamp": "2026-07-01T12:00:00.000Z", "data": {}}).encode()
BURN = "DO $$ BEGIN FOR i IN 1..10000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"


@pytest.fixture
def files() -> Iterator[Path]:
    """A place for servers, whose path is short enough for their sockets."""
    place = Path(tempfile.mkdtemp(prefix="ipn-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    place.chmod(0o711)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@asynccontextmanager
async def started(data_dir: Path) -> AsyncIterator[Database]:
    """A server on this directory and its database, as a process of the gateway prepares it at its start."""
    chosen = settings.load(data_dir=data_dir, secret_key=Fernet.generate_key().decode())
    async with runtime.server_url(chosen) as url, Database(url, clock=Clock(), faults=Faults()) as db:
        await runtime.prepare(url, chosen, db, migrate=False)
        yield db


async def events(db: Database, *names: str) -> None:
    make = Make(db)
    for name in names:
        await make.event(id=name, order_id=name, body=BODY)
    await all_in_view(db)


async def pulled(db: Database, after: str | None = None, limit: int = 200) -> tuple[list[str], str]:
    async with db.autocommit("test.pull") as tx:
        page = await pull.pull(tx, TENANT, after, limit)
    return [item.id for item in page.items], page.next_cursor


async def value(db: Database, statement: str) -> Any:
    async with db.autocommit("test.value") as tx:
        return await tx.value(statement)


def named(prefix: str, count: int) -> list[str]:
    return [f"evt_{prefix}{number:03}" for number in range(count)]


def tar(*arguments: str) -> None:
    subprocess.run(["tar", *arguments], check=True, timeout=60)


@pytest.mark.timeout(90)  # a cluster is made and started three times
@pytest.mark.case("S124")
async def test_a_copy_of_the_files_is_followed_without_a_gap(files: Path) -> None:
    """It has the identifier of the lost one, and its transactions have numbers that a follower has passed: who read on is sent back."""
    (files / "copy").mkdir()
    before, lost, since = named("before", 10), named("lost", 15), named("since", 60)
    async with started(files / "own") as db:
        await events(db, *before)
        (_, early), (_, at_the_end) = await pulled(db, limit=4), await pulled(db)
        system = await value(db, f"SELECT {event_log.SERVER}")
    await asyncio.to_thread(tar, "-C", str(files / "own"), "-cf", str(files / "backup.tar"), ".")
    async with started(files / "own") as db:
        await events(db, *lost)
        seen, late = await pulled(db, at_the_end)
        last = await value(db, "SELECT max(position) FROM events")
    await asyncio.to_thread(tar, "-C", str(files / "copy"), "-xpf", str(files / "backup.tar"))

    async with started(files / "copy") as db:
        await events(db, *since)

        assert seen == lost
        assert system == await value(db, f"SELECT {event_log.SERVER}")
        assert await value(db, "SELECT min(position) FROM events WHERE id LIKE 'evt_since%'") <= last
        with pytest.raises(StateConflict, match="start again without it"):
            await pulled(db, late)
        assert (await pulled(db, early))[0] == [*before[4:], *since]
        assert (await pulled(db, at_the_end))[0] == since
        assert (await pulled(db))[0] == [*before, *since]


def dumped(url: str) -> str:
    """What `pg_dump` writes, without what is for psql alone."""
    program = postgres._programs() / "pg_dump"
    done = subprocess.run([program, "--inserts", "--no-owner", url], check=True, capture_output=True, text=True, timeout=60)
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("\\"))


@pytest.mark.timeout(90)  # two clusters are made
@pytest.mark.case("S124")
async def test_a_dump_in_a_new_cluster_is_followed_without_a_gap(files: Path) -> None:
    """Its transactions begin anew, far below: all is shown once and in order at once, and what is new comes behind it."""
    before, since = [f"evt_{letter}" for letter in "fbdaec"], [f"evt_{letter}" for letter in "zyx"]
    async with started(files / "own") as db:
        async with db.autocommit("test.burn") as tx:
            await tx.execute(BURN)
        await events(db, *before)
        _, cursor = await pulled(db, limit=3)
        dump = await asyncio.to_thread(dumped, db._url)
    new = await asyncio.to_thread(postgres.start, files / "new")
    try:
        async with await psycopg.AsyncConnection.connect(new.server.url) as restoring:
            await restoring.execute(dump.encode())
        chosen = settings.load(database_url=SecretStr(new.server.url), secret_key=Fernet.generate_key().decode())
        async with (
            Database(new.server.url, clock=Clock(), faults=Faults()) as db,
            Database(new.server.url, clock=Clock(), faults=Faults()) as other,
        ):
            assert await value(db, "SELECT min(position) > pg_current_xact_id()::text::bigint + 4000 FROM events")
            await asyncio.gather(*(runtime.prepare(new.server.url, chosen, each, migrate=False) for each in (db, other)))
            whole = await pulled(db)
            first, behind = await pulled(db, limit=4)
            await events(other, *since)

            assert whole[0] == before
            assert first == before[:4]
            assert (await pulled(db, behind))[0] == [*before[4:], *since]
            assert (await pulled(db))[0] == [*before, *since]
            with pytest.raises(StateConflict, match="restored"):
                await pulled(db, cursor)
    finally:
        await asyncio.to_thread(new.close)
