"""The story of an order: complete, in order, in sentences, and nobody else's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import endpoints, ids, orders, paging, tenants, timeline
from ipn_gateway.objects import show_time
from ipn_gateway.simulator.serving import serving
from ipn_gateway.simulator.subscriber import create_subscriber
from ipn_gateway.web.app import create_app
from tests import world as worlds
from tests.make import TENANT, Make, ago
from tests.web.conftest import Caller, pointers, problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults
    from ipn_gateway.objects import TimelineItem


@pytest.fixture
async def world(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[worlds.World]:
    """A gateway beside a simulated provider, with a subscriber of everything."""
    subscriber = create_subscriber()
    async with worlds.opened(database_url, clock, faults) as opened, serving(subscriber) as url:
        new = endpoints.NewEndpoint(url=f"{url}/webhooks", events=["*"])
        made = await endpoints.create(opened.rt.db, opened.rt.vault, worlds.TENANT, new, secret_bytes=b"s" * 64, actor="test")
        subscriber.state.subscriber.secrets = [made.secret]
        yield opened


async def asked(world: worlds.World, order_id: str) -> list[dict[str, Any]]:
    """The timeline as a caller of the API gets it."""
    key = (await tenants.create_key(world.rt.db, worlds.TENANT)).key
    app = create_app(world.rt)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as http:
        answer = await Caller(http, key).get(f"/v1/orders/{order_id}/timeline")
        await app.state.slots.drained()
    assert answer.status_code == 200
    assert answer.json()["next_cursor"] is None
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def kinds(items: Sequence[dict[str, Any]]) -> list[str]:
    """What happened, in order."""
    return [item["kind"] for item in items]


async def test_a_payment_is_a_story_that_explains_itself(world: worlds.World) -> None:
    """From the order to the subscriber: a forgery, the payment, its copy, and the word about it, with what each was."""
    await world.order("ORD-1", "1000.00")
    fields = world.pay("ORD-1")
    await world.notify(world.signed(fields, "Another@Password"))
    await world.notify(fields)
    await world.drain()
    await world.notify(fields)
    await world.drain()
    await world.dispatch()

    items = await asked(world, "ORD-1")

    assert kinds(items) == [
        *("order", "delivery", "verdict"),
        *("delivery", "effect", "payment", "verdict", "event", "event_delivery"),
        *("delivery", "verdict", "attempt"),
    ]
    sentences = [item["summary"] for item in items]
    assert sentences[0] == "The order was registered: 1000.00 BDT at shop."
    assert sentences[1:3] == [
        "A notification said VALID; its hash is missing or wrong.",
        "Decided as rejected (signature): not believed.",
    ]
    assert sentences[3] == "A notification said VALID; its hash is right."
    assert sentences[4] == "paid (1000.00 BDT) was applied, once and for ever; learned by a notification."
    assert sentences[5].startswith("A payment of 1000.00 BDT was recorded as applied; the provider calls it ")
    assert sentences[6] == "Decided as applied: the provider confirmed it, and it was applied."
    assert sentences[7] == "The event order.paid was written: pending → paid."
    assert "it is delivered after 1 attempt(s)" in sentences[8]
    assert sentences[10] == "Decided as duplicate: this operation was applied before; nothing was done."
    assert sentences[11].startswith("Attempt 1 (initial) of order.paid to ep_")
    assert [item["at"] for item in items] == sorted(item["at"] for item in items)
    paid = items[4]
    assert (paid["amount"], paid["origin"], paid["notification_delivery_id"]) == ("1000.00", "notification", items[3]["id"])
    assert {item["id"].partition("_")[0] for item in items if item["kind"] not in {"order", "effect"}} == {
        "ndl",
        "pay",
        "evt",
        "edl",
        "att",
    }


async def test_manual_acts_are_part_of_the_story(world: worlds.World) -> None:
    """Who did what and why, before what it led to; acts on a source that has the order's name are not."""
    await world.source("ord-1")
    await world.order("ord-1")
    await orders.cancel(world.rt.db, worlds.TENANT, "ord-1", actor="key:key_1", reason="sold out")

    items = await asked(world, "ord-1")

    assert kinds(items) == ["order", "act", "event", "event_delivery", "sweep"]
    assert items[1]["summary"] == "key:key_1 did order.cancel on ord-1: sold out."
    assert (items[1]["actor"], items[1]["action"], items[1]["reason"]) == ("key:key_1", "order.cancel", "sold out")
    assert items[2]["summary"] == "The event order.cancelled was written: pending → cancelled."


async def test_what_lies_ahead_is_shown_too(world: worlds.World) -> None:
    """An undecided delivery says when it is worked on, and an unpaid order when the provider is asked about it."""
    await world.order("ORD-1")
    world.fault("validator", "status500", times=None)
    await world.notify(world.pay("ORD-1"))
    await world.drain()

    order, delivery, sweep = await asked(world, "ORD-1")

    assert kinds([order, delivery, sweep]) == ["order", "delivery", "sweep"]
    assert delivery["outcome"] == "received"
    assert delivery["summary"].endswith(f"received until now; it is worked on at {delivery['next_attempt_at']}.")
    assert sweep["at"] == sweep["due_at"] > order["at"]


async def test_what_the_sweep_found_says_so(world: worlds.World, clock: Clock) -> None:
    """A payment without any notification."""
    await world.order("ORD-1")
    world.pay("ORD-1")
    clock.advance(minutes=6)
    await world.sweep()

    items = await asked(world, "ORD-1")

    assert kinds(items) == ["order", "effect", "payment", "event", "event_delivery"]
    assert items[1]["summary"].endswith("learned by asking the provider.")
    assert items[1]["notification_delivery_id"] is None


