"""`ipn-gateway bench`: measures the gateway beside the limit of the machine and beside what a user would pick instead."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ipn_gateway import console, logs
from ipn_gateway.errors import ConfigurationError, GatewayError
from ipn_gateway.options import AsJson

if TYPE_CHECKING:
    from ipn_gateway.bench.comparison import Comparison

NEEDED = ("greenlet", "pgqueuer", "procrastinate")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "bench",
        short_help="Measure its speed, on a database of its own.",
        epilog="""\b
        Examples:
          ipn-gateway bench --quick
          ipn-gateway bench --only limit --only outbound --json
        """,
    )(bench)


class BenchStopped(GatewayError):
    """Stopped before the end; what was started is ended and removed."""


def bench(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows and turns: 5 minutes on two processors instead of 30.")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="One comparison; may be given again.")] = None,
    count: Annotated[int | None, typer.Option(min=8, help="Notifications a measurement, for trying it out; times scale with it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed by ratios, on a database and with processes of its own, and compare them with the targets.

    Each comparison checks what it measured: all accepted is applied once and delivered once. A target that is missed is told, and the
    exit code stays 0; it is 1 when a run is broken. Needs the extra `bench`. It never touches IPN_DATABASE_URL.
    """
    import uvloop
    from rich.console import Console

    from ipn_gateway.bench import report, runner, stage

    logs.configure(level="ERROR")
    chosen = _chosen(only or [])
    size = stage.tiny(count) if count else stage.QUICK if quick else stage.FULL
    progress, began = Console(stderr=True, highlight=False, soft_wrap=True), time.monotonic()
    try:
        results = uvloop.run(
            runner.run(chosen, size, lambda line: progress.print(f"{time.monotonic() - began:6.0f} s  {line}", style="dim"))
        )
    except asyncio.CancelledError:
        raise BenchStopped from None
    shown = runner.report(results, size, time.monotonic() - began)
    Console(stderr=as_json, width=report.WIDTH).print(report.table(results))
    if as_json:
        console.print_json(shown)
    if not shown["ok"]:
        raise typer.Exit(console.FAILED)


def _chosen(names: list[str]) -> "list[Comparison]":
    from importlib.util import find_spec

    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigurationError(f"{missing[0]} is not installed; it comes with the extra `bench`: pip install 'ipn-gateway[bench]'.")
    from ipn_gateway.bench.comparisons import CATALOGUE

    if unknown := [name for name in names if name not in CATALOGUE]:
        raise typer.BadParameter(f"{unknown[0]} is none; there are {', '.join(CATALOGUE)}.", param_hint="--only")
    return [CATALOGUE[name] for name in names or CATALOGUE]
