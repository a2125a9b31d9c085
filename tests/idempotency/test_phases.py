"""Work in steps: each step and its place in the row are one commit, the provider is called in between, and by one key for one intent."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import psycopg
import pytest

from ipn_gateway import idempotency_acts, ids
from ipn_gateway.errors import ConfigurationError
from ipn_gateway.idempotency import Idempotency
from ipn_gateway.operations import Work
from tests.idempotency import foreign
from tests.idempotency.service import BODY, LEASE_SECONDS, Service, is_replay, told
from tests.web.conftest import problem

if TYPE_CHECKING:
    from collections.abc import Iterator

DONE = ["begun", "recorded", "receipt"]
UNKNOWN = (409, "idempotency-indeterminate")
OVERLOADED = (503, "overloaded")

# Where a step fails, what has been committed by then, and at which point the row stands.
BOUNDARIES = [
    ("begin:statement_1", [], None),
    ("begin:before_commit", [], None),
    ("record:statement_1", ["begun"], 1),
    ("record:before_commit", ["begun"], 1),
    ("receipt:statement_1", ["begun", "recorded"], 2),
    ("receipt:before_commit", ["begun", "recorded"], 2),
]


@pytest.mark.case("S64", "S65", "S82")
@pytest.mark.parametrize(("boundary", "committed", "stands"), BOUNDARIES)
async def test_a_step_that_fails_is_undone_whole_and_the_next_try_goes_on_there(
    service: Service, boundary: str, committed: list[str], stands: int | None
) -> None:
    """A fault of ours is a 500 that is not kept; the key is free at once, nothing is done twice, and the provider is not called again."""
    service.faults.fail(f"charges.{boundary}", ZeroDivisionError())
    failed = await service.post("charges")
    rows, acts, calls = await service.rows(), await service.acts(), len(service.provider.calls)
    repeat = await service.post("charges")
    again = await service.post("charges")

    assert problem(failed) == (500, "internal-error")
    assert acts == committed
    assert [row["recovery_point"] for row in rows] == ([] if stands is None else [foreign.CHARGE.phases[stands]])
    assert (repeat.status_code, is_replay(repeat)) == (201, False)
    assert (told(again), is_replay(again)) == (told(repeat), True)
    assert await service.acts() == DONE
    assert service.provider.done == 1
    assert calls == (0 if boundary.startswith("begin") else 1)
    assert set(service.provider.keys) == {service.provider.keys[0]}


@pytest.mark.case("S64", "S59", "S82")
@pytest.mark.parametrize(("boundary", "committed", "stands"), [one for one in BOUNDARIES if not one[0].startswith("begin")])
async def test_a_payout_whose_record_fails_is_not_made_again(
    service: Service, boundary: str, committed: list[str], stands: int | None
) -> None:
    """Before its record is committed nobody knows of it but the provider; after it, it goes on."""
    service.faults.fail(f"payouts.{boundary}", ZeroDivisionError())
    failed = await service.post("payouts")
    acts, at_once = await service.acts(), await service.post("payouts")
    service.lease_ends()
    later = await service.post("payouts")

    assert problem(failed) == (500, "internal-error")
    assert acts == committed
    if stands == 1:
        assert problem(at_once) == (409, "idempotency-in-progress")
        assert problem(later) == UNKNOWN
    else:
        assert (at_once.status_code, is_replay(at_once), is_replay(later)) == (201, False, True)
    assert service.provider.done == 1


@pytest.mark.case("S65")
@pytest.mark.parametrize("path", ["charges", "payouts"])
async def test_a_receipt_is_written_without_another_payment(service: Service, path: str) -> None:
    """The process ends between the payment's record and its receipt: the repeat does what is left, from what was handed on."""
    await service.dies(f"{path}.record:after_commit", path)
    service.lease_ends()
    answer = await service.post(path)

    assert answer.status_code == 201
    assert (answer.json()["amount"], answer.json()["reference"]) == ("10.00", "ref-1")
    assert (len(service.provider.calls), await service.acts()) == (1, DONE)


@pytest.mark.case("S66")
@pytest.mark.parametrize("path", ["charges", "payouts"])
async def test_no_transaction_is_open_while_the_provider_takes_its_time(service: Service, path: str) -> None:
    """One connection is enough for everybody: the owner holds none, and no session is idle in a transaction."""
    async with service.another(connections_max=1) as small:
        plan = small.provider.hold()
        working = small.start(small.post(path))
        await plan.reached.wait()
        taken = small.db.taken
        others = [await small.post("notes"), await small.http.get("/v1/notes"), await small.post("notes", key="K2")]
        async with await psycopg.AsyncConnection.connect(service.database_url) as watching:
            found = await watching.execute(
                """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
                      AND (xact_start IS NOT NULL OR state = 'idle in transaction')"""
            )
            open_transactions = (await found.fetchall())[0][0]
        plan.go.set()
        answer = await working

    assert (taken, open_transactions) == (0, 0)
    assert [other.status_code for other in others] == [201, 200, 201]
    assert answer.status_code == 201


