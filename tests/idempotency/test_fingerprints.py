"""What makes two requests the same: what is declared to count, by value and not by how it is written."""

from __future__ import annotations

import dataclasses
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ipn_gateway import fingerprints, orders
from ipn_gateway.errors import ConfigurationError
from ipn_gateway.web import app as web_app
from ipn_gateway.web import bodies
from tests.idempotency import foreign
from tests.idempotency.service import BODY, Service, is_replay, told
from tests.web.conftest import ORDER, SOURCE, Caller, pointers, problem

if TYPE_CHECKING:
    from ipn_gateway.operations import Operation
    from ipn_gateway.runtime import Runtime

REUSED = (422, "idempotency-key-reused")
GOLDEN = Path(__file__).with_name("golden.json")


def mark(body: str, operation: Operation = orders.CREATE) -> str:
    """The fingerprint of a body as it came."""
    return fingerprints.fingerprint(operation.name, operation.fields, bodies.parse(body.encode()), path={}, query={}).hex()


# --- declared


@pytest.mark.case("S23")
def test_the_application_does_not_start_with_a_call_that_declares_nothing(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A POST under /v1 says what counts of it, or there is no application."""
    router = APIRouter()
    router.add_api_route("/v1/things", lambda: None, methods=["POST"])
    monkeypatch.setattr(web_app, "ROUTERS", (*web_app.ROUTERS, router))
    monkeypatch.setattr(web_app, "_routes", web_app._routes.__wrapped__)

    with pytest.raises(ConfigurationError, match="POST /v1/things"):
        web_app.create_app(rt)


@pytest.mark.case("S23")
def test_every_operation_of_ours_declares_what_counts(app: FastAPI) -> None:
    """Each POST under /v1 has one, and what it reads is among what its body documents."""
    paths = app.openapi()["paths"]
    posts = {f"POST {path}": methods["post"] for path, methods in paths.items() if path.startswith("/v1/") and "post" in methods}
    operations = app.state.idempotency.operations

    assert set(operations) == set(posts)
    for name, operation in operations.items():
        schema = posts[name].get("requestBody", {"content": {"application/json": {"schema": {}}}})["content"]["application/json"]["schema"]

        assert set(operation.fields) <= set(schema.get("properties", {})), name


# --- another request


@pytest.mark.case("S24", "S35")
async def test_another_request_under_a_known_key_is_refused(shop: Caller, rt: Runtime) -> None:
    """422 with a document that can be read and followed; it tells nothing of the first request, whose row stays as it is."""
    first = await shop.post("/v1/orders", ORDER | {"metadata": {"cart": "of-the-first"}}, idempotency_key="K1")
    before = await _rows(rt)
    answer = await shop.post("/v1/orders", ORDER | {"order_id": "ORD-2", "amount": "100.01"}, idempotency_key="K1")

    assert problem(answer) == REUSED
    assert answer.headers["content-language"] == "en"
    assert answer.json() == json.loads(answer.content)
    assert answer.json()["title"] == "Idempotency-Key is already used"
    assert (await shop.http.get(answer.json()["type"])).status_code == 200
    assert set(answer.json()) == {"type", "title", "status", "detail"}
    assert not re.search(r"ORD-|100\.0|BDT|of-the-first|amount|order_id|metadata|K1", answer.text + str(answer.headers))
    assert await _rows(rt) == before
    assert (await shop.get("/v1/orders")).json()["items"] == [first.json()]


async def _rows(rt: Runtime) -> list[dict[str, Any]]:
    async with rt.db.autocommit("test.rows") as tx:
        return await tx.all(dict, "SELECT * FROM idempotency_keys WHERE operation = 'POST /v1/orders'")


ANOTHER: dict[str, Any] = {
    "order_id": "ORD-2",
    "amount": "100.01",
    "currency": "USD",
    "source": "shop-two",
    "return_url": "https://shop.example/other",
    "expires_at": "2030-01-01T00:00:01Z",
    "metadata": {"cart": [1, 2]},
}


@pytest.mark.case("S27")
async def test_each_member_that_counts_makes_another_request(shop: Caller) -> None:
    """Changed, left out, or given where there was none: any single one of those that are declared."""
    await shop.post("/v1/sources", SOURCE | {"name": "shop-two", "config": SOURCE["config"] | {"store_id": "two"}})  # type: ignore[operator]
    whole = ORDER | {"return_url": "https://shop.example/", "expires_at": "2030-01-01T00:00:00Z", "metadata": {"cart": [1]}}
    first = await shop.post("/v1/orders", whole, idempotency_key="K1")
    told_ = {name: await shop.post("/v1/orders", whole | {name: value}, idempotency_key="K1") for name, value in ANOTHER.items()}
    for name in ("return_url", "expires_at", "metadata"):
        told_[f"no {name}"] = await shop.post("/v1/orders", {n: v for n, v in whole.items() if n != name}, idempotency_key="K1")

    assert first.status_code == 201
    assert set(ANOTHER) == set(orders.CREATE.fields)
    assert {name: problem(answer) for name, answer in told_.items()} == dict.fromkeys(told_, REUSED)
    assert is_replay(await shop.post("/v1/orders", whole, idempotency_key="K1"))


@pytest.mark.case("S27")
def test_each_member_of_every_operation_counts(app: FastAPI) -> None:
    """Whatever it is declared as: there, absent, null and another value are requests of their own; path and query count as well."""
    for operation in app.state.idempotency.operations.values():
        for name, kind in operation.fields.items():
            made = {
                fingerprints.fingerprint(operation.name, operation.fields, body, path={}, query={})
                for body in ({}, {name: None}, {name: "2030-01-01T00:00:00Z"}, {name: "1"}, {name: 1})
            }

            assert len(made) == (4 if kind == "decimal" else 5), (operation.name, name)
        places = [{"path": {"order_id": "1"}, "query": {}}, {"path": {"order_id": "2"}, "query": {}}, {"path": {}, "query": {"a": "1"}}]
        assert len({fingerprints.fingerprint(operation.name, operation.fields, {}, **place) for place in places}) == 3


@pytest.mark.case("S34")
async def test_another_request_is_refused_while_the_first_is_worked_on(service: Service) -> None:
    """422 comes before 409 and before the stored answer: waiting would not help it."""
    plan = service.provider.hold()
    working = service.start(service.post("charges"))
    await plan.reached.wait()
    other = await service.post("charges", BODY | {"amount": "10.01"})
    same = await service.post("charges")
    plan.go.set()
    await working
    after = await service.post("charges", BODY | {"amount": "10.01"})

    assert (problem(other), problem(after)) == (REUSED, REUSED)
    assert problem(same) == (409, "idempotency-in-progress")


@pytest.mark.case("S31")
async def test_the_same_body_under_another_key_is_another_order(service: Service) -> None:
    """A customer who buys the same coffee twice pays twice: the body is never the identity."""
    answers = [await service.post("charges", key=key) for key in ("K1", "K2")]

    assert [(answer.status_code, is_replay(answer)) for answer in answers] == [(201, False)] * 2
    assert service.provider.done == 2
    assert len(await service.rows()) == 2


# --- the same request


@pytest.mark.case("S25")
async def test_the_same_request_written_in_another_way_is_answered(service: Service) -> None:
    """Order of members, white space, escapes, and numbers and moments of the same value: a client may change its library."""
    first = await service.post(
        "notes",
        {"amount": "10.00", "currency": "BDT", "due_at": "2030-01-01T00:00:00Z", "details": {"n": 100, "text": "é", "l": [1.5, None]}},
    )
    spread = b'\n{ "currency" : "BDT",\t"amount":"10.0", "due_at":"2030-01-01t00:00:00.000z",'
    spread += b' "details":{"n":100.0,"l":[15E-1,null],"text":"\xc3\xa9"}}'
    others = [
        b'{"details":{"l":[1.50,null],"text":"\\u00e9","n":1e2},"due_at":"2030-01-01T06:00:00+06:00","currency":"BDT","amount":"10"}',
        spread,
    ]

    for content in others:
        answer = await service.post("notes", content=content, headers={"Content-Type": "application/json; charset=utf-8"})

        assert told(answer) == told(first)
        assert is_replay(answer)


@pytest.mark.case("S25")
@pytest.mark.parametrize("written", ['"10"', '"10.00"', "10", "10.0", "1e1", "100E-1"])
def test_a_decimal_is_one_value_as_text_and_as_number(written: str) -> None:
    """An operation that takes either, as those of an application may, compares what is meant; a JSON member keeps them apart."""
    assert mark(f'{{"amount":{written}}}') == mark('{"amount":"10"}')
    assert mark(f'{{"amount":{written}}}') != mark('{"amount":"10.01"}')


@pytest.mark.case("S28")
async def test_what_differs_from_try_to_try_does_not_count(service: Service) -> None:
    """Agent, trace, nonce, signature, the client's own clock, and members that nobody knows: ignored, never a 422."""
    first = await service.post("notes")
    headers = {
        "User-Agent": "shop/2",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "Date": "Mon, 01 Jan 2029",
        "X-Request-Id": "r-2",
        "X-Signature": "abc",
        "X-Nonce": "1",
        "Accept": "text/html",
    }
    unknown = {"sent_at": "2029-01-01T00:00:00Z", "nonce": 7, "remark": "third try", "new_in_v3": None}

    for answer in (
        await service.post("notes", headers=headers),
        await service.post("notes", BODY | unknown),
        await service.post("notes", BODY | unknown | {"remark": "fourth try"}, headers=headers),
    ):
        assert (told(answer), is_replay(answer)) == (told(first), True)


@pytest.mark.case("S26")
async def test_money_is_text_and_never_a_float(shop: Caller, rt: Runtime) -> None:
    """`10.10` as a JSON number is refused before the key is taken; as text it is that decimal, however it is written."""
    for body in ({"amount": 10.10}, {"amount": 10}, {"amount": "1e1"}):
        assert pointers(await shop.post("/v1/orders", ORDER | body, idempotency_key="K1")) == ["#/amount"]
    assert await _rows(rt) == []

    first = await shop.post("/v1/orders", ORDER | {"amount": "10.1"}, idempotency_key="K1")
    same = await shop.post("/v1/orders", ORDER | {"amount": "10.10"}, idempotency_key="K1")
    other = await shop.post("/v1/orders", ORDER | {"amount": "10.11"}, idempotency_key="K1")

    assert (first.json()["amount"], told(same), problem(other)) == ("10.10", told(first), REUSED)


# --- what was before still holds


@pytest.mark.case("S29")
def test_fingerprints_are_those_of_yesterday(app: FastAPI) -> None:
    """A change of code changes no fingerprint of a request that clients send already."""
    operations = app.state.idempotency.operations
    for line in json.loads(GOLDEN.read_text()):
        operation = operations[line["operation"]]
        body, fields = bodies.parse(line["body"].encode()), operation.projection(line["version"])
        made = fingerprints.fingerprint(operation.name, fields, body, path=line["path"], query=line["query"])

        assert made.hex() == line["fingerprint"], line


@pytest.mark.case("S29")
def test_every_member_of_every_operation_is_in_the_file(app: FastAPI) -> None:
    """A new operation, version or member brings its line along; the test above says which fingerprint it has."""
    present: dict[tuple[str, int], set[str]] = {}
    for line in json.loads(GOLDEN.read_text()):
        present.setdefault((line["operation"], line["version"]), set()).update(json.loads(line["body"]))
    operations = app.state.idempotency.operations.values()
    missing = {(one.name, one.version): set(one.fields) - present.get((one.name, one.version), set()) for one in operations}

    assert [name for name in missing if name not in present] == []
    assert {name: members for name, members in missing.items() if members} == {}


@pytest.mark.case("S29")
async def test_the_stored_fingerprint_is_the_one_of_the_file(shop: Caller, rt: Runtime) -> None:
    """The file is about what is kept, by way of HTTP."""
    line = next(line for line in json.loads(GOLDEN.read_text()) if line["operation"] == "POST /v1/orders")
    answer = await shop("POST", "/v1/orders", content=line["body"].encode(), headers={"Content-Type": "application/json"})

    assert answer.status_code == 201
    assert [(row["fingerprint"].hex(), row["fingerprint_version"]) for row in await _rows(rt)] == [(line["fingerprint"], line["version"])]


@pytest.mark.case("S32")
async def test_a_changed_projection_still_knows_the_requests_of_before(service: Service) -> None:
    """A row is compared by the version that it was stored with; a process of before the change leaves the new rows alone."""
    old_fields: dict[str, fingerprints.Kind] = {"amount": "decimal"}
    old = dataclasses.replace(foreign.NOTE, fields=old_fields)
    new = dataclasses.replace(foreign.NOTE, version=2, earlier={1: old_fields})
    async with service.another(note=old) as before, service.another(note=new) as after:
        first = await before.post("notes")
        repeat = await after.post("notes", BODY | {"currency": "USD"})
        other = await after.post("notes", BODY | {"amount": "11"})
        await after.post("notes", key="K2")
        changed = await after.post("notes", BODY | {"currency": "USD"}, key="K2")
        too_new = await before.post("notes", key="K2")

    assert (told(repeat), is_replay(repeat)) == (told(first), True)
    assert (problem(other), problem(changed)) == (REUSED, REUSED)
    assert problem(too_new) == (503, "idempotency-unavailable")
    assert [row["fingerprint_version"] for row in await service.rows()] == [1, 2]
    assert await service.acts() == ["noted", "noted"]


# --- no two requests share one

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NUMBERS = st.integers(min_value=-(10**30), max_value=10**30) | st.decimals(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.case("S33", "S25")
@given(JSON)
def test_the_encoding_can_be_read_back(value: Any) -> None:
    """It is JSON of the same value, so that two values never share one encoding; and one value has one, however its members are ordered."""
    text = fingerprints.canonical(value)
    back = json.loads(text, parse_float=Decimal, parse_int=Decimal)

    assert same(back, value)
    assert fingerprints.canonical(back) == text
    assert fingerprints.canonical(turned(value)) == text


@pytest.mark.case("S33")
@given(JSON, JSON)
def test_two_values_have_two_encodings(one: Any, other: Any) -> None:
    """Whatever they hold: delimiters, quotes and brackets inside texts included."""
    assume(not same(one, other))

    assert fingerprints.canonical(one) != fingerprints.canonical(other)


@pytest.mark.case("S25")
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(orders.CREATE.fields)), JSON), st.data())
def test_how_a_body_is_written_does_not_matter(body: dict[str, Any], data: st.DataObject) -> None:
    """Members in any order, white space anywhere, texts escaped or not, numbers as digits, with a point or with an exponent."""
    written = [write(body, data.draw(st.randoms(use_true_random=False))) for _ in range(2)]

    assert mark(written[0]) == mark(written[1])


