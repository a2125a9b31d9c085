"""Dispatchers and subscribers for the tests of event deliveries; as a program, a dispatcher in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import db as database
from ipn_gateway import logs, settings, signing
from ipn_gateway.clock import Clock
from ipn_gateway.event_deliveries import Dispatcher
from ipn_gateway.faults import Faults
from ipn_gateway.slots import Slots
from ipn_gateway.transport import Transport
from ipn_gateway.vault import Vault
from tests.loopback import OK, Server, says, tls_contexts
from tests.make import TENANT, Make

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable
    from uuid import UUID

    from aiohttp.abc import AbstractResolver

    from tests.loopback import Answering

    Row = dict[str, Any]

KEY = Fernet.generate_key().decode()


@dataclass
class Running:
    """A dispatcher and its slots."""

    dispatcher: Dispatcher
    slots: Slots
    freed: asyncio.Event

    async def run_once(self) -> int:
        """One pass, and all that it started."""
        count = await self.dispatcher.run_once()
        assert await self.slots.drained(seconds=10)
        return count

    async def drain(self) -> int:
        """Passes until nothing is due and nothing runs; how many attempts were started."""
        assert await self.slots.drained(seconds=10)
        total = 0
        while count := await self.run_once():
            total += count
        return total

    async def free(self) -> None:
        """Wait until a slot has become free since the last time."""
        async with asyncio.timeout(10):
            await self.freed.wait()
        self.freed.clear()

    async def start_all(self) -> int:
        """Passes until nothing can be claimed, without waiting for what they start."""
        total = 0
        while count := await self.dispatcher.run_once():
            total += count
        return total


@contextlib.asynccontextmanager
async def dispatching(
    db: database.Database,
    *,
    key: str = KEY,
    slots: int = 50,
    chance: float = 0.0,
    faults: Faults | None = None,
    wake: Callable[[], None] | None = None,
    loopback: bool = True,
    resolver: AbstractResolver | None = None,
    tls: ssl.SSLContext | None = None,
    **given: Any,
) -> AsyncIterator[Running]:
    """A dispatcher that may call loopback endpoints; at the end what it still runs is broken off, as if it died."""
    made = settings.load(allow_loopback_endpoints=loopback, **given)
    freed = asyncio.Event()
    own = Slots(slots, freed=freed.set)
    check, trusted = database.assert_no_transaction, tls or tls_contexts()[1]
    async with Transport(made, faults or Faults(), assert_no_transaction=check, resolver=resolver, tls=trusted) as transport:
        try:
            dispatcher = Dispatcher(db, transport, Vault([SecretStr(key)]), own, made, chance=lambda: chance, wake=wake)
            yield Running(dispatcher, own, freed)
        finally:
            await own.cancel()


@dataclass(frozen=True)
class Message:
    """What a subscriber got."""

    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


def received(server: Server) -> list[Message]:
    """The requests of a subscriber, in the order in which they came."""
    return [_message(request) for request in list(server.requests)]


def _message(request: bytes) -> Message:
    head, _, body = request.partition(b"\r\n\r\n")
    pairs = (line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    return Message({name.lower(): value for name, value in pairs}, body)


@dataclass
class Subscribers:
    """Endpoints with secrets that can be read here, and what the database says about their event deliveries."""

    db: database.Database
    make: Make
    secrets: dict[UUID, list[str]] = field(default_factory=dict)
    public_keys: dict[UUID, list[str]] = field(default_factory=dict)
    _count: int = 0

    async def endpoint(self, to: Server | str, *, secrets: int = 1, **given: Any) -> UUID:
        row = await self.make.endpoint(url=to if isinstance(to, str) else to.url, **given)
        for _ in range(secrets):
            await self.secret(row["id"], tenant_id=row["tenant_id"])
        endpoint_id: UUID = row["id"]
        return endpoint_id

    async def secret(self, endpoint_id: UUID, key: str = KEY, **given: Any) -> str:
        self._count += 1
        keys, vault = signing.new_keys(self._count.to_bytes(32, "big") * 2), Vault([SecretStr(key)])
        row = {
            "ciphertext": vault.seal(keys.secret.encode()),
            "seed_ciphertext": vault.seal(keys.private_key.encode()),
            "public_key": keys.public_key,
        }
        await self.make.endpoint_secret(endpoint_id=endpoint_id, **row | given)
        self.secrets.setdefault(endpoint_id, []).append(keys.secret)
        self.public_keys.setdefault(endpoint_id, []).append(keys.public_key)
        return keys.secret

    async def deliver(self, endpoint_id: UUID, count: int = 1, **given: Any) -> list[UUID]:
        """Event deliveries of `count` new events, due now; their ids."""
        return [(await self.make.event_delivery(endpoint_id=endpoint_id, **given))["id"] for _ in range(count)]

    async def backlog(self, endpoint_id: UUID, count: int, *, tenant_id: str = TENANT) -> None:
        """So many event deliveries at once, due since an hour ago, of events without a sequence."""
        await self.run(
            """WITH staged AS (
                   INSERT INTO event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, next_attempt_at)
                   SELECT %(tenant_id)s, gen_random_uuid(), 'evt_' || gen_random_uuid(), %(endpoint_id)s, 'order.paid',
                          ipn_now() - interval '1 hour'
                     FROM generate_series(1, %(count)s) RETURNING tenant_id, event_id)
               INSERT INTO events (tenant_id, id, type, body) SELECT tenant_id, event_id, 'endpoint.test', '{}' FROM staged""",
            tenant_id=tenant_id,
            endpoint_id=endpoint_id,
            count=count,
        )

    async def rows(self, table: str, where: str = "true", order: str = "id", **values: Any) -> list[Row]:
        async with self.db.transaction("test.rows") as tx:
            return await tx.all(dict, f"SELECT *, ipn_now() AS now FROM {table} WHERE {where} ORDER BY {order}", values)

    async def delivery(self, delivery_id: UUID) -> Row:
        (row,) = await self.rows("event_deliveries", "id = %(id)s", id=delivery_id)
        return row

    async def attempts(self, delivery_id: UUID) -> list[Row]:
        return await self.rows("delivery_attempts", "event_delivery_id = %(id)s", "number", id=delivery_id)

    async def statuses(self, endpoint_id: UUID) -> dict[str, int]:
        """How many event deliveries of the endpoint have each status."""
        rows = await self.rows("event_deliveries", "endpoint_id = %(id)s", id=endpoint_id)
        found = [row["status"] for row in rows]
        return {status: found.count(status) for status in sorted(set(found))}

    async def in_flight(self, endpoint_id: UUID) -> int:
        return len(await self.rows("event_deliveries", "endpoint_id = %(id)s AND lease_expires_at > ipn_now()", id=endpoint_id))

    async def run(self, statement: str, **values: Any) -> int:
        async with self.db.transaction("test.run") as tx:
            return await tx.execute(statement, {"tenant_id": TENANT, **values})


def refuses(status: int = 500, headers: str = "") -> Answering:
    """An answer of this status, always."""
    return says(f"HTTP/1.1 {status} Sorry\r\nContent-Length: 0\r\n{headers}\r\n".encode())


class Hanging:
    """An answer that does not come until the test lets it go, one or all; then it is `then`, a 200."""

    def __init__(self, then: bytes = OK) -> None:
        self.then = then
        self._waiting: list[asyncio.Event] = []
        self._reached = asyncio.Semaphore(0)
        self._all = False

    async def __call__(self, server: Server, writer: asyncio.StreamWriter) -> None:
        go = asyncio.Event()
        self._waiting.append(go)
        self._reached.release()
        if not self._all:
            ends = [asyncio.create_task(event.wait()) for event in (go, server.over)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        writer.write(self.then)

    async def has(self, count: int) -> None:
        """Wait until `count` more requests hang."""
        async with asyncio.timeout(10):
            for _ in range(count):
                await self._reached.acquire()

    def let_one_go(self) -> None:
        """Answer the request that has hung longest."""
        self._waiting.pop(0).set()

    def let_go(self) -> None:
        """Answer all, those to come too."""
        self._all = True
        for waiting in self._waiting:
            waiting.set()


async def _main(url: str, key: str) -> None:
    """Deliver what is due once, as soon as something can be claimed; say what was counted."""
    logs.configure(json=True)
    async with database.Database(url, clock=Clock(), faults=Faults(), name="dispatcher") as db, dispatching(db, key=key) as running:
        while not await running.dispatcher.run_once():  # noqa: ASYNC110 - another process may have it locked; only the database tells
            await asyncio.sleep(0.02)
        assert await running.slots.drained(seconds=30)
    sys.stdout.write(json.dumps(logs.counters))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
