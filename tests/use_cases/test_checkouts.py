"""Checkout: which orders have a payment page, how long it is the same, and what a provider that fails leaves behind."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import checkouts, orders, sources, views
from ipn_gateway.checkouts import CHECKOUT, Checkout
from ipn_gateway.errors import IdempotencyKeyReused, Overloaded
from ipn_gateway.idempotency import Answer, Idempotency, KeyedRequest
from ipn_gateway.simulator.sslcommerz import encode
from tests import adapters
from tests import world as worlds
from tests.make import Make, ago, ahead
from tests.world import SOURCE, STORE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from decimal import Decimal

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from tests.world import World

CUSTOMER = {
    "name": "Rahima Begum",
    "email": "rahima@example.test",
    "phone": "+8801700000000",
    "address": "12 Lake Road",
    "city": "Dhaka",
    "postcode": "1207",
    "country": "Bangladesh",
}
PRODUCT = {"name": "Tea, 250 g", "category": "grocery", "profile": "physical-goods"}
UNCLEAR = ("html", "empty", "status500", "apiconnect", "reset", "record_then_reset", "record_then_status500")


@dataclass
class Till:
    """A shop at the checkout: what its backend asks for, and what the provider saw of it."""

    world: World
    layer: Idempotency = field(init=False)

    def __post_init__(self) -> None:
        self.layer = Idempotency(self.world.rt.db, [CHECKOUT], lease_seconds=90, retention_hours=168)

    async def checkout(self, order_id: str = "ORD-1", *, key: str = "k-1", **customer: str) -> Answer:
        """One call, as the route makes it."""
        rt = self.world.rt
        async with rt.db.autocommit("test.order") as tx:
            order = await views.order(tx, TENANT, order_id)
        account = await rt.sources.reload(order.source)
        assert account is not None
        given = CUSTOMER | customer
        request = checkouts.session_request(order, given, PRODUCT, public_url="https://pay.example")
        body = {"customer": given, "product": PRODUCT}
        asked = KeyedRequest(tenant_id=TENANT, key=key, body=body, path={"order_id": order_id})
        timeout_seconds = rt.settings.provider_money_timeout_seconds
        return await self.layer.run(CHECKOUT, asked, Checkout(account, request, rt.transport, timeout_seconds=timeout_seconds).phases())

    async def page(self, order_id: str = "ORD-1", **given: str) -> dict[str, str]:
        """A call that is answered with a page."""
        answer = await self.checkout(order_id, **given)
        assert answer.status == 200, answer.body
        found: dict[str, str] = json.loads(answer.body)
        return found

    async def refused(self, order_id: str = "ORD-1", **given: str) -> str:
        """A call that the state does not allow; the sentence."""
        answer = await self.checkout(order_id, **given)
        assert answer.status == 409, answer.body
        document = json.loads(answer.body)
        assert document["type"] == "/problems/state-conflict"
        return str(document["detail"])

    @property
    def asked(self) -> int:
        """How many sessions the provider was asked for."""
        return self.world.simulator.api.inits.total()

    async def hanging(self, count: int = 1) -> None:
        """Wait until so many questions hang at the provider."""
        async with asyncio.timeout(10):
            while self.world.simulator.api.faults.hanging != count:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)

    async def kept(self, order_id: str = "ORD-1") -> str | None:
        """The page that the order's row holds."""
        found: str | None = await self.world.value("SELECT checkout_url FROM orders WHERE order_id = %(id)s", id=order_id)
        return found


@pytest.fixture
def till(world: World) -> Till:
    return Till(world)


@pytest.fixture
def make(world: World, clock: Clock) -> Make:
    """Rows of the world's merchant."""
    return Make(world.rt.db, clock)


