"""Giving money back: reserved, asked for once, and never twice, whatever is lost on the way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors as pg

from ipn_gateway import idempotency_acts, ids, logs, refunds, resolutions, sources
from ipn_gateway.db import Database
from ipn_gateway.errors import IdempotencyIndeterminate, IdempotencyInProgress, Overloaded, StateConflict, ValidationFailed
from ipn_gateway.operations import Downstream
from tests import world as worlds
from tests.make import NOW, Make
from tests.refunding import ORDER, Desk, members, nowhere
from tests.world import SOURCE, TENANT

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from tests.world import World

UNCLEAR: list[tuple[str, dict[str, Any]]] = [
    ("html", {}),
    ("empty", {}),
    ("status500", {}),
    ("reset", {}),
    ("record_then_reset", {}),
    ("record_then_status500", {}),
    ("fields", {"fields": {"status": "processing", "refund_ref_id": ""}}),
    ("apiconnect", {"value": "FAILED"}),
    ("apiconnect", {"value": "INVALID_REQUEST"}),
    ("fields", {"fields": {"status": ""}}),
    ("fields", {"fields": {"refund_ref_id": ""}}),
    ("fields", {"fields": {"bank_tran_id": "another"}}),
]


@pytest.fixture
async def desk(world: World) -> Desk:
    """A gateway with one paid order of 1000.00."""
    opened = Desk(world)
    await opened.paid()
    return opened


# One refund


@pytest.mark.case("S57", "S86")
async def test_a_refund_is_reserved_asked_for_once_and_accepted(desk: Desk) -> None:
    """202 with what never changes; the money is reserved, the provider has our key, and nobody is told before it is final."""
    answer = await desk.refund("key-1")

    (refund,) = (await desk.order()).refunds
    assert refunds.CREATE.downstream is Downstream.NONE
    assert answer.status == 202
    assert dict(answer.headers)["Location"] == "/v1/orders/ORD-1"
    assert members(answer) == {
        "refund_id": refund.refund_id,
        "reference": "R-1",
        "order_id": "ORD-1",
        "payment_id": refund.payment_id,
        "amount": "400.00",
        "currency": "BDT",
    }
    assert (refund.status, refund.reason, len(refund.provider_refund_id or "")) == ("processing", "sent back", 12)
    assert await desk.holds() == [("400.00", "0.00")]
    assert await desk.sums() == ("paid", "0.00")
    assert list(desk.calls.values()) == [1]
    assert await desk.world.event_types() == ["order.paid"]
    assert await desk.world.value("SELECT extract(epoch FROM due_at - ipn_now())::int FROM refunds") in range(55, 61)


@pytest.mark.case("S86")
async def test_parts_add_up_to_the_whole(desk: Desk) -> None:
    """400 and 600 of 1000: partially refunded, then refunded; each event has the sums after it and the provider's name for the refund."""
    await desk.refund("key-1", "R-1", "400.00")
    await desk.finish()
    first = await desk.sums()
    await desk.refund("key-2", "R-2", "600.00")
    await desk.finish()

    told = await desk.told("order.refunded")
    found = (await desk.order()).refunds
    assert (first, await desk.sums()) == (("partially_refunded", "400.00"), ("refunded", "1000.00"))
    assert [(data["previous_status"], data["status"], data["amount_refunded"], data["sequence"]) for data in told] == [
        ("paid", "partially_refunded", "400.00", 2),
        ("partially_refunded", "refunded", "1000.00", 3),
    ]
    assert [data["operation_id"] for data in told] == [refund.provider_refund_id for refund in found]
    assert [refund.status for refund in found] == ["succeeded", "succeeded"]
    assert await desk.holds() == [("0.00", "1000.00")]
    assert [f"{amount:.2f}" for amount in desk.moved] == ["400.00", "600.00"]


@pytest.mark.case("S86", "S61")
async def test_a_repeat_gets_the_first_answer_however_far_the_refund_is(desk: Desk) -> None:
    """The same bytes while it is processed, when it has succeeded and months later: how far it is, its order says."""
    first = await desk.refund("key-1")
    during = await desk.refund("key-1")
    await desk.finish()
    after = await desk.refund("key-1")

    assert (during.replayed, after.replayed) == (True, True)
    assert first.body == during.body == after.body
    assert first.headers == during.headers == after.headers
    assert list(desk.calls.values()) == [1]


