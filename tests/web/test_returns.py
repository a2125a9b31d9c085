"""A customer's browser comes back: what counts, what the customer is told, and what a stranger can do with the same address."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from ipn_gateway import tenants, workers
from ipn_gateway.errors import Overloaded
from ipn_gateway.returns import Standing
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.web.app import create_app
from tests import world as worlds
from tests.world import SOURCE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults

SHOP = "https://shop.example/thanks"
FORM = {"content-type": "application/x-www-form-urlencoded"}


class Browser:
    """A customer's browser, which follows nothing by itself, in front of a gateway."""

    def __init__(self, world: worlds.World, app: FastAPI, http: httpx.AsyncClient) -> None:
        self.world = world
        self.app = app
        self.http = http

    async def post(self, fields: dict[str, str] | bytes, end: str = "success", source: str = SOURCE, **headers: str) -> httpx.Response:
        body = fields if isinstance(fields, bytes) else encode(fields)
        return await self.http.post(f"/return/{source}/{end}", content=body, headers=FORM | headers)

    async def get(self, fields: dict[str, str], end: str = "success", source: str = SOURCE) -> httpx.Response:
        return await self.http.get(f"/return/{source}/{end}?{encode(fields).decode()}")


@pytest.fixture
def given() -> dict[str, Any]:
    """Settings of the gateway, which a test may override by parametrizing."""
    return {}


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults, given: dict[str, Any]) -> AsyncIterator[worlds.World]:
    """A gateway beside a simulated provider; its workers run only where a test asks for `working`."""
    async with worlds.opened(database_url, clock, faults, **given) as opened:
        yield opened


@pytest.fixture
async def working(world: worlds.World) -> AsyncIterator[None]:
    async with workers.running(world.rt, ("inbox", "maintenance")):
        yield


@pytest.fixture
async def browser(world: worlds.World) -> AsyncIterator[Browser]:
    app = create_app(world.rt)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as http:
        yield Browser(world, app, http)
        await app.state.slots.drained()


def told(answer: httpx.Response) -> dict[str, str]:
    """The query of the address that the browser is sent to, which is the shop's."""
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"].startswith(SHOP)
    return dict(parse_qsl(urlsplit(answer.headers["location"]).query))


def page(answer: httpx.Response, status: int = 200) -> str:
    """The text of a page for people."""
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    return answer.text


async def all_decided(world: worlds.World) -> None:
    """Wait until the workers have decided what came; a customer who is told of a payment does not wait for that."""
    async with asyncio.timeout(10):
        while await world.value("SELECT count(*) FROM inbox"):  # noqa: ASYNC110 - only the database tells
            await asyncio.sleep(0)


# --- who has paid


@pytest.mark.case("B01")
@pytest.mark.parametrize("method", ["post", "get"])
async def test_a_customer_who_paid_is_sent_to_the_shop_as_paid(browser: Browser, working: None, method: str) -> None:
    """Without any notification: the return is stored and validated as one would be, and the shop's own query stays."""
    world = browser.world
    await world.order("ORD-1", return_url=f"{SHOP}?lang=bn&status=old&order%5Fid=x#receipt")
    fields = world.pay("ORD-1")

    answer = await getattr(browser, method)(fields)

    assert answer.headers["location"] == f"{SHOP}?lang=bn&order_id=ORD-1&status=paid#receipt"
    assert answer.status_code == 303
    (row,) = await world.rows("SELECT via, proof, outcome, query, raw_body, headers FROM notification_deliveries")
    assert (row["via"], row["proof"], row["outcome"]) == ("return/success", "proved", "applied")
    assert (row["query"].encode(), row["raw_body"]) == ((b"", encode(fields)) if method == "post" else (encode(fields), b""))
    assert (await world.counts())["processed_notifications"] == 1


