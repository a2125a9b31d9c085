"""The inbox worker: claim due notification deliveries, ask the provider, apply; one function per step, no transaction across the call.

A lease says who works on a row, a fence that grows with each lease makes late writes count for nothing. Proved deliveries go first;
those that prove nothing are asked about at most once a second and source. After five unknown answers in a row a source is probed by one
delivery at a time, at most once a second; its first clear answer makes all that wait due.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, assert_never

import psycopg

from ipn_gateway import claims, effects, ids, logs, outbox, outcomes, source_states
from ipn_gateway.effects import EffectFailed, Origin
from ipn_gateway.errors import CommitUnknown, LeaseLost, Overloaded
from ipn_gateway.outcomes import Claimed, Ending
from ipn_gateway.providers.base import (
    NEGATIVE,
    Assertion,
    Confirmed,
    Effect,
    Malformed,
    Refuted,
    Unconfirmed,
    Unknown,
    Verdict,
)
from ipn_gateway.schedule import wait_of
from ipn_gateway.states import DeliveryOutcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from ipn_gateway.claims import Row
    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.effects import EffectHook
    from ipn_gateway.settings import Settings
    from ipn_gateway.slots import Slots
    from ipn_gateway.sources import SourceAccount, Sources
    from ipn_gateway.transport import Transport

SLOTS: Final = 2 * claims.IN_FLIGHT_PER_TENANT  # waiting for a provider is cheap, and no tenant holds more than half
UNCONFIRMED_SECONDS: Final = 3600.0
COPIES_ASKING: Final = 3  # copies of one notification that are asked about at once; the others wait for what those find
COPY_WAIT_SECONDS: Final = 5.0
COPY_SECONDS: Final = 60.0  # for so long an answer about one copy ends the others


@dataclass(frozen=True, slots=True)
class Worker:
    """What an inbox worker works with."""

    db: Database
    sources: Sources
    transport: Transport
    settings: Settings
    slots: Slots
    applied: Callable[[], None]  # told after each commit that may have staged events
    effect: EffectHook | None = None


async def run_once(worker: Worker) -> int:
    """Claim what is due, as much as slots are free, and start work on it; how many were claimed."""
    lease, parking = worker.settings.inbox_lease_seconds, worker.settings.parking_hours
    claimed = 0
    for claim in (claims.proved, claims.unproved):
        rows = await claim(worker.db, limit=worker.slots.free, lease_seconds=lease, parking_hours=parking)
        claimed += len(rows)
        for row in rows:
            worker.slots.start(work(worker, row), name=f"inbox {row.notification_delivery_id}")
    return claimed


async def work(worker: Worker, row: Row) -> None:
    """Bring one claimed delivery as far as it goes. Contained: what goes wrong is logged and left to the lease."""
    try:
        await _work_or_count(worker, row)
    except LeaseLost:
        logs.count("inbox.lease_lost")
        logs.get("inbox").info("inbox.lease_lost", notification_delivery_id=str(row.notification_delivery_id))
    except (Overloaded, CommitUnknown, psycopg.Error) as error:
        logs.get("inbox").warning(
            "inbox.left_to_lease", notification_delivery_id=str(row.notification_delivery_id), error_class=type(error).__name__
        )


async def _work_or_count(worker: Worker, row: Row) -> None:
    """What fails again each time is counted against the schedule, so that it ends as `dead`; an unreachable database is not."""
    try:
        await _work(worker, row)
    except (LeaseLost, Overloaded, CommitUnknown, psycopg.OperationalError):
        raise
    except EffectFailed as error:
        logs.get("inbox").error("effect.failed", notification_delivery_id=str(row.notification_delivery_id), **error.context)
        await _ask_again_or_bury(worker, row, "effect_failed", Unknown("effect_failed"))
    except Exception as error:  # noqa: BLE001 - a fault of ours must not leave the delivery to fail for ever
        logs.get("inbox").exception(
            "inbox.failed", notification_delivery_id=str(row.notification_delivery_id), error_class=type(error).__name__
        )
        await _ask_again_or_bury(worker, row, "no_verdict", Unknown("internal_error"))


async def _work(worker: Worker, row: Row) -> None:
    source = await worker.sources.get(row.source_id)
    if source is None:
        raise LeaseLost(source=row.source_id)  # cannot be: sources are never deleted; the lease brings it back
    said = source.provider.assertions(row.request())
    if isinstance(said, Malformed):
        await _end(worker, row, Ending(DeliveryOutcome.MALFORMED, said.reason))
        return
    assertion = said[0]
    if source.disabled:
        await _end(worker, row, _asserted(assertion, DeliveryOutcome.HELD, "source_disabled"))
    elif assertion.effect is Effect.INFORMATIVE:
        await _end(worker, row, _asserted(assertion, DeliveryOutcome.STALE))
    else:
        await _prove(worker, row, source, assertion)


async def _prove(worker: Worker, row: Row, source: SourceAccount, assertion: Assertion) -> None:
    known = await _known(worker, row, assertion)
    if known is not None and known["same"]:
        ending = _asserted(assertion, DeliveryOutcome.DUPLICATE)
        await _end(worker, row, ending)
        return
    if row.copy_id and assertion.effect in NEGATIVE and await _follows_earlier_copy(worker, row, assertion):
        return
    ask = worker.transport.ask_for(timeout_seconds=worker.settings.provider_timeout_seconds)
    verdict = await source.provider.validate(ask, source.config, assertion)
    logs.count("provider.questions")
    await _follow(worker, row, source, assertion, verdict, drifted=known is not None)


async def _known(worker: Worker, row: Row, assertion: Assertion) -> dict[str, Any] | None:
    """The ledger row of the posted operation, and whether order and money are the same too: only then the provider need not be asked.

    A read may end a repeat; it never decides that something is new.
    """
    if assertion.operation_id is None or assertion.effect is not Effect.PAID:
        return None
    async with worker.db.autocommit("inbox.known") as tx:
        return await tx.one(
            dict,
            """SELECT coalesce(order_id = %(order_id)s AND amount = %(amount)s AND currency = %(currency)s, false) AS same
                 FROM processed_notifications
                WHERE tenant_id = %(tenant_id)s AND source_id = %(source_id)s AND operation_id = %(operation_id)s AND effect = 'paid'""",
            {
                "tenant_id": row.tenant_id,
                "source_id": row.source_id,
                "operation_id": assertion.operation_id,
                "order_id": assertion.order_id,
                "amount": assertion.amount,
                "currency": assertion.currency,
            },
        )


_SAID_BEFORE: Final = {
    "applied": DeliveryOutcome.DUPLICATE,
    "duplicate": DeliveryOutcome.DUPLICATE,
    "stale": DeliveryOutcome.STALE,
}


async def _follows_earlier_copy(worker: Worker, row: Row, assertion: Assertion) -> bool:
    """Whether this copy of a negative needs no question: enough were decided a moment ago, or enough are being asked about.

    Whoever got one signed notification can post it as often as he likes; each copy must not become a question to the provider. A
    repeated payment is known by its operation in the ledger.
    """
    async with worker.db.autocommit("inbox.copies") as tx:
        copies = {
            "tenant_id": row.tenant_id,
            "source_id": row.source_id,
            "order_id": assertion.order_id,
            "id": row.notification_delivery_id,
            "copy_id": row.copy_id,
            "recent": COPY_SECONDS,
            "limit": COPIES_ASKING,
        }
        decided = await tx.all(dict, _DECIDED_COPIES, copies)
        open_ones = await tx.value(_OPEN_COPIES, copies)
    if len(decided) == COPIES_ASKING and (said := _SAID_BEFORE.get(decided[0]["outcome"])):
        await _end(worker, row, _asserted(assertion, said))
        return True
    if open_ones == COPIES_ASKING:
        await _postpone(worker, row, COPY_WAIT_SECONDS, questions=0)
        return True
    return False


_DECIDED_COPIES: Final = """
SELECT outcome FROM notification_deliveries
 WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND source_id = %(source_id)s AND copy_id = %(copy_id)s AND attempts > 0
   AND decided_at > ipn_now() - %(recent)s * interval '1 second' ORDER BY id DESC LIMIT %(limit)s
