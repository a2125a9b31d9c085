"""Every table, status, constraint and index: the file to read first.

`tenant_id` starts every key but those of `tenants`, `api_keys` and `sources`, which are unique in the whole deployment. Money is NUMERIC
without a scale, compared exactly. Every time is a database time. Text of a status is checked here, so that no code can invent one.
`notification_deliveries` and `delivery_attempts` are partitioned by range of their time-ordered id and have no foreign keys from or to
them, so that old partitions can be dropped; what must last is in tables that are never pruned.
"""

from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    PrimaryKeyConstraint,
    SmallInteger,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.types import UserDefinedType
from sqlmodel import Field, SQLModel

from ipn_gateway.states import DeliveryOutcome, EventDeliveryStatus, InboxState, OrderStatus, Trigger


class XID8(UserDefinedType[int]):
    """A transaction's number; what migrations made before positions took its place."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """The type's name in SQL."""
        return "xid8"


def _one_of(column: str, values: type[StrEnum] | tuple[str, ...], name: str) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=name)


def _time(*, nullable: bool = False, now: bool = False) -> Any:
    default: dict[str, Any] = {"server_default": text("ipn_now()")} if now else {}
    return Field(default=None, sa_type=DateTime(timezone=True), nullable=nullable, sa_column_kwargs=default)


def _text(*, nullable: bool = False, default: str | None = None) -> Any:
    kwargs: dict[str, Any] = {"server_default": text(f"'{default}'")} if default is not None else {}
    return Field(default=default, sa_type=Text, nullable=nullable, sa_column_kwargs=kwargs)


def _count(*, big: bool = False) -> Any:
    return Field(default=0, sa_type=BigInteger if big else SmallInteger, nullable=False, sa_column_kwargs={"server_default": text("0")})


def _json(*, nullable: bool = False, default: str | None = None) -> Any:
    kwargs: dict[str, Any] = {"server_default": text(f"'{default}'::jsonb")} if default is not None else {}
    return Field(default=None, sa_type=JSONB, nullable=nullable, sa_column_kwargs=kwargs)


def _bytes(*, nullable: bool = False) -> Any:
    return Field(default=None, sa_type=LargeBinary, nullable=nullable)


def _flag(*, default: bool = False) -> Any:
    return Field(default=default, nullable=False, sa_column_kwargs={"server_default": text(str(default).lower())})


def _texts() -> Any:
    return Field(default=None, sa_type=ARRAY(Text), nullable=False)


class Tenant(SQLModel, table=True):
    """A merchant, named by a short word that never changes."""

    __tablename__ = "tenants"
    __table_args__ = (PrimaryKeyConstraint("id"), CheckConstraint("id ~ '^[a-z0-9][a-z0-9_-]{0,62}$'", name="tenants_id_check"))

    id: str = _text()
    created_at: datetime = _time(now=True)


class ApiKey(SQLModel, table=True):
    """A key of a tenant, kept as SHA-256 of its 256 random bits."""

    __tablename__ = "api_keys"
    __table_args__ = (
        PrimaryKeyConstraint("id"),
        UniqueConstraint("digest", name="api_keys_digest_key"),
        ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
    )

    id: UUID
    tenant_id: str = _text()
    digest: bytes = _bytes()
    scopes: list[str] = _texts()
    created_at: datetime = _time(now=True)
    revoked_at: datetime | None = _time(nullable=True)


class Source(SQLModel, table=True):
    """One merchant account at one provider. Its name is the slug in the listener URL: unique in the deployment, never free again."""

    __tablename__ = "sources"
    __table_args__ = (
        PrimaryKeyConstraint("name"),
        UniqueConstraint("tenant_id", "name", name="sources_tenant_id_name_key"),
        ForeignKeyConstraint(["tenant_id"], ["tenants.id"]),
        CheckConstraint("name ~ '^[a-z0-9][a-z0-9-]{1,62}$'", name="sources_name_check"),
    )

    name: str = _text()
    tenant_id: str = _text()
    provider: str = _text()
    account_id: str = _text()  # the merchant's name at the provider
    config: dict[str, Any] = _json()  # without secrets
    created_at: datetime = _time(now=True)
    disabled_at: datetime | None = _time(nullable=True)


