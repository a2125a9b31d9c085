"""SSLCOMMERZ: sessions and refunds. The shared suite against the simulator, published samples, and exact money."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipn_gateway.providers import sslcommerz_money
from ipn_gateway.providers.base import (
    Declined,
    NoOutcome,
    Provider,
    ProviderConfig,
    RefundAccepted,
    RefundCancelled,
    RefundPending,
    RefundRequest,
    RefundRequestedBefore,
    RefundSucceeded,
    SessionOpened,
    SessionRequest,
)
from ipn_gateway.providers.sslcommerz import PROVIDER
from ipn_gateway.providers.sslcommerz_api import SslcommerzConfig
from ipn_gateway.simulator import sessions
from ipn_gateway.simulator.app import SimulatorConfig, create_app
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.simulator.faults import Fault
from ipn_gateway.simulator.serving import serving as running
from tests import loopback
from tests.providers.contract import Scripted, answered
from tests.providers.money_contract import MoneyContract, Paid, key_of
from tests.providers.sslcommerz import STORE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from ipn_gateway.simulator.app import Simulator
    from ipn_gateway.transport import Transport
    from tests.providers.money_contract import Call, OtherSide

PASSWORD = "Demo@Pass1"
PATHS: Mapping[Call, str] = {"session": "init", "refund": "refund", "refund_status": "refund_query"}
KEY = key_of(30)
BANK = "260714120330Hk2LsWq9PzTf"


@dataclass
class Simulated:
    """The simulator as the shared suite sees it."""

    simulator: Simulator
    store: SslcommerzConfig

    @property
    def config(self) -> ProviderConfig:
        return self.store

    def pay(self, order_id: str, amount: Decimal, currency: str) -> Paid:
        asked = PaymentRequest(tran_id=order_id, amount=amount, currency=currency, send_ipn=False)
        made = self.simulator.control.pay(asked)
        return Paid(made["bank_tran_id"], Decimal(made["amount"]), made["currency"])

    def fault(self, call: Call, kind: str) -> None:
        self.simulator.api.faults.add(Fault.model_validate({"path": PATHS[call], "kind": kind}))

    def cancel(self, provider_refund_id: str) -> None:
        assert self.simulator.api.refunds.decide(provider_refund_id, "cancelled")

    def sessions(self) -> int:
        return len(self.simulator.bank.sessions)

    def moved(self) -> Mapping[str, int]:
        return self.simulator.api.refunds.accepted()

    def refunded(self) -> list[Decimal]:
        """The amounts, in BDT."""
        return [refund.amount for refund in self.simulator.api.refunds.by_ref_id.values()]

    async def idle(self) -> None:
        while self.simulator.api.faults.hanging:  # noqa: ASYNC110 - it has no event, and the test has a limit
            await asyncio.sleep(0)


@asynccontextmanager
async def simulated() -> AsyncIterator[Simulated]:
    app = create_app(SimulatorConfig(store_id="demo01", store_passwd=PASSWORD, seed=1))
    async with running(app) as url:
        yield Simulated(app.state.simulator, store(url))


def store(base_url: str) -> SslcommerzConfig:
    return SslcommerzConfig(store_id="demo01", store_passwd=cast("Any", PASSWORD), mode="live", base_url=base_url)


class TestSslcommerzMoney(MoneyContract):
    """The shared suite."""

    provider: ClassVar[Provider] = PROVIDER
    currency: ClassVar[str] = "BDT"

    def other_side(self) -> AbstractAsyncContextManager[OtherSide]:
        return simulated()

    def unreachable(self) -> SslcommerzConfig:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return store(f"http://127.0.0.1:{listener.getsockname()[1]}")

    # What only this provider does

    async def test_a_foreign_order_is_refunded_in_shares_of_its_settlement(self, other: Simulated, transport: Transport) -> None:
        """100.00 USD were settled at 12340.00 BDT: three parts are rounded down to 0.01, and the provider takes all of them."""
        paid, ask = other.pay("ORD-1", Decimal("100.00"), "USD"), transport.ask_for(timeout_seconds=5)
        whole = self.refund(paid, currency="USD", payment_amount=Decimal("100.00"))
        parts = [Decimal("33.33"), Decimal("33.33"), Decimal("33.34")]

        found = [
            await PROVIDER.refund(ask, other.config, replace(whole, amount=amount, key=f"part-{number}"))
            for number, amount in enumerate(parts)
        ]

        assert [type(answer) for answer in found] == [RefundAccepted] * 3
        assert other.refunded() == [Decimal("4112.92"), Decimal("4112.92"), Decimal("4114.15")]
        assert Decimal(0) <= Decimal("12340.00") - sum(other.refunded()) < Decimal("0.03")

    async def test_a_whole_foreign_payment_is_its_whole_settlement(self, other: Simulated, transport: Transport) -> None:
        """Nothing stays behind: the provider has nothing left to give back."""
        paid, ask = other.pay("ORD-1", Decimal("0.30"), "EUR"), transport.ask_for(timeout_seconds=5)
        whole = self.refund(paid, currency="EUR", amount=Decimal("0.30"), payment_amount=Decimal("0.30"))

        accepted = await PROVIDER.refund(ask, other.config, whole)
        more = await PROVIDER.refund(ask, other.config, replace(whole, key="another", amount=Decimal("0.01")))

        assert isinstance(accepted, RefundAccepted)
        assert other.refunded() == [Decimal("42.98")] == [paid.settled_amount]
        assert more == Declined("failed_refund_amount_is_more_than_what_is_left_of_the")

    @pytest.mark.parametrize(
        ("word", "cause"), [("FAILED", "FAILED"), ("REQUEST_FROM_INVALID_SOURCE 192.0.2.1", "REQUEST_FROM_INVALID_SOURCE")]
    )
    async def test_a_call_that_was_not_taken_is_no_answer_about_the_refund(
        self, other: Simulated, transport: Transport, word: str, cause: str
    ) -> None:
        """The cause names their word, for a person to see that it was access."""
        paid = self.paid(other)
        other.simulator.api.faults.add(Fault(path="refund", kind="apiconnect", value=word))

        found = await PROVIDER.refund(transport.ask_for(timeout_seconds=5), other.config, self.refund(paid))

        assert found == NoOutcome(f"api_connect_{cause}", sent=True)

    async def test_a_wrong_password_declines_a_session_and_decides_no_refund(self, other: Simulated, transport: Transport) -> None:
        """A session says FAILED with a reason; the other address says only that the call was bad."""
        paid, ask = self.paid(other), transport.ask_for(timeout_seconds=5)
        wrong = other.store.model_copy(update={"store_passwd": STORE.store_passwd})

        assert await PROVIDER.open_session(ask, wrong, self.session()) == Declined("failed_store_credential_error_or_store_is")
        assert await PROVIDER.refund(ask, wrong, self.refund(paid)) == NoOutcome("api_connect_FAILED")
        assert await PROVIDER.refund_status(ask, wrong, "66a1demo0001", paid.provider_transaction_id) == NoOutcome("api_connect_FAILED")


# --- sessions


def session(**changes: Any) -> SessionRequest:
    return TestSslcommerzMoney().session(**changes)


async def opened_by(*answers: Any, **changes: Any) -> Any:
    return await PROVIDER.open_session(Scripted([answered(answer) for answer in answers]), STORE, session(**changes))


async def test_a_session_is_one_post_with_every_mandatory_field() -> None:
    """The address of the listener goes along, and the provider's own rules are met (API v4)."""
    ask = Scripted([answered({"status": "SUCCESS", "GatewayPageURL": "https://sandbox.sslcommerz.com/EasyCheckOut/testcde1"})])

    found = await PROVIDER.open_session(ask, STORE, session(amount=Decimal(1000)))

    assert found == SessionOpened("https://sandbox.sslcommerz.com/EasyCheckOut/testcde1")
    question = ask.asked[0]
    assert (question.method, question.url, len(ask.asked)) == ("POST", "https://sandbox.sslcommerz.com/gwprocess/v4/api.php", 1)
    assert sessions.problem(question.params) is None
    assert dict(question.params) == {
        "store_id": "demos64b1",
        "store_passwd": "demo_pass@ssl",
        "total_amount": "1000.00",
        "currency": "BDT",
        "tran_id": "ORD-1",
        "success_url": "https://shop.example/return/shop/success",
        "fail_url": "https://shop.example/return/shop/fail",
        "cancel_url": "https://shop.example/return/shop/cancel",
        "ipn_url": "https://shop.example/ipn/shop",
        "cus_name": "আলী",
        "cus_email": "a@b.example",
        "cus_phone": "01700000000",
        "cus_add1": "1 Road & 2",
        "cus_city": "Dhaka",
        "cus_postcode": "1000",
        "cus_country": "Bangladesh",
        "product_name": "Book",
        "product_category": "book",
        "product_profile": "general",
        "num_of_item": "1",
        "shipping_method": "NO",
        "emi_option": "0",
    }


