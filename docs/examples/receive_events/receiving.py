"""A shop that receives events: `uvicorn --app-dir docs/examples/receive_events receiving:app`, with SHOP_DATABASE_URL and WEBHOOK_KEYS.

WEBHOOK_KEYS are the endpoint's secret (`whsec_…`) or its public key (`whpk_…`); while one is replaced both, with a comma between.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from psycopg_pool import AsyncConnectionPool  # noqa: TID251 - the shop has a pool of its own

from ipn_gateway import receiver  # or your copy of it

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from psycopg import AsyncConnection

TABLES = f"""
{receiver.TABLE};
CREATE TABLE IF NOT EXISTS shop_orders (
    order_id text PRIMARY KEY, status text NOT NULL, amount_paid numeric NOT NULL, sequence integer NOT NULL);
CREATE TABLE IF NOT EXISTS shop_order_history (
    order_id text, sequence integer, type text NOT NULL, PRIMARY KEY (order_id, sequence))
"""
# Events may come out of order. What an order is now, the newest tells; one that is older changes nothing.
NEWEST = """
INSERT INTO shop_orders (order_id, status, amount_paid, sequence)
VALUES (%(order_id)s, %(status)s, %(amount_paid)s, %(sequence)s)
ON CONFLICT (order_id) DO UPDATE
   SET status = excluded.status, amount_paid = excluded.amount_paid, sequence = excluded.sequence
 WHERE shop_orders.sequence < excluded.sequence
"""
HISTORY = "INSERT INTO shop_order_history (order_id, sequence, type) VALUES (%s, %s, %s)"

BODY_BYTES_MAX = 256 * 1024  # more than any event has
log = logging.getLogger("receiving")


@asynccontextmanager
async def lifespan(shop: FastAPI) -> AsyncIterator[None]:
    """Refuse to start with keys that are none; make the tables if they are missing."""
    shop.state.keys = os.environ["WEBHOOK_KEYS"].split(",")
    receiver.check_keys(shop.state.keys)
    async with AsyncConnectionPool(os.environ["SHOP_DATABASE_URL"], open=False) as shop.state.pool:
        async with shop.state.pool.connection() as connection:
            await connection.execute(TABLES)
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/webhooks", status_code=204)
async def receive(request: Request) -> Response:
    """2xx only when the event is acted on, or was before. Anything else, a 500 too, and it is sent again."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            return Response(status_code=413)
    try:
        message = receiver.verify(request.headers, body, app.state.keys, now=time.time())  # noqa: TID251 - the shop's clock
    except receiver.Rejected as refusal:
        log.warning("A webhook was refused: %s", refusal)
        return Response(refusal.reason, status_code=401)
    async with app.state.pool.connection() as connection:  # one transaction: that the event came, and what it changes
        if await receiver.first_time(connection, message.id):
            await act(connection, message.event())
    return Response(status_code=204)


async def act(connection: AsyncConnection[Any], event: dict[str, Any]) -> None:
    """What the shop does about an event, in the transaction that keeps its id: no request and no mail from in here."""
    if event["type"].startswith("order."):
        data = event["data"]
        await connection.execute(HISTORY, (data["order_id"], data["sequence"], event["type"]))
        await connection.execute(NEWEST, data)
