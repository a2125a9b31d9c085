"""What the database says in the worst moment of a keyed call: exactly one effect, and an answer that is definite."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from cryptography.fernet import Fernet
from psycopg import errors as pg
from pydantic import SecretStr

from ipn_gateway import runtime, settings, tenants
from ipn_gateway.errors import StateConflict
from ipn_gateway.operations import Finished, Step, Work
from ipn_gateway.web.app import create_app
from tests.idempotency import foreign
from tests.idempotency.service import Points, Service, is_replay, told
from tests.make import TENANT
from tests.proxy import Proxy, proxying
from tests.web.conftest import ORDER, SOURCE, Caller, problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Transaction
    from tests.proxy import Moment

MOMENTS: tuple[Moment, ...] = ("before", "while", "after")
DONE = ["begun", "recorded", "receipt"]
COMMITS = {
    "notes": ["notes.write"],
    "charges": ["charges.begin", "charges.record", "charges.receipt"],
    "payouts": ["payouts.begin", "payouts.record", "payouts.receipt"],
}
EACH = [(path, name) for path, names in COMMITS.items() for name in names]


def acts_of(path: str) -> list[str]:
    return ["noted"] if path == "notes" else DONE


# --- S100: which unique key it was


@pytest.mark.case("S100")
async def test_a_unique_violation_of_anybody_elses_is_no_duplicate(service: Service) -> None:
    """Even of a table and constraint of the same names: a fault, one run, undone whole, and no stored answer."""
    await service.run("CREATE SCHEMA merchant")
    await service.run("CREATE TABLE merchant.idempotency_keys (id int CONSTRAINT idempotency_keys_pkey PRIMARY KEY)")
    runs: list[int] = []

    async def violate(tx: Transaction, work: Work) -> Step:
        runs.append(1)
        await foreign.act(tx, work, "done")
        await tx.execute("INSERT INTO merchant.idempotency_keys VALUES (1), (1)")
        raise AssertionError

    service.app.state.told = foreign.Told(violate)
    answer = await service.post("told")

    assert problem(answer) == (500, "internal-error")
    assert len(runs) == 1
    assert (await service.acts(), await service.rows()) == ([], [])


@pytest.mark.case("S100")
async def test_a_trigger_that_fails_under_the_claim_executes_nothing(service: Service) -> None:
    """What somebody hung on our table is no duplicate of a key: 503 and no loop, and when it is gone the key executes."""
    await service.run("CREATE TABLE copies (key text CONSTRAINT copies_pkey PRIMARY KEY)")
    await service.run("INSERT INTO copies VALUES ('K1')")
    await service.run(
        "CREATE FUNCTION copy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO copies VALUES (NEW.key); RETURN NEW; END $$"
    )
    await service.run("CREATE TRIGGER copy AFTER INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION copy()")
    before = len(service.faults.seen)
    answer = await service.post("charges")
    passed = service.faults.seen[before:]
    await service.run("DROP TRIGGER copy ON idempotency_keys")
    after = await service.post("charges")

    assert problem(answer) == (503, "idempotency-unavailable")
    assert passed == []
    assert (after.status_code, is_replay(after), service.provider.done) == (201, False, 1)


# --- S101, S103, S104: run again whole

RERUN = [
    pg.SerializationFailure("40001"),
    pg.DeadlockDetected("40P01"),
    pg.AdminShutdown("57P01"),
    pg.CannotConnectNow("57P03"),
    pg.ConnectionFailure("08006"),
    pg.ReadOnlySqlTransaction("25006"),
    psycopg.OperationalError("no SQLSTATE"),
]


@pytest.mark.case("S101", "S103", "S104")
@pytest.mark.parametrize("error", RERUN, ids=str)
async def test_what_is_no_fault_of_the_request_is_run_again(service: Service, error: psycopg.Error) -> None:
    """The transaction alone, whole, and at every step: the client notices nothing, and the provider is called once."""
    for path, names in COMMITS.items():
        for name in names:
            for point in ("statement_1", "before_commit"):
                service.faults.fail(f"{name}:{point}", error)
        answer = await service.post(path)

        assert (answer.status_code, is_replay(answer)) == (201, False)
        assert await service.acts() == acts_of(path)
        await service.run("DELETE FROM acts")
    assert service.provider.done == len(service.provider.calls) == 2


@pytest.mark.case("S101")
@pytest.mark.parametrize("error", [pg.SerializationFailure("40001"), pg.DeadlockDetected("40P01")], ids=str)
async def test_what_never_gets_through_is_a_503_and_left_to_its_lease(service: Service, error: psycopg.Error) -> None:
    """After five runs; then the same key executes, and the provider hears of it once."""
    runs: list[int] = []

    async def fail() -> None:
        runs.append(1)
        raise error

    service.faults.on["charges.receipt:before_commit"] = fail
    answer = await service.post("charges")
    left = await service.row()
    del service.faults.on["charges.receipt:before_commit"]
    service.lease_ends()
    after = await service.post("charges")

    assert (problem(answer), int(answer.headers["retry-after"]) >= 1) == ((503, "overloaded"), True)
    assert len(runs) == 5
    assert (left["state"], left["recovery_point"], left["response_status"]) == ("in_progress", "receipt", None)
    assert (after.status_code, service.provider.done, await service.acts()) == (201, 1, DONE)


@pytest.mark.case("S103")
@pytest.mark.parametrize(("path", "name"), EACH)
async def test_a_terminated_backend_costs_a_run_and_nothing_else(service: Service, path: str, name: str) -> None:
    """The connection goes in the middle of a step: the same on a new one."""

    async def terminate() -> None:
        del service.faults.on[f"{name}:statement_1"]
        async with await psycopg.AsyncConnection.connect(service.database_url, autocommit=True) as other:
            await other.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND state = 'idle in transaction'"
            )

    service.faults.on[f"{name}:statement_1"] = terminate
    answer = await service.post(path)

    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert f"{name}:statement_1" not in service.faults.on
    assert await service.acts() == acts_of(path)


@pytest.mark.case("S104")
async def test_a_server_that_only_reads_by_now_is_left(service: Service) -> None:
    """Its connection is closed, so that the next one may lead to the primary: for the claim, and for what comes after it."""
    backends: list[int] = []
    async with service.another(connections_max=1) as small:
        async with small.db.autocommit("test.demoted") as tx:
            await tx.execute("SET default_transaction_read_only = on")
            demoted = await tx.value("SELECT pg_backend_pid()")
        claimed = await small.post("notes")

        async def demote(tx: Transaction, work: Work) -> Step:
            if not backends:
                await tx.execute("SET TRANSACTION READ ONLY")
            backends.append(await tx.value("SELECT pg_backend_pid()"))
            await foreign.act(tx, work, "done")
            return Finished(201, b"{}")

        small.app.state.told = foreign.Told(demote)
        executed = await small.post("told")
    alive = await service.value("SELECT count(*) FROM pg_stat_activity WHERE pid = %(pid)s", pid=demoted)

    assert (claimed.status_code, is_replay(claimed)) == (201, False)
    assert (executed.status_code, is_replay(executed)) == (201, False)
    assert alive == 0
    assert len(set(backends)) == 2
    assert await service.acts() == ["noted", "done"]


# --- S102: whether a COMMIT happened


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    """What stands between the application and its database."""
    async with proxying(database_url) as opened:
        yield opened


def cut_once(points: Points, proxy: Proxy, name: str, moment: Moment) -> None:
    """The next COMMIT of a transaction is cut."""

    async def arm() -> None:
        del points.on[f"{name}:before_commit"]
        proxy.cut_next(moment)

    points.on[f"{name}:before_commit"] = arm


@pytest.mark.case("S102")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("path", "name"), EACH)
async def test_the_outcome_of_a_lost_commit_is_found_out(service: Service, proxy: Proxy, path: str, name: str, moment: Moment) -> None:
    """Sent or not, done or not: the client gets the answer, each step is done once, and the provider is called once."""
    async with service.another(database_url=proxy.url) as cut:
        cut_once(cut.faults, proxy, name, moment)
        answer = await cut.post(path)
    repeat = await service.post(path)

    assert proxy.cuts == 1
    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert (told(repeat), is_replay(repeat)) == (told(answer), True)
    assert await service.acts() == acts_of(path)
    assert service.provider.done == len(service.provider.calls) == (0 if path == "notes" else 1)


@pytest.mark.case("S102")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_refusal_whose_commit_was_lost_is_kept(service: Service, proxy: Proxy, moment: Moment) -> None:
    """The rule's no is stored once, and repeated."""
    async with service.another(database_url=proxy.url) as cut:
        cut.app.state.told = foreign.raises(StateConflict("sold out"))
        service.app.state.told = foreign.says(Finished(201, b"{}"))
        cut_once(cut.faults, proxy, "idempotency.refuse", moment)
        answer = await cut.post("told")
    repeat = await service.post("told")

    assert proxy.cuts == 1
    assert problem(answer) == (409, "state-conflict")
    assert (told(repeat), is_replay(repeat)) == (told(answer), True)


