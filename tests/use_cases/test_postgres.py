"""The embedded server: started by the first of its users, stopped by the last, and nobody else's business."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from ipn_gateway import postgres
from ipn_gateway.postgres import EmbeddedServerError, Handle, running, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_SECONDS = 20

USER = """
import pathlib, sys
from ipn_gateway.postgres import start
handle = start(pathlib.Path(sys.argv[1]))
print("in use", flush=True)
sys.stdin.read()
handle.close()
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a data directory in which no server runs; every test leaves it so. A making that was killed half way came before."""
    data_dir = tmp_path_factory.mktemp("postgres") / "data"
    (data_dir / "pg18.new" / "data" / "base").mkdir(parents=True)
    (data_dir / "pg18.new" / "data" / "PG_VERSION").write_text("18\n")
    (data_dir / "pg18.new" / "password").write_text("never used")
    start(data_dir).close()
    return data_dir


@pytest.fixture(autouse=True)
def _space_is_given_back(tmp_path: Path) -> Iterator[None]:
    """Remove what pytest would keep for three runs: a cluster takes 46 MB."""
    yield
    shutil.rmtree(tmp_path)


@contextmanager
def user(data_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that uses the server until its standard input ends."""
    command = [sys.executable, "-c", USER, str(data_dir)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=Path(postgres.__file__).parents[1]) as process:
        try:
            yield process
        finally:
            process.kill()


