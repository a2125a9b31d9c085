"""A stranger finds the way by --help alone."""

from __future__ import annotations

import pytest

from tests.cli import command

COMMANDS = (
    "serve",
    "migrate",
    "keys create",
    "sources add",
    "sources list",
    "orders show",
    "deliveries list",
    "deliveries show",
    "timeline",
    "tail",
    "contract",
    "events list",
    "events show",
    "endpoints add",
    "endpoints list",
    "endpoints show",
    "endpoints disable",
    "endpoints enable",
    "endpoints rotate-secret",
    "endpoints delete",
    "simulate",
    "demo",
    "bench",
)


async def test_every_command_is_listed():
    """The first help names every command, and where to begin."""
    done = await command.run_by_path(*command.OURS, "--help")

    assert done.code == 0
    assert {name.split()[0] for name in COMMANDS} <= set(done.out.split())
    assert "ipn-gateway demo" in done.out


@pytest.mark.parametrize("name", COMMANDS)
async def test_help_says_how_to_use_it(name: str):
    """Each command says what it does, and with what options."""
    done = await command.run(*name.split(), "--help")

    assert (done.code, done.err) == (0, "")
    assert f"Usage: ipn-gateway {name}" in done.out
    assert len(done.out.splitlines()[2].split()) > 3


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("disprove",), "No such command"),
        (("keys", "create"), "--tenant"),
        (("sources", "add", "shop", "--config", "{"), "--config"),
        (("sources", "add", "shop", "--config", "[]"), "object"),
        (("sources", "add", "shop", "--config", "@/does/not/exist"), "cannot be read"),
        (("serve", "--port", "70000"), "--port"),
        (("simulate", "--lose", "2"), "--lose"),
    ],
)
async def test_wrong_use_is_told_apart_from_failure(arguments: tuple[str, ...], hint: str):
    """Whoever types something wrong gets exit code 2 and is told what."""
    done = await command.run(*arguments)

    assert (done.code, done.out) == (2, "")
    assert hint in done.err
    assert "Traceback" not in done.err


async def test_the_version_is_shown():
    """`--version` prints the version and nothing else."""
    done = await command.run_by_path(*command.OURS, "--version")

    assert done.code == 0
    assert done.out.count(".") == 2
