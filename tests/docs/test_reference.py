"""The generated pages are what the code says, and the diagrams have the arrows that the code has."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import typer

from docs import generate
from ipn_gateway import cli, decisions
from ipn_gateway.providers.base import Confirmed, Effect
from ipn_gateway.states import DeliveryOutcome, EventDeliveryStatus, OrderStatus
from tests.docs import pages

DOCS = Path(__file__).parents[2] / "docs"
STATES = (DOCS / "reference/states.md").read_text(encoding="utf-8")
ARROW = re.compile(r"^ +(\S+) --> (\S+): ([\w., ]+)$", re.MULTILINE)
EFFECTS = (Effect.PAID, Effect.FAILED, Effect.CANCELLED, Effect.EXPIRED)
AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("name", sorted(generate.pages()))
def test_the_reference_is_what_the_code_says(name: str):
    """A page that differs was edited by hand, or the code changed: `make docs` writes it again."""
    assert (DOCS / "reference" / name).read_text(encoding="utf-8") == generate.pages()[name]


def _diagrams() -> dict[str, list[tuple[str, str, str]]]:
    sections = re.findall(r"^## (.*?)\n.*?```mermaid\n(.*?)```", STATES, re.MULTILINE | re.DOTALL)
    return {
        title: [(before, after, label) for before, after, labels in ARROW.findall(diagram) for label in labels.split(", ")]
        for title, diagram in sections
    }


@pytest.mark.parametrize(
    ("title", "words"),
    [("Orders", OrderStatus), ("Notification deliveries", DeliveryOutcome), ("Event deliveries", EventDeliveryStatus)],
)
def test_every_state_is_drawn_and_told(title: str, words: type[OrderStatus | DeliveryOutcome | EventDeliveryStatus]):
    """Each state that a row can be in has an arrow to it and a line that says what it means, and no other state is drawn."""
    drawn = {state for arrow in _diagrams()[title] for state in arrow[:2]} - {"[*]"}
    every = {word.value for word in words}

    assert drawn == every
    assert every <= set(re.findall(r"^\| `(\w+)` \|", STATES, re.MULTILINE))


def test_every_arrow_is_labelled_with_a_function_that_exists():
    """`module.function`, importable."""
    named = {label for arrows in _diagrams().values() for *_, label in arrows}
    missing = [name for name in named if not callable(_found(name))]

    assert len(named) >= 8
    assert missing == []


def _found(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"ipn_gateway.{module}"), function, None)


@pytest.mark.parametrize(("label", "decide"), [("effects.apply", decisions.decide), ("resolutions.resolve", decisions.resolve)])
def test_the_arrows_of_an_order_are_those_that_the_decision_makes(label: str, decide: Any):
    """For every status and every effect, risky and late money too: what the pure decision changes is drawn, and nothing else."""
    made = set()
    for status, effect, reason, risk in itertools.product(OrderStatus, EFFECTS, ("provider", "merchant"), (False, True)):
        source = ("shop",) if decide is decisions.decide else ()
        decision = decide(_order(status, reason), _verdict(effect, risk=risk), *source, None)
        if isinstance(decision, decisions.Change):
            made.add((status.value, decision.status.value))

    assert {(before, after) for before, after, by in _diagrams()["Orders"] if by == label} == made


def _order(status: str, reason: str) -> decisions.LockedOrder:
    due = Decimal(100)
    return decisions.LockedOrder("acme", "INV-1", "shop", status, reason, due, "BDT", Decimal(), Decimal(), None, {}, 0, AT)


def _verdict(effect: Effect, *, risk: bool) -> Confirmed:
    return Confirmed("INV-1", "v1", effect, "a word", "demo01", Decimal(100), "BDT", risk=risk)


def _shown() -> list[str]:
    """Every command line of ours in the docs, from its name on, without what the shell does with it."""
    texts = [page.read_text(encoding="utf-8") for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))]
    blocks = [block for text in texts for block in pages.blocks(text, r"sh[^\n]*")]
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    return [re.split(r" [|<] ?|\)$|  # ", found[1])[0] for line in lines if (found := re.search(r"(?:^|\()(ipn-gateway .*)", line))]


def test_every_command_shown_is_one_that_exists():
    """Each `ipn-gateway …` in the docs has a command, options and arguments that the command line takes."""
    shown = _shown()

    assert len(shown) > 40
    for line in shown:
        command, given = typer.main.get_command(cli.app), shlex.split(line)[1:]
        while hasattr(command, "commands") and given:
            command, given = command.commands[given[0]], given[1:]
        command.make_context(line, given)


def test_pages_are_linked():
    """Every page is reached from the index or from one that is, and every link leads somewhere."""
    reached, waiting = set(), [DOCS / "README.md"]
    broken = []
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))]
        broken += [f"{page.name}: {target}" for target in targets if not target.exists()]
        waiting += [target for target in targets if target.is_file()]

    assert broken == []
    assert {path.resolve() for path in DOCS.rglob("*.md")} - reached == set()
