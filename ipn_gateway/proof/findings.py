"""What the proof found: the bank's truth, the gateway's rows and what the subscribers verified, held against each other.

Each of the three counts for itself. What is right is what the bank says; our own rows are only looked at.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal  # noqa: TC003 - fields of rows
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ipn_gateway.db import Database
    from ipn_gateway.simulator.sslcommerz import Attempt

READ: Final[Mapping[str, str]] = {
    "orders": "SELECT order_id, status, amount, currency, amount_paid FROM orders",
    "payments": "SELECT order_id, operation_id, amount, currency, status FROM payments",
    "ledger": "SELECT order_id, operation_id, effect FROM processed_notifications",
    "events": "SELECT id, type, order_id FROM events",
    "event_deliveries": "SELECT event_id, endpoint_id, status FROM event_deliveries",
    "delivered": "SELECT event_delivery_id FROM delivery_attempts WHERE outcome = 'delivered'",
    "applied": "SELECT order_id, operation_id, effect FROM notification_deliveries WHERE outcome = 'applied'",
}
OPEN: Final = """
    SELECT (SELECT count(*) FROM inbox) AS notifications,
           (SELECT count(*) FROM event_deliveries WHERE status = 'pending') AS event_deliveries
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """The gateway's rows."""

    orders: Sequence[Mapping[str, Any]]
    payments: Sequence[Mapping[str, Any]]
    ledger: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    event_deliveries: Sequence[Mapping[str, Any]]
    delivered: Sequence[Mapping[str, Any]]
    applied: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one subscriber verified. `altered` counts repeats with other bytes, `refused` requests that did not verify."""

    event_ids: Collection[str]
    repeats: int
    altered: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The counts, and what they are about. `accepted` = `applied` + the lost ones that were accepted."""

    accepted: int
    """Genuine notifications that were answered 2xx, each once however often it was sent."""
    applied: int
    """Of these, those whose order stands exactly as the bank says."""
    lost: int
    """Notifications accepted, or payments told by nobody, whose order does not stand as the bank says."""
    doubled: int
    """Payments, ledger rows, events, obligations or sums beyond what the bank knows."""
    events: int
    events_lost: int
    """Events of the outbox that some subscriber has not verified."""

    lost_orders: Sequence[str]
    doubled_what: Sequence[str]
    events_lost_ids: Sequence[str]
    events_repeated: int
    """Requests with an event that was there already, by design: same id, same bytes."""
    events_altered: int
    events_invented: int
    """Events that a subscriber verified and that are not in the outbox: sent before they were true."""
    signatures_refused: int


async def read(db: Database) -> Books:
    """All rows that count."""
    async with db.autocommit("findings.read") as tx:
        return Books(**{name: await tx.all(dict, sql) for name, sql in READ.items()})


async def left(db: Database) -> dict[str, int]:
    """What is still to be done: notifications to decide, event deliveries to make."""
    async with db.autocommit("findings.left") as tx:
        return await tx.one(dict, OPEN) or {}


def compare(
    attempts: Sequence[Attempt], accepted: Collection[int], untold: Collection[str], books: Books, heard: Sequence[Heard]
) -> Findings:
    """Hold the three against each other. `accepted` are places in `attempts`, `untold` orders of which no notification was sent."""
    wrong = _wrong(attempts, books)
    missing = [place for place in accepted if place in wrong]
    silent = [place for place, attempt in enumerate(attempts) if attempt.tran_id in untold and place in wrong]
    doubled = list(_doubled(attempts, books))
    outbox = {event["id"] for event in books.events}
    unheard = sorted({event_id for one in heard for event_id in outbox.difference(one.event_ids)})
    return Findings(
        accepted=len(accepted),
        applied=len(accepted) - len(missing),
        lost=len(missing) + len(silent),
        doubled=len(doubled),
        events=len(outbox),
        events_lost=len(unheard),
        lost_orders=sorted({attempts[place].tran_id for place in (*missing, *silent)}),
        doubled_what=sorted(doubled),
        events_lost_ids=unheard,
        events_repeated=sum(one.repeats for one in heard),
        events_altered=sum(one.altered for one in heard),
        events_invented=len({event_id for one in heard for event_id in one.event_ids} - outbox),
        signatures_refused=sum(one.refused for one in heard),
    )


