"""Outbound: a second signature, the order of events, limited rates, warnings, events by time."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("endpoint_secrets", sa.Column("seed_ciphertext", sa.LargeBinary(), nullable=True))
    op.add_column("endpoint_secrets", sa.Column("public_key", sa.Text(), nullable=True))
    op.add_column("endpoint_states", sa.Column("paced_until", sa.DateTime(timezone=True), nullable=True))
    op.add_column("endpoint_states", sa.Column("warned_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("event_deliveries", sa.Column("sequence", sa.Integer(), nullable=True))
    op.create_index(
        "event_deliveries_sequence_idx",
        "event_deliveries",
        ["tenant_id", "endpoint_id", "order_id", "sequence"],
        postgresql_where=sa.text("status = 'pending' AND sequence IS NOT NULL"),
    )
    op.create_index("events_created_idx", "events", ["tenant_id", "created_at", "id"])


def downgrade() -> None:
    op.drop_index("events_created_idx", table_name="events")
    op.drop_index("event_deliveries_sequence_idx", table_name="event_deliveries")
    op.drop_column("event_deliveries", "sequence")
    op.drop_column("endpoint_states", "warned_at")
    op.drop_column("endpoint_states", "paced_until")
    op.drop_column("endpoint_secrets", "public_key")
    op.drop_column("endpoint_secrets", "seed_ciphertext")
