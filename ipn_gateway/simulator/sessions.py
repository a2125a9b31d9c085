"""The rules of a session init and the shape of its answer. Pure. Source: SSLCOMMERZ API v4, "Initiate Payment"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from ipn_gateway.simulator.sslcommerz import CENT, RATES, Json

if TYPE_CHECKING:
    from collections.abc import Mapping

AMOUNT_MIN: Final = Decimal("10.00")
AMOUNT_MAX: Final = Decimal("500000.00")
"""BDT; other currencies are converted first."""

MANDATORY: Final = (
    *("total_amount", "currency", "tran_id", "product_category", "success_url", "fail_url", "cancel_url"),
    *("cus_name", "cus_email", "cus_add1", "cus_city", "cus_postcode", "cus_country", "cus_phone"),
    *("shipping_method", "num_of_item", "product_name", "product_profile", "emi_option"),
)
URLS: Final = ("success_url", "fail_url", "cancel_url", "ipn_url")
VALUES: Final = ("value_a", "value_b", "value_c", "value_d")
LENGTHS: Final = {"tran_id": 30} | dict.fromkeys(URLS + VALUES, 255)
CHOICES: Final = {
    "shipping_method": {"YES", "NO", "COURIER", "SSLCOMMERZ_LOGISTIC"},
    "product_profile": {
        "general",
        "physical-goods",
        "non-physical-goods",
        "airline-tickets",
        "travel-vertical",
        "telecom-vertical",
    },
}
_AMOUNT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,2})?", re.ASCII)


@dataclass(slots=True, kw_only=True)
class Session:
    """A customer's visit to the payment page; several attempts are possible until it is `closed`."""

    key: str
    store_id: str
    tran_id: str
    amount: Decimal
    currency: str
    urls: dict[str, str]
    values: tuple[str, str, str, str]
    product: str
    attempts: int = 0
    closed: bool = False


def problem(form: Mapping[str, str]) -> str | None:
    """Why a session init is refused, as a sentence; None when it is good. Credentials are not looked at here."""
    return (
        next((f"{name} is missing or empty" for name in MANDATORY if not form.get(name, "").strip()), None)
        or next((f"{name} is longer than {most}" for name, most in LENGTHS.items() if len(form.get(name, "")) > most), None)
        or next((f"{name} is not an http(s) URL" for name in URLS if not _is_url(form.get(name, ""))), None)
        or _choice_problem(form)
        or _amount_problem(form["total_amount"], form["currency"])
    )


def session_of(key: str, form: Mapping[str, str]) -> Session:
    """The session that a form without a `problem` opens."""
    return Session(
        key=key,
        store_id=form["store_id"],
        tran_id=form["tran_id"],
        amount=Decimal(form["total_amount"]).quantize(CENT),
        currency=form["currency"],
        urls={name: form.get(name, "") for name in URLS},
        values=(form.get("value_a", ""), form.get("value_b", ""), form.get("value_c", ""), form.get("value_d", "")),
        product=form["product_name"],
    )


def refused(reason: str) -> Json:
    """The answer to a session init that was not accepted."""
    return {"status": "FAILED", "failedreason": reason, "sessionkey": "", "gw": {}, "GatewayPageURL": "", "desc": []}


def opened(session: Session, base_url: str) -> Json:
    """The answer to a session init that was accepted."""
    page = f"{base_url.rstrip('/')}/pay/{session.key}"
    return {
        "status": "SUCCESS",
        "failedreason": "",
        "sessionkey": session.key,
        "gw": {
            "visa": "visacard",
            "master": "mastercard",
            "amex": "amexcard",
            "othercards": "dbbl_nexus",
            "internetbanking": "city",
            "mobilebanking": "bkash",
        },
        "redirectGatewayURL": f"{page}?card=",
        "redirectGatewayURLFailed": "",
        "GatewayPageURL": page,
        "storeBanner": "",
        "storeLogo": "",
        "store_name": session.store_id,
        "desc": [
            {"name": "VISA", "type": "visa", "logo": "", "gw": "visacard", "redirectGatewayURL": f"{page}?card=visa"},
            {
                "name": "BKash",
                "type": "mobilebanking",
                "logo": "",
                "gw": "bkash",
                "redirectGatewayURL": f"{page}?card=bkash",
            },
        ],
        "is_direct_pay_enable": "0",
    }


def _is_url(text: str) -> bool:
    return not text or text.startswith(("http://", "https://"))


def _choice_problem(form: Mapping[str, str]) -> str | None:
    if form["shipping_method"].upper() not in CHOICES["shipping_method"]:
        return "shipping_method is not one of the allowed words"
    if form["product_profile"] not in CHOICES["product_profile"]:
        return "product_profile is not one of the allowed words"
    return None


def _amount_problem(total_amount: str, currency: str) -> str | None:
    if currency not in RATES:
        return "currency is not supported"
    if not _AMOUNT.fullmatch(total_amount):
        return "total_amount is not a decimal number with at most two decimals"
    taka = (Decimal(total_amount) * RATES[currency]).quantize(CENT)
    if not AMOUNT_MIN <= taka <= AMOUNT_MAX:
        return f"total_amount must be {AMOUNT_MIN} to {AMOUNT_MAX} BDT"
    return None
