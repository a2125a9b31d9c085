"""What SSLCOMMERZ writes on the wire: notification fields, their two hashes, validator and query answers. Pure.

Sources: the SSLCOMMERZ API v4 pages (fields, validator, query), the official PHP and Python libraries (MD5 hash) and
the hash example in the Python library's README, which the SHA-256 rule reproduces.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Json = dict[str, object]

CENT: Final = Decimal("0.01")
RATES: Final = {
    "BDT": Decimal("1.0000"),
    "USD": Decimal("123.4000"),
    "EUR": Decimal("143.2500"),
    "GBP": Decimal("165.1000"),
    "AUD": Decimal("81.2000"),
    "CAD": Decimal("90.5000"),
    "SGD": Decimal("95.3000"),
    "MYR": Decimal("29.1000"),
    "INR": Decimal("1.4100"),
}
"""BDT for one unit of a currency. Fixed, so that a converted amount can be known beforehand."""

HASH_FIELDS: Final = ("verify_sign", "verify_sign_sha2", "verify_key")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_CANCELLED: Final = _names(
    "tran_id status error bank_tran_id currency tran_date amount store_id"
    " currency_type currency_amount currency_rate base_fair value_a value_b value_c value_d"
)
_FAILED: Final = _names(
    "tran_id error status bank_tran_id currency tran_date amount store_id"
    " card_type card_no card_issuer card_brand card_sub_brand card_issuer_country card_issuer_country_code"
    " currency_type currency_amount currency_rate base_fair value_a value_b value_c value_d"
)
_VALID: Final = _names(
    "tran_id val_id amount card_type store_amount card_no bank_tran_id status tran_date error currency"
    " card_issuer card_brand card_sub_brand card_issuer_country card_issuer_country_code store_id"
    " currency_type currency_amount currency_rate base_fair value_a value_b value_c value_d risk_level risk_title"
)

FIELD_NAMES: Final = {
    "VALID": _VALID,
    "FAILED": _FAILED,
    "CANCELLED": _CANCELLED,
    "UNATTEMPTED": _VALID,  # all of them, mostly empty
    "EXPIRED": _CANCELLED,  # no sample of it is public; taken to be like a cancellation
}
"""The names that a notification of a status carries, in the order on the wire: 27, 23 or 16 of them."""

VALIDATOR_NAMES: Final = _names(
    "status tran_date tran_id val_id amount store_amount currency bank_tran_id card_type card_no card_issuer"
    " card_brand card_sub_brand card_category card_issuer_country card_issuer_country_code currency_type"
    " currency_amount currency_rate addition_charge base_fair value_a value_b value_c value_d emi_instalment"
    " emi_amount emi_description emi_issuer account_details risk_title risk_level discount_percentage"
    " discount_amount discount_remarks APIConnect validated_on gw_version offer_avail card_ref_id"
    " isTokeizeSuccess campaign_code token_key"  # "isTokeizeSuccess" is spelled by them
)
"""The members of the validator's answer."""

_UNPAID_ELEMENT: Final = _names("val_id status tran_id tran_date amount bank_tran_id currency_type currency_amount error")

