"""SSLCOMMERZ, API v4: the calls that move money. A session is opened by POST, a refund is asked for and asked about by GET.

A refund whose answer is lost cannot be asked about: the question needs `refund_ref_id`, which only that answer has. So an answer is a no
only where API v4 says so (`APIConnect` DONE and `failed`); everything that is not clear may have happened. What of it is inferred:
`docs/providers/sslcommerz.md`.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from ipn_gateway import money
from ipn_gateway.providers import answers, sslcommerz_api
from ipn_gateway.providers.base import (
    Answer,
    Ask,
    Declined,
    NoAnswer,
    NoOutcome,
    RefundAccepted,
    RefundAnswer,
    RefundCancelled,
    RefundPending,
    RefundRequest,
    RefundRequestedBefore,
    RefundStatus,
    RefundSucceeded,
    SessionAnswer,
    SessionOpened,
    SessionRequest,
    Unknown,
)
from ipn_gateway.providers.sslcommerz_api import SslcommerzConfig

REFUND_KEY_LENGTH_MAX: Final = 30
"""Characters of `refund_trans_id` (API v4)."""

SETTLEMENT: Final = "BDT"
"""What every payment is settled in, and every refund is asked for in."""

AMOUNT_MIN: Final = Decimal("10.00")
AMOUNT_MAX: Final = Decimal("500000.00")
"""Of a session's `total_amount`, in BDT (API v4)."""

_DECIMALS: Final = 2  # of every amount that they take: decimal(10,2)
_REMARKS_MAX: Final = 255
_REFUND_WORDS: Final = frozenset({"success", "failed", "processing"})
_REFUND_ID: Final = re.compile(r"[!-~]{1,100}")  # documented as text(50)
_PAGE_LENGTH_MAX: Final = 2048
_PAGE: Final = re.compile(r"(?i:https?)://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?#][!#-;=?-\[\]-~]*)?")


def order_amount_problem(amount: Decimal, currency: str) -> str | None:
    """Why a session of this amount would be refused. Other currencies than BDT are converted first, at a rate that only they know."""
    if amount != round(amount, _DECIMALS):
        return "must have at most two decimals at SSLCOMMERZ"
    if currency == SETTLEMENT and not AMOUNT_MIN <= amount <= AMOUNT_MAX:
        return f"must be {AMOUNT_MIN} to {AMOUNT_MAX} BDT at SSLCOMMERZ"
    return None


# --- a session


async def open_session(ask: Ask, config: SslcommerzConfig, request: SessionRequest) -> SessionAnswer:
    """Open a payment page. Only SUCCESS with its address, and FAILED with a reason, are answers."""
    got = await ask("POST", config.url(sslcommerz_api.SESSION), form={**_form(request), **config.credentials()})
    answer = _decoded(got)
    if isinstance(answer, NoOutcome):
        return answer
    status, reason = answers.text(answer, "status"), answers.sentence(answer, "failedreason")
    if status == "FAILED" and reason:
        return Declined(answers.reason("failed", reason, _secret(config)))
    if status != "SUCCESS":
        return NoOutcome(answers.code("status", status))
    page = _page(answer.get("GatewayPageURL"))
    return SessionOpened(page) if page else NoOutcome("no_gateway_page_url")


def _form(request: SessionRequest) -> dict[str, str]:
    """All mandatory fields and the listener's address. We ship nothing and offer no instalments; an order is one item."""
    customer, product = request.customer, request.product
    return {
        "total_amount": money.show(request.amount, SETTLEMENT),
        "currency": request.currency,
        "tran_id": request.order_id,
        "success_url": request.success_url,
        "fail_url": request.fail_url,
        "cancel_url": request.cancel_url,
        "ipn_url": request.notification_url,
        "cus_name": customer["name"],
        "cus_email": customer["email"],
        "cus_phone": customer["phone"],
        "cus_add1": customer["address"],
        "cus_city": customer["city"],
        "cus_postcode": customer["postcode"],
        "cus_country": customer["country"],
        "product_name": product["name"],
        "product_category": product["category"],
        "product_profile": product["profile"],
        "num_of_item": "1",
        "shipping_method": "NO",
        "emi_option": "0",
    }


def _page(url: Any) -> str | None:
    """The address if a browser can be sent there: absolute, without userinfo, quotes, blanks and anything else that no URL holds."""
    return url if isinstance(url, str) and len(url) <= _PAGE_LENGTH_MAX and _PAGE.fullmatch(url) else None


# --- a refund


