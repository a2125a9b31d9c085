"""A simulator and a subscriber on loopback sockets, a fixed clock and a listener that only records."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from urllib.parse import parse_qsl

import httpx
import pytest
from aiohttp import web

from ipn_gateway.simulator.app import SimulatorConfig, create_app
from ipn_gateway.simulator.serving import serving

Client = httpx.AsyncClient
NOW = datetime(2026, 7, 14, 6, 3, 35, tzinfo=UTC)
CREDENTIALS = {"store_id": "testbox", "store_passwd": "qwerty"}
FORM = CREDENTIALS | {
    "total_amount": "100.00",
    "currency": "BDT",
    "tran_id": "ORD-1",
    "product_category": "book",
    "success_url": "http://shop.test/success",
    "fail_url": "http://shop.test/fail",
    "cancel_url": "http://shop.test/cancel",
    "cus_name": "Demo",
    "cus_email": "demo@example.test",
    "cus_add1": "1 Road",
    "cus_city": "Dhaka",
    "cus_postcode": "1000",
    "cus_country": "Bangladesh",
    "cus_phone": "01700000000",
    "shipping_method": "NO",
    "num_of_item": "1",
    "product_name": "Book",
    "product_profile": "general",
    "emi_option": "0",
}


class Provider:
    """The simulator as a merchant's service and as a test see it."""

    def __init__(self, app, client: Client) -> None:
        self.simulator = app.state.simulator
        self.client = client

    def form(self, **changes: str | None) -> dict[str, str]:
        return {name: value for name, value in (FORM | changes).items() if value is not None}

    async def init(self, **changes: str | None):
        return (await self.client.post("/gwprocess/v4/api.php", data=self.form(**changes))).json()

    async def validate(self, val_id: str, **changes: str):
        params = CREDENTIALS | {"val_id": val_id} | changes
        return (await self.client.get("/validator/api/validationserverAPI.php", params=params)).json()

    async def query(self, **params: str):
        response = await self.client.get("/validator/api/merchantTransIDvalidationAPI.php", params=CREDENTIALS | params)
        return response.json()

    async def pay(self, **body):
        body = {"tran_id": "ORD-1", "amount": "100.00", "send_ipn": False} | body
        response = await self.client.post("/simulator/payments", json=body)
        assert response.status_code == 201, response.text
        return response.json()

    async def fault(self, **body):
        response = await self.client.post("/simulator/faults", json=body)
        assert response.status_code == 201, response.text

    async def state(self):
        return (await self.client.get("/simulator/state")).json()


class Listener:
    """Records what is posted to it, and answers `status`."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.bodies: list[bytes] = []

    def posts(self) -> list[dict[str, str]]:
        return [dict(parse_qsl(body.decode(), keep_blank_values=True)) for body in self.bodies]

    async def take(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return web.Response(text="taken", status=self.status)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def connect(stack: AsyncExitStack) -> Callable:
    """Give an HTTP client for an application that is served on a socket."""

    async def run(app) -> Client:
        url = await stack.enter_async_context(serving(app))
        return await stack.enter_async_context(Client(base_url=url, timeout=5))

    return run


@pytest.fixture
def enter(stack: AsyncExitStack) -> Callable:
    """Give an HTTP client for an application that runs here, without a socket."""

    async def run(app) -> Client:
        await stack.enter_async_context(app.router.lifespan_context(app))
        return await stack.enter_async_context(Client(transport=httpx.ASGITransport(app), base_url="http://simulator.test"))

    return run


@pytest.fixture
def start(enter: Callable) -> Callable:
    """Start a simulator with a config of one's own, without a socket."""

    async def run(**config) -> Provider:
        app = create_app(SimulatorConfig(**{"seed": 1} | config), clock=lambda: NOW)
        return Provider(app, await enter(app))

    return run


@pytest.fixture
async def provider(start: Callable):
    return await start()


@pytest.fixture
async def served(connect: Callable) -> Provider:
    """Start a simulator on a socket, whose connections can be cut."""
    app = create_app(SimulatorConfig(seed=1), clock=lambda: NOW)
    return Provider(app, await connect(app))


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    app = web.Application()
    app.router.add_post("/ipn/shop", listener.take)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    listener.url = f"http://127.0.0.1:{runner.addresses[0][1]}/ipn/shop"
    yield listener
    await runner.cleanup()
