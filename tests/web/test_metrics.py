"""What monitoring sees: counters of the process, gauges of the database, and what is missing when the database is away."""

from __future__ import annotations

import ast
import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs import generate
from ipn_gateway import gauges, logs
from ipn_gateway.web import metrics
from ipn_gateway.web.app import create_app
from tests import world as worlds
from tests.architecture.source import calls, modules
from tests.make import NOW, TENANT, Make, ago, ahead
from tests.web.conftest import problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ipn_gateway.clock import Clock
    from ipn_gateway.faults import Faults
    from ipn_gateway.runtime import Runtime

Values = dict[str, float]
DATABASE = set(gauges.CATALOGUE) - {"database_up"}


async def scraped(http: httpx.AsyncClient) -> Values:
    """Every sample by its name and labels, as they are written."""
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {_written(sample): sample.value for family in text_string_to_metric_families(answer.text) for sample in family.samples}


def _written(sample: Any) -> str:
    labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}}" if labels else str(sample.name)


def names(values: Values) -> set[str]:
    return {name.partition("{")[0] for name in values}


@pytest.fixture
async def busy(make: Make, rt: Runtime) -> Make:
    """A gateway with work of every kind: late, waiting for its time, and waiting for a person."""
    await make.source()
    for due in (ago(seconds=600), ago(seconds=60), ahead(seconds=60)):
        await make.inbox(due_at=due, received_at=ago(days=2))
        await make.sweep(due_at=due)
    await make.inbox(due_at=ago(seconds=5), proved=False)
    await make.inbox(due_at=ago(seconds=300), lease_expires_at=ahead(seconds=30))
    for state in ("parked", "held", "held", "conflict", "dead"):
        await make.inbox(state=state, due_at=None, parked_at=NOW if state == "parked" else None)
    for status in ("enabled", "disabled"):
        endpoint = await make.endpoint(status=status)
        for due in (ago(seconds=90), ahead(hours=1)):
            await make.event_delivery(endpoint_id=endpoint["id"], next_attempt_at=due, created_at=ago(days=2))
    await make.refund(status="processing", due_at=ago(seconds=30))
    for lease in (ago(seconds=1), ago(seconds=900), ahead(seconds=30)):
        await make.idempotency_key(lease_expires_at=lease)
    await make.idempotency_key(state="indeterminate", indeterminate_at=ago(seconds=7200), created_at=ago(days=1))
    await make.idempotency_key(state="completed")
    return make


@pytest.mark.case("S138")
async def test_late_is_what_is_past_its_due_time(busy: Make, http: httpx.AsyncClient) -> None:
    """Not what is old: work that waits for its next attempt is healthy, and nobody waits for a disabled endpoint."""
    found = await scraped(http)

    rows = {work: found[f"past_due_rows{{work={work}}}"] for work in ("inbox", "inbox_unproved", "sweeps", "event_deliveries", "refunds")}
    oldest = {work: found[f"past_due_oldest_seconds{{work={work}}}"] for work in rows}
    assert rows == {"inbox": 3, "inbox_unproved": 1, "sweeps": 2, "event_deliveries": 1, "refunds": 1}
    assert oldest == pytest.approx({"inbox": 600, "inbox_unproved": 5, "sweeps": 600, "event_deliveries": 90, "refunds": 30}, abs=15)


async def test_what_is_stuck_is_counted_by_state(busy: Make, http: httpx.AsyncClient) -> None:
    """Notifications that wait for an order or a person, keys without an answer, and how far partitions reach."""
    found = await scraped(http)

    assert {state: found[f"notifications_open{{state={state}}}"] for state in ("parked", "held", "conflict", "dead")} == {
        "parked": 1,
        "held": 2,
        "conflict": 1,
        "dead": 1,
    }
    assert found["idempotency_keys_open{state=in_progress}"] == 3
    assert found["idempotency_keys_open{state=indeterminate}"] == 1
    assert found["idempotency_keys_abandoned"] == 2
    assert found["idempotency_keys_indeterminate_oldest_seconds"] == pytest.approx(7200, abs=15)
    assert 60 < found["partitions_ahead_days"] < 130
    assert found["database_up"] == 1


async def test_an_empty_gateway_has_nothing_late(http: httpx.AsyncClient) -> None:
    """Zeros, not gaps: a gap means that it is not known."""
    found = await scraped(http)

    assert names(found) >= set(metrics.GAUGES)
    assert {value for name, value in found.items() if name.startswith(("past_due", "notifications_open", "idempotency_keys"))} == {0}


