"""Receivers in Node: the documentation's snippet and the standard's own npm package agree with us, message by message and live."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import receiver, signing
from ipn_gateway.clock import Clock
from tests.architecture.source import ROOT
from tests.dispatching import Subscribers, dispatching

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ipn_gateway.db import Database
    from tests.make import Make

INSTALL_SECONDS = 120
SECONDS = 20
OLD, NEW, OTHER = (signing.new_keys(bytes([number]) * signing.RANDOM_BYTES) for number in (1, 2, 3))
BODY = '{"id":"evt_1","type":"order.paid","data":{"note":"é ৳","amount":10.0,"nested":{"b":[1,{"a":null}]}}}'

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our programs for Node, the snippet, and what the lock names."""
    folder = tmp_path_factory.mktemp("node") / "programs"
    shutil.copytree(ROOT / "tests/outside/node", folder)
    shutil.copy(ROOT / "docs/howto/receive-events.mjs", folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    npm = subprocess.run(command, cwd=folder, stdin=DEVNULL, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    assert npm.returncode == 0, npm.stderr
    return folder


async def judge(node: Path, who: str, messages: list[dict[str, Any]], wanted: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What a receiver says to each message (nothing when it is genuine), and what Node signs when it is asked to."""
    process = await asyncio.create_subprocess_exec("node", "judge.mjs", who, cwd=node, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(SECONDS):
        out, errors = await process.communicate(json.dumps({"messages": messages, "wanted": wanted or []}).encode())
    assert process.returncode == 0, errors.decode()
    found: dict[str, Any] = json.loads(out)
    return found


def message(*keys: str, known: str, body: str = BODY, sent: str | None = None) -> dict[str, Any]:
    """A message of this moment, signed by `keys`, for a receiver that knows one; `sent` are other bytes than the signed ones."""
    now = int(Clock().now().timestamp())
    headers = signing.headers("evt_1", now, body.encode(), [signing.signing_key(key) for key in keys])
    return {"headers": headers, "body": sent or body, "keys": [known], "now": None}


async def test_the_snippet_gives_every_vector_its_verdict(node: Path):
    """Reason by reason, as published for receivers in any language."""
    vectors = json.loads((ROOT / "docs/reference/signature-vectors.json").read_text())["vectors"]

    found = await judge(node, "ours", vectors)

    assert dict(zip([vector["name"] for vector in vectors], found["reasons"], strict=True)) == {
        vector["name"]: vector["reason"] for vector in vectors
    }


async def test_the_snippet_tries_as_many_signatures_as_we_do(node: Path):
    """A genuine one as the 32nd is found, as the 33rd it is not."""
    wrong, good = (message(key, known=NEW.secret) for key in (OTHER.secret, NEW.secret))
    headers = [
        good["headers"]
        | {"webhook-signature": " ".join([wrong["headers"]["webhook-signature"]] * before + [good["headers"]["webhook-signature"]])}
        for before in (receiver.SIGNATURES_MAX - 1, receiver.SIGNATURES_MAX, 499)
    ]

    found = await judge(node, "ours", [good | {"headers": given} for given in headers])

    assert found["reasons"] == [None, "signature_wrong", "signature_wrong"]


async def test_the_packages_of_the_standard_accept_our_messages(node: Path):
    """The npm package, with the old and the new secret during a rotation, beside signatures v1a; another's secret is refused."""
    during = [NEW.secret, OLD.secret, NEW.private_key, OLD.private_key]
    messages = [
        *(message(*during, known=known) for known in (NEW.secret, OLD.secret, OTHER.secret)),
        message(NEW.secret, known=NEW.secret, sent=BODY + " "),
        message(NEW.secret, NEW.private_key, known=NEW.secret, body='{"é":"\\u2028৳"}'),
    ]

    found = await judge(node, "library", messages)

    assert [reason is None for reason in found["reasons"]] == [True, True, False, False, True]


async def test_we_accept_what_node_signs(node: Path):
    """v1 by the package and v1a by Node's crypto, over the same message."""
    wanted = [
        {"id": f"evt_{number}", "timestamp": 1_796_054_400 + number, "body": BODY * number, "secret": NEW.secret} for number in range(1, 20)
    ]

    found = await judge(node, "ours", [], wanted)

    for asked, made in zip(wanted, found["made"], strict=True):
        headers = {
            "webhook-id": str(asked["id"]),
            "webhook-timestamp": str(asked["timestamp"]),
            "webhook-signature": made["signature"],
        }
        for key in (made["publicKey"], NEW.secret):
            assert receiver.verify(headers, str(asked["body"]).encode(), [key], now=float(str(asked["timestamp"]))).id == asked["id"]


@asynccontextmanager
async def subscriber(node: Path, *keys: str) -> AsyncIterator[tuple[Process, str]]:
    """The snippet behind a socket, and its URL."""
    process = await asyncio.create_subprocess_exec("node", "serve.mjs", *keys, cwd=node, stdin=DEVNULL, stdout=PIPE)
    try:
        yield process, f"http://127.0.0.1:{int(await _line(process))}/webhooks"
    finally:
        process.kill()
        await process.wait()


async def _line(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(SECONDS):
        return (await process.stdout.readline()).decode()


@pytest.mark.parametrize("kind", ["secrets", "public_keys"])
async def test_the_snippet_receives_what_the_dispatcher_sends(node: Path, db: Database, make: Make, kind: str):
    """With the secret or with the public key alone; a repeat is recognised by its id, and another's key is refused."""
    subscribers = Subscribers(db, make)
    endpoint_id = await subscribers.endpoint("http://127.0.0.1:1/", secrets=2)
    stranger = await subscribers.endpoint("http://127.0.0.1:1/")
    known = getattr(subscribers, kind)[endpoint_id][0]
    async with subscriber(node, known) as (process, url), dispatching(db) as running:
        await subscribers.run("UPDATE endpoints SET url = %(url)s", url=url)
        await make.event(id="evt_1", body=BODY.encode())
        await subscribers.deliver(endpoint_id, event_id="evt_1")
        await running.drain()
        await subscribers.run("UPDATE event_deliveries SET next_attempt_at = ipn_now()")
        await running.drain()
        await subscribers.deliver(stranger, event_id="evt_1")
        await running.drain()
        told = [json.loads(await _line(process)) for _ in range(3)]

    event = json.loads(BODY)
    assert told == [
        {"status": 204, "id": "evt_1", "event": event, "repeated": False},
        {"status": 204, "id": "evt_1", "event": event, "repeated": True},
        {"status": 401, "reason": "signature_wrong"},
    ]
    assert await subscribers.statuses(endpoint_id) == {"delivered": 1}
    assert await subscribers.statuses(stranger) == {"pending": 1}