@pytest.mark.case("S67")
async def test_the_key_of_a_foreign_call_survives_everything(service: Service) -> None:
    """The row is lost, the process is another one: the same intent calls with the same key, and the provider does nothing twice."""
    await service.post("charges")
    await service.run("DELETE FROM idempotency_keys")
    async with service.another() as other:
        again = await other.post("charges")

    first, second = service.provider.keys
    assert (again.status_code, is_replay(again)) == (201, False)
    assert first == second
    assert service.provider.done == 1


@pytest.mark.case("S67", "S71")
async def test_each_intent_has_a_key_of_its_own_that_its_provider_takes(service: Service) -> None:
    """Another tenant, operation, key or step: another one; as long as the provider allows, and of plain characters."""
    for tenant, path, key in (
        ("acme", "charges", "K1"),
        ("other", "charges", "K1"),
        ("acme", "payouts", "K1"),
        ("acme", "charges", "K" * 255),
    ):
        await service.post(path, tenant=tenant, key=key)
    works = [Work(tenant, name, key) for tenant, name, key in (("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd"))]
    made = [work.downstream_key(step, 64) for work in works for step in ("charge", "refund")]

    assert len(set(service.provider.keys)) == 4
    assert all(re.fullmatch(r"[a-z2-7]{26,30}", key) for key in service.provider.keys)
    assert len(set(made)) == 6
    assert {len(works[0].downstream_key("charge", longest)) for longest in (26, 30, 36, 64, 255)} == {26, 30, 36, 52}
    with pytest.raises(ConfigurationError, match="26"):
        works[0].downstream_key("charge", 25)


@pytest.mark.case("S68")
async def test_an_unclear_answer_changes_no_key(service: Service) -> None:
    """Lost answers and 5xx say nothing: the same call again, by the same key, until the provider is clear; it was done once."""
    service.provider.will(lost=True)
    service.provider.will(status=503)
    service.provider.will(status=500, effect=False)
    answers = [await service.post("charges") for _ in range(4)]

    assert [problem(answer) for answer in answers[:3]] == [OVERLOADED] * 3
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers[:3])
    assert (answers[3].status_code, is_replay(answers[3])) == (201, False)
    assert len(set(service.provider.keys)) == 1
    assert len(service.provider.calls) == 4
    assert (service.provider.done, await service.acts()) == (1, DONE)


@pytest.mark.case("S68", "S78")
@pytest.mark.parametrize("path", ["charges", "payouts"])
async def test_a_definite_no_is_kept_and_a_new_attempt_has_a_new_key(service: Service, path: str) -> None:
    """Declined: the repeat hears the same without a call; a corrected attempt is a new request, and calls by a new key."""
    service.provider.will(status=402, effect=False)
    first = await service.post(path)
    repeat = await service.post(path)
    corrected = await service.post(path, BODY | {"amount": "5.00"}, key="K2")

    assert (first.status_code, is_replay(first)) == (402, False)
    assert (told(repeat), is_replay(repeat)) == (told(first), True)
    assert corrected.status_code == 201
    assert len(set(service.provider.keys)) == len(service.provider.calls) == 2


@pytest.mark.case("S68", "S59")
@pytest.mark.parametrize("plan", [{"lost": True}, {"status": 503}, {"status": 500}])
async def test_an_unclear_payout_is_left_to_a_person_at_once(service: Service, plan: dict[str, object]) -> None:
    """It may have happened; nobody asks the provider again, however it failed."""
    service.provider.will(**plan)  # type: ignore[arg-type]
    answers = [await service.post("payouts") for _ in range(3)]

    assert {problem(answer) for answer in answers} == {UNKNOWN}
    assert len({answer.json()["reconciliation_id"] for answer in answers}) == 1
    assert (await service.row())["state"] == "indeterminate"
    assert (len(service.provider.calls), await service.acts()) == (1, ["begun"])


