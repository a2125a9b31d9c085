"""Apply: what the provider confirms becomes one effect; a repeat, a drift and another operation are told apart by the ledger."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import ids, inbox, logs, notifications, orders
from ipn_gateway.models import PARTITIONED
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.sslcommerz import encode
from ipn_gateway.slots import Slots
from tests.providers.sslcommerz import V1, V2, V3, element, load, validator_answer
from tests.world import SOURCE, TENANT

if TYPE_CHECKING:
    import respx

    from ipn_gateway.notifications import Receipt
    from tests.world import World

VALIDATOR = "https://sandbox.sslcommerz.com/validator/api/validationserverAPI.php"
QUERY = "https://sandbox.sslcommerz.com/validator/api/merchantTransIDvalidationAPI.php"
GOLDEN = "golden"


# The payloads of the provider's documents, and what it answers about them


@pytest.fixture
async def golden(world: World) -> World:
    """A world with a source at the provider's own address, for a provider that is mocked."""
    await world.source(GOLDEN, store_id="demos64b1", store_passwd="demo_pass@ssl", base_url=None)
    return world


async def posted(world: World, sample: str) -> Receipt:
    """A sample arrives at the golden source as it was captured, and is worked on."""
    account = await world.rt.sources.get(GOLDEN)
    assert account is not None
    receipt = await notifications.receive(world.rt.db, world.rt.sources, world.rt.floods, account, load(sample))
    await world.drain()
    return receipt


def answers(*bodies: dict[str, Any]) -> list[httpx.Response]:
    return [httpx.Response(200, json=body) for body in bodies]


def listed(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"APIConnect": "DONE", "no_of_trans_found": len(elements), "element": list(elements)}


@pytest.mark.case("S105", "S107", "B31")
@pytest.mark.parametrize("sample", ["v1_valid", "v1_ampersand_in_issuer", "v1_equals_in_value", "v1_gbk"])
async def test_a_genuine_payment_is_applied_in_the_providers_words(golden: World, provider_mock: respx.MockRouter, sample: str) -> None:
    """Amount of the order, settled and net amount, the bank's id and the provider's local time, all from the validator's answer."""
    await golden.order("ORD-2026-000481", "1250.50", source=GOLDEN)
    route = provider_mock.get(VALIDATOR).mock(side_effect=answers(validator_answer(V1), validator_answer(V1, status="VALIDATED")))

    receipt = await posted(golden, sample)

    assert await golden.outcome(receipt) == ("applied", None)
    payment = (await golden.rows("SELECT * FROM payments"))[0]
    assert (payment["operation_id"], payment["provider_transaction_id"]) == ("2607141203317Qm4ZtVb1xYd2Rk", "260714120330Hk2LsWq9PzTf")
    assert (payment["amount"], payment["currency"], payment["net_amount"]) == (Decimal("1250.50"), "BDT", Decimal("1225.49"))
    assert (payment["settled_amount"], payment["settled_currency"]) == (Decimal("1250.50"), "BDT")
    assert payment["paid_at"] == datetime(2026, 7, 14, 6, 2, 58, tzinfo=UTC)
    asked = route.calls.last.request.url.params
    assert (asked["val_id"], asked["store_id"], asked["store_passwd"]) == ("2607141203317Qm4ZtVb1xYd2Rk", "demos64b1", "demo_pass@ssl")


@pytest.mark.case("S106", "B19", "B49")
async def test_a_risky_payment_in_dollars_is_recorded_and_held(golden: World, provider_mock: respx.MockRouter) -> None:
    """The order's own pair binds, the settled taka are beside it; the money is there and the goods wait for a person."""
    await golden.order("ORD-2026-000483", "100.00", "USD", source=GOLDEN)
    provider_mock.get(VALIDATOR).mock(side_effect=answers(validator_answer(V3)))

    receipt = await posted(golden, "v3_risk_usd")
    again = await posted(golden, "v3_risk_usd")

    assert await golden.outcome(receipt) == ("applied", None)
    assert await golden.outcome(again) == ("duplicate", None)
    assert await golden.rows("SELECT status, reason, amount_paid FROM orders") == [
        {"status": "paid_on_hold", "reason": "risk", "amount_paid": Decimal("100.00")}
    ]
    assert await golden.rows("SELECT amount, currency, settled_amount, settled_currency FROM payments") == [
        {"amount": Decimal("100.00"), "currency": "USD", "settled_amount": Decimal("12340.00"), "settled_currency": "BDT"}
    ]
    assert await golden.event_types() == ["order.paid_on_hold"]