@pytest.mark.parametrize(
    "url",
    [
        "https://sandbox.sslcommerz.com/gwprocess/v4/gw.php?Q=PAY&SESSIONKEY=1B2C%20#top",
        "HTTPS://epay-gw.sslcommerz.com:443/x",
        "http://127.0.0.1:8100/pay/1",
        "http://[::1]:8100/pay/1",
        "https://pay.sslcommerz.com?s=1",
        "https://pay.sslcommerz.com",
        "https://pay.sslcommerz.com/" + "x" * 2000,
    ],
)
async def test_an_absolute_page_is_taken_as_it_is(url: str) -> None:
    """The customer is sent to exactly what the provider gave."""
    assert await opened_by({"status": "SUCCESS", "GatewayPageURL": url}) == SessionOpened(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        None,
        7,
        ["https://pay.sslcommerz.com/"],
        "/pay/1",
        "//pay.sslcommerz.com/pay",
        "pay.sslcommerz.com/pay",
        "javascript:alert(1)",
        "ftp://pay.sslcommerz.com/",
        "https:///pay",
        "https:pay.sslcommerz.com",
        "https://user@pay.sslcommerz.com/",
        "https://pay.sslcommerz.com:pw@evil.example/",
        "https://pay.sslcommerz.com\\@evil.example/",
        "https://pay.sslcommerz.com/\r\nSet-Cookie: a=b",
        "https://pay.sslcommerz.com/\n",
        "https://pay.sslcommerz.com/a b",
        'https://pay.sslcommerz.com/"><script>',
        "https://p\u0430y.sslcommerz.com/",
        "https://pay.sslcommerz.com:port/",
        "https://pay.sslcommerz.com/" + "x" * 2100,
    ],
)
async def test_a_page_that_no_browser_should_be_sent_to_is_no_outcome(url: Any) -> None:
    """SUCCESS may be true all the same, so it is not declined."""
    assert await opened_by({"status": "SUCCESS", "GatewayPageURL": url}) == NoOutcome("no_gateway_page_url")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            {"status": "FAILED", "failedreason": "Store Credential Error Or Store is De-active"},
            Declined("failed_store_credential_error_or_store_is"),
        ),
        (
            {"status": "FAILED", "failedreason": "Invalid Information! 'cus_email' is missing."},
            Declined("failed_invalid_information_cus_email_is_missing"),
        ),
        ({"status": "FAILED", "failedreason": "x@y.example 192.0.2.1 #12 ৳"}, Declined("failed")),
        ({"status": "FAILED", "failedreason": "no demo_pass@ssl, no DEMO_PASS@SSL!"}, Declined("failed_no_no")),
        ({"status": "FAILED", "failedreason": "too long " * 100}, Declined("failed_too_long_too_long_too_long_too_long_too_long_too_long")),
        ({"status": "FAILED", "failedreason": ""}, NoOutcome("status_FAILED")),
        ({"status": "FAILED"}, NoOutcome("status_FAILED")),
        ({"status": "FAILED", "failedreason": ["no"]}, NoOutcome("status_FAILED")),
        ({"status": "failed", "failedreason": "no"}, NoOutcome("status_failed")),
        ({"status": "PENDING", "GatewayPageURL": "https://pay.sslcommerz.com/"}, NoOutcome("status_PENDING")),
        ({"GatewayPageURL": "https://pay.sslcommerz.com/"}, NoOutcome("status_missing")),
        ({"status": ["SUCCESS"], "GatewayPageURL": "https://pay.sslcommerz.com/"}, NoOutcome("status_missing")),
        ({"APIConnect": "FAILED"}, NoOutcome("status_missing")),
        (b'{"status":"SUCCESS","status":"FAILED","failedreason":"no"}', NoOutcome("not_json")),
    ],
)
async def test_only_two_words_are_answers_to_a_session(answer: Any, expected: Any) -> None:
    """A reason becomes a short code of its plain words, without what it may quote."""
    assert await opened_by(answer) == expected


