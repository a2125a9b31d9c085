"""What the state machine plays on: a provider and two subscribers that outlive the gateway, which dies at a point and is started again.

The gateway dies inside this process as it would by SIGKILL: once a point is reached nothing of it passes any other point, so it neither
commits nor asks nor sends any more; then its tasks are dropped with their connections. A worker that is slow is one whose task waits at a
point until it is let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cryptography.fernet import Fernet

import ipn_gateway
from ipn_gateway import endpoints, idempotency_acts, inbox, reconciliation, refund_polls, refunds, retention
from ipn_gateway.errors import CommitUnknown, Overloaded, PoolExhausted
from ipn_gateway.faults import Faults
from ipn_gateway.slots import Slots
from tests import loopback
from tests import world as worlds
from tests.loopback import OK
from tests.refunding import Desk
from tests.world import TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from uuid import UUID

    import psycopg

    from ipn_gateway.clock import Clock
    from ipn_gateway.effects import EffectHook, EffectNotification
    from tests.loopback import Server
    from tests.world import Provider, World

T = TypeVar("T")

KEY: Final = Fernet.generate_key().decode()
TIMEOUTS: Final = {"provider_timeout_seconds": 1.0, "provider_money_timeout_seconds": 1.0, "delivery_timeout_seconds": 0.5}
LOOK_SECONDS: Final = 0.02
OURS: Final = (str(Path(ipn_gateway.__file__).parent), __file__)
TURNED_AWAY: Final = (Overloaded, CommitUnknown, PoolExhausted)


class Died(Exception):
    """The gateway was killed while it did this: nobody was told what became of it."""


class Points(Faults):
    """Crash points: which were passed, where the gateway dies, and where tasks wait."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: dict[str, int] = {}
        self.died = asyncio.Event()
        self.waiting: list[tuple[asyncio.Task[Any], asyncio.Event]] = []
        self._deadly: tuple[str, int] | None = None
        self._holding: tuple[str, int] | None = None

    def kill_at(self, point: str, passes: int = 0) -> None:
        """Die there, after so many have passed."""
        self._deadly = (point, passes)

    def hold_at(self, point: str, tasks: int = 1) -> None:
        """Keep the next tasks that come there."""
        self._holding = (point, tasks)

    def forget(self) -> None:
        """Nobody dies or waits any more."""
        self._deadly = self._holding = None

    @property
    def holds(self) -> bool:
        """Whether somebody waits at a point, or will."""
        return bool(self.waiting or self._holding)

    async def at(self, point: str) -> None:
        self.passed[point] = self.passed.get(point, 0) + 1
        if self._deadly and self._deadly[0] == point:
            self._deadly = (point, self._deadly[1] - 1) if self._deadly[1] else None
            if self._deadly is None:
                self.died.set()
        if self.died.is_set():
            await asyncio.Event().wait()
        if self._holding and self._holding[0] == point:
            left = self._holding[1] - 1
            self._holding = (point, left) if left else None
            await self._wait()
        await super().at(point)

    async def _wait(self) -> None:
        task, go = asyncio.current_task(), asyncio.Event()
        assert task is not None
        self.waiting.append((task, go))
        await go.wait()
        if self.died.is_set():
            await asyncio.Event().wait()


async def effect(connection: psycopg.AsyncConnection[Any], told: EffectNotification) -> None:
    """The merchant's own effect: a row for each time that it is called."""
    await connection.execute("INSERT INTO of_the_merchant VALUES (%s, %s, %s)", (told.order_id, told.operation_id, told.effect))


@dataclass
class Subscriber:
    """A receiver whose answers the play chooses, and what it got."""

    server: Server
    mode: str = "up"
    id: UUID | None = None

    async def answer(self, server: Server, writer: asyncio.StreamWriter) -> None:
        match self.mode:
            case "up":
                writer.write(OK)
            case "slow":
                await asyncio.wait([asyncio.create_task(server.over.wait())], timeout=2 * TIMEOUTS["delivery_timeout_seconds"])
            case "cut":
                writer.transport.abort()
            case status:
                writer.write(f"HTTP/1.1 {status} Sorry\r\nContent-Length: 0\r\n\r\n".encode())


