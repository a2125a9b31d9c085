"""The local subscriber: verification, deduplication, counts, misbehaviour."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from standardwebhooks import Webhook

from ipn_gateway import signing
from ipn_gateway.simulator.subscriber import Mode, create_subscriber
from ipn_gateway.simulator.world import host_time

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"


def signed(event_id: str, body: str, *, secret: str = SECRET, moment: datetime | None = None) -> dict[str, str]:
    moment = moment or host_time()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": f"v1a,AAAA {Webhook(secret).sign(event_id, moment, body)}",
        "content-type": "application/json",
    }


class Target:
    def __init__(self, app, client) -> None:
        self.subscriber = app.state.subscriber
        self.client = client

    async def deliver(self, event_id: str = "evt_1", body: str | None = None, **signing):
        body = body if body is not None else json.dumps({"id": event_id, "type": "order.paid"})
        response = await self.client.post("/webhooks", content=body, headers=signed(event_id, body, **signing))
        return response.status_code

    async def received(self):
        return (await self.client.get("/received")).json()


@pytest.fixture
async def target(enter) -> Target:
    app = create_subscriber(SECRET)
    return Target(app, await enter(app))


@pytest.fixture
async def served(connect) -> Target:
    app = create_subscriber(SECRET)
    return Target(app, await connect(app))


async def test_events_are_verified_and_kept_once_in_the_order_in_which_they_came(target) -> None:
    """A repeat is acknowledged and counted, and is no second event."""
    answers = [await target.deliver(event_id) for event_id in ("evt_2", "evt_1", "evt_2")]

    received = await target.received()
    assert answers == [200, 200, 200]
    assert [event["id"] for event in received["events"]] == ["evt_2", "evt_1"]
    assert (received["received"], received["verified"], received["unique"], received["duplicates"]) == (3, 3, 2, 1)
    assert (received["bad_signature"], received["altered"], received["statuses"]) == (0, 0, {"200": 3})


async def test_a_repeat_with_other_bytes_is_noticed(target) -> None:
    """The same webhook-id must always carry the same bytes."""
    await target.deliver("evt_1", '{"a":1}')
    await target.deliver("evt_1", '{"a":2}')

    received = await target.received()
    assert (received["altered"], received["duplicates"], received["events"]) == (1, 1, [{"a": 1}])


@pytest.mark.parametrize(
    "signing",
    [{"secret": OTHER}, {"moment": datetime(2020, 1, 1, tzinfo=UTC)}, {"moment": datetime(2999, 1, 1, tzinfo=UTC)}],
    ids=["another secret", "too old", "too new"],
)
async def test_what_does_not_verify_is_refused(target, signing: dict) -> None:
    """Another secret, or a timestamp more than five minutes away, is a 401 and no event."""
    assert await target.deliver(**signing) == 401
    assert (await target.received())["bad_signature"] == 1
    assert (await target.received())["unique"] == 0


@pytest.mark.parametrize("headers", [{}, {"webhook-id": "evt_1", "webhook-timestamp": "1", "webhook-signature": "v1"}])
async def test_a_request_without_a_usable_signature_is_refused(target, headers: dict) -> None:
    """Missing or garbled headers are a 401 as well, never a 500."""
    assert (await target.client.post("/webhooks", content="{}", headers=headers)).status_code == 401


async def test_without_a_secret_nothing_verifies_until_one_is_set(enter) -> None:
    """Secrets can be set later, several of them while one is rotated."""
    app = create_subscriber()
    target = Target(app, await enter(app))

    before = await target.deliver()
    put = await target.client.put("/secrets", json={"secrets": [OTHER, SECRET]})
    after = [await target.deliver("evt_1"), await target.deliver("evt_2", secret=OTHER)]

    assert (before, put.status_code, after) == (401, 204, [200, 200])
    for secret in ("whsec_", "whpk_AAAA"):
        assert (await target.client.put("/secrets", json={"secrets": [secret]})).status_code == 422


@pytest.mark.parametrize("check_age", [True, False])
async def test_a_public_key_verifies_without_a_secret(enter, check_age: bool) -> None:
    """The key pair's public half is enough for signatures v1a; another one is not."""
    known, other = signing.new_keys(bytes(64)), signing.new_keys(b"o" * 64)
    app = create_subscriber(known.public_key, check_age=check_age)
    target = Target(app, await enter(app))
    body, moment = b'{"id":"evt_1"}', int(host_time().timestamp())

    answers = []
    for keys in (known, other):
        sent = signing.headers("evt_1", moment, body, [signing.signing_key(keys.private_key)])
        answers.append((await target.client.post("/webhooks", content=body, headers=sent)).status_code)

    assert answers == [200, 401]


