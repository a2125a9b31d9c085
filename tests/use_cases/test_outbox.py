"""Staging: an event and one event delivery per subscribed endpoint, fixed in the moment of the cause, once for each fact."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import events, outbox
from ipn_gateway.event_log import HORIZON
from tests.make import NOW, SOURCE, TENANT
from tests.pulling import all_in_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.events import NewEvent
    from tests.make import Make


def event(event_type: str, clock: Clock, name: str = "evt_1", order_id: str = "ORD-1", sequence: int = 1) -> NewEvent:
    """An event of a type, with some data."""
    if event_type.startswith("endpoint."):
        return events.new(name, event_type, clock.now(), events.EndpointData(endpoint_id="ep_1", url="https://subscriber.example"))
    if event_type.startswith("notification."):
        fields: dict[str, Any] = dict.fromkeys(events.NotificationData.model_fields)
        data = events.NotificationData(**fields | {"notification_delivery_id": "ndl_1", "source": SOURCE, "outcome": "held"})
        return events.new(name, event_type, clock.now(), data)
    fields = dict.fromkeys(events.OrderData.model_fields, "x") | {"sequence": sequence, "metadata": {}, "order_id": order_id}
    return events.new(name, event_type, clock.now(), events.OrderData(**fields))


async def stage(tx: Transaction, clock: Clock, *staged: NewEvent) -> int:
    return await outbox.stage(tx, clock, TENANT, staged)


@pytest.mark.parametrize(
    ("wanted", "gets"),
    [
        (["*"], ["order.paid", "notification.held", "endpoint.test"]),
        (["order.*"], ["order.paid"]),
        (["order.paid"], ["order.paid"]),
        (["order.refunded", "notification.*"], ["notification.held"]),
        (["order"], []),
        (["order.pai"], []),
        (["order.paid", "order.*", "*"], ["order.paid", "notification.held", "endpoint.test"]),
        ([], []),
    ],
    ids=lambda names: ",".join(names) or "none",
)
async def test_an_event_goes_to_those_who_want_its_type(
    tx: Transaction, clock: Clock, make: Make, wanted: Sequence[str], gets: Sequence[str]
) -> None:
    """All, a family of types, or a type by name; once, also when several of an endpoint's filters match."""
    await make.endpoint(events=list(wanted))
    types = ["order.paid", "notification.held", "endpoint.test"]

    await stage(tx, clock, *(event(event_type, clock, f"evt_{event_type}") for event_type in types))

    found = await tx.all(dict, "SELECT event_type, event_id, status, next_attempt_at <= ipn_now() AS due FROM event_deliveries")
    assert sorted(row["event_type"] for row in found) == sorted(gets)
    assert {(row["status"], row["due"]) for row in found} <= {("pending", True)}
    assert await tx.value("SELECT count(*) FROM events") == 3


async def test_who_is_subscribed_is_fixed_in_that_moment(tx: Transaction, clock: Clock, make: Make) -> None:
    """Another tenant's endpoint and a deleted one get nothing, a disabled one has it waiting; one that comes later gets later events."""
    await make.tenant(id="rival")
    await make.endpoint(tenant_id="rival")
    await make.endpoint(deleted_at=NOW)
    there = [(await make.endpoint())["id"], (await make.endpoint(status="disabled"))["id"]]

    made = await stage(tx, clock, event("order.paid", clock))
    await make.endpoint()

    assert made == 2
    assert sorted(row["endpoint_id"] for row in await tx.all(dict, "SELECT endpoint_id FROM event_deliveries")) == sorted(there)


@pytest.mark.case("S121")
async def test_a_fact_is_staged_once(tx: Transaction, clock: Clock, make: Make) -> None:
    """The same id again changes no byte and makes no delivery, not even to a new subscriber."""
    await make.endpoint()
    first = event("order.paid", clock)
    await stage(tx, clock, first)
    await make.endpoint()
    clock.advance(hours=1)

    assert await stage(tx, clock, event("order.paid", clock, sequence=2)) == 0
    assert [bytes(row["body"]) for row in await tx.all(dict, "SELECT body FROM events")] == [first.body]
    assert await tx.value("SELECT count(*) FROM event_deliveries") == 1


async def test_nothing_to_stage_costs_nothing(tx: Transaction, clock: Clock) -> None:
    """No statement is run."""
    assert await stage(tx, clock) == 0


@pytest.mark.case("S124")
async def test_events_can_be_pulled_without_a_gap_whatever_commits_first(db: Database, clock: Clock) -> None:
    """A page ends below the oldest running writer: what began first and commits last is neither passed over nor read twice."""
    page = f"SELECT id FROM events WHERE position < {HORIZON} ORDER BY position, id"
    begun, end = asyncio.Event(), asyncio.Event()

    async def commit_late() -> None:
        async with db.transaction("test.slow") as tx:
            await stage(tx, clock, event("order.paid", clock, "evt_slow", "ORD-1"))
            begun.set()
            await end.wait()

    async def pulled() -> list[str]:
        async with db.autocommit("test.pull") as tx:
            return [row["id"] for row in await tx.all(dict, page)]

    async with asyncio.TaskGroup() as group:
        group.create_task(commit_late())
        await begun.wait()
        async with db.transaction("test.quick") as tx:
            await stage(tx, clock, event("order.paid", clock, "evt_quick", "ORD-2"))
        while_it_runs = await pulled()
        end.set()

    await all_in_view(db)

    assert while_it_runs == []
    assert await pulled() == ["evt_slow", "evt_quick"]
