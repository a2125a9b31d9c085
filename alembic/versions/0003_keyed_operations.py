"""Keyed operations: unknown outcomes and their time, keys by name and by lease, checkout sessions, who made a refund, what waits."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("idempotency_keys", sa.Column("indeterminate_at", sa.DateTime(timezone=True), nullable=True))
    op.create_check_constraint(
        "idempotency_keys_indeterminate_check", "idempotency_keys", "(state = 'indeterminate') = (indeterminate_at IS NOT NULL)"
    )
    op.create_index(
        "idempotency_keys_lease_idx", "idempotency_keys", ["lease_expires_at"], postgresql_where=sa.text("state = 'in_progress'")
    )
    op.create_index("idempotency_keys_key_idx", "idempotency_keys", ["tenant_id", "key"])
    op.add_column("orders", sa.Column("checkout_url", sa.Text(), nullable=True))
    op.add_column("orders", sa.Column("checkout_expires_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("refunds", sa.Column("writer_id", sa.Uuid(), nullable=True))
    op.add_column("refunds", sa.Column("failure", sa.Text(), nullable=True))
    op.create_index(
        "inbox_waiting_idx", "inbox", ["tenant_id", "notification_delivery_id", "state"], postgresql_where=sa.text("due_at IS NULL")
    )


def downgrade() -> None:
    op.drop_index("inbox_waiting_idx", table_name="inbox")
    op.drop_column("refunds", "failure")
    op.drop_column("refunds", "writer_id")
    op.drop_column("orders", "checkout_expires_at")
    op.drop_column("orders", "checkout_url")
    op.drop_index("idempotency_keys_key_idx", table_name="idempotency_keys")
    op.drop_index("idempotency_keys_lease_idx", table_name="idempotency_keys")
    op.drop_constraint("idempotency_keys_indeterminate_check", "idempotency_keys")
    op.drop_column("idempotency_keys", "indeterminate_at")
