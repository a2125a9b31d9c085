"""`ipn-gateway events`, `trigger` and `contract`: what subscribers were told, samples of it, and what they may rely on."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ipn_gateway import act_commands, console
from ipn_gateway.options import AsJson, Limit, Tenant, group

if TYPE_CHECKING:
    from ipn_gateway import objects
    from ipn_gateway.db import Database
    from ipn_gateway.settings import Settings

events = group("Events: what subscribers are told.")


@events.command(
    "list",
    epilog="""\b
    Examples:
      ipn-gateway events list --order-id INV-1001
      ipn-gateway events list --type notification.held
    """,
)
def list_events(
    *,
    tenant: Tenant = None,
    order_id: Annotated[str | None, typer.Option(help="The order that they are about.")] = None,
    event_type: Annotated[str | None, typer.Option("--type", help="order.paid, notification.held, …")] = None,
    limit: Limit = 50,
    after: Annotated[str | None, typer.Option(help="`next_cursor` of the page before.")] = None,
    as_json: AsJson = False,
) -> None:
    """List events, oldest first and without a gap; go on with --after and the cursor that is printed, or the one of --json."""
    from ipn_gateway import pull
    from ipn_gateway.events import CATALOGUE, is_type

    if event_type is not None and not is_type(event_type):
        raise typer.BadParameter(f"give a type of your own, or one of {', '.join(CATALOGUE)}.", param_hint="--type")

    async def read(_: "Settings", db: "Database") -> "objects.EventPage":
        owner = await console.tenant(db, tenant)
        async with db.autocommit("events.list") as tx:
            return await pull.pull(tx, owner, after, limit, event_type=event_type, order_id=order_id)

    page = console.with_database(read)
    if as_json:
        console.print_json(page)
        return
    more = page.next_cursor if len(page.items) == limit else None  # a pull always has a cursor, for what is still to come
    console.table(page.items, ("id", "timestamp", "type", "order_id", "sequence"), more, as_json=False, option="--after")


@events.command("show", epilog="Example: ipn-gateway events show evt_mfrggzdfmztwq2lknnwg23tpobyxe43u")
def show_event(event_id: str, *, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Show one event, as it was frozen and is sent."""
    from ipn_gateway import views

    async def read(_: "Settings", db: "Database") -> "objects.Event":
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"event {event_id} of the tenant {owner}"):
            async with db.autocommit("events.show") as tx:
                return await views.event(tx, owner, event_id)

    console.show(console.with_database(read), as_json=as_json)


def trigger(
    event_type: Annotated[str, typer.Argument(metavar="EVENT", help="order.paid, notification.held, …")],
    *,
    endpoint: Annotated[str | None, typer.Option(help="The endpoint; by default every enabled one whose filter takes the type.")] = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Send a sample of an event to try a subscriber with: signed as a real one, made up, to be told by SAMPLE and metadata.sample.

    It is kept as an endpoint.test, whatever it looks like where it arrives. When an endpoint does not take it, the exit code is 1.
    """
    from ipn_gateway import endpoint_tests, ids
    from ipn_gateway.events import CATALOGUE

    if event_type not in CATALOGUE:
        raise typer.BadParameter(f"give one of {', '.join(CATALOGUE)}.", param_hint="EVENT")

    async def run(chosen: "Settings", db: "Database") -> "list[objects.EndpointTest]":
        owner = await console.tenant(db, tenant)
        cause, box = ids.new(db.clock.now()).hex, console.vault(chosen)
        found = [ids.read(ids.ENDPOINT, endpoint)] if endpoint else await endpoint_tests.takers(db, owner, event_type)
        asked = [endpoint_tests.Asked(owner, one, cause, act_commands.actor(), sample_of=event_type) for one in found]
        with console.looking_for(f"endpoint {endpoint} of the tenant {owner}"):
            async with console.transport(chosen) as transport:
                return [await endpoint_tests.run(db, transport, box, one) for one in asked]

    tested = console.with_database(run)
    if not tested and not as_json:
        typer.echo("No enabled endpoint wants it.", err=True)
    elif as_json:
        console.print_json({"items": [one.model_dump(mode="json") for one in tested]})
    else:
        console.table(tested, ("endpoint_id", "delivered", "failed_check", "event_id"), None, as_json=False)
        for one in tested:
            for check in one.checks:
                if check.status == "failed":
                    typer.echo(f"{one.endpoint_id}: {check.detail}", err=True)
    if not all(one.delivered for one in tested):
        raise typer.Exit(console.FAILED)


def contract(*, as_json: AsJson = False) -> None:
    """Print what callers and subscribers may rely on, as GET /v1/contract does, without a server.

    Schedules, limits and retention are those of this process's settings.
    """
    chosen = console.this_process()
    from ipn_gateway.web.app import ROUTERS
    from ipn_gateway.web.contract import described

    made = described(chosen, [route for router in ROUTERS for route in router.routes])
    if as_json:
        console.print_json(made)
    else:
        typer.echo(json.dumps(made, ensure_ascii=False, indent=2))
