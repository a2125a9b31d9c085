"""The database fails in every way at whatever the gateway does: each time there is a definite answer, one effect, and all is well again.

Who asks is told 2xx, which is true, or 503, and asks again; workers are brought back by the lease. Nobody restarts the gateway.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy
from psycopg import sql

from tests.acting import ACTS, UNAVAILABLE, definite, opened
from tests.proxy import Proxy, proxying

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from tests.acting import Gateway
    from tests.conftest import Server
    from tests.proxy import Moment

MOMENTS: tuple[Moment, ...] = ("before", "while", "after")


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    """What stands between the gateway and its database."""
    async with proxying(database_url) as opened:
        yield opened


@pytest.fixture
async def gateway(proxy: Proxy, database_url: str, clock: Clock, faults: Faults) -> AsyncIterator[Gateway]:
    """A gateway behind the proxy."""
    async with opened(proxy.url, database_url, clock, faults) as made:
        yield made


# Cut around any COMMIT


@pytest.mark.timeout(60)  # one after the other, at each of its COMMITs
@pytest.mark.case("S102", "S103")
@pytest.mark.parametrize("act", ACTS)
async def test_any_commit_may_be_cut(gateway: Gateway, proxy: Proxy, act: str) -> None:
    """Whichever COMMIT of an act it is, and at which moment: it is done once."""
    first = await gateway.prepared(act)
    before = proxy.commits
    await first.until_done()
    commits = proxy.commits - before
    wrong = []
    for moment in MOMENTS:
        for number in range(commits):
            thing = await gateway.prepared(act)
            proxy.cut_next(moment, after=number)
            await thing.until_done()
            proxy.disarm()
            if await thing.times() != 1:
                wrong.append((moment, number, await thing.times()))

    assert commits >= 1
    assert wrong == []
    assert definite(gateway.told)


# Terminated at any point


@pytest.mark.timeout(60)  # one after the other, at each of its points
@pytest.mark.case("S103")
@pytest.mark.parametrize("act", ACTS)
async def test_its_backends_may_be_terminated_at_any_point(gateway: Gateway, database_url: str, faults: Faults, act: str) -> None:
    """pg_terminate_backend for all of them, at each point that the act passes: it is done once."""
    points = await passed(gateway, faults, act)
    wrong, reached = [], 0

    async def terminate() -> None:
        faults.on.clear()
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as other:
            await other.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'ipn-gateway%'"
            )

    for point in points:
        thing = await gateway.prepared(act)
        faults.on[point] = terminate
        await thing.until_done()
        reached += not faults.on  # what is read anew each second may have been fresh
        faults.on.clear()
        if await thing.times() != 1:
            wrong.append((point, await thing.times()))

    assert reached >= 3
    assert wrong == []
    assert definite(gateway.told)


async def passed(gateway: Gateway, faults: Faults, act: str) -> list[str]:
    """The points that an act passes, in their order: of its statements the first of each transaction."""
    seen: dict[str, None] = {}

    class Seeing(dict[str, Any]):
        def __bool__(self) -> bool:
            return True

        def get(self, point: str, default: Any = None) -> Any:
            seen.setdefault(point)
            return default

    thing = await gateway.prepared(act)
    faults.on = Seeing()
    await thing.do()
    faults.on = {}
    skipped = ("test.", "tenants.", "sources.")  # ours, and what each process reads now and then
    return [point for point in seen if not point.startswith(skipped) and not re.search(r"statement_([2-9]|\d\d)", point)]


# The server refuses, at a statement or at COMMIT

TABLES = {
    "notify": "inbox",
    "apply": "processed_notifications",
    "deliver": "delivery_attempts",
    "create": "orders",
    "refund": "refunds",
}
RERUN = ("40001", "40P01", "25006")
REFUSED = ("53100", "53300", "58030")
LASTING = ("40001", "53100")
FOR_A_WHILE = 1000

FAIL = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('refusals') <= (SELECT times FROM refuse) THEN
        RAISE EXCEPTION 'refused' USING ERRCODE = (SELECT state FROM refuse);
    END IF;
    RETURN NULL;
END $$;
CREATE TABLE refuse (state text, times int);
"""


