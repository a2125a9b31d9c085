"""Orders over HTTP: what is taken, how it is shown, and how a list is paged."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from tests.make import Make, ago
from tests.web.conftest import ORDER, SOURCE, Caller, pointers, problem

if TYPE_CHECKING:
    from ipn_gateway.runtime import Runtime


async def test_an_order_is_registered_and_shown(shop: Caller) -> None:
    """201 with the order and its address; every member of the contract is there."""
    asked = ORDER | {
        "return_url": "https://shop.example/done?a=1",
        "expires_at": "2030-01-01T06:00:00+06:00",
        "metadata": {"cart": [1, 2.5, None]},
    }
    answer = await shop.post("/v1/orders", asked)

    assert answer.status_code == 201
    assert answer.headers["location"] == "/v1/orders/ORD-1"
    shown = answer.json()
    assert shown.pop("created_at").endswith("Z")
    assert shown.pop("updated_at").endswith("Z")
    assert shown == {
        "order_id": "ORD-1",
        "source": "shop-main",
        "status": "pending",
        "reason": None,
        "amount": "100.00",
        "currency": "BDT",
        "amount_paid": "0.00",
        "amount_refunded": "0.00",
        "return_url": "https://shop.example/done?a=1",
        "expires_at": "2030-01-01T00:00:00.000000Z",
        "metadata": {"cart": [1, 2.5, None]},
        "payments": [],
        "refunds": [],
    }
    assert (await shop.get("/v1/orders/ORD-1")).json() == answer.json()


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"order_id": None}, "#/order_id"),
    ({"order_id": ""}, "#/order_id"),
    ({"order_id": "a b"}, "#/order_id"),
    ({"order_id": "a/b"}, "#/order_id"),
    ({"order_id": "ORD\n"}, "#/order_id"),
    ({"order_id": "x" * 65}, "#/order_id"),
    ({"order_id": "x" * 31}, "#/order_id"),
    ({"order_id": "\N{BENGALI DIGIT ONE}"}, "#/order_id"),
    ({"order_id": 1}, "#/order_id"),
    ({"amount": 100}, "#/amount"),
    ({"amount": 10.10}, "#/amount"),
    ({"amount": True}, "#/amount"),
    ({"amount": "0"}, "#/amount"),
    ({"amount": "0.00"}, "#/amount"),
    ({"amount": "-1"}, "#/amount"),
    ({"amount": "+1"}, "#/amount"),
    ({"amount": "1e3"}, "#/amount"),
    ({"amount": "1.001"}, "#/amount"),
    ({"amount": "1.000"}, "#/amount"),
    ({"amount": "1_000"}, "#/amount"),
    ({"amount": " 1"}, "#/amount"),
    ({"amount": ".5"}, "#/amount"),
    ({"amount": "1."}, "#/amount"),
    ({"amount": "NaN"}, "#/amount"),
    ({"amount": "\N{BENGALI DIGIT ONE}"}, "#/amount"),
    ({"amount": "1" * 13}, "#/amount"),
    ({"amount": "1.0", "currency": "JPY"}, "#/amount"),
    ({"currency": "bdt"}, "#/currency"),
    ({"currency": "ABC"}, "#/currency"),
    ({"currency": "XAU"}, "#/currency"),
    ({"currency": ""}, "#/currency"),
    ({"source": 5}, "#/source"),
    ({"source": "nobody"}, "#/source"),
    ({"return_url": "shop.example"}, "#/return_url"),
    ({"return_url": "/done"}, "#/return_url"),
    ({"return_url": "javascript:alert(1)"}, "#/return_url"),
    ({"return_url": "https://"}, "#/return_url"),
    ({"return_url": "https://shop.example/a b"}, "#/return_url"),
    ({"return_url": "https://shop.example/\r\nX: y"}, "#/return_url"),
    ({"return_url": "https://u:p@shop.example/"}, "#/return_url"),
    ({"return_url": "https://shop.example:99999/"}, "#/return_url"),
    ({"return_url": "https://shop.example/" + "x" * 2000}, "#/return_url"),
    ({"expires_at": "2030-01-01"}, "#/expires_at"),
    ({"expires_at": "2030-01-01T00:00:00"}, "#/expires_at"),
    ({"expires_at": "2030-02-30T00:00:00Z"}, "#/expires_at"),
    ({"expires_at": "0001-01-01T00:00:00+06:00"}, "#/expires_at"),
    ({"expires_at": 1893456000}, "#/expires_at"),
    ({"metadata": []}, "#/metadata"),
    ({"metadata": "text"}, "#/metadata"),
    ({"metadata": {"a": "x" * 16_400}}, "#/metadata"),
    ({"metadata": {"a": 10**30}}, "#/metadata"),
]


@pytest.mark.case("S26")
async def test_a_member_that_cannot_be_is_a_422_that_points_at_it(shop: Caller) -> None:
    """And nothing is registered."""
    for members, pointer in IMPOSSIBLE:
        body = {name: value for name, value in (ORDER | members).items() if value is not None}

        assert pointers(await shop.post("/v1/orders", body)) == [pointer], members
    assert (await shop.get("/v1/orders")).json()["items"] == []


async def test_all_that_is_wrong_is_said_at_once(shop: Caller) -> None:
    """A client need not find out one field after the other."""
    assert pointers(await shop.post("/v1/orders", {"order_id": "a b", "currency": "x"})) == [
        "#/order_id",
        "#/amount",
        "#/currency",
        "#/source",
    ]


async def test_money_is_shown_with_its_currencys_decimals(shop: Caller) -> None:
    """However it was written, and exactly up to twelve digits before the point."""
    for currency, given, amount, nothing in (
        ("JPY", "500", "500", "0"),
        ("BDT", "10", "10.00", "0.00"),
        ("KWD", "1.5", "1.500", "0.000"),
        ("USD", "999999999999.99", "999999999999.99", "0.00"),
    ):
        order = (await shop.post("/v1/orders", ORDER | {"order_id": currency, "amount": given, "currency": currency})).json()

        assert (order["amount"], order["amount_paid"], order["amount_refunded"]) == (amount, nothing, nothing)


async def test_a_second_order_of_one_id_is_a_409(shop: Caller) -> None:
    """Whatever it says; the first one stays as it is."""
    await shop.post("/v1/orders", ORDER)

    assert problem(await shop.post("/v1/orders", ORDER | {"amount": "7.00"})) == (409, "order-exists")
    assert (await shop.get("/v1/orders/ORD-1")).json()["amount"] == "100.00"


async def test_two_tenants_may_use_one_order_id(shop: Caller, stranger: Caller) -> None:
    """It is unique per tenant."""
    await stranger.post("/v1/sources", SOURCE | {"name": "other-main"})
    await shop.post("/v1/orders", ORDER)

    assert (await stranger.post("/v1/orders", ORDER | {"source": "other-main"})).status_code == 201


async def test_a_disabled_source_takes_no_order(shop: Caller) -> None:
    """What would be paid to it would be held."""
    await shop.delete("/v1/sources/shop-main")

    assert problem(await shop.post("/v1/orders", ORDER)) == (409, "state-conflict")


async def test_payments_and_refunds_are_shown_with_their_order(api: Caller, rt: Runtime) -> None:
    """Money in the currency it moved in, finer amounts in full, and times in UTC."""
    make = Make(rt.db)
    await make.order(order_id="ORD-7", status="paid", amount=Decimal("1000.5"), amount_refunded=Decimal(10))
    paid = await make.payment(
        order_id="ORD-7", amount=Decimal("1000.5"), settled_amount=Decimal("8.123"), settled_currency="USD", net_amount=Decimal(8)
    )
    await make.payment(order_id="ORD-7", status="unapplied", recorded_at=ago(days=1))
    await make.refund(order_id="ORD-7", payment_id=paid["id"], reference="r-1", amount=Decimal(10))

    order = (await api.get("/v1/orders/ORD-7")).json()

    assert [payment["status"] for payment in order["payments"]] == ["unapplied", "applied"]
    payment = order["payments"][1]
    assert payment["payment_id"] == f"pay_{paid['id'].hex}"
    assert (payment["amount"], payment["settled_amount"], payment["net_amount"]) == ("1000.50", "8.123", "8.00")
    assert (payment["source"], payment["amount_refunded"], payment["paid_at"]) == ("shop-main", "0.00", None)
    assert payment["recorded_at"].endswith("Z")
    assert set(payment) == {
        *("payment_id", "amount", "currency", "settled_amount", "settled_currency", "net_amount", "amount_refunded"),
        *("provider_transaction_id", "operation_id", "source", "status", "paid_at", "recorded_at"),
    }
    refund = order["refunds"][0]
    assert (refund["reference"], refund["amount"], refund["payment_id"]) == ("r-1", "10.00", payment["payment_id"])


async def test_orders_are_filtered(api: Caller, rt: Runtime) -> None:
    """By status, source, and the earliest creation; unknown values are none or a 422."""
    make = Make(rt.db)
    await make.order(order_id="old", created_at=ago(days=2))
    await make.source(name="shop-2")
    await make.order(order_id="new", source_id="shop-2", status="failed")
    shown = (await api.get("/v1/orders/new")).json()

    async def found(**query: Any) -> list[str]:
        return [order["order_id"] for order in (await api.get("/v1/orders", **query)).json()["items"]]

    assert await found() == ["new", "old"]
    assert await found(status="pending") == ["old"]
    assert await found(source="shop-2", status="failed") == ["new"]
    assert await found(source="nobody") == []
    assert await found(since=shown["created_at"]) == ["new"]
    assert pointers(await api.get("/v1/orders", status="odd")) == ["status"]
    assert pointers(await api.get("/v1/orders", since="yesterday")) == ["since"]
    assert pointers(await api.get("/v1/orders", source="\0")) == ["source"]


async def test_pages_hold_each_order_once_while_new_ones_come_in(api: Caller, rt: Runtime) -> None:
    """What is registered meanwhile is newer than the cursor; ties of time are no matter."""
    make = Make(rt.db)
    async with rt.db.transaction("test") as tx:
        in_one_transaction = Make(tx)
        for number in range(7):
            await in_one_transaction.order(order_id=f"ORD-{number}", created_at=ago(hours=1 + number // 3))

    seen: list[str] = []
    cursor = None
    while True:
        page = (await api.get("/v1/orders", limit=2, **({"cursor": cursor} if cursor else {}))).json()
        seen += [order["order_id"] for order in page["items"]]
        await make.order(order_id=f"NEW-{len(seen)}")
        if (cursor := page["next_cursor"]) is None:
            break

    assert seen == ["ORD-2", "ORD-1", "ORD-0", "ORD-5", "ORD-4", "ORD-3", "ORD-6"]


async def test_a_limit_that_cannot_be_is_a_422(api: Caller) -> None:
    """It is 1 to 200."""
    for limit in ("0", "201", "-1", "x", "1.5", "9" * 50):
        assert pointers(await api.get("/v1/orders", limit=limit)) == ["limit"], limit


async def test_a_cursor_that_the_list_did_not_give_is_a_422(api: Caller, rt: Runtime) -> None:
    """Of another list, another form, or with values that no row has: never a 500."""
    make = Make(rt.db)
    for _ in range(2):
        await make.order()
    given = (await api.get("/v1/orders", limit=1)).json()["next_cursor"]

    for cursor in ("x", "", "!!!", given[:-4], "WyJvcmRlcnMiLCJub3ciLCJhIl0", "bnVsbA", "W10", "WyJvcmRlcnMiLDEsMl0", "é"):
        assert pointers(await api.get("/v1/orders", cursor=cursor)) == ["cursor"], cursor
    assert pointers(await api.get("/v1/sources", cursor=given)) == ["cursor"]
    assert pointers(await api.get("/v1/orders", cursor="x" * 501)) == ["cursor"]
