"""What must have become of everything once nothing is under way any more, derived from what the bank knows and from what people did."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from psycopg.rows import dict_row

from tests.dispatching import received

if TYPE_CHECKING:
    import psycopg

    from ipn_gateway.simulator.app import Simulator
    from ipn_gateway.simulator.sslcommerz import Attempt
    from tests.machine import Subscriber

    Row = dict[str, Any]

UNPAID: Final = frozenset({"pending", "failed", "cancelled", "expired"})
# The sweep asks on about an order whose attempts stay unclear, or whose money waits for a person. A key under which nothing was begun is
# for its client to use again.
OPEN: Final = """
SELECT least(
    (SELECT min(due_at) FROM inbox WHERE state = 'received'),
    (SELECT min(parked_at) + interval '72 hours' FROM inbox WHERE state = 'parked'),
    (SELECT min(due_at) FROM sweeps WHERE due_at < created_at + interval '3 days'),
    (SELECT min(due_at) FROM refunds),
    (SELECT min(greatest(next_attempt_at, open_until)) FROM event_deliveries LEFT JOIN endpoint_states USING (tenant_id, endpoint_id)
      WHERE next_attempt_at IS NOT NULL),
    (SELECT min(lease_expires_at) FROM idempotency_keys WHERE state = 'in_progress' AND recovery_point <> 'started'))
