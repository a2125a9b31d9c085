"""Accepted refunds are asked about until they are final: on a schedule, by one process at a time, and counted once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import logs, refund_polls, sources
from ipn_gateway.errors import IdempotencyIndeterminate, StateConflict
from ipn_gateway.providers import discovered
from ipn_gateway.providers.base import NoOutcome, RefundAccepted, RefundPending, RefundSucceeded
from ipn_gateway.simulator.sslcommerz import encode
from tests import adapters
from tests.make import Make, ago, ahead
from tests.refunding import ORDER, Desk
from tests.world import FORM, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ipn_gateway.db import Database
    from ipn_gateway.idempotency_acts import Decision
    from ipn_gateway.providers.base import RefundAnswer, RefundRequest, RefundStatus
    from tests.world import World

SCHEDULE = (60, 300, 900, 3600, 14400)


@pytest.fixture
async def desk(world: World) -> Desk:
    """A gateway with one paid order of 1000.00, of which 400.00 are being refunded."""
    opened = Desk(world)
    await opened.paid()
    await opened.refund("key-1")
    return opened


def ref_id(desk: Desk) -> str:
    """What the provider calls the one refund."""
    (found,) = desk.world.simulator.api.refunds.by_ref_id
    return found


def questions(desk: Desk) -> int:
    """How often the provider was asked how far a refund is."""
    return desk.world.simulator.api.refund_queries.total()


# When


def test_the_schedule_is_followed_by_thirty_days() -> None:
    """So long after each question comes the next; then nobody asks any more."""
    waits = [refund_polls.next_wait(SCHEDULE, asked) for asked in range(len(SCHEDULE) + 31)]

    assert waits == [*SCHEDULE, *[86400] * 30, None]


async def test_a_refund_is_asked_about_when_it_is_due_and_not_before(desk: Desk) -> None:
    """A minute after it was accepted, and five minutes after a question whose answer is not final."""
    asked = [await desk.poll()]
    for seconds in (59, 1, 299, 1):
        desk.world.rt.clock.advance(seconds=seconds)
        asked.append(await desk.poll())

    assert asked == [0, 0, 1, 0, 1]
    assert await desk.refunds() == [("R-1", "succeeded")]
    assert await desk.sums() == ("partially_refunded", "400.00")
    assert questions(desk) == 2


@pytest.mark.parametrize("kind", ["processing", "html", "status500", "reset", "record_then_reset", "empty", "apiconnect"])
async def test_what_is_never_final_is_left_to_a_person(desk: Desk, kind: str) -> None:
    """After the schedule and thirty days it is indeterminate: its money stays reserved, it is counted, and not asked about again."""
    desk.world.fault("refund_query", kind, times=None)
    before = logs.counters["refunds.indeterminate"]

    await desk.finish()
    desk.world.rt.clock.advance(days=365)

    assert await desk.poll() == 0
    assert questions(desk) == len(SCHEDULE) + 30
    assert await desk.refunds() == [("R-1", "indeterminate")]
    assert await desk.holds() == [("400.00", "0.00")]
    assert await desk.sums() == ("paid", "0.00")
    assert logs.counters["refunds.indeterminate"] == before + 1


@pytest.mark.case("S62")
@pytest.mark.parametrize("decision", ["applied", "not_applied"])
async def test_a_person_settles_what_the_provider_never_said(desk: Desk, decision: Decision) -> None:
    """Long after the call was answered: asked about again under the id that they found, or failed for good. The stored answer stays."""
    desk.world.fault("refund_query", "processing", times=len(SCHEDULE) + 30)
    await desk.finish()
    (ref_id,) = desk.world.simulator.api.refunds.by_ref_id

    await desk.resolve(decision, **({"provider_refund_id": ref_id} if decision == "applied" else {}))
    await desk.finish()
    again = await desk.refund("key-1")

    assert (again.status, again.replayed) == (202, True)
    assert await desk.refunds() == [("R-1", "succeeded" if decision == "applied" else "failed")]
    assert await desk.holds() == [("0.00", "400.00" if decision == "applied" else "0.00")]
    with pytest.raises(StateConflict):
        await desk.resolve("not_applied" if decision == "applied" else "applied", provider_refund_id=ref_id)


# What it ends as


async def test_a_cancelled_refund_frees_its_money(desk: Desk) -> None:
    """It failed, which is told with the provider's name for it; so much can be refunded again, under another reference."""
    desk.world.simulator.api.refunds.decide(ref_id(desk), "cancelled")
    await desk.finish()

    (told,) = await desk.told("order.refund_failed")
    assert await desk.refunds() == [("R-1", "failed")]
    assert await desk.holds() == [("0.00", "0.00")]
    assert await desk.sums() == ("paid", "0.00")
    assert (told["status"], told["amount_refunded"], told["operation_id"], told["sequence"]) == ("paid", "0.00", ref_id(desk), 2)
    assert told["provider_transaction_id"] == await desk.world.value("SELECT provider_transaction_id FROM payments")
    assert (await desk.refund("key-2", "R-2", "1000.00")).status == 202


