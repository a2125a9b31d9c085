"""Refunds over HTTP: what is taken, what is answered, and what a repeat gets."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import ids, tenants
from ipn_gateway.web.app import create_app
from tests import world as worlds
from tests.refunding import ORDER, Desk
from tests.web.conftest import Caller, pointers, problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults

PATH = "/v1/orders/ORD-1/refunds"
REFUND = {"reference": "R-1", "amount": "400.00", "reason": "sent back"}


@pytest.fixture
async def desk(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Desk]:
    """A gateway with one paid order of 1000.00."""
    async with worlds.opened(database_url, clock, faults) as world:
        opened = Desk(world)
        await opened.paid()
        yield opened


@pytest.fixture
async def http(desk: Desk) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(desk.world.rt)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as client:
        yield client
        await app.state.slots.drained()


@pytest.fixture
async def merchant(http: httpx.AsyncClient, desk: Desk) -> Caller:
    """The merchant, with all scopes."""
    return Caller(http, (await tenants.create_key(desk.world.rt.db, worlds.TENANT)).key)


async def order(merchant: Caller) -> dict[str, Any]:
    """The order as it stands."""
    shown: dict[str, Any] = (await merchant.get("/v1/orders/ORD-1")).json()
    return shown


# What is answered


@pytest.mark.case("S86", "S74", "S75", "S76")
async def test_a_refund_is_accepted_and_its_order_shows_it(merchant: Caller, desk: Desk) -> None:
    """202 with its name and where to look; a repeat gets the same bytes with the mark, whatever became of it since."""
    first = await merchant.post(PATH, REFUND, idempotency_key="one")
    (accepted,) = (await order(merchant))["refunds"]
    await desk.finish()
    again = await merchant.post(PATH, REFUND, idempotency_key="one")
    now = await order(merchant)

    assert (first.status_code, again.status_code) == (202, 202)
    assert first.headers["location"] == again.headers["location"] == "/v1/orders/ORD-1"
    assert first.content == again.content
    assert ("idempotent-replayed" in first.headers, again.headers["idempotent-replayed"]) == (False, "true")
    assert set(first.json()) == {"refund_id", "reference", "order_id", "payment_id", "amount", "currency"}
    assert first.json() == {name: accepted[name] for name in first.json()}
    assert (accepted["status"], now["refunds"][0]["status"]) == ("processing", "succeeded")
    assert (now["status"], now["amount_refunded"], now["payments"][0]["amount_refunded"]) == ("partially_refunded", "400.00", "400.00")


@pytest.mark.case("S78")
async def test_a_declined_refund_is_shown_whole(merchant: Caller, desk: Desk) -> None:
    """201 with the object as its order has it, final."""
    desk.unclear("failed", value="no balance")

    answer = await merchant.post(PATH, REFUND)

    assert answer.status_code == 201
    assert answer.json() == (await order(merchant))["refunds"][0]
    assert (answer.json()["status"], answer.json()["reason"]) == ("failed", "sent back")


@pytest.mark.case("S59", "S44")
async def test_an_unknown_outcome_has_a_problem_of_its_own(merchant: Caller, desk: Desk) -> None:
    """409 with the name under which it is resolved, and a long wait; what is refused by its reference is another 409."""
    desk.unclear("record_then_reset")
    unknown = await merchant.post(PATH, REFUND, idempotency_key="one")
    taken = await merchant.post(PATH, REFUND, idempotency_key="two")

    key_id = unknown.json()["reconciliation_id"]
    assert problem(unknown) == (409, "idempotency-indeterminate")
    assert int(unknown.headers["retry-after"]) == 3600
    assert (await merchant.get(f"/v1/idempotency-keys/{key_id}")).json()["state"] == "indeterminate"
    assert (await order(merchant))["refunds"][0]["status"] == "indeterminate"
    assert problem(taken) == (409, "state-conflict")
    assert taken.json()["refund_id"] == (await order(merchant))["refunds"][0]["refund_id"]


@pytest.mark.case("S62")
async def test_a_person_settles_it_over_the_api(merchant: Caller, desk: Desk) -> None:
    """With the id from the provider's panel the first request's 202 is there for its repeats, and the refund goes on."""
    desk.unclear("record_then_reset")
    unknown = await merchant.post(PATH, REFUND, idempotency_key="one")
    (ref_id,) = desk.world.simulator.api.refunds.by_ref_id
    act = {"decision": "applied", "reason": "seen in the panel", "evidence": {"provider_refund_id": ref_id}}

    settled = await merchant.post(f"/v1/idempotency-keys/{unknown.json()['reconciliation_id']}/resolve", act)
    again = await merchant.post(PATH, REFUND, idempotency_key="one")
    await desk.poll()
    await desk.finish()
    story = (await merchant.get("/v1/orders/ORD-1/timeline")).json()["items"]

    assert settled.status_code == 200, settled.text
    assert (again.status_code, again.headers["idempotent-replayed"]) == (202, "true")
    assert (await order(merchant))["status"] == "partially_refunded"
    assert [item["summary"] for item in story if item["kind"] == "refund"] == [
        "A refund of 400.00 BDT under the reference R-1 is succeeded."
    ]
    assert [item["action"] for item in story if item["kind"] == "act"] == ["idempotency_key.applied"]


@pytest.mark.case("S80")
async def test_an_unreachable_provider_is_a_503_that_is_not_kept(merchant: Caller, desk: Desk) -> None:
    """With a time to wait; the same key then refunds."""
    source = f"/v1/sources/{worlds.SOURCE}"
    await merchant.patch(source, {"config": {"base_url": "http://127.0.0.1:1"}})
    first = await merchant.post(PATH, REFUND, idempotency_key="one")
    await merchant.patch(source, {"config": {"base_url": desk.world.provider_url}})

    again = await merchant.post(PATH, REFUND, idempotency_key="one")

    assert problem(first) == (503, "overloaded")
    assert int(first.headers["retry-after"]) >= 1
    assert again.status_code == 202
    assert "idempotent-replayed" not in again.headers


# What is taken


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"reference": None}, "#/reference"),
    ({"reference": ""}, "#/reference"),
    ({"reference": "a b"}, "#/reference"),
    ({"reference": "R/1"}, "#/reference"),
    ({"reference": "R-1\n"}, "#/reference"),
    ({"reference": "x" * 65}, "#/reference"),
    ({"reference": "\N{BENGALI DIGIT ONE}"}, "#/reference"),
    ({"reference": 1}, "#/reference"),
    ({"amount": None}, "#/amount"),
    ({"amount": 400}, "#/amount"),
    ({"amount": 400.5}, "#/amount"),
    ({"amount": "0.00"}, "#/amount"),
    ({"amount": "-1.00"}, "#/amount"),
    ({"amount": "1e2"}, "#/amount"),
    ({"amount": "0.001"}, "#/amount"),
    ({"amount": "\N{BENGALI DIGIT ONE}"}, "#/amount"),
    ({"amount": "1" * 13}, "#/amount"),
    ({"reason": None}, "#/reason"),
    ({"reason": " "}, "#/reason"),
    ({"reason": "x" * 501}, "#/reason"),
    ({"payment_id": 1}, "#/payment_id"),
    ({"payment_id": "pay_1"}, "#/payment_id"),
    ({"payment_id": f"pay_{'0' * 32}"}, "#/payment_id"),
]


@pytest.mark.case("S43", "S26")
@pytest.mark.parametrize(("change", "pointer"), IMPOSSIBLE)
async def test_what_cannot_be_is_refused_and_saves_nothing(merchant: Caller, desk: Desk, change: dict[str, Any], pointer: str) -> None:
    """422 that points at the member; the corrected request with the same key is executed."""
    refused = await merchant.post(PATH, REFUND | change, idempotency_key="one")
    kept = await desk.world.value("SELECT count(*) FROM idempotency_keys")
    corrected = await merchant.post(PATH, REFUND, idempotency_key="one")

    assert pointers(refused) == [pointer]
    assert kept == 0
    assert corrected.status_code == 202


async def test_a_reason_and_a_reference_are_needed(merchant: Caller) -> None:
    """As is the amount; the payment is not."""
    answer = await merchant.post(PATH, {})

    assert sorted(pointers(answer)) == ["#/amount", "#/reason", "#/reference"]


@pytest.mark.parametrize("reference", ["a", "x" * 64, "2026.07_R-1"])
async def test_references_that_are_taken(merchant: Caller, reference: str) -> None:
    """One to 64 characters, with dots, underscores and dashes, as they are."""
    answer = await merchant.post(PATH, REFUND | {"reference": reference})

    assert (answer.status_code, answer.json()["reference"]) == (202, reference)


@pytest.mark.case("S25", "S27", "S24")
async def test_the_same_request_is_what_asks_for_the_same(merchant: Caller, desk: Desk) -> None:
    """400 and 400.00 are one amount, and unknown members count for nothing; any other amount, reference, reason or payment does."""
    first = await merchant.post(PATH, REFUND, idempotency_key="one")
    equal = await merchant.post(PATH, {"reason": "sent back", "amount": "400", "reference": "R-1", "note": 1}, idempotency_key="one")
    others = [
        await merchant.post(PATH, REFUND | change, idempotency_key="one")
        for change in ({"amount": "400.01"}, {"reference": "R-2"}, {"reason": "lost"}, {"payment_id": first.json()["payment_id"]})
    ]

    assert (equal.status_code, equal.content) == (202, first.content)
    assert [problem(answer) for answer in others] == [(422, "idempotency-key-reused")] * 4
    assert list(desk.calls.values()) == [1]


@pytest.mark.case("S19")
async def test_the_order_is_part_of_the_request(merchant: Caller, desk: Desk) -> None:
    """One key for two orders is a 422, not the first order's answer."""
    await desk.paid("ORD-2")
    await merchant.post(PATH, REFUND, idempotency_key="one")

    assert problem(await merchant.post("/v1/orders/ORD-2/refunds", REFUND, idempotency_key="one")) == (422, "idempotency-key-reused")


