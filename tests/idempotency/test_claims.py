"""Who executes: exactly one of all that come with a key, whoever else comes is told so at once, and nothing else can go wrong with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import errors as pg

from ipn_gateway.clock import Clock
from ipn_gateway.idempotency import CALLING_PER_TENANT
from tests.idempotency.service import BODY, LEASE_SECONDS, Service, is_replay, told
from tests.proxy import proxying
from tests.web.conftest import ORDER, Caller, pointers, problem

if TYPE_CHECKING:
    import httpx

IN_PROGRESS = (409, "idempotency-in-progress")
UNAVAILABLE = (503, "idempotency-unavailable")


def summed(answers: list[httpx.Response]) -> dict[str, int]:
    """How many were executed, answered from storage, told to wait, and anything else."""
    kinds = Counter(
        "replayed"
        if is_replay(answer)
        else {201: "executed", 409: "waiting" if "in-progress" in answer.text else "refused"}.get(answer.status_code, answer.text)
        for answer in answers
    )
    return dict(kinds)


@pytest.mark.case("S36")
async def test_the_claim_is_committed_before_anything_is_done(service: Service) -> None:
    """When the operation begins, every other connection sees that somebody is at it."""
    reached, go = service.faults.hold("notes.write:statement_1")
    working = service.start(service.post("notes"))
    await reached.wait()
    row = await service.row()
    done = await service.acts()
    go.set()
    await working

    assert (row["state"], row["recovery_point"], row["fence"], done) == ("in_progress", "started", 1, [])
    assert row["lease_expires_at"] is not None


@pytest.mark.case("S37")
@pytest.mark.parametrize("path", ["notes", "charges", "payouts"])
async def test_one_of_fifty_executes(service: Service, path: str) -> None:
    """At once, at two processes' worth of applications: one effect, and everybody else hears of it or is told to wait."""
    async with service.another() as other:
        answers = await asyncio.gather(*(application.post(path) for _ in range(25) for application in (service, other)))
        after = [await application.post(path) for application in (service, other)]

    kinds = summed([*answers, *after])
    assert set(kinds) <= {"executed", "replayed", "waiting"}
    assert kinds["executed"] == 1
    assert all(is_replay(answer) for answer in after)
    assert len({answer.content for answer in [*answers, *after] if answer.status_code == 201}) == 1
    assert await service.acts() == (["noted"] if path == "notes" else ["begun", "recorded", "receipt"])
    assert service.provider.done == len(service.provider.calls) == (0 if path == "notes" else 1)
    assert len(await service.rows()) == 1


@pytest.mark.case("S37", "S41")
async def test_repeats_take_no_place_among_those_who_call_their_provider(service: Service) -> None:
    """So many of a tenant may call at once; with all those places taken a repeat still hears what is true, and only a new call waits."""
    done = await service.post("charges", key="done")
    plans = [service.provider.hold() for _ in range(CALLING_PER_TENANT)]
    calls = [service.start(service.post("charges", key=f"K{number}")) for number in range(CALLING_PER_TENANT)]
    for plan in plans:
        await plan.reached.wait()
    repeat, beside = await service.post("charges", key="done"), await service.post("notes")
    waiting = await asyncio.gather(*(service.post("charges", key="K7") for _ in range(100)))
    new = await service.post("charges", key="new")
    for plan in plans:
        plan.go.set()
    answers = await asyncio.gather(*calls)
    again = await service.post("charges", key="new")

    assert (told(repeat), is_replay(repeat), beside.status_code) == (told(done), True, 201)
    assert summed(waiting) == {"waiting": 100}
    assert problem(new) == (503, "overloaded")
    assert summed([*answers, again]) == {"executed": CALLING_PER_TENANT + 1}
    assert service.provider.done == CALLING_PER_TENANT + 2


@pytest.mark.case("S37")
async def test_different_keys_do_not_meet(service: Service) -> None:
    """Fifty requests with fifty keys are fifty operations, at the same time."""
    answers = await asyncio.gather(*(service.post("notes", key=f"K{number}") for number in range(50)))

    assert summed(answers) == {"executed": 50}
    assert len(await service.acts()) == 50


