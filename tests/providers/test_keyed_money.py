"""Refunds at providers of different habits: what "in progress" looks like at each, and how our key gets there."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway.providers.base import Declined, NoOutcome, RefundAccepted, RefundRequest, RefundRequestedBefore
from ipn_gateway.providers.sslcommerz import PROVIDER as SSLCOMMERZ
from tests import loopback
from tests.providers.contract import Scripted, answered
from tests.providers.keyed import KEY_HEADER, AdyenLike, KeyedConfig, StripeLike
from tests.providers.money_contract import key_of
from tests.providers.sslcommerz import STORE

if TYPE_CHECKING:
    import asyncio

    from ipn_gateway.providers.base import RefundAnswer

ADYEN, STRIPE = AdyenLike(), StripeLike()
SECRET = "AQE-test-key"
IN_PROGRESS = RefundRequestedBefore()


def config(base_url: str = "https://pay.example.com") -> KeyedConfig:
    return KeyedConfig.model_validate({"merchant": "acme", "api_key": SECRET, "base_url": base_url})


def request(key: str = "k" * 30) -> RefundRequest:
    return RefundRequest(key, "ORD-1", "PT-1", Decimal("12.50"), "EUR", Decimal("100.00"), Decimal("12340.00"), "BDT", "late")


def adyen(code: str | None) -> dict[str, Any]:
    return {"status": 422, "message": "request already processed or in progress", "errorType": "validation"} | (
        {} if code is None else {"errorCode": code}
    )


def stripe(code: str | None) -> dict[str, Any]:
    return {"error": {"message": "There is currently another in-progress request"} | ({} if code is None else {"code": code})}


def sslcommerz(status: str, **changes: str) -> dict[str, Any]:
    return {"APIConnect": "DONE", "bank_tran_id": "PT-1", "refund_ref_id": "", "status": status, "errorReason": ""} | changes


@pytest.mark.case("S72")
@pytest.mark.parametrize(
    ("provider", "status", "body", "expected"),
    [
        # 409 alone says nothing, at none of them.
        (ADYEN, 409, {}, NoOutcome("status_409")),
        (STRIPE, 409, {}, NoOutcome("status_409")),
        (SSLCOMMERZ, 409, {}, NoOutcome("status_409")),
        (ADYEN, 409, adyen(None), NoOutcome("status_409")),
        (STRIPE, 409, stripe(None), NoOutcome("status_409")),
        # In progress, in the words of each.
        (ADYEN, 422, adyen("704"), IN_PROGRESS),
        (ADYEN, 409, adyen("704"), IN_PROGRESS),
        (STRIPE, 409, stripe("idempotency_key_in_use"), IN_PROGRESS),
        (SSLCOMMERZ, 200, sslcommerz("processing"), IN_PROGRESS),
        # The same status with another code, the same code with another status, and the words of the others.
        (ADYEN, 409, adyen("137"), NoOutcome("status_409")),
        (ADYEN, 422, adyen("137"), Declined("declined_137")),
        (ADYEN, 422, adyen("999"), NoOutcome("status_422")),
        (ADYEN, 500, adyen("704"), NoOutcome("status_500")),
        (ADYEN, 409, stripe("idempotency_key_in_use"), NoOutcome("status_409")),
        (STRIPE, 409, stripe("lock_timeout"), NoOutcome("status_409")),
        (STRIPE, 409, adyen("704"), NoOutcome("status_409")),
        (STRIPE, 422, adyen("704"), NoOutcome("status_422")),
        (STRIPE, 400, stripe("charge_already_refunded"), Declined("declined_charge_already_refunded")),
        (STRIPE, 400, stripe("idempotency_key_in_use"), NoOutcome("status_400")),
        (SSLCOMMERZ, 409, sslcommerz("processing"), NoOutcome("status_409")),
        (SSLCOMMERZ, 422, adyen("704"), NoOutcome("status_422")),
        (SSLCOMMERZ, 200, sslcommerz("failed"), Declined("failed")),
        # And what is not in progress at all.
        (ADYEN, 201, {"pspReference": "R-1", "status": "received"}, RefundAccepted("R-1")),
        (STRIPE, 200, {"id": "re_1", "status": "pending"}, RefundAccepted("re_1")),
        (SSLCOMMERZ, 200, sslcommerz("success", refund_ref_id="R-1"), RefundAccepted("R-1")),
    ],
)
async def test_in_progress_is_what_each_provider_calls_so(provider: Any, status: int, body: Any, expected: RefundAnswer) -> None:
    """Adyen's 422 or 409 with code 704, Stripe's 409 with its code, a word with status 200: never a status by itself."""
    account = STORE if provider is SSLCOMMERZ else config()

    found = await provider.refund(Scripted([answered(body, status=status)]), account, replace(request(), currency="BDT"))

    assert found == expected


def says(status: bytes, body: bytes) -> loopback.Answering:
    return loopback.says(b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))


@pytest.mark.case("S11")
@pytest.mark.parametrize("length", [30, 52, 64])
async def test_our_key_travels_unquoted_in_its_header(length: int) -> None:
    """Up to the provider's 64 characters, under the provider's name for it: once, without quotes, nothing cut or added."""
    key = key_of(length)
    async with loopback.serving(says(b"201 Created", b'{"pspReference":"R-1"}')) as server, loopback.opened() as transport:
        account = config(f"http://127.0.0.1:{server.port}")
        found = await ADYEN.refund(transport.ask_for(timeout_seconds=5), account, request(key))

    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert found == RefundAccepted("R-1")
    assert length <= ADYEN.refund_key_length_max == 64
    lines = [name.lower() + colon + value for name, colon, value in (line.partition(b":") for line in head.split(b"\r\n"))]
    assert head.startswith(b"POST /v71/payments/PT-1/refunds HTTP/1.1\r\n")
    assert [line for line in lines if line.startswith(b"idempotency-key")] == [f"{KEY_HEADER.lower()}: {key}".encode()]
    assert [line for line in lines if line.startswith(b"content-type")] == [b"content-type: application/json"]
    assert body == b'{"amount": 1250, "currency": "EUR"}'


@pytest.mark.case("S59", "S68", "S91")
async def test_a_kept_connection_that_is_closed_sees_a_keyed_post_once() -> None:
    """Not even a request that carries a key is sent again behind our back: whether it is, and with which key, is decided above."""

    async def close(_: loopback.Server, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with loopback.serving(says(b"201 Created", b'{"pspReference":"R-1"}')) as server, loopback.opened() as transport:
        account = config(f"http://127.0.0.1:{server.port}")
        await ADYEN.refund(transport.ask_for(timeout_seconds=5), account, request("k" * 30))
        server.answer = close
        found = await ADYEN.refund(transport.ask_for(timeout_seconds=5), account, request("l" * 30))

    assert found == NoOutcome("disconnected", sent=True)
    assert (len(server.requests), server.connections) == (2, 1)
    assert [len(re.findall(b"l{30}", received)) for received in server.requests] == [0, 1]