@pytest.mark.case("S78", "S68")
async def test_a_declined_refund_is_final_and_its_money_free(desk: Desk) -> None:
    """201 with the failed refund, told as `order.refund_failed`, repeated without asking; a corrected one has a key of its own."""
    desk.unclear("failed", value="no balance")
    first = await desk.refund("key-1")
    again = await desk.refund("key-1")
    shown = (await desk.order()).refunds[0].model_dump(mode="json")
    corrected = await desk.refund("key-2", "R-2")

    (told,) = await desk.told("order.refund_failed")
    assert (first.status, again.status, corrected.status) == (201, 201, 202)
    assert (again.replayed, again.body) == (True, first.body)
    assert members(first) == shown
    assert (shown["status"], shown["provider_refund_id"], shown["failure"]) == ("failed", None, "failed_no_balance")
    assert (told["status"], told["previous_status"], told["amount_refunded"], told["sequence"]) == ("paid", "paid", "0.00", 2)
    assert await desk.refunds() == [("R-1", "failed"), ("R-2", "processing")]
    assert await desk.holds() == [("400.00", "0.00")]
    assert list(desk.calls.values()) == [1, 1]


async def test_an_order_in_another_currency_is_refunded_in_its_own(world: World) -> None:
    """What is booked is in dollars; the provider gives back the same share of what it settled."""
    desk = Desk(world)
    await desk.paid(amount="100.00", currency="USD")

    answer = await desk.refund("key-1", amount="25.00")
    await desk.finish()

    settled = await world.value("SELECT settled_amount FROM payments")
    assert (members(answer)["amount"], members(answer)["currency"]) == ("25.00", "USD")
    assert await desk.sums() == ("partially_refunded", "25.00")
    assert desk.moved == [settled / 4]


async def test_what_a_disabled_source_took_can_be_given_back(desk: Desk) -> None:
    """It takes no new orders; its payments stay the merchant's to refund."""
    await sources.disable(desk.world.rt.db, TENANT, SOURCE, actor="test")

    assert (await desk.refund("key-1")).status == 202


# What is not refunded


@pytest.mark.case("S78")
async def test_only_what_was_paid_can_be_given_back(world: World) -> None:
    """A pending order is a stored 409, and the provider is not asked."""
    desk = Desk(world)
    await world.order(ORDER)

    first, again = await desk.refund("key-1"), await desk.refund("key-1")

    assert (first.status, again.status, again.replayed) == (409, 409, True)
    assert "which is pending" in members(first)["detail"]
    assert desk.calls == {}
    assert await desk.refunds() == []


async def test_more_than_is_left_is_refused_with_what_is_left(desk: Desk) -> None:
    """Refunds that are not final count; nothing is reserved by one that is refused."""
    await desk.refund("key-1", "R-1", "400.00")
    answer = await desk.refund("key-2", "R-2", "600.01")
    payment_id = (await desk.order()).payments[0].payment_id

    assert answer.status == 409
    assert f"What is left: 600.00 BDT of {payment_id}." in members(answer)["detail"]
    assert await desk.holds() == [("400.00", "0.00")]
    assert (await desk.refund("key-3", "R-3", "600.00")).status == 202
    assert "What is left: nothing." in members(await desk.refund("key-4", "R-4", "0.01"))["detail"]


@pytest.mark.case("S96")
async def test_a_refunded_order_has_nothing_left(desk: Desk) -> None:
    """What counts is what is left of its payments."""
    await desk.refund("key-1", amount="1000.00")
    await desk.finish()

    answer = await desk.refund("key-2", "R-2", "0.01")

    assert (answer.status, "What is left: nothing." in members(answer)["detail"]) == (409, True)


async def test_an_order_on_hold_can_be_refunded(world: World) -> None:
    """A person who will not take the risk gives the money back."""
    desk = Desk(world)
    await world.order(ORDER)
    await world.notify(world.pay(ORDER, risk=True))
    await world.drain()

    await desk.refund("key-1", amount="1000.00")
    await desk.finish()

    assert await desk.sums() == ("refunded", "1000.00")


# Which payment


