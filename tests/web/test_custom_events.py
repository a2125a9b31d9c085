"""Events of a tenant's own types: through the same outbox, to the same endpoints, in the same log as ours."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import ids, tenants
from tests.make import TENANT, Make
from tests.pulling import all_in_view
from tests.web.conftest import ENDPOINT, Caller, pointers, problem

if TYPE_CHECKING:
    from ipn_gateway.runtime import Runtime

JSON = {"Content-Type": "application/json"}
SENT = {"type": "invoice.sent", "data": {"number": "R-1", "lines": [1, 2.5, None, {"ünder": "ø"}]}, "order_id": "ORD-1"}


async def rows(rt: Runtime, statement: str) -> list[dict[str, Any]]:
    async with rt.db.autocommit("test.rows") as tx:
        return await tx.all(dict, statement)


async def test_an_event_is_stored_and_goes_to_those_who_want_it(api: Caller, rt: Runtime) -> None:
    """201 with the event and where it is found; frozen bytes, one event delivery for each filter that takes it, due at once."""
    make = Make(rt.db)
    wanted = [await make.endpoint(events=events) for events in (["*"], ["invoice.sent"], ["order.paid", "invoice.*"])]
    for events in (["order.*"], ["invoice.paid"], ["invoices.*"], ["invoice.sent.*"]):
        await make.endpoint(events=events)
    await make.endpoint(tenant_id="rival")
    rt.wakes.dispatcher.clear()

    answer = await api.post("/v1/events", SENT)

    event = answer.json()
    (stored,) = await rows(rt, "SELECT * FROM events")
    deliveries = await rows(rt, "SELECT * FROM event_deliveries ORDER BY endpoint_id")
    assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/events/{event['id']}")
    assert (event["type"], event["data"], event["order_id"], event["sequence"]) == (SENT["type"], SENT["data"], "ORD-1", None)
    assert json.loads(stored["body"]) == {"id": event["id"], "type": "invoice.sent", "timestamp": event["timestamp"], "data": SENT["data"]}
    assert [row["endpoint_id"] for row in deliveries] == [row["id"] for row in wanted]
    assert {(row["status"], row["event_type"], row["order_id"], row["sequence"]) for row in deliveries} == {
        ("pending", "invoice.sent", "ORD-1", None)
    }
    assert rt.wakes.dispatcher.is_set()
    assert (await api.get(f"/v1/events/{event['id']}")).json() == event


async def test_it_is_pulled_and_found_by_its_type_and_its_order(api: Caller, rt: Runtime) -> None:
    """Among ours, in their order; a type that nobody can have is a 422."""
    sent = [(await api.post("/v1/events", SENT | given)).json() for given in ({}, {"type": "invoice.paid"}, {"order_id": None})]
    await Make(rt.db).event(body=b'{"timestamp":"2026-03-01T12:00:00.000Z","data":{}}')
    await all_in_view(rt.db)

    async def found(**query: str) -> list[str]:
        return [item["id"] for item in (await api.get("/v1/events", **query)).json()["items"]]

    assert [item["type"] for item in (await api.get("/v1/events")).json()["items"]] == [
        "invoice.sent",
        "invoice.paid",
        "invoice.sent",
        "order.paid",
    ]
    assert await found(type="invoice.sent") == [sent[0]["id"], sent[2]["id"]]
    assert await found(type="invoice.paid", order_id="ORD-1") == [sent[1]["id"]]
    assert await found(type="nobody.sent_this") == []
    for odd in ("order.shipped", "Invoice.sent", "invoice", "*"):
        assert pointers(await api.get("/v1/events", type=odd)) == ["type"]


async def test_one_key_is_one_event(api: Caller, stranger: Caller, rt: Runtime) -> None:
    """However often and however many at once; another key, or another tenant, is another event, and another body a 422."""
    await Make(rt.db).endpoint()

    answers = await asyncio.gather(*(api.post("/v1/events", SENT, idempotency_key="k-1") for _ in range(8)))
    repeat = await api.post("/v1/events", SENT, idempotency_key="k-1")
    changed = await api.post("/v1/events", SENT | {"data": {}}, idempotency_key="k-1")
    other = await api.post("/v1/events", SENT, idempotency_key="k-2")
    theirs = await stranger.post("/v1/events", SENT, idempotency_key="k-1")

    made = {answer.json()["id"] for answer in answers if answer.status_code == 201}
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert made == {repeat.json()["id"]}
    assert repeat.headers["idempotent-replayed"] == "true"
    assert problem(changed) == (422, "idempotency-key-reused")
    assert len(made | {other.json()["id"], theirs.json()["id"]}) == 3
    assert len(await rows(rt, "SELECT FROM events")) == 3
    assert len(await rows(rt, "SELECT FROM event_deliveries")) == 2


@pytest.mark.case("S121")
async def test_its_id_comes_from_tenant_type_and_key(api: Caller, rt: Runtime) -> None:
    """The id of the key's row: the intent is the cause."""
    event = (await api.post("/v1/events", SENT)).json()

    (key,) = await rows(rt, "SELECT id FROM idempotency_keys")
    assert event["id"] == ids.event_id(TENANT, "invoice.sent", key["id"].hex)