class SourceSecret(SQLModel, table=True):
    """One version of a source's secrets, encrypted. The one without `expires_at` is current; a replaced one authenticates until then."""

    __tablename__ = "source_secrets"
    __table_args__ = (
        PrimaryKeyConstraint("id"),
        ForeignKeyConstraint(["source_id"], ["sources.name"]),
        Index("source_secrets_current_key", "source_id", unique=True, postgresql_where=text("expires_at IS NULL")),
    )

    id: UUID
    source_id: str = _text()
    ciphertext: bytes = _bytes()
    created_at: datetime = _time(now=True)
    expires_at: datetime | None = _time(nullable=True)


class SourceState(SQLModel, table=True):
    """A source's health, apart from the source and without a foreign key, so that nothing waits for it."""

    __tablename__ = "source_states"
    __table_args__ = (PrimaryKeyConstraint("source_id"),)

    source_id: str = _text()
    unknown_streak: int = _count()  # unknown answers in a row; from five on one delivery at a time probes
    refuted_streak: int = _count()
    probe_at: datetime | None = _time(nullable=True)  # the next probe is allowed from then on
    unproved_at: datetime | None = _time(nullable=True)  # the next unproved notification may be asked about from then on


class NotificationDelivery(SQLModel, table=True):
    """One inbound HTTP request, bytes and headers as received, and what became of it."""

    __tablename__ = "notification_deliveries"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        _one_of("outcome", DeliveryOutcome, "notification_deliveries_outcome_check"),
        _one_of("proof", ("proved", "unproved", "refused", "none"), "notification_deliveries_proof_check"),
        _one_of("resolution", ("apply", "dismiss"), "notification_deliveries_resolution_check"),
        CheckConstraint("(outcome IN ('received', 'parked')) = (decided_at IS NULL)", name="notification_deliveries_decided_check"),
        Index("notification_deliveries_order_idx", "tenant_id", "order_id", "id"),
        Index("notification_deliveries_outcome_idx", "tenant_id", "outcome", "id"),
        {"postgresql_partition_by": "RANGE (id)"},
    )

    tenant_id: str = _text()
    id: UUID
    source_id: str = _text()
    provider: str = _text()
    via: str = _text()  # the route: ipn, or return/success and so on
    received_at: datetime = _time(now=True)
    remote_address: str | None = _text(nullable=True)
    query: str = _text(default="")
    headers: list[Any] = _json()  # [[name, value], …] in the order received, credentials left out
    raw_body: bytes = _bytes()
    sha256: bytes = _bytes()
    proof: str = _text()
    provider_delivery_id: str | None = _text(nullable=True)
    copy_id: str | None = _text(nullable=True)  # of a proved one: the same in all its copies
    order_id: str | None = _text(nullable=True)  # as asserted
    operation_id: str | None = _text(nullable=True)
    effect: str | None = _text(nullable=True)
    asserted_status: str | None = _text(nullable=True)
    outcome: str = _text(default="received")
    reason: str | None = _text(nullable=True)
    decided_at: datetime | None = _time(nullable=True)
    attempts: int = _count()  # questions to the provider
    provider_answer: dict[str, Any] | None = _json(nullable=True)
    alerts: list[Any] | None = _json(nullable=True)
    confirmed: dict[str, Any] | None = _json(nullable=True)  # of a held one: what the provider confirmed, for a person to apply
    resolution: str | None = _text(nullable=True)  # what a person decided: apply or dismiss


