"""A customer's browser comes back from the provider: what it is told about its order, and how long it waits to hear it.

What the browser carries is taken in as any notification is (`notifications.receive`). Whatever it says, the customer is told what the
order's row says, and `pending` as long as nothing is confirmed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_plus, urlencode, urlsplit

import psycopg

from ipn_gateway import logs
from ipn_gateway.errors import Overloaded
from ipn_gateway.states import UNPAID, OrderStatus

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway.db import Database

LOOK_SECONDS_MIN: Final = 0.02
LOOK_SECONDS_MAX: Final = 0.2
"""How long to wait before looking again: most verdicts are there at once, and one that is not may take long."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an order stands for a customer. `return_url` is the one that its merchant registered; without an order there is none."""

    order_id: str | None = None
    status: str = OrderStatus.PENDING
    return_url: str | None = None
    decided: bool = False  # this return: nothing more is to be waited for
    confirmed: bool = False  # and the provider said what the order says

    @property
    def paid(self) -> bool:
        """Whether money has come, refunded since or not."""
        return self.status not in UNPAID

    def for_customer(self) -> Standing:
        """The same with the status that a customer may be told: `pending` until money has come or the provider has confirmed this return.

        The order's own `failed` would be an earlier attempt's: whoever has just paid would read it as an answer, and pay again.
        """
        return self if self.paid or self.confirmed else replace(self, status=OrderStatus.PENDING)

    @property
    def location(self) -> str | None:
        """Where the browser is sent: the return_url with `order_id` and `status` in its query, in place of what has these names there."""
        if self.return_url is None:
            return None
        ours = {"order_id": self.order_id or "", "status": str(self.status)}
        parts = urlsplit(self.return_url)
        kept = [piece for piece in parts.query.split("&") if piece and unquote_plus(piece.partition("=")[0]) not in ours]
        return parts._replace(query="&".join([*kept, urlencode(ours)])).geturl()


async def told_at_once(db: Database, tenant_id: str, order_id: str | None) -> Standing:
    """For a return that proves nothing: paid if the order is, else pending."""
    return (await _looked(db, tenant_id, order_id, None) or Standing(order_id)).for_customer()


async def told_in_time(db: Database, tenant_id: str, order_id: str | None, delivery_id: UUID | None, *, wait_seconds: float) -> Standing:
    """The order's standing as soon as it is paid or its return is decided, at the latest after `wait_seconds`.

    Nothing is held while it waits: each look is one read on a connection of its own. Another process may be the one that decides.
    """
    until = db.clock.monotonic_seconds() + wait_seconds
    wait, standing = LOOK_SECONDS_MIN, Standing(order_id)
    while True:
        standing = await _looked(db, tenant_id, order_id, delivery_id) or standing
        left = until - db.clock.monotonic_seconds()
        if standing.paid or standing.decided or left <= 0:
            return standing.for_customer()
        await asyncio.sleep(min(wait, left))
        wait = min(wait * 2, LOOK_SECONDS_MAX)


_LOOK: Final = """
SELECT asked.order_id, coalesce(o.status, 'pending') AS status, o.return_url,
       coalesce(d.decided_at IS NOT NULL OR (d.outcome = 'parked' AND o.order_id IS NULL), false) AS decided,
       coalesce(d.outcome IN ('applied', 'duplicate') OR (d.outcome = 'stale' AND d.effect IS NOT NULL), false) AS confirmed
  FROM (SELECT %(tenant_id)s::text AS tenant_id, %(order_id)s::text AS order_id, %(delivery_id)s::uuid AS delivery_id) AS asked
  LEFT JOIN orders o ON o.tenant_id = asked.tenant_id AND o.order_id = asked.order_id
  LEFT JOIN notification_deliveries d ON d.tenant_id = asked.tenant_id AND d.id = asked.delivery_id
"""


async def _looked(db: Database, tenant_id: str, order_id: str | None, delivery_id: UUID | None) -> Standing | None:
    """One look, or None when the database does not answer: the return is stored, so its customer is told to wait and not of our trouble."""
    try:
        async with db.autocommit("returns.look") as tx:
            return await tx.one(Standing, _LOOK, {"tenant_id": tenant_id, "order_id": order_id, "delivery_id": delivery_id})
    except (Overloaded, psycopg.Error) as error:
        logs.count("returns.not_looked")
        logs.get("returns").warning("return.not_looked", error_class=type(error).__name__)
        return None
