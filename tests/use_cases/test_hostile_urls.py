"""URLs that should never have been accepted, at the moment of sending: rules grow, and a row may be older than its rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import hostile
from tests.dispatching import Subscribers, dispatching
from tests.loopback import Names, event, opened

if TYPE_CHECKING:
    from ipn_gateway.db import Database
    from tests.make import Make

STORED = [
    "https://[::ffff:127.0.0.1]/",
    "https://2130706433/",
    "https://169.254.169.254/latest/meta-data/",
    "https://metadata.google.internal/",
    "https://hooks.example.com@10.0.0.1/",
    "http://hooks.example.com/",
    "https://hooks.example.com:22/",
    "",
]


@pytest.mark.case("B101")
@pytest.mark.parametrize("loopback", [False, True])
async def test_none_of_them_is_sent_to(loopback: bool) -> None:
    """Each is blocked before anything is looked up, so that no name of it leaves this host either."""
    names = Names(["8.8.8.8"])
    async with opened(loopback=loopback, resolver=names) as transport:
        outcomes = {url: await transport.send(event(url)) for url in hostile.ALWAYS}

    assert len(outcomes) > 200
    assert [url for url, made in outcomes.items() if (made.kind, made.error, made.address) != ("blocked", "url_not_allowed", None)] == []
    assert names.asked == []


@pytest.mark.case("B101")
async def test_this_host_is_not_sent_to_without_the_setting() -> None:
    """By name or by number, in whatever digits."""
    names = Names(["127.0.0.1"])
    async with opened(loopback=False, resolver=names) as transport:
        errors = {(await transport.send(event(url))).error for url in hostile.LOOPBACK}

    assert errors == {"url_not_allowed"}
    assert names.asked == []


@pytest.mark.case("B101", "B103")
async def test_a_blocked_attempt_is_one_as_any_other(db: Database, make: Make) -> None:
    """It is recorded without an address, counts against the endpoint, and is tried again: the owner may mend it."""
    subscribers = Subscribers(db, make)
    names = Names(["8.8.8.8", "10.0.0.5"])
    async with dispatching(db, loopback=False, resolver=names) as running:
        stored = [(await subscribers.deliver(await subscribers.endpoint(url)))[0] for url in STORED]
        (mixed,) = await subscribers.deliver(await subscribers.endpoint("https://hooks.example.com/"))
        await running.drain()

    made = [(await subscribers.attempts(delivery_id))[0] for delivery_id in [*stored, mixed]]
    assert [attempt["error"] for attempt in made] == ["url_not_allowed"] * len(STORED) + ["address_not_allowed"]
    assert {(attempt["outcome"], attempt["address"], attempt["status_code"]) for attempt in made} == {("blocked", None, None)}
    assert {row["status"] for row in await subscribers.rows("event_deliveries")} == {"pending"}
    assert [state["consecutive_failures"] for state in await subscribers.rows("endpoint_states", order="endpoint_id")] == [1] * len(made)
    assert names.asked == ["hooks.example.com"]
