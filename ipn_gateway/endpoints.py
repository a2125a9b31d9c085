"""Endpoints: subscribers' URLs with filter, limits and signing secrets. Their health is kept apart, in `endpoint_states`.

Locks are taken in this order: the endpoint, its event deliveries sorted by id, its state. What touches many event deliveries does so in
batches, each a transaction of its own, so that no number of them meets the limit of a statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import audit, ids, signing
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.operations import Downstream, Operation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from decimal import Decimal
    from uuid import UUID

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.vault import Vault

MAX_IN_FLIGHT_DEFAULT: Final = 10
OVERLAP_SECONDS_DEFAULT: Final = 86_400
OVERLAP_SECONDS_MAX: Final = 30 * 86_400
BATCH: Final = 2000  # event deliveries in one transaction
SECRETS_MAX: Final = 5
"""Signing secrets that are active at once: each one adds a signature to every attempt."""

ENDPOINTS_MAX: Final = 100
"""Endpoints of one tenant. One event goes to all that want it, in one transaction, whose length this bounds."""


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    """A subscription, checked at the edge: `url` by `addresses.check_endpoint_url`, `events` against the catalogue."""

    url: str
    events: Sequence[str]
    description: str = ""
    max_in_flight: int = MAX_IN_FLIGHT_DEFAULT
    rate_per_second: Decimal | None = None
    ordered: bool = False


CREATE: Final = Operation(
    name="POST /v1/endpoints",
    fields={
        "url": "json",
        "events": "json",
        "description": "json",
        "max_in_flight": "json",
        "rate_per_second": "json",
        "ordered": "json",
    },
    downstream=Downstream.LOCAL,
    secrets=("secret",),
)
ROTATE: Final = Operation(
    name="POST /v1/endpoints/{endpoint_id}/rotate-secret",
    fields={"overlap_seconds": "json"},
    downstream=Downstream.LOCAL,
    secrets=("secret",),
)
ENABLE: Final = Operation(name="POST /v1/endpoints/{endpoint_id}/enable", fields={"reason": "json"}, downstream=Downstream.IDEMPOTENT)


@dataclass(frozen=True, slots=True)
class CreatedSecret:
    """A new signing secret with its key pair: the only time that it is readable."""

    endpoint_id: UUID
    keys: signing.Keys

    @property
    def secret(self) -> str:
        """What its owner is shown."""
        return self.keys.secret


async def create(db: Database, vault: Vault, tenant_id: str, new: NewEndpoint, *, secret_bytes: bytes, actor: str) -> CreatedSecret:
    """Subscribe a URL in a transaction of its own; events staged from then on go to it. `secret_bytes` are 64 random ones."""
    made = CreatedSecret(ids.new(db.clock.now()), signing.new_keys(secret_bytes))
    async with db.transaction("endpoints.create") as tx:
        await create_in(tx, vault, tenant_id, new, made, actor=actor, now=db.clock.now())
    return made


async def create_in(
    tx: Transaction, vault: Vault, tenant_id: str, new: NewEndpoint, made: CreatedSecret, *, actor: str, now: datetime
) -> None:
    """The same as part of a transaction, with an id and a secret that were made before; done already, it changes nothing.

    Raises `StateConflict` for one more than `ENDPOINTS_MAX`.
    """
    inserted = await tx.execute(
        """INSERT INTO endpoints (tenant_id, id, url, events, description, max_in_flight, rate_per_second, ordered)
           VALUES (%(tenant_id)s, %(id)s, %(url)s, %(events)s, %(description)s, %(max_in_flight)s, %(rate_per_second)s, %(ordered)s)
           ON CONFLICT ON CONSTRAINT endpoints_pkey DO NOTHING""",
        {
            "tenant_id": tenant_id,
            "id": made.endpoint_id,
            "url": new.url,
            "events": list(new.events),
            "description": new.description,
            "max_in_flight": new.max_in_flight,
            "rate_per_second": new.rate_per_second,
            "ordered": new.ordered,
        },
    )
    if inserted:
        await _refuse_too_many(tx, tenant_id)
        await _insert_secret(tx, vault, tenant_id, made, now=now)
        await _note(tx, tenant_id, made.endpoint_id, "create", actor=actor, now=now)


async def _refuse_too_many(tx: Transaction, tenant_id: str) -> None:
    """One more than an event could go to would miss it unseen. Behind the tenant's lock, so that two at once are counted."""
    await tx.execute("SELECT FROM tenants WHERE id = %(tenant_id)s FOR NO KEY UPDATE", {"tenant_id": tenant_id})
    count = await tx.value(
        "SELECT count(*) FROM endpoints WHERE tenant_id = %(tenant_id)s AND deleted_at IS NULL", {"tenant_id": tenant_id}
    )
    if count > ENDPOINTS_MAX:
        raise StateConflict(f"A tenant has at most {ENDPOINTS_MAX} endpoints; delete one that is not used any more.")


