"""What every test stands on: a real PostgreSQL, a clock that can be moved, and no way out of this machine.

The server is the embedded one, started once per run and shared by its processes; IPN_TEST_DATABASE_URL, a superuser's URL, names another.
A test that needs rows takes `tx` (inside a transaction, rolled back) or `db` (commits on a database of its own), as the function it
tests does, and `make` to put rows there.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import ipaddress
import itertools
import os
import secrets
import shutil
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psycopg
import pytest
import respx
import sqlalchemy
from psycopg import sql

from ipn_gateway import migrations, postgres
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database, Transaction
from ipn_gateway.faults import Faults
from tests.make import Make

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MEMORY = Path("/dev/shm")  # where a database costs 20 ms instead of some 200: nothing waits for a disk
MEMORY_BYTES_MIN = 2 << 30

hypothesis.settings.register_profile("ipn", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("ipn"), max_examples=400, stateful_step_count=50
)  # a quarter of an hour, when asked for: --hypothesis-profile=thorough
hypothesis.settings.load_profile("ipn")


# The process: its environment and its sockets

server_url = pytest.StashKey[str | None]()
server_files = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Scrub the environment before anything reads it; a worker process is told by the first process what that one decided."""
    told = getattr(config, "workerinput", None)
    config.stash[server_url] = told["server_url"] if told else os.environ.get("IPN_TEST_DATABASE_URL")
    config.stash[server_files] = Path(told["server_files"]) if told else _new_files()
    for name in [name for name in os.environ if name.startswith(("IPN_", "PG"))]:
        del os.environ[name]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput |= {"server_url": node.config.stash[server_url], "server_files": str(node.config.stash[server_files])}


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.stash[server_files], ignore_errors=True)


def _new_files() -> Path:
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES_MIN
    return (MEMORY if roomy else Path(tempfile.gettempdir())) / f"ipn-test-{secrets.token_hex(4)}"


class OutsideReached(RuntimeError):
    """A test tried to leave this machine. No OSError, so that nothing takes it for an ordinary failure to connect."""


def refuse_the_outside(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: sockets lead to loopback addresses and Unix sockets only, and only `localhost` is looked up."""
    if event in {"socket.connect", "socket.sendto"}:
        address = arguments[1]
        if isinstance(address, tuple) and not _is_here(address[0]):
            raise OutsideReached(f"{event} to {address!r}")
    elif event == "socket.getaddrinfo" and not _is_here(arguments[0], resolving=True):
        raise OutsideReached(f"{event} of {arguments[0]!r}")


def _is_here(host: str | bytes | None, *, resolving: bool = False) -> bool:
    name = host.decode() if isinstance(host, bytes) else host or "localhost"
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback or resolving  # to resolve an address sends nothing


sys.addaudithook(refuse_the_outside)


# The server and its databases


@dataclass(frozen=True)
class Server:
    """The PostgreSQL of this run, and databases in it."""

    admin: psycopg.Connection[Any]
    url: str

    def url_of(self, name: str) -> str:
        return sqlalchemy.make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def run(self, statement: str, **names: str) -> None:
        self.admin.execute(sql.SQL(statement).format(**{key: sql.Identifier(name) for key, name in names.items()}))

    def exists(self, name: str) -> bool:
        return bool(self.admin.execute("SELECT FROM pg_database WHERE datname = %s", (name,)).rowcount)

    @contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """The URL of a new database, dropped afterwards. A connection that is still there then is a fault of the test."""
        name = f"ipn_test_{secrets.token_hex(6)}"
        self.run("CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy", name=name, template=template)
        try:
            yield self.url_of(name)
        finally:
            try:
                self.run("DROP DATABASE {name}", name=name)  # waits 5 s for the last connection to go
            except psycopg.errors.ObjectInUse:
                self.run("DROP DATABASE {name} WITH (FORCE)", name=name)
                pytest.fail("the test left connections to its database behind")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The given server, or the embedded one that the run's processes share: the first starts it, the last stops it."""
    if url := request.config.stash[server_url]:
        with psycopg.connect(url, autocommit=True) as admin:
            yield Server(admin, url)
        return
    handle = postgres.start(request.config.stash[server_files])
    try:
        with psycopg.connect(handle.server.url, autocommit=True) as admin:
            _let_in_quickly(admin)
            yield Server(admin, handle.server.url)
    finally:
        handle.close()


def _let_in_quickly(admin: psycopg.Connection[Any]) -> None:
    """To derive the key from the same password 4096 times takes the client 3 ms for each connection, of which a test has ten."""
    password = sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(admin.info.user), sql.Literal(admin.info.password))
    with admin.transaction():
        admin.execute("SELECT pg_advisory_xact_lock(hashtext('password'))")
        admin.execute("SET LOCAL scram_iterations = 1")
        admin.execute(password)