@pytest.mark.parametrize(
    ("amount", "currency", "problem"),
    [
        ("10.00", "BDT", None),
        ("500000", "BDT", None),
        ("500000.0000", "BDT", None),
        ("9.99", "BDT", "must be 10.00 to 500000.00 BDT at SSLCOMMERZ"),
        ("500000.01", "BDT", "must be 10.00 to 500000.00 BDT at SSLCOMMERZ"),
        ("0.01", "USD", None),
        ("999999999999.99", "USD", None),
        ("10.500", "KWD", None),
        ("10.505", "KWD", "must have at most two decimals at SSLCOMMERZ"),
    ],
)
def test_the_limits_that_can_be_known_here(amount: str, currency: str, problem: str | None) -> None:
    """BDT has its limits; another currency is converted first, at a rate that is theirs."""
    assert PROVIDER.order_amount_problem(Decimal(amount), currency) == problem


# --- refunds


def refund_request(**changes: Any) -> RefundRequest:
    made = TestSslcommerzMoney().refund(
        Paid(BANK, Decimal("1250.50"), "BDT"), order_id="ORD-2026-000481", payment_amount=Decimal("1250.50")
    )
    return replace(made, **changes)


async def refunded_by(answer: Any, **changes: Any) -> Any:
    return await PROVIDER.refund(Scripted([answered(answer)]), STORE, refund_request(**changes))


