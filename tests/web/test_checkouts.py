"""Checkout over HTTP: what the body needs, what is answered and repeated, and a customer's whole way to a paid order."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from html import unescape
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import runtime, tenants, workers
from ipn_gateway.operations import KEY_HEADER, REPLAYED_HEADER
from ipn_gateway.simulator.serving import serving
from ipn_gateway.web.app import create_app
from tests import world as worlds
from tests.web.conftest import SOURCE as OTHER_SOURCE
from tests.web.conftest import Caller, pointers, problem
from tests.world import SOURCE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from tests.world import World

CUSTOMER = {
    "name": "রহিমা বেগম",
    "email": "rahima@example.test",
    "phone": "+8801700000000",
    "address": "12 Lake Road",
    "city": "Dhaka",
    "postcode": "1207",
    "country": "Bangladesh",
}
PRODUCT = {"name": "Tea, 250 g", "category": "grocery", "profile": "physical-goods"}
BODY = {"customer": CUSTOMER, "product": PRODUCT}
PATH = "/v1/orders/ORD-1/checkout"
SHOP = "https://shop.example/thanks"


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[World]:
    """A whole gateway beside a simulated provider, with the order ORD-1."""
    async with worlds.opened(database_url, clock, faults) as opened:
        await opened.order("ORD-1")
        yield opened


@pytest.fixture
def rt(world: World) -> runtime.Runtime:
    return world.rt


@pytest.fixture
async def api(http: httpx.AsyncClient, world: World) -> Caller:
    """The world's merchant, with all scopes."""
    return Caller(http, (await tenants.create_key(world.rt.db, TENANT)).key)


def asked(world: World) -> int:
    """How many sessions the provider was asked for."""
    return world.simulator.api.inits.total()


@pytest.mark.case("S74", "S75")
async def test_a_page_is_answered_and_repeated(api: Caller, world: World) -> None:
    """200 with where to send the customer and until when; a repeat is the same bytes, marked, and asks nobody."""
    first = await api.post(PATH, BODY, idempotency_key="k-1")
    again = await api.post(PATH, BODY, idempotency_key="k-1")

    assert first.status_code == 200
    assert first.headers["content-type"] == "application/json"
    assert set(first.json()) == {"redirect_url", "expires_at"}
    assert first.json()["redirect_url"].startswith(f"{world.provider_url}/pay/")
    assert first.json()["expires_at"].endswith("Z")
    assert REPLAYED_HEADER not in first.headers
    assert (again.status_code, again.content, again.headers[REPLAYED_HEADER]) == (200, first.content, "true")
    assert asked(world) == 1
    assert (await api.post(PATH, BODY, idempotency_key="k-2")).json() == first.json()
    assert asked(world) == 1


@pytest.mark.case("S74", "S78")
async def test_a_refusal_is_repeated(api: Caller, world: World) -> None:
    """A 409 problem with its code, in the same bytes, while the provider would say yes by now."""
    world.fault("init", "failed", value="Store is De-active")
    first = await api.post(PATH, BODY, idempotency_key="k-1")
    again = await api.post(PATH, BODY, idempotency_key="k-1")

    assert problem(first) == problem(again) == (409, "state-conflict")
    assert first.json()["provider_code"] == "failed_store_is"
    assert (again.content, again.headers[REPLAYED_HEADER], again.headers["content-language"]) == (first.content, "true", "en")
    assert asked(world) == 1


@pytest.mark.case("S80")
async def test_no_answer_of_the_provider_is_a_503_that_says_when_to_come_back(api: Caller, world: World) -> None:
    """And what to do then: the same request, with the same key."""
    world.fault("init", "html")
    first = await api.post(PATH, BODY, idempotency_key="k-1")

    assert problem(first) == (503, "overloaded")
    assert first.headers["retry-after"] == "5"
    assert "same key" in first.json()["detail"]
    assert (await api.post(PATH, BODY, idempotency_key="k-1")).status_code == 200


