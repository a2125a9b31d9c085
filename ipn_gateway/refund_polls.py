"""Refunds that the provider accepted are asked about until they are final, under a lease, on a published schedule.

Where several processes do it each refund is asked about by one of them at a time, and one that was too slow changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID  # noqa: TC003 - field of a row

import psycopg

from ipn_gateway import ids, logs, orders, refund_outcomes
from ipn_gateway.errors import LeaseLost, Overloaded
from ipn_gateway.providers.base import NoOutcome, RefundCancelled, RefundSucceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.providers.base import RefundStatus
    from ipn_gateway.settings import Settings
    from ipn_gateway.slots import Slots
    from ipn_gateway.sources import Sources
    from ipn_gateway.transport import Transport

SLOTS: Final = 16
IN_FLIGHT_PER_SOURCE: Final = 4
CANDIDATES_MAX: Final = 1000  # the due refunds among which the slots are dealt

DAILY_SECONDS: Final = 86_400
DAYS: Final = 30


@dataclass(frozen=True, slots=True)
class Poller:
    """What the polls work with; `told` is called when there may be an event to deliver."""

    db: Database
    sources: Sources
    transport: Transport
    settings: Settings
    slots: Slots
    told: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Due:
    """A claimed refund that the provider is to be asked about."""

    tenant_id: str
    id: UUID
    order_id: str
    fence: int
    provider_refund_id: str
    provider_transaction_id: str
    source_id: str


# A source whose provider hangs gets its few slots and no more; the others come first, each with its oldest.
_CLAIM: Final = """
WITH late AS MATERIALIZED (
    SELECT first.*, p.source_id, p.provider_transaction_id
      FROM (SELECT r.tenant_id, r.id, r.payment_id, r.due_at, coalesce(r.lease_expires_at > ipn_now(), false) AS leased
              FROM refunds AS r WHERE r.due_at <= ipn_now() ORDER BY r.due_at LIMIT %(candidates)s) AS first
      JOIN payments AS p ON p.tenant_id = first.tenant_id AND p.id = first.payment_id
), ranked AS (
    SELECT late.*, row_number() OVER (PARTITION BY source_id ORDER BY leased DESC, due_at, id) AS nth FROM late
), chosen AS (
    SELECT * FROM ranked WHERE NOT leased AND nth <= %(per_source)s ORDER BY nth, due_at, id LIMIT %(limit)s
), due AS (
    SELECT locked.*, chosen.source_id, chosen.provider_transaction_id FROM chosen CROSS JOIN LATERAL (
        SELECT r.tenant_id, r.id FROM refunds AS r
         WHERE r.tenant_id = chosen.tenant_id AND r.id = chosen.id AND r.due_at <= ipn_now()
           AND (r.lease_expires_at IS NULL OR r.lease_expires_at <= ipn_now())
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS locked
)
UPDATE refunds SET lease_expires_at = ipn_now() + %(lease)s * interval '1 second', fence = refunds.fence + 1
  FROM due WHERE refunds.tenant_id = due.tenant_id AND refunds.id = due.id
RETURNING refunds.tenant_id, refunds.id, refunds.order_id, refunds.fence, refunds.provider_refund_id, due.provider_transaction_id,
          due.source_id"""


async def run_once(poller: Poller) -> int:
    """Claim refunds that are due, as many as slots are free, and start asking; how many were claimed."""
    if poller.slots.free <= 0:
        return 0
    claimed = await claim(poller.db, limit=poller.slots.free, lease_seconds=poller.settings.inbox_lease_seconds)
    for due in claimed:
        poller.slots.start(poll(poller, due), name=f"refund {ids.show(ids.REFUND, due.id)}")
    return len(claimed)


async def claim(db: Database, *, limit: int, lease_seconds: float) -> list[Due]:
    """Take leases on at most `limit` refunds that are due."""
    given = {"limit": limit, "lease": lease_seconds, "per_source": IN_FLIGHT_PER_SOURCE, "candidates": CANDIDATES_MAX}
    async with db.transaction("refund_polls.claim") as tx:
        return await tx.all(Due, _CLAIM, given)


async def poll(poller: Poller, due: Due) -> None:
    """Ask about one refund and write down what was said. Contained: what goes wrong is logged and left to the lease."""
    try:
        answer = await _asked(poller, due)
        await poller.db.rerun(_record, poller, due, answer)
        poller.told()
    except (LeaseLost, Overloaded, psycopg.Error) as error:
        logs.get("refunds").warning("refund_poll.left_to_lease", refund_id=ids.show(ids.REFUND, due.id), error_class=type(error).__name__)


async def _asked(poller: Poller, due: Due) -> RefundStatus:
    source = await poller.sources.get(due.source_id)
    if source is None:
        return NoOutcome("source_unknown", sent=False)
    logs.count("provider.refund_questions")
    ask = poller.transport.ask_for(timeout_seconds=poller.settings.provider_timeout_seconds)
    return await source.provider.refund_status(ask, source.config, due.provider_refund_id, due.provider_transaction_id)


async def _record(poller: Poller, due: Due, answer: RefundStatus) -> None:
    """What the answer means, written once. Raises `LeaseLost` when another process has the refund."""
    async with poller.db.transaction("refund_polls.record") as tx:
        order = await orders.lock(tx, due.tenant_id, due.order_id)
        refund = await refund_outcomes.lock(tx, due.tenant_id, due.id)
        assert order is not None  # noqa: S101 - orders are never deleted
        if refund.fence != due.fence:
            raise LeaseLost(refund_id=refund.public_id)
        if refund.status != "processing":
            return  # by our own commit, whose answer was lost
        if isinstance(answer, RefundSucceeded):
            await refund_outcomes.succeed(tx, poller.db.clock, order, refund)
        elif isinstance(answer, RefundCancelled):
            await refund_outcomes.fail(tx, poller.db.clock, order, refund, failure=answer.code, polled=True)
        elif (wait := next_wait(poller.settings.refund_poll_schedule, refund.polled + 1)) is not None:
            await _ask_again(tx, due, wait)
        else:
            await refund_outcomes.doubt(tx, refund)


def next_wait(schedule: Sequence[float], polled: int) -> float | None:
    """Seconds until the next question, `polled` of which were asked; None when schedule and days are over. Pure."""
    if polled < len(schedule):
        return schedule[polled]
    return DAILY_SECONDS if polled < len(schedule) + DAYS else None


async def _ask_again(tx: Transaction, due: Due, wait_seconds: float) -> None:
    """The lease is given back; without one there is nothing to do, as it was done by our own commit, whose answer was lost."""
    await tx.execute(
        """UPDATE refunds SET due_at = ipn_now() + %(wait)s::float8 * interval '1 second', polled = polled + 1, lease_expires_at = NULL
            WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND lease_expires_at IS NOT NULL""",
        {"wait": wait_seconds, "tenant_id": due.tenant_id, "id": due.id, "fence": due.fence},
    )