async def test_a_moved_clock_can_be_allowed(enter) -> None:
    """Where a test moves the sender's time, the age of a timestamp is not looked at, its signature is."""
    app = create_subscriber(SECRET, check_age=False)
    target = Target(app, await enter(app))
    later = host_time() + timedelta(days=3)

    assert await target.deliver("evt_1", moment=later) == 200
    assert await target.deliver("evt_2", moment=later, secret=OTHER) == 401


async def test_a_refusal_takes_nothing_in_and_ends_after_its_times(target) -> None:
    """status:<code> answers with the code and a hint; then it is ok again."""
    mode = {"mode": "status:503", "times": 2, "retry_after": "7"}
    await target.client.put("/mode", json=mode)
    body = json.dumps({"id": "evt_1"})

    refused = await target.client.post("/webhooks", content=body, headers=signed("evt_1", body))
    answers = [await target.deliver(), await target.deliver()]

    assert (refused.status_code, refused.headers["retry-after"], answers) == (503, "7", [503, 200])
    assert (await target.received())["statuses"] == {"503": 2, "200": 1}
    assert (await target.received())["duplicates"] == 0


async def test_another_success_is_a_success(target) -> None:
    """status:204 takes the event in."""
    target.subscriber.behave(Mode(mode="status:204"))

    assert await target.deliver() == 204
    assert (await target.received())["unique"] == 1


@pytest.mark.parametrize(("mode", "taken_in"), [("reset", 0), ("lost", 1)])
async def test_a_cut_connection_may_hide_an_event_that_was_taken_in(served, mode: str, taken_in: int) -> None:
    """`reset` cuts before, `lost` after; the repeat is then new or a duplicate."""
    served.subscriber.behave(Mode(mode=mode, times=1))

    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await served.deliver()

    assert (await served.received())["unique"] == taken_in
    assert await served.deliver() == 200
    assert (await served.received())["duplicates"] == taken_in


async def test_a_hanging_request_is_counted_and_released(served) -> None:
    """A sender that waits is in flight; a change of mode lets it go on."""
    served.subscriber.behave(Mode(mode="hang"))

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(served.deliver(event_id)) for event_id in ("evt_1", "evt_2")]
        while (await served.received())["in_flight"] < 2:
            pass
        await served.client.put("/mode", json={"mode": "ok"})

    assert [task.result() for task in waiting] == [200, 200]
    assert ((await served.received())["in_flight"], (await served.received())["in_flight_max"]) == (0, 2)


async def test_a_sender_that_gives_up_leaves_no_event(served) -> None:
    """When the sender's time is over before a slow answer, nothing was taken in."""
    served.subscriber.behave(Mode(mode="slow", seconds=30))
    body = json.dumps({"id": "evt_1"})

    with pytest.raises(httpx.ReadTimeout):
        await served.client.post("/webhooks", content=body, headers=signed("evt_1", body), timeout=httpx.Timeout(10, read=0.1))
    while (await served.received())["in_flight"]:
        pass

    assert (await served.received())["unique"] == 0


async def test_a_slow_answer_is_a_success(target) -> None:
    """`slow` waits its seconds, then behaves as ok."""
    target.subscriber.behave(Mode(mode="slow", seconds=0.02))

    assert await target.deliver() == 200


async def test_one_can_wait_for_events(target) -> None:
    """Tests await so many different events with a limit, instead of sleeping."""
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(target.subscriber.wait_for(2, seconds=5))
        await target.deliver("evt_1")
        await target.deliver("evt_2")

    assert waiting.result()
    assert not await target.subscriber.wait_for(3, seconds=0.01)


async def test_received_events_can_be_forgotten(target) -> None:
    """After that a repeat counts as new."""
    await target.deliver()

    assert (await target.client.delete("/received")).status_code == 204
    assert await target.deliver() == 200
    assert (await target.received())["unique"] == 1


@pytest.mark.parametrize("mode", ["sleepy", "status:99", "status:600", "ok "])
async def test_an_unknown_mode_is_refused(target, mode: str) -> None:
    """A misspelt mode is an error."""
    assert (await target.client.put("/mode", json={"mode": mode})).status_code == 422