class Life:
    """One process of the gateway."""

    def __init__(self, world: World, points: Points, stack: AsyncExitStack, context: contextvars.Context) -> None:
        self.world = world
        self.points = points
        self.context = context
        self.tasks: set[asyncio.Task[Any]] = set()
        self.desk = Desk(world)
        self._stack = stack

    async def quiet(self, slots: Slots) -> None:
        """Wait until nothing runs but what waits at a point."""
        while left := slots._tasks - {task for task, _ in self.points.waiting}:
            await asyncio.wait(left, timeout=LOOK_SECONDS)

    async def work(self, run_once: Callable[[], Awaitable[int]], slots: Slots) -> int:
        """Run a worker until nothing is due, or until its slots are taken by what waits."""
        total = 0
        while slots.free and (count := await run_once()):
            total += count
            await self.quiet(slots)
        return total

    async def drain(self) -> int:
        return await self.work(lambda: inbox.run_once(self.world.worker), self.world.worker.slots)

    async def sweep(self) -> int:
        return await self.work(lambda: reconciliation.run_once(self.world.sweeper), self.world.sweeper.slots)

    async def dispatch(self) -> int:
        return await self.work(self.world.dispatcher.run_once, self.world.dispatcher_slots)

    async def poll(self) -> int:
        return await self.work(lambda: refund_polls.run_once(self.desk.poller), self.desk.poller.slots)

    async def maintain(self) -> int:
        """What the timers do."""
        db, settings = self.world.rt.maintenance_db, self.world.rt.settings
        operations = {refunds.CREATE.name: refunds.CREATE}
        return (
            await inbox.release_parked(db, parking_hours=settings.parking_hours)
            + await idempotency_acts.doubt_abandoned(db, operations)
            + await idempotency_acts.lapse_unsent(db, operations)
            + await retention.ensure_partitions(db)
            + await endpoints.cancel_left_over(db)
        )

    async def all_at_once(self) -> int:
        """Every worker at the same time, the inbox's twice, as in two processes."""
        rt = self.world.rt
        twin = inbox.Worker(rt.inbox_db, rt.sources, rt.transport, rt.settings, Slots(16), lambda: None, self.world.worker.effect)
        second = self.work(lambda: inbox.run_once(twin), twin.slots)
        return sum(await asyncio.gather(self.drain(), second, self.dispatch(), self.sweep(), self.poll()))

    async def end(self) -> None:
        """Drop it with all that it does. Its pools go last, and with them every connection."""
        self.points.died.set()
        while left := [task for task in self.tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=LOOK_SECONDS)  # Python 3.11's `wait_for` loses a cancellation that comes with the result
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._stack.aclose()


_life: contextvars.ContextVar[set[asyncio.Task[Any]] | None] = contextvars.ContextVar("life", default=None)


def task_of_a_life(loop: asyncio.AbstractEventLoop, work: Any, **given: Any) -> asyncio.Task[Any]:
    """A task factory that tells each life which tasks are its own; what the libraries start goes with their pools."""
    task = asyncio.Task(work, loop=loop, **given)
    context = given.get("context")
    mine = context.get(_life) if context is not None else _life.get()
    code = getattr(work, "cr_code", None)
    if mine is not None and code and code.co_filename.startswith(OURS):
        mine.add(task)
    return task


