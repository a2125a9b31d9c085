"""Retention: up to where events were deleted, so that a pull that missed some is told."""

import sqlalchemy as sa
from alembic import op

from ipn_gateway.models import XID8

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "event_horizons",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("transaction_id", XID8(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("system", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "type"),
    )


def downgrade() -> None:
    op.drop_table("event_horizons")
