"""Everything that is known about one order in one list, in the order in which it happened: the first thing to look at when asked «why».

One statement over the tables that keep it, and no question for each row. What happened in one transaction has one time; then a cause
stands before its effect. Nothing of the customer is in it: neither fields nor addresses.
"""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import ids, money, objects
from ipn_gateway.errors import NotFound
from ipn_gateway.paging import Column, Listing, moment, plain
from ipn_gateway.states import DeliveryOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ipn_gateway.db import Transaction
    from ipn_gateway.paging import Wanted

    Details = dict[str, Any]

KINDS: Final = ("order", "act", "delivery", "verdict", "effect", "payment", "refund", "event", "event_delivery", "attempt", "sweep")
"""In this order at one time. `sweep` is the only one that may lie ahead: the next question to the provider."""


def _public(prefix: str, column: str) -> str:
    """SQL for `ids.show`."""
    return f"'{prefix}_' || replace({column}::text, '-', '')"


_NDL: Final = _public(ids.NOTIFICATION_DELIVERY, "d.id")
_EDL: Final = _public(ids.EVENT_DELIVERY, "d.id")

_TOLD: Final = ("status", "previous_status", "outcome", "reason")
"""What is shown of an event's data; the event itself has all of it."""

# Each gives at, id, body (the bytes of an event) and details. All have an index on the order; the audit log has one on what was acted on.
_PARTS: Final = {
    "order": """
        SELECT o.created_at AS at, o.order_id AS id, NULL::bytea AS body, jsonb_build_object(
               'source', o.source_id, 'amount', o.amount::text, 'currency', o.currency, 'expires_at', o.expires_at) AS details
          FROM orders o WHERE o.tenant_id = %(tenant_id)s AND o.order_id = %(order_id)s""",
    "act": f"""
        SELECT a.at, {_public(ids.AUDIT, "a.id")}, NULL::bytea, jsonb_build_object(
               'action', a.action, 'actor', a.actor, 'target', a.target, 'reason', a.reason, 'details', a.details)
          FROM audit_log a
         WHERE a.tenant_id = %(tenant_id)s AND a.target = ANY(ARRAY(
               SELECT %(order_id)s
               UNION ALL SELECT {_NDL} FROM notification_deliveries d WHERE d.tenant_id = %(tenant_id)s AND d.order_id = %(order_id)s
               UNION ALL SELECT {_public(ids.NOTIFICATION_DELIVERY, "p.writer_id")} FROM processed_notifications p
                          WHERE p.tenant_id = %(tenant_id)s AND p.order_id = %(order_id)s  -- also when the delivery is gone
               UNION ALL SELECT {_EDL} FROM event_deliveries d WHERE d.tenant_id = %(tenant_id)s AND d.order_id = %(order_id)s
               UNION ALL SELECT {_public(ids.REFUND, "r.id")} FROM refunds r
                          WHERE r.tenant_id = %(tenant_id)s AND r.order_id = %(order_id)s
               UNION ALL SELECT {_public(ids.IDEMPOTENCY_KEY, "r.writer_id")} FROM refunds r
                          WHERE r.tenant_id = %(tenant_id)s AND r.order_id = %(order_id)s))
           AND (a.target <> %(order_id)s OR starts_with(a.action, 'order.'))""",  # a source may have the name of an order
    "delivery": f"""
        SELECT d.received_at, {_NDL}, NULL::bytea, jsonb_build_object(
               'source', d.source_id, 'provider', d.provider, 'via', d.via, 'asserted_status', d.asserted_status, 'proof', d.proof,
               'outcome', d.outcome, 'next_attempt_at', i.due_at)
          FROM notification_deliveries d
          LEFT JOIN inbox i ON i.tenant_id = d.tenant_id AND i.notification_delivery_id = d.id
         WHERE d.tenant_id = %(tenant_id)s AND d.order_id = %(order_id)s""",
    "verdict": f"""
        SELECT d.decided_at, {_NDL}, NULL::bytea, jsonb_build_object(
               'outcome', d.outcome, 'reason', d.reason, 'effect', d.effect, 'operation_id', d.operation_id, 'questions', d.attempts,
               'resolution', d.resolution, 'alerts', coalesce(d.alerts, '[]'))
          FROM notification_deliveries d
         WHERE d.tenant_id = %(tenant_id)s AND d.order_id = %(order_id)s AND d.decided_at IS NOT NULL""",
    "effect": f"""
        SELECT p.applied_at, concat_ws('/', p.source_id, p.operation_id, p.effect), NULL::bytea, jsonb_build_object(
               'source', p.source_id, 'operation_id', p.operation_id, 'effect', p.effect, 'amount', p.amount::text, 'currency', p.currency,
               'booked', p.booked, 'origin', p.origin,
               'notification_delivery_id', CASE WHEN p.origin = 'notification' THEN {_public(ids.NOTIFICATION_DELIVERY, "p.writer_id")} END)
          FROM processed_notifications p WHERE p.tenant_id = %(tenant_id)s AND p.order_id = %(order_id)s""",
    "payment": f"""
        SELECT p.recorded_at, {_public(ids.PAYMENT, "p.id")}, NULL::bytea, jsonb_build_object(
               'status', p.status, 'amount', p.amount::text, 'currency', p.currency, 'settled_amount', p.settled_amount::text,
               'settled_currency', p.settled_currency, 'net_amount', p.net_amount::text, 'amount_refunded', p.amount_refunded::text,
               'provider_transaction_id', p.provider_transaction_id, 'operation_id', p.operation_id, 'paid_at', p.paid_at)
          FROM payments p WHERE p.tenant_id = %(tenant_id)s AND p.order_id = %(order_id)s""",
    "refund": f"""
        SELECT r.created_at, {_public(ids.REFUND, "r.id")}, NULL::bytea, jsonb_build_object(
               'reference', r.reference, 'status', r.status, 'amount', r.amount::text, 'currency', r.currency,
               'payment_id', {_public(ids.PAYMENT, "r.payment_id")}, 'provider_refund_id', r.provider_refund_id, 'reason', r.reason,
               'updated_at', r.updated_at)
          FROM refunds r WHERE r.tenant_id = %(tenant_id)s AND r.order_id = %(order_id)s""",
    "event": """
        SELECT e.created_at, e.id, e.body, jsonb_build_object('type', e.type, 'sequence', e.sequence)
          FROM events e WHERE e.tenant_id = %(tenant_id)s AND e.order_id = %(order_id)s""",
    "event_delivery": f"""
        SELECT d.created_at, {_EDL}, NULL::bytea, jsonb_build_object(
               'event_id', d.event_id, 'event_type', d.event_type, 'endpoint_id', {_public(ids.ENDPOINT, "d.endpoint_id")},
               'status', d.status, 'attempt_count', d.attempt_count, 'next_attempt_at',
               CASE WHEN e.status = 'enabled' THEN d.next_attempt_at END, 'delivered_at', d.delivered_at, 'endpoint_status', e.status)
          FROM event_deliveries d LEFT JOIN endpoints e ON e.tenant_id = d.tenant_id AND e.id = d.endpoint_id
         WHERE d.tenant_id = %(tenant_id)s AND d.order_id = %(order_id)s""",
    "attempt": f"""
        SELECT a.started_at, {_public(ids.ATTEMPT, "a.id")}, NULL::bytea, jsonb_build_object(
               'event_delivery_id', {_EDL}, 'event_type', d.event_type, 'endpoint_id', {_public(ids.ENDPOINT, "d.endpoint_id")},
               'number', a.number, 'trigger', a.trigger, 'outcome', a.outcome, 'status_code', a.status_code, 'error', a.error,
               'duration_ms', a.duration_ms)
          FROM event_deliveries d JOIN delivery_attempts a ON a.tenant_id = d.tenant_id AND a.event_delivery_id = d.id
         WHERE d.tenant_id = %(tenant_id)s AND d.order_id = %(order_id)s""",
    "sweep": """
        SELECT s.due_at, s.order_id, NULL::bytea, jsonb_build_object('source', s.source_id, 'due_at', s.due_at)
          FROM sweeps s WHERE s.tenant_id = %(tenant_id)s AND s.order_id = %(order_id)s""",
}