@dataclass
class Stage:
    """Provider, subscribers, and the gateway that lives now."""

    database_url: str
    clock: Clock
    provider: Provider
    subscribers: list[Subscriber]
    effect: EffectHook | None = None
    passed: dict[str, int] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    life: Life = field(init=False)
    _behind: list[asyncio.Task[Any]] = field(default_factory=list)

    async def start(self) -> None:
        """A gateway on the database as it is."""
        points, stack = Points(), AsyncExitStack()
        context, mine = contextvars.copy_context(), set[asyncio.Task[Any]]()
        context.run(_life.set, mine)
        given = TIMEOUTS | {"secret_key": KEY}
        opening = worlds.beside(self.provider, self.database_url, self.clock, points, **given)
        world = await asyncio.get_running_loop().create_task(stack.enter_async_context(opening), context=context)
        for name in ("worker", "sweeper"):
            setattr(world, name, replace(getattr(world, name), effect=self.effect))
        self.life = Life(world, points, stack, context)
        self.life.tasks = mine

    async def act(self, play: Callable[[Life], Awaitable[T]]) -> T:
        """Let the gateway do something. Raises `Died` when it is killed meanwhile; then another one has been started.

        What waits for a task that is held at a point goes on behind the scene, and raises `Died` too.
        """
        life = self.life
        task = asyncio.get_running_loop().create_task(_run(play, life), context=life.context)
        death = asyncio.ensure_future(life.points.died.wait())
        try:
            while not task.done() and not death.done():
                await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED, timeout=LOOK_SECONDS if life.points.holds else None)
                if life.points.waiting and not task.done() and not _moves(life):
                    self._behind.append(task)
                    raise Died
        finally:
            death.cancel()
        if life.points.died.is_set():
            await self.restart()
            raise Died
        return task.result()

    async def restart(self) -> None:
        """Kill what lives, and start another one."""
        self._keep_passed()
        await self.life.end()
        for task in self._behind:
            await asyncio.gather(task, return_exceptions=True)
        self._behind.clear()
        await self.start()

    async def let_go(self, index: int = 0) -> None:
        """Let one task that waits at a point go on, to its end."""
        task, go = self.life.points.waiting.pop(index)
        go.set()
        await asyncio.wait([task])
        for behind in [one for one in self._behind if not self.life.points.waiting]:
            await asyncio.gather(behind, return_exceptions=True)
            self._behind.remove(behind)

    async def close(self) -> None:
        """The end of the play."""
        self._keep_passed()
        await self.life.end()
        await asyncio.gather(*self._behind, return_exceptions=True)

    def _keep_passed(self) -> None:
        for point, times in self.life.points.passed.items():
            self.passed[point] = self.passed.get(point, 0) + times


async def _run(play: Callable[[Life], Awaitable[T]], life: Life) -> T:
    return await play(life)


def _moves(life: Life) -> bool:
    """Whether anything of the gateway still runs that does not wait at a point or for the one that does."""
    held = {task for task, _ in life.points.waiting}
    slots = (life.world.worker.slots, life.world.sweeper.slots, life.world.dispatcher_slots, life.desk.poller.slots)
    return any(one._tasks - held for one in slots) or not any(task in held for task in life.desk.layer._slots._tasks)


async def subscribe(stage: Stage, index: int, *events: str) -> None:
    """One more subscription of a subscriber."""
    subscriber = stage.subscribers[index]
    new = endpoints.NewEndpoint(subscriber.server.url, events)
    rt = stage.life.world.rt
    subscriber.id = (await endpoints.create(rt.db, rt.vault, TENANT, new, secret_bytes=bytes(64), actor="test")).endpoint_id


@contextlib.asynccontextmanager
async def staged(database_url: str, clock: Clock, *, with_effect: bool, subscribers: int = 2) -> AsyncIterator[Stage]:
    """Everything at its beginning: a source, no order, and subscribers of which the second takes orders alone."""
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(worlds.providing(clock=clock.now))
        receivers = []
        for _ in range(subscribers):
            receiver = Subscriber(server=None)  # type: ignore[arg-type]  # each needs the other
            receiver.server = await stack.enter_async_context(loopback.serving(receiver.answer))
            receivers.append(receiver)
        stage = Stage(database_url, clock, provider, receivers, effect if with_effect else None)
        await stage.start()
        stack.push_async_callback(stage.close)
        await stage.life.world.source()
        for index, events in zip(range(subscribers), (("*",), ("order.*",)), strict=False):
            await subscribe(stage, index, *events)
        yield stage
