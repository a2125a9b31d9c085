"""Apply: what the provider confirms becomes one effect; a repeat, a drift and another operation are told apart by the ledger."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import claims, ids, inbox, logs, orders
from ipn_gateway.retention import PARTITIONED
from ipn_gateway.slots import Slots
from tests.world import SOURCE, STORE, TENANT

if TYPE_CHECKING:
    from tests.world import World

# Repeats, drifts and other operations


@pytest.mark.case("S109", "S142")
async def test_a_duplicate_touches_nothing_but_the_audit(world: World) -> None:
    """No question, and no row of an order, event, payment or ledger is written again."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    tables = ("orders", "order_slots", "payments", "events", "processed_notifications", "source_states", "sweeps")
    written = " UNION ALL ".join(f"SELECT '{table}' AS name, xmin::text FROM {table}" for table in tables)
    before, asked, counted = await world.rows(written), world.questions, dict(logs.counters)

    receipt = await world.notify(fields)
    await world.drain()

    assert await world.outcome(receipt) == ("duplicate", None)
    assert await world.rows(written) == before
    assert world.questions == asked
    grown = {name for name, count in logs.counters.items() if count != counted.get(name, 0) and name.startswith("notifications")}
    assert grown == {"notifications.received", "notifications.duplicate"}


@pytest.mark.case("S110", "S142", "B03")
@pytest.mark.parametrize(
    "changed",
    [{"value_a": "drifted"}, {"card_issuer": "ANOTHER BANK"}, {"attempt": "2"}, {"bank_tran_id": "BT-OTHER"}],
    ids=lambda changed: next(iter(changed)),
)
async def test_the_operation_is_the_identity_and_not_the_body(world: World, changed: dict[str, str]) -> None:
    """Another body for the same operation, order and sum is a duplicate, and nobody needs to be asked."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    asked = world.questions

    receipt = await world.notify(world.signed(fields, **changed))
    await world.drain()

    assert await world.outcome(receipt) == ("duplicate", None)
    assert world.questions == asked
    assert await world.value("SELECT amount_paid FROM orders") == Decimal("1000.00")


@pytest.mark.case("S110", "S142")
@pytest.mark.parametrize("changed", [{"currency_amount": "999.00"}, {"currency_type": "USD"}], ids=["amount", "currency"])
async def test_other_posted_money_asks_and_is_a_duplicate_when_the_provider_says_the_same(world: World, changed: dict[str, str]) -> None:
    """What drifted is the post: the provider's answer equals the ledger, so nothing is done, and an alert is kept."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    asked = world.questions

    receipt = await world.notify(world.signed(fields, **changed))
    await world.drain()

    assert await world.outcome(receipt) == ("duplicate", None)
    assert world.questions == asked + 1
    assert await world.value("SELECT alerts FROM notification_deliveries WHERE id = %(id)s", id=receipt.delivery_id) == [
        "posted fields differ from the ledger, the provider's answer does not"
    ]


@pytest.mark.case("S110", "S142")
async def test_other_money_from_the_provider_is_a_conflict(world: World) -> None:
    """One operation, two sums: an alarm and a person, and the order stays as it was paid."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    world.fault("validator", "fields", fields={"currency_amount": "1.00"})

    receipt = await world.notify(world.signed(fields, currency_amount="1.00"))
    await world.drain()

    assert await world.outcome(receipt) == ("conflict", "amount")
    assert await world.value("SELECT amount_paid FROM orders") == Decimal("1000.00")
    assert await world.value("SELECT count(*) FROM payments") == 1
    assert await world.value("SELECT state FROM inbox") == "conflict"
    assert await world.event_types() == ["order.paid", "notification.conflict"]


@pytest.mark.case("S108", "S110")
async def test_an_applied_operation_under_another_order_is_a_conflict(world: World) -> None:
    """The provider contradicts itself about whose money it is: the ledger's key finds out, and no second order is paid."""
    await world.order("ORD-1")
    await world.order("ORD-2")
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    world.fault("validator", "fields", fields={"tran_id": "ORD-2", "bank_tran_id": "BT-OTHER"})

    receipt = await world.notify(world.signed(fields, tran_id="ORD-2"))
    await world.drain()

    assert await world.outcome(receipt) == ("conflict", "amount")
    assert await world.status("ORD-2") == "pending"
    assert await world.value("SELECT count(*) FROM payments") == 1