class Inbox(SQLModel, table=True):
    """Open work on a notification delivery; narrow. The row leaves when its delivery is decided."""

    __tablename__ = "inbox"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "notification_delivery_id"),
        _one_of("state", InboxState, "inbox_state_check"),
        CheckConstraint("state IN ('received', 'parked') OR due_at IS NULL", name="inbox_due_check"),
        Index("inbox_proved_idx", "source_id", "due_at", postgresql_where=text("proved AND due_at IS NOT NULL")),
        Index("inbox_unproved_idx", "source_id", "due_at", postgresql_where=text("NOT proved AND due_at IS NOT NULL")),
        Index("inbox_leased_idx", "source_id", "lease_expires_at", postgresql_where=text("lease_expires_at IS NOT NULL")),
        Index("inbox_order_idx", "tenant_id", "order_id"),
        Index("inbox_parked_idx", "parked_at", postgresql_where=text("state = 'parked'")),
        Index("inbox_waiting_idx", "tenant_id", "notification_delivery_id", "state", postgresql_where=text("due_at IS NULL")),
    )

    tenant_id: str = _text()
    notification_delivery_id: UUID
    source_id: str = _text()
    order_id: str | None = _text(nullable=True)
    operation_id: str | None = _text(nullable=True)
    state: str = _text(default="received")
    proved: bool = _flag()
    received_at: datetime = _time(now=True)
    due_at: datetime | None = _time(nullable=True)
    asked: int = _count()  # unknown answers so far: the step on the validation schedule
    refuted: int = _count()  # refutations so far: the step on the refuted schedule
    questions: int = _count()  # all questions asked so far
    parked_at: datetime | None = _time(nullable=True)
    lease_expires_at: datetime | None = _time(nullable=True)
    fence: int = _count(big=True)


class ProcessedNotification(SQLModel, table=True):
    """The ledger: one operation applied. Never pruned, never partitioned by time; its primary key is what makes a duplicate."""

    __tablename__ = "processed_notifications"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "source_id", "operation_id", "effect", name="processed_notifications_pkey"),
        ForeignKeyConstraint(["tenant_id", "order_id"], ["orders.tenant_id", "orders.order_id"]),
        Index("processed_notifications_order_idx", "tenant_id", "order_id"),
        _one_of("origin", ("notification", "sweep", "manual"), "processed_notifications_origin_check"),
    )

    tenant_id: str = _text()
    source_id: str = _text()
    operation_id: str = _text()
    effect: str = _text()
    order_id: str = _text()
    amount: Decimal | None = None
    currency: str | None = _text(nullable=True)
    booked: str = _text(default="applied")  # or unapplied: a second payment
    origin: str = _text()
    writer_id: UUID  # the notification delivery, or the question of the sweep, that wrote the row
    applied_at: datetime = _time(now=True)


class OrderSlot(SQLModel, table=True):
    """The row that both sides lock while an order may not exist yet."""

    __tablename__ = "order_slots"
    __table_args__ = (PrimaryKeyConstraint("tenant_id", "order_id"),)

    tenant_id: str = _text()
    order_id: str = _text()
    touched: int = _count(big=True)
    refused_count: int = _count()  # refused notifications that name the order and were stored beyond the rate
    asked_at: datetime | None = _time(nullable=True)  # when a browser return that proves nothing last led to a question


