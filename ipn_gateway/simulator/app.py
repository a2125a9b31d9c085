"""The simulator as one application: a local SSLCOMMERZ with a control API beside it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ipn_gateway.simulator.api import ProviderApi
from ipn_gateway.simulator.bank import Bank
from ipn_gateway.simulator.checkout import Checkout
from ipn_gateway.simulator.connections import CuttableApp
from ipn_gateway.simulator.control import Control, control_router
from ipn_gateway.simulator.faults import Faults
from ipn_gateway.simulator.refunds import Refunds
from ipn_gateway.simulator.sender import Knobs, Sender
from ipn_gateway.simulator.world import host_time, seeded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from fastapi import FastAPI

    from ipn_gateway.simulator.world import Chance, Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorConfig:
    """How the simulator is set up. The default store is the provider's public sandbox store.

    `public_url` is where browsers reach it (empty: as the request came); `ipn_url` is the panel's listener URL, for
    sessions that name none; `refund_polls` is how often a refund says `processing` before it is done.
    """

    store_id: str = "testbox"
    store_passwd: str = field(default="qwerty", repr=False)
    other_stores: Mapping[str, str] = field(default_factory=dict, repr=False)
    public_url: str = ""
    ipn_url: str = ""
    knobs: Knobs = field(default_factory=Knobs)
    seed: int | None = None
    ipn_timeout_seconds: float = 10.0
    ipn_hold_seconds: float = 1.0
    refund_polls: int = 1


@dataclass(slots=True)
class Simulator:
    """The parts of a running simulator, for a test or a demo in the same process: `app.state.simulator`."""

    bank: Bank
    api: ProviderApi
    sender: Sender
    control: Control

    async def drained(self, *, seconds: float | None = None) -> bool:
        """Wait until no notification is left to be sent, at most `seconds`; whether that came true."""
        return await self.sender.drained(seconds=seconds)


def create_app(config: SimulatorConfig | None = None, *, clock: Clock = host_time, chance: Chance | None = None) -> FastAPI:
    """The application. `chance` is seeded from the config unless given; `clock` gives aware datetimes."""
    simulator = _assembled(config or SimulatorConfig(), clock, chance)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with simulator.sender.running():
            yield
            simulator.api.faults.clear()

    app = CuttableApp(title="SSLCOMMERZ simulator", lifespan=lifespan, docs_url=None, redoc_url=None)  # their pages load from elsewhere
    app.state.simulator = simulator
    app.router.routes.extend([*simulator.api.routes(), *simulator.control.checkout.routes()])
    app.include_router(control_router(simulator.control))
    return app


def _assembled(config: SimulatorConfig, clock: Clock, chance: Chance | None) -> Simulator:
    chance = chance or seeded(config.seed)
    fate = seeded(chance.getrandbits(64))  # the sender's own, so that its plan does not depend on who asks for ids between
    bank = Bank({**config.other_stores, config.store_id: config.store_passwd}, clock, chance)
    refunds = Refunds(clock, chance, config.refund_polls)
    api = ProviderApi(bank, refunds, Faults(), config.public_url)
    sender = Sender(config.knobs, fate, timeout_seconds=config.ipn_timeout_seconds, hold_seconds=config.ipn_hold_seconds)
    control = Control(api, Checkout(bank, sender, config.ipn_url), sender, config.store_id)
    return Simulator(bank, api, sender, control)
