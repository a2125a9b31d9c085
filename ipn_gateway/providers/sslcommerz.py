"""SSLCOMMERZ, API v4: signed forms in, the Order Validation API and the transaction query as proof.

The hash of a notification is malleable: its sender chooses which fields it covers, and values are joined without escaping. It is a filter
before the question to the provider, never the answer. Sources of the rules: the parameter tables of SSLCOMMERZ API v4, and the official PHP
and Python libraries, whose functions give the digests that the tests hold. Which of it is inferred: `docs/providers/sslcommerz.md`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, ClassVar, Final

from ipn_gateway.providers import answers, forms, sslcommerz_api, sslcommerz_hash, sslcommerz_money
from ipn_gateway.providers.base import (
    NEGATIVE,
    Ack,
    Ask,
    Assertion,
    Confirmed,
    Effect,
    InboundRequest,
    Malformed,
    Proof,
    Provider,
    ProviderConfig,
    RefundAnswer,
    RefundRequest,
    RefundStatus,
    Refuted,
    SessionAnswer,
    SessionRequest,
    Unconfirmed,
    Unknown,
    Verdict,
)
from ipn_gateway.providers.sslcommerz_api import SslcommerzConfig
from ipn_gateway.providers.sslcommerz_api import view as _view

# Their status -> our effect. API v4; PENDING and PROCESSING are words of the transaction query.
EFFECTS: Final[Mapping[str, Effect]] = {
    "VALID": Effect.PAID,
    "VALIDATED": Effect.PAID,  # the validator's word from the second question on: success, and no sign of a duplicate
    "FAILED": Effect.FAILED,
    "CANCELLED": Effect.CANCELLED,
    "UNATTEMPTED": Effect.CANCELLED,  # the customer chose no way to pay
    "EXPIRED": Effect.EXPIRED,
    "PENDING": Effect.INFORMATIVE,
    "PROCESSING": Effect.INFORMATIVE,
}

# What the validator says of a val_id that is no payment. None of it closes an order: a validator answers about one val_id only.
_REFUTING: Final = frozenset({"INVALID_TRANSACTION", "FAILED", "CANCELLED", "EXPIRED", "UNATTEMPTED"})

_NUMBERS: Final = ("amount", "currency_amount", "store_amount")

_ORDER_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # an order's own alphabet: no order has another id
_STATUS: Final = re.compile(r"[!-~](?:[ -~]{0,62}[!-~])?")
_VAL_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_CURRENCY: Final = re.compile(r"[A-Z]{3}")
_LISTED_PAYMENTS_MAX: Final = 5  # questions that one query may lead to
_DHAKA: Final = timezone(timedelta(hours=6))  # their times carry no zone; Bangladesh has had no daylight saving since 2009


# --- what a notification says


def _if_like(pattern: re.Pattern[str], text: str) -> str | None:
    return text if pattern.fullmatch(text) else None


def _money(fields: Mapping[str, Any], amount_name: str, currency_name: str) -> tuple[Decimal, str] | tuple[None, None]:
    """An amount with its currency; neither unless both can be read."""
    amount, currency = answers.amount(fields, amount_name), answers.text(fields, currency_name)
    return (amount, currency) if amount is not None and _CURRENCY.fullmatch(currency) else (None, None)


def _unreadable(fields: Mapping[str, str]) -> str | None:
    """Why a form is no notification, without its values; None when it is one. `store_amount` is blank on some negatives."""
    if not _ORDER_ID.fullmatch(fields.get("tran_id", "")):
        return "tran_id is missing, or no order can have it"
    if not _STATUS.fullmatch(fields.get("status", "")):
        return "status is missing or not printable"
    for name in _NUMBERS:
        is_posted = name in fields and (name != "store_amount" or fields[name] != "")
        if is_posted and answers.plain_decimal(fields[name]) is None:
            return f"{name} is no plain decimal number"
    return None


def _alerts(fields: Mapping[str, str]) -> tuple[str, ...]:
    unsigned = set(fields).difference(fields["verify_key"].split(","), sslcommerz_hash.FIELDS) if "verify_key" in fields else set()
    alerts = [f"unsigned_field {name}" for name in fields if name in unsigned]
    if fields.get("val_id") and not _VAL_ID.fullmatch(fields["val_id"]):
        alerts.append("val_id_unreadable")
    return tuple(alerts)


def _asserted(fields: Mapping[str, str]) -> Assertion:
    """What the form says of the order's own pair of money; the settlement's stands in where that is not posted."""
    effect = EFFECTS.get(fields["status"], Effect.UNKNOWN)
    val_id = _if_like(_VAL_ID, fields.get("val_id", "")) if effect in {Effect.PAID, Effect.UNKNOWN} else None
    amount, currency = _money(fields, "currency_amount", "currency_type")
    if amount is None:
        amount, currency = _money(fields, "amount", "currency")
    copy_id = fields.get("verify_sign", "").lower()
    return Assertion(fields["tran_id"], fields["status"], effect, val_id, amount, currency, None, copy_id, fields, _alerts(fields))


# --- what the provider answers: the validator, about one payment


def _utc(tran_date: str) -> datetime | None:
    """Their local time in UTC; None when it cannot be read."""
    try:
        return answers.date_time(tran_date).replace(tzinfo=_DHAKA).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


async def _ask(ask: Ask, config: SslcommerzConfig, path: str, **params: str) -> dict[str, Any] | Unknown:
    """One question; only an object with `APIConnect` DONE says anything about a payment (API v4)."""
    answer = answers.decoded(await sslcommerz_api.get(ask, config, path, **params))
    if isinstance(answer, Unknown):
        return answer
    cause = sslcommerz_api.refusal(answer)
    return answer if cause is None else Unknown(cause, _view(answer))


def _paid(answer: Mapping[str, Any], view: Mapping[str, Any], config: SslcommerzConfig, val_id: str) -> Confirmed | Unknown:
    """A payment as the validator describes it. Any risk but a plain `0` or none is one: it holds fulfilment, not the money."""
    amount, currency = _money(answer, "currency_amount", "currency_type")
    if not amount:
        return Unknown("incomplete", view)
    settled_amount, settled_currency = _money(answer, "amount", "currency")
    return Confirmed(
        order_id=answers.text(answer, "tran_id"),
        operation_id=val_id,
        effect=Effect.PAID,
        status=answers.text(answer, "status"),
        account=config.account,
        amount=amount,
        currency=currency,
        provider_transaction_id=answers.text(answer, "bank_tran_id") or val_id,
        risk=answers.text(answer, "risk_level") not in {"", "0"},
        settled_amount=settled_amount,
        settled_currency=settled_currency,
        net_amount=answers.amount(answer, "store_amount"),
        paid_at=_utc(answers.text(answer, "tran_date")),
        answer=view,
    )


def _judged(answer: Mapping[str, Any], config: SslcommerzConfig, val_id: str, order_id: str, posted_store: str) -> Verdict:
    """The verdict of a validator's answer. The answer need not name the store; then the post must not name another one."""
    status, tran_id, view = answers.text(answer, "status"), answers.text(answer, "tran_id"), _view(answer)
    is_payment = EFFECTS.get(status) is Effect.PAID
    if not is_payment and status not in _REFUTING:
        return Unknown(answers.code("status", status), view)
    if (answers.text(answer, "store_id") or posted_store or config.store_id).lower() != config.store_id.lower():
        return Refuted("store_mismatch", final=True, answer=view)
    if not is_payment:
        return Refuted("refuted", answer=view)
    if answers.text(answer, "val_id") != val_id or not tran_id:
        return Unknown("other_val_id" if answer.get("val_id") and tran_id else "incomplete", view)
    if tran_id != order_id:
        return Refuted("order_mismatch", final=True, order_id=_if_like(_ORDER_ID, tran_id), answer=view)
    return _paid(answer, view, config, val_id)