class Order(SQLModel, table=True):
    """What is owed. Status moves only to a higher rank; money sums are kept beside it and checked."""

    __tablename__ = "orders"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "order_id"),
        ForeignKeyConstraint(["tenant_id", "source_id"], ["sources.tenant_id", "sources.name"]),
        _one_of("status", OrderStatus, "orders_status_check"),
        CheckConstraint("amount > 0", name="orders_amount_check"),
        CheckConstraint(
            "amount_paid >= 0 AND amount_refunded >= 0 AND amount_refunded <= amount_paid AND (status <> 'paid' OR amount_paid >= amount)",
            name="orders_money_check",
        ),
        Index("orders_status_idx", "tenant_id", "status", "created_at"),
        Index("orders_created_idx", "tenant_id", "created_at", "order_id"),
    )

    tenant_id: str = _text()
    order_id: str = _text()
    source_id: str = _text()
    status: str = _text(default="pending")
    reason: str | None = _text(nullable=True)
    amount: Decimal
    currency: str = _text()
    amount_paid: Decimal = Field(default=Decimal(), nullable=False, sa_column_kwargs={"server_default": text("0")})
    amount_refunded: Decimal = Field(default=Decimal(), nullable=False, sa_column_kwargs={"server_default": text("0")})
    return_url: str | None = _text(nullable=True)
    expires_at: datetime | None = _time(nullable=True)
    metadata_: dict[str, Any] = Field(
        default=None, sa_type=JSONB, sa_column_kwargs={"name": "metadata", "server_default": text("'{}'::jsonb")}
    )
    event_count: int = Field(default=0, nullable=False, sa_column_kwargs={"server_default": text("0")})
    checkout_url: str | None = _text(nullable=True)  # the provider's page of the last session
    checkout_expires_at: datetime | None = _time(nullable=True)
    writer_id: UUID = Field(default=None, nullable=False, sa_column_kwargs={"server_default": text("gen_random_uuid()")})  # the call
    created_at: datetime = _time(now=True)
    updated_at: datetime = _time(now=True)


class Sweep(SQLModel, table=True):
    """Open work of asking the provider about one unpaid order; narrow. The row leaves when the order is paid or the schedule ends."""

    __tablename__ = "sweeps"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "order_id"),
        Index("sweeps_due_idx", "source_id", "due_at"),
        Index("sweeps_leased_idx", "source_id", "lease_expires_at", postgresql_where=text("lease_expires_at IS NOT NULL")),
    )

    tenant_id: str = _text()
    order_id: str = _text()
    source_id: str = _text()
    created_at: datetime = _time(now=True)
    expires_at: datetime | None = _time(nullable=True)
    due_at: datetime = _time()
    lease_expires_at: datetime | None = _time(nullable=True)
    fence: int = _count(big=True)


class Payment(SQLModel, table=True):
    """One movement of money towards the merchant. Refunds are reserved in its row before the provider is called."""

    __tablename__ = "payments"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        UniqueConstraint("tenant_id", "provider", "account_id", "provider_transaction_id", name="payments_provider_transaction_key"),
        ForeignKeyConstraint(["tenant_id", "order_id"], ["orders.tenant_id", "orders.order_id"]),
        _one_of("status", ("applied", "unapplied"), "payments_status_check"),
        CheckConstraint("amount > 0", name="payments_amount_check"),
        CheckConstraint(
            "amount_refunded >= 0 AND amount_reserved >= 0 AND amount_refunded + amount_reserved <= amount", name="payments_refund_check"
        ),
        Index("payments_order_idx", "tenant_id", "order_id"),
    )

    tenant_id: str = _text()
    id: UUID
    order_id: str = _text()
    source_id: str = _text()
    provider: str = _text()
    account_id: str = _text()
    provider_transaction_id: str = _text()
    operation_id: str = _text()
    status: str = _text()
    amount: Decimal
    currency: str = _text()
    settled_amount: Decimal | None = None
    settled_currency: str | None = _text(nullable=True)
    net_amount: Decimal | None = None
    amount_refunded: Decimal = Field(default=Decimal(), nullable=False, sa_column_kwargs={"server_default": text("0")})
    amount_reserved: Decimal = Field(default=Decimal(), nullable=False, sa_column_kwargs={"server_default": text("0")})
    paid_at: datetime | None = _time(nullable=True)
    recorded_at: datetime = _time(now=True)


