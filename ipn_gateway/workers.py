"""The loops of the roles: run once, then again at once while there is work, else wait for a hint or a moment; and how they stop."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from ipn_gateway import (
    endpoint_health,
    endpoints,
    event_deliveries,
    idempotency_acts,
    inbox,
    logs,
    pruning,
    reconciliation,
    refund_polls,
    refunds,
    retention,
)
from ipn_gateway.event_deliveries import Dispatcher
from ipn_gateway.inbox import Worker
from ipn_gateway.reconciliation import Sweeper
from ipn_gateway.refund_polls import Poller
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection

    from ipn_gateway.runtime import Runtime

ROLES: Final = ("web", "inbox", "dispatcher", "maintenance")
IDLE_SECONDS_MIN: Final = 0.02
IDLE_SECONDS_MAX: Final = 1.0
MAINTENANCE_SECONDS: Final = 60.0
PRUNING_SECONDS: Final = 1.0
PARTITIONS_SECONDS: Final = 86400.0
RETENTION_SECONDS: Final = 600.0
FAILED_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Loop:
    """One worker: what it does once, the hint that wakes it, and its longest idle wait in seconds."""

    name: str
    run_once: Callable[[], Awaitable[int]]
    wake: asyncio.Event
    idle_seconds_max: float = IDLE_SECONDS_MAX
    idle_seconds_min: float = IDLE_SECONDS_MIN


async def run_forever(loop: Loop, stop: asyncio.Event) -> None:
    """Run until stopping sets both events. Idle waits double up to the longest; what fails is logged and tried again."""
    idle = loop.idle_seconds_min
    while not stop.is_set():
        try:
            busy = await loop.run_once()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong once, a worker goes on
            logs.get("workers").error("worker.failed", worker=loop.name, error_class=type(error).__name__, exc_info=error)
            busy, idle = 0, max(idle, FAILED_SECONDS)
        if busy:
            idle = loop.idle_seconds_min
            continue
        with suppress(TimeoutError):
            async with asyncio.timeout(idle):
                await loop.wake.wait()
                idle = loop.idle_seconds_min / 2
        loop.wake.clear()
        idle = min(idle * 2, loop.idle_seconds_max)


@asynccontextmanager
async def running(rt: Runtime, roles: Collection[str]) -> AsyncIterator[None]:
    """Run the workers of the roles. On leaving: no new claims, what is being worked on ends within its lease, the rest is given back."""
    stop = asyncio.Event()
    worker = Worker(
        rt.inbox_db,
        rt.sources,
        rt.transport,
        rt.settings,
        Slots(inbox.SLOTS, freed=rt.wakes.inbox.set),
        rt.wakes.dispatcher.set,
        rt.effect,
    )
    sweep_slots = Slots(reconciliation.SLOTS, freed=rt.wakes.sweep.set)
    poll_wake = asyncio.Event()
    poll_slots = Slots(refund_polls.SLOTS, freed=poll_wake.set)
    dispatcher = Dispatcher(
        rt.dispatcher_db,
        rt.transport,
        rt.vault,
        Slots(event_deliveries.SLOTS, freed=rt.wakes.dispatcher.set),
        rt.settings,
        chance=random.random,
        wake=rt.wakes.dispatcher.set,
    )
    loops = [
        *_inbox(rt, roles, worker),
        *_dispatcher(rt, roles, dispatcher),
        *_maintenance(rt, roles, sweep_slots),
        *_refund_polls(rt, roles, poll_slots, poll_wake),
    ]
    tasks = Slots(len(loops) or 1)
    for loop in loops:
        tasks.start(run_forever(loop, stop), name=loop.name)
    try:
        yield
    finally:
        stop.set()
        for loop in loops:
            loop.wake.set()
        await tasks.drained(seconds=rt.settings.inbox_lease_seconds)
        await dispatcher.stop(seconds=rt.settings.delivery_timeout_seconds)
        for slots in (worker.slots, sweep_slots, poll_slots):
            await slots.drained(seconds=rt.settings.provider_timeout_seconds)
            await slots.cancel()
        await worker.together.drained(seconds=rt.settings.provider_timeout_seconds)
        await tasks.cancel()


def _inbox(rt: Runtime, roles: Collection[str], worker: Worker) -> list[Loop]:
    async def claim() -> int:
        """Again at once only when every free slot was taken; else what is left is at its caps, and what changes that wakes the loop."""
        free = worker.slots.free
        claimed = await inbox.run_once(worker)
        return claimed if claimed >= free else 0

    return [Loop("inbox", claim, rt.wakes.inbox)] if "inbox" in roles else []


def _dispatcher(rt: Runtime, roles: Collection[str], dispatcher: Dispatcher) -> list[Loop]:
    return [Loop("dispatcher", dispatcher.run_once, rt.wakes.dispatcher)] if "dispatcher" in roles else []


def _refund_polls(rt: Runtime, roles: Collection[str], slots: Slots, wake: asyncio.Event) -> list[Loop]:
    if "maintenance" not in roles:
        return []
    poller = Poller(rt.maintenance_db, rt.sources, rt.transport, rt.settings, slots, rt.wakes.dispatcher.set)
    return [Loop("refund_polls", lambda: refund_polls.run_once(poller), wake)]


def _maintenance(rt: Runtime, roles: Collection[str], slots: Slots) -> list[Loop]:
    if "maintenance" not in roles:
        return []
    sweeper = Sweeper(rt.maintenance_db, rt.sources, rt.transport, rt.settings, slots, rt.wakes.dispatcher.set, rt.effect)

    parking_seconds = min(MAINTENANCE_SECONDS, rt.settings.parking_hours * 3600 / 4)

    async def parked() -> int:
        if released := await inbox.release_parked(rt.maintenance_db, parking_hours=rt.settings.parking_hours):
            rt.wakes.inbox.set()
        return 0 * released

    operations, lease = {refunds.CREATE.name: refunds.CREATE}, rt.settings.idempotency_lease_seconds

    async def abandoned() -> int:
        doubted = await idempotency_acts.doubt_abandoned(rt.maintenance_db, operations)
        return 0 * (doubted + await idempotency_acts.lapse_unsent(rt.maintenance_db, operations))

    async def left_over() -> int:
        return 0 * await endpoints.cancel_left_over(rt.maintenance_db)

    async def failing() -> int:
        return 0 * await endpoint_health.run_once(rt.maintenance_db)

    async def partitions() -> int:
        return 0 * await retention.ensure_partitions(rt.maintenance_db)

    pruner = pruning.Pruner(rt.maintenance_db, retention.Windows.of(rt.settings))

    return [
        Loop("sweep", lambda: reconciliation.run_once(sweeper), rt.wakes.sweep),
        Loop("parked", parked, asyncio.Event(), parking_seconds, parking_seconds),
        Loop("abandoned_keys", abandoned, asyncio.Event(), lease / 2, lease / 2),
        Loop("expired_keys", partial(idempotency_acts.prune, rt.maintenance_db), asyncio.Event(), MAINTENANCE_SECONDS, PRUNING_SECONDS),
        Loop("left_over", left_over, asyncio.Event(), MAINTENANCE_SECONDS, MAINTENANCE_SECONDS),
        Loop("endpoint_health", failing, asyncio.Event(), MAINTENANCE_SECONDS, MAINTENANCE_SECONDS),
        Loop("partitions", partitions, asyncio.Event(), PARTITIONS_SECONDS, PARTITIONS_SECONDS),
        Loop("retention", pruner.run_once, asyncio.Event(), RETENTION_SECONDS, RETENTION_SECONDS),
    ]
