"""Gateways that die on purpose: a process from which others are forked, each as `serve` runs it: `python -m ipn_gateway.proof.doomed`.

It reads, as lines of JSON, what to run, and writes what becomes of it. A fork starts in no time, since everything is imported already.

in     {"number": 1, "roles": ["web", …], "at": "effects.apply:before_commit", "passes": 2, "signal": "KILL", "environment": {…}}
out    {"number": 1, "process": 4711}    {"number": 1, "says": "…"} when it is at work    {"number": 1, "status": 9} of waitpid(2)

When it passes the fault point `at` for the `passes`th time, the child sends the signal to itself: KILL, or STOP to be frozen there. Nothing
outlives the end of standard input. `serve` has none of this.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ipn_gateway import logs, serving, settings
from ipn_gateway.errors import GatewayError
from ipn_gateway.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

READ_BYTES: Final = 65536
DIES_WITH_ITS_PARENT: Final = 1
"""prctl(PR_SET_PDEATHSIG)."""


def deadly(at: str | None, *, passes: int = 1, sent: signal.Signals = signal.SIGKILL) -> Faults:
    """Faults under which this process sends itself a signal when it passes a point for the `passes`th time; with None never."""
    left = passes

    async def passed() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), sent)

    on: dict[str, Callable[[], Awaitable[None]]] = {at: passed} if at else {}
    return Faults(on)


def tell(number: int, **news: Any) -> None:
    """One line to whoever started us; one write, as all share the pipe."""
    os.write(1, json.dumps({"number": number, **news}).encode() + b"\n")


class _Nursery:
    """The process to fork from: it has no event loop and no thread, so that a fork is whole."""

    def __init__(self) -> None:
        self._living: dict[int, int] = {}
        self._ends, end = os.pipe()
        os.set_blocking(self._ends, False)
        os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)

    def run(self) -> None:
        """Until standard input ends; then every child is killed."""
        rest = b""
        while True:
            ready, _, _ = select.select([0, self._ends], [], [])
            if self._ends in ready:
                os.read(self._ends, READ_BYTES)
                self._reap()
            if 0 not in ready:
                continue
            if not (read := os.read(0, READ_BYTES)):
                break
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                self._fork(json.loads(line))
        for process in self._living:
            os.kill(process, signal.SIGKILL)

    def _fork(self, asked: dict[str, Any]) -> None:
        process = os.fork()
        if process == 0:
            _be_a_gateway(asked)
        self._living[process] = asked["number"]
        tell(asked["number"], process=process)

    def _reap(self) -> None:
        while self._living:
            process, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not process:
                return
            tell(self._living[process], status=status)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                del self._living[process]


def _be_a_gateway(asked: dict[str, Any]) -> NoReturn:
    """In the child: run it to its end, whichever that is."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(DIES_WITH_ITS_PARENT, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(asked.get("environment", {}))
    code = 1
    try:
        serving.run(
            settings.load(),
            host="127.0.0.1",
            port=0,
            roles=asked["roles"],
            migrate=False,
            say=lambda line: tell(asked["number"], says=line),
            faults=deadly(asked.get("at"), passes=asked.get("passes", 1), sent=signal.Signals[f"SIG{asked.get('signal', 'KILL')}"]),
        )
        code = 0
    except GatewayError as error:
        tell(asked["number"], says=str(error))
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    logs.configure(level=sys.argv[1] if sys.argv[1:] else "ERROR", json=True)
    _Nursery().run()