async def _validated(ask: Ask, config: SslcommerzConfig, val_id: str, order_id: str, posted_store: str = "") -> Verdict:
    answer = await _ask(ask, config, sslcommerz_api.VALIDATOR, val_id=val_id, v="1")
    return answer if isinstance(answer, Unknown) else _judged(answer, config, val_id, order_id, posted_store)


# --- and the transaction query, about every attempt under one tran_id


@dataclass(frozen=True, slots=True)
class _Listing:
    """The attempts that a transaction query lists, by what their words mean. Their order is undefined, so it is not used."""

    attempts: tuple[dict[str, Any], ...]
    view: dict[str, Any]

    def of(self, *effects: Effect) -> list[dict[str, Any]]:
        """The attempts whose status has one of these effects."""
        return [attempt for attempt in self.attempts if EFFECTS.get(answers.text(attempt, "status"), Effect.UNKNOWN) in effects]

    @property
    def unsettled(self) -> Unconfirmed | Unknown | None:
        """Why no negative is final yet: an attempt is still open, or has a word that may mean anything."""
        unclear = self.of(Effect.UNKNOWN)
        if unclear:
            return Unknown(answers.code("status", answers.text(unclear[0], "status")), self.view)
        return Unconfirmed(self.view) if self.of(Effect.INFORMATIVE) else None


