"""What is done with keys beside driving them: shown, doubted when abandoned, decided by a person, and pruned when their time is over."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

from psycopg.types.json import Jsonb

from ipn_gateway import audit, idempotency_keys, ids, logs, objects, validation
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.operations import STARTED, Downstream, Finished, Operation
from ipn_gateway.paging import Column, Listing, moment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.idempotency_keys import Row
    from ipn_gateway.operations import Settlement
    from ipn_gateway.paging import Wanted

RESOLVE: Final = Operation(
    name="POST /v1/idempotency-keys/{key_id}/resolve",
    fields={"decision": "json", "reason": "json", "evidence": "json", "response": "json"},
    downstream=Downstream.LOCAL,
    money=True,
)

PRUNED_AT_ONCE: Final = 1000
DOUBTED_AT_ONCE: Final = 100
UNSENT_HOURS: Final = 24

Decision = Literal["applied", "not_applied"]


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a person found out about an unknown outcome, and why they believe it.

    An operation with a settlement makes the answer from `evidence`; of any other, `response` (status and JSON) is the answer.
    """

    tenant_id: str
    key_id: UUID
    decision: Decision
    actor: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    response: tuple[int, Any] | None = None


# --- shown

_KEYS: Final = Listing(
    "idempotency_keys",
    """SELECT id, operation, key, state, recovery_point, generation, fence, lease_expires_at, indeterminate_at, response_status,
              created_at, expires_at
         FROM idempotency_keys WHERE tenant_id = %(tenant_id)s""",
    key=(Column("created_at", moment), Column("id", UUID)),
    filters={"state": "state = %(state)s", "key": "key = %(key)s", "operation": "operation = %(operation)s"},
)


async def page(
    tx: Transaction, tenant_id: str, wanted: Wanted, *, state: str | None, key: str | None, operation: str | None
) -> objects.Page[objects.IdempotencyKey]:
    """The tenant's keys, newest first."""
    given = {"tenant_id": tenant_id, "state": state, "key": key, "operation": operation}
    rows, next_cursor = await _KEYS.page(tx, wanted, given)
    return objects.Page(items=[_shown(row) for row in rows], next_cursor=next_cursor)


async def shown(tx: Transaction, tenant_id: str, key_id: UUID) -> objects.IdempotencyKey:
    """One key. Raises `NotFound`."""
    row = await tx.one(dict, f"SELECT * FROM ({_KEYS.select}) AS listed WHERE id = %(id)s", {"tenant_id": tenant_id, "id": key_id})
    if row is None:
        raise NotFound
    return _shown(row)


