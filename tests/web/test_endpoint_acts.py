"""Testing an endpoint and recovering what it missed, over HTTP: keyed as every act is, for who administers endpoints alone."""

from __future__ import annotations

import asyncio
import base64
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import endpoint_tests, endpoints, ids, objects, recoveries, runtime, settings, tenants
from tests.dispatching import Hanging, received, refuses
from tests.loopback import OK, says, serving
from tests.make import TENANT, Make, ago
from tests.web.conftest import ORDER, Caller, pointers, problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from ipn_gateway.runtime import Runtime
    from tests.loopback import Server


@pytest.fixture
async def rt(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Runtime]:
    """A runtime that may call this machine."""
    chosen = settings.load(database_url=SecretStr(database_url), secret_key=Fernet.generate_key().decode(), allow_loopback_endpoints=True)
    async with runtime.opened(chosen, database_url, public_url="https://pay.example", clock=clock, faults=faults) as opened:
        yield opened


async def subscribe(api: Caller, to: Server | str, **given: Any) -> str:
    """The address of a new endpoint."""
    answer = await api.post("/v1/endpoints", {"url": to if isinstance(to, str) else to.url} | given)
    return f"/v1/endpoints/{answer.json()['id']}"


async def test_a_test_says_what_each_step_said(api: Caller) -> None:
    """200 whatever came of it; the event, its delivery and its attempt are found under the ids in the answer."""
    async with serving(says(OK)) as server:
        answer = await api.post(f"{await subscribe(api, server)}/test")

    told = answer.json()
    (delivery,) = (await api.get("/v1/event-deliveries")).json()["items"]
    event = (await api.get(f"/v1/events/{told['event_id']}")).json()
    assert answer.status_code == 200
    assert objects.EndpointTest.model_validate(told)
    assert (told["delivered"], told["failed_check"], told["attempt"]["outcome"]) == (True, None, "delivered")
    assert [(check["check"], check["status"]) for check in told["checks"]] == [
        *(("url", "passed"), ("dns", "passed"), ("connect", "passed"), ("tls", "skipped"), ("response", "passed"))
    ]
    assert (delivery["id"], delivery["status"], delivery["attempts"]) == (told["event_delivery_id"], "delivered", [told["attempt"]])
    assert (event["type"], event["data"]["endpoint_id"]) == ("endpoint.test", told["endpoint_id"])
    assert len(received(server)) == 1


async def test_a_test_that_fails_is_an_answer_too(api: Caller) -> None:
    """It names the step; the event delivery is not among the dead letters."""
    async with serving(refuses(503)) as server:
        answer = await api.post(f"{await subscribe(api, server)}/test", {"reason": "after their release"})

    told = answer.json()
    assert (answer.status_code, told["delivered"], told["failed_check"]) == (200, False, "response")
    assert told["attempt"]["status_code"] == 503
    assert [one["status"] for one in (await api.get("/v1/event-deliveries")).json()["items"]] == ["cancelled"]
    assert (await api.get("/v1/event-deliveries", status="dead")).json()["items"] == []


async def test_the_same_key_sends_one_test(api: Caller) -> None:
    """The repeat is answered from storage; another key is another test, and the same key for another endpoint a 422."""
    async with serving(says(OK)) as server:
        address, other = await subscribe(api, server), await subscribe(api, server)
        first = await api.post(f"{address}/test", idempotency_key="k-1")
        repeat = await api.post(f"{address}/test", idempotency_key="k-1")
        wrong = await api.post(f"{other}/test", idempotency_key="k-1")
        again = await api.post(f"{address}/test", idempotency_key="k-2")

    assert (repeat.content, repeat.headers["idempotent-replayed"]) == (first.content, "true")
    assert problem(wrong) == (422, "idempotency-key-reused")
    assert again.json()["event_id"] != first.json()["event_id"]
    assert len(received(server)) == 2


async def test_a_test_needs_no_key(api: Caller) -> None:
    """Each call without one is a test of its own."""
    async with serving(says(OK)) as server:
        address = await subscribe(api, server)
        told = [(await api.http.post(f"{address}/test", headers={"Authorization": f"Bearer {api.key}"})).json() for _ in range(2)]

    assert len({one["event_id"] for one in told}) == 2
    assert len(received(server)) == 2


