"""`ipn-gateway idempotency-keys`: what became of keyed requests, and unknown outcomes that a person settles."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ipn_gateway import console
from ipn_gateway.act_commands import Why, actor, said
from ipn_gateway.options import AsJson, Cursor, Limit, Tenant, group

if TYPE_CHECKING:
    from ipn_gateway import objects
    from ipn_gateway.db import Database
    from ipn_gateway.settings import Settings

State = Literal["in_progress", "completed", "indeterminate"]

keys = group("Idempotency keys: what became of keyed requests.")


@keys.command("list", epilog="Example: ipn-gateway idempotency-keys list --state indeterminate")
def list_keys(
    *,
    state: Annotated[State | None, typer.Option(help="Only those in this state; indeterminate ones wait for a person.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    operation: Annotated[str | None, typer.Option(help="Only this operation, such as 'POST /v1/orders'.")] = None,
    tenant: Tenant = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List keys, newest first."""
    from ipn_gateway import idempotency_acts, paging

    async def read(_: "Settings", db: "Database") -> "objects.Page[objects.IdempotencyKey]":
        owner = await console.tenant(db, tenant)
        async with db.autocommit("idempotency_keys.list") as tx:
            return await idempotency_acts.page(tx, owner, paging.Wanted(cursor, limit), state=state, key=key, operation=operation)

    page = console.with_database(read)
    console.table(page.items, ("id", "operation", "state", "recovery_point", "response_status"), page.next_cursor, as_json=as_json)


@keys.command(
    "resolve",
    epilog="""\b
    Examples:
      ipn-gateway idempotency-keys resolve idk_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f not-applied --reason "not in the merchant panel"
      ipn-gateway idempotency-keys resolve idk_0198f0c2a1b47c3e9d5f6a7b8c9d0e1f applied --reason "seen in the merchant panel" \\
        --provider-refund-id 66a1demo0001
    """,
)
def resolve_key(
    key_id: str,
    decision: Annotated[Literal["applied", "not-applied"], typer.Argument(help="Whether it happened at the provider.")],
    *,
    reason: Why,
    provider_refund_id: Annotated[str | None, typer.Option(help="Evidence: the provider's id of the refund.")] = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Say what became of a request whose outcome is not known. The same decision again changes nothing."""
    from ipn_gateway import idempotency_acts, ids, refunds

    said(reason)

    async def run(_: "Settings", db: "Database") -> "objects.IdempotencyKey":
        owner = await console.tenant(db, tenant)
        with console.looking_for(f"idempotency key {key_id} of the tenant {owner}"):
            resolution = idempotency_acts.Resolution(
                tenant_id=owner,
                key_id=ids.read(ids.IDEMPOTENCY_KEY, key_id),
                decision="applied" if decision == "applied" else "not_applied",
                actor=actor(),
                reason=reason,
                evidence={"provider_refund_id": provider_refund_id} if provider_refund_id else {},
            )
            async with db.transaction("idempotency_keys.resolve") as tx:
                await idempotency_acts.resolve(tx, db.clock, {refunds.CREATE.name: refunds.CREATE}, resolution)
        async with db.autocommit("idempotency_keys.show") as tx:
            return await idempotency_acts.shown(tx, owner, resolution.key_id)

    console.show(console.with_database(run), as_json=as_json)