def is_in_use(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout
    return process.stdout.readline() == b"in use\n"


def server_pid(data_dir: Path) -> int:
    return int((data_dir / "pg18" / "postmaster.pid").read_text().split()[0])


class Watched:
    """A process that is no child of ours; `ended` waits for its end."""

    def __init__(self, pid: int) -> None:
        self.descriptor = os.pidfd_open(pid)

    def ended(self, seconds: float = LIMIT_SECONDS) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


@pytest.fixture
def watch() -> Iterator[Callable[[Path], Watched]]:
    watched: list[Watched] = []

    def watch(data_dir: Path) -> Watched:
        watched.append(Watched(server_pid(data_dir)))
        return watched[-1]

    yield watch
    for one in watched:
        os.close(one.descriptor)


def ask(url: str, statement: str) -> list[tuple]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def is_held(file: Path) -> bool:
    with postgres._open(file) as opened:
        return not postgres._flocked(opened)


async def test_the_server_keeps_its_promises_and_ends_with_its_only_user(data_dir, watch) -> None:
    """It is PostgreSQL 18, has the database `ipn`, keeps what it acknowledged, listens on no port, and stops at the end."""
    names = ("server_version_num", "fsync", "full_page_writes", "synchronous_commit", "listen_addresses", "TimeZone", "server_encoding")

    async with running(data_dir) as server:
        watched = watch(data_dir)
        found = ask(server.url, "SELECT current_database(), " + ", ".join(f"current_setting('{name}')" for name in names))

    assert [(row[0], row[1][:2], *row[2:]) for row in found] == [("ipn", "18", "on", "on", "on", "", "UTC", "UTF8")]
    assert watched.ended()
    assert not (data_dir / "pg18" / "postmaster.pid").exists()


def test_the_server_asks_for_the_password(data_dir) -> None:
    """Whoever reaches the socket without the password stays outside, and the password is not in what is printed."""
    handle = start(data_dir)
    password = (data_dir / "pg18.password").read_text()
    try:
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            ask(handle.server.url.replace(password, "guessed"), "SELECT 1")
    finally:
        handle.close()

    assert len(password) == 43
    assert password in handle.server.url
    assert password not in repr(handle.server)


def test_nothing_above_the_data_is_opened_to_others(tmp_path, data_dir) -> None:
    """Below a closed directory the server runs, its files are private, and every directory above keeps its mode and owner."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    above = [closed, *closed.parents]
    before = [(mode(path), path.stat().st_uid) for path in above]
    handle = start(shutil.copytree(data_dir, closed / "data"))
    try:
        during = [(mode(path), path.stat().st_uid) for path in above]
        private = {name: mode(handle.server.data_dir / name) for name in ("pg18.password", "pg18.log", "pg18")}
        socket_dir = mode(handle.server.socket_dir)
    finally:
        handle.close()

    assert before == during
    assert private == {"pg18.password": 0o600, "pg18.log": 0o600, "pg18": 0o700}
    assert socket_dir == 0o700


@pytest.mark.parametrize("closed", [True, False])
def test_the_server_gets_no_privilege_but_to_pass_closed_directories(data_dir, closed) -> None:
    """It never runs as root. Behind closed directories it may pass them, behind open ones it may nothing at all."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o700 if closed else 0o711)
        handle = start(shutil.copytree(data_dir, Path(name, "data")))
        try:
            on_the_way = [*handle.server.data_dir.parents, *postgres._programs().parents]
            read_or_override = 0 if all(mode(path) & 0o001 for path in on_the_way) else 0b110
            status = Path("/proc", str(server_pid(handle.server.data_dir)), "status").read_text()
        finally:
            handle.close()
    fields = dict(line.split(":", 1) for line in status.splitlines())

    assert "0" not in fields["Uid"].split()
    assert int(fields["CapPrm"], 16) & ~read_or_override == 0


def test_our_secrets_and_settings_of_other_servers_do_not_reach_it(data_dir, monkeypatch) -> None:
    """The server is started without our environment, and found without it."""
    monkeypatch.setenv("IPN_SECRET_KEY", "the key of keys")
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    handle = start(data_dir)
    try:
        environment = Path("/proc", str(server_pid(data_dir)), "environ").read_bytes()
        answer = ask(handle.server.url, "SELECT 1")
    finally:
        handle.close()

    assert answer == [(1,)]
    assert b"the key of keys" not in environment


def test_the_last_of_two_processes_stops_it(data_dir, watch) -> None:
    """The first user goes, the server stays; the last user goes, the server stops."""
    with user(data_dir) as first, user(data_dir) as second:
        both = is_in_use(first) and is_in_use(second)
        watched = watch(data_dir)
        first.communicate(timeout=LIMIT_SECONDS)
        stayed = not watched.ended(seconds=0)
        second.communicate(timeout=LIMIT_SECONDS)

    assert both
    assert first.returncode == second.returncode == 0
    assert stayed
    assert watched.ended()


async def test_users_in_one_process_count_each(data_dir, watch) -> None:
    """A second user in the same process joins, and its going leaves the first one's server alone."""
    async with running(data_dir) as one:
        watched = watch(data_dir)
        async with running(data_dir) as other:
            same = one.url == other.url
        answer = ask(one.url, "SELECT 1")

    assert same
    assert answer == [(1,)]
    assert watched.ended()


def test_the_server_outlives_its_killed_starter_and_ends_with_the_next_user(data_dir, watch) -> None:
    """A SIGKILL of the only user leaves the server running; who comes next joins this one and, as the last, stops it."""
    with user(data_dir) as starter:
        assert is_in_use(starter)
        watched = watch(data_dir)
        starter.kill()
        starter.wait(LIMIT_SECONDS)
    left = server_pid(data_dir)
    handle = start(data_dir)
    joined = server_pid(data_dir)
    handle.close()

    assert left == joined
    assert watched.ended()


def test_a_killed_user_is_not_waited_for(data_dir, watch) -> None:
    """The last user alive stops the server, whoever was killed before."""
    handle = start(data_dir)
    watched = watch(data_dir)
    with user(data_dir) as killed:
        assert is_in_use(killed)
        killed.kill()
        killed.wait(LIMIT_SECONDS)
    handle.close()

    assert watched.ended()


async def test_a_server_that_dies_is_started_again_by_who_uses_it(data_dir, monkeypatch, watch) -> None:
    """Killed while it is used: it comes back at the same address, without anybody starting anything."""
    monkeypatch.setattr(postgres, "KEEP_SECONDS", 0.05)
    async with running(data_dir) as server:
        dying = watch(data_dir)
        os.kill(server_pid(data_dir), signal.SIGKILL)
        assert dying.ended()
        async with asyncio.timeout(LIMIT_SECONDS):
            while not await answers(server.url):  # noqa: ASYNC110 - only the server can tell
                await asyncio.sleep(0)
        revived = watch(data_dir)

    assert revived.ended()


async def answers(url: str) -> bool:
    try:
        async with await psycopg.AsyncConnection.connect(url):
            return True
    except psycopg.OperationalError:
        return False


def test_a_crashed_server_recovers_for_the_next_user(data_dir, watch) -> None:
    """After a SIGKILL of PostgreSQL the next user starts it again, with every committed row; the log tells."""
    first = start(data_dir)
    ask(first.server.url, "CREATE TABLE kept (id int)")
    ask(first.server.url, "INSERT INTO kept VALUES (7)")
    watched = watch(data_dir)
    os.kill(server_pid(data_dir), signal.SIGKILL)
    assert watched.ended()
    second = start(data_dir)
    try:
        kept = ask(first.server.url, "SELECT id FROM kept")  # the first user need not learn a new address
        recovered = watch(data_dir)
    finally:
        second.close()
        stayed = not recovered.ended(seconds=0)
        first.close()

    assert kept == [(7,)]
    assert "automatic recovery in progress" in (data_dir / "pg18.log").read_text()
    assert stayed
    assert recovered.ended()


def test_starters_at_the_same_moment_share_one_server(tmp_path) -> None:
    """Two processes meet an empty directory together: one makes and starts the server, the other joins."""
    with user(tmp_path / "data") as one, user(tmp_path / "data") as other:
        both = is_in_use(one) and is_in_use(other)
        one.communicate(timeout=LIMIT_SECONDS)
        other.communicate(timeout=LIMIT_SECONDS)
    log = (tmp_path / "data" / "pg18.log").read_text()

    assert both
    assert one.returncode == other.returncode == 0
    assert log.count("starting PostgreSQL 18") == 1


async def test_a_cancelled_start_leaves_no_server(data_dir) -> None:
    """Cancelling while the server starts ends in nothing running and nothing held."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), running(data_dir):
            pass

    assert not is_held(data_dir / "pg18.users")
    assert not is_held(data_dir / "pg18.lock")
    assert not (data_dir / "pg18" / "postmaster.pid").exists()


@pytest.mark.parametrize(("name", "version"), [("pg18", "17"), ("pg17", "17"), ("pg19", "19")])
def test_data_of_another_major_version_is_refused_with_a_sentence(tmp_path, name, version) -> None:
    """Data that this PostgreSQL cannot read is left as it is, and the message says what to do."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "PG_VERSION").write_text(f"{version}\n")

    with pytest.raises(EmbeddedServerError, match=rf"holds data of PostgreSQL {version}, .* runs 18\. Dump it .* IPN_DATABASE_URL\."):
        start(tmp_path)

    assert [path.name for path in (tmp_path / name).iterdir()] == ["PG_VERSION"]
    assert not is_held(tmp_path / "pg18.users")


def test_a_half_made_cluster_is_made_again(data_dir) -> None:
    """What a kill in the middle of the making left behind was cleared away, and nothing of it is used."""
    handle = start(data_dir)
    try:
        answer = ask(handle.server.url, "SELECT 1")
    finally:
        handle.close()

    assert answer == [(1,)]
    assert not (data_dir / "pg18.new").exists()
    assert (data_dir / "pg18.password").read_text() != "never used"


@pytest.mark.parametrize("content", ["{pid}\n", ""])
def test_a_stale_pid_file_does_not_keep_it_from_starting(data_dir, content) -> None:
    """The number of the dead server may be another process's by now, or its file may have been cut by a power failure."""
    (data_dir / "pg18" / "postmaster.pid").write_text(content.format(pid=os.getpid()))
    handle = start(data_dir)
    try:
        answer = ask(handle.server.url, "SELECT 1")
    finally:
        handle.close()

    assert answer == [(1,)]


@pytest.mark.parametrize("name", ["plain", "a space", 'größe, quo"te$HOME`x', "long" * 30])
def test_any_path_will_do(data_dir, name) -> None:
    """Names that a shell or a connection string reads otherwise, or longer than a socket's path may be, move only the socket."""
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent).resolve() / name
        handle = start(shutil.copytree(data_dir, path))
        try:
            answer = ask(handle.server.url, "SELECT current_setting('data_directory')")
            socket_dir = mode(handle.server.socket_dir)
        finally:
            handle.close()

    assert answer == [(str(path / "pg18"),)]
    assert socket_dir == 0o700
    assert (handle.server.socket_dir == path / "pg18.socket") == (name == "plain")
    assert not handle.server.socket_dir.exists()


