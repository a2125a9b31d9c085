"""A command that a test starts is forked from a process that has imported everything; it is as one that was started by `python -m`."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests import forkserver
from tests.cli import command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("sources", "list"), ("serve", "--port", "many"), ("contract", "--json")],
)
async def test_it_says_and_ends_as_one_that_was_started(arguments: tuple[str, ...]):
    """Exit code and both streams are the same: of what is asked for, of what fails, and of what is used wrongly."""
    settings = {"IPN_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "IPN_RETRY_SCHEDULE": "0,7", "COLUMNS": "80"}

    forked, started = await asyncio.gather(command.run(*arguments, **settings), command.run_by_path(*command.OURS, *arguments, **settings))

    assert forked == started


async def test_its_session_and_folder_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A signal to the group of the tests does not reach it, and it works where it was started."""
    monkeypatch.chdir(tmp_path)
    async with command.serving("simulate", "--port", "0") as simulator:
        pid = simulator.process.pid
        session, folder = os.getsid(pid), os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - no file is waited for

    assert session == pid
    assert folder == str(tmp_path)
    assert await simulator.process.wait() == -signal.SIGKILL


async def test_it_does_not_outlive_who_asked_for_it():
    """When the connection to the server ends, so does the process, and what waits for its output is told."""
    process = await forkserver.start("ipn_gateway", "simulate", "--port", "0", environment=os.environ)
    assert process.stdout is not None
    await process.stdout.readline()

    process._server.close()
    async with asyncio.timeout(10):
        left = await process.stdout.read()

    assert left == b""
