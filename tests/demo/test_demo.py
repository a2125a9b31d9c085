"""The demo as it is started from a shell."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.cli import command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


def left_in(directory: Path) -> list[Path]:
    """What a demo with this TMPDIR left behind."""
    return list(directory.iterdir())


async def test_the_demo_checks_itself_and_leaves_nothing_behind(tmp_path: Path):
    """Five payments, each once, through repeats, forgeries and a loss; it ends by itself, whatever IPN_DATABASE_URL says."""
    asked = (*command.OURS, "demo", "--payments", "5", "--json")
    done = await command.run_by_path(*asked, TMPDIR=str(tmp_path), IPN_DATABASE_URL="postgresql://nowhere.invalid/")

    summary = done.json

    assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 1)
    assert summary["ok"]
    assert {summary[name] for name in ("payments", "applied", "orders_paid", "events", "events_delivered")} == {5}
    assert (summary["lost"], summary["doubled"], summary["forgeries_applied"]) == (0, 0, 0)
    assert summary["notifications_sent"] == summary["notifications_stored"] > 5
    assert min(summary[name] for name in ("duplicates", "rejected", "found_by_sweep", "event_repeats")) > 0
    assert left_in(tmp_path) == []


async def test_the_demo_stays_up_until_it_is_told_to_end(tmp_path: Path):
    """With --keep the summary is followed by what to try next; a signal is the orderly end, and takes everything along."""
    process = await command.start("demo", "--payments", "1", "--json", "--keep", "--seed", "3", TMPDIR=str(tmp_path))
    assert process.stdout is not None
    async with asyncio.timeout(command.COMMAND_SECONDS):
        summary = json.loads(await process.stdout.readline())
    process.send_signal(signal.SIGINT)
    done = await command.ended(process)

    assert summary["ok"]
    assert done.code == 0
    assert "To try next" in done.err
    assert left_in(tmp_path) == []


async def test_a_demo_that_is_stopped_early_leaves_nothing_behind(tmp_path: Path):
    """SIGTERM before the end: exit code 1 with a sentence, and no process, server or file stays."""
    process = await command.start("demo", "--payments", "50", TMPDIR=str(tmp_path))
    assert process.stderr is not None
    async with asyncio.timeout(command.COMMAND_SECONDS):
        while b"notifications sent" not in await process.stderr.readline():
            pass
    process.send_signal(signal.SIGTERM)
    done = await command.ended(process)

    assert done.code == 1
    assert "Stopped before the end" in done.err.splitlines()[-1]
    assert left_in(tmp_path) == []