async def test_counting_ends_at_the_most(busy: Make, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a table is, a scrape looks at so many rows of it."""
    monkeypatch.setattr(gauges, "COUNT_MAX", 1)

    found = await scraped(http)

    assert {value for name, value in found.items() if name.startswith("past_due_rows")} == {1}
    assert found["idempotency_keys_open{state=in_progress}"] == 1
    assert found["past_due_oldest_seconds{work=inbox}"] == pytest.approx(600, abs=15)


async def test_what_the_process_did_is_counted(database_url: str, clock: Clock, faults: Faults) -> None:
    """One payment, told once: the notification is late until it is worked on, then it is applied; requests and transactions have labels."""
    async with worlds.opened(database_url, clock, faults) as world, client(world.rt) as http:
        await world.order("ORD-1")
        before = await scraped(http)
        await world.notify(world.pay("ORD-1"))
        clock.advance(seconds=5)
        told = await scraped(http)
        await world.drain()
        await http.get("/v1/orders")
        clock.advance(seconds=5)
        after = await scraped(http)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert (told["past_due_rows{work=inbox}"], after["past_due_rows{work=inbox}"]) == (1, 0)
    assert grown("notifications_applied_total") == 1
    assert grown("provider_questions_total") == 1
    assert grown("requests_total{status=401}") == 1
    assert grown("requests_total{status=200}") == 2
    assert grown("transactions_total{transaction=inbox.claim}") >= 1


@asynccontextmanager
async def client(rt: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(rt)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as opened:
        yield opened
        await app.state.slots.drained()


async def test_nobody_needs_a_key_and_no_tenant_is_named(busy: Make, http: httpx.AsyncClient) -> None:
    """Monitoring asks without one; labels are few words of ours."""
    await http.get("/healthz")
    text = (await http.get("/metrics")).text

    assert not re.search(rf'="{TENANT}', text)
    assert set(re.findall(r"\{(\w+)=", text)) == {"status", "transaction", "work", "state", "share", "table"}
    assert problem(await http.get("/metrics", params={"name[]": "x"})) == (400, "unknown-parameter")


async def test_without_the_database_the_counters_are_still_told(rt: Runtime, http: httpx.AsyncClient) -> None:
    """200, `database_up 0`, and no gauge that would pretend to know."""
    await rt.maintenance_db.close()

    found = await scraped(http)

    assert found["database_up"] == 0
    assert not DATABASE & names(found)
    assert found["database_connections_waiting{share=web}"] == 0
    assert found["gauges_not_read_total"] >= 1
    assert found["requests_failed_total"] == logs.counters["requests.failed"]


async def test_what_takes_too_long_is_missing_and_the_rest_is_told(
    database_url: str, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that cannot be read now costs its own gauges and those behind them; the answer does not wait for it."""
    monkeypatch.setattr(gauges, "READ_SECONDS_MAX", 0.5)

    async with await psycopg.AsyncConnection.connect(database_url) as other:
        await other.execute("LOCK TABLE idempotency_keys IN ACCESS EXCLUSIVE MODE")
        async with asyncio.timeout(5):
            found = await scraped(http)

    assert found["database_up"] == 1
    assert "past_due_rows" in names(found)
    assert "idempotency_keys_open" not in names(found)


async def test_one_reads_for_all_and_not_again_for_five_seconds(http: httpx.AsyncClient, clock: Clock, faults: Faults) -> None:
    """However often and however many at once ask, the database is asked once."""
    reads = 0

    async def count() -> None:
        nonlocal reads
        reads += 1

    faults.on["gauges.read:statement_1"] = count

    await asyncio.gather(*(scraped(http) for _ in range(20)))
    clock.advance(seconds=4)
    await scraped(http)
    assert reads == 1

    clock.advance(seconds=1)
    await scraped(http)
    assert reads == 2


async def test_connections_are_told_by_share(rt: Runtime, http: httpx.AsyncClient) -> None:
    """Each share of the process, and what of it is taken at this moment."""
    async with rt.inbox_db.autocommit("test.hold"):
        found = await scraped(http)

    assert {name for name in found if name.startswith("database_connections_in_use")} == {
        f"database_connections_in_use{{share={share}}}" for share in ("web", "inbox", "dispatcher", "maintenance")
    }
    assert found["database_connections_in_use{share=inbox}"] == 1


# What is written about it


def _counted(path: Path) -> set[str]:
    """The names that a file counts, with `<>` for what the code puts in."""
    count = "count" if path.name == "logs.py" else "logs.count"
    return {name for called, call in calls(path) if called == count for name in _literals(call.args[0])}


def _literals(node: ast.expr) -> set[str]:
    match node:
        case ast.Constant():
            return {str(node.value)}
        case ast.IfExp():
            return _literals(node.body) | _literals(node.orelse)
        case ast.JoinedStr():
            return {"".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)}
    return {f"not a literal: {ast.unparse(node)}"}


def test_every_counter_is_described():
    """Each name that the source counts has a line in `metrics.COUNTERS`, and no line is about something that is not counted."""
    counted = set().union(*map(_counted, modules()))

    assert {re.sub("<.*?>", "<>", name) for name in metrics.COUNTERS} == counted


async def test_every_gauge_is_described(busy: Make, http: httpx.AsyncClient) -> None:
    """The page lists exactly the gauges that a busy gateway tells of."""
    listed = re.findall(r"^\| `(\w+)` \|", generate.pages()["metrics.md"].partition("## Counters")[0], re.MULTILINE)
    told = {name for name in names(await scraped(http)) if not name.endswith("_total")}

    assert sorted(listed) == sorted(told)


async def test_counters_are_there_before_they_count(http: httpx.AsyncClient) -> None:
    """A rate needs a beginning: those with a name of their own start at 0, and each has the name that the page gives."""
    listed = set(re.findall(r"^\| `([a-z_<>]+_total)` \|", generate.pages()["metrics.md"], re.MULTILINE))
    told = names(await scraped(http))

    assert {name for name in listed if "<" not in name} <= told | {"requests_total", "transactions_total"}
    assert not [name for name in told if name.endswith("_total") and not any(_fits(name, pattern) for pattern in listed)]


def _fits(name: str, pattern: str) -> bool:
    return re.fullmatch(re.sub("<.*?>", r"\\w+", pattern), name) is not None


@pytest.mark.case("S138")
def test_alerts_ask_for_what_is_told_and_notice_when_nothing_is():
    """Every name in them exists; late work is measured by due time; that a value is missing alarms too."""
    told = set(metrics.GAUGES) | {metric for metric, _, _ in metrics.described()}
    asked = set().union(*(re.findall(r"[a-z]+(?:_[a-z]+)+", re.sub(r"\{.*?\}", "", expression)) for expression, _ in generate.ALERTS))

    assert asked <= told
    assert {"past_due_oldest_seconds", "database_up"} <= {
        name for expression, _ in generate.ALERTS for name in re.findall(r"absent\((\w+)\)", expression)
    }