async def test_a_second_payment_is_given_back_by_its_name(desk: Desk) -> None:
    """The order stays paid with its sums, the event is sent all the same; without its name it is never touched."""
    await desk.payment(ORDER, "1000.00")
    surplus = await desk.world.value("SELECT id FROM payments WHERE status = 'unapplied'")

    answer = await desk.refund("key-1", "R-1", "1000.00", payment=surplus)
    await desk.finish()

    (told,) = await desk.told("order.refunded")
    assert members(answer)["payment_id"] == ids.show(ids.PAYMENT, surplus)
    assert await desk.sums() == ("paid", "0.00")
    assert await desk.holds() == [("0.00", "0.00"), ("0.00", "1000.00")]
    assert (told["status"], told["previous_status"], told["amount_refunded"], told["sequence"]) == ("paid", "paid", "0.00", 3)
    assert (await desk.refund("key-2", "R-2", "1000.00")).status == 202
    assert await desk.holds() == [("1000.00", "0.00"), ("0.00", "1000.00")]


async def test_a_second_payment_can_be_given_back_when_the_order_is_refunded(desk: Desk) -> None:
    """Whatever the order's status: it is money that nobody is owed."""
    await desk.payment(ORDER, "250.00")
    surplus = await desk.world.value("SELECT id FROM payments WHERE status = 'unapplied'")
    await desk.refund("key-1", "R-1", "1000.00")
    await desk.finish()

    answer = await desk.refund("key-2", "R-2", "250.00", payment=surplus)
    await desk.finish()

    assert answer.status == 202
    assert await desk.sums() == ("refunded", "1000.00")
    assert await desk.holds() == [("0.00", "1000.00"), ("0.00", "250.00")]


async def test_a_named_payment_is_the_one_that_pays(desk: Desk) -> None:
    """With too little left in it the refund is refused, whatever the others hold."""
    await desk.payment(ORDER, "100.00")
    surplus = await desk.world.value("SELECT id FROM payments WHERE status = 'unapplied'")

    answer = await desk.refund("key-1", payment=surplus)

    assert answer.status == 409
    assert members(answer)["detail"].endswith(f"What is left: 100.00 BDT of {ids.show(ids.PAYMENT, surplus)}.")


# A reference refunds once


@pytest.mark.case("S96", "S97")
async def test_another_key_does_not_refund_a_reference_again(desk: Desk) -> None:
    """409 with the name of the refund there is, whatever the amount and however it ended; another order has references of its own."""
    first = members(await desk.refund("key-1"))
    second = await desk.refund("key-2")
    await desk.paid("ORD-2")

    assert second.status == 409
    assert members(second)["refund_id"] == first["refund_id"]
    assert first["refund_id"] in members(second)["detail"]
    assert (await desk.refund("key-3", order_id="ORD-2")).status == 202
    assert await desk.holds() == [("400.00", "0.00"), ("400.00", "0.00")]
    assert sorted(desk.calls.values()) == [1, 1]


@pytest.mark.case("S96", "S97", "S95")
async def test_a_late_retry_is_stopped_by_the_reference(desk: Desk) -> None:
    """Thirty days later nobody remembers the key: 409 naming the refund, no second one, also when all money went back."""
    first = members(await desk.refund("key-1", amount="1000.00"))
    await desk.finish()
    desk.world.rt.clock.advance(days=30)
    async with desk.world.rt.db.transaction("test.prune") as tx:
        await tx.execute("DELETE FROM idempotency_keys")

    late = await desk.refund("key-1", amount="1000.00")

    assert (late.status, members(late)["refund_id"]) == (409, first["refund_id"])
    assert list(desk.calls.values()) == [1]
    assert await desk.sums() == ("refunded", "1000.00")


@pytest.mark.case("S97")
async def test_that_constraint_lasts(desk: Desk) -> None:
    """It is one of the database, in a table that is neither partitioned nor ever pruned."""
    found = await desk.world.rows(
        """SELECT pg_get_constraintdef(c.oid) AS rule, t.relkind::text AS kind
             FROM pg_constraint AS c JOIN pg_class AS t ON t.oid = c.conrelid WHERE c.conname = 'refunds_reference_key'"""
    )

    assert found == [{"rule": "UNIQUE (tenant_id, order_id, reference)", "kind": "r"}]


# The outcome is not known