def test_a_trap_in_the_socket_s_place_is_passed_by(data_dir, tmp_path) -> None:
    """A link where the socket directory would be, which anybody may put below /tmp, is not followed."""
    far_off = shutil.copytree(data_dir, tmp_path / ("long" * 30))
    first = start(far_off)
    first.close()
    taken, elsewhere = first.server.socket_dir, tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    taken.symlink_to(elsewhere)
    try:
        second = start(far_off)
        second.close()
    finally:
        taken.unlink()

    assert second.server.socket_dir != taken
    assert mode(elsewhere) == 0o755


def test_a_server_that_does_not_start_says_why_and_holds_nothing(data_dir) -> None:
    """The message quotes the log; when the cause is gone the same handle starts it."""
    conf = data_dir / "pg18" / "postgresql.conf"
    good = conf.read_text()
    conf.write_text(good + "\nshared_buffers = plenty\n")
    handle = Handle(data_dir)

    with pytest.raises(EmbeddedServerError, match=r'pg_ctl .* failed; .*pg18\.log ends: .*invalid value .*"shared_buffers": "plenty"'):
        handle.open()

    assert not is_held(data_dir / "pg18.users")
    conf.write_text(good)
    handle.open()
    handle.close()


def test_a_lost_password_is_said(data_dir) -> None:
    """Without its password file the data cannot be entered; the message names the file, and the server is stopped again."""
    password = (data_dir / "pg18.password").rename(data_dir / "lost")

    with pytest.raises(EmbeddedServerError, match=r"No such file .*pg18\.password"):
        start(data_dir)

    password.rename(data_dir / "pg18.password")
    assert not (data_dir / "pg18" / "postmaster.pid").exists()


