"""SSLCOMMERZ: what its validator says about one payment."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from ipn_gateway.providers.base import Confirmed, Effect, Refuted, Unknown
from ipn_gateway.providers.sslcommerz import PROVIDER
from tests.providers.contract import Scripted, answered, asserted
from tests.providers.sslcommerz import (
    F0,
    STORE,
    V3,
    load,
    validator_answer,
    verdict_on,
)


@pytest.mark.case("B46", "B49", "S106")
async def test_a_confirmed_payment_in_full() -> None:
    """Everything that effects are made from comes from the answer; what is private is masked in the copy that is kept."""
    ask = Scripted([answered(validator_answer(V3, status="VALIDATED", risk_level=1, store_amount=12031.5, cus_email="a@b.example"))])

    verdict = await PROVIDER.validate(ask, STORE, asserted(PROVIDER, load("v3_risk_usd")))

    assert verdict == Confirmed(
        order_id="ORD-2026-000483",
        operation_id="2607141209121Qa0BcDe4FgHi5Jk",
        effect=Effect.PAID,
        status="VALIDATED",
        account="demos64b1",
        amount=Decimal("100.00"),
        currency="USD",
        provider_transaction_id="260714120911Zx8CvBn7MmLk",
        risk=True,
        settled_amount=Decimal("12340.00"),
        settled_currency="BDT",
        net_amount=Decimal("12031.5"),
        paid_at=datetime(2026, 7, 14, 6, 8, 40, tzinfo=UTC),
        answer=verdict.answer,
    )
    assert (verdict.answer["card_no"], verdict.answer["cus_email"], verdict.answer["store_amount"]) == ("***", "***", "12031.5")
    assert [(question.method, question.url) for question in ask.asked] == [
        ("GET", "https://sandbox.sslcommerz.com/validator/api/validationserverAPI.php")
    ]
    assert ask.asked[0].params == {
        "val_id": "2607141209121Qa0BcDe4FgHi5Jk",
        "v": "1",
        "store_id": "demos64b1",
        "store_passwd": "demo_pass@ssl",
        "format": "json",
    }


@pytest.mark.parametrize("word", ["VALID", "VALIDATED"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"currency_amount": "1000"}, {"amount": Decimal(1000)}),
        ({"currency_amount": 1000.0}, {"amount": Decimal(1000)}),
        ({"currency_amount": 1000}, {"amount": Decimal(1000)}),
        ({"currency_amount": "1000.001"}, {"amount": Decimal("1000.001")}),
        ({"amount": "1"}, {"amount": Decimal("1000.00"), "settled_amount": Decimal(1)}),
        ({"amount": ...}, {"settled_amount": None, "settled_currency": None}),
        ({"currency": None}, {"settled_amount": None, "settled_currency": None}),
        ({"store_amount": ""}, {"net_amount": None}),
        ({"store_amount": ...}, {"net_amount": None}),
        ({"store_amount": 97.5}, {"net_amount": Decimal("97.5")}),
        ({"bank_tran_id": ""}, {"provider_transaction_id": "V-1001"}),
        ({"bank_tran_id": 4711}, {"provider_transaction_id": "4711"}),
        ({"bank_tran_id": "x" * 256}, {"provider_transaction_id": "V-1001"}),
        ({"risk_level": 0}, {"risk": False}),
        ({"risk_level": ""}, {"risk": False}),
        ({"risk_level": ...}, {"risk": False}),
        ({"risk_level": 1}, {"risk": True}),
        ({"risk_level": "1"}, {"risk": True}),
        ({"risk_level": "2"}, {"risk": True}),
        ({"risk_level": "high"}, {"risk": True}),
        ({"tran_date": "2026-03-01 03:05:09"}, {"paid_at": datetime(2026, 2, 28, 21, 5, 9, tzinfo=UTC)}),
        ({"tran_date": "0001-01-01 00:00:00"}, {"paid_at": None}),
        ({"tran_date": "soon"}, {"paid_at": None}),
        ({"store_id": "demo01"}, {"account": "demo01"}),
        ({"store_id": "DEMO01"}, {"account": "demo01"}),
    ],
)
async def test_a_payment_in_all_its_spellings(word: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """Numbers may come as numbers or text, zeros get lost, optional fields are missing: the payment is the same."""
    verdict = await verdict_on(F0, answered(validator_answer(F0, status=word, **changes)))

    assert isinstance(verdict, Confirmed)
    assert (verdict.effect, verdict.order_id, verdict.operation_id, verdict.currency) == (Effect.PAID, "ORD-1001", "V-1001", "BDT")
    assert {name: getattr(verdict, name) for name in expected} == expected


@pytest.mark.case("B52", "S106")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": "INVALID_TRANSACTION"}, Refuted("refuted")),
        ({"status": "FAILED"}, Refuted("refuted")),
        ({"status": "CANCELLED"}, Refuted("refuted")),
        ({"status": "EXPIRED"}, Refuted("refuted")),
        ({"status": "UNATTEMPTED"}, Refuted("refuted")),
        ({"status": "PENDING"}, Unknown("status_PENDING")),
        ({"status": "PROCESSING"}, Unknown("status_PROCESSING")),
        ({"status": "SETTLED"}, Unknown("status_SETTLED")),
        ({"status": "valid"}, Unknown("status_valid")),
        ({"status": ""}, Unknown("status_missing")),
        ({"status": None}, Unknown("status_missing")),
        ({"status": ["VALID"]}, Unknown("status_missing")),
        ({"status": ...}, Unknown("status_missing")),
        ({"APIConnect": "FAILED"}, Unknown("api_connect_FAILED")),
        ({"APIConnect": "INACTIVE"}, Unknown("api_connect_INACTIVE")),
        ({"APIConnect": "INVALID_REQUEST"}, Unknown("api_connect_INVALID_REQUEST")),
        ({"APIConnect": "REQUEST_FROM_INVALID_SOURCE 192.0.2.1"}, Unknown("api_connect_REQUEST_FROM_INVALID_SOURCE")),
        ({"APIConnect": "done"}, Unknown("api_connect_done")),
        ({"APIConnect": ""}, Unknown("api_connect_missing")),
        ({"APIConnect": ...}, Unknown("api_connect_missing")),
        ({"val_id": "V-1002"}, Unknown("other_val_id")),
        ({"val_id": ...}, Unknown("incomplete")),
        ({"val_id": ""}, Unknown("incomplete")),
        ({"tran_id": ...}, Unknown("incomplete")),
        ({"tran_id": None}, Unknown("incomplete")),
        ({"currency_type": ...}, Unknown("incomplete")),
        ({"currency_type": "usd"}, Unknown("incomplete")),
        ({"currency_amount": ...}, Unknown("incomplete")),
        ({"currency_amount": ""}, Unknown("incomplete")),
        ({"currency_amount": "0.00"}, Unknown("incomplete")),
        ({"currency_amount": "1,000.00"}, Unknown("incomplete")),
        ({"currency_amount": "-1000.00"}, Unknown("incomplete")),
        ({"currency_amount": 1e300}, Unknown("incomplete")),
        ({"currency_amount": True}, Unknown("incomplete")),
        ({"currency_amount": {"a": 1}}, Unknown("incomplete")),
        ({"store_id": "evil01"}, Refuted("store_mismatch", final=True)),
        ({"tran_id": "ORD-1002"}, Refuted("order_mismatch", final=True, order_id="ORD-1002")),
        ({"tran_id": "ord-1001"}, Refuted("order_mismatch", final=True, order_id="ord-1001")),
        ({"tran_id": "no order\0"}, Refuted("order_mismatch", final=True, order_id=None)),
    ],
)
async def test_a_validator_that_does_not_confirm(changes: dict[str, Any], expected: Refuted | Unknown) -> None:
    """Only a whole and plain answer is a payment; what is unclear is asked again, what is another order's or store's is final."""
    verdict = await verdict_on(F0, answered(validator_answer(F0, **changes)))

    assert replace(verdict, answer={}) == expected
    assert "\0" not in json.dumps(verdict.answer, ensure_ascii=False)


@pytest.mark.case("B63")
@pytest.mark.parametrize("status", ["VALID", "INVALID_TRANSACTION"])
async def test_a_notification_of_another_store_is_final_at_once(status: str) -> None:
    """A post that names another store is not ours, unless the provider's answer names our store."""
    posted = {**F0, "store_id": "evil01"}

    silent = await verdict_on(posted, answered(validator_answer(F0, status=status)))
    speaking = await verdict_on(posted, answered(validator_answer(F0, store_id="demo01")))

    assert replace(silent, answer={}) == Refuted("store_mismatch", final=True)
    assert isinstance(speaking, Confirmed)


