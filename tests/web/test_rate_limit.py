"""How often a tenant may call: what is refused, what is never refused, and what every answer says about it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import tenants
from ipn_gateway.clock import Clock
from ipn_gateway.web.app import create_app
from ipn_gateway.web.limits import HEADERS, Limiter
from tests.make import TENANT
from tests.web.conftest import ORDER, SOURCE, Caller, problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.runtime import Runtime

WRITTEN = ("sources", "source_secrets", "orders", "order_slots", "sweeps", "events", "event_deliveries", "idempotency_keys", "audit_log")


@asynccontextmanager
async def gateway(rt: Runtime, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application under other settings."""
    app = create_app(replace(rt, settings=rt.settings.model_copy(update=settings)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as client:
        yield client
        await app.state.slots.drained()


async def caller(rt: Runtime, http: httpx.AsyncClient, tenant: str = TENANT, *scopes: str) -> Caller:
    return Caller(http, (await tenants.create_key(rt.db, tenant, scopes or tenants.SCOPES)).key)


async def rows(rt: Runtime) -> dict[str, int]:
    async with rt.db.autocommit("test.rows") as tx:
        return {table: await tx.value(f"SELECT count(*) FROM {table}") for table in WRITTEN}


def standing(answer: httpx.Response) -> tuple[int, int, int]:
    limit, remaining, reset = (int(answer.headers[name]) for name in HEADERS)
    return limit, remaining, reset


@pytest.mark.case("S89", "S80")
async def test_who_calls_is_found_out_first_then_how_often_then_anything_else(rt: Runtime, clock: Clock) -> None:
    """A 401 and a 429 leave no row, whatever else is wrong with the call; when the window has moved on, the same key executes."""
    async with gateway(rt, rate_limit_per_tenant="1/hour") as http:
        api, nobody = await caller(rt, http), Caller(http, "ipn_" + "x" * 43)
        source = {"json": SOURCE, "headers": {"Idempotency-Key": "first"}}
        before = await rows(rt)

        refused = [await nobody("POST", "/v1/sources", **source) for _ in range(3)]
        assert {problem(answer) for answer in refused} == {(401, "unauthorized")}
        assert await rows(rt) == before

        assert (await api.get("/v1/sources")).status_code == 200
        late = [
            await api("POST", "/v1/sources", **source),
            await api("POST", "/v1/sources", content=b"{", params={"unknown": "1"}),
            await (await caller(rt, http, TENANT, "read"))("POST", "/v1/sources", **source),
            await api.get("/v1/orders/none"),
        ]
        assert {problem(answer) for answer in late} == {(429, "rate-limited")}
        assert await rows(rt) == before

        clock.advance(hours=1)
        assert (await api("POST", "/v1/sources", **source)).status_code == 201


@pytest.mark.case("S89")
async def test_every_answer_to_a_known_caller_says_where_it_stands(rt: Runtime) -> None:
    """Success, refusal and fault count alike and carry the three headers; an answer to a stranger has none."""
    async with gateway(rt, rate_limit_per_tenant="5/minute") as http:
        api, reader = await caller(rt, http), await caller(rt, http, TENANT, "read")
        answers = [
            await api.get("/v1/orders"),
            await api.get("/v1/orders/none"),
            await reader.post("/v1/sources", SOURCE),
            await api.post("/v1/sources", {"name": "-"}),
            await api.get("/v1/orders", unknown="1"),
            await api.get("/v1/orders"),
        ]
        unknown = await Caller(http, None).get("/v1/orders")

    assert [answer.status_code for answer in answers] == [200, 404, 403, 422, 400, 429]
    assert [standing(answer)[:2] for answer in answers] == [(5, 4), (5, 3), (5, 2), (5, 1), (5, 0), (5, 0)]
    assert all(1 <= standing(answer)[2] <= 60 for answer in answers)
    assert answers[-1].headers["retry-after"] == answers[-1].headers["ratelimit-reset"]
    assert "retry-after" not in answers[0].headers
    assert unknown.status_code == 401
    assert not {name.lower() for name in HEADERS} & set(unknown.headers)


async def test_a_fault_of_ours_says_where_the_caller_stands(shop: Caller, faults) -> None:
    """The answer is made outside of everything that knows the caller."""

    async def fault() -> None:
        raise RuntimeError

    faults.on["orders.list:statement_1"] = faults.on["orders.create:before_commit"] = fault

    answer = await shop("POST", "/v1/orders", json=ORDER, headers={"Idempotency-Key": "k1"})

    assert answer.status_code == 500
    assert standing(answer)[0] == 200


async def test_the_window_moves_call_by_call(rt: Runtime, clock: Clock) -> None:
    """After `Retry-After` exactly the calls that are as old as the window have made room; a refused call does not count."""
    async with gateway(rt, rate_limit_per_tenant="2/minute") as http:
        api = await caller(rt, http)

        await api.get("/v1/orders")
        clock.advance(seconds=20)
        second = await api.get("/v1/orders")
        refused = await api.get("/v1/orders")
        clock.advance(seconds=int(refused.headers["retry-after"]) - 1)
        still = await api.get("/v1/orders")
        clock.advance(seconds=int(still.headers["retry-after"]))
        third, fourth = await api.get("/v1/orders"), await api.get("/v1/orders")

    assert (second.status_code, standing(second)) == (200, (2, 0, 40))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "40")
    assert (still.status_code, still.headers["retry-after"]) == (429, "1")
    assert (third.status_code, fourth.status_code) == (200, 429)


async def test_tenants_do_not_share_and_keys_of_one_tenant_do(rt: Runtime) -> None:
    """Another tenant's calls take nothing away; a second key gives nothing more."""
    async with gateway(rt, rate_limit_per_tenant="2/hour") as http:
        first, second, stranger = await caller(rt, http), await caller(rt, http), await caller(rt, http, "other")

        statuses = [(await one.get("/v1/orders")).status_code for one in (first, second, first, second, stranger, stranger, stranger)]

    assert statuses == [200, 200, 429, 429, 200, 200, 429]


async def test_notifications_and_open_pages_are_never_limited(rt: Runtime) -> None:
    """A tenant that may not call any more still gets its notifications, and these take none of its calls."""
    async with gateway(rt, rate_limit_per_tenant="2/hour") as http:
        api = await caller(rt, http)
        await api.post("/v1/sources", SOURCE)

        notified = [await http.post("/ipn/shop-main", content=b"a=1") for _ in range(5)]
        last, refused = await api.get("/v1/orders"), await api.get("/v1/orders")
        after = [
            await http.post("/ipn/shop-main", content=b"a=1"),
            await api.get("/v1/contract"),
            await api.get("/healthz"),
            await api.get("/metrics"),
        ]

    assert {answer.status_code for answer in notified} == {400}  # stored, and malformed
    assert (last.status_code, refused.status_code) == (200, 429)
    assert [answer.status_code for answer in after] == [400, 200, 200, 200]
    assert not any(HEADERS[0].lower() in answer.headers for answer in after)


@pytest.mark.case("S77", "S76")
async def test_a_repeat_says_where_the_caller_stands_now(shop: Caller) -> None:
    """The stored answer comes back, with the headers of this call."""
    first, repeat = [await shop("POST", "/v1/orders", json=ORDER, headers={"Idempotency-Key": "once"}) for _ in range(2)]

    assert (first.status_code, repeat.status_code, repeat.headers.get("idempotent-replayed")) == (201, 201, "true")
    assert repeat.content == first.content
    assert standing(repeat)[1] < standing(first)[1]
    assert len(repeat.headers.get_list(HEADERS[0])) == 1


@pytest.mark.case("S13")
async def test_a_browser_may_read_the_headers(rt: Runtime) -> None:
    """They are exposed to the origins that may call."""
    async with gateway(rt, cors_origins=("https://admin.example",)) as http:
        answer = await (await caller(rt, http))("GET", "/v1/orders", headers={"Origin": "https://admin.example"})

    exposed = {name.strip().lower() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert exposed >= {"retry-after", "idempotent-replayed", *(name.lower() for name in HEADERS)}


async def test_the_rate_is_published(rt: Runtime) -> None:
    """The one that is enforced, with the names of the headers."""
    async with gateway(rt, rate_limit_per_tenant="7/minute") as http:
        published = (await http.get("/v1/contract")).json()["rate_limit"]

    assert published["per_tenant_and_process"] == "7/minute"
    assert set(HEADERS) < set(published["headers"])


async def test_no_more_than_the_window_is_remembered() -> None:
    """Tenants that are idle for a window leave memory, and so do the calls of those that go on."""
    clock = Clock()
    limiter = Limiter("3/second", clock)
    for number in range(1000):
        await limiter.take(f"tenant-{number}")
    for _ in range(20):
        clock.advance(seconds=0.5)
        await limiter.take("tenant-7")

    assert list(limiter._calls._times) == ["LIMITER/tenant-7/3/1/second"]
    assert len(limiter._calls._times["LIMITER/tenant-7/3/1/second"]) <= 3


@pytest.mark.parametrize("rate", ["1/second", "100/minute", "999999999/hour"])
async def test_whatever_may_be_set_works(rate: str) -> None:
    """Every rate that the settings take."""
    standing = await Limiter(rate, Clock()).take("shop")

    assert standing.let_through
    assert standing.remaining == int(rate.partition("/")[0]) - 1