@pytest.mark.case("S43")
async def test_every_member_is_needed(api: Caller, world: World) -> None:
    """A text that says something, within its length and without control characters; what is refused leaves the key unused."""
    for group, members in BODY.items():
        assert pointers(await api.post(PATH, {name: BODY[name] for name in BODY if name != group})) == [f"#/{group}"]
        assert pointers(await api.post(PATH, BODY | {group: "text"})) == [f"#/{group}"]
        for name in members:
            without = BODY | {group: {other: members[other] for other in members if other != name}}
            wrong: list[Any] = ["", " \t", "a\nb", "a\x7fb", "a\x9bb", "x" * 256, None, 7, ["x"]]
            bodies = [without, *(BODY | {group: members | {name: value}} for value in wrong)]
            for body in bodies:
                assert pointers(await api.post(PATH, body, idempotency_key="k-1")) == [f"#/{group}/{name}"], body

    assert asked(world) == 0
    assert (await api.post(PATH, BODY, idempotency_key="k-1")).status_code == 200


def _to(email: str) -> dict[str, Any]:
    return BODY | {"customer": CUSTOMER | {"email": email}}


async def test_an_address_looks_like_one(api: Caller) -> None:
    """One @ between a name and a host with a dot; whether somebody reads there nobody can see."""
    for email in (
        "rahima",
        "@example.test",
        "rahima@",
        "rahima@host",
        "a@b@example.test",
        "a b@example.test",
        "a@example..test",
        "a@.test",
    ):
        assert pointers(await api.post(PATH, _to(email))) == ["#/customer/email"], email
    assert pointers(await api.post(PATH, _to(f"{'a' * 65}@example.test"))) == ["#/customer/email"]
    for email in ("a.b+tag@sub.example.test", "রহিমা@উদাহরণ.বাংলা"):
        assert (await api.post(PATH, _to(email))).status_code == 200, email


@pytest.mark.case("S25", "S28")
async def test_what_is_not_read_does_not_count(api: Caller, world: World) -> None:
    """Members that are unknown, their order and the space between them: the same request, written in another way."""
    first = await api.post(PATH, BODY, idempotency_key="k-1")
    product = {"sku": "T-250", **dict(reversed(PRODUCT.items()))}
    other = json.dumps({"sent_at": "2026-07-14T12:00:00Z", "product": product, "customer": CUSTOMER}, indent=3)
    again = await api("POST", PATH, content=other, headers={KEY_HEADER: "k-1", "Content-Type": "application/json"})

    assert (again.status_code, again.content) == (200, first.content)
    assert asked(world) == 1


@pytest.mark.case("S24")
async def test_the_key_is_needed_and_is_this_requests(api: Caller, http: httpx.AsyncClient, world: World) -> None:
    """None is a 400, two are a 400, and one that stands for another customer or order is a 422."""
    await world.order("ORD-2")
    bare = {"Authorization": f"Bearer {api.key}"}

    assert problem(await http.post(PATH, json=BODY, headers=bare)) == (400, "idempotency-key-missing")
    twice = [*bare.items(), (KEY_HEADER, "k-1"), (KEY_HEADER, "k-1")]
    assert problem(await http.post(PATH, json=BODY, headers=twice)) == (400, "idempotency-key-invalid")
    assert (await api.post(PATH, BODY, idempotency_key="k-1")).status_code == 200
    assert problem(await api.post(PATH, _to("other@example.test"), idempotency_key="k-1")) == (422, "idempotency-key-reused")
    assert problem(await api.post("/v1/orders/ORD-2/checkout", BODY, idempotency_key="k-1")) == (422, "idempotency-key-reused")
    assert problem(await api.post(f"{PATH}?dry=1", BODY, idempotency_key="k-1")) == (400, "unknown-parameter")


