"""Apply: one transaction that writes the ledger row, the order, the payment, the events and the delivery's outcome, or nothing.

1. Lock the order; where there is none, lock its slot and look again.
2. Decide (a pure function, `decisions.decide`).
3. Write what was decided in one statement, the ledger first and the rest joined to what it returned; stage the events; call `IPN_EFFECT`.

A change is written without asking whether the operation is new: the ledger's primary key and the payments' unique key say when it is
not, and then the transaction is run again, reading what is booked under the lock. A run that meets its own earlier commit ends as that.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import errors as pg

from ipn_gateway import decisions, events, ids, logs, orders, outbox, outcomes
from ipn_gateway.db import lost, refuse_silent_rollback
from ipn_gateway.decisions import Booked, Change, LockedOrder, Nothing, SecondPayment
from ipn_gateway.errors import ConfigurationError, GatewayError
from ipn_gateway.outcomes import Claimed, Ending
from ipn_gateway.providers.base import NEGATIVE, Confirmed, Effect
from ipn_gateway.states import DeliveryOutcome, OrderStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction

EFFECT_TIMEOUT_SECONDS: Final = 5

_SAYS_BOOKED: Final = {
    ("processed_notifications", "processed_notifications_pkey"),
    ("payments", "payments_provider_transaction_key"),
}


def says_booked(error: pg.UniqueViolation) -> bool:
    """Whether it is the ledger or the payments that know the operation, and not a table of the merchant's."""
    return (error.diag.table_name, error.diag.constraint_name) in _SAYS_BOOKED


@dataclass(frozen=True, slots=True)
class Origin:
    """Who writes: a notification delivery under its lease (`claimed`) or because a person applied it (`manual`), or the sweep."""

    tenant_id: str
    source_id: str
    provider: str
    writer_id: UUID
    claimed: Claimed | None = None
    asserted_effect: Effect | None = None
    parking_over: bool = False
    alerts: Mapping[DeliveryOutcome, str] = field(default_factory=dict)  # what is odd about it, if it ends as that
    manual: bool = False

    @property
    def finding(self) -> Claimed:
        """The delivery to write about: the claimed one, or one to file what the sweep found."""
        return self.claimed or Claimed(self.tenant_id, self.writer_id, self.source_id, fence=0, questions=1)

    @property
    def kind(self) -> str:
        """The ledger's word for it."""
        return "manual" if self.manual else "notification" if self.claimed else "sweep"


@dataclass(frozen=True, slots=True)
class EffectNotification:
    """What `IPN_EFFECT` is told about an applied operation."""

    order_id: str
    effect: str
    status: str
    previous_status: str
    amount: Decimal | None
    currency: str | None
    operation_id: str
    source: str
    metadata: dict[str, Any]


if TYPE_CHECKING:
    EffectHook = Callable[[psycopg.AsyncConnection[Any], EffectNotification], Awaitable[None]]


class EffectFailed(GatewayError):
    """The merchant's IPN_EFFECT raised; everything was rolled back and is tried again."""


class BookedBefore(Exception):
    """The ledger knows the operation: run again and read what is booked."""


