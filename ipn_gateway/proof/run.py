"""The proof: gateways in processes of their own that are killed all the time, a provider, subscribers, and a count at the end.

It tries to refute the promise that what was answered 2xx is applied exactly once, and that every event that follows arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

import uvloop
from rich.console import Console

from ipn_gateway import endpoints, logs, migrations, postgres, premises, settings, sources, tenants, vault
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from ipn_gateway.proof import findings, fleet, nursery, ordeals, rounds
from ipn_gateway.proof.findings import Findings, Heard
from ipn_gateway.proof.fleet import Fleet
from ipn_gateway.proof.ordeals import Ground, ProofFailed
from ipn_gateway.simulator.app import SimulatorConfig
from ipn_gateway.simulator.app import create_app as simulator_app
from ipn_gateway.simulator.serving import serving
from ipn_gateway.simulator.subscriber import Mode, Subscriber, create_subscriber
from ipn_gateway.stories import SOURCE, STORE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from ipn_gateway.proof.ordeals import Ordeal

TENANT: Final = "proof"
SUBSCRIBERS: Final = 2
IN_FLIGHT: Final = 50
ACTING_AT_ONCE: Final = 24
DRAIN_SECONDS_MAX: Final = 90.0
DRAIN_SECONDS_PER_NOTIFICATION: Final = 0.03
LOOK_SECONDS: Final = 0.3
SAY_SECONDS: Final = 2.0
LOG: Final = "gateways.log"


class ProofStopped(ProofFailed):
    """Stopped before the end; what was started is ended and removed."""


@dataclass(frozen=True, slots=True)
class House:
    """Everything that was started."""

    db: Database
    nursery: nursery.Nursery
    ground: Ground
    fleet: Fleet
    subscribers: Sequence[Subscriber]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be proved."""

    notifications: int
    kills: int
    sends: int
    seed: int


def run(asked: Asked, *, as_json: bool, keep: bool) -> bool:
    """Carry it out and print the report; whether nothing was refuted.

    Raises `ProofFailed` when it could not be carried out and `ProofStopped` when a signal comes before the end.
    """
    logs.configure(level="ERROR")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # whoever hangs up was killed, which is no news
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_run(asked, as_json=as_json, keep=keep))
        except asyncio.CancelledError:
            raise ProofStopped from None


async def _run(asked: Asked, *, as_json: bool, keep: bool) -> bool:
    began, console = asyncio.get_running_loop().time(), Console(stderr=True)
    plan = ordeals.plan(asked.notifications, asked.seed)
    with premises.signals_cancel(), premises.directory("proof", keep=keep) as directory:
        _say(console, f"Starting {fleet.SIZE} gateways with a PostgreSQL of their own, a provider and {SUBSCRIBERS} subscribers …")
        async with _house(directory, asked) as house:
            sends = await _sends(house, asked, console)
            if plan:
                await _carry_out(house, plan, asked, console)
            undone = await _drained(house, plan, asked, console)
            found = await _found(house, plan)
        wrong = [*findings.differences(found, notifications=asked.notifications, undone=undone), *rounds.differences(sends)]
        report = _report(asked, house, found, sends, wrong) | {"seconds": round(asyncio.get_running_loop().time() - began, 1)}
        _print(report, wrong, as_json=as_json)
        if keep:
            _say(console, f"Rows and log are kept in {directory}.")
    return not wrong


def _say(console: Console, line: str) -> None:
    console.print(line, style="dim", highlight=False, soft_wrap=True)


# --- setting up


@contextlib.asynccontextmanager
async def _house(directory: Path, asked: Asked) -> AsyncIterator[House]:
    """Start everything but the gateways, and end it afterwards. The server is ours too, so that it outlives every gateway."""
    provider = simulator_app(SimulatorConfig(store_id=STORE["store_id"], store_passwd=STORE["store_passwd"], seed=asked.seed))
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(postgres.running(directory))
        db = await stack.enter_async_context(Database(server.url, clock=Clock(), faults=Faults(), name="proof", connections_max=4))
        await migrations.migrate(server.url, db)
        box = vault.load_or_make(directory, settings.load(data_dir=directory, database_url=None, secret_key=()))
        key = (await tenants.create_key(db, TENANT)).key
        given = {**STORE, "mode": "sandbox", "base_url": await stack.enter_async_context(serving(provider))}
        await sources.create(db, box, TENANT, SOURCE, provider="sslcommerz", given=given, actor="proof")
        subscribers = [await _subscribed(stack, db, box) for _ in range(SUBSCRIBERS)]
        errors = stack.enter_context((directory / LOG).open("wb"))
        forks = await stack.enter_async_context(nursery.opened(premises.environment(directory), errors=errors))
        chance = Random(asked.seed)  # noqa: S311 - repeatable
        ships = Fleet(forks, fleet.dooms(asked.kills, asked.notifications, asked.seed), chance)
        shop = await stack.enter_async_context(premises.client("", {"Authorization": f"Bearer {key}"}))
        ground = Ground(provider.state.simulator, subscribers, shop, ships.gateway, chance)
        yield House(db, forks, ground, ships, subscribers)
        ground.simulator.api.faults.clear()


async def _subscribed(stack: contextlib.AsyncExitStack, db: Database, box: vault.Vault) -> Subscriber:
    """A subscriber to everything, and its endpoint."""
    app = create_subscriber()
    url = await stack.enter_async_context(serving(app))
    new = endpoints.NewEndpoint(url=f"{url}/webhooks", events=["*"], max_in_flight=IN_FLIGHT)
    made = await endpoints.create(db, box, TENANT, new, secret_bytes=os.urandom(64), actor="proof")
    app.state.subscriber.secrets = [made.secret]
    subscriber: Subscriber = app.state.subscriber
    return subscriber


