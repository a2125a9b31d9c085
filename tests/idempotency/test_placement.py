"""Where the layer stands: behind who calls and how often, before the work, and beside the connection of the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from ipn_gateway import tenants
from ipn_gateway.simulator.serving import serving
from ipn_gateway.web.app import create_app
from tests.idempotency.service import Service, is_replay
from tests.make import TENANT
from tests.web.conftest import ORDER, Caller, problem

if TYPE_CHECKING:
    from ipn_gateway.runtime import Runtime

KIBIBYTES_64 = 64 * 1024


@pytest.mark.case("S88")
async def test_who_may_hear_the_answer_is_asked_again(shop: Caller, rt: Runtime) -> None:
    """A stored answer is not for a key that was revoked since, nor for one that never had the scope."""
    made = await tenants.create_key(rt.db, TENANT)
    caller = Caller(shop.http, made.key)
    first = await caller.post("/v1/orders", ORDER, idempotency_key="K1")
    await tenants.revoke_key(rt.db, TENANT, made.key_id)
    rt.clock.advance(seconds=2)
    revoked = await caller.post("/v1/orders", ORDER, idempotency_key="K1")
    reader = Caller(shop.http, (await tenants.create_key(rt.db, TENANT, ["read"])).key)
    without_scope = await reader.post("/v1/orders", ORDER, idempotency_key="K1")

    assert first.status_code == 201
    assert problem(revoked) == (401, "unauthorized")
    assert problem(without_scope) == (403, "forbidden")
    assert "ORD-1" not in revoked.text + without_scope.text
    assert is_replay(await shop.post("/v1/orders", ORDER, idempotency_key="K1"))


@pytest.mark.case("S89")
async def test_what_is_refused_before_the_layer_leaves_no_row(shop: Caller, rt: Runtime) -> None:
    """Authentication, then the limit of calls, then the key, then the operation: the same key executes when the way is free."""
    rt_small = create_app(rt)
    rt_small.state.limiter = type(rt_small.state.limiter)("1/minute", rt.clock)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(rt_small), base_url="http://gateway.test") as http:
        caller = Caller(http, shop.key)
        await caller.get("/v1/orders")
        unknown = await Caller(http, "ipn_" + "x" * 43).post("/v1/orders", ORDER, idempotency_key="K1")
        limited = [await caller.post("/v1/orders", ORDER, idempotency_key=key) for key in ("K1", "no, key")]
        rt.clock.advance(seconds=61)
        executed = await caller.post("/v1/orders", ORDER, idempotency_key="K1")
        await rt_small.state.slots.drained()

    assert problem(unknown) == (401, "unauthorized")
    assert [problem(answer) for answer in limited] == [(429, "rate-limited")] * 2
    assert (executed.status_code, is_replay(executed)) == (201, False)


@pytest.mark.case("S90")
@pytest.mark.parametrize("path", ["notes", "charges", "payouts"])
async def test_a_client_that_gives_up_is_answered_when_it_comes_again(service: Service, path: str) -> None:
    """It closes its connection while the provider takes its time, and tries again: one charge, and the answer that it would have had."""
    point = f"{path}.write:before_commit" if path == "notes" else f"{path}.receipt:before_commit"
    reached, go = service.faults.hold(point)
    async with serving(service.app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        headers = {"Idempotency-Key": "K1", "X-Tenant": "acme"}
        impatient = service.start(http.post(f"/v1/{path}", json={}, headers=headers))
        await reached.wait()
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        during = await http.post(f"/v1/{path}", json={}, headers=headers)
        go.set()
        assert await service.app.state.idempotency.drained(seconds=10)
        after = await http.post(f"/v1/{path}", json={}, headers=headers)

    assert problem(during) == (409, "idempotency-in-progress")
    assert (after.status_code, is_replay(after)) == (201, True)
    assert service.provider.done == (0 if path == "notes" else 1)
    assert await service.acts() == (["noted"] if path == "notes" else ["begun", "recorded", "receipt"])


@pytest.mark.case("S90")
async def test_our_own_api_goes_on_when_its_client_is_gone(shop: Caller, rt: Runtime) -> None:
    """On a real server: the order is registered, and the next try gets the answer of the first."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await go.wait()

    rt.faults.on["orders.create:before_commit"] = wait
    app = create_app(rt)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        caller = Caller(http, shop.key)
        impatient = asyncio.ensure_future(caller.post("/v1/orders", ORDER, idempotency_key="K1"))
        await reached.wait()
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        go.set()
        assert await app.state.slots.drained(seconds=10)
        after = await caller.post("/v1/orders", ORDER, idempotency_key="K1")

    assert (after.status_code, is_replay(after)) == (201, True)
    assert len((await shop.get("/v1/orders")).json()["items"]) == 1


@pytest.mark.case("S90")
@pytest.mark.parametrize("path", ["notes", "charges", "payouts"])
async def test_a_server_that_cancels_the_request_cancels_no_operation(service: Service, path: str) -> None:
    """Some do so when the client is gone, as does any middleware with a limit: the operation is a task of its own and ends."""
    reached, go = service.faults.hold(f"{path}.write:before_commit" if path == "notes" else f"{path}.record:before_commit")
    request = service.start(service.post(path))
    await reached.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    go.set()
    assert await service.app.state.idempotency.drained(seconds=10)
    after = await service.post(path)

    assert (after.status_code, is_replay(after)) == (201, True)
    assert await service.acts() == (["noted"] if path == "notes" else ["begun", "recorded", "receipt"])
