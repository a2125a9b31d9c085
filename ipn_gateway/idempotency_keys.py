"""The rows of `idempotency_keys`: claimed, advanced, finished, given back. The database decides each; every write of an owner is fenced.

A claim commits by itself, before anything else happens. All times are the database's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID  # noqa: TC003 - fields of rows

from psycopg.types.json import Jsonb

from ipn_gateway import ids, logs
from ipn_gateway.errors import IdempotencyUnavailable, LeaseLost, RateLimited
from ipn_gateway.operations import KEPT_HEADERS, STARTED, Work

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.operations import Finished, Operation

OPEN_MAX: Final = 1000
"""Keys of one tenant that are worked on or indeterminate; a new one beyond is answered 429 before it is claimed."""

RESPONSE_BYTES_MAX: Final = 64 * 1024
OMITTED: Final = b'{"omitted":"The first answer was larger than is kept; read the resource instead."}'
"""What is kept of a larger answer: its status and headers, and this."""

QUOTA_WAIT_SECONDS: Final = 60
CLAIMS_MAX: Final = 5  # each time the row was there for the insert and gone for the read


@dataclass(frozen=True, slots=True)
class Row:
    """A key as it stands. `lease_seconds` is what is left of the lease, negative when it is over."""

    tenant_id: str
    operation: str
    key: str = field(repr=False)
    id: UUID
    fingerprint: bytes
    fingerprint_version: int
    state: str
    recovery_point: str
    progress: dict[str, Any]
    generation: int
    fence: int
    lease_seconds: float | None
    age_seconds: float
    response_status: int | None
    response_headers: list[list[str]] | None
    response_body: bytes | None = field(repr=False)

    @property
    def digest(self) -> str:
        """What the log calls the key."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:12]

    @property
    def work(self) -> Work:
        """What its phases are given."""
        return Work(self.tenant_id, self.operation, self.key, self.id, self.generation, self.progress)

    @property
    def public_id(self) -> str:
        """How it is named outside; also the reconciliation id."""
        return ids.show(ids.IDEMPOTENCY_KEY, self.id)


_ROW: Final = """
SELECT tenant_id, operation, key, id, fingerprint, fingerprint_version, state, recovery_point, progress, generation, fence,
       extract(epoch FROM lease_expires_at - ipn_now())::float8 AS lease_seconds,
       extract(epoch FROM ipn_now() - created_at)::float8 AS age_seconds, response_status, response_headers, response_body
  FROM idempotency_keys"""

