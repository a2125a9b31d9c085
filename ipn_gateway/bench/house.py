"""A gateway with its merchants, and the whole way of a notification through it: received, applied, delivered, and counted afterwards.

The merchants are as a deployment has them: several tenants with several sources each, because questions to a provider are limited by
source (16 in flight) and by tenant (64), and one endpoint each, which allows 100 in flight. Orders are written by COPY, with their slots
and sweeps, since registering them is not what is measured. Bodies are signed before the clock starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import endpoints, signing, sources, tenants
from ipn_gateway.bench import load, wire
from ipn_gateway.bench.comparison import Broken
from ipn_gateway.bench.stage import connected, opened_database, writing
from ipn_gateway.endpoints import NewEndpoint
from ipn_gateway.simulator import sslcommerz

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence
    from uuid import UUID

    import psycopg

    from ipn_gateway.bench.load import Answers
    from ipn_gateway.bench.processes import Started
    from ipn_gateway.bench.stage import Stage

TENANTS: Final = 4
SOURCES: Final = 4
IN_FLIGHT: Final = 100
WARM_UP: Final = 200
LOOK_AGAIN_SECONDS: Final = 0.05
SETTLE_SECONDS_MAX: Final = 120.0
SETTLE_PER_SECOND_MIN: Final = 20.0
"""Slower than this counts as standing still."""

FORM: Final = {
    "Content-Type": "application/x-www-form-urlencoded",
    "User-Agent": "SSLCOMMERZ",
    "Accept": "*/*",
}


@dataclass(frozen=True, slots=True)
class Merchant:
    """A tenant with its sources and the paths of its endpoints at the receiver."""

    tenant: str
    key: str
    sources: Sequence[str]
    endpoint_ids: Sequence[UUID]
    paths: Sequence[str]


@dataclass(frozen=True, slots=True)
class Notification:
    """A payment of an order, and its notification as it goes over the wire."""

    tenant: str
    order_id: str
    request: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a run: `arrived` is the time of each event, by path and order."""

    notifications: Sequence[Notification]
    answers: Answers
    arrived: dict[tuple[str, str], float]

    @property
    def rate(self) -> float:
        """Notifications per second, from the first request to the last event's arrival."""
        return len(self.notifications) / (max(self.arrived.values()) - self.answers.began)