CHANGEABLE: Final = ("url", "events", "description", "max_in_flight", "rate_per_second", "ordered")


async def patch(db: Database, tenant_id: str, endpoint_id: UUID, changes: Mapping[str, Any], *, actor: str) -> None:
    """Change some of `CHANGEABLE`, checked at the edge. Raises `NotFound`.

    With `ordered` false what was held back behind another event is due at once; a repeat goes on where a process died with that.
    """
    assert set(changes) <= set(CHANGEABLE)  # noqa: S101 - names become SQL below
    async with db.transaction("endpoints.patch") as tx:
        await _lock(tx, tenant_id, endpoint_id)
        if changes:
            assignments = ", ".join(f"{name} = %({name})s" for name in changes)
            await tx.execute(
                f"UPDATE endpoints SET {assignments} WHERE tenant_id = %(tenant_id)s AND id = %(id)s",
                {"tenant_id": tenant_id, "id": endpoint_id, **changes},
            )
            if changes.get("rate_per_second") is not None:
                await tx.execute(_PACE_ANEW, {"tenant_id": tenant_id, "id": endpoint_id, **changes})
            await _note(tx, tenant_id, endpoint_id, "patch", actor=actor, now=db.clock.now(), details={"changed": sorted(changes)})
    if changes.get("ordered") is False:
        while await db.rerun(_release_batch, db, tenant_id, endpoint_id):
            pass


async def _release_batch(db: Database, tenant_id: str, endpoint_id: UUID) -> int:
    """How many, until none is left; none of an endpoint that is ordered again, or gone."""
    async with db.transaction("endpoints.release") as tx:
        return await tx.execute(_RELEASE, {"tenant_id": tenant_id, "id": endpoint_id, "batch": BATCH})


# Held back: never tried, put off, and behind a pending event of its order. What a recovery spreads over time was never held back.
_RELEASE = """
WITH held AS MATERIALIZED (
    SELECT id FROM event_deliveries AS d
     WHERE d.tenant_id = %(tenant_id)s AND d.endpoint_id = %(id)s AND d.next_attempt_at > greatest(ipn_now(), d.created_at)
       AND d.status = 'pending' AND d.sequence IS NOT NULL AND d.attempt_count = 0 AND d.next_trigger = 'initial'
       AND EXISTS (SELECT FROM endpoints AS e
                    WHERE e.tenant_id = d.tenant_id AND e.id = d.endpoint_id AND NOT e.ordered AND e.deleted_at IS NULL)
       AND EXISTS (SELECT FROM event_deliveries AS h
                    WHERE h.tenant_id = d.tenant_id AND h.endpoint_id = d.endpoint_id AND h.order_id = d.order_id
                      AND h.sequence < d.sequence AND h.sequence IS NOT NULL AND h.status = 'pending')
     ORDER BY d.next_attempt_at LIMIT %(batch)s
), locked AS MATERIALIZED (
    SELECT d.id FROM event_deliveries AS d JOIN held USING (id)
     WHERE d.tenant_id = %(tenant_id)s AND d.status = 'pending' AND d.next_attempt_at > greatest(ipn_now(), d.created_at)
     ORDER BY d.id FOR NO KEY UPDATE OF d
)
UPDATE event_deliveries AS d SET next_attempt_at = created_at FROM locked WHERE d.tenant_id = %(tenant_id)s AND d.id = locked.id
"""