# The constraint decides. The look before it spares a wait: ON CONFLICT waits for an owner that has written its answer and is committing.
_CLAIM: Final = """
WITH open AS MATERIALIZED (
    SELECT count(*) AS n
      FROM (SELECT FROM idempotency_keys
             WHERE tenant_id = %(tenant_id)s AND state <> 'completed' AND (lease_expires_at IS NULL OR lease_expires_at > ipn_now())
             LIMIT %(open_max)s) AS found
), claimed AS (
    INSERT INTO idempotency_keys
           (tenant_id, operation, key, id, fingerprint, fingerprint_version, lease_expires_at, fence, expires_at)
    SELECT %(tenant_id)s, %(operation)s, %(key)s, %(id)s, %(fingerprint)s, %(version)s,
           ipn_now() + %(lease)s::float8 * interval '1 second', 1, ipn_now() + %(hours)s::float8 * interval '1 hour'
      FROM open
     WHERE n < %(open_max)s
       AND NOT EXISTS (SELECT FROM idempotency_keys AS here
                        WHERE here.tenant_id = %(tenant_id)s AND here.operation = %(operation)s AND here.key = %(key)s)
    ON CONFLICT ON CONSTRAINT idempotency_keys_pkey DO NOTHING
    RETURNING id
)
SELECT (SELECT id FROM claimed) AS id, n >= %(open_max)s AS is_full,
       EXISTS (SELECT FROM idempotency_keys AS other
                WHERE other.tenant_id = %(tenant_id)s AND other.key = %(key)s AND other.operation <> %(operation)s) AS elsewhere
  FROM open"""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A key about to be claimed; `id` is made before, so that a claim whose answer was lost is known again."""

    tenant_id: str
    operation: str
    key: str = field(repr=False)
    id: UUID
    fingerprint: bytes
    version: int
    lease_seconds: float
    retention_hours: float

    def row(self) -> Row:
        """The row as it stands when the claim made it."""
        return Row(
            tenant_id=self.tenant_id,
            operation=self.operation,
            key=self.key,
            id=self.id,
            fingerprint=self.fingerprint,
            fingerprint_version=self.version,
            state="in_progress",
            recovery_point=STARTED,
            progress={},
            generation=0,
            fence=1,
            lease_seconds=self.lease_seconds,
            age_seconds=0,
            response_status=None,
            response_headers=None,
            response_body=None,
        )


async def claim(db: Database, new: NewRow) -> Row:
    """Insert the row first, and read it only if there is one: ours (by its id), somebody's, or none because it was pruned just now.

    Raises `RateLimited` when the tenant has too many open keys.
    """
    for _ in range(CLAIMS_MAX):
        async with db.autocommit("idempotency.claim") as tx:
            made = await tx.one(
                dict,
                _CLAIM,
                {
                    "tenant_id": new.tenant_id,
                    "operation": new.operation,
                    "key": new.key,
                    "id": new.id,
                    "fingerprint": new.fingerprint,
                    "version": new.version,
                    "lease": new.lease_seconds,
                    "hours": new.retention_hours,
                    "open_max": OPEN_MAX,
                },
            )
            assert made is not None  # noqa: S101 - of one row
            if made["id"] is not None:
                logs.count("idempotency.cross_operation_reuse", int(made["elsewhere"]))
                return new.row()
            if row := await read(tx, new.tenant_id, new.operation, new.key):
                return row
        if made["is_full"]:
            sentence = "Too many of your keyed requests are still open; wait for their answers."
            raise RateLimited(sentence, retry_after_seconds=QUOTA_WAIT_SECONDS)
    raise IdempotencyUnavailable


async def read(tx: Transaction, tenant_id: str, operation: str, key: str) -> Row | None:
    """The row, or None."""
    return await tx.one(
        Row,
        f"{_ROW} WHERE tenant_id = %(tenant_id)s AND operation = %(operation)s AND key = %(key)s",
        {"tenant_id": tenant_id, "operation": operation, "key": key},
    )


async def lock(tx: Transaction, tenant_id: str, key_id: UUID) -> Row | None:
    """The row as it is now, locked: a transaction of its owner that may still run is waited for."""
    sql = f"{_ROW} WHERE tenant_id = %(tenant_id)s AND id = %(id)s FOR UPDATE"
    return await tx.one(Row, sql, {"tenant_id": tenant_id, "id": key_id})


# The row as it was read, if its lease is over and no transaction of its owner is at it just now: nobody waits for one.
_ABANDONED: Final = """(tenant_id, id) IN (
    SELECT tenant_id, id FROM idempotency_keys
     WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND state = 'in_progress' AND lease_expires_at <= ipn_now()
       FOR UPDATE SKIP LOCKED)"""


async def take_over(db: Database, row: Row, lease_seconds: float) -> Row | None:
    """Become the owner of a row whose lease is over; None when somebody else was first or the owner is alive after all."""
    async with db.autocommit("idempotency.take_over") as tx:
        won = await tx.execute(
            f"""UPDATE idempotency_keys
                   SET fence = fence + 1, lease_expires_at = ipn_now() + %(lease)s::float8 * interval '1 second'
                 WHERE {_ABANDONED}""",
            {"lease": lease_seconds, "tenant_id": row.tenant_id, "id": row.id, "fence": row.fence},
        )
    return replace(row, fence=row.fence + 1, lease_seconds=lease_seconds) if won else None


# --- the writes of an owner


async def _owned(tx: Transaction, row: Row, changes: str, parameters: Mapping[str, Any]) -> None:
    """Change the row if it still is as its owner knows it. Raises `LeaseLost`, which undoes everything that the owner wrote."""
    written = await tx.execute(
        f"""UPDATE idempotency_keys SET {changes}
             WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND state = 'in_progress'
               AND recovery_point = %(recovery_point)s""",
        {**parameters, "tenant_id": row.tenant_id, "id": row.id, "fence": row.fence, "recovery_point": row.recovery_point},
    )
    if written == 0:
        raise LeaseLost


async def advance(tx: Transaction, row: Row, point: str, progress: Mapping[str, Any], lease_seconds: float) -> Row:
    """The next recovery point, with a new lease."""
    handed_on = {**row.progress, **progress}
    await _owned(
        tx,
        row,
        "recovery_point = %(point)s, progress = %(progress)s, lease_expires_at = ipn_now() + %(lease)s::float8 * interval '1 second'",
        {"point": point, "progress": Jsonb(handed_on), "lease": lease_seconds},
    )
    return replace(row, recovery_point=point, progress=handed_on)


_COMPLETED: Final = """state = 'completed', lease_expires_at = NULL, indeterminate_at = NULL, response_status = %(status)s,
    response_headers = %(headers)s, response_body = %(body)s"""


def _stored(operation: Operation | None, finished: Finished) -> dict[str, Any]:
    """What is kept of an answer: status, type, listed headers, and the bytes without what is shown once."""
    kept = kept_body(operation, finished.body)
    names = {name.lower() for name in (*KEPT_HEADERS, *(operation.headers if operation else ()))}
    headers = [[name, value] for name, value in finished.headers if name.lower() in names]
    media_type = finished.media_type if len(finished.body) <= RESPONSE_BYTES_MAX else "application/json"
    return {
        "status": finished.status,
        "headers": Jsonb([["Content-Type", media_type], *headers] if kept else headers),
        "body": kept,
    }


async def finish(tx: Transaction, row: Row, operation: Operation, finished: Finished) -> None:
    """The owner's answer."""
    await _owned(tx, row, _COMPLETED, _stored(operation, finished))


