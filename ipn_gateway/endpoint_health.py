"""What becomes of an endpoint that is gone or has been failing for days: its owner is warned, then it is disabled, and told about.

A person may disable one as well. Nothing is lost by that: what waits for it stays pending, and is sent when a person enables it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ipn_gateway import addresses, audit, endpoints, events, ids, logs, outbox
from ipn_gateway.errors import NotFound
from ipn_gateway.operations import Downstream, Operation

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction

DISABLE: Final = Operation(name="POST /v1/endpoints/{endpoint_id}/disable", fields={"reason": "json"}, downstream=Downstream.LOCAL)

BY_HAND: Final = "manual"
"""The `disabled_reason` of what a person has disabled."""

WARNED_AFTER_DAYS: Final = (1, 3)
"""After so long with nothing but failure the owner of an endpoint is warned."""

DISABLED_AFTER_DAYS: Final = 5
"""After so long with nothing but failure it is disabled."""


@dataclass(frozen=True, slots=True)
class Failing:
    """An endpoint with nothing but failures for so many days, one of `WARNED_AFTER_DAYS`, and whether it is to be disabled."""

    tenant_id: str
    id: UUID
    url: str
    days: int
    over: bool


# Whoever is disabled fails still: an attempt failed and waits for its next one. Where nothing waits there is nothing to hold back either.
_FAILING: Final = """
SELECT * FROM (
    SELECT s.tenant_id, e.id, e.url, failing.days, (failing.days > s.warned_days) IS NOT FALSE AS to_be_warned,
           s.failing_since <= ipn_now() - %(disabled_after)s * interval '1 day'
             AND (SELECT d.next_attempt_at FROM event_deliveries AS d
                   WHERE d.tenant_id = s.tenant_id AND d.endpoint_id = s.endpoint_id AND d.next_attempt_at IS NOT NULL
                   ORDER BY d.next_attempt_at DESC LIMIT 1) > ipn_now() IS TRUE AS over
      FROM (SELECT *, extract(epoch FROM warned_at - failing_since) / 86400 AS warned_days FROM endpoint_states) AS s
      JOIN endpoints AS e ON e.tenant_id = s.tenant_id AND e.id = s.endpoint_id AND e.status = 'enabled' AND e.deleted_at IS NULL
     CROSS JOIN LATERAL (
        SELECT max(warned.days) AS days FROM unnest(%(warned_after)s::int[]) AS warned (days)
         WHERE s.failing_since <= ipn_now() - warned.days * interval '1 day') AS failing
     WHERE failing.days IS NOT NULL) AS found
 WHERE to_be_warned OR over
"""


async def run_once(db: Database) -> int:
    """Warn of and disable what has been failing for too long; how many. Safe to run at once anywhere."""
    given = {"warned_after": list(WARNED_AFTER_DAYS), "disabled_after": DISABLED_AFTER_DAYS}
    async with db.autocommit("endpoint_health.failing") as tx:
        found = await tx.all(Failing, f"SELECT tenant_id, id, url, days, over FROM ({_FAILING}) AS failing", given)
    for failing in found:
        await db.rerun(_disable if failing.over else _warn, db, failing)
    return len(found)


async def _warn(db: Database, failing: Failing) -> None:
    async with db.transaction("endpoint_health.warn") as tx:
        since: datetime | None = await tx.value(
            """UPDATE endpoint_states SET warned_at = ipn_now()
                WHERE tenant_id = %(tenant_id)s AND endpoint_id = %(id)s AND failing_since <= ipn_now() - %(days)s * interval '1 day'
                  AND (warned_at < failing_since + %(days)s * interval '1 day') IS NOT FALSE
            RETURNING failing_since""",
            {"tenant_id": failing.tenant_id, "id": failing.id, "days": failing.days},
        )
        if since is None:
            return  # it has recovered, or somebody else was first
        shown = ids.show(ids.ENDPOINT, failing.id)
        details = {"failing_since": events.timestamp(since), "days": failing.days, "disabled_after_days": DISABLED_AFTER_DAYS}
        await audit.record(
            tx, failing.tenant_id, actor="maintenance", action="endpoint.warn", target=shown, now=db.clock.now(), details=details
        )
    logs.count("endpoints.warned")
    logs.get("endpoint_health").warning("endpoint.failing", tenant_id=failing.tenant_id, endpoint_id=shown, **details)


async def _disable(db: Database, failing: Failing) -> None:
    async with db.transaction("endpoint_health.disable") as tx:
        row = {"tenant_id": failing.tenant_id, "id": failing.id, "disabled_after": DISABLED_AFTER_DAYS}
        await tx.execute("SELECT FROM endpoints WHERE tenant_id = %(tenant_id)s AND id = %(id)s FOR NO KEY UPDATE", row)
        still = await tx.value(
            """SELECT failing_since <= ipn_now() - %(disabled_after)s * interval '1 day' FROM endpoint_states
                WHERE tenant_id = %(tenant_id)s AND endpoint_id = %(id)s FOR NO KEY UPDATE""",
            row,
        )
        if still:
            await disable(tx, db.clock, failing.tenant_id, failing.id, url=failing.url, reason="failing", actor="maintenance")


async def disable_by_hand(db: Database, tenant_id: str, endpoint_id: UUID, *, actor: str, reason: str | None = None) -> None:
    """Send nothing more to it until a person enables it. One that is disabled already stays as it is. Raises `NotFound`."""

    async def once() -> None:
        async with db.transaction("endpoints.disable") as tx:
            await disable_by_hand_in(tx, db.clock, tenant_id, endpoint_id, actor=actor, reason=reason)

    await db.rerun(once)


async def disable_by_hand_in(tx: Transaction, clock: Clock, tenant_id: str, endpoint_id: UUID, *, actor: str, reason: str | None) -> None:
    """The same as part of a transaction."""
    url: str | None = await tx.value(
        "SELECT url FROM endpoints WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND deleted_at IS NULL FOR NO KEY UPDATE",
        {"tenant_id": tenant_id, "id": endpoint_id},
    )
    if url is None:
        raise NotFound
    await disable(tx, clock, tenant_id, endpoint_id, url=url, reason=BY_HAND, actor=actor, why=reason)


async def disable(
    tx: Transaction, clock: Clock, tenant_id: str, endpoint_id: UUID, *, url: str, reason: str, actor: str, why: str | None = None
) -> None:
    """Send nothing more to it until a person enables it, and tell the tenant's other endpoints. Once: of one that is disabled, nothing.

    `why` is what a person said about it, for the audit log.
    """
    moment = await endpoints.disable(tx, tenant_id, endpoint_id, reason)
    if moment is None:
        return
    shown = ids.show(ids.ENDPOINT, endpoint_id)
    event_id = ids.event_id(tenant_id, "endpoint.disabled", shown, events.timestamp(moment))
    data = events.EndpointData(endpoint_id=shown, url=addresses.origin(url), reason=reason)
    told = [events.new(event_id, "endpoint.disabled", moment, data)]
    await outbox.stage(tx, clock, tenant_id, told, but_to=endpoint_id)
    await audit.record(tx, tenant_id, actor=actor, action="endpoint.disable", target=shown, now=clock.now(), reason=why or reason)
    logs.count("endpoints.disabled")
    logs.get("endpoint_health").warning("endpoint.disabled", tenant_id=tenant_id, endpoint_id=shown, reason=reason, event_id=event_id)
