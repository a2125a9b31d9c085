"""How an attempt to pay is made, and what the provider keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from ipn_gateway.simulator import sslcommerz
from ipn_gateway.simulator.sslcommerz import CARDS, CENT, FAILED_CARD, NO_CARD, RATES, Attempt, Json
from ipn_gateway.simulator.world import stamp_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from ipn_gateway.simulator.world import Chance

ERRORS: Final = {
    "FAILED": "Invalid expiration date",
    "CANCELLED": "Cancelled by User",
    "UNATTEMPTED": "Customer did not choose to pay any channel",
    "EXPIRED": "Payment time ran out",
}
VALID_TAIL: Final = 15
BANK_TAIL: Final = 12
"""Letters after the twelve digits of a `val_id` and a `bank_tran_id`."""

_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_STARTED_BEFORE: Final = timedelta(seconds=5)
"""`tran_date` is seen some seconds before the stamp inside `val_id`: it is the start of the attempt."""


def _nothing() -> None:
    """Change nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the provider says, and what it remembers of having said it."""

    body: Json
    record: Callable[[], None] = _nothing

    def recorded(self) -> Json:
        """Remember, then say it."""
        self.record()
        return self.body


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An attempt to be made. `amount` is in `currency`; `error` None means the usual text of the status."""

    store_id: str
    tran_id: str
    amount: Decimal
    currency: str = "BDT"
    status: str = "VALID"
    risky: bool = False
    card: str = "visa"
    error: str | None = None
    values: tuple[str, str, str, str] = ("", "", "", "")


@dataclass(slots=True)
class Payment:
    """An attempt and what became of it; `refunded` is BDT."""

    attempt: Attempt
    session_key: str = ""
    validated_on: str = ""
    refunded: Decimal = Decimal(0)

    def element(self) -> Json:
        """It in the list that a transaction query gives."""
        return sslcommerz.query_element(self.attempt, validated_on=self.validated_on)


def attempt_of(wanted: Wanted, now: datetime, chance: Chance) -> Attempt:
    """The attempt: converted to BDT, with identifiers where its status has them, the fee taken off."""
    paid, failed = wanted.status == "VALID", wanted.status == "FAILED"
    card = CARDS[wanted.card] if paid else FAILED_CARD if failed else NO_CARD
    rate = RATES[wanted.currency]
    amount = (wanted.amount * rate).quantize(CENT)
    return Attempt(
        status=wanted.status,
        store_id=wanted.store_id,
        tran_id=wanted.tran_id,
        tran_date=text_of(now - _STARTED_BEFORE),
        amount=amount,
        currency_type=wanted.currency,
        currency_amount=wanted.amount.quantize(CENT),
        currency_rate=rate,
        val_id=identifier(now, chance, VALID_TAIL) if paid else "",
        bank_tran_id=identifier(now, chance, BANK_TAIL) if paid or failed else "",
        store_amount=(amount * (1 - card.fee)).quantize(CENT) if paid else None,
        card=card,
        risky=wanted.risky and paid,
        error=ERRORS.get(wanted.status, "") if wanted.error is None else wanted.error,
        values=wanted.values,
    )


def identifier(now: datetime, chance: Chance, tail: int) -> str:
    """Twelve digits of time and a random tail, in the shape of the provider's identifiers."""
    return stamp_of(now) + "".join(chance.choices(_LETTERS, k=tail))
