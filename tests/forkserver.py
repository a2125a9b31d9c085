"""Programs of ours in processes of their own that start in no time: forked from one that has imported everything. As a program, that one.

It listens on a socket in the folder it is given. A request is one line of JSON, with the three standard streams attached; the answers are
the new process's id and, when that has ended, its wait status, a line each. A process whose caller hangs up is killed, and all are when
the server's own standard input ends. That our programs start without it too is shown by the tests that run `python -m`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import os
import pkgutil
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[1]
REQUEST_BYTES_MAX = 1 << 20
PIECE = 1 << 16


# Who asks


@dataclass
class Process(asyncio.Protocol):
    """A process that was forked: what tests use of `asyncio.subprocess.Process`. As a protocol it reads what the server answers."""

    stdout: asyncio.StreamReader | None = None
    stderr: asyncio.StreamReader | None = None
    returncode: int | None = None
    _pid: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _status: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _pipes: list[tuple[asyncio.ReadTransport, asyncio.StreamReader]] = field(default_factory=list)
    _said: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server is there."""
        self._server = transport

    def data_received(self, data: bytes) -> None:
        """The id, then the wait status."""
        self._said += data
        *lines, _ = self._said.split(b"\n")
        for told, line in zip((self._pid, self._status), lines, strict=False):
            if not told.done():
                told.set_result(int(line))
        if self._status.done():
            self.returncode = os.waitstatus_to_exitcode(self._status.result())
            self._server.close()

    async def started(self) -> Process:
        """This process, which runs now."""
        await self._pid
        return self

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid.result()

    async def wait(self) -> int:
        """Wait for its end: its exit code, or minus the number of the signal that ended it."""
        code = os.waitstatus_to_exitcode(await asyncio.shield(self._status))
        for transport, reader in self._pipes:
            if not transport.is_closing():  # all that it wrote is in the pipe
                pipe = transport.get_extra_info("pipe")
                with contextlib.suppress(BlockingIOError):
                    while piece := os.read(pipe.fileno(), PIECE):
                        reader.feed_data(piece)
                transport.close()
        return code

    async def communicate(self) -> tuple[bytes, bytes]:
        """All that it still writes, and its end."""
        out, err = await asyncio.gather(*(stream.read() if stream else _nothing() for stream in (self.stdout, self.stderr)))
        await self.wait()
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    async def read(self, end: int) -> asyncio.StreamReader:
        """Read what comes out of this end of a pipe."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", 0))
        self._pipes.append((transport, reader))
        return reader


async def _nothing() -> bytes:
    return b""


async def start(module: str, *arguments: str, environment: Mapping[str, str], errors: int = subprocess.PIPE) -> Process:
    """Run a module as `python -m` would, with this environment, and nothing on its standard input.

    Its standard output is a pipe, and so are its errors unless they go to a descriptor that is given.
    """
    asked = {"module": module, "arguments": arguments, "environment": dict(environment), "cwd": str(Path.cwd())}
    path = await asyncio.to_thread(listening)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    process = Process()
    with contextlib.ExitStack() as stack:
        out, theirs = os.pipe()
        stack.callback(os.close, theirs)
        if errors == subprocess.PIPE:
            err, errors = os.pipe()
            stack.callback(os.close, errors)
            process.stderr = await process.read(err)
        process.stdout = await process.read(out)
        nothing = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, nothing)
        socket.send_fds(connection, [json.dumps(asked).encode() + b"\n"], [nothing, theirs, errors])
    await asyncio.get_running_loop().connect_accepted_socket(lambda: process, connection)
    return await process.started()


_starting = threading.Lock()
_paths: list[Path] = []


def listening() -> Path:
    """The socket of this process's server, which is started by who needs it first and ends with this process."""
    with _starting:
        if not _paths:
            _paths.append(_started())
        return _paths[0]


def _started() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ipn-fork-"))
    command = [sys.executable, "-m", "tests.forkserver", str(folder)]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, start_new_session=True)
    atexit.register(server.communicate)  # the end of its standard input ends it
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return folder / "socket"


