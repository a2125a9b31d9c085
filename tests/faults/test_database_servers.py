"""The database's server goes away, fills its disk or is no longer the primary: a definite answer each time, and no restart of the gateway.

The server is one of the test's own, with a standby where that is told, so that nobody else's goes away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy

from ipn_gateway import migrations, postgres
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from tests.acting import UNAVAILABLE, definite, opened
from tests.conftest import MEMORY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ipn_gateway.postgres import Handle

SECONDS = 60
MEGABYTE = 1 << 20


@pytest.fixture
def files() -> Iterator[Path]:
    """A place for servers, whose path is short enough for their sockets."""
    place = Path(tempfile.mkdtemp(prefix="ipn-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    place.chmod(0o711)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
async def handle(files: Path) -> AsyncIterator[Handle]:
    """A server of the test's own, migrated."""
    handle = await asyncio.to_thread(postgres.start, files / "own")
    try:
        async with Database(handle.server.url, clock=Clock(), faults=Faults(), name="maintenance") as db:
            await migrations.migrate(handle.server.url, db)
        yield handle
    finally:
        await asyncio.to_thread(handle.close)


async def look(url: str, statement: str) -> Any:
    """The first column of the first row, where there is one, by a connection that is for this alone."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as direct:
        cursor = await direct.execute(statement)
        row = await cursor.fetchone() if cursor.description else None
        return row and row[0]


@pytest.mark.timeout(60)  # making a server and starting it again takes seconds
@pytest.mark.case("S103", "S115")
async def test_a_server_that_crashes_and_starts_again(handle: Handle, clock: Clock, faults: Faults) -> None:
    """Notifications, orders and refunds go on while it does: all that was accepted is there, once, and the rest was a 503."""
    url = handle.server.url
    async with opened(url, url, clock, faults) as gateway:
        things = [await gateway.prepared(act) for act in ("refund", "deliver", "apply", "notify", "create") * 2]
        restart = asyncio.to_thread(handle._run, "pg_ctl", "restart", "--silent", "--mode=immediate", seconds=SECONDS)
        told, _ = await asyncio.gather(asyncio.gather(*(thing.do() for thing in things)), restart)
        for thing in things:
            if await thing.times() != 1:
                await thing.until_done()

        assert [(thing.act, await thing.times()) for thing in things] == [(thing.act, 1) for thing in things]
    assert definite([*told, *gateway.told])


# A full disk


@contextlib.contextmanager
def small_disk(place: Path, owner: int) -> Iterator[Path | None]:
    """A file system of 32 MB; None where mounting is refused."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        yield None
        return
    try:
        os.chown(place, owner, owner)
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.asynccontextmanager
async def full(handle: Handle, disk: Path | None) -> AsyncIterator[None]:
    """The disk is full while the block runs; where there is none of its own, the server says that it is."""
    url = handle.server.url
    if disk is None:
        await look(url, "CREATE TABLE refusals (state text)")
        await look(
            url,
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100'; END $$",
        )
        await look(url, "CREATE TRIGGER refuse AFTER INSERT ON inbox FOR EACH ROW EXECUTE FUNCTION refuse()")
        yield
        await look(url, "DROP TRIGGER refuse ON inbox")
        return
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(MEGABYTE))
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(512))
    yield
    ballast.unlink()


@pytest.mark.timeout(60)  # making a server takes seconds
@pytest.mark.case("S115")
async def test_a_full_disk_is_a_503_until_there_is_room(handle: Handle, files: Path, clock: Clock, faults: Faults) -> None:
    """53100: what cannot be stored is not acknowledged, nothing is stored by halves, and with room again all goes on."""
    url = handle.server.url
    with small_disk(files / "small", handle._user()) as disk:
        if disk is not None:
            await look(url, f"CREATE TABLESPACE small LOCATION '{disk}'")
            await look(url, "CREATE DATABASE on_small TEMPLATE ipn TABLESPACE small")
            url = sqlalchemy.make_url(url).set(database="on_small").render_as_string(hide_password=False)
        async with opened(url, url, clock, faults) as gateway:
            thing = await gateway.prepared("notify")
            thing.fields = gateway.world.signed(thing.fields, value_d=secrets.token_hex(20_000))  # needs pages of its own
            async with full(handle, disk):
                told = [await thing.do() for _ in range(12)]
                stored = await gateway.count("SELECT count(*) FROM notification_deliveries")
                queued = await gateway.count("SELECT count(*) FROM inbox")
            after = await thing.do()

            assert UNAVAILABLE in told
            assert set(told) <= {200, UNAVAILABLE}
            assert (stored, queued) == (told.count(200), told.count(200))
            assert after == 200
            assert await gateway.world.drain() == stored + 1
        if disk is not None:
            await look(handle.server.url, "DROP DATABASE on_small WITH (FORCE)")
            await look(handle.server.url, "DROP TABLESPACE small")


