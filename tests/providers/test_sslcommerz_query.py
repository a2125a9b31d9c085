"""SSLCOMMERZ: what its transaction query says about an order."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from itertools import permutations
from typing import Any

import pytest

from ipn_gateway.providers.base import Answer, Confirmed, Effect, NoAnswer, Refuted, Unconfirmed, Unknown
from ipn_gateway.providers.sslcommerz import PROVIDER
from tests.providers.contract import Scripted, answered, asserted
from tests.providers.sslcommerz import (
    CANCELLED,
    F0,
    FAILED,
    NOT_KNOWN,
    SHOP,
    element,
    listing,
    signed,
    validator_answer,
    verdict_on,
)

PAID_HERE = element(F0, status="VALIDATED")
OPEN_HERE = element(F0, status="PROCESSING", val_id="")


@pytest.mark.case("S113")
@pytest.mark.parametrize(
    ("posted", "answer", "expected"),
    [
        # confirmed by what is listed, and named by it
        (FAILED, listing(element(FAILED)), "ORD-1001/FAILED/BT-F1"),
        (FAILED, listing(element(FAILED), no_of_trans_found="1"), "ORD-1001/FAILED/BT-F1"),
        (FAILED, answered({"APIConnect": "DONE", "no_of_trans_found": 1, "element": element(FAILED)}), "ORD-1001/FAILED/BT-F1"),
        (FAILED, listing(element(FAILED), element(FAILED, bank_tran_id="BT-F2")), "ORD-1001/FAILED/BT-F1"),
        (FAILED, listing(element(FAILED, bank_tran_id="")), "ORD-1001/FAILED/2026-03-01 12:58:00"),
        (FAILED, listing(element(FAILED, bank_tran_id=None, tran_date=...)), "ORD-1001/FAILED"),
        (FAILED, listing(element(FAILED), element(F0, tran_id="ORD-1002")), "ORD-1001/FAILED/BT-F1"),
        (FAILED, listing(element(FAILED), {"tran_id": "ORD-1001", "status": "INVALID"}), "ORD-1001/FAILED/BT-F1"),
        ({**FAILED, "bank_tran_id": ""}, listing(element(FAILED)), "ORD-1001/FAILED/BT-F1"),
        (CANCELLED, listing(element(CANCELLED)), "ORD-1001/CANCELLED/2026-07-14 12:10:05"),
        (CANCELLED, listing(element(CANCELLED), element(FAILED)), "ORD-1001/CANCELLED/2026-07-14 12:10:05"),
        (CANCELLED, listing(element(CANCELLED, tran_date="2026-07-15"), element(CANCELLED)), "ORD-1001/CANCELLED/2026-07-14 12:10:05"),
        # not confirmed yet
        (FAILED, listing(element(FAILED), OPEN_HERE), Unconfirmed),
        (FAILED, listing(OPEN_HERE), Unconfirmed),
        (FAILED, listing(element(F0, status="PENDING")), Unconfirmed),
        (FAILED, listing(element(FAILED, bank_tran_id="BT-F2")), Unconfirmed),
        (FAILED, listing(element(CANCELLED)), Unconfirmed),
        (CANCELLED, listing(element(CANCELLED, status="UNATTEMPTED")), Unconfirmed),
        # not known there
        (FAILED, answered(NOT_KNOWN), Refuted),
        (FAILED, answered({**NOT_KNOWN, "no_of_trans_found": "0"}), Refuted),
        (FAILED, listing(), Refuted),
        # no verdict
        (FAILED, listing(no_of_trans_found=1), Unknown),
        (FAILED, listing(no_of_trans_found=None), Unknown),
        (FAILED, listing(element(FAILED), element=None), Unknown),
        (FAILED, listing(element="FAILED"), Unknown),
        (FAILED, listing(element=["FAILED"]), Unknown),
        (FAILED, listing(element(FAILED, tran_id="ORD-1002")), Unknown),
        (FAILED, listing(element(FAILED, tran_id="ORD-1002"), no_of_trans_found=0), Unknown),
        (FAILED, listing(element(FAILED, tran_id=...)), Unknown),
        (FAILED, listing(element(FAILED), element(F0, status="SETTLED")), Unknown),
        (FAILED, listing(element(FAILED, status="")), Unknown),
        (FAILED, listing(element(FAILED), APIConnect="FAILED"), Unknown),
    ],
)  # fmt: skip
async def test_a_negative_is_decided_by_what_the_query_lists(posted: dict[str, str], answer: Answer, expected: Any) -> None:
    """A negative is confirmed by an attempt of its own word and bank's id, while none is open; its name comes from the list."""
    verdict = await verdict_on(posted, answer)

    if isinstance(expected, str):
        assert isinstance(verdict, Confirmed)
        assert (verdict.operation_id, verdict.order_id, verdict.status) == (expected, "ORD-1001", posted["status"])
        assert (verdict.amount, verdict.currency, verdict.effect) == (None, None, PROVIDER.EFFECTS[posted["status"]])
    else:
        assert type(verdict) is expected
        assert not getattr(verdict, "final", False)


