"""A provider whose certificate is not good is not asked: the notification waits, somebody is told, and nothing switches the check off."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from ipn_gateway.db import assert_no_transaction
from ipn_gateway.providers.sslcommerz import PROVIDER
from ipn_gateway.settings import Settings
from ipn_gateway.transport import Transport
from tests import loopback
from tests.loopback import serving, tls_contexts
from tests.providers.contract import answered
from tests.providers.sslcommerz import validator_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.world import World

LIVE: Final = "live-shop"
SWITCHES: Final[dict[str, Any]] = {"verify": False, "verify_ssl": False, "tls_verify": "no", "insecure": True, "check_hostname": False}


def validator(fields: dict[str, str]) -> loopback.Answering:
    """The provider's validator, which confirms a payment of these fields."""
    body = answered(validator_answer(fields)).body
    return loopback.says(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


@asynccontextmanager
async def trusting(world: World, tls: ssl.SSLContext) -> AsyncIterator[None]:
    """Let the world's worker trust other authorities than the system's; the check itself stays as it is."""
    before = world.worker
    async with Transport(world.rt.settings, world.rt.faults, assert_no_transaction=assert_no_transaction, tls=tls) as transport:
        world.worker = replace(before, transport=transport)
        yield
        world.worker = before


def certificate(kind: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's certificate, and what a client trusts that would take it but for this fault."""
    if kind == "self-signed":
        return tls_contexts()[0], ssl.create_default_context()
    return {"expired": tls_contexts(valid_days=30), "wrong-host": tls_contexts("elsewhere.example"), "good": tls_contexts()}[kind]


@pytest.mark.case("B47")
@pytest.mark.parametrize("kind", ["self-signed", "expired", "wrong-host"])
async def test_a_bad_certificate_is_no_verdict_and_nothing_is_sent(world: World, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In live mode, with every switch that one might wish for: asked again on the schedule, an alarm, and paid when it is put right."""
    fields = world.pay("ORD-1")
    theirs, ours = certificate(kind)
    async with serving(validator(fields), theirs) as server:
        await world.source(LIVE, mode="live", base_url=f"https://localhost:{server.port}", **SWITCHES)
        await world.order("ORD-1", source=LIVE)
        receipt = await world.notify(fields, source=LIVE)
        async with trusting(world, ours):
            for wait in (5, 30, 120, 600, 0):
                await world.drain()
                assert await world.outcome(receipt) == ("received", None)
                world.rt.clock.advance(seconds=wait)

        assert receipt.error is None
        assert server.requests == []
        assert await world.status("ORD-1") == "pending"
        assert await world.rows("SELECT state, asked FROM inbox") == [{"state": "received", "asked": 5}]
    logged = capsys.readouterr().out
    assert logged.count("cause=tls_failed") == 5 + 1
    assert "source.no_verdicts" in logged

    theirs, ours = certificate("good")
    async with serving(validator(fields), theirs) as server, trusting(world, ours):
        await world.value(
            "UPDATE sources SET config = config || jsonb_build_object('base_url', %(url)s::text) WHERE name = %(name)s RETURNING name",
            url=f"https://localhost:{server.port}",
            name=LIVE,
        )
        world.rt.sources.forget(LIVE)
        world.rt.clock.advance(seconds=1800)
        await world.drain()

        assert await world.outcome(receipt) == ("applied", None)
        assert len(server.requests) == 1


@pytest.mark.case("B47")
def test_no_setting_and_no_source_can_switch_the_check_off() -> None:
    """There is nothing to set: neither for all nor for one source, and a switch that somebody writes anyway is not kept."""
    known = set(PROVIDER.Config.model_fields)

    assert known == {"store_id", "store_passwd", "mode", "base_url"}
    assert set(SWITCHES).isdisjoint(known)
    assert [
        name for name in Settings.model_fields if any(word in name for word in ("verify", "tls", "ssl", "insecure", "certificate"))
    ] == []