@pytest.mark.timeout(60)  # each act in turn, with the waits between runs
@pytest.mark.case("S101", "S104")
@pytest.mark.parametrize("when", ["IMMEDIATE", "DEFERRED"])
@pytest.mark.parametrize("state", RERUN + REFUSED)
async def test_the_server_refuses_once_or_for_a_while(gateway: Gateway, database_url: str, state: str, when: str) -> None:
    """At the statement, or at COMMIT: what may be run again is; the rest is a 503, and done once when the server takes it again."""
    came: dict[str, tuple[list[int], int]] = {}
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as direct:
        await direct.execute(FAIL)
        for act in ACTS:
            for times in (1, FOR_A_WHILE) if state in LASTING else (1,):
                thing = await gateway.prepared(act)
                await refusing(direct, TABLES[act], state, when, times)
                told = [await thing.do()]
                await direct.execute("TRUNCATE refuse")
                gateway.world.rt.clock.advance(seconds=91)
                if await thing.times() != 1:
                    await thing.until_done()
                await direct.execute(f"DROP TRIGGER refuse ON {TABLES[act]}")
                came[f"{act} {times}"] = told, await thing.times()

    assert {name: times for name, (_, times) in came.items() if times != 1} == {}
    assert definite(gateway.told)
    if state in RERUN:
        assert [name for name, (told, _) in came.items() if name.endswith(" 1") and told[0] == UNAVAILABLE] == []


async def refusing(direct: psycopg.AsyncConnection[Any], table: str, state: str, when: str, times: int) -> None:
    """The next writes of the table fail, so many."""
    await direct.execute("DROP SEQUENCE IF EXISTS refusals; CREATE SEQUENCE refusals; TRUNCATE refuse")
    await direct.execute("INSERT INTO refuse VALUES (%s, %s)", (state, times))
    await direct.execute(
        f"CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON {table} DEFERRABLE INITIALLY {when}"
        " FOR EACH ROW EXECUTE FUNCTION refuse()"
    )


# Silence


@pytest.mark.timeout(60)  # the workers' limit for a silent server is 15 s
@pytest.mark.case("S102", "S115")
async def test_a_server_that_falls_silent_at_commit_keeps_nobody(gateway: Gateway, proxy: Proxy) -> None:
    """Each act waits no longer than its limit for the answer to COMMIT, which never comes; then it finds what it did."""
    things = [await gateway.prepared(act) for act in ("refund", "apply", "notify", "create")]
    loop = asyncio.get_running_loop()
    began = loop.time()
    proxy.cut_next("silent", times=len(things))
    told = await asyncio.gather(*(thing.do() for thing in things))
    took = loop.time() - began
    proxy.disarm()
    for thing in things:
        if await thing.times() != 1:
            await thing.until_done()

    assert proxy.cuts == len(things)
    assert took < 40
    assert definite(list(told))
    assert [await thing.times() for thing in things] == [1] * len(things)


# No connection is left


@pytest.mark.case("S115")
async def test_a_server_without_a_free_connection_is_a_503_until_it_has_one(
    server: Server, database_url: str, clock: Clock, faults: Faults
) -> None:
    """53300 at connecting, by the server's own limit: nothing is stored, everybody hears so, and afterwards everything works."""
    name = sqlalchemy.make_url(database_url).database
    role = f"{name}_role"
    limit = "ALTER DATABASE {name} CONNECTION LIMIT "
    server.run("CREATE ROLE {role} LOGIN PASSWORD 'x'", role=role)
    try:
        with psycopg.connect(database_url, autocommit=True) as direct:
            for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
                grant = f"GRANT ALL ON ALL {what} IN SCHEMA public TO {{}}"
                direct.execute(sql.SQL(grant).format(sql.Identifier(role)))
        url = sqlalchemy.make_url(database_url).set(username=role, password="x").render_as_string(hide_password=False)
        async with opened(url, database_url, clock, faults) as gateway:
            thing = await gateway.prepared("notify")
            server.run(limit + "0", name=str(name))
            server.admin.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", (role,))
            refused = await thing.do()
            ready = (await gateway.client.get("/readyz")).status_code
            server.run(limit + "-1", name=str(name))
            async with asyncio.timeout(15):
                while (await gateway.client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - only an answer can tell
                    await asyncio.sleep(0)
            accepted = await thing.do()

            assert (refused, ready, accepted) == (UNAVAILABLE, UNAVAILABLE, 200)
            assert await thing.times() == 1
    finally:
        with psycopg.connect(database_url, autocommit=True) as direct:
            direct.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        server.run("DROP ROLE {role}", role=role)