async def test_the_provider_is_told_everything_that_it_needs(till: Till) -> None:
    """Order, amount, currency, the three ways back and the listener; its page is answered, and held for a quarter of an hour."""
    await till.world.order("ORD-1", "1000.50", "USD")

    page = await till.page()

    (session,) = till.world.simulator.bank.sessions.values()
    assert (session.store_id, session.tran_id, f"{session.amount}", session.currency) == (STORE, "ORD-1", "1000.50", "USD")
    assert session.urls == {
        "success_url": f"https://pay.example/return/{SOURCE}/success",
        "fail_url": f"https://pay.example/return/{SOURCE}/fail",
        "cancel_url": f"https://pay.example/return/{SOURCE}/cancel",
        "ipn_url": f"https://pay.example/ipn/{SOURCE}",
    }
    assert session.product == PRODUCT["name"]
    assert page["redirect_url"] == f"{till.world.provider_url}/pay/{session.key}" == await till.kept()
    minutes = "extract(epoch FROM checkout_expires_at - ipn_now()) / 60"
    assert 14.5 < await till.world.value(f"SELECT {minutes} FROM orders WHERE checkout_expires_at = %(at)s", at=page["expires_at"]) <= 15


async def test_nothing_of_the_customer_is_kept(till: Till) -> None:
    """What the provider is told about a person is in no row of ours."""
    await till.world.order("ORD-1")
    await till.page()

    for table in ("orders", "idempotency_keys", "audit_log", "events"):
        rows = await till.world.rows(f"SELECT row_to_json(t)::text AS row FROM {table} AS t")
        assert not any(value in row["row"] for row in rows for value in (CUSTOMER["email"], CUSTOMER["name"], CUSTOMER["address"]))


async def test_a_young_page_is_given_again(till: Till, clock: Clock) -> None:
    """To any key and customer, until it is 15 minutes old; then there is a new one."""
    await till.world.order("ORD-1")
    first = await till.page(key="k-1")

    assert await till.page(key="k-2", name="Somebody Else") == first
    clock.advance(minutes=14)
    assert await till.page(key="k-3") == first
    assert till.asked == 1
    clock.advance(minutes=1)
    second = await till.page(key="k-4")
    assert second["redirect_url"] != first["redirect_url"]
    assert second["expires_at"] > first["expires_at"]
    assert till.asked == 2


async def test_an_order_that_can_still_be_paid_has_a_page(till: Till, make: Make) -> None:
    """An attempt that the provider ended leaves the order payable."""
    for status, reason in (("pending", None), ("failed", "provider"), ("cancelled", "provider"), ("expired", "provider")):
        await make.order(tenant_id=TENANT, source_id=SOURCE, order_id=status, status=status, reason=reason)

        assert (await till.page(status, key=status))["redirect_url"] == await till.kept(status)


NOT_PAYABLE: list[tuple[dict[str, Any], str]] = [
    ({"status": "paid"}, "is paid"),
    ({"status": "paid_on_hold", "reason": "risk"}, "is paid"),
    ({"status": "partially_refunded"}, "is paid"),
    ({"status": "refunded"}, "is paid"),
    ({"status": "cancelled", "reason": "merchant"}, "is closed"),
    ({"status": "expired", "reason": "expired"}, "is closed"),
    ({"expires_at": ago(seconds=1)}, "is closed"),
    ({"amount_paid": 40}, "A part of this order is paid"),
]


@pytest.mark.case("S78")
@pytest.mark.parametrize("page", [{}, {"checkout_url": "https://provider.example/old", "checkout_expires_at": ahead(minutes=5)}])
async def test_an_order_that_should_not_be_paid_has_none(till: Till, make: Make, page: dict[str, Any]) -> None:
    """Whether or not there is a young page: a payment would be a second one, late, or held. The answer is this key's for good."""
    for number, (given, sentence) in enumerate(NOT_PAYABLE):
        await make.order(tenant_id=TENANT, source_id=SOURCE, order_id=f"ORD-{number}", **given | page)

        assert sentence in await till.refused(f"ORD-{number}", key=f"k-{number}"), given
        again = await till.checkout(f"ORD-{number}", key=f"k-{number}")
        assert (again.status, again.replayed) == (409, True)
    assert till.asked == 0


async def test_a_disabled_source_opens_no_page(till: Till) -> None:
    """What is paid there is held; a page that there is is not given either."""
    await till.world.order("ORD-1")
    await till.page()
    await till.world.order("ORD-2")
    await sources.disable(till.world.rt.db, TENANT, SOURCE, actor="test")

    assert "disabled" in await till.refused("ORD-1", key="k-2")
    assert "disabled" in await till.refused("ORD-2", key="k-3")
    assert till.asked == 1


