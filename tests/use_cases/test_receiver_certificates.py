"""Receivers whose certificate is not good: nothing is sent, the owner reads why, and nothing switches the check off."""

from __future__ import annotations

import dataclasses
import ssl
from typing import TYPE_CHECKING

import pytest

from ipn_gateway import views
from ipn_gateway.endpoints import NewEndpoint
from ipn_gateway.guard import trusted
from ipn_gateway.models import Endpoint
from ipn_gateway.paging import Wanted
from ipn_gateway.settings import Settings
from ipn_gateway.web import schemas
from tests.dispatching import Subscribers, dispatching, received
from tests.loopback import OK, says, serving, tls_contexts
from tests.make import TENANT

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from tests.make import Make


def certificate(kind: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A receiver's certificate, and what a client trusts that would take it but for this fault."""
    if kind == "self-signed":
        return tls_contexts()[0], ssl.create_default_context()
    return tls_contexts(valid_days=30) if kind == "expired" else tls_contexts("elsewhere.example")


@pytest.mark.case("B107")
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("self-signed", "self-signed certificate"),
        ("expired", "certificate has expired"),
        ("wrong-host", "Hostname mismatch, certificate is not valid for 'localhost'."),
    ],
)
async def test_an_event_waits_for_a_good_certificate(clock: Clock, db: Database, make: Make, kind: str, word: str) -> None:
    """Each attempt is `tls_failed` and says why; the schedule is that of every failure, and a good certificate ends it."""
    subscribers = Subscribers(db, make)
    theirs, ours = certificate(kind)
    async with serving(says(OK), theirs) as server, dispatching(db, tls=ours) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        await running.drain()
        clock.advance(seconds=6)
        await running.drain()
        waiting = await subscribers.delivery(delivery_id)
        async with db.autocommit("test.shown") as tx:
            (shown,) = (await views.event_deliveries(tx, TENANT, Wanted())).items

    assert server.requests == []
    assert [(attempt.outcome, attempt.error) for attempt in shown.attempts] == [("tls_failed", f"certificate_refused: {word}")] * 2
    assert {(attempt.status_code, attempt.address, attempt.response_excerpt) for attempt in shown.attempts} == {(None, None, None)}
    assert (waiting["next_attempt_at"] - waiting["now"]).total_seconds() == pytest.approx(300, abs=2)

    clock.advance(seconds=301)
    good, trusting = tls_contexts()
    async with serving(says(OK), good) as server, dispatching(db, tls=trusting) as running:
        await subscribers.run("UPDATE endpoints SET url = %(url)s", url=server.url)
        await running.drain()

    assert len(received(server)) == 1
    assert (await subscribers.delivery(delivery_id))["status"] == "delivered"


@pytest.mark.case("B107")
async def test_one_bad_certificate_is_nobody_elses_matter(db: Database, make: Make) -> None:
    """Other endpoints, also of the same tenant, are sent to as ever."""
    subscribers = Subscribers(db, make)
    async with (
        serving(says(OK), certificate("expired")[0]) as bad,
        serving(says(OK), tls_contexts()[0]) as good,
        dispatching(db) as running,
    ):
        refused, healthy = await subscribers.endpoint(bad), await subscribers.endpoint(good)
        await subscribers.deliver(refused, 3)
        await subscribers.deliver(healthy, 3)
        await running.drain()

    assert await subscribers.statuses(refused) == {"pending": 3}
    assert await subscribers.statuses(healthy) == {"delivered": 3}
    assert bad.requests == []


@pytest.mark.case("B107")
def test_there_is_no_switch() -> None:
    """Neither for all, nor for one endpoint, at creation or later; what checks is the same for every connection."""
    names = {
        *Settings.model_fields,
        *Endpoint.model_fields,
        *schemas.NewEndpoint.model_fields,
        *schemas.EndpointChange.model_fields,
        *(field.name for field in dataclasses.fields(NewEndpoint)),
    }
    context = trusted()

    assert [name for name in names if any(word in name for word in ("verify", "tls", "ssl", "insecure", "certificate", "trust_"))] == []
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
