"""A process that dies inside the merchant's effect: nothing of it is there, and the next process applies the payment once."""

from __future__ import annotations

import signal
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest

from ipn_gateway.simulator.app import SimulatorConfig, create_app
from ipn_gateway.simulator.control import PaymentRequest
from ipn_gateway.simulator.serving import serving
from tests.cli import command

if TYPE_CHECKING:
    from pathlib import Path

EFFECT = """
import os, pathlib, signal, sys

ONCE = pathlib.Path(__file__).with_name("died")

async def effect(connection, notification):
    await connection.execute("INSERT INTO credits VALUES (%s)", (notification.order_id,))
    if not ONCE.exists():
        ONCE.touch()
        {dies}
"""
SHORT = {"IPN_PROVIDER_TIMEOUT_SECONDS": "1", "IPN_INBOX_LEASE_SECONDS": "2"}
COUNTED = "SELECT (SELECT count(*) FROM credits), (SELECT count(*) FROM processed_notifications), (SELECT count(*) FROM payments)"


@pytest.mark.case("S107", "S141")
@pytest.mark.timeout(120)
async def test_a_process_killed_inside_the_effect_has_written_nothing(tmp_path: Path, database_url: str):
    """Neither the merchant's row nor ours; after the lease another process takes the delivery and the effect is there once."""
    (tmp_path / "merchant.py").write_text(EFFECT.format(dies="os.kill(os.getpid(), signal.SIGKILL)"))
    settings = command.given_database(database_url) | SHORT
    doomed = settings | {"IPN_EFFECT": "merchant:effect", "PYTHONPATH": str(tmp_path)}
    provider = create_app(SimulatorConfig(store_id="testbox", store_passwd="qwerty", seed=1))
    async with serving(provider) as url, await psycopg.AsyncConnection.connect(database_url, autocommit=True) as merchant:
        await merchant.execute("CREATE TABLE credits (order_id text PRIMARY KEY)")
        key = (await command.run("keys", "create", "--tenant", "acme", "--json", **settings)).json["key"]
        config = f'{{"store_id":"testbox","store_passwd":"qwerty","mode":"sandbox","base_url":"{url}"}}'
        await command.run("sources", "add", "shop", "--config", config, **settings)
        order = {"order_id": "INV-1", "amount": "100.00", "currency": "BDT", "source": "shop"}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}", "Idempotency-Key": "one"}) as client:
            async with command.serving("serve", "--port", "0", **doomed) as first:
                await client.post(f"{first.url}/v1/orders", json=order)
                fields = provider.state.simulator.control.pay(
                    PaymentRequest(tran_id="INV-1", amount=Decimal("100.00"), currency="BDT", send_ipn=False)
                )
                answer = await client.post(f"{first.url}/ipn/shop", data=fields)
                died = await first.ended()
            nothing = await _counted(merchant)
            async with command.serving("serve", "--port", "0", **doomed) as second:
                while (await _counted(merchant))[1] == 0:
                    pass
                await second.stopped()

        assert (answer.status_code, died.code) == (200, -signal.SIGKILL)
        assert nothing == (0, 0, 0)
        assert await _counted(merchant) == (1, 1, 1)


async def _counted(merchant: psycopg.AsyncConnection[Any]) -> tuple[int, ...]:
    return tuple(await (await merchant.execute(COUNTED)).fetchone() or ())