async def test_after_a_crash_the_same_key_sends_the_same_event(api: Caller, rt: Runtime) -> None:
    """The process dies behind the sending: when the lease is over, the repeat sends it again under the same id, and one attempt is kept."""

    async def die() -> None:
        raise asyncio.CancelledError

    async with serving(says(OK)) as server:
        address = await subscribe(api, server)
        rt.faults.on["transport.send:after"] = die
        with pytest.raises(asyncio.CancelledError):
            await api.post(f"{address}/test", idempotency_key="k-1")
        rt.faults.on.clear()
        waiting = await api.post(f"{address}/test", idempotency_key="k-1")
        rt.clock.advance(seconds=rt.settings.idempotency_lease_seconds + 1)
        answer = await api.post(f"{address}/test", idempotency_key="k-1")

    assert problem(waiting) == (409, "idempotency-in-progress")
    assert answer.json()["delivered"]
    assert [message.id for message in received(server)] == [answer.json()["event_id"]] * 2
    assert len((await api.get("/v1/event-deliveries")).json()["items"]) == 1


async def test_too_many_tests_at_once_are_told_to_wait(api: Caller) -> None:
    """429 with Retry-After, which is not kept: the same key may be used a moment later."""
    hanging = Hanging()
    async with serving(hanging) as server:
        address = await subscribe(api, server)
        running = [asyncio.create_task(api.post(f"{address}/test")) for _ in range(endpoint_tests.AT_ONCE_MAX)]
        await hanging.has(endpoint_tests.AT_ONCE_MAX)
        refused = await api.post(f"{address}/test", idempotency_key="k-1")
        hanging.let_go()
        await asyncio.gather(*running)
        again = await api.post(f"{address}/test", idempotency_key="k-1")

    assert problem(refused) == (429, "rate-limited")
    assert int(refused.headers["retry-after"]) >= 1
    assert again.status_code == 200


async def test_who_may_not_administer_endpoints_tests_and_recovers_none(api: Caller, stranger: Caller, rt: Runtime) -> None:
    """Another tenant finds nothing, whatever the body; a key without the scope is refused; nothing is sent."""
    reader = Caller(api.http, (await tenants.create_key(rt.db, TENANT, ["read", "write"])).key)
    async with serving(says(OK)) as server:
        address = await subscribe(api, server)
        for act in ("test", "recover"):
            assert problem(await stranger.post(f"{address}/{act}", {"since": 1})) == (404, "not-found")
            assert problem(await reader.post(f"{address}/{act}")) == (403, "forbidden")
            assert problem(await api.post(f"/v1/endpoints/ep_1/{act}", {})) == (404, "not-found")

    assert received(server) == []


# Recovery


async def test_what_was_missed_is_recovered(api: Caller, rt: Runtime) -> None:
    """The counts, then the event deliveries, due in order; the dispatcher is woken."""
    address = await subscribe(api, "https://subscriber.example/hook", events=["order.*"])
    endpoint_id = ids.read(ids.ENDPOINT, address.rpartition("/")[2])
    make = Make(rt.db)
    missing = await make.event(created_at=ago(hours=2))
    gone = await make.event(created_at=ago(hours=1))
    await make.event_delivery(event_id=gone["id"], endpoint_id=endpoint_id, status="dead", attempt_count=10)
    since = (rt.clock.now() - timedelta(hours=3)).isoformat()
    rt.wakes.dispatcher.clear()

    dry = await api.post(f"{address}/recover", {"since": since, "dry_run": True, "reason": "how many?"})
    answer = await api.post(f"{address}/recover", {"since": since, "reason": "the service is back"})

    told = {"matched": 2, "recovered": 2, "dead": 1, "missing": 1, "skipped": 0, "next_cursor": None, "until": None}
    assert (dry.status_code, answer.status_code) == (200, 200)
    assert {name: answer.json()[name] for name in told} == {name: dry.json()[name] for name in told} == told
    assert (dry.json()["dry_run"], answer.json()["dry_run"]) == (True, False)
    assert answer.json()["endpoint_id"] == ids.show(ids.ENDPOINT, endpoint_id)
    pending = (await api.get("/v1/event-deliveries", status="pending")).json()["items"]
    assert sorted(one["event_id"] for one in pending) == sorted([missing["id"], gone["id"]])
    assert rt.wakes.dispatcher.is_set()


