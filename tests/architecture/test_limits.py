"""Small and flat: how long functions and modules are, and what they are called. What ruff cannot know."""

from __future__ import annotations

import re
from statistics import median

from tests.architecture.source import PACKAGE, functions, lines, modules, name_of

FUNCTION_LINES_MAX = 80
FUNCTION_LINES_UNEXPLAINED = 50
FUNCTION_LINES_MEDIAN = 10
MODULE_LINES_MAX = 400
MODULE_LINES_MEDIAN = 200

LONGER_MODULES = {
    "ipn_gateway/models.py": "every table in one file is the point of it",
}

SAYS_NOTHING = {"base", "common", "const", "constants", "core", "helper", "helpers", "lib", "manager", "managers", "misc"} | {
    "service", "services", "shared", "stuff", "tools", "util", "utilities", "utils",
}  # fmt: skip
NAMED_ALL_THE_SAME = {
    "ipn_gateway/providers/base.py": "what every provider implements",
}


def test_functions_are_short():
    """No function is longer than 80 lines, and the median is at most 10."""
    lengths = {f"{name_of(path)}:{node.name}": lines(node) for path in modules() for node in functions(path)}

    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES_MAX} == {}
    assert median(lengths.values()) <= FUNCTION_LINES_MEDIAN


def test_long_functions_say_why():
    """A function of more than 50 lines has a comment of its own, `# Long: …`, with the reason."""
    unexplained = [
        f"{name_of(path)}:{node.name}"
        for path in modules()
        for node in functions(path)
        if lines(node) > FUNCTION_LINES_UNEXPLAINED
        and not re.search(r"^\s*# Long: \w", "\n".join(path.read_text().splitlines()[node.lineno - 1 : node.end_lineno]), re.MULTILINE)
    ]

    assert unexplained == []


def test_modules_are_short():
    """No module is longer than 400 lines but those that say why; the median is at most 200."""
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in modules()}

    assert {name for name, length in lengths.items() if length > MODULE_LINES_MAX} == set(LONGER_MODULES)
    assert median(lengths.values()) <= MODULE_LINES_MEDIAN


def test_modules_are_named_after_what_is_in_them():
    """Files are named by nouns of the glossary; names that say nothing are refused."""
    parts = {name_of(path): {path.stem, *path.relative_to(PACKAGE).parts[:-1]} for path in modules()}

    assert {name for name, words in parts.items() if words & SAYS_NOTHING} == set(NAMED_ALL_THE_SAME)


def test_packages_are_few():
    """Providers, the web application, the simulator, the benchmark and the proof are the only packages."""
    packages = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}

    assert packages <= {"bench", "proof", "providers", "simulator", "web"}
