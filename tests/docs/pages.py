"""Running what a page shows: the commands of its `sh runnable` blocks, one after the other, in one shell."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cli import command

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
GATEWAY, SIMULATOR = "http://127.0.0.1:8000", "http://127.0.0.1:8100"
"""Where pages say that the two listen; a test puts its own addresses there."""


def blocks(text: str, language: str) -> list[str]:
    """The code of the fences that begin with these words."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shims(directory: Path) -> Path:
    """A folder for PATH with the commands that pages call; curl and psql are stand-ins, so that Python alone is needed."""
    here = Path(__file__).parent
    called = {"ipn-gateway": ["-m", "ipn_gateway"], "curl": [str(here / "curl.py")], "psql": [str(here / "psql.py")]}
    directory.mkdir()
    for name, arguments in called.items():
        shim = directory / name
        shim.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *arguments])} "$@"\n')
        shim.chmod(0o755)
    return directory


async def run(text: str, folder: Path, settings: Mapping[str, str], addresses: Mapping[str, str]) -> command.Done:
    """Run a page's blocks in a folder from which the docs are seen as from a clone; the first command that fails ends it."""
    script = "set -eu\n" + "".join(blocks(text, "sh runnable"))
    for written, real in addresses.items():
        script = script.replace(written, real)
    path = f"{shims(folder / 'bin')}{os.pathsep}{os.environ['PATH']}"
    (folder / "docs").symlink_to(ROOT / "docs")
    shell = await asyncio.create_subprocess_exec(
        *("sh", "-c", script),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), **settings, "PATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    return await command.ended(shell)