@pytest.mark.case("S59", "S61", "S68")
@pytest.mark.parametrize(("kind", "given"), UNCLEAR)
async def test_an_unclear_answer_is_never_asked_for_again(desk: Desk, kind: str, given: dict[str, Any]) -> None:
    """409 with the name to resolve it by and a long wait; the money stays reserved, and repeats ask nobody."""
    desk.unclear(kind, **given)
    first = await desk.refused("key-1")
    repeats = [await desk.refused("key-1") for _ in range(3)]

    key_id = ids.show(ids.IDEMPOTENCY_KEY, await desk.world.value("SELECT id FROM idempotency_keys"))
    for refused in (first, *repeats):
        assert isinstance(refused, IdempotencyIndeterminate)
        assert refused.members == {"reconciliation_id": key_id}
        assert refused.retry_after_seconds == 3600
    assert await desk.key() == ("indeterminate", "asking")
    assert await desk.refunds() == [("R-1", "indeterminate")]
    assert await desk.holds() == [("400.00", "0.00")]
    assert await desk.world.event_types() == ["order.paid"]
    assert list(desk.calls.values()) == [1]


@pytest.mark.case("S61")
async def test_a_hundred_repeats_ask_nobody(desk: Desk) -> None:
    """Nor does a day: what is not known waits for a person."""
    desk.unclear("record_then_reset")
    await desk.refused("key-1")
    for _ in range(100):
        await desk.refused("key-1")
    desk.world.rt.clock.advance(days=1)
    await desk.refused("key-1")
    await desk.poll()

    assert list(desk.calls.values()) == [1]
    assert desk.world.simulator.api.refund_queries.total() == 0


@pytest.mark.case("S59", "S68")
async def test_silence_is_no_answer(database_url: str, clock: Clock, faults: Faults) -> None:
    """After the time for money calls the outcome is unknown; that the provider never did it makes no difference."""
    async with worlds.opened(database_url, clock, faults, provider_money_timeout_seconds=0.2) as world:
        desk = Desk(world)
        await desk.paid()
        desk.unclear("hang")

        refused = await desk.refused("key-1")

        assert isinstance(refused, IdempotencyIndeterminate)
        assert await desk.refunds() == [("R-1", "indeterminate")]


@pytest.mark.case("S68", "S80", "S67", "S58")
async def test_a_call_that_never_left_is_made_again_under_the_same_key(desk: Desk) -> None:
    """503 that is not stored, the money reserved; the repeat asks for the same refund with the same downstream key, and succeeds."""
    keys = logged_keys(desk)
    await desk.move_provider(nowhere())
    first = await desk.refused("key-1")
    waiting = await desk.key(), await desk.refunds(), await desk.holds()
    again = await desk.refused("key-1")
    await desk.move_provider(desk.world.provider_url)

    answer = await desk.refund("key-1")

    assert [type(first), type(again), answer.status] == [Overloaded, Overloaded, 202]
    assert waiting == (("in_progress", "unsent"), [("R-1", "pending")], [("400.00", "0.00")])
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert desk.calls == {keys[0]: 1}
    assert await desk.refunds() == [("R-1", "processing")]
    assert await desk.holds() == [("400.00", "0.00")]


def logged_keys(desk: Desk) -> list[str]:
    """Our key of each call, sent or not."""
    keys: list[str] = []
    ask_for = desk.world.rt.transport.ask_for

    def asked_for(*, timeout_seconds: float) -> Any:
        ask = ask_for(timeout_seconds=timeout_seconds)

        async def noted(*given: Any, params: Any = None, **named: Any) -> Any:
            keys.extend([params["refund_trans_id"]] if params and "refund_trans_id" in params else [])
            return await ask(*given, params=params, **named)

        return noted

    desk.world.rt.transport.ask_for = asked_for  # type: ignore[method-assign]  # the real one does the work
    return keys


@pytest.mark.case("S67")
async def test_our_key_is_the_same_when_everything_here_is_lost(desk: Desk) -> None:
    """Rows deleted as by a failover: the provider is told the same refund again, moves nothing twice, and the outcome is unknown."""
    await desk.refund("key-1")
    async with desk.world.rt.db.transaction("test.lose") as tx:
        await tx.execute("DELETE FROM idempotency_keys")
        await tx.execute("DELETE FROM refunds")
        await tx.execute("UPDATE payments SET amount_reserved = 0")

    refused = await desk.refused("key-1")

    assert isinstance(refused, IdempotencyIndeterminate)
    assert list(desk.calls.values()) == [2]
    assert [len(key) for key in desk.calls] == [30]
    assert [f"{amount:.2f}" for amount in desk.moved] == ["400.00"]