"""

_OPEN_COPIES: Final = """
SELECT count(*) FROM (
    SELECT FROM inbox JOIN notification_deliveries d ON d.tenant_id = inbox.tenant_id AND d.id = inbox.notification_delivery_id
     WHERE inbox.tenant_id = %(tenant_id)s AND inbox.order_id = %(order_id)s AND inbox.source_id = %(source_id)s AND state = 'received'
       AND d.id < %(id)s AND d.copy_id = %(copy_id)s LIMIT %(limit)s
) AS older
"""


async def _follow(worker: Worker, row: Row, source: SourceAccount, assertion: Assertion, verdict: Verdict, *, drifted: bool) -> None:
    """What a verdict leads to."""
    if not isinstance(verdict, Unknown) and (row.unknown_streak or (row.refuted_streak and isinstance(verdict, Confirmed))):
        await source_states.clear_answer(worker.db, row.source_id, row.unknown_streak, confirmed=isinstance(verdict, Confirmed))
    match verdict:
        case Confirmed():
            await _apply(worker, row, source, assertion, verdict, drifted=drifted)
        case Refuted(final=True):
            await _reject(worker, row, assertion, verdict)
        case Refuted():
            await _ask_again_or_reject(worker, row, assertion, verdict)
        case Unconfirmed():
            await _wait_for_confirmation(worker, row, assertion, verdict)
        case Unknown():
            await source_states.unknown_answer(worker.db, row.source_id, verdict.cause)
            await _ask_again_or_bury(worker, row, "no_verdict", verdict)
        case _:
            assert_never(verdict)


_DRIFTED: Final = "posted fields differ from the ledger, the provider's answer does not"
_UNDATED: Final = "the provider gave no time that can be read, so that of receipt stands for it"


async def _apply(worker: Worker, row: Row, source: SourceAccount, assertion: Assertion, verdict: Confirmed, *, drifted: bool) -> None:
    alerts = {DeliveryOutcome.DUPLICATE: _DRIFTED} if drifted else {}
    if verdict.effect is Effect.PAID and verdict.paid_at is None:
        verdict = replace(verdict, paid_at=row.received_at)
        alerts[DeliveryOutcome.APPLIED] = _UNDATED
    claimed = row.claimed(questions=1)
    origin = Origin(
        row.tenant_id,
        row.source_id,
        source.provider.name,
        row.notification_delivery_id,
        claimed,
        assertion.effect,
        row.parking_over,
        alerts,
    )
    await effects.apply(worker.db, origin, verdict, worker.effect)
    worker.applied()


async def _reject(worker: Worker, row: Row, assertion: Assertion, verdict: Refuted) -> None:
    """Final: refuted often enough, another store, or another order than the post named; that one is asked for at once."""
    ending = _asserted(assertion, DeliveryOutcome.REJECTED, verdict.reason, verdict.answer)
    if assertion.effect is Effect.UNKNOWN and verdict.reason == "refuted" and row.proved:
        ending = ending.because(DeliveryOutcome.HELD, "unknown_status")  # what a word that we do not know means, only a person can say
    await _end(worker, row, ending, questions=1, sweep_order_id=verdict.order_id)
    if verdict.reason == "refuted" and row.proved:  # what anybody can post must not look like a misconfigured source
        await source_states.refuted_answer(worker.db, row.source_id)


async def _ask_again_or_reject(worker: Worker, row: Row, assertion: Assertion, verdict: Refuted) -> None:
    """The next wait of the refuted schedule, then `rejected`; for what proved nothing by itself one refutation is enough."""
    wait = wait_of(worker.settings.refuted_schedule, row.refuted + 1) if row.proved else None
    if wait is None:
        await _reject(worker, row, assertion, verdict)
    else:
        await _postpone(worker, row, wait, refuted=1)


async def _wait_for_confirmation(worker: Worker, row: Row, assertion: Assertion, verdict: Unconfirmed) -> None:
    """A negative that the provider does not confirm within an hour ends without alarm: the sweep and `expires_at` close the order."""
    if row.age_seconds >= UNCONFIRMED_SECONDS:
        await _end(worker, row, _asserted(assertion, DeliveryOutcome.REJECTED, "unconfirmed", verdict.answer), questions=1)
        return
    wait = wait_of(worker.settings.validation_schedule, row.asked + 2) or UNCONFIRMED_SECONDS
    await _postpone(worker, row, min(wait, UNCONFIRMED_SECONDS - row.age_seconds + 1), asked=1)


async def _ask_again_or_bury(worker: Worker, row: Row, reason: str, verdict: Unknown) -> None:
    """The next wait of the validation schedule, whose first is before the first question; then `dead`."""
    wait = wait_of(worker.settings.validation_schedule, row.asked + 2)
    logs.get("inbox").warning(
        "notification.no_verdict",
        notification_delivery_id=ids.show(ids.NOTIFICATION_DELIVERY, row.notification_delivery_id),
        source=row.source_id,
        cause=verdict.cause,
        asked=row.asked + 1,
        wait_seconds=wait,
    )
    if wait is None:
        await _end(worker, row, Ending(DeliveryOutcome.DEAD, reason, answer=verdict.answer or None), questions=1)
    else:
        await _postpone(worker, row, wait, asked=1)


def _asserted(assertion: Assertion, outcome: DeliveryOutcome, reason: str | None = None, answer: Any = None) -> Ending:
    """An end that rests on what was said, for what the provider did not confirm."""
    known = assertion.effect not in {Effect.UNKNOWN, Effect.INFORMATIVE}
    return Ending(
        outcome,
        reason,
        order_id=assertion.order_id,
        operation_id=assertion.operation_id,
        effect=str(assertion.effect) if known else None,
        amount=assertion.amount,
        currency=assertion.currency,
        answer=answer or None,
    )


async def _end(worker: Worker, row: Row, ending: Ending, *, questions: int = 0, sweep_order_id: str | None = None) -> None:
    claimed = row.claimed(questions=questions)
    await worker.db.rerun(_end_once, worker.db, claimed, ending, row.now, sweep_order_id)
    outcomes.report(claimed, ending)
    if ending.outcome in outcomes.WAITING_FOR_A_PERSON:
        worker.applied()


async def _end_once(db: Database, claimed: Claimed, ending: Ending, now: datetime, sweep_order_id: str | None) -> None:
    async with db.transaction("inbox.end") as tx:
        if await outcomes.recorded(tx, claimed):
            return  # our own COMMIT, whose answer was lost
        await outcomes.end(tx, claimed, ending)
        await outbox.stage(tx, db.clock, claimed.tenant_id, outcomes.announcement(claimed, ending, now))
        if sweep_order_id:
            await _sweep_at_once(tx, claimed.tenant_id, sweep_order_id)


async def _sweep_at_once(tx: Transaction, tenant_id: str, order_id: str) -> None:
    await tx.execute(
        """INSERT INTO sweeps (tenant_id, order_id, source_id, created_at, expires_at, due_at)
           SELECT tenant_id, order_id, source_id, created_at, expires_at, ipn_now() FROM orders
            WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND status IN ('pending', 'failed', 'cancelled', 'expired')
           ON CONFLICT ON CONSTRAINT sweeps_pkey DO UPDATE SET due_at = least(sweeps.due_at, excluded.due_at)""",
        {"tenant_id": tenant_id, "order_id": order_id},
    )


async def _postpone(worker: Worker, row: Row, wait_seconds: float, *, asked: int = 0, refuted: int = 0, questions: int = 1) -> None:
    """Give the lease back and be due again after the wait."""
    async with worker.db.transaction("inbox.postpone") as tx:
        kept = await tx.execute(
            """UPDATE inbox SET due_at = ipn_now() + %(wait)s * interval '1 second', lease_expires_at = NULL, asked = asked + %(asked)s,
                                refuted = refuted + %(refuted)s, questions = questions + %(questions)s
                WHERE tenant_id = %(tenant_id)s AND notification_delivery_id = %(id)s AND fence = %(fence)s
                  AND lease_expires_at IS NOT NULL""",
            {
                "wait": wait_seconds,
                "asked": asked,
                "refuted": refuted,
                "questions": questions,
                "tenant_id": row.tenant_id,
                "id": row.notification_delivery_id,
                "fence": row.fence,
            },
        )
    if kept == 0:
        raise LeaseLost(notification_delivery=str(row.notification_delivery_id))


async def release_parked(db: Database, *, parking_hours: float) -> int:
    """Make due what has waited for the whole parking time, and, as a belt, what is parked although its order is there; how many."""
    async with db.transaction("inbox.release_parked") as tx:
        return await tx.execute(
            """UPDATE inbox SET state = 'received', due_at = ipn_now()
                WHERE state = 'parked' AND (parked_at <= ipn_now() - %(hours)s * interval '1 hour'
                   OR EXISTS (SELECT FROM orders o WHERE o.tenant_id = inbox.tenant_id AND o.order_id = inbox.order_id))""",
            {"hours": parking_hours},
        )