@pytest.mark.case("S102")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("path", ["charges", "payouts"])
async def test_an_unclear_answer_whose_commit_was_lost_stays_unclear(service: Service, proxy: Proxy, path: str, moment: Moment) -> None:
    """The charge is free to be tried again by the same key, the payout waits for a person: as if nothing had been cut."""
    service.provider.will(lost=True)
    async with service.another(database_url=proxy.url) as cut:
        cut_once(cut.faults, proxy, f"{path}.record", moment)
        answer = await cut.post(path)
    repeat = await service.post(path)

    assert proxy.cuts == 1
    if path == "charges":
        assert (problem(answer), repeat.status_code) == ((503, "overloaded"), 201)
        assert len(set(service.provider.keys)) == 1
    else:
        assert problem(answer) == problem(repeat) == (409, "idempotency-indeterminate")
        assert len(service.provider.calls) == 1
    assert service.provider.done == 1


@pytest.mark.case("S102")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_doubt_whose_commit_was_lost_is_recorded_once(service: Service, proxy: Proxy, moment: Moment) -> None:
    """An abandoned payout is marked, and the repeat that found it says so."""
    await service.dies("transport.ask:after", "payouts")
    service.lease_ends()
    async with service.another(database_url=proxy.url) as cut:
        cut_once(cut.faults, proxy, "idempotency.doubt", moment)
        answer = await cut.post("payouts")
    row = await service.row()

    assert proxy.cuts == 1
    assert problem(answer) == (409, "idempotency-indeterminate")
    assert (row["state"], row["fence"]) == ("indeterminate", 2)


