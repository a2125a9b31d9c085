"""Sends notifications as a provider on a bad day does: twice, late, out of order, not at all, and forged beside them.

It never sends again what was refused or not reached: SSLCOMMERZ publishes no retry.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final

import aiohttp

from ipn_gateway import logs
from ipn_gateway.simulator.forgeries import FORGERIES, kinds_for
from ipn_gateway.simulator.sslcommerz import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping

    from ipn_gateway.simulator.world import Chance

CONTENT_TYPE: Final = "application/x-www-form-urlencoded"

log = logs.get("simulator.sender")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Probabilities from 0 to 1 per notification, and the longest delay in seconds; all 0 is a good day."""

    duplicate: float = 0.0
    reorder: float = 0.0
    delay_seconds: float = 0.0
    lose: float = 0.0
    forge: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is not a probability or not a delay."""
        for name in ("duplicate", "reorder", "lose", "forge"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability from 0 to 1")
        if self.delay_seconds < 0:
            raise ValueError("delay_seconds must not be negative")


@dataclass(frozen=True, slots=True)
class Shot:
    """One POST of a plan: `genuine`, `duplicate` or the name of a forgery."""

    kind: str
    body: bytes
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent for one notification; with `held`, only after a later one has gone first."""

    shots: tuple[Shot, ...]
    lost: bool
    held: bool


def plan(notification: Mapping[str, str], knobs: Knobs, chance: Chance) -> Plan:
    """What to send for one signed notification. Draws the same number of times whatever the knobs are."""
    lost, doubled, held, forged = (chance.random() < limit for limit in (knobs.lose, knobs.duplicate, knobs.reorder, knobs.forge))
    kind = chance.choice(kinds_for(notification))
    waits = [chance.random() * knobs.delay_seconds for _ in range(3)]
    body = encode(notification)
    shots = [] if lost else [Shot("genuine", body, waits[0])]
    if doubled and not lost:
        shots.append(Shot("duplicate", body, waits[1]))
    if forged:
        shots.append(Shot(kind, encode(FORGERIES[kind](notification)), waits[2]))
    return Plan(tuple(shots), lost=lost, held=held and not lost)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a listener answered; status 0 is no answer, with the class of the error."""

    status: int
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def acknowledged(self) -> bool:
        """Whether the status was a 2xx."""
        return 200 <= self.status < 300  # noqa: PLR2004 - the range of success


@dataclass(slots=True)
class Counts:
    """What was sent since the start. `sent` counts genuine first copies; `failed` counts POSTs without an answer."""

    sent: int = 0
    duplicates: int = 0
    lost: int = 0
    reordered: int = 0
    acknowledged: int = 0
    failed: int = 0
    forged: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    forged_statuses: Counter[str] = field(default_factory=Counter)

    def view(self) -> dict[str, object]:
        """As JSON."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}


class Sender:
    """Use inside `running`. `send` plans at once and posts in the background; `post` waits for the answer."""

    def __init__(self, knobs: Knobs, chance: Chance, *, timeout_seconds: float = 10.0, hold_seconds: float = 1.0) -> None:
        """A held notification goes after `hold_seconds` at the latest."""
        self.knobs = knobs
        self.counts = Counts()
        self._chance = chance
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._hold_seconds = hold_seconds
        self._overtaken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._holding = 0

    @contextlib.asynccontextmanager
    async def running(self, *, drain_seconds: float = 10.0) -> AsyncIterator[None]:
        """Hold the HTTP session; at the end let open sends finish for `drain_seconds`, then cancel them."""
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(  # noqa: TID251 - the provider's way out, not the gateway's
            connector=connector, timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar()
        )
        async with self._http, asyncio.TaskGroup() as self._group:
            yield
            if not await self.drained(seconds=drain_seconds):
                for task in self._tasks:
                    task.cancel()

    def send(self, url: str, notification: Mapping[str, str]) -> Plan:
        """Send one signed notification to a listener, as the knobs and chance have it."""
        planned = plan(notification, self.knobs, self._chance)
        self.counts.lost += planned.lost
        self.counts.reordered += planned.held
        if planned.held:
            self._holding += 1
            self._start(self._send_later(url, planned))
        else:
            self._start(self._send_all(url, planned, overtakes=not planned.lost))
        return planned

    async def post(self, url: str, body: bytes, *, kind: str = "genuine") -> Reply:
        """POST once, now, and count it."""
        self._count_shot(kind)
        try:
            answer = await self._post(url, body)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            answer = Reply(0, error=type(error).__name__)
        self._count_answer(kind, answer)
        log.info("ipn.sent", kind=kind, http_status=answer.status, error_class=answer.error)
        return answer

    async def drained(self, *, seconds: float | None = None) -> bool:
        """Wait until nothing is left to be sent, at most `seconds`; held notifications go last. Whether it came true."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._tasks:
                    if len(self._tasks) == self._holding:
                        self._overtaken.set()
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                    self._overtaken.clear()
        return not self._tasks

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_later(self, url: str, planned: Plan) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hold_seconds):
                await self._overtaken.wait()
        self._holding -= 1
        await self._send_all(url, planned, overtakes=False)

    async def _send_all(self, url: str, planned: Plan, *, overtakes: bool) -> None:
        await asyncio.gather(*(self._send_one(url, shot) for shot in planned.shots))
        if overtakes:
            self._overtaken.set()
            self._overtaken.clear()  # wakes those that wait now, and nobody later

    async def _send_one(self, url: str, shot: Shot) -> None:
        await asyncio.sleep(shot.wait_seconds)
        await self.post(url, shot.body, kind=shot.kind)

    async def _post(self, url: str, body: bytes) -> Reply:
        headers = {"Content-Type": CONTENT_TYPE, "User-Agent": "SSLCOMMERZ"}
        async with self._http.post(url, data=body, headers=headers, allow_redirects=False) as response:
            text = await response.read()
            names = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, body=text.decode(errors="replace"), headers=names)

    def _count_shot(self, kind: str) -> None:
        match kind:
            case "genuine":
                self.counts.sent += 1
            case "duplicate":
                self.counts.duplicates += 1
            case _:
                self.counts.forged[kind] += 1

    def _count_answer(self, kind: str, answer: Reply) -> None:
        name = str(answer.status) if answer.status else answer.error
        if kind in {"genuine", "duplicate"}:
            self.counts.statuses[name] += 1
            self.counts.acknowledged += answer.acknowledged
        else:
            self.counts.forged_statuses[name] += 1
        self.counts.failed += not answer.status
