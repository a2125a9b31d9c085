"""An application whose calls take an Idempotency-Key: `uvicorn --app-dir docs/examples/keys_alone coffee:app`.

SHOP_DATABASE_URL names any PostgreSQL from 15 on.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request, Response
from pydantic import BaseModel

from ipn_gateway import migrations
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database, Transaction
from ipn_gateway.errors import Unauthorized
from ipn_gateway.faults import Faults
from ipn_gateway.idempotency import Idempotency
from ipn_gateway.operations import Downstream, Finished, Operation
from ipn_gateway.web import bodies, keyed, problems

ORDER = Operation(name="POST /coffees", fields={"kind": "json", "price": "decimal"}, downstream=Downstream.LOCAL, key_required=True)


class Coffee(BaseModel):
    """What a customer wants, and what it costs."""

    kind: str
    price: Decimal


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the database, make the layer's table if it is missing, and let what is begun end before the database is closed."""
    async with Database(os.environ["SHOP_DATABASE_URL"], clock=Clock(), faults=Faults()) as db:
        await migrations.install_keys(db)
        app.state.idempotency = Idempotency(db, keyed.declared(app.routes), lease_seconds=30, retention_hours=24)
        yield
        await app.state.idempotency.drained(seconds=20)


app = FastAPI(lifespan=lifespan)
problems.install(app)


async def customer(x_customer: Annotated[str | None, Header()] = None) -> str:
    """Your authentication: the name that a caller's keys are kept under. Nobody is nobody's."""
    if not x_customer:
        raise Unauthorized("Say who you are in X-Customer.")
    return x_customer


@app.post("/coffees", status_code=201)
async def order_coffee(request: Request, call: Annotated[keyed.KeyedCall, keyed.of(ORDER, tenant=customer)]) -> Response:
    """Make one coffee for each key, however often it is asked for."""
    wanted = await bodies.read(request, Coffee)

    async def commit(tx: Transaction) -> Finished:
        made: Any = await tx.value("INSERT INTO coffees (kind, price) VALUES (%(kind)s, %(price)s) RETURNING id", dict(wanted))
        return Finished.shown(wanted, 201, Location=f"/coffees/{made}")

    return await call.once("coffees.order", commit)
