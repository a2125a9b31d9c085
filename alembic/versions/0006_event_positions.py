"""Positions in the log of events: they go on where they were after a restore into another cluster, whose transactions begin anew."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# Without the row of `event_log` no event is written.
EVENT_POSITION = """
CREATE FUNCTION event_position() RETURNS bigint LANGUAGE sql
BEGIN ATOMIC SELECT pg_current_xact_id()::text::bigint + xid_offset FROM event_log; END
"""


def upgrade() -> None:
    op.create_table(
        "event_log",
        sa.Column("is_only", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("system", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("xid_offset", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint("is_only", name="event_log_is_only_check"),
        sa.PrimaryKeyConstraint("is_only"),
    )
    op.execute("INSERT INTO event_log DEFAULT VALUES")
    op.execute(EVENT_POSITION)
    op.execute("ALTER TABLE events ALTER transaction_id DROP DEFAULT, ALTER transaction_id TYPE bigint USING transaction_id::text::bigint")
    op.alter_column("events", "transaction_id", new_column_name="position", server_default=sa.text("event_position()"))

    op.execute("DELETE FROM event_horizons WHERE system <> (SELECT system_identifier::text FROM pg_control_system())")
    op.drop_column("event_horizons", "system")
    op.execute("ALTER TABLE event_horizons ALTER transaction_id TYPE bigint USING transaction_id::text::bigint")
    op.alter_column("event_horizons", "transaction_id", new_column_name="position")
    op.add_column("event_horizons", sa.Column("deleted_by", sa.BigInteger(), nullable=True))
    op.execute("UPDATE event_horizons SET deleted_by = event_position()")
    op.alter_column("event_horizons", "deleted_by", nullable=False)


def downgrade() -> None:
    op.drop_column("event_horizons", "deleted_by")
    op.alter_column("event_horizons", "position", new_column_name="transaction_id")
    op.execute("ALTER TABLE event_horizons ALTER transaction_id TYPE xid8 USING transaction_id::text::xid8")
    op.add_column("event_horizons", sa.Column("system", sa.Text(), nullable=True))
    op.execute("UPDATE event_horizons SET system = (SELECT system_identifier::text FROM pg_control_system())")
    op.alter_column("event_horizons", "system", nullable=False)

    op.alter_column("events", "position", new_column_name="transaction_id", server_default=None)
    op.execute("ALTER TABLE events ALTER transaction_id TYPE xid8 USING transaction_id::text::xid8")
    op.execute("ALTER TABLE events ALTER transaction_id SET DEFAULT pg_current_xact_id()")
    op.execute("DROP FUNCTION event_position()")
    op.drop_table("event_log")
