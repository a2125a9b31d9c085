"""The catalogue: types that are ours, types that are a tenant's, filters, versions, and a sample of each."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from ipn_gateway import events, samples
from ipn_gateway.web.contract import wire_model

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)

ORDER = {"order_id", "status", "previous_status", "reason", "amount", "currency", "amount_paid", "amount_refunded", "sequence"} | {
    "source",
    "operation_id",
    "provider_transaction_id",
    "metadata",
}
NOTIFICATION = {"notification_delivery_id", "order_id", "source", "outcome", "reason", "operation_id", "amount", "currency"} | {
    "expected_amount",
    "expected_currency",
}
ENDPOINT = {"endpoint_id", "url", "reason"}
PROMISED = {
    (events.OrderData, 1): ORDER,
    (events.NotificationData, 1): NOTIFICATION,
    (events.EndpointData, 1): ENDPOINT,
}
"""What each version of a type's data had from its beginning. A line is never changed: a version that lacks a member is another one."""


@pytest.mark.parametrize("event_type", events.CATALOGUE)
def test_a_version_keeps_its_members(event_type: str) -> None:
    """Members are added and never taken away, unless the version of the type goes up."""
    model = events.CATALOGUE[event_type]

    assert set(model.model_fields) >= PROMISED[model, events.VERSIONS[event_type]]


def test_every_type_has_a_version() -> None:
    """From 1 on."""
    assert set(events.VERSIONS) == set(events.CATALOGUE)
    assert min(events.VERSIONS.values()) >= 1


@pytest.mark.parametrize("name", ["invoice.sent", "a.b", "loyalty_points.earned_2.v2", f"{'x' * 98}.y"])
def test_a_tenant_has_types_of_its_own(name: str) -> None:
    """Words of a-z, 0-9 and _ that are joined by dots."""
    assert events.is_custom(name)
    assert events.is_type(name)
    assert events.is_filter(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "invoice", "Invoice.sent", "invoice.", ".sent", "invoice..sent", "invoice sent.x", "1nvoice.sent", "invoice.sent\n"),
        *("order.shipped", "notification.sent", "endpoint.moved", "order.paid", f"{'x' * 99}.y", "ínvoice.sent"),
    ],
)
def test_other_names_are_no_types_of_a_tenant(name: str) -> None:
    """What is ours, what is no word, and what is longer than a hundred characters."""
    assert not events.is_custom(name)
    assert events.is_type(name) == (name == "order.paid")


@pytest.mark.parametrize("name", ["*", "order.*", "notification.*", "endpoint.*", "order.paid", "invoice.*", "invoice.sent.*"])
def test_filters_are_types_and_families(name: str) -> None:
    """Of ours and of a tenant's; `*` is all of both."""
    assert events.is_filter(name)


@pytest.mark.parametrize("name", ["", "**", "*.*", ".*", "order", "order.p*", "order.shipped", "order.paid.*", "invoice.*.*", "Invoice.*"])
def test_other_texts_are_no_filters(name: str) -> None:
    """A wildcard stands for a whole family only; what is ours has to be there."""
    assert not events.is_filter(name)


def test_an_event_of_a_tenant_is_frozen_as_ours_are() -> None:
    """The same four members; the order that it is about is kept beside it and not sent."""
    made = events.custom("evt_1", "invoice.sent", AT, {"number": "R-1", "sum": 1.5, "ünder": None}, order_id="ORD-1")

    assert (made.order_id, made.sequence) == ("ORD-1", None)
    assert json.loads(made.body) == {
        "id": "evt_1",
        "type": "invoice.sent",
        "timestamp": "2026-03-01T12:00:00.000Z",
        "data": {"number": "R-1", "sum": 1.5, "ünder": None},
    }


@pytest.mark.parametrize("event_type", events.CATALOGUE)
def test_every_type_has_a_sample(event_type: str) -> None:
    """It is what the published schema says, and says itself that it is none of the merchant's orders."""
    data = samples.sample(event_type, "A1", endpoint_id="ep_1", url="https://subscriber.example/")
    wire = json.loads(events.frozen("evt_1", event_type, AT, data.model_dump(mode="json")))

    assert wire_model(event_type).model_validate(wire)
    assert "SAMPLE-A1" in str(wire) or wire["data"]["endpoint_id"] == "ep_1"
    if event_type.startswith("order."):
        assert wire["data"]["metadata"] == {"sample": True}