# A person finds out


@pytest.mark.case("S62")
async def test_what_a_person_found_in_the_panel_is_asked_about_at_once(desk: Desk) -> None:
    """`applied` with the provider's id: the repeat gets the 202, and the polls bring the refund to its end."""
    desk.unclear("record_then_reset")
    await desk.refused("key-1")
    (ref_id,) = desk.world.simulator.api.refunds.by_ref_id

    await desk.resolve("applied", provider_refund_id=ref_id)
    answer = await desk.refund("key-1")
    await desk.poll()
    await desk.finish()

    assert (answer.status, answer.replayed) == (202, True)
    assert members(answer)["reference"] == "R-1"
    assert await desk.refunds() == [("R-1", "succeeded")]
    assert await desk.sums() == ("partially_refunded", "400.00")
    assert await desk.world.event_types() == ["order.paid", "order.refunded"]
    assert list(desk.calls.values()) == [1]


@pytest.mark.case("S62", "S68")
async def test_what_did_not_happen_leaves_its_reference_behind(desk: Desk) -> None:
    """`not_applied`: the money is free, the refund failed and told; the same key is a 409 naming it, another reference refunds."""
    desk.unclear("html")
    await desk.refused("key-1")

    await desk.resolve("not_applied")
    again = await desk.refund("key-1")
    another = await desk.refund("key-2", "R-2", "1000.00")

    (failed, _) = (await desk.order()).refunds
    assert (again.status, members(again)["refund_id"]) == (409, failed.refund_id)
    assert another.status == 202
    assert await desk.refunds() == [("R-1", "failed"), ("R-2", "processing")]
    assert await desk.holds() == [("1000.00", "0.00")]
    assert await desk.world.event_types() == ["order.paid", "order.refund_failed"]
    assert list(desk.calls.values()) == [1, 1]


@pytest.mark.case("S62")
@pytest.mark.parametrize("evidence", [{}, {"provider_refund_id": ""}, {"provider_refund_id": 7}, {"provider_refund_id": "a b"}])
async def test_applied_needs_the_providers_name_for_it(desk: Desk, evidence: dict[str, Any]) -> None:
    """Without it nobody could be asked; nothing changes."""
    desk.unclear("html")
    await desk.refused("key-1")

    with pytest.raises(ValidationFailed):
        await desk.resolve("applied", **evidence)

    assert await desk.refunds() == [("R-1", "indeterminate")]
    assert await desk.key() == ("indeterminate", "asking")


@pytest.mark.case("S62")
async def test_one_refund_of_the_provider_is_not_two_of_ours(desk: Desk) -> None:
    """The id of another refund of the order proves nothing about this one."""
    await desk.refund("key-1", "R-1", "100.00")
    (ref_id,) = desk.world.simulator.api.refunds.by_ref_id
    desk.unclear("html")
    await desk.refused("key-2", "R-2", "100.00")

    with pytest.raises(StateConflict, match="Another refund"):
        await desk.resolve("applied", provider_refund_id=ref_id)

    assert await desk.refunds() == [("R-1", "processing"), ("R-2", "indeterminate")]


@pytest.mark.case("S62", "S60")
async def test_a_call_that_never_left_can_be_given_up(desk: Desk) -> None:
    """Its client never came again: a person sets it to not applied, and the money is free."""
    await desk.move_provider(nowhere())
    await desk.refused("key-1")
    async with desk.world.rt.db.transaction("test.abandon") as tx:  # the resolver takes those in progress too
        await tx.execute("UPDATE idempotency_keys SET state = 'indeterminate', indeterminate_at = ipn_now(), lease_expires_at = NULL")

    await desk.resolve("not_applied")

    assert await desk.refunds() == [("R-1", "failed")]
    assert await desk.holds() == [("0.00", "0.00")]


@pytest.mark.case("S62")
async def test_a_key_that_has_asked_for_nothing_has_nothing_to_settle(desk: Desk) -> None:
    """Whoever died before the intent left no refund: there is none to apply, and giving up changes no money."""
    given = {"tenant_id": TENANT, "operation": refunds.CREATE.name, "state": "indeterminate", "indeterminate_at": NOW}
    await Make(desk.world.rt.db).idempotency_key(**given)

    with pytest.raises(StateConflict, match="asked for no refund"):
        await desk.resolve("applied", provider_refund_id="R")
    await desk.resolve("not_applied")

    assert await desk.key() == ("in_progress", "started")
    assert await desk.holds() == [("0.00", "0.00")]
    assert await desk.world.event_types() == ["order.paid"]


