"""Testing an endpoint: one signed attempt outside of the queue, what each step said, and an account of it that stays."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from ipn_gateway import db as database
from ipn_gateway import endpoint_tests, endpoints, ids, settings
from ipn_gateway.endpoint_tests import Asked
from ipn_gateway.errors import NotFound, RateLimited, StateConflict
from ipn_gateway.faults import Faults
from ipn_gateway.receiver import verify
from ipn_gateway.transport import Transport
from ipn_gateway.vault import Vault
from tests.dispatching import KEY, Hanging, Subscribers, dispatching, received, refuses
from tests.loopback import OK, Names, says, serving, tls_contexts
from tests.make import TENANT, ago

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from ipn_gateway import objects
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults as FaultsType
    from tests.make import Make

VAULT = Vault([SecretStr(KEY)])


@asynccontextmanager
async def way_out(*, loopback: bool = True, faults: FaultsType | None = None, **given: Any) -> AsyncIterator[Transport]:
    chosen = settings.load(allow_loopback_endpoints=loopback, delivery_timeout_seconds=5)
    given.setdefault("tls", tls_contexts()[1])
    async with Transport(chosen, faults or Faults(), assert_no_transaction=database.assert_no_transaction, **given) as transport:
        yield transport


@pytest.fixture
async def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


def asked(endpoint_id: UUID, cause: str = "a cause", **given: Any) -> Asked:
    return Asked(TENANT, endpoint_id, cause, "test", **given)


async def run(db: Database, transport: Transport, endpoint_id: UUID, **given: Any) -> objects.EndpointTest:
    return await endpoint_tests.run(db, transport, VAULT, asked(endpoint_id, **given))


def steps(tested: objects.EndpointTest) -> dict[str, str]:
    return {check.check: check.status for check in tested.checks}


async def test_one_event_goes_to_one_endpoint_and_is_kept(db: Database, subscribers: Subscribers) -> None:
    """Signed with both kinds of signature by every active secret; event, event delivery and attempt are there, and the act is audited."""
    async with serving(says(OK), tls_contexts()[0]) as server, way_out() as transport:
        endpoint_id = await subscribers.endpoint(server, secrets=2, events=["order.paid"])
        await subscribers.endpoint(server)
        tested = await run(db, transport, endpoint_id, reason="is it there?")

    (message,) = received(server)
    keys = subscribers.secrets[endpoint_id] + subscribers.public_keys[endpoint_id]
    (delivery,) = await subscribers.rows("event_deliveries")
    (attempt,) = await subscribers.rows("delivery_attempts")
    (event,) = await subscribers.rows("events")
    (act,) = await subscribers.rows("audit_log")
    sent = json.loads(message.body)
    for key in keys:
        assert verify(message.headers, message.body, [key], now=int(message.headers["webhook-timestamp"])).id == tested.event_id
    assert message.headers["webhook-signature"].count("v1,") == message.headers["webhook-signature"].count("v1a,") == 2
    assert (sent["type"], sent["data"]["endpoint_id"], sent["data"]["url"]) == ("endpoint.test", tested.endpoint_id, server.url)
    assert (tested.delivered, tested.failed_check, set(steps(tested).values())) == (True, None, {"passed"})
    assert (tested.attempt.trigger, tested.attempt.number, tested.attempt.status_code) == ("test", 1, 200)
    assert (delivery["status"], delivery["attempt_count"], delivery["next_attempt_at"]) == ("delivered", 1, None)
    assert delivery["delivered_at"] is not None
    assert (delivery["event_id"], delivery["endpoint_id"]) == (tested.event_id, endpoint_id)
    assert (attempt["trigger"], attempt["outcome"], attempt["address"]) == ("test", "delivered", "127.0.0.1")
    assert (bytes(event["body"]), event["type"]) == (message.body, "endpoint.test")
    assert (act["action"], act["target"], act["reason"]) == ("endpoint.test", tested.endpoint_id, "is it there?")


async def test_a_disabled_endpoint_is_tested_too(db: Database, subscribers: Subscribers) -> None:
    """Before one enables it again; it stays disabled, and what waits for it goes on waiting."""
    async with serving(says(OK)) as server, way_out() as transport, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server, status="disabled", disabled_reason="gone")
        (waiting,) = await subscribers.deliver(endpoint_id)
        tested = await run(db, transport, endpoint_id)
        await running.drain()

    assert tested.delivered
    assert len(received(server)) == 1
    assert (await subscribers.delivery(waiting))["status"] == "pending"
    assert (await subscribers.rows("endpoints"))[0]["status"] == "disabled"


async def test_a_test_that_fails_is_never_tried_again(db: Database, subscribers: Subscribers) -> None:
    """It is cancelled and no dead letter; the endpoint's health is untouched, and a 410 disables nothing."""
    async with serving(refuses(410)) as server, way_out() as transport, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        tested = await run(db, transport, endpoint_id)
        attempts = await running.drain()

    (delivery,) = await subscribers.rows("event_deliveries")
    assert (tested.delivered, tested.failed_check, tested.attempt.status_code) == (False, "response", 410)
    assert "410" in tested.checks[-1].detail
    assert (delivery["status"], delivery["next_attempt_at"], delivery["delivered_at"]) == ("cancelled", None, None)
    assert (attempts, len(received(server))) == (0, 1)
    assert await subscribers.rows("endpoint_states", order="endpoint_id") == []
    assert (await subscribers.rows("endpoints"))[0]["status"] == "enabled"