"""


def next_due(database: psycopg.Connection[Any]) -> Any:
    """When the next thing is due; None when nothing is."""
    (due,) = database.execute(OPEN).fetchone() or (None,)
    return due


def open_work(database: psycopg.Connection[Any]) -> list[str]:
    """The rows of what is still to be done."""
    tables = ("inbox", "sweeps", "refunds", "idempotency_keys", "endpoint_states")
    found = [(table, database.execute(f"SELECT t::text FROM {table} AS t").fetchall()) for table in tables]
    return [f"{table}: {row[0]}" for table, rows in found for row in rows]


def disappointed(database: psycopg.Connection[Any], simulator: Simulator, subscribers: list[Subscriber]) -> list[str]:
    """What is not as it must be, as sentences."""
    rows = _Rows(database)
    return [*_money(rows, simulator), *_refunds(rows, simulator), *_deliveries(rows, subscribers)]


class _Rows:
    def __init__(self, database: psycopg.Connection[Any]) -> None:
        self._database = database

    def __call__(self, statement: str) -> list[Row]:
        with self._database.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(statement).fetchall()


def _money(rows: _Rows, simulator: Simulator) -> list[str]:
    paid = [payment.attempt for payment in simulator.bank.payments if payment.attempt.paid]
    payments = rows("SELECT * FROM payments")
    held = {row["operation_id"] for row in rows("SELECT operation_id FROM notification_deliveries WHERE outcome = 'held'")}
    by_bank = {attempt.bank_tran_id: attempt for attempt in paid}
    wrong = [f"{row['operation_id']} is no payment of the bank's" for row in payments if not _is(row, by_bank)]
    wrong += [f"{bank} was booked {times} times" for bank, times in Counter(_names(payments)).items() if times > 1]
    acts = {(row["action"], row["target"]) for row in rows("SELECT action, target FROM audit_log")}
    manual = {row["order_id"] for row in rows("SELECT order_id FROM processed_notifications WHERE origin = 'manual' AND effect = 'paid'")}
    for order in rows("SELECT * FROM orders"):
        attempts = [attempt for attempt in paid if attempt.tran_id == order["order_id"]]
        known = {row["operation_id"] for row in payments} | held
        wrong += [f"{order['order_id']}: {one.val_id} is nowhere" for one in attempts if one.val_id not in known]
        if order["order_id"] not in manual:
            applied = [row for row in payments if row["order_id"] == order["order_id"] and row["status"] == "applied"]
            wrong += _order(order, attempts, [by_bank[row["provider_transaction_id"]] for row in applied if _is(row, by_bank)], acts)
    return wrong


def _names(payments: list[Row]) -> list[str]:
    return [row["provider_transaction_id"] for row in payments]


def _is(row: Row, by_bank: dict[str, Attempt]) -> bool:
    attempt = by_bank.get(row["provider_transaction_id"])
    return attempt is not None and (attempt.tran_id, attempt.val_id, attempt.currency_amount, attempt.currency_type) == (
        *(row["order_id"], row["operation_id"]),
        *(row["amount"], row["currency"]),
    )


def _order(order: Row, attempts: list[Attempt], applied: list[Attempt], acts: set[tuple[str, str]]) -> list[str]:
    """One that nobody put right by hand: paid exactly once if the bank has its money, otherwise not."""
    name, status = order["order_id"], order["status"]
    exact = [one for one in attempts if (one.currency_amount, one.currency_type) == (order["amount"], order["currency"])]
    if not exact:
        return [f"{name} is {status} without its money"] if applied or status not in UNPAID or order["amount_paid"] else []
    if len(applied) != 1 or applied[0] not in exact or order["amount_paid"] != order["amount"] or status in UNPAID:
        return [f"{name} is {status} with {len(applied)} payments applied, and the bank has {len(exact)} of its sum"]
    may_wait = applied[0].risky or ("order.cancel", name) in acts or order["expires_at"] is not None
    released = ("order.release", name) in acts
    if status == "paid_on_hold" and not may_wait:
        return [f"{name} waits for a person without a reason"]
    if applied[0].risky and not released and status == "paid":
        return [f"{name} is paid at a risk that nobody took"]
    return []


def _refunds(rows: _Rows, simulator: Simulator) -> list[str]:
    theirs = simulator.api.refunds.by_ref_id
    ours = rows("SELECT r.*, p.provider_transaction_id FROM refunds AS r JOIN payments AS p ON p.id = r.payment_id")
    by_id = {row["provider_refund_id"]: row for row in ours if row["provider_refund_id"]}
    wrong = [f"{key} moved money {times} times" for key, times in simulator.api.refunds.accepted().items() if times > 1]
    doubtful = Counter(row["provider_transaction_id"] for row in ours if row["status"] == "indeterminate")
    unknown = Counter(one.payment.attempt.bank_tran_id for ref, one in theirs.items() if ref not in by_id)
    wrong += [f"money of {bank} went back and nobody doubts it" for bank in unknown if unknown[bank] > doubtful[bank]]
    for row in ours:
        told = theirs.get(row["provider_refund_id"])
        if row["status"] == "succeeded" and (told is None or told.status != "refunded"):
            wrong.append(f"{row['reference']} succeeded here and not there")
        if row["status"] == "failed" and told is not None and told.status != "cancelled":
            wrong.append(f"{row['reference']} failed here and not there")
        if told is not None and row["currency"] == "BDT" and told.amount != row["amount"]:
            wrong.append(f"{row['reference']} is {row['amount']} here and {told.amount} there")
        if row["status"] in {"pending", "processing"}:
            wrong.append(f"{row['reference']} is still {row['status']}")
    return wrong


def _deliveries(rows: _Rows, subscribers: list[Subscriber]) -> list[str]:
    bodies = {row["id"]: bytes(row["body"]) for row in rows("SELECT id, body FROM events")}
    undecided = rows("SELECT id, outcome FROM notification_deliveries WHERE decided_at IS NULL")
    wrong = [f"{row['id']} is still {row['outcome']}" for row in undecided]
    got: dict[Any, set[str]] = {}
    for subscriber in subscribers:
        messages = received(subscriber.server)
        wrong += [f"{one.id} came with other bytes" for one in messages if bodies.get(one.id) != one.body]
        got[subscriber.server.url] = {one.id for one in messages}
    for row in rows("SELECT d.*, p.url, p.deleted_at FROM event_deliveries AS d JOIN endpoints AS p ON p.id = d.endpoint_id"):
        if row["status"] == "delivered" and row["event_id"] not in got[row["url"]]:
            wrong.append(f"{row['event_id']} was delivered to nobody")
        if row["status"] not in {"delivered", "dead"} and row["deleted_at"] is None:
            wrong.append(f"{row['event_id']} is still {row['status']}")
    return wrong