_CONSTANT: Final[Json] = {
    **dict.fromkeys(_names("card_category emi_description emi_issuer account_details discount_remarks"), ""),
    **dict.fromkeys(_names("gw_version card_ref_id campaign_code token_key"), ""),
    "addition_charge": "0.00",
    "emi_instalment": "0",
    "emi_amount": "0.00",
    "discount_percentage": "0",
    "discount_amount": "0.00",
    "APIConnect": "DONE",
    "offer_avail": 1,
    "isTokeizeSuccess": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A way to pay, and the share of the amount that the provider keeps."""

    type: str = ""
    number: str = ""
    issuer: str = ""
    brand: str = ""
    sub_brand: str = ""
    country: str = ""
    country_code: str = ""
    fee: Decimal = Decimal(0)


NO_CARD: Final = Card()
FAILED_CARD: Final = Card(sub_brand="Classic")
CARDS: Final = {
    "bkash": Card(
        type="BKASH-BKash",
        issuer="BKash Mobile Banking",
        brand="MOBILEBANKING",
        sub_brand="Classic",
        country="Bangladesh",
        country_code="BD",
        fee=Decimal("0.02"),
    ),
    "visa": Card(
        type="VISA-Dutch Bangla",
        number="411111XXXXXX1111",
        issuer="EXAMPLE BANK LTD",
        brand="VISA",
        sub_brand="Classic",
        country="United States",
        country_code="US",
        fee=Decimal("0.025"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try of a customer to pay. `amount` and `store_amount` are BDT; `currency_amount` is what the merchant asked."""

    status: str
    store_id: str
    tran_id: str
    tran_date: str
    amount: Decimal
    currency_type: str
    currency_amount: Decimal
    currency_rate: Decimal
    val_id: str = ""
    bank_tran_id: str = ""
    store_amount: Decimal | None = None
    card: Card = NO_CARD
    risky: bool = False
    error: str = ""
    values: tuple[str, str, str, str] = ("", "", "", "")

    @property
    def paid(self) -> bool:
        """Whether money moved: only then is there a `val_id`."""
        return self.status == "VALID"


def ipn_fields(attempt: Attempt) -> dict[str, str]:
    """The unsigned fields of an attempt's notification; which ones depends on its status."""
    everything = _everything(attempt)
    return {name: everything[name] for name in FIELD_NAMES.get(attempt.status, FIELD_NAMES["CANCELLED"])}


def sign(fields: Mapping[str, str], store_passwd: str) -> dict[str, str]:
    """The fields with `verify_sign`, `verify_sign_sha2` and a `verify_key` that names all of them; old hashes go."""
    signed = {name: value for name, value in fields.items() if name not in HASH_FIELDS}
    return signed | {
        "verify_sign": _digest("md5", signed, store_passwd),
        "verify_sign_sha2": _digest("sha256", signed, store_passwd),
        "verify_key": ",".join(signed),
    }


def encode(fields: Mapping[str, str] | Iterable[tuple[str, str]]) -> bytes:
    """The body of the POST: `application/x-www-form-urlencoded`, UTF-8, in the order given."""
    pairs = fields.items() if hasattr(fields, "items") else fields
    return urlencode(list(pairs)).encode()


def validator_answer(attempt: Attempt, *, status: str, validated_on: str) -> Json:
    """What the Order Validation API says about a paid attempt: text for numbers, except two integers."""
    have: Json = {**_everything(attempt), **_CONSTANT, "status": status, "validated_on": validated_on}
    have["store_amount"] = _without_zeros(attempt.store_amount)
    return {name: have[name] for name in VALIDATOR_NAMES}


def query_element(attempt: Attempt, *, validated_on: str) -> Json:
    """An attempt as the transaction query lists it; a paid one is VALIDATED once the validator was asked for it."""
    if not attempt.paid:
        have = _everything(attempt)
        return {name: have[name] for name in _UNPAID_ELEMENT}
    answer = validator_answer(attempt, status="VALIDATED" if validated_on else "VALID", validated_on=validated_on)
    del answer["APIConnect"]
    return answer | {"bank_gw": attempt.card.type.partition("-")[0], "error": attempt.error}


def _digest(algorithm: str, fields: Mapping[str, str], store_passwd: str) -> str:
    secret = hashlib.new(algorithm, store_passwd.encode(), usedforsecurity=False).hexdigest()
    pairs = sorted({**fields, "store_passwd": secret}.items())
    text = "&".join(f"{name}={value}" for name, value in pairs)
    return hashlib.new(algorithm, text.encode(), usedforsecurity=False).hexdigest()


def _common(attempt: Attempt) -> dict[str, str]:
    values = dict(zip(("value_a", "value_b", "value_c", "value_d"), attempt.values, strict=True))
    return values | {
        "tran_id": attempt.tran_id,
        "val_id": attempt.val_id,
        "amount": f"{attempt.amount:.2f}",
        "store_amount": "" if attempt.store_amount is None else f"{attempt.store_amount:.2f}",
        "bank_tran_id": attempt.bank_tran_id,
        "status": attempt.status,
        "tran_date": attempt.tran_date,
        "error": attempt.error,
        "currency": "BDT",
        "store_id": attempt.store_id,
        "currency_type": attempt.currency_type,
        "currency_amount": f"{attempt.currency_amount:.2f}",
        "currency_rate": f"{attempt.currency_rate:.4f}",
        "base_fair": "0.00",
    }


def _card(card: Card) -> dict[str, str]:
    return {
        "card_type": card.type,
        "card_no": card.number,
        "card_issuer": card.issuer,
        "card_brand": card.brand,
        "card_sub_brand": card.sub_brand,
        "card_issuer_country": card.country,
        "card_issuer_country_code": card.country_code,
    }


def _risk(attempt: Attempt) -> dict[str, str]:
    return {"risk_level": "1" if attempt.risky else "0", "risk_title": "Not Safe" if attempt.risky else "Safe"}


def _everything(attempt: Attempt) -> dict[str, str]:
    return _common(attempt) | _card(attempt.card) | _risk(attempt)


def _without_zeros(amount: Decimal | None) -> str:
    """`97.5` for 97.50: the validator loses trailing zeros here, the notification does not."""
    return "" if amount is None else f"{amount.normalize():f}"
