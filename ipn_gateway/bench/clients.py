"""The bare clients, which are two parts of the composed limit: so many questions to a provider and so many POSTs a second make no more.

`ask` is httpx's client over aiohttp, `post` is aiohttp's: what one would take. The gateway's own two ways (`asking`, `posting`) go around
most of both. No guard, no signature, no database; what the answer says is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Final

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from ipn_gateway.bench import wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

IN_FLIGHT: Final = 100
BODY: Final = json.dumps(
    {
        "id": "evt_" + 32 * "a",
        "type": "order.paid",
        "timestamp": "2026-01-02T03:04:05Z",
        "data": {"order_id": "@order@", "status": "paid", "previous_status": "pending", "amount": "1250.00", "currency": "BDT"}
        | {"amount_paid": "1250.00", "amount_refunded": "0.00", "sequence": 1, "source": "tenant-0-source-0", "metadata": {}},
    }
)
"""What an event weighs, about."""


def event(number: int) -> tuple[dict[str, str], bytes]:
    """Headers and body of one POST."""
    return {"Content-Type": "application/json", "webhook-id": f"evt_{number}"}, BODY.replace("@order@", f"order-{number}").encode()


async def ask(url: str, count: int) -> None:
    """Ask the provider `count` times and say how many that was a second."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()) as session,
        httpx.AsyncClient(transport=AiohttpTransport(client=session), trust_env=False) as client,
    ):

        async def one(number: int) -> None:
            params = {"val_id": f"{wire.PREFIX}order-{number}", "v": "1", **wire.STORE, "format": "json"}
            answer = await client.get(f"{url}/validator/api/validationserverAPI.php", params=params)
            assert answer.json()["status"] == "VALID"  # noqa: S101 - the provider is ours

        await _measured(one, count)


async def post(url: str, count: int) -> None:
    """Post `count` events to the receiver and say how many that was a second."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def one(number: int) -> None:
            headers, body = event(number)
            async with session.post(f"{url}/hooks/bare", data=body, headers=headers) as answer:
                await answer.read()
                answer.raise_for_status()

        await _measured(one, count)


async def _measured(one: Callable[[int], Awaitable[None]], count: int) -> None:
    print("ready", flush=True)  # noqa: T201 - what the starter waits for
    began = time.monotonic()
    await in_flight(one, count)
    print(count / (time.monotonic() - began))  # noqa: T201 - the result


async def in_flight(one: Callable[[int], Awaitable[None]], count: int) -> None:
    """All of them, `IN_FLIGHT` at a time."""
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(lane())
