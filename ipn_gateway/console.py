"""What the commands share: the process's settings, the database, and printing. Data goes to standard output, the rest to standard error."""
# ruff: noqa: PLC0415 - what takes long to import is imported when a command needs it, so that --help answers at once

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from pydantic import BaseModel
from typer import echo

from ipn_gateway import logs, settings
from ipn_gateway.errors import ConfigurationError, GatewayError, NotFound, ValidationFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from ipn_gateway.db import Database
    from ipn_gateway.settings import Settings
    from ipn_gateway.transport import Transport
    from ipn_gateway.vault import Vault

T = TypeVar("T")

FAILED: Final = 1
WRONG_USE: Final = 2
PUBLIC_URL: Final = "http://127.0.0.1:8000"
"""Where `serve` listens when it is not told otherwise."""

TENANTS_NAMED_MAX: Final = 10
GAP: Final = "  "
CELL_MIN: Final = 6

PARTS: Final = {
    "payments": ("amount", "currency", "status", "paid_at", "provider_transaction_id", "payment_id"),
    "refunds": ("amount", "currency", "status", "created_at", "reference", "refund_id"),
    "attempts": ("number", "trigger", "started_at", "outcome", "status_code", "error"),
    "secrets": ("id", "public_key", "created_at", "expires_at"),
    "checks": ("check", "status", "detail", "duration_ms"),
}
"""What an object may have several of, and the columns that tell a person about them; --json has the rest."""

PIPE_WIDTH: Final = 10_000
"""More than any line takes."""


def this_process(*, level: str = "WARNING") -> Settings:
    """The settings of this process; logs are written from `level` on, and names that mean nothing are warned about.

    Raises `ConfigurationError`.
    """
    logs.configure(level=level)
    for unknown in settings.unknown_names():
        echo(f"ipn-gateway: warning: {unknown} is no setting, so it has no effect; is the name spelled right?", err=True)
    return settings.load()


@asynccontextmanager
async def database(chosen: Settings, *, prepared: bool = True) -> AsyncIterator[tuple[str, Database]]:
    """The database and its URL, beside a running `serve` or without one.

    Unless `prepared` is False an embedded one is migrated, and a given one that is not is refused with `ConfigurationError`.
    """
    from ipn_gateway import runtime
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults

    async with runtime.server_url(chosen) as url, Database(url, clock=Clock(), faults=Faults(), name="command", connections_max=2) as db:
        if prepared:
            await runtime.prepare(url, chosen, db, migrate=False)
        yield url, db


def with_database(work: Callable[[Settings, Database], Awaitable[T]]) -> T:
    """Do one thing with this process's settings and database, and close it."""
    chosen = this_process()

    async def run() -> T:
        async with database(chosen) as (_, db):
            return await work(chosen, db)

    return asyncio.run(run())


async def tenant(db: Database, given: str | None) -> str:
    """The tenant that is meant. Raises `ValidationFailed` when none is given and there are several, `ConfigurationError` when none is."""
    if given is not None:
        return given
    async with db.autocommit("tenants.only") as tx:
        rows = await tx.all(dict, "SELECT id FROM tenants ORDER BY id LIMIT %(limit)s", {"limit": TENANTS_NAMED_MAX})
    names = [row["id"] for row in rows]
    if not names:
        raise ConfigurationError("There is no tenant yet; make one with `ipn-gateway keys create --tenant NAME`.")
    if len(names) > 1:
        raise ValidationFailed(f"Say whose with --tenant: {', '.join(names)}{', …' if len(names) == TENANTS_NAMED_MAX else ''}.")
    return str(names[0])


def vault(chosen: Settings) -> Vault:
    """What seals secrets. Raises `ConfigurationError`."""
    from ipn_gateway import vault as vaults

    return vaults.load_or_make(chosen.data_dir, chosen)


@asynccontextmanager
async def transport(chosen: Settings) -> AsyncIterator[Transport]:
    """The way out to endpoints, as a running `serve` has it."""
    from ipn_gateway.db import assert_no_transaction
    from ipn_gateway.faults import Faults
    from ipn_gateway.transport import Transport

    async with Transport(chosen, Faults(), assert_no_transaction=assert_no_transaction) as opened:
        yield opened


