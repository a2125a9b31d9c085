"""The demo: a gateway in a process of its own, a simulated provider and a subscriber; what they did is compared at the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from httpx import HTTPError
from rich.console import Console

from ipn_gateway import logs, playbill, postgres, premises, stories, tally
from ipn_gateway.errors import GatewayError
from ipn_gateway.playbill import Playbill
from ipn_gateway.simulator.app import Simulator, SimulatorConfig
from ipn_gateway.simulator.app import create_app as simulator_app
from ipn_gateway.simulator.serving import serving
from ipn_gateway.simulator.subscriber import Mode, Subscriber, create_subscriber
from ipn_gateway.stories import SOURCE, STORE, Scene, Stage
from ipn_gateway.tally import Booked, Heard, Sent, Summary

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from httpx import AsyncClient  # noqa: TID251 - the shop's and the customer's, not the gateway's

TENANT: Final = "demo"

ACTING_AT_ONCE: Final = 6
REFUSED_BY_SUBSCRIBER: Final = 3
LOST_BY_SUBSCRIBER: Final = 2
START_SECONDS_MAX: Final = 150.0
SETTLE_SECONDS_MAX: Final = 25.0
SETTLE_SECONDS_PER_PAYMENT: Final = 0.1
STOP_SECONDS_MAX: Final = 15.0
NEXT: Final = """
Everything stays up until ^C. To try next:

  An order and what was paid for it:
    curl -H 'Authorization: Bearer {house.key}' {house.gateway_url}/v1/orders/{order_id}
  What was posted about it, forgeries too, and what became of each:
    curl -H 'Authorization: Bearer {house.key}' '{house.gateway_url}/v1/notification-deliveries?order_id={order_id}'
  The API, and the contract that subscribers may rely on:
    {house.gateway_url}/docs   {house.gateway_url}/v1/contract
  The provider's side; paying a second time at one of its pages gets you order.overpaid:
    {house.simulator_url}/
  What the subscriber verified:
    {house.subscriber_url}/received