async def test_a_final_answer_is_told_once(desk: Desk) -> None:
    """One event with one name for each end of a refund; nothing is asked afterwards."""
    await desk.finish()
    asked = questions(desk)
    desk.world.rt.clock.advance(days=2)

    assert await desk.poll() == 0
    assert questions(desk) == asked
    assert await desk.world.event_types() == ["order.paid", "order.refunded"]
    assert await desk.world.value("SELECT event_count FROM orders") == 2


# By whom


async def claimed(desk: Desk) -> refund_polls.Due:
    """The lease on the one refund that is due."""
    (due,) = await refund_polls.claim(desk.world.rt.maintenance_db, limit=16, lease_seconds=45)
    return due


async def test_a_refund_under_a_lease_is_nobody_elses(desk: Desk) -> None:
    """Until the lease is over, even when its holder died; then the next one takes it."""
    desk.world.rt.clock.advance(seconds=60)
    await claimed(desk)

    assert await desk.poll() == 0

    desk.world.rt.clock.advance(seconds=45)

    assert await desk.poll() == 1


@pytest.mark.parametrize("status", ["refunded", "cancelled", "processing"])
async def test_who_was_too_slow_changes_nothing(desk: Desk, status: str) -> None:
    """Its fence is an old one: the other's ask counts, and what it found."""
    desk.world.simulator.api.refunds.decide(ref_id(desk), status)
    desk.world.rt.clock.advance(seconds=60)
    late = await claimed(desk)
    desk.world.rt.clock.advance(seconds=45)
    current = await claimed(desk)

    await refund_polls.poll(desk.poller, late)
    between = await desk.refunds(), await desk.world.value("SELECT polled FROM refunds")
    desk.world.simulator.api.refunds.decide(ref_id(desk), "refunded")
    await refund_polls.poll(desk.poller, current)

    assert between == ([("R-1", "processing")], 0)
    assert await desk.refunds() == [("R-1", "succeeded")]
    assert await desk.holds() == [("0.00", "400.00")]


@pytest.mark.parametrize("moment", ["statement_1", "statement_2", "statement_3", "statement_4", "before_commit", "after_commit"])
async def test_a_lost_connection_counts_a_refund_once(desk: Desk, moment: str) -> None:
    """Refund, payment, order and event are one commit, run again whole or found to be there."""
    desk.world.simulator.api.refunds.decide(ref_id(desk), "refunded")
    point = f"refund_polls.record:{moment}"

    async def lose() -> None:
        del desk.world.rt.faults.on[point]
        raise psycopg.OperationalError("no SQLSTATE")

    desk.world.rt.faults.on[point] = lose
    desk.world.rt.clock.advance(seconds=60)
    await desk.poll()

    assert point not in desk.world.rt.faults.on
    assert await desk.refunds() == [("R-1", "succeeded")]
    assert await desk.holds() == [("0.00", "400.00")]
    assert await desk.sums() == ("partially_refunded", "400.00")
    assert await desk.world.event_types() == ["order.paid", "order.refunded"]
    assert questions(desk) == 1


