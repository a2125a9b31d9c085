"""The foreign application in processes of their own: `python -m tests.idempotency.foreign_process DATABASE_URL PROVIDER_URL POINT…`.

There is one process for each point, in order; it kills itself with SIGKILL when it passes that point, and at `-` never. Each prints its
number, its process id and its URL on one line when it listens. They are forked from one, so that the libraries are loaded once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

from ipn_gateway import logs
from ipn_gateway.clock import Clock
from ipn_gateway.faults import Faults
from ipn_gateway.simulator.serving import serving
from tests.idempotency import foreign


async def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _run(number: int, database_url: str, provider_url: str, crash_at: str) -> None:
    async with (
        foreign.opened(database_url, provider_url, Clock(), Faults({crash_at: _die}), connections_max=4) as (app, _),
        serving(app) as url,
    ):
        os.write(1, f"{number} {os.getpid()} {url}\n".encode())  # one write, as all of them share the pipe
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    parser.add_argument("provider_url")
    parser.add_argument("points", nargs="+")
    given = parser.parse_args()
    logs.configure(level="ERROR")
    for number, point in enumerate(given.points):
        if os.fork() == 0:
            asyncio.run(_run(number, given.database_url, given.provider_url, point))
    for _ in given.points:
        os.wait()