"""

AGREED_TIMES: Final = 2
AGAIN_SECONDS: Final = 0.5
LOG: Final = "serve.log"
PAGE: Final = 200


class DemoStopped(GatewayError):
    """Stopped before the end; what was started is ended and removed."""


class DemoFailed(GatewayError):
    """The demo could not be set up."""


@dataclass(frozen=True, slots=True)
class House:
    """Everything that was started: `stage` to act on, and the three whose accounts are compared."""

    gateway_url: str
    simulator_url: str
    subscriber_url: str
    key: str
    log: Path
    stage: Stage
    simulator: Simulator
    subscriber: Subscriber


def run(*, payments: int, seed: int, as_json: bool, keep: bool) -> bool:
    """Show it, print the summary, and stay up on a terminal or with `keep`; whether all accounts agree.

    Raises `DemoFailed` when something does not start and `DemoStopped` when a signal comes before the end.
    """
    logs.configure(level="ERROR")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # a customer who leaves because the demo is stopped is no news
    with asyncio.Runner() as runner:
        try:
            return runner.run(_run(payments, seed, as_json=as_json, stay=keep or sys.stdin.isatty()))
        except asyncio.CancelledError:
            raise DemoStopped from None


async def _run(payments: int, seed: int, *, as_json: bool, stay: bool) -> bool:
    scenes = stories.plan(payments, seed)
    console = Console(stderr=as_json or not sys.stdout.isatty(), quiet=as_json and not stay)
    with premises.signals_cancel():
        async with _house(console, seed) as house:
            bill = Playbill(scenes, house.simulator.sender, house.subscriber, console, quiet=as_json)
            summary = await _show(house, scenes, bill)
            wrong = tally.differences(summary, payments=payments)
            if as_json:
                _print_json(summary, wrong, seed)
            else:
                playbill.print_summary(Console(), summary, wrong)
            if stay:
                await _stay(house, console, scenes[0].order_id)
    return not wrong


def _print_json(summary: Summary, wrong: Sequence[str], seed: int) -> None:
    sys.stdout.write(json.dumps({"ok": not wrong, "seed": seed, **asdict(summary), "differences": wrong}, ensure_ascii=False) + "\n")
    sys.stdout.flush()


async def _stay(house: House, console: Console, order_id: str) -> None:
    """Say what to try next, and stay until a signal, which is the orderly end."""
    console.print(NEXT.format(house=house, order_id=order_id), highlight=False, markup=False, soft_wrap=True)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if work := asyncio.current_task():
            work.uncancel()


# --- setting up


@contextlib.asynccontextmanager
async def _house(console: Console, seed: int) -> AsyncIterator[House]:
    """Start everything, and end and remove it afterwards."""
    provider, listening = (
        simulator_app(SimulatorConfig(store_id=STORE["store_id"], store_passwd=STORE["store_passwd"], seed=seed)),
        create_subscriber(),
    )
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(premises.directory("demo"))
        console.print("Starting a gateway with a PostgreSQL of its own, a provider and a subscriber …", style="dim")
        environment = premises.environment(directory)
        gateway_url = await stack.enter_async_context(_gateway(directory, environment))
        simulator_url = await stack.enter_async_context(serving(provider))
        subscriber_url = await stack.enter_async_context(serving(listening))
        key = await _make_key(environment)
        shop = await stack.enter_async_context(premises.client(gateway_url, {"Authorization": f"Bearer {key}"}))
        customer = await stack.enter_async_context(premises.client(simulator_url))
        listener_url, secret = await _introduce(shop, simulator_url, f"{subscriber_url}/webhooks")
        simulator, subscriber = provider.state.simulator, listening.state.subscriber
        subscriber.secrets = [secret]
        stage = Stage(shop, customer, simulator, listener_url)
        yield House(gateway_url, simulator_url, subscriber_url, key, directory / LOG, stage, simulator, subscriber)
        simulator.api.faults.clear()


@contextlib.asynccontextmanager
async def _gateway(directory: Path, environment: Mapping[str, str]) -> AsyncIterator[str]:
    """`serve` in a process of its own, on any free port; its URL. Its log is a file, quoted when it does not start."""
    log = directory / LOG
    with log.open("wb") as errors:
        process = await _command("serve", "--port", "0", environment=environment, errors=errors)
    try:
        yield await _url(process, log)
    finally:
        await _end(process, directory)


async def _command(*arguments: str, environment: Mapping[str, str], errors: Any) -> Process:
    # A session of its own: ^C is meant for us, and we end it in order.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ipn_gateway", *arguments),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=errors,
        env=environment,
        start_new_session=True,
    )


async def _url(process: Process, log: Path) -> str:
    assert process.stdout is not None  # noqa: S101 - it was started with a pipe
    try:
        async with asyncio.timeout(START_SECONDS_MAX):
            line = (await process.stdout.readline()).decode().strip()
    except TimeoutError:
        line = ""
    if " listens on " not in line:
        raise DemoFailed(f"The gateway did not start; its log ends: {_tail(log)}")
    return line.rpartition(" ")[2]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(nothing)"


async def _end(process: Process, directory: Path) -> None:
    """In order, or else by force; then the database server, which would outlive it, is stopped by us as its last user."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS_MAX):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.returncode != 0 and (directory / postgres.NAME).exists():
        async with postgres.running(directory):
            pass


async def _make_key(environment: Mapping[str, str]) -> str:
    process = await _command("keys", "create", "--tenant", TENANT, "--json", environment=environment, errors=PIPE)
    try:
        written, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    if process.returncode != 0:
        raise DemoFailed(f"No key could be made: {errors.decode().strip()}")
    return str(json.loads(written.splitlines()[-1])["key"])


