"""Receive: what arrives is kept, byte for byte, before anybody is told that we have it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import logs, sources
from ipn_gateway.clock import Clock
from ipn_gateway.errors import MalformedNotification, Overloaded, SignatureInvalid, UnsupportedMediaType
from ipn_gateway.notifications import Floods
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.sslcommerz import encode
from tests.world import FORM, PASSWORD, TENANT

if TYPE_CHECKING:
    from ipn_gateway.notifications import Receipt
    from tests.world import World

JSON = (("content-type", "application/json"),)


async def stored(world: World, receipt: Receipt) -> dict[str, Any]:
    """The row of a delivery."""
    return (await world.rows("SELECT * FROM notification_deliveries WHERE id = %(id)s", id=receipt.delivery_id))[0]


async def refused(world: World, order_id: str, times: int = 1) -> list[Receipt]:
    """Notifications with a wrong hash that name an order."""
    body = encode(FORGERIES["wrong_hash"](world.signed({"tran_id": order_id, "status": "VALID", "amount": "1.00"})))
    return [await world.notify(body) for _ in range(times)]


# What is kept


@pytest.mark.case("S111", "S115")
async def test_the_request_is_kept_as_it_came(world: World) -> None:
    """Body, query and headers in their order, repeats included; and credentials that somebody sent along are not."""
    body = encode(world.pay("ORD-1")) + b"&"
    headers = (
        *FORM,
        ("x-forwarded-for", "192.0.2.7"),
        ("x-forwarded-for", "192.0.2.8"),
        ("cookie", "session=1"),
        ("authorization", "Bearer x"),
    )

    receipt = await world.notify(body, headers=headers)

    row = await stored(world, receipt)
    assert bytes(row["raw_body"]) == body
    assert bytes(row["sha256"]) == hashlib.sha256(body).digest()
    assert row["headers"] == [
        ["content-type", "application/x-www-form-urlencoded"],
        ["x-forwarded-for", "192.0.2.7"],
        ["x-forwarded-for", "192.0.2.8"],
        ["cookie", "[left out]"],
        ["authorization", "[left out]"],
    ]
    assert (row["via"], row["remote_address"], row["proof"], row["provider"]) == ("ipn", "127.0.0.1", "proved", "sslcommerz")


@pytest.mark.case("S115")
async def test_a_receipt_is_given_only_for_what_another_connection_sees(world: World) -> None:
    """A 2xx is a promise that we have it: row and open work are committed together before the call returns."""
    receipt = await world.notify(world.pay("ORD-1"))

    async with await psycopg.AsyncConnection.connect(world.rt.url) as other:
        cursor = await other.execute(
            "SELECT outcome, state, due_at <= ipn_now() FROM notification_deliveries d JOIN inbox i ON i.notification_delivery_id = d.id"
            " WHERE d.id = %s",
            (receipt.delivery_id,),
        )
        assert await cursor.fetchall() == [("received", "received", True)]


@pytest.mark.case("S115")
async def test_what_cannot_be_stored_is_not_acknowledged(world: World) -> None:
    """The database is away for longer than we try: the caller answers 503, and nothing was kept."""

    async def gone() -> None:
        raise psycopg.OperationalError

    world.rt.faults.on["notifications.receive:before_commit"] = gone
    with pytest.raises(Overloaded):
        await world.notify(world.pay("ORD-1"))

    assert await world.value("SELECT count(*) FROM notification_deliveries") == 0


@pytest.mark.case("S109", "S112", "B05")
async def test_a_repeat_gets_the_same_answer_and_a_row_of_its_own(world: World) -> None:
    """Its sender may never have seen our first answer: it is told nothing else than then, and only the audit grows."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    receipts = []
    for _ in range(3):
        receipts.append(await world.notify(fields))
        await world.drain()

    assert [receipt.error for receipt in receipts] == [None, None, None]
    assert len({receipt.delivery_id for receipt in receipts}) == 3
    assert await world.outcomes() == ["applied", "duplicate", "duplicate"]
    assert await world.event_types() == ["order.paid"]


# What is refused


@pytest.mark.case("S105", "S111", "B59", "B129")
async def test_a_wrong_or_missing_hash_is_refused_and_kept(world: World) -> None:
    """401, stored as `rejected` with the order that it names, without open work; nobody is asked and nothing changes."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    signs = fields["verify_sign"], fields["verify_sign_sha2"]
    bodies = [
        *(encode(FORGERIES[kind](fields)) for kind in ("wrong_hash", "no_hash", "altered_amount", "claimed_paid", "other_store")),
        encode(fields | {"verify_sign": ""}),
        encode(fields | {"error": "e" * 5000}),
        encode(fields | {"verify_sign": signs[0][:-1]}),
        encode(fields | {"verify_sign_sha2": signs[1][:-1]}),
        encode({name: value for name, value in fields.items() if name != "verify_key"}),
        encode({name: value for name, value in fields.items() if name != "verify_sign"}),
    ]

    receipts = [await world.notify(body) for body in bodies]
    await world.drain()

    assert {type(receipt.error) for receipt in receipts} == {SignatureInvalid}
    assert await world.rows("SELECT DISTINCT outcome, reason, proof, order_id FROM notification_deliveries") == [
        {"outcome": "rejected", "reason": "signature", "proof": "refused", "order_id": "ORD-1"}
    ]
    assert await world.value("SELECT count(*) FROM notification_deliveries") == len(bodies)
    assert await world.value("SELECT count(*) FROM inbox") == 0
    assert await world.status("ORD-1") == "pending"
    assert world.questions == 0


@pytest.mark.case("B59")
async def test_hexadecimal_digits_may_be_of_either_case(world: World) -> None:
    """By written rule: a digest in upper case is the same digest."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")

    receipt = await world.notify(fields | {"verify_sign": fields["verify_sign"].upper()})
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)


