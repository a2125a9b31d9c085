"""Samples of what is sent: for each type of the catalogue data that its schema takes, and that nobody can mistake for a real order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import addresses, events
from ipn_gateway.events import EndpointData, NotificationData, OrderData

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

_ORDER: Final[Mapping[str, Any]] = {
    "status": "paid",
    "previous_status": "pending",
    "reason": None,
    "amount": "1250.00",
    "currency": "BDT",
    "amount_paid": "1250.00",
    "amount_refunded": "0.00",
    "sequence": 1,
    "source": "sample",
    "operation_id": "SAMPLE",
    "provider_transaction_id": "SAMPLE",
    "metadata": {"sample": True},
}
_NOTIFICATION: Final[Mapping[str, Any]] = {
    "notification_delivery_id": f"ndl_{'0' * 32}",
    "source": "sample",
    "outcome": "held",
    "reason": "amount",
    "operation_id": "SAMPLE",
    "amount": "1000.00",
    "currency": "BDT",
    "expected_amount": "1250.00",
    "expected_currency": "BDT",
}
_UNPAID: Final[Mapping[str, Any]] = {"amount_paid": "0.00", "reason": "provider"}
_OF_TYPE: Final[Mapping[str, Mapping[str, Any]]] = {
    "order.paid_on_hold": {"status": "paid_on_hold", "reason": "risk"},
    "order.payment_failed": {"status": "failed", **_UNPAID},
    "order.cancelled": {"status": "cancelled", **_UNPAID},
    "order.expired": {"status": "expired", **_UNPAID, "reason": "expired", "operation_id": None, "provider_transaction_id": None},
    "order.overpaid": {"previous_status": "paid", "amount_paid": "1300.00", "sequence": 2},
    "order.refunded": {"status": "refunded", "previous_status": "paid", "amount_refunded": "1250.00", "sequence": 2},
    "order.refund_failed": {"previous_status": "paid", "sequence": 2},
    "notification.conflict": {"outcome": "conflict", "reason": "second_payment", "expected_amount": None, "expected_currency": None},
    "endpoint.disabled": {"reason": "gone"},
}


def sample(event_type: str, name: str, *, endpoint_id: str, url: str) -> BaseModel:
    """Data of this type, checked against the catalogue. `name` tells samples apart; of an order it is the number, after `SAMPLE-`."""
    given: Mapping[type[BaseModel], Mapping[str, Any]] = {
        OrderData: {**_ORDER, "order_id": f"SAMPLE-{name}"},
        NotificationData: {**_NOTIFICATION, "order_id": f"SAMPLE-{name}"},
        EndpointData: {"endpoint_id": endpoint_id, "url": addresses.origin(url) if event_type == "endpoint.disabled" else url},
    }
    model = events.CATALOGUE[event_type]
    return model.model_validate({**given[model], **_OF_TYPE.get(event_type, {})})
