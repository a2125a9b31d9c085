"""Whose key it is: the tenant's, for one operation; nobody else's key and no other operation's is ever met."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest

from ipn_gateway import logs, tenants
from tests.idempotency.service import BODY, Service, is_replay, told
from tests.make import TENANT
from tests.web.conftest import ORDER, SOURCE, Caller, problem

if TYPE_CHECKING:
    from ipn_gateway.db import Database
    from ipn_gateway.runtime import Runtime
    from tests.make import Make


@pytest.mark.case("S14")
async def test_the_database_keeps_one_row_for_tenant_operation_and_key(db: Database, make: Make) -> None:
    """By its primary key, not by code: a second row is a unique violation, and a change of any of the three is another row."""
    async with db.autocommit("test.catalogue") as tx:
        columns = await tx.value(
            """SELECT array_agg(attname::text ORDER BY array_position(conkey, attnum)) FROM pg_constraint, pg_attribute
                WHERE conrelid = 'idempotency_keys'::regclass AND contype = 'p' AND attrelid = conrelid AND attnum = ANY(conkey)"""
        )
    await make.idempotency_key(tenant_id="a", operation="POST /v1/x", key="K")
    for other in ({"tenant_id": "b"}, {"operation": "POST /v1/y"}, {"key": "k"}):
        await make.idempotency_key(**{"tenant_id": "a", "operation": "POST /v1/x", "key": "K"} | other)

    assert columns == ["tenant_id", "operation", "key"]
    with pytest.raises(psycopg.errors.UniqueViolation) as violated:
        await make.idempotency_key(tenant_id="a", operation="POST /v1/x", key="K")
    assert violated.value.diag.constraint_name == "idempotency_keys_pkey"


@pytest.mark.case("S15")
@pytest.mark.parametrize("path", ["notes", "charges", "payouts"])
async def test_two_tenants_may_use_one_key(service: Service, path: str) -> None:
    """With the same body too: both are executed, and their answers share no id."""
    answers = [await service.post(path, tenant=name) for name in ("acme", "other")]
    again = [await service.post(path, tenant=name) for name in ("acme", "other")]

    assert [is_replay(answer) for answer in [*answers, *again]] == [False, False, True, True]
    assert [told(answer) for answer in again] == [told(answer) for answer in answers]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert len(set(service.provider.keys)) == len(service.provider.keys) == (0 if path == "notes" else 2)
    assert len({row["tenant_id"] for row in await service.rows()}) == 2


@pytest.mark.case("S16")
async def test_no_key_of_a_tenant_gives_another_one_anything(service: Service) -> None:
    """Each stored key, guessed exactly, with the same body or another: never a stored answer, and not one byte of it."""
    keys = ["order-1001", "1", "a" * 255, str(uuid.uuid4()), "../x", "acme:K", "acme", "%00", "K1"]
    theirs = {}
    for number, key in enumerate(keys):
        details = {"secret": f"of-acme-{number}-{uuid.uuid4()}"}
        theirs[key] = (await service.post("notes", BODY | {"details": details}, key=key)).json()
    stored = await service.rows("SELECT key, response_body FROM idempotency_keys")

    for row in stored:
        answer = await service.post("notes", BODY | {"details": {"guess": 1}}, key=row["key"], tenant="other")

        assert (answer.status_code, is_replay(answer)) == (201, False)
        assert theirs[row["key"]]["details"]["secret"] not in answer.text
        assert theirs[row["key"]]["id"] not in answer.text + str(answer.headers)
    for key, their in theirs.items():
        answer = await service.post("notes", BODY | {"details": their["details"]}, key=key, tenant="third")

        assert (answer.status_code, is_replay(answer)) == (201, False)
        assert their["id"] not in answer.text + str(answer.headers)
    kept = await service.rows("SELECT key, response_body FROM idempotency_keys WHERE tenant_id = 'acme'")
    assert {row["key"]: json.loads(row["response_body"]) for row in kept} == theirs


@pytest.mark.case("S17")
async def test_one_key_serves_several_operations_of_a_flow(service: Service) -> None:
    """To the client it is one intent: note, charge and payout are all executed, and how often that happens is counted."""
    before = logs.counters["idempotency.cross_operation_reuse"]
    paths = ("notes", "charges", "payouts", "pings")
    answers = [await service.post(path) for path in paths]
    again = [await service.post(path) for path in paths]

    assert [answer.status_code for answer in answers] == [201] * 4
    assert [is_replay(answer) for answer in again] == [True] * 4
    assert [told(answer) for answer in again] == [told(answer) for answer in answers]
    assert {answer.headers["location"].split("/")[2] for answer in answers} == set(paths)
    assert logs.counters["idempotency.cross_operation_reuse"] - before == 3
    assert await service.acts() == ["noted", *["begun", "recorded", "receipt"] * 2, "pinged"]


@pytest.mark.case("S17")
async def test_an_order_is_created_and_cancelled_under_one_key(shop: Caller) -> None:
    """Two of our own operations; neither is taken for the other."""
    created = await shop.post("/v1/orders", ORDER, idempotency_key="K1")
    cancelled = await shop.post("/v1/orders/ORD-1/cancel", {"reason": "sold out"}, idempotency_key="K1")

    assert (created.status_code, created.json()["status"]) == (201, "pending")
    assert (cancelled.status_code, cancelled.json()["status"], is_replay(cancelled)) == (200, "cancelled", False)


@pytest.mark.case("S19")
async def test_one_key_on_two_orders_is_refused(shop: Caller) -> None:
    """The operation is the route's template; which order it is belongs to the request, and the other order is not touched."""
    for order_id in ("ORD-1", "ORD-2"):
        await shop.post("/v1/orders", ORDER | {"order_id": order_id})
    first = await shop.post("/v1/orders/ORD-1/cancel", {"reason": "sold out"}, idempotency_key="K1")
    second = await shop.post("/v1/orders/ORD-2/cancel", {"reason": "sold out"}, idempotency_key="K1")

    assert first.status_code == 200
    assert problem(second) == (422, "idempotency-key-reused")
    assert "ORD-1" not in second.text
    assert (await shop.get("/v1/orders/ORD-2")).json()["status"] == "pending"


