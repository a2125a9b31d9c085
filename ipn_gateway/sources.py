"""Sources: merchant accounts at providers. Secrets are sealed and write-only; a replaced one still authenticates for seven days."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from unicodedata import category

from psycopg import errors as pg
from psycopg.types.json import Jsonb
from pydantic import SecretStr, ValidationError

from ipn_gateway import audit, ids, logs, validation
from ipn_gateway.db import INTAKE_SECONDS_MAX
from ipn_gateway.errors import ConfigurationError, NotFound, StateConflict
from ipn_gateway.operations import Downstream, Operation
from ipn_gateway.providers import discovered
from ipn_gateway.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.providers.base import Provider, ProviderConfig
    from ipn_gateway.vault import Vault

CREATE: Final = Operation(
    name="POST /v1/sources", fields={"name": "json", "provider": "json", "config": "secret"}, downstream=Downstream.LOCAL
)

NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{1,62}")
SECRET_OVERLAP_DAYS: Final = 7
SECRETS_MAX: Final = 10
"""Versions of a source's secrets that authenticate at once: each is tried on a notification that the newer ones do not prove."""

REMEMBERED_SECONDS: Final = 1.0
REMEMBERED_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """A source as its listener and its workers use it. `configs` has the current one first, then those that still authenticate."""

    name: str
    tenant_id: str
    provider: Provider
    account_id: str
    config: ProviderConfig
    configs: tuple[ProviderConfig, ...]
    disabled: bool


class Sources:
    """The sources, remembered per process for a second, unknown names too."""

    def __init__(self, db: Database, vault: Vault) -> None:
        self._db = db
        self._vault = vault
        self._recent: Recent[SourceAccount | None] = Recent(db.clock, seconds=REMEMBERED_SECONDS, entries_max=REMEMBERED_MAX)

    async def get(self, name: str) -> SourceAccount | None:
        """The source of this name, at most a second old; None when there is none."""
        return await self._recent.get(name, lambda: self._load(name)) if NAME.fullmatch(name) else None

    async def reload(self, name: str) -> SourceAccount | None:
        """The source as it is now, for when a hash is refused: the password may have been replaced a moment ago."""
        return await self._recent.reload(name, lambda: self._load(name)) if NAME.fullmatch(name) else None

    def forget(self, name: str) -> None:
        """Read it from the database the next time."""
        self._recent.forget(name)

    async def _load(self, name: str) -> SourceAccount | None:
        async with self._db.autocommit("sources.load", seconds_max=INTAKE_SECONDS_MAX) as tx:
            row = await tx.one(dict, _LOAD, {"name": name})
        return _account(row, self._vault) if row else None


_LOAD = """
SELECT s.name, s.tenant_id, s.provider, s.account_id, s.config, s.disabled_at IS NOT NULL AS disabled,
       ARRAY(SELECT ciphertext FROM source_secrets
              WHERE source_id = s.name AND (expires_at IS NULL OR expires_at > ipn_now())
              ORDER BY expires_at DESC NULLS FIRST, created_at DESC) AS sealed
  FROM sources AS s WHERE s.name = %(name)s
"""


def _account(row: Mapping[str, Any], vault: Vault) -> SourceAccount:
    provider = _adapter(row["provider"])
    try:
        configs = tuple(provider.Config(**(row["config"] | _opened(vault, sealed))) for sealed in row["sealed"])
    except ValidationError:
        raise ConfigurationError(f"The stored configuration of the source {row['name']} is not one that its provider takes.") from None
    return SourceAccount(row["name"], row["tenant_id"], provider, row["account_id"], configs[0], configs, row["disabled"])


async def create(db: Database, vault: Vault, tenant_id: str, name: str, *, provider: str, given: Mapping[str, Any], actor: str) -> None:
    """Register a source in a transaction of its own, with the configuration `given`; its name is taken for ever.

    Raises `ValidationFailed` for a name, provider or configuration that cannot be, `StateConflict` when the name is taken.
    """
    config = checked(name, provider, given)
    try:
        async with db.transaction("sources.create") as tx:
            await create_in(tx, vault, tenant_id, name, provider=provider, config=config, actor=actor, now=db.clock.now())
    except pg.ForeignKeyViolation:
        raise NotFound("There is no tenant of this name; make a key for it first.") from None


def checked(name: str, provider: str, given: Mapping[str, Any]) -> ProviderConfig:
    """The configuration of a new source. Raises `ValidationFailed` for a name, provider or configuration that cannot be."""
    if not NAME.fullmatch(name):
        raise validation.refused("must be 2 to 63 of a-z, 0-9 and -, and begin with a letter or digit", "name")
    adapter = discovered().get(provider)
    if adapter is None:
        raise validation.refused(f"must be one of {', '.join(sorted(discovered()))}", "provider")
    return _checked(adapter, given)


async def create_in(
    tx: Transaction, vault: Vault, tenant_id: str, name: str, *, provider: str, config: ProviderConfig, actor: str, now: datetime
) -> None:
    """Register a source that was `checked`. Raises `StateConflict` when the name is taken."""
    await _insert(tx, tenant_id, name, provider, config)
    await _insert_secrets(tx, vault, name, _secrets(config), now)
    await audit.record(tx, tenant_id, actor=actor, action="source.create", target=name, now=now)


