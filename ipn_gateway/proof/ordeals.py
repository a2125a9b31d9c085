"""What the proof puts notifications through: a plan made from a seed, and acting it out as shop, provider and attacker.

A provider that has not heard a 2xx sends again here, to whichever gateway is up: what was accepted in the end is what is counted.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Final

from httpx import TransportError

from ipn_gateway.errors import GatewayError
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.simulator.faults import Fault
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.simulator.subscriber import Mode
from ipn_gateway.stories import PROVE_NOTHING, REFUSED_AT_ONCE, SOURCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from httpx import AsyncClient  # noqa: TID251 - the shop's, not the gateway's

    from ipn_gateway.simulator.app import Simulator
    from ipn_gateway.simulator.sslcommerz import Attempt
    from ipn_gateway.simulator.subscriber import Subscriber

PAID: Final = "paid"
RISKY: Final = "risky"
DECLINED: Final = "declined"

ATTEMPTS: Final[Sequence[tuple[tuple[str, ...], int]]] = (((PAID,), 84), ((DECLINED, PAID), 10), ((RISKY,), 3), ((DECLINED,), 3))
"""How an order is tried to be paid, and how many of a hundred orders are."""

UNTOLD_PER: Final = 100
PROVING_NOTHING_MAX: Final = 9
"""Of those whose hash matches: they are asked about one a second."""

TRIES_MAX: Final = 400
AGAIN_SECONDS: Final = 0.15
DELAY_SECONDS_MAX: Final = 1.5
UNHEARD_SECONDS_MAX: Final = 0.02
MOOD_SECONDS: Final = 2.0
SLOW_SECONDS: Final = 1.5  # longer than any timeout

PROVIDER_MOODS: Final = ("status500", "hang", "reset", "record_then_reset", "record_then_status500", "html", "empty")
SUBSCRIBER_MOODS: Final = ("status:503", "lost", "reset", "slow", "lost")


class ProofFailed(GatewayError):
    """The proof could not be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordeal:
    """One order: how it is tried to be paid, and what happens to the notifications of that.

    `copies` are sent beside each notification, all at once; of `unheard` answers the sender hears nothing; `overtaken` turns the order of
    two round; `early` ones come before their order; of the untold ones there is no notification at all. The moods are how the provider
    answers the first questions about it, and how a subscriber takes the next events.
    """

    order_id: str
    amount: Decimal
    attempts: tuple[str, ...]
    copies: int = 0
    unheard: int = 0
    wait_seconds: float = 0.0
    overtaken: bool = False
    early: bool = False
    told: bool = True
    forged: tuple[str, ...] = ()
    provider_mood: str = "ok"
    subscriber_mood: str = "ok"