@pytest.mark.parametrize("moment", ["before_commit", "after_commit"])
async def test_a_question_whose_commit_was_lost_counts_once(desk: Desk, moment: str) -> None:
    """The next one is due after one step of the schedule, not two."""
    point = f"refund_polls.record:{moment}"

    async def lose() -> None:
        del desk.world.rt.faults.on[point]
        raise psycopg.OperationalError("no SQLSTATE")

    desk.world.rt.faults.on[point] = lose
    desk.world.rt.clock.advance(seconds=60)
    await desk.poll()

    assert await desk.world.rows("SELECT polled, lease_expires_at FROM refunds") == [{"polled": 1, "lease_expires_at": None}]
    assert await desk.world.value("SELECT extract(epoch FROM due_at - ipn_now())::int FROM refunds") in range(295, 301)


async def test_a_provider_that_hangs_holds_no_slot_of_the_others(db: Database, make: Make) -> None:
    """Each source has at most four in flight, those of other processes too, however long its queue; the others get the rest."""
    await make.source(name="slow")
    for source, count in (("slow", 10), ("shop-main", 3)):
        for number in range(count):
            payment = await make.payment(source_id=source)
            leased = {"lease_expires_at": ahead(seconds=30)} if source == "slow" and number == 0 else {}
            await make.refund(
                payment_id=payment["id"],
                order_id=payment["order_id"],
                status="processing",
                provider_refund_id=f"{source}-{number}",
                due_at=ago(seconds=100 - number) if source == "slow" else ago(seconds=1),
                **leased,
            )

    found = await refund_polls.claim(db, limit=16, lease_seconds=45)

    assert sorted(due.source_id for due in found) == ["shop-main"] * 3 + ["slow"] * 3
    assert sorted(due.provider_refund_id for due in found if due.source_id == "slow") == ["slow-1", "slow-2", "slow-3"]
    assert await refund_polls.claim(db, limit=16, lease_seconds=45) == []


async def test_few_slots_are_dealt_in_turn(db: Database, make: Make) -> None:
    """Two slots for two sources are one each, though one has the older refunds."""
    await make.source(name="slow")
    for source, seconds in (("slow", 100), ("slow", 99), ("shop-main", 1)):
        payment = await make.payment(source_id=source)
        given = {"payment_id": payment["id"], "order_id": payment["order_id"], "due_at": ago(seconds=seconds)}
        await make.refund(**given, status="processing", provider_refund_id="R")

    found = await refund_polls.claim(db, limit=2, lease_seconds=45)

    assert sorted(due.source_id for due in found) == ["shop-main", "slow"]


# Told by the provider as well

ECHO = "echo-shop"
BUSINESS = "shop@example.test"
PAID = {
    "mc_gross": "1000.00",
    "payment_date": "23:03:30 Jul 13, 2026 PDT",
    "payment_status": "Completed",
    "charset": "windows-1252",
    "business": BUSINESS,
    "custom": ORDER,
    "txn_id": "8DEMO0001",
    "mc_currency": "BDT",
    "ipn_track_id": "demo0a1b2c3d4",
}
REFUNDED = PAID | {"payment_status": "Refunded", "txn_id": "RF-1", "parent_txn_id": "8DEMO0001", "ipn_track_id": "demo0a1b2c3d5"}


class Refunds(adapters.EchoPay):
    """`echopay` with refunds that are asked for, and told by a notification of its own as well, `meanwhile` or later."""

    answer: RefundAnswer = RefundAccepted("RF-1")
    status: RefundStatus = RefundSucceeded()
    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def refund(self, ask: Any, config: Any, request: RefundRequest) -> Any:  # noqa: ARG002
        if self.meanwhile:
            await self.meanwhile()
        return self.answer

    async def refund_status(self, ask: Any, config: Any, provider_refund_id: str, provider_transaction_id: str) -> Any:  # noqa: ARG002
        return self.status


@dataclass
class Echo:
    """A paid order at `echopay`, and what its notifications end as."""

    desk: Desk
    host: adapters.EchoHost
    provider: Refunds

    async def tell(self, fields: dict[str, str]) -> tuple[str, str | None]:
        """A genuine notification arrives and is worked on."""
        body = encode(fields)
        self.host.sent.add(body)
        self.desk.world.rt.clock.advance(seconds=1)
        receipt = await self.desk.world.notify(body, source=ECHO, headers=FORM)
        await self.desk.world.drain()
        return await self.desk.world.outcome(receipt)

    async def told_refund(self, amount: str = "400.00") -> tuple[str, str | None]:
        """The provider says that so much went back."""
        return await self.tell(REFUNDED | {"mc_gross": f"-{amount}"})

    async def counted_once(self) -> bool:
        """Whether 400 of 1000 went back, in one refund that the merchant knows by its reference, told by one event."""
        return (
            await self.desk.refunds() == [("R-1", "succeeded")]
            and await self.desk.holds() == [("0.00", "400.00")]
            and await self.desk.sums() == ("partially_refunded", "400.00")
            and await self.desk.world.event_types(ORDER) == ["order.paid", "order.refunded"]
        )