async def test_an_order_of_nobody_or_somebody_else_is_a_404(api: Caller, stranger: Caller, world: World) -> None:
    """Whatever the body says, and no key is taken by it."""
    await stranger.post("/v1/sources", OTHER_SOURCE)

    for body in (BODY, {}, {"customer": 5}):
        assert problem(await stranger.post(PATH, body)) == (404, "not-found")
        assert problem(await api.post("/v1/orders/ORD-9/checkout", body)) == (404, "not-found")
        assert problem(await api.post("/v1/orders/a%00b/checkout", body)) == (404, "not-found")
    assert await world.value("SELECT count(*) FROM idempotency_keys WHERE operation LIKE '%%checkout'") == 0
    assert asked(world) == 0


async def test_it_needs_the_scope_money(http: httpx.AsyncClient, world: World) -> None:
    """As everything that leads to a payment does."""
    made = await tenants.create_key(world.rt.db, TENANT, scopes=["read", "write"])

    assert problem(await Caller(http, made.key).post(PATH, BODY)) == (403, "forbidden")


def test_its_body_is_described_without_loose_ends(app: FastAPI) -> None:
    """Every member of the customer and the product stands in the document itself; no reference leads nowhere."""
    document = app.openapi()
    described = document["paths"]["/v1/orders/{order_id}/checkout"]["post"]

    schema = described["requestBody"]["content"]["application/json"]["schema"]
    for group, members in BODY.items():
        assert schema["properties"][group]["required"] == list(members)
    assert {"200", "400", "401", "403", "404", "409", "422", "429", "503"} <= set(described["responses"])
    assert described["responses"]["200"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Checkout"}
    assert not re.search(r"#/\$defs/", json.dumps(document))


# --- the whole way


class _Late:
    """An application that is there when its address is known."""

    def __init__(self) -> None:
        self.inner: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        assert self.inner is not None
        await self.inner(scope, receive, send)


@asynccontextmanager
async def reached(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[tuple[World, Caller]]:
    """A gateway on a socket, which provider and browsers reach under its public URL, with its workers."""
    late = _Late()
    async with (
        serving(late) as url,
        worlds.opened(database_url, clock, faults, public_url=url) as world,
        workers.running(world.rt, ("inbox", "dispatcher")),
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        late.inner = create_app(world.rt)
        yield world, Caller(http, (await tenants.create_key(world.rt.db, TENANT)).key)
        await late.inner.state.slots.drained()


def _form(page: str) -> tuple[str, dict[str, str]]:
    """The form of a page for browsers: where it goes and what is in it."""
    (action,) = re.findall(r'<form method="post" action="([^"]*)"', page)
    fields = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', page)
    return unescape(action), {unescape(name): unescape(value) for name, value in fields}


@pytest.mark.parametrize("action", ["pay", "fail"])
async def test_a_customers_whole_way(database_url: str, clock: Clock, faults: Faults, action: str) -> None:
    """Checkout, the provider's page, its notification and the way back to the shop; after a failed attempt the same page again."""
    async with reached(database_url, clock, faults) as (world, api):
        await world.order("ORD-1", return_url=SHOP)
        page = (await api.post(PATH, BODY)).json()["redirect_url"]

        if action == "fail":
            await api.http.post(page, data={"action": "fail"})
            assert await world.simulator.drained(seconds=10)
            assert (await api.post(PATH, BODY)).json()["redirect_url"] == page
        address, fields = _form((await api.http.post(page, data={"action": "pay"})).text)
        assert address == f"{world.rt.public_url}/return/{SOURCE}/success"
        back = await api.http.post(address, data=fields)
        assert await world.simulator.drained(seconds=10)
        order = (await api.get("/v1/orders/ORD-1")).json()

        assert (back.status_code, back.headers["location"]) == (303, f"{SHOP}?order_id=ORD-1&status=paid")
        assert (order["amount_paid"], len(order["payments"])) == ("1000.00", 1)
        assert await world.value("SELECT count(*) FROM notification_deliveries WHERE via = 'ipn'") == (1 if action == "pay" else 2)
        assert await world.value("SELECT count(*) FROM processed_notifications WHERE effect = 'paid'") == 1
        assert problem(await api.post(PATH, BODY)) == (409, "state-conflict")
        assert asked(world) == 1
