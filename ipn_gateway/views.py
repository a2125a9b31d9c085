"""Reading: every object that customers see, one or a page of them, each in one statement (attempts come in a second).

All take `tx`, so that an answer can be made in the transaction of its effect as well as on a connection of its own.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from ipn_gateway import ids, money, objects, retention
from ipn_gateway.errors import NotFound
from ipn_gateway.objects import Page
from ipn_gateway.paging import Column, Listing, moment, plain
from ipn_gateway.providers import answers, discovered, forms
from ipn_gateway.providers.base import InboundRequest, Malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ipn_gateway.db import Transaction
    from ipn_gateway.paging import Wanted
    from ipn_gateway.providers.base import Provider

    Row = Mapping[str, Any]

_BY_ID: Final = (Column("id", UUID),)


async def _page(
    tx: Transaction, listing: Listing, wanted: Wanted, given: Mapping[str, Any], shape: Callable[[Row], objects.T]
) -> objects.Page[objects.T]:
    rows, next_cursor = await listing.page(tx, wanted, given)
    return Page(items=[shape(row) for row in rows], next_cursor=next_cursor)


async def _one(tx: Transaction, listing: Listing, key: str, tenant_id: str, value: Any) -> Row:
    """The row with this value in the column `key`. Raises `NotFound`."""
    statement = f"SELECT * FROM ({listing.select}) AS listed WHERE {key} = %(value)s"
    row = await tx.one(dict, statement, {"tenant_id": tenant_id, "value": value})
    if row is None:
        raise NotFound
    return row


# --- orders, with their payments and refunds

_ORDERS: Final = Listing(
    "orders",
    """SELECT o.order_id, o.source_id, o.status, o.reason, o.amount, o.currency, o.amount_paid, o.amount_refunded, o.return_url,
              o.expires_at, o.metadata, o.created_at, o.updated_at,
              (SELECT json_agg(p ORDER BY p.recorded_at, p.id)::text FROM payments AS p
                WHERE p.tenant_id = o.tenant_id AND p.order_id = o.order_id) AS payments,
              (SELECT json_agg(r ORDER BY r.created_at, r.id)::text FROM refunds AS r
                WHERE r.tenant_id = o.tenant_id AND r.order_id = o.order_id) AS refunds
         FROM orders AS o WHERE o.tenant_id = %(tenant_id)s""",
    key=(Column("created_at", moment), Column("order_id", plain)),
    filters={"status": "status = %(status)s", "source": "source_id = %(source)s", "since": "created_at >= %(since)s"},
)


async def order(tx: Transaction, tenant_id: str, order_id: str) -> objects.Order:
    """One order. Raises `NotFound`."""
    return _order(await _one(tx, _ORDERS, "order_id", tenant_id, order_id))


async def orders(
    tx: Transaction, tenant_id: str, wanted: Wanted, *, status: str | None = None, source: str | None = None, since: datetime | None = None
) -> Page[objects.Order]:
    """Orders, newest first; `since` is the earliest creation."""
    return await _page(tx, _ORDERS, wanted, {"tenant_id": tenant_id, "status": status, "source": source, "since": since}, _order)


def _order(row: Row) -> objects.Order:
    currency = row["currency"]
    return objects.Order(
        **_picked(row, "order_id", "status", "reason", "currency", "return_url", "expires_at", "metadata", "created_at", "updated_at"),
        source=row["source_id"],
        amount=money.show(row["amount"], currency),
        amount_paid=money.show(row["amount_paid"], currency),
        amount_refunded=money.show(row["amount_refunded"], currency),
        payments=[_payment(part) for part in _children(row["payments"])],
        refunds=[_refund(part) for part in _children(row["refunds"])],
    )


def _payment(row: Row) -> objects.Payment:
    settled_in = row["settled_currency"] or row["currency"]
    return objects.Payment(
        **_picked(row, "currency", "settled_currency", "provider_transaction_id", "operation_id", "status", "paid_at", "recorded_at"),
        payment_id=ids.show(ids.PAYMENT, UUID(row["id"])),
        source=row["source_id"],
        amount=money.show(Decimal(row["amount"]), row["currency"]),
        amount_refunded=money.show(Decimal(row["amount_refunded"]), row["currency"]),
        settled_amount=_money(row["settled_amount"], settled_in),
        net_amount=_money(row["net_amount"], settled_in),
    )


def _refund(row: Row) -> objects.Refund:
    return objects.Refund(
        **_picked(row, "order_id", "reference", "currency", "status", "provider_refund_id", "reason", "failure"),
        **_picked(row, "created_at", "updated_at"),
        refund_id=ids.show(ids.REFUND, UUID(row["id"])),
        payment_id=ids.show(ids.PAYMENT, UUID(row["payment_id"])),
        amount=money.show(Decimal(row["amount"]), row["currency"]),
    )


def _children(rows: str | None) -> list[dict[str, Any]]:
    """Rows that came as JSON. Their numbers are money, so no float may touch them."""
    found: list[dict[str, Any]] = json.loads(rows or "[]", parse_float=Decimal)
    return found


def _money(amount: Decimal | int | None, currency: str) -> str | None:
    return None if amount is None else money.show(Decimal(amount), currency)


# --- sources

_SOURCES: Final = Listing(
    "sources",
    "SELECT name, provider, config, created_at, disabled_at FROM sources WHERE tenant_id = %(tenant_id)s",
    key=(Column("created_at", moment), Column("name", plain)),
    filters={},
)


async def source(tx: Transaction, tenant_id: str, name: str, *, public_url: str) -> objects.Source:
    """One source; `public_url` is where providers reach this service. Raises `NotFound`."""
    return _source(await _one(tx, _SOURCES, "name", tenant_id, name), public_url)


async def sources(tx: Transaction, tenant_id: str, wanted: Wanted, *, public_url: str) -> Page[objects.Source]:
    """Sources, newest first."""
    return await _page(tx, _SOURCES, wanted, {"tenant_id": tenant_id}, lambda row: _source(row, public_url))


def _source(row: Row, public_url: str) -> objects.Source:
    return objects.Source(
        **_picked(row, "name", "provider", "config", "created_at", "disabled_at"),
        mode=row["config"].get("mode"),
        listener_url=f"{public_url}/ipn/{row['name']}",
    )


# --- notification deliveries

_NOTIFICATIONS: Final = Listing(
    "notification_deliveries",
    """SELECT d.*, i.due_at AS next_attempt_at, greatest(d.attempts, i.questions) AS questions
         FROM notification_deliveries AS d
         LEFT JOIN inbox AS i ON i.tenant_id = d.tenant_id AND i.notification_delivery_id = d.id
        WHERE d.tenant_id = %(tenant_id)s""",
    key=_BY_ID,
    filters={
        "order_id": "order_id = %(order_id)s",
        "source": "source_id = %(source)s",
        "outcome": "outcome = %(outcome)s",
        "provider_delivery_id": "provider_delivery_id = %(provider_delivery_id)s",
        "since": "received_at >= %(since)s AND id >= %(since_id)s",  # the second half only spares partitions
        "until": "received_at < %(until)s AND id <= %(until_id)s",
    },
)
# What waits is few rows of a narrow table: found along its primary key, and only these are looked up. A cursor is good for both lists.
_WAITING: Final = replace(
    _NOTIFICATIONS,
    select="""SELECT d.*, i.notification_delivery_id AS open_id, i.due_at AS next_attempt_at, greatest(d.attempts, i.questions) AS questions
         FROM inbox AS i
         JOIN notification_deliveries AS d ON d.tenant_id = i.tenant_id AND d.id = i.notification_delivery_id
        WHERE i.tenant_id = %(tenant_id)s AND i.state IN ('held', 'conflict', 'dead') AND i.due_at IS NULL""",
    key=(Column("open_id", UUID),),
)
_HOST_CLOCK_OFF_SECONDS: Final = 86_400  # ids carry host time, rows database time
_LATEST: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


async def notification_delivery(tx: Transaction, tenant_id: str, delivery_id: str, *, raw: bool) -> objects.NotificationDelivery:
    """One notification delivery, with its raw body if `raw`. Raises `NotFound`."""
    found = await _one(tx, _NOTIFICATIONS, "id", tenant_id, ids.read(ids.NOTIFICATION_DELIVERY, delivery_id))
    return _notification(found, raw=raw)


async def notification_deliveries(
    tx: Transaction, tenant_id: str, wanted: Wanted, *, raw: bool, waiting: bool = False, **filters: Any
) -> Page[objects.NotificationDelivery]:
    """Notification deliveries, newest first; received from `since` on and before `until`, and equal in the other filters.

    With `waiting` only those that a person has to resolve.
    """
    since, until = filters.get("since"), filters.get("until")
    bounds = {
        "since_id": _id_at(since, -_HOST_CLOCK_OFF_SECONDS) if since else None,
        "until_id": _id_at(until, +_HOST_CLOCK_OFF_SECONDS) if until else None,
    }
    given = {"tenant_id": tenant_id, **filters, **bounds}
    return await _page(tx, _WAITING if waiting else _NOTIFICATIONS, wanted, given, lambda row: _notification(row, raw=raw))


def _id_at(moment: datetime, off_seconds: int) -> UUID:
    return retention.lower_bound(datetime.fromtimestamp(min(max(moment.timestamp() + off_seconds, 0), _LATEST), UTC))


def _notification(row: Row, *, raw: bool) -> objects.NotificationDelivery:
    return objects.NotificationDelivery(
        **_picked(row, "provider_delivery_id", "provider", "via", "received_at", "order_id", "operation_id", "effect", "asserted_status"),
        **_picked(
            row, "proof", "outcome", "reason", "decided_at", "next_attempt_at", "remote_address", "headers", "provider_answer", "resolution"
        ),
        id=ids.show(ids.NOTIFICATION_DELIVERY, row["id"]),
        source=row["source_id"],
        alerts=row["alerts"] or [],
        attempts=row["questions"],
        sha256=row["sha256"].hex(),
        fields=_fields(row),
        raw_body_base64=base64.b64encode(row["raw_body"]).decode() if raw else None,
    )


def _fields(row: Row) -> dict[str, str] | None:
    """What the provider's adapter reads in the request, personal fields masked; of one that it refuses, the form if it is one."""
    provider = discovered().get(row["provider"])
    if provider is None:
        return None
    request = InboundRequest.stored(row["via"], row["query"], row["headers"], row["raw_body"])
    fields = _read(provider, request)
    if fields is None:
        return None
    masked = answers.view(fields, provider.masked_fields)
    return {_marked(name): _marked(text) for name, text in masked.items()}


