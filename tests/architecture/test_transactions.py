"""Where transactions begin and end can be read off a signature: `db` owns them, `tx` is inside one."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from tests.architecture.source import calls, functions, modules, name_of

if TYPE_CHECKING:
    from tests.architecture.source import Function

COMMITS = {
    "ipn_gateway/db.py": "the one home of transactions",
    "ipn_gateway/migrations.py": "Alembic's connection, beside every transaction of ours",
}
PHASE = "phase.commit"
"""What a keyed operation writes in a transaction that the layer begins and ends."""

BEGINS = {"transaction", "autocommit", "rerun"}


def test_only_the_database_module_commits():
    """No other module commits or rolls back, so that small functions can be combined."""
    committing = {
        name_of(path)
        for path in modules()
        for name, _ in calls(path)
        if name.rpartition(".")[2] in {"commit", "rollback"} and name != PHASE
    }

    assert committing <= set(COMMITS)


def test_a_function_takes_db_or_tx():
    """Never both: it owns its transactions or it is part of its caller's."""
    both = [f"{name_of(path)}:{node.name}" for path in modules() for node in functions(path) if {"Database", "Transaction"} <= _takes(node)]

    assert both == []


def test_they_are_called_db_and_tx():
    """A parameter of type `Transaction` is `tx`, and one of type `Database` is `db` or ends in `_db`."""
    misnamed = [
        f"{name_of(path)}:{node.name}({argument.arg})"
        for path in modules()
        for node in functions(path)
        for argument in _arguments(node)
        if (_type_of(argument) == "Transaction" and argument.arg != "tx")
        or (_type_of(argument) == "Database" and not f"_{argument.arg}".endswith("_db"))
    ]

    assert misnamed == []


def test_a_function_inside_a_transaction_begins_none():
    """What takes `tx` begins no transaction of its own and runs nothing again."""
    beginning = [
        f"{name_of(path)}:{node.name}"
        for path in modules()
        for node in functions(path)
        if "Transaction" in _takes(node) and any(isinstance(inner, ast.Attribute) and inner.attr in BEGINS for inner in ast.walk(node))
    ]

    assert beginning == []


def test_no_transaction_begins_inside_another():
    """Inside `async with db.transaction(…)` no other one is written."""
    nested = [
        f"{name_of(path)}:{inner.lineno}"
        for path in modules()
        for outer in ast.walk(ast.parse(path.read_text()))
        if isinstance(outer, ast.AsyncWith) and _begins(outer)
        for statement in outer.body
        for inner in ast.walk(statement)
        if isinstance(inner, ast.AsyncWith) and _begins(inner)
    ]

    assert nested == []


def test_transactions_are_named_noun_verb():
    """A name is `noun.verb` in lower case, as its log line, its metric and its crash points are."""
    names = {
        f"{name_of(path)}:{call.lineno}": ast.unparse(call.args[0]) if call.args else ""
        for path in modules()
        for name, call in calls(path)
        if (name.endswith((".transaction", ".autocommit", "call.once", "call.around")) or name == "Phase")
        and name_of(path) != "ipn_gateway/db.py"
    }

    passed_on = r"[a-z_]+|phase\.transaction"
    assert {place: name for place, name in names.items() if not re.fullmatch(rf"'[a-z_]+\.[a-z_]+'|{passed_on}", name)} == {}


def _begins(node: ast.AsyncWith) -> bool:
    contexts = [item.context_expr for item in node.items]
    return any(isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "transaction" for call in contexts)


def _arguments(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _type_of(argument: ast.arg) -> str:
    written = ast.unparse(argument.annotation).strip("'\"") if argument.annotation else ""
    return written.removesuffix(" | None").rpartition(".")[2]


def _takes(node: Function) -> set[str]:
    return {_type_of(argument) for argument in _arguments(node)}