@pytest.mark.case("B01", "B11")
@pytest.mark.parametrize("first", ["notification", "return"])
async def test_whoever_comes_first_the_other_is_a_duplicate(browser: Browser, working: None, first: str) -> None:
    """One ledger for both ways in: one effect, one payment, one event, and the order stays paid."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    fields = world.pay("ORD-1")
    if first == "return":
        assert told(await browser.post(fields))["status"] == "paid"

    await world.notify(fields)
    world.rt.wakes.inbox.set()
    answers = [await browser.post(fields), await browser.post(fields, "cancel"), await browser.get(fields, "fail")]

    assert [told(answer)["status"] for answer in answers] == ["paid"] * 3
    await all_decided(world)
    counts = await world.counts()
    assert (counts["processed_notifications"], counts["payments"], counts["events"], counts["inbox"]) == (1, 1, 1, 0)
    assert sorted(set(await world.outcomes())) == ["applied", "duplicate"]
    assert await world.status("ORD-1") == "paid"


@pytest.mark.parametrize(("end", "status", "shown"), [("fail", "FAILED", "failed"), ("cancel", "CANCELLED", "cancelled")])
async def test_a_customer_who_did_not_pay_is_told_so(browser: Browser, working: None, end: str, status: str, shown: str) -> None:
    """Confirmed by the provider first; the order stays payable."""
    await browser.world.order("ORD-1", return_url=SHOP)

    answer = await browser.post(browser.world.pay("ORD-1", status=status), end)

    assert told(answer) == {"order_id": "ORD-1", "status": shown}
    assert told(await browser.post(browser.world.pay("ORD-1")))["status"] == "paid"


@pytest.mark.parametrize(("status", "sentence"), [("VALID", "was received"), ("FAILED", "did not succeed")])
async def test_without_a_return_url_a_page_says_the_same(browser: Browser, working: None, status: str, sentence: str) -> None:
    """Order and status, in words and as the API has them."""
    await browser.world.order("ORD-1")

    text = page(await browser.post(browser.world.pay("ORD-1", status=status)))

    assert sentence in text
    assert "ORD-1" in text
    assert f"<code>{'paid' if status == 'VALID' else 'failed'}</code>" in text


# --- how long one waits


@pytest.mark.parametrize("given", [{"return_wait_seconds": 0}])
async def test_without_a_wait_the_answer_is_at_once(browser: Browser) -> None:
    """IPN_RETURN_WAIT_SECONDS=0: pending, even where an earlier attempt failed, since this one may have paid."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    first = await browser.post(world.pay("ORD-1", status="FAILED"), "fail")
    await world.drain()
    assert await world.status("ORD-1") == "failed"

    second = await browser.post(world.pay("ORD-1"))

    assert told(first)["status"] == told(second)["status"] == "pending"
    await world.drain()
    assert await world.status("ORD-1") == "paid"


@pytest.mark.parametrize("given", [{"return_wait_seconds": 1.0}])
async def test_waiting_holds_no_connection(browser: Browser) -> None:
    """Three times as many customers wait as there are connections; others are served meanwhile, and all are told in the end."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    fields = world.pay("ORD-1")
    waiting = asyncio.gather(*(browser.post(fields) for _ in range(30)))
    await world.rt.wakes.inbox.wait()

    async with asyncio.timeout(0.9):
        others = [await browser.http.get("/readyz") for _ in range(3)]
        assert not waiting.done()
    answers = await waiting

    assert {answer.status_code for answer in others} == {200}
    assert {told(answer)["status"] for answer in answers} == {"pending"}


async def test_a_crowded_process_waits_for_nobody(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends genuine returns over and over cannot fill the process with waiting ones."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    monkeypatch.setattr("ipn_gateway.web.returns.WAITING_MAX", 0)

    async with asyncio.timeout(4):
        assert told(await browser.post(world.pay("ORD-1")))["status"] == "pending"


async def test_who_waits_is_told_when_another_process_decides(browser: Browser) -> None:
    """The database is asked, so it does not matter whose worker it was."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    waiting = asyncio.ensure_future(browser.post(world.pay("ORD-1")))
    await world.rt.wakes.inbox.wait()
    await world.drain()  # a worker that knows nothing of the browser

    assert told(await waiting)["status"] == "paid"


# --- who has proved nothing


BARE = {"tran_id": "ORD-1"}
FORGED = {"tran_id": "ORD-1", "status": "VALID", "amount": "1000.00", "currency": "BDT", "verify_sign": "0" * 32, "verify_key": "tran_id"}


@pytest.mark.case("B65")
@pytest.mark.parametrize("fields", [BARE, BARE | {"status": "VALID"}, FORGED])
@pytest.mark.parametrize("method", ["post", "get"])
async def test_opening_the_success_address_pays_nothing(browser: Browser, method: str, fields: dict[str, str]) -> None:
    """It is stored, the customer is told to wait, and the provider is asked about the order at most once a minute."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)

    asked = []
    for _ in range(3):
        for _ in range(5):
            assert told(await getattr(browser, method)(fields)) == {"order_id": "ORD-1", "status": "pending"}
            await world.sweep()
        asked.append(world.questions)
        world.rt.clock.advance(seconds=61)

    assert asked == [1, 2, 3]
    assert await world.status("ORD-1") == "pending"
    counts = await world.counts()
    assert counts["notification_deliveries"] == 15
    assert (counts["inbox"], counts["processed_notifications"], counts["events"], counts["sweeps"]) == (0, 0, 0, 1)


@pytest.mark.case("B65")
async def test_two_at_once_lead_to_one_question(browser: Browser) -> None:
    """The minute is counted in the database, in one row that both write."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)

    await asyncio.gather(*(browser.post(BARE) for _ in range(8)))
    await world.sweep()

    assert world.questions == 1


