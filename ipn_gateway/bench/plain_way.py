"""The same job as most teams write it: FastAPI, SQLModel's AsyncSession, httpx, and everything in the request.

One handler checks the hash, asks the provider, writes in one transaction (the notification, the order that it reads, the payment, the
order's status: four statements) and answers; a background task posts the event. It is what we stand beside, so it is written well: one
client, one pool, a unique key against repeats. What it lacks is not its speed: a crash or a slow receiver loses events, a provider that
is down loses notifications.
"""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from decimal import Decimal
from typing import Annotated
from urllib.parse import parse_qsl

import httpx
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, Request
from sqlalchemy import Column, DateTime, func
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel, select
from sqlmodel.ext.asyncio.session import AsyncSession

from ipn_gateway.bench import form, wire

STATEMENTS = 4


class Plain(SQLModel, registry=registry()):
    """Tables of their own, apart from the gateway's."""


class Notification(Plain, table=True):
    """What came."""

    __tablename__ = "plain_notifications"

    id: int | None = Field(default=None, primary_key=True)
    order_id: str
    body: bytes
    received_at: datetime | None = Field(default=None, sa_column=Column(DateTime(timezone=True), server_default=func.now()))


class Order(Plain, table=True):
    """What is owed."""

    __tablename__ = "plain_orders"

    order_id: str = Field(primary_key=True)
    amount: Decimal
    status: str = "pending"


class Payment(Plain, table=True):
    """What was paid; its key makes a repeat fail."""

    __tablename__ = "plain_payments"

    val_id: str = Field(primary_key=True)
    order_id: str = Field(index=True)
    amount: Decimal
    answer: str


def application(url: str, provider_url: str, receiver_url: str) -> FastAPI:
    """The whole service."""
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"), pool_size=20)
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=100), trust_env=False)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.aclose()
        await engine.dispose()

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as opened:
            yield opened

    app = FastAPI(lifespan=lifespan)

    async def notify(order_id: str) -> None:
        body = {"type": "order.paid", "data": {"order_id": order_id, "status": "paid", "amount": "1250.00", "currency": "BDT"}}
        await client.post(f"{receiver_url}/hooks/plain", json=body, headers={"webhook-id": order_id})

    @app.post("/ipn/{source}")
    async def ipn(
        source: str, request: Request, background: BackgroundTasks, session: Annotated[AsyncSession, Depends(session)]
    ) -> dict[str, str]:
        body = await request.body()
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True))
        if not _signed(fields):
            raise HTTPException(401)
        params = {"val_id": fields["val_id"], **wire.STORE, "format": "json"}
        answer = (await client.get(f"{provider_url}/validator/api/validationserverAPI.php", params=params)).json()
        try:
            async with session.begin():
                session.add(Notification(order_id=fields["tran_id"], body=body))
                order = (await session.exec(select(Order).where(Order.order_id == fields["tran_id"]).with_for_update())).one()
                if answer["status"] not in {"VALID", "VALIDATED"} or Decimal(answer["currency_amount"]) < order.amount:
                    raise HTTPException(400)
                order.status = "paid"
                session.add(Payment(val_id=fields["val_id"], order_id=order.order_id, amount=order.amount, answer=json.dumps(answer)))
        except IntegrityError:
            return {"status": "duplicate"}
        background.add_task(notify, fields["tran_id"])
        return {"status": source}

    return app


def _signed(fields: dict[str, str]) -> bool:
    secret = hashlib.md5(wire.STORE["store_passwd"].encode(), usedforsecurity=False).hexdigest()
    named = {name: fields[name] for name in fields["verify_key"].split(",")} | {"store_passwd": secret}
    text = "&".join(f"{name}={named[name]}" for name in sorted(named))
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest() == fields["verify_sign"]


async def prepare(url: str) -> None:
    """Make the tables."""
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    async with engine.begin() as connection:
        await connection.run_sync(Plain.metadata.create_all)
    await engine.dispose()


def serve(url: str, provider_url: str, receiver_url: str) -> None:
    """Serve it as the gateway is served."""
    form.serve(application(url, provider_url, receiver_url))
