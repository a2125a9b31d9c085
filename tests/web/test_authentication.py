"""Who may call what: 401, then 403, then what is asked; and another tenant's things are not there."""

from __future__ import annotations

from ipn_gateway import tenants
from tests.make import TENANT
from tests.web.conftest import ENDPOINT, ORDER, SOURCE, Caller, problem

OWNERS = {"read": ("money", "admin")}  # who may write orders, sources and endpoints may read them
CALLS = [
    ("GET", "/v1/sources", "read"),
    ("GET", "/v1/sources/shop-main", "read"),
    ("POST", "/v1/sources", "admin"),
    ("PATCH", "/v1/sources/shop-main", "admin"),
    ("DELETE", "/v1/sources/shop-main", "admin"),
    ("GET", "/v1/orders", "read"),
    ("GET", "/v1/orders/ORD-1", "read"),
    ("POST", "/v1/orders", "money"),
    ("GET", "/v1/notification-deliveries", "read"),
    ("GET", "/v1/notification-deliveries/ndl_00000000000070008000000000000000", "read"),
    ("GET", "/v1/endpoints", "read"),
    ("GET", "/v1/endpoints/ep_00000000000070008000000000000000", "read"),
    ("POST", "/v1/endpoints", "admin"),
    ("PATCH", "/v1/endpoints/ep_00000000000070008000000000000000", "admin"),
    ("DELETE", "/v1/endpoints/ep_00000000000070008000000000000000", "admin"),
    ("POST", "/v1/endpoints/ep_00000000000070008000000000000000/enable", "admin"),
    ("POST", "/v1/endpoints/ep_00000000000070008000000000000000/disable", "admin"),
    ("POST", "/v1/endpoints/ep_00000000000070008000000000000000/rotate-secret", "admin"),
    ("GET", "/v1/events", "read"),
    ("GET", "/v1/events/evt_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "read"),
    ("GET", "/v1/event-deliveries", "read"),
    ("GET", "/v1/event-deliveries/edl_00000000000070008000000000000000", "read"),
]


async def test_without_a_key_a_call_is_a_401_whatever_else_is_wrong(http) -> None:
    """Authentication comes before the query and before the body."""
    nobody = Caller(http, None)

    for method, path, _ in CALLS:
        answer = await nobody(method, path, params={"unknown": "1"}, content=b"{" * 70_000)

        assert problem(answer) == (401, "unauthorized"), (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_header_that_holds_no_key_is_a_401(http) -> None:
    """Whatever stands there, in any form, it is no key."""
    for value in ("", "Bearer", "Bearer ", "Basic abc", "Bearer ipn_short", "Bearer ipn_" + "é" * 43, "bearer\tipn_x"):
        answer = await http.get("/v1/orders", headers={"Authorization": value.encode()})

        assert problem(answer) == (401, "unauthorized"), value


async def test_a_well_formed_key_that_nobody_has_is_a_401(http, api: Caller) -> None:
    """The form of a key is not the key; two headers are none at all."""
    unknown = await http.get("/v1/orders", headers={"Authorization": "Bearer ipn_" + "A" * 43})
    doubled = await http.get("/v1/orders", headers=[("Authorization", f"Bearer {api.key}"), ("Authorization", f"Bearer {api.key}")])

    assert problem(unknown) == (401, "unauthorized")
    assert problem(doubled) == (401, "unauthorized")


async def test_a_key_without_the_scope_gets_a_403(http, rt) -> None:
    """All other scopes together do not help, and neither query nor body is looked at before."""
    lacking: dict[str, Caller] = {}
    for scope in tenants.SCOPES:
        others = [other for other in tenants.SCOPES if other != scope and other not in OWNERS.get(scope, ())]
        lacking[scope] = Caller(http, (await tenants.create_key(rt.db, TENANT, others)).key)

    for method, path, needed in CALLS:
        answer = await lacking[needed](method, path, params={"unknown": "1"}, content=b"{")

        assert problem(answer) == (403, "forbidden"), (method, path)
        assert needed in answer.json()["detail"]


OPEN = ("/v1/contract", "/openapi.json", "/docs", "/problems", "/problems/not-found", "/healthz", "/readyz")


async def test_an_unknown_query_parameter_is_a_400(api: Caller) -> None:
    """On every call, before anything is looked up, and without a key where none is needed; its name is not repeated."""
    calls = [(method, path) for method, path, _ in CALLS] + [("GET", path) for path in OPEN]
    for method, path in calls:
        answer = await api(method, path, params={"secret_word": "1"})

        assert problem(answer) == (400, "unknown-parameter"), (method, path)
        assert "secret_word" not in answer.text


async def test_a_query_parameter_given_twice_is_a_400(api: Caller) -> None:
    """Readers would differ on which one counts."""
    assert problem(await api("GET", "/v1/orders?limit=1&limit=2")) == (400, "unknown-parameter")


async def test_a_revoked_key_dies_within_a_second(api: Caller, rt, clock) -> None:
    """A process that knows the key follows when its memory of it ends."""
    assert (await api.get("/v1/orders")).status_code == 200
    key_id = (await rt.keys.authenticate(api.key)).key_id
    await tenants.revoke_key(rt.db, TENANT, f"key_{key_id.hex}")

    clock.advance(seconds=1)

    assert problem(await api.get("/v1/orders")) == (401, "unauthorized")


async def _things(caller: Caller) -> list[tuple[str, str]]:
    await caller.post("/v1/sources", SOURCE)
    await caller.post("/v1/orders", ORDER)
    endpoint = f"/v1/endpoints/{(await caller.post('/v1/endpoints', ENDPOINT)).json()['id']}"
    await caller.http.post("/ipn/shop-main", content=b"tran_id=ORD-1&status=VALID&amount=1")
    delivery = f"/v1/notification-deliveries/{(await caller.get('/v1/notification-deliveries')).json()['items'][0]['id']}"
    return [
        ("GET", "/v1/sources/shop-main"),
        ("PATCH", "/v1/sources/shop-main"),
        ("DELETE", "/v1/sources/shop-main"),
        ("GET", "/v1/orders/ORD-1"),
        ("GET", endpoint),
        ("PATCH", endpoint),
        ("DELETE", endpoint),
        ("POST", f"{endpoint}/enable"),
        ("POST", f"{endpoint}/disable"),
        ("POST", f"{endpoint}/rotate-secret"),
        ("GET", delivery),
    ]


async def test_another_tenants_things_are_not_there_whatever_the_body(api: Caller, stranger: Caller) -> None:
    """404 for each of them, and nothing of the kind is listed; the owner still has them all."""
    for method, path in await _things(api):
        for body in (b"", b"not json", b'{"config": 1, "url": 1, "reason": 1}', b"x" * 70_000):
            assert problem(await stranger(method, path, content=body)) == (404, "not-found"), (method, path)

    for listed in ("sources", "orders", "endpoints", "notification-deliveries", "event-deliveries"):
        assert (await stranger.get(f"/v1/{listed}")).json() == {"items": [], "next_cursor": None}
    assert (await stranger.get("/v1/events")).json()["items"] == []
    assert (await api.get("/v1/sources/shop-main")).json()["disabled_at"] is None


async def test_a_source_of_another_tenant_takes_no_order(shop: Caller, stranger: Caller) -> None:
    """It is a field with a value that cannot be, as an unknown name is."""
    of_another = await stranger.post("/v1/orders", ORDER)
    unknown = await stranger.post("/v1/orders", ORDER | {"source": "nobody"})

    assert problem(of_another) == (422, "validation-failed")
    assert of_another.json() == unknown.json()


async def test_an_id_of_odd_form_is_a_404(api: Caller) -> None:
    """Nothing has such a name, and nothing breaks on it."""
    for listed in ("sources", "orders", "endpoints", "notification-deliveries", "events", "event-deliveries"):
        for odd in ("%00", "ORD%201", "..%2f", "%ff", "x" * 500, "ndl_zz", "ep_" + "g" * 32, "\N{BENGALI DIGIT ONE}"):
            assert problem(await api("GET", f"/v1/{listed}/{odd}")) == (404, "not-found"), (listed, odd)


async def test_an_unknown_address_is_a_404_and_a_wrong_method_a_405(http) -> None:
    """With or without a key; the 405 lists what the address takes."""
    unknown = await http.get("/v1/nothing")
    wrong = await http.put("/v1/orders")

    assert problem(unknown) == (404, "not-found")
    assert problem(wrong) == (405, "method-not-allowed")
    assert wrong.headers["allow"] == "GET, POST"
    assert (await http.post("/v1/sources/shop-main")).headers["allow"] == "GET, PATCH, DELETE"


async def test_nothing_is_redirected_to_another_form_of_its_address(api: Caller) -> None:
    """A slash at the end is another address; no answer names an inner host."""
    assert problem(await api.get("/v1/orders/")) == (404, "not-found")
