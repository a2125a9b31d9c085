"""A shop that exists already, with the whole gateway mounted into it: `uvicorn --app-dir docs/examples/own_tables existing_app:app`.

The shop opens what the gateway works with, runs its workers while it lives, and closes everything in order. The gateway's addresses are
below the mount: the provider posts to `/payments/ipn/{source}`, and the API is `/payments/v1/…`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from ipn_gateway import logs, runtime, settings, workers
from ipn_gateway.web.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MOUNTED_AT = "/payments"
GRACE_SECONDS = 20


@asynccontextmanager
async def lifespan(shop: FastAPI) -> AsyncIterator[None]:
    """Open the gateway, mount it, and run its workers until the shop stops."""
    logs.configure()  # JSON lines with secrets taken out; a shop with logging of its own sets up structlog instead
    chosen = settings.load()
    async with (
        runtime.server_url(chosen) as url,
        runtime.opened(chosen, url, public_url=f"http://127.0.0.1:8000{MOUNTED_AT}", migrate=True) as gateway,
        workers.running(gateway, workers.ROLES),
    ):
        app = create_app(gateway)
        shop.mount(MOUNTED_AT, app)
        yield
        await app.state.slots.drained(seconds=GRACE_SECONDS)  # what was begun commits before the connections are closed


app = FastAPI(title="A shop", lifespan=lifespan)


@app.get("/")
async def front_page() -> dict[str, str]:
    """The shop's own page."""
    return {"shop": "open"}
