"""The commands. Each makes one call and prints what it gives."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ipn_gateway import (
    __version__,
    act_commands,
    bench_command,
    console,
    endpoint_commands,
    event_commands,
    key_commands,
    listen_command,
    prove_command,
    retention_command,
    simulate_command,
    tail,
    timeline_command,
)
from ipn_gateway.errors import GatewayError
from ipn_gateway.options import AsJson, Cursor, Host, Limit, Tenant, group

if TYPE_CHECKING:
    from ipn_gateway.db import Database
    from ipn_gateway.settings import Settings


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys, sources, orders, deliveries = (
    group("API keys of tenants."),
    group("Merchant accounts at payment providers."),
    group("Orders and what was paid for them."),
    group("Notification deliveries: what providers posted."),
)
for name, commands in (
    ("keys", keys),
    ("sources", sources),
    ("orders", orders),
    ("deliveries", deliveries),
    ("events", event_commands.events),
    ("endpoints", endpoint_commands.endpoints),
    ("idempotency-keys", key_commands.keys),
):
    app.add_typer(commands, name=name)

EXIT_CODES: Final = {
    0: "done",
    console.FAILED: "it failed, was refused, or what was looked for is not there; one sentence on standard error says what",
    console.WRONG_USE: "it was used wrongly: an option, or a value in it, that cannot be",
    130: "ended by ^C, where that is not the usual end",
}


def main() -> None:
    """Run the command line; the exit code is 2 for wrong use and 1 for what failed, with one sentence on standard error."""
    try:
        app(prog_name="ipn-gateway")
    except GatewayError as error:
        console.end_with(error)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback(
    epilog="""Settings are read from IPN_… environment variables; without IPN_DATABASE_URL an embedded PostgreSQL is used, and
    all commands on one IPN_DATA_DIR share it.

    \b
    Begin with:
      ipn-gateway demo
      ipn-gateway serve
      ipn-gateway keys create --tenant acme
    """
)
def gateway(
    *,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Apply every payment notification exactly once, and deliver every event that follows."""


# --- the service


@app.command(
    short_help="Run the gateway.",
    epilog="""\b
    Examples:
      ipn-gateway serve
      ipn-gateway serve --host 0.0.0.0 --port 8000 --migrate
      ipn-gateway serve --roles inbox,dispatcher
    """,
)
def serve(
    *,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    roles: Annotated[str, typer.Option(help="What this process does, separated by commas.")] = "web,inbox,dispatcher,maintenance",
    migrate: Annotated[bool, typer.Option("--migrate", help="Apply pending migrations to the database of IPN_DATABASE_URL.")] = False,
) -> None:
    """Run the gateway until SIGTERM or SIGINT; a second signal stops it at once.

    One line on standard output says where it listens. Several processes may share one database, with all roles each or some.
    """
    chosen = console.this_process(level="INFO")
    from ipn_gateway import serving, workers

    wanted = [role for role in (part.strip() for part in roles.split(",")) if role]
    if not wanted or set(wanted) - set(workers.ROLES):
        raise typer.BadParameter(f"give one or more of {', '.join(workers.ROLES)}.", param_hint="--roles")
    serving.run(chosen, host=host, port=port, roles=wanted, migrate=migrate, say=lambda line: print(line, flush=True))


@app.command()
def migrate(*, as_json: AsJson = False) -> None:
    """Bring the database's schema up to date."""
    from ipn_gateway import migrations

    chosen = console.this_process()

    async def run() -> list[str]:
        async with console.database(chosen, prepared=False) as (url, db):
            return await migrations.migrate(url, db)

    applied = asyncio.run(run())
    if as_json:
        console.print_json({"applied": applied})
    else:
        print(f"Applied {', '.join(applied)}." if applied else "Nothing was pending.")


# --- tenants, keys and sources