# --- carrying it out


async def _sends(house: House, asked: Asked, console: Console) -> rounds.Counts:
    """The rounds of dispatchers alone, if any are asked for."""
    if not asked.sends:
        return rounds.Counts()
    _say(console, f"{asked.sends} rounds in which a dispatcher dies between send and record …")
    nursery, shop = house.nursery, house.ground.shop
    return await rounds.carry_out(nursery, house.db, shop, rounds=asked.sends, seed=asked.seed, say=lambda line: _say(console, line))


async def _carry_out(house: House, plan: Sequence[Ordeal], asked: Asked, console: Console) -> None:
    """All ordeals and all kills, beside each other."""
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(house, asked, console))
            async with asyncio.TaskGroup() as work:
                work.create_task(house.fleet.run())
                work.create_task(_act(house, plan))
            watching.cancel()
    except ExceptionGroup as failed:
        if refused := failed.subgroup(ProofFailed):
            raise _first(refused) from failed
        raise


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


async def _act(house: House, plan: Sequence[Ordeal]) -> None:
    turns = asyncio.Semaphore(ACTING_AT_ONCE)

    async def act(ordeal: Ordeal) -> None:
        try:
            await house.ground.act(ordeal)
        finally:
            turns.release()

    async with asyncio.TaskGroup() as group:
        for number, ordeal in enumerate(plan):
            await house.fleet.reached(number / len(plan))
            await turns.acquire()
            group.create_task(act(ordeal))
        await house.fleet.reached(1)


async def _watch(house: House, asked: Asked, console: Console) -> None:
    while True:
        await asyncio.sleep(SAY_SECONDS)
        heard = ", ".join(str(subscriber.received.unique) for subscriber in house.subscribers)
        _say(
            console,
            f"{len(house.ground.accepted)} of {asked.notifications} notifications accepted · {house.fleet.killed} of {asked.kills} killed"
            f" · {len(house.fleet.visited)} of {len(fleet.POINTS)} points visited · events received: {heard}",
        )


async def _drained(house: House, plan: Sequence[Ordeal], asked: Asked, console: Console) -> Mapping[str, int]:
    """Wait until nothing is left to be done and nothing is missing, for a time at most; what was left."""
    house.ground.simulator.api.faults.clear()
    for subscriber in house.subscribers:
        subscriber.behave(Mode())
    _say(console, "Everything is sent; the rest is left to the gateways …")
    clock = asyncio.get_running_loop().time
    deadline = clock() + DRAIN_SECONDS_MAX + DRAIN_SECONDS_PER_NOTIFICATION * asked.notifications
    while True:
        undone = await findings.left(house.db)
        if clock() > deadline or (not any(undone.values()) and not (await _found(house, plan)).lost):
            return undone
        await asyncio.sleep(LOOK_SECONDS)


async def _found(house: House, plan: Sequence[Ordeal]) -> Findings:
    heard = [
        Heard(event_ids=got.bodies, repeats=got.duplicates, altered=got.altered, refused=got.bad_signature)
        for got in (subscriber.received for subscriber in house.subscribers)
    ]
    attempts = [payment.attempt for payment in house.ground.simulator.bank.payments]
    untold = {ordeal.order_id for ordeal in plan if not ordeal.told}
    return findings.compare(attempts, house.ground.accepted, untold, await findings.read(house.db), heard)


# --- the report


def _report(asked: Asked, house: House, found: Findings, sends: rounds.Counts, wrong: Sequence[str]) -> dict[str, Any]:
    """The members that are promised first, then the rest."""
    counts, ships = house.ground.simulator.sender.counts, house.fleet
    promised = {name: getattr(found, name) for name in ("accepted", "applied", "lost", "doubled", "events", "events_lost")}
    details = {name: value for name, value in asdict(found).items() if name not in promised}
    return promised | {
        "kills": ships.killed,
        "ok": not wrong,
        "seed": asked.seed,
        "notifications": asked.notifications,
        "requests_sent": counts.sent + counts.forged.total(),
        "answers_lost": house.ground.answers_lost,
        "forgeries": house.ground.forgeries,
        "payments_untold": sum(payment.attempt.tran_id.startswith("UNTOLD") for payment in house.ground.simulator.bank.payments),
        "frozen_and_woken": ships.frozen,
        "points_visited": dict(sorted(ships.visited.items())),
        "points_not_visited": sorted(set(fleet.POINTS) - set(ships.visited)),
        "sends": asdict(sends),
        **details,
        "differences": list(wrong),
    }


REPORT: Final[Mapping[str, str]] = {
    "accepted": "genuine notifications answered 2xx",
    "applied": "of them applied exactly as the bank says",
    "lost": "lost",
    "doubled": "doubled",
    "events": "events in the outbox",
    "events_lost": "events that a subscriber did not get",
    "kills": "processes killed",
    "frozen_and_woken": "of them frozen past their leases, and woken, before",
    "requests_sent": "requests to the listener",
    "answers_lost": "answers that the sender did not hear",
    "forgeries": "forgeries",
    "payments_untold": "payments without a notification, found by asking",
    "events_repeated": "events sent again, same id and bytes",
    "seconds": "seconds",
}


def _print(report: Mapping[str, Any], wrong: Sequence[str], *, as_json: bool) -> None:
    for name, words in REPORT.items():
        print(f"{report[name]:>10}  {words}", file=sys.stderr if as_json else sys.stdout)
    visited = len(report["points_visited"])
    said = [f"{visited:>10}  of {len(fleet.POINTS)} named points visited, seed {report['seed']}", ""]
    said += list(wrong) or ["Nothing is lost and nothing counts twice."]
    print("\n".join(said), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(report, ensure_ascii=False), flush=True)  # noqa: T201
