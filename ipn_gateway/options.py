"""Options that several commands have, and groups of commands."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Tenant = Annotated[str | None, typer.Option(help="The tenant; by default the only one.")]
Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all of them.")]
Limit = Annotated[int, typer.Option(min=1, max=200, help="How many at most, newest first.")]
Cursor = Annotated[str | None, typer.Option(help="`next_cursor` of the page before.")]


def group(help_text: str) -> typer.Typer:
    """A group of commands; without one of them it shows its help."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
