"""Tests are sentences with a promise, run always, and never wait for time to pass."""

from __future__ import annotations

import ast
import re

from tests.architecture.source import TESTS, calls, functions, modules, name_of, tree

FILES = [path for path in modules(TESTS) if path.name.startswith("test_") or path.name in {"contract.py", "conftest.py", "make.py"}]
PUTS_OFF = {"skip", "skipif", "xfail", "importorskip", "SkipTest", "skipTest"}
MOCKS = {"unittest.mock", "mock"}


def test_every_test_states_its_behaviour():
    """Each has a docstring: what holds, in the words of who relies on it."""
    silent = [
        f"{name_of(path)}:{node.name}" for path in FILES for node in functions(path) if _is_test(node) and not ast.get_docstring(node)
    ]

    assert silent == []


def test_no_test_is_put_off():
    """A test belongs to a tier in which it runs: none is skipped, and none is expected to fail."""
    put_off = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in PUTS_OFF
    ]

    assert put_off == []


def test_no_test_sleeps():
    """Events are awaited with a limit and the clock is moved. A bare `asyncio.sleep(0)` lets others run and waits for nothing."""
    sleeping = [
        f"{name_of(path)}:{call.lineno}"
        for path in FILES
        for name, call in calls(path)
        if name.rpartition(".")[2] == "sleep" and not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0)
    ]

    assert sleeping == []


def test_nothing_is_mocked():
    """Tests look at rows and requests, not at calls."""
    mocking = [
        name_of(path)
        for path in FILES
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.ImportFrom) and (node.module in MOCKS or "mock" in {alias.name for alias in node.names}))
        or (isinstance(node, ast.Import) and MOCKS & {alias.name for alias in node.names})
    ]

    assert mocking == []


def test_cases_are_named_as_they_are_listed():
    """`@pytest.mark.case` takes ids of statements, public cases and known bugs: S1 to S142, B01 and so on, K1 to K46."""
    wrong = [
        f"{name_of(path)}:{call.lineno}"
        for path in FILES
        for name, call in calls(path)
        if name.endswith("mark.case")
        and not all(
            isinstance(given, ast.Constant) and re.fullmatch(r"S\d{1,3}|B\d{2,3}|K\d{1,2}", str(given.value)) for given in call.args
        )
    ]

    assert wrong == []


def _is_test(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return node.name.startswith("test_")
