"""Orders: registering one with its slot, its sweep and the parked deliveries that waited for it, and the acts of a person on it.

Each is one transaction. An act is safe to repeat, has its entry in the audit log, and tells the subscribers what it changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from psycopg.types.json import Jsonb

from ipn_gateway import audit, ids, logs, outbox
from ipn_gateway.db import LOCK_TIMEOUT_SECONDS
from ipn_gateway.decisions import LockedOrder
from ipn_gateway.errors import NotFound, OrderExists, StateConflict
from ipn_gateway.operations import Downstream, Operation
from ipn_gateway.states import UNPAID, OrderStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from decimal import Decimal
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction


CREATE: Final = Operation(
    name="POST /v1/orders",
    fields={
        "order_id": "json",
        "amount": "decimal",
        "currency": "json",
        "source": "json",
        "return_url": "json",
        "expires_at": "time",
        "metadata": "json",
    },
    downstream=Downstream.LOCAL,
    key_required=True,
    money=True,
)
RELEASE: Final = Operation(
    name="POST /v1/orders/{order_id}/release", fields={"reason": "json"}, downstream=Downstream.LOCAL, key_required=True, money=True
)
CANCEL: Final = Operation(name="POST /v1/orders/{order_id}/cancel", fields={"reason": "json"}, downstream=Downstream.LOCAL, money=True)


@dataclass(frozen=True, slots=True)
class NewOrder:
    """What is owed: amount > 0 in the currency's decimals, checked at the edge."""

    order_id: str
    source: str
    amount: Decimal
    currency: str
    return_url: str | None = None
    expires_at: datetime | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


LOCKED: Final = """
o.tenant_id, o.order_id, o.source_id, o.status, o.reason, o.amount, o.currency, o.amount_paid, o.amount_refunded, o.expires_at, o.metadata,
o.event_count, ipn_now() AS now
"""
"""The columns of a `LockedOrder`, from `orders AS o`."""


async def lock(tx: Transaction, tenant_id: str, order_id: str, *, wait_seconds: float = LOCK_TIMEOUT_SECONDS) -> LockedOrder | None:
    """The order, locked, or None. Raises `LockNotAvailable` after `wait_seconds`, which limit what else the transaction waits for too."""
    return await tx.one(
        LockedOrder,
        f"""WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', %(wait)s, true))
            SELECT {LOCKED} FROM patience CROSS JOIN orders AS o
             WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s FOR UPDATE OF o""",
        {"tenant_id": tenant_id, "order_id": order_id, "wait": f"{round(wait_seconds * 1000)}ms"},
    )


async def lock_slot(tx: Transaction, tenant_id: str, order_id: str) -> None:
    """Lock the row that both sides lock while an order may not exist yet."""
    await tx.execute(
        """INSERT INTO order_slots (tenant_id, order_id) VALUES (%(tenant_id)s, %(order_id)s)
           ON CONFLICT ON CONSTRAINT order_slots_pkey DO UPDATE SET touched = order_slots.touched + 1""",
        {"tenant_id": tenant_id, "order_id": order_id},
    )


async def create(db: Database, tenant_id: str, new: NewOrder, *, sweep_schedule: Sequence[float]) -> int:
    """Register an order in a transaction of its own; how many parked deliveries became due. Raises `OrderExists`."""
    return await db.rerun(_create_once, db, tenant_id, new, ids.new(db.clock.now()), sweep_schedule)


async def _create_once(db: Database, tenant_id: str, new: NewOrder, writer_id: UUID, sweep_schedule: Sequence[float]) -> int:
    async with db.transaction("orders.create") as tx:
        return await create_in(tx, tenant_id, new, writer_id, sweep_schedule=sweep_schedule)


async def create_in(tx: Transaction, tenant_id: str, new: NewOrder, writer_id: UUID, *, sweep_schedule: Sequence[float]) -> int:
    """Register an order; how many parked deliveries became due. `sweep_schedule` is in seconds from now.

    Raises `OrderExists` when the tenant has an order of this id that another `writer_id` made.
    """
    await lock_slot(tx, tenant_id, new.order_id)
    await insert(tx, tenant_id, new, writer_id, first_sweep=sweep_schedule[0] if sweep_schedule else None)
    adopted = await adopt_parked(tx, tenant_id, new.order_id)
    logs.get("orders").info("order.created", order_id=new.order_id, source=new.source, adopted=adopted)
    return adopted