async def test_an_amount_that_the_provider_does_not_take_is_refused_here(till: Till) -> None:
    """With its limits, and without a question; such an order can be registered all the same."""
    await till.world.order("ORD-1", "9.99")
    await till.world.order("ORD-2", "500000.01")

    assert await till.refused("ORD-1", key="k-1") == "The amount of this order must be 10.00 to 500000.00 BDT at SSLCOMMERZ."
    assert await till.refused("ORD-2", key="k-2") == "The amount of this order must be 10.00 to 500000.00 BDT at SSLCOMMERZ."
    assert till.asked == 0


async def test_what_the_provider_refuses_is_the_answer_to_the_key(till: Till) -> None:
    """Its code is told, without what it quotes; a repeat asks nobody, and a corrected request has a new key."""
    await till.world.order("ORD-1")
    till.world.fault("init", "failed", value="Store Credential Error: demo01 203.0.113.7")

    answer = await till.checkout(key="k-1")

    document = json.loads(answer.body)
    assert (answer.status, document["provider_code"]) == (409, "failed_store_credential_error")
    assert document["provider_code"] in document["detail"]
    assert "203.0.113.7" not in document["detail"]
    again = await till.checkout(key="k-1")
    assert (again.body, again.replayed, till.asked) == (answer.body, True, 1)
    assert await till.kept() is None
    assert (await till.page(key="k-2"))["redirect_url"] == await till.kept()


async def test_a_provider_without_a_page_says_so(till: Till) -> None:
    """One that only notifies: a 409, and nothing is asked."""
    with adapters.installed():
        given = {"business": "shop@example.test", "base_url": "http://127.0.0.1:9"}
        await sources.create(till.world.rt.db, till.world.rt.vault, TENANT, "echo-shop", provider="echopay", given=given, actor="test")
        await till.world.order("ORD-1", source="echo-shop")

        assert "not_offered" in await till.refused()


# --- a provider that fails


@pytest.mark.case("S80", "S68", "S58")
async def test_an_unclear_answer_is_no_answer(till: Till) -> None:
    """503, not stored, and the same key may be sent again at once; whatever the provider remembers of the first, one page is given."""
    for kind in UNCLEAR:
        await till.world.order(kind)
        till.world.fault("init", kind)
        before = till.asked

        with pytest.raises(Overloaded, match="same key") as told:
            await till.checkout(kind, key=kind)

        assert told.value.retry_after_seconds == checkouts.RETRY_SECONDS
        assert await till.kept(kind) is None
        page = await till.page(kind, key=kind)
        assert page["redirect_url"] == await till.kept(kind)
        again = await till.checkout(kind, key=kind)
        assert (again.replayed, json.loads(again.body)) == (True, page)
        assert till.asked == before + 2


async def test_an_answer_without_a_usable_page_is_none(till: Till) -> None:
    """A customer is sent to an http(s) address or nowhere."""
    await till.world.order("ORD-1")
    for changed in ({"GatewayPageURL": None}, {"GatewayPageURL": "javascript:alert(1)"}, {"status": "MAYBE"}):
        till.world.fault("init", "fields", fields=changed)

        with pytest.raises(Overloaded):
            await till.checkout()
        assert await till.kept() is None
    await till.page()


