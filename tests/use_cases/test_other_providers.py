"""Public cases that need another provider's shape, through the whole flow: see the table in `tests/adapters.py`."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import resolutions, sources, views
from ipn_gateway.errors import StateConflict
from ipn_gateway.simulator.sslcommerz import encode
from tests import adapters
from tests.world import FORM, TENANT, shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from ipn_gateway import objects
    from ipn_gateway.notifications import Receipt
    from ipn_gateway.resolutions import Decision
    from tests.adapters import EchoHost
    from tests.world import World

ECHO = "echo-shop"
BUSINESS = "shop@example.test"
PAID = {
    "mc_gross": "1000.00",
    "payment_date": "23:03:30 Jul 13, 2026 PDT",
    "payment_status": "Completed",
    "charset": "windows-1252",
    "business": BUSINESS,
    "custom": "ORD-1",
    "txn_id": "8DEMO0001",
    "mc_currency": "BDT",
    "ipn_track_id": "demo0a1b2c3d4",
}


@pytest.fixture
async def echo(world: World) -> AsyncIterator[EchoHost]:
    """The provider `echopay`, where the world's merchant has a source."""
    with adapters.installed():
        async with adapters.echo_host() as host:
            given = {"business": BUSINESS, "base_url": host.url}
            await sources.create(world.rt.db, world.rt.vault, TENANT, ECHO, provider="echopay", given=given, actor="test")
            yield host


async def tell(world: World, echo: EchoHost, body: bytes | Mapping[str, str], *, forged: bool = False) -> Receipt:
    """A notification of `echopay` arrives and is worked on; one that proves nothing is asked about once a second."""
    written = body if isinstance(body, bytes) else encode(dict(body))
    if not forged:
        echo.sent.add(written)
    world.rt.clock.advance(seconds=1)
    receipt = await world.notify(written, source=ECHO, headers=FORM)
    await world.drain()
    return receipt


async def seen(world: World, receipt: Receipt) -> objects.NotificationDelivery:
    """The delivery as the API shows it."""
    async with world.rt.db.autocommit("test.seen") as tx:
        return await views.notification_delivery(tx, TENANT, shown(receipt), raw=True)


def refund(reference: str, amount: str, **given: str) -> dict[str, str]:
    """Money that went back, under an id of its own."""
    named = {"payment_status": "Refunded", "txn_id": reference, "parent_txn_id": "8DEMO0001", "mc_gross": f"-{amount}"}
    return PAID | named | {"ipn_track_id": f"track-{reference}"} | given


async def sums(world: World, order_id: str = "ORD-1") -> tuple[str, str, str]:
    """The order's status, and what was paid and refunded."""
    (row,) = await world.rows("SELECT status, amount_paid, amount_refunded FROM orders WHERE order_id = %(id)s", id=order_id)
    return row["status"], f"{row['amount_paid']:.2f}", f"{row['amount_refunded']:.2f}"


# Bytes that are posted back


SPANISH, RUSSIAN, CHINESE = "Nu\u00f1ez\u20ac", "\u0418\u0432\u0430\u043d", "\u4e2d\u6587"


@pytest.mark.case("B29", "B33")
@pytest.mark.parametrize(
    ("charset", "name", "escaped"),
    [("windows-1252", SPANISH, b"Nu%F1ez%80"), ("KOI8_R", RUSSIAN, b"%E9%D7%C1%CE"), ("gb18030", CHINESE, b"%d6%D0%CE%c4")],
)
async def test_what_is_posted_back_are_the_bytes_that_came(world: World, echo: EchoHost, charset: str, name: str, escaped: bytes) -> None:
    """Behind the command, in their order and escaping, blanks and bare names too: VERIFIED. The decoded text is for display."""
    await world.order("ORD-1", source=ECHO)
    body = (
        b"mc_gross=1000.00&payment_date=23%3A03%3A30+Jul+13%2c+2026+PDT&memo=&bare&payment_status=Completed&charset="
        + charset.encode()
        + b"&business=shop%40example.test&last_name="
        + escaped
        + b"&custom=ORD-1&txn_id=8DEMO0001&mc_currency=BDT&address=a%20b+c&"
    )

    receipt = await tell(world, echo, body)

    assert await world.outcome(receipt) == ("applied", None)
    assert echo.posted_back == [b"cmd=_notify-validate&" + body]
    assert await world.value("SELECT raw_body FROM notification_deliveries") == body
    fields = (await seen(world, receipt)).fields
    assert fields is not None
    assert (fields["last_name"], fields["memo"], fields["bare"], fields["address"]) == (name, "", "", "a b c")