async def test_a_key_is_required(api: Caller, rt: Runtime) -> None:
    """Without it nothing says whether a repeat is a second event."""
    answer = await api.http.post("/v1/events", json=SENT, headers={"Authorization": f"Bearer {api.key}"})

    assert problem(answer) == (400, "idempotency-key-missing")
    assert await rows(rt, "SELECT FROM events") == []


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"type": None}, "#/type"),
    ({"type": "invoice"}, "#/type"),
    ({"type": "Invoice.sent"}, "#/type"),
    ({"type": "invoice.*"}, "#/type"),
    ({"type": "invoice.sent\n"}, "#/type"),
    ({"type": f"{'x' * 100}.y"}, "#/type"),
    ({"type": "order.paid"}, "#/type"),
    ({"type": "order.shipped"}, "#/type"),
    ({"type": "notification.sent"}, "#/type"),
    ({"type": "endpoint.test"}, "#/type"),
    ({"data": None}, "#/data"),
    ({"data": []}, "#/data"),
    ({"data": "x"}, "#/data"),
    ({"data": {"x": "y" * 32 * 1024}}, "#/data"),
    ({"data": {"x": 1 << 63}}, "#/data"),
    ({"order_id": ""}, "#/order_id"),
    ({"order_id": "a b"}, "#/order_id"),
    ({"order_id": "x" * 65}, "#/order_id"),
]


@pytest.mark.parametrize(("members", "pointer"), IMPOSSIBLE, ids=lambda part: str(part)[:40])
async def test_what_cannot_be_is_pointed_at(api: Caller, rt: Runtime, members: dict[str, Any], pointer: str) -> None:
    """What is ours is nobody else's to send; data is an object of at most 32 KiB. Nothing is stored, not even the key."""
    body = {name: value for name, value in (SENT | members).items() if value is not None}

    assert pointers(await api.post("/v1/events", body)) == [pointer]
    assert await rows(rt, "SELECT FROM events") == await rows(rt, "SELECT FROM idempotency_keys") == []


