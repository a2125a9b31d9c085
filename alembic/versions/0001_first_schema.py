"""The first schema: every table, and the time that SQL sees."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from ipn_gateway.models import XID8

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


IPN_NOW = """
CREATE FUNCTION ipn_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT statement_timestamp() + coalesce(nullif(current_setting('ipn.clock_offset', true), ''), '0')::interval $$
"""

# Rows of these tables are rewritten all the time: room on each page for the new version, and vacuum early.
HOT = ("inbox", "event_deliveries", "sweeps", "source_states", "endpoint_states", "order_slots")


def upgrade() -> None:
    op.execute(IPN_NOW)
    op.create_table(
        "audit_log",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("details", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
    )
    op.create_index("audit_log_target_idx", "audit_log", ["tenant_id", "target"], unique=False)
    op.create_table(
        "delivery_attempts",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("event_delivery_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("duration_ms", sa.Integer(), nullable=False),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("status_code", sa.SmallInteger(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("response_excerpt", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "outcome IN ('delivered', 'refused', 'timeout', 'connect_failed', 'tls_failed', 'disconnected', 'protocol_error', 'blocked')",
            name="delivery_attempts_outcome_check",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
        postgresql_partition_by="RANGE (id)",
    )
    op.create_index("delivery_attempts_event_delivery_idx", "delivery_attempts", ["tenant_id", "event_delivery_id", "number"], unique=False)
    op.create_table(
        "endpoint_states",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Uuid(), nullable=False),
        sa.Column("consecutive_failures", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failing_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("open_until", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", "endpoint_id"),
    )
    op.create_table(
        "endpoints",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("description", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("status", sa.Text(), server_default=sa.text("'enabled'"), nullable=False),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("max_in_flight", sa.SmallInteger(), server_default=sa.text("10"), nullable=False),
        sa.Column("rate_per_second", sa.Numeric(), nullable=True),
        sa.Column("ordered", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("status IN ('enabled', 'disabled')", name="endpoints_status_check"),
        sa.CheckConstraint("max_in_flight BETWEEN 1 AND 100", name="endpoints_max_in_flight_check"),
        sa.CheckConstraint("rate_per_second > 0", name="endpoints_rate_check"),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
    )
    op.create_table(
        "event_deliveries",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Uuid(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), server_default=sa.text("'pending'"), nullable=False),
        sa.Column("attempt_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_trigger", sa.Text(), server_default=sa.text("'initial'"), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.CheckConstraint("status <> 'pending' OR next_attempt_at IS NOT NULL", name="event_deliveries_due_check"),
        sa.CheckConstraint("next_trigger IN ('initial', 'retry', 'redelivery', 'recovery', 'test')", name="event_deliveries_trigger_check"),
        sa.CheckConstraint("status IN ('pending', 'delivered', 'dead', 'cancelled')", name="event_deliveries_status_check"),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
        sa.UniqueConstraint("tenant_id", "event_id", "endpoint_id", name="event_deliveries_once_key"),
    )
    op.create_index(
        "event_deliveries_due_idx",
        "event_deliveries",
        ["tenant_id", "endpoint_id", "next_attempt_at"],
        unique=False,
        postgresql_where=sa.text("next_attempt_at IS NOT NULL"),
    )
    op.create_index("event_deliveries_order_idx", "event_deliveries", ["tenant_id", "order_id"], unique=False)
    op.create_index("event_deliveries_status_idx", "event_deliveries", ["tenant_id", "status", "id"], unique=False)
    op.create_table(
        "events",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=True),
        sa.Column("sequence", sa.Integer(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("transaction_id", XID8(), server_default=sa.text("pg_current_xact_id()"), nullable=False),
        sa.CheckConstraint("(type LIKE 'order.%') = (sequence IS NOT NULL)", name="events_sequence_check"),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
        sa.UniqueConstraint("tenant_id", "order_id", "sequence", name="events_sequence_key"),
    )
    op.create_index("events_pull_idx", "events", ["tenant_id", "transaction_id", "id"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("operation", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("fingerprint_version", sa.SmallInteger(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'in_progress'"), nullable=False),
        sa.Column("recovery_point", sa.Text(), server_default=sa.text("'started'"), nullable=False),
        sa.Column("progress", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("generation", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("response_status", sa.SmallInteger(), nullable=True),
        sa.Column("response_headers", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("response_body", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("(state = 'completed') = (response_status IS NOT NULL)", name="idempotency_keys_response_check"),
        sa.CheckConstraint("(state = 'in_progress') = (lease_expires_at IS NOT NULL)", name="idempotency_keys_lease_check"),
        sa.CheckConstraint("state IN ('in_progress', 'completed', 'indeterminate')", name="idempotency_keys_state_check"),
        sa.PrimaryKeyConstraint("tenant_id", "operation", "key"),
        sa.UniqueConstraint("tenant_id", "id", name="idempotency_keys_id_key"),
    )
    op.create_index(
        "idempotency_keys_expiry_idx", "idempotency_keys", ["expires_at"], unique=False, postgresql_where=sa.text("state = 'completed'")
    )
    op.create_index(
        "idempotency_keys_open_idx",
        "idempotency_keys",
        ["tenant_id", "state"],
        unique=False,
        postgresql_where=sa.text("state <> 'completed'"),
    )
    op.create_table(
        "inbox",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("notification_delivery_id", sa.Uuid(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=True),
        sa.Column("operation_id", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), server_default=sa.text("'received'"), nullable=False),
        sa.Column("proved", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("received_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("asked", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("refuted", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("questions", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("parked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint("state IN ('received', 'parked') OR due_at IS NULL", name="inbox_due_check"),
        sa.CheckConstraint("state IN ('received', 'parked', 'held', 'conflict', 'dead')", name="inbox_state_check"),
        sa.PrimaryKeyConstraint("tenant_id", "notification_delivery_id"),
    )
    op.create_index(
        "inbox_leased_idx",
        "inbox",
        ["source_id", "lease_expires_at"],
        unique=False,
        postgresql_where=sa.text("lease_expires_at IS NOT NULL"),
    )
    op.create_index("inbox_order_idx", "inbox", ["tenant_id", "order_id"], unique=False)
    op.create_index("inbox_parked_idx", "inbox", ["parked_at"], unique=False, postgresql_where=sa.text("state = 'parked'"))
    op.create_index(
        "inbox_proved_idx", "inbox", ["source_id", "due_at"], unique=False, postgresql_where=sa.text("proved AND due_at IS NOT NULL")
    )
    op.create_index(
        "inbox_unproved_idx", "inbox", ["source_id", "due_at"], unique=False, postgresql_where=sa.text("NOT proved AND due_at IS NOT NULL")
    )
    op.create_table(
        "notification_deliveries",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("received_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("remote_address", sa.Text(), nullable=True),
        sa.Column("query", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("headers", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("raw_body", sa.LargeBinary(), nullable=False),
        sa.Column("sha256", sa.LargeBinary(), nullable=False),
        sa.Column("proof", sa.Text(), nullable=False),
        sa.Column("provider_delivery_id", sa.Text(), nullable=True),
        sa.Column("copy_id", sa.Text(), nullable=True),
        sa.Column("order_id", sa.Text(), nullable=True),
        sa.Column("operation_id", sa.Text(), nullable=True),
        sa.Column("effect", sa.Text(), nullable=True),
        sa.Column("asserted_status", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), server_default=sa.text("'received'"), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("provider_answer", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("alerts", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("confirmed", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("resolution", sa.Text(), nullable=True),
        sa.CheckConstraint("(outcome IN ('received', 'parked')) = (decided_at IS NULL)", name="notification_deliveries_decided_check"),
        sa.CheckConstraint(
            "outcome IN ('received', 'applied', 'duplicate', 'conflict', 'stale', 'rejected', 'held', 'parked', 'malformed', 'dead')",
            name="notification_deliveries_outcome_check",
        ),
        sa.CheckConstraint("proof IN ('proved', 'unproved', 'refused', 'none')", name="notification_deliveries_proof_check"),
        sa.CheckConstraint("resolution IN ('apply', 'dismiss')", name="notification_deliveries_resolution_check"),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
        postgresql_partition_by="RANGE (id)",
    )
    op.create_index("notification_deliveries_order_idx", "notification_deliveries", ["tenant_id", "order_id", "id"], unique=False)
    op.create_index("notification_deliveries_outcome_idx", "notification_deliveries", ["tenant_id", "outcome", "id"], unique=False)
    op.create_table(
        "order_slots",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=False),
        sa.Column("touched", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("refused_count", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "order_id"),
    )
    op.create_table(
        "source_states",
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("unknown_streak", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("refuted_streak", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("probe_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("unproved_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("source_id"),
    )
    op.create_table(
        "sweeps",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "order_id"),
    )
    op.create_index("sweeps_due_idx", "sweeps", ["source_id", "due_at"], unique=False)
    op.create_index(
        "sweeps_leased_idx",
        "sweeps",
        ["source_id", "lease_expires_at"],
        unique=False,
        postgresql_where=sa.text("lease_expires_at IS NOT NULL"),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.CheckConstraint("id ~ '^[a-z0-9][a-z0-9_-]{0,62}$'", name="tenants_id_check"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest", name="api_keys_digest_key"),
    )
    op.create_table(
        "endpoint_secrets",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("endpoint_id", sa.Uuid(), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id", "endpoint_id"],
            ["endpoints.tenant_id", "endpoints.id"],
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
    )
    op.create_index("endpoint_secrets_endpoint_idx", "endpoint_secrets", ["tenant_id", "endpoint_id"], unique=False)
    op.create_table(
        "sources",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("name ~ '^[a-z0-9][a-z0-9-]{1,62}$'", name="sources_name_check"),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("name"),
        sa.UniqueConstraint("tenant_id", "name", name="sources_tenant_id_name_key"),
    )
    op.create_table(
        "orders",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), server_default=sa.text("'pending'"), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("amount", sa.Numeric(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("amount_paid", sa.Numeric(), server_default=sa.text("0"), nullable=False),
        sa.Column("amount_refunded", sa.Numeric(), server_default=sa.text("0"), nullable=False),
        sa.Column("return_url", sa.Text(), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("event_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("writer_id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.CheckConstraint(
            "amount_paid >= 0 AND amount_refunded >= 0 AND amount_refunded <= amount_paid AND (status <> 'paid' OR amount_paid >= amount)",
            name="orders_money_check",
        ),
        sa.CheckConstraint(
            "status IN ('pending', 'failed', 'cancelled', 'expired', 'paid_on_hold', 'paid', 'partially_refunded', 'refunded')",
            name="orders_status_check",
        ),
        sa.CheckConstraint("amount > 0", name="orders_amount_check"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "source_id"],
            ["sources.tenant_id", "sources.name"],
        ),
        sa.PrimaryKeyConstraint("tenant_id", "order_id"),
    )
    op.create_index("orders_created_idx", "orders", ["tenant_id", "created_at", "order_id"], unique=False)
    op.create_index("orders_status_idx", "orders", ["tenant_id", "status", "created_at"], unique=False)
    op.create_table(
        "source_secrets",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["source_id"],
            ["sources.name"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "source_secrets_current_key", "source_secrets", ["source_id"], unique=True, postgresql_where=sa.text("expires_at IS NULL")
    )
    op.create_table(
        "payments",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("provider_transaction_id", sa.Text(), nullable=False),
        sa.Column("operation_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("amount", sa.Numeric(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("settled_amount", sa.Numeric(), nullable=True),
        sa.Column("settled_currency", sa.Text(), nullable=True),
        sa.Column("net_amount", sa.Numeric(), nullable=True),
        sa.Column("amount_refunded", sa.Numeric(), server_default=sa.text("0"), nullable=False),
        sa.Column("amount_reserved", sa.Numeric(), server_default=sa.text("0"), nullable=False),
        sa.Column("paid_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("recorded_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.CheckConstraint("status IN ('applied', 'unapplied')", name="payments_status_check"),
        sa.CheckConstraint("amount > 0", name="payments_amount_check"),
        sa.CheckConstraint(
            "amount_refunded >= 0 AND amount_reserved >= 0 AND amount_refunded + amount_reserved <= amount", name="payments_refund_check"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "order_id"],
            ["orders.tenant_id", "orders.order_id"],
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
        sa.UniqueConstraint("tenant_id", "provider", "account_id", "provider_transaction_id", name="payments_provider_transaction_key"),
    )
    op.create_index("payments_order_idx", "payments", ["tenant_id", "order_id"], unique=False)
    op.create_table(
        "processed_notifications",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("operation_id", sa.Text(), nullable=False),
        sa.Column("effect", sa.Text(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=False),
        sa.Column("amount", sa.Numeric(), nullable=True),
        sa.Column("currency", sa.Text(), nullable=True),
        sa.Column("booked", sa.Text(), server_default=sa.text("'applied'"), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("writer_id", sa.Uuid(), nullable=False),
        sa.Column("applied_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.CheckConstraint("origin IN ('notification', 'sweep', 'manual')", name="processed_notifications_origin_check"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "order_id"],
            ["orders.tenant_id", "orders.order_id"],
        ),
        sa.PrimaryKeyConstraint("tenant_id", "source_id", "operation_id", "effect", name="processed_notifications_pkey"),
    )
    op.create_index("processed_notifications_order_idx", "processed_notifications", ["tenant_id", "order_id"], unique=False)
    op.create_table(
        "refunds",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("order_id", sa.Text(), nullable=False),
        sa.Column("payment_id", sa.Uuid(), nullable=False),
        sa.Column("reference", sa.Text(), nullable=False),
        sa.Column("amount", sa.Numeric(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), server_default=sa.text("'pending'"), nullable=False),
        sa.Column("provider_refund_id", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("polled", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("ipn_now()"), nullable=False),
        sa.CheckConstraint("status IN ('pending', 'processing', 'succeeded', 'failed', 'indeterminate')", name="refunds_status_check"),
        sa.CheckConstraint("amount > 0", name="refunds_amount_check"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "order_id"],
            ["orders.tenant_id", "orders.order_id"],
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "payment_id"],
            ["payments.tenant_id", "payments.id"],
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id"),
        sa.UniqueConstraint("tenant_id", "order_id", "reference", name="refunds_reference_key"),
    )
    op.create_index("refunds_due_idx", "refunds", ["due_at"], unique=False, postgresql_where=sa.text("due_at IS NOT NULL"))
    for table in HOT:
        op.execute(f"ALTER TABLE {table} SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_limit = 2000)")


def downgrade() -> None:
    op.drop_index("refunds_due_idx", table_name="refunds", postgresql_where=sa.text("due_at IS NOT NULL"))
    op.drop_table("refunds")
    op.drop_index("processed_notifications_order_idx", table_name="processed_notifications")
    op.drop_table("processed_notifications")
    op.drop_index("payments_order_idx", table_name="payments")
    op.drop_table("payments")
    op.drop_index("source_secrets_current_key", table_name="source_secrets", postgresql_where=sa.text("expires_at IS NULL"))
    op.drop_table("source_secrets")
    op.drop_index("orders_status_idx", table_name="orders")
    op.drop_index("orders_created_idx", table_name="orders")
    op.drop_table("orders")
    op.drop_table("sources")
    op.drop_index("endpoint_secrets_endpoint_idx", table_name="endpoint_secrets")
    op.drop_table("endpoint_secrets")
    op.drop_table("api_keys")
    op.drop_table("tenants")
    op.drop_index("sweeps_leased_idx", table_name="sweeps", postgresql_where=sa.text("lease_expires_at IS NOT NULL"))
    op.drop_index("sweeps_due_idx", table_name="sweeps")
    op.drop_table("sweeps")
    op.drop_table("source_states")
    op.drop_table("order_slots")
    op.drop_index("notification_deliveries_outcome_idx", table_name="notification_deliveries")
    op.drop_index("notification_deliveries_order_idx", table_name="notification_deliveries")
    op.drop_table("notification_deliveries")
    op.drop_index("inbox_unproved_idx", table_name="inbox", postgresql_where=sa.text("NOT proved AND due_at IS NOT NULL"))
    op.drop_index("inbox_proved_idx", table_name="inbox", postgresql_where=sa.text("proved AND due_at IS NOT NULL"))
    op.drop_index("inbox_parked_idx", table_name="inbox", postgresql_where=sa.text("state = 'parked'"))
    op.drop_index("inbox_order_idx", table_name="inbox")
    op.drop_index("inbox_leased_idx", table_name="inbox", postgresql_where=sa.text("lease_expires_at IS NOT NULL"))
    op.drop_table("inbox")
    op.drop_index("idempotency_keys_open_idx", table_name="idempotency_keys", postgresql_where=sa.text("state <> 'completed'"))
    op.drop_index("idempotency_keys_expiry_idx", table_name="idempotency_keys", postgresql_where=sa.text("state = 'completed'"))
    op.drop_table("idempotency_keys")
    op.drop_index("events_pull_idx", table_name="events")
    op.drop_table("events")
    op.drop_index("event_deliveries_status_idx", table_name="event_deliveries")
    op.drop_index("event_deliveries_order_idx", table_name="event_deliveries")
    op.drop_index("event_deliveries_due_idx", table_name="event_deliveries", postgresql_where=sa.text("next_attempt_at IS NOT NULL"))
    op.drop_table("event_deliveries")
    op.drop_table("endpoints")
    op.drop_table("endpoint_states")
    op.drop_index("delivery_attempts_event_delivery_idx", table_name="delivery_attempts")
    op.drop_table("delivery_attempts")
    op.drop_index("audit_log_target_idx", table_name="audit_log")
    op.drop_table("audit_log")
    op.execute("DROP FUNCTION ipn_now()")
