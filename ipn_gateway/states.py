"""The states that rows are in, by the words that stand in their columns. `models` has the tables, which few processes need to know."""

from enum import StrEnum
from typing import Final


class OrderStatus(StrEnum):
    """pending → paid | paid_on_hold | failed | cancelled | expired; paid_on_hold → paid; both → partially_refunded → refunded."""

    PENDING = "pending"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PAID_ON_HOLD = "paid_on_hold"
    PAID = "paid"
    PARTIALLY_REFUNDED = "partially_refunded"
    REFUNDED = "refunded"


UNPAID: Final = (OrderStatus.PENDING, OrderStatus.FAILED, OrderStatus.CANCELLED, OrderStatus.EXPIRED)


class DeliveryOutcome(StrEnum):
    """What a notification delivery ended as; `received` until it is decided."""

    RECEIVED = "received"
    APPLIED = "applied"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    STALE = "stale"
    REJECTED = "rejected"
    HELD = "held"
    PARKED = "parked"
    MALFORMED = "malformed"
    DEAD = "dead"


class InboxState(StrEnum):
    """Open work: `received` and `parked` become due by time, the others wait for a person."""

    RECEIVED = "received"
    PARKED = "parked"
    HELD = "held"
    CONFLICT = "conflict"
    DEAD = "dead"


class EventDeliveryStatus(StrEnum):
    """The obligation to bring one event to one endpoint."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"
    CANCELLED = "cancelled"


class Trigger(StrEnum):
    """Why an attempt was made."""

    INITIAL = "initial"
    RETRY = "retry"
    REDELIVERY = "redelivery"
    RECOVERY = "recovery"
    TEST = "test"