async def test_a_surplus_in_another_currency_is_given_back_in_that(merchant: Caller, desk: Desk) -> None:
    """The amount of a named payment has its currency's decimals: a second payment may be in another one than the order."""
    await desk.payment(ORDER, "20.00", "USD")
    surplus = ids.show(ids.PAYMENT, await desk.world.value("SELECT id FROM payments WHERE status = 'unapplied'"))

    answer = await merchant.post(PATH, REFUND | {"payment_id": surplus, "amount": "20.00"})

    assert (answer.status_code, answer.json()["amount"], answer.json()["currency"]) == (202, "20.00", "USD")


# Who may


async def test_a_key_is_required(merchant: Caller, http: httpx.AsyncClient) -> None:
    """Without one nothing is looked at."""
    answer = await http.post(PATH, json=REFUND, headers={"Authorization": f"Bearer {merchant.key}"})

    assert problem(answer) == (400, "idempotency-key-missing")


async def test_only_the_cashier_refunds(merchant: Caller, http: httpx.AsyncClient, desk: Desk) -> None:
    """Every scope but `money` is not enough."""
    scopes: Any = ["read", "write", "audit:raw", "admin"]
    other = Caller(http, (await tenants.create_key(desk.world.rt.db, worlds.TENANT, scopes=scopes)).key)

    assert problem(await other.post(PATH, REFUND)) == (403, "forbidden")
    assert desk.calls == {}


