"""Every way in which a notification delivery can end, from the request to the row that says so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from psycopg import errors as pg

from ipn_gateway import inbox, sources
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.states import DeliveryOutcome, InboxState
from tests.world import TENANT, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ipn_gateway.notifications import Receipt
    from tests.world import World

    Scenario = Callable[[World], Awaitable[Receipt]]

SCENARIOS: dict[tuple[str, str | None], Scenario] = {}


def ends_as(outcome: str, reason: str | None = None) -> Callable[[Scenario], Scenario]:
    """Register a scenario under the end that it leads to."""

    def register(scenario: Scenario) -> Scenario:
        SCENARIOS[outcome, reason] = scenario
        return scenario

    return register


@ends_as("applied")
async def _a_payment_of_a_pending_order(world: World) -> Receipt:
    return await world.notify(world.pay("ORD-1"))


@ends_as("duplicate")
async def _the_same_again(world: World) -> Receipt:
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    return await world.notify(fields)


@ends_as("stale")
async def _a_word_that_changes_nothing(world: World) -> Receipt:
    return await world.notify(world.pay("ORD-1", status="PENDING"))


@ends_as("conflict", "amount")
async def _other_money_for_an_applied_operation(world: World) -> Receipt:
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    world.fault("validator", "fields", times=None, fields={"currency_amount": "999.00"})
    return await world.notify(world.signed(fields, currency_amount="999.00"))


@ends_as("conflict", "second_payment")
async def _a_second_payment(world: World) -> Receipt:
    await world.notify(world.pay("ORD-1"))
    await world.drain()
    return await world.notify(world.pay("ORD-1"))


@ends_as("rejected", "signature")
async def _a_wrong_hash(world: World) -> Receipt:
    return await world.notify(encode(FORGERIES["wrong_hash"](world.pay("ORD-1"))))


@ends_as("rejected", "refuted")
async def _a_payment_that_the_provider_does_not_know(world: World) -> Receipt:
    world.fault("validator", "invalid_transaction", times=None)
    receipt = await world.notify(world.pay("ORD-1"))
    for wait in world.rt.settings.refuted_schedule:
        await world.drain()
        world.rt.clock.advance(seconds=wait)
    return receipt


@ends_as("rejected", "unconfirmed")
async def _a_failure_of_an_order_that_is_still_open(world: World) -> Receipt:
    receipt = await world.notify(world.pay("ORD-1", status="FAILED"))
    world.fault("query", "processing", times=None)
    await world.drain()
    world.rt.clock.advance(hours=1)
    return receipt


@ends_as("rejected", "order_mismatch")
async def _a_payment_of_another_order(world: World) -> Receipt:
    return await world.notify(world.signed(world.pay("ORD-2"), tran_id="ORD-1"))


@ends_as("rejected", "store_mismatch")
async def _a_payment_into_another_store(world: World) -> Receipt:
    world.fault("validator", "fields", fields={"store_id": "evil01"})
    return await world.notify(world.pay("ORD-1"))


@ends_as("held", "amount")
async def _a_part_of_the_sum(world: World) -> Receipt:
    return await world.notify(world.pay("ORD-1", "400.00"))


@ends_as("held", "currency")
async def _another_currency(world: World) -> Receipt:
    return await world.notify(world.pay("ORD-1", "1000.00", "USD"))


@ends_as("held", "source_mismatch")
async def _a_payment_at_another_source_of_the_tenant(world: World) -> Receipt:
    await world.source("second")
    return await world.notify(world.pay("ORD-1"), source="second")


@ends_as("held", "unknown_status")
async def _a_word_that_nobody_knows(world: World) -> Receipt:
    return await world.notify(world.pay("ORD-1", status="REVERSED"))


@ends_as("held", "order_unknown")
async def _a_payment_whose_order_never_comes(world: World) -> Receipt:
    receipt = await world.notify(world.pay("ORD-NEVER"))
    await world.drain()
    world.rt.clock.advance(hours=world.rt.settings.parking_hours)
    await inbox.release_parked(world.rt.maintenance_db, parking_hours=world.rt.settings.parking_hours)
    return receipt


@ends_as("held", "payment_reference_reused")
async def _the_banks_id_of_another_order(world: World) -> Receipt:
    await world.order("ORD-2")
    fields = world.pay("ORD-2")
    await world.notify(fields)
    await world.drain()
    world.fault("validator", "fields", times=None, fields={"bank_tran_id": fields["bank_tran_id"]})
    return await world.notify(world.pay("ORD-1"))


@ends_as("held", "source_disabled")
async def _a_payment_at_a_disabled_source(world: World) -> Receipt:
    await sources.disable(world.rt.db, TENANT, "shop", actor="test")
    world.rt.sources.forget("shop")
    return await world.notify(world.pay("ORD-1"))


@ends_as("parked")
async def _a_payment_before_its_order(world: World) -> Receipt:
    return await world.notify(world.pay("ORD-LATER"))


@ends_as("malformed", "unreadable")
async def _a_form_without_an_order(world: World) -> Receipt:
    return await world.notify(b"status=VALID&amount=1000.00")


@ends_as("malformed", "media_type")
async def _a_body_in_json(world: World) -> Receipt:
    return await world.notify(b'{"tran_id":"ORD-1"}', headers=(("content-type", "application/json"),))


@ends_as("dead", "no_verdict")
async def _a_provider_that_never_says_anything_clear(world: World) -> Receipt:
    world.fault("validator", "status500", times=None)
    return await _through_the_schedule(world)


@ends_as("dead", "effect_failed")
async def _an_effect_that_always_fails(world: World) -> Receipt:
    async def effect(*_: object) -> None:
        raise pg.UniqueViolation

    world.worker = replace(world.worker, effect=effect)
    return await _through_the_schedule(world)


async def _through_the_schedule(world: World) -> Receipt:
    """A short schedule: its shape has tests of its own."""
    schedule = (0.0, 5.0, 30.0)
    world.worker = replace(world.worker, settings=world.worker.settings.model_copy(update={"validation_schedule": schedule}))
    receipt = await world.notify(world.pay("ORD-1"))
    for wait in schedule[1:]:
        await world.drain()
        world.rt.clock.advance(seconds=wait)
    return receipt


@pytest.mark.case("S105", "S106", "S107", "S110", "S113", "B61", "B133")
@pytest.mark.parametrize("end", SCENARIOS, ids=lambda end: "-".join(filter(None, end)))
async def test_a_notification_ends_as_published(world: World, end: tuple[str, str | None]) -> None:
    """Each outcome with each of its reasons; what is decided has no open work, what waits for a person keeps its row and is announced."""
    await world.order("ORD-1")

    receipt = await SCENARIOS[end](world)
    await world.drain()

    assert await world.outcome(receipt) == end
    row = (await world.rows("SELECT * FROM notification_deliveries WHERE id = %(id)s", id=receipt.delivery_id))[0]
    states = await world.rows("SELECT state, due_at, lease_expires_at FROM inbox WHERE notification_delivery_id = %(id)s", id=row["id"])
    assert (row["decided_at"] is None) == (end[0] == "parked")
    waits = end[0] in set(InboxState)
    assert states == ([{"state": end[0], "due_at": None, "lease_expires_at": None}] if waits else [])
    if end[0] in {"held", "conflict"}:
        await _is_announced_once(world, receipt, end)


async def _is_announced_once(world: World, receipt: Receipt, end: tuple[str, str | None]) -> None:
    """A copy ends like its original and announces nothing; one of booked money is a duplicate."""
    events = "SELECT id, body FROM events WHERE type = %(type)s"
    told = await world.rows(events, type=f"notification.{end[0]}")
    row = (await world.rows("SELECT raw_body, source_id FROM notification_deliveries WHERE id = %(id)s", id=receipt.delivery_id))[0]

    again = await world.notify(bytes(row["raw_body"]), source=row["source_id"])
    await world.drain()

    data = json.loads(told[0]["body"])["data"]
    assert (data["notification_delivery_id"], data["outcome"], data["reason"]) == (shown(receipt), *end)
    assert len(told) == 1
    assert await world.rows(events, type=f"notification.{end[0]}") == told
    assert (await world.outcome(again))[0] == {"second_payment": "duplicate", "order_unknown": "parked"}.get(end[1] or "", end[0])


def test_every_outcome_and_every_reason_has_its_scenario() -> None:
    """What the contract lists can be reached, but for what this provider cannot show: a mode is part of its credentials."""
    listed = (
        "signature, refuted, unconfirmed, order_mismatch, store_mismatch, mode_mismatch, source_mismatch, amount, currency, unknown_status,"
        " order_unknown, payment_reference_reused, second_payment, no_verdict, effect_failed, source_disabled, media_type, unreadable"
    )

    assert {outcome for outcome, _ in SCENARIOS} == set(DeliveryOutcome) - {"received"}
    assert {reason for _, reason in SCENARIOS if reason} == set(listed.split(", ")) - {"mode_mismatch"}