async def test_nothing_of_the_customer_is_in_it(world: worlds.World) -> None:
    """Neither fields nor addresses, nor a card; those are in the deliveries, masked."""
    await world.order("ORD-1", metadata={"note": "Rahim from Sylhet"})
    await world.notify(world.signed(world.pay("ORD-1"), cus_name="Rahim", cus_phone="01700000000"))
    await world.drain()

    text = str(await asked(world, "ORD-1"))

    for private in ("Rahim", "01700000000", "127.0.0.1", "411111"):
        assert private not in text


# --- every kind, made by hand


async def every_kind(make: Make) -> None:
    """One row of each kind about ORD-1, and of some a second one about another order."""
    for order_id in ("ORD-1", "ORD-2"):
        await make.order(order_id=order_id, status="paid_on_hold", created_at=ago(minutes=9))
        held = await make.notification_delivery(order_id=order_id, outcome="held", reason="amount", received_at=ago(minutes=8))
        parked = await make.notification_delivery(order_id=order_id, outcome="parked", received_at=ago(minutes=7), via="return/success")
        await make.inbox(notification_delivery_id=parked["id"], order_id=order_id, state="parked", due_at=None)
        await make.processed_notification(order_id=order_id, operation_id=f"V-{order_id}", booked="unapplied", origin="manual")
        payment = await make.payment(order_id=order_id, status="unapplied", settled_amount=None, provider_transaction_id=f"B-{order_id}")
        refund = await make.refund(order_id=order_id, payment_id=payment["id"], reference="R-1", status="processing")
        event = await make.event(order_id=order_id)
        endpoint = await make.endpoint(status="disabled")
        delivery = await make.event_delivery(event_id=event["id"], order_id=order_id, endpoint_id=endpoint["id"])
        await make.delivery_attempt(event_delivery_id=delivery["id"], outcome="timeout", error="no answer within 15 s")
        await make.sweep(order_id=order_id)
        for target in (
            order_id,
            ids.show(ids.NOTIFICATION_DELIVERY, held["id"]),
            ids.show(ids.EVENT_DELIVERY, delivery["id"]),
            ids.show(ids.REFUND, refund["id"]),
        ):
            await make.audit_entry(target=target, action="order.release" if target == order_id else "something.done", reason=None)


async def story(db: Database, order_id: str, **wanted: Any) -> tuple[list[TimelineItem], str | None]:
    """One page."""
    async with db.autocommit("test") as tx:
        page = await timeline.of(tx, TENANT, order_id, paging.Wanted(**wanted))
    return page.items, page.next_cursor


async def test_every_kind_has_its_sentence(make: Make, db: Database) -> None:
    """Each table's row is there once, of this order only, as a sentence that ends."""
    await every_kind(make)

    items, _ = await story(db, "ORD-1")

    assert sorted(item.kind for item in items) == sorted([*timeline.KINDS, "delivery", "act", "act", "act"])
    assert all(item.summary[0] not in " ;" and item.summary.endswith(".") for item in items)
    assert not any("ORD-2" in str(item) for item in items)
    said = {item.kind: item.summary for item in items}
    assert said["effect"] == "paid (100.00 BDT) was booked as unapplied, a second payment; learned by a person."
    assert said["refund"] == "A refund of 10.00 BDT under the reference R-1 is processing."
    assert said["event_delivery"].endswith("is due, and waits for its endpoint to be enabled.")
    assert said["attempt"].endswith("timeout (no answer within 15 s) in 5 ms.")
    assert "A notification said nothing that could be read; its hash is right." in [item.summary for item in items]
    assert any(item.summary.startswith("The customer's browser (return/success)") and "parked until now" in item.summary for item in items)


async def test_the_pages_are_the_whole(make: Make, db: Database) -> None:
    """Oldest first, in pages of any size, nothing twice and nothing left out, also where many have one time."""
    await every_kind(make)
    whole, none = await story(db, "ORD-1")
    paged, cursor = await story(db, "ORD-1", limit=1)
    while cursor:
        more, cursor = await story(db, "ORD-1", limit=2, cursor=cursor)
        paged += more

    assert none is None
    assert [(item.kind, item.id) for item in paged] == [(item.kind, item.id) for item in whole]
    assert [show_time(item.at) for item in whole] == sorted(show_time(item.at) for item in whole)


async def test_a_page_is_two_statements_however_long_the_story(make: Make, db: Database, faults: Faults) -> None:
    """Whether the order is there, and all of it: no question for each row."""
    await every_kind(make)
    ran = []

    async def note() -> None:
        ran.append(1)

    for number in range(1, 9):
        faults.on[f"test:statement_{number}"] = note
    await story(db, "ORD-1")

    assert len(ran) == 2


async def test_only_the_tenant_s_own_orders_have_one(shop: Caller, stranger: Caller) -> None:
    """Unknown, malformed or another's: not found; a cursor of another list is refused."""
    await shop.post("/v1/orders", {"order_id": "ORD-1", "amount": "100.00", "currency": "BDT", "source": "shop-main"})

    assert (await shop.get("/v1/orders/ORD-1/timeline")).json()["items"][0]["kind"] == "order"
    assert problem(await stranger.get("/v1/orders/ORD-1/timeline")) == (404, "not-found")
    assert problem(await shop.get("/v1/orders/ORD-2/timeline")) == (404, "not-found")
    assert problem(await shop.get("/v1/orders/%00/timeline")) == (404, "not-found")
    assert problem(await shop.get("/v1/orders/ORD-1/timeline", kind="act")) == (400, "unknown-parameter")
    first = (await shop.get("/v1/orders/ORD-1/timeline", limit=1)).json()
    assert pointers(await shop.get("/v1/orders", cursor=first["next_cursor"])) == ["cursor"]
