"""Public cases about keys: what went wrong elsewhere, with the input that showed it. The one with a killed process is beside this file."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import tenants
from ipn_gateway.errors import Overloaded
from ipn_gateway.operations import Finished
from tests.idempotency.service import Service, is_replay, told
from tests.make import TENANT
from tests.web.conftest import ORDER, SOURCE, Caller, problem

if TYPE_CHECKING:
    import httpx
    from fastapi import FastAPI

    from ipn_gateway.runtime import Runtime
    from tests.idempotency.service import Points

REUSED = (422, "idempotency-key-reused")


async def rows(rt: Runtime) -> int:
    """How many keys of `POST /v1/orders` there are."""
    async with rt.db.autocommit("test.count") as tx:
        return int(await tx.value("SELECT count(*) FROM idempotency_keys WHERE operation = 'POST /v1/orders'"))


@pytest.mark.case("B111", "S80", "S85", "S89")
async def test_a_throttled_or_refused_first_try_does_not_use_up_the_key(shop: Caller, app: FastAPI, rt: Runtime, faults: Points) -> None:
    """429, 401, 413, 503: a request that never reached its end takes nothing; the same key executes."""
    stranger = Caller(shop.http, "ipn_" + "0" * 43)
    faults.fail("orders.create:before_commit", Overloaded())
    first = [
        await stranger.post("/v1/orders", ORDER, idempotency_key="K1"),
        await shop.post("/v1/orders", ORDER | {"metadata": {"text": "x" * 70_000}}, idempotency_key="K1"),
        await shop.post("/v1/orders", ORDER, idempotency_key="K1"),
    ]
    limiter, app.state.limiter = app.state.limiter, type(app.state.limiter)("1/hour", rt.clock)
    await shop.get("/v1/orders")
    first.append(await shop.post("/v1/orders", ORDER, idempotency_key="K1"))
    app.state.limiter = limiter
    kept = await rows(rt)
    after = await shop.post("/v1/orders", ORDER, idempotency_key="K1")

    assert [answer.status_code for answer in first] == [401, 413, 503, 429]
    assert kept == 0
    assert (after.status_code, is_replay(after)) == (201, False)


@pytest.mark.case("B113", "S15", "S16")
async def test_the_keys_of_a_tenant_are_its_own(shop: Caller, stranger: Caller, rt: Runtime) -> None:
    """Another tenant with the same key and body, and with another body, executes its own; two API keys of one tenant share theirs."""
    await stranger.post("/v1/sources", SOURCE | {"name": "other-main", "config": SOURCE["config"] | {"store_id": "other"}})  # type: ignore[operator]
    first = await shop.post("/v1/orders", ORDER | {"metadata": {"of": "the-first"}}, idempotency_key="abc")
    same = await stranger.post("/v1/orders", ORDER | {"source": "other-main"}, idempotency_key="abc")
    other = await stranger.post("/v1/orders", ORDER | {"source": "other-main", "order_id": "ORD-2"}, idempotency_key="abcd")
    colleague = Caller(shop.http, (await tenants.create_key(rt.db, TENANT)).key)
    shared = await colleague.post("/v1/orders", ORDER | {"metadata": {"of": "the-first"}}, idempotency_key="abc")

    assert [(answer.status_code, is_replay(answer)) for answer in (first, same, other)] == [(201, False)] * 3
    assert (told(shared), is_replay(shared)) == (told(first), True)
    assert "the-first" not in stranger.heard()


@pytest.mark.case("B115", "S25")
async def test_the_same_json_in_another_order_is_the_same_request(shop: Caller) -> None:
    """Members reordered, other white space, é or its escape: the first answer."""
    order = ORDER | {"metadata": {"name": "café", "n": 1}}
    first = await shop.post("/v1/orders", order, idempotency_key="K1")
    for text in (
        json.dumps(dict(reversed(order.items()))),
        json.dumps(order, indent=4, ensure_ascii=False),
        json.dumps(order, separators=(",", ":")).replace("\\u00e9", "\\u00E9"),
    ):
        headers = {"Idempotency-Key": "K1", "Content-Type": "application/json"}
        answer = await shop("POST", "/v1/orders", headers=headers, content=text.encode())

        assert (told(answer), is_replay(answer)) == (told(first), True)


@pytest.mark.case("B117", "S76", "S83")
async def test_a_repeat_from_another_session_hears_nothing_of_the_first_one(service: Service) -> None:
    """No cookie, no challenge, no date, no request id; and an answer above the limit is not a reason to execute again."""
    session = (("Set-Cookie", "s=first"), ("WWW-Authenticate", 'Bearer realm="first"'), ("Date", "then"), ("X-Request-Id", "first"))
    _, second = await service.tell(Finished(200, b"{}", (*session, ("ETag", '"1"'))))
    _, large = await service.tell(Finished(200, b"x" * 70_000, media_type="text/plain"))

    assert is_replay(second)
    assert second.headers["etag"] == '"1"'
    assert "first" not in str(second.headers)
    assert not {"set-cookie", "www-authenticate", "date", "x-request-id"} & set(second.headers)
    assert (large.status_code, is_replay(large)) == (200, True)


GOOD = ["k", "k" * 255, "../x", "a'b;--", "<script>", "%00", "{}", "0"]
BAD: list[str | bytes] = [
    "",
    "k" * 256,
    "k" * 10_000,
    " ",
    "   ",
    "a b",
    "a\0b",
    "\N{PILE OF POO}",
    "\N{BENGALI DIGIT ONE}",
    b"a\r\nX: y",
    "a,b",
    "a\tb",
]


@pytest.mark.case("B119", "S4", "S5")
async def test_length_and_characters_of_a_key_are_checked(shop: Caller, rt: Runtime) -> None:
    """1 to 255 of the published alphabet, as it stands; the rest is a 400 and never a 500, and no two keys are made equal."""
    good, bad = [], []
    for number, key in enumerate(GOOD):
        good.append(await shop.post("/v1/orders", ORDER | {"order_id": f"ORD-{number}"}, idempotency_key=key))
    for value in BAD:
        raw = value if isinstance(value, bytes) else value.encode()
        headers = [(b"authorization", f"Bearer {shop.key}".encode()), (b"idempotency-key", raw)]
        bad.append(await shop.http.post("/v1/orders", json=ORDER, headers=headers))
    lower, upper = [await shop.post("/v1/orders", ORDER | {"order_id": f"ORD-{key}"}, idempotency_key=key) for key in ("aB", "Ab")]

    assert [(answer.status_code, is_replay(answer)) for answer in good] == [(201, False)] * len(GOOD)
    assert {problem(answer) for answer in bad} == {(400, "idempotency-key-invalid")}
    assert (lower.status_code, upper.status_code) == (201, 201)
    assert await rows(rt) == len(GOOD) + 2


@pytest.mark.case("B121", "S37", "S34", "S46")
async def test_two_first_requests_at_once_are_no_error(shop: Caller, rt: Runtime) -> None:
    """Twenty with one body: one order. Then ten and ten with two bodies: one order of one of them, the others hear 422 or wait; no 500."""
    one = await asyncio.gather(*(shop.post("/v1/orders", ORDER, idempotency_key="K1") for _ in range(20)))
    bodies: list[dict[str, Any]] = [ORDER | {"order_id": order_id} for order_id in ("ORD-X", "ORD-Y")]
    two = await asyncio.gather(*(shop.post("/v1/orders", bodies[n % 2], idempotency_key="K2") for n in range(20)))
    listed = [order["order_id"] for order in (await shop.get("/v1/orders")).json()["items"]]
    (winner,) = set(listed) - {"ORD-1"}
    losers = [answer for n, answer in enumerate(two) if bodies[n % 2]["order_id"] != winner]

    assert kinds(one).keys() <= {"executed", "replayed", "409 idempotency-in-progress"}
    assert kinds(one)["executed"] == kinds(two)["executed"] == 1
    assert kinds(two).keys() <= {"executed", "replayed", "409 idempotency-in-progress", "422 idempotency-key-reused"}
    assert {problem(answer) for answer in losers} == {REUSED}
    assert len(listed) == 2
    assert await rows(rt) == 2


def kinds(answers: list[httpx.Response]) -> Counter[str]:
    """What they were answered."""
    return Counter(
        "replayed" if is_replay(answer) else "executed" if answer.status_code == 201 else "{} {}".format(*problem(answer))
        for answer in answers
    )


@pytest.mark.case("B123", "S8")
async def test_a_key_on_a_get_is_ignored(shop: Caller, rt: Runtime) -> None:
    """What is read is of now, however often the key was used; and the POST that comes with it executes."""
    await shop.post("/v1/orders", ORDER)
    first = await shop("GET", "/v1/orders/ORD-1", headers={"Idempotency-Key": "K"})
    async with rt.db.transaction("test.pay") as tx:
        await tx.execute("UPDATE orders SET status = 'paid', amount_paid = amount")
    second = await shop("GET", "/v1/orders/ORD-1", headers={"Idempotency-Key": "K"})
    posted = await shop.post("/v1/orders", ORDER | {"order_id": "ORD-2"}, idempotency_key="K")

    assert (first.json()["status"], second.json()["status"]) == ("pending", "paid")
    assert not is_replay(second)
    assert (posted.status_code, is_replay(posted)) == (201, False)
    assert await rows(rt) == 2


@pytest.mark.case("S96")
async def test_an_order_is_not_made_twice_when_its_key_is_long_forgotten(shop: Caller, rt: Runtime) -> None:
    """A month later somebody runs the failed batch again: the key is new by then, and the order's own id still holds."""
    first = await shop.post("/v1/orders", ORDER, idempotency_key="K1")
    rt.clock.advance(days=30)
    async with rt.db.transaction("test.prune") as tx:
        await tx.execute("DELETE FROM idempotency_keys WHERE expires_at < ipn_now()")
    late = await shop.post("/v1/orders", ORDER, idempotency_key="K1")
    repeat = await shop.post("/v1/orders", ORDER, idempotency_key="K1")

    assert first.status_code == 201
    assert problem(late) == (409, "order-exists")
    assert "ORD-1" in late.json()["detail"]
    assert (told(repeat), is_replay(repeat)) == (told(late), True)
    assert (await shop.get("/v1/orders")).json()["items"] == [first.json()]