def write(value: Any, chance: Any) -> str:
    """The value as JSON, in one of the ways that there are."""
    gap = str(chance.choice(["", " ", "\n\t"]))
    if isinstance(value, dict):
        members = [f"{write(name, chance)}{gap}:{gap}{write(item, chance)}" for name, item in value.items()]
        chance.shuffle(members)
        return "{" + gap + f"{gap},".join(members) + gap + "}"
    if isinstance(value, list):
        return "[" + f"{gap},{gap}".join(write(item, chance) for item in value) + gap + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=chance.random() < 0.5)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    sign, digits, exponent = Decimal(value).as_tuple()
    assert isinstance(exponent, int)
    zeros = chance.choice([0, 1, 3])
    text = "".join(map(str, digits)).lstrip("0") or "0"
    return f"{'-' if sign and text != '0' else ''}{text}{'0' * zeros if text != '0' else ''}e{exponent - zeros}"


def same(one: Any, other: Any) -> bool:
    """Whether two values are one in JSON: true is not 1, and 1 is 1.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(item, other[name]) for name, item in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, int | Decimal) and isinstance(other, int | Decimal) and not (isinstance(one, bool) or isinstance(other, bool)):
        return Decimal(one) == Decimal(other)
    return type(one) is type(other) and bool(one == other)


def turned(value: Any) -> Any:
    """The same with the members of every object in the other order."""
    if isinstance(value, dict):
        return {name: turned(item) for name, item in reversed(value.items())}
    return [turned(item) for item in value] if isinstance(value, list) else value


APART = [
    ('{"metadata":{"a":"b:c"}}', '{"metadata":{"a:b":"c"}}'),
    ('{"metadata":["a,b"]}', '{"metadata":["a","b"]}'),
    ('{"metadata":"1"}', '{"metadata":1}'),
    ('{"metadata":null}', "{}"),
    ('{"metadata":null}', '{"metadata":{}}'),
    ('{"metadata":null}', '{"metadata":"null"}'),
    ('{"metadata":true}', '{"metadata":1}'),
    ('{"metadata":"\\u00e9"}', '{"metadata":"e\\u0301"}'),
    ('{"metadata":1e400}', '{"metadata":2e400}'),
    ('{"metadata":0.1000000000000000000000000000001}', '{"metadata":0.1}'),
    ('{"amount":"10.00"}', '{"metadata":"10.00"}'),
    ('{"amount":"10.00"}', '{"amount":"10.00 BDT"}'),
    ('{"amount":"1"}', '{"amount":true}'),
    ('{"order_id":"10"}', '{"order_id":"10.0"}'),
    ('{"expires_at":"2030-01-01T00:00:00Z"}', '{"metadata":"2030-01-01T00:00:00Z"}'),
]


@pytest.mark.case("S33")
@pytest.mark.parametrize("pair", APART)
def test_crafted_pairs_stay_apart(pair: tuple[str, str]) -> None:
    """Delimiters, types, absence and null, precision that a double has not."""
    assert mark(pair[0]) != mark(pair[1])


@pytest.mark.case("S33")
async def test_what_readers_differ_on_is_refused(service: Service) -> None:
    """A member that is there twice, NaN and infinities: another reader would see another request, so nobody is asked which it was."""
    for body, status in (
        ('{"amount":"1","amount":"2"}', 400),
        ('{"details":{"a":{"b":1,"b":1}}}', 400),
        ('{"details":{"a":NaN}}', 422),
        ('{"details":{"a":-Infinity}}', 422),
    ):
        answer = await service.post("notes", content=body.encode(), headers={"Content-Type": "application/json"})

        assert answer.status_code == status, body
    assert await service.rows() == []