@pytest.mark.case("S38")
async def test_the_insert_is_the_first_statement(service: Service) -> None:
    """Nobody looks first and inserts then, and nobody asks for an advisory lock: the unique key arbitrates."""
    statements: list[str] = []

    async def note() -> None:
        async with await psycopg.AsyncConnection.connect(service.database_url) as other:
            found = await other.execute(
                """SELECT query FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'ipn-gateway%'
                    ORDER BY state_change DESC LIMIT 1"""
            )
            statements.append((await found.fetchall())[0][0])

    for name in ("idempotency.claim", "idempotency.take_over", "idempotency.read", "notes.write"):
        for number in (1, 2, 3):
            service.faults.on[f"{name}:statement_{number}"] = note
    before = len(service.faults.seen)
    await service.post("notes")
    await service.post("notes")
    layers = [statement for statement in statements if "idempotency_keys" in statement]

    assert service.faults.seen[before] == "idempotency.claim:statement_1"
    assert "INSERT INTO idempotency_keys" in layers[0]
    assert "ON CONFLICT" in layers[0]
    assert not any("advisory" in statement for statement in statements)
    assert len(layers) >= 3  # claim and answer, then claim again


@pytest.mark.case("S39", "S41", "S44")
async def test_who_comes_second_is_told_to_wait_and_for_how_long(service: Service) -> None:
    """409 with a time that lies within the lease; it is not kept, so that the same key gets the answer when there is one."""
    plan = service.provider.hold()
    working = service.start(service.post("payouts"))
    await plan.reached.wait()
    waiting = [await service.post("payouts") for _ in range(3)]
    remaining = await service.value("SELECT extract(epoch FROM lease_expires_at - ipn_now())::float8 FROM idempotency_keys")
    plan.go.set()
    first = await working
    after = await service.post("payouts")

    for answer in waiting:
        assert problem(answer) == IN_PROGRESS
        assert answer.json()["title"] == "A request is outstanding for this Idempotency-Key"
        assert 1 <= int(answer.headers["retry-after"]) <= remaining
        assert not is_replay(answer)
    assert (told(after), is_replay(after)) == (told(first), True)
    assert service.provider.done == 1


@pytest.mark.case("S40")
async def test_losers_hold_no_connection_and_keep_nobody_waiting(service: Service) -> None:
    """Two connections, an owner that waits for its provider, two hundred repeats: all are answered, and so is everybody else."""
    async with service.another(connections_max=2) as small:
        plan = small.provider.hold()
        working = small.start(small.post("charges"))
        await plan.reached.wait()

        async def client() -> list[httpx.Response]:
            return [await small.post("charges") for _ in range(10)]

        losers = [answer for answers in await asyncio.gather(*(client() for _ in range(20))) for answer in answers]
        taken, unrelated = small.db.taken, await small.http.get("/v1/notes")
        still_working = not working.done()
        plan.go.set()
        await working

    assert summed(losers) == {"waiting": 200}
    assert (taken, unrelated.status_code, still_working) == (0, 200, True)


@pytest.mark.case("S40")
@pytest.mark.parametrize("lease_is_over", [False, True])
@pytest.mark.parametrize("point", ["charges.receipt:before_commit", "payouts.record:before_commit", "notes.write:before_commit"])
async def test_nobody_waits_for_an_owner_that_is_committing(service: Service, point: str, *, lease_is_over: bool) -> None:
    """It has written its answer and holds the row, for as long as its COMMIT takes: who comes meanwhile is told to wait, and waits not."""
    path = point.partition(".")[0]
    reached, go = service.faults.hold(point)
    working = service.start(service.post(path))
    await reached.wait()
    if lease_is_over:
        service.lease_ends()
    during = [await service.post(path) for _ in range(3)]
    held = service.db.taken
    go.set()
    first = await working
    after = await service.post(path)

    assert {problem(answer) for answer in during} == {IN_PROGRESS}
    assert held == 1
    assert (first.status_code, told(after), is_replay(after)) == (201, told(first), True)
    assert service.provider.done <= 1


