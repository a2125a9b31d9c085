"""Receiving events as the page shows it: the example is run as it is printed, against duplicates, replays, forgeries and disorder."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from standardwebhooks import Webhook

from docs import vectors
from docs.examples.receive_events import receiving
from ipn_gateway import receiver, signing
from ipn_gateway.clock import Clock
from ipn_gateway.simulator.serving import serving
from tests.dispatching import Subscribers, dispatching
from tests.docs import pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from ipn_gateway.db import Database
    from tests.conftest import Server
    from tests.make import Make

DOCS = pages.ROOT / "docs"
PAGE = (DOCS / "howto/receive-events.md").read_text(encoding="utf-8")
OLD, NEW, OTHER = (signing.new_keys(bytes([number]) * signing.RANDOM_BYTES) for number in (1, 2, 3))


def event(event_id: str, sequence: int = 1, *, order_id: str = "INV-1", event_type: str = "order.paid", **data: Any) -> bytes:
    """The bytes of an event, with what the example reads."""
    told = {"order_id": order_id, "status": event_type.partition(".")[2], "amount_paid": "10.00", "sequence": sequence} | data
    return json.dumps({"id": event_id, "type": event_type, "data": told}).encode()


class Shop:
    """The example, and what its tables hold."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self.client = client
        self.url = url

    async def take(self, body: bytes, *keys: str, seconds: int = 0, sent: bytes | None = None) -> int:
        """Send it an event, signed `seconds` from now; `sent` are other bytes than those that were signed."""
        event_id = json.loads(body)["id"]
        signed = [signing.signing_key(key) for key in keys or (NEW.secret, NEW.private_key)]
        headers = signing.headers(event_id, int(Clock().now().timestamp()) + seconds, body, signed)
        return (await self.client.post("/webhooks", content=sent or body, headers=headers)).status_code

    async def rows(self, query: str) -> list[Any]:
        async with await psycopg.AsyncConnection.connect(self.url) as connection:
            return await (await connection.execute(query)).fetchall()

    async def history(self) -> list[Any]:
        return await self.rows("SELECT order_id, sequence, type FROM shop_order_history ORDER BY 1, 2")

    async def orders(self) -> list[Any]:
        return await self.rows("SELECT order_id, status, sequence FROM shop_orders ORDER BY 1")


@pytest.fixture(params=["secret", "public key"])
async def shop(request: pytest.FixtureRequest, server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shop]:
    """A shop on a database of its own that knows the new secret, or the new public key, and nothing else."""
    with server.database() as url:
        monkeypatch.setenv("SHOP_DATABASE_URL", url)
        monkeypatch.setenv("WEBHOOK_KEYS", NEW.secret if request.param == "secret" else NEW.public_key)
        transport = httpx.ASGITransport(app=receiving.app, raise_app_exceptions=False)
        async with (
            receiving.app.router.lifespan_context(receiving.app),
            httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client,
        ):
            yield Shop(client, url)


# The example


async def test_an_event_counts_once_however_often_it_comes(shop: Shop):
    """Its repeats are successes that change nothing, also weeks later, with a new timestamp and new keys beside the known ones."""
    body = event("evt_1")

    answers = [await shop.take(body) for _ in range(3)]
    answers.append(await shop.take(body, OLD.secret, NEW.secret, OLD.private_key, NEW.private_key))

    assert answers == [204] * 4
    assert await shop.history() == [("INV-1", 1, "order.paid")]


async def test_an_event_that_comes_twice_at_once_counts_once(shop: Shop):
    """Twenty deliveries side by side are all answered with a success, and one of them acts."""
    answers = await asyncio.gather(*(shop.take(event("evt_1")) for _ in range(20)))

    assert set(answers) == {204}
    assert await shop.history() == [("INV-1", 1, "order.paid")]


