"""The listener over HTTP: what senders, proxies and layers around it do to a notification, and what it must still be then."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware

from ipn_gateway import sources, tenants
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.serving import serving
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.web.app import create_app
from tests import adapters
from tests import world as worlds
from tests.web.conftest import Caller, pointers
from tests.world import SOURCE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from tests.world import World

PATH = f"/ipn/{SOURCE}"
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[World]:
    """A gateway beside a simulated provider, with one source and no order."""
    async with worlds.opened(database_url, clock, faults) as opened:
        yield opened


@pytest.fixture
def app(world: World) -> FastAPI:
    return create_app(world.rt)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as client:
        yield client
        await app.state.slots.drained()


@pytest.fixture
async def api(http: httpx.AsyncClient, world: World) -> Caller:
    """A caller of the world's tenant with all scopes."""
    return Caller(http, (await tenants.create_key(world.rt.db, TENANT)).key)


@pytest.fixture
def others() -> Iterator[None]:
    """Providers of other shapes."""
    with adapters.installed():
        yield


async def registered(api: Caller, order_id: str, amount: str) -> httpx.Response:
    body = {"order_id": order_id, "amount": amount, "currency": "BDT", "source": SOURCE}
    return await api("POST", "/v1/orders", json=body, headers={"Idempotency-Key": f"{order_id}-{amount}"})


# What the sender is told


@pytest.mark.case("B05")
async def test_a_sender_that_hangs_up_before_our_answer_is_told_the_same_later(world: World) -> None:
    """The first answer was lost on the wire: the repeat is no fault, it gets that answer, and only the audit has a row more."""
    await world.order("ORD-1")
    body = encode(world.pay("ORD-1"))
    async with serving(create_app(world.rt)) as url:
        async with httpx.AsyncClient(trust_env=False) as client:
            other = await client.post(f"{url}{PATH}", content=encode(world.pay("ORD-2")), headers=FORM)
        address = httpx.URL(url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM['content-type']}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.transport.abort()
        async with asyncio.timeout(10):
            while await world.value("SELECT count(*) FROM notification_deliveries") < 2:  # noqa: ASYNC110 - only the database tells
                await asyncio.sleep(0)
        await world.drain()
        before = await world.counts()
        async with httpx.AsyncClient(trust_env=False) as client:
            again = await client.post(f"{url}{PATH}", content=body, headers=FORM)
        await world.drain()

    assert await world.rows("SELECT outcome FROM notification_deliveries WHERE order_id = 'ORD-1' ORDER BY id") == [
        {"outcome": "applied"},
        {"outcome": "duplicate"},
    ]
    assert (again.status_code, again.json()) == (other.status_code, other.json() | {"delivery_id": again.headers["x-delivery-id"]})
    assert again.json()["status"] == "received"
    assert await world.counts() == before | {"notification_deliveries": before["notification_deliveries"] + 1}


@pytest.mark.case("B29")
async def test_a_provider_gets_the_very_bytes_that_it_demands(world: World, http: httpx.AsyncClient, others: None) -> None:
    """Here nothing at all; what it sent is stored all the same, and a refusal is a problem document as for every other."""
    given = {"business": "shop@example.test", "base_url": "http://127.0.0.1:9"}
    await sources.create(world.rt.db, world.rt.vault, TENANT, "echo-shop", provider="echopay", given=given, actor="test")

    taken = await http.post("/ipn/echo-shop", content=b"custom=ORD-1&payment_status=Pending&mc_gross=1.00", headers=FORM)
    refused = await http.post("/ipn/echo-shop", content=b"custom=ORD-1", headers=FORM)

    assert (taken.status_code, taken.content) == (200, b"")
    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/problem+json"
    assert await world.outcomes() == ["received", "malformed"]
    assert {"x-delivery-id"} <= set(taken.headers) & set(refused.headers)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("slash", ["", "/"])
async def test_only_a_post_is_taken(world: World, http: httpx.AsyncClient, method: str, slash: str) -> None:
    """405 with the one method that is; a source that does not exist is a 404 first, whatever the method. Nothing is stored."""
    known = await http.request(method, f"{PATH}{slash}", content=b"a=1")
    unknown = await http.request(method, f"/ipn/nobody{slash}", content=b"a=1")

    assert (known.status_code, known.headers["allow"], unknown.status_code) == (405, "POST", 404)
    assert await world.outcomes() == []


