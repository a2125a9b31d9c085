"""The commands around a subscriber: test its endpoint, recover what it missed, send it samples, and listen in its place."""

from __future__ import annotations

import asyncio
import getpass
import json
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from pydantic import SecretStr

from ipn_gateway import endpoints, events, ids, signing, tenants
from ipn_gateway.clock import Clock
from ipn_gateway.vault import Vault
from tests.cli import command
from tests.cli.command import here
from tests.dispatching import received, refuses
from tests.loopback import OK, says, serving
from tests.make import Make, ago

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.db import Database
    from tests.cli.command import Serving
    from tests.forkserver import Process
    from tests.loopback import Server

pytestmark = pytest.mark.timeout(120)

LOOPBACK = {"IPN_ALLOW_LOOPBACK_ENDPOINTS": "true"}
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
URL = "https://subscriber.example/hook"


async def subscribed(db: Database, settings: dict[str, str], to: Server | str, wanted: tuple[str, ...] = ("*",)) -> str:
    """An endpoint of the tenant `acme`; its id."""
    await tenants.create_key(db, "acme")
    new = endpoints.NewEndpoint(to if isinstance(to, str) else to.url, wanted)
    vault = Vault([SecretStr(settings["IPN_SECRET_KEY"])])
    made = await endpoints.create(db, vault, "acme", new, secret_bytes=bytes(64), actor="test")
    return ids.show(ids.ENDPOINT, made.endpoint_id)


async def rows(db: Database, statement: str) -> list[dict[str, Any]]:
    async with db.autocommit("test.rows") as tx:
        return await tx.all(dict, statement)


async def test_an_endpoint_is_tested(database_url: str, db: Database):
    """Each step is printed; one that fails is named, and the exit code says it too. The act is the user's."""
    settings = command.given_database(database_url) | LOOPBACK
    async with serving(says(OK)) as well, serving(refuses(500)) as ill:
        good, bad = await subscribed(db, settings, well), await subscribed(db, settings, ill)
        told = await here("endpoints", "test", good, "--reason", "new server", **settings)
        failed = await command.run("endpoints", "test", bad, "--json", **settings)
        lost = await here("endpoints", "test", "ep_1", **settings)

    acts = await rows(db, "SELECT actor, reason FROM audit_log WHERE action = 'endpoint.test' ORDER BY id")
    assert (told.code, failed.code, lost.code) == (0, 1, 1)
    assert [line.split()[:2] for line in told.out.splitlines() if line.startswith(("dns", "connect", "tls", "response"))] == [
        *(["dns", "passed"], ["connect", "passed"], ["tls", "skipped"], ["response", "passed"])
    ]
    assert (failed.json["failed_check"], failed.json["attempt"]["status_code"]) == ("response", 500)
    assert failed.err == ""
    assert acts == [{"actor": f"cli:{getpass.getuser()}", "reason": reason} for reason in ("new server", None)]
    assert [len(received(server)) for server in (well, ill)] == [1, 1]


async def test_what_is_not_sent_to_this_machine_names_the_setting(database_url: str, db: Database):
    """A test and a sample are sent from the command's own process, whatever `serve` may do."""
    settings = command.given_database(database_url)
    endpoint = await subscribed(db, settings, "http://127.0.0.1:3000/hook")

    tested = await here("endpoints", "test", endpoint, **settings)
    sample = await here("trigger", "order.paid", **settings)

    assert (tested.code, sample.code) == (1, 1)
    assert "IPN_ALLOW_LOOPBACK_ENDPOINTS=true" in tested.out
    assert f"{endpoint}: this URL may not be called" in sample.err
    assert "IPN_ALLOW_LOOPBACK_ENDPOINTS=true" in sample.err


