"""What an operation promises about its keys stands beside it: in OpenAPI and in the contract, made from what the code runs on."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import pytest
from fastapi import FastAPI, Response
from fastapi.openapi.models import OpenAPI

from ipn_gateway import errors, fingerprints, idempotency_keys, orders
from ipn_gateway.errors import IdempotencyKeyInvalid
from ipn_gateway.operations import KEY_PATTERN, NEVER_STORED, Downstream, Operation, is_stored, parse_key
from ipn_gateway.providers import discovered
from ipn_gateway.web import keyed, openapi, publication
from ipn_gateway.web.publication import Limits

if TYPE_CHECKING:
    from ipn_gateway.providers.base import Provider
    from ipn_gateway.runtime import Runtime

LIMITS = Limits(90, 168)
ANSWERS = {"operation", "key", "scope", "retention", "fingerprint", "concurrency", "recovery", "statuses"}


def described(app: FastAPI) -> dict[str, tuple[Operation, dict[str, Any]]]:
    """Every keyed operation with what OpenAPI says of it."""
    paths = app.openapi()["paths"]
    found = {operation.name: operation for operation in keyed.declared(app.routes)}
    return {name: (operation, paths[name.partition(" ")[2]][name.partition(" ")[0].lower()]) for name, operation in found.items()}


@pytest.mark.case("S21", "S30", "S93", "S127")
def test_every_operation_has_its_five_answers(app: FastAPI, rt: Runtime) -> None:
    """Complete, as the declaration has them, and nowhere else: what takes no key says nothing of one."""
    operations = described(app)
    others = [
        call
        for path in app.openapi()["paths"].values()
        for call in path.values()
        if call not in [found for _, found in operations.values()]
    ]

    assert len(operations) >= 12
    for name, (operation, call) in operations.items():
        said = call["x-idempotency"]
        assert (set(said), said["operation"]) == (ANSWERS, name)
        assert said["scope"]["unique_per"] == ["tenant", "operation"]
        assert said["retention"]["hours"] == rt.settings.idempotency_retention_hours
        assert said["retention"]["starts"].startswith("first submission")
        assert {member: given["compared"] for member, given in said["fingerprint"]["body"].items()} == operation.fields
        assert said["fingerprint"]["path"] == re.findall(r"{(.*?)}", name)
        assert said["recovery"]["class"] == operation.downstream
        assert said["recovery"]["repeat"]["left_out"] == list(operation.secrets)
        assert said["key"]["required"] is operation.key_required
    assert others
    assert not any("x-idempotency" in call for call in others)


@pytest.mark.case("S21", "S127", "S128")
def test_the_answers_are_told_in_words_beside_the_operation(app: FastAPI) -> None:
    """What it does comes first; then each answer in a paragraph, with the statuses and every member that is compared."""
    for name, (operation, call) in described(app).items():
        first, *paragraphs = call["description"].split("\n\n")
        titles = [paragraph.partition(":")[0] for paragraph in paragraphs]
        text = call["description"]

        assert titles[-7:] == ["Idempotency", "Scope", "Retention", "Fingerprint", "Concurrency", "Recovery", "Repeats"], name
        assert first
        assert not first.startswith("Idempotency")
        assert "422 (`/problems/idempotency-key-reused`)" in text
        assert "409 (`/problems/idempotency-in-progress`)" in text
        assert all(f"`{member}`" in text for member in operation.fields)
        assert publication.CONVENTION in text


@pytest.mark.case("S128")
def test_a_mismatch_is_422_and_one_in_progress_is_409(app: FastAPI) -> None:
    """As data, equal to what the errors themselves are answered with."""
    for _, call in described(app).values():
        said = call["x-idempotency"]

        assert said["fingerprint"]["mismatch"] == {"status": 422, "type": "/problems/idempotency-key-reused"}
        assert said["concurrency"]["in_progress"]["status"] == errors.IdempotencyInProgress.status == 409
        assert said["concurrency"]["in_progress"]["type"] == "/problems/idempotency-in-progress"


@pytest.mark.case("S129")
def test_the_statuses_are_those_of_the_code(app: FastAPI) -> None:
    """Stored and never stored are the code's own table, and every answer that is documented is in one of the lists."""
    for name, (_, call) in described(app).items():
        said = call["x-idempotency"]["statuses"]
        listed = {*said["stored"], *said["never_stored"], *said["refused_before_the_key"]}

        assert said["never_stored"] == sorted(NEVER_STORED)
        assert all(is_stored(status) for status in said["stored"])
        assert said["stored_when"] in call["description"]
        assert {int(status) for status in call["responses"]} <= listed, name
        assert {int(status) for status in call["responses"] if status.startswith("2")} <= set(said["stored"])