async def test_a_long_recovery_goes_on_with_its_cursor(api: Caller, rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is none is refused."""
    monkeypatch.setattr(recoveries, "BATCH", 2)
    monkeypatch.setattr(recoveries, "LOOKED_AT_MAX", 2)
    address = await subscribe(api, "https://subscriber.example/hook")
    make = Make(rt.db)
    for hours in (3, 2, 1):
        await make.event(created_at=ago(hours=hours))
    body = {"since": (rt.clock.now() - timedelta(hours=4)).isoformat(), "reason": "is back"}

    first = (await api.post(f"{address}/recover", body)).json()
    second = (await api.post(f"{address}/recover", body | {"cursor": first["next_cursor"]})).json()

    assert [(part["recovered"], part["next_cursor"] is None) for part in (first, second)] == [(2, False), (1, True)]
    assert pointers(await api.post(f"{address}/recover", body | {"cursor": "x"})) == ["#/cursor"]


async def test_a_member_of_a_recovery_that_cannot_be_is_pointed_at(api: Caller) -> None:
    """A span needs its beginning, and the act its reason."""
    address = await subscribe(api, "https://subscriber.example/hook")
    good = {"since": "2026-07-01T00:00:00Z", "reason": "is back"}

    for members, pointer in (
        ({"since": None}, "#/since"),
        ({"since": "yesterday"}, "#/since"),
        ({"since": "2026-07-01T00:00:00"}, "#/since"),
        ({"until": "2026-07-01"}, "#/until"),
        ({"until": "2026-06-30T23:59:59Z"}, "#/until"),
        ({"until": good["since"]}, "#/until"),
        ({"since": "2026-07-01T00:00:0\N{BENGALI DIGIT ONE}Z"}, "#/since"),
        ({"cursor": f"\N{BENGALI DIGIT ONE}.evt_{'a' * 32}.0"}, "#/cursor"),
        ({"cursor": f"1.evt_{'a' * 32}.\N{ARABIC-INDIC DIGIT THREE}"}, "#/cursor"),
        ({"reason": " "}, "#/reason"),
        ({"dry_run": "yes"}, "#/dry_run"),
    ):
        assert pointers(await api.post(f"{address}/recover", good | members)) == [pointer], members
    assert pointers(await api.post(f"{address}/recover", {"since": good["since"]})) == ["#/reason"]


async def test_digits_of_another_script_are_no_number(shop: Caller) -> None:
    """Wherever one is read: in a query, a cursor, a time, a header."""
    three, two = "\N{ARABIC-INDIC DIGIT THREE}", "\N{SUPERSCRIPT TWO}"
    await shop.post("/v1/orders", ORDER)
    page = (await shop.get("/v1/orders/ORD-1/timeline", limit="1")).json()
    kind, at, place, rest = json.loads(base64.urlsafe_b64decode(page["next_cursor"] + "=="))
    forged = base64.urlsafe_b64encode(json.dumps([kind, at, three, rest]).encode()).decode().rstrip("=")

    assert place.isascii()
    assert pointers(await shop.get("/v1/orders", limit=three)) == ["limit"]
    assert pointers(await shop.get("/v1/orders", since=f"2026-07-01T00:00:0{three}Z")) == ["since"]
    assert pointers(await shop.get("/v1/orders/ORD-1/timeline", cursor=forged)) == ["cursor"]
    announced = {"Content-Type": "application/json", "Content-Length": two.encode("latin-1")}
    assert (await shop("POST", "/v1/orders", content=json.dumps(ORDER | {"order_id": "B"}), headers=announced)).status_code == 201


async def test_a_disabled_endpoint_is_enabled_before_it_recovers(api: Caller, rt: Runtime) -> None:
    """409; a dry run may be asked for."""
    address = await subscribe(api, "https://subscriber.example/hook")
    async with rt.db.transaction("test.disable") as tx:
        await endpoints.disable(tx, TENANT, ids.read(ids.ENDPOINT, address.rpartition("/")[2]), "gone")
    body = {"since": "2026-07-01T00:00:00Z", "reason": "is back"}

    assert problem(await api.post(f"{address}/recover", body)) == (409, "state-conflict")
    assert (await api.post(f"{address}/recover", body | {"dry_run": True})).status_code == 200