async def _listed(ask: Ask, config: SslcommerzConfig, order_id: str) -> _Listing | Refuted | Unknown:
    """Ask the transaction query. An order that they do not know comes as count 0 with one element of status INVALID (observed)."""
    answer = await _ask(ask, config, sslcommerz_api.QUERY, tran_id=order_id)
    if isinstance(answer, Unknown):
        return answer
    view, elements = _view(answer), answer.get("element")
    listed = [elements] if isinstance(elements, dict) else elements
    if not isinstance(listed, list) or not all(isinstance(element, dict) for element in listed):
        return Unknown("no_element", view)
    own = [element for element in listed if answers.text(element, "tran_id") == order_id]
    attempts = tuple(element for element in own if answers.text(element, "status") != "INVALID")
    if attempts:
        return _Listing(attempts, view)
    not_known = own or (not listed and answers.text(answer, "no_of_trans_found") == "0")
    return Refuted("refuted", answer=view) if not_known else Unknown("other_elements", view)


async def _listed_payment(ask: Ask, config: SslcommerzConfig, attempt: Mapping[str, Any]) -> Verdict:
    """A listed payment, as the validator confirms it. A validator that disagrees with the query is no verdict."""
    val_id = answers.text(attempt, "val_id")
    if not val_id:
        return Unknown("no_val_id", _view(attempt))
    verdict = await _validated(ask, config, val_id, answers.text(attempt, "tran_id"))
    return Unknown("contradiction", verdict.answer) if isinstance(verdict, Refuted) else verdict


def _unpaid(attempt: Mapping[str, Any], config: SslcommerzConfig, effect: Effect) -> Confirmed:
    """An attempt without money. Its id comes from what the provider lists, never from a post, which could invent any number of them."""
    order_id, status = answers.text(attempt, "tran_id"), answers.text(attempt, "status")
    told_apart_by = answers.text(attempt, "bank_tran_id") or answers.text(attempt, "tran_date")
    operation_id = "/".join(part for part in (order_id, status, told_apart_by) if part)
    return Confirmed(order_id, operation_id, effect, status, config.account, None, None, answer=_view(attempt))


