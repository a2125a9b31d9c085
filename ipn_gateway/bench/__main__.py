"""The programs that the benchmark starts in processes of their own: `python -m ipn_gateway.bench NAME …`.

Each says a line when it is ready.
"""
# ruff: noqa: PLC0415 - each imports what it needs: what it weighs is measured

import sys

import uvloop


def main(name: str, *given: str) -> None:
    """Run one of them."""
    if name in {"provider", "receiver"}:
        from ipn_gateway.bench import wire

        uvloop.run(wire.serve(wire.Provider() if name == "provider" else wire.Receiver()))
    elif name in {"ask", "post"}:
        from ipn_gateway.bench import clients

        uvloop.run((clients.ask if name == "ask" else clients.post)(given[0], int(given[1])))
    elif name == "form":
        from ipn_gateway.bench import form

        form.serve()
    elif name == "plain":
        from ipn_gateway.bench import plain_way

        plain_way.serve(*given)
    elif name in {"procrastinate", "pgqueuer"}:
        from ipn_gateway.bench import queues

        uvloop.run((queues.procrastinate if name == "procrastinate" else queues.pgqueuer)(given[0], given[1], int(given[2])))


if __name__ == "__main__":
    main(*sys.argv[1:])
