"""The one way into PostgreSQL: named transactions on a pool, and running them again when that is safe.

| wanted | call |
| --- | --- |
| several statements that commit together | `async with db.transaction("noun.verb") as tx` |
| the same, run again whole after a deadlock, a lost connection or an unknown COMMIT | `await db.rerun(function, …)` |
| a statement that refuses a transaction block | `async with db.autocommit("noun.verb") as tx` |

A function takes `db` (it owns its transactions) or `tx` (it is part of the caller's), never both. Beginning one inside another is a
programming error that nobody catches.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import socket
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import psycopg
import psycopg_pool
from psycopg import errors as pg
from psycopg.pq import TransactionStatus
from psycopg.rows import class_row, dict_row

from ipn_gateway import logs
from ipn_gateway.errors import CommitUnknown, ConfigurationError, Overloaded, PoolExhausted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults

T = TypeVar("T")

SERVER_VERSION_MIN: Final = 150000
RERUNS_MAX: Final = 5
RERUN_WAIT_SECONDS: Final = 0.05  # doubled each time, times a draw between 0.5 and 1.5
POOL_WAIT_SECONDS: Final = 2.0
WAITERS_PER_CONNECTION: Final = 20
AWAY_SECONDS: Final = 0.25  # after somebody waited in vain nobody waits for so long
STATEMENT_TIMEOUT_SECONDS: Final = 10
LOCK_TIMEOUT_SECONDS: Final = 5
IDLE_IN_TRANSACTION_TIMEOUT_SECONDS: Final = 30
SLOW_TRANSACTION_SECONDS: Final = 1.0
CONNECTION_SECONDS_MAX: Final = 15.0  # from taking a connection to giving it back; a server that is silent keeps none of ours longer
INTAKE_SECONDS_MAX: Final = 4.0  # the same where a sender waits for the answer
RERUN_SECONDS_MAX: Final = 10.0  # no further run begins later than this
PLANS_SECONDS_MIN: Final = 0.5  # for so long a new connection keeps its plans, then twice as long each time, …
PLANS_SECONDS_MAX: Final = 16.0  # … at most so long

_open: ContextVar[str | None] = ContextVar("ipn_open_transaction", default=None)

_RERUN_WHOLE = (pg.SerializationFailure, pg.DeadlockDetected)
_SHUTTING_DOWN = (pg.AdminShutdown, pg.CrashShutdown, pg.CannotConnectNow)


def assert_no_transaction() -> None:
    """Raises `RuntimeError` when this task has an open transaction: nothing foreign is called inside one."""
    if name := _open.get():
        msg = f"something foreign is called inside the transaction {name}"
        raise RuntimeError(msg)


def lost(error: BaseException, connection: psycopg.AsyncConnection[Any] | None = None) -> bool:
    """Whether the error says that the connection is gone, or that its server cannot write (class 08, 57P0x, 25006, or no SQLSTATE)."""
    if isinstance(error, (*_SHUTTING_DOWN, pg.ReadOnlySqlTransaction)):
        return True
    if not isinstance(error, psycopg.OperationalError):
        return False
    state = error.sqlstate
    return state is None or state.startswith("08") or bool(connection and connection.closed)


def _unknown_at_commit(error: BaseException, connection: psycopg.AsyncConnection[Any]) -> bool:
    return lost(error, connection) or isinstance(error, (pg.StatementCompletionUnknown, pg.QueryCanceled))


def refuse_silent_rollback(connection: psycopg.AsyncConnection[Any]) -> None:
    """COMMIT of a failed transaction is answered without an error, and on a connection that is lost already the driver sends none."""
    status = connection.info.transaction_status
    if status == TransactionStatus.UNKNOWN:
        raise psycopg.OperationalError("the connection was lost before COMMIT")
    if status != TransactionStatus.INTRANS:
        raise pg.InFailedSqlTransaction("the transaction cannot be committed: it failed, or it was ended inside its block")


class Connection(psycopg.AsyncConnection[dict[str, Any]]):
    """A connection of a pool. PostgreSQL keeps the plans of its statements, while the tables grow for which they were made."""

    plans_until: float = 0.0  # by the steady counter
    plans_seconds: float = PLANS_SECONDS_MIN / 2


class Transaction:
    """An open, named transaction. Rows come back as models (dataclasses or Pydantic) or as dicts."""

    __slots__ = ("_faults", "_statements", "connection", "name")

    def __init__(self, connection: Connection, name: str, faults: Faults) -> None:
        self.connection = connection
        self.name = name
        self._faults = faults
        self._statements = 0

    async def execute(self, sql: str, parameters: Mapping[str, Any] | None = None) -> int:
        """Run a statement; how many rows it touched."""
        return (await self._run(sql, parameters, dict_row)).rowcount

    async def all(self, model: type[T], sql: str, parameters: Mapping[str, Any] | None = None) -> list[T]:
        """Every row, as `model` (`dict` for a plain one)."""
        return await (await self._run(sql, parameters, _row_factory(model))).fetchall()

    async def one(self, model: type[T], sql: str, parameters: Mapping[str, Any] | None = None) -> T | None:
        """The first row as `model`, or None."""
        return await (await self._run(sql, parameters, _row_factory(model))).fetchone()

    async def _run(self, sql: str, parameters: Mapping[str, Any] | None, row_factory: Any) -> psycopg.AsyncCursor[Any]:
        """Has the fault point `name:statement_N` behind the Nth statement."""
        cursor = self.connection.cursor(row_factory=row_factory)
        await cursor.execute(sql, parameters)
        self._statements += 1
        await self._faults.at(f"{self.name}:statement_{self._statements}")
        return cursor

    async def value(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Any:
        """The first column of the first row, or None."""
        row = await self.one(dict, sql, parameters)
        return next(iter(row.values())) if row else None


def _row_factory(model: type[Any]) -> Any:
    return dict_row if model is dict else class_row(model)


class Database:
    """A pool of connections to one server; `name` labels it, so that intake, workers and API have shares of their own."""

    def __init__(self, url: str, *, clock: Clock, faults: Faults, name: str = "web", connections_max: int = 10) -> None:
        self.clock = clock
        self.faults = faults
        self.name = name
        self._url = url
        self._waiters = 0
        self._waiters_max = connections_max * WAITERS_PER_CONNECTION
        self._away_until = 0.0
        self._log = logs.get("db")
        self._pool: psycopg_pool.AsyncConnectionPool[Connection] = psycopg_pool.AsyncConnectionPool(  # noqa: TID251 - its home
            url,
            name=f"ipn-{name}",
            min_size=1,
            max_size=connections_max,
            timeout=POOL_WAIT_SECONDS,
            reconnect_timeout=POOL_WAIT_SECONDS,  # then the next caller tries again at once, however long the server was away
            open=False,
            connection_class=Connection,
            configure=_configure,
            kwargs={"row_factory": dict_row, "autocommit": True, "application_name": f"ipn-gateway {name}", "tcp_user_timeout": 10000}
            | {"client_encoding": "UTF8"},  # sets are written in it
        )

    def __repr__(self) -> str:
        return f"Database(name={self.name!r})"

    @property
    def taken(self) -> int:
        """Connections in use now."""
        stats = self._pool.get_stats()
        return stats["pool_size"] - stats["pool_available"]

    @property
    def waiting(self) -> int:
        """Callers that wait for a connection now."""
        return self._waiters

    async def open(self) -> None:
        """Open the pool and look at the server. Raises `ConfigurationError` when it cannot be used safely."""
        await self._pool.open()
        try:
            await self._pool.wait(timeout=10)
        except psycopg_pool.PoolTimeout:
            await self._pool.close()
            raise ConfigurationError("The database cannot be reached: check IPN_DATABASE_URL and that the server is up.") from None
        try:
            async with self.autocommit("db.check") as tx:
                await _refuse_unsafe_server(tx)
        except ConfigurationError:
            await self._pool.close()
            raise

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def transaction(self, name: str, *, seconds_max: float = CONNECTION_SECONDS_MAX) -> AsyncIterator[Transaction]:
        """A transaction that commits when the block ends and rolls back when it raises.

        After `seconds_max` its connection is cut, whatever the server does. Has the fault points `name:before_commit` and
        `name:after_commit`. Raises `CommitUnknown` when the connection was lost at COMMIT, `PoolExhausted` when no connection became free
        in time, and `RuntimeError` inside another transaction.
        """
        self._refuse_nesting(name)
        committing = False
        async with self._connection(seconds_max) as connection:
            _open.set(name)
            started = self.clock.monotonic_seconds()
            try:
                async with connection.transaction():
                    await self._shift_clock(connection, local=True)
                    yield Transaction(connection, name, self.faults)
                    await self.faults.at(f"{name}:before_commit")
                    refuse_silent_rollback(connection)
                    committing = True
                _open.set(None)
                await self.faults.at(f"{name}:after_commit")
            except psycopg.Error as error:
                if isinstance(error, pg.ReadOnlySqlTransaction):
                    await connection.close()  # a demoted server: the pool makes a new connection, to the primary
                if committing and _unknown_at_commit(error, connection):
                    raise CommitUnknown(transaction=name) from error
                raise
            finally:
                _open.set(None)
                self._measure(name, self.clock.monotonic_seconds() - started)

    @asynccontextmanager
    async def autocommit(self, name: str, *, seconds_max: float = CONNECTION_SECONDS_MAX) -> AsyncIterator[Transaction]:
        """A connection on which each statement commits by itself, for single reads and for what refuses a transaction block."""
        self._refuse_nesting(name)
        async with self._connection(seconds_max) as connection:
            await self._shift_clock(connection, local=False)
            try:
                yield Transaction(connection, name, self.faults)
            except pg.ReadOnlySqlTransaction:
                await connection.close()  # as above
                raise
            finally:
                if self.clock.offset and not connection.closed:
                    await connection.execute("SELECT set_config('ipn.clock_offset', '', false)")

    async def rerun(
        self, function: Callable[..., Awaitable[T]], *arguments: Any, within_seconds: float = RERUN_SECONDS_MAX, **named: Any
    ) -> T:
        """Run a function that holds exactly one transaction; again, whole, on a new connection, when its outcome is none or unknown.

        40001 and 40P01, a lost connection and an unknown COMMIT are run again with jitter, at most five times in all, and none that would
        begin after `within_seconds`; the function reads its own row first and so finds its own success. Raises `Overloaded` when that did
        not help.
        """
        began = self.clock.monotonic_seconds()
        for attempt in range(1, RERUNS_MAX + 1):
            try:
                return await function(*arguments, **named)
            except (psycopg.Error, CommitUnknown) as error:
                if not isinstance(error, (*_RERUN_WHOLE, CommitUnknown)) and not lost(error):
                    raise
                logs.count("transactions.rerun")
                self._log.warning(
                    "transaction.rerun", function=function.__qualname__, attempt=attempt, sqlstate=getattr(error, "sqlstate", None)
                )
                if attempt == RERUNS_MAX or self.clock.monotonic_seconds() - began > within_seconds:
                    raise Overloaded from error
                await asyncio.sleep(RERUN_WAIT_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        raise AssertionError

    @asynccontextmanager
    async def _connection(self, seconds_max: float) -> AsyncIterator[Connection]:
        """A connection of the pool whose server has not hung up; its socket is shut down after `seconds_max`."""
        while _hung_up(connection := await self._taken()):
            await connection.close()
            await self._pool.putconn(connection)
        watchdog = asyncio.get_running_loop().call_later(seconds_max, _shut_down, connection)
        try:
            await self._forget_old_plans(connection)
            yield connection
        finally:
            watchdog.cancel()
            await self._pool.putconn(connection)

    async def _forget_old_plans(self, connection: Connection) -> None:
        """Plans made for a small table read all of it, or the wrong index; those of foreign keys' checks too. Autovacuum may take a minute.

        So while a connection is young they are made anew each time its age has doubled, and later on every few seconds.
        """
        now = self.clock.monotonic_seconds()
        if now < connection.plans_until:
            return
        if connection.plans_until:
            await connection.execute("DISCARD PLANS")
        connection.plans_seconds = min(2 * connection.plans_seconds, PLANS_SECONDS_MAX)
        connection.plans_until = now + connection.plans_seconds

    async def _taken(self) -> Connection:
        """The pool's own limit of waiters counts those that gave up long ago, and would keep a server that is back away; so ours counts."""
        if self._waiters >= self._waiters_max or self.clock.monotonic_seconds() < self._away_until:
            logs.count("pool.refused")
            raise PoolExhausted(pool=self.name)
        self._waiters += 1
        try:
            return await self._pool.getconn()
        except psycopg_pool.PoolTimeout:
            self._away_until = self.clock.monotonic_seconds() + AWAY_SECONDS
            logs.count("pool.exhausted")
            raise PoolExhausted(pool=self.name) from None
        finally:
            self._waiters -= 1

    async def _shift_clock(self, connection: Connection, *, local: bool) -> None:
        if self.clock.offset:
            offset = f"{self.clock.offset.total_seconds()} seconds"
            await connection.execute("SELECT set_config('ipn.clock_offset', %s, %s)", (offset, local))

    def _refuse_nesting(self, name: str) -> None:
        if outer := _open.get():
            msg = f"the transaction {name} begins inside {outer}; take tx instead of db"
            raise RuntimeError(msg)

    def _measure(self, name: str, seconds: float) -> None:
        logs.count(f"transactions.{name}")
        if seconds > SLOW_TRANSACTION_SECONDS:
            self._log.warning("transaction.slow", transaction=name, duration_ms=round(seconds * 1000))


