"""What the money calls of every provider adapter must do, against a simulator of the provider on a loopback socket.

A provider's test inherits `MoneyContract` in `test_<name>_money.py` and says how its simulator is started and made to fail.
"""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager  # noqa: TC003 - a class's annotation
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import pytest

from ipn_gateway.providers.base import (
    Declined,
    NoAnswer,
    NoOutcome,
    RefundAccepted,
    RefundCancelled,
    RefundPending,
    RefundRequest,
    RefundRequestedBefore,
    RefundSucceeded,
    SessionOpened,
    SessionRequest,
)
from tests.loopback import opened
from tests.providers.contract import UNCLEAR, Scripted, answered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from ipn_gateway.providers.base import Answer, Ask, Provider, ProviderConfig
    from ipn_gateway.transport import Transport

Call = Literal["session", "refund", "refund_status"]
CALLS: tuple[Call, ...] = ("session", "refund", "refund_status")

# How an answer is lost, and whether what was asked is done all the same.
LOST: Mapping[str, bool] = {
    "reset": False,
    "hang": False,
    "status500": False,
    "html": False,
    "empty": False,
    "record_then_reset": True,
    "record_then_hang": True,
    "record_then_status500": True,
}

# Only 200 is an answer for sure; what else a status means is for the provider's own codes to say.
STATUSES = [201, 202, 204, 301, 400, 401, 402, 403, 404, 408, 409, 410, 418, 422, 425, 429, 500, 502, 503, 504]


@dataclass(frozen=True)
class Paid:
    """A payment as the provider settled it."""

    provider_transaction_id: str
    settled_amount: Decimal | None
    settled_currency: str | None


class OtherSide(Protocol):
    """A provider's simulator, as a test sees it. The kinds of `fault` are those of `LOST`, and `failed`: it says no."""

    @property
    def config(self) -> ProviderConfig:
        """The account there."""
        ...

    def pay(self, order_id: str, amount: Decimal, currency: str) -> Paid: ...

    def fault(self, call: Call, kind: str) -> None: ...

    def cancel(self, provider_refund_id: str) -> None: ...

    def sessions(self) -> int:
        """How many were opened."""
        ...

    def moved(self) -> Mapping[str, int]:
        """How often money went back, by our key."""
        ...

    async def idle(self) -> None:
        """Wait until no answer hangs."""
        ...


def patience(kind: str) -> float:
    """Seconds to wait for an answer, long enough for the other side to have begun on it."""
    return 1 if kind.endswith("hang") else 5


def key_of(length: int, *, first: str = "q") -> str:
    """A downstream key of exactly this length, in the alphabet of ours."""
    return (first + "abcdefghijklmnopqrstuvwxyz234567" * 8)[:length]