class Refund(SQLModel, table=True):
    """One movement of money back. A reference refunds once for ever."""

    __tablename__ = "refunds"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        UniqueConstraint("tenant_id", "order_id", "reference", name="refunds_reference_key"),
        ForeignKeyConstraint(["tenant_id", "order_id"], ["orders.tenant_id", "orders.order_id"]),
        ForeignKeyConstraint(["tenant_id", "payment_id"], ["payments.tenant_id", "payments.id"]),
        _one_of("status", ("pending", "processing", "succeeded", "failed", "indeterminate"), "refunds_status_check"),
        CheckConstraint("amount > 0", name="refunds_amount_check"),
        Index("refunds_due_idx", "due_at", postgresql_where=text("due_at IS NOT NULL")),
    )

    tenant_id: str = _text()
    id: UUID
    order_id: str = _text()
    payment_id: UUID
    reference: str = _text()
    amount: Decimal
    currency: str = _text()
    status: str = _text(default="pending")
    provider_refund_id: str | None = _text(nullable=True)
    reason: str | None = _text(nullable=True)
    due_at: datetime | None = _time(nullable=True)
    polled: int = _count()
    lease_expires_at: datetime | None = _time(nullable=True)
    fence: int = _count(big=True)
    writer_id: UUID | None = None  # the idempotency key whose call made it
    failure: str | None = _text(nullable=True)  # a short code: why no money went back
    created_at: datetime = _time(now=True)
    updated_at: datetime = _time(now=True)


class Event(SQLModel, table=True):
    """An immutable outbound fact: the bytes that are signed and sent, the same for ever."""

    __tablename__ = "events"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        UniqueConstraint("tenant_id", "order_id", "sequence", name="events_sequence_key"),
        Index("events_pull_idx", "tenant_id", "position", "id"),
        Index("events_created_idx", "tenant_id", "created_at", "id"),
        CheckConstraint("(type LIKE 'order.%') = (sequence IS NOT NULL)", name="events_sequence_check"),
    )

    tenant_id: str = _text()
    id: str = _text()  # evt_…: a digest of tenant, type and cause
    type: str = _text()
    order_id: str | None = _text(nullable=True)
    sequence: int | None = None
    body: bytes = _bytes()
    created_at: datetime = _time(now=True)
    position: int = Field(  # the order of the pull
        default=None, sa_type=BigInteger, nullable=False, sa_column_kwargs={"server_default": text("event_position()")}
    )


class EventLog(SQLModel, table=True):
    """The one row behind `event_position()`: the number of the writing transaction plus an offset, which each start looks at."""

    __tablename__ = "event_log"
    __table_args__ = (PrimaryKeyConstraint("is_only"), CheckConstraint("is_only", name="event_log_is_only_check"))

    is_only: bool = _flag(default=True)
    system: str = _text(default="")  # identifier of the cluster that the offset is for; empty before the first start
    xid_offset: int = _count(big=True)


class EventHorizon(SQLModel, table=True):
    """Up to where a tenant's events of one type were deleted after their retention: a pull's cursor before it has missed some."""

    __tablename__ = "event_horizons"
    __table_args__ = (PrimaryKeyConstraint("tenant_id", "type"),)

    tenant_id: str = _text()
    type: str = _text()
    position: int = Field(sa_type=BigInteger)
    event_id: str = _text()  # with its position: the last one deleted, in the order of the pull
    deleted_by: int = Field(sa_type=BigInteger)  # the position of the last transaction that deleted some


class Endpoint(SQLModel, table=True):
    """A subscriber's URL, filter and limits; soft-deleted."""

    __tablename__ = "endpoints"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        _one_of("status", ("enabled", "disabled"), "endpoints_status_check"),
        CheckConstraint("max_in_flight BETWEEN 1 AND 100", name="endpoints_max_in_flight_check"),
        CheckConstraint("rate_per_second > 0", name="endpoints_rate_check"),
    )

    tenant_id: str = _text()
    id: UUID
    url: str = _text()
    events: list[str] = _texts()
    description: str = _text(default="")
    status: str = _text(default="enabled")
    disabled_reason: str | None = _text(nullable=True)
    disabled_at: datetime | None = _time(nullable=True)
    max_in_flight: int = Field(default=10, sa_type=SmallInteger, nullable=False, sa_column_kwargs={"server_default": text("10")})
    rate_per_second: Decimal | None = None
    ordered: bool = _flag()
    created_at: datetime = _time(now=True)
    deleted_at: datetime | None = _time(nullable=True)


