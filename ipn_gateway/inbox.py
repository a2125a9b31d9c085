"""The inbox worker: claim due notification deliveries, ask the provider, apply; one function per step, no transaction across the call.

A lease says who works on a row, a fence that grows with each lease makes late writes count for nothing. Proved deliveries go first;
those that prove nothing are asked about at most once a second and source. After five unknown answers in a row a source is probed by one
delivery at a time, at most once a second; its first clear answer makes all that wait due.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, assert_never

import psycopg
from psycopg import errors as pg

from ipn_gateway import claims, ids, logs, outcomes, source_states
from ipn_gateway.bookings import Origin
from ipn_gateway.effects import EffectFailed
from ipn_gateway.errors import CommitUnknown, LeaseLost, Overloaded
from ipn_gateway.inbox_batches import COPIES_ASKING, End, InboxBatches, Wait
from ipn_gateway.outcomes import Ending
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
from ipn_gateway.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from ipn_gateway.claims import Row
    from ipn_gateway.db import Database
    from ipn_gateway.effects import EffectHook
    from ipn_gateway.settings import Settings
    from ipn_gateway.slots import Slots
    from ipn_gateway.sources import SourceAccount, Sources
    from ipn_gateway.transport import Transport

SLOTS: Final = 2 * claims.LEASED_PER_TENANT  # waiting for a provider is cheap, and no tenant holds more than half
UNCONFIRMED_SECONDS: Final = 3600.0
LOCKED_WAIT_SECONDS: Final = 5.0  # until what found its order held by somebody is tried again
COPY_WAIT_SECONDS: Final = 5.0


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
    together: InboxBatches = field(init=False)
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        """The batches and turns of this worker."""
        object.__setattr__(self, "together", InboxBatches(self.db, self.effect))
        object.__setattr__(self, "turns", Turns(claims.IN_FLIGHT_PER_SOURCE, unanswered_max=source_states.PROBING_FROM))

    @property
    def turn_seconds(self) -> float:
        """How long a delivery waits for its turn at most: the question and what follows it must end within the lease."""
        return (self.settings.inbox_lease_seconds - self.settings.provider_timeout_seconds) / 2


async def run_once(worker: Worker) -> int:
    """Claim what is due, as much as slots are free, and start work on it; how many were claimed."""
    lease, parking = worker.settings.inbox_lease_seconds, worker.settings.parking_hours
    claimed = 0
    for claim in (claims.proved, claims.unproved):
        rows = await claim(worker.db, limit=worker.slots.free, lease_seconds=lease, parking_hours=parking)
        claimed += len(rows)
        for row in rows:  # started together, they look up together
            worker.slots.start(work(worker, row), name=f"inbox {row.notification_delivery_id}")
        if rows and not rows[0].unproved_waits:
            break
    return claimed


async def work(worker: Worker, row: Row) -> None:
    """Bring one claimed delivery as far as it goes. Contained: what goes wrong is logged and left to the lease."""
    try:
        await _work_or_count(worker, row)
    except LeaseLost:
        logs.count("inbox.lease_lost")
        logs.get("inbox").info("inbox.lease_lost", **_named(row))
    except (Overloaded, CommitUnknown, psycopg.Error) as error:
        logs.get("inbox").warning("inbox.left_to_lease", error_class=type(error).__name__, **_named(row))


async def _work_or_count(worker: Worker, row: Row) -> None:
    """What fails again each time is counted against the schedule, so that it ends as `dead`; an unreachable database is not."""
    try:
        await _work(worker, row)
    except (LeaseLost, Overloaded, CommitUnknown, psycopg.OperationalError):
        raise
    except EffectFailed as error:
        logs.get("inbox").error("effect.failed", **_named(row), **error.context)
        await _ask_again_or_bury(worker, row, "effect_failed", Unknown("effect_failed"))
    except Exception as error:  # noqa: BLE001 - a fault of ours must not leave the delivery to fail for ever
        logs.get("inbox").exception("inbox.failed", error_class=type(error).__name__, **_named(row))
        await _ask_again_or_bury(worker, row, "no_verdict", Unknown("internal_error"))


def _named(row: Row) -> dict[str, str]:
    return {"notification_delivery_id": ids.show(ids.NOTIFICATION_DELIVERY, row.notification_delivery_id)}


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
    if known is True:
        await _end(worker, row, _asserted(assertion, DeliveryOutcome.DUPLICATE))
        return
    if row.copy_id and assertion.effect in NEGATIVE and await _follows_earlier_copy(worker, row, assertion):
        return
    async with worker.turns.turn(row.source_id, seconds=worker.turn_seconds) as line:
        if line is None:
            verdict = None
        else:
            ask = worker.transport.ask_for(timeout_seconds=worker.settings.provider_timeout_seconds)
            verdict = await source.provider.validate(ask, source.config, assertion)
            line.unanswered = line.unanswered + 1 if isinstance(verdict, Unknown) else 0
    if verdict is None:
        await _postpone(worker, row, 0.0, questions=0)
        return
    logs.count("provider.questions")
    await _follow(worker, row, source, assertion, verdict, drifted=known is not None)


async def _known(worker: Worker, row: Row, assertion: Assertion) -> bool | None:
    """Whether the ledger has the posted operation, for the same order and money: only then the provider need not be asked.

    None when it has not. A read may end a repeat; it never decides that something is new.
    """
    if assertion.operation_id is None or assertion.effect is not Effect.PAID:
        return None
    return await worker.together.known.put((row, assertion))


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
    copies = await worker.together.copies.put((row, assertion))
    if len(copies.decided) == COPIES_ASKING and (said := _SAID_BEFORE.get(copies.decided[0])):
        await _end(worker, row, _asserted(assertion, said))
        return True
    if copies.asking == COPIES_ASKING:
        await _postpone(worker, row, COPY_WAIT_SECONDS, questions=0)
        return True
    return False


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
    if worker.effect or await worker.together.applied.put((origin, verdict)) is None:
        try:
            await worker.together.alone.put((origin, verdict))
        except pg.LockNotAvailable:
            logs.count("inbox.order_locked")
            logs.get("inbox").warning("inbox.order_locked", order_id=verdict.order_id, **_named(row))
            await _postpone(worker, row, LOCKED_WAIT_SECONDS)
            return
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
    await worker.together.ended.put(End(claimed, ending, row.now, sweep_order_id))
    outcomes.report(claimed, ending)
    if ending.outcome in outcomes.WAITING_FOR_A_PERSON:
        worker.applied()


async def _postpone(worker: Worker, row: Row, wait_seconds: float, *, asked: int = 0, refuted: int = 0, questions: int = 1) -> None:
    """Give the lease back and be due again after the wait."""
    await worker.together.postponed.put(Wait(row, wait_seconds, asked=asked, refuted=refuted, questions=questions))


async def release_parked(db: Database, *, parking_hours: float) -> int:
    """Make due what has waited for the whole parking time, and, as a belt, what is parked although its order is there; how many."""
    async with db.transaction("inbox.release_parked") as tx:
        return await tx.execute(
            """UPDATE inbox SET state = 'received', due_at = ipn_now()
                WHERE state = 'parked' AND (parked_at <= ipn_now() - %(hours)s * interval '1 hour'
                   OR EXISTS (SELECT FROM orders o WHERE o.tenant_id = inbox.tenant_id AND o.order_id = inbox.order_id))""",
            {"hours": parking_hours},
        )
