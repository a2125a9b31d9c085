"""Receive: keep the bytes before trusting them. When `receive` returns, the notification delivery is durable.

Refused ones (forged, malformed) are kept up to a rate per source and address, beyond it counted and sampled: an open endpoint must not
fill the disk. So the rates weigh bytes, and a source has one over all addresses too. A wrong hash may only be a changed password, so one
that names a known unpaid order is kept beyond the rates too.

Arrivals that are in flight together are written together (`Batches`); each sender is answered after the commit of his own.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import columns, ids, logs
from ipn_gateway.batches import Batches
from ipn_gateway.db import INTAKE_SECONDS_MAX
from ipn_gateway.errors import GatewayError, MalformedNotification, SignatureInvalid, UnsupportedMediaType
from ipn_gateway.providers.base import Assertion, Effect, InboundRequest, Malformed, Proof
from ipn_gateway.states import UNPAID

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.sources import SourceAccount, Sources

BODY_BYTES_MAX: Final = 64 * 1024
TEXT_LENGTH_MAX: Final = 255
REFUSED_UNIT_BYTES: Final = 4096  # each refused one costs a token for each so many bytes that it begins; a bucket holds so many tokens …
REFUSED_BURST: Final = 300  # … of one source and address, …
REFUSED_PER_SECOND: Final = 5.0  # … which gets as many each second;
REFUSED_BURST_PER_SOURCE: Final = 3000  # the same of one source, whatever the addresses
REFUSED_PER_SECOND_PER_SOURCE: Final = 25.0
REFUSED_SAMPLE: Final = 100  # beyond that, one of so many is kept, within a rate of its own for each source
SAMPLES_BURST: Final = 100
SAMPLES_PER_SECOND: Final = 1.0
REFUSED_PER_ORDER: Final = 100  # and this many that name one unpaid order
ADDRESSES_MAX: Final = 10_000
IPV6_SITE_BITS: Final = 64  # who has one address of IPv6 has all of its /64
TOGETHER_MAX: Final = 64
"""Arrivals in one statement: what it costs beside them is then little, and the last bytes of the first one wait for few others."""

WRITERS: Final = 2
"""Sets that are written at once: one is prepared while the other commits, and a connection that falls silent holds up its own set only."""

WAITING_MAX: Final = 1000
"""Arrivals that wait to be written, as many as requests at once; one more is answered 503."""

NOT_STORED_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the sender is told: the delivery's id (None when a refused one was only counted), and the error to answer, if any.

    `order_id` is the order that it names, true or not.
    """

    delivery_id: UUID | None
    error: GatewayError | None = None
    order_id: str | None = None


class Buckets:
    """Token buckets by key, full at first; bounded, the one not looked at for longest goes first."""

    def __init__(self, clock: Clock, *, burst: float, per_second: float) -> None:
        self._clock = clock
        self._burst = burst
        self._per_second = per_second
        self._tokens: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def has(self, key: Hashable, tokens: float) -> bool:
        """Whether so many tokens are there."""
        now = self._clock.monotonic_seconds()
        left, at = self._tokens.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        self._tokens[key] = (left, now)
        if len(self._tokens) > ADDRESSES_MAX:
            self._tokens.popitem(last=False)
        return left >= tokens

    def take(self, key: Hashable, tokens: float) -> None:
        """Take tokens that `has` has found."""
        left, at = self._tokens[key]
        self._tokens[key] = (left - tokens, at)


class Floods:
    """The rates within which refused deliveries are kept, in this process."""

    def __init__(self, clock: Clock) -> None:
        self._by_address = Buckets(clock, burst=REFUSED_BURST, per_second=REFUSED_PER_SECOND)
        self._by_source = Buckets(clock, burst=REFUSED_BURST_PER_SOURCE, per_second=REFUSED_PER_SECOND_PER_SOURCE)
        self._samples = Buckets(clock, burst=SAMPLES_BURST, per_second=SAMPLES_PER_SECOND)
        self._beyond = 0

    def within(self, source: str, address: str | None, size_bytes: int = 1) -> bool:
        """Whether one more refused delivery of this size is within the rates; takes its tokens when it is."""
        tokens = _weight(size_bytes)
        site = (source, _site(address))
        allowed = self._by_address.has(site, tokens) and self._by_source.has(source, tokens)
        if allowed:
            self._by_address.take(site, tokens)
            self._by_source.take(source, tokens)
        return allowed

    def sampled(self, source: str, size_bytes: int = 1) -> bool:
        """Whether this one beyond the rates is kept as a sample."""
        self._beyond += 1
        tokens = _weight(size_bytes)
        chosen = self._beyond % REFUSED_SAMPLE == 1 and self._samples.has(source, tokens)
        if chosen:
            self._samples.take(source, tokens)
        return chosen


