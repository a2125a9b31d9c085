"""Commands as they are used: in processes of their own, with an environment that a test chooses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cryptography.fernet import Fernet
from pydantic import SecretStr
from typer.testing import CliRunner

from ipn_gateway import sources, tenants
from ipn_gateway.cli import app
from ipn_gateway.errors import GatewayError, ValidationFailed
from ipn_gateway.vault import Vault
from tests import forkserver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ipn_gateway.db import Database
    from tests.forkserver import Process

COMMAND_SECONDS = 60


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])

    @property
    def sentence(self) -> str:
        """What it says about its failure: one line, which names the command."""
        (line,) = self.err.splitlines()
        assert line.startswith("ipn-gateway: ")
        return line.removeprefix("ipn-gateway: ")


def given_database(url: str) -> dict[str, str]:
    """The environment for a database that somebody else runs."""
    return {"IPN_DATABASE_URL": url, "IPN_SECRET_KEY": Fernet.generate_key().decode()}


def embedded(data_dir: Path) -> dict[str, str]:
    """The environment for the embedded one."""
    return {"IPN_DATA_DIR": str(data_dir)}


async def source(db: Database, settings: dict[str, str], name: str, **config: str) -> None:
    """A source of the tenant `acme`, made without a command."""
    await tenants.create_key(db, "acme")
    given = {"store_id": "testbox", "store_passwd": "qwerty", "mode": "sandbox"} | config
    await sources.create(db, Vault([SecretStr(settings["IPN_SECRET_KEY"])]), "acme", name, provider="sslcommerz", given=given, actor="test")


OURS = (sys.executable, "-m", "ipn_gateway")


async def start(*arguments: str, **settings: str) -> Process:
    """Start a command, in a process and a session of its own, ready to run: that `python` gets so far is shown by `run_by_path`."""
    return await forkserver.start("ipn_gateway", *arguments, environment=os.environ | settings)


async def run_by_path(*words: str, **settings: str) -> Done:
    """Run a program to its end, ours or another one, from its very beginning."""
    process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=os.environ | settings)
    return await ended(process)


async def ended(process: Process | asyncio.subprocess.Process, *, seconds: float = COMMAND_SECONDS) -> Done:
    """Wait for its end."""
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Done(process.returncode or 0, out.decode(), err.decode())


async def run(*arguments: str, **settings: str) -> Done:
    """Run a command to its end."""
    return await ended(await start(*arguments, **settings))


async def here(*arguments: str, **settings: str) -> Done:
    """Run a command to its end in a thread of this process, which is a second faster than a process of its own."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=settings, prog_name="ipn-gateway")
    error = result.exception
    if isinstance(error, GatewayError):
        return Done(2 if isinstance(error, ValidationFailed) else 1, result.stdout, f"ipn-gateway: {error}")
    assert error is None or isinstance(error, SystemExit), error
    return Done(result.exit_code, result.stdout, result.stderr)


@dataclass
class Serving:
    """A `serve` or `simulate` that runs. `line` is what it said when it was ready."""

    process: Process | asyncio.subprocess.Process
    line: str

    @property
    def url(self) -> str:
        """Where it listens."""
        return next(word for word in self.line.split() if word.startswith("http://"))

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self) -> Done:
        """Wait for its end."""
        return await ended(self.process)

    async def stopped(self) -> Done:
        """Ask it to stop and wait for its end."""
        self.signal()
        return await self.ended()

    async def takes_no_more(self) -> None:
        """Wait until it listens no more: then it has seen the signal."""
        address = urlsplit(self.url)
        async with asyncio.timeout(COMMAND_SECONDS):
            while True:
                try:
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
                except OSError:
                    return
                writer.close()
                await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(*arguments: str, **settings: str) -> AsyncIterator[Serving]:
    """Start a command that stays, and wait until it says that it is ready; killed at the end if the test did not stop it."""
    async with _ready(await start(*arguments, **settings)) as running:
        yield running


@asynccontextmanager
async def serving_by_path(*words: str, **settings: str) -> AsyncIterator[Serving]:
    """The same of a program, from its very beginning."""
    process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=os.environ | settings)
    async with _ready(process) as running:
        yield running


@asynccontextmanager
async def _ready(process: Process | asyncio.subprocess.Process) -> AsyncIterator[Serving]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise AssertionError((await ended(process)).err)
        yield Serving(process, line)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