@pytest.mark.case("B29")
async def test_what_the_provider_did_not_send_is_refuted(world: World, echo: EchoHost) -> None:
    """INVALID to a single byte that differs is a verdict; the order stays as it is."""
    await world.order("ORD-1", source=ECHO)
    await tell(world, echo, PAID | {"custom": "ORD-2"})

    receipt = await tell(world, echo, PAID, forged=True)

    assert await world.outcome(receipt) == ("rejected", "refuted")
    assert await world.status("ORD-1") == "pending"


# Two channels for one payment


@pytest.mark.case("B08")
@pytest.mark.parametrize("first", ["shop", ECHO])
async def test_a_second_provider_that_tells_of_a_paid_order_waits_for_a_person(world: World, echo: EchoHost, first: str) -> None:
    """No key joins what two providers say: one credit, whoever comes first, and the other's word is held."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    receipts = {}
    for source in (first, "shop" if first == ECHO else ECHO):
        if source == ECHO:
            receipts[source] = await tell(world, echo, PAID)
        else:
            receipts[source] = await world.notify(fields)
            await world.drain()

    assert await world.outcome(receipts["shop"]) == ("applied", None)
    assert await world.outcome(receipts[ECHO]) == ("held", "source_mismatch")
    assert await sums(world) == ("paid", "1000.00", "0.00")
    assert await world.value("SELECT count(*) FROM payments") == 1
    assert sorted(await world.event_types()) == ["notification.held", "order.paid"]


@pytest.mark.case("B08")
async def test_a_movement_of_money_under_another_event_is_known_by_the_banks_id(world: World) -> None:
    """A second source of the same account brings the payment under an operation of another name: it is a duplicate."""
    await world.source("second")
    await world.order("ORD-1")
    fields, renamed = world.pay("ORD-1"), world.pay("ORD-1")
    first = await world.notify(fields)
    await world.drain()
    world.fault("validator", "fields", fields={"bank_tran_id": fields["bank_tran_id"]})

    second = await world.notify(renamed, source="second")
    await world.drain()

    assert renamed["val_id"] != fields["val_id"]
    assert await world.outcome(first) == ("applied", None)
    assert await world.outcome(second) == ("duplicate", None)
    assert await world.value("SELECT sum(amount) FROM payments") == Decimal("1000.00")
    assert await world.event_types() == ["order.paid"]


# The time of a payment


@pytest.mark.case("B131")
@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("16:23:34 May 05, 2026 PDT", datetime(2026, 5, 5, 23, 23, 34, tzinfo=UTC)),
        ("16:23:34 Jan 05, 2026 PST", datetime(2026, 1, 6, 0, 23, 34, tzinfo=UTC)),
    ],
)
async def test_a_time_is_kept_with_its_zone(world: World, echo: EchoHost, written: str, moment: datetime) -> None:
    """Summer or winter, what is recorded is that moment, and shown in UTC; there is nothing to alert on."""
    await world.order("ORD-1", source=ECHO)

    receipt = await tell(world, echo, PAID | {"payment_date": written})

    assert await world.value("SELECT paid_at FROM payments") == moment
    async with world.rt.db.autocommit("test.order") as tx:
        shown_order = await views.order(tx, TENANT, "ORD-1")
    assert shown_order.model_dump(mode="json")["payments"][0]["paid_at"] == moment.strftime("%Y-%m-%dT%H:%M:%S.000000Z")
    assert (await seen(world, receipt)).alerts == []


@pytest.mark.case("B131")
async def test_for_a_time_in_an_unknown_zone_that_of_receipt_stands(world: World, echo: EchoHost) -> None:
    """No guess: when we received it, the text as it came, and a flag at both the notification's reading and its verdict."""
    await world.order("ORD-1", source=ECHO)

    receipt = await tell(world, echo, PAID | {"payment_date": "16:23:34 May 05, 2026 XXT"})

    delivery = await seen(world, receipt)
    assert await world.outcome(receipt) == ("applied", None)
    assert await world.value("SELECT paid_at FROM payments") == await world.value("SELECT received_at FROM notification_deliveries")
    assert (delivery.fields or {})["payment_date"] == "16:23:34 May 05, 2026 XXT"
    assert delivery.alerts == [
        "payment_date_unreadable",
        "the provider gave no time that can be read, so that of receipt stands for it",
    ]


