"""The application over a runtime of the test's own, and callers with keys."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import runtime, settings, tenants
from ipn_gateway.web.app import create_app
from tests.make import TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from ipn_gateway.runtime import Runtime

CONFIG = {"store_id": "teststore", "store_passwd": "Pa#ss$1 =x", "mode": "sandbox"}
SOURCE = {"name": "shop-main", "provider": "sslcommerz", "config": CONFIG}
ORDER = {"order_id": "ORD-1", "amount": "100.00", "currency": "BDT", "source": "shop-main"}
ENDPOINT = {"url": "https://subscriber.example/events"}


@dataclass
class Caller:
    """A client with a key; `answers` keeps everything that it was told."""

    http: httpx.AsyncClient
    key: str | None = field(repr=False)
    answers: list[httpx.Response] = field(default_factory=list)

    async def __call__(self, method: str, path: str, **given: Any) -> httpx.Response:
        headers = httpx.Headers({"Authorization": f"Bearer {self.key}"} if self.key else {})
        if method == "POST":
            headers["Idempotency-Key"] = secrets.token_hex(8)  # a new one for each call, where the test gives none
        headers.update(given.pop("headers", {}))
        answer = await self.http.request(method, path, headers=headers, **given)
        self.answers.append(answer)
        return answer

    async def get(self, path: str, **query: Any) -> httpx.Response:
        return await self("GET", path, params=query)

    async def post(self, path: str, body: Any = None, *, idempotency_key: str | None = None) -> httpx.Response:
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return await self("POST", path, headers=headers, **({} if body is None else {"json": body}))

    async def patch(self, path: str, body: Any) -> httpx.Response:
        return await self("PATCH", path, json=body)

    async def delete(self, path: str) -> httpx.Response:
        return await self("DELETE", path)

    def heard(self) -> str:
        """All that the client was told, headers too."""
        return "\n".join(f"{answer.headers} {answer.text}" for answer in self.answers)


@pytest.fixture
async def rt(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Runtime]:
    chosen = settings.load(database_url=SecretStr(database_url), secret_key=Fernet.generate_key().decode())
    async with runtime.opened(chosen, database_url, public_url="https://pay.example", clock=clock, faults=faults) as opened:
        yield opened


@pytest.fixture
def app(rt: Runtime) -> FastAPI:
    return create_app(rt)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as client:
        yield client
        await app.state.slots.drained()


@pytest.fixture
async def api(http: httpx.AsyncClient, rt: Runtime) -> Caller:
    """A caller of the tenant `shop` with all scopes."""
    return Caller(http, (await tenants.create_key(rt.db, TENANT)).key)


@pytest.fixture
async def stranger(http: httpx.AsyncClient, rt: Runtime) -> Caller:
    """A caller of another tenant with all scopes."""
    return Caller(http, (await tenants.create_key(rt.db, "other")).key)


@pytest.fixture
async def shop(api: Caller) -> Caller:
    """The caller `api`, with the source `shop-main`."""
    assert (await api.post("/v1/sources", SOURCE)).status_code == 201
    return api


def problem(answer: httpx.Response) -> tuple[int, str]:
    """The status and slug of a problem document, which is checked to be one."""
    body = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert {"type", "title", "status", "detail"} <= set(body)
    assert body["status"] == answer.status_code
    return answer.status_code, body["type"].removeprefix("/problems/")


def pointers(answer: httpx.Response) -> list[str]:
    """What a 422 points at."""
    assert problem(answer) == (422, "validation-failed")
    return [error.get("pointer") or error["parameter"] for error in answer.json()["errors"]]