@keys.command(
    "create",
    epilog="""\b
    Examples:
      ipn-gateway keys create --tenant acme
      ipn-gateway keys create --tenant acme --scopes read,write --json
    """,
)
def create_key(
    *,
    tenant: Annotated[str, typer.Option(help="Whose key; a new tenant is made.")],
    scopes: Annotated[str | None, typer.Option(help="Of read, write, money, audit:raw, admin; by default all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key. It is shown this once; only its digest is kept."""
    from ipn_gateway import tenants

    wanted = tenants.SCOPES if scopes is None else [part.strip() for part in scopes.split(",")]
    made = console.with_database(lambda _, db: tenants.create_key(db, tenant, wanted))
    if as_json:
        console.print_json({"tenant": made.tenant, "key_id": made.key_id, "key": made.key})
    else:
        print(f"{made.key_id} of the tenant {made.tenant}; keep the key, it is not shown again:", file=sys.stderr)
        print(made.key)


@sources.command(
    "add",
    epilog="""\b
    Examples:
      ipn-gateway sources add shop --tenant acme --config @shop.json
      ipn-gateway sources add shop --config - < shop.json
    \b
    where shop.json holds, for SSLCOMMERZ:
      {"store_id": "…", "store_passwd": "…", "mode": "sandbox"}
    """,
)
def add_source(
    name: Annotated[str, typer.Argument(help="The slug in the listener URL; it stays taken for ever.")],
    *,
    tenant: Tenant = None,
    provider: Annotated[str, typer.Option(help="The provider's adapter.")] = "sslcommerz",
    config: Annotated[str, typer.Option(help="JSON; @FILE and - (standard input) keep secrets out of the process list.")] = "{}",
    as_json: AsJson = False,
) -> None:
    """Register a merchant account; its listener_url is what the provider is told as IPN URL."""
    given = _config(config)
    from ipn_gateway import objects, views
    from ipn_gateway import sources as accounts

    async def add(chosen: "Settings", db: "Database") -> objects.Source:
        owner = await console.tenant(db, tenant)
        await accounts.create(db, console.vault(chosen), owner, name, provider=provider, given=given, actor="command")
        async with db.autocommit("sources.show") as tx:
            made = await views.source(tx, owner, name, public_url=console.public_url(chosen))
        console.own_up_to_guess(chosen)
        return made

    console.show(console.with_database(add), as_json=as_json)


def _config(text: str) -> dict[str, Any]:
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        found = json.loads(text)
    except OSError as error:
        raise typer.BadParameter(f"the file cannot be read: {error.strerror}.", param_hint="--config") from None
    except ValueError:
        raise typer.BadParameter("this is no JSON.", param_hint="--config") from None
    if not isinstance(found, dict):
        raise typer.BadParameter("a JSON object is needed.", param_hint="--config")
    return found


@sources.command("list")
def list_sources(*, tenant: Tenant = None, limit: Limit = 50, cursor: Cursor = None, as_json: AsJson = False) -> None:
    """List merchant accounts. Their listener URLs are made from IPN_PUBLIC_URL."""
    from ipn_gateway import objects, paging, views

    async def read(chosen: "Settings", db: "Database") -> objects.Page[objects.Source]:
        owner = await console.tenant(db, tenant)
        async with db.autocommit("sources.list") as tx:
            found = await views.sources(tx, owner, paging.Wanted(cursor, limit), public_url=console.public_url(chosen))
        if found.items:
            console.own_up_to_guess(chosen)
        return found

    page = console.with_database(read)
    console.table(page.items, ("name", "provider", "mode", "listener_url", "disabled_at"), page.next_cursor, as_json=as_json)


# --- looking things up


@orders.command("show", epilog="Example: ipn-gateway orders show INV-1001")
def show_order(order_id: str, *, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Show an order with its payments and refunds."""
    from ipn_gateway import objects, views

    async def read(_: "Settings", db: "Database") -> objects.Order:
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"order {order_id} of the tenant {owner}"):
            async with db.autocommit("orders.show") as tx:
                return await views.order(tx, owner, order_id)

    console.show(console.with_database(read), as_json=as_json)


@deliveries.command(
    "list",
    epilog="""\b
    Examples:
      ipn-gateway deliveries list --order-id INV-1001
      ipn-gateway deliveries list --waiting
    """,
)
def list_deliveries(
    *,
    tenant: Tenant = None,
    order_id: Annotated[str | None, typer.Option(help="The order that they named, forged ones too.")] = None,
    source: Annotated[str | None, typer.Option(help="The source that they were posted to.")] = None,
    outcome: Annotated[str | None, typer.Option(help="received, applied, duplicate, rejected, held, …")] = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only what a person has to resolve: held, in conflict or dead.")] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List what providers posted, and what became of it."""
    from ipn_gateway import objects, paging, views
    from ipn_gateway.states import DeliveryOutcome

    if outcome is not None and outcome not in set(DeliveryOutcome):
        raise typer.BadParameter(f"give one of {', '.join(DeliveryOutcome)}.", param_hint="--outcome")
    filters = {"order_id": order_id, "source": source, "outcome": outcome}

    async def read(_: "Settings", db: "Database") -> objects.Page[objects.NotificationDelivery]:
        owner = await console.tenant(db, tenant)
        async with db.autocommit("notification_deliveries.list") as tx:
            return await views.notification_deliveries(tx, owner, paging.Wanted(cursor, limit), raw=False, waiting=waiting, **filters)

    page = console.with_database(read)
    columns = ("id", "received_at", "source", "order_id", "asserted_status", "outcome", "reason")
    console.table(page.items, columns, page.next_cursor, as_json=as_json)


@deliveries.command("show", epilog="Example: ipn-gateway deliveries show ndl_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f")
def show_delivery(delivery_id: str, *, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Show one notification delivery: what came, what the provider said about it, and what became of it."""
    from ipn_gateway import objects, views

    async def read(_: "Settings", db: "Database") -> objects.NotificationDelivery:
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"notification delivery {delivery_id} of the tenant {owner}"):
            async with db.autocommit("notification_deliveries.show") as tx:
                return await views.notification_delivery(tx, owner, delivery_id, raw=False)

    console.show(console.with_database(read), as_json=as_json)


app.command("tail", epilog="Example: ipn-gateway tail --only in --outcome rejected")(tail.tail)
app.command("timeline", epilog="Example: ipn-gateway timeline INV-1001")(timeline_command.timeline)
app.command("retention", epilog="Example: ipn-gateway retention --dry-run")(retention_command.retention)
app.command("contract")(event_commands.contract)
app.command(
    "trigger",
    epilog="""\b
    Examples:
      ipn-gateway trigger order.paid
      ipn-gateway trigger order.refunded --endpoint ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f
    """,
)(event_commands.trigger)

act_commands.register(app)


# --- trying things out


app.command(
    "listen",
    epilog="""\b
    Examples:
      ipn-gateway listen --tenant acme --forward-to http://localhost:3000/webhooks
      ipn-gateway listen --port 8200 --secret "$WEBHOOK_SECRET"
    """,
)(listen_command.listen)


simulate_command.register(app)


@app.command(
    short_help="Watch it work, on a database of its own.",
    epilog="""\b
    Examples:
      ipn-gateway demo
      ipn-gateway demo --payments 200 --seed 7 --json
    """,
)
def demo(
    *,
    payments: Annotated[int, typer.Option(min=1, max=10_000, help="How many orders are paid; some more are not.")] = 20,
    seed: Annotated[int, typer.Option(help="Which payment meets which trouble.")] = 1,
    as_json: AsJson = False,
    keep: Annotated[bool, typer.Option("--keep", help="Stay up afterwards, as on a terminal.")] = False,
) -> None:
    """Watch payments arrive twice, late, forged or not at all, and each one count once.

    Starts a gateway of its own in a temporary directory, a simulated SSLCOMMERZ and a subscriber, compares their three accounts at the
    end, and exits with 1 if they differ. It never touches IPN_DATABASE_URL.
    """
    from ipn_gateway import demo as show

    if not show.run(payments=payments, seed=seed, as_json=as_json, keep=keep):
        raise typer.Exit(console.FAILED)


for command in (bench_command, prove_command):
    command.register(app)