class EndpointSecret(SQLModel, table=True):
    """One signing secret, encrypted; several are active during an overlap."""

    __tablename__ = "endpoint_secrets"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        ForeignKeyConstraint(["tenant_id", "endpoint_id"], ["endpoints.tenant_id", "endpoints.id"]),
        Index("endpoint_secrets_endpoint_idx", "tenant_id", "endpoint_id"),
    )

    tenant_id: str = _text()
    id: UUID
    endpoint_id: UUID
    ciphertext: bytes = _bytes()  # the shared secret of v1
    seed_ciphertext: bytes | None = _bytes(nullable=True)  # the private key of v1a; none where the secret is older than v1a is
    public_key: str | None = _text(nullable=True)  # that belongs to it, in its published form
    created_at: datetime = _time(now=True)
    expires_at: datetime | None = _time(nullable=True)


class EndpointState(SQLModel, table=True):
    """An endpoint's health, apart and without a foreign key, so that fan-out never waits for the dispatcher."""

    __tablename__ = "endpoint_states"
    __table_args__ = (PrimaryKeyConstraint("tenant_id", "endpoint_id"),)

    tenant_id: str = _text()
    endpoint_id: UUID
    consecutive_failures: int = Field(default=0, nullable=False, sa_column_kwargs={"server_default": text("0")})
    failing_since: datetime | None = _time(nullable=True)
    open_until: datetime | None = _time(nullable=True)  # the breaker: nothing is sent before
    paced_until: datetime | None = _time(nullable=True)  # of a limited rate: when the last permitted send is paid for
    warned_at: datetime | None = _time(nullable=True)  # when its owner was warned that it will be disabled


class EventDelivery(SQLModel, table=True):
    """The obligation to bring one event to one endpoint; narrow and hot. No foreign key to the endpoint, whose row is never deleted."""

    __tablename__ = "event_deliveries"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        UniqueConstraint("tenant_id", "event_id", "endpoint_id", name="event_deliveries_once_key"),
        _one_of("status", EventDeliveryStatus, "event_deliveries_status_check"),
        _one_of("next_trigger", Trigger, "event_deliveries_trigger_check"),
        CheckConstraint("status <> 'pending' OR next_attempt_at IS NOT NULL", name="event_deliveries_due_check"),
        Index(
            "event_deliveries_due_idx", "tenant_id", "endpoint_id", "next_attempt_at", postgresql_where=text("next_attempt_at IS NOT NULL")
        ),
        Index(
            "event_deliveries_leased_idx",
            "tenant_id",
            "endpoint_id",
            "lease_expires_at",
            postgresql_where=text("lease_expires_at IS NOT NULL"),
        ),
        Index(
            "event_deliveries_sequence_idx",
            "tenant_id",
            "endpoint_id",
            "order_id",
            "sequence",
            postgresql_where=text("status = 'pending' AND sequence IS NOT NULL"),
        ),
        Index("event_deliveries_order_idx", "tenant_id", "order_id"),
        Index("event_deliveries_status_idx", "tenant_id", "status", "id"),
    )

    tenant_id: str = _text()
    id: UUID
    event_id: str = _text()
    endpoint_id: UUID
    event_type: str = _text()
    order_id: str | None = _text(nullable=True)
    sequence: int | None = None  # of its event, in the order
    status: str = _text(default="pending")
    attempt_count: int = Field(default=0, nullable=False, sa_column_kwargs={"server_default": text("0")})
    redelivery_count: int = Field(default=0, nullable=False, sa_column_kwargs={"server_default": text("0")})  # of those attempts
    next_trigger: str = _text(default="initial")
    next_attempt_at: datetime | None = _time(nullable=True)
    scheduled_at: datetime | None = _time(nullable=True)  # of what is redelivered while it is pending: when it is due otherwise
    asked_again: bool = Field(default=False, nullable=False, sa_column_kwargs={"server_default": text("false")})  # during an attempt
    delivered_at: datetime | None = _time(nullable=True)
    lease_expires_at: datetime | None = _time(nullable=True)
    fence: int = _count(big=True)
    created_at: datetime = _time(now=True)