ACCEPTED = {
    "APIConnect": "DONE",
    "bank_tran_id": BANK,
    "trans_id": "ORD-2026-000481",
    "refund_ref_id": "66a1demo0001",
    "status": "success",
    "errorReason": "",
}
ASKED = {
    "APIConnect": "DONE",
    "bank_tran_id": BANK,
    "tran_id": "ORD-2026-000481",
    "initiated_on": "2026-07-15 10:00:00",
    "refunded_on": "",
    "status": "processing",
    "refund_ref_id": "66a1demo0001",
}


async def test_the_published_refund_and_its_query() -> None:
    """The samples of API v4, and what is asked for them: by GET, once each."""
    ask = Scripted([answered(ACCEPTED), answered(ASKED)])

    accepted = await PROVIDER.refund(ask, STORE, refund_request(remarks=" late "))
    status = await PROVIDER.refund_status(ask, STORE, "66a1demo0001", BANK)

    assert (accepted, status) == (RefundAccepted("66a1demo0001"), RefundPending())
    url = "https://sandbox.sslcommerz.com/validator/api/merchantTransIDvalidationAPI.php"
    assert [(question.method, question.url) for question in ask.asked] == [("GET", url)] * 2
    credentials = {"store_id": "demos64b1", "store_passwd": "demo_pass@ssl", "format": "json"}
    assert dict(ask.asked[0].params) == credentials | {
        "bank_tran_id": BANK,
        "refund_trans_id": KEY,
        "refund_amount": "400.00",
        "refund_remarks": "late",
        "refe_id": "ORD-2026-000481",
        "v": "1",
    }
    assert dict(ask.asked[1].params) == credentials | {"refund_ref_id": "66a1demo0001"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RefundAccepted("66a1demo0001")),
        ({"bank_tran_id": ""}, RefundAccepted("66a1demo0001")),
        ({"bank_tran_id": None}, RefundAccepted("66a1demo0001")),
        ({"refund_ref_id": 4711}, RefundAccepted("4711")),
        ({"status": "processing"}, RefundAccepted("66a1demo0001")),
        ({"status": "processing", "refund_ref_id": ""}, RefundRequestedBefore()),
        ({"status": "processing", "refund_ref_id": None}, RefundRequestedBefore()),
        ({"status": "failed", "refund_ref_id": ""}, Declined("failed")),
        ({"status": "failed", "refund_ref_id": "", "errorReason": None}, Declined("failed")),
        (
            {"status": "failed", "refund_ref_id": "", "errorReason": "Refund amount 400.00 exceeds!"},
            Declined("failed_refund_amount_exceeds"),
        ),
        ({"status": "failed", "refund_ref_id": "", "bank_tran_id": "", "errorReason": "No such id"}, Declined("failed_no_such_id")),
        ({"status": "success", "refund_ref_id": ""}, NoOutcome("refund_ref_id")),
        ({"status": "success", "refund_ref_id": None}, NoOutcome("refund_ref_id")),
        ({"status": "success", "refund_ref_id": ["66a1"]}, NoOutcome("refund_ref_id")),
        ({"status": "success", "refund_ref_id": "66a1 demo"}, NoOutcome("refund_ref_id")),
        ({"status": "success", "refund_ref_id": "x" * 101}, NoOutcome("refund_ref_id")),
        ({"status": "processing", "refund_ref_id": "\u0995"}, NoOutcome("refund_ref_id")),
        ({"status": "failed"}, NoOutcome("refund_ref_id")),
        ({"bank_tran_id": BANK[:-1]}, NoOutcome("other_transaction")),
        ({"bank_tran_id": BANK.lower()}, NoOutcome("other_transaction")),
        ({"bank_tran_id": [BANK]}, NoOutcome("other_transaction")),
        ({"bank_tran_id": "x" * 300}, NoOutcome("other_transaction")),
        ({"status": "failed", "refund_ref_id": "", "bank_tran_id": "another"}, NoOutcome("other_transaction")),
        ({"status": "Success"}, NoOutcome("status_Success")),
        ({"status": "FAILED", "refund_ref_id": ""}, NoOutcome("status_FAILED")),
        ({"status": "refunded"}, NoOutcome("status_refunded")),
        ({"status": "", "refund_ref_id": ""}, NoOutcome("status_missing")),
        ({"status": None}, NoOutcome("status_missing")),
        ({"APIConnect": "FAILED", "status": "failed", "refund_ref_id": ""}, NoOutcome("api_connect_FAILED")),
        ({"APIConnect": "INVALID_REQUEST"}, NoOutcome("api_connect_INVALID_REQUEST")),
        ({"APIConnect": "INACTIVE"}, NoOutcome("api_connect_INACTIVE")),
        ({"APIConnect": ""}, NoOutcome("api_connect_missing")),
    ],
)
async def test_what_an_answer_to_a_refund_means(changes: dict[str, Any], expected: Any) -> None:
    """Declined is only what says so of this payment; everything else that is not accepted may have happened."""
    assert await refunded_by(ACCEPTED | changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": "refunded", "refunded_on": "2026-07-16 10:00:00"}, RefundSucceeded()),
        ({"status": "cancelled", "errorReason": "Card is closed."}, RefundCancelled("cancelled_card_is_closed")),
        ({"status": "cancelled"}, RefundCancelled("cancelled")),
        ({"status": "refunded", "bank_tran_id": ""}, RefundSucceeded()),
        ({"status": "refunded", "refund_ref_id": ""}, RefundSucceeded()),
        ({"status": "refunded", "bank_tran_id": "", "refund_ref_id": ""}, NoOutcome("other_refund")),
        ({"status": "refunded", "bank_tran_id": "another"}, NoOutcome("other_refund")),
        ({"status": "cancelled", "refund_ref_id": "another"}, NoOutcome("other_refund")),
        ({"status": "refunded", "refund_ref_id": ["66a1demo0001"]}, NoOutcome("other_refund")),
        ({"status": "REFUNDED"}, NoOutcome("status_REFUNDED")),
        ({"status": "success"}, NoOutcome("status_success")),
        ({"status": ""}, NoOutcome("status_missing")),
        ({"APIConnect": "INACTIVE", "status": "cancelled"}, NoOutcome("api_connect_INACTIVE")),
    ],
)
async def test_what_an_answer_about_a_refund_means(changes: dict[str, Any], expected: Any) -> None:
    """An end is one only where it is about this refund."""
    found = await PROVIDER.refund_status(Scripted([answered(ASKED | changes)]), STORE, "66a1demo0001", BANK)

    assert found == expected