def _likeness(attempt: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[bool, bool, str, str]:
    """How well an attempt fits a post, to choose among several: by bank's id, by date, then the latest."""
    bank_tran_id, tran_date = answers.text(attempt, "bank_tran_id"), answers.text(attempt, "tran_date")
    return bank_tran_id == fields.get("bank_tran_id", ""), tran_date == fields.get("tran_date", ""), tran_date, bank_tran_id


def _asserted_attempt(listing: _Listing, assertion: Assertion) -> dict[str, Any] | None:
    """The listed attempt that a post speaks of: of its very status, and of its bank's id where both name one."""
    banks = {assertion.fields.get("bank_tran_id", ""), ""}
    same = [attempt for attempt in listing.attempts if answers.text(attempt, "status") == assertion.status]
    fitting = same if banks == {""} else [attempt for attempt in same if answers.text(attempt, "bank_tran_id") in banks]
    return max(fitting, key=lambda attempt: _likeness(attempt, assertion.fields), default=None)


def _without_money(listing: _Listing, config: SslcommerzConfig, assertion: Assertion) -> Verdict:
    """The verdict of a query that lists no payment."""
    attempt = _asserted_attempt(listing, assertion)
    if assertion.effect is Effect.UNKNOWN:
        named = {"tran_id": assertion.order_id, "status": assertion.status}
        return replace(_unpaid(attempt or named, config, Effect.UNKNOWN), answer=listing.view)
    if listing.unsettled is not None:
        return listing.unsettled
    if assertion.effect not in NEGATIVE:
        return Refuted("refuted", answer=listing.view)
    return Unconfirmed(listing.view) if attempt is None else _unpaid(attempt, config, assertion.effect)


async def _queried(ask: Ask, config: SslcommerzConfig, assertion: Assertion) -> Verdict:
    """The query, and the validator about the payment that it lists; of several, about the one that fits the post best."""
    listing = await _listed(ask, config, assertion.order_id)
    if not isinstance(listing, _Listing):
        return listing
    paid = listing.of(Effect.PAID)
    if not paid:
        return _without_money(listing, config, assertion)
    return await _listed_payment(ask, config, max(paid, key=lambda attempt: _likeness(attempt, assertion.fields)))


class Sslcommerz:
    """The adapter; stateless."""

    name: ClassVar[str] = "sslcommerz"
    Config: ClassVar[type[ProviderConfig]] = SslcommerzConfig
    EFFECTS: ClassVar[Mapping[str, Effect]] = EFFECTS
    order_id_length_max: ClassVar[int] = 30
    refund_key_length_max: ClassVar[int] = sslcommerz_money.REFUND_KEY_LENGTH_MAX
    key_retention_hours: ClassVar[float | None] = None  # not published
    masked_fields: ClassVar[Sequence[str]] = sslcommerz_api.MASKED_FIELDS
    ack: ClassVar[Ack] = Ack()

    def assertions(self, request: InboundRequest) -> list[Assertion] | Malformed:
        """One assertion, or why the form is none."""
        form = forms.read(request)
        if isinstance(form, Malformed):
            return form
        fields = form.texts()
        detail = _unreadable(fields)
        if detail is None:
            return [_asserted(fields)]
        order_id, status = _if_like(_ORDER_ID, fields.get("tran_id", "")), _if_like(_STATUS, fields.get("status", ""))
        return Malformed("unreadable", detail, order_id, status)

    def authenticate(self, request: InboundRequest, configs: Sequence[ProviderConfig]) -> Proof:
        """REFUSED: hash missing or wrong. UNPROVED: it matches, yet the form leaves room for another reading. PROVED: neither."""
        form = forms.read(request)
        if isinstance(form, Malformed):
            return Proof.REFUSED
        passwds = [config.store_passwd.get_secret_value().encode() for config in configs if isinstance(config, SslcommerzConfig)]
        is_payment = EFFECTS.get(form.text("status")) is Effect.PAID
        return sslcommerz_hash.prove(form.values, passwds, is_payment=is_payment)

    async def validate(self, ask: Ask, config: SslcommerzConfig, assertion: Assertion) -> Verdict:
        """Ask the validator about a val_id, otherwise the query: at most two questions. A word that is unknown here stays so."""
        if assertion.operation_id is not None:
            posted_store = assertion.fields.get("store_id", "")
            verdict = await _validated(ask, config, assertion.operation_id, assertion.order_id, posted_store)
        else:
            verdict = await _queried(ask, config, assertion)
        if assertion.effect is Effect.UNKNOWN and isinstance(verdict, Confirmed):
            return replace(verdict, effect=Effect.UNKNOWN, status=assertion.status)
        return verdict

    async def query(self, ask: Ask, config: SslcommerzConfig, order_id: str) -> list[Verdict]:
        """Payments first, each as the validator confirms it; then the negatives, unless an attempt is still open."""
        listing = await _listed(ask, config, order_id)
        if not isinstance(listing, _Listing):
            return [listing]
        payments = {answers.text(attempt, "val_id"): attempt for attempt in listing.of(Effect.PAID)}
        paid = [await _listed_payment(ask, config, payments[val_id]) for val_id in sorted(payments)[:_LISTED_PAYMENTS_MAX]]
        if listing.unsettled is not None:
            return [*paid, listing.unsettled]
        negatives = [(attempt, EFFECTS[answers.text(attempt, "status")]) for attempt in listing.of(*NEGATIVE)]
        return [*paid, *(_unpaid(attempt, config, effect) for attempt, effect in negatives)]

    def order_amount_problem(self, amount: Decimal, currency: str) -> str | None:
        """The limits of a session, where they can be known here."""
        return sslcommerz_money.order_amount_problem(amount, currency)

    async def open_session(self, ask: Ask, config: SslcommerzConfig, request: SessionRequest) -> SessionAnswer:
        """One POST."""
        return await sslcommerz_money.open_session(ask, config, request)

    async def refund(self, ask: Ask, config: SslcommerzConfig, request: RefundRequest) -> RefundAnswer:
        """One GET that has an effect, in BDT whatever the order's currency is."""
        return await sslcommerz_money.refund(ask, config, request)

    async def refund_status(
        self, ask: Ask, config: SslcommerzConfig, provider_refund_id: str, provider_transaction_id: str
    ) -> RefundStatus:
        """One GET that has none."""
        return await sslcommerz_money.refund_status(ask, config, provider_refund_id, provider_transaction_id)


PROVIDER: Final[Provider] = Sslcommerz()