@dataclass(frozen=True, slots=True)
class House:
    """Gateways on one database, with their merchants."""

    stage: Stage
    url: str
    gateways: Sequence[Started]
    merchants: Sequence[Merchant]

    @property
    def urls(self) -> list[str]:
        """Where the gateways listen."""
        return [gateway.url for gateway in self.gateways]

    async def notifications(self, count: int, merchants: Sequence[Merchant] | None = None) -> list[Notification]:
        """New orders, and the notification of the payment of each."""
        merchants = merchants or self.merchants
        run = f"B{next(self.stage.numbers)}"
        placed = [(merchants[number % len(merchants)], f"{run}-{number}") for number in range(count)]
        rows = [
            (merchant.tenant, order_id, merchant.sources[number // len(merchants) % len(merchant.sources)])
            for number, (merchant, order_id) in enumerate(placed)
        ]
        async with await writing(self.url) as connection:
            await _copy_orders(connection, rows)
        return [Notification(tenant, order_id, _request(source, order_id)) for tenant, order_id, source in rows]

    async def post(self, notifications: Sequence[Notification], *, per_second: float | None = None) -> Answers:
        """Send them to the gateways, at a rate or as fast as they are accepted. Raises `Broken` unless all are accepted."""
        requests = [notification.request for notification in notifications]
        if per_second:
            answers = await load.at_rate(self.urls, requests, per_second=per_second)
        else:
            answers = await load.at_once(self.urls, requests)
        answers.all_accepted()
        if answers.resent:
            self.stage.say(f"{answers.resent} of {len(requests)} notifications were answered 503 and sent again")
        return answers

    async def run(
        self, count: int, *, per_second: float | None = None, merchants: Sequence[Merchant] | None = None, deaf: Collection[str] = ()
    ) -> Run:
        """The whole way. Raises `Broken` unless each was applied once and came once to each endpoint but the `deaf` ones."""
        notifications = await self.notifications(count, merchants)
        await self.stage.receiver.ask("forget")
        answers = await self.post(notifications, per_second=per_second)
        paths = {merchant.tenant: merchant.paths for merchant in self.merchants}
        expected = {(path, one.order_id) for one in notifications for path in paths[one.tenant] if path not in deaf}
        arrived = await arrivals(self.stage, len(expected))
        if arrived.keys() != expected:
            raise Broken(
                f"{len(expected - arrived.keys())} events did not arrive, {len(arrived.keys() - expected)} arrived that none expected."
            )
        await self.check(notifications, deliveries=len(expected), resent=answers.resent)
        self.stage.cut_logs()
        return Run(notifications, answers, arrived)

    async def check(self, notifications: Sequence[Notification], *, deliveries: int, copies: int = 1, resent: int = 0) -> None:
        """Raises `Broken` unless each was received (`copies` times, `resent` ones perhaps twice), booked once and delivered."""
        count = len(notifications)
        wanted = dict.fromkeys(("applied", "ledger", "payments", "paid", "events"), count)
        wanted |= {"received": copies * count, "delivered": deliveries}
        given = {"tenants": [one.tenant for one in notifications], "orders": [one.order_id for one in notifications]}
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        async with await connected(self.url) as connection:
            while (found := await _books(connection, given)) != wanted:
                spare = found["received"] - wanted["received"]
                if 0 < spare <= resent:
                    wanted["received"] += spare
                    continue
                if time.monotonic() > deadline or any(found[name] > wanted[name] for name in wanted):
                    raise Broken(f"The books do not agree: {found} instead of {wanted}.")
                await asyncio.sleep(LOOK_AGAIN_SECONDS)


@contextlib.asynccontextmanager
async def opened(
    stage: Stage, *, gateways: int = 1, roles: str = "", tenants: int = TENANTS, endpoints: int = 1, url: str | None = None
) -> AsyncIterator[House]:
    """Gateways on a database of their own (or at `url`), with their merchants, warmed up if they do all of the work."""
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(stage.database()) if url is None else url
        merchants = await settled(stage, database, tenants=tenants, endpoints=endpoints)
        running = [await stack.enter_async_context(stage.gateway(database, roles=roles)) for _ in range(gateways)]
        house = House(stage, database, running, merchants)
        if not roles:
            await house.run(min(WARM_UP, stage.size.count))
        yield house


async def settled(stage: Stage, url: str, *, tenants: int = TENANTS, endpoints: int = 1) -> list[Merchant]:
    """Make merchants in a database."""
    async with opened_database(url) as db:
        return [await _merchant(stage, db, f"tenant-{number}", endpoints) for number in range(tenants)]


async def _merchant(stage: Stage, db: Any, tenant: str, count: int) -> Merchant:
    made = await tenants.create_key(db, tenant)
    config = {**wire.STORE, "mode": "sandbox", "base_url": stage.provider.url}
    names = [f"{tenant}-source-{number}" for number in range(SOURCES)]
    for name in names:
        await sources.create(db, stage.vault, tenant, name, provider="sslcommerz", given=config, actor="bench")
    paths = [f"/hooks/{tenant}/{number}" for number in range(count)]
    subscribed = []
    for path in paths:
        new = NewEndpoint(f"{stage.receiver.url}{path}", ["order.*"], max_in_flight=IN_FLIGHT)
        secret_bytes = secrets.token_bytes(signing.RANDOM_BYTES)
        subscribed.append((await endpoints.create(db, stage.vault, tenant, new, secret_bytes=secret_bytes, actor="bench")).endpoint_id)
    return Merchant(tenant, made.key, names, subscribed, paths)


def _request(source: str, order_id: str) -> bytes:
    signed = sslcommerz.sign(sslcommerz.ipn_fields(wire.attempt(order_id)), wire.STORE["store_passwd"])
    return load.request(f"/ipn/{source}", sslcommerz.encode(signed), FORM)


async def _copy_orders(connection: psycopg.AsyncConnection[Any], rows: Sequence[tuple[str, str, str]]) -> None:
    """As the gateway registers an order: its slot, itself and its sweep, which is far off."""
    async with connection.cursor() as cursor:
        async with cursor.copy("COPY order_slots (tenant_id, order_id) FROM STDIN") as copy:
            for tenant, order_id, _ in rows:
                await copy.write_row((tenant, order_id))
        async with cursor.copy("COPY orders (tenant_id, order_id, source_id, amount, currency) FROM STDIN") as copy:
            for row in rows:
                await copy.write_row((*row, wire.AMOUNT, "BDT"))
        async with cursor.copy("COPY sweeps (tenant_id, order_id, source_id, due_at) FROM STDIN") as copy:
            for row in rows:
                await copy.write_row((*row, "infinity"))


async def arrivals(stage: Stage, count: int) -> dict[tuple[str, str], float]:
    """Wait until so many events have arrived; when each did, by path and order. Raises `Broken` for repeats, and when they do not come."""
    deadline = time.monotonic() + SETTLE_SECONDS_MAX + count / SETTLE_PER_SECOND_MIN
    while (seen := await stage.receiver.ask("count"))["count"] < count:
        if time.monotonic() > deadline:
            raise Broken(f"Of {count} events {seen['count']} arrived.")
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
    if seen["repeats"]:
        raise Broken(f"{seen['repeats']} events arrived more than once.")
    return {(path, order_id): at for path, order_id, at in await stage.receiver.ask("arrivals")}


_BOOKS: Final = """
WITH given AS MATERIALIZED (SELECT * FROM unnest(%(tenants)s::text[], %(orders)s::text[]) AS given (tenant_id, order_id))
SELECT (SELECT count(*) FROM given JOIN notification_deliveries d USING (tenant_id, order_id)) AS received,
       (SELECT count(*) FROM given JOIN notification_deliveries d USING (tenant_id, order_id) WHERE outcome = 'applied') AS applied,
       (SELECT count(*) FROM given JOIN processed_notifications p USING (tenant_id, order_id)) AS ledger,
       (SELECT count(*) FROM given JOIN payments p USING (tenant_id, order_id)) AS payments,
       (SELECT count(*) FROM given JOIN orders o USING (tenant_id, order_id) WHERE o.status = 'paid') AS paid,
       (SELECT count(*) FROM given JOIN events e USING (tenant_id, order_id) WHERE e.type = 'order.paid') AS events,
       (SELECT count(*) FROM given JOIN event_deliveries d USING (tenant_id, order_id) WHERE d.status = 'delivered') AS delivered
"""


async def _books(connection: psycopg.AsyncConnection[Any], given: dict[str, list[str]]) -> dict[str, int]:
    """How often each table knows the orders. By look-ups, however large the tables are."""
    cursor = await connection.execute(_BOOKS, given)
    names = [column.name for column in cursor.description or ()]
    return dict(zip(names, await cursor.fetchone() or (), strict=True))
