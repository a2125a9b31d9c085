"""What the deliveries that an inbox worker works on at the same time do together: look up, apply, end, and be put off.

Each is one statement, or one transaction, for all that wait for it; each row stands under its own fence, so one that is lost is lost alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from ipn_gateway import columns, effects, outbox, outcomes
from ipn_gateway.batches import Batches
from ipn_gateway.errors import LeaseLost

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.bookings import Origin
    from ipn_gateway.claims import Row
    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.effects import EffectHook
    from ipn_gateway.outcomes import Claimed, Ending
    from ipn_gateway.providers.base import Assertion, Confirmed
    from ipn_gateway.states import DeliveryOutcome

TOGETHER: Final = 64  # in one statement; more gain nothing and hold locks for longer
APPLYING: Final = 2  # sets at once: one is prepared while the other commits, and a silent connection holds up its own set only
ALONE: Final = 4  # transactions at once, for what is applied by itself; the rest of the share's connections is for sets
WAITING_MAX: Final = 2048  # never reached: each delivery in a slot waits in one place at a time
COPIES_ASKING: Final = 3  # copies of one notification that are asked about at once; the others wait for what those find
COPY_SECONDS: Final = 60.0  # for so long an answer about one copy ends the others


@dataclass(frozen=True, slots=True)
class Copies:
    """Earlier copies of a notification, at most `COPIES_ASKING` of a kind."""

    decided: list[str]  # the outcomes of a moment ago, newest first
    asking: int  # those that are open


@dataclass(frozen=True, slots=True)
class End:
    """A decided delivery, when it was claimed, and the order that is asked for at once because of it."""

    claimed: Claimed
    ending: Ending
    now: datetime
    sweep_order_id: str | None


@dataclass(frozen=True, slots=True)
class Wait:
    """A delivery whose lease is given back, to be due again after so many seconds, and what is counted meanwhile."""

    row: Row
    seconds: float
    asked: int
    refuted: int
    questions: int


class InboxBatches:
    """The batches of one worker."""

    def __init__(self, db: Database, effect: EffectHook | None) -> None:
        """`effect` is called for what is applied alone; with one, that is everything."""
        self.known: Batches[tuple[Row, Assertion], bool | None] = Batches(
            partial(_known, db), name="inbox.known", most=TOGETHER, waiting_max=WAITING_MAX
        )
        self.copies: Batches[tuple[Row, Assertion], Copies] = Batches(
            partial(_copies, db), name="inbox.copies", most=TOGETHER, waiting_max=WAITING_MAX
        )
        self.applied: Batches[tuple[Origin, Confirmed], DeliveryOutcome | None] = Batches(
            partial(effects.apply_together, db),
            name="effects.apply_together",
            most=TOGETHER,
            waiting_max=WAITING_MAX,
            writers=APPLYING,
            apart=_order_of,
        )
        self.alone: Batches[tuple[Origin, Confirmed], DeliveryOutcome] = Batches(
            partial(_apply_alone, db, effect), name="effects.apply", most=1, waiting_max=WAITING_MAX, writers=ALONE
        )
        self.ended: Batches[End, None] = Batches(
            partial(_end, db), name="inbox.end", most=TOGETHER, waiting_max=WAITING_MAX, apart=lambda end: end.claimed.delivery_id
        )
        self.postponed: Batches[Wait, None] = Batches(
            partial(_postpone, db),
            name="inbox.postpone",
            most=TOGETHER,
            waiting_max=WAITING_MAX,
            apart=lambda wait: wait.row.notification_delivery_id,
        )

    async def drained(self, *, seconds: float | None = None) -> None:
        """Wait until nothing is being written, at most `seconds` for each kind."""
        for kind in (self.known, self.copies, self.applied, self.alone, self.ended, self.postponed):
            await kind.drained(seconds=seconds)


def _order_of(confirmed: tuple[Origin, Confirmed]) -> tuple[str, str]:
    origin, verdict = confirmed
    return origin.tenant_id, verdict.order_id


async def _apply_alone(db: Database, effect: EffectHook | None, confirmed: Sequence[tuple[Origin, Confirmed]]) -> list[DeliveryOutcome]:
    ((origin, verdict),) = confirmed
    return [await effects.apply(db, origin, verdict, effect)]


# LATERAL and LIMIT keep it at look-ups: a join would read the whole ledger as long as there are no statistics of it.
_KNOWN: Final = f"""
SELECT given.place, p.same
  FROM {
    columns.given(place="int", tenant_id="text", source_id="text", operation_id="text", order_id="text", amount="numeric", currency="text")
} CROSS JOIN LATERAL (
        SELECT coalesce(order_id = given.order_id AND amount = given.amount AND currency = given.currency, false) AS same
          FROM processed_notifications AS p
         WHERE p.tenant_id = given.tenant_id AND p.source_id = given.source_id AND p.operation_id = given.operation_id
           AND p.effect = 'paid' LIMIT 1) AS p
