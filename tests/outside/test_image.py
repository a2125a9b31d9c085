"""The steps of the Dockerfile, replayed in a clean folder as far as no engine is needed: its RUN lines, its command, its health check."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import closing
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.architecture.source import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DOCKERFILE = (ROOT / "Dockerfile").read_text()
STEP_SECONDS = 300
BUILT_AT = "/opt/ipn-gateway"


def instructions() -> list[tuple[str, str]]:
    """The instructions in order, with their lines joined and comments left out."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


async def _run(step: str, folder: Path, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *("sh", "-euc", step), cwd=folder, env=os.environ | environment, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(STEP_SECONDS):
        out, err = await process.communicate()
    assert process.returncode == 0, f"{step}\n{err.decode()}"
    return out.decode()


async def _replay_build(folder: Path) -> Path:
    """Do what the first stage does, with folders of ours in the place of its own; where it puts the environment."""
    uv, base, target = shutil.which("uv"), folder / "image", folder / "opt"
    await _run(shlex.join([uv, "venv", "--quiet", "--seed"] if uv else [sys.executable, "-m", "venv"]) + f" {base}", folder)
    python = {"PATH": f"{base}/bin{os.pathsep}{os.environ['PATH']}"}
    for word, rest in instructions():
        if word == "COPY":
            *names, _ = rest.split()
            for name in names:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
                copy(ROOT / name, folder / name)
        elif word == "RUN":
            await _run(rest.replace(BUILT_AT, str(target)), folder, **python)
        elif word == "FROM" and not rest.endswith("AS build"):
            return target
    raise AssertionError("the Dockerfile has no second stage")


@pytest.mark.timeout(900)
async def test_the_steps_of_the_image_lead_to_a_healthy_gateway(tmp_path: Path, database_url: str):
    """Built from the lock alone, without test tools, it serves, its health check says so, and it ends at the stop signal."""
    target = await _replay_build(tmp_path)
    found = dict(instructions())
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    command = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    check = json.loads(found["HEALTHCHECK"].partition(" CMD ")[2])
    path = {"PATH": f"{target}/bin{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    settings = path | {"IPN_DATABASE_URL": database_url, "IPN_SECRET_KEY": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="}

    installed = await _run("pip list --format freeze", tmp_path, **path)
    process = await asyncio.create_subprocess_exec(
        *[f"{target}/bin/{command[0]}", *(port if word == "8000" else word for word in command[1:])],
        env=os.environ | settings,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(STEP_SECONDS):
        line = (await process.stdout.readline()).decode()
    await _run(shlex.join(word.replace("8000", port) for word in check), tmp_path, **path)
    async with httpx.AsyncClient() as client:
        alive = await client.get(f"http://127.0.0.1:{port}/healthz")
    process.terminate()
    async with asyncio.timeout(STEP_SECONDS):
        _, errors = await process.communicate()

    assert f"listens on http://127.0.0.1:{port}" in line
    assert alive.status_code == 200
    assert process.returncode == 0, errors.decode()
    locked = set(re.findall(r"^([a-z0-9.-]+(?:\[[a-z,]+\])?==[^ ;]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    releases = {release.lower().replace("_", "-") for release in installed.split()}
    unlocked = releases - {re.sub(r"\[.*\]", "", name) for name in locked}
    assert {name.partition("==")[0] for name in unlocked} <= {"ipn-gateway", "pip", "setuptools"}
    assert not {release.partition("==")[0] for release in releases} & {"pytest", "mypy", "ruff", "hatchling", "hypothesis"}


@pytest.mark.timeout(60)
async def test_a_check_of_a_gateway_that_is_not_there_fails():
    """The health check says unhealthy by its exit code."""
    check = json.loads(dict(instructions())["HEALTHCHECK"].partition(" CMD ")[2])
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", check[2].replace("8000", port), stderr=DEVNULL)

    assert await process.wait() != 0
