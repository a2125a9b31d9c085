"""`ipn-gateway retention`: what is past its time, and an end of it now instead of in ten minutes."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel

from ipn_gateway import console
from ipn_gateway.options import AsJson

if TYPE_CHECKING:
    from ipn_gateway.db import Database
    from ipn_gateway.old_partitions import Partition
    from ipn_gateway.retention import Windows
    from ipn_gateway.settings import Settings

COLUMNS = ("what", "then", "oldest_at", "rows", "bytes", "why")


class PastItem(BaseModel):
    """Something past its time: what becomes of it (`drop`, `delete` or `keep`), how much it is about, its oldest, and why it is kept."""

    table: str
    what: str
    then: str
    oldest_at: datetime | None
    rows: int
    bytes: int
    why: str | None = None


def retention(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what is past its time, and what becomes of it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop and delete what is past its time, as the maintenance role does every ten minutes.

    It cannot be undone: look with --dry-run first when a window was made shorter. Rows and bytes of partitions are the database's
    estimates. What still waits for somebody is kept, whatever its age.
    """
    from ipn_gateway.retention import Windows

    async def run(chosen: "Settings", db: "Database") -> dict[str, Any]:
        windows = Windows.of(chosen)
        return await (_would(db, windows) if dry_run else _does(db, windows))

    found = console.with_database(run)
    if as_json:
        console.print_json({"dry_run": dry_run, **found})
    elif not dry_run:
        console.say(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found.items()))
    elif found["items"]:
        console.table([PastItem(**item) for item in found["items"]], COLUMNS, None, as_json=False)
    else:
        console.say("Nothing is past its time.")


async def _would(db: "Database", windows: "Windows") -> dict[str, Any]:
    from ipn_gateway import idempotency_acts, pruning

    late, past = await pruning.overdue(db, windows)
    events = await pruning.events_past(db, windows)
    items = [_partition(partition, "drop") for partition in past.droppable]
    items += [_partition(partition, "keep", "a notification in it still waits") for partition in past.kept]
    if events.events:
        what = f"events, with {events.event_deliveries} deliveries"
        items.append(
            PastItem(table="events", what=what, then="delete", oldest_at=events.oldest_at, rows=events.events, bytes=events.size_bytes)
        )
    if events.kept:
        why = "still to be delivered, or about what still waits"
        items.append(PastItem(table="events", what="events", then="keep", oldest_at=None, rows=events.kept, bytes=0, why=why))
    if keys := await idempotency_acts.expired(db):
        items.append(PastItem(table="idempotency_keys", what="idempotency keys", then="delete", oldest_at=None, rows=keys, bytes=0))
    return {"items": [item.model_dump(mode="json") for item in items], "overdue_seconds": {each.table: each.seconds for each in late}}


def _partition(partition: "Partition", then: str, why: str | None = None) -> PastItem:
    return PastItem(
        table=partition.table,
        what=partition.name,
        then=then,
        oldest_at=partition.begins_at,
        rows=partition.rows,
        bytes=partition.size_bytes,
        why=why,
    )


async def _does(db: "Database", windows: "Windows") -> dict[str, Any]:
    from ipn_gateway import idempotency_acts, pruning

    pruner, keys = pruning.Pruner(db, windows), 0
    while await pruner.run_once():
        pass
    while count := await idempotency_acts.prune(db):
        keys += count
    return asdict(pruner.total) | {"idempotency_keys": keys}