@pytest.mark.case("B131")
async def test_money_of_an_unknown_time_is_late_when_it_came_late(world: World, echo: EchoHost) -> None:
    """It may have been paid before the order expired, or not: a person looks."""
    await world.order("ORD-1", source=ECHO, expires_at=world.rt.clock.now() + timedelta(seconds=30))
    world.rt.clock.advance(minutes=1)

    await tell(world, echo, PAID | {"payment_date": "16:23:34 May 05, 2026 XXT"})

    assert await world.rows("SELECT status, reason FROM orders") == [{"status": "paid_on_hold", "reason": "late_payment"}]


# Refunds that the provider tells of


@pytest.mark.case("B137")
async def test_refunds_are_summed_up_to_what_was_paid(world: World, echo: EchoHost) -> None:
    """300, the same again, 700, and a last 0.01 of 1000: partially refunded, nothing, refunded, and one for a person to look at."""
    await world.order("ORD-1", source=ECHO)
    await tell(world, echo, PAID)
    steps = []
    for reference, amount in (("R1", "300.00"), ("R1", "300.00"), ("R2", "700.00"), ("R3", "0.01")):
        receipt = await tell(world, echo, refund(reference, amount))
        steps.append((*await world.outcome(receipt), *await sums(world)))

    assert steps == [
        ("applied", None, "partially_refunded", "1000.00", "300.00"),
        ("duplicate", None, "partially_refunded", "1000.00", "300.00"),
        ("applied", None, "refunded", "1000.00", "1000.00"),
        ("held", "amount", "refunded", "1000.00", "1000.00"),
    ]
    assert await world.rows("SELECT provider_refund_id, status, amount FROM refunds ORDER BY created_at") == [
        {"provider_refund_id": "R1", "status": "succeeded", "amount": Decimal("300.00")},
        {"provider_refund_id": "R2", "status": "succeeded", "amount": Decimal("700.00")},
    ]
    assert await world.rows("SELECT amount_refunded FROM payments") == [{"amount_refunded": Decimal("1000.00")}]
    assert await world.value("SELECT count(*) FROM processed_notifications WHERE effect = 'refunded'") == 2
    assert await world.event_types() == ["order.paid", "order.refunded", "order.refunded", "notification.held"]
    bodies = await world.rows("SELECT body FROM events WHERE type = 'order.refunded' ORDER BY sequence")
    told = [json.loads(row["body"])["data"] for row in bodies]
    assert [(data["previous_status"], data["status"], data["amount_refunded"], data["sequence"]) for data in told] == [
        ("paid", "partially_refunded", "300.00", 2),
        ("partially_refunded", "refunded", "1000.00", 3),
    ]


@pytest.mark.case("B137")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mc_gross": "-1000.01"}, "amount"),
        ({"mc_gross": "-0.00"}, "amount"),
        ({"mc_currency": "USD"}, "currency"),
        ({"parent_txn_id": "8DEMO0002"}, "amount"),
        ({"custom": "ORD-2"}, "amount"),
    ],
    ids=["too-much", "nothing", "currency", "unknown-payment", "another-order"],
)
async def test_a_refund_that_fits_no_payment_is_held_and_only_dismissed(
    world: World, echo: EchoHost, given: dict[str, str], reason: str
) -> None:
    """The books have no such money to give back: nothing is counted, and no decision of a person makes a payment of it."""
    for order_id, txn_id in (("ORD-1", "8DEMO0001"), ("ORD-2", "8DEMO0003")):
        await world.order(order_id, source=ECHO)
        await tell(world, echo, PAID | {"custom": order_id, "txn_id": txn_id})

    receipt = await tell(world, echo, refund("R1", "300.00", **given))

    assert await world.outcome(receipt) == ("held", reason)
    with pytest.raises(StateConflict):
        await _resolve(world, receipt, "apply")
    with pytest.raises(StateConflict):
        await _resolve(world, receipt, "apply", resolutions.Evidence(Decimal("1000.00"), "BDT", "BANK-1"))
    await _resolve(world, receipt, "dismiss")
    assert await sums(world) == await sums(world, "ORD-2") == ("paid", "1000.00", "0.00")
    assert await world.value("SELECT count(*) FROM refunds") == 0
    assert await world.value("SELECT count(*) FROM payments") == 2


