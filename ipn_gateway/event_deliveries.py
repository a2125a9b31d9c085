"""The dispatcher: brings events to endpoints. Claim, send, record; only the first and the last hold a transaction.

What is due is claimed under a lease, each event delivery is sent in a slot of its own that nobody waits for, and what became of the
attempt is written only if the lease is still ours. A dispatcher that dies leaves its leases to expire: then the event is sent again, under
the same id. So an event arrives at least once. Which are due, and who gets the slots, is decided in `event_claims`.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import psycopg

from ipn_gateway import ids, logs, signing
from ipn_gateway.attempts import Attempt, Recorded, Recorder, decide
from ipn_gateway.errors import GatewayError, LeaseLost
from ipn_gateway.event_claims import IN_FLIGHT_PER_TENANT, Claimed, claim, give_back
from ipn_gateway.guard import TooLate
from ipn_gateway.states import EventDeliveryStatus, Trigger
from ipn_gateway.transport import DeliveryRequest, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ipn_gateway.db import Database
    from ipn_gateway.settings import Settings
    from ipn_gateway.slots import Slots
    from ipn_gateway.transport import Transport
    from ipn_gateway.vault import Vault

SLOTS: Final = 2 * IN_FLIGHT_PER_TENANT
"""Attempts at once in this process: waiting for an endpoint is cheap, and no tenant holds more than half."""

STARTED_A_TURN: Final = 32
"""So many attempts begin in one turn of the event loop, which takes some milliseconds. With fewer the sets that are recorded get small."""

KEYS_KEPT: Final = 2048
"""Signing secrets and private keys that a dispatcher keeps unsealed."""

LOOK_AGAIN_SECONDS_MIN: Final = 0.02
"""For a limited rate nobody looks more often: of a high one, what may go at once comes together meanwhile."""


class Dispatcher:
    """Claims, sends and records. `slots` are its own; `chance` draws between 0 and 1 for the jitter.

    `wake` is called when an endpoint with a limited rate, of which something was claimed, may have its next one.
    """

    def __init__(
        self,
        db: Database,
        transport: Transport,
        vault: Vault,
        slots: Slots,
        settings: Settings,
        *,
        chance: Callable[[], float],
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._db = db
        self._transport = transport
        self._key = lru_cache(KEYS_KEPT)(partial(_key, vault))  # which of them are active each claim reads anew
        self._slots = slots
        self._settings = settings
        self._chance = chance
        self._wake = wake
        self._recorder = Recorder(db)
        self._sending: dict[Claimed, asyncio.Task[Any]] = {}
        self._held: dict[Claimed, float] = {}  # what is not recorded yet, and the time of the loop at which its lease ends, or earlier
        self._stopping = False
        self._log = logs.get("event_deliveries")

    async def run_once(self) -> int:
        """Claim what is due, no more than slots are free, and start each in a slot; how many. Waits for none of them."""
        limit = 0 if self._stopping else self._slots.free
        if limit <= 0:
            return 0
        lease_seconds, now = self._settings.dispatch_lease_seconds, asyncio.get_running_loop().time()
        held = [delivery.id for delivery, ends_by in self._held.items() if ends_by - now < lease_seconds / 2]
        async with self._db.transaction("event_deliveries.claim") as tx:
            claimed = await claim(tx, limit=limit, lease_seconds=lease_seconds, held=held)
        self._held.update(dict.fromkeys(claimed, now + lease_seconds))
        self._wake_when_free(claimed)
        return await self._start(claimed)

    async def _start(self, claimed: Sequence[Claimed]) -> int:
        """A few in each turn of the loop: signing and writing hundreds at once would hold up the answers to all others."""
        for begun in range(0, len(claimed), STARTED_A_TURN):
            if begun:
                await asyncio.sleep(0)
            if self._stopping:
                await self._give_back(claimed[begun:])
                return begun
            for delivery in claimed[begun : begun + STARTED_A_TURN]:
                self._sending[delivery] = self._slots.start(self._send_and_record(delivery), name="event_delivery")
        return len(claimed)

    async def _give_back(self, unsent: Sequence[Claimed]) -> None:
        for delivery in unsent:
            self._held.pop(delivery, None)
        try:
            await give_back(self._db, unsent)
        except (GatewayError, psycopg.Error) as error:
            self._log.warning("event_deliveries.left_to_lease", error_class=type(error).__name__, count=len(unsent))

    def _wake_when_free(self, claimed: Iterable[Claimed]) -> None:
        """A hint and nothing more: the poll comes to it too."""
        limited = {delivery.endpoint_id: delivery.free_seconds for delivery in claimed if delivery.free_seconds is not None}
        if self._wake:
            for seconds in limited.values():
                asyncio.get_running_loop().call_later(max(seconds, LOOK_AGAIN_SECONDS_MIN), self._wake)

    async def stop(self, *, seconds: float) -> None:
        """Claim no more, let what runs end within `seconds`, then break off what is still being sent and give back its leases."""
        self._stopping = True
        await self._slots.drained(seconds=seconds)
        unsent = dict(self._sending)
        for task in unsent.values():
            task.cancel()
        await self._slots.drained()  # what was sent is recorded
        await self._give_back([*unsent, *self._held])  # and what was claimed and never begun

    async def _send_and_record(self, delivery: Claimed) -> None:
        """What goes wrong in here is logged by the slot and left to the lease."""
        try:
            try:
                outcome = await self._send(delivery)
            finally:
                self._sending.pop(delivery, None)
            if outcome is not None:
                await self._record(delivery, self._made(delivery, outcome))
        finally:
            self._held.pop(delivery, None)

    async def _record(self, delivery: Claimed, attempt: Attempt) -> None:
        try:
            self._tell(delivery, attempt, await self._recorder.record(attempt))
        except LeaseLost:
            logs.count("event_deliveries.lease_lost")
            self._log.info("event_delivery.lease_lost", event_delivery_id=ids.show(ids.EVENT_DELIVERY, delivery.id), fence=delivery.fence)

    async def _send(self, delivery: Claimed) -> Outcome | None:
        """None when nothing was sent, and the lease is its wait until the next look.

        An event is never sent unsigned, nor when an attempt could last longer than the lease: another dispatcher might send it meanwhile.
        """
        keys = [self._key(sealed) for sealed in delivery.sealed_keys]
        if not keys:
            self._log.error("event_delivery.unsigned", endpoint_id=ids.show(ids.ENDPOINT, delivery.endpoint_id))
            return None
        signed = signing.headers(delivery.event_id, int(delivery.claimed_at.timestamp()), delivery.body, keys)
        headers = {"Content-Type": "application/json", **signed}
        request = DeliveryRequest(delivery.url, delivery.body, headers, delivery.claimed_at, self._held[delivery])
        try:
            return await self._transport.send(request)
        except TooLate:
            logs.count("event_deliveries.too_late")
            self._log.info("event_delivery.too_late", event_delivery_id=ids.show(ids.EVENT_DELIVERY, delivery.id), fence=delivery.fence)
            return None

    def _made(self, delivery: Claimed, outcome: Outcome) -> Attempt:
        return Attempt(
            id=ids.new(self._db.clock.now()),
            tenant_id=delivery.tenant_id,
            event_delivery_id=delivery.id,
            endpoint_id=delivery.endpoint_id,
            fence=delivery.fence,
            trigger=delivery.trigger,
            started_at=delivery.claimed_at,
            url=delivery.url,
            outcome=outcome,
            ordered=delivery.ordered,
            after=decide(
                delivery.tries,
                outcome,
                schedule=self._settings.retry_schedule,
                chance=self._chance(),
                resumes=delivery.resumes if delivery.trigger == Trigger.REDELIVERY.value else None,
            ),
        )

    def _tell(self, delivery: Claimed, attempt: Attempt, recorded: Recorded) -> None:
        outcome, after = attempt.outcome, recorded.status
        logs.count(f"event_deliveries.{'retried' if after == EventDeliveryStatus.PENDING else after}")
        self._log.info(
            "event_delivery.attempted",
            event_delivery_id=ids.show(ids.EVENT_DELIVERY, delivery.id),
            event_id=delivery.event_id,
            event_type=delivery.event_type,
            tenant_id=delivery.tenant_id,
            endpoint_id=ids.show(ids.ENDPOINT, delivery.endpoint_id),
            attempt=recorded.number,
            attempts_max=len(self._settings.retry_schedule),
            trigger=delivery.trigger,
            outcome=outcome.kind,
            http_status=outcome.status_code,
            error=outcome.error,
            address=outcome.address,
            duration_ms=outcome.duration_ms,
            status=recorded.status,
            next_attempt_at=recorded.next_attempt_at and recorded.next_attempt_at.isoformat(),
            endpoint_rests_until=recorded.rests_until and recorded.rests_until.isoformat(),
        )


def _key(vault: Vault, sealed: bytes) -> signing.SigningKey:
    return signing.signing_key(vault.unseal(sealed).decode())