@pytest.mark.case("B65")
async def test_an_unproved_return_of_a_payment_finds_it(browser: Browser) -> None:
    """A changed store password makes genuine returns look forged: the question finds the money, and then the customer is told."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    fields = world.signed(world.pay("ORD-1"), "Another@Password")

    assert told(await browser.post(fields))["status"] == "pending"
    await world.sweep()

    assert told(await browser.post(fields))["status"] == "paid"
    assert await world.outcomes() == ["rejected", "rejected"]
    assert await world.value("SELECT count(*) FROM sweeps") == 0


@pytest.mark.case("B65")
async def test_nothing_is_asked_about_an_order_that_is_paid(browser: Browser) -> None:
    """Its customer is told that it is, and the provider is left alone."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    await world.notify(world.pay("ORD-1"))
    await world.drain()
    before = world.questions

    assert told(await browser.get(BARE))["status"] == "paid"
    await world.sweep()
    assert world.questions == before


async def test_what_names_no_order_of_ours_is_answered_with_a_page(browser: Browser) -> None:
    """Nothing, another's field names, an order that is not there, markup: being confirmed, and never a redirect."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)

    answers = [
        await browser.post(b""),
        await browser.get({"order_id": "ORD-1", "return_url": "https://elsewhere.example/"}),
        await browser.get({"tran_id": "ORD-2", "status": "VALID"}),
        await browser.post({"tran_id": "<script>alert(1)</script>", "status": "VALID"}),
        await browser.post(b"\xff=\x00&tran_id=ORD-1"),
        await browser.post(b"tran_id=ORD-1&tran_id=ORD-1"),
        await browser.http.post(f"/return/{SOURCE}/success", json={"tran_id": "ORD-1"}),
    ]

    for answer in answers:
        assert "is being confirmed" in page(answer)
        assert "<code>pending</code>" in answer.text
        assert "<script" not in answer.text
        assert "location" not in answer.headers
    assert await world.outcomes() == ["malformed", "malformed", "rejected", "malformed", "malformed", "malformed", "malformed"]


async def test_an_order_of_another_tenant_is_not_looked_up(browser: Browser) -> None:
    """The source says whose orders are meant: a stranger's source leads neither to a return_url nor to a status."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    await world.source("stranger", tenant="other")

    assert "<code>pending</code>" in page(await browser.get(BARE, source="stranger"))
    assert await world.value("SELECT count(*) FROM order_slots WHERE asked_at IS NOT NULL") == 0


# --- what browsers and proxies do


@pytest.mark.case("B69")
async def test_a_cross_site_post_needs_no_cookie_and_no_token(browser: Browser, working: None) -> None:
    """Browsers send no SameSite cookie along; nothing here needs one, sets one, or is kept in a cache."""
    await browser.world.order("ORD-1", return_url=SHOP)
    fields = browser.world.pay("ORD-1")

    for origin in ({}, {"origin": "null"}, {"origin": "https://securepay.sslcommerz.com"}):
        answer = await browser.post(fields, **origin, cookie="session=somebody", referer="https://secret.example/")

        assert told(answer)["status"] == "paid"
        assert "set-cookie" not in answer.headers
        assert (answer.headers["cache-control"], answer.headers["referrer-policy"]) == ("no-store", "no-referrer")
    assert "somebody" not in str(await browser.world.rows("SELECT * FROM notification_deliveries"))
    await all_decided(browser.world)


@pytest.mark.case("B71", "B73")
async def test_slash_and_media_type_are_taken_as_at_the_listener(browser: Browser, working: None) -> None:
    """A trailing slash is the same address, and a form may have no type or a general one."""
    for number, media_type in enumerate(("", "text/plain", "application/octet-stream")):
        await browser.world.order(f"ORD-{number}", return_url=SHOP)
        headers = {"content-type": media_type} if media_type else {}

        answer = await browser.http.post(f"/return/{SOURCE}/success/", content=encode(browser.world.pay(f"ORD-{number}")), headers=headers)

        assert told(answer) == {"order_id": f"ORD-{number}", "status": "paid"}