class DeliveryAttempt(SQLModel, table=True):
    """One HTTP try of an event delivery; append-only."""

    __tablename__ = "delivery_attempts"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        Index("delivery_attempts_event_delivery_idx", "tenant_id", "event_delivery_id", "number"),
        _one_of(
            "outcome",
            ("delivered", "refused", "timeout", "connect_failed", "tls_failed", "disconnected", "protocol_error", "blocked"),
            "delivery_attempts_outcome_check",
        ),
        {"postgresql_partition_by": "RANGE (id)"},
    )

    tenant_id: str = _text()
    id: UUID
    event_delivery_id: UUID
    number: int
    trigger: str = _text()
    started_at: datetime = _time()
    duration_ms: int
    address: str | None = _text(nullable=True)
    status_code: int | None = Field(default=None, sa_type=SmallInteger)
    outcome: str = _text()
    error: str | None = _text(nullable=True)
    response_excerpt: str | None = _text(nullable=True)


class IdempotencyKey(SQLModel, table=True):
    """One client intent: claimed, worked on under a lease, and answered from here when it is repeated."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "operation", "key"),
        UniqueConstraint("tenant_id", "id", name="idempotency_keys_id_key"),
        _one_of("state", ("in_progress", "completed", "indeterminate"), "idempotency_keys_state_check"),
        CheckConstraint("(state = 'in_progress') = (lease_expires_at IS NOT NULL)", name="idempotency_keys_lease_check"),
        CheckConstraint("(state = 'completed') = (response_status IS NOT NULL)", name="idempotency_keys_response_check"),
        CheckConstraint("(state = 'indeterminate') = (indeterminate_at IS NOT NULL)", name="idempotency_keys_indeterminate_check"),
        Index("idempotency_keys_expiry_idx", "expires_at", postgresql_where=text("state = 'completed'")),
        Index("idempotency_keys_open_idx", "tenant_id", "state", postgresql_where=text("state <> 'completed'")),
        Index("idempotency_keys_lease_idx", "lease_expires_at", postgresql_where=text("state = 'in_progress'")),
        Index("idempotency_keys_key_idx", "tenant_id", "key"),
    )

    tenant_id: str = _text()
    operation: str = _text()
    key: str = _text()
    id: UUID
    fingerprint: bytes = _bytes()
    fingerprint_version: int = Field(default=1, sa_type=SmallInteger, nullable=False)
    state: str = _text(default="in_progress")
    recovery_point: str = _text(default="started")
    progress: dict[str, Any] = _json(default="{}")  # what phases hand on
    generation: int = _count()
    lease_expires_at: datetime | None = _time(nullable=True)
    fence: int = _count(big=True)
    response_status: int | None = Field(default=None, sa_type=SmallInteger)
    response_headers: list[Any] | None = _json(nullable=True)
    response_body: bytes | None = _bytes(nullable=True)
    created_at: datetime = _time(now=True)
    expires_at: datetime = _time()
    indeterminate_at: datetime | None = _time(nullable=True)


class AuditEntry(SQLModel, table=True):
    """Who did what by hand or by timer; append-only."""

    __tablename__ = "audit_log"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "id"),
        Index("audit_log_target_idx", "tenant_id", "target"),
    )

    tenant_id: str = _text()
    id: UUID
    at: datetime = _time(now=True)
    actor: str = _text()
    action: str = _text()
    target: str = _text()
    reason: str | None = _text(nullable=True)
    details: dict[str, Any] = _json(default="{}")
