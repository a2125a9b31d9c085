"""Starts the foreign application in processes of their own, and ends them all."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class Child:
    """One running process; `point` is where it dies."""

    point: str
    process_id: int
    url: str
    http: httpx.AsyncClient = field(repr=False)

    async def post(self, path: str, body: Any, *, key: str = "K1", tenant: str = "acme") -> httpx.Response | None:
        """One call; None where the connection ended without an answer."""
        with suppress(httpx.TransportError):
            return await self.http.post(f"{self.url}/v1/{path}", json=body, headers={"Idempotency-Key": key, "X-Tenant": tenant})
        return None

    def stop(self) -> None:
        """Freeze it: SIGSTOP."""
        os.kill(self.process_id, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.process_id, signal.SIGCONT)


@asynccontextmanager
async def running(database_url: str, provider_url: str, *points: str) -> AsyncIterator[list[Child]]:
    """A process for each point, `-` for one that lives."""
    handle = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.idempotency.foreign_process",
        database_url,
        provider_url,
        *points,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    children: dict[int, Child] = {}
    http = httpx.AsyncClient(trust_env=False, timeout=30)
    try:
        assert handle.stdout is not None
        async with asyncio.timeout(60):
            while len(children) < len(points):
                number, process_id, url = (await handle.stdout.readline()).decode().split()
                children[int(number)] = Child(points[int(number)], int(process_id), url, http)
        yield [children[number] for number in range(len(points))]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(handle.pid, signal.SIGKILL)
        await http.aclose()
        await handle.communicate()
