"""Gateways of which one is always about to die: at a named point, at some moment, or frozen past its leases and woken again."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ipn_gateway.proof.nursery import Gateway, Nursery

TRANSACTIONS: Final = (
    "orders.create",
    "notifications.receive",
    "inbox.claim",
    "inbox.end",
    "inbox.postpone",
    "effects.apply_together",
    "effects.apply",
    "source_states.unknown_answer",
    "source_states.clear_answer",
    "sweeps.claim",
    "sweeps.record",
    "event_deliveries.claim",
    "event_deliveries.record",
)
"""Those that every notification passes sooner or later, or that trouble leads to."""

CALLS: Final = ("transport.ask", "transport.send")
POINTS: Final = (
    "idempotency.claim:statement_1",
    *(f"{name}:{side}_commit" for name in TRANSACTIONS for side in ("before", "after")),
    *(f"{name}:{side}" for name in CALLS for side in ("before", "after")),
)
OFTEN: Final = (
    "orders.create",
    "notifications.receive",
    "effects.apply_together",
    "transport.ask",
    "transport.send",
    "event_deliveries.record",
)
PASSES_MAX: Final = 40

SIZE: Final = 2
"""Gateways at once: one works while another one starts."""

MOMENT_PER: Final = 5
FROZEN_PER: Final = 12
REACHED_SECONDS_MAX: Final = 2.5
"""A point that is not passed within this is given up: then the process is killed where it is."""

AHEAD: Final = SIZE
"""So many more processes may have to die before the traffic waits for them: both last equally long."""

LEASE_SECONDS: Final = 2.0
AWAKE_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Doom:
    """How one process ends: at the point `at`, passed for the nth time, or without one after some seconds. A frozen one wakes up first."""

    at: str | None
    passes: int
    seconds: float
    frozen: bool


def dooms(kills: int, notifications: int, seed: int) -> list[Doom]:
    """The ends that the seed draws: each point before any is drawn again; every fifth is a moment, every twelfth begins frozen."""
    chance = Random(seed)  # noqa: S311 - repeatable
    points = _shuffled(chance)
    most = max(1, min(PASSES_MAX, notifications // max(1, 3 * kills)))
    drawn = []
    for number in range(1, kills + 1):
        at = next(points) if number % MOMENT_PER else None
        often = at is not None and at.partition(":")[0] in OFTEN
        drawn.append(
            Doom(
                at,
                passes=chance.randint(1, most if often else 2),
                seconds=REACHED_SECONDS_MAX if at else chance.uniform(0.1, REACHED_SECONDS_MAX),
                frozen=at is not None and number % FROZEN_PER == 1 and number > 1,
            )
        )
    return drawn


def _shuffled(chance: Random) -> Iterator[str]:
    while True:
        yield from chance.sample(POINTS, len(POINTS))


@dataclass(slots=True)
class Fleet:
    """The gateways. `visited` counts the points at which one died or froze by itself."""

    nursery: Nursery
    dooms: list[Doom]
    chance: Random
    begun: int = 0
    killed: int = 0
    frozen: int = 0
    visited: Counter[str] = field(default_factory=Counter)
    _share: float = 0.0
    _up: dict[int, Gateway] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def gateway(self) -> str:
        """The URL of a gateway that is up; waits for one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._up)
            return self.chance.choice(list(self._up.values())).url

    async def reached(self, share: float) -> None:
        """Say that so much of the traffic, 0 to 1, has begun, and wait until as many processes have died, but for the last few."""
        async with self._changed:
            self._share = share
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.killed >= share * len(self.dooms) - AHEAD)

    async def run(self) -> None:
        """Let all of them meet their ends, some at once; when none is left, as many live on."""
        ends = iter(self.dooms)
        async with asyncio.TaskGroup() as group:
            for place in range(SIZE):
                group.create_task(self._succession(place, ends))

    async def _succession(self, place: int, ends: Iterator[Doom]) -> None:
        for doom in itertools.chain(ends, (None,)):
            gateway = await self._start(place, doom)
            if doom is None:
                return
            await self._meet(place, gateway, doom)

    async def _start(self, place: int, doom: Doom | None) -> Gateway:
        self.begun += doom is not None
        if doom is None:
            gateway = await self.nursery.start()
        else:
            gateway = await self.nursery.start(at=doom.at, passes=doom.passes, frozen=doom.frozen)
        async with self._changed:
            if gateway.url and not gateway.gone.is_set():
                self._up[place] = gateway
            self._changed.notify_all()
        return gateway

    async def _meet(self, place: int, gateway: Gateway, doom: Doom) -> None:
        """It dies at its point, or is killed. Whoever froze is woken when others have its work, and killed a little later."""
        at_its_point = False
        if doom.frozen:
            if at_its_point := await self._comes(gateway.frozen, doom.seconds):
                await self._down(place)
                await asyncio.sleep(LEASE_SECONDS + AWAKE_SECONDS)
                gateway.signal(signal.SIGCONT)
                await asyncio.sleep(AWAKE_SECONDS)
                self.frozen += 1
        else:
            at_its_point = await self._comes(gateway.gone, doom.seconds) and doom.at is not None
        await gateway.kill()
        if at_its_point and doom.at:
            self.visited[doom.at] += 1
        self.killed += 1
        await self._down(place)

    async def _comes(self, event: asyncio.Event, seconds: float) -> bool:
        """Whether it comes about within the seconds, which are given again as long as the traffic is not as far as the deaths."""
        while not event.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await event.wait()
            except TimeoutError:
                if self._share * len(self.dooms) >= self.killed:
                    return False
        return True

    async def _down(self, place: int) -> None:
        async with self._changed:
            self._up.pop(place, None)
            self._changed.notify_all()
