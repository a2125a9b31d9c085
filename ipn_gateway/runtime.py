"""What a process works with: opened once, in order, and closed in the reverse order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ipn_gateway import effects, event_log, migrations, postgres, retention, vault
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database, assert_no_transaction
from ipn_gateway.errors import ConfigurationError
from ipn_gateway.faults import Faults
from ipn_gateway.notifications import Intake
from ipn_gateway.sources import Sources
from ipn_gateway.tenants import Keys
from ipn_gateway.transport import Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.effects import EffectHook
    from ipn_gateway.settings import Settings
    from ipn_gateway.vault import Vault

CONNECTIONS = {"web": 10, "inbox": 8, "dispatcher": 6, "maintenance": 4}
"""Each share has connections of its own, so that neither slow providers nor slow endpoints starve intake."""


URL_FILE: Final = "public_url"


@dataclass(frozen=True, slots=True)
class Wakes:
    """Hints inside this process that there is work; a poll finds it without them."""

    inbox: asyncio.Event = field(default_factory=asyncio.Event)
    dispatcher: asyncio.Event = field(default_factory=asyncio.Event)
    sweep: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The collaborators of one process. `db` is the share of web and commands."""

    settings: Settings
    url: str = field(repr=False)
    clock: Clock
    faults: Faults
    vault: Vault
    db: Database
    inbox_db: Database
    dispatcher_db: Database
    maintenance_db: Database
    transport: Transport
    sources: Sources
    keys: Keys
    intake: Intake
    effect: EffectHook | None
    public_url: str
    wakes: Wakes = field(default_factory=Wakes)


@asynccontextmanager
async def server_url(settings: Settings) -> AsyncIterator[str]:
    """The URL of the database: the given one, or that of the embedded server, which runs as long as somebody uses it."""
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    async with postgres.running(settings.data_dir) as server:
        yield server.url


async def prepare(url: str, settings: Settings, db: Database, *, migrate: bool) -> None:
    """Bring the schema up to date, or refuse: an embedded database is migrated, a given one only when asked."""
    if settings.database_url is None or migrate:
        await migrations.migrate(url, db)
        return
    if waiting := await migrations.pending(db):
        raise ConfigurationError(
            f"The database lacks {len(waiting)} migration(s), from {waiting[0]} on: run `ipn-gateway migrate`, or serve with --migrate."
        )
    await event_log.ensure_continued(db)
    await retention.ensure_partitions(db)


@asynccontextmanager
async def opened(
    settings: Settings,
    url: str,
    *,
    public_url: str = "http://127.0.0.1:8000",
    migrate: bool = False,
    clock: Clock | None = None,
    faults: Faults | None = None,
) -> AsyncIterator[Runtime]:
    """Everything, opened. Raises `ConfigurationError` with a sentence when something cannot be used."""
    clock, faults = clock or Clock(), faults or Faults()
    async with AsyncExitStack() as stack:
        shares = {name: Database(url, clock=clock, faults=faults, name=name, connections_max=most) for name, most in CONNECTIONS.items()}
        for share in shares.values():
            await stack.enter_async_context(share)
        db = shares["web"]
        await prepare(url, settings, db, migrate=migrate)
        box = await asyncio.to_thread(vault.load_or_make, settings.data_dir, settings)
        transport = Transport(settings, faults, assert_no_transaction=assert_no_transaction)
        await transport.open()
        stack.push_async_callback(transport.close)
        sources = Sources(db, box)
        intake = Intake(db, sources)
        stack.push_async_callback(intake.drained)
        yield Runtime(
            settings=settings,
            url=url,
            clock=clock,
            faults=faults,
            vault=box,
            db=db,
            inbox_db=shares["inbox"],
            dispatcher_db=shares["dispatcher"],
            maintenance_db=shares["maintenance"],
            transport=transport,
            sources=sources,
            keys=Keys(db),
            intake=intake,
            effect=effects.load_effect(settings.effect),
            public_url=(settings.public_url or public_url).rstrip("/"),
        )


def remember_url(settings: Settings, url: str) -> None:
    """Tell commands on the same embedded data directory where the service is reached."""
    if settings.database_url is None:
        (settings.data_dir / URL_FILE).write_text(url, encoding="utf-8")


def remembered_url(settings: Settings) -> str | None:
    """What the last `serve` on this embedded data directory remembered, if any did."""
    file = settings.data_dir / URL_FILE
    return file.read_text(encoding="utf-8") if settings.database_url is None and file.is_file() else None
