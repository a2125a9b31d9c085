"""One factory per table: a row that is valid by default, with what matters to the test given by name. What it needs above it is made too.

`make` puts rows where the test works: in its `tx`, or committed in its `db`. Times are SQL's: `NOW`, `ago(minutes=5)`, `ahead(days=1)`.
"""

from __future__ import annotations

import hashlib
import itertools
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from psycopg import sql
from psycopg.types.json import Jsonb
from sqlalchemy.dialects.postgresql import JSONB
from sqlmodel import SQLModel

from ipn_gateway import ids, models
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ipn_gateway.db import Transaction

    Row = dict[str, Any]

TENANT = "shop"
SOURCE = "shop-main"
NOW = sql.SQL("ipn_now()")
SETTLED = {"paid_on_hold", "paid", "partially_refunded", "refunded"}


def ago(**parts: float) -> sql.Composable:
    """The database's time, `timedelta(**parts)` before now."""
    return ahead(**{unit: -count for unit, count in parts.items()})


def ahead(**parts: float) -> sql.Composable:
    """The database's time, `timedelta(**parts)` after now."""
    return sql.SQL("ipn_now() + {}").format(sql.Literal(timedelta(**parts)))


class Make:
    """Factories, each named after its table's row; they return the row as a dict."""

    def __init__(self, at: Database | Transaction, clock: Clock | None = None) -> None:
        self._at = at
        self._clock = clock or Clock()
        self._numbers = itertools.count(1)

    # Merchants and their accounts

    async def tenant(self, **given: Any) -> Row:
        return await self._insert(models.Tenant, {"id": TENANT} | given)

    async def api_key(self, **given: Any) -> Row:
        row = {"id": self._id(), "tenant_id": TENANT, "digest": self._digest(), "scopes": ["orders:read"]} | given
        await self._above(self.tenant, models.Tenant, id=row["tenant_id"])
        return await self._insert(models.ApiKey, row)

    async def source(self, **given: Any) -> Row:
        config = {"store_id": "teststore", "mode": "sandbox"}
        row = {"name": SOURCE, "tenant_id": TENANT, "provider": "sslcommerz", "account_id": "teststore", "config": config} | given
        await self._above(self.tenant, models.Tenant, id=row["tenant_id"])
        return await self._insert(models.Source, row)

    async def source_secret(self, **given: Any) -> Row:
        row = {"id": self._id(), "source_id": SOURCE, "ciphertext": b"sealed"} | given
        await self._above(self.source, models.Source, name=row["source_id"])
        return await self._insert(models.SourceSecret, row)

    async def source_state(self, **given: Any) -> Row:
        return await self._insert(models.SourceState, {"source_id": SOURCE} | given)

    # What providers said

    async def notification_delivery(self, **given: Any) -> Row:
        row = {
            "tenant_id": TENANT,
            "id": self._id(),
            "source_id": SOURCE,
            "provider": "sslcommerz",
            "via": "ipn",
            "proof": "proved",
        } | given
        body = row.setdefault("raw_body", f"tran_id={row.setdefault('order_id', self._name('order'))}&status=VALID".encode())
        row.setdefault("headers", [["content-type", "application/x-www-form-urlencoded"]])
        row.setdefault("sha256", hashlib.sha256(body).digest())
        if row.setdefault("outcome", "received") not in {"received", "parked"}:
            row.setdefault("decided_at", NOW)
        return await self._insert(models.NotificationDelivery, row)

    async def inbox(self, **given: Any) -> Row:
        if "notification_delivery_id" not in given:
            shared = {name: given[name] for name in ("tenant_id", "source_id", "order_id", "operation_id") if name in given}
            delivery = await self.notification_delivery(**shared)
            given = {"notification_delivery_id": delivery["id"], "order_id": delivery["order_id"]} | given
        row = {"tenant_id": TENANT, "source_id": SOURCE, "state": "received", "proved": True} | given
        if row["state"] in {"received", "parked"}:
            row.setdefault("due_at", NOW)
        return await self._insert(models.Inbox, row)

    async def processed_notification(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "source_id": SOURCE, "operation_id": self._name("operation"), "effect": "paid"} | given
        row = {"order_id": self._name("order"), "amount": Decimal(100), "currency": "BDT"} | row
        row = {"origin": "notification", "writer_id": self._id()} | row
        await self._above(self.order, models.Order, tenant_id=row["tenant_id"], order_id=row["order_id"])
        return await self._insert(models.ProcessedNotification, row)

    # What is owed, and the money that moved

    async def order_slot(self, **given: Any) -> Row:
        return await self._insert(models.OrderSlot, {"tenant_id": TENANT, "order_id": self._name("order")} | given)

    async def order(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "order_id": self._name("order"), "source_id": SOURCE, "amount": Decimal(100), "currency": "BDT"} | given
        if row.get("status") in SETTLED:
            row = {"amount_paid": row["amount"], "amount_refunded": row["amount"] if row["status"] == "refunded" else 0} | row
        await self._above(self.source, models.Source, tenant_id=row["tenant_id"], name=row["source_id"])
        return await self._insert(models.Order, row)

    async def sweep(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "order_id": self._name("order"), "source_id": SOURCE, "due_at": NOW} | given
        return await self._insert(models.Sweep, row)

    async def payment(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "id": self._id(), "order_id": self._name("order"), "source_id": SOURCE, "status": "applied"} | given
        row = {"provider": "sslcommerz", "account_id": "teststore", "operation_id": self._name("operation")} | row
        row = {"provider_transaction_id": self._name("bank"), "amount": Decimal(100), "currency": "BDT"} | row
        await self._above(self.order, models.Order, tenant_id=row["tenant_id"], order_id=row["order_id"])
        return await self._insert(models.Payment, row)

    async def refund(self, **given: Any) -> Row:
        if "payment_id" not in given:
            payment = await self.payment(**{name: given[name] for name in ("tenant_id", "order_id") if name in given})
            given = {"payment_id": payment["id"], "order_id": payment["order_id"]} | given
        row = {"tenant_id": TENANT, "id": self._id(), "reference": self._name("refund"), "amount": Decimal(10), "currency": "BDT"} | given
        return await self._insert(models.Refund, row)

    # What subscribers are told

    async def event(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "type": "order.paid", "body": b'{"type":"order.paid"}'} | given
        if row["type"].startswith("order."):
            row = {"order_id": self._name("order"), "sequence": 1} | row
        row.setdefault("id", ids.event_id(row["tenant_id"], row["type"], self._name("cause")))
        return await self._insert(models.Event, row)

    async def event_horizon(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "type": self._name("shop.type"), "position": 1, "event_id": "evt_a", "deleted_by": 1} | given
        return await self._insert(models.EventHorizon, row)

    async def endpoint(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "id": self._id(), "url": "https://subscriber.example/events", "events": ["*"]} | given
        return await self._insert(models.Endpoint, row)

    async def endpoint_secret(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "id": self._id(), "ciphertext": b"sealed"} | given
        if "endpoint_id" not in row:
            row["endpoint_id"] = (await self.endpoint(tenant_id=row["tenant_id"]))["id"]
        return await self._insert(models.EndpointSecret, row)

    async def endpoint_state(self, **given: Any) -> Row:
        return await self._insert(models.EndpointState, {"tenant_id": TENANT, "endpoint_id": self._id()} | given)

    async def event_delivery(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "id": self._id(), "event_type": "order.paid", "status": "pending"} | given
        if "event_id" not in row:
            event = await self.event(tenant_id=row["tenant_id"], type=row["event_type"])
            row = {"event_id": event["id"], "order_id": event["order_id"]} | row
        if "endpoint_id" not in row:
            row["endpoint_id"] = (await self.endpoint(tenant_id=row["tenant_id"]))["id"]
        if row["status"] == "pending":
            row.setdefault("next_attempt_at", NOW)
        return await self._insert(models.EventDelivery, row)

    async def delivery_attempt(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "id": self._id(), "number": 1, "trigger": "initial", "started_at": NOW, "duration_ms": 5} | given
        row = {"outcome": "delivered"} | row
        if "event_delivery_id" not in row:
            row["event_delivery_id"] = (await self.event_delivery(tenant_id=row["tenant_id"]))["id"]
        return await self._insert(models.DeliveryAttempt, row)

    # What clients asked for, and who did what

    async def idempotency_key(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "operation": "POST /v1/orders", "key": self._name("key"), "id": self._id()} | given
        row = {"fingerprint": self._digest(), "fingerprint_version": 1, "expires_at": ahead(hours=168), "state": "in_progress"} | row
        if row["state"] == "in_progress":
            row.setdefault("lease_expires_at", ahead(seconds=90))
        if row["state"] == "completed":
            row = {"response_status": 201, "response_headers": [], "response_body": b"{}"} | row
        return await self._insert(models.IdempotencyKey, row)

    async def audit_entry(self, **given: Any) -> Row:
        row = {"tenant_id": TENANT, "id": self._id(), "actor": "key_1", "action": "order.release", "target": "order-1"} | given
        return await self._insert(models.AuditEntry, row)

    # How

    def _id(self) -> Any:
        return ids.new(self._clock.now())

    def _name(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"

    def _digest(self) -> bytes:
        return hashlib.sha256(self._name("digest").encode()).digest()

    async def _above(self, factory: Callable[..., Awaitable[Row]], model: type[SQLModel], **key: Any) -> None:
        """Make the row that another one refers to, unless it is there."""
        where = sql.SQL(" AND ").join(sql.SQL("{} = {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in key)
        if await self._one(sql.SQL("SELECT 1 AS there FROM {} WHERE {}").format(sql.Identifier(_table(model)), where), key) is None:
            await factory(**key)

    async def _insert(self, model: type[SQLModel], row: Row) -> Row:
        columns = SQLModel.metadata.tables[_table(model)].columns
        row = {name: Jsonb(value) if isinstance(columns[name].type, JSONB) and value is not None else value for name, value in row.items()}
        values = [value if isinstance(value, sql.Composable) else sql.Placeholder(name) for name, value in row.items()]
        names, places = sql.SQL(", ").join(map(sql.Identifier, row)), sql.SQL(", ").join(values)
        statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) RETURNING *").format(sql.Identifier(_table(model)), names, places)
        inserted = await self._one(statement, {name: value for name, value in row.items() if not isinstance(value, sql.Composable)})
        assert inserted is not None
        return inserted

    async def _one(self, statement: sql.Composed, parameters: Row) -> Row | None:
        if isinstance(self._at, Database):
            async with self._at.transaction("make") as tx:
                return await tx.one(dict, statement.as_string(), parameters)
        return await self._at.one(dict, statement.as_string(), parameters)


def _table(model: type[SQLModel]) -> str:
    return str(model.__tablename__)
