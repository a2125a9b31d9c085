"""What the dispatcher signs, as receivers see it: with both kinds of keys, while they are replaced, and byte for byte."""

from __future__ import annotations

import base64
import json
import secrets
from typing import TYPE_CHECKING

import pytest
import standardwebhooks
from pydantic import SecretStr

from ipn_gateway import endpoints, receiver
from ipn_gateway.endpoints import CreatedSecret, NewEndpoint
from ipn_gateway.vault import Vault
from tests.dispatching import KEY, Subscribers, dispatching, received
from tests.loopback import OK, says, serving
from tests.make import TENANT, ago

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from tests.dispatching import Message
    from tests.loopback import Server
    from tests.make import Make

VAULT = Vault([SecretStr(KEY)])


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


async def subscribe(db: Database, server: Server) -> CreatedSecret:
    new = NewEndpoint(url=server.url, events=["*"])
    return await endpoints.create(db, VAULT, TENANT, new, secret_bytes=secrets.token_bytes(64), actor="test")


async def rotate(db: Database, endpoint_id: UUID, *, overlap: float) -> CreatedSecret:
    return await endpoints.rotate_secret(
        db, VAULT, TENANT, endpoint_id, overlap_seconds=overlap, secret_bytes=secrets.token_bytes(64), actor="test"
    )


async def next_message(db: Database, subscribers: Subscribers, server: Server, endpoint_id: UUID) -> Message:
    """A new event, sent; what the endpoint got."""
    await subscribers.deliver(endpoint_id)
    async with dispatching(db) as running:
        await running.drain()
    return received(server)[-1]


def accepted(message: Message, keys: Sequence[str]) -> list[bool]:
    """Whether a receiver that knows one key alone takes the message, for each key."""
    return [_accepts(message, key) for key in keys]


def _accepts(message: Message, key: str) -> bool:
    try:
        receiver.verify(message.headers, message.body, [key], now=int(message.headers["webhook-timestamp"]))
    except receiver.Rejected:
        return False
    return True


def both(made: CreatedSecret) -> list[str]:
    return [made.keys.secret, made.keys.public_key]


@pytest.mark.case("B95")
async def test_what_is_signed_is_what_is_sent(db: Database, subscribers: Subscribers) -> None:
    """A hundred events, in which spelling matters, verify from their raw bytes by either kind of key; the bytes are the stored ones."""
    bodies = {
        f"evt_{number}": json.dumps(
            {"id": f"evt_{number}", "type": "order.paid", "data": {"é": "৳ \u2028", "amount": 10.0, "nested": {"b": [1, {"a": None}]}}},
            ensure_ascii=number % 2 == 0,
            indent=number % 3 or None,
        ).encode()
        for number in range(100)
    }
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        for event_id, body in bodies.items():
            await subscribers.make.event(id=event_id, body=body)
            await subscribers.deliver(endpoint_id, event_id=event_id)
        await running.drain()

    messages = received(server)
    assert {message.id: message.body for message in messages} == bodies
    keys = [*subscribers.secrets[endpoint_id], *subscribers.public_keys[endpoint_id]]
    assert [accepted(message, keys) for message in messages] == [[True, True]] * 100
    library = standardwebhooks.Webhook(keys[0])
    assert all(library.verify(message.body, message.headers) == json.loads(message.body) for message in messages)


async def test_every_active_secret_signs_and_then_every_active_key(db: Database, subscribers: Subscribers) -> None:
    """v1 of each, newest first, then v1a of each; what has expired does not sign."""
    async with serving(says(OK)) as server:
        endpoint_id = await subscribers.endpoint(server, secrets=0)
        for days, expires_at in ((3, ago(seconds=1)), (2, None), (1, None)):
            await subscribers.secret(endpoint_id, created_at=ago(days=days), expires_at=expires_at)
        message = await next_message(db, subscribers, server, endpoint_id)

    signatures = message.headers["webhook-signature"].split(" ")
    assert [one.partition(",")[0] for one in signatures] == ["v1", "v1", "v1a", "v1a"]
    for known, (first, second) in (
        (subscribers.secrets[endpoint_id], signatures[:2]),
        (subscribers.public_keys[endpoint_id], signatures[2:]),
    ):
        assert accepted(message, known) == [False, True, True]
        assert accepted(signed_by(message, first), known) == [False, False, True]
        assert accepted(signed_by(message, second), known) == [False, True, False]


