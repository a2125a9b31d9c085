"""The audit over HTTP: what came in, what was told, and to whom, without what must not be seen."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import tenants
from tests.make import TENANT, Make, ago, ahead
from tests.pulling import all_in_view
from tests.web.conftest import Caller, pointers, problem

if TYPE_CHECKING:
    from ipn_gateway.runtime import Runtime

FORM = (
    b"tran_id=ORD-1&status=VALID&amount=100.00&currency=BDT&val_id=V-1&card_no=432155XXXXXX3964"
    b"&cus_name=Rahim&cus_phone=01700000000&value_a=a%00b&value_b=%ff&risk_level=0"
)


async def test_a_notification_delivery_is_shown_whole_but_masked(shop: Caller) -> None:
    """Every member of the contract; card and customer masked, NUL and undecodable bytes marked, no credentials."""
    received = await shop.http.post("/ipn/shop-main", content=FORM, headers={"Authorization": "Bearer x", "Cookie": "a=b"})
    assert received.status_code == 401

    item = (await shop.get("/v1/notification-deliveries")).json()["items"][0]

    assert item["id"] == received.headers["x-delivery-id"]
    assert item == (await shop.get(f"/v1/notification-deliveries/{item['id']}")).json()
    assert (item["source"], item["provider"], item["order_id"], item["asserted_status"]) == ("shop-main", "sslcommerz", "ORD-1", "VALID")
    assert (item["outcome"], item["reason"], item["attempts"], item["next_attempt_at"]) == ("rejected", "signature", 0, None)
    assert item["fields"]["card_no"] == item["fields"]["cus_name"] == item["fields"]["cus_phone"] == "***"
    assert item["fields"]["value_a"] == "a␀b"
    assert item["fields"]["value_b"] == "\\xff"
    assert item["fields"]["amount"] == "100.00"
    assert base64.b64decode(item["raw_body_base64"]) == FORM
    assert len(item["sha256"]) == 64
    assert dict(item["headers"])["cookie"] == dict(item["headers"])["authorization"] == "[left out]"
    assert set(item) >= {
        *("id", "provider_delivery_id", "source", "provider", "received_at", "order_id", "operation_id", "effect", "asserted_status"),
        *("outcome", "reason", "decided_at", "attempts", "next_attempt_at", "remote_address", "sha256", "headers", "fields"),
        *("raw_body_base64", "provider_answer"),
    }


async def test_raw_bytes_need_a_scope_of_their_own(shop: Caller, rt: Runtime) -> None:
    """Without `audit:raw` they are null, in lists and in single answers."""
    await shop.http.post("/ipn/shop-main", content=FORM)
    reader = Caller(shop.http, (await tenants.create_key(rt.db, TENANT, ["read"])).key)

    item = (await reader.get("/v1/notification-deliveries")).json()["items"][0]

    assert item["raw_body_base64"] is None
    assert (await reader.get(f"/v1/notification-deliveries/{item['id']}")).json()["raw_body_base64"] is None
    assert base64.b64encode(FORM).decode() not in reader.heard()
    assert "Rahim" not in reader.heard()


async def test_a_malformed_notification_shows_its_form_if_it_is_one(shop: Caller) -> None:
    """Masked all the same; what is no form shows no fields, since nobody knows what is in it."""
    for body in (b"tran_id=ORD-1&status=VALID&amount=one&cus_name=Rahim", b'{"cus_name": "Rahim"}', b"a=1&a=2", b""):
        await shop.http.post("/ipn/shop-main", content=body)
    reader_sees = [item["fields"] for item in (await shop.get("/v1/notification-deliveries")).json()["items"]]

    assert reader_sees == [{}, None, None, {"tran_id": "ORD-1", "status": "VALID", "amount": "one", "cus_name": "***"}]


async def test_open_work_is_shown_with_its_next_attempt(api: Caller, rt: Runtime) -> None:
    """Questions asked so far and when the next one is due come from the inbox."""
    await Make(rt.db).inbox(questions=4, due_at=ahead(minutes=10))

    item = (await api.get("/v1/notification-deliveries")).json()["items"][0]

    assert (item["outcome"], item["attempts"]) == ("received", 4)
    assert item["next_attempt_at"].endswith("Z")


async def test_notification_deliveries_are_filtered(api: Caller, rt: Runtime) -> None:
    """By order, source, outcome, the provider's id, and when they were received: from `since` on, before `until`."""
    make = Make(rt.db)
    old = await make.notification_delivery(order_id="A", received_at=ago(hours=2), outcome="rejected")
    new = await make.notification_delivery(order_id="B", source_id="shop-2", provider_delivery_id="P-1")

    async def found(**query: Any) -> list[str]:
        return [item["order_id"] for item in (await api.get("/v1/notification-deliveries", **query)).json()["items"]]

    assert await found() == ["B", "A"]
    assert await found(order_id="A") == ["A"]
    assert await found(source="shop-2") == ["B"]
    assert await found(outcome="rejected") == ["A"]
    assert await found(provider_delivery_id="P-1") == ["B"]
    assert await found(since=new["received_at"].isoformat()) == ["B"]
    assert await found(until=new["received_at"].isoformat()) == ["A"]
    assert await found(since=old["received_at"].isoformat(), until="2999-12-31T23:59:59Z", outcome="received") == ["B"]
    assert await found(since="1950-01-01T00:00:00Z") == ["B", "A"]
    assert await found(since="0001-01-01T00:00:00Z", until="0001-01-01T00:00:01Z") == []
    assert await found(until="9999-12-31T23:59:59Z") == ["B", "A"]
    assert pointers(await api.get("/v1/notification-deliveries", outcome="odd")) == ["outcome"]
    assert pointers(await api.get("/v1/notification-deliveries", until="2026-07-01")) == ["until"]