@pytest.mark.case("S102")
async def test_a_claim_whose_answer_was_lost_is_known_again(service: Service) -> None:
    """The row is there and nobody heard of it: the same request goes on as its owner, by the id that it had made before."""
    service.faults.fail("idempotency.claim:statement_1", psycopg.OperationalError("the connection is lost"))
    answer = await service.post("charges")
    row = await service.row()

    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert (row["fence"], row["state"]) == (1, "completed")
    assert service.provider.done == 1


@pytest.mark.case("S102")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_order_is_registered_once_whatever_became_of_its_commit(proxy: Proxy, clock: Clock, moment: Moment) -> None:
    """Of our own API: 201 and not "exists already", which would be our own row; and the repeat hears the same."""
    points = Points()
    chosen: dict[str, Any] = {"database_url": SecretStr(proxy.url), "secret_key": Fernet.generate_key().decode()}
    async with runtime.opened(settings.load(**chosen), proxy.url, clock=clock, faults=points) as rt:
        app = create_app(rt)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway.test") as http:
            shop = Caller(http, (await tenants.create_key(rt.db, TENANT)).key)
            await shop.post("/v1/sources", SOURCE)
            cut_once(points, proxy, "orders.create", moment)
            key = secrets.token_hex(8)
            first = await shop.post("/v1/orders", ORDER, idempotency_key=key)
            second = await shop.post("/v1/orders", ORDER, idempotency_key=key)
            listed = (await shop.get("/v1/orders")).json()["items"]
            await app.state.slots.drained()

    assert proxy.cuts == 1
    assert (first.status_code, is_replay(first)) == (201, False)
    assert (told(second), is_replay(second)) == (told(first), True)
    assert listed == [first.json()]