def public_url(chosen: Settings) -> str:
    """Where providers reach the service: as set, else as the last `serve` on this data directory had it, else `serve`'s own default."""
    return (_known_url(chosen) or PUBLIC_URL).rstrip("/")


def _known_url(chosen: Settings) -> str | None:
    from ipn_gateway import runtime

    return chosen.public_url or runtime.remembered_url(chosen)


def own_up_to_guess(chosen: Settings) -> None:
    """Say on standard error that listener URLs were made from `serve`'s own default, when nothing better is known."""
    if not _known_url(chosen):
        echo(f"ipn-gateway: warning: listener_url is a guess, made from {PUBLIC_URL}; set IPN_PUBLIC_URL as serve has it.", err=True)


@contextlib.contextmanager
def looking_for(what: str) -> Iterator[None]:
    """Says what was not found."""
    try:
        yield
    except NotFound:
        raise NotFound(f"There is no {what}.") from None


# --- printing


def print_json(data: BaseModel | Mapping[str, Any]) -> None:
    """One JSON object on one line."""
    echo(data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, ensure_ascii=False))


def show(found: BaseModel, *, as_json: bool) -> None:
    """One object: as JSON, or its members that say something, one a line, and what it has several of in a table below."""
    if as_json:
        print_json(found)
        return
    members = {name: value for name, value in found.model_dump(mode="json").items() if value not in (None, [], {})}
    several = {name: members.pop(name) for name in PARTS if isinstance(members.get(name), list)}
    width = max(map(len, members))
    for name, value in members.items():
        echo(f"{name:<{width}}  {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    for name, parts in several.items():
        echo(f"\n{name}:")
        _echo_parts(parts, [column for column in PARTS[name] if any(part[column] is not None for part in parts)])


def _echo_parts(parts: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A table in which nothing is cut off: what is too wide for the terminal goes on in the next line, in its column."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="none")
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column in {"amount", "currency", "status"})
    for part in parts:
        drawn.add_row(*("" if part[column] is None else str(part[column]) for column in columns))
    Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(drawn)


def say(line: str) -> None:
    """One line, written through at once also into a pipe."""
    echo(line)
    sys.stdout.flush()


@contextlib.contextmanager
def progress(what: str, total: int | None = None, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on standard error for work of `total` steps (None: not known), on a terminal only; give what it yields the steps done since."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    on = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=on, transient=True, disable=not (shown and sys.stderr.isatty())) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)


def table(items: Sequence[BaseModel], columns: Sequence[str], next_cursor: str | None, *, as_json: bool, option: str = "--cursor") -> None:
    """A page of objects: as the JSON of a list call, or some of their members in columns; `option` goes on with the next page.

    In a pipe no cell is cut off. On a terminal the table fits: the widest columns but the first, which names the object, are shortened.
    """
    rows = [item.model_dump(mode="json") for item in items]
    if as_json:
        print_json({"items": rows, "next_cursor": next_cursor})
        return
    cells = [list(columns), *(["" if row[column] is None else str(row[column]) for column in columns] for row in rows)]
    for line in laid_out(cells, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
        echo(line)
    if next_cursor:
        echo(f"More: {option} {next_cursor}", err=True)


def laid_out(cells: Sequence[Sequence[str]], columns_max: int | None) -> list[str]:
    """Lines of aligned columns, at most `columns_max` characters wide as far as shortening to `CELL_MIN` can do it, the first never."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while columns_max is not None and sum(widths) + len(GAP) * (len(widths) - 1) > columns_max:
        widest = max(range(1, len(widths)), key=lambda place: widths[place], default=0)
        if widths[widest] <= CELL_MIN or widest == 0:
            break
        widths[widest] -= 1
    return [GAP.join(_cut(cell, width).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def end_with(error: GatewayError) -> NoReturn:
    """One sentence on standard error, each field that is wrong named; 2 when the command was used wrongly, else 1."""
    wrong = [f"{part['pointer'].lstrip('#/').replace('/', '.')}: {part['detail']}" for part in error.errors if "pointer" in part]
    echo(f"ipn-gateway: {'; '.join(wrong) or error}", err=True)
    sys.exit(WRONG_USE if isinstance(error, ValidationFailed) else FAILED)