async def test_a_redirect_is_a_refusal(db: Database, subscribers: Subscribers) -> None:
    """Where it points to is never called, and the answer says that it is not followed."""
    async with serving(says(OK)) as elsewhere, way_out() as transport:
        moved = f"HTTP/1.1 307 Moved\r\nLocation: {elsewhere.url}\r\nContent-Length: 0\r\n\r\n".encode()
        async with serving(says(moved)) as server:
            tested = await run(db, transport, await subscribers.endpoint(server))

    assert tested.failed_check == "response"
    assert "not followed" in tested.checks[-1].detail
    assert elsewhere.connections == 0


@pytest.mark.case("B101")
@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1"])
async def test_a_private_address_is_never_called_and_never_named(db: Database, subscribers: Subscribers, address: str) -> None:
    """The guard is the same as for every attempt: the test says that the name leads nowhere, not where."""
    async with way_out(loopback=False, resolver=Names([address])) as transport:
        tested = await run(db, transport, await subscribers.endpoint("https://subscriber.example/hook"))

    assert (tested.failed_check, tested.attempt.outcome, tested.attempt.address) == ("dns", "blocked", None)
    assert steps(tested) == {"url": "passed", "dns": "failed", "connect": "not_reached", "tls": "not_reached", "response": "not_reached"}
    assert address not in tested.model_dump_json()


@pytest.mark.parametrize("url", ["https://127.0.0.1:8443/", "http://localhost:8080/"])
async def test_a_url_that_may_not_be_called_any_more_is_not_called(db: Database, subscribers: Subscribers, url: str) -> None:
    """It was allowed when the endpoint was made."""
    async with way_out(loopback=False) as transport:
        tested = await run(db, transport, await subscribers.endpoint(url))

    assert (tested.failed_check, tested.attempt.error) == ("url", "url_not_allowed")


async def speak_http_at_once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()
    await writer.wait_closed()


async def test_each_step_is_told_from_the_others(db: Database, subscribers: Subscribers) -> None:
    """Nothing listens; a certificate for another name; no TLS where https is spoken; the connection breaks."""
    async with way_out() as transport:
        async with serving(says(OK)) as gone:
            pass
        async with serving(says(OK), tls_contexts("other.example")[0]) as other:
            untrusted = await run(db, transport, await subscribers.endpoint(other))
        async with await asyncio.start_server(speak_http_at_once, "127.0.0.1", 0) as plain:
            port = plain.sockets[0].getsockname()[1]
            no_tls = await run(db, transport, await subscribers.endpoint(f"https://localhost:{port}/"))
        async with serving(says(b"", close=True)) as cut:
            broken = await run(db, transport, await subscribers.endpoint(cut))
        refused = await run(db, transport, await subscribers.endpoint(gone))

    found = [tested.failed_check for tested in (refused, untrusted, no_tls, broken)]
    assert found == ["connect", "tls", "tls", "response"]
    assert steps(untrusted)["connect"] == "passed"
    assert steps(broken)["tls"] == "skipped"
    assert refused.checks[1].detail in {"127.0.0.1", "::1", "127.0.0.1, ::1", "::1, 127.0.0.1"}


async def test_every_test_makes_a_connection_of_its_own(db: Database, subscribers: Subscribers) -> None:
    """What is kept open to the endpoint would prove nothing about its name, its port and its certificate."""
    async with serving(says(OK)) as server, way_out() as transport:
        endpoint_id = await subscribers.endpoint(server)
        await run(db, transport, endpoint_id, cause="first")
        second = await run(db, transport, endpoint_id, cause="second")

    assert server.connections == 2
    assert second.checks[2].status == "passed"


async def test_the_same_cause_is_the_same_event(db: Database, subscribers: Subscribers, faults: Faults) -> None:
    """Asked again after the process died behind the sending: the same id and bytes, one act, and then one attempt on record."""

    async def die() -> None:
        raise asyncio.CancelledError

    faults.on["transport.send:after"] = die
    async with serving(says(OK)) as server, way_out(faults=faults) as transport:
        endpoint_id = await subscribers.endpoint(server)
        with pytest.raises(asyncio.CancelledError):
            await run(db, transport, endpoint_id)
        del faults.on["transport.send:after"]
        db.clock.advance(seconds=90)
        await run(db, transport, endpoint_id)

    first, second = received(server)
    assert (first.id, first.body) == (second.id, second.body)
    assert [len(await subscribers.rows(table)) for table in ("events", "event_deliveries", "delivery_attempts", "audit_log")] == [
        1,
        1,
        1,
        1,
    ]