class MoneyContract:
    """Inherit it as `Test…` and fill in these members."""

    provider: ClassVar[Provider]
    currency: ClassVar[str]

    def other_side(self) -> AbstractAsyncContextManager[OtherSide]:
        """The provider's simulator, while the block runs."""
        raise NotImplementedError

    def unreachable(self) -> ProviderConfig:
        """An account at a loopback port where nobody listens."""
        raise NotImplementedError

    @pytest.fixture
    async def other(self) -> AsyncIterator[OtherSide]:
        async with self.other_side() as other:
            yield other

    @pytest.fixture
    async def transport(self) -> AsyncIterator[Transport]:
        async with opened() as transport:
            yield transport

    def session(self, **changes: Any) -> SessionRequest:
        customer = {"name": "আলী", "email": "a@b.example", "phone": "01700000000", "address": "1 Road & 2", "city": "Dhaka"}
        made = SessionRequest(
            order_id="ORD-1",
            amount=Decimal("1000.00"),
            currency=self.currency,
            customer=customer | {"postcode": "1000", "country": "Bangladesh"},
            product={"name": "Book", "category": "book", "profile": "general"},
            success_url="https://shop.example/return/shop/success",
            fail_url="https://shop.example/return/shop/fail",
            cancel_url="https://shop.example/return/shop/cancel",
            notification_url="https://shop.example/ipn/shop",
        )
        return replace(made, **changes)

    def refund(self, paid: Paid, **changes: Any) -> RefundRequest:
        made = RefundRequest(
            key=key_of(self.provider.refund_key_length_max),
            order_id="ORD-1",
            provider_transaction_id=paid.provider_transaction_id,
            amount=Decimal("400.00"),
            currency=self.currency,
            payment_amount=Decimal("1000.00"),
            settled_amount=paid.settled_amount,
            settled_currency=paid.settled_currency,
            remarks='late & "sorry", 50% off',
        )
        return replace(made, **changes)

    def paid(self, other: OtherSide) -> Paid:
        return other.pay("ORD-1", Decimal("1000.00"), self.currency)

    async def call(self, call: Call, ask: Ask, config: ProviderConfig, paid: Paid, refund_id: str = "RF-1") -> Any:
        if call == "session":
            return await self.provider.open_session(ask, config, self.session())
        if call == "refund":
            return await self.provider.refund(ask, config, self.refund(paid))
        return await self.provider.refund_status(ask, config, refund_id, paid.provider_transaction_id)

    def test_its_limits_make_sense(self) -> None:
        """A key of ours is at least 26 characters long; what is known of its retention is a time; a normal amount is no problem."""
        hours = self.provider.key_retention_hours

        assert 26 <= self.provider.refund_key_length_max <= 255
        assert hours is None or hours > 0
        assert self.provider.order_amount_problem(Decimal("1000.00"), self.currency) is None

    async def test_a_session_leads_to_a_page(self, other: OtherSide, transport: Transport) -> None:
        """The customer can be sent there, and a second session moves no money."""
        ask = transport.ask_for(timeout_seconds=5)
        made = [await self.provider.open_session(ask, other.config, self.session()) for _ in range(2)]

        assert [type(session) for session in made] == [SessionOpened, SessionOpened]
        for session in made:
            assert isinstance(session, SessionOpened)
            assert re.match(r"https?://[^/@]+/", session.redirect_url)
            assert session.redirect_url not in repr(session)
        assert other.sessions() == 2
        assert other.moved() == {}

    async def test_a_refused_session_is_declined(self, other: OtherSide, transport: Transport) -> None:
        """A clear no is one, with a short code, and nothing was opened."""
        other.fault("session", "failed")

        found = await self.provider.open_session(transport.ask_for(timeout_seconds=5), other.config, self.session())

        assert isinstance(found, Declined)
        assert re.fullmatch(r"[A-Za-z0-9_]{1,60}", found.code)
        assert other.sessions() == 0

    @pytest.mark.case("S68")
    @pytest.mark.parametrize("kind", LOST)
    async def test_a_session_whose_answer_is_lost_is_neither_open_nor_declined(
        self, other: OtherSide, transport: Transport, kind: str
    ) -> None:
        """It may be open; asking again opens another, which is harmless."""
        other.fault("session", kind)

        lost = await self.provider.open_session(transport.ask_for(timeout_seconds=patience(kind)), other.config, self.session())
        await other.idle()
        again = await self.provider.open_session(transport.ask_for(timeout_seconds=5), other.config, self.session())

        assert isinstance(lost, NoOutcome)
        assert lost.sent
        assert isinstance(again, SessionOpened)
        assert other.sessions() == 1 + LOST[kind]

    async def test_a_refund_is_accepted_and_asked_about_until_it_is_done(self, other: OtherSide, transport: Transport) -> None:
        """Its id leads to its end; money went back once."""
        paid, ask = self.paid(other), transport.ask_for(timeout_seconds=5)
        request = self.refund(paid)

        accepted = await self.provider.refund(ask, other.config, request)
        assert isinstance(accepted, RefundAccepted)
        asked = (other.config, accepted.provider_refund_id, paid.provider_transaction_id)
        polls = [await self.provider.refund_status(ask, *asked) for _ in range(3)]

        assert polls == [RefundPending(), RefundSucceeded(), RefundSucceeded()]
        assert other.moved() == {request.key: 1}

    async def test_a_refund_may_be_cancelled_later(self, other: OtherSide, transport: Transport) -> None:
        """That is its end too, with a short code."""
        paid, ask = self.paid(other), transport.ask_for(timeout_seconds=5)
        accepted = await self.provider.refund(ask, other.config, self.refund(paid))
        assert isinstance(accepted, RefundAccepted)
        other.cancel(accepted.provider_refund_id)

        found = await self.provider.refund_status(ask, other.config, accepted.provider_refund_id, paid.provider_transaction_id)

        assert isinstance(found, RefundCancelled)
        assert re.fullmatch(r"[A-Za-z0-9_]{1,60}", found.code)

    @pytest.mark.case("S67")
    async def test_the_same_key_moves_money_once(self, other: OtherSide, transport: Transport) -> None:
        """A repeat is recognised by the provider, and another key is another refund."""
        paid, ask = self.paid(other), transport.ask_for(timeout_seconds=5)
        first = self.refund(paid)
        second = self.refund(paid, key=key_of(self.provider.refund_key_length_max, first="r"))

        found = [await self.provider.refund(ask, other.config, request) for request in (first, first, second)]

        assert isinstance(found[0], RefundAccepted)
        assert found[1] in {found[0], RefundRequestedBefore()}
        assert isinstance(found[2], RefundAccepted)
        assert found[2] != found[0]
        assert other.moved() == {first.key: 1, second.key: 1}

    async def test_a_refund_of_more_than_was_paid_is_declined(self, other: OtherSide, transport: Transport) -> None:
        """A clear no is one: nothing happened, and a smaller refund under another key goes through."""
        paid, ask = self.paid(other), transport.ask_for(timeout_seconds=5)
        smaller = self.refund(paid, key=key_of(self.provider.refund_key_length_max, first="r"))

        declined = await self.provider.refund(ask, other.config, self.refund(paid, amount=Decimal("1000.01")))
        accepted = await self.provider.refund(ask, other.config, smaller)

        assert isinstance(declined, Declined)
        assert re.fullmatch(r"[A-Za-z0-9_]{1,60}", declined.code)
        assert isinstance(accepted, RefundAccepted)
        assert other.moved() == {smaller.key: 1}

    @pytest.mark.case("S59", "S68")
    @pytest.mark.parametrize("kind", LOST)
    async def test_a_refund_whose_answer_is_lost_may_have_happened(self, other: OtherSide, transport: Transport, kind: str) -> None:
        """It is not declined, whatever came back; with the same key the money goes back once in all."""
        paid = self.paid(other)
        request = self.refund(paid)
        other.fault("refund", kind)

        lost = await self.provider.refund(transport.ask_for(timeout_seconds=patience(kind)), other.config, request)
        await other.idle()
        moved = dict(other.moved())
        again = await self.provider.refund(transport.ask_for(timeout_seconds=5), other.config, request)

        assert isinstance(lost, NoOutcome)
        assert lost.sent
        assert re.fullmatch(r"[A-Za-z0-9_]{1,60}", lost.cause)
        assert moved == ({request.key: 1} if LOST[kind] else {})
        assert isinstance(again, RefundAccepted | RefundRequestedBefore)
        assert other.moved() == {request.key: 1}

    @pytest.mark.parametrize("kind", [kind for kind, done in LOST.items() if not done])
    async def test_a_refund_is_asked_about_again_when_the_answer_is_lost(self, other: OtherSide, transport: Transport, kind: str) -> None:
        """Nothing is decided by a lost answer."""
        paid = self.paid(other)
        accepted = await self.provider.refund(transport.ask_for(timeout_seconds=5), other.config, self.refund(paid))
        assert isinstance(accepted, RefundAccepted)
        asked = (other.config, accepted.provider_refund_id, paid.provider_transaction_id)
        other.fault("refund_status", kind)

        lost = await self.provider.refund_status(transport.ask_for(timeout_seconds=patience(kind)), *asked)
        await other.idle()
        again = await self.provider.refund_status(transport.ask_for(timeout_seconds=5), *asked)

        assert isinstance(lost, NoOutcome)
        assert isinstance(again, RefundPending | RefundSucceeded)

    @pytest.mark.case("S68")
    @pytest.mark.parametrize("call", CALLS)
    async def test_what_never_left_is_told_as_such(self, transport: Transport, call: Call) -> None:
        """Nobody listened: then nothing happened, and that is known."""
        found = await self.call(call, transport.ask_for(timeout_seconds=5), self.unreachable(), Paid("PT-1", Decimal(1000), self.currency))

        assert found == NoOutcome("connect_failed", sent=False)

    @pytest.mark.case("S68")
    @pytest.mark.parametrize("answer", UNCLEAR.values(), ids=UNCLEAR.keys())
    @pytest.mark.parametrize("call", CALLS)
    async def test_an_unclear_answer_is_no_outcome(self, call: Call, answer: Answer | NoAnswer) -> None:
        """A timeout, a page or half an answer is never a no."""
        found = await self.call(call, Scripted([answer]), self.unreachable(), Paid("PT-1", Decimal(1000), self.currency))

        assert isinstance(found, NoOutcome)
        assert found.sent is (answer.sent if isinstance(answer, NoAnswer) else True)
        assert re.fullmatch(r"[A-Za-z0-9_]{1,60}", found.cause)

    @pytest.mark.case("S72")
    @pytest.mark.parametrize("status", STATUSES)
    @pytest.mark.parametrize("call", CALLS)
    async def test_a_status_alone_says_nothing(self, call: Call, status: int) -> None:
        """409 may mean in progress, done before, or something else: only the provider's own code tells, so without one nothing is known."""
        for body in ({}, b"", {"message": "Conflict"}, b"<title>Conflict</title>"):
            found = await self.call(
                call, Scripted([answered(body, status=status)]), self.unreachable(), Paid("PT-1", Decimal(1000), self.currency)
            )

            assert found == NoOutcome(found.cause, sent=True)

    async def test_no_secret_is_shown(self, other: OtherSide, transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
        """A secret is in what is sent to the provider and nowhere else: no repr, no log line, no code."""
        caplog.set_level(0)
        ask, paid = transport.ask_for(timeout_seconds=5), self.paid(other)
        secrets = [getattr(other.config, name).get_secret_value() for name in other.config.SECRETS]
        found = [await self.call(call, ask, other.config, paid) for call in CALLS]
        other.fault("refund", "reset")
        found.append(await self.call("refund", ask, other.config, paid))
        logged = [record.getMessage() for record in caplog.records if not record.name.startswith("uvicorn")]  # that is the other side
        shown = [*logged, repr(found), repr(self.session()), repr(self.refund(paid))]

        assert secrets
        assert [secret for secret in secrets for text in shown if secret in text] == []
        assert "a@b.example" not in repr(self.session())
