"""`ipn-gateway listen`: a receiver on this machine that shows what is sent, verifies it, and hands it on to the service one works on."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from ipn_gateway import act_commands, console, receiver
from ipn_gateway.options import Host

if TYPE_CHECKING:
    from uuid import UUID

    from ipn_gateway.db import Database
    from ipn_gateway.endpoints import CreatedSecret, NewEndpoint
    from ipn_gateway.listening import Listener
    from ipn_gateway.settings import Settings

DESCRIPTION: Final = "ipn-gateway listen"
"""Of the endpoints that are made here, by which one that was left behind is known."""

ANSWER_SECONDS: Final = 2.0
"""How long another `listen` may take to accept a connection."""


def listen(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8200,
    host: Host = "127.0.0.1",
    forward_to: Annotated[
        str | None, typer.Option(metavar="URL", help="Hand each event on to this URL of your service, and answer what it answers.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(envvar="WEBHOOK_SECRET", metavar="KEY", help="Verify with this secret, whsec_…, or public key, whpk_…; repeatable."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Subscribe to this tenant's events until the end, with a secret of its own.")] = None,
    events: Annotated[str, typer.Option(help="What to subscribe to, with --tenant: types or families, separated by commas.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print each as a JSON object on a line of its own.")] = False,
) -> None:
    """Show the events that arrive here, verify them, and hand them on to a service on this machine, until ^C.

    With --tenant it subscribes itself to a gateway on the same settings, which must run with IPN_ALLOW_LOOPBACK_ENDPOINTS=true, and ends
    the subscription at its own end. Without, it waits for what you point at it. What is not genuine is answered 401 and not handed on;
    where no key is given nothing can be told apart, and all is handed on as unverified.
    """
    chosen = console.this_process()
    keys = list(secret or [])
    _check(forward_to, keys)
    subscription = None if tenant is None else _subscription(chosen, tenant, events)
    if subscription:
        keys.append(subscription.secret)
    from ipn_gateway.listening import Listener, line

    def say(said: dict[str, Any]) -> None:
        console.say(json.dumps(said, ensure_ascii=False) if as_json else line(said))

    with suppress(asyncio.CancelledError):
        asyncio.run(_run(chosen, Listener(keys, say, forward_to=forward_to), subscription, host, port))


@dataclass(frozen=True, slots=True)
class _Subscription:
    """An endpoint that is to be there while we listen. Its secret is made before, so that its first event can be verified."""

    tenant: str
    events: Sequence[str]
    secret_bytes: bytes = field(repr=False)

    @property
    def secret(self) -> str:
        """What it signs with."""
        from ipn_gateway import signing

        return signing.new_keys(self.secret_bytes).secret

    @property
    def public_key(self) -> str:
        """What a service behind this one can verify with."""
        from ipn_gateway import signing

        return signing.new_keys(self.secret_bytes).public_key


def _check(forward_to: str | None, keys: Sequence[str]) -> None:
    """Raise `BadParameter` for what cannot be, before anything is begun."""
    from ipn_gateway.addresses import refusal

    if forward_to is not None and (sentence := refusal(forward_to, allow_loopback=True, any_port=True)):
        raise typer.BadParameter(f"{sentence} Plain http is for this machine only.", param_hint="--forward-to")
    try:
        if keys:
            receiver.check_keys(keys)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--secret") from None


def _subscription(chosen: "Settings", tenant: str, events: str) -> _Subscription:
    """Raises `ConfigurationError` where nothing would be sent to this machine, `ValidationFailed` for a filter that cannot be."""
    from ipn_gateway import signing, validation
    from ipn_gateway.errors import ConfigurationError
    from ipn_gateway.web.schemas import NewEndpoint

    if not chosen.allow_loopback_endpoints:
        raise ConfigurationError(
            "A gateway sends to this machine only when it is told to: set IPN_ALLOW_LOOPBACK_ENDPOINTS=true for `serve` and here."
        )
    try:
        wanted = NewEndpoint(url="-", events=[part.strip() for part in events.split(",")])
    except ValueError as error:
        raise validation.failed(error) from None  # type: ignore[arg-type]  # pydantic's is the only one
    return _Subscription(tenant, wanted.events, secrets.token_bytes(signing.RANDOM_BYTES))


async def _run(chosen: "Settings", listener: "Listener", subscription: _Subscription | None, host: str, port: int) -> None:
    from ipn_gateway import listening, serving
    from ipn_gateway.simulator.serving import serving as served

    signals = serving.Signals()
    with signals.handled():
        async with AsyncExitStack() as stack:
            if listener.forward_to:
                listener.poster = await stack.enter_async_context(listening.poster())
            try:
                address = await stack.enter_async_context(served(listener.app(), host=host, port=port))
            except OSError as error:
                raise serving.refusal(host, port, error) from None
            url = serving.url_of(host, int(address.rpartition(":")[2])) + "/"
            if subscription:
                await stack.enter_async_context(_subscribed(chosen, subscription, url))
            _tell(url, subscription, verified=bool(listener.keys))
            await signals.asked.wait()


@asynccontextmanager
async def _subscribed(chosen: "Settings", subscription: _Subscription, url: str) -> AsyncIterator[None]:
    """An endpoint that is there as long as the block runs, whatever ends it: its id is chosen before, so it is deleted unseen, too."""
    from ipn_gateway import addresses, endpoints, ids, signing
    from ipn_gateway.endpoints import CreatedSecret

    addresses.check_endpoint_url(url, allow_loopback=True)
    tenant = subscription.tenant
    new = endpoints.NewEndpoint(url, subscription.events, DESCRIPTION)
    async with console.database(chosen) as (_, db):
        await _check_tenant(db, tenant)
        await _delete_left_over(db, tenant, url)
        made = CreatedSecret(ids.new(db.clock.now()), signing.new_keys(subscription.secret_bytes))
        try:
            await _to_its_end(_create(chosen, db, tenant, new, made))
            yield
        finally:
            await _to_its_end(_delete(db, tenant, made.endpoint_id))


async def _create(chosen: "Settings", db: "Database", tenant: str, new: "NewEndpoint", made: "CreatedSecret") -> None:
    from ipn_gateway import endpoints

    async with db.transaction("endpoints.create") as tx:
        await endpoints.create_in(tx, console.vault(chosen), tenant, new, made, actor=act_commands.actor(), now=db.clock.now())


async def _delete(db: "Database", tenant: str, endpoint_id: "UUID") -> None:
    from ipn_gateway import endpoints
    from ipn_gateway.errors import NotFound

    with suppress(NotFound):  # somebody else has deleted it, or it was never made
        cancelled = await db.rerun(endpoints.delete, db, tenant, endpoint_id, actor=act_commands.actor())
        typer.echo(f"The subscription is ended; {cancelled} event deliveries were cancelled.", err=True)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do what a second signal must not break off in the middle; it is heeded as soon as that is done."""
    task = asyncio.create_task(work)  # noqa: TID251 - one task, awaited here
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # looked at: what was asked for, to end, is what is told
        raise


