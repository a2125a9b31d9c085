"""Structured logging: one canonical line per unit of work, as JSON or for a terminal, on standard error.

Secrets never get here; as a second line `redact` removes what looks like a credential from every text that is logged.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_SECRETS = re.compile(r"(?i)(store_passwd|password|passwd|secret|authorization|api_key)(=|%3D|\"?: ?\"?)[^&\s\"',)]+")
_KEYS = re.compile(r"\b(?:wh(?:sec|sk)_[A-Za-z0-9+/=_-]+|ipn_[A-Za-z0-9_-]{40,})")

counters: Counter[str] = Counter()
"""Counts since the start of this process, by dotted name; read by tests and by the metrics page."""


def redact(text: str) -> str:
    """The text without values of credentials: `store_passwd=…` travels in provider URLs.

    The patterns are only tried on a text that has what each of their matches has: most have neither, and searching takes long.
    """
    if "=" in text or ":" in text or "%3" in text:
        text = _SECRETS.sub(r"\1\2[redacted]", text)
    if "whs" in text or "ipn_" in text:
        text = _KEYS.sub("[redacted]", text)
    return text


def _redact_event(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = redact(value)
    return event


class _RedactFilter(logging.Filter):
    """For lines of other libraries: the message is built, redacted and passed on."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


def configure(*, level: str = "INFO", json: bool | None = None) -> None:
    """Set up logging for this process; `json` defaults to whether standard error is no terminal."""
    as_json = not sys.stderr.isatty() if json is None else json
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RedactFilter())
    logging.basicConfig(level=level, handlers=[handler], format="%(levelname)s %(name)s %(message)s", force=True)
    for noisy in ("httpx", "aiohttp.access", "uvicorn.access", "alembic", "psycopg.pool"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # a database that is away is told by what fails for it
    render: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _redact_event,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


def get(name: str) -> Any:
    """The logger of a module; takes an event name and plain values."""
    return structlog.get_logger(component=name)


def count(name: str, by: int = 1) -> None:
    """Raise a counter."""
    counters[name] += by
