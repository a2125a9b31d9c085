"""Named transactions: what they refuse, and when they are run again."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql
from sqlalchemy import make_url

from ipn_gateway.clock import Clock
from ipn_gateway.db import PLANS_SECONDS_MIN, RERUNS_MAX, Database, assert_no_transaction
from ipn_gateway.errors import ConfigurationError, Overloaded, PoolExhausted
from ipn_gateway.faults import Faults

if TYPE_CHECKING:
    from ipn_gateway.db import Transaction

ADD = "INSERT INTO order_slots (tenant_id, order_id) VALUES ('shop', %(id)s)"
COUNT = "SELECT count(*) FROM order_slots"


async def count(db: Database) -> int:
    async with db.autocommit("test.count") as tx:
        return int(await tx.value(COUNT))


async def test_a_block_that_ends_commits_and_one_that_raises_rolls_back(db: Database) -> None:
    """All of a transaction or nothing of it."""
    async with db.transaction("test.kept") as tx:
        await tx.execute(ADD, {"id": "kept"})
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
        async with db.transaction("test.lost") as tx:
            await tx.execute(ADD, {"id": "lost"})
            raise ZeroDivisionError

    assert await count(db) == 1


async def test_nesting_is_refused_and_the_outer_transaction_can_go_on(db: Database) -> None:
    """Beginning one inside another is a programming error, and so is a foreign call."""
    async with db.transaction("test.outer") as tx:
        with pytest.raises(RuntimeError, match=r"test\.inner begins inside test\.outer"):
            async with db.transaction("test.inner"):
                pass
        with pytest.raises(RuntimeError, match=r"inside the transaction test\.outer"):
            assert_no_transaction()
        await tx.execute(ADD, {"id": "a"})
    assert_no_transaction()

    assert await count(db) == 1


async def test_the_connection_of_a_transaction_refuses_to_commit(db: Database) -> None:
    """Whoever gets the connection inside the transaction cannot end it."""
    async with db.transaction("test.guarded") as tx:
        with pytest.raises(psycopg.ProgrammingError):
            await tx.connection.commit()
        with pytest.raises(psycopg.ProgrammingError):
            await tx.connection.rollback()


@pytest.mark.case("S48")
async def test_sql_sees_the_moved_clock_inside_and_outside_transactions(db: Database, clock: Clock) -> None:
    """The offset of the clock is what tests move; another transaction afterwards sees the new one."""
    async with db.autocommit("test.now") as tx:
        before = await tx.value("SELECT ipn_now()")
    clock.advance(hours=5)
    async with db.transaction("test.now") as tx:
        inside = await tx.value("SELECT ipn_now()")
    async with db.autocommit("test.now") as tx:
        outside = await tx.value("SELECT ipn_now()")

    assert timedelta(hours=5) <= inside - before < timedelta(hours=5, minutes=1)
    assert timedelta(hours=5) <= outside - before < timedelta(hours=5, minutes=1)


@pytest.mark.case("S101")
@pytest.mark.parametrize("error", [pg.SerializationFailure, pg.DeadlockDetected])
async def test_a_serialization_failure_or_deadlock_is_run_again_whole(db: Database, faults: Faults, error: type[Exception]) -> None:
    """The function runs until it gets through; what the failed runs wrote is gone."""
    failures = iter([error("one"), error("two")])

    async def fail() -> None:
        if found := next(failures, None):
            raise found

    faults.on["test.add:before_commit"] = fail
    runs = await db.rerun(adding, db, [])

    assert (runs, await count(db)) == (3, 1)


@pytest.mark.case("S101")
async def test_what_never_gets_through_ends_as_overloaded(db: Database, faults: Faults) -> None:
    """Bounded: after five runs the caller answers 503, or leaves the row to its lease."""

    async def fail() -> None:
        raise pg.SerializationFailure

    faults.on["test.add:before_commit"] = fail
    runs: list[int] = []

    with pytest.raises(Overloaded):
        await db.rerun(adding, db, runs)

    assert (len(runs), await count(db)) == (RERUNS_MAX, 0)


async def test_any_other_database_error_is_not_run_again(db: Database, faults: Faults) -> None:
    """A unique violation says something; running it again would say it again."""
    await db.rerun(adding, db, [])
    runs: list[int] = []

    with pytest.raises(pg.UniqueViolation):
        await db.rerun(adding, db, runs)

    assert len(runs) == 1


@pytest.mark.case("S103")
async def test_a_connection_that_is_cut_before_commit_is_replaced(db: Database, database_url: str, faults: Faults) -> None:
    """The backend is terminated in mid-transaction; the function runs again on a new connection."""
    victims: list[int] = []

    async def terminate() -> None:
        if len(victims) == 1:
            async with await psycopg.AsyncConnection.connect(database_url) as other:
                await other.execute("SELECT pg_terminate_backend(%s, 5000)", (victims[0],))

    async def add(tx: Transaction) -> None:
        victims.append(await tx.value("SELECT pg_backend_pid()"))
        await tx.execute("SELECT 'terminated behind this one'")
        await tx.execute("SELECT 'fails in the first run'")

    faults.on["test.add:statement_3"] = terminate
    runs = await db.rerun(adding, db, [], add)

    assert (runs, await count(db)) == (2, 1)


@pytest.mark.case("S103")
async def test_a_block_on_a_lost_connection_does_not_pass_for_a_commit(database_url: str, clock: Clock) -> None:
    """The driver leaves the block of a dead connection in silence; that must not look like success."""
    faults = Faults()
    async with Database(database_url, clock=clock, faults=faults) as db:
        with pytest.raises(psycopg.OperationalError):  # noqa: PT012 - the block is what is tested
            async with db.transaction("test.cut") as tx:
                await tx.execute(ADD, {"id": "a"})
                backend = tx.connection

                async def cut() -> None:
                    backend.pgconn.finish()

                faults.on["test.cut:before_commit"] = cut

        assert await count(db) == 0


async def test_a_failed_statement_that_is_swallowed_does_not_pass_for_a_commit(db: Database) -> None:
    """PostgreSQL answers COMMIT of a failed transaction with ROLLBACK and no error; that must not look like success."""
    with pytest.raises(pg.InFailedSqlTransaction):  # noqa: PT012 - the block is what is tested
        async with db.transaction("test.swallows") as tx:
            await tx.execute(ADD, {"id": "a"})
            with pytest.raises(pg.UndefinedTable):
                await tx.execute("SELECT * FROM nowhere")

    assert await count(db) == 0


async def test_a_transaction_that_was_ended_inside_its_block_is_an_error(db: Database) -> None:
    """COMMIT as a statement gets past the driver; the block says so."""
    with pytest.raises(pg.InFailedSqlTransaction):
        async with db.transaction("test.ended") as tx:
            await tx.execute("COMMIT")


async def test_a_server_that_falls_silent_keeps_nobody_waiting(db: Database) -> None:
    """Its process is stopped in mid-transaction: the connection is cut at the limit, and the next one works."""
    async with db.transaction("test.warm") as tx:
        await tx.execute(ADD, {"id": "before"})
    with pytest.raises(psycopg.OperationalError):  # noqa: PT012 - the block is what is tested
        async with db.transaction("test.silent", seconds_max=0.3) as tx:
            backend = int(await tx.value("SELECT pg_backend_pid()"))
            os.kill(backend, signal.SIGSTOP)
            try:
                await tx.execute(ADD, {"id": "never"})
            finally:
                os.kill(backend, signal.SIGCONT)

    assert await count(db) == 1


async def test_connections_that_died_while_idle_are_not_handed_out(db: Database, database_url: str) -> None:
    """After a restart of the server the pool is full of dead connections; nobody gets one."""
    async with db.transaction("test.warm") as tx:
        backend = await tx.value("SELECT pg_backend_pid()")
    async with await psycopg.AsyncConnection.connect(database_url) as other:
        await other.execute("SELECT pg_terminate_backend(%s, 5000)", (backend,))

    assert await count(db) == 0


async def test_plans_are_made_anew_while_tables_grow(database_url: str, faults: Faults) -> None:
    """A plan for an empty table is not kept until statistics come, but only until the age of its connection has doubled."""

    class Counter(Clock):
        at = 1000.0

        @classmethod
        def monotonic_seconds(cls) -> float:
            return cls.at

    async def expected(tx: Transaction) -> int:
        plan = await tx.value("EXPLAIN (FORMAT JSON) EXECUTE slots")
        return int(plan[0]["Plan"]["Plan Rows"])

    async with Database(database_url, clock=Counter(), faults=faults, connections_max=1) as db:
        async with db.transaction("test.grow") as tx:
            await tx.execute("PREPARE slots AS SELECT FROM order_slots")
            planned = await expected(tx)
            await tx.execute("INSERT INTO order_slots (tenant_id, order_id) SELECT 'shop', n::text FROM generate_series(1, 20000) AS n")
            kept = await expected(tx)
        Counter.at += PLANS_SECONDS_MIN
        async with db.autocommit("test.look") as tx:
            anew = await expected(tx)

    assert planned == kept < anew


async def test_text_goes_over_in_utf8(database_url: str, clock: Clock) -> None:
    """Whatever the environment or the URL says: sets are written in it."""
    url = f"{database_url}{'&' if '?' in database_url else '?'}client_encoding=LATIN1"
    async with Database(url, clock=clock, faults=Faults(), connections_max=1) as db, db.autocommit("test.look") as tx:
        assert await tx.value("SHOW client_encoding") == "UTF8"


async def test_a_database_that_cannot_keep_every_text_is_refused(database_url: str, clock: Clock) -> None:
    """Bytes and texts of others are kept as they came."""
    name = "in_latin1"
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        await connection.execute(f"CREATE DATABASE {name} ENCODING LATIN1 LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0")
        try:
            url = make_url(database_url).set(database=name).render_as_string(hide_password=False)
            with pytest.raises(ConfigurationError, match="make one in UTF8"):
                async with Database(url, clock=clock, faults=Faults(), connections_max=1):
                    pass
        finally:
            await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_no_look_up_is_compiled(db: Database) -> None:
    """Where the server can compile statements, of large tables it would at each, for longer than they take."""
    async with db.autocommit("test.look") as tx:
        assert await tx.value("SHOW jit") == "off"


async def test_an_exhausted_pool_says_so_quickly(database_url: str, clock: Clock) -> None:
    """One connection, taken: the next one does not wait for long."""
    async with Database(database_url, clock=clock, faults=Faults(), connections_max=1) as db, db.transaction("test.holds"):

        async def second() -> None:
            async with db.autocommit("test.waits"):
                pass

        with pytest.raises(PoolExhausted):
            await asyncio.get_running_loop().create_task(second(), context=contextvars.Context())  # as another request would


@pytest.mark.parametrize("style", ["German", "SQL, DMY", "Postgres, MDY"])
async def test_times_are_read_whatever_style_the_server_shows_them_in(database_url: str, clock: Clock, style: str) -> None:
    """It is set for each session, as the time zone is."""
    name = sql.Identifier(make_url(database_url).database or "")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("ALTER DATABASE {} SET datestyle = {}").format(name, style))
    async with Database(database_url, clock=clock, faults=Faults(), connections_max=1) as db, db.autocommit("test.look") as tx:
        now = await tx.value("SELECT ipn_now()")

    assert abs(now - clock.now()) < timedelta(minutes=1)


async def test_a_server_that_cannot_be_reached_is_refused_with_a_sentence(tmp_path) -> None:
    """No traceback of a driver: what to check."""
    db = Database(f"postgresql://x@/x?host={tmp_path}", clock=Clock(), faults=Faults())

    with pytest.raises(ConfigurationError, match="cannot be reached"):
        await db.open()


async def adding(db: Database, runs: list[int], also=None) -> int:
    """One transaction that adds the same row; how often it was run."""
    runs.append(1)
    async with db.transaction("test.add") as tx:
        await tx.execute(ADD, {"id": "a"})
        if also:
            await also(tx)
    return len(runs)


@pytest.mark.case("S104")
async def test_a_server_that_would_lose_commits_is_refused(database_url: str, clock: Clock, faults: Faults):
    """Where commits do not wait for the disk a 2xx would promise nothing: the start says what to switch on."""
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        await connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(sql.Identifier(connection.info.dbname)))

    with pytest.raises(ConfigurationError, match="switch synchronous_commit on"):
        async with Database(database_url, clock=clock, faults=faults, connections_max=1):
            pass