async def _delete_left_over(db: "Database", tenant: str, url: str) -> None:
    """Delete what an earlier `listen` that was killed has left behind: nobody listens there any more, or now we do."""
    from ipn_gateway import ids

    async with db.autocommit("endpoints.left_by_listen") as tx:
        found = await tx.all(
            dict,
            "SELECT id, url FROM endpoints WHERE tenant_id = %(tenant)s AND description = %(description)s AND deleted_at IS NULL",
            {"tenant": tenant, "description": DESCRIPTION},
        )
    for row in found:
        if row["url"] == url or not await _is_listened_on(row["url"]):
            typer.echo(f"{ids.show(ids.ENDPOINT, row['id'])} was left behind by an earlier `listen`.", err=True)
            await _delete(db, tenant, row["id"])


async def _is_listened_on(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True


async def _check_tenant(db: "Database", tenant: str) -> None:
    from ipn_gateway.errors import NotFound

    async with db.autocommit("tenants.check") as tx:
        if not await tx.value("SELECT EXISTS (SELECT FROM tenants WHERE id = %(id)s)", {"id": tenant}):
            raise NotFound(f"There is no tenant {tenant}.")


def _tell(url: str, subscription: _Subscription | None, *, verified: bool) -> None:
    console.say(f"ipn-gateway listens on {url}; ^C ends.")
    if subscription:
        sample = f"ipn-gateway trigger order.paid --tenant {subscription.tenant}"
        typer.echo(f"Subscribed to the events of {subscription.tenant}. Send a sample with: {sample}", err=True)
        typer.echo(f"A service behind this one verifies with the public key {subscription.public_key}", err=True)
        return
    if not verified:
        typer.echo("Nothing is verified: give the endpoint's secret with --secret or in WEBHOOK_SECRET.", err=True)
    typer.echo(
        "To get the events of a gateway on this machine, set IPN_ALLOW_LOOPBACK_ENDPOINTS=true for `serve` and here, and give --tenant; "
        f"or subscribe this URL: ipn-gateway endpoints add {url}",
        err=True,
    )
