"""Redeliveries apart from the schedule, also while an attempt runs; and an index of what is being sent, which is counted at each claim."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("event_deliveries", sa.Column("redelivery_count", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("event_deliveries", sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("event_deliveries", sa.Column("asked_again", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_index(
        "event_deliveries_leased_idx",
        "event_deliveries",
        ["tenant_id", "endpoint_id", "lease_expires_at"],
        postgresql_where=sa.text("lease_expires_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("event_deliveries_leased_idx", table_name="event_deliveries")
    op.drop_column("event_deliveries", "asked_again")
    op.drop_column("event_deliveries", "scheduled_at")
    op.drop_column("event_deliveries", "redelivery_count")
