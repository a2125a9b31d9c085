"""Positions in the log of events, which only grow: in a database that was restored into another cluster as well.

The position of an event is the number of the transaction that wrote it, plus an offset that is kept beside the system identifier of
the cluster in which it holds. What is below the number of the oldest transaction that still writes, plus the same offset, is complete.
The numbers of another cluster mean nothing here. So each start looks, and sets the offset in a new cluster so that every position to
come is above all that are there. Then the log is in its old order, visible, and goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psycopg import errors as pg

from ipn_gateway import logs
from ipn_gateway.errors import ConfigurationError

if TYPE_CHECKING:
    from ipn_gateway.db import Database

HORIZON: Final = "(SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint + xid_offset FROM event_log)"
"""SQL for the position below which all events are committed and seen by this statement."""

SERVER: Final = "(SELECT system_identifier::text FROM pg_control_system())"
"""SQL for the identifier of the cluster: an initdb makes one, a copy of the files has the same."""

# Tenant by tenant through `events_pull_idx`, since each start asks.
_LAST: Final = """
WITH RECURSIVE owners AS (
    (SELECT tenant_id FROM events ORDER BY tenant_id LIMIT 1)
    UNION ALL
    SELECT (SELECT e.tenant_id FROM events AS e WHERE e.tenant_id > owners.tenant_id ORDER BY e.tenant_id LIMIT 1)
      FROM owners WHERE owners.tenant_id IS NOT NULL
)
SELECT greatest(
    max((SELECT e.position FROM events AS e WHERE e.tenant_id = owners.tenant_id ORDER BY e.position DESC, e.id DESC LIMIT 1)),
    (SELECT max(greatest(h.position, h.deleted_by)) FROM event_horizons AS h), 0)
  FROM owners
"""

# The second half is for a cluster with the same identifier whose numbers are lower: a newer dump in an older copy of the files.
_CONTINUED: Final = f"""
SELECT l.system = {SERVER} AND ({_LAST}) < pg_snapshot_xmax(pg_current_snapshot())::text::bigint + l.xid_offset FROM event_log AS l
"""

_CONTINUE: Final = f"""
UPDATE event_log SET system = {SERVER}, xid_offset = ({_LAST}) + 1 - pg_snapshot_xmin(pg_current_snapshot())::text::bigint
"""


async def ensure_continued(db: Database) -> bool:
    """See to it that new positions are above all that are there; whether that needed anything. Safe to run at once anywhere.

    Nothing may be written to the log of a restored database before this is done: who comes first locks out writers, and waits for
    those that are at work. Raises `ConfigurationError` when one of them does not end.
    """
    async with db.autocommit("event_log.look") as tx:
        if await tx.value(_CONTINUED):
            return False
    try:
        return bool(await db.rerun(_continue, db))
    except pg.LockNotAvailable:
        raise ConfigurationError("The database was restored, and somebody writes to it: stop every process of the gateway first.") from None


async def _continue(db: Database) -> bool:
    async with db.transaction("event_log.continue") as tx:
        await tx.execute("LOCK TABLE events IN SHARE ROW EXCLUSIVE MODE")
        if await tx.value(_CONTINUED):
            return False  # another process was first
        await tx.execute(_CONTINUE)
    logs.get("event_log").info("event_log.continued")
    return True
