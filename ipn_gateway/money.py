"""Amounts of money: decimal strings with an ISO 4217 code at the edge, `Decimal` inside, never a float."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from iso4217 import Currency

INTEGER_DIGITS_MAX: Final = 12
_TEXT_LENGTH_MAX: Final = 32
_AMOUNT: Final = re.compile(r"([0-9]+)(?:\.([0-9]+))?")

# ISO 4217 list one, "minor unit"; metals, funds' units and test codes have none and are no money that an order can be in.
_EXPONENTS: Final[dict[str, int]] = {currency.code: currency.exponent for currency in Currency if currency.exponent is not None}


def exponent(currency: str) -> int:
    """How many decimals the currency has, 0 to 4. Raises ValueError for what is no ISO 4217 code in upper case."""
    if currency not in _EXPONENTS:
        raise ValueError("must be an ISO 4217 currency code, such as BDT")
    return _EXPONENTS[currency]


def parse(text: str, currency: str) -> Decimal:
    """An amount as customers write it: `100`, `100.00`; > 0, ASCII digits, at most 12 of them before the point.

    Raises ValueError with a sentence for signs, exponents, blanks, zero, and more decimals than the currency has.
    """
    decimals = exponent(currency)
    match = _AMOUNT.fullmatch(text) if len(text) <= _TEXT_LENGTH_MAX else None
    if match is None:
        raise ValueError("must be a plain decimal number, such as 100.00")
    if len(match[1]) > INTEGER_DIGITS_MAX:
        raise ValueError(f"must have at most {INTEGER_DIGITS_MAX} digits before the decimal point")
    if len(match[2] or "") > decimals:
        raise ValueError(f"must have at most {decimals} decimals in {currency}")
    amount = Decimal(text)
    if not amount:
        raise ValueError("must be greater than 0")
    return amount


def show(amount: Decimal, currency: str) -> str:
    """The amount with the currency's decimals; one that is finer than the currency in full. Never rounded."""
    whole, _, fraction = f"{amount:f}".partition(".")
    fraction = fraction.rstrip("0").ljust(_EXPONENTS.get(currency, 0), "0")
    return f"{whole}.{fraction}" if fraction else whole
