"""What all comparisons share: one durable PostgreSQL in a directory of its own, databases in it, and the other sides in processes.

The server has the settings that the gateway always gives its embedded one (fsync, full_page_writes and synchronous_commit on), and beside
them pg_stat_statements, which counts nothing but in the database of the comparison that asks for it. Nothing of the machine's `IPN_…`
settings gets in here, and the directory is removed at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import psycopg
from cryptography.fernet import Fernet
from psycopg import sql
from pydantic import SecretStr

from ipn_gateway import migrations, postgres
from ipn_gateway.bench import processes
from ipn_gateway.bench.comparison import Broken
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from ipn_gateway.vault import Vault

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from ipn_gateway.bench.processes import Started

TEMPLATE: Final = "bench_template"
PROGRAMS: Final = "ipn_gateway.bench"
CALL_SECONDS_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: `count` notifications a measurement, open loops of `seconds`, rows and times of what takes long."""

    turns: int
    count: int
    seconds: float
    ledger_rows: int
    deliveries: int
    soak_seconds: float
    backlog: int
    hanging_seconds: float
    hanging_due: int = 10_000


FULL: Final = Size(
    turns=3,
    count=4000,
    seconds=10,
    ledger_rows=10_000_000,
    deliveries=5_000_000,
    soak_seconds=600,
    backlog=1_000_000,
    hanging_seconds=60,  # as long as autovacuum's cycle: its second of work is more than the slowest hundredth of a shorter time
)
QUICK: Final = Size(
    turns=2, count=1200, seconds=4, ledger_rows=100_000, deliveries=100_000, soak_seconds=15, backlog=50_000, hanging_seconds=8
)


def tiny(count: int) -> Size:
    """So little that only the counts mean something."""
    return Size(
        turns=1,
        count=count,
        seconds=1,
        ledger_rows=10 * count,
        deliveries=10 * count,
        soak_seconds=3,
        backlog=10 * count,
        hanging_seconds=1.5,
        hanging_due=count,
    )


class OtherSide:
    """A bare provider or receiver, in a process of its own."""

    def __init__(self, program: Started, client: httpx.AsyncClient) -> None:
        self.program = program
        self.url = program.url
        self._client = client

    async def ask(self, question: str, **given: str | float) -> Any:
        """Steer it, or ask it how things stand."""
        answer = await self._client.get(f"{self.url}/_{question}", params=given)
        return answer.raise_for_status().json()


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that was started. `say` tells a person how far it is."""

    size: Size
    directory: Path
    url: str = field(repr=False)
    provider: OtherSide
    receiver: OtherSide
    vault: Vault
    environment: dict[str, str] = field(repr=False)
    say: Callable[[str], None]
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextlib.asynccontextmanager
    async def database(self, *, template: str = TEMPLATE) -> AsyncIterator[str]:
        """The URL of a database of its own, with the schema and no rows; dropped afterwards."""
        name = f"bench_{next(self.numbers)}"
        await _run(self.url, "CREATE DATABASE {} TEMPLATE {}", name, template)
        try:
            yield _url_of(self.url, name)
        finally:
            await _run(self.url, "DROP DATABASE {} WITH (FORCE)", name)

    @contextlib.asynccontextmanager
    async def gateway(self, url: str, *, roles: str = "") -> AsyncIterator[Started]:
        """`serve` on that database, in a process of its own."""
        given = ("--roles", roles) if roles else ()
        async with self.run(*processes.GATEWAY, *given, IPN_DATABASE_URL=url) as program:
            yield program

    @contextlib.asynccontextmanager
    async def program(self, name: str, *arguments: str) -> AsyncIterator[Started]:
        """One of the benchmark's own programs."""
        async with self.run(PROGRAMS, name, *arguments) as program:
            yield program

    @contextlib.asynccontextmanager
    async def run(self, module: str, *arguments: str, **environment: str) -> AsyncIterator[Started]:
        """A module in a process of its own."""
        log = self.directory / f"{next(self.numbers)}.log"
        async with processes.started(module, *arguments, log=log, environment=self.environment | environment) as program:
            yield program

    def cut_logs(self) -> None:
        """Empty what the processes have logged, so that a long run does not fill the disk."""
        for log in self.directory.glob("*.log"):
            os.truncate(log, 0)

    def postgres_cpu_seconds(self) -> float:
        """The processor time of all the server's processes."""
        main = int((self.directory / postgres.NAME / "postmaster.pid").read_text().split()[0])
        return processes.family_cpu_seconds(main)


@contextlib.asynccontextmanager
async def opened(size: Size, say: Callable[[str], None]) -> AsyncIterator[Stage]:
    """Start what all comparisons share; stop and remove it afterwards."""
    key = Fernet.generate_key().decode()
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(_directory()))
        environment = _environment(directory, key)
        url = await stack.enter_async_context(_server(directory))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=CALL_SECONDS_MAX, trust_env=False))
        provider, receiver = [
            OtherSide(
                await stack.enter_async_context(processes.started(PROGRAMS, name, log=directory / f"{name}.log", environment=environment)),
                client,
            )
            for name in ("provider", "receiver")
        ]
        yield Stage(size, directory, url, provider, receiver, Vault([SecretStr(key)]), environment, say)


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="ipn-bench-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _environment(directory: Path, key: str) -> dict[str, str]:
    """Ours without its settings: the gateways run with the defaults, but that they may call loopback addresses."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("IPN_", "PG"))}
    return inherited | {"IPN_DATA_DIR": str(directory / "data"), "IPN_SECRET_KEY": key, "IPN_ALLOW_LOOPBACK_ENDPOINTS": "1"}


@contextlib.asynccontextmanager
async def _server(directory: Path) -> AsyncIterator[str]:
    """The server, started twice, since a library is preloaded at the start only; with a migrated template."""
    async with postgres.running(directory) as server:
        await _run(server.url, "ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'")
        await _run(server.url, "ALTER SYSTEM SET pg_stat_statements.track = 'none'")
    async with postgres.running(directory) as server:
        await _run(server.url, "CREATE DATABASE {}", TEMPLATE)
        template = _url_of(server.url, TEMPLATE)
        await _run(template, "CREATE EXTENSION pg_stat_statements")
        async with opened_database(template) as db:
            await migrations.migrate(template, db)
        await _refuse_unsafe(server.url)
        yield server.url


def _url_of(url: str, name: str) -> str:
    """The same server's other database."""
    return url.replace("@/ipn?", f"@/{name}?")


def opened_database(url: str) -> Database:
    """A database, for what the benchmark prepares through the gateway's own functions."""
    return Database(url, clock=Clock(), faults=Faults(), name="bench", connections_max=2)


async def connected(url: str) -> psycopg.AsyncConnection[Any]:
    """A connection on which each statement commits by itself."""
    return await psycopg.AsyncConnection.connect(url, autocommit=True)


async def writing(url: str) -> psycopg.AsyncConnection[Any]:
    """A connection whose block is one transaction."""
    return await psycopg.AsyncConnection.connect(url)


async def _run(url: str, statement: str, *names: str) -> None:
    async with await connected(url) as connection:
        await connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


async def _refuse_unsafe(url: str) -> None:
    async with await connected(url) as connection:
        row = await (
            await connection.execute(
                "SELECT current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes')"
            )
        ).fetchone()
    if row != ("on", "on", "on"):
        raise Broken("The server is not durable, so what it measures means nothing.")