@pytest.mark.case("S19")
async def test_the_query_belongs_to_the_request(service: Service) -> None:
    """Another parameter, another value or none: another request. Their order is none."""
    first = await service.post("notes?mode=live&page=1")
    others = [await service.post(f"notes{query}") for query in ("", "?mode=test&page=1", "?mode=live", "?mode=live&page=1&x=")]
    same = await service.post("notes?page=1&mode=live")

    assert first.status_code == 201
    assert {problem(answer) for answer in others} == {(422, "idempotency-key-reused")}
    assert is_replay(same)
    assert await service.acts() == ["noted"]


@pytest.mark.case("S19")
async def test_a_source_belongs_to_the_request(shop: Caller) -> None:
    """Whether money is live or a test is the source's: the same order at another source is another request."""
    await shop.post("/v1/sources", SOURCE | {"name": "shop-live", "config": SOURCE["config"] | {"store_id": "live", "mode": "live"}})  # type: ignore[operator]
    first = await shop.post("/v1/orders", ORDER, idempotency_key="K1")
    second = await shop.post("/v1/orders", ORDER | {"source": "shop-live"}, idempotency_key="K1")

    assert first.status_code == 201
    assert problem(second) == (422, "idempotency-key-reused")


@pytest.mark.case("S20")
async def test_who_is_not_known_never_reaches_the_layer(service: Service) -> None:
    """There is no anonymous tenant whose keys strangers would share: 401, no row, and not even of a known key."""
    await service.post("notes", tenant="")
    await service.post("notes")
    before = len(service.faults.seen)
    answers = [await service.post("notes", tenant=None), await service.post("pings", tenant=None, key=None)]

    assert {problem(answer) for answer in answers} == {(401, "unauthorized")}
    assert service.faults.seen[before:] == []
    assert [row["tenant_id"] for row in await service.rows()] == ["acme"]


@pytest.mark.case("S20")
async def test_our_own_keys_are_kept_behind_authentication_and_scope(shop: Caller, rt: Runtime) -> None:
    """No key, a wrong one, one without the scope: 401 and 403, whether the Idempotency-Key is known or cannot be one."""
    await shop.post("/v1/orders", ORDER, idempotency_key="K1")
    reader = await tenants.create_key(rt.db, TENANT, ["read"])
    told_ = []
    for key, status in ((None, 401), ("ipn_" + "x" * 43, 401), (reader.key, 403)):
        for value in ("K1", "K2", "no, key"):
            answer = await Caller(shop.http, key).post("/v1/orders", ORDER, idempotency_key=value)
            told_.append((answer.status_code, status, is_replay(answer)))
    async with rt.db.autocommit("test.count") as tx:
        keys = await tx.value("SELECT count(*) FROM idempotency_keys WHERE operation = 'POST /v1/orders'")

    assert told_ == [(status, status, False) for status in (401, 401, 403) for _ in range(3)]
    assert keys == 1


@pytest.mark.case("S15")
async def test_two_api_keys_of_a_tenant_share_its_keys(shop: Caller, rt: Runtime) -> None:
    """The scope is the tenant: a second process of the merchant with a key of its own repeats, and does not execute."""
    other = Caller(shop.http, (await tenants.create_key(rt.db, TENANT)).key)
    first = await shop.post("/v1/orders", ORDER, idempotency_key="K1")
    second = await other.post("/v1/orders", ORDER, idempotency_key="K1")

    assert (is_replay(first), is_replay(second)) == (False, True)
    assert told(second) == told(first)