def load_effect(name: str | None) -> EffectHook | None:
    """The merchant's coroutine function behind `module:object`. Raises `ConfigurationError`."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"IPN_EFFECT={name}: {type(error).__name__}: write module:object, importable from here.") from error
    if not inspect.iscoroutinefunction(found):
        raise ConfigurationError(f"IPN_EFFECT={name} is no coroutine function: write `async def effect(connection, notification)`.")
    return found  # type: ignore[no-any-return]  # looked at above


async def apply(db: Database, origin: Origin, verdict: Confirmed, effect: EffectHook | None = None) -> DeliveryOutcome:
    """Apply a confirmed operation at most once; what the notification delivery ended as.

    Raises `LeaseLost` when another worker holds the delivery, `EffectFailed` when the merchant's effect raised, and `Overloaded` when the
    database could not take it; nothing is written then.
    """
    try:
        return await db.rerun(_apply_once, db, origin, verdict, effect, careful=False)
    except BookedBefore:
        pass
    except pg.UniqueViolation as error:
        if not says_booked(error):
            raise
    return await db.rerun(_apply_once, db, origin, verdict, effect, careful=True)


async def _apply_once(db: Database, origin: Origin, verdict: Confirmed, effect: EffectHook | None, *, careful: bool) -> DeliveryOutcome:
    async with db.transaction("effects.apply") as tx:
        order = await _lock_order(tx, origin.tenant_id, verdict.order_id)
        if order is None:
            return await _without_order(tx, db.clock, origin, verdict)
        refundable = await _refundable(tx, origin, verdict)
        decision = decisions.decide(order, verdict, origin.source_id, None, refundable)
        if careful or not isinstance(decision, Change) or decision.refunded:  # a refund may be on record as one of the merchant's own
            booked = await booked_before(tx, origin, verdict)
            if booked and booked.writer_id == origin.writer_id and origin.claimed and (own := await outcomes.recorded(tx, origin.claimed)):
                return own
            decision = decisions.decide(order, verdict, origin.source_id, booked, refundable)
        ending = _ending(origin, verdict, order, decision)
        staged = []
        if not isinstance(decision, Nothing):
            await book(tx, origin, verdict, order, decision, new_id=ids.new(db.clock.now()))
            staged += order_events(verdict, order, origin.source_id, decision)
        if origin.claimed:
            await outcomes.end(tx, origin.claimed, ending)
        if origin.claimed or await outcomes.file(tx, origin.finding, origin.provider, ending):
            staged += outcomes.announcement(origin.finding, ending, order.now)
        await outbox.stage(tx, db.clock, origin.tenant_id, staged)
        if effect and isinstance(decision, Change):
            await merchant_effect(tx, effect, told(origin, verdict, order, decision))
    _report(origin, ending)
    return ending.outcome


async def _lock_order(tx: Transaction, tenant_id: str, order_id: str) -> LockedOrder | None:
    """The order, locked. An order that is not there cannot be locked: its slot can, and then a new statement looks again."""
    if order := await orders.lock(tx, tenant_id, order_id):
        return order
    await orders.lock_slot(tx, tenant_id, order_id)
    return await orders.lock(tx, tenant_id, order_id)


async def _without_order(tx: Transaction, clock: Clock, origin: Origin, verdict: Confirmed) -> DeliveryOutcome:
    """Parked until its order is created, or held when it has waited for the whole parking time. Under the slot's lock."""
    if origin.claimed is None:
        return DeliveryOutcome.PARKED
    ending = _found(verdict, DeliveryOutcome.PARKED)
    if not origin.parking_over:
        await outcomes.park(tx, origin.claimed, ending)
    else:
        ending = ending.because(DeliveryOutcome.HELD, "order_unknown")
        await outcomes.end(tx, origin.claimed, ending)
        now = await tx.value("SELECT ipn_now()")
        await outbox.stage(tx, clock, origin.tenant_id, outcomes.announcement(origin.claimed, ending, now))
    outcomes.report(origin.claimed, ending)
    return ending.outcome


async def booked_before(tx: Transaction, origin: Origin, verdict: Confirmed) -> Booked | None:
    """What is booked for the operation, read after the lock: its ledger row, else a payment or refund that the provider calls the same."""
    return await tx.one(
        Booked,
        """(SELECT 'ledger' AS kind, order_id, amount, currency, writer_id FROM processed_notifications
             WHERE tenant_id = %(tenant_id)s AND source_id = %(source_id)s AND operation_id = %(operation_id)s AND effect = %(effect)s)
           UNION ALL
           (SELECT 'payment', order_id, amount, currency, NULL FROM payments
             WHERE tenant_id = %(tenant_id)s AND provider = %(provider)s AND account_id = %(account_id)s AND %(effect)s = 'paid'
               AND provider_transaction_id = %(provider_transaction_id)s)
           UNION ALL
           (SELECT 'refund', order_id, amount, currency, NULL FROM refunds
             WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND %(effect)s = 'refunded'
               AND provider_refund_id = %(operation_id)s AND status <> 'failed')
           LIMIT 1""",
        _operation(origin, verdict),
    )


async def _refundable(tx: Transaction, origin: Origin, verdict: Confirmed) -> Decimal:
    """What is left of the order's money in the payment that a refund is of. Under the order's lock."""
    if verdict.effect is not Effect.REFUNDED:
        return decisions.NOTHING_REFUNDABLE
    found = await tx.value(
        """SELECT amount - amount_refunded - amount_reserved FROM payments
            WHERE tenant_id = %(tenant_id)s AND provider = %(provider)s AND account_id = %(account_id)s AND order_id = %(order_id)s
              AND provider_transaction_id = %(provider_transaction_id)s AND currency = %(currency)s AND status = 'applied'""",
        _operation(origin, verdict),
    )
    return found or decisions.NOTHING_REFUNDABLE