async def test_what_is_checked_first_is_answered(world: World, http: httpx.AsyncClient) -> None:
    """The source before the size, the size before the type, the type before the form, the form before the hash."""
    large: dict[str, Any] = {"content": b"a" * (64 * 1024 + 1), "headers": {"content-type": "application/json"}}
    asked = [
        await http.post("/ipn/nobody", **large),
        await http.get(PATH, headers={"content-length": "70000"}),
        await http.post(PATH, **large),
        await http.post(PATH, content=b"a b", headers={"content-type": "application/json"}),
        await http.post(PATH, content=b"a b", headers=FORM),
        await http.post(PATH, content=encode(FORGERIES["wrong_hash"](world.pay("ORD-1"))), headers=FORM),
    ]

    assert [answer.status_code for answer in asked] == [404, 405, 413, 415, 400, 401]
    assert {answer.headers["content-type"] for answer in asked} == {"application/problem+json"}
    assert ["x-delivery-id" in answer.headers for answer in asked] == [False, False, False, True, True, True]


# Money


@pytest.mark.case("B25")
async def test_an_order_finer_than_its_currency_is_refused_and_never_paid(world: World, api: Caller) -> None:
    """29.4847 taka cannot be owed: 422, so that one value is stored, sent and compared, and no tolerance is needed later."""
    assert pointers(await registered(api, "ORD-1", "29.4847")) == ["#/amount"]
    early = await world.notify(world.pay("ORD-1", "29.48"))
    await world.drain()
    assert await world.outcome(early) == ("parked", None)

    order = (await registered(api, "ORD-1", "29.48")).json()
    await world.drain()
    await registered(api, "ORD-2", "29.48")
    world.fault("validator", "fields", fields={"currency_amount": "29.4847"})
    rounded = await world.notify(world.pay("ORD-2", "29.48"))
    await world.drain()

    paid = (await api.get("/v1/orders/ORD-1")).json()
    assert (order["amount"], paid["amount"], paid["amount_paid"], paid["payments"][0]["amount"]) == ("29.48",) * 4
    assert await world.outcome(early) == ("applied", None)
    assert await world.outcome(rounded) == ("held", "amount")
    assert await world.status("ORD-2") == "pending"


@pytest.mark.case("B21")
async def test_a_large_sum_is_told_without_grouping_everywhere(world: World, api: Caller) -> None:
    """In the answer to its creation, when it is shown, in the list, in the events that are pulled and in the timeline."""
    created = (await registered(api, "ORD-1", "1234567.89")).json()
    await world.notify(world.pay("ORD-1", "1234567.89"))
    await world.drain()

    shown = (await api.get("/v1/orders/ORD-1")).json()
    listed = (await api.get("/v1/orders")).json()["items"][0]
    pulled = (await api.get("/v1/events")).json()["items"][0]["data"]
    timeline = (await api.get("/v1/orders/ORD-1/timeline")).json()["items"]
    sums = [created["amount"], *(order[name] for order in (shown, listed) for name in ("amount", "amount_paid"))]
    sums += [shown["payments"][0]["amount"], pulled["amount"], pulled["amount_paid"]]
    sums += [item["amount"] for item in timeline if item["kind"] in {"order", "effect", "payment"}]
    assert sums == ["1234567.89"] * len(sums)
    assert len(sums) == 5 + 3 + 3
    assert "1,234" not in api.heard()


@pytest.mark.case("B11")
async def test_a_stale_writer_cannot_bring_a_paid_order_back(world: World, api: Caller) -> None:
    """Who registers it again or cancels it, from what was known before the payment, gets a 409; the order stays paid."""
    await registered(api, "ORD-1", "1000.00")
    await world.notify(world.pay("ORD-1"))
    await world.drain()

    answers = [
        await registered(api, "ORD-1", "1000.0"),
        await api("POST", "/v1/orders/ORD-1/cancel", json={"reason": "unpaid for an hour"}, headers={"Idempotency-Key": "cancel-1"}),
    ]

    assert [answer.status_code for answer in answers] == [409, 409]
    order = (await api.get("/v1/orders/ORD-1")).json()
    assert (order["status"], order["amount_paid"]) == ("paid", "1000.00")
    assert await world.event_types() == ["order.paid"]


# Text