def _shown(row: Mapping[str, Any]) -> objects.IdempotencyKey:
    public_id = ids.show(ids.IDEMPOTENCY_KEY, row["id"])
    return objects.IdempotencyKey(
        id=public_id,
        operation=row["operation"],
        key=row["key"],
        state=row["state"],
        recovery_point=row["recovery_point"],
        reconciliation_id=public_id if row["state"] == "indeterminate" else None,
        take_overs=max(0, row["fence"] - 1),
        response_status=row["response_status"],
        lease_expires_at=row["lease_expires_at"],
        indeterminate_at=row["indeterminate_at"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
    )


# --- doubted, by the maintenance role

_ABANDONED: Final = """
SELECT tenant_id, id FROM idempotency_keys
 WHERE state = 'in_progress' AND lease_expires_at <= ipn_now() AND operation = %(operation)s AND recovery_point = ANY(%(intents)s)
 ORDER BY lease_expires_at LIMIT %(batch)s"""


async def doubt_abandoned(db: Database, operations: Mapping[str, Operation]) -> int:
    """Mark what was abandoned behind an intent of class `none` as indeterminate, so that nothing waits unseen for its client; how many."""
    marked = 0
    for operation in operations.values():
        if operation.downstream is not Downstream.NONE:
            continue
        async with db.autocommit("idempotency.abandoned") as tx:
            found = await tx.all(
                dict, _ABANDONED, {"operation": operation.name, "intents": sorted(operation.intents), "batch": DOUBTED_AT_ONCE}
            )
        for row in found:
            marked += await db.rerun(_doubt_one, db, operation, row["tenant_id"], row["id"])
    return marked


async def _doubt_one(db: Database, operation: Operation, tenant_id: str, key_id: UUID) -> bool:
    async with db.transaction("idempotency.doubt") as tx:
        row = await idempotency_keys.lock(tx, tenant_id, key_id)
        marked = row is not None and await idempotency_keys.doubt(tx, row, operation)
    if row is not None and marked:
        idempotency_keys.report_doubt(row)
    return marked


_UNSENT: Final = """
SELECT tenant_id, id FROM idempotency_keys
 WHERE state = 'in_progress' AND lease_expires_at <= ipn_now() - %(hours)s * interval '1 hour' AND operation = %(operation)s
   AND recovery_point <> 'started' AND recovery_point <> ALL(%(intents)s)
 ORDER BY lease_expires_at LIMIT %(batch)s"""


async def lapse_unsent(db: Database, operations: Mapping[str, Operation]) -> int:
    """Give back what is reserved for calls that were never made and that nobody repeated for a day; how many."""
    lapsed = 0
    for operation in operations.values():
        async with db.autocommit("idempotency.unsent") as tx:
            wanted = {"operation": operation.name, "intents": sorted(operation.intents), "hours": UNSENT_HOURS, "batch": DOUBTED_AT_ONCE}
            found = await tx.all(dict, _UNSENT, wanted)
        for row in found:
            resolution = Resolution(row["tenant_id"], row["id"], "not_applied", "maintenance", "nothing was asked, and nobody repeated it")
            with suppress(StateConflict, NotFound):  # somebody repeated it just now
                await db.rerun(_lapse, db, operations, resolution)
                lapsed += 1
    return lapsed


async def _lapse(db: Database, operations: Mapping[str, Operation], resolution: Resolution) -> None:
    async with db.transaction("idempotency.lapse") as tx:
        await resolve(tx, db.clock, operations, resolution)


# --- decided by a person


async def resolve(tx: Transaction, clock: Clock, operations: Mapping[str, Operation], resolution: Resolution) -> None:
    """Settle a key whose outcome is unknown, or that was left in progress, or what was accepted under it and never came to an end.

    `applied` stores the answer that every repeat gets from now on; `not_applied` frees the key, and the next call has a new downstream
    key. The same decision again changes nothing. Raises `NotFound`, `StateConflict` for a key that waits for nobody, `ValidationFailed`.
    """
    row = await idempotency_keys.lock(tx, resolution.tenant_id, resolution.key_id)
    if row is None:
        raise NotFound
    operation = operations.get(row.operation)
    settlement = operation.settlement if operation else None
    if settlement and row.state == "completed" and await settlement.is_open(tx, row.work):
        await _settle_late(tx, row, settlement, resolution)
        await _note(tx, clock, row, resolution)
        return
    if await _is_done(tx, row, resolution):
        return
    if row.state == "completed" or (row.lease_seconds or 0) > 0:
        raise StateConflict("Only a key whose outcome is unknown, or that was left in progress, can be resolved.")
    if resolution.decision == "applied":
        finished = await settlement.applied(tx, row.work, resolution.evidence) if settlement else _given(resolution)
        await idempotency_keys.settle(tx, row, finished, operation)
    else:
        if settlement:
            await settlement.not_applied(tx, row.work)
        await idempotency_keys.release(tx, row)
    await _note(tx, clock, row, resolution)


async def _settle_late(tx: Transaction, row: Row, settlement: Settlement, resolution: Resolution) -> None:
    """What was accepted, and answered, and then never came to an end: its answer stays, and what it was about is settled."""
    if resolution.decision == "applied":
        await settlement.applied(tx, row.work, resolution.evidence)
    else:
        await settlement.not_applied(tx, row.work)


async def _note(tx: Transaction, clock: Clock, row: Row, resolution: Resolution) -> None:
    await audit.record(
        tx,
        row.tenant_id,
        actor=resolution.actor,
        action=f"idempotency_key.{resolution.decision}",
        target=row.public_id,
        now=clock.now(),
        reason=resolution.reason,
        details=_details(row, resolution),
    )
    logs.count(f"idempotency.resolved.{resolution.decision}")
    logs.get("idempotency").info("idempotency.resolved", id=row.public_id, decision=resolution.decision, actor=resolution.actor)


def _details(row: Row, resolution: Resolution) -> dict[str, Any]:
    return {
        "operation": row.operation,
        "recovery_point": row.recovery_point,
        "generation": row.generation,
        "evidence": dict(resolution.evidence),
    }


async def _is_done(tx: Transaction, row: Row, resolution: Resolution) -> bool:
    """Whether this very decision, with the same evidence, made the row what it is now."""
    freed = row.state == "in_progress" and row.recovery_point == STARTED
    if (resolution.decision == "applied" and row.state != "completed") or (resolution.decision == "not_applied" and not freed):
        return False
    found = await tx.value(
        """SELECT EXISTS (SELECT FROM audit_log
                           WHERE tenant_id = %(tenant_id)s AND target = %(target)s AND action = %(action)s
                             AND details -> 'generation' = to_jsonb(%(generation)s::int) AND details -> 'evidence' = %(evidence)s)""",
        {
            "tenant_id": row.tenant_id,
            "target": row.public_id,
            "action": f"idempotency_key.{resolution.decision}",
            "generation": row.generation - freed,
            "evidence": Jsonb(dict(resolution.evidence)),
        },
    )
    return bool(found)


def _given(resolution: Resolution) -> Finished:
    if resolution.response is None:
        raise validation.refused("is needed: the answer that repeats get", "response")
    status, body = resolution.response
    return Finished(status, json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())


# --- pruned

_EXPIRED: Final = """
SELECT count(*) FROM idempotency_keys
 WHERE expires_at <= ipn_now()
   AND (state = 'completed'
        OR state = 'in_progress' AND lease_expires_at <= ipn_now() AND recovery_point = 'started' AND generation > 0)"""

_PRUNE: Final = """
DELETE FROM idempotency_keys
 WHERE (tenant_id, operation, key) IN (
       SELECT tenant_id, operation, key FROM idempotency_keys WHERE state = 'completed' AND expires_at <= ipn_now()
        ORDER BY expires_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED)"""

_PRUNE_FREED: Final = """
DELETE FROM idempotency_keys
 WHERE (tenant_id, operation, key) IN (
       SELECT tenant_id, operation, key FROM idempotency_keys
        WHERE state = 'in_progress' AND lease_expires_at <= ipn_now() AND recovery_point = 'started' AND generation > 0
          AND expires_at <= ipn_now()
        ORDER BY lease_expires_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED)"""


async def prune(db: Database) -> int:
    """Delete one batch of keys whose retention is over; how many: completed ones, and those that a person freed and nobody used again.

    Others are never deleted, however old.
    """
    pruned = 0
    async with db.autocommit("idempotency.prune") as tx:
        for statement in (_PRUNE, _PRUNE_FREED):
            pruned += await tx.execute(statement, {"batch": PRUNED_AT_ONCE})
    if pruned:
        logs.count("idempotency.pruned", pruned)
    return pruned


async def expired(db: Database) -> int:
    """How many `prune` would delete now."""
    async with db.autocommit("idempotency.expired") as tx:
        return int(await tx.value(_EXPIRED))
