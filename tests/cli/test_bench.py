"""The benchmark as it is started from a shell: what it says has a shape, and what it counts is true. How fast anything is, no test asks."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway.bench import load, wire
from ipn_gateway.bench.comparison import Broken, Finding
from ipn_gateway.bench.comparisons import CATALOGUE
from ipn_gateway.bench.latency import percentile
from ipn_gateway.bench.limit import composed
from tests.cli import command

if TYPE_CHECKING:
    from pathlib import Path

TARGETS = {
    "isolation": 1,
    "limit": 1,
    "intake": 1,
    "plain": 1,
    "duplicates": 2,
    "outbound": 3,
    "idempotency": 0,
    "latency": 1,
    "statements": 2,
    "growth": 3,
    "memory": 2,
}


def left_in(directory: Path) -> list[Path]:
    """What a run with this TMPDIR left behind."""
    return list(directory.iterdir())


@pytest.mark.timeout(240)  # a server that waits for the disk, and gateways one after the other
async def test_a_tiny_run_tells_what_it_counted_and_leaves_nothing_behind(tmp_path: Path):
    """Repeats are answered without a question, rows are counted, each finding has its spread, and a missed target is no failure."""
    arguments = ("--only", "duplicates", "--only", "statements", "--count", "24", "--json")

    process = await command.start("bench", *arguments, TMPDIR=str(tmp_path), IPN_DATABASE_URL="postgresql://nowhere.invalid/")
    done = await command.ended(process, seconds=200)
    report = done.json
    results = {result["name"]: result for result in report["comparisons"]}
    findings = {finding["name"]: finding for result in results.values() for finding in result["findings"]}

    assert (done.code, report["ok"], list(results)) == (0, True, ["duplicates", "statements"])
    assert findings["questions about repeats"]["value"] == 0
    assert findings["repeats ÷ fresh"]["min"] <= findings["repeats ÷ fresh"]["value"] <= findings["repeats ÷ fresh"]["max"]
    assert findings["bytes of WAL a notification"]["value"] > 1000
    assert all(finding["judged"] is (finding["target"] is not None) is (finding["met"] is not None) for finding in findings.values())
    assert [len(result["turns"]) for result in results.values()] == [1, 1]
    assert "repeats ÷ fresh" in done.err
    assert left_in(tmp_path) == []


@pytest.mark.timeout(120)  # a server is started twice
async def test_a_run_that_is_stopped_leaves_nothing_behind(tmp_path: Path):
    """SIGTERM in the middle: exit code 1 with a sentence, and no process, server or file stays."""
    process = await command.start("bench", "--only", "duplicates", "--count", "24", TMPDIR=str(tmp_path))
    assert process.stderr is not None
    async with asyncio.timeout(command.COMMAND_SECONDS):
        while b"duplicates" not in await process.stderr.readline():
            pass
    process.send_signal(signal.SIGTERM)
    done = await command.ended(process)

    assert done.code == 1
    assert "Stopped before the end" in done.err.splitlines()[-1]
    assert left_in(tmp_path) == []


async def test_a_comparison_that_does_not_exist_is_wrong_use():
    """The names that there are, are told."""
    done = await command.run("bench", "--only", "speed")

    assert (done.code, done.out) == (2, "")
    assert "limit" in done.err


def test_every_comparison_has_its_targets():
    """Eleven comparisons, and how many of their findings are judged."""
    judged = {name: sum(finding.judged for finding in comparison.findings) for name, comparison in CATALOGUE.items()}

    assert judged == TARGETS


def test_the_limit_is_composed_of_what_each_part_takes():
    """Parts that share the processors add up in time: no part's rate is the limit."""
    parts = {"form": 4600, "provider_client": 2660, "delivery_client": 7770, "rows_together": 30000}

    assert composed(parts) == pytest.approx(1324, abs=1)


@pytest.mark.parametrize(("bounds", "value", "met"), [({"at_least": 2}, 2, True), ({"at_most": 2}, 2.1, False), ({}, 5, None)])
def test_a_finding_is_judged_by_its_bound(bounds: dict[str, float], value: float, met: bool | None):
    """At least, at most, or told only."""
    assert Finding("any", lambda _: 0, **bounds).met(value) is met  # type: ignore[arg-type]  # bounds are numbers


@pytest.mark.parametrize(("percent", "milliseconds"), [(50, 50), (99, 99), (100, 100)])
def test_percentiles_are_those_of_values_that_were_measured(percent: float, milliseconds: float):
    """Of a hundred values, the one that so many are not above."""
    assert percentile([number / 1000 for number in range(100, 0, -1)], percent) == pytest.approx(milliseconds)


async def test_an_open_loop_counts_the_wait_of_what_was_due():
    """Requests that wait for a busy connection are late from their intended time on, and none is left out."""
    requests = [load.request(f"/hooks/{number}", b"{}", {"webhook-id": f"evt_{number}"}) for number in range(20)]

    async with wire.listening(wire.Receiver()) as url:
        answers = await load.at_rate([url], requests, per_second=1000, lanes=1)

    due = [at - answers.began for at in answers.due]
    assert due == pytest.approx([number / 1000 for number in range(20)])
    assert all(answered >= at for at, answered in zip(answers.due, answers.answered, strict=True))
    assert answers.statuses == {200: 20}


async def test_a_refusal_breaks_a_run():
    """A rate of refusals is no rate."""

    class Refuses:
        def answer(self, _: bytes, __: bytes, write: Any) -> None:
            write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")

    async with wire.listening(Refuses()) as url:
        answers = await load.at_once([url], [load.request("/", b"", {})] * 3, lanes=2)

    with pytest.raises(Broken, match="503"):
        answers.all_accepted()
