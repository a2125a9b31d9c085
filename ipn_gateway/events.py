"""The catalogue of outbound events: types, the shape of their data, and the bytes that are frozen, signed and sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field


class OrderData(BaseModel):
    """The order after the change. `sequence` counts its events from 1 without gaps, so that late can be told from new."""

    model_config = ConfigDict(title="Order event data")

    order_id: str
    status: str
    previous_status: str
    reason: str | None
    amount: str = Field(description="decimal string with the currency's decimals")
    currency: str = Field(description="ISO 4217")
    amount_paid: str
    amount_refunded: str
    sequence: int = Field(ge=1)
    source: str
    operation_id: str | None = Field(description="the provider's name for what caused it; null for an act of ours")
    provider_transaction_id: str | None
    metadata: dict[str, Any]


class NotificationData(BaseModel):
    """A notification delivery that waits for a person, and what was expected instead."""

    model_config = ConfigDict(title="Notification event data")

    notification_delivery_id: str
    order_id: str | None
    source: str
    outcome: str
    reason: str | None
    operation_id: str | None
    amount: str | None
    currency: str | None
    expected_amount: str | None
    expected_currency: str | None


class EndpointData(BaseModel):
    """An endpoint that no longer gets events, or a test of one."""

    model_config = ConfigDict(title="Endpoint event data")

    endpoint_id: str
    url: str
    reason: str | None = None


CATALOGUE: Final[dict[str, type[BaseModel]]] = {
    "order.paid": OrderData,
    "order.paid_on_hold": OrderData,
    "order.payment_failed": OrderData,
    "order.cancelled": OrderData,
    "order.expired": OrderData,
    "order.overpaid": OrderData,
    "order.refunded": OrderData,
    "order.refund_failed": OrderData,
    "notification.held": NotificationData,
    "notification.conflict": NotificationData,
    "endpoint.disabled": EndpointData,
    "endpoint.test": EndpointData,
}


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event about to be staged: its id is a digest of tenant, type and cause, so the same fact has the same id for ever."""

    id: str
    type: str
    order_id: str | None
    sequence: int | None
    body: bytes


def new(event_id: str, event_type: str, now: datetime, data: BaseModel) -> NewEvent:
    """Freeze an event. `now` is database time; the data is validated against the catalogue."""
    assert isinstance(data, CATALOGUE[event_type]), event_type  # noqa: S101 - a programming error
    fields = data.model_dump(mode="json")
    wire = {"id": event_id, "type": event_type, "timestamp": timestamp(now), "data": fields}
    body = json.dumps(wire, ensure_ascii=False, separators=(",", ":")).encode()
    return NewEvent(event_id, event_type, fields.get("order_id"), fields.get("sequence"), body)


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