@pytest.mark.case("S80")
async def test_a_provider_that_cannot_be_reached_is_asked_again(till: Till) -> None:
    """Refused connections are a 503; after the address is put right the same key succeeds, with the new configuration at once."""
    await till.world.order("ORD-1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await sources.patch(till.world.rt.db, till.world.rt.vault, TENANT, SOURCE, {"base_url": closed}, actor="test")

    with pytest.raises(Overloaded):
        await till.checkout()

    await sources.patch(till.world.rt.db, till.world.rt.vault, TENANT, SOURCE, {"base_url": till.world.provider_url}, actor="test")
    assert (await till.page())["redirect_url"] == await till.kept()
    assert till.asked == 1


@pytest.fixture
async def hasty(database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Till]:
    """A gateway that waits for a provider's money calls only for a moment."""
    async with worlds.opened(database_url, clock, faults, provider_money_timeout_seconds=0.2) as opened:
        yield Till(opened)


@pytest.mark.case("S80")
@pytest.mark.parametrize("kind", ["hang", "record_then_hang"])
async def test_a_provider_that_hangs_is_left_after_the_limit(hasty: Till, kind: str) -> None:
    """Then the key is free, and not only when its lease ends."""
    await hasty.world.order("ORD-1")
    hasty.world.fault("init", kind)

    with pytest.raises(Overloaded):
        await hasty.checkout()

    assert (await hasty.page())["redirect_url"] == await hasty.kept()


async def test_a_retry_asks_nobody_when_there_is_a_page_by_now(till: Till) -> None:
    """A key that got no answer looks again before it asks again."""
    await till.world.order("ORD-1")
    till.world.fault("init", "status500")
    with pytest.raises(Overloaded):
        await till.checkout(key="k-1")
    page = await till.page(key="k-2")

    assert await till.page(key="k-1") == page
    assert till.asked == 2


# --- what happens while the provider is asked


async def _pay(till: Till) -> None:
    await till.world.notify(till.world.pay("ORD-1"))
    await till.world.drain()


async def _cancel(till: Till) -> None:
    await orders.cancel(till.world.rt.db, TENANT, "ORD-1", actor="test", reason="out of stock")


async def _disable(till: Till) -> None:
    await sources.disable(till.world.rt.db, TENANT, SOURCE, actor="test")


@pytest.mark.parametrize(("meanwhile", "sentence"), [(_pay, "is paid"), (_cancel, "is closed"), (_disable, "disabled")])
@pytest.mark.parametrize("fault", ["hang", "record_then_hang"])
async def test_what_is_true_when_the_provider_has_answered_decides(till: Till, meanwhile: Any, sentence: str, fault: str) -> None:
    """An order that was paid or closed meanwhile gets no page, though the provider opened one: 409, stored."""
    await till.world.order("ORD-1")
    till.world.fault("init", fault)
    waiting = asyncio.ensure_future(till.refused())
    await till.hanging()

    await meanwhile(till)
    till.world.simulator.api.faults.clear()

    assert sentence in await waiting
    assert await till.kept() is None
    assert len(till.world.simulator.bank.sessions) == 1
    assert (await till.checkout()).replayed


@pytest.mark.case("S64", "S69", "S82")
@pytest.mark.parametrize("point", ["checkouts.start:before_commit", "checkouts.settle:before_commit"])
async def test_a_phase_that_fails_leaves_nothing_of_itself(till: Till, faults: Faults, point: str) -> None:
    """Page and answer commit together or not at all; the key goes on from the phase before."""
    await till.world.order("ORD-1")
    reached = []

    async def fail() -> None:
        reached.append(point)
        del faults.on[point]
        raise RuntimeError("cut short")

    faults.on[point] = fail
    with pytest.raises(RuntimeError, match="cut short"):
        await till.checkout()

    assert reached == [point]
    assert await till.kept() is None
    assert await till.world.value("SELECT count(*) FROM idempotency_keys WHERE state = 'completed'") == 0
    page = await till.page()
    assert page["redirect_url"] == await till.kept()
    assert till.asked == (1 if "start" in point else 2)


# --- the key


@pytest.mark.case("S27")
async def test_every_member_counts_and_nothing_else(till: Till) -> None:
    """Another customer or order under the same key is another request."""
    await till.world.order("ORD-1")
    await till.world.order("ORD-2")
    await till.page(key="k-1")

    for name in CUSTOMER:
        with pytest.raises(IdempotencyKeyReused):
            await till.checkout(key="k-1", **{name: "other@example.test"})
    with pytest.raises(IdempotencyKeyReused):
        await till.checkout("ORD-2", key="k-1")
    assert till.asked == 1


async def test_a_page_leads_to_a_payment(till: Till) -> None:
    """What is paid there pays the order, once; then there is no page any more."""
    await till.world.order("ORD-1")
    await till.page()

    fields = till.world.pay("ORD-1")
    await till.world.notify(fields)
    await till.world.notify(encode(fields))
    await till.world.drain()

    assert await till.world.status("ORD-1") == "paid"
    paid: Decimal = await till.world.value("SELECT amount_paid FROM orders")
    assert paid == 1000
    assert "is paid" in await till.refused(key="k-2")
