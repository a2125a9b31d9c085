"""What the demo puts payments through: a plan made from a seed, and acting it out as shop, customer, provider and attacker."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.simulator.api import INIT_PATH
from ipn_gateway.simulator.control import IpnRequest
from ipn_gateway.simulator.sender import Knobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from httpx import AsyncClient as Client  # noqa: TID251 - the shop's and the customer's, not the gateway's

    from ipn_gateway.simulator.app import Simulator

SOURCE: Final = "demo"
STORE: Final[Mapping[str, str]] = {"store_id": "testbox", "store_passwd": "qwerty"}
"""The provider's public sandbox store."""

SHOP_URL: Final = "https://shop.example/thanks"
CUSTOMER: Final[Mapping[str, str]] = {
    "cus_name": "Ayesha Rahman",
    "cus_email": "ayesha@example.com",
    "cus_phone": "01700000000",
    "cus_add1": "House 1",
    "cus_city": "Dhaka",
    "cus_postcode": "1205",
    "cus_country": "Bangladesh",
    "shipping_method": "NO",
    "num_of_item": "1",
    "product_name": "Tea",
    "product_category": "grocery",
    "product_profile": "general",
    "emi_option": "0",
}
"""What every session init repeats."""

REPEATS: Final = 5
FORGERIES_MAX: Final = 200
LATE_SECONDS: Final = 2.0
STATUS_SECONDS_MAX: Final = 20.0
LOOK_SECONDS: Final = 0.1
REFUSED_AT_ONCE: Final = ("wrong_hash", "no_hash", "altered_amount", "claimed_paid", "unknown_order", "other_store", "doubled_field")
PROVE_NOTHING: Final = ("folded_order", "swallowed_amount", "odd_key")
"""Forgeries whose hash matches: the provider is asked about them, one a second."""


class Story(StrEnum):
    """What happens to one order; the value is how the demo tells it."""

    TWICE = "told twice at once"
    FORGED = "forgeries before and after the genuine one"
    LOST = "never told: found by asking the provider"
    OVERTAKEN = "declined, then paid; told in the wrong order"
    RETRIED = "declined, then paid with another card"
    EARLY = "told before the order was registered"
    STORM = f"told {1 + REPEATS} times"
    LATE = "told late"
    PLAIN = "told once"
    RISKY = "paid, but risky: held for a person"
    DECLINED = "declined"
    CANCELLED = "cancelled by the customer"
    ATTACKED = "declined; forged into a payment"


PAID: Final = (Story.TWICE, Story.FORGED, Story.LOST, Story.OVERTAKEN, Story.EARLY, Story.RETRIED, Story.STORM, Story.LATE, Story.PLAIN)
UNPAID: Final = (Story.RISKY, Story.DECLINED, Story.CANCELLED, Story.ATTACKED)
PAID_PER_UNPAID_ROUND: Final = 20


@dataclass(frozen=True, slots=True)
class Scene:
    """One order, its amount in BDT, and its story."""

    order_id: str
    amount: Decimal
    story: Story