def _operation(origin: Origin, verdict: Confirmed) -> dict[str, Any]:
    return {
        "tenant_id": origin.tenant_id,
        "source_id": origin.source_id,
        "provider": origin.provider,
        "account_id": verdict.account,
        "operation_id": verdict.operation_id,
        "effect": str(verdict.effect),
        "order_id": verdict.order_id,
        "amount": verdict.amount,
        "currency": verdict.currency,
        "provider_transaction_id": verdict.provider_transaction_id or verdict.operation_id,
    }


def _found(verdict: Confirmed, outcome: DeliveryOutcome, reason: str | None = None) -> Ending:
    known = verdict.effect not in {Effect.UNKNOWN, Effect.INFORMATIVE}
    return Ending(
        outcome,
        reason,
        order_id=verdict.order_id,
        operation_id=verdict.operation_id,
        effect=str(verdict.effect) if known else None,
        amount=verdict.amount,
        currency=verdict.currency,
        answer=verdict.answer,
        confirmed=verdict,
    )


def _ending(origin: Origin, verdict: Confirmed, order: LockedOrder, decision: decisions.Decision) -> Ending:
    """The outcome of the delivery that brought it, with what the order expected beside what the provider confirmed."""
    match decision:
        case Change():
            ending = _found(verdict, DeliveryOutcome.APPLIED)
        case SecondPayment():
            ending = _found(verdict, DeliveryOutcome.CONFLICT, "second_payment")
        case Nothing(outcome=DeliveryOutcome.DUPLICATE) if origin.asserted_effect in NEGATIVE and verdict.effect is Effect.PAID:
            ending = _found(verdict, DeliveryOutcome.STALE)  # a negative whose payment is applied says nothing new
        case Nothing():
            ending = _found(verdict, decision.outcome, decision.reason)
    alert = getattr(decision, "alert", None) or origin.alerts.get(ending.outcome)
    return replace(ending, alert=alert, expected_amount=order.amount, expected_currency=order.currency)


_BOOK = """
WITH ledger AS (
    INSERT INTO processed_notifications
           (tenant_id, source_id, operation_id, effect, order_id, amount, currency, booked, origin, writer_id)
    VALUES (%(tenant_id)s, %(source_id)s, %(operation_id)s, %(effect)s, %(order_id)s, %(amount)s, %(currency)s, %(booked)s, %(origin)s,
            %(writer_id)s)
    ON CONFLICT ON CONSTRAINT processed_notifications_pkey DO NOTHING
    RETURNING operation_id
), payment AS (
    INSERT INTO payments (tenant_id, id, order_id, source_id, provider, account_id, provider_transaction_id, operation_id, status, amount,
                          currency, settled_amount, settled_currency, net_amount, paid_at)
    SELECT %(tenant_id)s, %(new_id)s, %(order_id)s, %(source_id)s, %(provider)s, %(account_id)s, %(provider_transaction_id)s,
           operation_id, %(booked)s, %(amount)s, %(currency)s, %(settled_amount)s, %(settled_currency)s, %(net_amount)s, %(paid_at)s
      FROM ledger WHERE %(effect)s = 'paid'
), refunded AS (
    UPDATE payments SET amount_refunded = amount_refunded + %(amount_refunded)s
      FROM ledger WHERE %(effect)s = 'refunded' AND tenant_id = %(tenant_id)s AND provider = %(provider)s AND account_id = %(account_id)s
       AND provider_transaction_id = %(provider_transaction_id)s
    RETURNING payments.id, ledger.operation_id
), refund AS (
    INSERT INTO refunds (tenant_id, id, order_id, payment_id, reference, amount, currency, status, provider_refund_id)
    SELECT %(tenant_id)s, %(new_id)s, %(order_id)s, id, 'provider:' || operation_id, %(amount)s, %(currency)s, 'succeeded', operation_id
      FROM refunded
), changed AS (
    UPDATE orders SET status = %(status)s, reason = %(reason)s, amount_paid = amount_paid + %(amount_added)s,
                      amount_refunded = amount_refunded + %(amount_refunded)s,
                      event_count = event_count + %(events)s, updated_at = ipn_now()
      FROM ledger WHERE orders.tenant_id = %(tenant_id)s AND orders.order_id = %(order_id)s
), swept AS (
    DELETE FROM sweeps USING ledger WHERE %(settled)s AND tenant_id = %(tenant_id)s AND order_id = %(order_id)s
)
SELECT count(*) FROM ledger
"""