@pytest.mark.case("S113", "B17")
@pytest.mark.parametrize("posted", [FAILED, CANCELLED, {key: value for key, value in F0.items() if key != "val_id"}])
@pytest.mark.parametrize("others", [[], [element(FAILED)], [OPEN_HERE], [element(CANCELLED), element(F0, status="SETTLED")]])
async def test_a_listed_payment_comes_before_everything(posted: dict[str, str], others: list[dict[str, Any]]) -> None:
    """Whatever the post says and whatever else is listed, in any order: the payment is validated by its val_id and is the verdict."""
    for elements in permutations([PAID_HERE, *others]):
        ask = Scripted([listing(*elements), answered(validator_answer(F0, status="VALIDATED"))])
        verdict = await PROVIDER.validate(ask, SHOP, asserted(PROVIDER, signed(posted, SHOP)))

        assert isinstance(verdict, Confirmed)
        assert (verdict.effect, verdict.operation_id, verdict.amount) == (Effect.PAID, "V-1001", Decimal("1000.00"))
        assert [question.url.rpartition("/")[2] for question in ask.asked] == [
            "merchantTransIDvalidationAPI.php",
            "validationserverAPI.php",
        ]
        assert (ask.asked[0].params["tran_id"], ask.asked[1].params["val_id"]) == ("ORD-1001", "V-1001")


async def test_of_several_listed_payments_the_posted_one_is_asked_about() -> None:
    """By the bank's id, which the post and the list have in common; else the latest, in whatever order they are listed."""
    payments = {"BT0001": "V-1001", "BT0002": "V-1002"}
    elements = [element(F0, val_id=val_id, bank_tran_id=bank, tran_date="2026-03-01 13:00:00") for bank, val_id in payments.items()]
    elements.append(element(F0, val_id="V-1003", bank_tran_id="BT0003", tran_date="2026-03-01 14:00:00"))
    unnamed = {name: value for name, value in F0.items() if name != "val_id"}

    for bank, expected in {**payments, "": "V-1003"}.items():
        for listed in permutations(elements):
            ask = Scripted([listing(*listed), NoAnswer("timeout")])
            await PROVIDER.validate(ask, SHOP, asserted(PROVIDER, signed({**unnamed, "bank_tran_id": bank}, SHOP)))

            assert ask.asked[1].params["val_id"] == expected


@pytest.mark.parametrize(
    "validator",
    [
        NoAnswer("timeout"),
        answered(validator_answer(F0, status="INVALID_TRANSACTION")),
        answered(validator_answer(F0, tran_id="ORD-1002")),
        answered(validator_answer(F0, store_id="evil01")),
        answered(validator_answer(F0, val_id="V-1002")),
    ],
)
async def test_a_listed_payment_that_is_not_validated_is_no_verdict(validator: Answer | NoAnswer) -> None:
    """A query and a validator that disagree are asked again."""
    posted = listing(PAID_HERE, element(FAILED))

    assert isinstance(await verdict_on(FAILED, posted, validator), Unknown)
    assert isinstance((await PROVIDER.query(Scripted([posted, validator]), SHOP, "ORD-1001"))[0], Unknown)