async def test_anothers_order_is_not_there(http: httpx.AsyncClient, desk: Desk) -> None:
    """404 whatever the body, and nothing is kept."""
    stranger = Caller(http, (await tenants.create_key(desk.world.rt.db, "stranger")).key)

    assert problem(await stranger.post(PATH, REFUND)) == (404, "not-found")
    assert problem(await stranger.post(PATH, {"amount": secrets.token_hex(4)})) == (404, "not-found")
    assert await desk.world.value("SELECT count(*) FROM idempotency_keys") == 0


async def test_an_order_that_does_not_exist_is_a_404(merchant: Caller) -> None:
    """Also under a name that no order can have."""
    for order_id in ("ORD-9", "a%20b", "x" * 65):
        assert problem(await merchant.post(f"/v1/orders/{order_id}/refunds", REFUND)) == (404, "not-found")


async def test_the_document_lists_both_answers(http: httpx.AsyncClient) -> None:
    """202 for what is on its way, 201 for what was declined."""
    document = (await http.get("/openapi.json")).json()
    responses = document["paths"]["/v1/orders/{order_id}/refunds"]["post"]["responses"]

    shown = {status: responses[status]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2] for status in ("201", "202")}
    assert shown == {"201": "Refund", "202": "AcceptedRefund"}