@pytest.mark.case("B98", "B99")
async def test_forgeries_and_replays_change_nothing(shop: Shop):
    """Another's keys, other bytes under a good signature, no signature, what was sent long ago and what is dated for later: all a 401."""
    body = event("evt_1")

    answers = [
        await shop.take(body, OTHER.secret, OTHER.private_key),
        await shop.take(body, OLD.secret, OLD.private_key),
        await shop.take(body, sent=body.replace(b"10.00", b"99.00")),
        await shop.take(body, sent=body + b" "),
        await shop.take(body, seconds=-310),
        await shop.take(body, seconds=310),
        await shop.take(body, seconds=864_000),
        (await shop.client.post("/webhooks", content=body)).status_code,
    ]

    assert answers == [401] * 8
    assert await shop.history() == await shop.orders() == await shop.rows("SELECT FROM received_events") == []
    assert (await shop.client.post("/webhooks", content=b"x" * (receiving.BODY_BYTES_MAX + 1))).status_code == 413


async def test_the_newest_event_tells_what_an_order_is(shop: Shop):
    """In whatever order they come, and between two orders; what happened is known of each."""
    sent = [
        ("evt_2", 2, "order.paid_on_hold", "INV-1"),
        ("evt_9", 1, "order.paid", "INV-2"),
        ("evt_3", 3, "order.paid", "INV-1"),
        ("evt_1", 1, "order.payment_failed", "INV-1"),
        ("evt_2", 2, "order.paid_on_hold", "INV-1"),
    ]

    for event_id, sequence, event_type, order_id in sent:
        assert await shop.take(event(event_id, sequence, event_type=event_type, order_id=order_id)) == 204

    assert await shop.orders() == [("INV-1", "paid", 3), ("INV-2", "paid", 1)]
    assert [row[:2] for row in await shop.history()] == [("INV-1", 1), ("INV-1", 2), ("INV-1", 3), ("INV-2", 1)]


async def test_what_could_not_be_done_is_done_at_the_repeat(shop: Shop):
    """An effect that fails is no success and leaves nothing behind, so that the event is still new when it comes again."""
    async with await psycopg.AsyncConnection.connect(shop.url, autocommit=True) as connection:
        await connection.execute("ALTER TABLE shop_orders RENAME TO lost")
        failed = await shop.take(event("evt_1"))
        left = await shop.rows("SELECT event_id FROM received_events UNION ALL SELECT order_id FROM shop_order_history")
        await connection.execute("ALTER TABLE lost RENAME TO shop_orders")

    assert (failed, left) == (500, [])
    assert await shop.take(event("evt_1")) == 204
    assert await shop.orders() == [("INV-1", "paid", 1)]


async def test_what_is_no_order_is_taken_in(shop: Shop):
    """A type that the shop has no use for, one that comes later too, is a success."""
    assert await shop.take(event("evt_1", event_type="endpoint.test")) == 204
    assert await shop.rows("SELECT event_id FROM received_events") == [("evt_1",)]


async def test_it_does_not_start_without_keys(shop: Shop, monkeypatch: pytest.MonkeyPatch):
    """A key that is none is an error of the start, not a 401 for every event."""
    monkeypatch.setenv("WEBHOOK_KEYS", f"{NEW.secret},whsec_")

    with pytest.raises(ValueError, match="a key is"):
        async with receiving.app.router.lifespan_context(receiving.app):
            pass


