"""The pull: a tenant's events, oldest first, without a gap, so that a subscriber can always catch up. It keeps no state per reader.

PostgreSQL gives no order of commits. A page ends below the oldest transaction that is still writing, so nothing can appear before a cursor
that was given out. Each cursor carries the database's system identifier: after a restore the numbers start anew, and it is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ipn_gateway.errors import StateConflict, ValidationFailed
from ipn_gateway.objects import Event, Page
from ipn_gateway.paging import plain, transaction_id
from ipn_gateway.views import shown_event

if TYPE_CHECKING:
    from ipn_gateway.db import Transaction

_SYSTEM: Final = "SELECT system_identifier::text FROM pg_control_system()"

_PAGE: Final = """
SELECT id, type, order_id, sequence, body, transaction_id::text AS number FROM events
 WHERE tenant_id = %(tenant_id)s AND transaction_id < pg_snapshot_xmin(pg_current_snapshot())
   AND (transaction_id, id) > (%(transaction_id)s::text::xid8, %(id)s)
   AND (%(type)s::text IS NULL OR type = %(type)s) AND (%(order_id)s::text IS NULL OR order_id = %(order_id)s)
 ORDER BY transaction_id, id LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader is: all events up to this transaction and id, of this database."""

    system: str
    transaction_id: str = "0"
    id: str = ""

    def __str__(self) -> str:
        text = json.dumps(["pull", self.system, self.transaction_id, self.id], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read(text: str) -> Cursor:
    """The cursor behind its text. Raises `ValidationFailed` for a text that no pull gave."""
    try:
        kind, system, number, event_id = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        if kind == "pull":
            return Cursor(plain(system), transaction_id(number), plain(event_id))
    except (binascii.Error, ValueError, TypeError, AttributeError, RecursionError):
        pass
    sentence = "The cursor is not one that this list gave; start again without it."
    raise ValidationFailed(sentence, errors=[{"parameter": "after", "detail": sentence}])


async def pull(
    tx: Transaction, tenant_id: str, after: str | None, limit: int, *, event_type: str | None = None, order_id: str | None = None
) -> Page[Event]:
    """At most `limit` events behind the cursor `after`, from the oldest one without it; `next_cursor` is never None.

    Raises `ValidationFailed` for a text that is no cursor, `StateConflict` for a cursor from before a restore.
    """
    system = str(await tx.value(_SYSTEM))
    cursor = read(after) if after is not None else Cursor(system)
    if cursor.system != system:
        raise StateConflict("This cursor is from before the database was restored; start again without it, and deduplicate by event id.")
    filters = {"tenant_id": tenant_id, "type": event_type, "order_id": order_id, "limit": limit}
    rows = await tx.all(dict, _PAGE, filters | {"transaction_id": cursor.transaction_id, "id": cursor.id})
    if rows:
        cursor = Cursor(system, rows[-1]["number"], rows[-1]["id"])
    return Page(items=[shown_event(row) for row in rows], next_cursor=str(cursor))