def _marked(text: str) -> str:
    """Text that can be sent: a mark stands for NUL and for half a surrogate pair."""
    return text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()


def _read(provider: Provider, request: InboundRequest) -> Mapping[str, str] | None:
    said = provider.assertions(request)
    if not isinstance(said, Malformed):
        return {name: text for assertion in said for name, text in assertion.fields.items()}
    form = forms.read(request)
    return None if isinstance(form, Malformed) else form.texts()


# --- endpoints

_ENDPOINTS: Final = Listing(
    "endpoints",
    """SELECT e.id, e.url, e.events, e.description, e.status, e.disabled_reason, e.max_in_flight, e.rate_per_second, e.ordered,
              e.created_at,
              (SELECT json_agg(json_build_object('id', s.id, 'public_key', s.public_key, 'created_at', s.created_at,
                                                  'expires_at', s.expires_at)
                               ORDER BY s.created_at DESC, s.id DESC)
                 FROM endpoint_secrets AS s WHERE s.tenant_id = e.tenant_id AND s.endpoint_id = e.id
                  AND (s.expires_at IS NULL OR s.expires_at > ipn_now())) AS secrets,
              (SELECT s.failing_since FROM endpoint_states AS s WHERE s.tenant_id = e.tenant_id AND s.endpoint_id = e.id) AS failing_since
         FROM endpoints AS e WHERE e.tenant_id = %(tenant_id)s AND e.deleted_at IS NULL""",
    key=_BY_ID,
    filters={},
)