@pytest.mark.case("S4", "S5", "S134")
def test_the_header_its_mark_and_its_errors_are_documented(app: FastAPI) -> None:
    """The key with its limits, the mark of a repeat on each success, the 409 with Retry-After, and the layer's other answers."""
    for operation, call in described(app).values():
        (header,) = [given for given in call["parameters"] if given["in"] == "header"]
        responses = call["responses"]

        assert (header["name"], header["required"]) == ("Idempotency-Key", operation.key_required)
        assert header["schema"] == {"type": "string", "minLength": 1, "maxLength": 255, "pattern": f"^{KEY_PATTERN}$"}
        assert publication.ALPHABET in header["description"]
        assert all("Idempotent-Replayed" in answer["headers"] for status, answer in responses.items() if status.startswith("2"))
        assert all("Retry-After" in responses[status]["headers"] for status in ("409", "429", "503"))
        assert "idempotency-key-invalid" in responses["400"]["description"]
        assert ("idempotency-key-missing" in responses["400"]["description"]) is operation.key_required
        assert "idempotency-key-reused" in responses["422"]["description"]
        assert "idempotency-unavailable" in responses["503"]["description"]
        assert {"RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"} <= set(responses["429"]["headers"])


def test_headers_that_are_referred_to_are_there(app: FastAPI) -> None:
    """Every reference to a header leads to a description."""
    document = app.openapi()
    named = set(re.findall(r'"\$ref": "#/components/headers/([^"]+)"', json.dumps(document)))

    assert named == set(document["components"]["headers"])
    assert {"Idempotent-Replayed", "Retry-After"} <= named


@pytest.mark.case("S5")
def test_the_published_alphabet_is_the_one_that_is_taken() -> None:
    """Of all characters of one byte, those that the sentence names are taken; the error says the same sentence."""
    taken = set()
    for code in range(256):
        try:
            taken.add(parse_key([f"a{chr(code)}"], required=True))
        except IdempotencyKeyInvalid:
            continue
    named = {f"a{chr(code)}" for code in range(0x21, 0x7F) if chr(code) not in ' ",\\'}

    assert taken == named
    assert publication.ALPHABET.removeprefix("printable ASCII without ") in str(IdempotencyKeyInvalid())
    assert "1 to 255" in str(IdempotencyKeyInvalid())


@pytest.mark.case("S21", "S22", "S93", "S127")
async def test_the_contract_says_the_same(http: Any, app: FastAPI, rt: Runtime) -> None:
    """The answers of every operation are those of OpenAPI, and what is alike for all stands before them."""
    told = (await http.get("/v1/contract")).json()["idempotency"]

    assert told["operations"] == [call["x-idempotency"] for _, call in described(app).values()]
    assert told["convention"] == "the widely-used Idempotency-Key convention"
    assert (told["key"]["length_max"], told["key"]["pattern"]) == (255, f"^{KEY_PATTERN}$")
    assert told["retention"]["hours"] == rt.settings.idempotency_retention_hours
    assert told["statuses"]["never_stored"] == sorted(NEVER_STORED)
    assert told["open_keys_max"] == idempotency_keys.OPEN_MAX
    assert "one region" in told["region"]
    assert "lag is the window" in told["region"]