@pytest.mark.parametrize(("written", "sent"), [("", "Refund"), (" \n", "Refund"), ("x" * 300, "x" * 255), ("ফেরত", "ফেরত")])
async def test_remarks_are_never_empty_and_never_too_long(written: str, sent: str) -> None:
    """They are mandatory there, with at most 255 characters."""
    ask = Scripted([answered(ACCEPTED)])

    await PROVIDER.refund(ask, STORE, refund_request(remarks=written))

    assert ask.asked[0].params["refund_remarks"] == sent


# --- money


USD = {"currency": "USD", "payment_amount": Decimal("100.00"), "settled_amount": Decimal("12340.00"), "settled_currency": "BDT"}


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({"amount": Decimal("1250.5")}, "1250.50"),
        ({"amount": Decimal(7)}, "7.00"),
        ({"amount": Decimal("7.00"), "settled_amount": None, "settled_currency": None}, "7.00"),
        (USD | {"amount": Decimal("100.00")}, "12340.00"),
        (USD | {"amount": Decimal("0.01")}, "1.23"),
        (USD | {"amount": Decimal("99.99")}, "12338.76"),
        (USD | {"amount": Decimal("100.00"), "settled_amount": Decimal("12340.009")}, "12340.00"),
        (USD | {"amount": Decimal(1), "payment_amount": Decimal(3), "settled_amount": Decimal("999999999999.99")}, "333333333333.33"),
    ],
)
async def test_a_refund_is_asked_for_in_taka(changes: dict[str, Any], sent: str) -> None:
    """An order in BDT is its own amount, whatever the settlement; another is its share of it, rounded down."""
    ask = Scripted([answered(ACCEPTED)])

    await PROVIDER.refund(ask, STORE, refund_request(**changes))

    assert ask.asked[0].params["refund_amount"] == sent


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (USD | {"settled_amount": None}, "settlement_unknown"),
        (USD | {"settled_currency": None}, "settlement_unknown"),
        (USD | {"settled_currency": "USD"}, "settlement_unknown"),
        (USD | {"payment_amount": Decimal(0)}, "settlement_unknown"),
        (USD | {"amount": Decimal("0.01"), "settled_amount": Decimal("99.99")}, "amount_too_small"),
    ],
)
async def test_a_refund_that_has_no_amount_in_taka_is_not_asked_for(changes: dict[str, Any], code: str) -> None:
    """Then nothing happened, for sure."""
    ask = Scripted([answered(ACCEPTED)])

    assert await PROVIDER.refund(ask, STORE, refund_request(**changes)) == Declined(code)
    assert ask.asked == []


