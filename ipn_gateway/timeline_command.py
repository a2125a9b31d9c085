"""`ipn-gateway timeline`: what happened to an order, drawn for a person."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ipn_gateway import console
from ipn_gateway.options import AsJson, Cursor, Tenant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from ipn_gateway import objects
    from ipn_gateway.db import Database
    from ipn_gateway.settings import Settings

STYLES: Final = {
    "order": "bold",
    "act": "bold magenta",
    "delivery": "cyan",
    "verdict": "yellow",
    "effect": "bold green",
    "payment": "green",
    "refund": "green",
    "event": "blue",
    "event_delivery": "dim blue",
    "attempt": "dim",
    "sweep": "dim",
}
MARGIN: Final = 40  # more than time and kind take
ALARMING: Final = {"held", "conflict", "dead", "rejected", "malformed"}


def timeline(
    order_id: Annotated[str, typer.Argument(metavar="ORDER", help="The order's id.")],
    *,
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many at most, oldest first.")] = 200,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """Draw what happened to an order: deliveries, verdicts, effects, payments, events, attempts and manual acts, oldest first."""
    from ipn_gateway import paging
    from ipn_gateway import timeline as story

    async def read(_: "Settings", db: "Database") -> "objects.Page[objects.TimelineItem]":
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"order {order_id} of the tenant {owner}"):
            async with db.autocommit("orders.timeline") as tx:
                return await story.of(tx, owner, order_id, paging.Wanted(cursor, limit))

    page = console.with_database(read)
    if as_json:
        console.print_json(page)
        return
    _draw(page.items)
    if page.next_cursor:
        typer.echo(f"More: --cursor {page.next_cursor}", err=True)


def _draw(items: "Sequence[objects.TimelineItem]") -> None:
    """One line of the day where it changes, then time, kind and sentence, which wraps on a terminal and not in a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    longest = max((len(item.summary) for item in items), default=0)
    on = Console(highlight=False, width=None if sys.stdout.isatty() else longest + MARGIN)
    drawn = Table.grid(padding=(0, 2))
    for name in ("time", "kind"):
        drawn.add_column(name, no_wrap=True)
    drawn.add_column("summary", overflow="fold")
    day = ""
    for item in items:
        if item.at.date().isoformat() != day:
            day = item.at.date().isoformat()
            drawn.add_row(Text(day, style="bold"), "", "")
        drawn.add_row(Text(f"{item.at:%H:%M:%S}.{item.at.microsecond // 1000:03}", style="dim"), _kind(item), Text(item.summary))
    on.print(drawn)


def _kind(item: "objects.TimelineItem") -> "Text":
    from rich.text import Text

    outcome = (item.model_extra or {}).get("outcome")
    return Text(f"● {item.kind}", style="bold red" if item.kind == "verdict" and outcome in ALARMING else STYLES[item.kind])
