"""The project's own files, read once for the tests that look at them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ipn_gateway"
TESTS = ROOT / "tests"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(below: Path = PACKAGE) -> list[Path]:
    """Every Python file below a folder."""
    return sorted(below.rglob("*.py"))


def name_of(path: Path) -> str:
    """The path as it is written in this project, from its root."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(), str(path))


def functions(path: Path) -> Iterator[Function]:
    """Every function of a file, methods and inner ones too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            yield node


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a file with its dotted name as written there: `time.sleep`, `tx.execute`, `.commit` on anything longer."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield _dotted(node.func), node


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def lines(node: Function) -> int:
    """How long a function is, its docstring included, its decorators not."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def ours() -> Iterator[Path]:
    """Every file that belongs to the project, as a clean clone has it."""
    for entry in sorted(ROOT.iterdir()):
        if entry.name in {".ci", ".gitignore"} or not entry.name.startswith("."):
            yield from (path for path in ([entry] if entry.is_file() else sorted(entry.rglob("*"))) if _is_source(path))


def _is_source(path: Path) -> bool:
    made = {"__pycache__", "build", "dist", ".venv", "node_modules"}
    return path.is_file() and not made & set(path.parts) and not path.name.endswith((".pyc", ".egg-info"))
