"""`release`, `cancel`, `resolve`, `replay`, `redeliver`: what a person does by hand. The same use cases and checks as the API's.

The audit log names who ran the command, and what they gave as `--reason`.
"""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

import getpass
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ipn_gateway import console
from ipn_gateway.options import AsJson, Tenant

if TYPE_CHECKING:
    from ipn_gateway import objects
    from ipn_gateway.db import Database
    from ipn_gateway.resolutions import Evidence
    from ipn_gateway.settings import Settings

Why = Annotated[str, typer.Option("--reason", help="Why; kept in the audit log.")]
WhyNot = Annotated[str | None, typer.Option("--reason", help="Why; kept in the audit log.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("release", epilog='Example: ipn-gateway release INV-1001 --reason "checked with the bank"')(release)
    app.command("cancel", epilog='Example: ipn-gateway cancel INV-1001 --reason "out of stock"')(cancel)
    app.command("resolve", short_help="Apply or dismiss a notification delivery that waits for a person.", epilog=_RESOLVE)(resolve)
    app.command("replay", short_help="Run stored notification deliveries again.", epilog=_REPLAY)(replay)
    app.command("redeliver", epilog="Example: ipn-gateway redeliver edl_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f")(redeliver)


def actor() -> str:
    """How the audit log names who runs the command."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a user id without a name, as in a container
        return "cli"


def said(reason: str | None, *, needed: bool = True) -> str | None:
    """The reason, if it is one. Raises `BadParameter`."""
    from ipn_gateway.web.schemas import REASON_LENGTH_MAX

    if (needed and not (reason or "").strip()) or len(reason or "") > REASON_LENGTH_MAX:
        raise typer.BadParameter(f"say why, in at most {REASON_LENGTH_MAX} characters.", param_hint="--reason")
    return reason


# --- orders


def release(order_id: str, *, reason: Why, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Let an order on hold be paid. Releasing it again changes nothing."""
    from ipn_gateway import orders

    _on_order(orders.release, order_id, reason, tenant, as_json=as_json)


def cancel(order_id: str, *, reason: Why, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Close an order that nobody has paid: money that still comes is held for a person."""
    from ipn_gateway import orders

    _on_order(orders.cancel, order_id, reason, tenant, as_json=as_json)


def _on_order(act: Callable[..., Awaitable[None]], order_id: str, reason: str, tenant: str | None, *, as_json: bool) -> None:
    from ipn_gateway import views

    said(reason)

    async def run(_: "Settings", db: "Database") -> "objects.Order":
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"order {order_id} of the tenant {owner}"):
            await act(db, owner, order_id, actor=actor(), reason=reason)
        async with db.autocommit("orders.show") as tx:
            return await views.order(tx, owner, order_id)

    console.show(console.with_database(run), as_json=as_json)


# --- notification deliveries

_RESOLVE = """\b
Examples:
  ipn-gateway resolve ndl_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f apply --reason "the customer paid in two parts"
  ipn-gateway resolve ndl_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f dismiss --reason "refunded at the provider"
\b
One that is dead is applied with what you see at the provider:
  ipn-gateway resolve ndl_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f apply --reason "seen in the merchant panel" \\
    --amount 100.00 --currency BDT --provider-transaction-id BT-1001
"""


def resolve(
    delivery_id: str,
    decision: Annotated[Literal["apply", "dismiss"], typer.Argument(help="What is to become of it.")],
    *,
    reason: Why,
    amount: Annotated[str | None, typer.Option(help="Evidence: what was paid.")] = None,
    currency: Annotated[str | None, typer.Option(help="Evidence: its currency, an ISO 4217 code.")] = None,
    provider_transaction_id: Annotated[str | None, typer.Option(help="Evidence: the provider's id of the payment.")] = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Apply or dismiss a notification delivery that is held, in conflict or dead, and all copies of it.

    To apply books what the provider confirmed. Where it confirmed nothing, all three options of the evidence are needed.
    """
    from ipn_gateway import effects, ids, resolutions, views

    said(reason)
    evidence = _evidence({"amount": amount, "currency": currency, "provider_transaction_id": provider_transaction_id})

    async def run(chosen: "Settings", db: "Database") -> "objects.NotificationDelivery":
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"notification delivery {delivery_id} of the tenant {owner}"):
            known = ids.read(ids.NOTIFICATION_DELIVERY, delivery_id)
            act = resolutions.Act(owner, known, decision, actor(), reason, evidence)
            await resolutions.resolve(db, act, effects.load_effect(chosen.effect))
        async with db.autocommit("notification_deliveries.show") as tx:
            return await views.notification_delivery(tx, owner, delivery_id, raw=False)

    console.show(console.with_database(run), as_json=as_json)


def _evidence(given: dict[str, str | None]) -> "Evidence | None":
    from pydantic import ValidationError

    from ipn_gateway import validation
    from ipn_gateway.web.schemas import Resolution

    members = {name: text for name, text in given.items() if text is not None}
    if not members:
        return None
    try:
        return Resolution.model_validate({"decision": "apply", "reason": "-", "evidence": members}).proof()
    except ValidationError as error:
        raise validation.failed(error) from None


_REPLAY = """\b
Examples:
  ipn-gateway replay ndl_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f
  ipn-gateway replay --source shop --outcome rejected --since 2026-07-01T00:00:00Z --dry-run
  ipn-gateway replay --source shop --outcome rejected --reason "the store password was changed"
"""


def replay(
    delivery_id: Annotated[str | None, typer.Argument(help="One notification delivery; without it, give --source and --outcome.")] = None,
    *,
    source: Annotated[str | None, typer.Option(help="All of this source …")] = None,
    outcome: Annotated[str | None, typer.Option(help="… that ended so: rejected, dead, held, …")] = None,
    since: Annotated[str | None, typer.Option(help="Received from then on, such as 2026-07-01T12:00:00Z.")] = None,
    until: Annotated[str | None, typer.Option(help="Received before then.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and change nothing.")] = False,
    reason: WhyNot = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Run stored notification deliveries again, authenticated anew. Each still has one effect at most.

    One, by its id, or all of a source with one outcome, oldest first; that many at once need a --reason, unless it is a --dry-run.
    When that is broken off, run it again: each is put back once.
    """
    if delivery_id is None:
        _replay_many(source, outcome, since, until, reason, tenant, dry_run=dry_run, as_json=as_json)
        return
    if source or outcome or since or until or dry_run:
        raise typer.BadParameter("give either the id of one, or --source and --outcome.", param_hint="DELIVERY_ID")
    from ipn_gateway import ids, replays, views
    from ipn_gateway.sources import Sources

    said(reason, needed=False)

    async def run(chosen: "Settings", db: "Database") -> "objects.NotificationDelivery":
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"notification delivery {delivery_id} of the tenant {owner}"):
            known = ids.read(ids.NOTIFICATION_DELIVERY, delivery_id)
            await replays.replay(db, Sources(db, console.vault(chosen)), owner, known, actor=actor(), reason=reason)
        async with db.autocommit("notification_deliveries.show") as tx:
            return await views.notification_delivery(tx, owner, delivery_id, raw=False)

    console.show(console.with_database(run), as_json=as_json)


def _replay_many(  # noqa: PLR0917
    source: str | None,
    outcome: str | None,
    since: str | None,
    until: str | None,
    reason: str | None,
    tenant: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from ipn_gateway import objects, replays
    from ipn_gateway.sources import Sources
    from ipn_gateway.states import DeliveryOutcome

    if source is None or outcome not in set(DeliveryOutcome):
        raise typer.BadParameter(f"give --source and one outcome of {', '.join(DeliveryOutcome)}.", param_hint="--outcome")
    selection = replays.Selection(source, outcome, moment(since, "--since"), moment(until, "--until"))
    why = said(reason, needed=not dry_run) or ""

    async def run(chosen: "Settings", db: "Database") -> "objects.Replay":
        owner = await console.tenant(db, tenant)
        accounts = Sources(db, console.vault(chosen))
        call = partial(replays.replay_many, db, accounts, owner, selection, actor=actor(), reason=why, dry_run=dry_run)
        total = None if as_json else await replays.how_many(db, owner, selection)
        found = replays.Replayed(0, 0, 0, None)
        with console.progress("Counting" if dry_run else "Running again", total, shown=not as_json) as advance:
            while True:
                part = await call(cursor=found.next_cursor)
                advance(part.count + part.refused + part.settled)
                found += part
                if part.next_cursor is None:
                    break
        members: dict[str, Any] = {"source": source, "outcome": outcome, "since": selection.since, "until": selection.until}
        return objects.Replay(**members, dry_run=dry_run, **asdict(found))

    console.show(console.with_database(run), as_json=as_json)


def moment(text: str | None, option: str) -> datetime | None:
    """The time that an option gives. Raises `BadParameter`."""
    from ipn_gateway.web.deps import rfc3339

    try:
        return None if text is None else rfc3339(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint=option) from None


# --- event deliveries


def redeliver(delivery_id: str, *, reason: WhyNot = None, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Send an event to its endpoint once more, with the same id and bytes, whatever became of its delivery."""
    from ipn_gateway import ids, redeliveries, views

    said(reason, needed=False)

    async def run(_: "Settings", db: "Database") -> "objects.EventDelivery":
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"event delivery {delivery_id} of the tenant {owner}"):
            known = ids.read(ids.EVENT_DELIVERY, delivery_id)
            await redeliveries.redeliver(db, owner, known, actor=actor(), reason=reason)
        async with db.autocommit("event_deliveries.show") as tx:
            return await views.event_delivery(tx, owner, delivery_id)

    console.show(console.with_database(run), as_json=as_json)
