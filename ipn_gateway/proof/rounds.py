"""Dispatchers that die between send and record, round after round, and some that are frozen there until others have their work.

Each round has events of its own; what the dead have left goes on with the next ones, after its lease.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from httpx import TransportError

from ipn_gateway.proof.ordeals import AGAIN_SECONDS, TRIES_MAX, ProofFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from httpx import AsyncClient  # noqa: TID251 - the shop's, not the gateway's

    from ipn_gateway.db import Database
    from ipn_gateway.proof.nursery import Gateway, Nursery

BETWEEN: Final = ("transport.send:after", "event_deliveries.record:statement_1", "event_deliveries.record:before_commit")
BESIDE: Final = ("transport.send:before", "event_deliveries.record:after_commit", "event_deliveries.claim:after_commit")
BESIDE_SHARE: Final = 0.1

EVENTS: Final = 5
PASSES_MAX: Final = 4
LANES: Final = 3
"""Rounds at once."""

FROZEN_PER: Final = 25
REACHED_SECONDS_MAX: Final = 4.0
SETTLED_SECONDS_MAX: Final = 60.0
LOOK_SECONDS: Final = 0.1

ROWS: Final = """
    SELECT d.id, d.status, d.attempt_count, d.fence, d.next_attempt_at, d.delivered_at, d.lease_expires_at,
           count(a.*) AS attempts, max(a.number) AS last_number
      FROM event_deliveries d LEFT JOIN delivery_attempts a ON a.event_delivery_id = d.id
     GROUP BY d.id, d.tenant_id, d.status, d.attempt_count, d.fence, d.next_attempt_at, d.delivered_at, d.lease_expires_at
     ORDER BY d.id
"""
PENDING: Final = "SELECT count(*) FROM event_deliveries WHERE status = 'pending'"


@dataclass(slots=True)
class Counts:
    """What the rounds came to: `rounds` ended between send and record, the others `elsewhere`."""

    rounds: int = 0
    elsewhere: int = 0
    events: int = 0
    zombies: int = 0
    """Frozen between send and record until others had delivered, then woken."""
    zombies_overwrote: int = 0
    numbers_wrong: int = 0
    """Event deliveries whose attempts are not numbered 1 to n, or do not end with the delivered one."""


@dataclass(slots=True)
class Rounds:
    """One run of them. `web` is the gateway that takes the events in."""

    nursery: Nursery
    db: Database
    shop: AsyncClient
    web: Gateway
    chance: Random
    counts: Counts

    async def carry_out(self, rounds: int, say: Callable[[str], None]) -> None:
        """So many rounds, some at once, and every now and then one with a zombie, alone. Then what is left is delivered."""
        for first in range(0, rounds, FROZEN_PER):
            turns = iter(range(first, min(first + FROZEN_PER, rounds)))
            async with asyncio.TaskGroup() as group:
                for _ in range(LANES):
                    group.create_task(self._lane(turns))
            await self._zombie()
            say(f"{self.counts.rounds} of {rounds} rounds · {self.counts.events} events · {self.counts.zombies} zombies")
        await self._delivered()
        self.counts.numbers_wrong = sum(
            row["attempts"] != row["attempt_count"] or row["last_number"] != row["attempt_count"] for row in await self._rows()
        )

    async def _lane(self, numbers: Iterator[int]) -> None:
        for _ in numbers:
            while not await self._round():
                self.counts.elsewhere += 1
            self.counts.rounds += 1

    async def _round(self) -> bool:
        """New events, and a dispatcher that dies; whether that was between send and record."""
        beside = self.chance.random() < BESIDE_SHARE
        at = self.chance.choice(BESIDE if beside else BETWEEN)
        await self._publish()
        dispatcher = await self.nursery.start(roles=["dispatcher"], at=at, passes=1 if beside else self.chance.randint(1, PASSES_MAX))
        try:
            await dispatcher.ended(seconds=REACHED_SECONDS_MAX)
        except TimeoutError:  # the others took what it was to pass with
            await dispatcher.kill()
            return False
        return not beside

    async def _zombie(self) -> None:
        """One is frozen between send and record; others get its work and finish it; then it wakes up, and must not write."""
        await self._delivered()
        await self._publish()
        zombie = await self.nursery.start(roles=["dispatcher"], at="transport.send:after", frozen=True)
        async with asyncio.timeout(SETTLED_SECONDS_MAX):
            await zombie.frozen.wait()
        await self._delivered()
        before = await self._rows()
        zombie.signal(signal.SIGCONT)
        zombie.signal(signal.SIGTERM)
        await zombie.ended(seconds=SETTLED_SECONDS_MAX)  # in order: what it was at is over
        self.counts.zombies += 1
        self.counts.zombies_overwrote += await self._rows() != before

    async def _delivered(self) -> None:
        """A dispatcher that lives delivers whatever is due, or comes to be due when leases end."""
        dispatcher = await self.nursery.start(roles=["dispatcher"])
        try:
            async with asyncio.timeout(SETTLED_SECONDS_MAX), self.db.autocommit("rounds.pending") as tx:
                while await tx.value(PENDING):  # noqa: ASYNC110 - other processes write; only the database tells
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise ProofFailed(f"Events were still not delivered after {SETTLED_SECONDS_MAX:.0f} s.") from None
        finally:
            await dispatcher.kill()

    async def _rows(self) -> Sequence[dict[str, Any]]:
        async with self.db.autocommit("rounds.read") as tx:
            return await tx.all(dict, ROWS)

    async def _publish(self) -> None:
        for _ in range(EVENTS):
            self.counts.events += 1
            number = self.counts.events
            await self._event(f"event-{number}", {"type": "proof.round", "data": {"number": number}})

    async def _event(self, key: str, body: dict[str, Any]) -> None:
        for _ in range(TRIES_MAX):
            try:
                answer = await self.shop.post(f"{self.web.url}/v1/events", json=body, headers={"Idempotency-Key": key})
            except TransportError:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if answer.is_success:
                return
            raise ProofFailed(f"An event was answered {answer.status_code}: {answer.text[:200]}")
        raise ProofFailed("The gateway does not take events.")


async def carry_out(nursery: Nursery, db: Database, shop: AsyncClient, *, rounds: int, seed: int, say: Callable[[str], None]) -> Counts:
    """All of it, with a gateway of its own for taking the events in."""
    web = await nursery.start(roles=["web"])
    chance = Random(seed)  # noqa: S311 - repeatable
    counts = Counts()
    try:
        await Rounds(nursery, db, shop, web, chance, counts).carry_out(rounds, say)
    finally:
        await web.kill()
    return counts


def differences(counts: Counts) -> list[str]:
    """What refutes the promise, a sentence each; that all events arrived, as themselves, is told by the findings."""
    wrong = []
    if counts.zombies_overwrote:
        wrong.append(f"{counts.zombies_overwrote} of {counts.zombies} dispatchers that woke up behind their lease wrote something.")
    if counts.numbers_wrong:
        wrong.append(f"The attempts of {counts.numbers_wrong} event deliveries are not told right.")
    return wrong