def signed_by(message: Message, signature: str) -> Message:
    """The message with this one signature alone."""
    return type(message)(message.headers | {"webhook-signature": signature}, message.body)


@pytest.mark.case("B98")
async def test_while_they_are_replaced_old_and_new_keys_sign(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """Whichever secret or public key a receiver knows, it loses no event until the overlap ends; then the new ones alone sign."""
    async with serving(says(OK)) as server:
        old = await subscribe(db, server)
        new = await rotate(db, old.endpoint_id, overlap=3600)
        during = await next_message(db, subscribers, server, old.endpoint_id)
        clock.advance(seconds=3599)
        at_the_end = await next_message(db, subscribers, server, old.endpoint_id)
        clock.advance(seconds=2)
        after = await next_message(db, subscribers, server, old.endpoint_id)

    assert len({*both(old), *both(new)}) == 4
    assert accepted(during, both(old) + both(new)) == [True] * 4
    assert accepted(at_the_end, both(old) + both(new)) == [True] * 4
    assert accepted(after, both(old) + both(new)) == [False, False, True, True]


async def test_without_an_overlap_the_old_keys_are_dropped_at_once(db: Database, subscribers: Subscribers) -> None:
    """After a leak neither the old secret nor the old private key signs once more, not even what waited."""
    async with serving(says(OK)) as server:
        old = await subscribe(db, server)
        await subscribers.deliver(old.endpoint_id)
        new = await rotate(db, old.endpoint_id, overlap=0)
        async with dispatching(db) as running:
            await running.drain()

    (message,) = received(server)
    assert accepted(message, both(old) + both(new)) == [False, False, True, True]


async def test_a_running_dispatcher_follows_a_rotation(db: Database, subscribers: Subscribers) -> None:
    """What it keeps unsealed is never a reason to sign with a key that is dropped, or without the new one."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        old = await subscribe(db, server)
        await subscribers.deliver(old.endpoint_id)
        await running.drain()
        new = await rotate(db, old.endpoint_id, overlap=0)
        await subscribers.deliver(old.endpoint_id)
        await running.drain()

    before, after = received(server)
    assert accepted(before, both(old) + both(new)) == [True, True, False, False]
    assert accepted(after, both(old) + both(new)) == [False, False, True, True]


async def test_a_secret_without_a_key_pair_signs_alone(db: Database, subscribers: Subscribers) -> None:
    """Secrets from before there were key pairs work on; a rotation gives the endpoint one."""
    async with serving(says(OK)) as server:
        endpoint_id = await subscribers.endpoint(server, secrets=0)
        secret = await subscribers.secret(endpoint_id, seed_ciphertext=None, public_key=None)
        alone = await next_message(db, subscribers, server, endpoint_id)
        new = await rotate(db, endpoint_id, overlap=60)
        together = await next_message(db, subscribers, server, endpoint_id)

    assert [one.partition(",")[0] for one in alone.headers["webhook-signature"].split(" ")] == ["v1"]
    assert accepted(alone, [secret]) == [True]
    assert [one.partition(",")[0] for one in together.headers["webhook-signature"].split(" ")] == ["v1", "v1", "v1a"]
    assert accepted(together, [secret, *both(new)]) == [True] * 3


async def test_nothing_in_the_database_signs(db: Database, subscribers: Subscribers) -> None:
    """Secret and private key are sealed, each secret with a pair of its own; the public key is for everybody."""
    async with serving(says(OK)) as server:
        made = await subscribe(db, server)
        await rotate(db, made.endpoint_id, overlap=60)

    rows = await subscribers.rows("endpoint_secrets", order="created_at, id")
    private = base64.b64decode(made.keys.private_key.removeprefix("whsk_"))
    assert VAULT.unseal(rows[0]["seed_ciphertext"]).decode() == made.keys.private_key
    assert rows[0]["public_key"] == made.keys.public_key
    assert rows[0]["public_key"] != rows[1]["public_key"]
    for row in rows:
        stored = row["ciphertext"] + row["seed_ciphertext"] + row["public_key"].encode()
        assert not any(part in stored for part in (made.secret.encode(), made.keys.private_key.encode(), private[:32]))
