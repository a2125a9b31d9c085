"""The sweep: unpaid orders are asked for at their provider on a published schedule and at `expires_at`.

A notification that never came is found here; what is found goes through the same apply, under the same keys, so that racing with the
notification is safe. `ask_about` is the one function that asks about an order and applies what it learns.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - field of a row
from typing import TYPE_CHECKING, Final, Literal

import psycopg

from ipn_gateway import audit, claims, effects, ids, logs, orders, outbox, outcomes, source_states
from ipn_gateway.bookings import Origin
from ipn_gateway.effects import EffectFailed
from ipn_gateway.errors import LeaseLost, Overloaded
from ipn_gateway.providers.base import Confirmed, Unknown
from ipn_gateway.states import UNPAID, OrderStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.decisions import LockedOrder
    from ipn_gateway.effects import EffectHook
    from ipn_gateway.settings import Settings
    from ipn_gateway.slots import Slots
    from ipn_gateway.sources import SourceAccount, Sources
    from ipn_gateway.transport import Transport

SLOTS: Final = 32
IN_FLIGHT_PER_SOURCE: Final = 4
HINT_SECONDS: Final = 60.0  # between two questions about an order that hints lead to
IN_FLIGHT_PER_TENANT: Final = SLOTS // 2

Learned = Literal["clear", "unclear", "money_waits"]

UNCLEAR_SECONDS: Final = 600.0
UNCLEAR_AGE_SECONDS_MAX: Final = 259_200.0  # of an order's age; then the wait is a part of that
UNCLEAR_PER_AGE: Final = 0.1
MONEY_WAITS_SECONDS: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Sweeper:
    """What the sweep works with."""

    db: Database
    sources: Sources
    transport: Transport
    settings: Settings
    slots: Slots
    applied: Callable[[], None]
    effect: EffectHook | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """A claimed sweep: an unpaid order that is due to be asked for."""

    tenant_id: str
    order_id: str
    source_id: str
    fence: int
    age_seconds: float
    expired: bool
    expires_at: datetime | None


_CLAIM = (
    claims.fair_share("sweeps", "order_id")
    + """
UPDATE sweeps SET lease_expires_at = ipn_now() + %(lease)s * interval '1 second', fence = sweeps.fence + 1
  FROM due WHERE sweeps.tenant_id = due.tenant_id AND sweeps.order_id = due.order_id
RETURNING sweeps.tenant_id, sweeps.order_id, sweeps.source_id, sweeps.fence, sweeps.expires_at,
          extract(epoch FROM ipn_now() - sweeps.created_at)::float8 AS age_seconds,
          coalesce(sweeps.expires_at <= ipn_now(), false) AS expired
"""
)


async def run_once(sweeper: Sweeper) -> int:
    """Claim the orders that are due, as many as slots are free, and start asking; how many were claimed."""
    if sweeper.slots.free <= 0:
        return 0
    claimed = await claim(sweeper.db, limit=sweeper.slots.free, lease_seconds=sweeper.settings.inbox_lease_seconds)
    for due in claimed:
        sweeper.slots.start(sweep(sweeper, due), name=f"sweep {due.order_id}")
    return len(claimed)


async def claim(db: Database, *, limit: int, lease_seconds: float) -> list[Due]:
    """Take leases on at most `limit` orders that are due to be asked for."""
    caps = {"per_source": IN_FLIGHT_PER_SOURCE, "per_tenant": IN_FLIGHT_PER_TENANT, "probing_from": source_states.PROBING_FROM}
    async with db.transaction("sweeps.claim") as tx:
        return await tx.all(Due, _CLAIM, {"limit": limit, "lease": lease_seconds, **caps})


async def sweep(sweeper: Sweeper, due: Due) -> None:
    """Ask about one order, then make it due again, or expire it. Contained: what goes wrong is logged and left to the lease."""
    try:
        source = await sweeper.sources.get(due.source_id)
        if source is not None:
            learned = await _learned(sweeper, source, due.order_id)
            await sweeper.db.rerun(_after_asking, sweeper.db, sweeper.settings, due, learned)
            sweeper.applied()
    except (LeaseLost, Overloaded, psycopg.Error) as error:
        logs.get("sweep").warning("sweep.left_to_lease", order_id=due.order_id, error_class=type(error).__name__)


async def _learned(sweeper: Sweeper, source: SourceAccount, order_id: str) -> Learned:
    """Ask. An effect of the merchant's that fails is tried again on the schedule, not with each lease."""
    try:
        return await ask_about(sweeper, source, order_id)
    except EffectFailed as error:
        logs.get("sweep").error("effect.failed", order_id=order_id, **error.context)
        return "unclear"


async def ask_about(sweeper: Sweeper, source: SourceAccount, order_id: str) -> Learned:
    """Ask the provider about an order and apply every operation that it confirms.

    `money_waits` when it confirmed something that only a person can decide: then no timer closes the order.
    """
    ask = sweeper.transport.ask_for(timeout_seconds=sweeper.settings.provider_timeout_seconds)
    verdicts = await source.provider.query(ask, source.config, order_id)
    logs.count("provider.queries")
    found = []
    for verdict in verdicts:
        if isinstance(verdict, Confirmed) and verdict.order_id == order_id:
            origin = Origin(source.tenant_id, source.name, source.provider.name, ids.new(sweeper.db.clock.now()))
            found.append(await effects.apply(sweeper.db, origin, verdict, sweeper.effect))
    if any(isinstance(verdict, Unknown) for verdict in verdicts):
        return "unclear"
    return "money_waits" if outcomes.WAITING_FOR_A_PERSON.intersection(found) else "clear"


