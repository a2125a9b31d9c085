"""Apply: one transaction that writes the ledger row, the order, the payment, the events and the delivery's outcome, or nothing.

1. Lock the order; where there is none, lock its slot and look again.
2. Decide (a pure function, `decisions.decide`).
3. Book what was decided in one statement (`bookings`); end the delivery; stage the events; call `IPN_EFFECT`.

`apply_together` does the same for a set, by the same statements, for what is plain; the rules for all the rest are in `apply` alone.

A change is written without asking whether the operation is new: the ledger's primary key and the payments' unique key say when it is
not, and then the transaction is run again, reading what is booked under the lock. A run that meets its own earlier commit ends as that.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from decimal import Decimal  # noqa: TC003 - field of what is public
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import psycopg
from psycopg import errors as pg

from ipn_gateway import bookings, columns, decisions, ids, logs, orders, outbox, outcomes
from ipn_gateway.bookings import BookedBefore, Booking, Origin, booked_before, refundable, says_booked
from ipn_gateway.db import LOCK_TIMEOUT_SECONDS, lost, refuse_silent_rollback
from ipn_gateway.decisions import Change, LockedOrder, Nothing, SecondPayment
from ipn_gateway.errors import ConfigurationError, GatewayError
from ipn_gateway.outcomes import Ending
from ipn_gateway.providers.base import NEGATIVE, Confirmed, Effect
from ipn_gateway.states import DeliveryOutcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction

EFFECT_TIMEOUT_SECONDS: Final = 5
ORDER_WAIT_SECONDS: Final = 0.1  # a worker's transactions are few, and none is kept from others by an order that somebody holds


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

    Raises `LeaseLost` when another worker holds the delivery, `EffectFailed` when the merchant's effect raised, `LockNotAvailable` when
    somebody holds its order, and `Overloaded` when the database could not take it; nothing is written then.
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
        order = await _lock_order(tx, origin, verdict.order_id)
        if order is None:
            return await _without_order(tx, db.clock, origin, verdict)
        left = await refundable(tx, origin, verdict)
        decision = decisions.decide(order, verdict, origin.source_id, None, left)
        if careful or not _is_plain(decision):
            booked = await booked_before(tx, origin, verdict)
            if booked and booked.writer_id == origin.writer_id and origin.claimed and (own := await outcomes.recorded(tx, origin.claimed)):
                return own
            decision = decisions.decide(order, verdict, origin.source_id, booked, left)
        ending = _ending(origin, verdict, order, decision)
        booking = None if isinstance(decision, Nothing) else Booking(origin, verdict, order, decision, ids.new(db.clock.now()))
        if booking:
            await bookings.book(tx, booking)
        staged = booking.events() if booking else []
        if origin.claimed:
            await outcomes.end(tx, origin.claimed, ending)
        if origin.claimed or await outcomes.file(tx, origin.finding, origin.provider, ending):
            staged += outcomes.announcement(origin.finding, ending, order.now)
        await outbox.stage(tx, db.clock, origin.tenant_id, staged)
        if effect and booking and isinstance(decision, Change):
            await merchant_effect(tx, effect, told(booking))
    _report(origin, ending)
    return ending.outcome


def _is_plain(decision: decisions.Decision) -> TypeGuard[Change]:
    """Whether it can be written without reading what is booked. A refund may be on record as one of the merchant's own."""
    return isinstance(decision, Change) and not decision.refunded


async def apply_together(db: Database, confirmed: Sequence[tuple[Origin, Confirmed]]) -> list[DeliveryOutcome | None]:
    """Apply the plain ones among a set of claimed deliveries in one transaction, no two of them about one order.

    `None` is for what the set leaves out, to be applied by itself: an order that is missing or locked by somebody, a lease that is lost, an
    operation that is booked or changes nothing or is a refund; and our own end, when it was its COMMIT whose answer was lost.
    """
    try:
        return await db.rerun(_apply_together_once, db, confirmed)
    except pg.UniqueViolation as error:
        if len(confirmed) > 1 or not says_booked(error):
            raise
    return [None]


async def _apply_together_once(db: Database, confirmed: Sequence[tuple[Origin, Confirmed]]) -> list[DeliveryOutcome | None]:
    async with db.transaction("effects.apply_together") as tx:
        locked = await _lock_leased(tx, confirmed)
        found = [
            Booking(origin, verdict, order, decision, ids.new(db.clock.now()))
            for origin, verdict in sorted(confirmed, key=_order_of)
            if (order := locked.get((origin.tenant_id, verdict.order_id)))
            and _is_plain(decision := decisions.decide(order, verdict, origin.source_id, None))
        ]
        new = await bookings.book_all(tx, found) if found else set()
        ends = [
            (booking.origin.finding, _ending(booking.origin, booking.verdict, booking.order, booking.decision))
            for booking in found
            if booking.origin.writer_id in new
        ]
        if ends:
            ended = await outcomes.end_all(tx, ends)
            assert ended == new  # noqa: S101 - their inbox rows are locked, with our fences
            staged = [(one.order.tenant_id, event) for one in found if one.origin.writer_id in new for event in one.events()]
            await outbox.stage_all(tx, db.clock, staged)
    for claimed, ending in ends:
        outcomes.report(claimed, ending)
    return [DeliveryOutcome.APPLIED if origin.writer_id in new else None for origin, _ in confirmed]


