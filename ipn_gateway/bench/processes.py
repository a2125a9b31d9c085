"""Programs in processes of their own: started, waited for until they say where they listen, looked at in /proc, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ipn_gateway.bench.comparison import Broken

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Mapping

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 40.0
GATEWAY: Final = ("ipn_gateway", "serve", "--port", "0")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_CPU_FIELDS: Final = slice(11, 15)  # utime, stime, cutime, cstime; counted behind the name (proc(5))
_PARENT_FIELD: Final = 1
_RESIDENT_FIELD: Final = 1


@dataclass(frozen=True, slots=True)
class Started:
    """A program that runs. `line` is what it said when it was ready."""

    process: Process
    line: str
    log: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return next(word for word in self.line.split() if word.startswith("http://"))

    @property
    def resident_bytes(self) -> int:
        """The memory that it has now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[_RESIDENT_FIELD]) * _PAGE

    @property
    def cpu_seconds(self) -> float:
        """What it has used so far."""
        return _cpu_ticks(self.process.pid) / _TICKS

    async def rest(self) -> str:
        """Wait for its end; what else it said."""
        assert self.process.stdout is not None  # noqa: S101 - it was started with a pipe
        said = (await self.process.stdout.read()).decode()
        if await self.process.wait() != 0:
            raise Broken(f"A program failed; its log ends: {last_line(self.log)}")
        return said


@contextlib.asynccontextmanager
async def started(module: str, *arguments: str, log: Path, environment: Mapping[str, str]) -> AsyncIterator[Started]:
    """Run `python -m module arguments`; ready when it has said a line. Raises `Broken` when it does not come to that."""
    with log.open("ab") as errors:  # appended to, so that it can be cut while it is written
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        yield Started(process, await _first_line(process, log), log)
    finally:
        await _end(process)


async def _first_line(process: Process, log: Path) -> str:
    assert process.stdout is not None  # noqa: S101 - it was started with a pipe
    try:
        async with asyncio.timeout(START_SECONDS_MAX):
            line = (await process.stdout.readline()).decode().strip()
    except TimeoutError:
        line = ""
    if not line:
        raise Broken(f"A program did not start; its log ends: {last_line(log)}")
    return line


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS_MAX):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def last_line(log: Path) -> str:
    """How a log ends."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(nothing)"


def family_cpu_seconds(pid: int) -> float:
    """The processor time of a process, of its children and of those that it has waited for, since they began."""
    family = [pid, *(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(int(entry.name)) == pid)]
    return sum(_cpu_ticks(one) for one in family) / _TICKS


def _fields(pid: int) -> list[str]:
    with contextlib.suppress(OSError):  # it may just have ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[_PARENT_FIELD]) if fields else 0


def _cpu_ticks(pid: int) -> int:
    return sum(map(int, _fields(pid)[_CPU_FIELDS]))