@given(
    parts=st.lists(st.integers(min_value=1, max_value=10**9), min_size=1, max_size=8),
    settled=st.integers(min_value=1, max_value=10**14),
)
def test_parts_never_exceed_the_settlement_and_lose_less_than_a_poisha_each(parts: list[int], settled: int) -> None:
    """Exact, whatever the numbers: the whole is the whole, and the parts of it come within 0.01 each, from below."""
    payment, settlement = Decimal(sum(parts)).scaleb(-2), Decimal(settled).scaleb(-2)
    whole = refund_request(**USD | {"amount": payment, "payment_amount": payment, "settled_amount": settlement})
    shares = [sslcommerz_money.settled_share(replace(whole, amount=Decimal(part).scaleb(-2))) for part in parts]
    total = sum((share for share in shares if share is not None), Decimal(0))

    assert sslcommerz_money.settled_share(whole) == settlement
    assert None not in shares
    assert settlement - len(parts) * Decimal("0.01") < total <= settlement


# --- on the wire


def says(answer: bytes) -> loopback.Answering:
    return loopback.says(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))


@pytest.mark.case("S11")
async def test_our_key_travels_unquoted_in_full() -> None:
    """Thirty characters, the most that the provider takes, as they are: no quotes, nothing escaped, nothing cut."""
    async with loopback.serving(says(b"{}")) as server, loopback.opened() as transport:
        await PROVIDER.refund(transport.ask_for(timeout_seconds=5), store(f"http://127.0.0.1:{server.port}"), refund_request())

    line = server.requests[0].split(b"\r\n")[0]
    assert len(KEY) == PROVIDER.refund_key_length_max == 30
    assert re.findall(rb"[?&]refund_trans_id=([^& ]*)", line) == [KEY.encode()]
    assert line.startswith(b"GET /validator/api/merchantTransIDvalidationAPI.php?")


@pytest.mark.case("S91")
@pytest.mark.parametrize("call", ["session", "refund"])
async def test_a_kept_connection_that_is_closed_sees_a_money_call_once(call: Call) -> None:
    """The server takes the second call and closes: nobody sends it again, and whether it happened is not known."""

    async def close(_: loopback.Server, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with loopback.serving(says(b"{}")) as server, loopback.opened() as transport:
        suite, config = TestSslcommerzMoney(), store(f"http://127.0.0.1:{server.port}")
        await suite.call(call, transport.ask_for(timeout_seconds=5), config, Paid(BANK, None, None))
        server.answer = close
        found = await suite.call(call, transport.ask_for(timeout_seconds=5), config, Paid(BANK, None, None))

    assert found == NoOutcome("disconnected", sent=True)
    assert (len(server.requests), server.connections) == (2, 1)
    assert server.requests[1].startswith(b"POST /gwprocess/" if call == "session" else b"GET /validator/")
