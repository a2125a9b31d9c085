"""The foreign application as a client meets it, what became of its calls, and how its processes go wrong."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import pytest

from ipn_gateway.faults import Faults
from ipn_gateway.operations import REPLAYED_HEADER
from tests.idempotency import foreign

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from fastapi import FastAPI

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.operations import Finished
    from tests.idempotency.provider import Provider

T = TypeVar("T")

BODY = {"amount": "10.00", "currency": "BDT"}
LEASE_SECONDS = 90


@dataclass(slots=True)
class Points(Faults):
    """Fault points that are remembered: `seen` is every one that was passed."""

    seen: list[str] = field(default_factory=list)

    async def at(self, point: str) -> None:
        self.seen.append(point)
        if action := self.on.get(point):
            await action()

    def fail(self, point: str, error: BaseException, *, times: int = 1) -> None:
        """Raise at a point, the first times that it is passed."""
        left = [error] * times

        async def raise_it() -> None:
            if left:
                raise left.pop()

        self.on[point] = raise_it

    def die(self, point: str) -> None:
        """Whoever passes the point next is gone: nothing of it runs any more, as after the end of its process."""
        self.fail(point, asyncio.CancelledError())

    def hold(self, point: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Whoever passes the point next waits there: whether it is there, and how to let it go."""
        reached, go = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            if not reached.is_set():
                reached.set()
                await go.wait()

        self.on[point] = wait
        return reached, go


@dataclass
class Service:
    """The foreign application as a client meets it, and what became of its calls."""

    app: FastAPI
    db: Database
    http: httpx.AsyncClient
    provider: Provider
    clock: Clock
    faults: Points
    database_url: str
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin something and go on."""
        task = asyncio.create_task(call)
        self.tasks.add(task)
        return task

    async def post(
        self, path: str, body: Any = BODY, *, key: str | None = "K1", tenant: str | None = "acme", **given: Any
    ) -> httpx.Response:
        """One call. `path` is without `/v1/`."""
        headers = httpx.Headers(given.pop("headers", None))
        if key is not None:
            headers["Idempotency-Key"] = key
        if tenant is not None:
            headers["X-Tenant"] = tenant
        return await self.http.post(f"/v1/{path}", headers=headers, **({} if "content" in given else {"json": body}), **given)

    async def dies(self, point: str, path: str, body: Any = BODY, *, key: str = "K1") -> None:
        """One call whose process ends at a point."""
        self.faults.die(point)
        with pytest.raises(asyncio.CancelledError):
            await self.post(path, body, key=key)
        del self.faults.on[point]

    def lease_ends(self) -> None:
        """Time passes, until every lease of now is over."""
        self.clock.advance(seconds=LEASE_SECONDS + 1)

    async def rows(self, sql: str = "SELECT * FROM idempotency_keys ORDER BY id", **parameters: Any) -> list[dict[str, Any]]:
        """Rows of a query, by default all keys."""
        async with self.db.autocommit("test.rows") as tx:
            return await tx.all(dict, sql, parameters)

    async def row(self) -> dict[str, Any]:
        """The only key that there is."""
        (found,) = await self.rows()
        return found

    async def value(self, sql: str, **parameters: Any) -> Any:
        """The first column of the first row."""
        return next(iter((await self.rows(sql, **parameters))[0].values()))

    async def run(self, statement: str, **parameters: Any) -> int:
        """Change rows beside the application; how many."""
        async with self.db.transaction("test.run") as tx:
            return await tx.execute(statement, parameters)

    async def acts(self) -> list[str]:
        """What the operations did, in order."""
        return [row["what"] for row in await self.rows("SELECT what FROM acts ORDER BY number")]

    async def tell(self, finished: Finished) -> tuple[httpx.Response, httpx.Response]:
        """What `POST /v1/told` does once and answers so; the first answer, and its repeat. Nothing of it is left."""
        self.app.state.told = foreign.says(finished)
        first, second = await self.post("told"), await self.post("told")
        assert await self.acts() == ["done"]
        await self.run("DELETE FROM acts")
        await self.run("DELETE FROM idempotency_keys")
        return first, second

    @asynccontextmanager
    async def another(self, **given: Any) -> AsyncIterator[Service]:
        """Another process on the same database: its own pool, fault points and layer."""
        faults, clock, url = Points(), given.pop("clock", self.clock), given.pop("database_url", self.database_url)
        provider_url = given.pop("provider_url", self.provider.url)
        async with foreign.opened(url, provider_url, clock, faults, **given) as (app, db), client_of(app) as http:
            yield Service(app, db, http, self.provider, clock, faults, url)


def client_of(app: Any) -> httpx.AsyncClient:
    """A client in this process; what the application raises is an answer."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://foreign.test")


def is_replay(answer: httpx.Response) -> bool:
    """Whether the answer says that it comes from storage."""
    return str(answer.headers.get(REPLAYED_HEADER)) == "true"


def told(answer: httpx.Response) -> tuple[int, bytes]:
    """What a client acts on."""
    return answer.status_code, answer.content
