"""A gateway in a process of its own, as `serve` runs it, that can be told to die at a named point: `python -m tests.gateway_process`.

It prints its URL when it listens, and nothing else. At the point given by --crash-at it kills itself with SIGKILL.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

from pydantic import SecretStr

from ipn_gateway import logs, runtime, settings, workers
from ipn_gateway.clock import Clock
from ipn_gateway.faults import Faults
from ipn_gateway.simulator.serving import serving
from ipn_gateway.web.app import create_app


async def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _run(database_url: str, crash_at: str | None, roles: list[str]) -> None:
    faults = Faults({crash_at: _die} if crash_at else {})
    loaded = settings.load(database_url=SecretStr(database_url))
    async with (
        runtime.opened(loaded, database_url, clock=Clock(), faults=faults) as rt,
        workers.running(rt, roles),
        serving(create_app(rt)) as url,
    ):
        print(url, flush=True)  # noqa: T201 - the line that the test waits for
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    parser.add_argument("--crash-at")
    parser.add_argument("--roles", default=",".join(workers.ROLES))
    given = parser.parse_args()
    logs.configure(level="WARNING")
    asyncio.run(_run(given.database_url, given.crash_at, given.roles.split(",")))