async def endpoint(tx: Transaction, tenant_id: str, endpoint_id: UUID) -> objects.Endpoint:
    """One endpoint, without its secrets. Raises `NotFound`."""
    return _endpoint(await _one(tx, _ENDPOINTS, "id", tenant_id, endpoint_id))


async def endpoints(tx: Transaction, tenant_id: str, wanted: Wanted) -> Page[objects.Endpoint]:
    """Endpoints, newest first; deleted ones are gone."""
    return await _page(tx, _ENDPOINTS, wanted, {"tenant_id": tenant_id}, _endpoint)


def _endpoint(row: Row) -> objects.Endpoint:
    secrets = [{**secret, "id": ids.show(ids.SECRET, UUID(secret["id"]))} for secret in row["secrets"] or []]
    return objects.Endpoint(
        **_picked(row, "url", "events", "description", "status", "disabled_reason", "max_in_flight", "rate_per_second", "ordered"),
        failing_since=row["failing_since"],
        id=ids.show(ids.ENDPOINT, row["id"]),
        secrets=[objects.EndpointSecret(**secret) for secret in secrets],
        created_at=row["created_at"],
    )


# --- events


async def event(tx: Transaction, tenant_id: str, event_id: str) -> objects.Event:
    """One event. Raises `NotFound`."""
    row = await tx.one(
        dict,
        "SELECT id, type, order_id, sequence, body FROM events WHERE tenant_id = %(tenant_id)s AND id = %(id)s",
        {"tenant_id": tenant_id, "id": event_id},
    )
    if row is None:
        raise NotFound
    return shown_event(row)


