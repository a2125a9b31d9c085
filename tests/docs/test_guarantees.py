"""What the page of guarantees names is there: each promise has something it rests on, and a test that tries to refute it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from sqlmodel import SQLModel

from ipn_gateway.settings import Settings
from tests.architecture.source import PACKAGE, modules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/guarantees.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
PROMISES = {
    title: re.findall(r"^\| (?!---|it is promised)(.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE) for title, text in SECTIONS.items()
}
TOPICS = {
    "Intake",
    "The ledger",
    "Money",
    "Events",
    "Idempotency keys",
    "Refunds",
    "Retention",
    "A process that dies",
    "Failover",
    "Restore",
    "Clocks",
}
TEST = re.compile(r"`(tests/[\w/]+\.py)` (test_\w+)")
NAMED = re.compile(r"`([^`]+)`")


@cache
def _tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_topic_has_promises_and_says_what_is_not_promised() -> None:
    """A page that promises only is not to be believed."""
    assert {title for title, promises in PROMISES.items() if promises} == TOPICS
    assert [title for title in TOPICS if "**Not promised" not in SECTIONS[title]] == []


@pytest.mark.parametrize("title", sorted(TOPICS))
def test_every_promise_has_a_test_that_exists(title: str) -> None:
    """Found by path and name, and run by `make test`."""
    for promise, _, tried in PROMISES[title]:
        named = TEST.findall(tried)

        assert named, promise
        assert TEST.sub("", tried).replace("<br>", "").strip() == "", promise
        assert [f"{path} {name}" for path, name in named if not (ROOT / path).is_file() or name not in _tests(path)] == []
        assert [path for path, _ in named if path.startswith(("tests/outside", "tests/cluster"))] == []


@pytest.mark.parametrize("title", sorted(TOPICS))
def test_what_a_promise_rests_on_exists(title: str) -> None:
    """Constraints are in the schema, transactions in the code, settings are settings, and each promise rests on something."""
    for promise, rests_on, _ in PROMISES[title]:
        assert rests_on.strip(), promise
        assert [name for name in NAMED.findall(rests_on) if not _exists(name)] == [], promise


def _exists(name: str) -> bool:
    if name.startswith("IPN_"):
        return name.removeprefix("IPN_").lower() in Settings.model_fields
    if name.endswith(("_key", "_check", "_pkey")):
        return name in _constraints()
    if "." in name:
        return f'"{name}"' in _code()
    return name in {*_words(), *SQLModel.metadata.tables}


@cache
def _constraints() -> set[str]:
    tables = SQLModel.metadata.tables
    return {str(constraint.name) for table in tables.values() for constraint in table.constraints} | {f"{name}_pkey" for name in tables}


@cache
def _code() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in modules(PACKAGE))


@cache
def _words() -> set[str]:
    """States and columns, settings of the server that the start looks at, and SQL functions of ours."""
    words = set(re.findall(r"[a-z_]+", _code()))
    return words | {"ipn_now()"}
