"""Lines of the log: what is in them, and what is taken out."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from ipn_gateway import logs

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZmdoaWprbG1u"


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are() -> Iterator[None]:
    root, configured = logging.getLogger(), structlog.get_config()
    level, handlers = root.level, root.handlers[:]
    levels = {name: logging.getLogger(name).level for name in root.manager.loggerDict}
    yield
    structlog.configure(**configured)
    root.setLevel(level)
    root.handlers[:] = handlers
    for name in root.manager.loggerDict:
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What was logged since the last time."""
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_has_its_fields_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    """The component, what was given, the event, the level and the time; what JSON does not know is shown as Python does."""
    logs.configure(json=True)
    logs.get("orders").info("order.paid", amount=Decimal("1.50"), id=UUID(int=1), none=None, at=1.5, items=["a", 2])

    text = capsys.readouterr().err
    assert text.startswith(
        '{"component":"orders","amount":"Decimal(\'1.50\')","id":"UUID(\'00000000-0000-0000-0000-000000000001\')","none":null,'
        '"at":1.5,"items":["a",2],"event":"order.paid","level":"info","timestamp":"2'
    )
    assert text.endswith('Z"}\n')


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"it is {SECRET}", "it is [redacted]"),
        ("GET /v?store_passwd=qwerty&v=1", "GET /v?store_passwd=[redacted]&v=1"),
        ("STORE_PASSWD%3Dqwerty", "STORE_PASSWD%3D[redacted]"),
        ('{"Password": "qwerty"}', '{"Password": "[redacted]"}'),
        ("pa\N{LATIN SMALL LETTER LONG S}sword=qwerty", "pa\N{LATIN SMALL LETTER LONG S}sword=[redacted]"),
        ("api_\N{KELVIN SIGN}ey=qwerty", "api_\N{KELVIN SIGN}ey=[redacted]"),
        ("ipn_" + "a" * 40, "[redacted]"),
        ("secretary, password", "secretary, password"),
    ],
)
def test_credentials_are_taken_out_of_a_line(capsys: pytest.CaptureFixture[str], text: str, shown: str) -> None:
    """From whatever text they are in, and from nothing else in the line."""
    logs.configure(json=True)
    logs.get("x").warning("thing.seen", about=text, order_id="ORD-1", url="https://example.com/?a=b")

    (line,) = lines(capsys)
    assert (line["about"], line["order_id"], line["url"]) == (shown, "ORD-1", "https://example.com/?a=b")
    assert (line["event"], line["level"]) == ("thing.seen", "warning")


def test_what_is_not_unicode_is_logged_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """In a line of the same form."""
    logs.configure(json=True)
    logs.get("x").warning("thing.seen", about="half of \ud83d", items=["a", 2])

    text = capsys.readouterr().err
    assert text.startswith('{"component":"x","about":"half of \\ud83d","items":["a",2],"event":"thing.seen"')


@dataclass
class _Sealed:
    """Something that keeps a value to itself."""

    name: str
    value: str = field(repr=False)


