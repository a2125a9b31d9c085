"""Every statement of the acceptance list has a test that carries its number, or a reason why not; every case has one."""

from __future__ import annotations

import ast
import re
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from docs import acceptance
from tests.architecture.source import TESTS, modules

if TYPE_CHECKING:
    from pathlib import Path

LATER = {"S137", "S138"}
"""Of the list, but of no part that is built yet."""

NUMBERS = [f"S{number}" for number in range(1, 143)]


def test_the_list_is_whole() -> None:
    """Every number has its statement, a sentence, in order."""
    assert list(acceptance.STATEMENTS) == NUMBERS
    assert [text for text in acceptance.STATEMENTS.values() if not text.endswith(".")] == []


def test_every_statement_has_a_test_or_a_reason() -> None:
    """What has neither is not known to hold."""
    without = set(NUMBERS) - set(acceptance.by_statement()) - set(acceptance.excused()) - LATER

    assert sorted(without, key=NUMBERS.index) == []


def test_no_reason_is_left_of_a_statement_that_has_a_test() -> None:
    """The decision lists what is untested now, with a sentence each."""
    excused = acceptance.excused()

    assert set(excused) & set(acceptance.by_statement()) == set()
    assert set(excused) <= set(NUMBERS)
    assert all(len(reason.split()) >= 5 for reason in excused.values())


def test_every_mark_is_of_a_statement_that_exists() -> None:
    """A number that was mistyped would prove nothing."""
    assert set(acceptance.by_statement()) - set(NUMBERS) == set()


def test_every_mark_is_found() -> None:
    """Reading the files finds each number that is written in one."""
    written = {number for path in modules(TESTS) for call in _marks(path) for number in re.findall(r"'(S\d+)'", call)}

    assert written - set(acceptance.by_statement()) == set()


def _marks(path: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if ast.unparse(call.func).endswith("mark.case")]


# The cases

CASES = re.findall(
    r"B\d+",
    """
    B01 B03 B05 B08 B09 B11 B14 B16 B17 B19 B21 B23 B25 B27 B29 B31 B33 B35 B37 B39 B41 B43 B46 B47 B49 B52 B53 B55 B57 B59 B61 B63
    B65 B67 B69 B71 B73 B75 B77 B79 B81 B83 B85 B87 B89 B91 B93 B95 B98 B99 B101 B103 B105 B107 B109 B111 B113 B115 B117 B119 B121
    B123 B125 B127 B129 B131 B133 B135 B137 B139 B141
    """,
)
SOURCE = re.compile(r"[\w.-]+/[\w.-]+(#\d+| PR #\d+)|[a-z.-]+\.[a-z]+/\S+")


def test_the_cases_are_whole() -> None:
    """Every one has its public source and a sentence of ours, in order."""
    assert list(acceptance.CASES) == CASES
    assert [source for source, _ in acceptance.CASES.values() if not SOURCE.fullmatch(source)] == []
    assert [text for _, text in acceptance.CASES.values() if not text.endswith(".")] == []


def test_every_case_has_a_test() -> None:
    """Without an exception, and no mark is of a case that does not exist."""
    assert sorted(acceptance.by_case(), key=CASES.index) == CASES


def test_every_mark_of_a_case_is_found() -> None:
    """Reading the files finds each one that is written in one."""
    written = {case for path in modules(TESTS) for call in _marks(path) for case in re.findall(r"'(B\d+)'", call)}

    assert written == set(acceptance.by_case())


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ('@pytest.mark.case("S1", "B2")\ndef test_a(): ...', ["`tests/test_x.py` test_a"]),
        (
            '@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.case("S1"))])\ndef test_a(n): ...',
            ["`tests/test_x.py` test_a"],
        ),
        ('pytestmark = [pytest.mark.timeout(1), pytest.mark.case("S1")]', ["`tests/test_x.py`"]),
        ('CASES = [pytest.param(1, marks=pytest.mark.case("S1"))]', ["`tests/test_x.py`"]),
        ('@pytest.mark.case("S1")\nclass TestA:\n    def test_a(self): ...', ["`tests/test_x.py` TestA"]),
        ('class TestA:\n    @pytest.mark.case("S1")\n    def test_a(self): ...', ["`tests/test_x.py` test_a"]),
        ("async def test_s1_holds(): ...", ["`tests/test_x.py` test_s1_holds"]),
        ('def test_a():\n    """S1"""', []),
    ],
)
def test_marks_are_found_wherever_they_stand(tmp_path: Path, source: str, tests: list[str]) -> None:
    """On a test, one of its parameters, a class, a whole file, or in the name."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text(dedent(source))

    assert acceptance.by_statement(folder).get("S1", []) == tests
    assert set(acceptance.by_statement(folder)) <= {"S1"}
    assert acceptance.by_case(folder) == ({"B2": tests} if "B2" in source else {})