async def test_an_address_that_is_none_is_a_page(browser: Browser) -> None:
    """An unknown source or end is a 404 whatever the method, and nothing is stored."""
    for path in ("/return/nobody/success", f"/return/{SOURCE}/elsewhere"):
        for method in ("GET", "POST", "PUT", "HEAD"):
            page(await browser.http.request(method, path), 404)

    assert (await browser.world.counts())["notification_deliveries"] == 0


async def test_other_methods_are_refused(browser: Browser) -> None:
    """Who only looks, as link scanners do with HEAD, leaves no row."""
    for method in ("HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = await browser.http.request(method, f"/return/{SOURCE}/success")

        page(answer, 405)
        assert answer.headers["allow"] == "GET, POST"
    assert (await browser.world.counts())["notification_deliveries"] == 0


async def test_too_much_is_refused_with_a_page(browser: Browser) -> None:
    """Over 64 KiB, in the body or in the query."""
    fields = {"tran_id": "ORD-1", "value_a": "x" * 65536}

    page(await browser.post(fields), 413)
    assert await status_of(browser.app, f"/return/{SOURCE}/success", encode(fields)) == 413
    assert (await browser.world.counts())["notification_deliveries"] == 0


async def status_of(app: Any, path: str, query: bytes) -> int:
    """The status of a GET with a query that is longer than the client allows."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": [], "client": ("127.0.0.1", 1)}
    await app(scope, receive, send)
    return int(sent[0]["status"])


async def test_what_could_not_be_stored_is_said_to_people_too(browser: Browser, faults: Faults) -> None:
    """A page with Retry-After; to load it again sends the same fields again. A fault of ours is a page with an incident."""
    await browser.world.order("ORD-1", return_url=SHOP)
    fields = browser.world.pay("ORD-1")

    async def overloaded() -> None:
        raise Overloaded

    async def broken() -> None:
        raise ArithmeticError("the detail of it")

    faults.on["notifications.receive:before_commit"] = overloaded
    refused = await browser.post(fields)
    faults.on["notifications.receive:before_commit"] = broken
    failed = await browser.post(fields)
    faults.on.clear()

    assert "send it again" in page(refused, 503)
    assert refused.headers["retry-after"]
    assert "inc_" in page(failed, 500)
    assert "the detail of it" not in failed.text
    assert (await browser.world.counts())["notification_deliveries"] == 0


@pytest.mark.parametrize("given", [{"return_wait_seconds": 0.1}])
async def test_a_database_that_is_gone_after_storing_is_no_error(browser: Browser, faults: Faults) -> None:
    """The return is stored, so its customer is told to wait instead of being frightened."""

    async def gone() -> None:
        raise Overloaded

    await browser.world.order("ORD-1", return_url=SHOP)
    faults.on["returns.look:statement_1"] = gone

    assert "is being confirmed" in page(await browser.post(browser.world.pay("ORD-1")))


async def test_a_return_is_in_the_audit_like_any_other(browser: Browser) -> None:
    """By its route, with the fields of its query read and masked."""
    world = browser.world
    await world.order("ORD-1", return_url=SHOP)
    answer = await browser.get(BARE | {"status": "VALID", "cus_name": "Rahim"})
    key = (await tenants.create_key(world.rt.db, TENANT)).key

    shown = await browser.http.get(
        f"/v1/notification-deliveries/{answer.headers['x-delivery-id']}", headers={"Authorization": f"Bearer {key}"}
    )

    assert (shown.json()["via"], shown.json()["reason"], shown.json()["order_id"]) == ("return/success", "signature", "ORD-1")
    assert shown.json()["fields"] == {"tran_id": "ORD-1", "status": "VALID", "cus_name": "***"}


@pytest.mark.parametrize(
    ("registered", "location"),
    [
        ("https://shop.example", "https://shop.example?order_id=A-1&status=paid"),
        ("https://shop.example/?", "https://shop.example/?order_id=A-1&status=paid"),
        ("https://shop.example/a?b=1&&c", "https://shop.example/a?b=1&c&order_id=A-1&status=paid"),
        (
            "https://shop.example/a?status=x&status=y&b=%26#/end?status=z",
            "https://shop.example/a?b=%26&order_id=A-1&status=paid#/end?status=z",
        ),
        ("https://shop.example/a?STATUS=x", "https://shop.example/a?STATUS=x&order_id=A-1&status=paid"),
    ],
)
def test_order_and_status_are_added_to_any_return_url(registered: str, location: str) -> None:
    """What else is in the query stays as it was written, and the fragment stays last."""
    assert Standing("A-1", "paid", registered).location == location
