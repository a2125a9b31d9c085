"""The process behind `serve`: a socket, the workers of its roles, and an orderly end. Also the one behind `simulate`.

first SIGTERM or SIGINT    nothing new is taken in, what is being worked on ends within its limits
second                     the rest is cancelled; leases give the work to others
third                      the process ends where it stands
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import uvicorn
import uvloop

from ipn_gateway import logs, runtime, workers
from ipn_gateway.errors import ConfigurationError, GatewayError
from ipn_gateway.heads import BoundedHeads
from ipn_gateway.simulator.app import create_app as simulator
from ipn_gateway.simulator.serving import serving
from ipn_gateway.web.app import create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator

    from fastapi import FastAPI

    from ipn_gateway.faults import Faults
    from ipn_gateway.settings import Settings
    from ipn_gateway.simulator.app import SimulatorConfig

GRACE_SECONDS: Final = 20
KEEP_ALIVE_SECONDS: Final = 75  # longer than a proxy in front keeps what it does not use, so that the proxy is who ends a connection
"""How long open requests may go on after the first signal: longer than any statement may take."""

BACKLOG: Final = 2048
COLLECT_EVERY: Final = (50_000, 20, 20)
"""How often the garbage collector looks for cycles: requests leave few, and each look at all of memory stops every request."""

ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where it listens is the operator's to say


class PortTaken(GatewayError):
    """Something else listens on this port; choose another with --port, or --port 0 for any free one."""


class Stopped(GatewayError):
    """Stopped at once, as asked twice: what was open is taken up again after its lease."""


@dataclass(slots=True)
class Signals:
    """What the process was asked by signals. `asked` is set by the first one."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT while the block runs; the second one cancels the task that runs the block."""
        loop, work = asyncio.get_running_loop(), asyncio.current_task()

        def take() -> None:
            if self.asked.is_set():
                release()
                if work is not None:
                    work.cancel()
            self.asked.set()

        def release() -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, take)
        try:
            yield
        finally:
            release()


class _Server(uvicorn.Server):
    """Says when it listens, stops when asked, and leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config, asked: asyncio.Event, listens: Callable[[], None]) -> None:
        super().__init__(config)
        self._asked = asked
        self._listens = listens

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        except OSError:  # bound beside us a moment ago, and the other one listened first
            raise PortTaken from None
        self._listens()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._asked.is_set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    settings: Settings,
    *,
    host: str,
    port: int,
    roles: Collection[str],
    migrate: bool,
    say: Callable[[str], None],
    faults: Faults | None = None,
) -> None:
    """Serve until a signal; `say` gets one line when the roles are at work. `faults` are a test's.

    Raises `PortTaken`, `Stopped` after a second signal, and `ConfigurationError` for what cannot be used.
    """
    _run(serve(settings, host=host, port=port, roles=roles, migrate=migrate, say=say, faults=faults))


def simulate(config: SimulatorConfig, *, host: str, port: int, say: Callable[[str], None]) -> None:
    """Run a simulated provider until a signal. Raises as `run`."""
    _run(_simulate(config, host, port, say))


def _run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(work)
        except asyncio.CancelledError:
            raise Stopped from None


async def serve(
    settings: Settings,
    *,
    host: str,
    port: int,
    roles: Collection[str],
    migrate: bool,
    say: Callable[[str], None],
    faults: Faults | None = None,
) -> None:
    """As `run`, inside a loop. A port that is taken is found out before the database is opened."""
    signals = Signals()
    with signals.handled(), contextlib.ExitStack() as stack:
        bound = stack.enter_context(contextlib.closing(bind(host, port))) if "web" in roles else None
        address = url_of(host, bound.getsockname()[1] if bound else port)
        async with (
            runtime.server_url(settings) as url,
            runtime.opened(settings, url, public_url=address, migrate=migrate, faults=faults) as rt,
            workers.running(rt, roles),
        ):
            log = logs.get("serving")
            _keep_what_stays()
            if bound:
                runtime.remember_url(settings, rt.public_url)
            log.info(
                "gateway.started", address=address if bound else None, public_url=rt.public_url, roles=sorted(roles), process=os.getpid()
            )
            if bound is None:
                say(f"ipn-gateway runs {', '.join(roles)}; it does not listen.")
                await signals.asked.wait()
            else:
                await _listen(create_app(rt), bound, signals.asked, lambda: say(f"ipn-gateway listens on {address}"))
            log.info("gateway.stopping", process=os.getpid())


def _keep_what_stays() -> None:
    """What was made up to now stays until the end, so the garbage collector need not go through it time and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)


async def _listen(app: FastAPI, bound: socket.socket, asked: asyncio.Event, listens: Callable[[], None]) -> None:
    """Take requests until asked to stop; then let what was begun commit, whether or not its client still waits."""
    await _Server(_config(app), asked, listens).serve(sockets=[bound])
    await app.state.slots.drained(seconds=GRACE_SECONDS)


async def _simulate(config: SimulatorConfig, host: str, port: int, say: Callable[[str], None]) -> None:
    signals = Signals()
    with signals.handled():
        try:
            async with serving(simulator(config), host=host, port=port) as address:
                say(f"The simulated SSLCOMMERZ listens on {address} (store {config.store_id}, password {config.store_passwd})")
                await signals.asked.wait()
        except OSError as error:
            raise refusal(host, port, error) from None


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHeads,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,  # one canonical line per unit of work instead
        server_header=False,
        proxy_headers=False,  # the client's address is worked out in web/deps, from trusted proxies only
        backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address, which does not listen yet. Raises `PortTaken`, or `ConfigurationError` for an address that is not ours."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError:
        raise ConfigurationError(f"{host} is no address of this machine; give --host one, or 0.0.0.0 for all of them.") from None
    bound = socket.socket(family, kind, socket.IPPROTO_TCP)  # with the protocol named, asyncio switches Nagle's delay off
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise refusal(host, port, error) from None
    return bound


def refusal(host: str, port: int, error: OSError) -> GatewayError:
    """What to tell about an address that cannot be listened on."""
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"Port {port} on {host} is taken; choose another with --port, or --port 0 for any free one.")
    if error.errno == errno.EACCES:
        return ConfigurationError(f"Port {port} needs rights that this user lacks; choose one from 1024 on with --port.")
    return ConfigurationError(f"{host} is no address of this machine; give --host one, or 0.0.0.0 for all of them.")


def url_of(host: str, port: int) -> str:
    """The URL under which this machine reaches what listens there."""
    reached = ANY_ADDRESS.get(host, host)
    return f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