@pytest.mark.case("B27")
async def test_amounts_that_are_no_plain_numbers_are_malformed(world: World) -> None:
    """Before anything is compared, and without an error of ours: 400, and the order that it names is shown."""
    written = ["NaN", "sNaN", "Infinity", "-0", "1e3", "1e309", "1_000", " 1000.00 ", "+1000.00", "0x3E8", "\u09e7", "1,000.00", "1\x00"]
    changes = [{name: text} for name in ("amount", "currency_amount", "store_amount") for text in written] + [{"amount": ""}]

    receipts = [await world.notify(world.signed(world.pay("ORD-1"), **changed)) for changed in changes]

    assert {type(receipt.error) for receipt in receipts} == {MalformedNotification}
    assert await world.rows(
        "SELECT outcome, reason, order_id, asserted_status, count(*) FROM notification_deliveries GROUP BY 1, 2, 3, 4"
    ) == [{"outcome": "malformed", "reason": "unreadable", "order_id": "ORD-1", "asserted_status": "VALID", "count": len(changes)}]


@pytest.mark.case("B39")
async def test_a_name_twice_is_malformed(world: World) -> None:
    """Whichever of them was signed, and even when both say the same: signer and reader may pick different ones."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    doubled = [("tran_id", "ORD-9999"), ("amount", "1.00"), ("amount", "1000.00"), ("verify_key", "amount"), ("value_a", "")]

    receipts = [await world.notify(encode([pair, *fields.items()])) for pair in doubled]
    receipts += [await world.notify(encode([*fields.items(), pair])) for pair in doubled]
    await world.drain()

    assert {type(receipt.error) for receipt in receipts} == {MalformedNotification}
    assert await world.outcomes() == ["malformed"] * 10
    assert await world.status("ORD-1") == "pending"


async def test_a_body_in_another_language_is_kept_as_malformed(world: World) -> None:
    """415: we cannot read it, and it stays readable for a person."""
    body = encode(world.pay("ORD-1"))
    languages: list[Any] = [JSON, (("content-type", "multipart/form-data; boundary=x"),), (*FORM, ("content-encoding", "gzip"))]

    receipts = [await world.notify(body, headers=headers) for headers in languages]

    assert {type(receipt.error) for receipt in receipts} == {UnsupportedMediaType}
    assert await world.rows("SELECT outcome, reason, raw_body FROM notification_deliveries") == [
        {"outcome": "malformed", "reason": "media_type", "raw_body": body}
    ] * len(languages)


@pytest.mark.case("B73")
async def test_a_missing_or_general_type_pays_all_the_same(world: World) -> None:
    """The bytes say what they are."""
    general: list[Any] = [(), (("content-type", "text/plain"),), (("content-type", "application/octet-stream"),)]
    for number, headers in enumerate(general):
        await world.order(f"ORD-{number}")
        await world.notify(encode(world.pay(f"ORD-{number}")), headers=headers)
    await world.drain()

    assert await world.outcomes() == ["applied"] * 3


# Text that is awkward


@pytest.mark.case("B33", "B35", "B37")
async def test_awkward_text_is_kept_and_pays(world: World) -> None:
    """Blanks, separators, NUL and other scripts are data: the hash is made of them, and nothing is dropped or reinterpreted."""
    awkward = [
        {"value_a": "", "value_b": ""},
        {"value_c": "a;status=FAILED;b=1"},
        {"value_d": "abc\x00def"},
        {"value_d": "abc\\u0000def"},
        {"value_a": "নুসরাত", "card_issuer": "中文 BANK & CO"},
        {"value_d": "x" * 255, "error": "e" * 5000},
    ]
    bodies = []
    for number, changed in enumerate(awkward):
        await world.order(f"ORD-{number}")
        bodies.append(encode(world.signed(world.pay(f"ORD-{number}"), **changed)))
        await world.notify(bodies[-1])
    await world.drain()

    assert await world.rows("SELECT proof, outcome, raw_body FROM notification_deliveries ORDER BY id") == [
        {"proof": "proved", "outcome": "applied", "raw_body": body} for body in bodies
    ]


@pytest.mark.case("B33")
async def test_a_bare_name_is_an_empty_value(world: World) -> None:
    """`value_b` without its `=` is kept in the signed text as it would be with it."""
    await world.order("ORD-1")
    body = encode(world.signed(world.pay("ORD-1"), value_b="")).replace(b"&value_b=&", b"&value_b&")

    receipt = await world.notify(body)
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)


@pytest.mark.case("B37")
async def test_text_that_a_database_refuses_is_shown_with_a_mark(world: World) -> None:
    """NUL in a header or in what is shown becomes its symbol, a lone surrogate a question mark; the bytes stay."""
    receipt = await world.notify(b"tran_id=a%00b&status=VALID", headers=(*FORM, ("x-odd", "a\x00b\udcff")))

    row = await stored(world, receipt)
    assert row["headers"][-1] == ["x-odd", "a␀b?"]
    assert bytes(row["raw_body"]) == b"tran_id=a%00b&status=VALID"
    assert (row["outcome"], row["reason"]) == ("malformed", "unreadable")


# A replaced password


@pytest.mark.case("S111", "B57")
async def test_a_replaced_password_is_known_at_once_and_the_old_one_for_a_week(world: World) -> None:
    """What is signed with either pays; after seven days the old one is a wrong hash."""
    renewed = 'Pa#ss$1 =x"'
    assert await world.rt.sources.get("shop")  # remembered for a second, with the old password
    await sources.patch(world.rt.db, world.rt.vault, TENANT, "shop", {"store_passwd": renewed}, actor="test")
    world.simulator.bank.stores = {**world.simulator.bank.stores, "demo01": renewed}
    for order_id in ("ORD-1", "ORD-2", "ORD-3"):
        await world.order(order_id)

    new = await world.notify(world.pay("ORD-1"))
    old = await world.notify(world.signed(world.pay("ORD-2"), PASSWORD))
    world.rt.clock.advance(days=7, seconds=2)
    late = await world.notify(world.signed(world.pay("ORD-3"), PASSWORD))
    await world.drain()

    assert [await world.outcome(receipt) for receipt in (new, old, late)] == [
        ("applied", None),
        ("applied", None),
        ("rejected", "signature"),
    ]


# Floods


class Steady(Clock):
    """A clock whose durations pass when the test says so."""

    seconds = 0.0

    def monotonic_seconds(self) -> float:  # type: ignore[override]
        return self.seconds


@pytest.mark.case("S111")
def test_the_rate_is_one_of_each_source_and_address() -> None:
    """Three hundred at once, then five a second; who floods from one address takes nothing from another one."""
    clock = Steady()
    floods = Floods(clock)

    assert sum(floods.within("shop", "192.0.2.1") for _ in range(400)) == 300
    assert floods.within("shop", "192.0.2.2")
    assert floods.within("other", "192.0.2.1")
    clock.seconds = 2.0
    assert sum(floods.within("shop", "192.0.2.1") for _ in range(400)) == 10
    clock.seconds = 3600.0
    assert sum(floods.within("shop", "192.0.2.1") for _ in range(400)) == 300


@pytest.mark.case("S111")
async def test_a_flood_of_forgeries_is_counted_and_sampled(world: World) -> None:
    """Beyond the rate one in a hundred is kept, the others are counted; all get the same answer, and what may be genuine is kept."""
    world.rt.intake.floods = Floods(Steady())
    before = logs.counters["notifications.refused_beyond_rate"]

    receipts = await refused(world, "NO-SUCH-ORDER", times=450)
    genuine = await world.notify(world.pay("ORD-1"))
    unproved = await world.notify(encode(FORGERIES["odd_key"](world.pay("ORD-1"))))

    kept = [receipt for receipt in receipts if receipt.delivery_id]
    assert all(isinstance(receipt.error, SignatureInvalid) for receipt in receipts)
    assert len(kept) == 300 + 2
    assert logs.counters["notifications.refused_beyond_rate"] - before == 450 - len(kept)
    assert await world.value("SELECT count(*) FROM notification_deliveries WHERE outcome = 'rejected'") == len(kept)
    assert genuine.delivery_id
    assert unproved.delivery_id


@pytest.mark.case("S111")
async def test_a_flood_cannot_drown_what_names_an_unpaid_order(world: World) -> None:
    """A wrong hash may be a changed password: a hundred that name an unpaid order are kept beyond the rate, of a paid one none."""
    world.rt.intake.floods = Floods(Steady())
    await world.order("ORD-1")
    await world.order("ORD-2")
    await world.notify(world.pay("ORD-2"))
    await world.drain()
    await refused(world, "NO-SUCH-ORDER", times=301)  # the last of them is the sample

    unpaid = await refused(world, "ORD-1", times=95)
    paid = await refused(world, "ORD-2", times=4)
    unpaid += await refused(world, "ORD-1", times=15)

    assert {receipt.delivery_id for receipt in paid} == {None}
    assert sum(receipt.delivery_id is not None for receipt in unpaid) == 100 + 1  # and one more sample
