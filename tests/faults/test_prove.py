"""`ipn-gateway prove`: real processes are killed, and a count says that nothing is lost and nothing counts twice."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway.proof import findings, fleet, ordeals
from ipn_gateway.proof.findings import Books, Heard
from ipn_gateway.simulator.sslcommerz import Attempt
from tests.cli import command

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 150
PROMISED = ["accepted", "applied", "lost", "doubled", "events", "events_lost", "kills"]


def left_in(directory: Path) -> list[Path]:
    """What a proof with this TMPDIR left behind."""
    return list(directory.iterdir())


@pytest.mark.case("S107", "S115", "S123")
@pytest.mark.timeout(SECONDS)  # a database, a dozen processes and their leases
async def test_killed_processes_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    """A short proof with two gateways: whatever dies where, the bank, the books and the subscribers agree; nothing of it is left behind."""
    given = ("--notifications", "60", "--kills", "5", "--sends", "2", "--seed", "1", "--json")
    process = await command.start("prove", *given, TMPDIR=str(tmp_path), IPN_DATABASE_URL="postgresql://nowhere.invalid/")
    done = await command.ended(process, seconds=SECONDS - 10)

    report = done.json

    assert done.code == 0, done.err
    assert list(report)[: len(PROMISED)] == PROMISED
    assert [report[name] for name in ("accepted", "applied", "lost", "doubled", "events_lost", "kills")] == [60, 60, 0, 0, 0, 5]
    assert report["events"] > 50
    assert (report["sends"]["rounds"], report["sends"]["zombies"], report["sends"]["zombies_overwrote"]) == (2, 1, 0)
    assert left_in(tmp_path) == []


def test_the_seed_decides_what_is_sent_and_where_processes_die() -> None:
    """The same plan for the same seed, exactly as many notifications as asked for, and every point before any comes again."""
    plan, ends = ordeals.plan(500, 3), fleet.dooms(200, 500, 3)
    points = Counter(end.at for end in ends if end.at)

    assert plan == ordeals.plan(500, 3) != ordeals.plan(500, 4)
    assert ends == fleet.dooms(200, 500, 3) != fleet.dooms(200, 500, 4)
    assert sum(len(ordeal.attempts) for ordeal in plan if ordeal.told) == 500
    assert len(ends) == 200
    assert set(points) == set(fleet.POINTS)
    assert max(points.values()) - min(points.values()) <= 1


# What is counted


PAID = Attempt(
    status="VALID",
    store_id="testbox",
    tran_id="ORD-1",
    tran_date="",
    amount=Decimal(100),
    currency_type="BDT",
    currency_amount=Decimal(100),
    currency_rate=Decimal(1),
    val_id="val-1",
)


def books(**changed: Any) -> Books:
    """One paid order as it should be, or with other rows."""
    rows: dict[str, list[dict[str, Any]]] = {
        "orders": [{"order_id": "ORD-1", "status": "paid", "amount": Decimal(100), "currency": "BDT", "amount_paid": Decimal(100)}],
        "payments": [{"order_id": "ORD-1", "operation_id": "val-1", "amount": Decimal(100), "currency": "BDT", "status": "applied"}],
        "ledger": [{"order_id": "ORD-1", "operation_id": "val-1", "effect": "paid"}],
        "events": [{"id": "evt_1", "type": "order.paid", "order_id": "ORD-1"}],
        "event_deliveries": [{"event_id": "evt_1", "endpoint_id": "ep_1", "status": "delivered"}],
        "delivered": [{"event_delivery_id": "edl_1"}],
        "applied": [{"order_id": "ORD-1", "operation_id": "val-1", "effect": "paid"}],
    }
    return Books(**(rows | changed))


def compared(rows: Books, *event_ids: str) -> findings.Findings:
    heard = Heard(event_ids=event_ids, repeats=0, altered=0, refused=0)
    return findings.compare([PAID], [0], [], rows, [heard])


def test_what_is_as_the_bank_says_is_neither_lost_nor_doubled() -> None:
    """All zeros, and no sentence."""
    found = compared(books(), "evt_1")

    assert (found.accepted, found.applied, found.lost, found.doubled, found.events, found.events_lost) == (1, 1, 0, 0, 1, 0)
    assert findings.differences(found, notifications=1, undone={}) == []


@pytest.mark.parametrize("table", ["orders", "payments", "ledger"])
def test_what_is_missing_is_lost(table: str) -> None:
    """The bank has the money, and one of our rows does not say so."""
    found = compared(books(**{table: []}), "evt_1")

    assert (found.accepted, found.applied, found.lost) == (1, 0, 1)
    assert found.lost_orders == ["ORD-1"]
    assert findings.differences(found, notifications=1, undone={}) != []


def test_another_amount_is_lost_too() -> None:
    """Applied exactly, or not applied."""
    row = {"order_id": "ORD-1", "operation_id": "val-1", "amount": Decimal(99), "currency": "BDT", "status": "applied"}

    assert compared(books(payments=[row]), "evt_1").lost == 1


@pytest.mark.parametrize("table", ["payments", "ledger", "events", "event_deliveries", "delivered", "applied"])
def test_what_is_there_twice_is_doubled(table: str) -> None:
    """Each kind of row counts."""
    rows = getattr(books(), table)
    found = compared(books(**{table: rows * 2}), "evt_1")

    assert found.doubled > 0
    assert findings.differences(found, notifications=1, undone={}) != []


def test_a_sum_beyond_the_banks_is_doubled() -> None:
    """Money on the order that the bank has never seen."""
    order = {"order_id": "ORD-1", "status": "paid", "amount": Decimal(100), "currency": "BDT", "amount_paid": Decimal(200)}

    assert compared(books(orders=[order]), "evt_1").doubled == 1


def test_events_that_did_not_arrive_are_named() -> None:
    """And so are those that arrived without having been written."""
    found = compared(books(), "evt_2")

    assert (found.events_lost, found.events_lost_ids, found.events_invented) == (1, ["evt_1"], 1)
    assert len(findings.differences(found, notifications=1, undone={"notifications": 1})) == 3
