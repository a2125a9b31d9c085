"""An owner that wakes when its lease is over and the key is another's: it writes nothing, and says what is true now."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final

import pytest

from ipn_gateway import logs
from ipn_gateway.operations import Finished, Work
from tests.idempotency import foreign
from tests.idempotency.service import Service, is_replay, told
from tests.web.conftest import problem

IN_PROGRESS = (409, "idempotency-in-progress")
DONE = ["begun", "recorded", "receipt"]
DONE_ONCE: Final = foreign.says(Finished(201, b"{}"))

OUTCOMES: list[dict[str, Any]] = [{"status": 200}, {"status": 402}, {"status": 503}, {"lost": True}]


@pytest.mark.case("S55", "S56")
@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_late_owner_writes_no_phase_no_answer_and_no_release(service: Service, outcome: dict[str, Any]) -> None:
    """Whatever its provider says to it in the end: the row is the other's, and so is the answer that it gives."""
    plan = service.provider.hold(**outcome)
    late = service.start(service.post("charges"))
    await plan.reached.wait()
    service.lease_ends()
    async with service.another() as other:
        finished = await other.post("charges")
        before = await service.row()
        lost = logs.counters["idempotency.leases_lost"]
        plan.go.set()
        answer = await late

    assert (finished.status_code, is_replay(finished)) == (201, False)
    assert (told(answer), is_replay(answer)) == (told(finished), True)
    assert await service.row() == before
    assert logs.counters["idempotency.leases_lost"] - lost == 1
    assert await service.acts() == DONE
    assert service.provider.done == 1


@pytest.mark.case("S55", "S56")
@pytest.mark.parametrize("point", ["charges.begin:statement_1", "charges.record:statement_1", "charges.receipt:statement_1"])
async def test_a_late_owner_renews_nothing(service: Service, point: str) -> None:
    """It stands in the middle of a phase, in front of what would move the row on and renew its lease: that finds no row of its own."""
    reached, go = service.faults.hold(point)
    late = service.start(service.post("charges"))
    await reached.wait()
    service.lease_ends()
    async with service.another() as other:
        plan = other.provider.hold() if "begin" in point else None
        taking = other.start(other.post("charges"))
        if plan:
            await plan.reached.wait()
            before = await service.row()
            go.set()
            answer = await late
            unchanged = await service.row() == before
            plan.go.set()
        else:
            await taking
            before = await service.row()
            go.set()
            answer = await late
            unchanged = await service.row() == before
        finished = await taking

    assert (problem(answer) == IN_PROGRESS) if plan else is_replay(answer)
    assert unchanged
    assert finished.status_code == 201
    assert await service.acts() == DONE
    assert service.provider.done == 1


@pytest.mark.case("S55")
@pytest.mark.parametrize("used_again", [False, True])
async def test_a_late_owner_of_a_row_that_is_gone_says_that_nothing_is_known(service: Service, *, used_again: bool) -> None:
    """Who took over failed and gave the key back, and perhaps another request has it now: neither that one's answer nor a 500 of ours."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def wait(_: Work) -> None:
        reached.set()
        await go.wait()

    service.app.state.told = dataclasses.replace(DONE_ONCE, calls=wait)
    late = service.start(service.post("told"))
    await reached.wait()
    service.lease_ends()
    async with service.another() as other:
        other.app.state.told = foreign.raises(ZeroDivisionError())
        failed = await other.post("told")
        other.app.state.told = foreign.says(Finished(200, b"of-another-request"))
        new = await other.post("told?page=2") if used_again else None
    before = await service.rows()
    go.set()
    answer = await late

    assert problem(failed) == (500, "internal-error")
    assert problem(answer) == (503, "idempotency-unavailable")
    assert new is None or new.content == b"of-another-request"
    assert await service.rows() == before
    assert (len(before), await service.acts()) == ((1, ["done"]) if used_again else (0, []))


@pytest.mark.case("S55", "S59")
async def test_an_owner_that_is_late_but_first_is_believed(service: Service) -> None:
    """Its lease is over and somebody has seen that, but it records its payout before the other can doubt it: the answer is the payout."""
    plan = service.provider.hold()
    late = service.start(service.post("payouts"))
    await plan.reached.wait()
    service.lease_ends()
    async with service.another() as other:
        seen, go = other.faults.hold("idempotency.claim:statement_2")
        repeating = other.start(other.post("payouts"))
        await seen.wait()
        plan.go.set()
        answer = await late
        go.set()
        repeat = await repeating

    assert answer.status_code == 201
    assert (told(repeat), is_replay(repeat)) == (told(answer), True)
    assert (await service.row())["state"] == "completed"