# A debt of the old rate is cut to one send of the new one, at least a second.
_PACE_ANEW = """
UPDATE endpoint_states SET paced_until = least(paced_until, ipn_now() + greatest(1, 1 / %(rate_per_second)s::float8) * interval '1 second')
 WHERE tenant_id = %(tenant_id)s AND endpoint_id = %(id)s AND paced_until IS NOT NULL
"""


async def delete(db: Database, tenant_id: str, endpoint_id: UUID, *, actor: str) -> int:
    """Take the endpoint away for good; how many pending event deliveries were cancelled. Raises `NotFound`.

    From the first commit on nothing more is sent to it. What is staged meanwhile, or left by a process that died, `cancel_left_over` finds.
    """
    async with db.transaction("endpoints.delete") as tx:
        await _lock(tx, tenant_id, endpoint_id)
        await tx.execute(
            "UPDATE endpoints SET deleted_at = ipn_now() WHERE tenant_id = %(tenant_id)s AND id = %(id)s",
            {"tenant_id": tenant_id, "id": endpoint_id},
        )
        await _note(tx, tenant_id, endpoint_id, "delete", actor=actor, now=db.clock.now())
    return await _cancel_all(db, tenant_id, endpoint_id)


async def cancel_left_over(db: Database) -> int:
    """Cancel what is pending at deleted endpoints; how many. An event that was staged while its endpoint was deleted is such a case."""
    async with db.autocommit("endpoints.left_over") as tx:
        found = await tx.all(
            dict,
            """SELECT e.tenant_id, e.id FROM endpoints e CROSS JOIN LATERAL (
                   SELECT FROM event_deliveries d
                    WHERE d.tenant_id = e.tenant_id AND d.endpoint_id = e.id AND d.next_attempt_at IS NOT NULL LIMIT 1) AS pending
                WHERE e.deleted_at IS NOT NULL""",
        )
    return sum([await _cancel_all(db, row["tenant_id"], row["id"]) for row in found])


async def _cancel_all(db: Database, tenant_id: str, endpoint_id: UUID) -> int:
    cancelled = 0
    while statuses := await db.rerun(_cancel_batch, db, tenant_id, endpoint_id):
        cancelled += statuses.count("cancelled")
    return cancelled


async def _cancel_batch(db: Database, tenant_id: str, endpoint_id: UUID) -> list[str]:
    """Nothing of it is claimed any more. What is being sent keeps its lease, so that its attempt is written; its status stays `cancelled`.

    What is delivered and waits for a redelivery stays delivered. Gives the statuses of what was touched.
    """
    async with db.transaction("endpoints.cancel_deliveries") as tx:
        ended = await tx.all(
            dict,
            """WITH pending AS MATERIALIZED (
                   SELECT id FROM event_deliveries
                    WHERE tenant_id = %(tenant_id)s AND endpoint_id = %(id)s AND next_attempt_at IS NOT NULL
                    ORDER BY next_attempt_at LIMIT %(batch)s
               ), locked AS MATERIALIZED (
                   SELECT d.id FROM event_deliveries d JOIN pending USING (id)
                    WHERE d.tenant_id = %(tenant_id)s AND d.next_attempt_at IS NOT NULL ORDER BY d.id FOR NO KEY UPDATE OF d
               )
               UPDATE event_deliveries d
                  SET status = CASE WHEN d.status = 'delivered' THEN d.status ELSE 'cancelled' END,
                      next_attempt_at = NULL, scheduled_at = NULL, asked_again = false
                 FROM locked WHERE d.tenant_id = %(tenant_id)s AND d.id = locked.id
               RETURNING d.status""",
            {"tenant_id": tenant_id, "id": endpoint_id, "batch": BATCH},
        )
    return [row["status"] for row in ended]


