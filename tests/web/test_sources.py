"""Sources over HTTP: secrets go in and never come out, and a name is taken for ever."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.conftest import CONFIG, SOURCE, Caller, pointers, problem


async def test_a_source_is_registered_and_shown_without_its_secret(api: Caller) -> None:
    """201 with its address, and the URL that the provider is told."""
    answer = await api.post("/v1/sources", SOURCE)

    assert answer.status_code == 201
    assert answer.headers["location"] == "/v1/sources/shop-main"
    shown = answer.json()
    assert shown.pop("created_at").endswith("Z")
    assert shown == {
        "name": "shop-main",
        "provider": "sslcommerz",
        "mode": "sandbox",
        "config": {"store_id": "teststore", "mode": "sandbox"},
        "listener_url": "https://pay.example/ipn/shop-main",
        "disabled_at": None,
    }
    assert (await api.get("/v1/sources/shop-main")).json() == answer.json()
    assert (await api.get("/v1/sources")).json()["items"] == [answer.json()]
    assert CONFIG["store_passwd"] not in api.heard()


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"name": "A"}, "#/name"),
    ({"name": "a"}, "#/name"),
    ({"name": "-ab"}, "#/name"),
    ({"name": "a_b"}, "#/name"),
    ({"name": "a" * 64}, "#/name"),
    ({"name": "ab\n"}, "#/name"),
    ({"name": None}, "#/name"),
    ({"provider": "unknown"}, "#/provider"),
    ({"config": []}, "#/config"),
    ({"config": {"store_id": "a", "mode": "sandbox"}}, "#/config/store_passwd"),
    ({"config": {"store_passwd": "a", "mode": "sandbox"}}, "#/config/store_id"),
    ({"config": {"store_id": "a", "store_passwd": "b"}}, "#/config/mode"),
    ({"config": CONFIG | {"mode": "test"}}, "#/config/mode"),
    ({"config": CONFIG | {"base_url": "http://provider.example"}}, "#/config/base_url"),
    ({"config": CONFIG | {"base_url": "https://provider.example/path"}}, "#/config/base_url"),
]


@pytest.mark.case("B52")
async def test_a_member_that_cannot_be_is_a_422_that_points_at_it(api: Caller) -> None:
    """A missing value, a blank secret, one with a newline: refused here, not found out by the first notification."""
    config: dict[str, object] = dict(CONFIG)
    blank = [
        ({"config": config | {"store_passwd": secret}}, "#/config/store_passwd") for secret in ("", "  ", "a\nb", "a\x1bb", "\x7f", 5, None)
    ]

    for members, pointer in IMPOSSIBLE + blank:
        assert pointers(await api.post("/v1/sources", SOURCE | members)) == [pointer], members
    assert (await api.get("/v1/sources")).json()["items"] == []


async def test_a_name_is_never_free_again(api: Caller, stranger: Caller) -> None:
    """Neither for its tenant nor for another, and not after it was disabled."""
    await api.post("/v1/sources", SOURCE)

    assert problem(await api.post("/v1/sources", SOURCE)) == (409, "state-conflict")
    assert problem(await stranger.post("/v1/sources", SOURCE)) == (409, "state-conflict")
    assert (await api.delete("/v1/sources/shop-main")).status_code == 204
    assert problem(await api.post("/v1/sources", SOURCE)) == (409, "state-conflict")


async def test_a_change_is_merged(api: Caller) -> None:
    """What is not named stays; null takes an optional value away, not a required one."""
    await api.post("/v1/sources", SOURCE | {"config": CONFIG | {"base_url": "http://127.0.0.1:9000"}})

    changed = await api.patch("/v1/sources/shop-main", {"config": {"mode": "live"}})
    assert changed.json()["config"] == {"store_id": "teststore", "mode": "live", "base_url": "http://127.0.0.1:9000"}
    assert changed.json()["mode"] == "live"

    changed = await api.patch("/v1/sources/shop-main", {"config": {"base_url": None}})
    assert changed.json()["config"] == {"store_id": "teststore", "mode": "live"}

    assert (await api.patch("/v1/sources/shop-main", {})).json() == changed.json()
    assert pointers(await api.patch("/v1/sources/shop-main", {"config": {"store_passwd": None}})) == ["#/config/store_passwd"]
    assert pointers(await api.patch("/v1/sources/shop-main", {"config": {"store_passwd": " "}})) == ["#/config/store_passwd"]
    assert pointers(await api.patch("/v1/sources/shop-main", {"config": 1})) == ["#/config"]


async def test_a_changed_source_is_used_at_once(api: Caller, rt) -> None:
    """The process that took the change does not go on with what it remembered."""
    await api.post("/v1/sources", SOURCE)
    assert (await rt.sources.get("shop-main")).config.mode == "sandbox"

    await api.patch("/v1/sources/shop-main", {"config": {"mode": "live"}})

    assert (await rt.sources.get("shop-main")).config.mode == "live"


async def test_a_source_that_was_asked_for_too_early_is_found_once_it_is_there(api: Caller, http) -> None:
    """That it was unknown is forgotten when it is made."""
    assert (await http.post("/ipn/shop-main")).status_code == 404

    await api.post("/v1/sources", SOURCE)

    assert (await http.post("/ipn/shop-main", content=b"a=1")).status_code == 400


async def test_a_disabled_source_still_receives(api: Caller, http) -> None:
    """DELETE disables, and doing it again changes nothing; only a tenant's own source can be disabled."""
    await api.post("/v1/sources", SOURCE)
    await api.delete("/v1/sources/shop-main")
    disabled_at = (await api.get("/v1/sources/shop-main")).json()["disabled_at"]

    again = await api.delete("/v1/sources/shop-main")

    assert again.status_code == 204
    assert again.content == b""
    assert disabled_at is not None
    assert (await api.get("/v1/sources/shop-main")).json()["disabled_at"] == disabled_at
    assert (await http.post("/ipn/shop-main", content=b"tran_id=a&status=VALID&amount=1")).status_code == 401
    assert problem(await api.delete("/v1/sources/nobody")) == (404, "not-found")