async def settle(tx: Transaction, row: Row, finished: Finished, operation: Operation | None) -> None:
    """The answer that a person decided on; `row` is locked. Its fence goes up, so that no former owner writes over it."""
    await tx.execute(
        f"UPDATE idempotency_keys SET fence = fence + 1, {_COMPLETED} WHERE tenant_id = %(tenant_id)s AND id = %(id)s",
        {**_stored(operation, finished), "tenant_id": row.tenant_id, "id": row.id},
    )


async def release(tx: Transaction, row: Row) -> None:
    """Free for a new execution from the start, with new downstream keys; `row` is locked."""
    await tx.execute(
        """UPDATE idempotency_keys
              SET state = 'in_progress', recovery_point = 'started', progress = '{}', generation = generation + 1, fence = fence + 1,
                  lease_expires_at = ipn_now(), indeterminate_at = NULL
            WHERE tenant_id = %(tenant_id)s AND id = %(id)s""",
        {"tenant_id": row.tenant_id, "id": row.id},
    )


def kept_body(operation: Operation | None, body: bytes) -> bytes:
    """What is kept of an answer's body."""
    if len(body) > RESPONSE_BYTES_MAX:
        return OMITTED
    if operation is None or not operation.secrets or not body:
        return body
    members = json.loads(body)
    kept = {name: members[name] for name in members if name not in operation.secrets}
    return body if len(kept) == len(members) else json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()


async def free(tx: Transaction, row: Row, point: str) -> None:
    """Give the key back at once, to go on at `point`. One that would begin anew leaves no trace: nobody may come back for it."""
    if point == STARTED and not row.generation:
        gone = await tx.execute(
            """DELETE FROM idempotency_keys
                WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND fence = %(fence)s AND state = 'in_progress'
                  AND recovery_point = %(recovery_point)s""",
            {"tenant_id": row.tenant_id, "id": row.id, "fence": row.fence, "recovery_point": row.recovery_point},
        )
        if gone == 0:
            raise LeaseLost
        return
    await _owned(tx, row, "recovery_point = %(point)s, lease_expires_at = ipn_now()", {"point": point})


async def doubt(tx: Transaction, row: Row, operation: Operation) -> bool:
    """Mark an abandoned row whose foreign call may have happened; whether it was this call that did. What was reserved stays so."""
    marked = await tx.execute(
        f"""UPDATE idempotency_keys
               SET state = 'indeterminate', lease_expires_at = NULL, indeterminate_at = ipn_now(), fence = fence + 1
             WHERE {_ABANDONED}""",
        {"tenant_id": row.tenant_id, "id": row.id, "fence": row.fence},
    )
    if marked and operation.settlement:
        await operation.settlement.indeterminate(tx, row.work)
    return bool(marked)


async def give_up(tx: Transaction, row: Row, operation: Operation) -> None:
    """The owner itself got no clear answer: the row waits for a person. Its fence stays, so that a re-run knows its own commit."""
    await _owned(tx, row, "state = 'indeterminate', lease_expires_at = NULL, indeterminate_at = ipn_now()", {})
    if operation.settlement:
        await operation.settlement.indeterminate(tx, row.work)


def report_doubt(row: Row) -> None:
    """Tell the operator, once that is committed."""
    logs.count("idempotency.indeterminate")
    logs.get("idempotency").error("idempotency.indeterminate", id=row.public_id, operation=row.operation, point=row.recovery_point)
