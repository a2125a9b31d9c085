"""The same POSTs by job queues from PyPI: a worker each, in a process of its own, as their documentation shows it.

A job holds what the POST needs; a worker takes them, 100 at a time, and posts with the same client as everybody here. They sign nothing
and keep no attempts. Jobs are there before the worker starts.
"""

from __future__ import annotations

import json
from typing import Final

import aiohttp
import pgqueuer as queuer
import procrastinate as crastinate
import psycopg
from pgqueuer.db import PsycopgDriver
from pgqueuer.queries import Queries

from ipn_gateway.bench.clients import IN_FLIGHT, event

BATCH: Final = 1000


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())


async def _post(session: aiohttp.ClientSession, url: str, headers: dict[str, str], body: str) -> None:
    async with session.post(url, data=body.encode(), headers=headers) as answer:
        await answer.read()
        answer.raise_for_status()


def _jobs(count: int) -> list[dict[str, object]]:
    return [{"headers": headers, "body": body.decode()} for headers, body in map(event, range(count))]


async def procrastinate(url: str, receiver_url: str, count: int) -> None:
    """Defer `count` jobs, say so, and work."""
    app = crastinate.App(connector=crastinate.PsycopgConnector(conninfo=url, max_size=10))
    async with app.open_async(), _session() as session:
        await app.schema_manager.apply_schema_async()

        @app.task(name="post")
        async def post(headers: dict[str, str], body: str) -> None:
            await _post(session, f"{receiver_url}/hooks/procrastinate", headers, body)

        jobs = _jobs(count)
        for begin in range(0, count, BATCH):
            await post.batch_defer_async(*jobs[begin : begin + BATCH])  # type: ignore[arg-type]  # plain JSON
        print("ready", flush=True)  # noqa: T201 - what the starter waits for
        await app.run_worker_async(concurrency=IN_FLIGHT)


async def pgqueuer(url: str, receiver_url: str, count: int) -> None:
    """Enqueue `count` jobs, say so, and work."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection, _session() as session:
        worker = queuer.PgQueuer(PsycopgDriver(connection))

        @worker.entrypoint("post")
        async def post(job: queuer.Job) -> None:
            made = json.loads(job.payload or b"")
            await _post(session, f"{receiver_url}/hooks/pgqueuer", made["headers"], made["body"])

        queries = Queries(PsycopgDriver(connection))
        await queries.install()
        jobs: list[bytes | None] = [json.dumps(job).encode() for job in _jobs(count)]
        for begin in range(0, count, BATCH):
            part = jobs[begin : begin + BATCH]
            await queries.enqueue(["post"] * len(part), part, [0] * len(part))
        print("ready", flush=True)  # noqa: T201 - what the starter waits for
        await worker.run(batch_size=IN_FLIGHT)