@pytest.mark.case("S106", "S142", "B67")
@pytest.mark.parametrize("applied_before", [True, False])
async def test_a_payment_of_another_order_is_rejected_and_its_own_order_asked_for(world: World, applied_before: bool) -> None:
    """The order is the one that the provider's answer names: the cited one stays pending, and the named one is paid by the sweep."""
    await world.order("ORD-1001")
    await world.order("ORD-1002")
    fields = world.pay("ORD-1001")
    if applied_before:
        await world.notify(fields)
        await world.drain()

    receipt = await world.notify(world.signed(fields, tran_id="ORD-1002"))
    await world.drain()

    assert await world.outcome(receipt) == ("rejected", "order_mismatch")
    assert await world.value("SELECT count(*) FROM processed_notifications") == int(applied_before)

    await world.sweep()

    assert await world.status("ORD-1001") == "paid"
    assert await world.status("ORD-1002") == "pending"
    assert await world.value("SELECT count(*) FROM processed_notifications") == 1


@pytest.mark.case("B46")
async def test_validated_on_the_first_processing_is_good(world: World) -> None:
    """The provider recorded a question whose answer was cut off: VALIDATED is no sign of a duplicate, our own key is."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    world.fault("validator", "record_then_reset")

    receipt = await world.notify(fields)
    await world.drain()
    assert await world.outcome(receipt) == ("received", None)

    world.rt.clock.advance(seconds=5)
    await world.drain()
    again = await world.notify(world.signed(fields, currency_amount="1000.0"))
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert (await world.rows("SELECT provider_answer->>'status' AS status FROM notification_deliveries ORDER BY id"))[0] == {
        "status": "VALIDATED"
    }
    assert await world.outcome(again) == ("duplicate", None)


@pytest.mark.case("S113", "B133")
async def test_a_second_payment_is_booked_beside_the_order(world: World) -> None:
    """Two tabs, two real payments: the second is kept as unapplied, announced, and a copy of it is a duplicate."""
    await world.order("ORD-1")
    first, second = world.pay("ORD-1"), world.pay("ORD-1")
    receipts = []
    for fields in (first, second, second, first):
        receipts.append(await world.notify(fields))
        await world.drain()

    assert [await world.outcome(receipt) for receipt in receipts] == [
        ("applied", None),
        ("conflict", "second_payment"),
        ("duplicate", None),
        ("duplicate", None),
    ]
    assert await world.rows("SELECT status, amount_paid, event_count FROM orders") == [
        {"status": "paid", "amount_paid": Decimal("1000.00"), "event_count": 2}
    ]
    assert await world.rows("SELECT status, operation_id FROM payments ORDER BY recorded_at") == [
        {"status": "applied", "operation_id": first["val_id"]},
        {"status": "unapplied", "operation_id": second["val_id"]},
    ]
    assert await world.rows("SELECT booked FROM processed_notifications ORDER BY applied_at") == [
        {"booked": "applied"},
        {"booked": "unapplied"},
    ]
    assert (await world.event_types("ORD-1")) == ["order.paid", "order.overpaid", "notification.conflict"]


@pytest.mark.case("S113", "B49")
async def test_nothing_but_a_person_lifts_a_hold(world: World) -> None:
    """A copy of the risky notice, another payment without risk, and every negative leave the order on hold."""
    await world.order("ORD-1")
    risky = world.pay("ORD-1", risk=True)
    later = [risky, world.pay("ORD-1"), world.pay("ORD-1", status="FAILED"), world.pay("ORD-1", status="CANCELLED")]
    outcomes = []
    for fields in (risky, *later):
        receipt = await world.notify(fields)
        await world.drain()
        outcomes.append((await world.outcome(receipt))[0])

    assert outcomes[:3] == ["applied", "duplicate", "conflict"]
    assert set(outcomes[3:]) <= {"stale"}
    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "paid_on_hold", "reason": "risk"}]


@pytest.mark.case("S106", "B08")
async def test_one_movement_of_money_through_two_sources_is_one_credit(world: World) -> None:
    """Same bank's id, account, order and sum under another source: a duplicate, whatever message brought it."""
    await world.source("second")
    await world.order("ORD-1")
    fields = world.pay("ORD-1")

    first = await world.notify(fields)
    await world.drain()
    second = await world.notify(fields, source="second")
    await world.drain()

    assert await world.outcome(first) == ("applied", None)
    assert await world.outcome(second) == ("duplicate", None)
    assert await world.value("SELECT count(*) FROM payments") == 1