async def test_a_listed_payment_without_its_id_is_no_verdict() -> None:
    """There is nothing to validate it by, and it may be money."""
    assert replace(await verdict_on(FAILED, listing(element(F0, val_id=""))), answer={}) == Unknown("no_val_id")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (listing(element(FAILED), element(CANCELLED)), Refuted),
        (answered(NOT_KNOWN), Refuted),
        (listing(OPEN_HERE), Unconfirmed),
        (listing(element(F0, status="SETTLED")), Unknown),
    ],
)
async def test_a_payment_without_its_id_is_asked_by_query(answer: Answer, expected: type[Any]) -> None:
    """A folded status on a cancelled payload ends here: the provider lists no payment."""
    verdict = await verdict_on({key: value for key, value in F0.items() if key != "val_id"}, answer)

    assert type(verdict) is expected
    assert not getattr(verdict, "final", False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (listing(element(F0, status="SETTLED", val_id="")), "ORD-1001/SETTLED/BT0001"),
        (listing(element(CANCELLED)), "ORD-1001/SETTLED"),
        (listing(OPEN_HERE), "ORD-1001/SETTLED"),
        (answered(NOT_KNOWN), None),
    ],
)
async def test_an_unknown_word_about_a_known_order_is_for_a_person(answer: Answer, expected: str | None) -> None:
    """It is told as unknown when the provider knows the order at all, and refuted when it does not."""
    verdict = await verdict_on({**F0, "status": "SETTLED", "val_id": ""}, answer)

    assert getattr(verdict, "operation_id", None) == expected
    assert isinstance(verdict, Refuted) or verdict.effect is Effect.UNKNOWN


async def test_a_query_tells_everything_payments_first() -> None:
    """Each payment as the validator confirms it, then the negatives; two payments of one order are both told."""
    second = {**F0, "val_id": "V-1002", "bank_tran_id": "BT0002"}
    ask = Scripted(
        [
            listing(element(FAILED), element(second), PAID_HERE, PAID_HERE, element(CANCELLED)),
            answered(validator_answer(F0, status="VALIDATED")),
            answered(validator_answer(second)),
        ]
    )

    verdicts = await PROVIDER.query(ask, SHOP, "ORD-1001")

    assert [getattr(verdict, "operation_id", None) for verdict in verdicts] == [
        "V-1001",
        "V-1002",
        "ORD-1001/FAILED/BT-F1",
        "ORD-1001/CANCELLED/2026-07-14 12:10:05",
    ]
    assert len(ask.asked) == 3


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (answered(NOT_KNOWN), [Refuted]),
        (listing(), [Refuted]),
        (listing(OPEN_HERE), [Unconfirmed]),
        (listing(element(FAILED), OPEN_HERE), [Unconfirmed]),
        (listing(element(FAILED), element(F0, status="SETTLED")), [Unknown]),
        (listing(element(FAILED)), [Confirmed]),
    ],
)
async def test_a_query_without_a_payment(answer: Answer, expected: list[type[Any]]) -> None:
    """Negatives are told only when nothing is open any more."""
    assert [type(verdict) for verdict in await PROVIDER.query(Scripted([answer]), SHOP, "ORD-1001")] == expected


async def test_a_query_asks_about_a_bounded_number_of_payments() -> None:
    """An endless list of payments does not become an endless list of questions."""
    ask = Scripted([listing(*(element(F0, val_id=f"V-{number}") for number in range(100))), NoAnswer("timeout")])

    assert len(await PROVIDER.query(ask, SHOP, "ORD-1001")) == 5
    assert len(ask.asked) == 6