@pytest.mark.case("S42")
async def test_a_client_that_does_as_it_is_told_gets_the_answer(service: Service) -> None:
    """The 409 says in words that the same request with the same key is to be sent again; doing that ends with the stored answer."""
    plan = service.provider.hold()
    first = service.start(service.post("charges"))
    await plan.reached.wait()
    waits: list[int] = []

    async def insist() -> httpx.Response:
        while (answer := await service.post("charges")).status_code == 409 and "in-progress" in answer.json()["type"]:
            waits.append(int(answer.headers["retry-after"]))
            assert "same request" in answer.json()["detail"]
            assert "same key" in answer.json()["detail"]
            if len(waits) == 3:
                plan.go.set()
                await first
        return answer

    answer = await insist()

    assert (told(answer), is_replay(answer)) == (told(await first), True)
    assert len(waits) == 3
    assert service.provider.done == 1


@pytest.mark.case("S43")
async def test_a_request_that_fails_its_checks_saves_nothing(service: Service) -> None:
    """The corrected one executes under the same key, whatever was wrong before."""
    wrong = [
        await service.post("notes", {"amount": "ten"}),
        await service.post("notes", {"amount": 10.0}),
        await service.post("notes", content=b"{", headers={"Content-Type": "application/json"}),
        await service.post("notes", content=b"{}", headers={"Content-Type": "text/plain"}),
        await service.post("notes", content=b'{"a":1,"a":2}', headers={"Content-Type": "application/json"}),
    ]
    rows = await service.rows()
    right = await service.post("notes")

    assert [answer.status_code for answer in wrong] == [422, 422, 422, 415, 400]
    assert rows == []
    assert (right.status_code, is_replay(right)) == (201, False)


@pytest.mark.case("S43")
async def test_what_is_wrong_with_an_order_does_not_take_its_key(shop: Caller) -> None:
    """Nor does an unknown source or a parameter that the call does not have."""
    refused = await shop.post("/v1/orders", ORDER | {"amount": "0"}, idempotency_key="K1")
    unknown = await shop.post("/v1/orders", ORDER | {"source": "nobody"}, idempotency_key="K1")
    odd = await shop.post("/v1/orders?dry_run=1", ORDER, idempotency_key="K1")
    right = await shop.post("/v1/orders", ORDER, idempotency_key="K1")

    assert (pointers(refused), pointers(unknown)) == (["#/amount"], ["#/source"])
    assert problem(odd) == (400, "unknown-parameter")
    assert (right.status_code, is_replay(right)) == (201, False)


@pytest.mark.case("S44")
async def test_each_reason_has_a_word_of_its_own(service: Service) -> None:
    """A client need not guess from 409 or 422 whether to wait, to stop or to mend its keys."""
    service.provider.will(lost=True)
    told_ = {}
    unclear = await service.post("payouts", key="K1")
    told_["unknown"] = await service.post("payouts", key="K1")
    plan = service.provider.hold()
    working = service.start(service.post("payouts", key="K2"))
    await plan.reached.wait()
    told_["in progress"] = await service.post("payouts", key="K2")
    told_["reused"] = await service.post("payouts", BODY | {"amount": "11"}, key="K2")
    told_["checks"] = await service.post("payouts", {"amount": "x"}, key="K2")
    plan.go.set()
    await working

    assert problem(unclear) == problem(told_["unknown"])
    assert {name: problem(answer) for name, answer in told_.items()} == {
        "unknown": (409, "idempotency-indeterminate"),
        "in progress": IN_PROGRESS,
        "reused": (422, "idempotency-key-reused"),
        "checks": (422, "validation-failed"),
    }


@pytest.mark.case("S45")
async def test_without_its_store_nothing_is_executed(service: Service) -> None:
    """The database is away: 503 with a time, and not a call without the guard; when it is back the same key executes."""
    async with proxying(service.database_url) as proxy, service.another(database_url=proxy.url) as away:
        async with proxy.closed():
            answers = await asyncio.gather(*(away.post(path) for path in ("notes", "charges", "payouts", "pings")))
        async with asyncio.timeout(15):
            while (back := await away.post("charges")).status_code != 201:
                assert problem(back) == UNAVAILABLE

    assert {problem(answer) for answer in answers} == {UNAVAILABLE}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert not is_replay(back)
    assert await service.acts() == ["begun", "recorded", "receipt"]
    assert service.provider.done == 1