# Crashes, and commits of unknown outcome


class Crash(Exception):
    """A process that ends there."""


def crashing(desk: Desk, point: str, error: BaseException) -> None:
    """The error is raised the first time that the point is passed."""

    async def crash() -> None:
        del desk.world.rt.faults.on[point]
        raise error

    desk.world.rt.faults.on[point] = crash


@pytest.mark.case("S64", "S60")
@pytest.mark.parametrize("point", [*(f"statement_{number}" for number in range(1, 7)), "before_commit"])
async def test_a_crash_before_the_intent_leaves_nothing_and_is_taken_over(desk: Desk, point: str) -> None:
    """Refund, reservation and intent are one: none of them is there, and the repeat refunds once."""
    crashing(desk, f"refunds.reserve:{point}", Crash())
    with pytest.raises(Crash):
        await desk.refund("key-1")
    between = await desk.refunds(), await desk.holds()

    answer = await desk.refund("key-1")

    assert between == ([], [("0.00", "0.00")])
    assert answer.status == 202
    assert list(desk.calls.values()) == [1]


@pytest.mark.case("S64", "S59")
@pytest.mark.parametrize("point", [*(f"statement_{number}" for number in range(1, 6)), "before_commit"])
async def test_a_crash_behind_the_call_leaves_the_intent(desk: Desk, point: str) -> None:
    """In progress until the lease is over, then unknown: the provider did it, and is not asked again."""
    crashing(desk, f"refunds.record:{point}", Crash())
    with pytest.raises(Crash):
        await desk.refund("key-1")
    during = await desk.refused("key-1")
    state = await desk.key(), await desk.refunds(), await desk.holds()
    desk.world.rt.clock.advance(seconds=desk.layer.lease_seconds)

    after = await desk.refused("key-1")

    assert isinstance(during, IdempotencyInProgress)
    assert state == (("in_progress", "asking"), [("R-1", "pending")], [("400.00", "0.00")])
    assert isinstance(after, IdempotencyIndeterminate)
    assert await desk.refunds() == [("R-1", "indeterminate")]
    assert await desk.holds() == [("400.00", "0.00")]
    assert list(desk.calls.values()) == [1]


RERUN = [pg.SerializationFailure("40001"), pg.AdminShutdown("57P01"), psycopg.OperationalError("no SQLSTATE")]


@pytest.mark.case("S64", "S61")
@pytest.mark.parametrize("phase", ["reserve", "record"])
@pytest.mark.parametrize("moment", ["statement_2", "before_commit", "after_commit"])
async def test_a_lost_connection_asks_nobody_again(desk: Desk, phase: str, moment: str) -> None:
    """A phase is run again whole, or finds that it was committed; the call is not part of it."""
    for number, error in enumerate(RERUN):
        crashing(desk, f"refunds.{phase}:{moment}", error)

        answer = await desk.refund(f"key-{number}", f"R-{number}", "100.00")

        assert answer.status == 202, error
    assert list(desk.calls.values()) == [1, 1, 1]
    assert await desk.holds() == [("300.00", "0.00")]


@pytest.mark.case("S64")
@pytest.mark.parametrize("moment", ["statement_1", "before_commit", "after_commit"])
async def test_a_doubt_whose_commit_was_lost_is_one_doubt(desk: Desk, moment: str) -> None:
    """The unknown outcome is written once, and told as that."""
    desk.unclear("html")
    crashing(desk, f"refunds.record:{moment}", psycopg.OperationalError("no SQLSTATE"))
    before = logs.counters["idempotency.indeterminate"]

    refused = await desk.refused("key-1")

    assert isinstance(refused, IdempotencyIndeterminate)
    assert logs.counters["idempotency.indeterminate"] == before + 1
    assert await desk.refunds() == [("R-1", "indeterminate")]


