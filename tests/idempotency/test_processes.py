"""Our own API in processes of its own, on one database: many at once with one key, and one that dies with it."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ipn_gateway import tenants
from tests import processes
from tests.idempotency.service import is_replay, told
from tests.web.conftest import problem
from tests.world import SOURCE, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.processes import Process, Site

IN_PROGRESS = (409, "idempotency-in-progress")


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    """A database with a source and its provider; leases of keyed calls last five seconds."""
    async with processes.opened(database_url) as opened:
        opened.environment |= {"IPN_PROVIDER_MONEY_TIMEOUT_SECONDS": "1", "IPN_IDEMPOTENCY_LEASE_SECONDS": "5"}
        yield opened


async def client(site: Site) -> dict[str, str]:
    """The header of a merchant's API key."""
    return {"Authorization": f"Bearer {(await tenants.create_key(site.db, TENANT)).key}"}


async def create(site: Site, process: Process, caller: dict[str, str], order_id: str, key: str) -> httpx.Response:
    """One `POST /v1/orders`."""
    body: dict[str, Any] = {"order_id": order_id, "amount": "1000.00", "currency": "BDT", "source": SOURCE}
    return await site.http.post(f"{process.url}/v1/orders", json=body, headers=caller | {"Idempotency-Key": key})


@pytest.mark.case("S37", "S133")
@pytest.mark.timeout(90)
async def test_of_many_at_two_processes_exactly_one_executes(site: Site) -> None:
    """Fifty, then a hundred identical requests: one order, one answer for all who get one, the others are told to wait; no 5xx."""
    gateways = await asyncio.gather(site.start(roles="web"), site.start(roles="web"))
    caller = await client(site)
    for count in (50, 100):
        order_id = f"ORD-{count}"
        answers = await asyncio.gather(*(create(site, gateways[n % 2], caller, order_id, "K" * count) for n in range(count)))
        after = [await create(site, gateway, caller, order_id, "K" * count) for gateway in gateways]

        assert Counter(answer.status_code for answer in answers if not is_replay(answer)).keys() <= {201, 409}
        assert [answer.status_code for answer in answers if not is_replay(answer)].count(201) == 1
        assert {problem(answer) for answer in answers if answer.status_code != 201} <= {IN_PROGRESS}
        assert len({told(answer) for answer in [*answers, *after] if answer.status_code == 201}) == 1
        assert all(is_replay(answer) for answer in after)
        assert await site.value("SELECT count(*) FROM orders WHERE order_id = %(id)s", id=order_id) == 1
        assert await site.value("SELECT count(*) FROM idempotency_keys WHERE key = %(key)s", key="K" * count) == 1
    assert await site.value("SELECT count(*) FROM sweeps") == 2


@pytest.mark.case("B109", "S36", "S50")
@pytest.mark.timeout(90)
async def test_a_key_whose_process_was_killed_is_free_again_after_its_lease(site: Site) -> None:
    """Kill -9 in the middle of the order: 409 with a time while the lease lives, then the same key makes the one order that there is."""
    doomed, survivor = await asyncio.gather(site.start(crash_at="orders.create:before_commit", roles="web"), site.start(roles="web"))
    caller = await client(site)
    with pytest.raises(httpx.TransportError):
        await create(site, doomed, caller, "ORD-1", "K1")
    assert await doomed.ended() == -signal.SIGKILL
    during = await create(site, survivor, caller, "ORD-1", "K1")
    await site.until("SELECT count(*) FROM idempotency_keys WHERE lease_expires_at > ipn_now()", 0)
    after = await create(site, survivor, caller, "ORD-1", "K1")
    again = await create(site, survivor, caller, "ORD-1", "K1")

    assert problem(during) == IN_PROGRESS
    assert 1 <= int(during.headers["retry-after"]) <= 5
    assert (after.status_code, is_replay(after)) == (201, False)
    assert (told(again), is_replay(again)) == (told(after), True)
    assert await site.value("SELECT count(*) FROM orders") == 1
