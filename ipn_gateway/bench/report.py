"""The table: each finding with its spread and, where it is judged, whether the target is met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from ipn_gateway.bench.comparison import rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipn_gateway.bench.comparison import Found, Result


WIDTH: Final = 120


def table(results: Sequence[Result]) -> Table:
    """Judged findings first in each comparison, as they are declared."""
    drawn = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("comparison", "finding", "median", "spread", "target", ""):
        drawn.add_column(name, justify="right" if name in {"median", "spread", "target"} else "left", no_wrap=True)
    for result in results:
        if result.broken:
            drawn.add_row(Text(result.comparison.name, style="bold"), Text(f"broken: {result.broken}", style="bold red"))
        for number, found in enumerate(result.found):
            drawn.add_row(Text("" if number else result.comparison.name, style="bold"), *_cells(found))
    return drawn


def _cells(found: Found) -> list[str | Text]:
    unit = f" {found.finding.unit}" if found.finding.unit else ""
    spread = f"{_number(min(found.values))} – {_number(max(found.values))}" if len(found.values) > 1 else ""
    met = found.finding.met(found.value)
    said = Text("") if met is None else Text("met", style="green") if met else Text("not met", style="bold red")
    return [found.finding.name, f"{_number(found.value)}{unit}", spread, found.finding.target, said]


def _number(value: float) -> str:
    return f"{rounded(value):,.4g}" if abs(value) < 1000 else f"{rounded(value):,.0f}"  # noqa: PLR2004 - whole numbers are enough then