@pytest.mark.case("S113")
async def test_a_cancellation_is_applied_when_the_query_lists_it(golden: World, provider_mock: respx.MockRouter) -> None:
    """Its ledger id comes from the listed attempt, never from the post."""
    await golden.order("ORD-2026-000482", "800.00", source=GOLDEN)
    provider_mock.get(QUERY).mock(side_effect=answers(listed(element(V2, tran_date="2026-07-14 12:10:06"))))

    receipt = await posted(golden, "v2_cancelled")

    assert await golden.outcome(receipt) == ("applied", None)
    assert await golden.rows("SELECT status, reason FROM orders") == [{"status": "cancelled", "reason": "provider"}]
    assert await golden.rows("SELECT operation_id, effect, amount FROM processed_notifications") == [
        {"operation_id": "ORD-2026-000482/CANCELLED/2026-07-14 12:10:06", "effect": "cancelled", "amount": None}
    ]


@pytest.mark.case("S105")
@pytest.mark.parametrize("attempts", [[element(V2)], [{"tran_id": "ORD-2026-000482", "status": "INVALID"}]], ids=["cancelled", "not-known"])
async def test_a_cancellation_folded_into_a_payment_is_rejected(
    golden: World, provider_mock: respx.MockRouter, attempts: list[dict[str, Any]]
) -> None:
    """The official libraries accept this forgery: ours answers 2xx, asks by query as there is no val_id, and one refutation is enough."""
    await golden.order("ORD-2026-000482", "800.00", source=GOLDEN)
    provider_mock.get(QUERY).mock(side_effect=answers(listed(*attempts) | {"no_of_trans_found": 0}))

    receipt = await posted(golden, "f1_folded_status")

    assert receipt.error is None
    assert await golden.outcome(receipt) == ("rejected", "refuted")
    assert await golden.status("ORD-2026-000482") == "pending"


@pytest.mark.case("S105", "S106")
async def test_a_payment_folded_onto_another_order_pays_its_own(golden: World, provider_mock: respx.MockRouter) -> None:
    """The order is the one that the provider names; that one is asked for at once."""
    await golden.order("ORD-2026-000481", "1250.50", source=GOLDEN)
    await golden.order("ORD-2026-000999", "1250.50", source=GOLDEN)
    provider_mock.get(VALIDATOR).mock(side_effect=answers(*[validator_answer(V1)] * 2))
    provider_mock.get(QUERY).mock(side_effect=answers(listed(element(V1))))

    receipt = await posted(golden, "f2_folded_order")
    await golden.sweep()

    assert await golden.outcome(receipt) == ("rejected", "order_mismatch")
    assert (await golden.status("ORD-2026-000481"), await golden.status("ORD-2026-000999")) == ("paid", "pending")
    assert await golden.rows("SELECT origin FROM processed_notifications") == [{"origin": "sweep"}]


async def test_a_field_name_that_swallows_the_amount_is_malformed(golden: World) -> None:
    """Names are made of letters, digits and underscores; nothing is asked."""
    receipt = await posted(golden, "f3_swallowing_name")

    assert await golden.outcome(receipt) == ("malformed", "unreadable")