def shown_event(row: Row) -> objects.Event:
    """An event as it was frozen."""
    frozen = json.loads(row["body"])
    return objects.Event(**_picked(row, "id", "type", "order_id", "sequence"), timestamp=frozen["timestamp"], data=frozen["data"])


# --- event deliveries, with their attempts

_EVENT_DELIVERIES: Final = Listing(
    "event_deliveries",
    """SELECT d.id, d.event_id, d.event_type, d.endpoint_id, d.order_id, d.status, d.attempt_count, d.delivered_at,
              CASE WHEN e.status = 'disabled' THEN NULL
                   WHEN d.status = 'pending' AND d.next_trigger <> 'redelivery' THEN greatest(d.next_attempt_at, s.open_until)
                   ELSE d.next_attempt_at END AS next_attempt_at
         FROM event_deliveries AS d
         LEFT JOIN endpoints AS e ON e.tenant_id = d.tenant_id AND e.id = d.endpoint_id
         LEFT JOIN endpoint_states AS s ON s.tenant_id = d.tenant_id AND s.endpoint_id = d.endpoint_id
        WHERE d.tenant_id = %(tenant_id)s""",
    key=_BY_ID,
    filters={
        "status": "status = %(status)s",
        "endpoint_id": "endpoint_id = %(endpoint_id)s",
        "event_id": "event_id = %(event_id)s",
        "order_id": "order_id = %(order_id)s",
    },
)


async def event_delivery(tx: Transaction, tenant_id: str, delivery_id: str) -> objects.EventDelivery:
    """One event delivery. Raises `NotFound`."""
    row = await _one(tx, _EVENT_DELIVERIES, "id", tenant_id, ids.read(ids.EVENT_DELIVERY, delivery_id))
    return _event_delivery(row, await _attempts(tx, tenant_id, [row["id"]]))


async def event_deliveries(tx: Transaction, tenant_id: str, wanted: Wanted, **filters: Any) -> Page[objects.EventDelivery]:
    """Event deliveries, newest first; `filters` are status, endpoint_id, event_id and order_id."""
    rows, next_cursor = await _EVENT_DELIVERIES.page(tx, wanted, {"tenant_id": tenant_id, **filters})
    attempts = await _attempts(tx, tenant_id, [row["id"] for row in rows])
    return Page(items=[_event_delivery(row, attempts) for row in rows], next_cursor=next_cursor)


async def _attempts(tx: Transaction, tenant_id: str, delivery_ids: Sequence[UUID]) -> dict[UUID, list[objects.Attempt]]:
    found: dict[UUID, list[objects.Attempt]] = {delivery_id: [] for delivery_id in delivery_ids}
    if not found:
        return found
    rows = await tx.all(
        dict,
        """SELECT * FROM delivery_attempts WHERE tenant_id = %(tenant_id)s AND event_delivery_id = ANY(%(ids)s)
            ORDER BY event_delivery_id, number""",
        {"tenant_id": tenant_id, "ids": list(delivery_ids)},
    )
    for row in rows:
        found[row["event_delivery_id"]].append(_attempt(row))
    return found


def _attempt(row: Row) -> objects.Attempt:
    names = ("number", "trigger", "started_at", "duration_ms", "address", "status_code", "outcome", "error", "response_excerpt")
    return objects.Attempt(id=ids.show(ids.ATTEMPT, row["id"]), **_picked(row, *names))


def _event_delivery(row: Row, attempts: Mapping[UUID, list[objects.Attempt]]) -> objects.EventDelivery:
    return objects.EventDelivery(
        **_picked(row, "event_id", "event_type", "order_id", "status", "attempt_count", "next_attempt_at", "delivered_at"),
        id=ids.show(ids.EVENT_DELIVERY, row["id"]),
        endpoint_id=ids.show(ids.ENDPOINT, row["endpoint_id"]),
        attempts=attempts[row["id"]],
    )


def _picked(row: Row, *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}