def plan(notifications: int, seed: int) -> list[Ordeal]:
    """So many genuine notifications, and some payments beside them that are told by none."""
    chance = Random(seed)  # noqa: S311 - repeatable
    odd = itertools.islice(itertools.cycle(PROVE_NOTHING), PROVING_NOTHING_MAX)
    kinds, weights = [attempts for attempts, _ in ATTEMPTS], [weight for _, weight in ATTEMPTS]
    ordeals: list[Ordeal] = []
    left = notifications
    while left:
        attempts = chance.choices(kinds, weights)[0] if left > 1 else (PAID,)
        ordeals.append(_drawn(len(ordeals), attempts, chance, odd))
        left -= len(attempts)
    for number in range(-(-notifications // UNTOLD_PER)):
        untold = Ordeal(order_id=f"UNTOLD-{number:05}", amount=_amount(chance), attempts=(PAID,), told=False)
        ordeals.insert(chance.randrange(1 + len(ordeals) // 2), untold)
    return ordeals


def _drawn(number: int, attempts: tuple[str, ...], chance: Random, odd: Iterator[str]) -> Ordeal:
    # Each is drawn whatever the others are, so that one seed means the same for long.
    copied, unheard, late, overtaken, early, forged, asked, sent = (chance.random() for _ in range(8))
    kinds, provider, subscriber = chance.sample(REFUSED_AT_ONCE, 2), chance.choice(PROVIDER_MOODS), chance.choice(SUBSCRIBER_MOODS)
    return Ordeal(
        order_id=f"PROVE-{number:05}",
        amount=_amount(chance),
        attempts=attempts,
        copies=chance.randint(1, 3) if copied < 0.25 else 0,  # noqa: PLR2004 - the shares of troubles
        unheard=chance.randint(1, 2) if unheard < 0.15 else 0,  # noqa: PLR2004
        wait_seconds=chance.random() * DELAY_SECONDS_MAX if late < 0.2 else 0.0,  # noqa: PLR2004
        overtaken=overtaken < 0.5,  # noqa: PLR2004
        early=early < 0.08,  # noqa: PLR2004
        forged=(*kinds, *itertools.islice(odd, 1)) if forged < 0.1 else (),  # noqa: PLR2004
        provider_mood=provider if asked < 0.08 else "ok",  # noqa: PLR2004
        subscriber_mood=subscriber if sent < 0.05 else "ok",  # noqa: PLR2004
    )


def _amount(chance: Random) -> Decimal:
    return Decimal(chance.randrange(1_000, 1_000_000)) / 100


@dataclass(slots=True)
class Ground:
    """Where it is acted out. `gateway` gives the URL of one that is up."""

    simulator: Simulator
    subscribers: Sequence[Subscriber]
    shop: AsyncClient
    gateway: Callable[[], Awaitable[str]]
    chance: Random
    accepted: dict[int, Attempt] = field(default_factory=dict)
    """The attempts of which a genuine notification was answered 2xx, by their place in the bank."""

    forgeries: int = 0
    answers_lost: int = 0

    async def act(self, ordeal: Ordeal) -> None:
        """One order from its registration, or its first notification, to the last one. Raises `ProofFailed`."""
        if not ordeal.early:
            await self.register(ordeal)
        self._set_moods(ordeal)
        made = [self._attempt(ordeal, what) for what in ordeal.attempts]
        if ordeal.told:
            for place in reversed(made) if ordeal.overtaken else made:
                copies = [self._tell(place, ordeal) for _ in range(1 + ordeal.copies)]
                await asyncio.gather(*copies, *(self._forge(place, kind) for kind in ordeal.forged))
        if ordeal.early:
            await self.register(ordeal)

    async def register(self, ordeal: Ordeal) -> None:
        """Register the order at the gateway: the same call, until it is answered."""
        order = {"order_id": ordeal.order_id, "amount": f"{ordeal.amount:.2f}", "currency": "BDT", "source": SOURCE}
        said = ""
        for _ in range(TRIES_MAX):
            try:
                answer = await self.shop.post(
                    f"{await self.gateway()}/v1/orders", json=order, headers={"Idempotency-Key": f"register-{ordeal.order_id}"}
                )
            except TransportError as error:
                said = type(error).__name__
            else:
                if answer.is_success:
                    return
                said = str(answer.status_code)
            await asyncio.sleep(AGAIN_SECONDS)
        raise ProofFailed(f"The order {ordeal.order_id} was not taken in {TRIES_MAX} calls; the last one ended as {said}.")

    def _set_moods(self, ordeal: Ordeal) -> None:
        """Only about this order does the provider misbehave: else one fault would be used up by another's question."""
        times = self.chance.randint(1, 3)
        if ordeal.provider_mood != "ok":
            for path in ("validator", "query"):
                fault = {"path": path, "kind": ordeal.provider_mood, "times": times, "seconds": SLOW_SECONDS, "tran_id": ordeal.order_id}
                self.simulator.api.faults.add(Fault.model_validate(fault))
        if ordeal.subscriber_mood != "ok":
            subscriber = self.chance.choice(self.subscribers)
            subscriber.behave(Mode(mode=ordeal.subscriber_mood, times=times, seconds=SLOW_SECONDS))
            # A mood passes: else an endpoint that rests for its failures would meet it with its only probe, minutes later.
            asyncio.get_running_loop().call_later(MOOD_SECONDS, subscriber.behave, Mode())

    def _attempt(self, ordeal: Ordeal, what: str) -> int:
        """A customer tries to pay; the place of that in the bank's memory."""
        status = "FAILED" if what == DECLINED else "VALID"
        asked = PaymentRequest(
            tran_id=ordeal.order_id, amount=ordeal.amount, currency="BDT", status=status, risk=what == RISKY, send_ipn=False
        )
        self.simulator.control.pay(asked)
        return len(self.simulator.bank.payments) - 1

    async def _tell(self, place: int, ordeal: Ordeal) -> None:
        """Post one genuine notification until a 2xx is heard."""
        attempt = self.simulator.bank.payments[place].attempt
        body = encode(self.simulator.control.fields_of(attempt))
        await asyncio.sleep(ordeal.wait_seconds * self.chance.random())
        for number in range(TRIES_MAX):
            url = f"{await self.gateway()}/ipn/{SOURCE}"
            patience = self.chance.random() * UNHEARD_SECONDS_MAX if number < ordeal.unheard else None
            try:
                async with asyncio.timeout(patience):
                    answer = await self.simulator.sender.post(url, body)
            except TimeoutError:
                self.answers_lost += 1
                continue
            if answer.acknowledged:
                self.accepted[place] = attempt
                return
            await asyncio.sleep(AGAIN_SECONDS)

    async def _forge(self, place: int, kind: str) -> None:
        """Post what an attacker makes of it, once."""
        fields = self.simulator.control.fields_of(self.simulator.bank.payments[place].attempt)
        await asyncio.sleep(self.chance.random() * DELAY_SECONDS_MAX)
        await self.simulator.sender.post(f"{await self.gateway()}/ipn/{SOURCE}", encode(FORGERIES[kind](fields)), kind=kind)
        self.forgeries += 1