async def enable(db: Database, tenant_id: str, endpoint_id: UUID, *, actor: str, reason: str | None = None) -> None:
    """Send to it again: what waited is due at once, oldest first. One that is enabled already stays as it is. Raises `NotFound`."""
    while not await db.rerun(_enable_or_prepare, db, tenant_id, endpoint_id, actor, reason):
        pass


async def _enable_or_prepare(db: Database, tenant_id: str, endpoint_id: UUID, actor: str, reason: str | None) -> bool:
    """Make a batch of what waits due, or enable once nothing is left to be. Whether it is enabled: until then nothing is sent."""
    async with db.transaction("endpoints.enable") as tx:
        if await _lock(tx, tenant_id, endpoint_id) == "enabled":
            return True
        row = {"tenant_id": tenant_id, "id": endpoint_id}
        if await tx.execute(_MAKE_DUE, row | {"batch": BATCH}):
            return False
        await tx.execute(
            """UPDATE endpoints SET status = 'enabled', disabled_reason = NULL, disabled_at = NULL
                WHERE tenant_id = %(tenant_id)s AND id = %(id)s""",
            row,
        )
        await tx.execute(_FORGET_FAILURES, row)
        await _note(tx, tenant_id, endpoint_id, "enable", actor=actor, now=db.clock.now(), reason=reason)
    return True


# What was sent within a limited rate stays paid for.
_FORGET_FAILURES = """
UPDATE endpoint_states SET consecutive_failures = 0, failing_since = NULL, open_until = NULL, warned_at = NULL
 WHERE tenant_id = %(tenant_id)s AND endpoint_id = %(id)s
"""

# Due since it was made: the order in which due ones are taken is then that of age. Those that wait longest come first, and so the batches
# do not read again what those before them have moved.
_MAKE_DUE = """
WITH waiting AS MATERIALIZED (
    SELECT id FROM event_deliveries
     WHERE tenant_id = %(tenant_id)s AND endpoint_id = %(id)s AND next_attempt_at IS NOT NULL AND next_attempt_at > created_at
       AND (lease_expires_at IS NULL OR lease_expires_at <= ipn_now())
     ORDER BY next_attempt_at DESC LIMIT %(batch)s
), locked AS MATERIALIZED (
    SELECT d.id FROM event_deliveries d JOIN waiting USING (id)
     WHERE d.tenant_id = %(tenant_id)s AND d.next_attempt_at > d.created_at
       AND (d.lease_expires_at IS NULL OR d.lease_expires_at <= ipn_now())
     ORDER BY d.id FOR NO KEY UPDATE OF d
)
UPDATE event_deliveries d SET next_attempt_at = created_at FROM locked WHERE d.tenant_id = %(tenant_id)s AND d.id = locked.id
"""


async def rotate_secret(
    db: Database, vault: Vault, tenant_id: str, endpoint_id: UUID, *, overlap_seconds: float, secret_bytes: bytes, actor: str
) -> CreatedSecret:
    """Give the endpoint a new signing secret and key pair; the old ones sign beside them for `overlap_seconds` (0 to 30 days).

    0 drops them at once. `secret_bytes` are 64 random ones. Raises `NotFound`, and `StateConflict` when too many would be active.
    """
    made = CreatedSecret(endpoint_id, signing.new_keys(secret_bytes))
    async with db.transaction("endpoints.rotate_secret") as tx:
        await rotate_secret_in(tx, vault, tenant_id, made, overlap_seconds=overlap_seconds, actor=actor, now=db.clock.now())
    return made


async def rotate_secret_in(
    tx: Transaction, vault: Vault, tenant_id: str, made: CreatedSecret, *, overlap_seconds: float, actor: str, now: datetime
) -> None:
    """The same as part of a transaction, with a secret that was made before."""
    await _lock(tx, tenant_id, made.endpoint_id)
    kept = await tx.execute(_EXPIRE_SECRETS, {"tenant_id": tenant_id, "id": made.endpoint_id, "overlap": overlap_seconds})
    if overlap_seconds > 0 and kept >= SECRETS_MAX:
        raise StateConflict(f"{kept} secrets are active; wait until one expires, or rotate with overlap_seconds 0.")
    await _insert_secret(tx, vault, tenant_id, made, now=now)
    await _note(tx, tenant_id, made.endpoint_id, "rotate_secret", actor=actor, now=now, details={"overlap_seconds": overlap_seconds})