def _order_of(confirmed: tuple[Origin, Confirmed]) -> tuple[str, str]:
    origin, verdict = confirmed
    return origin.tenant_id, verdict.order_id


# What somebody holds is passed over and not waited for: one order that is locked for long must not keep the others. LATERAL and LIMIT keep
# it at look-ups: a join would read all orders as long as there are no statistics of them.
_LOCK_LEASED = f"""
SELECT {orders.LOCKED}
  FROM (SELECT * FROM {columns.given(tenant_id="text", order_id="text", delivery_id="uuid", fence="bigint")}
         ORDER BY tenant_id, order_id) AS given
 CROSS JOIN LATERAL (
        SELECT * FROM orders WHERE orders.tenant_id = given.tenant_id AND orders.order_id = given.order_id
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS o
 CROSS JOIN LATERAL (
        SELECT FROM inbox
         WHERE inbox.tenant_id = given.tenant_id AND inbox.notification_delivery_id = given.delivery_id
           AND inbox.fence = given.fence AND inbox.lease_expires_at IS NOT NULL
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS leased
"""


async def _lock_leased(tx: Transaction, confirmed: Sequence[tuple[Origin, Confirmed]]) -> dict[tuple[str, str], LockedOrder]:
    """The orders, each locked together with the inbox row of its delivery, whose lease is ours."""
    rows = [
        {
            "tenant_id": origin.tenant_id,
            "order_id": verdict.order_id,
            "delivery_id": origin.finding.delivery_id,
            "fence": origin.finding.fence,
        }
        for origin, verdict in confirmed
    ]
    found = await tx.all(LockedOrder, _LOCK_LEASED, columns.arrays(rows))
    return {(order.tenant_id, order.order_id): order for order in found}


async def _lock_order(tx: Transaction, origin: Origin, order_id: str) -> LockedOrder | None:
    """The order, locked. An order that is not there cannot be locked: its slot can, and then a new statement looks again."""
    wait = ORDER_WAIT_SECONDS if origin.kind == "notification" else LOCK_TIMEOUT_SECONDS
    if order := await orders.lock(tx, origin.tenant_id, order_id, wait_seconds=wait):
        return order
    await orders.lock_slot(tx, origin.tenant_id, order_id)
    return await orders.lock(tx, origin.tenant_id, order_id, wait_seconds=wait)


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


def _found(
    verdict: Confirmed, outcome: DeliveryOutcome, reason: str | None = None, *, alert: str | None = None, order: LockedOrder | None = None
) -> Ending:
    """What was confirmed, beside what the order expected."""
    known = verdict.effect not in {Effect.UNKNOWN, Effect.INFORMATIVE}
    return Ending(
        outcome,
        reason,
        order_id=verdict.order_id,
        operation_id=verdict.operation_id,
        effect=str(verdict.effect) if known else None,
        amount=verdict.amount,
        currency=verdict.currency,
        expected_amount=order.amount if order else None,
        expected_currency=order.currency if order else None,
        answer=verdict.answer,
        alert=alert,
        confirmed=verdict,
    )


def _ending(origin: Origin, verdict: Confirmed, order: LockedOrder, decision: decisions.Decision) -> Ending:
    """The end of the delivery that brought it."""
    alert: str | None = None
    reason: str | None = None
    match decision:
        case Change():
            outcome = DeliveryOutcome.APPLIED
        case SecondPayment():
            outcome, reason = DeliveryOutcome.CONFLICT, "second_payment"
        case Nothing(outcome=DeliveryOutcome.DUPLICATE) if origin.asserted_effect in NEGATIVE and verdict.effect is Effect.PAID:
            outcome, alert = DeliveryOutcome.STALE, decision.alert  # a negative whose payment is applied says nothing new
        case Nothing():
            outcome, reason, alert = decision.outcome, decision.reason, decision.alert
    return _found(verdict, outcome, reason, alert=alert or origin.alerts.get(outcome), order=order)


def told(booking: Booking) -> EffectNotification:
    """What the merchant's effect is told about a change."""
    verdict = booking.verdict
    return EffectNotification(
        order_id=booking.order.order_id,
        effect=str(verdict.effect),
        status=booking.after.status,
        previous_status=booking.order.status,
        amount=verdict.amount,
        currency=verdict.currency,
        operation_id=verdict.operation_id,
        source=booking.origin.source_id,
        metadata=booking.order.metadata,
    )


async def merchant_effect(tx: Transaction, effect: EffectHook, notification: EffectNotification) -> None:
    """Call the merchant's effect under a statement limit. A deadlock or a lost connection is ours to run again; the rest is its failure.

    Its deferred constraints are checked here and not at COMMIT, and a transaction that it broke or ended is its failure too.
    """
    limits = "SELECT set_config('statement_timeout', %(seconds)s, true), set_config('lock_timeout', %(seconds)s, true)"
    await tx.execute(limits, {"seconds": f"{EFFECT_TIMEOUT_SECONDS}s"})
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
