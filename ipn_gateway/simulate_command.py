"""The command `simulate`."""
# ruff: noqa: PLC0415 - a command imports what it needs when it runs, so that --help answers at once

from typing import Annotated

import typer

from ipn_gateway import logs
from ipn_gateway.options import Host


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "simulate",
        short_help="Run a local SSLCOMMERZ for trying things out.",
        epilog="""\b
        Example, and the source that asks it:
          ipn-gateway simulate --port 8100 --duplicate 0.3 --forge 0.2
          ipn-gateway sources add sandbox --config \\
            '{"store_id":"testbox","store_passwd":"qwerty","mode":"sandbox","base_url":"http://127.0.0.1:8100"}'
        """,
    )(simulate)


def simulate(
    *,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8100,
    ipn_url: Annotated[str, typer.Option(help="Where notifications go of sessions that name no ipn_url.")] = "",
    duplicate: Annotated[float, typer.Option(min=0, max=1, help="Chance that a notification is sent twice.")] = 0,
    reorder: Annotated[float, typer.Option(min=0, max=1, help="Chance that it is overtaken by a later one.")] = 0,
    delay: Annotated[float, typer.Option(min=0, help="Longest delay of a notification, in seconds.")] = 0,
    lose: Annotated[float, typer.Option(min=0, max=1, help="Chance that it is never sent.")] = 0,
    forge: Annotated[float, typer.Option(min=0, max=1, help="Chance that a forgery is sent beside it.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes chance repeatable.")] = None,
) -> None:
    """Run a local SSLCOMMERZ that misbehaves on request: session init, payment page, validator, query, refund, IPN."""
    from ipn_gateway import serving
    from ipn_gateway.simulator.app import SimulatorConfig
    from ipn_gateway.simulator.sender import Knobs

    logs.configure(level="INFO")
    knobs = Knobs(duplicate=duplicate, reorder=reorder, delay_seconds=delay, lose=lose, forge=forge)
    serving.simulate(
        SimulatorConfig(ipn_url=ipn_url, knobs=knobs, seed=seed),
        host=host,
        port=port,
        say=lambda line: print(line, flush=True),  # noqa: T201
    )