async def test_the_largest_data_is_taken(api: Caller) -> None:
    """32 KiB of JSON, counted as it is sent: in UTF-8 and without spaces."""
    data = {"x": "ø" * ((32 * 1024 - len('{"x":""}')) // 2)}

    answer = await api.post("/v1/events", SENT | {"data": data})

    assert answer.status_code == 201
    assert answer.json()["data"] == data


async def test_numbers_arrive_as_they_were_sent(api: Caller, rt: Runtime) -> None:
    """In the answer and in the bytes that are signed and sent: each is the number that was written, to its last digit."""
    numbers = ["0.1", "-1e300", "12345678901234567", "1.0", "0", "10.10", "1E+2", "0.30000000000000004", "5e-324", "9007199254740993"]

    told = await api("POST", "/v1/events", content=_with(*numbers), headers=JSON)

    (stored,) = await rows(rt, "SELECT body FROM events")
    for data in (told.text, stored["body"]):
        found = json.loads(data, parse_float=Decimal)["data"]["numbers"]
        assert [Decimal(number) for number in found] == [Decimal(number) for number in numbers]


@pytest.mark.parametrize("number", ["12345678901234567.5", "0.1e-400", "0.1000000000000000055511151231257827", "1e400", "-1e-324"])
async def test_a_number_that_would_come_out_as_another_is_refused(shop: Caller, rt: Runtime, number: str) -> None:
    """It has more digits than a double keeps, or lies outside of its range; in an event and in an order's metadata."""
    order = f'{{"order_id": "ORD-1", "amount": "1.00", "currency": "BDT", "source": "shop-main", "metadata": {{"deep": [{number}]}}}}'

    assert pointers(await shop("POST", "/v1/events", content=_with(number), headers=JSON)) == ["#/data"]
    assert pointers(await shop("POST", "/v1/orders", content=order, headers=JSON)) == ["#/metadata"]
    assert await rows(rt, "SELECT FROM events") == []


def _with(*numbers: str) -> str:
    """An event with numbers as they are written."""
    return f'{{"type": "invoice.sent", "data": {{"numbers": [{", ".join(numbers)}]}}}}'


async def test_a_type_that_is_too_long_is_told_so(api: Caller) -> None:
    """Not that it is not made of words, which it is."""
    answer = await api.post("/v1/events", SENT | {"type": f"{'x' * 100}.y"})

    assert answer.json()["errors"] == [{"pointer": "#/type", "detail": "must have at most 100 characters"}]


async def test_sending_needs_the_scope_to_write(api: Caller, rt: Runtime) -> None:
    """A key that only reads is refused."""
    reader = Caller(api.http, (await tenants.create_key(rt.db, TENANT, ["read"])).key)

    assert problem(await reader.post("/v1/events", SENT)) == (403, "forbidden")


async def test_an_order_s_timeline_has_them(shop: Caller) -> None:
    """What was sent about an order by its merchant stands among what we sent."""
    order = {"order_id": "ORD-1", "amount": "100.00", "currency": "BDT", "source": "shop-main"}
    await shop.post("/v1/orders", order)
    event = (await shop.post("/v1/events", SENT)).json()

    items = (await shop.get("/v1/orders/ORD-1/timeline")).json()["items"]

    assert [item["id"] for item in items if item["kind"] == "event"] == [event["id"]]


async def test_endpoints_ask_for_types_and_families_of_their_own(api: Caller) -> None:
    """At creation and in a change."""
    wanted = ["invoice.sent", "invoice.*", "loyalty.points.*", "order.*"]
    made = (await api.post("/v1/endpoints", ENDPOINT | {"events": wanted})).json()
    changed = await api.patch(f"/v1/endpoints/{made['id']}", {"events": ["refund_notes.*"]})

    assert made["events"] == wanted
    assert changed.json()["events"] == ["refund_notes.*"]


async def test_types_and_their_versions_are_published(api: Caller) -> None:
    """In the contract, with the schema of each; and beside each webhook of the OpenAPI document."""
    contract = (await api.get("/v1/contract")).json()
    document = (await api.get("/openapi.json")).json()

    versions = {event["type"]: event["version"] for event in contract["events"]}
    assert {type_: webhook["post"]["x-version"] for type_, webhook in document["webhooks"].items()} == versions
    assert all(event["schema"]["properties"]["data"] for event in contract["events"])
    assert contract["outbound"]["custom_events"]["reserved_families"] == ["endpoint", "notification", "order"]
    assert contract["outbound"]["custom_events"]["data_bytes_max"] == 32 * 1024
    assert document["openapi"].startswith("3.1")
