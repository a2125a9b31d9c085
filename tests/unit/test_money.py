"""Amounts: plain decimal strings in, the currency's decimals out, and nothing rounded on the way."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipn_gateway import money

CURRENCIES = ["BDT", "USD", "JPY", "KWD", "CLF"]


@pytest.mark.parametrize(("currency", "decimals"), [("BDT", 2), ("USD", 2), ("JPY", 0), ("KWD", 3), ("CLF", 4)])
def test_a_currency_has_its_decimals(currency: str, decimals: int) -> None:
    """As ISO 4217 lists them."""
    assert money.exponent(currency) == decimals


@pytest.mark.parametrize("code", ["", "bdt", "BD", "BDTT", "ABC", "XXX", "XTS", "XAU", "B\N{CYRILLIC CAPITAL LETTER DE}T", "BDT "])
def test_what_is_no_currency_has_no_decimals(code: str) -> None:
    """Small letters, metals and test codes are none."""
    with pytest.raises(ValueError, match="ISO 4217"):
        money.exponent(code)


@pytest.mark.parametrize(
    ("text", "currency", "amount"),
    [
        ("100", "BDT", "100"),
        ("100.5", "BDT", "100.5"),
        ("0.01", "BDT", "0.01"),
        ("007", "JPY", "7"),
        ("999999999999.9999", "CLF", "999999999999.9999"),
    ],
)
def test_a_plain_amount_is_read_exactly(text: str, currency: str, amount: str) -> None:
    """Up to twelve digits before the point, up to the currency's decimals after it."""
    assert money.parse(text, currency) == Decimal(amount)


NONE = [
    "",
    ".",
    "1.",
    ".1",
    "-1",
    "+1",
    "1e2",
    "1E2",
    "1_0",
    "1,0",
    " 1",
    "1 ",
    "1\n",
    "0",
    "0.00",
    "NaN",
    "Infinity",
    "0x1",
    "1.001",
    "1.000",
]
NONE += ["1" * 13, "0" * 13, "9" * 5000, "\N{BENGALI DIGIT ONE}", "\N{FULLWIDTH DIGIT ONE}", "1.\N{ARABIC-INDIC DIGIT ONE}"]


@pytest.mark.case("S26")
@pytest.mark.parametrize("text", NONE)
def test_an_amount_in_any_other_form_is_refused(text: str) -> None:
    """With a sentence that does not repeat it."""
    with pytest.raises(ValueError, match=r"must be|must have") as refused:
        money.parse(text, "BDT")

    assert "\n" not in str(refused.value)
    assert "5000" not in str(refused.value)


@pytest.mark.parametrize(
    ("amount", "currency", "shown"),
    [
        ("100", "BDT", "100.00"),
        ("100.5", "BDT", "100.50"),
        ("100.500", "BDT", "100.50"),
        ("100.505", "BDT", "100.505"),
        ("0", "BDT", "0.00"),
        ("1E+3", "BDT", "1000.00"),
        ("1E-7", "BDT", "0.0000001"),
        ("5", "JPY", "5"),
        ("5.0", "JPY", "5"),
        ("5.5", "JPY", "5.5"),
        ("5", "KWD", "5.000"),
        ("5.10", "???", "5.1"),
        ("12345678901234567890123456789012345.67", "BDT", "12345678901234567890123456789012345.67"),
    ],
)
def test_money_is_shown_with_its_decimals_and_never_rounded(amount: str, currency: str, shown: str) -> None:
    """What is finer than the currency, as a provider may say it, is shown in full."""
    assert money.show(Decimal(amount), currency) == shown


@given(currency=st.sampled_from(CURRENCIES), units=st.integers(1, 10**12 - 1))
def test_what_is_shown_is_read_again_as_the_same_amount(currency: str, units: int) -> None:
    """For every amount that an order can have."""
    amount = Decimal(units).scaleb(-money.exponent(currency))

    assert money.parse(money.show(amount, currency), currency) == amount
