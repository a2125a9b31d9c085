"""Changing an endpoint loses nothing: what was staged for it goes where it is now, whatever its filter says by then."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import endpoints, events, ids, outbox
from tests.dispatching import Hanging, Subscribers, dispatching, received, refuses
from tests.loopback import OK, says, serving
from tests.make import TENANT

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from tests.make import Make


@pytest.fixture
async def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


async def change(db: Database, endpoint_id: UUID, **changes: Any) -> None:
    await endpoints.patch(db, TENANT, endpoint_id, changes, actor="test")


async def test_what_was_staged_goes_to_the_new_url(db: Database, subscribers: Subscribers) -> None:
    """Also what was tried at the old one: its attempts go on being counted."""
    async with serving(refuses(500)) as old, serving(says(OK)) as new, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(old)
        tried = await subscribers.deliver(endpoint_id)
        await running.drain()
        staged = await subscribers.deliver(endpoint_id, 2)
        await change(db, endpoint_id, url=new.url)
        db.clock.advance(minutes=5)
        await running.drain()

    assert len(received(old)) == 1
    assert len(received(new)) == 3
    assert await subscribers.statuses(endpoint_id) == {"delivered": 3}
    assert [len(await subscribers.attempts(delivery)) for delivery in tried + staged] == [2, 1, 1]


async def test_a_narrower_filter_takes_nothing_back(db: Database, subscribers: Subscribers) -> None:
    """Who gets an event is fixed when it is staged; only later ones are chosen by the new filter."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        (delivery,) = await subscribers.deliver(endpoint_id)
        await change(db, endpoint_id, events=["notification.*"])
        await running.drain()

    assert (await subscribers.delivery(delivery))["status"] == "delivered"


async def test_an_attempt_under_way_is_recorded(db: Database, subscribers: Subscribers) -> None:
    """The change does not wait for it and does not end it; the next attempt is made by the new URL and limits."""
    hanging = Hanging()
    async with serving(hanging) as old, serving(says(OK)) as new, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(old)
        (sent,) = await subscribers.deliver(endpoint_id)
        await running.start_all()
        await hanging.has(1)
        await change(db, endpoint_id, url=new.url, max_in_flight=1, rate_per_second=Decimal(100))
        (later,) = await subscribers.deliver(endpoint_id)
        hanging.let_go()
        await running.drain()
        db.clock.advance(seconds=5)
        await running.drain()

    assert [(await subscribers.delivery(delivery))["status"] for delivery in (sent, later)] == ["delivered", "delivered"]
    assert (len(received(old)), len(received(new))) == (1, 1)


async def test_events_that_are_staged_while_it_changes_all_arrive(db: Database, clock: Clock, subscribers: Subscribers) -> None:
    """Fifty changes and fifty events at once: each event has its one event delivery, since every filter in between takes it."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)

        async def stage(number: int) -> None:
            event_id = ids.event_id(TENANT, "invoice.sent", str(number))
            async with db.transaction("test.stage") as tx:
                made = events.custom(event_id, "invoice.sent", clock.now(), {"number": number}, order_id=None)
                await outbox.stage(tx, clock, TENANT, [made])

        filters = (["*"], ["invoice.*"], ["invoice.sent", "order.*"])
        changes = [
            change(db, endpoint_id, events=filters[number % 3], url=f"{server.url}/{number}", description=str(number))
            for number in range(50)
        ]
        await asyncio.gather(*changes, *(stage(number) for number in range(50)))
        for _ in range(10):
            await running.drain()

    assert await subscribers.statuses(endpoint_id) == {"delivered": 50}
    assert len({message.id for message in received(server)}) == 50
