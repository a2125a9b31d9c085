"""Who did what by hand or by timer. Rows are only ever added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

from ipn_gateway import ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from ipn_gateway.db import Transaction


async def record(
    tx: Transaction,
    tenant_id: str,
    *,
    actor: str,
    action: str,
    target: str,
    now: datetime,
    reason: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> UUID:
    """Add an entry in the transaction of the act itself; its id, which is also the cause of an event that the act leads to.

    `actor` is `key:…` for an API key, `cli:…` for who ran a command, or the name of a role; `action` is a `noun.verb`, `target` the public
    id of what was acted on; `now` (host time) only goes into the id. `details` hold no secrets.
    """
    entry_id = ids.new(now)
    await tx.execute(
        """INSERT INTO audit_log (tenant_id, id, actor, action, target, reason, details)
           VALUES (%(tenant_id)s, %(id)s, %(actor)s, %(action)s, %(target)s, %(reason)s, %(details)s)""",
        {
            "tenant_id": tenant_id,
            "id": entry_id,
            "actor": actor,
            "action": action,
            "target": target,
            "reason": reason,
            "details": Jsonb(dict(details or {})),
        },
    )
    return entry_id


async def known(tx: Transaction, tenant_id: str, *, action: str, target: str) -> bool:
    """Whether this was done to the target before."""
    found = await tx.value(
        """SELECT EXISTS (SELECT FROM audit_log WHERE tenant_id = %(tenant_id)s AND target = %(target)s AND action = %(action)s)""",
        {"tenant_id": tenant_id, "target": target, "action": action},
    )
    return bool(found)


async def record_each(
    tx: Transaction, tenant_id: str, targets: Sequence[str], *, actor: str, action: str, now: datetime, reason: str | None = None
) -> None:
    """Add an entry for each target of one act on many."""
    await tx.execute(
        """INSERT INTO audit_log (tenant_id, id, actor, action, target, reason)
           SELECT %(tenant_id)s, id, %(actor)s, %(action)s, target, %(reason)s FROM unnest(%(ids)s::uuid[], %(targets)s::text[])
                  AS given (id, target)""",
        {
            "tenant_id": tenant_id,
            "ids": [ids.new(now) for _ in targets],
            "targets": list(targets),
            "actor": actor,
            "action": action,
            "reason": reason,
        },
    )