@pytest.mark.parametrize("verify_sign", ["991ef296988c21cd1a4fab4a2578b18c", "27865453d39d4a225462646e7d205f0b"])
async def test_a_trailing_ampersand_verifies_with_either_digest(golden: World, provider_mock: respx.MockRouter, verify_sign: str) -> None:
    """The libraries disagree about it, so both of their digests are good."""
    await golden.order("ORD-2026-000481", "1250.50", source=GOLDEN)
    provider_mock.get(VALIDATOR).mock(side_effect=answers(validator_answer(V1)))
    fields = V1 | {"value_d": "sess-77&", "verify_sign": verify_sign, "verify_key": ",".join(V1)}

    receipt = await golden.notify(fields, source=GOLDEN)
    await golden.drain()

    assert await golden.outcome(receipt) == ("applied", None)


# Forgeries from end to end

SIGNATURE, REFUTED, UNREADABLE = ("rejected", "signature"), ("rejected", "refuted"), ("malformed", "unreadable")
ENDS: dict[str, dict[str, tuple[str, str | None]]] = {
    "wrong_hash": {"VALID": SIGNATURE, "CANCELLED": SIGNATURE},
    "no_hash": {"VALID": SIGNATURE, "CANCELLED": SIGNATURE},
    "altered_amount": {"VALID": SIGNATURE, "CANCELLED": SIGNATURE},
    "claimed_paid": {"VALID": SIGNATURE, "CANCELLED": SIGNATURE},
    "unknown_order": {"VALID": SIGNATURE, "CANCELLED": SIGNATURE},
    "other_store": {"VALID": SIGNATURE, "CANCELLED": SIGNATURE},
    "folded_status": {"VALID": SIGNATURE, "CANCELLED": REFUTED},
    "folded_order": {"VALID": ("rejected", "order_mismatch"), "CANCELLED": REFUTED},  # the val_id is genuine: whose it is, is known
    "swallowed_amount": {"VALID": UNREADABLE, "CANCELLED": UNREADABLE},
    "odd_key": {"VALID": ("applied", None), "CANCELLED": ("applied", None)},  # a replay of what is true
    "doubled_field": {"VALID": UNREADABLE, "CANCELLED": UNREADABLE},
}


@pytest.mark.case("S105", "S111")
@pytest.mark.parametrize("status", ["VALID", "CANCELLED"])
@pytest.mark.parametrize("kind", FORGERIES)
async def test_no_forgery_gains_anything(world: World, kind: str, status: str) -> None:
    """Nobody can make of a genuine notification what pays another sum or order, or stands in the genuine one's way; all is kept."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1", status=status)

    forged = await world.notify(encode(FORGERIES[kind](fields)))
    await world.drain()
    genuine = await world.notify(fields)
    await world.drain()

    assert await world.outcome(forged) == ENDS[kind][status]
    assert await world.outcome(genuine) == ("duplicate" if kind == "odd_key" else "applied", None)
    assert await world.status("ORD-1") == ("paid" if status == "VALID" else "cancelled")
    assert await world.value("SELECT count(*) FROM payments") == (status == "VALID")
    assert await world.value("SELECT count(*) FROM orders") == 1


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


@pytest.mark.case("S110")
async def test_two_operations_under_the_same_body_are_two(golden: World, provider_mock: respx.MockRouter) -> None:
    """A payment without val_id is asked for by query: the very same bytes bring in what the provider lists by then."""
    await golden.order("ORD-2026-000481", "1250.50", source=GOLDEN)
    other = V1 | {"val_id": "V-2", "bank_tran_id": "BT-2", "tran_date": "2026-07-14 12:09:00"}
    provider_mock.get(QUERY).mock(side_effect=answers(listed(element(V1)), listed(element(V1), element(other))))
    provider_mock.get(VALIDATOR).mock(side_effect=answers(validator_answer(V1), validator_answer(other)))
    body = golden.signed(V1 | {"bank_tran_id": "", "tran_date": ""}, "demo_pass@ssl", val_id="")

    first = await golden.notify(body, source=GOLDEN)
    await golden.drain()
    golden.rt.clock.advance(seconds=1)
    second = await golden.notify(body, source=GOLDEN)
    await golden.drain()

    assert await golden.outcome(first) == ("applied", None)
    assert await golden.outcome(second) == ("conflict", "second_payment")
    assert await golden.value("SELECT count(*) FROM processed_notifications") == 2


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
    await world.drain()

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