async def test_what_was_missed_is_recovered(database_url: str, db: Database, make: Make):
    """Counted first, then made due; it needs a reason, and times that can be read."""
    settings = command.given_database(database_url)
    endpoint = await subscribed(db, settings, URL)
    for hours in (3, 2):
        await make.event(tenant_id="acme", created_at=ago(hours=hours))
    recover = ("endpoints", "recover", endpoint, "--since", "2020-01-01T00:00:00Z")

    dry = await here(*recover, "--dry-run", **settings)
    silent = await here(*recover, **settings)
    odd = await here(*recover[:3], "--since", "yesterday", "--reason", "is back", **settings)
    done = await here(*recover, "--reason", "is back", "--json", **settings)

    assert [one.code for one in (dry, silent, odd, done)] == [0, 2, 2, 0]
    assert [line.split() for line in dry.out.splitlines() if line.startswith("recovered")] == [["recovered", "2"]]
    assert ("--reason" in silent.err, "--since" in odd.err) == (True, True)
    assert (done.json["matched"], done.json["missing"], done.json["dry_run"], done.json["next_cursor"]) == (2, 2, False, None)
    assert [row["next_trigger"] for row in await rows(db, "SELECT next_trigger FROM event_deliveries")] == ["recovery"] * 2


async def test_samples_are_sent(database_url: str, db: Database):
    """To each endpoint that would get the real one, or to one; what has no taker is no failure, what is refused is."""
    settings = command.given_database(database_url) | LOOPBACK
    async with serving(says(OK)) as orders, serving(refuses(500)) as other:
        first = await subscribed(db, settings, orders, ("order.*",))
        second = await subscribed(db, settings, other, ("notification.*",))
        told = await here("trigger", "order.refunded", **settings)
        one = await here("trigger", "order.paid", "--endpoint", second, "--json", **settings)
        nobody = await here("trigger", "endpoint.disabled", **settings)
        odd = await here("trigger", "order.bought", **settings)

    assert [done.code for done in (told, one, nobody, odd)] == [0, 1, 0, 2]
    assert told.out.splitlines()[1].split()[:2] == [first, "True"]
    assert [item["endpoint_id"] for item in one.json["items"]] == [second]
    assert "No enabled endpoint" in nobody.err
    assert [json.loads(message.body)["type"] for server in (orders, other) for message in received(server)] == [
        "order.refunded",
        "order.paid",
    ]
    assert {row["type"] for row in await rows(db, "SELECT type FROM events")} == {"endpoint.test"}


# listen


@asynccontextmanager
async def listening(*arguments: str, **settings: str) -> AsyncIterator[Serving]:
    async with command.serving("listen", "--port", "0", "--json", *arguments, **settings) as listener:
        yield listener


async def printed(listener: Serving) -> dict[str, Any]:
    """The next line about a webhook."""
    assert listener.process.stdout is not None
    async with asyncio.timeout(30):
        found: dict[str, Any] = json.loads(await listener.process.stdout.readline())
    return found


def signed(event_type: str = "order.paid", *, at: int | None = None) -> tuple[dict[str, str], bytes]:
    """Headers and body of a genuine webhook."""
    now = Clock().now()
    body = events.frozen("evt_1", event_type, now, {"order_id": "ORD-1"})
    keys = [signing.signing_key(SECRET)]
    return {"Content-Type": "application/json"} | signing.headers("evt_1", int(now.timestamp()) if at is None else at, body, keys), body


async def test_what_arrives_is_verified_handed_on_and_answered_as_there(database_url: str):
    """What is not genuine is refused and goes no further; bytes and signature arrive as they came."""
    settings = command.given_database(database_url)
    answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nRetry-After: 7\r\nContent-Type: text/plain\r\n\r\nbusy"
    async with (
        serving(says(answer, OK)) as service,
        httpx.AsyncClient() as client,
        listening("--secret", SECRET, "--forward-to", service.url, **settings) as listener,
    ):
        headers, body = signed()
        refused = await client.post(listener.url, headers=headers, content=body)
        taken = await client.post(listener.url + "any/path", headers=headers, content=body)
        forged = await client.post(listener.url, headers=headers, content=body + b" ")
        old = await client.post(listener.url, headers=signed(at=1_700_000_000)[0], content=body)
        told = [await printed(listener) for _ in range(4)]
        done = await listener.stopped()

    assert (refused.status_code, refused.text, refused.headers["retry-after"]) == (503, "busy", "7")
    assert [answer.status_code for answer in (taken, forged, old)] == [200, 401, 401]
    assert [(one["verified"], one.get("rejected"), one["status"]) for one in told] == [
        *((True, None, 503), (True, None, 200), (False, "signature_wrong", 401), (False, "timestamp_too_old", 401))
    ]
    assert (told[0]["webhook_id"], told[0]["event"]["type"]) == ("evt_1", "order.paid")
    assert [(message.body, message.headers["webhook-signature"]) for message in received(service)] == [
        (body, headers["webhook-signature"])
    ] * 2
    assert done.code == 0
    assert SECRET not in done.out + done.err


