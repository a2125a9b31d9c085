"""A secret on its way from file, environment or API to the hash: the bytes arrive, and nobody sees them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from pydantic import SecretStr

from ipn_gateway import runtime, settings, tenants
from ipn_gateway.providers.base import Proof
from ipn_gateway.providers.sslcommerz import PROVIDER
from ipn_gateway.web.app import create_app
from tests.cli import command
from tests.providers.sslcommerz import F0, SHOP, signed

if TYPE_CHECKING:
    from pathlib import Path

    from ipn_gateway.db import Database

pytestmark = pytest.mark.timeout(120)

PASSWORD = 'Pa#ss$1 =x"'
CONFIG = {"store_id": "demo01", "store_passwd": PASSWORD, "mode": "sandbox"}


@pytest.mark.case("B57")
async def test_a_password_with_signs_survives_every_way_in(database_url: str, db: Database, tmp_path: Path):
    """Out of a file, out of an environment variable, through the API: what is signed with it is proved, and no output shows it."""
    environment = command.given_database(database_url)
    key = (await tenants.create_key(db, "acme")).key
    file = tmp_path / "shop.json"
    file.write_text(json.dumps(CONFIG), encoding="utf-8")
    shell = f'exec "{sys.executable}" -m ipn_gateway sources add by-variable --config "$SHOP_CONFIG" --json'

    from_file = await command.run("sources", "add", "by-file", "--config", f"@{file}", "--json", **environment)
    from_variable = await command.run_by_path("/bin/sh", "-c", shell, **environment, SHOP_CONFIG=json.dumps(CONFIG))
    chosen = settings.load(database_url=SecretStr(database_url), secret_key=environment["IPN_SECRET_KEY"])
    async with runtime.opened(chosen, database_url) as rt:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=create_app(rt)), base_url="http://gateway.test") as client:
            body = {"name": "by-api", "provider": "sslcommerz", "config": CONFIG}
            from_api = await client.post("/v1/sources", json=body, headers={"Authorization": f"Bearer {key}", "Idempotency-Key": "s-1"})
        accounts = [await rt.sources.get(name) for name in ("by-file", "by-variable", "by-api")]

    notification = signed(F0, SHOP.model_copy(update={"store_passwd": SecretStr(PASSWORD)}))
    assert (from_file.code, from_variable.code, from_api.status_code) == (0, 0, 201)
    assert [account and PROVIDER.authenticate(notification, account.configs) for account in accounts] == [Proof.PROVED] * 3
    assert "Pa#ss" not in from_file.out + from_file.err + from_variable.out + from_variable.err + from_api.text
