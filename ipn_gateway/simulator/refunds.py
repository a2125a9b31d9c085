"""Refunds: accepted once per `refund_trans_id`, then asked about until they are final. Source: SSLCOMMERZ API v4."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Final

from ipn_gateway.simulator.payments import Answer, Payment
from ipn_gateway.simulator.world import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.simulator.sslcommerz import Json
    from ipn_gateway.simulator.world import Chance, Clock

REFUND_TRANS_ID_MAX: Final = 30
_MANDATORY: Final = ("bank_tran_id", "refund_trans_id", "refund_amount", "refund_remarks")


@dataclass(slots=True)
class Refund:
    """A refund that was accepted. `amount` is BDT; `polls` counts the questions about it."""

    ref_id: str
    trans_id: str
    payment: Payment
    amount: Decimal
    initiated_on: str
    status: str = "processing"
    refunded_on: str = ""
    polls: int = 0


@dataclass(slots=True)
class Refunds:
    """All refunds. One says `processing` for `polls_before_done` questions, then `refunded`."""

    clock: Clock
    chance: Chance
    polls_before_done: int = 1
    by_ref_id: dict[str, Refund] = field(default_factory=dict)
    _by_trans_id: dict[tuple[str, str], Refund] = field(default_factory=dict)

    def initiate(self, payment: Payment | None, names: Mapping[str, str]) -> Answer:
        """Accept a refund, say why not, or say `processing` when this `refund_trans_id` was used before."""
        if missing := next((name for name in _MANDATORY if not names.get(name)), None):
            return _refused(payment, names, f"{missing} is missing")
        if payment is None:
            return _refused(payment, names, "bank_tran_id is not known")
        if (payment.attempt.store_id, names["refund_trans_id"]) in self._by_trans_id:
            return Answer(_initiated(payment, names, "processing"))  # no refund_ref_id: none is documented here
        if reason := _problem(payment, names):
            return _refused(payment, names, reason)
        refund = Refund(
            ref_id=f"{self.chance.getrandbits(48):012x}",
            trans_id=names["refund_trans_id"],
            payment=payment,
            amount=Decimal(names["refund_amount"]),
            initiated_on=text_of(self.clock()),
        )
        return Answer(_initiated(payment, names, "success", ref_id=refund.ref_id), lambda: self._remember(refund))

    def accepted(self) -> Counter[str]:
        """How many refunds were accepted under each `refund_trans_id`, over all stores: how often money moved."""
        return Counter(refund.trans_id for refund in self.by_ref_id.values())

    def query(self, store_id: str, ref_id: str) -> Answer:
        """How far a refund is. Asking often enough finishes it."""
        refund = self.by_ref_id.get(ref_id)
        if refund is None or refund.payment.attempt.store_id != store_id:
            return Answer({"APIConnect": "DONE", "refund_ref_id": ref_id, "status": "", "errorReason": "not found"})
        return Answer(_view(refund), lambda: self._asked(refund))

    def decide(self, ref_id: str, status: str) -> bool:
        """Make a refund `refunded`, `cancelled` or `processing` from now on; whether it exists."""
        refund = self.by_ref_id.get(ref_id)
        if refund is None:
            return False
        if status == "cancelled" and refund.status != "cancelled":
            refund.payment.refunded -= refund.amount
        refund.status = status
        refund.refunded_on = text_of(self.clock()) if status == "refunded" else ""
        return True

    def _remember(self, refund: Refund) -> None:
        refund.payment.refunded += refund.amount
        self.by_ref_id[refund.ref_id] = refund
        self._by_trans_id[refund.payment.attempt.store_id, refund.trans_id] = refund

    def _asked(self, refund: Refund) -> None:
        refund.polls += 1
        if refund.status == "processing" and refund.polls == self.polls_before_done:
            self.decide(refund.ref_id, "refunded")


def _problem(payment: Payment, names: Mapping[str, str]) -> str | None:
    if len(names["refund_trans_id"]) > REFUND_TRANS_ID_MAX:
        return f"refund_trans_id is longer than {REFUND_TRANS_ID_MAX}"
    try:
        amount = Decimal(names["refund_amount"])
    except InvalidOperation:
        return "refund_amount is not a number"
    if not amount.is_finite() or amount <= 0:
        return "refund_amount is not positive"
    if amount > payment.attempt.amount - payment.refunded:
        return "refund_amount is more than what is left of the payment"
    return None


def _initiated(payment: Payment | None, names: Mapping[str, str], status: str, *, ref_id: str = "", error: str = "") -> Json:
    return {
        "APIConnect": "DONE",
        "bank_tran_id": names.get("bank_tran_id", ""),
        "trans_id": payment.attempt.tran_id if payment else "",
        "refund_ref_id": ref_id,
        "status": status,
        "errorReason": error,
    }


def _refused(payment: Payment | None, names: Mapping[str, str], reason: str) -> Answer:
    return Answer(_initiated(payment, names, "failed", error=reason))


def _view(refund: Refund) -> Json:
    return {
        "APIConnect": "DONE",
        "bank_tran_id": refund.payment.attempt.bank_tran_id,
        "tran_id": refund.payment.attempt.tran_id,
        "initiated_on": refund.initiated_on,
        "refunded_on": refund.refunded_on,
        "status": refund.status,
        "refund_ref_id": refund.ref_id,
        "errorReason": "",
    }
