"""Tenants and keys: what is kept of a key does not reveal it, and a revoked one dies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ipn_gateway import tenants
from ipn_gateway.errors import NotFound, ValidationFailed

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database


async def test_a_key_is_made_with_its_tenant_and_kept_as_a_digest(db: Database) -> None:
    """256 random bits, url-safe; the database has neither the key nor a part of it."""
    made = await tenants.create_key(db, "shop")

    assert re.fullmatch(r"ipn_[A-Za-z0-9_-]{43}", made.key)
    assert re.fullmatch(r"key_[0-9a-f]{32}", made.key_id)
    assert made.key not in repr(made)
    async with db.autocommit("test") as tx:
        rows = await tx.all(dict, "SELECT *, api_keys::text AS text FROM api_keys")
    assert made.key[4:20] not in rows[0]["text"]
    assert rows[0]["scopes"] == ["read", "write", "money", "audit:raw", "admin"]


async def test_a_key_authenticates_with_its_scopes(db: Database) -> None:
    """And a second one of the tenant beside it; nothing else does."""
    first = await tenants.create_key(db, "shop")
    second = await tenants.create_key(db, "shop", ["money", "read"])
    other = await tenants.create_key(db, "other")

    found = await tenants.authenticate(db, second.key)

    assert found is not None
    assert (found.tenant_id, found.scopes, found.actor) == ("shop", frozenset({"read", "money"}), f"key:{second.key_id}")
    assert len({first.key, second.key, other.key}) == 3
    for wrong in (first.key[:-1], first.key + "A", first.key.swapcase(), "", "ipn_" + "A" * 43, f"{first.key}\n", first.key.encode().hex()):
        assert await tenants.authenticate(db, wrong) is None


@pytest.mark.parametrize("name", ["", "Shop", "a b", "-a", "_a", "a" * 64, "shop\n", "\N{BENGALI DIGIT ONE}"])
async def test_a_name_that_no_tenant_can_have_is_refused(db: Database, name: str) -> None:
    """With a sentence; no row is made."""
    with pytest.raises(ValidationFailed):
        await tenants.create_key(db, name)


async def test_a_scope_that_does_not_exist_is_refused(db: Database) -> None:
    """As is a key without any."""
    for scopes in ([], ["read", "everything"]):
        with pytest.raises(ValidationFailed, match="scopes"):
            await tenants.create_key(db, "shop", scopes)


async def test_a_revoked_key_is_forgotten_within_a_second(db: Database, clock: Clock) -> None:
    """Asked of the database at once, in a process that remembers it after its second."""
    made = await tenants.create_key(db, "shop")
    keys = tenants.Keys(db)
    assert await keys.authenticate(made.key) is not None

    await tenants.revoke_key(db, "shop", made.key_id)

    assert await tenants.authenticate(db, made.key) is None
    assert await keys.authenticate(made.key) is not None
    clock.advance(seconds=1)
    assert await keys.authenticate(made.key) is None


async def test_only_its_tenant_revokes_a_key_and_only_once(db: Database) -> None:
    """Another tenant's key is not there."""
    made = await tenants.create_key(db, "shop")
    await tenants.create_key(db, "other")

    for tenant, key_id in (("other", made.key_id), ("shop", "key_" + "0" * 32), ("shop", "odd")):
        with pytest.raises(NotFound):
            await tenants.revoke_key(db, tenant, key_id)
    await tenants.revoke_key(db, "shop", made.key_id)
    with pytest.raises(NotFound):
        await tenants.revoke_key(db, "shop", made.key_id)


async def test_a_key_that_is_new_works_at_once(db: Database) -> None:
    """That a key is unknown is not remembered."""
    keys = tenants.Keys(db)
    made = await tenants.create_key(db, "shop")
    async with db.transaction("test") as tx:
        digest = await tx.value("DELETE FROM api_keys RETURNING digest")
    assert await keys.authenticate(made.key) is None

    async with db.transaction("test") as tx:
        await tx.execute(
            "INSERT INTO api_keys (id, tenant_id, digest, scopes) VALUES (gen_random_uuid(), 'shop', %(d)s, '{read}')", {"d": digest}
        )

    assert await keys.authenticate(made.key) is not None
