"""Endpoints over HTTP: a secret is shown once, a private address never called, and what waits is not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import endpoints, ids, receiver
from tests.make import TENANT, Make, ahead
from tests.web.conftest import ENDPOINT, Caller, pointers, problem

if TYPE_CHECKING:
    from ipn_gateway.runtime import Runtime


async def test_an_endpoint_is_subscribed_and_its_secret_shown_once(api: Caller) -> None:
    """201 with the secret and the public key; afterwards only what is public."""
    answer = await api.post("/v1/endpoints", ENDPOINT)

    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    shown = answer.json()
    secret, public_key = shown.pop("secret"), shown.pop("public_key")
    receiver.check_keys([secret, public_key])
    assert (secret[:6], public_key[:5]) == ("whsec_", "whpk_")
    assert answer.headers["location"] == f"/v1/endpoints/{shown['id']}"
    assert [set(one) for one in shown["secrets"]] == [{"id", "public_key", "created_at", "expires_at"}]
    assert shown["secrets"][0]["public_key"] == public_key
    assert {name: value for name, value in shown.items() if name not in {"id", "secrets", "created_at"}} == {
        "url": "https://subscriber.example/events",
        "events": ["*"],
        "description": "",
        "status": "enabled",
        "disabled_reason": None,
        "max_in_flight": 10,
        "rate_per_second": None,
        "ordered": False,
        "failing_since": None,
    }
    assert (await api.get(f"/v1/endpoints/{shown['id']}")).json() == shown
    assert (await api.get("/v1/endpoints")).json()["items"] == [shown]
    assert secret not in api.heard().replace(answer.text, "")


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"url": None}, "#/url"),
    ({"url": "http://subscriber.example/"}, "#/url"),
    ({"url": "https://127.0.0.1/"}, "#/url"),
    ({"url": "https://10.0.0.1/"}, "#/url"),
    ({"url": "https://169.254.169.254/latest"}, "#/url"),
    ({"url": "https://[::ffff:127.0.0.1]/"}, "#/url"),
    ({"url": "https://[64:ff9b::7f00:1]/"}, "#/url"),
    ({"url": "https://2130706433/"}, "#/url"),
    ({"url": "https://localhost/"}, "#/url"),
    ({"url": "https://u:p@subscriber.example/"}, "#/url"),
    ({"url": "ftp://subscriber.example/"}, "#/url"),
    ({"url": "https://subscriber.example/" + "x" * 2100}, "#/url"),
    ({"events": []}, "#/events"),
    ({"events": ["order.unknown"]}, "#/events/0"),
    ({"events": ["order.paid", "Refund.*"]}, "#/events/1"),
    ({"events": ["order.p*"]}, "#/events/0"),
    ({"events": "*"}, "#/events"),
    ({"events": ["*"] * 51}, "#/events"),
    ({"description": "x" * 501}, "#/description"),
    ({"description": 1}, "#/description"),
    ({"max_in_flight": 0}, "#/max_in_flight"),
    ({"max_in_flight": 101}, "#/max_in_flight"),
    ({"max_in_flight": 1.5}, "#/max_in_flight"),
    ({"max_in_flight": "5"}, "#/max_in_flight"),
    ({"max_in_flight": True}, "#/max_in_flight"),
    ({"rate_per_second": 0}, "#/rate_per_second"),
    ({"rate_per_second": -1}, "#/rate_per_second"),
    ({"rate_per_second": "1"}, "#/rate_per_second"),
    ({"rate_per_second": True}, "#/rate_per_second"),
    ({"ordered": "yes"}, "#/ordered"),
]


@pytest.mark.case("B101")
async def test_a_member_that_cannot_be_is_a_422_that_points_at_it(api: Caller) -> None:
    """At creation and in a change alike; nothing of it is kept."""
    made = (await api.post("/v1/endpoints", ENDPOINT)).json()
    address = f"/v1/endpoints/{made['id']}"

    for members, pointer in IMPOSSIBLE:
        assert pointers(await api.post("/v1/endpoints", {k: v for k, v in (ENDPOINT | members).items() if v is not None})) == [pointer], (
            members
        )
        assert pointers(await api.patch(address, members)) == [pointer], members
    assert [one["id"] for one in (await api.get("/v1/endpoints")).json()["items"]] == [made["id"]]
    assert (await api.get(address)).json() == {name: value for name, value in made.items() if name not in {"secret", "public_key"}}


async def test_only_what_is_given_is_changed(api: Caller) -> None:
    """Null takes the rate away again."""
    given = {"events": ["order.*", "notification.held"], "description": "books", "max_in_flight": 100, "rate_per_second": 2.5}
    address = f"/v1/endpoints/{(await api.post('/v1/endpoints', ENDPOINT | given)).json()['id']}"

    changed = (await api.patch(address, {"url": "https://other.example/", "rate_per_second": 10})).json()
    assert (changed["url"], changed["rate_per_second"], changed["max_in_flight"]) == ("https://other.example/", 10, 100)
    assert (changed["events"], changed["description"]) == (["order.*", "notification.held"], "books")

    assert (await api.patch(address, {"rate_per_second": None})).json()["rate_per_second"] is None
    assert (await api.patch(address, {})).json()["url"] == "https://other.example/"


@pytest.mark.case("B87")
async def test_a_deleted_endpoint_is_gone_and_what_waited_is_cancelled(api: Caller, rt: Runtime) -> None:
    """204, then 404; what is delivered stays so."""
    made = (await api.post("/v1/endpoints", ENDPOINT)).json()
    address, endpoint_id = f"/v1/endpoints/{made['id']}", ids.read("ep", made["id"])
    make = Make(rt.db)
    await make.event_delivery(endpoint_id=endpoint_id)
    await make.event_delivery(endpoint_id=endpoint_id, lease_expires_at=ahead(seconds=30), fence=1)
    await make.event_delivery(endpoint_id=endpoint_id, status="delivered")
    await make.event_delivery()

    answer = await api.delete(address)

    assert (answer.status_code, answer.content) == (204, b"")
    assert problem(await api.get(address)) == (404, "not-found")
    assert problem(await api.patch(address, {})) == (404, "not-found")
    assert problem(await api.delete(address)) == (404, "not-found")
    assert problem(await api.post(f"{address}/enable")) == (404, "not-found")
    assert problem(await api.post(f"{address}/rotate-secret")) == (404, "not-found")
    assert made["id"] not in (await api.get("/v1/endpoints")).text
    deliveries = (await api.get("/v1/event-deliveries", endpoint_id=made["id"])).json()["items"]
    assert sorted(one["status"] for one in deliveries) == ["cancelled", "cancelled", "delivered"]
    assert all(one["next_attempt_at"] is None for one in deliveries)


async def test_a_disabled_endpoint_shows_nothing_due_until_it_is_enabled(api: Caller, rt: Runtime) -> None:
    """Its deliveries stay pending; enabled, they are due at once, oldest first, and their attempts go on being counted."""
    made = (await api.post("/v1/endpoints", ENDPOINT)).json()
    address, endpoint_id = f"/v1/endpoints/{made['id']}", ids.read("ep", made["id"])
    make = Make(rt.db)
    for _ in range(2):
        await make.event_delivery(endpoint_id=endpoint_id, next_attempt_at=ahead(hours=5), attempt_count=3)
    async with rt.db.transaction("test") as tx:
        await endpoints.disable(tx, TENANT, endpoint_id, "gone")

    assert (await api.get(address)).json()["disabled_reason"] == "gone"
    assert [one["next_attempt_at"] for one in (await api.get("/v1/event-deliveries")).json()["items"]] == [None, None]

    before = (await api.post("/v1/endpoints", ENDPOINT)).json()["created_at"]
    enabled = (await api.post(f"{address}/enable", {"reason": "they are back"})).json()

    assert (enabled["status"], enabled["disabled_reason"]) == ("enabled", None)
    newer, older = (await api.get("/v1/event-deliveries", status="pending")).json()["items"]
    assert older["next_attempt_at"] < newer["next_attempt_at"] < before
    assert newer["attempt_count"] == 3
    assert rt.wakes.dispatcher.is_set()
    assert (await api.post(f"{address}/enable")).json() == enabled


async def test_an_endpoint_is_disabled_by_hand(api: Caller, stranger: Caller, rt: Runtime) -> None:
    """What is for it stays pending until it is enabled; the others are told, who did it and why is kept, and again changes nothing."""
    made = (await api.post("/v1/endpoints", {"url": "https://subscriber.example:8443/hook/s3cret?k=s3cret"})).json()
    other = (await api.post("/v1/endpoints", ENDPOINT)).json()
    address = f"/v1/endpoints/{made['id']}"
    await Make(rt.db).event_delivery(endpoint_id=ids.read("ep", made["id"]), event_type="order.paid")

    answer = await api.post(f"{address}/disable", {"reason": "their service moves"}, idempotency_key="k-1")
    repeat = await api.post(f"{address}/disable", {"reason": "their service moves"}, idempotency_key="k-1")
    again = await api.post(f"{address}/disable")
    deliveries = (await api.get("/v1/event-deliveries")).json()["items"]
    async with rt.db.autocommit("test.audit") as tx:
        acts = await tx.all(dict, "SELECT actor, reason FROM audit_log WHERE action = 'endpoint.disable'")

    assert (answer.status_code, answer.json()["status"], answer.json()["disabled_reason"]) == (200, "disabled", "manual")
    assert again.json() == repeat.json() == answer.json()
    assert repeat.headers["idempotent-replayed"] == "true"
    assert {(one["endpoint_id"], one["event_type"], one["status"]) for one in deliveries} == {
        (made["id"], "order.paid", "pending"),
        (other["id"], "endpoint.disabled", "pending"),
    }
    (event,) = (await api.get("/v1/events", type="endpoint.disabled")).json()["items"]
    assert event["data"] == {"endpoint_id": made["id"], "url": "https://subscriber.example:8443", "reason": "manual"}
    assert [act["reason"] for act in acts] == ["their service moves"]
    assert acts[0]["actor"].startswith("key:")
    assert problem(await api.post(f"{address}/recover", {"since": "2026-07-01T00:00:00Z", "reason": "x"})) == (409, "state-conflict")
    assert (await api.post(f"{address}/enable")).json()["disabled_reason"] is None
    assert problem(await stranger.post(f"{address}/disable")) == (404, "not-found")
    await api.delete(address)
    assert problem(await api.post(f"{address}/disable")) == (404, "not-found")


async def test_rotating_shows_a_new_secret_and_keeps_the_old_one_for_a_day(api: Caller) -> None:
    """By default; with no overlap it is dropped at once; a day is not for ever, and there is a limit to their number."""
    made = (await api.post("/v1/endpoints", ENDPOINT)).json()
    address = f"/v1/endpoints/{made['id']}/rotate-secret"

    rotated = await api.post(address)
    assert rotated.status_code == 200
    assert rotated.headers["cache-control"] == "no-store"
    assert rotated.json()["secret"].startswith("whsec_")
    assert rotated.json()["secret"] != made["secret"]
    assert [one["expires_at"] is None for one in rotated.json()["secrets"]] == [True, False]
    assert [one["public_key"] for one in rotated.json()["secrets"]] == [rotated.json()["public_key"], made["public_key"]]
    assert rotated.json()["public_key"] != made["public_key"]

    for _ in range(3):
        assert (await api.post(address, {"overlap_seconds": 0.5e3})).status_code == 200
    assert problem(await api.post(address, {"overlap_seconds": 60})) == (409, "state-conflict")

    alone = (await api.post(address, {"overlap_seconds": 0})).json()
    assert len(alone["secrets"]) == 1
    for impossible in (-1, 2_592_001, "60", None, True):
        assert pointers(await api.post(address, {"overlap_seconds": impossible})) == ["#/overlap_seconds"], impossible


async def test_a_repeat_of_a_rotation_shows_what_is_public_only(api: Caller) -> None:
    """The stored answer has the public key; the secret was shown the first time."""
    made = (await api.post("/v1/endpoints", ENDPOINT)).json()
    address = f"/v1/endpoints/{made['id']}/rotate-secret"

    first, repeat = [(await api.post(address, idempotency_key="rotate-1")).json() for _ in range(2)]

    assert repeat == {name: value for name, value in first.items() if name != "secret"}
    assert len((await api.get(f"/v1/endpoints/{made['id']}")).json()["secrets"]) == 2


async def test_the_contract_says_how_events_are_signed(api: Caller) -> None:
    """Both versions with the forms of their keys, and where public keys are to be had."""
    signature = (await api.get("/v1/contract")).json()["outbound"]["signature"]

    assert signature["versions"] == ["v1", "v1a"] == list(signature["forms"]) == list(signature["algorithms"])
    assert [form.split()[0] for form in signature["forms"].values()] == ["whsec_", "whpk_"]
    assert "GET /v1/endpoints/{endpoint_id}" in signature["public_keys"]
    assert signature["tolerance_seconds"] == 300


@pytest.mark.case("S94")
async def test_a_repeat_of_an_act_has_its_answer_when_the_endpoint_is_gone(api: Caller) -> None:
    """Within its window a completed key gives what it gave, without the secret; a new key on the deleted endpoint is a 404."""
    address = f"/v1/endpoints/{(await api.post('/v1/endpoints', ENDPOINT)).json()['id']}"
    first = await api.post(f"{address}/rotate-secret", {}, idempotency_key="rotate-1")
    await api.delete(address)

    again = await api.post(f"{address}/rotate-secret", {}, idempotency_key="rotate-1")

    assert (first.status_code, again.status_code, again.headers["idempotent-replayed"]) == (200, 200, "true")
    assert again.json() == {name: value for name, value in first.json().items() if name != "secret"}
    assert problem(await api.post(f"{address}/rotate-secret", {}, idempotency_key="rotate-2")) == (404, "not-found")