CLIENT = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
asked = {"module": sys.argv[2], "arguments": sys.argv[3:], "environment": dict(os.environ), "cwd": os.getcwd()}
socket.send_fds(server, [json.dumps(asked).encode() + b"\\n"], [0, 1, 2])
_, status = server.makefile("r")
code = os.waitstatus_to_exitcode(int(status))
sys.exit(code if code >= 0 else 128 - code)
"""


def shim(module: str) -> str:
    """A shell script that has a module run by the server, for PATH."""
    return f'#!/bin/sh\nexec {shlex.join([sys.executable, "-ISc", CLIENT, str(listening()), module])} "$@"\n'


# The server


class Forked(BaseException):
    """Takes a child out of the server, with what it was asked to be."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked


@dataclass
class Server:
    """Whom it listens to, and who waits for which process."""

    listener: socket.socket
    woken: int
    wake: int
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    callers: dict[int, socket.socket] = field(default_factory=dict)

    def run(self) -> None:
        """Fork for each request until standard input ends. Raises `Forked` in each child."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake)
        for source, act in ((self.listener, self._fork), (self.woken, self._reap), (0, None)):
            self.selector.register(source, selectors.EVENT_READ, act)
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    return
                if isinstance(key.data, int):
                    self._abandoned(key.data)
                else:
                    key.data()

    def kill(self) -> None:
        """End every process that is left."""
        for pid in self.callers:
            os.kill(pid, signal.SIGKILL)

    def _fork(self) -> None:
        caller, _ = self.listener.accept()
        line, streams, _, _ = socket.recv_fds(caller, REQUEST_BYTES_MAX, 3)
        while not line.endswith(b"\n"):
            line += caller.recv(REQUEST_BYTES_MAX)
        pid = os.fork()
        if pid == 0:
            self._become(json.loads(line), streams, caller)
        for stream in streams:
            os.close(stream)
        caller.sendall(b"%d\n" % pid)
        self.callers[pid] = caller
        self.selector.register(caller, selectors.EVENT_READ, pid)

    def _become(self, asked: dict[str, Any], streams: list[int], caller: socket.socket) -> NoReturn:
        """As a program that was just started: a session, streams, signals, a folder and an environment of its own."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for end in (*streams, self.woken, self.wake):
            os.close(end)
        self.selector.close()
        for held in (self.listener, caller, *self.callers.values()):
            held.close()
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.path[0] = asked["cwd"]
        sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        raise Forked(asked)

    def _reap(self) -> None:
        os.read(self.woken, PIECE)
        while self.callers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self.callers.pop(pid) as caller, contextlib.suppress(KeyError, OSError):
                self.selector.unregister(caller)
                caller.sendall(b"%d\n" % status)

    def _abandoned(self, pid: int) -> None:
        """Who waited for it has gone."""
        if pid in self.callers:
            self.selector.unregister(self.callers[pid])
            os.kill(pid, signal.SIGKILL)


def _prepare() -> None:
    """Import what the programs may need; nothing here opens a connection or starts a thread."""
    ours = [found.name for found in pkgutil.walk_packages([str(ROOT / "ipn_gateway")], "ipn_gateway.")]
    for name in (*ours, "alembic.command", "uvicorn.lifespan.on", "uvicorn.protocols.http.httptools_impl"):
        if not name.endswith(".__main__"):
            __import__(name)
    gc.collect()
    gc.freeze()


def _serve(folder: Path) -> dict[str, Any] | None:
    """What a child was asked to be; None in the server, which has come to its end."""
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen(100)
            server = Server(listener, *os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
            print("ready", flush=True)  # noqa: T201 - whoever started it waits for the line
            server.run()
    except Forked as forked:
        return forked.asked
    server.kill()
    shutil.rmtree(folder)
    return None


def _run(module: str, arguments: list[str]) -> NoReturn:
    """What `python -m` does, but that memory is not tidied up at the end: that takes longer than most commands."""
    sys.argv = [module, *arguments]
    if module != "ipn_gateway":
        sys.modules.pop(module, None)  # else it would be there twice, which is warned about
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - the last one to see it
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        code = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _prepare()
    if given := _serve(Path(sys.argv[1])):
        _run(given["module"], given["arguments"])