def _hung_up(connection: Connection) -> bool:
    """Whether the server closed the connection while it was idle: only then there is something to read, the end of the stream."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _shut_down(connection: Connection) -> None:
    """End a wait for a silent server: what waits sees a lost connection, the driver's own cancelling would wait for the server too."""
    logs.count("connections.cut")
    logs.get("db").error("connection.cut", backend=connection.info.backend_pid)
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as doubled:
        doubled.shutdown(socket.SHUT_RDWR)


async def _configure(connection: Connection) -> None:
    """Without JIT: where tables are large, compiling a look-up would take longer than it does."""
    await connection.execute(
        f"""SELECT set_config('statement_timeout', '{STATEMENT_TIMEOUT_SECONDS}s', false),
                   set_config('lock_timeout', '{LOCK_TIMEOUT_SECONDS}s', false),
                   set_config('idle_in_transaction_session_timeout', '{IDLE_IN_TRANSACTION_TIMEOUT_SECONDS}s', false),
                   set_config('jit', 'off', false),
                   set_config('timezone', 'UTC', false), set_config('datestyle', 'ISO', false)"""
    )


async def _refuse_unsafe_server(tx: Transaction) -> None:
    row = await tx.one(
        dict,
        """SELECT current_setting('server_version_num')::int AS version, current_setting('fsync') AS fsync,
                  current_setting('full_page_writes') AS full_page_writes, current_setting('synchronous_commit') AS synchronous_commit,
                  current_setting('server_encoding') AS encoding, pg_is_in_recovery() AS standby""",
    )
    assert row is not None  # noqa: S101 - a SELECT without FROM gives a row
    if row["version"] < SERVER_VERSION_MIN:
        raise ConfigurationError(f"PostgreSQL 15 or newer is needed; this server is {row['version'] // 10000}.")
    if row["standby"]:
        raise ConfigurationError(
            "This server is a read-only standby: give the primary, or several hosts with target_session_attrs=read-write."
        )
    if row["encoding"] != "UTF8":
        raise ConfigurationError(f"This database is in {row['encoding']}, which cannot keep every notification: make one in UTF8.")
    unsafe = [name for name in ("fsync", "full_page_writes", "synchronous_commit") if row[name] == "off"]
    if unsafe:
        raise ConfigurationError(f"The server would lose what it acknowledged: switch {', '.join(unsafe)} on.")