@pytest.mark.case("S100")
async def test_a_payment_reference_under_another_operation_is_judged_by_its_money(world: World) -> None:
    """The unique key of payments is no duplicate by itself: same order and money is one, anything else waits for a person."""
    await world.order("ORD-1")
    await world.order("ORD-2")
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()
    world.fault("validator", "fields", times=2, fields={"bank_tran_id": fields["bank_tran_id"]})

    same = await world.notify(world.pay("ORD-1"))
    await world.drain()
    other = await world.notify(world.pay("ORD-2"))
    await world.drain()

    assert await world.outcome(same) == ("duplicate", None)
    assert await world.outcome(other) == ("held", "payment_reference_reused")
    assert await world.status("ORD-2") == "pending"
    assert await world.value("SELECT count(*) FROM processed_notifications") == 1


@pytest.mark.case("S106", "B63")
async def test_money_of_a_stranger_s_store_pays_no_order(world: World) -> None:
    """Whoever signs the notice: with that store's password it is forged here, with ours the store is not ours or the payment not known."""
    world.simulator.bank.stores = {**world.simulator.bank.stores, "evil01": "Evil@Pass1"}
    await world.order("ORD-1001")
    genuine = world.pay("ORD-1001", store_id="evil01")

    receipts = [await world.notify(fields) for fields in (genuine, world.signed(genuine), world.signed(genuine, store_id=STORE))]
    for wait in (60, 300, 540, 0):
        await world.drain()
        world.rt.clock.advance(seconds=wait)

    assert [await world.outcome(receipt) for receipt in receipts] == [
        ("rejected", "signature"),
        ("rejected", "store_mismatch"),
        ("rejected", "refuted"),
    ]
    assert await world.status("ORD-1001") == "pending"
    assert await world.value("SELECT count(*) FROM payments") == 0


@pytest.mark.case("S106", "B63")
async def test_money_at_another_source_of_the_tenant_waits_for_a_person(world: World) -> None:
    """Confirmed, and the merchant's own: it may be meant for the order, yet it went to an account that the order is not of."""
    world.simulator.bank.stores = {**world.simulator.bank.stores, "other02": "Other@Pass2"}
    await world.source("second", store_id="other02", store_passwd="Other@Pass2")
    await world.order("ORD-1001")

    receipt = await world.notify(world.pay("ORD-1001", store_id="other02"), source="second")
    await world.drain()

    assert await world.outcome(receipt) == ("held", "source_mismatch")
    assert await world.status("ORD-1001") == "pending"
    assert await world.event_types() == ["notification.held"]