async def test_pages_of_deliveries_follow_each_other(api: Caller, rt: Runtime) -> None:
    """Each once, filters kept by the caller."""
    make = Make(rt.db)
    for number in range(5):
        await make.notification_delivery(order_id=f"O-{number}")

    first = (await api.get("/v1/notification-deliveries", limit=3)).json()
    await make.notification_delivery(order_id="O-new")
    second = (await api.get("/v1/notification-deliveries", limit=3, cursor=first["next_cursor"])).json()

    assert [item["order_id"] for item in first["items"] + second["items"]] == ["O-4", "O-3", "O-2", "O-1", "O-0"]
    assert second["next_cursor"] is None


def frozen(number: int, kind: str = "order.paid") -> bytes:
    event = {"id": "x", "type": kind, "timestamp": "2026-07-01T12:00:00.000Z", "data": {"order_id": f"O-{number}", "amount": "1.00"}}
    return json.dumps(event).encode()


async def test_events_are_shown_as_they_were_frozen(api: Caller, rt: Runtime) -> None:
    """With order and sequence beside; filtered by type and order, oldest first."""
    make = Make(rt.db)
    for number in range(3):
        await make.event(order_id=f"O-{number}", body=frozen(number))
    held = await make.event(type="notification.held", body=frozen(9, "notification.held"))
    await all_in_view(rt.db)

    async def found(**query: Any) -> list[str | None]:
        return [item["order_id"] for item in (await api.get("/v1/events", **query)).json()["items"]]

    assert await found() == ["O-0", "O-1", "O-2", None]
    assert await found(type="notification.held") == [None]
    assert await found(order_id="O-1") == ["O-1"]
    assert pointers(await api.get("/v1/events", type="order.odd")) == ["type"]
    shown = (await api.get(f"/v1/events/{held['id']}")).json()
    assert shown == {
        "id": held["id"],
        "type": "notification.held",
        "timestamp": "2026-07-01T12:00:00.000Z",
        "order_id": None,
        "sequence": None,
        "data": {"order_id": "O-9", "amount": "1.00"},
    }
    first = (await api.get("/v1/events", limit=3)).json()
    second = (await api.get("/v1/events", limit=3, after=first["next_cursor"])).json()
    assert [item["order_id"] for item in first["items"]] == ["O-0", "O-1", "O-2"]
    assert [item["id"] for item in second["items"]] == [held["id"]]