def _wrong(attempts: Sequence[Attempt], books: Books) -> set[int]:
    """The places of the attempts whose order does not stand as the bank says."""
    orders = {order["order_id"]: order for order in books.orders}
    booked = Counter((row["order_id"], row["operation_id"], row["amount"], row["currency"], row["status"]) for row in books.payments)
    written = Counter((row["order_id"], row["operation_id"], row["effect"]) for row in books.ledger)
    told = Counter((event["order_id"], event["type"]) for event in books.events)
    expected = _expected(attempts)
    wrong = set()
    for place, attempt in enumerate(attempts):
        order, (status, paid) = orders.get(attempt.tran_id), expected[attempt.tran_id]
        stands = order is not None and (order["status"], order["amount_paid"]) == (status, paid)
        if attempt.paid:
            money = (attempt.tran_id, attempt.val_id, attempt.currency_amount, attempt.currency_type, "applied")
            stands = stands and booked[money] > 0 and written[attempt.tran_id, attempt.val_id, "paid"] > 0
            stands = stands and told[attempt.tran_id, f"order.{status}"] > 0
        if not stands:
            wrong.add(place)
    return wrong


def _expected(attempts: Sequence[Attempt]) -> dict[str, tuple[str, Decimal]]:
    """The status of each order and what was paid for it, by what the bank knows."""
    expected: dict[str, tuple[str, Decimal]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.paid):
        status = ("paid_on_hold" if attempt.risky else "paid") if attempt.paid else "failed"
        expected[attempt.tran_id] = (status, attempt.currency_amount if attempt.paid else attempt.currency_amount * 0)
    return expected


def _doubled(attempts: Sequence[Attempt], books: Books) -> Iterable[str]:
    """What counts more than once, or was never at the bank: a sentence each."""
    paid = {attempt.val_id for attempt in attempts if attempt.paid}
    expected = _expected(attempts)
    yield from _beyond_one("payment", ((row["operation_id"],) for row in books.payments))
    yield from _beyond_one("ledger row", ((row["operation_id"], row["effect"]) for row in books.ledger))
    yield from _beyond_one("paid effect", ((row["order_id"],) for row in books.ledger if row["effect"] == "paid"))
    yield from _beyond_one("event", ((row["order_id"], row["type"]) for row in books.events if row["type"].startswith("order.")))
    yield from _beyond_one("applied", ((row["operation_id"], row["effect"]) for row in books.applied if row["effect"] == "paid"))
    yield from _beyond_one("event delivery", ((row["event_id"], row["endpoint_id"]) for row in books.event_deliveries))
    yield from _beyond_one("delivered attempt", ((row["event_delivery_id"],) for row in books.delivered))
    yield from (f"payment that the bank does not know: {row['operation_id']}" for row in books.payments if row["operation_id"] not in paid)
    for order in books.orders:
        most = expected.get(order["order_id"], ("", order["amount"] * 0))[1]
        if order["amount_paid"] > most:
            yield f"sum of an order: {order['order_id']} has {order['amount_paid']} of {most}"


def _beyond_one(what: str, keys: Iterable[tuple[Any, ...]]) -> Iterable[str]:
    for key, count in Counter(keys).items():
        yield from [f"{what}: {' '.join(map(str, key))}"] * (count - 1)


def differences(findings: Findings, *, notifications: int, undone: Mapping[str, int]) -> list[str]:
    """What refutes the promise, a sentence each; none when all is well."""
    return [sentence for differs, sentence in _comparisons(findings, notifications, undone) if differs]


def _comparisons(it: Findings, notifications: int, undone: Mapping[str, int]) -> Iterable[tuple[bool, str]]:
    yield it.accepted != notifications, f"Of {notifications} genuine notifications {it.accepted} were accepted."
    yield it.lost > 0, f"{it.lost} are lost: {_some(it.lost_orders)}."
    yield it.doubled > 0, f"{it.doubled} count more than once: {_some(it.doubled_what)}."
    yield it.events_lost > 0, f"{it.events_lost} of {it.events} events did not arrive: {_some(it.events_lost_ids)}."
    yield it.events_altered > 0, f"{it.events_altered} events came again with other bytes."
    yield it.events_invented > 0, f"{it.events_invented} events arrived that are not in the outbox."
    yield it.signatures_refused > 0, f"{it.signatures_refused} webhooks did not verify."
    yield from ((count > 0, f"{count} {what.replace('_', ' ')} are still open.") for what, count in undone.items())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")  # noqa: PLR2004 - enough to begin with