@pytest.fixture
async def echo(world: World) -> AsyncIterator[Echo]:
    """The provider, a source there, and one paid order of 1000.00."""
    with adapters.installed():
        provider = Refunds()
        discovered()[provider.name] = provider
        async with adapters.echo_host() as host:
            given = {"business": BUSINESS, "base_url": host.url}
            await sources.create(world.rt.db, world.rt.vault, TENANT, ECHO, provider=provider.name, given=given, actor="test")
            opened = Echo(Desk(world), host, provider)
            await world.order(ORDER, source=ECHO)
            await opened.tell(PAID)
            yield opened


@pytest.mark.case("B79")
async def test_a_notification_of_our_own_refund_is_a_duplicate(echo: Echo) -> None:
    """While it is processed and after it: the poll counts it, and the provider's word adds nothing."""
    await echo.desk.refund("key-1")
    during = await echo.told_refund()
    await echo.desk.finish()
    after = await echo.tell(REFUNDED | {"mc_gross": "-400.00", "ipn_track_id": "another"})

    assert (during, after) == (("duplicate", None), ("duplicate", None))
    assert await echo.counted_once()


@pytest.mark.case("B79")
async def test_a_notification_that_overtakes_the_answer_counts_the_refund(echo: Echo) -> None:
    """It came while we waited for the provider: then the refund is that one, and what the notification booked is not booked again."""
    outcomes = []

    async def meanwhile() -> None:
        outcomes.append(await echo.told_refund())

    echo.provider.meanwhile = meanwhile
    answer = await echo.desk.refund("key-1")
    await echo.desk.finish()

    assert (answer.status, outcomes) == (202, [("applied", None)])
    assert await echo.counted_once()
    assert await echo.desk.world.rows("SELECT provider_refund_id, polled FROM refunds") == [{"provider_refund_id": "RF-1", "polled": 0}]


@pytest.mark.case("B79", "S62")
async def test_a_notification_while_nobody_knows_is_what_a_person_may_find(echo: Echo) -> None:
    """It booked the money under the provider's name; told that this was the refund, we count no second one."""
    echo.provider.answer = NoOutcome("timeout")
    refused = await echo.desk.refused("key-1")
    outcome = await echo.told_refund()

    await echo.desk.resolve("applied", provider_refund_id="RF-1")
    answer = await echo.desk.refund("key-1")
    await echo.desk.finish()

    assert isinstance(refused, IdempotencyIndeterminate)
    assert outcome == ("applied", None)
    assert (answer.status, answer.replayed) == (202, True)
    assert await echo.counted_once()


@pytest.mark.case("B79")
async def test_another_sum_under_that_name_is_not_taken_for_the_refund(echo: Echo) -> None:
    """The provider told of 300 under the name that it now gives to 400: nobody knows, so a person looks."""

    async def meanwhile() -> None:
        await echo.told_refund("300.00")

    echo.provider.meanwhile = meanwhile
    refused = await echo.desk.refused("key-1")

    assert isinstance(refused, IdempotencyIndeterminate)
    assert await echo.desk.refunds() == [("R-1", "indeterminate"), ("provider:RF-1", "succeeded")]
    assert await echo.desk.holds() == [("400.00", "300.00")]


async def test_one_that_is_not_final_yet_is_asked_about_again(echo: Echo) -> None:
    """Pending and unreachable are the same: nothing is known yet."""
    await echo.desk.refund("key-1")
    for status in (RefundPending(), NoOutcome("not_connected", sent=False)):
        echo.provider.status = status
        echo.desk.world.rt.clock.advance(seconds=300)
        await echo.desk.poll()
    waiting = await echo.desk.world.value("SELECT polled FROM refunds")
    echo.provider.status = RefundSucceeded()
    await echo.desk.finish()

    assert waiting == 2
    assert await echo.counted_once()