def _place(text: str) -> int:
    return [str(place) for place in range(len(KINDS))].index(text)


_TIMELINE: Final = Listing(
    "timeline",
    "SELECT * FROM ("
    + " UNION ALL ".join(f"SELECT {place} AS place, part.* FROM ({_PARTS[kind]}) AS part" for place, kind in enumerate(KINDS))
    + ") AS parts WHERE true",
    key=(Column("at", moment), Column("place", _place), Column("id", plain)),
    filters={},
    oldest_first=True,
)


async def of(tx: Transaction, tenant_id: str, order_id: str, wanted: Wanted) -> objects.Page[objects.TimelineItem]:
    """What happened to an order, oldest first. Raises `NotFound`."""
    given = {"tenant_id": tenant_id, "order_id": order_id}
    if not await tx.value("SELECT EXISTS (SELECT FROM orders WHERE tenant_id = %(tenant_id)s AND order_id = %(order_id)s)", given):
        raise NotFound
    rows, next_cursor = await _TIMELINE.page(tx, wanted, given)
    return objects.Page(items=[_item(row) for row in rows], next_cursor=next_cursor)


def _item(row: Mapping[str, Any]) -> objects.TimelineItem:
    kind = KINDS[row["place"]]
    details = {name: _shown(name, value, row["details"]) for name, value in row["details"].items()}
    if row["body"] is not None:
        data = json.loads(row["body"]).get("data", {})
        details |= {name: data[name] for name in _TOLD if name in data}
    return objects.TimelineItem(at=row["at"], kind=kind, id=row["id"], summary=_SENTENCES[kind](details), **details)