# A failover


@contextlib.asynccontextmanager
async def standby_of(handle: Handle, files: Path) -> AsyncIterator[str]:
    """A streaming standby of the server; gives the directory of its socket."""
    data, sockets, user = files / "standby", files / "sockets", handle._user()
    for directory in (data, sockets):
        directory.mkdir(mode=0o700)
        os.chown(directory, user if os.geteuid() == 0 else -1, -1)
    await asyncio.to_thread(
        handle._run, "pg_basebackup", "-D", str(data), "-R", "-X", "stream", "-c", "fast", "-d", handle.server.url, seconds=SECONDS
    )
    options = f"-c port={postgres.PORT} -c listen_addresses= -c unix_socket_directories={sockets}"
    started = ("start", "--silent", f"--timeout={SECONDS}", f"--options={options}", f"--log={files / 'standby.log'}")
    (files / "standby.log").touch()
    os.chown(files / "standby.log", user if os.geteuid() == 0 else -1, -1)
    await asyncio.to_thread(handle._run, "pg_ctl", *started, seconds=SECONDS, data=data)
    try:
        yield str(sockets)
    finally:
        await asyncio.to_thread(handle._run, "pg_ctl", "stop", "--silent", "--mode=immediate", seconds=SECONDS, data=data)


@pytest.mark.timeout(90)  # two servers
@pytest.mark.case("S104")
async def test_after_a_failover_the_gateway_finds_the_new_primary(handle: Handle, files: Path, clock: Clock, faults: Faults) -> None:
    """The old primary only reads now and keeps our connections: each act leaves it, and is done once, on the promoted standby."""
    old = handle.server.url
    async with standby_of(handle, files) as sockets:
        own = sqlalchemy.make_url(old)
        new = own.update_query_dict({"host": sockets}).render_as_string(hide_password=False)
        hosts = {"host": f"{handle.server.socket_dir},{sockets}", "port": f"{postgres.PORT},{postgres.PORT}"}
        both = own.update_query_dict(hosts | {"target_session_attrs": "read-write"}).render_as_string(hide_password=False)
        async with opened(both, new, clock, faults) as gateway:
            things = [await gateway.prepared(act) for act in ("refund", "deliver", "apply", "notify", "create")]
            await look(old, "SELECT count(*) FROM orders")
            written = await look(old, "SELECT pg_current_wal_lsn()")
            while not await look(new, f"SELECT pg_last_wal_replay_lsn() >= '{written}'"):  # noqa: ASYNC110 - only the standby can tell
                await asyncio.sleep(0)
            await look(old, "ALTER SYSTEM SET default_transaction_read_only = on")
            await look(old, "SELECT pg_reload_conf()")
            assert await look(new, "SELECT pg_promote(wait_seconds => 30)")
            told = [await thing.do() for thing in things]
            for thing in things:
                if await thing.times() != 1:
                    await thing.until_done()

            assert [(thing.act, await thing.times()) for thing in things] == [(thing.act, 1) for thing in things]
        await look(old, "SET default_transaction_read_only = off")
    assert definite(told)
    assert told[3] == 200


@pytest.mark.timeout(90)  # two servers
@pytest.mark.case("S104", "S115")
async def test_while_there_is_only_a_standby_everybody_hears_so(handle: Handle, files: Path, clock: Clock, faults: Faults) -> None:
    """The primary is gone and nobody was promoted yet: 503 and no 500; with the promotion everything works."""
    async with standby_of(handle, files) as sockets:
        own = sqlalchemy.make_url(handle.server.url)
        new = own.update_query_dict({"host": sockets}).render_as_string(hide_password=False)
        hosts = {"host": f"{handle.server.socket_dir},{sockets}", "port": f"{postgres.PORT},{postgres.PORT}"}
        both = own.update_query_dict(hosts | {"target_session_attrs": "read-write"}).render_as_string(hide_password=False)
        async with opened(both, new, clock, faults) as gateway:
            things = [await gateway.prepared(act) for act in ("notify", "create")]
            written = await look(handle.server.url, "SELECT pg_current_wal_lsn()")
            while not await look(new, f"SELECT pg_last_wal_replay_lsn() >= '{written}'"):  # noqa: ASYNC110 - only the standby can tell
                await asyncio.sleep(0)
            await asyncio.to_thread(handle._run, "pg_ctl", "stop", "--silent", "--mode=immediate", seconds=SECONDS)
            told = [await thing.do() for thing in things]
            assert await look(new, "SELECT pg_promote(wait_seconds => 30)")
            async with asyncio.timeout(30):
                while (await gateway.client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - only an answer can tell
                    await asyncio.sleep(0)
            for thing in things:
                await thing.until_done()

            assert [await thing.times() for thing in things] == [1, 1]
    assert told == [UNAVAILABLE, UNAVAILABLE]