async def _introduce(shop: AsyncClient, simulator_url: str, webhook_url: str) -> tuple[str, str]:
    """Tell the gateway about provider and subscriber: the listener URL for the one, the signing secret for the other."""
    source = {"name": SOURCE, "provider": "sslcommerz", "config": {**STORE, "mode": "sandbox", "base_url": simulator_url}}
    made = await shop.post("/v1/sources", json=source, headers={"Idempotency-Key": "demo-source"})
    subscribed = await shop.post("/v1/endpoints", json={"url": webhook_url}, headers={"Idempotency-Key": "demo-endpoint"})
    for answer in (made, subscribed):
        answer.raise_for_status()
    return made.json()["listener_url"], subscribed.json()["secret"]


# --- the show


async def _show(house: House, scenes: Sequence[Scene], bill: Playbill) -> Summary:
    """Act all scenes, then wait until the accounts agree, for a time at most; what they say in the end."""
    payments = sum(scene.story in stories.PAID for scene in scenes)
    house.subscriber.behave(Mode(mode="status:503", times=REFUSED_BY_SUBSCRIBER))
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(bill.watch())
            await _act(house, scenes)
            summary = await _agreed(house, payments)
            watching.cancel()
    except ExceptionGroup as failed:
        if failed.subgroup(HTTPError):
            raise DemoFailed(f"The gateway does not answer as it should; its log ends: {_tail(house.log)}") from failed
        raise
    return summary


async def _act(house: House, scenes: Sequence[Scene]) -> None:
    """All scenes, some at once. In the middle the subscriber takes two events in and its answers get lost."""
    turns, acted = asyncio.Semaphore(ACTING_AT_ONCE), itertools.count(1)

    async def act(scene: Scene) -> None:
        async with turns:
            await stories.act(house.stage, scene)
        if next(acted) == len(scenes) // 2:
            house.subscriber.behave(Mode(mode="lost", times=LOST_BY_SUBSCRIBER))

    async with asyncio.TaskGroup() as group:
        for scene in scenes:
            group.create_task(act(scene))


async def _agreed(house: House, payments: int) -> Summary:
    """The accounts when they agree twice in a row with nothing left to do, or when the time is over."""
    agreed, clock = 0, asyncio.get_running_loop().time
    deadline = clock() + SETTLE_SECONDS_MAX + SETTLE_SECONDS_PER_PAYMENT * payments
    while True:
        booked = await _booked(house.stage.shop)
        summary = tally.tally(_sent(house), booked, _heard(house.subscriber))
        agreed = agreed + 1 if tally.settled(booked) and not tally.differences(summary, payments=payments) else 0
        if agreed == AGREED_TIMES or clock() > deadline:
            return summary
        await asyncio.sleep(AGAIN_SECONDS)


def _sent(house: House) -> Sent:
    counts, paid = house.simulator.sender.counts, [payment.attempt for payment in house.simulator.bank.payments if payment.attempt.paid]
    money = {one.val_id: (one.tran_id, one.currency_amount) for one in paid}
    risky = {one.val_id for one in paid if one.risky}
    return Sent(
        paid={val_id: what for val_id, what in money.items() if val_id not in risky},
        risky={val_id: what for val_id, what in money.items() if val_id in risky},
        notifications=counts.sent + counts.duplicates + counts.forged.total(),
        duplicates=house.stage.duplicates,
        forged=house.stage.forged,
    )


async def _booked(shop: AsyncClient) -> Booked:
    orders, notifications, events, deliveries = [
        await _all(shop, f"/v1/{name}") for name in ("orders", "notification-deliveries", "events", "event-deliveries")
    ]
    return Booked(orders=orders, notification_deliveries=notifications, events=events, event_deliveries=deliveries)


async def _all(shop: AsyncClient, path: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": PAGE}
    while True:
        answer = await shop.get(path, params=query)
        answer.raise_for_status()
        page = answer.json()
        items += page["items"]
        if page["next_cursor"] is None or not page["items"]:
            return items
        query["after" if path == "/v1/events" else "cursor"] = page["next_cursor"]


def _heard(subscriber: Subscriber) -> Heard:
    received = subscriber.received
    return Heard(events=received.events, repeats=received.duplicates, refused=received.bad_signature, altered=received.altered)
