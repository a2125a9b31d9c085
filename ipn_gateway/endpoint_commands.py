"""`ipn-gateway endpoints`: subscribers' URLs. The same use cases and the same checks as `/v1/endpoints`."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

import secrets
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ipn_gateway import act_commands, console
from ipn_gateway.act_commands import WhyNot
from ipn_gateway.options import AsJson, Cursor, Limit, Tenant, group

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway import objects
    from ipn_gateway.db import Database
    from ipn_gateway.endpoints import CreatedSecret
    from ipn_gateway.settings import Settings

ACTOR = "command"

endpoints = group("Endpoints: the URLs that events are sent to.")


@endpoints.command(
    "add",
    epilog="""\b
    Examples:
      ipn-gateway endpoints add https://shop.example/webhooks
      ipn-gateway endpoints add https://shop.example/webhooks --events 'order.*,notification.held'
    """,
)
def add_endpoint(
    url: Annotated[str, typer.Argument(help="https; what it leads to is vetted at each send.")],
    *,
    tenant: Tenant = None,
    events: Annotated[str, typer.Option(help="Types, or families such as order.*, separated by commas.")] = "*",
    description: Annotated[str, typer.Option(help="For people.")] = "",
    max_in_flight: Annotated[int | None, typer.Option(help="How many are sent at once.")] = None,
    as_json: AsJson = False,
) -> None:
    """Subscribe a URL to events. The signing secret is shown this once."""
    from ipn_gateway import addresses, signing, validation
    from ipn_gateway import endpoints as use_cases
    from ipn_gateway.web.schemas import NewEndpoint

    members: dict[str, Any] = {"url": url, "events": [part.strip() for part in events.split(",")], "description": description}
    if max_in_flight is not None:
        members["max_in_flight"] = max_in_flight
    try:
        new = NewEndpoint.model_validate(members)
    except ValueError as error:
        raise validation.failed(error) from None  # type: ignore[arg-type]  # pydantic's is the only one

    async def add(chosen: "Settings", db: "Database") -> "objects.EndpointWithSecret":
        addresses.check_endpoint_url(new.url, allow_loopback=chosen.allow_loopback_endpoints)
        owner = await console.tenant(db, tenant)
        made = await use_cases.create(
            db,
            console.vault(chosen),
            owner,
            use_cases.NewEndpoint(**dict(new)),
            secret_bytes=secrets.token_bytes(signing.RANDOM_BYTES),
            actor=ACTOR,
        )
        return await _with_secret(db, owner, made)

    console.show(console.with_database(add), as_json=as_json)


@endpoints.command("list")
def list_endpoints(*, tenant: Tenant = None, limit: Limit = 50, cursor: Cursor = None, as_json: AsJson = False) -> None:
    """List endpoints, newest first; deleted ones are gone."""
    from ipn_gateway import paging, views

    async def read(_: "Settings", db: "Database") -> "objects.Page[objects.Endpoint]":
        owner = await console.tenant(db, tenant)
        async with db.autocommit("endpoints.list") as tx:
            return await views.endpoints(tx, owner, paging.Wanted(cursor, limit))

    page = console.with_database(read)
    console.table(page.items, ("id", "url", "status", "disabled_reason", "description"), page.next_cursor, as_json=as_json)


@endpoints.command("show", epilog="Example: ipn-gateway endpoints show ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f")
def show_endpoint(endpoint_id: str, *, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Show one endpoint, without its secrets."""

    async def read(_: "Settings", db: "Database", owner: str, known: "UUID") -> "objects.Endpoint":
        return await _shown(db, owner, known)

    console.show(_about(endpoint_id, tenant, read), as_json=as_json)


