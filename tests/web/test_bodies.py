"""How bodies are read: within limits of size and time, strictly as JSON, and never repeated in an answer."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from ipn_gateway.web import bodies, deps
from tests.web.conftest import CONFIG, ENDPOINT, ORDER, SOURCE, Caller, pointers, problem

if TYPE_CHECKING:
    import pytest

JSON = {"Content-Type": "application/json"}


async def in_chunks(data: bytes, size: int = 1000):
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def test_a_body_over_64_kib_is_a_413(shop: Caller) -> None:
    """Announced or sent in chunks, on every call that takes a body; one of exactly 64 KiB is read."""
    whole = json.dumps(ORDER).encode()
    largest = whole + b" " * (64 * 1024 - len(whole))

    for path in ("/v1/orders", "/v1/sources", "/v1/endpoints"):
        announced = await shop("POST", path, content=largest + b" ", headers=JSON)
        chunked = await shop("POST", path, content=in_chunks(largest + b" "), headers=JSON)

        assert problem(announced) == problem(chunked) == (413, "payload-too-large")
        assert chunked.headers["connection"] == "close"
    assert (await shop("POST", "/v1/orders", content=in_chunks(largest), headers=JSON)).status_code == 201


async def test_a_body_over_the_limit_is_not_read_to_its_end(shop: Caller) -> None:
    """An endless body is cut off where it becomes too large."""
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1024
            yield b" " * 1024

    answer = await shop("POST", "/v1/orders", content=endless(), headers=JSON)

    assert problem(answer) == (413, "payload-too-large")
    assert sent <= 66 * 1024


async def test_a_body_that_does_not_arrive_is_a_408(shop: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time runs from the first byte to the last, not from one to the next."""
    monkeypatch.setattr(deps, "BODY_SECONDS_MAX", 0.05)

    async def stuck():
        yield b"{"
        await asyncio.Event().wait()

    answer = await shop("POST", "/v1/orders", content=stuck(), headers=JSON)

    assert problem(answer) == (408, "request-timeout")
    assert answer.headers["connection"] == "close"


async def test_what_is_not_called_json_is_a_415(shop: Caller) -> None:
    """Nothing is guessed from the bytes."""
    for headers in (
        {},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/jsonp"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ):
        answer = await shop("POST", "/v1/orders", content=json.dumps(ORDER).encode(), headers=headers)

        assert problem(answer) == (415, "unsupported-media-type"), headers


async def test_json_by_any_of_its_names_is_read(shop: Caller) -> None:
    """Case, blanks and the charset do not matter."""
    for number, media_type in enumerate(("application/json", "Application/JSON ; charset=UTF-8", 'application/json; charset="utf-8"')):
        body = json.dumps(ORDER | {"order_id": f"ORD-{number}"}).encode()

        answer = await shop("POST", "/v1/orders", content=body, headers={"Content-Type": media_type})

        assert answer.status_code == 201, media_type


UNREADABLE = [
    b"",
    b" ",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"{'a': 1}",
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e9999999999999999999999}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    b'{"metadata": ' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}",
    b'\xef\xbb\xbf{"a": 1}',
    b'{"a": "\xff"}',
    json.dumps(ORDER).encode("utf-16"),
]


async def test_what_is_no_json_object_is_a_422(shop: Caller) -> None:
    """Whatever is wrong with it: never a 500."""
    for data in UNREADABLE:
        answer = await shop("POST", "/v1/orders", content=data, headers=JSON)

        assert problem(answer) == (422, "validation-failed"), data[:50]


async def test_a_repeated_member_is_a_400(shop: Caller) -> None:
    """At any depth, even with the same value, since readers differ on which one counts."""
    for data in ('{"order_id": "a", "order_id": "a"}', '{"metadata": {"a": [{"b": 1, "c": 2, "b": 1}]}}'):
        answer = await shop("POST", "/v1/orders", content=data.encode(), headers=JSON)

        assert problem(answer) == (400, "unknown-parameter")


async def test_text_that_no_database_keeps_is_a_422(shop: Caller) -> None:
    """NUL and halves of surrogate pairs, in names and values, wherever they are; the six characters of an escape are only text."""
    for members, pointer in (
        ({"order_id": "a\0b"}, "#/order_id"),
        ({"source": "\ud800"}, "#/source"),
        ({"ignored": "\0"}, "#/ignored"),
        ({"metadata": {"note": ["a", "b\0"]}}, "#/metadata/note/1"),
        ({"metadata": {"a\0": 1}}, "#/metadata"),
        ({"metadata": {"\udfff": 1}}, "#/metadata"),
    ):
        answer = await shop("POST", "/v1/orders", content=json.dumps(ORDER | members).encode(), headers=JSON)

        assert pointers(answer) == [pointer], members
    assert (await shop.post("/v1/orders", ORDER | {"metadata": {"note": "\\u0000"}})).json()["metadata"] == {"note": "\\u0000"}


async def test_unknown_members_are_ignored(shop: Caller) -> None:
    """A newer client may say more than this service knows."""
    assert (await shop.post("/v1/orders", ORDER | {"colour": {"deep": [1]}})).status_code == 201


async def test_every_post_takes_an_idempotency_key(shop: Caller) -> None:
    """It is accepted, whether it does anything yet or not."""
    answer = await shop("POST", "/v1/orders", json=ORDER, headers={"Idempotency-Key": "k-1"})

    assert answer.status_code == 201


async def test_no_answer_and_no_log_holds_a_secret_that_was_sent(api: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    """Good, bad, of the wrong type, in the wrong place: it is not repeated, in an answer or in a log."""
    secret = "s3cr3t-Word-77"
    good = CONFIG | {"store_passwd": secret}

    await api.post("/v1/sources", SOURCE | {"config": good})
    for config in (
        good | {"store_id": 7},
        good | {"mode": secret},
        good | {"store_passwd": [secret]},
        good | {"store_passwd": f"{secret}\n"},
    ):
        await api.post("/v1/sources", {"name": "b2", "provider": "sslcommerz", "config": config})
        await api.patch("/v1/sources/shop-main", {"config": config})
    await api.post("/v1/sources", {"name": secret, "provider": secret, "config": secret})
    await api.post("/v1/orders", {"order_id": f"{secret} ", "amount": secret, "currency": secret, "source": secret, "return_url": secret})
    await api.post("/v1/endpoints", ENDPOINT | {"events": [secret]})
    await api("POST", "/v1/orders", content=f'{{"a": {secret}'.encode(), headers=JSON)
    await api("GET", "/v1/orders", params={"status": secret, "since": secret})
    await api("GET", "/v1/orders", params={secret: "1"})
    await api("GET", f"/v1/sources/{secret}")
    await api("GET", "/v1/sources")

    logged = capsys.readouterr()
    assert secret not in api.heard()
    assert secret not in logged.out + logged.err
    assert api.key is not None
    assert api.key not in api.heard() + logged.out + logged.err


def test_numbers_with_a_point_are_exact() -> None:
    """They are decimals from the first moment on."""
    assert str(bodies.parse(b'{"a": 10.10}')["a"]) == "10.10"
