"""What becomes of a key whose owner is gone, or slow: it waits for the end of a lease, then for one other, or for a person."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from structlog.testing import capture_logs

from ipn_gateway import logs, settings
from ipn_gateway.errors import ConfigurationError
from ipn_gateway.operations import Downstream, Operation, Step, Work
from tests.idempotency import foreign
from tests.idempotency.service import BODY, LEASE_SECONDS, Service, is_replay, told
from tests.web.conftest import problem

if TYPE_CHECKING:
    from ipn_gateway.db import Database, Transaction
    from tests.make import Make

IN_PROGRESS = (409, "idempotency-in-progress")
UNKNOWN = (409, "idempotency-indeterminate")
DONE = ["begun", "recorded", "receipt"]


@pytest.mark.case("S49")
async def test_no_row_is_in_progress_without_an_end(db: Database, make: Make) -> None:
    """The table refuses it, so that no code can leave a key locked for ever; and what is not in progress has no lease."""
    for wrong in (
        {"state": "in_progress", "lease_expires_at": None},
        {"state": "completed", "lease_expires_at": "2030-01-01Z"},
        {"state": "indeterminate", "lease_expires_at": "2030-01-01Z", "indeterminate_at": "2030-01-01Z"},
        {"state": "indeterminate"},
        {"state": "completed", "response_status": None},
        {"state": "in_progress", "response_status": 201},
        {"state": "pending"},
    ):
        with pytest.raises(psycopg.errors.CheckViolation):
            await make.idempotency_key(**wrong)


@pytest.mark.case("S49", "S50")
@pytest.mark.parametrize("path", ["notes", "charges"])
async def test_a_dead_owner_keeps_its_key_until_its_lease_is_over(service: Service, path: str) -> None:
    """Every repeat until then hears 409, with a time; the first one after it executes."""
    point = "notes.write:before_commit" if path == "notes" else "charges.begin:before_commit"
    await service.dies(point, path)
    left = await service.value("SELECT extract(epoch FROM lease_expires_at - ipn_now())::float8 FROM idempotency_keys")
    early = []
    for seconds in (0, LEASE_SECONDS / 2, LEASE_SECONDS / 2 - 5):
        service.clock.advance(seconds=seconds)
        early.append(await service.post(path))
    service.clock.advance(seconds=6)
    late = await service.post(path)
    again = await service.post(path)

    assert LEASE_SECONDS - 5 < left <= LEASE_SECONDS
    assert {problem(answer) for answer in early} == {IN_PROGRESS}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in early)
    assert (late.status_code, is_replay(late), told(again), is_replay(again)) == (201, False, told(late), True)
    assert await service.acts() == (["noted"] if path == "notes" else DONE)


@pytest.mark.case("S49", "S50")
async def test_each_step_has_a_lease_of_its_own(service: Service) -> None:
    """An operation that takes longer than one lease, in steps that do not, is not taken for dead."""
    plan = service.provider.hold()
    reached, go = service.faults.hold("charges.receipt:statement_1")
    working = service.start(service.post("charges"))
    await plan.reached.wait()
    service.clock.advance(seconds=LEASE_SECONDS - 10)
    plan.go.set()
    await reached.wait()
    service.clock.advance(seconds=LEASE_SECONDS - 10)
    async with service.another() as other:
        during = await other.post("charges")
    go.set()
    answer = await working

    assert problem(during) == IN_PROGRESS
    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert (await service.row())["fence"] == 1


@pytest.mark.case("S51")
@pytest.mark.parametrize(
    ("path", "point"), [("notes", "notes.write:before_commit"), ("charges", "transport.ask:after"), ("payouts", "transport.ask:after")]
)
async def test_another_request_takes_nothing_over(service: Service, path: str, point: str) -> None:
    """422, whatever became of the owner: lease, owner, point and state are what they were, and the right request still gets on."""
    await service.dies(point, path)
    service.lease_ends()
    before = await service.row()
    answer = await service.post(path, BODY | {"amount": "10.01"})

    assert problem(answer) == (422, "idempotency-key-reused")
    assert await service.row() == before
    assert (await service.post(path)).status_code == (409 if path == "payouts" else 201)


@pytest.mark.case("S52")
@pytest.mark.parametrize("path", ["notes", "charges"])
async def test_one_of_two_takes_over(service: Service, path: str) -> None:
    """Both have seen that the lease is over before either acts: one executes, the other is told to wait or gets the answer."""
    await service.dies("notes.write:before_commit" if path == "notes" else "transport.ask:before", path)
    service.lease_ends()
    barrier = asyncio.Barrier(4)
    async with service.another() as other:
        for application in (service, other):
            application.faults.on["idempotency.claim:statement_2"] = _wait_at(barrier)
        answers = await asyncio.gather(*(application.post(path) for application in (service, other) for _ in range(2)))

    executed = [answer for answer in answers if answer.status_code == 201 and not is_replay(answer)]
    assert len(executed) == 1
    assert all(is_replay(answer) or problem(answer) == IN_PROGRESS for answer in answers if answer not in executed)
    assert (await service.row())["fence"] == 2
    assert await service.acts() == (["noted"] if path == "notes" else DONE)
    assert service.provider.done == len(service.provider.calls) == (0 if path == "notes" else 1)


@pytest.mark.case("S52", "S59")
async def test_one_of_two_finds_the_outcome_unknown(service: Service) -> None:
    """One says so, the other the same, or that the first is at it; and it is marked and counted once."""
    await service.dies("transport.ask:after", "payouts")
    service.lease_ends()
    before = logs.counters["idempotency.indeterminate"]
    barrier = asyncio.Barrier(2)
    async with service.another() as other:
        for application in (service, other):
            application.faults.on["idempotency.claim:statement_2"] = _wait_at(barrier)
        answers = await asyncio.gather(service.post("payouts"), other.post("payouts"))

    assert {UNKNOWN} <= {problem(answer) for answer in answers} <= {UNKNOWN, IN_PROGRESS}
    assert (await service.row())["fence"] == 2
    assert logs.counters["idempotency.indeterminate"] - before == 1


def _wait_at(barrier: asyncio.Barrier) -> Any:
    async def wait() -> None:
        await barrier.wait()

    return wait


@pytest.mark.case("S53")
def test_a_lease_that_the_work_may_outlive_stops_the_start() -> None:
    """It is one and a half times the longest foreign call at least; the longest call is a setting too."""
    settings.load(idempotency_lease_seconds=30, provider_money_timeout_seconds=20)

    with pytest.raises(ConfigurationError, match="IPN_IDEMPOTENCY_LEASE_SECONDS must be at least 30"):
        settings.load(idempotency_lease_seconds=29.9, provider_money_timeout_seconds=20)


@pytest.mark.case("S53")
async def test_a_foreign_call_ends_before_the_lease(service: Service) -> None:
    """Whatever its own limits are: the client hears 503, it is noticed that leases are short, and the key is free for the next try."""
    never = asyncio.Event()

    async def hang(_: Work) -> None:
        await never.wait()

    async def done(tx: Transaction, work: Work) -> Step:
        await foreign.act(tx, work, "done")
        return foreign.answered(work)

    slow = logs.counters["idempotency.slow"]
    async with service.another(lease_seconds=0.6) as hasty:
        hasty.app.state.told = foreign.Told(done, hang)
        with capture_logs() as lines:
            first = await hasty.post("told")
        hasty.app.state.told = foreign.Told(done)
        second = await hasty.post("told")

    assert (problem(first), int(first.headers["retry-after"]) >= 1) == ((503, "overloaded"), True)
    assert [(line["log_level"], line["operation"]) for line in lines if line["event"] == "idempotency.slow"] == [
        ("warning", "POST /v1/told")
    ]
    assert logs.counters["idempotency.slow"] - slow == 1
    assert (second.status_code, is_replay(second)) == (201, False)
    assert await service.acts() == ["done"]


@pytest.mark.case("S53", "S59")
async def test_a_call_that_was_cut_off_is_unknown_where_it_must_not_be_repeated(service: Service) -> None:
    """The provider never answered: 409 in progress until the lease is over, for its own client too, and then it waits for a person."""
    plan = service.provider.hold()
    async with service.another(lease_seconds=0.6) as hasty:
        first = await hasty.post("payouts")
        state = await service.row()
        service.lease_ends()
        second = await hasty.post("payouts")
        plan.go.set()

    assert problem(first) == (409, "idempotency-in-progress")
    assert (state["state"], state["recovery_point"]) == ("in_progress", "payout")
    assert problem(second) == UNKNOWN
    assert len(service.provider.calls) == 1


@pytest.mark.case("S54")
async def test_a_take_over_is_told(service: Service) -> None:
    """Something died: a warning with the ids, without the key itself, and a count."""
    key = "personal-key-0815"
    await service.dies("transport.ask:after", "charges", key=key)
    service.lease_ends()
    before = logs.counters["idempotency.take_overs"]
    with capture_logs() as lines:
        await service.post("charges", key=key)
    row = await service.row()
    (line,) = [line for line in lines if line["event"] == "idempotency.taken_over"]

    assert logs.counters["idempotency.take_overs"] - before == 1
    assert (line["log_level"], line["id"], line["operation"]) == ("warning", f"idk_{row['id'].hex}", "POST /v1/charges")
    assert (line["point"], line["fence"]) == ("charge", 2)
    assert key not in str(lines)


# --- what is declared


@pytest.mark.case("S57")
@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "notes"},
        {"name": "GET /v1/notes"},
        {"phases": ("begin",)},
        {"phases": ()},
        {"phases": ("started", "charge"), "key_required": False},
        {"downstream": Downstream.LOCAL, "phases": ("started", "charge"), "intents": {"charge"}},
        {"downstream": Downstream.NONE},
        {"downstream": Downstream.NONE, "phases": ("started", "pay"), "intents": frozenset({"pay"}), "key_required": False},
        {"intents": frozenset({"pay"})},
        {"earlier": {1: {}}},
    ],
)
def test_a_declaration_that_cannot_be_kept_stops_the_start(wrong: dict[str, Any]) -> None:
    """Class, phases, intents and key have to fit together; each operation has one class."""
    right = {"name": "POST /v1/notes", "fields": {}, "downstream": Downstream.IDEMPOTENT, "key_required": True}
    Operation(**right)  # type: ignore[arg-type]

    with pytest.raises(ConfigurationError):
        Operation(**right | wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="downstream"):
        Operation(**{name: value for name, value in right.items() if name != "downstream"})  # type: ignore[arg-type]


@pytest.mark.case("S57")
async def test_an_operation_is_declared_once_and_driven_as_declared(service: Service) -> None:
    """Two of one name, or phases that are not those of the declaration, are faults of the program."""
    layer = service.app.state.idempotency
    twice = [foreign.NOTE, dataclasses.replace(foreign.NOTE)]

    with pytest.raises(ConfigurationError, match="twice"):
        type(layer)(service.db, twice, lease_seconds=90, retention_hours=168)
    with pytest.raises(RuntimeError, match="phases"):
        await layer.run(foreign.CHARGE, None, {})


# --- an outcome that nobody knows


@pytest.mark.case("S59", "S61")
async def test_an_unknown_outcome_stays_unknown_however_often_it_is_asked_for(service: Service) -> None:
    """A hundred repeats, days later, at any process: the provider is not called, and each is told whom to ask by which id."""
    await service.dies("transport.ask:after", "payouts")
    service.lease_ends()
    first = await service.post("payouts")
    before = await service.row()
    async with service.another() as other:
        for number in range(100):
            service.clock.advance(hours=1)
            answer = await (service if number % 2 else other).post("payouts")

            assert told(answer) == told(first)
            assert not is_replay(answer)

    assert problem(first) == UNKNOWN
    assert first.json()["reconciliation_id"] == f"idk_{before['id'].hex}"
    assert int(first.headers["retry-after"]) >= 600
    assert await service.row() == before
    assert before["indeterminate_at"] is not None
    assert len(service.provider.calls) == 1


@pytest.mark.case("S60")
async def test_before_the_intent_nothing_can_have_happened(service: Service) -> None:
    """Of a payout, too: who died there is taken over and the payout is made, once."""
    await service.dies("payouts.begin:before_commit", "payouts")
    service.lease_ends()
    answer = await service.post("payouts")

    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert service.provider.done == 1
    assert await service.acts() == DONE