async def ask_soon(db: Database, tenant_id: str, order_id: str) -> bool:
    """Make an unpaid order due to be asked for, at most once a minute, for what proves nothing but may be a hint; whether it was made so.

    The slot's row is the meter: it is there as long as the order, while the sweep's comes and goes.
    """
    async with db.transaction("sweeps.ask_soon") as tx:
        made = await tx.execute(
            """WITH allowed AS (
                   UPDATE order_slots SET asked_at = ipn_now()
                    WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s
                      AND (asked_at IS NULL OR asked_at <= ipn_now() - %(every)s * interval '1 second')
                      AND EXISTS (SELECT FROM orders AS o WHERE o.tenant_id = order_slots.tenant_id AND o.order_id = order_slots.order_id
                                     AND o.status = ANY(%(unpaid)s))
                   RETURNING tenant_id, order_id
               ), unpaid AS (
                   SELECT o.tenant_id, o.order_id, o.source_id, o.created_at, o.expires_at FROM orders AS o JOIN allowed
                       ON o.tenant_id = allowed.tenant_id AND o.order_id = allowed.order_id
                    WHERE o.status = ANY(%(unpaid)s) FOR SHARE OF o  -- one that is paid at this moment must not get a sweep again
               )
               INSERT INTO sweeps (tenant_id, order_id, source_id, created_at, expires_at, due_at)
               SELECT tenant_id, order_id, source_id, created_at, expires_at, ipn_now() FROM unpaid
               ON CONFLICT ON CONSTRAINT sweeps_pkey DO UPDATE SET due_at = least(sweeps.due_at, excluded.due_at)""",
            {
                "tenant_id": tenant_id,
                "order_id": order_id,
                "every": HINT_SECONDS,
                "unpaid": [str(status) for status in UNPAID],
            },
        )
    return made > 0


async def _after_asking(db: Database, settings: Settings, due: Due, learned: Learned) -> None:
    async with db.transaction("sweeps.record") as tx:
        order = await orders.lock(tx, due.tenant_id, due.order_id)
        ours = await _reschedule(tx, due, _next_wait(settings, due, learned))
        if ours and due.expired and learned == "clear" and order is not None and order.status == OrderStatus.PENDING:
            await _expire(tx, db.clock, order)


def _next_wait(settings: Settings, due: Due, learned: Learned) -> float | None:
    """Seconds until the order is asked for again; None when the schedule and the expiry are behind it.

    An unclear answer is no end: it is asked again each 10 minutes, as often as a notification would be, and from the third day on after a
    tenth of the order's age, ever more rarely. Nor is one that found money for a person to decide: that is asked about once a day.
    """
    waits = [moment - due.age_seconds for moment in settings.sweep_schedule if moment > due.age_seconds]
    if learned == "unclear":
        waits.append(UNCLEAR_SECONDS if due.age_seconds < UNCLEAR_AGE_SECONDS_MAX else due.age_seconds * UNCLEAR_PER_AGE)
    elif learned == "money_waits":
        waits.append(MONEY_WAITS_SECONDS)
    return min(waits, default=None)


async def _reschedule(tx: Transaction, due: Due, wait_seconds: float | None) -> bool:
    """Whether the sweep is still ours. Fenced: one that was taken over, or whose order was paid meanwhile, changes nothing."""
    changed = await tx.value(
        """WITH next AS (
               SELECT least(ipn_now() + %(wait)s::float8 * interval '1 second',
                            CASE WHEN NOT %(expired)s THEN %(expires_at)s::timestamptz END) AS due_at
           ), over AS (
               DELETE FROM sweeps USING next WHERE next.due_at IS NULL
                  AND tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND fence = %(fence)s
               RETURNING 1
           ), again AS (
               UPDATE sweeps SET due_at = next.due_at, lease_expires_at = NULL
                 FROM next WHERE next.due_at IS NOT NULL
                  AND tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND fence = %(fence)s
               RETURNING 1
           )
           SELECT (SELECT count(*) FROM over) + (SELECT count(*) FROM again)""",
        {
            "wait": wait_seconds,
            "expired": due.expired,
            "expires_at": due.expires_at,
            "tenant_id": due.tenant_id,
            "order_id": due.order_id,
            "fence": due.fence,
        },
    )
    return bool(changed)


async def _expire(tx: Transaction, clock: Clock, order: LockedOrder) -> None:
    """Close an order whose time has passed and that the provider has no payment for; a timed act, with its row in the audit log."""
    entry = await audit.record(
        tx, order.tenant_id, actor="maintenance", action="order.expire", target=order.order_id, now=clock.now(), reason="expires_at"
    )
    await tx.execute(
        """UPDATE orders SET status = 'expired', reason = 'expired', event_count = event_count + 1, updated_at = ipn_now()
            WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND status = 'pending'""",
        {"tenant_id": order.tenant_id, "order_id": order.order_id},
    )
    event = outbox.order_event(order, "order.expired", (str(entry),), status="expired", reason="expired")
    await outbox.stage(tx, clock, order.tenant_id, [event])