@pytest.mark.case("S106")
async def test_a_mismatch_leaves_the_operation_unused(world: World) -> None:
    """What was confirmed with a wrong sum is held; the same operation with the right one still applies, once."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    world.fault("validator", "fields", fields={"currency_amount": "1.00"})

    wrong = await world.notify(fields)
    await world.drain()
    right = await world.notify(fields)
    await world.drain()

    assert await world.outcome(wrong) == ("held", "amount")
    assert await world.outcome(right) == ("applied", None)


@pytest.mark.case("S106")
async def test_tenants_do_not_meet(world: World) -> None:
    """The same order id of another tenant stays as it is."""
    await world.source("theirs", tenant="rival")
    await world.order("ORD-1")
    await orders.create(
        world.rt.db, "rival", orders.NewOrder("ORD-1", "theirs", Decimal("1000.00"), "BDT"), sweep_schedule=world.rt.settings.sweep_schedule
    )

    await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert await world.rows("SELECT tenant_id, status FROM orders ORDER BY tenant_id") == [
        {"tenant_id": TENANT, "status": "paid"},
        {"tenant_id": "rival", "status": "pending"},
    ]


# The ledger


@pytest.mark.case("S116")
async def test_the_ledger_is_permanent(world: World) -> None:
    """No partition that could be dropped, no key that holds a time, and nothing cascades into it."""
    catalogue = await world.rows(
        "SELECT relkind::text, relispartition, pg_get_constraintdef(c.oid) AS key FROM pg_class r"
        " JOIN pg_constraint c ON c.conrelid = r.oid AND c.contype = 'p' WHERE r.oid = 'processed_notifications'::regclass"
    )
    deleting = await world.rows(
        "SELECT confdeltype::text FROM pg_constraint WHERE conrelid = 'processed_notifications'::regclass AND contype = 'f'"
    )

    assert catalogue == [{"relkind": "r", "relispartition": False, "key": "PRIMARY KEY (tenant_id, source_id, operation_id, effect)"}]
    assert {row["confdeltype"] for row in deleting} == {"a"}
    assert "processed_notifications" not in PARTITIONED


@pytest.mark.case("S121")
async def test_an_event_that_comes_again_after_a_loss_has_the_same_id(world: World) -> None:
    """Its id is made of tenant, type and cause: when the rows are gone and the notification is sent again, it is the same event."""
    await world.order("ORD-1")
    await world.order("ORD-2")
    paid, part = world.pay("ORD-1"), world.pay("ORD-2", "400.00")
    ids_of = "SELECT id, type FROM events ORDER BY type"
    for fields in (paid, part):
        await world.notify(fields)
    await world.drain()
    before = await world.rows(ids_of)

    async with world.rt.db.transaction("test.loss") as tx:
        for table in ("events", "payments", "processed_notifications", "inbox", "notification_deliveries"):
            await tx.execute(f"DELETE FROM {table}")
        await tx.execute("UPDATE orders SET status = 'pending', amount_paid = 0, event_count = 0")
    for fields in (paid, part):
        await world.notify(fields)
    await world.drain()

    assert [row["type"] for row in before] == ["notification.held", "order.paid"]
    assert await world.rows(ids_of) == before
    assert before[1]["id"] == ids.event_id(TENANT, "order.paid", SOURCE, paid["val_id"], "paid")


@pytest.mark.case("S121", "S124")
async def test_the_events_of_an_order_are_numbered_without_gaps(world: World) -> None:
    """Whatever happened to it, in the order in which it happened."""
    await world.order("ORD-1")
    for fields in (world.pay("ORD-1", status="FAILED"), world.pay("ORD-1", status="CANCELLED"), world.pay("ORD-1"), world.pay("ORD-1")):
        await world.notify(fields)
        await world.drain()

    found = await world.rows("SELECT sequence, type FROM events WHERE sequence IS NOT NULL ORDER BY sequence")
    assert [row["sequence"] for row in found] == list(range(1, len(found) + 1))
    assert await world.value("SELECT event_count FROM orders") == len(found)


# Where the question is asked


@pytest.mark.case("S114")
async def test_no_transaction_is_open_while_the_provider_is_asked(world: World) -> None:
    """However long it takes: no connection of the gateway is in a transaction, and no row is locked."""
    await world.order("ORD-1")
    seen: list[Any] = []

    async def look() -> None:
        seen.append(
            await world.rows(
                "SELECT state, query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND state LIKE 'idle in transaction%%'"
            )
        )

    world.rt.faults.on["transport.ask:before"] = look
    world.rt.faults.on["transport.ask:after"] = look
    await world.notify(world.pay("ORD-1"))
    (row,) = await claims.proved(world.rt.inbox_db, limit=1, lease_seconds=45, parking_hours=72)
    await inbox.work(world.worker, row)

    assert seen == [[], []]
    assert await world.status("ORD-1") == "paid"


@pytest.mark.case("S114")
async def test_a_provider_that_hangs_does_not_stop_intake(world: World) -> None:
    """While every question hangs, notifications are taken in and what needs no question is decided."""
    await world.order("ORD-1")
    await world.order("ORD-2")
    fields = world.pay("ORD-2")
    await world.notify(fields)
    await world.drain()
    world.fault("validator", "hang", times=None)
    waiting = await world.notify(world.pay("ORD-1"))
    await inbox.run_once(world.worker)

    repeat = await world.notify(fields)
    beside = replace(world.worker, slots=Slots(1))
    await inbox.run_once(beside)
    await beside.slots.drained()

    assert await world.outcome(repeat) == ("duplicate", None)
    assert await world.outcome(waiting) == ("received", None)

    world.simulator.api.faults.clear()
    await world.worker.slots.drained()

    assert await world.outcome(waiting) == ("applied", None)