@pytest.mark.case("B137")
async def test_a_refund_before_its_payment_is_held(world: World, echo: EchoHost) -> None:
    """Refunds have no rank that could wait for a payment: a person replays it when the payment is there."""
    await world.order("ORD-1", source=ECHO)

    early = await tell(world, echo, refund("R1", "300.00"))
    await tell(world, echo, PAID)

    assert await world.outcome(early) == ("held", "amount")
    assert await sums(world) == ("paid", "1000.00", "0.00")


@pytest.mark.case("B137")
async def test_a_refund_that_is_on_record_already_is_a_duplicate(world: World, echo: EchoHost) -> None:
    """The merchant's own refund comes back as a notification: it is known by the provider's id and counted once."""
    await world.order("ORD-1", source=ECHO)
    await tell(world, echo, PAID)
    async with world.rt.db.transaction("test.refund") as tx:
        await tx.execute(
            """INSERT INTO refunds (tenant_id, id, order_id, payment_id, reference, amount, currency, status, provider_refund_id)
               SELECT tenant_id, gen_random_uuid(), order_id, id, 'return-7', 300, 'BDT', 'succeeded', 'R1' FROM payments"""
        )
        await tx.execute("UPDATE payments SET amount_refunded = 300")
        await tx.execute("UPDATE orders SET amount_refunded = 300, status = 'partially_refunded'")

    same = await tell(world, echo, refund("R1", "300.00"))
    other = await tell(world, echo, refund("R1", "299.00"))

    assert await world.outcome(same) == ("duplicate", None)
    assert await world.outcome(other) == ("conflict", "amount")
    assert await sums(world) == ("partially_refunded", "1000.00", "300.00")


async def _resolve(world: World, receipt: Receipt, decision: Decision, evidence: Any = None) -> None:
    assert receipt.delivery_id is not None
    act = resolutions.Act(TENANT, receipt.delivery_id, decision, "test", "looked at", evidence)
    await resolutions.resolve(world.rt.db, act)


# Disputes


@pytest.mark.case("B139")
async def test_a_dispute_and_its_end_are_told_and_never_fail_an_order(world: World, echo: EchoHost) -> None:
    """No adapter has disputes, so each of their words waits for a person: the order is paid all the way, and three events tell of it."""
    await world.order("ORD-1", source=ECHO)
    disputes = [PAID | {"payment_status": word, "txn_id": f"T-{word}"} for word in ("Reversed", "Canceled_Reversal")]
    steps = []
    for fields in (PAID, *disputes):
        receipt = await tell(world, echo, fields)
        steps.append((*await world.outcome(receipt), *await sums(world)))

    assert steps == [
        ("applied", None, "paid", "1000.00", "0.00"),
        ("held", "unknown_status", "paid", "1000.00", "0.00"),
        ("held", "unknown_status", "paid", "1000.00", "0.00"),
    ]
    assert await world.event_types() == ["order.paid", "notification.held", "notification.held"]


@pytest.mark.case("B139")
async def test_the_end_of_a_dispute_alone_is_held(world: World, echo: EchoHost) -> None:
    """It pays no order and closes none."""
    await world.order("ORD-1", source=ECHO)

    receipt = await tell(world, echo, PAID | {"payment_status": "Canceled_Reversal"})

    assert await world.outcome(receipt) == ("held", "unknown_status")
    assert await sums(world) == ("pending", "0.00", "0.00")
    assert await world.event_types() == ["notification.held"]