async def test_it_receives_what_the_dispatcher_sends(
    server: Server, db: Database, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """Out of order, with a failure in between and all of it sent once more by hand: the shop ends with what is, each event counted once."""
    subscribers = Subscribers(db, make)
    with server.database() as url:
        endpoint_id = await subscribers.endpoint("http://127.0.0.1:1/webhooks")
        keys = [*subscribers.secrets[endpoint_id], *subscribers.public_keys[endpoint_id]]
        monkeypatch.setenv("SHOP_DATABASE_URL", url)
        monkeypatch.setenv("WEBHOOK_KEYS", ",".join(keys))
        bodies = {f"evt_{number}": event(f"evt_{number}", number) for number in (3, 1, 2)}
        for event_id, body in bodies.items():
            await make.event(id=event_id, body=body, order_id="INV-1", sequence=int(event_id[-1]))
        async with serving(receiving.app) as address, httpx.AsyncClient() as client, dispatching(db) as running:
            await _goes_to(subscribers, endpoint_id, f"{address}/webhooks")
            shop = Shop(client, url)
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                await connection.execute("ALTER TABLE shop_orders RENAME TO lost")
                for event_id in bodies:
                    await subscribers.deliver(endpoint_id, event_id=event_id, order_id="INV-1")
                await running.drain()
                await connection.execute("ALTER TABLE lost RENAME TO shop_orders")
            clock.advance(seconds=6)
            await running.drain()
            statuses = await subscribers.statuses(endpoint_id)
            await subscribers.run("UPDATE event_deliveries SET next_attempt_at = ipn_now(), next_trigger = 'redelivery'")
            await running.drain()
            found = (await shop.orders(), await shop.history())

    attempts = await subscribers.rows("delivery_attempts")
    assert statuses == {"delivered": 3}
    assert sorted(attempt["status_code"] for attempt in attempts) == [204] * 6 + [500] * 3
    assert found == ([("INV-1", "paid", 3)], [("INV-1", number, "order.paid") for number in (1, 2, 3)])


async def _goes_to(subscribers: Subscribers, endpoint_id: UUID, url: str) -> None:
    await subscribers.run("UPDATE endpoints SET url = %(url)s WHERE id = %(id)s", url=url, id=endpoint_id)


# The page


def test_the_example_is_what_the_page_shows():
    """From the route on."""
    shown, _ = pages.blocks(PAGE, "python")
    source = (DOCS / "examples/receive_events/receiving.py").read_text(encoding="utf-8")

    assert source.endswith(shown)
    assert shown.startswith("@app.post")


def by_hand() -> Any:
    """What the page shows for those who want no library of ours, as it is printed."""
    _, source = pages.blocks(PAGE, "python")
    code: dict[str, Any] = {}
    exec(compile(source, "receive-events.md", "exec"), code)
    return code["verify"]


@pytest.mark.parametrize(
    ("altered", "genuine"),
    [
        ({}, True),
        ({"webhook-id": "evt_2"}, False),
        ({"webhook-id": ""}, False),
        ({"webhook-timestamp": "soon"}, False),
        ({"webhook-signature": "v1,ü v2,x"}, False),
    ],
)
def test_a_webhook_is_verified_by_hand_as_shown(altered: dict[str, str], genuine: bool):
    """What the library of the standard signs is genuine, and what anybody changed is not."""
    now = Clock().now()
    body = b'{"id":"evt_1","type":"order.paid"}'
    headers = {"webhook-id": "evt_1", "webhook-timestamp": str(int(now.timestamp()))}
    headers["webhook-signature"] = "v1,AAAA " + Webhook(NEW.secret).sign("evt_1", now, body.decode()) + " v1a,AAAA"

    event = by_hand()([NEW.secret], headers | altered, body, now.timestamp())
    late = by_hand()([NEW.secret], headers, body, now.timestamp() + 301)

    assert (event == {"id": "evt_1", "type": "order.paid"}) is genuine
    assert late is None


# The vectors


VECTORS = json.loads((DOCS / "reference/signature-vectors.json").read_text(encoding="utf-8"))["vectors"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_each_vector_gets_its_verdict(vector: dict[str, Any]):
    """The published verdict is the one that the receiver's module comes to, with its reason."""
    try:
        receiver.verify(vector["headers"], vector["body"].encode(), vector["keys"], now=vector["now"])
        reason = None
    except receiver.Rejected as refusal:
        reason = refusal.reason

    assert (reason, reason is None) == (vector["reason"], vector["genuine"])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_each_vector_gets_its_verdict_by_hand(vector: dict[str, Any]):
    """With secrets and with public keys, also where a header is missing or cannot be read."""
    event = by_hand()(vector["keys"], vector["headers"], vector["body"].encode(), vector["now"])

    assert event == (json.loads(vector["body"]) if vector["genuine"] else None)


def test_the_vectors_are_those_of_this_code():
    """`make docs` writes them; every reason is among them, and no name stands for two."""
    names = [vector["name"] for vector in VECTORS]

    assert (DOCS / "reference/signature-vectors.json").read_text(encoding="utf-8") == vectors.text()
    assert {vector["reason"] for vector in VECTORS} == {None, *receiver.Reason.__args__}  # type: ignore[attr-defined]  # a Literal has them
    assert len(set(names)) == len(names) > 35
    assert not any("whsk_" in key for vector in VECTORS for key in vector["keys"])
