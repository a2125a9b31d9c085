"""The payloads of the provider's documents, and what anybody can forge from them, through the whole flow."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import notifications
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.sslcommerz import encode
from tests.providers.sslcommerz import V1, V2, V3, element, load, validator_answer

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
    receipt = await notifications.receive(world.rt.intake, account, load(sample))
    await world.drain()
    return receipt


def answers(*bodies: dict[str, Any]) -> list[httpx.Response]:
    return [httpx.Response(200, json=body) for body in bodies]


def listed(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"APIConnect": "DONE", "no_of_trans_found": len(elements), "element": list(elements)}


@pytest.mark.case("S105", "S107", "B131")
async def test_a_genuine_payment_is_applied_in_the_providers_words(golden: World, provider_mock: respx.MockRouter) -> None:
    """Amount of the order, settled and net amount, the bank's id and the provider's local time, all from the validator's answer."""
    await golden.order("ORD-2026-000481", "1250.50", source=GOLDEN)
    route = provider_mock.get(VALIDATOR).mock(side_effect=answers(validator_answer(V1), validator_answer(V1, status="VALIDATED")))

    receipt = await posted(golden, "v1_valid")

    assert await golden.outcome(receipt) == ("applied", None)
    payment = (await golden.rows("SELECT * FROM payments"))[0]
    assert (payment["operation_id"], payment["provider_transaction_id"]) == ("2607141203317Qm4ZtVb1xYd2Rk", "260714120330Hk2LsWq9PzTf")
    assert (payment["amount"], payment["currency"], payment["net_amount"]) == (Decimal("1250.50"), "BDT", Decimal("1225.49"))
    assert (payment["settled_amount"], payment["settled_currency"]) == (Decimal("1250.50"), "BDT")
    assert payment["paid_at"] == datetime(2026, 7, 14, 6, 2, 58, tzinfo=UTC)
    asked = route.calls.last.request.url.params
    assert (asked["val_id"], asked["store_id"], asked["store_passwd"]) == ("2607141203317Qm4ZtVb1xYd2Rk", "demos64b1", "demo_pass@ssl")


@pytest.mark.case("S105", "B31")
@pytest.mark.parametrize(
    ("sample", "proof"),
    [("v1_ampersand_in_issuer", "proved"), ("v1_equals_in_value", "unproved"), ("v1_gbk", "proved")],
)
async def test_an_ampersand_in_a_value_is_told_from_a_folded_field(
    golden: World, provider_mock: respx.MockRouter, sample: str, proof: str
) -> None:
    """A bank's name with `&` proves; a value that looks like another field proves nothing, and the provider decides; both pay."""
    await golden.order("ORD-2026-000481", "1250.50", source=GOLDEN)
    provider_mock.get(VALIDATOR).mock(side_effect=answers(validator_answer(V1)))

    receipt = await posted(golden, sample)

    assert await golden.value("SELECT proof FROM notification_deliveries") == proof
    assert await golden.outcome(receipt) == ("applied", None)


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
async def test_no_forgery_gains_anything(world: World, status: str) -> None:
    """Nobody can make of a genuine notification what pays another sum or order, or stands in the genuine one's way; all is kept."""
    ends = {}
    for kind, forge in FORGERIES.items():
        order_id = f"ORD-{kind}"
        await world.order(order_id)
        fields = world.pay(order_id, status=status)

        forged = await world.notify(encode(forge(fields)))
        await world.drain()
        genuine = await world.notify(fields)
        await world.drain()

        ends[kind] = await world.outcome(forged)
        assert await world.outcome(genuine) == ("duplicate" if kind == "odd_key" else "applied", None)
        assert await world.status(order_id) == ("paid" if status == "VALID" else "cancelled")
        world.rt.clock.advance(seconds=1)  # the next that proves nothing may be asked about

    assert ends == {kind: of_status[status] for kind, of_status in ENDS.items()}
    assert await world.value("SELECT count(*) FROM payments") == len(FORGERIES) * (status == "VALID")
    assert await world.value("SELECT count(*) FROM orders") == len(FORGERIES)
