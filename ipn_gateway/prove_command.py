"""The command `prove`."""

from typing import Annotated

import typer

from ipn_gateway import console
from ipn_gateway.options import AsJson


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "prove",
        short_help="Kill it again and again, and count what is lost or doubled.",
        epilog="""\b
        Examples:
          ipn-gateway prove
          ipn-gateway prove --notifications 10000 --kills 300 --seed 3 --json
          ipn-gateway prove --notifications 0 --kills 0 --sends 500
        """,
    )(prove)


def prove(
    *,
    notifications: Annotated[int, typer.Option(min=0, max=1_000_000, help="How many genuine notifications are sent.")] = 300,
    kills: Annotated[int, typer.Option(min=0, max=100_000, help="How many gateway processes are killed with SIGKILL.")] = 6,
    sends: Annotated[int, typer.Option(min=0, max=100_000, help="How many dispatchers are killed between send and record.")] = 0,
    seed: Annotated[int, typer.Option(help="Which notification meets which trouble, and where each process dies.")] = 1,
    as_json: AsJson = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the database and the log of the gateways.")] = False,
) -> None:
    """Try to refute that every accepted notification is applied exactly once and every event arrives.

    Runs gateway processes on a temporary database of their own, a simulated SSLCOMMERZ and subscribers, with repeats, disorder, losses,
    delays and forgeries; kills gateways at named points and at random moments; then compares the provider's books with ours and with what
    was received, and exits with 1 if anything is lost or doubled. It never touches IPN_DATABASE_URL.
    """
    from ipn_gateway.proof import run as proof  # noqa: PLC0415 - so that --help answers at once

    asked = proof.Asked(notifications=notifications, kills=kills, sends=sends, seed=seed)
    if not proof.run(asked, as_json=as_json, keep=keep):
        raise typer.Exit(console.FAILED)