async def book(
    tx: Transaction, origin: Origin, verdict: Confirmed, order: LockedOrder, decision: Change | SecondPayment, *, new_id: UUID
) -> None:
    """Ledger row, payment or refund (`new_id`), and order in one statement. Raises `BookedBefore` when the ledger knows the operation."""
    after = _after(order, verdict, decision)
    row = _operation(origin, verdict) | {
        "origin": origin.kind,
        "writer_id": origin.writer_id,
        "booked": "applied" if isinstance(decision, Change) else "unapplied",
        "new_id": new_id,
        "settled_amount": verdict.settled_amount,
        "settled_currency": verdict.settled_currency,
        "net_amount": verdict.net_amount,
        "paid_at": verdict.paid_at,
        "status": after.status,
        "reason": after.reason,
        "amount_added": after.amount_paid - order.amount_paid,
        "amount_refunded": after.amount_refunded - order.amount_refunded,
        "events": len(_event_types(decision)),
        "settled": decisions.RANK[after.status] >= decisions.RANK[OrderStatus.PAID_ON_HOLD],
    }
    if await tx.value(_BOOK, row) == 0:
        raise BookedBefore


def _after(order: LockedOrder, verdict: Confirmed, decision: Change | SecondPayment) -> LockedOrder:
    """The order with the status, reason and sums that it has after the decision."""
    if isinstance(decision, SecondPayment):
        return order
    amount = verdict.amount or Decimal()
    return replace(
        order,
        status=str(decision.status),
        reason=decision.reason,
        amount_paid=order.amount_paid + amount * decision.paid,
        amount_refunded=order.amount_refunded + amount * decision.refunded,
    )


def _event_types(decision: Change | SecondPayment) -> list[str]:
    return decision.event_types if isinstance(decision, Change) else ["order.overpaid"]


def order_events(verdict: Confirmed, order: LockedOrder, source_id: str, decision: Change | SecondPayment) -> list[events.NewEvent]:
    """The events of a ledger row: their cause is the ledger's key."""
    after = _after(order, verdict, decision)
    cause = (source_id, verdict.operation_id, str(verdict.effect))
    order = replace(order, amount_paid=after.amount_paid, amount_refunded=after.amount_refunded)
    staged = []
    for event_type in _event_types(decision):
        staged.append(outbox.order_event(order, event_type, cause, status=after.status, reason=after.reason, verdict=verdict))
        order = replace(order, status=after.status, event_count=order.event_count + 1)
    return staged


def told(origin: Origin, verdict: Confirmed, order: LockedOrder, decision: Change) -> EffectNotification:
    """What the merchant's effect is told about a change."""
    return EffectNotification(
        order_id=order.order_id,
        effect=str(verdict.effect),
        status=str(decision.status),
        previous_status=order.status,
        amount=verdict.amount,
        currency=verdict.currency,
        operation_id=verdict.operation_id,
        source=origin.source_id,
        metadata=order.metadata,
    )


async def merchant_effect(tx: Transaction, effect: EffectHook, notification: EffectNotification) -> None:
    """Call the merchant's effect under a statement limit. A deadlock or a lost connection is ours to run again; the rest is its failure.

    Its deferred constraints are checked here and not at COMMIT, and a transaction that it broke or ended is its failure too.
    """
    await tx.execute(f"SET LOCAL statement_timeout = '{EFFECT_TIMEOUT_SECONDS}s'")
    try:
        await effect(tx.connection, notification)
        await tx.execute("SET CONSTRAINTS ALL IMMEDIATE")
        refuse_silent_rollback(tx.connection)
    except (pg.SerializationFailure, pg.DeadlockDetected):
        raise
    except Exception as error:
        if lost(error, tx.connection):
            raise
        raise EffectFailed(error_class=type(error).__name__, operation_id=notification.operation_id) from error


def _report(origin: Origin, ending: Ending) -> None:
    if origin.claimed:
        outcomes.report(origin.claimed, ending)
        return
    logs.count(f"sweeps.{ending.outcome}")
    log = logs.get("sweep")
    write = log.error if ending.outcome in outcomes.WAITING_FOR_A_PERSON else log.info
    write(
        "sweep.found",
        source=origin.source_id,
        order_id=ending.order_id,
        operation_id=ending.operation_id,
        outcome=str(ending.outcome),
        reason=ending.reason,
    )
