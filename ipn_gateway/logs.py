"""Structured logging: one canonical line per unit of work, as JSON or for a terminal, on standard error.

Secrets never get here; as a second line `redact` removes what looks like a credential from every text that is logged.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from functools import cache
from json import dumps
from typing import TYPE_CHECKING, Any, Final

import structlog
from pydantic_core import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

_SECRETS = re.compile(r"(?i)(store_passwd|password|passwd|secret|authorization|api_key)(=|%3D|\"?: ?\"?)[^&\s\"',)]+")
_KEYS = re.compile(r"\b(?:wh(?:sec|sk)_[A-Za-z0-9+/=_-]+|ipn_[A-Za-z0-9_-]{40,})")

counters: Counter[str] = Counter()
"""Counts since the start of this process, by dotted name; read by tests and by the metrics page."""


def redact(text: str) -> str:
    """The text without values of credentials: `store_passwd=…` travels in provider URLs.

    The patterns are only tried on a text that has what each of their matches has: most have neither, and searching takes long.
    """
    if _may_hold_a_pair(text):
        text = _SECRETS.sub(r"\1\2[redacted]", text)
    if _may_hold_a_key(text):
        text = _KEYS.sub("[redacted]", text)
    return text


def _may_hold_a_pair(text: str) -> bool:
    return "=" in text or ":" in text or "%3" in text


def _may_hold_a_key(text: str) -> bool:
    return "whs" in text or "ipn_" in text


def _redact_event(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if _PLAIN.issuperset(map(type, event.values())):
        texts = "\n".join([value for value in event.values() if type(value) is str])  # one look at all of them is mostly enough
        if not _may_hold_a_pair(texts) and not _may_hold_a_key(texts):
            return event
    return {name: _redacted(value) for name, value in event.items()}


_PLAIN: Final = frozenset((str, int, float, bool, type(None)))


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, dict):
        return {name: _redacted(one) for name, one in value.items()}
    return [_redacted(one) for one in value] if isinstance(value, (list, tuple)) else redact(repr(value))


_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)


def _encode(event: MutableMapping[str, Any]) -> str:
    """Of what `_redact_event` leaves. The fast way, which takes a quarter of the other's time, refuses what is not Unicode."""
    try:
        return to_json(event).decode()
    except ValueError:
        return dumps(event, separators=(",", ":"))


def _json_line(_: Any, level: str, event: MutableMapping[str, Any]) -> str:
    """All that is done to an event that is logged as JSON. The order of its fields is that of the line."""
    event = structlog.processors.add_log_level(None, level, event)
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(None, level, event)
    return _encode(_stamp(None, level, _redact_event(None, level, event)))


class _Foreign(logging.Formatter):
    """Lines of other libraries: as JSON of the same form, their component is the name of the logger; redacted in any case."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__("%(levelname)s %(name)s %(message)s")
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        if not self._as_json:
            return redact(super().format(record))
        event = {"component": record.name, "event": record.getMessage()}
        return _json_line(None, record.levelname.lower(), event | ({"exc_info": record.exc_info} if record.exc_info else {}))


def configure(*, level: str = "INFO", json: bool | None = None) -> None:
    """Set up logging for this process; `json` defaults to whether standard error is no terminal."""
    as_json = not sys.stderr.isatty() if json is None else json
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Foreign(as_json=as_json))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "aiohttp.access", "uvicorn.access", "alembic", "psycopg.pool"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # a database that is away is told by what fails for it
    for_people: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        _redact_event,
        _stamp,
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
    ]
    structlog.configure(
        processors=[_json_line] if as_json else for_people,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    if as_json:
        _lines.configured(logging.getLevelNamesMapping()[level])


_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Lines:
    """Where lines go at once, past structlog's loggers, while nobody has configured structlog otherwise than `configure` did for JSON."""

    def __init__(self) -> None:
        self._config: dict[str, Any] = {}
        self._levels: frozenset[str] = frozenset()
        self._write: Callable[[str], None] = print

    def configured(self, level: int) -> None:
        """By `configure`, for lines of at least this level."""
        config = structlog.get_config()
        self._config = config | {"processors": list(config["processors"])}  # a copy: structlog's way to capture lines changes the list
        self._levels = frozenset(name for name, number in _LEVELS.items() if number >= level)
        self._write = structlog.WriteLogger(sys.stderr).msg

    def log(self, component: str, level: str, event: str, values: dict[str, Any]) -> None:
        """One line, or none below the level. One that cannot be written is counted: what it tells of goes on."""
        try:
            if structlog.get_config() != self._config:
                getattr(structlog.get_logger(component=component), level)(event, **values)
            elif level in self._levels:
                self._write(_json_line(None, level, {"component": component, **values, "event": event}))
        except Exception:  # noqa: BLE001 - a full disk, a pipe that nobody reads any more
            count("logs.lost")


_lines = _Lines()


class Logger:
    """Takes the name of an event and plain values: a line of its component."""

    __slots__ = ("_component",)

    def __init__(self, component: str) -> None:
        self._component = component

    def debug(self, event: str, **values: Any) -> None:
        """For who looks for a fault."""
        _lines.log(self._component, "debug", event, values)

    def info(self, event: str, **values: Any) -> None:
        """What was done."""
        _lines.log(self._component, "info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        """What somebody should know of."""
        _lines.log(self._component, "warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        """What should not have happened."""
        _lines.log(self._component, "error", event, values)

    def exception(self, event: str, **values: Any) -> None:
        """An error, with the exception that is being handled."""
        _lines.log(self._component, "error", event, {"exc_info": True, **values})


@cache
def get(name: str) -> Logger:
    """The logger of a module."""
    return Logger(name)


def count(name: str, by: int = 1) -> None:
    """Raise a counter."""
    counters[name] += by
