"""`serve` as an operator sees it: what it says, what it refuses, and how it ends."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

from ipn_gateway.errors import ConfigurationError
from ipn_gateway.serving import bind, url_of
from tests.cli import command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ipn_gateway.db import Database
    from tests.conftest import Server

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def empty_database_url(server: Server) -> Iterator[str]:
    """The URL of a database without a schema."""
    with server.database() as url:
        yield url


async def test_a_given_database_is_migrated_only_when_asked(empty_database_url: str):
    """Pending migrations are refused with the way out; with --migrate they are applied, the gateway is ready, and nothing is left to do."""
    settings = command.given_database(empty_database_url)

    refused = await command.run("serve", "--port", "0", **settings)
    async with command.serving("serve", "--port", "0", "--migrate", **settings) as gateway, httpx.AsyncClient() as client:
        alive = await client.get(f"{gateway.url}/healthz")
        ready = await client.get(f"{gateway.url}/readyz")
        stopped = await gateway.stopped()
    migrated = await command.run("migrate", **settings)

    assert (refused.code, refused.out) == (1, "")
    assert "ipn-gateway migrate" in refused.sentence
    assert (alive.status_code, ready.status_code) == (200, 200)
    assert "server" not in alive.headers
    assert (stopped.code, "Traceback" in stopped.err) == (0, False)
    assert migrated.out == "Nothing was pending.\n"


async def test_a_port_that_is_taken_is_said_in_a_sentence(database_url: str):
    """The second one ends at once, names the port and what to do, and leaves the first one alone."""
    settings = command.given_database(database_url)

    async with command.serving("serve", "--port", "0", **settings) as first, httpx.AsyncClient() as client:
        port = str(urlsplit(first.url).port)
        second = await command.run("serve", "--port", port, **settings)
        alive = await client.get(f"{first.url}/healthz")
        await first.stopped()

    assert (second.code, second.out) == (1, "")
    assert f"Port {port} on 127.0.0.1 is taken" in second.sentence
    assert alive.status_code == 200


async def test_without_the_web_role_nothing_listens(database_url: str):
    """A process of workers says so, warns about a setting that it does not know, and ends at SIGINT."""
    settings = command.given_database(database_url) | {"IPN_PROVIDER_TIMEOUT_SECOND": "5"}

    async with command.serving("serve", "--roles", "inbox,dispatcher", **settings) as gateway:
        gateway.signal(signal.SIGINT)
        done = await gateway.ended()

    assert gateway.line == "ipn-gateway runs inbox, dispatcher; it does not listen."
    assert done.code == 0
    assert "IPN_PROVIDER_TIMEOUT_SECOND is no setting" in done.err


async def test_an_open_request_is_waited_for_until_a_second_signal(database_url: str, db: Database):
    """After the first signal nothing new is taken in while a client still sends; the second one ends it at once."""
    settings = command.given_database(database_url)

    await command.source(db, settings, "shop")
    async with command.serving("serve", "--port", "0", **settings) as gateway:
        address = urlsplit(gateway.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"POST /ipn/shop HTTP/1.1\r\nHost: gateway\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\nhalf")
        await writer.drain()
        gateway.signal()
        await gateway.takes_no_more()
        running = gateway.process.returncode is None
        gateway.signal()
        done = await gateway.ended()
        writer.close()

    assert running
    assert done.code == 1
    assert "Stopped at once" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"IPN_DISPATCH_LEASE_SECONDS": "1"}, "IPN_DISPATCH_LEASE_SECONDS must be at least"),
        ({"IPN_RETRY_SCHEDULE": "soon"}, "IPN_RETRY_SCHEDULE"),
    ],
)
async def test_settings_that_cannot_be_stop_the_start(settings: dict[str, str], hint: str):
    """The sentence names the setting."""
    done = await command.run("serve", "--port", "0", **settings)

    assert (done.code, done.out) == (1, "")
    assert hint in done.sentence


def test_an_address_of_another_machine_is_refused():
    """`--host` takes addresses of this machine, and says so."""
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1 is no address of this machine"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("shop", "http://shop:80")],
)
def test_the_url_is_one_that_this_machine_reaches(host: str, url: str):
    """All addresses are reached under the loopback one, and IPv6 stands in brackets."""
    assert url_of(host, 80) == url


async def test_the_simulator_runs_by_itself():
    """`simulate` says where it listens, answers, and ends at SIGTERM."""
    async with command.serving("simulate", "--port", "0", "--seed", "1", "--duplicate", "0.5") as simulator, httpx.AsyncClient() as client:
        state = await client.get(f"{simulator.url}/simulator/state")
        done = await simulator.stopped()

    assert state.status_code == 200
    assert done.code == 0