def _shown(name: str, value: Any, details: Mapping[str, Any]) -> Any:
    """A value as the API has it: money with its currency's decimals, times in RFC 3339."""
    if value is None:
        return None
    if name in {"settled_amount", "net_amount"}:
        return money.show(Decimal(value), details["settled_currency"] or details["currency"])
    if name in {"amount", "amount_refunded"}:
        return money.show(Decimal(value), details["currency"])
    return objects.show_time(datetime.fromisoformat(value)) if name.endswith("_at") else value


# --- what each is in words

_MEANING: Final = {
    DeliveryOutcome.APPLIED: "the provider confirmed it, and it was applied",
    DeliveryOutcome.DUPLICATE: "this operation was applied before; nothing was done",
    DeliveryOutcome.STALE: "understood, and it changes nothing any more",
    DeliveryOutcome.REJECTED: "not believed",
    DeliveryOutcome.HELD: "confirmed by the provider, yet it does not fit the order; a person decides",
    DeliveryOutcome.CONFLICT: "money that this order did not expect; a person decides",
    DeliveryOutcome.MALFORMED: "could not be read",
    DeliveryOutcome.DEAD: "no verdict within the whole schedule; a person decides",
}
_PROOFS: Final = {
    "proved": "its hash is right",
    "unproved": "its hash proves nothing",
    "refused": "its hash is missing or wrong",
    "none": "it cannot be read",
}
_ORIGINS: Final = {"notification": "by a notification", "sweep": "by asking the provider", "manual": "by a person"}


def _money(details: Details) -> str:
    return f"{details['amount']} {details['currency']}" if details.get("amount") is not None else "no money"


def _because(details: Details) -> str:
    return f" ({details['reason']})" if details.get("reason") else ""


def _order(details: Details) -> str:
    until = f", to be paid until {details['expires_at']}" if details["expires_at"] else ""
    return f"The order was registered: {_money(details)} at {details['source']}{until}."


def _act(details: Details) -> str:
    why = f": {details['reason']}" if details["reason"] else ""
    return f"{details['actor']} did {details['action']} on {details['target']}{why}."


def _delivery(details: Details) -> str:
    how = "A notification" if details["via"] == "ipn" else f"The customer's browser ({details['via']})"
    said = f"said {details['asserted_status']}" if details["asserted_status"] else "said nothing that could be read"
    due = f"; it is worked on at {details['next_attempt_at']}" if details["next_attempt_at"] else ""
    waits = f"; {details['outcome']} until now" if details["outcome"] in {DeliveryOutcome.RECEIVED, DeliveryOutcome.PARKED} else ""
    return f"{how} {said}; {_PROOFS[details['proof']]}{waits}{due}."


def _verdict(details: Details) -> str:
    resolved = f" Since then a person decided: {details['resolution']}." if details["resolution"] else ""
    return f"Decided as {details['outcome']}{_because(details)}: {_MEANING[DeliveryOutcome(details['outcome'])]}.{resolved}"


def _effect(details: Details) -> str:
    what = "was booked as unapplied, a second payment" if details["booked"] == "unapplied" else "was applied, once and for ever"
    return f"{details['effect']} ({_money(details)}) {what}; learned {_ORIGINS[details['origin']]}."


def _payment(details: Details) -> str:
    known_as = details["provider_transaction_id"]
    return f"A payment of {_money(details)} was recorded as {details['status']}; the provider calls it {known_as}."


def _refund(details: Details) -> str:
    return f"A refund of {_money(details)} under the reference {details['reference']} is {details['status']}."


def _event(details: Details) -> str:
    change = f": {details['previous_status']} → {details['status']}" if "previous_status" in details else ""
    return f"The event {details['type']} was written{change}."


def _event_delivery(details: Details) -> str:
    where = f"{details['event_type']} to {details['endpoint_id']}"
    if details["status"] != "pending":
        return f"{where} was due; it is {details['status']} after {details['attempt_count']} attempt(s)."
    if details["endpoint_status"] == "disabled":
        return f"{where} is due, and waits for its endpoint to be enabled."
    return f"{where} is due; the next attempt is at {details['next_attempt_at']}."


def _attempt(details: Details) -> str:
    answer = f" {details['status_code']}" if details["status_code"] else f" ({details['error']})" if details["error"] else ""
    return (
        f"Attempt {details['number']} ({details['trigger']}) of {details['event_type']} to {details['endpoint_id']}: "
        f"{details['outcome']}{answer} in {details['duration_ms']} ms."
    )


def _sweep(details: Details) -> str:
    return f"Unpaid so far; the provider is asked about it at {details['due_at']}."


_SENTENCES: Final[Mapping[str, Callable[[Details], str]]] = {
    "order": _order,
    "act": _act,
    "delivery": _delivery,
    "verdict": _verdict,
    "effect": _effect,
    "payment": _payment,
    "refund": _refund,
    "event": _event,
    "event_delivery": _event_delivery,
    "attempt": _attempt,
    "sweep": _sweep,
}