@dataclass
class OtherProvider:
    """As far as keys to a provider go."""

    name: str
    refund_key_length_max: int
    key_retention_hours: float | None


@pytest.mark.case("S71")
def test_the_shortest_of_all_providers_counts() -> None:
    """Length and memory are computed over all of them; one that publishes no memory shortens nothing."""
    played = [OtherProvider("long", 64, 168), OtherProvider("short", 30, None), OtherProvider("brief", 255, 24)]

    told = publication.downstream(cast("list[Provider]", played))
    real = publication.downstream(discovered().values())

    assert (told["key_length_max"], told["key_retention_hours"]) == (30, 24)
    assert list(told["providers"]) == ["brief", "long", "short"]
    assert real["key_length_max"] == min(provider.refund_key_length_max for provider in discovered().values())
    assert real["key_retention_hours"] is None


@pytest.mark.parametrize(
    ("downstream", "intents", "horizon_seconds", "is_open"),
    [
        (Downstream.NONE, {"asking"}, None, True),
        (Downstream.IDEMPOTENT, {"asking"}, 3600, True),
        (Downstream.IDEMPOTENT, {"asking"}, None, False),
        (Downstream.IDEMPOTENT, set(), 3600, False),
    ],
)
@pytest.mark.case("S127")
def test_an_outcome_that_may_stay_unknown_is_published(downstream, intents, horizon_seconds, is_open) -> None:
    """With its 409, how long to wait and what to do; an operation that cannot get there does not mention it."""
    refund = Operation(
        name="POST /refunds",
        fields={"amount": "decimal"},
        downstream=downstream,
        key_required=True,
        phases=("started", "asking"),
        intents=frozenset(intents),
        horizon_seconds=horizon_seconds,
    )

    said = publication.answers(refund, LIMITS)

    assert ("idempotency-indeterminate" in publication.prose(said)) is is_open
    assert (said["recovery"]["indeterminate"] or {}).get("type") == ("/problems/idempotency-indeterminate" if is_open else None)
    assert not is_open or said["recovery"]["indeterminate"]["retry_after_seconds"] == 3600


@pytest.mark.case("S30")
def test_a_changed_declaration_changes_what_is_published() -> None:
    """Nothing is typed twice: a new member, another comparison, a secret, another header."""
    changed = replace(orders.CREATE, fields={"amount": "decimal", "due": "time"}, version=2, secrets=("token",), headers=("Link",))

    said = publication.answers(changed, LIMITS, [202])

    assert {name: given["meaning"] for name, given in said["fingerprint"]["body"].items()} == {
        "amount": fingerprints.KINDS["decimal"],
        "due": fingerprints.KINDS["time"],
    }
    assert said["fingerprint"]["version"] == 2
    assert "Link" in said["recovery"]["repeat"]["headers"]
    assert "`token`, which is shown once" in publication.prose(said)
    assert 202 in said["statuses"]["stored"]


async def nobody() -> str:
    return "nobody"


COFFEE = Operation(name="POST /coffees", fields={"kind": "json"}, downstream=Downstream.LOCAL)
CoffeeCall = Annotated[keyed.KeyedCall, keyed.of(COFFEE, tenant=nobody)]


def test_another_application_can_publish_the_same() -> None:
    """The document that FastAPI made of its routes gets the answers, and stays a valid one."""
    app = FastAPI()

    @app.post("/coffees", status_code=201)
    async def order(call: CoffeeCall, size: int = 1) -> Response:
        """Make a coffee."""
        raise AssertionError

    document = app.openapi()
    openapi.extend(document, app.routes, Limits(30, 24))
    call = document["paths"]["/coffees"]["post"]
    references = re.findall(r'"#/components/(\w+)/([^"]+)"', json.dumps(document))

    OpenAPI.model_validate(document)
    assert all(name in document["components"][kind] for kind, name in references)
    assert call["x-idempotency"]["retention"]["hours"] == 24
    assert call["description"].startswith("Make a coffee.\n\nIdempotency: ")
    assert call["x-idempotency"]["statuses"]["stored"][0] == 201