@pytest.mark.case("B37")
@pytest.mark.parametrize(
    ("written", "displayed"),
    [(r"abc\u0000def", "abc\u2400def"), (r"abc\\u0000def", r"abc\u0000def"), (r"abc\ud800def", "abc?def"), (r"abc\u09b6", "abc\u09b6")],
    ids=["NUL", "literal", "lone-surrogate", "Bengali"],
)
async def test_text_in_json_that_a_database_refuses_is_kept_and_shown_with_a_mark(
    world: World, api: Caller, others: None, written: str, displayed: str
) -> None:
    """The bytes are stored as they came and applied; the copy for display has a mark, and the six characters of an escape are only text."""
    given = {"merchant": "m-1", "secret": "s3cret"}
    await sources.create(world.rt.db, world.rt.vault, TENANT, "sign-shop", provider="signpay", given=given, actor="test")
    await world.order("ORD-1", source="sign-shop")
    members = '"order":"ORD-1","status":"captured","id":"P-1","amount":"1000.00","currency":"BDT"'
    body = f'{{{members},"memo":"{written}"}}'.encode()

    answer = await api.http.post("/ipn/sign-shop", content=body, headers={adapters.SIGNATURE: adapters.signature(body, "s3cret")})
    await world.drain()

    assert answer.status_code == 200
    delivery = (await api.get(f"/v1/notification-deliveries/{answer.json()['delivery_id']}")).json()
    assert (delivery["outcome"], delivery["fields"]["memo"]) == ("applied", displayed)
    assert base64.b64decode(delivery["raw_body_base64"]) == body
    assert (await world.rows("SELECT raw_body, sha256 FROM notification_deliveries")) == [
        {"raw_body": body, "sha256": hashlib.sha256(body).digest()}
    ]


@pytest.mark.case("B73")
@pytest.mark.parametrize("media_type", [None, "", "text/plain", "application/octet-stream"])
async def test_a_form_without_its_name_pays(world: World, http: httpx.AsyncClient, media_type: str | None) -> None:
    """No header at all, an empty one or a general one: the bytes are read as this provider's form."""
    await world.order("ORD-1")
    headers = {} if media_type is None else {"content-type": media_type}

    answer = await http.post(PATH, content=encode(world.pay("ORD-1")), headers=headers)
    await world.drain()

    assert answer.status_code == 200
    assert await world.outcomes() == ["applied"]


# What stands in front of it


@pytest.mark.case("B69")
@pytest.mark.parametrize("cors", [(), ("https://admin.example",)], ids=["no-origins", "with-origins"])
async def test_a_gateway_needs_no_cookie_and_no_token(world: World, cors: tuple[str, ...]) -> None:
    """Nor an origin that is known: the exemption is this path's; who acts for the merchant needs a key, whatever the browser sends."""
    app = create_app(replace(world.rt, settings=world.rt.settings.model_copy(update={"cors_origins": cors})))
    origins: list[dict[str, str]] = [{}, {"origin": "null"}, {"origin": "https://securepay.sslcommerz.com", "sec-fetch-site": "cross-site"}]
    answers = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as client:
        for number, headers in enumerate(origins):
            await world.order(f"ORD-{number}")
            answers.append(await client.post(PATH, content=encode(world.pay(f"ORD-{number}")), headers=FORM | headers))
            cancel = f"/v1/orders/ORD-{number}/cancel"
            acts = [await client.post(cancel, json={"reason": "x"}, headers=headers | {"cookie": "session=somebody"})]
            acts.append(await client.post("/v1/orders", content=b"{}", headers=headers))
            assert [act.status_code for act in acts] == [401, 401]
    await world.drain()

    assert [answer.status_code for answer in answers] == [200] * 3
    assert not any("set-cookie" in answer.headers for answer in answers)
    assert await world.outcomes() == ["applied"] * 3


@pytest.mark.case("B71")
async def test_behind_a_proxy_that_ends_tls_neither_slash_form_is_a_redirect(world: World, http: httpx.AsyncClient, api: Caller) -> None:
    """Both are the listener's; nobody is sent to an address with the scheme inside, and the one to configure has the scheme outside."""
    proxied = FORM | {"host": "pay.example", "x-forwarded-proto": "https", "x-forwarded-for": "192.0.2.7"}
    answers = []
    for number, path in enumerate((PATH, f"{PATH}/")):
        await world.order(f"ORD-{number}")
        answers.append(await http.post(path, content=encode(world.pay(f"ORD-{number}")), headers=proxied))
    await world.drain()
    elsewhere = [await api.get("/v1/orders/"), await api.get("/docs/"), await http.get(PATH), await http.get(f"{PATH}/")]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert await world.outcomes() == ["applied", "applied"]
    assert [answer.status_code for answer in elsewhere] == [404, 404, 405, 405]
    for answer in (*answers, *elsewhere):
        assert "location" not in answer.headers
        assert "http://" not in answer.text


