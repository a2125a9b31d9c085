"""The pull: a tenant's events, oldest first, without a gap, so that a subscriber can always catch up. It keeps no state per reader.

PostgreSQL gives no order of commits. A page ends below the oldest transaction that is still writing anywhere on the server, so nothing can
appear before a cursor that was given out; `lag_seconds` says what that holds back. A cursor names the database and the event that it stands
at. Where that event is not at its place, the reader has read what a restore forgot, and is sent back to the beginning. So is one behind
whose cursor events were deleted after their retention since it was given: who reads on from there would miss them and not know.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.errors import Overloaded, StateConflict, ValidationFailed
from ipn_gateway.event_log import HORIZON, SERVER
from ipn_gateway.objects import EventPage
from ipn_gateway.paging import plain
from ipn_gateway.views import shown_event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.db import Transaction

PRUNED: Final = (
    "a cursor behind which events were deleted is answered 409 state-conflict: start again without it, and deduplicate by event id; "
    "a pull of one order's events shows those that are kept"
)

_CREATED: Final = "(extract(epoch FROM e.created_at) * 1000000)::bigint"

# One statement, so one moment: what is deleted while it runs is all there or is told. An event that was deleted as the last of its type is
# where the cursor says, too. A deletion counts when the page that gave the cursor may have shown what it deleted; not where it was over
# before, so that whoever begins again gets on, past events that are kept among deleted ones.
_PULL: Final = f"""
WITH log AS MATERIALIZED (SELECT system, {SERVER} AS server, {HORIZON} AS horizon FROM event_log)
SELECT log.server, log.system = log.server AS continued, log.horizon, coalesce(hidden.seconds, 0) AS lag_seconds,
       newest.position AS newest_position, newest.id AS newest_id, newest.created AS newest_created, page.*,
       EXISTS (SELECT FROM events AS e
                WHERE e.tenant_id = %(tenant_id)s AND e.id = %(id)s AND e.position = %(position)s::bigint
                  AND {_CREATED} = %(created)s::bigint)
       OR EXISTS (SELECT FROM event_horizons AS h
                   WHERE h.tenant_id = %(tenant_id)s AND h.event_id = %(id)s AND h.position = %(position)s::bigint) AS known,
       EXISTS (SELECT FROM event_horizons AS h
                WHERE h.tenant_id = %(tenant_id)s AND (%(type)s::text IS NULL OR h.type = %(type)s)
                  AND (h.position, h.event_id) > (%(position)s::bigint, %(id)s) AND h.deleted_by >= %(horizon)s::bigint) AS missed
  FROM log
  LEFT JOIN LATERAL (
    SELECT greatest(0, extract(epoch FROM ipn_now() - e.created_at))::float8 AS seconds FROM events AS e
     WHERE e.tenant_id = %(tenant_id)s AND e.position >= log.horizon ORDER BY e.position, e.id LIMIT 1) AS hidden ON true
  LEFT JOIN LATERAL (
    SELECT e.position, e.id, {_CREATED} AS created FROM events AS e
     WHERE e.tenant_id = %(tenant_id)s AND e.position < log.horizon ORDER BY e.position DESC, e.id DESC LIMIT 1) AS newest ON true
  LEFT JOIN LATERAL (
    SELECT e.id, e.type, e.order_id, e.sequence, e.body, e.position, {_CREATED} AS created FROM events AS e
     WHERE e.tenant_id = %(tenant_id)s AND e.position < log.horizon AND (e.position, e.id) > (%(position)s::bigint, %(id)s)
       AND (%(type)s::text IS NULL OR e.type = %(type)s) AND (%(order_id)s::text IS NULL OR e.order_id = %(order_id)s)
     ORDER BY e.position, e.id LIMIT %(limit)s) AS page ON true
 ORDER BY page.position, page.id
"""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader is: all events up to this one, of this database. `horizon` is the position up to which it was looked then."""

    system: str = ""
    position: int = 0
    id: str = ""  # none: before the first one
    created: int = 0  # microseconds since 1970
    horizon: int = 0

    def __str__(self) -> str:
        text = json.dumps(["pull", self.system, self.position, self.id, self.created, self.horizon], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read(text: str) -> Cursor:
    """The cursor behind its text. Raises `ValidationFailed` for a text that no pull gave."""
    try:
        parts = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        kind, system, position, event_id, created, horizon = parts
        if kind == "pull":
            return Cursor(plain(system), _number(position), plain(event_id), _number(created), _number(horizon))
    except (binascii.Error, ValueError, TypeError, AttributeError, RecursionError):
        pass
    sentence = "The cursor is not one that this list gave; start again without it."
    raise ValidationFailed(sentence, errors=[{"parameter": "after", "detail": sentence}])


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a number of 63 bits is needed")
    return value


async def pull(
    tx: Transaction, tenant_id: str, after: str | None, limit: int, *, event_type: str | None = None, order_id: str | None = None
) -> EventPage:
    """At most `limit` events behind the cursor `after`, from the oldest one without it.

    `next_cursor` is never None: after a page that is not full it stands at the tenant's newest event that can be shown, of whatever type,
    so that no later page looks at those in between again.

    Raises `ValidationFailed` for a text that is no cursor; `StateConflict` for a cursor that a restore has made wrong, and for one behind
    which events (of this type, if one is asked for) were deleted after their retention; `Overloaded` when the database was restored under
    a running process, which has to be started again.
    """
    cursor = Cursor() if after is None else read(after)
    place = {"position": cursor.position, "id": cursor.id, "created": cursor.created, "horizon": cursor.horizon}
    rows = await tx.all(dict, _PULL, {"tenant_id": tenant_id, "type": event_type, "order_id": order_id, "limit": limit} | place)
    if not (rows and rows[0]["continued"]):
        raise Overloaded("The database was restored while the gateway ran; its processes have to be started again.")
    first, found = rows[0], [row for row in rows if row["id"] is not None]
    if after is not None:
        _refuse(cursor, first, whole_log=order_id is None)
    last = _last(cursor, first, found[-1] if len(found) == limit else None)
    return EventPage(items=[shown_event(row) for row in found], next_cursor=str(last), lag_seconds=round(first["lag_seconds"], 3))


def _refuse(cursor: Cursor, log: Mapping[str, Any], *, whole_log: bool) -> None:
    if cursor.system != log["server"]:
        why = "This cursor is from before the database was restored"
    elif whole_log and log["missed"]:
        why = "Events behind this cursor were deleted after their retention"
    elif cursor.id and not log["known"]:
        why = "The event that this cursor stands at is gone: the database was restored, or it was deleted after its retention"
    else:
        return
    raise StateConflict(f"{why}; start again without it, and deduplicate by event id.")


def _last(cursor: Cursor, log: Mapping[str, Any], shown: Mapping[str, Any] | None) -> Cursor:
    """Where the reader stands now; as before, when nothing is new."""
    if shown:
        return Cursor(log["server"], shown["position"], shown["id"], shown["created"], log["horizon"])
    if log["newest_id"] not in {None, cursor.id} and log["newest_position"] >= cursor.position:
        return Cursor(log["server"], log["newest_position"], log["newest_id"], log["newest_created"], log["horizon"])
    return cursor if cursor.system else replace(cursor, system=log["server"], horizon=log["horizon"])
