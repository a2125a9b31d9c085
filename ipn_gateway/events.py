"""The catalogue of outbound events: types, the shape of their data, and the bytes that are frozen, signed and sent.

Beside the catalogue a tenant may send events of its own types, through the same outbox; their data is its own affair.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    url: str = Field(description="of one that is disabled only scheme, host and port, since others are told: its path may be a secret")
    reason: str | None = Field(default=None, description="`gone` (410), `failing` (for days) or `manual` (by a person)")


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

VERSIONS: Final[Mapping[str, int]] = dict.fromkeys(CATALOGUE, 1)
"""The version of each type's data. It goes up when a member is taken away or means something else; members may be added in any version."""

FAMILIES: Final = frozenset(name.partition(".")[0] for name in CATALOGUE)
"""What a type of ours begins with; nobody else's may."""

TYPE_PATTERN: Final = r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+"
TYPE_LENGTH_MAX: Final = 100

_TYPE: Final = re.compile(TYPE_PATTERN)


def is_custom(text: str) -> bool:
    """Whether a tenant may send events of this type."""
    return len(text) <= TYPE_LENGTH_MAX and bool(_TYPE.fullmatch(text)) and text.partition(".")[0] not in FAMILIES


def is_type(text: str) -> bool:
    """Whether there can be an event of this type."""
    return text in CATALOGUE or is_custom(text)


def is_filter(text: str) -> bool:
    """Whether an endpoint may ask for this: a type, a family of types such as `order.*`, or `*` for all."""
    family, star, rest = text.rpartition(".*")
    if star and not rest:
        return family in FAMILIES or is_custom(f"{family}.any")
    return text == "*" or is_type(text)


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
    return NewEvent(event_id, event_type, fields.get("order_id"), fields.get("sequence"), frozen(event_id, event_type, now, fields))


def custom(event_id: str, event_type: str, now: datetime, data: Mapping[str, Any], *, order_id: str | None) -> NewEvent:
    """Freeze an event of a tenant's own type. `now` is database time, `data` plain JSON."""
    assert is_custom(event_type), event_type  # noqa: S101 - checked at the edge
    return NewEvent(event_id, event_type, order_id, None, frozen(event_id, event_type, now, data))


def frozen(event_id: str, event_type: str, now: datetime, data: Mapping[str, Any]) -> bytes:
    """The bytes that are signed and sent."""
    wire = {"id": event_id, "type": event_type, "timestamp": timestamp(now), "data": data}
    return json.dumps(wire, ensure_ascii=False, separators=(",", ":")).encode()


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