_EXPIRE_SECRETS = """
UPDATE endpoint_secrets SET expires_at = least(expires_at, ipn_now() + %(overlap)s * interval '1 second')
 WHERE tenant_id = %(tenant_id)s AND endpoint_id = %(id)s AND (expires_at IS NULL OR expires_at > ipn_now())
"""


async def known(tx: Transaction, tenant_id: str, endpoint_id: UUID) -> None:
    """Raises `NotFound` for an endpoint that the tenant never had. A deleted one is known: a repeat of an act on it has its answer."""
    if not await tx.value(
        "SELECT EXISTS (SELECT FROM endpoints WHERE tenant_id = %(tenant_id)s AND id = %(id)s)", {"tenant_id": tenant_id, "id": endpoint_id}
    ):
        raise NotFound


async def active_secrets(tx: Transaction, vault: Vault, tenant_id: str, endpoint_ids: Sequence[UUID]) -> dict[UUID, list[str]]:
    """The signing secrets of each endpoint, newest first."""
    rows = await tx.all(
        dict,
        """SELECT endpoint_id, ciphertext FROM endpoint_secrets
            WHERE tenant_id = %(tenant_id)s AND endpoint_id = ANY(%(ids)s) AND (expires_at IS NULL OR expires_at > ipn_now())
            ORDER BY created_at DESC, id DESC""",
        {"tenant_id": tenant_id, "ids": list(endpoint_ids)},
    )
    found: dict[UUID, list[str]] = {endpoint_id: [] for endpoint_id in endpoint_ids}
    for row in rows:
        found[row["endpoint_id"]].append(vault.unseal(row["ciphertext"]).decode())
    return found


async def disable(tx: Transaction, tenant_id: str, endpoint_id: UUID, reason: str) -> datetime | None:
    """Stop sending to it; the moment, which is part of the cause of `endpoint.disabled`, or None when it is not enabled any more."""
    moment: datetime | None = await tx.value(
        """UPDATE endpoints SET status = 'disabled', disabled_reason = %(reason)s, disabled_at = ipn_now()
            WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND status = 'enabled' AND deleted_at IS NULL RETURNING disabled_at""",
        {"tenant_id": tenant_id, "id": endpoint_id, "reason": reason},
    )
    return moment


async def _lock(tx: Transaction, tenant_id: str, endpoint_id: UUID) -> str:
    status: str | None = await tx.value(
        "SELECT status FROM endpoints WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND deleted_at IS NULL FOR UPDATE",
        {"tenant_id": tenant_id, "id": endpoint_id},
    )
    if status is None:
        raise NotFound
    return status


async def _insert_secret(tx: Transaction, vault: Vault, tenant_id: str, made: CreatedSecret, *, now: datetime) -> None:
    await tx.execute(
        """INSERT INTO endpoint_secrets (tenant_id, id, endpoint_id, ciphertext, seed_ciphertext, public_key)
           VALUES (%(tenant_id)s, %(id)s, %(endpoint_id)s, %(ciphertext)s, %(seed_ciphertext)s, %(public_key)s)""",
        {
            "tenant_id": tenant_id,
            "id": ids.new(now),
            "endpoint_id": made.endpoint_id,
            "ciphertext": vault.seal(made.keys.secret.encode()),
            "seed_ciphertext": vault.seal(made.keys.private_key.encode()),
            "public_key": made.keys.public_key,
        },
    )


async def _note(
    tx: Transaction,
    tenant_id: str,
    endpoint_id: UUID,
    verb: str,
    *,
    actor: str,
    now: datetime,
    reason: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> None:
    target = ids.show(ids.ENDPOINT, endpoint_id)
    await audit.record(tx, tenant_id, actor=actor, action=f"endpoint.{verb}", target=target, now=now, reason=reason, details=details)