def plan(payments: int, seed: int) -> list[Scene]:
    """So many orders that end paid, and for each 20 of them one of each kind that does not, in an order that the seed decides."""
    chance = Random(seed)  # noqa: S311 - a repeatable show
    paid = list(itertools.islice(itertools.cycle(PAID), payments))
    stories = paid + list(UNPAID) * -(-payments // PAID_PER_UNPAID_ROUND)
    chance.shuffle(stories)
    return [
        Scene(f"DEMO-{number:04}", Decimal(chance.randrange(1_000, 1_000_000)) / 100, story)
        for number, story in enumerate(stories, start=1)
    ]


@dataclass(slots=True)
class Stage:
    """What the stories are acted on. `hand` is held from setting the provider's mood until it has been used."""

    shop: Client
    customer: Client
    simulator: Simulator
    listener_url: str
    hand: asyncio.Lock = field(default_factory=asyncio.Lock)
    duplicates: int = 0
    forged: set[str] = field(default_factory=set)
    _proves_nothing: Iterator[str] = field(default_factory=lambda: iter(PROVE_NOTHING))
    _refused: Iterator[str] = field(default_factory=lambda: itertools.cycle(REFUSED_AT_ONCE))

    # The shop

    async def register(self, scene: Scene) -> None:
        """Register the order at the gateway."""
        order = {"order_id": scene.order_id, "amount": f"{scene.amount:.2f}", "currency": "BDT", "source": SOURCE}
        answer = await self.shop.post("/v1/orders", json=order, headers={"Idempotency-Key": f"register-{scene.order_id}"})
        answer.raise_for_status()

    async def open(self, scene: Scene) -> str:
        """Open a session at the provider; the address of its payment page."""
        answer = await self.customer.post(INIT_PATH, data=_session(scene, self.listener_url))
        answer.raise_for_status()
        return str(answer.json()["GatewayPageURL"])

    async def status(self, path: str, **query: str) -> str:
        """The status of an order, or the outcome of the newest notification delivery."""
        answer = await self.shop.get(path, params=query)
        answer.raise_for_status()
        found = answer.json()
        items = found.get("items", [found])
        return str(items[0].get("outcome") or items[0].get("status")) if items else ""

    async def becomes(self, wanted: str, path: str, **query: str) -> None:
        """Wait until a status is the wanted one, for some seconds at most; the accounts show it if it never is."""
        try:
            async with asyncio.timeout(STATUS_SECONDS_MAX):
                while await self.status(path, **query) != wanted:  # noqa: ASYNC110 - another process knows
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            return

    # The customer

    async def press(self, page: str, button: str, mood: Knobs | None = None) -> None:
        """Look at the payment page and press a button; the notification goes out in the provider's mood."""
        (await self.customer.get(page)).raise_for_status()
        async with self.hand:
            self.simulator.sender.knobs = mood or Knobs()
            (await self.customer.post(page, data={"action": button})).raise_for_status()
            self.simulator.sender.knobs = Knobs()

    # The provider, and who plays it

    async def repeat(self, scene: Scene, times: int) -> None:
        """Send the order's newest notification again."""
        await self.simulator.control.notify(IpnRequest(tran_id=scene.order_id, times=times))

    async def forge(self, scene: Scene, kind: str) -> None:
        """Post what an attacker makes of the order's newest notification."""
        for reply in await self.simulator.control.notify(IpnRequest(tran_id=scene.order_id, forge=kind)):
            if delivery_id := reply.headers.get("x-delivery-id"):
                self.forged.add(delivery_id)

    def refused_kinds(self, count: int) -> list[str]:
        """The next kinds of forgery that are refused at once; none beyond what the listener keeps instead of only counting."""
        return list(itertools.islice(self._refused, count if len(self.forged) < FORGERIES_MAX else 0))

    def kind_that_proves_nothing(self) -> list[str]:
        """The next kind whose hash matches; each is used once, since asking about them is rationed."""
        return list(itertools.islice(self._proves_nothing, 1))


def _session(scene: Scene, listener_url: str) -> dict[str, str]:
    """A session init as SSLCOMMERZ API v4 wants it, "Initiate Payment"."""
    return {
        **STORE,
        **CUSTOMER,
        "total_amount": f"{scene.amount:.2f}",
        "currency": "BDT",
        "tran_id": scene.order_id,
        "ipn_url": listener_url,
        "success_url": SHOP_URL,
        "fail_url": SHOP_URL,
        "cancel_url": SHOP_URL,
    }


async def act(stage: Stage, scene: Scene) -> None:
    """Act out one scene: from registering the order to the last notification."""
    if scene.story is not Story.EARLY:
        await stage.register(scene)
    await ACTS[scene.story](stage, scene, await stage.open(scene))


async def _pay(stage: Stage, _: Scene, page: str) -> None:
    await stage.press(page, "pay")


async def _twice(stage: Stage, _: Scene, page: str) -> None:
    stage.duplicates += 1
    await stage.press(page, "pay", Knobs(duplicate=1))


async def _storm(stage: Stage, scene: Scene, page: str) -> None:
    await stage.press(page, "pay")
    stage.duplicates += REPEATS
    await asyncio.gather(*(stage.repeat(scene, 1) for _ in range(REPEATS)))


async def _late(stage: Stage, _: Scene, page: str) -> None:
    await stage.press(page, "pay", Knobs(delay_seconds=LATE_SECONDS))


async def _lost(stage: Stage, _: Scene, page: str) -> None:
    await stage.press(page, "pay", Knobs(lose=1))


async def _overtaken(stage: Stage, _: Scene, page: str) -> None:
    await stage.press(page, "fail", Knobs(reorder=1))
    await stage.press(page, "pay")


async def _retried(stage: Stage, scene: Scene, page: str) -> None:
    await stage.press(page, "fail")
    await stage.becomes("failed", f"/v1/orders/{scene.order_id}")
    await stage.press(page, "pay")


async def _early(stage: Stage, scene: Scene, page: str) -> None:
    await stage.press(page, "pay")
    await stage.becomes("parked", "/v1/notification-deliveries", order_id=scene.order_id)
    await stage.register(scene)


async def _forged(stage: Stage, scene: Scene, page: str) -> None:
    """The genuine notification comes between the forgeries.

    One that proves nothing waits until the payment is applied: before that, the provider's answer to it would be the truth.
    """
    await stage.press(page, "pay", Knobs(lose=1))
    for kind in stage.refused_kinds(3):
        await stage.forge(scene, kind)
    await stage.repeat(scene, 1)
    await stage.becomes("paid", f"/v1/orders/{scene.order_id}")
    for kind in stage.kind_that_proves_nothing():
        await stage.forge(scene, kind)


async def _risky(stage: Stage, _: Scene, page: str) -> None:
    await stage.press(page, "risky")


async def _declined(stage: Stage, _: Scene, page: str) -> None:
    await stage.press(page, "fail")


async def _cancelled(stage: Stage, _: Scene, page: str) -> None:
    await stage.press(page, "cancel")


async def _attacked(stage: Stage, scene: Scene, page: str) -> None:
    await stage.press(page, "fail", Knobs(lose=1))
    for kind in ("claimed_paid", "folded_status"):
        await stage.forge(scene, kind)


ACTS: Final[Mapping[Story, Callable[[Stage, Scene, str], Awaitable[Any]]]] = {
    Story.TWICE: _twice,
    Story.FORGED: _forged,
    Story.LOST: _lost,
    Story.OVERTAKEN: _overtaken,
    Story.RETRIED: _retried,
    Story.EARLY: _early,
    Story.STORM: _storm,
    Story.LATE: _late,
    Story.PLAIN: _pay,
    Story.RISKY: _risky,
    Story.DECLINED: _declined,
    Story.CANCELLED: _cancelled,
    Story.ATTACKED: _attacked,
}