@endpoints.command(
    "enable", epilog="Example: ipn-gateway endpoints enable ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f --reason 'certificate renewed'"
)
def enable_endpoint(
    endpoint_id: str,
    *,
    reason: Annotated[str | None, typer.Option(help="For the audit log.")] = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Send to a disabled endpoint again: what waited is due at once, oldest first. An enabled one stays as it is."""
    from ipn_gateway import endpoints as use_cases

    async def enable(_: "Settings", db: "Database", owner: str, known: "UUID") -> "objects.Endpoint":
        await use_cases.enable(db, owner, known, actor=ACTOR, reason=reason)
        return await _shown(db, owner, known)

    console.show(_about(endpoint_id, tenant, enable), as_json=as_json)


@endpoints.command(
    "disable", epilog="Example: ipn-gateway endpoints disable ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f --reason 'their service moves'"
)
def disable_endpoint(
    endpoint_id: str,
    *,
    reason: Annotated[str | None, typer.Option(help="For the audit log.")] = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Send nothing to an endpoint until it is enabled; what is for it stays pending. The tenant's other endpoints are told."""
    from ipn_gateway import endpoint_health

    async def disable(_: "Settings", db: "Database", owner: str, known: "UUID") -> "objects.Endpoint":
        await endpoint_health.disable_by_hand(db, owner, known, actor=ACTOR, reason=reason)
        return await _shown(db, owner, known)

    console.show(_about(endpoint_id, tenant, disable), as_json=as_json)


@endpoints.command(
    "rotate-secret", epilog="Example: ipn-gateway endpoints rotate-secret ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f --overlap-seconds 3600"
)
def rotate_secret(
    endpoint_id: str,
    *,
    overlap_seconds: Annotated[
        float | None,
        typer.Option(min=0, max=30 * 86_400, help="How long the old ones sign beside it; by default a day, 0 drops them at once."),
    ] = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Make a new signing secret. It is shown this once; every attempt is signed with each one that is active."""
    from ipn_gateway import endpoints as use_cases
    from ipn_gateway import signing

    async def rotate(chosen: "Settings", db: "Database", owner: str, known: "UUID") -> "objects.EndpointWithSecret":
        made = await use_cases.rotate_secret(
            db,
            console.vault(chosen),
            owner,
            known,
            overlap_seconds=use_cases.OVERLAP_SECONDS_DEFAULT if overlap_seconds is None else overlap_seconds,
            secret_bytes=secrets.token_bytes(signing.RANDOM_BYTES),
            actor=ACTOR,
        )
        return await _with_secret(db, owner, made)

    console.show(_about(endpoint_id, tenant, rotate), as_json=as_json)


@endpoints.command("test", epilog="Example: ipn-gateway endpoints test ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f")
def try_endpoint(endpoint_id: str, *, reason: WhyNot = None, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Send one endpoint.test to this endpoint alone, now, and say which step failed; then the exit code is 1.

    The event is signed and sent as any other one is, from this process, also to a disabled endpoint, and never tried again.
    """
    from ipn_gateway import endpoint_tests, ids

    act_commands.said(reason, needed=False)

    async def test(chosen: "Settings", db: "Database", owner: str, known: "UUID") -> "objects.EndpointTest":
        asked = endpoint_tests.Asked(owner, known, ids.new(db.clock.now()).hex, act_commands.actor(), reason)
        async with console.transport(chosen) as transport:
            return await endpoint_tests.run(db, transport, console.vault(chosen), asked)

    tested = _about(endpoint_id, tenant, test)
    console.show(tested, as_json=as_json)
    if not tested.delivered:
        raise typer.Exit(console.FAILED)


@endpoints.command(
    "recover",
    epilog="""\b
    Examples:
      ipn-gateway endpoints recover ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f --since 2026-07-01T00:00:00Z --dry-run
      ipn-gateway endpoints recover ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f --since 2026-07-01T00:00:00Z --reason "the service is back"
    """,
)
def recover_endpoint(
    endpoint_id: str,
    *,
    since: Annotated[str, typer.Option(help="Events that were written from then on, such as 2026-07-01T12:00:00Z.")],
    until: Annotated[str | None, typer.Option(help="And before then.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and change nothing.")] = False,
    reason: WhyNot = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Give an endpoint what it did not get of a span of time: dead event deliveries again, missing ones for the first time.

    What it got, or is about to get, is left alone. They become due in the order of their events, at the endpoint's rate or 50 each second.
    It needs a --reason, unless it is a --dry-run. When that is broken off, run it again.
    """
    from ipn_gateway import recoveries

    why = act_commands.said(reason, needed=not dry_run) or ""
    bounds = (act_commands.moment(since, "--since"), act_commands.moment(until, "--until"))

    async def recover(_: "Settings", db: "Database", owner: str, known: "UUID") -> "objects.Recovery":
        span = recoveries.Span(owner, known, *bounds)  # type: ignore[arg-type]  # the first one is required
        total = None if as_json else await recoveries.how_many(db, span)
        found = recoveries.Recovered()
        with console.progress("Counting" if dry_run else "Recovering", total, shown=not as_json) as advance:
            while True:
                part = await recoveries.recover(db, span, actor=act_commands.actor(), reason=why, dry_run=dry_run, cursor=found.next_cursor)
                advance(part.looked_at)
                found += part
                if found.next_cursor is None:
                    return recoveries.shown(span, found, dry_run=dry_run)

    console.show(_about(endpoint_id, tenant, recover), as_json=as_json)


@endpoints.command("delete", epilog="Example: ipn-gateway endpoints delete ep_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f")
def delete_endpoint(endpoint_id: str, *, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """End a subscription for good; what was not delivered yet is cancelled."""
    from ipn_gateway import endpoints as use_cases

    async def delete(_: "Settings", db: "Database", owner: str, known: "UUID") -> int:
        return await use_cases.delete(db, owner, known, actor=ACTOR)

    cancelled = _about(endpoint_id, tenant, delete)
    if as_json:
        console.print_json({"id": endpoint_id, "cancelled": cancelled})
    else:
        typer.echo(f"Deleted; {cancelled} event deliveries were cancelled.")


def _about(endpoint_id: str, tenant: str | None, work: Any) -> Any:
    """Do `work` with the endpoint of this id; who it belongs to is found out first."""
    from ipn_gateway import ids

    async def run(chosen: "Settings", db: "Database") -> Any:
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"endpoint {endpoint_id} of the tenant {owner}"):
            return await work(chosen, db, owner, ids.read(ids.ENDPOINT, endpoint_id))

    return console.with_database(run)


async def _shown(db: "Database", owner: str, endpoint_id: "UUID") -> "objects.Endpoint":
    from ipn_gateway import views

    async with db.autocommit("endpoints.show") as tx:
        return await views.endpoint(tx, owner, endpoint_id)


async def _with_secret(db: "Database", owner: str, made: "CreatedSecret") -> "objects.EndpointWithSecret":
    from ipn_gateway import objects

    shown = await _shown(db, owner, made.endpoint_id)
    return objects.EndpointWithSecret(**dict(shown), secret=made.secret, public_key=made.keys.public_key)
