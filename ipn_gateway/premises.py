"""What demo and proof stand on: a directory of their own, the settings of a day in seconds, and nothing of the machine's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from httpx_aiohttp import HttpxAiohttpClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from httpx import AsyncClient  # noqa: TID251 - the shop's and the customer's, not the gateway's

SETTINGS: Final = {
    "IPN_PROVIDER_TIMEOUT_SECONDS": "1",
    "IPN_INBOX_LEASE_SECONDS": "2",
    "IPN_PROVIDER_MONEY_TIMEOUT_SECONDS": "1",
    "IPN_DELIVERY_TIMEOUT_SECONDS": "1",
    "IPN_DISPATCH_LEASE_SECONDS": "2",
    "IPN_IDEMPOTENCY_LEASE_SECONDS": "2",
    "IPN_RETRY_SCHEDULE": "0,0.5,1,2,4,8,16,32",
    "IPN_VALIDATION_SCHEDULE": "0,0.5,1,2,4*30",
    "IPN_SWEEP_SCHEDULE": "4,8,12,16,24,32,60*10",
    "IPN_REFUTED_SCHEDULE": "0.5,0.5,0.5",
    "IPN_ALLOW_LOOPBACK_ENDPOINTS": "1",
    "IPN_RATE_LIMIT_PER_TENANT": "100000/second",
}
"""A day in seconds: timeouts of 1 s, leases of 2 s, and schedules that end while one watches."""

CALL_SECONDS_MAX: Final = 30.0


def client(base_url: str, headers: Mapping[str, str] | None = None) -> AsyncClient:
    """A client of what listens here."""
    # No proxy stands before loopback. Over aiohttp: httpx's own way out fails oddly when its peer is killed while it connects.
    return HttpxAiohttpClient(base_url=base_url, headers=headers, timeout=CALL_SECONDS_MAX, trust_env=False)


@contextlib.contextmanager
def directory(purpose: str, *, keep: bool = False) -> Iterator[Path]:
    """A directory that is removed afterwards, unless it is kept."""
    made = Path(tempfile.mkdtemp(prefix=f"ipn-{purpose}-"))
    try:
        yield made
    finally:
        if not keep:
            shutil.rmtree(made, ignore_errors=True)


def environment(data_dir: Path, **settings: str) -> dict[str, str]:
    """Ours without its IPN_… settings: what they lead to is never touched."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("IPN_")}
    return inherited | SETTINGS | settings | {"IPN_DATA_DIR": str(data_dir)}


@contextlib.contextmanager
def signals_cancel() -> Iterator[None]:
    """The first SIGINT or SIGTERM cancels the task that runs the block; later ones do not disturb what it ends."""
    loop, work, caught = asyncio.get_running_loop(), asyncio.current_task(), False

    def take() -> None:
        nonlocal caught
        if work is not None and not caught:
            caught = True
            work.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, take)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