@pytest.mark.parametrize("more", ['"status": "INVALID_TRANSACTION"', '"x": NaN', '"x": -Infinity', f'"x": {"[" * 40}{"]" * 40}'])
async def test_an_answer_that_readers_may_differ_on_is_no_verdict(more: str) -> None:
    """A member twice, what is no JSON, and what is nested beyond any answer of theirs."""
    body = json.dumps(validator_answer(F0)).encode()[:-1] + f", {more}}}".encode()

    assert await verdict_on(F0, answered(body)) == Unknown("not_json")


async def test_an_answer_under_another_media_type_is_read() -> None:
    """JSON is told by its bytes: such APIs send it as text/html as well."""
    answer = replace(answered(validator_answer(F0)), media_type="text/html")

    assert isinstance(await verdict_on(F0, answer), Confirmed)


async def test_a_stored_answer_holds_nothing_that_a_database_refuses() -> None:
    """NUL and lone surrogates are shown as marks, in names and values, at any depth."""
    verdict = await verdict_on(F0, answered(validator_answer(F0, **{"value_a": "a\0b\ud800", "k\0": [{"x": ["\0"]}]})))

    text = json.dumps(verdict.answer, ensure_ascii=False)
    assert isinstance(verdict, Confirmed)
    assert verdict.answer["value_a"] == "a\u2400b?"
    assert verdict.answer["k\u2400"] == [{"x": ["\u2400"]}]
    assert "\0" not in text.encode().decode()


@pytest.mark.parametrize("answer", [validator_answer(F0), validator_answer(F0, status="INVALID_TRANSACTION")])
async def test_a_word_that_is_not_known_stays_unknown(answer: dict[str, Any]) -> None:
    """The provider may confirm or refute the payment behind it; what it means is for a person."""
    verdict = await verdict_on({**F0, "status": "SETTLED"}, answered(answer))

    if answer["status"] == "VALID":
        assert (verdict.effect, verdict.status, verdict.operation_id) == (Effect.UNKNOWN, "SETTLED", "V-1001")
        assert (verdict.amount, verdict.currency) == (Decimal("1000.00"), "BDT")
    else:
        assert isinstance(verdict, Refuted)
