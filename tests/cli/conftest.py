"""What every test of a command stands on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are() -> Iterator[None]:
    """A command configures the logs of its process, which here is the tests' own."""
    root, configured = logging.getLogger(), structlog.get_config()
    level, handlers = root.level, root.handlers[:]
    yield
    structlog.configure(**configured)
    root.setLevel(level)
    root.handlers[:] = handlers
