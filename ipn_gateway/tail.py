"""`ipn-gateway tail`: what comes in and what goes out, as it happens.

Rows are found by their ids, which are ordered by time: each look reads what is younger than the youngest row seen before, less a few
seconds, because a row with an older id may be committed later. What was shown as `received` is looked at again until it is decided.
"""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from ipn_gateway import console, ids
from ipn_gateway.objects import show_time
from ipn_gateway.options import Tenant

if TYPE_CHECKING:
    from ipn_gateway.db import Database

EVERY_SECONDS: Final = 0.5
LATE_SECONDS: Final = 10
OPEN_MAX: Final = 1000
"""How many undecided notification deliveries are watched at once; of more, the oldest are not looked at again."""

_INBOUND: Final = """
SELECT 'in' AS direction, id, received_at AS at, source_id AS source, order_id, asserted_status AS said, outcome, reason
  FROM notification_deliveries
 WHERE tenant_id = %(tenant_id)s AND (id > %(after)s OR id = ANY(%(open)s))
   AND (%(source)s::text IS NULL OR source_id = %(source)s) AND (%(order_id)s::text IS NULL OR order_id = %(order_id)s)
 ORDER BY id
"""
_OUTBOUND: Final = """
SELECT 'out' AS direction, a.id, a.started_at AS at, e.source_id AS source, d.order_id, d.event_type AS said, a.outcome,
       coalesce(a.status_code::text, a.error) AS reason
  FROM delivery_attempts AS a
  JOIN event_deliveries AS d ON d.tenant_id = a.tenant_id AND d.id = a.event_delivery_id
  LEFT JOIN orders AS e ON e.tenant_id = d.tenant_id AND e.order_id = d.order_id
 WHERE a.tenant_id = %(tenant_id)s AND a.id > %(after)s
   AND (%(source)s::text IS NULL OR e.source_id = %(source)s) AND (%(order_id)s::text IS NULL OR d.order_id = %(order_id)s)
 ORDER BY a.id
"""
_NEWEST: Final = {
    "in": "SELECT id FROM notification_deliveries WHERE tenant_id = %(tenant_id)s ORDER BY id DESC LIMIT 1",
    "out": "SELECT id FROM delivery_attempts WHERE tenant_id = %(tenant_id)s ORDER BY id DESC LIMIT 1",
}
_PREFIX: Final = {"in": ids.NOTIFICATION_DELIVERY, "out": ids.ATTEMPT}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is shown. `directions` is one or both of in and out; a filter that is None is none."""

    tenant_id: str
    directions: Sequence[str]
    source: str | None = None
    outcome: str | None = None
    order_id: str | None = None


@dataclass(slots=True)
class Tail:
    """What was shown so far, and where to look on."""

    wanted: Wanted
    after: dict[str, UUID] = field(default_factory=dict)
    shown: dict[UUID, str] = field(default_factory=dict)

    async def begin(self, db: "Database") -> None:
        """From now on: what is there already is not shown."""
        for direction in self.wanted.directions:
            self.after[direction] = await self._newest(db, direction) or UUID(int=0)

    async def look(self, db: "Database") -> list[dict[str, Any]]:
        """What is new, or was decided, since the last look; oldest first."""
        found: list[dict[str, Any]] = []
        for direction in self.wanted.directions:
            newest = await self._newest(db, direction)
            found += self._fresh(await self._rows(db, direction))
            if newest is not None:
                self.after[direction] = max(self.after[direction], _earlier(newest))
        self._forget()
        return [row for row in sorted(found, key=lambda row: row["at"]) if self.wanted.outcome in {None, row["outcome"]}]

    async def _rows(self, db: "Database", direction: str) -> Sequence[dict[str, Any]]:
        undecided = [key for key, outcome in self.shown.items() if outcome in {"received", "parked"}]
        given = {"tenant_id": self.wanted.tenant_id, "source": self.wanted.source, "order_id": self.wanted.order_id}
        async with db.autocommit("tail.look") as tx:
            return await tx.all(
                dict, _INBOUND if direction == "in" else _OUTBOUND, {**given, "after": self.after[direction], "open": undecided[-OPEN_MAX:]}
            )

    async def _newest(self, db: "Database", direction: str) -> UUID | None:
        async with db.autocommit("tail.newest") as tx:
            found: UUID | None = await tx.value(_NEWEST[direction], {"tenant_id": self.wanted.tenant_id})
            return found

    def _fresh(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        fresh = [row for row in rows if self.shown.get(row["id"]) != row["outcome"]]
        self.shown |= {row["id"]: row["outcome"] for row in fresh}
        return fresh

    def _forget(self) -> None:
        oldest = min(self.after.values())
        self.shown = {key: outcome for key, outcome in self.shown.items() if key > oldest or outcome in {"received", "parked"}}


def _earlier(newest: UUID) -> UUID:
    """The smallest id of `LATE_SECONDS` before: the first 48 bits of a UUIDv7 are milliseconds (RFC 9562 section 5.7)."""
    milliseconds = max(0, (newest.int >> 80) - LATE_SECONDS * 1000)
    return UUID(int=milliseconds << 80)


def line(row: dict[str, Any], *, as_json: bool) -> str:
    """One row as it is printed."""
    shown = {**row, "id": ids.show(_PREFIX[row["direction"]], row["id"]), "at": show_time(row["at"])}
    if as_json:
        return json.dumps(shown, ensure_ascii=False)
    arrow = "→" if row["direction"] == "in" else "←"
    texts = (shown["at"], arrow, shown["id"], row["source"], row["order_id"], row["said"], row["outcome"], row["reason"])
    return "  ".join("-" if text is None else str(text) for text in texts)


def tail(
    *,
    tenant: Tenant = None,
    only: Annotated[str | None, typer.Option(help="in: what providers post; out: what is sent to endpoints.")] = None,
    source: Annotated[str | None, typer.Option(help="The source that it came by, or that its order belongs to.")] = None,
    outcome: Annotated[str | None, typer.Option(help="applied, rejected, …; of an attempt delivered, refused, …")] = None,
    order: Annotated[str | None, typer.Option(help="The order that it names.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each as a JSON object on a line of its own.")] = False,
) -> None:
    """Show notifications and attempts as they happen, until ^C.

    A notification has a line when it arrives and one when it is decided; an attempt to bring an event to an endpoint has one.
    """
    if only not in {None, "in", "out"}:
        raise typer.BadParameter("give in or out.", param_hint="--only")
    chosen = console.this_process()
    from ipn_gateway.serving import Signals

    async def run() -> None:
        signals = Signals()
        with signals.handled():
            async with console.database(chosen) as (_, db):
                owner = await console.tenant(db, tenant)
                wanted = Wanted(owner, (only,) if only else ("in", "out"), source, outcome, order)
                await follow(db, wanted, signals.asked, as_json=as_json)

    with suppress(asyncio.CancelledError):
        asyncio.run(run())


async def follow(db: "Database", wanted: Wanted, asked: asyncio.Event, *, as_json: bool) -> None:
    """Print what is new until `asked` to stop. Each direction costs two short reads by primary key a look."""
    tailing = Tail(wanted)
    await tailing.begin(db)
    typer.echo(f"Following {' and '.join(wanted.directions)} of the tenant {wanted.tenant_id}; ^C ends.", err=True)
    while not asked.is_set():
        for row in await tailing.look(db):
            console.say(line(row, as_json=as_json))
        with suppress(TimeoutError):
            async with asyncio.timeout(EVERY_SECONDS):
                await asked.wait()