@pytest.mark.case("S124")
async def test_the_pull_waits_for_transactions_that_still_write(api: Caller, rt: Runtime) -> None:
    """Of two that commit out of order neither is missed, and neither is shown twice; an empty page has a cursor to wait at."""
    late = Make(rt.maintenance_db)
    async with rt.inbox_db.transaction("test.early") as tx:
        early = await Make(tx).event(id="evt_early", order_id="O-early", body=frozen(1))

        async def meanwhile() -> tuple[dict[str, Any], str]:
            second = await late.event(id="evt_late", order_id="O-late", body=frozen(2))
            return (await api.get("/v1/events")).json(), second["id"]

        waiting, second = await asyncio.get_running_loop().create_task(meanwhile(), context=contextvars.Context())

    await all_in_view(rt.db)
    pulled = (await api.get("/v1/events", after=waiting["next_cursor"])).json()
    nothing = (await api.get("/v1/events", after=pulled["next_cursor"])).json()

    assert waiting["items"] == []
    assert [item["id"] for item in pulled["items"]] == [early["id"], second]
    assert nothing == {"items": [], "next_cursor": pulled["next_cursor"], "lag_seconds": 0}


async def test_a_cursor_from_before_a_restore_is_a_409(api: Caller) -> None:
    """The database says which one it is; the numbers of another mean nothing here."""
    first = (await api.get("/v1/events")).json()["next_cursor"]
    kind, _, *place = json.loads(base64.urlsafe_b64decode(first + "=="))
    other = base64.urlsafe_b64encode(json.dumps([kind, "1", *place]).encode()).decode()

    assert problem(await api.get("/v1/events", after=other)) == (409, "state-conflict")


async def test_a_cursor_of_events_with_a_number_that_is_none_is_a_422(api: Caller) -> None:
    """No number reaches the database that it could refuse."""
    for place, number in itertools.product((2, 4, 5), (-1, "1", 1 << 63, 1e3, True, None)):
        parts: list[Any] = ["pull", "1", 1, "evt_a", 1, 1]
        parts[place] = number
        cursor = base64.urlsafe_b64encode(json.dumps(parts).encode()).decode()

        assert pointers(await api.get("/v1/events", after=cursor)) == ["after"], parts


async def test_event_deliveries_are_shown_with_their_attempts(api: Caller, rt: Runtime) -> None:
    """In the order they were made, for lists and single ones."""
    make = Make(rt.db)
    delivery = await make.event_delivery(status="dead", attempt_count=2)
    await make.delivery_attempt(event_delivery_id=delivery["id"], number=2, trigger="retry", outcome="timeout", error="took too long")
    await make.delivery_attempt(event_delivery_id=delivery["id"], number=1, outcome="refused", status_code=500, response_excerpt="no")
    other = await make.event_delivery()

    listed = (await api.get("/v1/event-deliveries")).json()["items"]
    shown = (await api.get(f"/v1/event-deliveries/edl_{delivery['id'].hex}")).json()

    assert [item["id"] for item in listed] == [f"edl_{other['id'].hex}", f"edl_{delivery['id'].hex}"]
    assert listed[1] == shown
    assert listed[0]["attempts"] == []
    assert [(one["number"], one["trigger"], one["outcome"], one["status_code"]) for one in shown["attempts"]] == [
        (1, "initial", "refused", 500),
        (2, "retry", "timeout", None),
    ]
    assert set(shown) == {
        *(
            "id",
            "event_id",
            "event_type",
            "endpoint_id",
            "order_id",
            "status",
            "attempt_count",
            "next_attempt_at",
            "delivered_at",
            "attempts",
        ),
    }
    assert set(shown["attempts"][0]) == {
        *("id", "number", "trigger", "started_at", "duration_ms", "address", "status_code", "outcome", "error", "response_excerpt"),
    }


async def test_event_deliveries_are_filtered(api: Caller, rt: Runtime) -> None:
    """By status, endpoint, event and order; the dead letters are one of these lists."""
    make = Make(rt.db)
    dead = await make.event_delivery(status="dead")
    await make.event_delivery(status="delivered")

    async def found(**query: Any) -> list[str]:
        return [item["status"] for item in (await api.get("/v1/event-deliveries", **query)).json()["items"]]

    assert await found() == ["delivered", "dead"]
    assert await found(status="dead") == ["dead"]
    assert await found(endpoint_id=f"ep_{dead['endpoint_id'].hex}") == ["dead"]
    assert await found(event_id=dead["event_id"]) == ["dead"]
    assert await found(order_id=dead["order_id"]) == ["dead"]
    assert await found(endpoint_id="ep_" + "0" * 32) == []
    assert pointers(await api.get("/v1/event-deliveries", status="odd")) == ["status"]
    assert pointers(await api.get("/v1/event-deliveries", endpoint_id="odd")) == ["endpoint_id"]
