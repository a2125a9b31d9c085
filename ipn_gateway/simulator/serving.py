"""Runs an application on a socket inside a running loop: the demo's and the tests' way to have a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class _Server(uvicorn.Server):
    """Says when it is ready, and leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        except SystemExit:
            self.should_exit = True  # uvicorn would end the whole process
        finally:
            self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve while the block runs, on a free port unless one is given; gives the base URL, without a slash at the end.

    Raises RuntimeError if the application does not start. At the end open requests get two seconds.
    """
    listening = _listening(host, port)
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=2))
    with contextlib.closing(listening):
        served = asyncio.create_task(server.serve(sockets=[listening]))  # noqa: TID251 - one task, awaited at the end of the block
        try:
            await server.ready.wait()
            if not server.started:
                raise RuntimeError("the application did not start")
            yield f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await served


def _listening(host: str, port: int) -> socket.socket:
    """Bind and listen. With the protocol named, asyncio switches Nagle's delay off; else each answer takes 40 ms."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening
