"""Money on its way through the flow: the order's own pair binds, exactly, and what differs waits for a person."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.world import World


@pytest.mark.case("B23")
async def test_the_ways_to_write_a_sum_pay_alike(world: World) -> None:
    """1000, 1000.0, 1000.00 and 1000.000 from the provider are one sum; 1000.001 is another one and is held."""
    written = ["1000", "1000.0", "1000.00", "1000.000", "1000.001"]
    receipts = []
    for index, amount in enumerate(written):
        await world.order(f"ORD-{index}")
        fields = world.signed(world.pay(f"ORD-{index}"), amount=amount, currency_amount=amount)
        world.fault("validator", "fields", tran_id=f"ORD-{index}", fields={"amount": amount, "currency_amount": amount})
        receipts.append(await world.notify(fields))
    await world.drain()

    assert [await world.outcome(receipt) for receipt in receipts] == [("applied", None)] * 4 + [("held", "amount")]
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'paid' AND amount_paid = amount") == 4
    held = json.loads(await world.value("SELECT body FROM events WHERE type = 'notification.held'"))["data"]
    assert (held["amount"], held["expected_amount"], held["currency"]) == ("1000.001", "1000.00", "BDT")


@pytest.mark.case("S106", "B19")
async def test_a_foreign_order_is_paid_in_its_own_currency(world: World) -> None:
    """Compared is what the merchant asked for, never what it settles as."""
    payments = [("50.00", "USD"), ("49.99", "USD"), ("50.00", "EUR"), ("6170.00", "BDT")]  # the last is what 50 USD settle as
    receipts = []
    for number, (amount, currency) in enumerate(payments):
        await world.order(f"ORD-{number}", "50.00", "USD")
        receipts.append(await world.notify(world.pay(f"ORD-{number}", amount, currency)))
    await world.drain()

    assert [await world.outcome(receipt) for receipt in receipts] == [
        ("applied", None),
        ("held", "amount"),
        ("held", "currency"),
        ("held", "currency"),
    ]
    assert await world.rows("SELECT order_id FROM orders WHERE status = 'paid'") == [{"order_id": "ORD-0"}]


@pytest.mark.case("S106", "B61")
async def test_a_genuine_payment_of_too_little_never_completes_an_order(world: World) -> None:
    """Replayed five times it is still one thing to look at."""
    await world.order("ORD-1001")
    fields = world.pay("ORD-1001", "1.00")
    for _ in range(5):
        await world.notify(fields)
        await world.drain()

    assert set(await world.outcomes()) == {"held"}
    assert await world.rows("SELECT status, amount_paid FROM orders") == [{"status": "pending", "amount_paid": Decimal(0)}]
    assert await world.event_types() == ["notification.held"]
    assert await world.value("SELECT count(*) FROM processed_notifications") == 0


@pytest.mark.case("B141")
async def test_a_part_of_the_sum_is_no_payment(world: World) -> None:
    """400 and 600 of 1000 are two things to look at; nothing leaves, and the whole sum still pays."""
    await world.order("ORD-1")
    for amount in ("400.00", "600.00"):
        await world.notify(world.pay("ORD-1", amount))
    await world.drain()

    assert await world.outcomes() == ["held", "held"]
    assert await world.status("ORD-1") == "pending"

    await world.notify(world.pay("ORD-1"))
    await world.drain()

    assert await world.status("ORD-1") == "paid"


@pytest.mark.case("B21")
async def test_a_large_sum_is_the_same_number_everywhere(world: World) -> None:
    """Order, ledger, payment and event carry the very digits; grouping is for display."""
    await world.order("ORD-1", "1234567.89")
    await world.notify(world.pay("ORD-1", "1234567.89"))
    await world.drain()

    sums = await world.rows(
        "SELECT amount_paid AS sum FROM orders UNION ALL SELECT amount FROM processed_notifications UNION ALL SELECT amount FROM payments"
    )
    told = json.loads(await world.value("SELECT body FROM events"))["data"]
    assert [row["sum"] for row in sums] == [Decimal("1234567.89")] * 3
    assert (told["amount"], told["amount_paid"], told["amount_refunded"]) == ("1234567.89", "1234567.89", "0.00")


@pytest.mark.case("S107")
async def test_an_event_says_what_the_change_was(world: World) -> None:
    """The order after the change, where it came from, and what caused it."""
    await world.order("ORD-1", metadata={"basket": 7, "name": "নুসরাত"})
    fields = world.pay("ORD-1")
    await world.notify(fields)
    await world.drain()

    event = (await world.rows("SELECT id, type, sequence, body FROM events"))[0]
    wire = json.loads(event["body"])
    assert (wire["id"], wire["type"], event["sequence"]) == (event["id"], "order.paid", 1)
    assert wire["data"] == {
        "order_id": "ORD-1",
        "status": "paid",
        "previous_status": "pending",
        "reason": None,
        "amount": "1000.00",
        "currency": "BDT",
        "amount_paid": "1000.00",
        "amount_refunded": "0.00",
        "sequence": 1,
        "source": "shop",
        "operation_id": fields["val_id"],
        "provider_transaction_id": fields["bank_tran_id"],
        "metadata": {"basket": 7, "name": "নুসরাত"},
    }


async def test_an_answer_without_clear_money_is_no_verdict(world: World) -> None:
    """Neither paid nor refuted nor held: it is asked again, and the next clear answer counts."""
    unclear = [
        ("currency_amount", None),
        ("currency_amount", ""),
        ("currency_amount", "1,000.00"),
        ("currency_amount", "NaN"),
        ("currency_amount", "0.00"),
        ("currency_type", "Taka"),
        ("tran_id", None),
        ("val_id", "another"),
    ]
    for number, (name, value) in enumerate(unclear):
        await world.order(f"ORD-{number}")
        world.fault("validator", "fields", fields={name: value})
        receipt = await world.notify(world.pay(f"ORD-{number}"))
        await world.drain()
        assert await world.rows("SELECT state, asked FROM inbox") == [{"state": "received", "asked": 1}], name

        world.rt.clock.advance(seconds=5)
        await world.drain()

        assert await world.outcome(receipt) == ("applied", None), name
