"""Which failures are an answer that a repeat gets too, and which are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ipn_gateway.errors import (
    ConfigurationError,
    Forbidden,
    GatewayError,
    NotFound,
    Overloaded,
    RateLimited,
    RequestTimeout,
    StateConflict,
    Unauthorized,
)
from ipn_gateway.operations import Finished
from tests.idempotency import foreign
from tests.idempotency.service import Service, is_replay, told
from tests.web.conftest import ORDER, Caller, problem

if TYPE_CHECKING:
    from ipn_gateway.runtime import Runtime

KIBIBYTES_64 = 64 * 1024


@pytest.mark.case("S78")
@pytest.mark.parametrize("error", [foreign.Declined(), StateConflict("sold out"), NotFound()], ids=lambda error: str(error.status))
async def test_a_refusal_by_rule_is_kept_and_repeated(service: Service, error: GatewayError) -> None:
    """Trying again would end in the same way: the repeat is answered from storage, what was begun is undone, and nothing is run again."""
    service.app.state.told = foreign.raises(error)
    first = await service.post("told")
    service.app.state.told = foreign.says(Finished(201, b"{}"))
    second = await service.post("told")

    assert (first.status_code, is_replay(first)) == (error.status, False)
    assert (told(second), is_replay(second)) == (told(first), True)
    assert second.headers["content-type"] == "application/problem+json"
    assert second.headers["content-language"] == "en"
    assert await service.acts() == []


@pytest.mark.case("S78")
async def test_a_release_that_was_refused_is_refused_again(shop: Caller, rt: Runtime) -> None:
    """Also of our own calls: the repeat of a refused one is refused in the same words when it would succeed by now."""
    await shop.post("/v1/orders", ORDER)
    first = await shop.post("/v1/orders/ORD-1/release", {"reason": "seen"}, idempotency_key="K1")
    async with rt.db.transaction("test.change") as tx:
        await tx.execute("UPDATE orders SET status = 'paid_on_hold', amount_paid = amount")
    second = await shop.post("/v1/orders/ORD-1/release", {"reason": "seen"}, idempotency_key="K1")
    third = await shop.post("/v1/orders/ORD-1/release", {"reason": "seen"}, idempotency_key="K2")

    assert problem(first) == (409, "state-conflict")
    assert (told(second), is_replay(second)) == (told(first), True)
    assert (third.status_code, third.json()["status"]) == (200, "paid")


class _BadGateway(Overloaded):
    """Who was asked gave no sense."""

    status = 502


class _GatewayTimeout(Overloaded):
    """Who was asked gave no answer."""

    status = 504


NEVER = [Unauthorized(), Forbidden(), RequestTimeout(), RateLimited(), _BadGateway(), Overloaded(), _GatewayTimeout()]


@pytest.mark.case("S80")
@pytest.mark.parametrize("error", NEVER, ids=lambda error: str(error.status))
async def test_a_failure_that_says_nothing_of_the_operation_is_never_kept(service: Service, error: GatewayError) -> None:
    """401, 403, 408, 429, 502, 503, 504: the same key succeeds when the cause is gone, at once."""
    service.app.state.told = foreign.raises(error)
    refused = [await service.post("told") for _ in range(2)]
    kept = await service.rows()
    service.app.state.told = foreign.says(Finished(201, b"{}"))
    after = await service.post("told")

    assert [(answer.status_code, is_replay(answer)) for answer in refused] == [(error.status, False)] * 2
    assert kept == []
    assert (after.status_code, is_replay(after)) == (201, False)
    assert await service.acts() == ["done"]


@pytest.mark.case("S80")
@pytest.mark.parametrize("status", [401, 403, 408, 429, 502, 503, 504])
async def test_such_a_status_cannot_be_an_answer_to_keep(service: Service, status: int) -> None:
    """An operation that ends with one is at fault: it is undone whole, and nothing is kept."""
    service.app.state.told = foreign.says(Finished(status, b"{}"))
    wrong = await service.post("told")
    kept, acts = await service.rows(), await service.acts()
    service.app.state.told = foreign.says(Finished(201, b"{}"))

    assert problem(wrong) == (500, "internal-error")
    assert (kept, acts) == ([], [])
    assert (await service.post("told")).status_code == 201


@pytest.mark.case("S81")
async def test_a_500_that_the_operation_decided_on_is_kept(service: Service) -> None:
    """It is as definite as any other answer: running it again would be another story."""
    first, second = await service.tell(Finished(500, b'{"detail":"the books do not add up"}', media_type="application/problem+json"))

    assert (first.status_code, told(second), is_replay(second)) == (500, told(first), True)


@pytest.mark.case("S82")
@pytest.mark.parametrize("error", [ZeroDivisionError(), ConfigurationError("wrong"), TimeoutError(), AssertionError()])
async def test_an_accident_is_never_kept(service: Service, error: Exception) -> None:
    """Neither as a 500 nor otherwise: the next try executes."""
    service.app.state.told = foreign.raises(error)
    first = await service.post("told")
    kept, acts = await service.rows(), await service.acts()
    service.app.state.told = foreign.says(Finished(201, b"{}"))
    second = await service.post("told")

    assert first.status_code in {500, 503}
    assert (kept, acts) == ([], [])
    assert (second.status_code, is_replay(second)) == (201, False)
