"""Tenants and their API keys. A key is shown once; what is kept is its SHA-256, which is safe because the key is 256 random bits."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ipn_gateway import ids
from ipn_gateway.errors import NotFound, ValidationFailed
from ipn_gateway.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    from ipn_gateway.db import Database

Scope = Literal["read", "write", "money", "audit:raw", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("read", "write", "money", "audit:raw", "admin")
KEY_PREFIX: Final = "ipn_"
REMEMBERED_SECONDS: Final = 1.0  # a revoked key works on for so long in other processes
REMEMBERED_MAX: Final = 1000

_KEY: Final = re.compile(r"ipn_[A-Za-z0-9_-]{43}")
_TENANT: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A new key: the only time that it is readable."""

    tenant: str
    key_id: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: a key of a tenant, and what it may do."""

    tenant_id: str
    key_id: UUID
    scopes: frozenset[str]

    @property
    def actor(self) -> str:
        """How the audit log names this caller."""
        return f"key:{ids.show(ids.API_KEY, self.key_id)}"


async def create_key(db: Database, tenant: str, scopes: Collection[str] = SCOPES) -> CreatedKey:
    """Make a key, and the tenant if it is new. Raises `ValidationFailed` for a name or a scope that cannot be."""
    if not _TENANT.fullmatch(tenant):
        raise ValidationFailed("A tenant's name is 1 to 63 of a-z, 0-9, _ and -, and begins with a letter or digit.")
    if not scopes or (unknown := set(scopes) - set(SCOPES)):
        named = f"; {', '.join(sorted(unknown))} is none" if scopes else ""
        raise ValidationFailed(f"A key has one or more of the scopes {', '.join(SCOPES)}{named}.")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    key_id = ids.new(db.clock.now())
    async with db.transaction("tenants.create_key") as tx:
        await tx.execute(
            "INSERT INTO tenants (id) VALUES (%(tenant)s) ON CONFLICT ON CONSTRAINT tenants_pkey DO NOTHING", {"tenant": tenant}
        )
        await tx.execute(
            "INSERT INTO api_keys (id, tenant_id, digest, scopes) VALUES (%(id)s, %(tenant)s, %(digest)s, %(scopes)s)",
            {"id": key_id, "tenant": tenant, "digest": _digest(key), "scopes": [scope for scope in SCOPES if scope in scopes]},
        )
    return CreatedKey(tenant, ids.show(ids.API_KEY, key_id), key)


async def revoke_key(db: Database, tenant: str, key_id: str) -> None:
    """End a key; processes that remember it follow within a second. Raises `NotFound` when the tenant has no such living key."""
    async with db.transaction("tenants.revoke_key") as tx:
        ended = await tx.execute(
            "UPDATE api_keys SET revoked_at = ipn_now() WHERE id = %(id)s AND tenant_id = %(tenant)s AND revoked_at IS NULL",
            {"id": ids.read(ids.API_KEY, key_id), "tenant": tenant},
        )
        if ended == 0:
            raise NotFound


async def authenticate(db: Database, bearer: str) -> Principal | None:
    """Whose key this is, asked of the database; None when it is nobody's or was revoked."""
    if not _KEY.fullmatch(bearer):
        return None
    async with db.autocommit("tenants.authenticate") as tx:
        row = await tx.one(
            dict,
            "SELECT tenant_id, id, scopes FROM api_keys WHERE digest = %(digest)s AND revoked_at IS NULL",
            {"digest": _digest(bearer)},
        )
    return Principal(row["tenant_id"], row["id"], frozenset(row["scopes"])) if row else None


class Keys:
    """The keys of this process's callers, remembered for a second; unknown ones are not, so that a new key works at once."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._recent: Recent[Principal | None] = Recent(db.clock, seconds=REMEMBERED_SECONDS, entries_max=REMEMBERED_MAX)

    async def authenticate(self, bearer: str) -> Principal | None:
        """Whose key this is, or None."""
        if not _KEY.fullmatch(bearer):
            return None
        remembered_as = _digest(bearer).hex()
        principal = await self._recent.get(remembered_as, lambda: authenticate(self._db, bearer))
        if principal is None:
            self._recent.forget(remembered_as)
        return principal


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