async def test_a_service_that_is_not_there_is_a_502(database_url: str):
    """The gateway tries again, as it would with the service itself."""
    settings = command.given_database(database_url)
    async with serving(says(OK)) as gone:
        pass
    async with listening("--secret", SECRET, "--forward-to", gone.url, **settings) as listener, httpx.AsyncClient() as client:
        headers, body = signed()
        answer = await client.post(listener.url, headers=headers, content=body)
        told = await printed(listener)
        await listener.stopped()

    assert (answer.status_code, told["verified"], told["status"]) == (502, True, 502)


async def test_without_a_key_nothing_is_called_verified(database_url: str):
    """It is shown and taken, and one is told how to get further."""
    settings = command.given_database(database_url)
    async with listening(**settings) as listener, httpx.AsyncClient() as client:
        answer = await client.post(listener.url, content=b"no event at all")
        told = await printed(listener)
        done = await listener.stopped()

    assert (answer.status_code, told["verified"], told["event"]) == (200, None, None)
    assert "--secret" in done.err
    assert "endpoints add http://127.0.0.1:" in done.err


async def test_it_subscribes_itself_and_ends_that_with_itself(database_url: str, db: Database):
    """Beside a `serve`: a sample comes by the command, a real event by the dispatcher; afterwards the endpoint is gone."""
    settings = command.given_database(database_url) | LOOPBACK
    key = (await tenants.create_key(db, "acme")).key
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "k-1"}
    async with command.serving("serve", "--port", "0", **settings) as gateway, httpx.AsyncClient(headers=headers) as client:
        async with listening("--tenant", "acme", "--events", "order.*,invoice.*", **settings) as listener:
            triggered = await here("trigger", "order.paid", "--json", **settings)
            sample = await printed(listener)
            await client.post(f"{gateway.url}/v1/events", json={"type": "invoice.sent", "data": {"number": 1}})
            real = await printed(listener)
            during = (await client.get(f"{gateway.url}/v1/endpoints")).json()["items"]
            listener.signal(signal.SIGINT)
            done = await listener.ended()
        after = (await client.get(f"{gateway.url}/v1/endpoints")).json()["items"]
        await gateway.stopped()

    assert triggered.json["items"][0]["delivered"]
    assert (sample["verified"], sample["event"]["type"], sample["event"]["data"]["metadata"]) == (True, "order.paid", {"sample": True})
    assert (real["verified"], real["event"]["type"], real["event"]["data"]) == (True, "invoice.sent", {"number": 1})
    assert [(one["events"], one["description"]) for one in during] == [(["order.*", "invoice.*"], "ipn-gateway listen")]
    assert after == []
    assert (done.code, "The subscription is ended" in done.err) == (0, True)
    assert f"verifies with the public key {during[0]['secrets'][0]['public_key']}\n" in done.err


async def until(db: Database, condition: str) -> None:
    """Wait until the database says so."""
    async with asyncio.timeout(command.COMMAND_SECONDS):
        while not (await rows(db, f"SELECT {condition} AS found"))[0]["found"]:
            pass


@asynccontextmanager
async def begun(settings: dict[str, str]) -> AsyncIterator[Process]:
    """A `listen --tenant acme` that has just been started; killed at the end if the test did not stop it."""
    process = await command.start("listen", "--port", "0", "--tenant", "acme", **settings)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)], ids=["one signal", "two"])
