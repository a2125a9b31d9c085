"""Running what a page shows: the commands of its `sh runnable` blocks, one after the other, in one shell."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ipn_gateway import postgres
from tests import forkserver
from tests.cli import command

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
GATEWAY, SIMULATOR = "http://127.0.0.1:8000", "http://127.0.0.1:8100"
"""Where pages say that the two listen; a test puts its own addresses there."""
PAGE_SECONDS = 90
OURS = {"ipn-gateway": "ipn_gateway", "curl": "tests.docs.curl", "psql": "tests.docs.psql"}


def blocks(text: str, language: str) -> list[str]:
    """The code of the fences that begin with these words."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    """What a page has under a heading of the second level."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def shims(directory: Path) -> Path:
    """A folder for PATH with the commands that pages call. curl and psql are stand-ins, so that Python alone is needed."""
    programs = postgres._programs()
    called = {name: forkserver.shim(module) for name, module in OURS.items()} | {
        name: f'#!/bin/sh\nexec {shlex.quote(str(programs / name))} "$@"\n' for name in ("pg_dump", "pg_restore")
    }
    directory.mkdir()
    for name, script in called.items():
        shim = directory / name
        shim.write_text(script)
        shim.chmod(0o755)
    return directory


async def run(text: str, folder: Path, settings: Mapping[str, str], addresses: Mapping[str, str]) -> command.Done:
    """Run a page's blocks in a folder from which the docs are seen as from a clone; the first command that fails ends it."""
    script = "set -eu\n" + "".join(blocks(text, "sh runnable"))
    for written, real in addresses.items():
        script = script.replace(written, real)
    path = f"{await asyncio.to_thread(shims, folder / 'bin')}{os.pathsep}{os.environ['PATH']}"
    (folder / "docs").symlink_to(ROOT / "docs")
    shell = await asyncio.create_subprocess_exec(
        *("sh", "-c", script),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), **settings, "PATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    return await command.ended(shell, seconds=PAGE_SECONDS)
