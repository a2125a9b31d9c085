"""Every named transaction and every foreign call has its kill -9: what is added to the code without one fails here."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from ipn_gateway.proof import fleet
from tests.architecture.source import ROOT, calls, functions, modules, name_of, tree
from tests.faults import test_acts_killed, test_kill, test_refund_killed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = r"[a-z_]+\.[a-z_]+"
BEGINS = ("db.transaction", "call.once", "call.around")

ELSEWHERE = {
    "checkouts.start": "tests/concurrency/test_checkouts.py",
    "checkouts.settle": "tests/concurrency/test_checkouts.py",
}
"""Killed in the tests of their own concept, which name both points."""

STANDS_FOR: dict[str, tuple[str, str]] = {
    "refunds.resend": ("refunds.reserve", "the same phase, begun from a recovery point"),
    "idempotency.give_back": ("idempotency.refuse", "the end of a keyed call that was refused; the lease ends it otherwise"),
    "idempotency.lapse": ("idempotency.doubt", "the same timer, of calls that were never made"),
    "event_log.continue": ("key_store.install", "at the first start in a restored database: one statement under a lock"),
    "idempotency_keys.resolve": ("orders.release", "a keyed call of one transaction"),
    "sweeps.ask_soon": ("inbox.end", "one UPDATE that makes a sweep due; its hint is worth a question, never an effect"),
    "endpoints.release": ("endpoints.patch", "puts forward what was held back, which otherwise waits for its own time"),
    "event_deliveries.let_go": ("event_deliveries.record", "the same, for an endpoint that became ordered during an attempt"),
    "event_deliveries.give_back": ("event_deliveries.claim", "a lease that is ended early; the lease ends it otherwise"),
}
"""One statement or one phase of a kind that is killed under another name: which, and why that will do."""


def transactions() -> set[str]:
    """The names that the code gives its transactions, those that are handed to a function that begins one too."""
    return {name for path in modules() if name_of(path) != "ipn_gateway/db.py" for name in _named(path)}


def _named(path: Path) -> Iterator[str]:
    takers = {}
    for function in functions(path):
        parameters = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and _begins(node) and isinstance(node.args[0], ast.Name) and node.args[0].id in parameters:
                takers[function.name] = node.args[0].id, parameters.index(node.args[0].id)
    for name, call in calls(path):
        if _begins(call):
            yield from _constant(call.args[0])
        if name in takers:
            keyword, place = takers[name]
            yield from (found for given in call.keywords if given.arg == keyword for found in _constant(given.value))
            yield from _constant(call.args[place]) if len(call.args) > place else ()


def _begins(call: ast.Call) -> bool:
    written = ast.unparse(call.func)
    return bool(call.args) and (written.endswith(BEGINS) or written == "Phase")


def _constant(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and re.fullmatch(NAME, str(node.value)):
        yield str(node.value)


def foreign_calls() -> set[str]:
    """The points around what leaves this process, as `transport` names them."""
    transport = next(path for path in modules() if path.name == "transport.py")
    return {
        str(call.args[0].value) for name, call in calls(transport) if name.endswith("faults.at") and isinstance(call.args[0], ast.Constant)
    }


def killed() -> set[str]:
    """The points at which some test kills a process."""
    of_the_way = {point for points in test_kill.POINTS.values() for point in points}
    of_refunds = {point for point, *_ in test_refund_killed.PHASES} | set(test_refund_killed.POLLS)
    by_name = {*test_acts_killed.CALLS, *test_acts_killed.TIMERS, *test_acts_killed.COMMANDS, *ELSEWHERE, *STANDS_FOR}
    return of_the_way | of_refunds | {f"{name}:{side}_commit" for name in by_name for side in ("before", "after")}


@pytest.mark.case("S107")
def test_every_transaction_and_every_foreign_call_is_killed() -> None:
    """At both sides of each commit, and before and behind each call; the list is the code's own."""
    wanted = {f"{name}:{side}_commit" for name in transactions() for side in ("before", "after")} | foreign_calls()

    assert len(wanted) > 100
    assert sorted(wanted - killed()) == []


def test_nothing_is_killed_that_is_not_there() -> None:
    """A name that the code has given up is given up here too, and what stands for another is killed itself."""
    names = transactions()

    assert sorted({*test_acts_killed.CALLS, *test_acts_killed.TIMERS, *test_acts_killed.COMMANDS, *ELSEWHERE, *STANDS_FOR} - names) == []
    assert sorted(set(fleet.TRANSACTIONS) - names) == []
    assert {name for name, _ in STANDS_FOR.values()} <= names - set(STANDS_FOR)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_killed_elsewhere_is(name: str) -> None:
    """The other file names both of its points."""
    texts = {str(node.value) for node in ast.walk(tree(ROOT / ELSEWHERE[name])) if isinstance(node, ast.Constant)}

    assert {f"{name}:before_commit", f"{name}:after_commit"} <= texts