def _weight(size_bytes: int) -> int:
    return max(1, -(-size_bytes // REFUSED_UNIT_BYTES))


def _site(address: str | None) -> str:
    """What one sender has as good as for himself: the address, or the /64 of an IPv6 one; IPv4 inside IPv6 is IPv4."""
    try:
        found = ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(found, IPv4Address) or found.ipv4_mapped:
        return str(getattr(found, "ipv4_mapped", None) or found)
    return str(IPv6Address(int(found) >> IPV6_SITE_BITS << IPV6_SITE_BITS))


def _size_bytes(request: InboundRequest) -> int:
    """What storing a request takes, about."""
    return len(request.body) + len(request.query) + sum(len(name) + len(value) for name, value in request.headers)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was made of the bytes before anything is stored."""

    proof: str
    assertion: Assertion | None = None
    malformed: Malformed | None = None

    @property
    def outcome(self) -> str:
        """What the delivery begins with: `received`, or its end where it is refused."""
        if self.malformed:
            return "malformed"
        return "rejected" if self.proof == Proof.REFUSED else "received"

    @property
    def reason(self) -> str | None:
        """Why it is refused."""
        if self.malformed:
            return self.malformed.reason
        return "signature" if self.proof == Proof.REFUSED else None

    @property
    def order_id(self) -> str | None:
        """The order that it names."""
        return (self.assertion or self.malformed).order_id if self.assertion or self.malformed else None  # type: ignore[union-attr]

    @property
    def error(self) -> GatewayError | None:
        """What the sender is answered, if it is refused."""
        if self.malformed:
            wrong = UnsupportedMediaType if self.malformed.reason == "media_type" else MalformedNotification
            return wrong(self.malformed.detail)
        return SignatureInvalid() if self.proof == Proof.REFUSED else None


class Intake:
    """Where arrivals are kept: the database, the rates of the refused ones, and those that wait to be written."""

    def __init__(self, db: Database, sources: Sources) -> None:
        self.db = db
        self.sources = sources
        self.floods = Floods(db.clock)
        self._arrivals: Batches[dict[str, Any], None] = Batches(
            partial(db.rerun, _store_together, db, within_seconds=INTAKE_SECONDS_MAX),
            name="notifications",
            most=TOGETHER_MAX,
            waiting_max=WAITING_MAX,
            writers=WRITERS,
            within_seconds=INTAKE_SECONDS_MAX,
        )

    async def store(self, row: dict[str, Any]) -> None:
        """Returns when it is committed. Raises `Overloaded` when too many wait, and when that took so long that the sender is told.

        Nothing is taken back by a caller that goes away: what has arrived is written all the same.
        """
        await self._arrivals.put(row)

    async def drained(self) -> None:
        """Wait until what has arrived is written, as long as senders would."""
        await self._arrivals.drained(seconds=2 * INTAKE_SECONDS_MAX)


async def receive(
    intake: Intake, source: SourceAccount, request: InboundRequest, *, via: str = "ipn", remote_address: str | None = None
) -> Receipt:
    """Read, prove locally, store, commit. Raises `Overloaded` when nothing could be stored in time."""
    reading = await _read(intake.sources, source, request)
    delivery_id = ids.new(intake.db.clock.now())
    row = _row(source, request, reading, delivery_id, via=via, remote_address=remote_address)
    stored = True
    if row["outcome"] == "received" or _within_rates(intake.floods, source, request, remote_address):
        await intake.store(row)
    else:
        stored = await intake.db.rerun(_store_if_unpaid, intake.db, row, within_seconds=INTAKE_SECONDS_MAX)
    _report(row, reading, stored=stored)
    return Receipt(delivery_id if stored else None, reading.error, row["order_id"])


def _within_rates(floods: Floods, source: SourceAccount, request: InboundRequest, remote_address: str | None) -> bool:
    size = _size_bytes(request)
    return floods.within(source.name, remote_address, size) or floods.sampled(source.name, size)


async def _read(sources: Sources, source: SourceAccount, request: InboundRequest) -> Reading:
    reading = read(source, request)
    if reading.proof == Proof.REFUSED and (fresh := await sources.reload(source.name)):
        return read(fresh, request)  # the password may have been replaced a moment ago
    return reading


def read(source: SourceAccount, request: InboundRequest) -> Reading:
    """What a request says, and what its local check says of it with every secret that still authenticates. Stores nothing."""
    said = source.provider.assertions(request)
    if isinstance(said, Malformed):
        return Reading("none", malformed=said)
    return Reading(str(source.provider.authenticate(request, source.configs)), assertion=said[0])


def _row(
    source: SourceAccount, request: InboundRequest, reading: Reading, delivery_id: UUID, *, via: str, remote_address: str | None
) -> dict[str, Any]:
    return {
        "tenant_id": source.tenant_id,
        "id": delivery_id,
        "source_id": source.name,
        "provider": source.provider.name,
        "via": via,
        "remote_address": remote_address,
        "query": storable(request.query, BODY_BYTES_MAX),
        "headers": json.dumps(
            [[name, "[left out]" if name in NOT_STORED_HEADERS else storable(value, BODY_BYTES_MAX)] for name, value in request.headers]
        ),
        "raw_body": request.body,
        "sha256": hashlib.sha256(request.body).digest(),
        **asserted(reading),
        "outcome": reading.outcome,
        "reason": reading.reason,
        "alerts": json.dumps(reading.assertion.alerts) if reading.assertion and reading.assertion.alerts else None,
    }


def asserted(reading: Reading) -> dict[str, Any]:
    """What a delivery's row says of the local proof, and of what was asserted."""
    assertion = reading.assertion
    status = assertion.status if assertion else reading.malformed.status if reading.malformed else None
    effect = assertion.effect if assertion and assertion.effect not in {Effect.UNKNOWN, Effect.INFORMATIVE} else None
    return {
        "proof": reading.proof,
        "proved": reading.proof == Proof.PROVED,
        "provider_delivery_id": storable(assertion.provider_delivery_id) if assertion else None,
        "copy_id": storable(assertion.copy_id) if assertion and reading.proof == Proof.PROVED else None,
        "order_id": storable(reading.order_id),
        "operation_id": storable(assertion.operation_id) if assertion else None,
        "effect": effect,
        "asserted_status": storable(status),
    }


def storable(text: str | None, length_max: int = TEXT_LENGTH_MAX) -> str | None:
    """Text that PostgreSQL takes and a person can read: NUL becomes ␀, undecodable bytes ?, cut at `length_max` characters."""
    if text is None or (text.isascii() and "\x00" not in text):
        return text and text[:length_max]
    return text.replace("\x00", "␀").encode("utf-8", "replace").decode()[:length_max]


_STORE: Final = f"""
WITH delivery AS (
    INSERT INTO notification_deliveries
           (tenant_id, id, source_id, provider, via, remote_address, query, headers, raw_body, sha256, proof, provider_delivery_id,
            copy_id, order_id, operation_id, effect, asserted_status, outcome, reason, decided_at, alerts)
    SELECT tenant_id, id, source_id, provider, via, remote_address, query, headers::jsonb, raw_body, sha256, proof, provider_delivery_id,
           copy_id, order_id, operation_id, effect, asserted_status, outcome, reason,
           CASE WHEN outcome <> 'received' THEN ipn_now() END, alerts::jsonb
      FROM {
    columns.given(
        tenant_id="text",
        id="uuid",
        source_id="text",
        provider="text",
        via="text",
        remote_address="text",
        query="text",
        headers="text",
        raw_body="bytea",
        sha256="bytea",
        proof="text",
        provider_delivery_id="text",
        copy_id="text",
        order_id="text",
        operation_id="text",
        effect="text",
        asserted_status="text",
        outcome="text",
        reason="text",
        alerts="text",
    )
}
    ON CONFLICT ON CONSTRAINT notification_deliveries_pkey DO NOTHING
    RETURNING tenant_id, id, source_id, order_id, operation_id, proof, outcome, received_at
)
INSERT INTO inbox (tenant_id, notification_delivery_id, source_id, order_id, operation_id, proved, received_at, due_at)
SELECT tenant_id, id, source_id, order_id, operation_id, proof = 'proved', received_at, received_at
  FROM delivery WHERE outcome = 'received'
"""

_ONE_MORE_REFUSED: Final = """
UPDATE order_slots SET refused_count = refused_count + 1
 WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s AND refused_count < %(refused_per_order)s
   AND EXISTS (SELECT FROM orders WHERE orders.tenant_id = order_slots.tenant_id AND orders.order_id = order_slots.order_id
                  AND status = ANY(%(unpaid)s))
"""


async def _store_together(db: Database, rows: Sequence[dict[str, Any]]) -> list[None]:
    """Insert deliveries and their open work. Their ids are ours and the whole key, so a run after a lost COMMIT finds its own rows."""
    async with db.transaction("notifications.receive", seconds_max=INTAKE_SECONDS_MAX) as tx:
        await _store(tx, rows)
    return [None] * len(rows)


async def _store_if_unpaid(db: Database, row: dict[str, Any]) -> bool:
    """The same for one that was refused and is beyond the rates, if it names an unpaid order that has few such; whether it was stored."""
    asked = {
        "tenant_id": row["tenant_id"],
        "order_id": row["order_id"],
        "refused_per_order": REFUSED_PER_ORDER,
        "unpaid": [str(status) for status in UNPAID],
    }
    async with db.transaction("notifications.receive", seconds_max=INTAKE_SECONDS_MAX) as tx:
        if await tx.execute(_ONE_MORE_REFUSED, asked) == 0:
            return False
        await _store(tx, [row])
    return True


async def _store(tx: Transaction, rows: Sequence[dict[str, Any]]) -> None:
    await tx.execute(_STORE, columns.arrays(rows))


def _report(row: Mapping[str, Any], reading: Reading, *, stored: bool) -> None:
    logs.count(f"notifications.{row['outcome']}" if stored else "notifications.refused_beyond_rate")
    logs.get("listener").info(
        "notification.received",
        notification_delivery_id=ids.show(ids.NOTIFICATION_DELIVERY, row["id"]),
        source=row["source_id"],
        via=row["via"],
        order_id=row["order_id"],
        proof=row["proof"],
        outcome=row["outcome"],
        reason=row["reason"],
        stored=stored,
        alerts=list(reading.assertion.alerts) if reading.assertion else [],
    )