"""


async def _known(db: Database, asserted: Sequence[tuple[Row, Assertion]]) -> list[bool | None]:
    rows = [
        {
            "place": place,
            "tenant_id": row.tenant_id,
            "source_id": row.source_id,
            "operation_id": assertion.operation_id,
            "order_id": assertion.order_id,
            "amount": assertion.amount,
            "currency": assertion.currency,
        }
        for place, (row, assertion) in enumerate(asserted)
    ]
    async with db.autocommit("inbox.known") as tx:
        found = {one["place"]: one["same"] for one in await tx.all(dict, _KNOWN, columns.arrays(rows))}
    return [found.get(place) for place in range(len(asserted))]


_COPIES: Final = f"""
SELECT given.place,
       ARRAY(SELECT d.outcome FROM notification_deliveries AS d
              WHERE d.tenant_id = given.tenant_id AND d.order_id = given.order_id AND d.source_id = given.source_id
                AND d.copy_id = given.copy_id AND d.attempts > 0 AND d.decided_at > ipn_now() - %(recent)s * interval '1 second'
              ORDER BY d.id DESC LIMIT %(limit)s) AS decided,
       (SELECT count(*) FROM (
            SELECT FROM inbox AS i JOIN notification_deliveries AS d ON d.tenant_id = i.tenant_id AND d.id = i.notification_delivery_id
             WHERE i.tenant_id = given.tenant_id AND i.order_id = given.order_id AND i.source_id = given.source_id
               AND i.state = 'received' AND d.id < given.id AND d.copy_id = given.copy_id LIMIT %(limit)s) AS older) AS asking
  FROM {columns.given(place="int", tenant_id="text", source_id="text", order_id="text", id="uuid", copy_id="text")}
"""


async def _copies(db: Database, asserted: Sequence[tuple[Row, Assertion]]) -> list[Copies]:
    rows = [
        {
            "place": place,
            "tenant_id": row.tenant_id,
            "source_id": row.source_id,
            "order_id": assertion.order_id,
            "id": row.notification_delivery_id,
            "copy_id": row.copy_id,
        }
        for place, (row, assertion) in enumerate(asserted)
    ]
    async with db.autocommit("inbox.copies") as tx:
        found = await tx.all(dict, _COPIES, columns.arrays(rows) | {"recent": COPY_SECONDS, "limit": COPIES_ASKING})
    copies = {one["place"]: Copies(one["decided"], one["asking"]) for one in found}
    return [copies[place] for place in range(len(asserted))]


async def _end(db: Database, ends: Sequence[End]) -> list[LeaseLost | None]:
    lost = await db.rerun(_end_once, db, ends)
    return [LeaseLost(notification_delivery=str(end.claimed.delivery_id)) if end.claimed.delivery_id in lost else None for end in ends]


async def _end_once(db: Database, ends: Sequence[End]) -> set[UUID]:
    """Those whose lease was lost. One that has its end already got it from our own COMMIT, whose answer was lost."""
    async with db.transaction("inbox.end") as tx:
        ended = await outcomes.end_all(tx, [(end.claimed, end.ending) for end in ends])
        ours = [end for end in ends if end.claimed.delivery_id in ended]
        events = [(end.claimed.tenant_id, event) for end in ours for event in outcomes.announcement(end.claimed, end.ending, end.now)]
        await outbox.stage_all(tx, db.clock, events)
        for end in ours:
            if end.sweep_order_id:
                await _sweep_at_once(tx, end.claimed.tenant_id, end.sweep_order_id)
        left = [end.claimed for end in ends if end.claimed.delivery_id not in ended]
        return {claimed.delivery_id for claimed in left if not await outcomes.recorded(tx, claimed)}


async def _sweep_at_once(tx: Transaction, tenant_id: str, order_id: str) -> None:
    await tx.execute(
        """INSERT INTO sweeps (tenant_id, order_id, source_id, created_at, expires_at, due_at)
           SELECT tenant_id, order_id, source_id, created_at, expires_at, ipn_now() FROM orders
            WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND status IN ('pending', 'failed', 'cancelled', 'expired')
           ON CONFLICT ON CONSTRAINT sweeps_pkey DO UPDATE SET due_at = least(sweeps.due_at, excluded.due_at)""",
        {"tenant_id": tenant_id, "order_id": order_id},
    )


_POSTPONE: Final = f"""
WITH mine AS (
    SELECT given.* FROM {
    columns.given(tenant_id="text", id="uuid", fence="bigint", wait="float8", asked="int", refuted="int", questions="int")
}
      JOIN inbox ON inbox.tenant_id = given.tenant_id AND inbox.notification_delivery_id = given.id AND inbox.fence = given.fence
                AND inbox.lease_expires_at IS NOT NULL
     ORDER BY inbox.tenant_id, inbox.notification_delivery_id FOR UPDATE OF inbox
)
UPDATE inbox SET due_at = ipn_now() + mine.wait * interval '1 second', lease_expires_at = NULL, asked = inbox.asked + mine.asked,
                 refuted = inbox.refuted + mine.refuted, questions = inbox.questions + mine.questions
  FROM mine WHERE inbox.tenant_id = mine.tenant_id AND inbox.notification_delivery_id = mine.id
RETURNING inbox.notification_delivery_id AS id
"""


async def _postpone(db: Database, waits: Sequence[Wait]) -> list[LeaseLost | None]:
    rows = [
        {
            "tenant_id": wait.row.tenant_id,
            "id": wait.row.notification_delivery_id,
            "fence": wait.row.fence,
            "wait": float(wait.seconds),
            "asked": wait.asked,
            "refuted": wait.refuted,
            "questions": wait.questions,
        }
        for wait in waits
    ]
    async with db.transaction("inbox.postpone") as tx:
        kept = {row["id"] for row in await tx.all(dict, _POSTPONE, columns.arrays(rows))}
    ids = [wait.row.notification_delivery_id for wait in waits]
    return [None if one in kept else LeaseLost(notification_delivery=str(one)) for one in ids]