def test_waiting_for_a_stuck_process_has_a_limit(data_dir) -> None:
    """Who holds the lock for too long is named after the given seconds."""
    with postgres._open(data_dir / "pg18.lock") as lock:
        assert postgres._flocked(lock)

        with pytest.raises(EmbeddedServerError, match="another process that starts or stops"):
            start(data_dir, start_seconds=0.1)


def test_who_leaves_waits_for_who_comes(data_dir, watch) -> None:
    """While another process starts or stops the server, closing waits for its turn, and then stops it as the last user."""
    handle = start(data_dir)
    watched = watch(data_dir)
    with ThreadPoolExecutor(1) as pool:
        with postgres._open(data_dir / "pg18.lock") as lock:
            assert postgres._flocked(lock)
            closing = pool.submit(handle.close)
            early, _ = wait([closing], timeout=0.2)
        closing.result(LIMIT_SECONDS)

    assert not early
    assert watched.ended()


def test_a_large_log_is_put_aside_at_a_start(data_dir, monkeypatch) -> None:
    """One older log is kept, closed to others like the new one."""
    monkeypatch.setattr(postgres, "LOG_BYTES_MAX", 10)
    before = (data_dir / "pg18.log").read_text()
    start(data_dir).close()

    assert (data_dir / "pg18.log.1").read_text() == before
    assert mode(data_dir / "pg18.log") == mode(data_dir / "pg18.log.1") == 0o600