def settled_share(request: RefundRequest) -> Decimal | None:
    """What to refund in BDT; None when it cannot be known.

    An order in BDT: its own amount. In another currency: the same share of what the payment was settled at, computed exactly and rounded
    down to 0.01, so that refunds together never exceed the settlement. The whole payment is the whole settlement; of several parts
    up to 0.01 BDT each stays behind. The day's rate plays no part.
    """
    if request.currency == SETTLEMENT:
        return request.amount
    if request.settled_amount is None or request.settled_currency != SETTLEMENT or not request.payment_amount:
        return None
    share = Fraction(request.settled_amount) * Fraction(request.amount) / Fraction(request.payment_amount)
    return Decimal(share * 100 // 1).scaleb(-_DECIMALS)


async def refund(ask: Ask, config: SslcommerzConfig, request: RefundRequest) -> RefundAnswer:
    """Ask for a refund, once. Declined here, and not asked for, when there is no settlement to take a share of, or less than 0.01 BDT."""
    amount = settled_share(request)
    if not amount:
        return Declined("settlement_unknown" if amount is None else "amount_too_small")
    got = await sslcommerz_api.get(
        ask,
        config,
        sslcommerz_api.QUERY,
        bank_tran_id=request.provider_transaction_id,
        refund_trans_id=request.key,
        refund_amount=money.show(amount, SETTLEMENT),
        refund_remarks=request.remarks.strip()[:_REMARKS_MAX] or "Refund",
        refe_id=request.order_id,
        v="1",
    )
    answer = _connected(got)
    return answer if isinstance(answer, NoOutcome) else _judged(answer, config, request.provider_transaction_id)


def _judged(answer: Mapping[str, Any], config: SslcommerzConfig, bank_tran_id: str) -> RefundAnswer:
    """`processing` is their word for a refund that was requested before. Only one that was accepted has a `refund_ref_id`."""
    status, ref_id = answers.text(answer, "status"), answers.text(answer, "refund_ref_id")
    named = bool(answer.get("refund_ref_id"))
    if _names_another(answer, "bank_tran_id", bank_tran_id):
        return NoOutcome("other_transaction")
    if status in {"success", "processing"} and _REFUND_ID.fullmatch(ref_id):
        return RefundAccepted(ref_id)
    if status == "processing" and not named:
        return RefundRequestedBefore()
    if status == "failed" and not named:
        return Declined(answers.reason("failed", answers.sentence(answer, "errorReason"), _secret(config)))
    return NoOutcome("refund_ref_id" if status in _REFUND_WORDS else answers.code("status", status))


async def refund_status(ask: Ask, config: SslcommerzConfig, provider_refund_id: str, provider_transaction_id: str) -> RefundStatus:
    """Ask how far a refund is. The answer must name it or its payment, and neither another refund nor another payment."""
    got = await sslcommerz_api.get(ask, config, sslcommerz_api.QUERY, refund_ref_id=provider_refund_id)
    answer = _connected(got)
    if isinstance(answer, NoOutcome):
        return answer
    asked = {"refund_ref_id": provider_refund_id, "bank_tran_id": provider_transaction_id}
    if any(_names_another(answer, name, value) for name, value in asked.items()) or not any(answer.get(name) for name in asked):
        return NoOutcome("other_refund")
    match answers.text(answer, "status"):
        case "refunded":
            return RefundSucceeded()
        case "processing":
            return RefundPending()
        case "cancelled":
            return RefundCancelled(answers.reason("cancelled", answers.sentence(answer, "errorReason"), _secret(config)))
        case word:
            return NoOutcome(answers.code("status", word))


def _names_another(answer: Mapping[str, Any], name: str, asked: str) -> bool:
    """Whether a member is there and says something else; what is missing or blank contradicts nothing."""
    return answer.get(name) not in (None, "") and answers.text(answer, name) != asked


def _decoded(got: Answer | NoAnswer) -> dict[str, Any] | NoOutcome:
    if isinstance(got, NoAnswer):
        return NoOutcome(got.cause, sent=got.sent)
    answer = answers.decoded(got)
    return NoOutcome(answer.cause) if isinstance(answer, Unknown) else answer


def _connected(got: Answer | NoAnswer) -> dict[str, Any] | NoOutcome:
    """The answer, if the call was taken.

    API v4 says of FAILED, INVALID_REQUEST and INACTIVE only that the call was bad, of other words nothing: no promise that no money
    moved. The cause is for a person, who sees in it whether the password was wrong or the address not registered.
    """
    answer = _decoded(got)
    if isinstance(answer, NoOutcome):
        return answer
    cause = sslcommerz_api.refusal(answer)
    return answer if cause is None else NoOutcome(cause)


def _secret(config: SslcommerzConfig) -> tuple[str, ...]:
    return (config.store_passwd.get_secret_value(),)