@pytest.fixture
def closed_url() -> Iterator[str]:
    """Where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.case("S68", "S60")
async def test_a_call_that_provably_never_left_is_made_later(service: Service, closed_url: str) -> None:
    """The connection was refused: what was begun is undone, the key is free at once, and the payout is made by the next try."""
    async with service.another(provider_url=closed_url) as cut_off:
        first = await cut_off.post("payouts")
    undone = await service.acts()
    second = await service.post("payouts")

    assert problem(first) == OVERLOADED
    assert undone == []
    assert (second.status_code, is_replay(second)) == (201, False)
    assert (service.provider.done, await service.acts()) == (1, DONE)


@pytest.mark.case("S68")
async def test_what_a_person_found_not_done_is_done_by_a_new_key(service: Service) -> None:
    """Their word is the definite failure: the key executes again from the start, and the provider sees another call."""
    await service.dies("transport.ask:before", "payouts")
    service.lease_ends()
    doubted = await service.post("payouts")
    key_id = ids.read(ids.IDEMPOTENCY_KEY, doubted.json()["reconciliation_id"])
    found = idempotency_acts.Resolution("acme", key_id, "not_applied", "person", "the provider has nothing of it")
    async with service.db.transaction("test.resolve") as tx:
        await idempotency_acts.resolve(tx, service.clock, service.app.state.idempotency.operations, found)
    await service.run("DELETE FROM acts")
    answer = await service.post("payouts")
    never_called = Work("acme", "POST /v1/payouts", "K1").downstream_key("payout", foreign.PROVIDER_KEY_LENGTH)

    assert problem(doubted) == UNKNOWN
    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert (service.provider.done, await service.acts()) == (1, DONE)
    assert service.provider.keys[0] != never_called


@pytest.mark.case("S69")
@pytest.mark.parametrize("path", ["notes", "charges"])
async def test_effect_and_answer_appear_together(service: Service, path: str) -> None:
    """Nobody ever sees the one without the other: neither before the commit, nor when it fails, nor when nobody hears of it."""
    point, last = ("notes.write", "noted") if path == "notes" else ("charges.receipt", "receipt")

    async def seen() -> tuple[bool, str]:
        return last in await service.acts(), (await service.row())["state"]

    reached, go = service.faults.hold(f"{point}:before_commit")
    working = service.start(service.post(path))
    await reached.wait()
    at_commit = await seen()
    go.set()
    await working
    committed = await seen()
    await service.run("DELETE FROM acts")
    await service.run("DELETE FROM idempotency_keys")
    await service.dies(f"{point}:before_commit", path)
    lost = await seen()
    service.lease_ends()
    await service.dies(f"{point}:after_commit", path)
    unheard = await seen()
    repeat = await service.post(path)

    assert (at_commit, committed, lost, unheard) == (
        (False, "in_progress"),
        (True, "completed"),
        (False, "in_progress"),
        (True, "completed"),
    )
    assert (repeat.status_code, is_replay(repeat)) == (201, True)
    assert (await service.acts()).count(last) == 1


@pytest.mark.case("S70")
async def test_nobody_calls_a_provider_that_has_forgotten_the_key(service: Service) -> None:
    """Within the time that it remembers keys the call is repeated; beyond it, the same call could be a second effect: a person decides."""
    for key in ("soon", "late"):
        await service.dies("transport.ask:after", "charges", key=key)
    service.clock.advance(hours=23)
    soon = await service.post("charges", key="soon")
    service.clock.advance(hours=2)
    late = [await service.post("charges", key="late") for _ in range(2)]

    assert soon.status_code == 201
    assert {problem(answer) for answer in late} == {UNKNOWN}
    assert (service.provider.done, len(service.provider.calls)) == (2, 3)


@pytest.mark.case("S70")
async def test_an_unclear_answer_is_not_asked_about_for_ever(service: Service) -> None:
    """The key was given back, but by the next try the provider may have forgotten it."""
    service.provider.will(lost=True)
    await service.post("charges")
    service.clock.advance(hours=25)

    assert problem(await service.post("charges")) == UNKNOWN
    assert len(service.provider.calls) == 1


@pytest.mark.case("S70", "S71")
async def test_a_provider_that_forgets_before_a_lease_is_over_stops_the_start(service: Service) -> None:
    """Then no repeat of an abandoned call would ever be safe."""
    with pytest.raises(ConfigurationError, match="forgets our key"):
        Idempotency(service.db, [foreign.CHARGE], lease_seconds=86400, retention_hours=168)
    Idempotency(service.db, [foreign.CHARGE], lease_seconds=LEASE_SECONDS, retention_hours=168)


@pytest.mark.case("S92")
async def test_answers_that_would_be_kept_too_short_stop_the_start(service: Service) -> None:
    """Seven days where money moves, a day elsewhere: less may not be promised."""
    for operation, least in ((foreign.CHARGE, 168), (foreign.NOTE, 24)):
        Idempotency(service.db, [operation], lease_seconds=LEASE_SECONDS, retention_hours=least)
        with pytest.raises(ConfigurationError, match=f"at least {least} hours"):
            Idempotency(service.db, [operation], lease_seconds=LEASE_SECONDS, retention_hours=least - 0.1)