async def patch(db: Database, vault: Vault, tenant_id: str, name: str, given: Mapping[str, Any], *, actor: str) -> None:
    """Merge `given` into the configuration; null takes an optional value away.

    A replaced secret still authenticates for seven days. Raises `NotFound`, `ValidationFailed`, and `StateConflict` when too many do.
    """
    async with db.transaction("sources.patch") as tx:
        row = await tx.one(dict, _LOCK, {"tenant_id": tenant_id, "name": name})
        if row is None:
            raise NotFound
        provider = _adapter(row["provider"])
        old_secrets = _opened(vault, row["sealed"])
        merged = row["config"] | old_secrets | given
        config = _checked(provider, {key: value for key, value in merged.items() if value is not None})
        now = db.clock.now()
        await tx.execute(
            "UPDATE sources SET config = %(config)s, account_id = %(account)s WHERE name = %(name)s",
            {"name": name, "config": Jsonb(_public(config)), "account": config.account},
        )
        if _secrets(config) != old_secrets:
            await _replace_secrets(tx, vault, name, _secrets(config), now)
        changed = sorted(set(given) & set(provider.Config.model_fields))
        await audit.record(tx, tenant_id, actor=actor, action="source.patch", target=name, now=now, details={"changed": changed})


_LOCK = """
SELECT s.provider, s.config, s.disabled_at,
       (SELECT ciphertext FROM source_secrets WHERE source_id = s.name AND expires_at IS NULL) AS sealed
  FROM sources AS s WHERE s.tenant_id = %(tenant_id)s AND s.name = %(name)s FOR UPDATE OF s
"""


async def disable(db: Database, tenant_id: str, name: str, *, actor: str) -> None:
    """Stop applying what comes for this source; it still receives. Doing it again changes nothing. Raises `NotFound`."""
    async with db.transaction("sources.disable") as tx:
        row = await tx.one(dict, _LOCK, {"tenant_id": tenant_id, "name": name})
        if row is None:
            raise NotFound
        if row["disabled_at"] is None:
            await tx.execute("UPDATE sources SET disabled_at = ipn_now() WHERE name = %(name)s", {"name": name})
            await audit.record(tx, tenant_id, actor=actor, action="source.disable", target=name, now=db.clock.now())


# --- configurations and their secrets


def _adapter(provider: str) -> Provider:
    if provider not in discovered():
        raise ConfigurationError(f"This installation lacks the provider {provider}, which a source was made with.")
    return discovered()[provider]


def _checked(provider: Provider, given: Mapping[str, Any]) -> ProviderConfig:
    """The configuration, if its provider takes it. Whatever the provider says, no secret is blank or holds a control character."""
    try:
        config = provider.Config(**given)
    except ValidationError as error:
        raise validation.failed(error, "config") from None
    for name, secret in _secrets(config).items():
        if not secret.strip() or any(category(character) in {"Cc", "Cs"} for character in secret):
            raise validation.refused("must not be blank or contain a control character", "config", name)
    return config


def _secrets(config: ProviderConfig) -> dict[str, str]:
    values = {name: getattr(config, name) for name in config.SECRETS}
    return {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in values.items() if value is not None
    }


def _public(config: ProviderConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=set(config.SECRETS), exclude_none=True)


def _opened(vault: Vault, sealed: bytes) -> dict[str, str]:
    opened: dict[str, str] = json.loads(vault.unseal(sealed))
    return opened


async def _insert(tx: Transaction, tenant_id: str, name: str, provider: str, config: ProviderConfig) -> None:
    inserted = await tx.execute(
        """INSERT INTO sources (name, tenant_id, provider, account_id, config)
           VALUES (%(name)s, %(tenant_id)s, %(provider)s, %(account)s, %(config)s)
           ON CONFLICT ON CONSTRAINT sources_pkey DO NOTHING""",
        {"name": name, "tenant_id": tenant_id, "provider": provider, "account": config.account, "config": Jsonb(_public(config))},
    )
    if inserted == 0:
        raise StateConflict("This source name is taken; names stay taken for ever, disabled sources' too.")


async def _replace_secrets(tx: Transaction, vault: Vault, name: str, secrets: Mapping[str, str], now: datetime) -> None:
    active = await tx.value(
        "SELECT count(*) FROM source_secrets WHERE source_id = %(name)s AND (expires_at IS NULL OR expires_at > ipn_now())", {"name": name}
    )
    if active >= SECRETS_MAX:
        raise StateConflict(f"{active} versions of this source's secrets still authenticate; wait until one expires.")
    await tx.execute(
        """UPDATE source_secrets SET expires_at = ipn_now() + %(days)s * interval '1 day'
            WHERE source_id = %(name)s AND expires_at IS NULL""",
        {"name": name, "days": SECRET_OVERLAP_DAYS},
    )
    await _insert_secrets(tx, vault, name, secrets, now)
    logs.get("sources").info("source.secrets_replaced", source=name, active=active + 1)


async def _insert_secrets(tx: Transaction, vault: Vault, name: str, secrets: Mapping[str, str], now: datetime) -> None:
    await tx.execute(
        "INSERT INTO source_secrets (id, source_id, ciphertext) VALUES (%(id)s, %(name)s, %(ciphertext)s)",
        {"id": ids.new(now), "name": name, "ciphertext": vault.seal(json.dumps(dict(secrets)).encode())},
    )