@pytest.fixture(scope="session")
def template(server: Server) -> str:
    """The name of a database that was migrated once and that nobody connects to. Its name is a digest of what made it."""
    name = f"ipn_template_{_schema_digest()}"
    draft = f"{name}_draft"
    server.admin.execute("SELECT pg_advisory_lock(hashtext(%s))", (name,))
    if not server.exists(name):
        server.run("DROP DATABASE IF EXISTS {draft}", draft=draft)
        server.run("CREATE DATABASE {draft}", draft=draft)
        asyncio.run(_migrate(server.url_of(draft)))
        server.run("ALTER DATABASE {draft} RENAME TO {name}", draft=draft, name=name)
    server.admin.execute("SELECT pg_advisory_unlock(hashtext(%s))", (name,))
    return name


async def _migrate(url: str) -> None:
    async with Database(url, clock=Clock(), faults=Faults(), name="maintenance") as db:
        await migrations.migrate(url, db)


def _schema_digest() -> str:
    package = migrations.scripts().parent / "ipn_gateway"
    ours = (package / name for name in ("models.py", "states.py", "retention.py"))
    sources: Iterator[Path] = itertools.chain(sorted(migrations.scripts().rglob("*.py")), ours)
    digest = hashlib.sha256(f"{Clock().now():%Y-%m}".encode())  # the partitions are those of the month
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


@pytest.fixture
def database_url(server: Server, template: str) -> Iterator[str]:
    """The URL of a migrated database of the test's own."""
    with server.database(template) as url:
        yield url


@pytest.fixture(scope="session")
def shared_database_url(server: Server, template: str) -> Iterator[str]:
    """The URL of a migrated database in which nothing is ever committed."""
    with server.database(template) as url:
        yield url


# What tests ask for


@pytest.fixture
def clock() -> Clock:
    """The clock of the test's databases; `clock.advance(hours=1)` moves SQL's time too."""
    return Clock()


@pytest.fixture
def faults() -> Faults:
    """Points at which the test makes things go wrong: `faults.on["noun.verb:before_commit"] = …`."""
    return Faults()


@pytest.fixture
async def db(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Database]:
    """An open database of the test's own, where commits are real."""
    async with Database(database_url, clock=clock, faults=faults) as opened:
        yield opened


@pytest.fixture
async def tx(shared_database_url: str, clock: Clock) -> AsyncIterator[Transaction]:
    """An open transaction that is rolled back."""
    async with (
        Database(shared_database_url, clock=clock, faults=Faults(), connections_max=1) as opened,
        opened.transaction("test") as transaction,
    ):
        yield transaction
        raise psycopg.Rollback


@pytest.fixture
def make(request: pytest.FixtureRequest, clock: Clock) -> Make:
    """Rows, valid by default, in the `tx` of the test if it takes one, else committed in its `db`."""
    return Make(request.getfixturevalue("tx" if "tx" in request.fixturenames else "db"), clock)


@pytest.fixture
def provider_mock() -> Iterator[respx.MockRouter]:
    """Answers in the providers' place, where the network does not matter. An unexpected request fails."""
    with respx.mock(using="httpx", assert_all_called=False) as router:
        yield router


# Nothing is left behind


@pytest.fixture(autouse=True)
def _nothing_left_running(request: pytest.FixtureRequest) -> None:
    # Asked for first, so ended last: after the test's own databases and servers are closed.
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_no_task_left_behind")


@pytest.fixture
async def _no_task_left_behind() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0)  # what was cancelled a moment ago ends now
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {sorted(task.get_name() + ' ' + repr(task.get_coro()) for task in left)}"
