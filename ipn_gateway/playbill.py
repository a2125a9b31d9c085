"""What the demo looks like: a table while it runs, on a terminal; lines elsewhere; and the summary."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from ipn_gateway.simulator.sender import Sender
    from ipn_gateway.simulator.subscriber import Subscriber
    from ipn_gateway.stories import Scene
    from ipn_gateway.tally import Summary

REFRESH_SECONDS: Final = 0.2
LINE_SECONDS: Final = 2.0
SHOWN_MAX: Final = 40
COLOURS: Final = {"paid": "green", "paid_on_hold": "yellow", "failed": "red", "cancelled": "red", "expired": "red"}


class Playbill:
    """Shows what the subscriber has heard of each order. `quiet` shows nothing."""

    def __init__(self, scenes: Sequence[Scene], sender: Sender, subscriber: Subscriber, console: Console, *, quiet: bool) -> None:
        self._scenes = scenes
        self._sender = sender
        self._subscriber = subscriber
        self._console = console
        self._quiet = quiet

    async def watch(self) -> None:
        """Show it until cancelled, and once more then."""
        if self._quiet:
            return
        if not self._console.is_terminal:
            await self._watch_in_lines()
            return
        with Live(self.table(), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    await asyncio.sleep(REFRESH_SECONDS)
                    live.update(self.table(), refresh=True)
            finally:
                live.update(self.table(), refresh=True)

    async def _watch_in_lines(self) -> None:
        shown = ""
        while True:
            if (line := self._progress()) != shown:
                self._console.print(line, highlight=False, soft_wrap=True)
                shown = line
            await asyncio.sleep(LINE_SECONDS)

    def table(self) -> Table:
        """The orders, as far as they fit: what happens to each, and what the subscriber has heard of it."""
        heard = self._heard()
        table = Table(caption=self._progress(), box=None, pad_edge=False, caption_justify="left")
        for column in ("order", "BDT", "what happens to it", "the subscriber heard"):
            table.add_column(column, justify="right" if column == "BDT" else "left", no_wrap=True)
        for scene in self._scenes[:SHOWN_MAX]:
            statuses = [status for _, status in sorted(heard.get(scene.order_id, []))]
            said = Text(" → ").join(Text(status, COLOURS.get(status, "")) for status in statuses)
            table.add_row(scene.order_id, f"{scene.amount:.2f}", scene.story.value, said)
        if len(self._scenes) > SHOWN_MAX:
            table.add_row("…", "", f"and {len(self._scenes) - SHOWN_MAX} more", "")
        return table

    def _heard(self) -> dict[str, list[tuple[int, str]]]:
        """The statuses of each order with their sequence."""
        heard: dict[str, list[tuple[int, str]]] = {}
        for event in self._subscriber.received.events:
            data: Any = event["data"]
            if "sequence" in data:
                heard.setdefault(data["order_id"], []).append((data["sequence"], data["status"]))
        return heard

    def _progress(self) -> str:
        counts, received = self._sender.counts, self._subscriber.received
        sent = counts.sent + counts.duplicates + counts.forged.total()
        return (
            f"{sent} notifications sent, {counts.forged.total()} of them forged · "
            f"{received.unique} events at the subscriber, {received.duplicates} of them more than once"
        )


SUMMARY: Final[Mapping[str, str]] = {
    "payments": "payments at the provider",
    "applied": "applied, each once",
    "orders_paid": "orders paid",
    "events": "events order.paid",
    "events_delivered": "delivered and verified",
    "lost": "lost",
    "doubled": "doubled",
    "notifications_sent": "notifications sent",
    "notifications_stored": "stored before they were answered",
    "duplicates": "ended as duplicates",
    "stale": "too late to change anything",
    "forgeries_sent": "forgeries",
    "forgeries_applied": "forgeries believed",
    "found_by_sweep": "payments found without a notification",
    "orders_on_hold": "orders on hold for a person",
    "event_repeats": "events sent again, same id and bytes",
    "amount_booked": "BDT booked",
}


def print_summary(console: Console, summary: Summary, wrong: Sequence[str]) -> None:
    """The numbers, then whether the three accounts agree."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right")
    for name, words in SUMMARY.items():
        table.add_row(str(getattr(summary, name)), words)
    console.print()
    console.print(table)
    console.print()
    if wrong:
        for sentence in wrong:
            console.print(sentence, style="bold red", highlight=False)
    else:
        console.print("Provider, gateway and subscriber agree: no payment lost, none doubled, no forgery believed.", style="bold green")