@pytest.mark.case("S45")
async def test_a_pool_that_is_used_up_is_a_store_that_is_away(service: Service) -> None:
    """All connections are busy elsewhere: 503 with a time, and nothing is executed."""
    held, go = asyncio.Event(), asyncio.Event()
    async with service.another(connections_max=1) as small:

        async def busy() -> None:
            async with small.db.transaction("test.busy"):
                held.set()
                await go.wait()

        somebody = small.start(busy())
        await held.wait()
        answer = await small.post("charges")
        go.set()
        await somebody
        async with asyncio.timeout(15):
            while (after := await small.post("charges")).status_code == 503:
                assert problem(after) == UNAVAILABLE

    assert (problem(answer), int(answer.headers["retry-after"]) >= 1) == (UNAVAILABLE, True)
    assert (after.status_code, is_replay(after), service.provider.done) == (201, False, 1)


@pytest.mark.case("S46")
@pytest.mark.parametrize("error", [pg.UniqueViolation("23505"), pg.SerializationFailure("40001"), pg.DeadlockDetected("40P01")])
@pytest.mark.parametrize("point", ["idempotency.claim:statement_1", "idempotency.claim:statement_2"])
async def test_what_the_database_says_to_a_claim_is_never_a_500(service: Service, error: psycopg.Error, point: str) -> None:
    """Once: the request is executed or told to come again. For ever: 503. And never two effects."""
    await service.post("notes", key="known")
    service.faults.fail(point, error)
    once = [await service.post("notes", key=key) for key in ("known", "new")]
    service.faults.fail(point, error, times=100)
    always = [await service.post("notes", key=key) for key in ("known", "newer")]
    del service.faults.on[point]
    service.lease_ends()
    after = [await service.post("notes", key=key) for key in ("known", "new", "newer")]

    for answer in [*once, *always]:
        assert answer.status_code in {201, 503}
        assert answer.status_code == 201 or (problem(answer) == UNAVAILABLE and int(answer.headers["retry-after"]) >= 1)
    assert problem(always[0]) == UNAVAILABLE
    assert [answer.status_code for answer in after] == [201, 201, 201]
    assert await service.acts() == ["noted"] * 3


@pytest.mark.case("S47")
async def test_a_row_that_is_pruned_in_between_is_claimed_again(service: Service) -> None:
    """It was there for the insert and is gone for the read: then the key is new, and the answer says what happened now."""
    first = await service.post("notes")

    async def prune() -> None:
        del service.faults.on["idempotency.claim:statement_1"]
        async with await psycopg.AsyncConnection.connect(service.database_url, autocommit=True) as other:
            await other.execute("DELETE FROM idempotency_keys")

    service.faults.on["idempotency.claim:statement_1"] = prune
    second = await service.post("notes")
    third = await service.post("notes")

    assert (second.status_code, is_replay(second)) == (201, False)
    assert second.json()["id"] != first.json()["id"]
    assert (told(third), is_replay(third)) == (told(second), True)
    assert await service.acts() == ["noted", "noted"]


class _Ahead(Clock):
    def now(self) -> datetime:
        return super().now() + timedelta(minutes=10)


class _Behind(Clock):
    def now(self) -> datetime:
        return super().now() - timedelta(minutes=10)


@pytest.mark.case("S48")
@pytest.mark.parametrize("clocks", [(_Ahead, _Behind), (_Behind, _Ahead)])
async def test_the_clock_of_a_host_ends_no_lease(service: Service, clocks: tuple[type[Clock], type[Clock]]) -> None:
    """Whose clock is ten minutes wrong takes nothing over too early, and its own leases and times are as long as those of others."""
    first, second = clocks
    async with service.another(clock=first()) as one, service.another(clock=second()) as other:
        await one.dies("notes.write:before_commit", "notes")
        at_once = [await application.post("notes") for application in (one, other, service)]
        left = await service.value("SELECT extract(epoch FROM lease_expires_at - clock_timestamp())::float8 FROM idempotency_keys")
        kept = await service.value("SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM idempotency_keys")
        await service.run("UPDATE idempotency_keys SET lease_expires_at = clock_timestamp()")
        over = await other.post("notes")

    assert {problem(answer) for answer in at_once} == {IN_PROGRESS}
    assert LEASE_SECONDS - 20 < left <= LEASE_SECONDS
    assert 168 * 3600 - 20 < kept <= 168 * 3600
    assert over.status_code == 201