def test_what_an_object_keeps_to_itself_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown as Python shows it, wherever it stands, and not taken apart."""
    logs.configure(json=True)
    logs.get("x").warning("thing.seen", one=_Sealed("n", "plum"), many=[_Sealed("n", "plum")])

    text = capsys.readouterr().err
    assert text.count("_Sealed(name='n')") == 2
    assert "plum" not in text


@pytest.mark.parametrize("value", [[SECRET], {"a": {"b": SECRET}}, (SECRET, 1), ValueError(SECRET), SECRET.encode()])
def test_credentials_are_taken_out_of_whatever_is_logged(capsys: pytest.CaptureFixture[str], value: object) -> None:
    """Inside of lists and objects, and of what is shown as Python shows it."""
    logs.configure(json=True)
    logs.get("x").warning("thing.seen", value=value)

    (line,) = lines(capsys)
    assert "[redacted]" in str(line["value"])
    assert SECRET not in str(line)


def test_credentials_are_taken_out_of_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """An exception is a text of the line."""
    logs.configure(json=True)
    try:
        int(f"bad key {SECRET}")
    except ValueError:
        logs.get("x").exception("thing.failed")

    (line,) = lines(capsys)
    assert "bad key [redacted]" in line["exception"]
    assert (line["level"], SECRET in str(line)) == ("error", False)


PARTS = [
    "pass",
    "wd",
    "word",
    "store_",
    "secret",
    "=",
    "%3D",
    '": "',
    "whsec_",
    "ipn_",
    "\N{LATIN SMALL LETTER LONG S}",
    "a" * 40,
    " ",
    ":",
    "\n",
]


@given(st.lists(st.sampled_from(PARTS)))
def test_a_line_is_as_if_each_text_were_redacted(parts: list[str]) -> None:
    """Looking at a line as a whole first finds whatever looking at each of its texts finds."""
    text = "".join(parts)

    line = json.loads(logs._json_line(None, "info", {"about": text, "event": "x"}))

    assert (line["about"], line["event"]) == (logs.redact(text), "x")


def test_a_logger_follows_what_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is kept since before: by this module, or by somebody else for an application of his own."""
    kept = logs.get("x")
    logs.configure(json=True, level="INFO")
    kept.info("first")
    logs.configure(json=True, level="ERROR")
    kept.info("too little")
    kept.error("second")
    own: list[str] = []

    def render(_: Any, __: str, event: Any) -> str:
        own.append(event["event"])
        return "{}"

    structlog.configure(processors=[render], wrapper_class=structlog.make_filtering_bound_logger(0))
    kept.debug("third")

    assert [line.get("event") for line in lines(capsys)] == ["first", "second", None]
    assert own == ["third"]


def test_what_tests_capture_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The way of structlog to look at lines works, and ends with its block."""
    logs.configure(json=True)
    logs.get("x").info("first")
    with structlog.testing.capture_logs() as captured:
        logs.get("x").info("second", number=2)
    logs.get("x").info("third")

    assert captured == [{"component": "x", "number": 2, "event": "second", "log_level": "info"}]
    assert [line["event"] for line in lines(capsys)] == ["first", "third"]


def test_lines_of_other_libraries_have_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    """So that whoever reads the log line by line reads all of it; nothing secret is in them, nor in what they tell of a failure."""
    logs.configure(json=True)
    logging.getLogger("uvicorn.error").warning("bad %s", "password=qwerty")
    try:
        int(f"bad key {SECRET}")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("It failed.")

    text = capsys.readouterr().err
    warned, failed = [json.loads(line) for line in text.splitlines()]
    assert (warned["component"], warned["event"], warned["level"]) == ("uvicorn.error", "bad password=[redacted]", "warning")
    assert (failed["component"], failed["event"], failed["level"]) == ("uvicorn.error", "It failed.", "error")
    assert "bad key [redacted]" in failed["exception"]
    assert warned["timestamp"].endswith("Z")


def test_lines_of_other_libraries_are_redacted_for_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Also what they tell of a failure."""
    logs.configure(json=False)
    try:
        int(f"bad key {SECRET}")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("It failed: %s", "password=qwerty")

    text = capsys.readouterr().err
    assert "ERROR uvicorn.error It failed: password=[redacted]\n" in text
    assert "bad key [redacted]" in text
    assert SECRET not in text


class _Full(io.StringIO):
    """A file on a disk that is full."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_line_that_cannot_be_written_is_counted(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    """What it tells of goes on: a full disk must not end a worker, or keep back the answer to what is stored."""
    monkeypatch.setattr(sys, "stderr", _Full())
    logs.counters.clear()
    logs.configure(json=as_json)
    logs.get("x").error("thing.failed")
    logs.get("x").info("thing.seen", value={b"bytes": 1})

    assert logs.counters["logs.lost"] == 2
