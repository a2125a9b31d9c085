"""What is wrong with a request is said in words of JSON: whatever the schemas can find, and whatever the library could."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from pydantic_core import _pydantic_core as library

from ipn_gateway import validation
from ipn_gateway.web import bodies, schemas

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON = re.compile(
    r"[Dd]ecimal\b|dict|instance|\blist\b|tuple|\bNone\b|\bTrue\b|\bstr\b|\bint\b|boolean|\bfloat|pydantic|python|Input should|class"
)
GIVEN = (
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "1e999",
    "123456789012345678901234567890",
    '""',
    '"x"',
    '"\\n"',
    "[]",
    "[1]",
    "[{}]",
    "{}",
    '{"a": 1}',
)
EXAMPLES: dict[str, dict[str, Any]] = {
    "NewSource": {"name": "shop", "provider": "sslcommerz", "config": {}},
    "NewOrder": {"order_id": "A", "amount": "1.00", "currency": "BDT", "source": "shop"},
    "NewEndpoint": {"url": "https://subscriber.example/"},
    "ReasonedAct": {"reason": "x"},
    "Evidence": {"amount": "1.00", "currency": "BDT", "provider_transaction_id": "B"},
    "Resolution": {"reason": "x", "decision": "apply"},
    "Replay": {"reason": "x", "source": "shop", "outcome": "held"},
    "Recovery": {"reason": "x", "since": "2026-07-01T00:00:00Z"},
    "NewEvent": {"type": "invoice.sent", "data": {}},
    "KeyedResponse": {"status": 200},
    "KeyResolution": {"reason": "x", "decision": "applied"},
    "Customer": dict.fromkeys(("name", "phone", "address", "city", "postcode", "country"), "x") | {"email": "a@b.example"},
    "Product": dict.fromkeys(("name", "category", "profile"), "x"),
    "NewRefund": {"reference": "R", "amount": "1.00", "reason": "x"},
}
EXAMPLES["NewCheckout"] = {"customer": EXAMPLES["Customer"], "product": EXAMPLES["Product"]}
"""A body that each schema takes; those that are not named take `{}`."""


def models(model: type[schemas.Body] = schemas.Body) -> Iterator[type[schemas.Body]]:
    """Every schema of a body, and of a part of one."""
    for kind in model.__subclasses__():
        yield kind
        yield from models(kind)


def told(model: type[schemas.Body], members: dict[str, Any]) -> list[str]:
    """What is wrong with a body."""
    try:
        model.model_validate(members)
    except ValidationError as error:
        return [part["detail"] for part in validation.failed(error).errors]
    return []


@pytest.mark.parametrize("model", [*models()], ids=lambda model: model.__name__)
def test_whatever_a_member_is_given_is_answered_in_words_of_json(model: type[schemas.Body]) -> None:
    """Every kind of JSON in every member, too long, too short, too large and left out: never a word of Python, never a shrug."""
    good = EXAMPLES.get(model.__name__, {})
    said: list[str] = []
    for name in model.model_fields:
        values = [bodies.parse(f'{{"it": {text}}}'.encode())["it"] for text in GIVEN]
        values += [
            "x" * 5000,
            ["order.paid"] * 60,
            "2026-07-01T00:00:00Z",
            {f"k{number}": "v" for number in range(30)},
            Decimal("0.0001"),
            Decimal("1e6"),
            10**6,
        ]
        said += [sentence for value in values for sentence in told(model, good | {name: value})]
        said += told(model, {other: value for other, value in good.items() if other != name})

    assert told(model, good) == []
    assert [sentence for sentence in said if PYTHON.search(sentence) or sentence == validation._OTHERWISE] == []
    assert said or not model.model_fields


@pytest.mark.parametrize("error", library.list_all_errors(), ids=lambda error: error["type"])
def test_whatever_the_library_could_find_has_a_sentence(error: dict[str, Any]) -> None:
    """What no schema of ours raises today is still not answered in the library's words."""
    sentence = validation.sentence(
        {"type": error["type"], "msg": f"Value error, {error['type']}", "ctx": error.get("example_context") or {}}
    )

    assert sentence
    assert error["type"] in {"value_error", "assertion_error"} or not PYTHON.search(sentence)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"rate_per_second": "2"}, "must be a number"),
        ({"rate_per_second": 0}, "must be at least 0.001"),
        ({"rate_per_second": Decimal("1.23456")}, "must have at most 3 decimals"),
        ({"max_in_flight": Decimal("1.5")}, "must be an integer"),
        ({"ordered": "yes"}, "must be true or false"),
        ({"description": 1}, "must be a string"),
        ({"events": {}}, "must be an array"),
        ({"url": None}, "must be a string"),
    ],
)
def test_a_member_of_an_endpoint_is_told_what_it_must_be(members: dict[str, Any], sentence: str) -> None:
    """As somebody who sends JSON knows it."""
    assert told(schemas.NewEndpoint, EXAMPLES["NewEndpoint"] | members) == [sentence]


def test_every_example_is_one() -> None:
    """Of a schema that is there, in JSON."""
    assert set(EXAMPLES) <= {model.__name__ for model in models()}
    assert json.dumps(EXAMPLES)
