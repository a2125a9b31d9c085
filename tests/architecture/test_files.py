"""Nothing in the project's files ties it to one machine or to one registry, and nothing is left for later in a comment."""

from __future__ import annotations

import re

import pytest

from tests.architecture.source import ROOT, name_of, ours

# Written in two parts, so that this file does not hold what it looks for.
LABELS = (
    *[
        ("pypi", "org"),
        ("python" + "hosted", "org"),
        ("npmjs", "org"),
        ("crates", "io"),
        ("golang", "org"),
        ("debian", "org"),
        ("maven", "org"),
    ],
    *[("docker", "io"), ("ghcr", "io"), ("quay", "io"), ("gcr", "io"), ("unpkg", "com"), ("jsdelivr", "net")],
)
REGISTRIES = [".".join(labels) for labels in LABELS]
MACHINES = [f"/{folder}/" for folder in ("work", "root", "home", "Users")]
LATER = ["TO" + "DO", "FIX" + "ME"]


def _found(pattern: str) -> list[str]:
    looked_for = re.compile(pattern.encode())
    return [f"{name_of(path)}: {match[0].decode()}" for path in ours() for match in looked_for.finditer(path.read_bytes())]


def test_files_are_found():
    """The tests below look at the files that matter."""
    names = {name_of(path) for path in ours()}

    assert names >= {"Makefile", "pyproject.toml", "requirements.lock", ".ci/run", "ipn_gateway/models.py", "alembic/env.py"}
    assert ROOT.joinpath("Makefile").is_file()


@pytest.mark.parametrize("host", REGISTRIES)
def test_no_file_names_a_registry(host):
    """Packages come from wherever the machine's own settings say."""
    assert _found(rf"(?<![\w-]){re.escape(host)}(?![\w-])") == []


@pytest.mark.parametrize("folder", MACHINES)
def test_no_file_holds_a_path_of_one_machine(folder):
    """A path that exists on one machine only is a fault on every other."""
    assert _found(rf"(?<![\w.:/}}-]){folder}\w") == []


@pytest.mark.parametrize("word", LATER)
def test_nothing_is_put_off_in_a_comment(word):
    """What is not done is not announced in the code."""
    assert _found(rf"\b{word}\b") == []


def test_the_lock_has_hashes_and_no_addresses():
    """Every release is pinned with its hashes, and no line says where it comes from."""
    text = (ROOT / "requirements.lock").read_text()
    releases = re.split(r"\n(?=\S)", text.strip())

    assert [
        release for release in releases if not re.match(r"[a-z0-9.-]+(\[[a-z,]+\])?==[\w.!+]+.*--hash=sha256:", release, re.DOTALL)
    ] == []
    assert "://" not in text


def test_the_lock_holds_what_the_project_asks_for():
    """A dependency that is added to pyproject.toml is in the lock too."""
    declared = re.findall(r'^    "([A-Za-z0-9-]+)(?:\[[a-z,]+\])?[=><]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    locked = set(re.findall(r"^([a-z0-9.-]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))

    assert {name.lower() for name in declared} - locked == set()


def test_the_migrations_are_no_package():
    """An `__init__.py` in the top-level `alembic/` would shadow the library for every command that runs from here."""
    assert list((ROOT / "alembic").rglob("__init__.py")) == []