async def test_a_write_that_is_repeated_writes_once(db: Database, subscribers: Subscribers) -> None:
    """Its ids were made before."""
    async with serving(says(OK)) as server, way_out() as transport:
        tested = await endpoint_tests.send(db, transport, VAULT, asked(await subscribers.endpoint(server)))
    for _ in range(2):
        async with db.transaction("test.record") as tx:
            shown = await endpoint_tests.record(tx, tested)

    assert shown.attempt.id == ids.show(ids.ATTEMPT, tested.attempt_id)
    assert [len(await subscribers.rows(table)) for table in ("event_deliveries", "delivery_attempts")] == [1, 1]


async def test_nobody_else_s_endpoint_and_no_deleted_one_is_tested(db: Database, subscribers: Subscribers) -> None:
    """Nothing is stored and nothing is sent; without a secret there is nothing to sign with."""
    async with serving(says(OK)) as server, way_out() as transport:
        theirs = await subscribers.endpoint(server, tenant_id="rival")
        gone = await subscribers.endpoint(server, deleted_at=ago(hours=1))
        bare = await subscribers.endpoint(server, secrets=0)
        for endpoint_id in (theirs, gone, ids.new(db.clock.now())):
            with pytest.raises(NotFound):
                await run(db, transport, endpoint_id)
        stored = await subscribers.rows("events")
        with pytest.raises(StateConflict):
            await run(db, transport, bare)

    assert (stored, server.requests) == ([], [])


async def test_an_endpoint_that_is_deleted_meanwhile_has_its_attempt_on_record(db: Database, subscribers: Subscribers) -> None:
    """What was sent was sent."""
    hanging = Hanging()
    async with serving(hanging) as server, way_out() as transport:
        endpoint_id = await subscribers.endpoint(server)
        running = asyncio.create_task(run(db, transport, endpoint_id))
        await hanging.has(1)
        await endpoints.delete(db, TENANT, endpoint_id, actor="test")
        hanging.let_go()
        tested = await running

    assert tested.delivered
    assert await subscribers.statuses(endpoint_id) == {"delivered": 1}


async def test_a_tenant_s_tests_at_once_have_a_limit(db: Database, subscribers: Subscribers) -> None:
    """Endpoints that hang hold five at most; another tenant's are not touched, and the place is free afterwards."""
    hanging = Hanging()
    async with serving(hanging) as server, way_out() as transport:
        endpoint_id = await subscribers.endpoint(server)
        running = [asyncio.create_task(run(db, transport, endpoint_id, cause=str(n))) for n in range(endpoint_tests.AT_ONCE_MAX)]
        await hanging.has(endpoint_tests.AT_ONCE_MAX)
        with pytest.raises(RateLimited):
            await run(db, transport, endpoint_id, cause="one more")
        hanging.let_go()
        theirs = await subscribers.endpoint(server, tenant_id="rival")
        other = await endpoint_tests.run(db, transport, VAULT, Asked("rival", theirs, "a cause", "test"))
        await asyncio.gather(*running)
        again = await run(db, transport, endpoint_id, cause="one more")

    assert (other.delivered, again.delivered) == (True, True)


@pytest.mark.parametrize("event_type", ["order.refunded", "notification.held", "endpoint.disabled"])
async def test_a_sample_of_another_type_is_kept_as_a_test(db: Database, subscribers: Subscribers, event_type: str) -> None:
    """It arrives as what it is a sample of; who pulls events, or looks for an order's, finds an endpoint.test."""
    async with serving(says(OK)) as server, way_out() as transport:
        tested = await run(db, transport, await subscribers.endpoint(server), sample_of=event_type)

    (message,) = received(server)
    (event,) = await subscribers.rows("events")
    (delivery,) = await subscribers.rows("event_deliveries")
    assert tested.delivered
    assert json.loads(message.body)["type"] == event_type
    assert (event["type"], event["order_id"], event["sequence"]) == ("endpoint.test", None, None)
    assert (delivery["event_type"], delivery["order_id"]) == ("endpoint.test", None)


async def test_a_sample_goes_to_those_who_would_get_the_real_one(db: Database, subscribers: Subscribers) -> None:
    """By filter, enabled, and of this tenant."""
    url = "https://subscriber.example/hook"
    wanted = [await subscribers.endpoint(url), await subscribers.endpoint(url, events=["order.*"])]
    await subscribers.endpoint(url, events=["notification.*"])
    await subscribers.endpoint(url, status="disabled")
    await subscribers.endpoint(url, tenant_id="rival")

    assert await endpoint_tests.takers(db, TENANT, "order.paid") == wanted
