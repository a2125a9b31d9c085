"""The header: which values are keys, that quotes around one do not matter, and where it has no effect."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import httpx
import pytest

from ipn_gateway.simulator.serving import serving
from tests.idempotency.service import BODY, Service, is_replay, told
from tests.web.conftest import ORDER, Caller, problem

if TYPE_CHECKING:
    from ipn_gateway.runtime import Runtime

INVALID = (400, "idempotency-key-invalid")
ALPHABET = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '",\\')


async def bare(service: Service, *headers: tuple[bytes, bytes], path: str = "notes") -> httpx.Response:
    """One call whose key headers are exactly these bytes."""
    always = [(b"x-tenant", b"acme"), (b"content-type", b"application/json")]
    return await service.http.post(f"/v1/{path}", headers=[*always, *headers], content=b"{}")


def touched(service: Service) -> list[str]:
    """The transactions of the layer that were begun, and those of the operation."""
    return [point for point in service.faults.seen if point.startswith(("idempotency.", "notes.", "pings."))]


@pytest.mark.case("S1")
async def test_every_uuid_and_every_opaque_text_is_a_key(service: Service) -> None:
    """Also those that a parser of structured fields refuses, since they begin with a digit: the value is taken as it is."""
    keys = [digit + str(uuid.UUID(int=number))[1:] for number, digit in enumerate("0123456789abcdef")]
    for key in [*keys, "KG5LxwFBepaKHyUD", "K;p=1", "*", "?1", ":YWJj:", "(a)", "01", "1.0", "@1659578233"]:
        answer = await service.post("notes", key=key)

        assert (answer.status_code, is_replay(answer)) == (201, False), key
        assert (await service.rows("SELECT key FROM idempotency_keys ORDER BY id DESC LIMIT 1")) == [{"key": key}]


@pytest.mark.case("S2")
@pytest.mark.parametrize("keys", [('"K"', "K"), ("K", '"K"')])
async def test_a_key_in_quotes_is_the_same_key(service: Service, keys: tuple[str, str]) -> None:
    """One pair is taken off before anything is compared or stored: a client that changes its library is still recognised."""
    first, second = [await service.post("notes", key=key) for key in keys]

    assert (is_replay(first), is_replay(second)) == (False, True)
    assert told(first) == told(second)
    assert (await service.row())["key"] == "K"


BROKEN = ['"', '""', '"K', 'K"', '""K""', '"K""', '"a\\"b"', "a\\b", '"a\\\\b"', '"K";p=1', '"K", "L"', "a b", '" K"', '"K "']


@pytest.mark.case("S3")
async def test_broken_forms_are_refused_before_the_store_is_asked(service: Service) -> None:
    """A single quote mark, nothing between two, backslashes, parameters: 400, also where no key is needed."""
    for value in BROKEN:
        for path in ("notes", "pings"):
            answer = await bare(service, (b"idempotency-key", value.encode()), path=path)

            assert problem(answer) == INVALID, value
    assert touched(service) == []
    assert await service.rows() == []


@pytest.mark.case("S4")
async def test_a_key_has_255_characters_at_most(service: Service) -> None:
    """Counted without the quotes; one more is refused, however much more."""
    longest = "k" * 255

    for value in ("k", longest, f'"{longest[:-1]}x"'):
        assert (await service.post("notes", key=value)).status_code == 201
    for value in ("k" * 256, f'"{longest}k"', "k" * 10_000, ""):
        assert problem(await service.post("notes", key=value)) == INVALID
    assert {len(row["key"]) for row in await service.rows()} == {1, 255}


@pytest.mark.case("S5")
async def test_the_alphabet_is_printable_ascii_without_four(service: Service) -> None:
    """Space, quote, comma and backslash are none of it, nor is any control character, line end or byte above 126."""
    every = await service.post("notes", key=ALPHABET)
    refused = [code for code in range(256) if code > 0x7E or chr(code) not in ALPHABET]
    for code in refused:
        answer = await bare(service, (b"idempotency-key", b"a" + bytes([code]) + b"b"))

        assert problem(answer) == INVALID, code
    for text in ("ключ", "\N{BENGALI DIGIT ONE}", "\N{PILE OF POO}"):
        assert problem(await bare(service, (b"idempotency-key", text.encode()))) == INVALID

    assert every.status_code == 201
    assert len(refused) == 256 - 91
    assert (await service.row())["key"] == ALPHABET


@pytest.mark.case("S6")
async def test_two_keys_are_no_key(service: Service) -> None:
    """Sent twice, equal or not, or joined by somebody on the way: nothing is executed."""
    for values in ([b"K", b"K"], [b"K", b"L"], [b'"K"', b"K"], [b"K, K"], [b"K,K"], [b"", b"K"]):
        answer = await bare(service, *((b"idempotency-key", value) for value in values))

        assert problem(answer) == INVALID, values
    assert touched(service) == []
    assert await service.acts() == []


@pytest.mark.case("S6", "S9")
async def test_a_real_server_hands_on_every_header_in_any_case(service: Service) -> None:
    """Field names have no case; two fields that differ in it are two."""
    async with serving(service.app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:

        async def post(*headers: tuple[str, str]) -> httpx.Response:
            return await client.post("/v1/notes", headers=[("X-Tenant", "acme"), *headers], json=BODY)

        first = await post(("idempotency-key", "K"))
        others = [await post((name, "K")) for name in ("IDEMPOTENCY-KEY", "Idempotency-Key", "iDeMpOtEnCy-KeY")]
        refused = [await post(("Idempotency-Key", "L"), (name, "L")) for name in ("Idempotency-Key", "IDEMPOTENCY-KEY")]

    assert (first.status_code, is_replay(first)) == (201, False)
    assert [is_replay(answer) for answer in others] == [True] * 3
    assert {problem(answer) for answer in refused} == {INVALID}
    assert (await service.row())["key"] == "K"


@pytest.mark.case("S7")
async def test_a_missing_key_is_a_400_where_one_is_needed(service: Service) -> None:
    """Where none is needed the operation executes, each time, and nothing is kept."""
    missing = await service.post("notes", key=None)
    pings = [await service.post("pings", key=None) for _ in range(2)]

    assert problem(missing) == (400, "idempotency-key-missing")
    assert missing.json()["title"] == "Idempotency-Key is missing"
    assert [answer.status_code for answer in pings] == [201, 201]
    assert not any(is_replay(answer) for answer in pings)
    assert await service.acts() == ["pinged", "pinged"]
    assert await service.rows() == []


@pytest.mark.case("S7")
async def test_what_a_problem_means_is_said_where_its_type_leads(shop: Caller) -> None:
    """Our own calls that move money need a key, and say where to read about it."""
    answer = await shop.http.post("/v1/orders", json=ORDER, headers={"Authorization": f"Bearer {shop.key}"})

    assert problem(answer) == (400, "idempotency-key-missing")
    assert (await shop.http.get(answer.json()["type"])).status_code == 200
    assert (await shop.get("/v1/orders")).json()["items"] == []


@pytest.mark.case("S8")
async def test_safe_methods_and_delete_take_no_notice_of_a_key(service: Service) -> None:
    """They are safe to repeat already: no row, no mark, and each answer is of now."""
    key = {"Idempotency-Key": "K1", "X-Tenant": "acme"}
    none = await service.http.get("/v1/notes", headers=key)
    posted = await service.post("notes")
    one = await service.http.get("/v1/notes", headers=key)
    others = [await service.http.request(method, "/v1/notes", headers=key) for method in ("HEAD", "OPTIONS", "DELETE", "DELETE", "GET")]

    assert (none.json(), one.json(), others[-1].json()) == (0, 1, 0)
    assert not any(is_replay(answer) for answer in (none, posted, one, *others))
    assert [(row["operation"], row["key"]) for row in await service.rows()] == [("POST /v1/notes", "K1")]


@pytest.mark.case("S8")
async def test_our_own_reads_and_deletes_take_no_notice_of_a_key(shop: Caller, rt: Runtime) -> None:
    """Even one that cannot be a key, or is the key of a call."""
    posted = await shop.post("/v1/orders", ORDER, idempotency_key="K1")
    answers = [
        await shop(method, path, headers={"Idempotency-Key": key})
        for key in ("K1", "no, key")
        for method, path in (("GET", "/v1/orders/ORD-1"), ("GET", "/v1/orders"), ("DELETE", "/v1/sources/shop-main"))
    ]
    async with rt.db.autocommit("test.count") as tx:
        keys = await tx.all(dict, "SELECT operation FROM idempotency_keys WHERE key = 'K1'")

    assert posted.status_code == 201
    assert [answer.status_code for answer in answers] == [200, 200, 204] * 2
    assert not any(is_replay(answer) for answer in answers)
    assert keys == [{"operation": "POST /v1/orders"}]