async def insert(tx: Transaction, tenant_id: str, new: NewOrder, writer_id: UUID, *, first_sweep: float | None) -> None:
    """The order and its sweep, which is due after `first_sweep` seconds or at the order's expiry, whichever is first.

    `writer_id` names the call, so that one whose COMMIT was lost on the way back finds its own row; `OrderExists` for another's.
    """
    writer = await tx.value(
        """WITH created AS (
               INSERT INTO orders (tenant_id, order_id, source_id, amount, currency, return_url, expires_at, metadata, writer_id)
               VALUES (%(tenant_id)s, %(order_id)s, %(source)s, %(amount)s, %(currency)s, %(return_url)s, %(expires_at)s, %(metadata)s,
                       %(writer_id)s)
               ON CONFLICT ON CONSTRAINT orders_pkey DO NOTHING
               RETURNING tenant_id, order_id, source_id, expires_at, writer_id
           ), swept AS (
               INSERT INTO sweeps (tenant_id, order_id, source_id, expires_at, due_at)
               SELECT tenant_id, order_id, source_id, expires_at, due_at
                 FROM created, least(ipn_now() + %(first_sweep)s::float8 * interval '1 second', expires_at) AS due_at
                WHERE due_at IS NOT NULL
           )
           SELECT writer_id FROM created
           UNION ALL SELECT writer_id FROM orders WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s""",
        {
            "tenant_id": tenant_id,
            "order_id": new.order_id,
            "source": new.source,
            "amount": new.amount,
            "currency": new.currency,
            "return_url": new.return_url,
            "expires_at": new.expires_at,
            "metadata": Jsonb(new.metadata),
            "writer_id": writer_id,
            "first_sweep": first_sweep,
        },
    )
    if writer != writer_id:
        raise OrderExists(f"The order {new.order_id} exists already; GET /v1/orders/{new.order_id} shows it.")


async def adopt_parked(tx: Transaction, tenant_id: str, order_id: str) -> int:
    """Make the order's parked deliveries due at once; how many. Under the slot's lock neither side can miss the other."""
    return await tx.execute(
        """UPDATE inbox SET state = 'received', due_at = ipn_now()
            WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND state = 'parked'""",
        {"tenant_id": tenant_id, "order_id": order_id},
    )


# --- manual acts

_ONCE_PAID: Final = (OrderStatus.PAID, OrderStatus.PARTIALLY_REFUNDED, OrderStatus.REFUNDED)


async def release(db: Database, tenant_id: str, order_id: str, *, actor: str, reason: str) -> None:
    """Let an order on hold be paid: a person looked at the risk, or accepts the late payment. Releasing it again changes nothing.

    Raises `NotFound`, and `StateConflict` for an order that is not on hold.
    """

    async def once() -> None:
        async with db.transaction("orders.release") as tx:
            await release_in(tx, db.clock, tenant_id, order_id, actor=actor, reason=reason)

    await db.rerun(once)


async def release_in(tx: Transaction, clock: Clock, tenant_id: str, order_id: str, *, actor: str, reason: str) -> None:
    """The same as part of a transaction."""
    order = await _found(tx, tenant_id, order_id)
    if order.status in _ONCE_PAID and await audit.known(tx, tenant_id, action="order.release", target=order_id):
        return
    if order.status != OrderStatus.PAID_ON_HOLD:
        raise StateConflict("Only an order in status paid_on_hold can be released.")
    await _act(tx, clock, order, "order.release", actor=actor, reason=reason, status=OrderStatus.PAID, order_reason=None)


async def cancel(db: Database, tenant_id: str, order_id: str, *, actor: str, reason: str) -> None:
    """Close an order that nobody has paid, for the merchant's own reason: money that still comes is held for a person.

    What the provider cancelled or let expire stays payable until then. Cancelling it again changes nothing. Raises `NotFound`, and
    `StateConflict` for an order that is paid.
    """

    async def once() -> None:
        async with db.transaction("orders.cancel") as tx:
            await cancel_in(tx, db.clock, tenant_id, order_id, actor=actor, reason=reason)

    await db.rerun(once)


async def cancel_in(tx: Transaction, clock: Clock, tenant_id: str, order_id: str, *, actor: str, reason: str) -> None:
    """The same as part of a transaction."""
    order = await _found(tx, tenant_id, order_id)
    if (order.status, order.reason) == (OrderStatus.CANCELLED, "merchant"):
        return
    if order.status not in UNPAID:
        raise StateConflict("Only an order that is not paid can be cancelled; refund this one instead.")
    await _act(tx, clock, order, "order.cancel", actor=actor, reason=reason, status=OrderStatus.CANCELLED, order_reason="merchant")


async def _found(tx: Transaction, tenant_id: str, order_id: str) -> LockedOrder:
    order = await lock(tx, tenant_id, order_id)
    if order is None:
        raise NotFound
    return order


_EVENT_OF: Final = {"order.release": "order.paid", "order.cancel": "order.cancelled"}


async def _act(
    tx: Transaction,
    clock: Clock,
    order: LockedOrder,
    action: str,
    *,
    actor: str,
    reason: str,
    status: OrderStatus,
    order_reason: str | None,
) -> None:
    """The new state, the entry in the audit log, and the event, whose cause is that entry."""
    entry = await audit.record(
        tx,
        order.tenant_id,
        actor=actor,
        action=action,
        target=order.order_id,
        now=clock.now(),
        reason=reason,
        details={"previous_status": order.status, "previous_reason": order.reason},
    )
    await tx.execute(
        """UPDATE orders SET status = %(status)s, reason = %(reason)s, event_count = event_count + 1, updated_at = ipn_now()
            WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s""",
        {"status": str(status), "reason": order_reason, "tenant_id": order.tenant_id, "order_id": order.order_id},
    )
    event = outbox.order_event(order, _EVENT_OF[action], (str(entry),), status=str(status), reason=order_reason)
    await outbox.stage(tx, clock, order.tenant_id, [event])
    logs.get("orders").info(action, order_id=order.order_id, previous_status=order.status, status=str(status), actor=actor)