@pytest.mark.case("S59", "S61")
async def test_who_answers_after_the_lease_writes_nothing(desk: Desk) -> None:
    """While the provider thought, the lease ended and the outcome became unknown: so it stays, and the late answer is in the log."""
    other: list[Exception] = []

    async def overtaken() -> None:
        del desk.world.rt.faults.on["transport.ask:after"]
        desk.world.rt.clock.advance(seconds=desk.layer.lease_seconds)
        other.append(await desk.refused("key-1"))

    desk.world.rt.faults.on["transport.ask:after"] = overtaken
    refused = await desk.refused("key-1")

    assert [type(error) for error in (*other, refused)] == [IdempotencyIndeterminate, IdempotencyIndeterminate]
    assert await desk.refunds() == [("R-1", "indeterminate")]
    assert await desk.world.rows("SELECT provider_refund_id FROM refunds") == [{"provider_refund_id": None}]
    assert list(desk.calls.values()) == [1]


# Many at once


@pytest.mark.case("S66")
async def test_nothing_is_held_while_the_provider_thinks(desk: Desk, database_url: str, clock: Clock, faults: Faults) -> None:
    """No transaction is open and no connection taken: a pool of one serves another order meanwhile."""
    await desk.paid("ORD-2")
    async with Database(database_url, clock=clock, faults=faults, name="one", connections_max=1) as db:
        narrow = Desk(desk.world, db)
        narrow.unclear("hang")
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(narrow.refund("key-1"))
            await narrow.hanging()

            idle = await desk.world.value(
                "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()"
            )
            taken = db.taken
            quick = await narrow.refund("key-2", order_id="ORD-2")
            desk.world.simulator.api.faults.clear()

    assert (idle, taken) == (0, 0)
    assert (quick.status, slow.result().status) == (202, 202)


async def test_refunds_at_once_never_exceed_the_payment(desk: Desk) -> None:
    """Twenty of 100 from a payment of 1000: ten are accepted, ten are refused, and the provider was asked ten times."""
    answers = await asyncio.gather(*(desk.refund(f"key-{number}", f"R-{number}", "100.00") for number in range(20)))

    assert sorted(answer.status for answer in answers) == [202] * 10 + [409] * 10
    assert sum(desk.moved) == 1000
    assert list(desk.calls.values()) == [1] * 10
    assert await desk.holds() == [("1000.00", "0.00")]
    await desk.finish()
    assert await desk.sums() == ("refunded", "1000.00")
    assert await desk.holds() == [("0.00", "1000.00")]
    assert len(await desk.told("order.refunded")) == 10


@pytest.mark.case("S61", "S96")
async def test_one_reference_at_once_refunds_once(desk: Desk) -> None:
    """Under twenty keys: one refund, nineteen refusals that name it."""
    answers = await asyncio.gather(*(desk.refund(f"key-{number}") for number in range(20)))

    assert sorted(answer.status for answer in answers) == [202] + [409] * 19
    assert len({members(answer)["refund_id"] for answer in answers}) == 1
    assert list(desk.calls.values()) == [1]


@pytest.mark.case("S62")
async def test_what_was_never_asked_for_is_free_again_after_a_day(desk: Desk) -> None:
    """The provider could not be reached and the client never came back: the refund failed, and its money is free."""
    await desk.move_provider(nowhere())
    await desk.refused("key-1")
    clock, db = desk.world.rt.clock, desk.world.rt.maintenance_db
    early = await idempotency_acts.lapse_unsent(db, desk.layer.operations)
    clock.advance(hours=24, minutes=5)

    lapsed = [await idempotency_acts.lapse_unsent(db, desk.layer.operations) for _ in range(2)]

    assert (early, lapsed) == (0, [1, 0])
    assert await desk.refunds() == [("R-1", "failed")]
    assert await desk.holds() == [("0.00", "0.00")]
    assert desk.calls == {}


async def test_a_part_on_an_order_that_is_not_paid_can_be_given_back(world: World) -> None:
    """A person booked it; the order stays what it is, and may still be paid in full."""
    desk = Desk(world)
    await world.order(ORDER, "1000.00")
    held = await world.notify(world.pay(ORDER, "400.00"))
    await world.drain()
    assert held.delivery_id
    act = resolutions.Act(TENANT, held.delivery_id, "apply", actor="test", reason="a part")
    await resolutions.resolve(world.rt.db, act, world.rt.effect)

    answer = await desk.refund("key-1", amount="400.00")
    await desk.finish()

    order = await desk.order()
    assert answer.status == 202
    assert (order.status, order.amount_paid, order.amount_refunded) == ("pending", "400.00", "400.00")
    assert await desk.refunds() == [("R-1", "succeeded")]