@pytest.mark.case("B71")
async def test_the_address_to_configure_has_the_scheme_outside(world: World) -> None:
    """It is made from what the service is told to be called, never from the request that a proxy passed on."""
    app = create_app(replace(world.rt, public_url="https://pay.example"))
    key = (await tenants.create_key(world.rt.db, TENANT)).key
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://10.0.0.7:8000") as client:
        source = (await client.get(f"/v1/sources/{SOURCE}", headers={"Authorization": f"Bearer {key}"})).json()

    assert source["listener_url"] == f"https://pay.example{PATH}"


@pytest.mark.case("B75")
async def test_the_address_of_a_sender_decides_nothing(world: World) -> None:
    """A content network's, one that the provider added yesterday, none that is an address: the hash and the provider decide, it is kept."""
    rt = replace(world.rt, settings=world.rt.settings.model_copy(update={"trusted_proxies": ("10.0.0.0/8",)}))
    app = create_app(rt)
    senders = [("192.0.2.1", ""), ("10.0.0.1", "198.51.100.7"), ("10.0.0.1", "2001:db8::7"), ("10.0.0.1", "unknown"), ("127.0.0.1", "")]
    statuses = []
    for number, (peer, forwarded) in enumerate(senders):
        await world.order(f"ORD-{number}")
        fields = world.pay(f"ORD-{number}")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app, client=(peer, 1)), base_url="http://gateway.test") as client:
            for body in (encode(FORGERIES["wrong_hash"](fields)), encode(fields)):
                headers = FORM | ({"x-forwarded-for": forwarded} if forwarded else {})
                statuses.append((await client.post(PATH, content=body, headers=headers)).status_code)
    await world.drain()

    assert statuses == [401, 200] * len(senders)
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'paid'") == len(senders)
    found = await world.rows("SELECT remote_address, outcome FROM notification_deliveries ORDER BY id")
    assert [row["outcome"] for row in found] == ["rejected", "applied"] * len(senders)
    assert [row["remote_address"] for row in found[1::2]] == ["192.0.2.1", "198.51.100.7", "2001:db8::7", "10.0.0.1", "127.0.0.1"]


# Layers that read the body too


class Monitor(BaseHTTPMiddleware):
    """A layer that logs bodies, as monitoring does: it reads what the handler will read."""

    def __init__(self, app: ASGIApp, seen: list[bytes]) -> None:
        super().__init__(app)
        self._seen = seen

    async def dispatch(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        self._seen.append(await request.body())
        return await call_next(request)


class Recorder:
    """The same without a framework: the messages are read and played again."""

    def __init__(self, app: ASGIApp, seen: list[bytes]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        self._seen.append(b"".join(message.get("body", b"") for message in messages))

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)


def layered(kind: str, app: FastAPI, seen: list[bytes]) -> tuple[ASGIApp, str]:
    """The application with a layer inside or around it, and where it is then."""
    if kind == "inside":
        app.add_middleware(Monitor, seen=seen)
        return app, ""
    if kind == "around":
        return Monitor(app, seen), ""
    if kind == "recorded":
        return Recorder(app, seen), ""
    host = FastAPI()
    host.add_middleware(Monitor, seen=seen)
    host.mount("/pay", app)
    return host, "/pay"


@pytest.mark.case("B77")
@pytest.mark.parametrize("kind", ["inside", "around", "recorded", "mounted"])
async def test_a_layer_that_reads_the_body_takes_nothing_from_it(world: World, app: FastAPI, kind: str) -> None:
    """Hash, fields and the stored copy are of the very bytes that came in pieces; nobody waits for what was read before."""
    await world.order("ORD-1")
    seen: list[bytes] = []
    fields = world.signed(world.pay("ORD-1"), value_a="", value_d="x" * 30_000)
    body = encode(fields)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    layers, prefix = layered(kind, app, seen)
    async with serving(layers) as url, httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(10):
        answer = await client.post(f"{url}{prefix}{PATH}", content=pieces(), headers=FORM)
    await world.drain()

    assert answer.status_code == 200
    assert seen == [body]
    assert await world.rows("SELECT proof, outcome, raw_body, sha256 FROM notification_deliveries") == [
        {"proof": "proved", "outcome": "applied", "raw_body": body, "sha256": hashlib.sha256(body).digest()}
    ]
    assert answer.json()["status"] == "received"
