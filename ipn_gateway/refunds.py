"""Giving money back: reserved first, asked for once, and then asked about (`refund_polls`) until it is final.

A provider that loses our call, or whose answer we lose, may have paid: so the intent to call is committed before the call, and behind it
nothing is ever asked for again by itself. What is not known waits for a person, with its money reserved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal  # noqa: TC003 - fields of rows
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID  # noqa: TC003

from ipn_gateway import ids, logs, money, objects, orders, refund_outcomes, validation, views
from ipn_gateway.clock import Clock
from ipn_gateway.errors import NotFound, Overloaded, StateConflict
from ipn_gateway.operations import STARTED, Advance, Doubt, Downstream, Finished, Operation, Phase, Retry, Settlement
from ipn_gateway.providers.base import Declined, NoOutcome, RefundAccepted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.decisions import LockedOrder
    from ipn_gateway.operations import Step, Work
    from ipn_gateway.providers.base import RefundAnswer, RefundRequest
    from ipn_gateway.refund_outcomes import LockedRefund
    from ipn_gateway.settings import Settings
    from ipn_gateway.sources import SourceAccount, Sources
    from ipn_gateway.transport import Transport

UNSENT: Final = "unsent"
ASKING: Final = "asking"

RETRY_SECONDS: Final = 5  # what a 503 asks for: the provider could not be reached a moment ago
PARTS_NAMED_MAX: Final = 10  # of the payments with something left, in a refusal

_EVIDENCE: Final = re.compile(r"[!-~]{1,255}")


@dataclass(frozen=True, slots=True)
class NewRefund:
    """What is to be given back: amount > 0 in the decimals of the payment's currency, checked at the edge.

    Without a `payment_id` it is taken from an applied payment that still holds so much.
    """

    order_id: str
    reference: str
    amount: Decimal
    reason: str
    payment_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Refunder:
    """What a refund is made with."""

    db: Database
    sources: Sources
    transport: Transport
    settings: Settings


@dataclass(frozen=True, slots=True)
class Part:
    """A payment of the order, and what can still be given back of it."""

    id: UUID
    status: str
    currency: str
    left: Decimal


class Refunding:
    """One request for a refund, as it goes through the phases of `CREATE`.

    What the call to the provider needs is read in the transaction that commits the intent, so that behind it nothing stands between us
    and the provider.
    """

    def __init__(self, refunder: Refunder, tenant_id: str, new: NewRefund) -> None:
        self._refunder = refunder
        self._tenant_id = tenant_id
        self._new = new
        self._question: tuple[SourceAccount, RefundRequest] | None = None

    def phases(self) -> dict[str, Phase]:
        """The phases of `CREATE`."""
        return {
            STARTED: Phase("refunds.reserve", self._reserve, self._accounts),
            UNSENT: Phase("refunds.resend", self._resend, self._accounts),
            ASKING: Phase("refunds.record", self._record, self._ask),
        }

    async def _accounts(self, _: Work) -> dict[str, SourceAccount]:
        """The accounts at which the order was paid, as they are now: a password of a second ago would leave the outcome unknown."""
        async with self._refunder.db.autocommit("refunds.sources") as tx:
            names = await tx.all(
                dict,
                "SELECT DISTINCT source_id FROM payments WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s",
                {"tenant_id": self._tenant_id, "order_id": self._new.order_id},
            )
        found = [await self._refunder.sources.reload(row["source_id"]) for row in names]
        return {account.name: account for account in found if account}

    async def _reserve(self, tx: Transaction, work: Work, accounts: Mapping[str, SourceAccount]) -> Advance:
        """The money is reserved and the refund is there, before anybody is asked. Raises `StateConflict`."""
        order = await orders.lock(tx, self._tenant_id, self._new.order_id)
        if order is None:
            raise NotFound
        await _refuse_known(tx, self._tenant_id, self._new)
        part = chosen(order, await _parts(tx, order), self._new)
        refund_id = ids.new(self._refunder.db.clock.now())
        await _insert(tx, work, self._new, part, refund_id)
        return await self._intend(tx, work, refund_id, accounts)

    async def _resend(self, tx: Transaction, work: Work, accounts: Mapping[str, SourceAccount]) -> Advance:
        """The call before provably never left, so that this one is still the first."""
        return await self._intend(tx, work, _refund_id(work), accounts)

    async def _intend(self, tx: Transaction, work: Work, refund_id: UUID, accounts: Mapping[str, SourceAccount]) -> Advance:
        refund = await refund_outcomes.lock(tx, self._tenant_id, refund_id)
        account = accounts.get(refund.source_id)
        if account is None:  # of a payment that was recorded since they were read
            raise Overloaded(retry_after_seconds=RETRY_SECONDS)
        self._question = account, refund.request(work.downstream_key("refund", account.provider.refund_key_length_max))
        return Advance(ASKING, {"refund_id": refund.public_id, "order_id": refund.order_id})

    async def _ask(self, work: Work) -> RefundAnswer:
        """Ask, once. The answer is logged here as well: it is evidence, should it come too late to be recorded."""
        assert self._question is not None  # noqa: S101 - who did not commit the intent never comes here
        account, request = self._question
        logs.count("provider.refunds")
        ask = self._refunder.transport.ask_for(timeout_seconds=self._refunder.settings.provider_money_timeout_seconds)
        answer = await account.provider.refund(ask, account.config, request)
        logs.get("refunds").info(
            "refund.answered", refund_id=work.progress["refund_id"], key=request.key, source=account.name, answer=repr(answer)
        )
        return answer

    async def _record(self, tx: Transaction, work: Work, answer: RefundAnswer) -> Step:
        order, refund = await _locked(tx, work)
        if isinstance(answer, NoOutcome) and not answer.sent:
            sentence = "The provider could not be reached, so nothing was asked for. Send the same request with the same key again."
            return Retry(UNSENT, Overloaded(sentence, retry_after_seconds=RETRY_SECONDS, provider_cause=answer.cause))
        if isinstance(answer, Declined):
            await refund_outcomes.fail(tx, self._refunder.db.clock, order, refund, failure=answer.code)
            shown = await _shown(tx, refund)
            return Finished.shown(shown, 201, Location=_address(refund))
        first = self._refunder.settings.refund_poll_schedule[0]
        if isinstance(answer, RefundAccepted) and await refund_outcomes.accept(
            tx, refund, answer.provider_refund_id, first_poll_seconds=first
        ):
            return _taken(refund)
        return Doubt()


# --- which payment carries it


def chosen(order: LockedOrder, parts: Sequence[Part], new: NewRefund) -> Part:
    """The payment that the refund is taken from: the one that is named, or the oldest applied one that holds so much. Pure.

    Unapplied money is refunded only by name. What counts is what is left of a payment, whatever the order's status: a part that a person
    booked on an order that is not paid is money too. Raises `StateConflict`.
    """
    wanted = [part for part in parts if (part.id == new.payment_id if new.payment_id else part.status == "applied")]
    if not wanted:
        raise StateConflict(
            f"There is no money on this order, which is {order.status}, to give back; an unapplied payment is refunded by its payment_id."
        )
    for part in wanted:
        if part.left >= new.amount:
            return part
    raise StateConflict(_too_much(wanted))


def _too_much(parts: Sequence[Part]) -> str:
    left = [f"{money.show(part.left, part.currency)} {part.currency} of {ids.show(ids.PAYMENT, part.id)}" for part in parts if part.left]
    listed = ", ".join(left[:PARTS_NAMED_MAX]) or "nothing"
    return f"No payment has so much left to give back; refunds that are not final count. What is left: {listed}."


async def _parts(tx: Transaction, order: LockedOrder) -> list[Part]:
    return await tx.all(
        Part,
        """SELECT id, status, currency, amount - amount_refunded - amount_reserved AS left FROM payments
            WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s ORDER BY recorded_at, id""",
        {"tenant_id": order.tenant_id, "order_id": order.order_id},
    )


async def _refuse_known(tx: Transaction, tenant_id: str, new: NewRefund) -> None:
    """A reference refunds once for ever: what comes of a retry when nobody remembers its key any more."""
    known = await tx.value(
        "SELECT id FROM refunds WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND reference = %(reference)s",
        {"tenant_id": tenant_id, "order_id": new.order_id, "reference": new.reference},
    )
    if known is not None:
        refund_id = ids.show(ids.REFUND, known)
        raise StateConflict(
            f"The reference {new.reference} is that of {refund_id}, and a reference refunds once; GET /v1/orders/{new.order_id} shows it.",
            members={"refund_id": refund_id},
        )


_INSERT: Final = """
WITH reserved AS (
    UPDATE payments SET amount_reserved = amount_reserved + %(amount)s
     WHERE tenant_id = %(tenant_id)s AND id = %(payment_id)s AND amount_refunded + amount_reserved + %(amount)s <= amount
    RETURNING id, currency
)
INSERT INTO refunds (tenant_id, id, order_id, payment_id, reference, amount, currency, reason, writer_id)
SELECT %(tenant_id)s, %(id)s, %(order_id)s, reserved.id, %(reference)s, %(amount)s, reserved.currency, %(reason)s, %(writer_id)s
  FROM reserved"""


async def _insert(tx: Transaction, work: Work, new: NewRefund, part: Part, refund_id: UUID) -> None:
    """The refund and its reservation, both or none: `payments_refund_check` and `refunds_reference_key` stand behind the questions."""
    made = await tx.execute(
        _INSERT,
        {
            "tenant_id": work.tenant_id,
            "id": refund_id,
            "order_id": new.order_id,
            "payment_id": part.id,
            "reference": new.reference,
            "amount": new.amount,
            "reason": new.reason,
            "writer_id": work.key_id,
        },
    )
    if made == 0:  # nobody else changes a payment while we hold its order
        raise Overloaded(retry_after_seconds=RETRY_SECONDS)


# --- answers


def _refund_id(work: Work) -> UUID:
    return ids.read(ids.REFUND, work.progress["refund_id"])


async def _locked(tx: Transaction, work: Work) -> tuple[LockedOrder, LockedRefund]:
    """The order first, as everywhere."""
    order = await orders.lock(tx, work.tenant_id, work.progress["order_id"])
    assert order is not None  # noqa: S101 - orders are never deleted
    return order, await refund_outcomes.lock(tx, work.tenant_id, _refund_id(work))


async def _shown(tx: Transaction, refund: LockedRefund) -> objects.Refund:
    order = await views.order(tx, refund.tenant_id, refund.order_id)
    return next(shown for shown in order.refunds if shown.refund_id == refund.public_id)


def _taken(refund: LockedRefund) -> Finished:
    """Only what never changes: how far the refund is, its order shows."""
    body = objects.AcceptedRefund(
        refund_id=refund.public_id,
        reference=refund.reference,
        order_id=refund.order_id,
        payment_id=ids.show(ids.PAYMENT, refund.payment_id),
        amount=money.show(refund.amount, refund.currency),
        currency=refund.currency,
    )
    return Finished.shown(body, 202, Location=_address(refund))


def _address(refund: LockedRefund) -> str:
    return f"/v1/orders/{refund.order_id}"


# --- when the outcome is not known


async def _doubted(tx: Transaction, work: Work) -> None:
    _, refund = await _locked(tx, work)
    await refund_outcomes.doubt(tx, refund)


async def _applied(tx: Transaction, work: Work, evidence: Mapping[str, Any]) -> Finished:
    """A person found the refund in the provider's panel: its id there is the evidence, and the provider is asked about it at once."""
    if "refund_id" not in work.progress:
        raise StateConflict("This key has asked for no refund: it can only be set to not_applied, or be used again.")
    found = evidence.get("provider_refund_id")
    if not isinstance(found, str) or not _EVIDENCE.fullmatch(found):
        raise validation.refused("must be what the provider calls the refund", "evidence", "provider_refund_id")
    _, refund = await _locked(tx, work)
    if not await refund_outcomes.accept(tx, refund, found, first_poll_seconds=0):
        raise StateConflict("Another refund of this order has this provider_refund_id.")
    return _taken(refund)


async def _not_applied(tx: Transaction, work: Work) -> None:
    """No money went back: it is free again. The refund stays, as failed, so that its reference does too."""
    if "refund_id" in work.progress:
        order, refund = await _locked(tx, work)
        await refund_outcomes.fail(tx, Clock(), order, refund, failure="not_applied")  # the clock gives ids their time, and nothing else


async def _is_open(tx: Transaction, work: Work) -> bool:
    """Whether the provider took it and never said, however often it was asked, what became of it."""
    if "refund_id" not in work.progress:
        return False
    _, refund = await _locked(tx, work)
    return refund.status == "indeterminate"


CREATE: Final = Operation(
    name="POST /v1/orders/{order_id}/refunds",
    fields={"reference": "json", "amount": "decimal", "reason": "json", "payment_id": "json"},
    downstream=Downstream.NONE,
    key_required=True,
    money=True,
    phases=(STARTED, UNSENT, ASKING),
    intents=frozenset({ASKING}),
    settlement=Settlement(_doubted, _applied, _not_applied, _is_open),
)
"""After `not_applied` the same key executes again, and is answered 409 by the reference of the refund that failed."""
