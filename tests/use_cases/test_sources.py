"""Sources: sealed secrets, replaced ones that still authenticate, and what a process remembers of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import sources, tenants
from ipn_gateway.errors import ConfigurationError, NotFound, StateConflict, ValidationFailed
from ipn_gateway.sources import Sources
from ipn_gateway.vault import Vault

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database

CONFIG = {"store_id": "teststore", "store_passwd": "Pa#ss$1 =x\"'\\ ü", "mode": "sandbox"}


@pytest.fixture
def vault() -> Vault:
    return Vault([SecretStr(Fernet.generate_key().decode())])


@pytest.fixture
async def shop(db: Database, vault: Vault) -> Sources:
    """The sources of a deployment with one, `shop-main`."""
    await tenants.create_key(db, "shop")
    await create(db, vault)
    return Sources(db, vault)


async def create(db: Database, vault: Vault, name: str = "shop-main", *, tenant: str = "shop", **config: Any) -> None:
    await sources.create(db, vault, tenant, name, provider="sslcommerz", given=CONFIG | config, actor="test")


async def patch(db: Database, vault: Vault, **config: Any) -> None:
    await sources.patch(db, vault, "shop", "shop-main", config, actor="test")


async def passwords(known: Sources) -> list[str]:
    """The passwords that authenticate, the current one first."""
    account = await known.reload("shop-main")
    assert account is not None
    assert account.config == account.configs[0]
    return [config.store_passwd.get_secret_value() for config in account.configs]  # type: ignore[attr-defined]


async def rows(db: Database, statement: str) -> list[dict[str, Any]]:
    async with db.autocommit("test") as tx:
        return await tx.all(dict, statement)


@pytest.mark.case("B57")
async def test_a_secret_survives_to_the_byte_and_is_sealed(db: Database, shop: Sources) -> None:
    """Blanks, quotes and signs too; what is at rest does not show it, and neither does the account when printed."""
    account = await shop.get("shop-main")

    assert account is not None
    assert account.config.store_passwd.get_secret_value() == CONFIG["store_passwd"]  # type: ignore[attr-defined]
    assert (account.tenant_id, account.provider.name, account.account_id, account.disabled) == ("shop", "sslcommerz", "teststore", False)
    assert "Pa#ss" not in repr(account)
    stored = await rows(db, "SELECT sources::text AS a, source_secrets::text AS b, ciphertext FROM sources, source_secrets")
    assert "Pa#ss" not in stored[0]["a"] + stored[0]["b"]
    assert b"Pa#ss" not in stored[0]["ciphertext"]


async def test_a_replaced_secret_authenticates_for_seven_days(db: Database, vault: Vault, shop: Sources, clock: Clock) -> None:
    """Each of several replaced ones for its own seven days, newest first; then it is gone."""
    await patch(db, vault, store_passwd="second")
    clock.advance(days=3)
    await patch(db, vault, store_passwd="third")

    assert await passwords(shop) == ["third", "second", CONFIG["store_passwd"]]
    clock.advance(days=4, seconds=-5)
    assert await passwords(shop) == ["third", "second", CONFIG["store_passwd"]]
    clock.advance(seconds=10)
    assert await passwords(shop) == ["third", "second"]
    clock.advance(days=3)
    assert await passwords(shop) == ["third"]


async def test_the_same_secret_again_replaces_nothing(db: Database, vault: Vault, shop: Sources) -> None:
    """Nor does a change of something else."""
    await patch(db, vault, store_passwd=CONFIG["store_passwd"])
    await patch(db, vault, mode="live")

    assert await passwords(shop) == [CONFIG["store_passwd"]]
    assert (await shop.reload("shop-main")).config.mode == "live"  # type: ignore[union-attr]


async def test_replaced_secrets_have_a_limit(db: Database, vault: Vault, shop: Sources, clock: Clock) -> None:
    """Every one of them is tried on a notification; the change that is refused changes nothing."""
    for number in range(sources.SECRETS_MAX - 1):
        await patch(db, vault, store_passwd=f"next-{number}")

    with pytest.raises(StateConflict):
        await patch(db, vault, store_passwd="one-too-many", mode="live")
    assert len(await passwords(shop)) == sources.SECRETS_MAX
    assert (await shop.reload("shop-main")).config.mode == "sandbox"  # type: ignore[union-attr]
    clock.advance(days=8)
    await patch(db, vault, store_passwd="later")
    assert await passwords(shop) == ["later", "next-8"]


async def test_changes_at_the_same_time_come_one_after_the_other(db: Database, vault: Vault, shop: Sources) -> None:
    """No change is lost, and exactly one secret is current."""
    await asyncio.gather(*(patch(db, vault, store_passwd=f"p-{number}") for number in range(5)), patch(db, vault, mode="live"))

    assert len(await passwords(shop)) == 6
    assert (await shop.reload("shop-main")).config.mode == "live"  # type: ignore[union-attr]
    assert len(await rows(db, "SELECT FROM source_secrets WHERE expires_at IS NULL")) == 1


async def test_a_refused_change_changes_nothing(db: Database, vault: Vault, shop: Sources) -> None:
    """Neither the configuration nor a secret nor the audit log."""
    with pytest.raises(ValidationFailed):
        await patch(db, vault, store_passwd="new", mode="odd")
    with pytest.raises(NotFound):
        await sources.patch(db, vault, "other", "shop-main", {"mode": "live"}, actor="test")

    assert await passwords(shop) == [CONFIG["store_passwd"]]
    assert len(await rows(db, "SELECT FROM audit_log")) == 1


async def test_acts_on_a_source_are_in_the_audit_log_without_values(db: Database, vault: Vault, shop: Sources) -> None:
    """Who did what; of a change the names of the members, never their values."""
    await patch(db, vault, store_passwd="n3w", mode="live", unknown="x")
    await sources.disable(db, "shop", "shop-main", actor="key:1")
    await sources.disable(db, "shop", "shop-main", actor="key:2")

    entries = await rows(db, "SELECT action, actor, target, details, audit_log::text AS text FROM audit_log ORDER BY id")
    assert [(entry["action"], entry["actor"], entry["target"]) for entry in entries] == [
        ("source.create", "test", "shop-main"),
        ("source.patch", "test", "shop-main"),
        ("source.disable", "key:1", "shop-main"),
    ]
    assert entries[1]["details"] == {"changed": ["mode", "store_passwd"]}
    assert not any("n3w" in entry["text"] or "Pa#ss" in entry["text"] for entry in entries)


async def test_a_name_is_taken_once_however_many_want_it(db: Database, vault: Vault) -> None:
    """The database decides; of two tenants at once one has it."""
    for tenant in ("shop", "other"):
        await tenants.create_key(db, tenant)
    results = await asyncio.gather(
        *(create(db, vault, "wanted", tenant=tenant) for tenant in ("shop", "other") for _ in range(3)), return_exceptions=True
    )

    assert [type(result) for result in results if result is not None] == [StateConflict] * 5
    assert len(await rows(db, "SELECT FROM sources")) == len(await rows(db, "SELECT FROM source_secrets")) == 1


async def test_a_source_needs_its_tenant(db: Database, vault: Vault) -> None:
    """A sentence, and no half of it stays."""
    with pytest.raises(NotFound, match="tenant"):
        await create(db, vault, tenant="nobody")
    assert await rows(db, "SELECT FROM source_secrets") == []


async def test_what_is_remembered_is_at_most_a_second_old(db: Database, vault: Vault, shop: Sources, clock: Clock) -> None:
    """Unknown names too; `reload` and `forget` do not wait for it."""
    assert await shop.get("later") is None
    assert (await shop.get("shop-main")).disabled is False  # type: ignore[union-attr]
    await sources.disable(db, "shop", "shop-main", actor="test")
    await create(db, vault, "later")

    assert (await shop.get("shop-main")).disabled is False  # type: ignore[union-attr]
    assert await shop.get("later") is None
    assert (await shop.reload("shop-main")).disabled is True  # type: ignore[union-attr]
    assert (await shop.get("shop-main")).disabled is True  # type: ignore[union-attr]
    clock.advance(seconds=1)
    assert await shop.get("later") is not None
    shop.forget("later")
    assert await shop.get("later") is not None


async def test_what_is_remembered_has_a_bound(shop: Sources) -> None:
    """An open listener is asked for any number of names."""
    for number in range(sources.REMEMBERED_MAX + 10):
        assert await shop.get(f"unknown-{number}") is None
    for odd in ("", "A", "a/b", "x" * 1000, "\0\0", "shop-main\n"):
        assert await shop.get(odd) is None
        assert await shop.reload(odd) is None

    assert len(shop._recent._entries) == sources.REMEMBERED_MAX


async def test_many_that_ask_at_once_ask_the_database_once(shop: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who come while it is being loaded wait for it."""
    loads = 0
    load = shop._load

    async def counted(name: str) -> Any:
        nonlocal loads
        loads += 1
        return await load(name)

    monkeypatch.setattr(shop, "_load", counted)

    found = await asyncio.gather(*(shop.get("shop-main") for _ in range(50)))

    assert loads == 1
    assert len({id(account) for account in found}) == 1


async def test_a_lost_key_is_a_sentence(db: Database, shop: Sources) -> None:
    """Not a source that seems not to be there: its notifications would be lost."""
    with pytest.raises(ConfigurationError, match="IPN_SECRET_KEY"):
        await Sources(db, Vault([SecretStr(Fernet.generate_key().decode())])).get("shop-main")


async def test_a_stored_configuration_that_no_longer_fits_is_a_sentence(db: Database, shop: Sources) -> None:
    """That names the source, and not what is in it."""
    async with db.transaction("test") as tx:
        await tx.execute("""UPDATE sources SET config = '{"mode": "odd-value", "store_id": "x"}'""")
    with pytest.raises(ConfigurationError, match="shop-main") as refused:
        await shop.get("shop-main")
    assert "odd-value" not in str(refused.value)

    async with db.transaction("test") as tx:
        await tx.execute("UPDATE sources SET provider = 'gone'")
    with pytest.raises(ConfigurationError, match="gone"):
        await shop.get("shop-main")