async def test_a_signal_right_after_the_beginning_leaves_no_endpoint(database_url: str, db: Database, signals: tuple[int, ...]):
    """In the moment in which the endpoint is there, before a line is printed; the second signal waits until it is gone."""
    settings = command.given_database(database_url) | LOOPBACK
    await tenants.create_key(db, "acme")

    async with begun(settings) as process:
        await until(db, "EXISTS (SELECT FROM endpoints)")
        for number in signals:
            process.send_signal(number)
        done = await command.ended(process)

    assert await rows(db, "SELECT status FROM endpoints WHERE deleted_at IS NULL") == []
    assert "The subscription is ended" in done.err


async def test_signals_while_the_endpoint_is_being_made_leave_none(database_url: str, db: Database):
    """What was sent to the database is waited for, and then undone."""
    settings = command.given_database(database_url) | LOOPBACK
    await tenants.create_key(db, "acme")

    async with begun(settings) as process:
        async with await psycopg.AsyncConnection.connect(database_url) as holder:
            await holder.execute("SELECT FROM tenants WHERE id = 'acme' FOR UPDATE")
            await until(db, f"EXISTS (SELECT FROM pg_stat_activity WHERE {holder.info.backend_pid} = ANY(pg_blocking_pids(pid)))")
            for _ in range(2):
                process.send_signal(signal.SIGINT)
        await command.ended(process)

    assert await rows(db, "SELECT status FROM endpoints WHERE deleted_at IS NULL") == []


async def test_what_a_killed_one_left_behind_is_removed_by_the_next(database_url: str, db: Database):
    """An endpoint where nobody listens any more; that of another which runs stays, and so does what somebody else has made."""
    settings = command.given_database(database_url) | LOOPBACK
    others = await subscribed(db, settings, "http://127.0.0.1:9/hook")
    async with listening("--tenant", "acme", **settings) as running:
        async with listening("--tenant", "acme", **settings) as killed:
            killed.signal(signal.SIGKILL)
            await killed.ended()
        async with listening("--tenant", "acme", **settings) as third:
            left = await rows(db, "SELECT id, url FROM endpoints WHERE deleted_at IS NULL ORDER BY id")
            done = await third.stopped()
        await running.stopped()

    assert [one["url"] for one in left] == ["http://127.0.0.1:9/hook", running.url.rstrip(";"), third.url.rstrip(";")]
    assert "left behind by an earlier `listen`" in done.err
    assert [ids.show(ids.ENDPOINT, one["id"]) for one in await rows(db, "SELECT id FROM endpoints WHERE deleted_at IS NULL")] == [others]


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (("--tenant", "acme"), 1, "IPN_ALLOW_LOOPBACK_ENDPOINTS"),
        (("--secret", "whsec_x"), 2, "--secret"),
        (("--forward-to", "http://shop.example/hook"), 2, "--forward-to"),
        (("--forward-to", "ftp://localhost/"), 2, "--forward-to"),
    ],
)
async def test_what_cannot_be_is_said_before_anything_is_begun(database_url: str, arguments: tuple[str, ...], code: int, hint: str):
    """One sentence, and nothing listens."""
    done = await here("listen", "--port", "0", *arguments, **command.given_database(database_url))

    assert (done.code, done.out) == (code, "")
    assert hint in done.err


async def test_an_address_that_is_not_ours_is_not_listened_on(database_url: str):
    """One sentence, as of `serve`."""
    done = await command.run("listen", "--port", "0", "--host", "192.0.2.1", **command.given_database(database_url))

    assert (done.code, done.out) == (1, "")
    assert "no address of this machine" in done.sentence


async def test_a_tenant_that_is_not_there_has_no_events(database_url: str, db: Database):
    """A name that is misspelt would otherwise wait for ever; nor is anything subscribed to a filter that cannot be."""
    settings = command.given_database(database_url) | LOOPBACK
    await tenants.create_key(db, "acme")

    lost = await command.run("listen", "--port", "0", "--tenant", "acmee", **settings)
    odd = await here("listen", "--port", "0", "--tenant", "acme", "--events", "order.bought", **settings)

    assert [(done.code, done.out) for done in (lost, odd)] == [(1, ""), (2, "")]
    assert lost.sentence == "There is no tenant acmee."
    assert await rows(db, "SELECT FROM endpoints") == []
