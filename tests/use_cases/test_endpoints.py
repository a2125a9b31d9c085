"""Endpoints: their secrets, and what becomes of event deliveries when one is disabled, enabled or deleted."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from ipn_gateway import endpoints, events, logs, outbox
from ipn_gateway.endpoints import CreatedSecret, NewEndpoint
from ipn_gateway.errors import NotFound, StateConflict
from ipn_gateway.vault import Vault
from tests.make import TENANT, Make, ago, ahead

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults


@pytest.fixture
def vault() -> Vault:
    return Vault([SecretStr(Fernet.generate_key().decode())])


async def create(db: Database, vault: Vault) -> CreatedSecret:
    new = NewEndpoint(url="https://subscriber.example/", events=["*"])
    return await endpoints.create(db, vault, TENANT, new, secret_bytes=secrets.token_bytes(64), actor="test")


async def rotate(db: Database, vault: Vault, endpoint_id: UUID, *, overlap: float) -> str:
    made = await endpoints.rotate_secret(
        db, vault, TENANT, endpoint_id, overlap_seconds=overlap, secret_bytes=secrets.token_bytes(64), actor="test"
    )
    return made.secret


async def active(db: Database, vault: Vault, *endpoint_ids: UUID) -> dict[UUID, list[str]]:
    async with db.autocommit("test") as tx:
        return await endpoints.active_secrets(tx, vault, TENANT, endpoint_ids)


async def rows(db: Database, statement: str, **parameters: Any) -> list[dict[str, Any]]:
    async with db.autocommit("test") as tx:
        return await tx.all(dict, statement, parameters)


async def disable(db: Database, endpoint_id: UUID, reason: str = "gone") -> Any:
    async with db.transaction("test") as tx:
        return await endpoints.disable(tx, TENANT, endpoint_id, reason)


async def test_secrets_are_sealed_and_given_to_who_signs(db: Database, vault: Vault) -> None:
    """Of several endpoints in one question; one without any has none."""
    first, second, unknown = await create(db, vault), await create(db, vault), UUID(int=1)

    found = await active(db, vault, first.endpoint_id, second.endpoint_id, unknown)

    assert found == {first.endpoint_id: [first.secret], second.endpoint_id: [second.secret], unknown: []}
    assert first.secret not in repr(first)
    assert not any(first.secret.encode() in row["ciphertext"] for row in await rows(db, "SELECT ciphertext FROM endpoint_secrets"))


async def test_a_rotated_secret_signs_beside_the_new_one_until_its_overlap_ends(db: Database, vault: Vault, clock: Clock) -> None:
    """Newest first; a later rotation never prolongs an older overlap."""
    made = await create(db, vault)
    second = await rotate(db, vault, made.endpoint_id, overlap=3600)
    third = await rotate(db, vault, made.endpoint_id, overlap=86_400)
    assert (await active(db, vault, made.endpoint_id))[made.endpoint_id] == [third, second, made.secret]

    clock.advance(hours=1, seconds=1)
    assert (await active(db, vault, made.endpoint_id))[made.endpoint_id] == [third, second]

    alone = await rotate(db, vault, made.endpoint_id, overlap=0)
    assert (await active(db, vault, made.endpoint_id))[made.endpoint_id] == [alone]


async def test_secrets_of_one_endpoint_have_a_limit(db: Database, vault: Vault) -> None:
    """However many rotate at the same time; the ones that are refused change nothing."""
    made = await create(db, vault)

    results = await asyncio.gather(*(rotate(db, vault, made.endpoint_id, overlap=60) for _ in range(7)), return_exceptions=True)

    assert sum(isinstance(result, StateConflict) for result in results) == 7 - (endpoints.SECRETS_MAX - 1)
    assert len((await active(db, vault, made.endpoint_id))[made.endpoint_id]) == endpoints.SECRETS_MAX


async def test_only_one_of_many_disables_an_endpoint(db: Database, vault: Vault) -> None:
    """And knows the moment, which names the event; a deleted one is not disabled any more."""
    made = await create(db, vault)

    moments = await asyncio.gather(*(disable(db, made.endpoint_id) for _ in range(5)))

    assert len([moment for moment in moments if moment]) == 1
    row = (await rows(db, "SELECT status, disabled_reason, disabled_at FROM endpoints"))[0]
    assert (row["status"], row["disabled_reason"]) == ("disabled", "gone")
    assert row["disabled_at"] in moments
    await endpoints.enable(db, TENANT, made.endpoint_id, actor="test")
    await endpoints.delete(db, TENANT, made.endpoint_id, actor="test")
    assert await disable(db, made.endpoint_id) is None


async def test_enabling_makes_due_what_waited_oldest_first(db: Database, vault: Vault, make: Make) -> None:
    """Attempts go on being counted, health starts anew, and what is being sent at the moment is left alone."""
    made = await create(db, vault)
    await disable(db, made.endpoint_id)
    await make.endpoint_state(endpoint_id=made.endpoint_id, consecutive_failures=9, failing_since=ago(days=5))
    waiting = {"endpoint_id": made.endpoint_id, "next_attempt_at": ahead(hours=3), "attempt_count": 4}
    old = await make.event_delivery(**waiting, created_at=ago(days=2))
    new = await make.event_delivery(**waiting, created_at=ago(days=1))
    lost = await make.event_delivery(**waiting, created_at=ago(hours=1), lease_expires_at=ago(seconds=1))
    sent = await make.event_delivery(**waiting, lease_expires_at=ahead(seconds=30))
    await make.event_delivery(endpoint_id=made.endpoint_id, status="dead")

    await endpoints.enable(db, TENANT, made.endpoint_id, actor="test", reason="they are back")

    due = await rows(db, "SELECT id, attempt_count FROM event_deliveries WHERE next_attempt_at <= ipn_now() ORDER BY next_attempt_at")
    assert [row["id"] for row in due] == [old["id"], new["id"], lost["id"]]
    assert {row["attempt_count"] for row in due} == {4}
    assert len(await rows(db, "SELECT FROM event_deliveries WHERE id = %(id)s AND next_attempt_at > ipn_now()", id=sent["id"])) == 1
    assert await rows(db, "SELECT FROM endpoint_states WHERE consecutive_failures > 0 OR num_nonnulls(failing_since, open_until) > 0") == []
    assert (await rows(db, "SELECT action, reason FROM audit_log ORDER BY id"))[-1] == {
        "action": "endpoint.enable",
        "reason": "they are back",
    }


async def test_enabling_an_enabled_one_changes_nothing(db: Database, vault: Vault, make: Make) -> None:
    """Retries keep their times; there is no entry in the audit log."""
    made = await create(db, vault)
    await make.event_delivery(endpoint_id=made.endpoint_id, next_attempt_at=ahead(hours=3))

    await endpoints.enable(db, TENANT, made.endpoint_id, actor="test")

    assert len(await rows(db, "SELECT FROM event_deliveries WHERE next_attempt_at > ipn_now()")) == 1
    assert [row["action"] for row in await rows(db, "SELECT action FROM audit_log")] == ["endpoint.create"]


@pytest.mark.case("B87")
async def test_deleting_cancels_what_is_pending_and_leaves_the_lease_of_what_is_being_sent(db: Database, vault: Vault, make: Make) -> None:
    """An attempt under way is written down under it; nothing is claimed any more, and nothing of other endpoints is touched."""
    made, other = await create(db, vault), await create(db, vault)
    sent = await make.event_delivery(endpoint_id=made.endpoint_id, lease_expires_at=ahead(seconds=30), fence=7)
    await make.event_delivery(endpoint_id=made.endpoint_id)
    await make.event_delivery(endpoint_id=made.endpoint_id, status="delivered")
    kept = await make.event_delivery(endpoint_id=other.endpoint_id)

    assert await endpoints.delete(db, TENANT, made.endpoint_id, actor="test") == 2

    found = {row["id"]: row for row in await rows(db, "SELECT id, status, fence, lease_expires_at FROM event_deliveries")}
    assert sorted(row["status"] for row in found.values()) == ["cancelled", "cancelled", "delivered", "pending"]
    assert (found[sent["id"]]["fence"], found[sent["id"]]["lease_expires_at"]) == (7, sent["lease_expires_at"])
    assert found[kept["id"]]["status"] == "pending"


async def test_many_are_cancelled_and_made_due_in_batches(db: Database, vault: Vault, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a transaction of its own: no number of event deliveries meets the limit of a statement."""
    monkeypatch.setattr(endpoints, "BATCH", 2)
    made = await create(db, vault)
    await disable(db, made.endpoint_id)
    for _ in range(5):
        await make.event_delivery(endpoint_id=made.endpoint_id, next_attempt_at=ahead(hours=3))
    before = Counter(logs.counters)

    await endpoints.enable(db, TENANT, made.endpoint_id, actor="test")
    due = await rows(db, "SELECT FROM event_deliveries WHERE next_attempt_at = created_at")
    assert await endpoints.delete(db, TENANT, made.endpoint_id, actor="test") == 5

    begun = Counter(logs.counters) - before
    assert len(due) == 5
    assert begun["transactions.endpoints.enable"] == begun["transactions.endpoints.cancel_deliveries"] == 4


async def test_an_endpoint_is_enabled_only_when_all_that_waited_is_due(
    db: Database, vault: Vault, make: Make, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies between the batches leaves it disabled; enabling it again goes on from there."""
    monkeypatch.setattr(endpoints, "BATCH", 2)
    made = await create(db, vault)
    await disable(db, made.endpoint_id)
    for _ in range(3):
        await make.event_delivery(endpoint_id=made.endpoint_id, next_attempt_at=ahead(hours=3))

    async def die() -> None:
        raise Died

    faults.on["endpoints.enable:after_commit"] = die
    with pytest.raises(Died):
        await endpoints.enable(db, TENANT, made.endpoint_id, actor="test")
    half = (await rows(db, "SELECT status FROM endpoints"))[0]["status"]
    faults.on.clear()
    await endpoints.enable(db, TENANT, made.endpoint_id, actor="test")

    assert half == "disabled"
    assert (await rows(db, "SELECT status FROM endpoints"))[0]["status"] == "enabled"
    assert len(await rows(db, "SELECT FROM event_deliveries WHERE next_attempt_at = created_at")) == 3


async def test_what_is_staged_while_its_endpoint_is_deleted_is_cancelled_afterwards(db: Database, clock: Clock, vault: Vault) -> None:
    """The event's transaction saw the endpoint and commits after it is gone; nothing of other endpoints is touched."""
    made, other = await create(db, vault), await create(db, vault)
    saw, go_on = asyncio.Event(), asyncio.Event()

    async def stage() -> None:
        data = events.EndpointData(endpoint_id="ep_1", url="https://subscriber.example")
        async with db.transaction("test.stage") as tx:
            await outbox.stage(tx, clock, TENANT, [events.new("evt_1", "endpoint.test", clock.now(), data)])
            saw.set()
            await go_on.wait()

    staging = asyncio.create_task(stage())
    await saw.wait()
    assert await endpoints.delete(db, TENANT, made.endpoint_id, actor="test") == 0
    assert await endpoints.cancel_left_over(db) == 0
    go_on.set()
    await staging

    assert await endpoints.cancel_left_over(db) == 1
    assert await endpoints.cancel_left_over(db) == 0
    found = {row["endpoint_id"]: row["status"] for row in await rows(db, "SELECT endpoint_id, status FROM event_deliveries")}
    assert found == {made.endpoint_id: "cancelled", other.endpoint_id: "pending"}


class Died(BaseException):
    """What a test makes a process die of."""


async def test_nobody_else_acts_on_an_endpoint(db: Database, vault: Vault) -> None:
    """Another tenant, or anybody on one that is deleted."""
    made = await create(db, vault)
    deleted = await create(db, vault)
    await endpoints.delete(db, TENANT, deleted.endpoint_id, actor="test")

    for tenant, endpoint_id in (("other", made.endpoint_id), (TENANT, deleted.endpoint_id), (TENANT, UUID(int=1))):
        with pytest.raises(NotFound):
            await endpoints.patch(db, tenant, endpoint_id, {"description": "x"}, actor="test")
        with pytest.raises(NotFound):
            await endpoints.enable(db, tenant, endpoint_id, actor="test")
        with pytest.raises(NotFound):
            await endpoints.delete(db, tenant, endpoint_id, actor="test")
        with pytest.raises(NotFound):
            await endpoints.rotate_secret(db, vault, tenant, endpoint_id, overlap_seconds=0, secret_bytes=bytes(64), actor="test")


async def test_a_tenant_has_no_more_endpoints_than_one_event_reaches(db: Database, vault: Vault, make: Make) -> None:
    """One more would miss events and nobody would see it: it is refused, also when two come at once; each of the others gets the event."""
    await make.tenant()
    gone = await make.endpoint(deleted_at=ago(days=1))
    for _ in range(endpoints.ENDPOINTS_MAX - 1):
        await make.endpoint()

    made = await asyncio.gather(*(create(db, vault) for _ in range(3)), return_exceptions=True)

    assert Counter(type(each) for each in made) == {CreatedSecret: 1, StateConflict: 2}
    async with db.transaction("test.stage") as tx:
        event = events.custom(f"evt_{'a' * 32}", "shop.sent", await tx.value("SELECT ipn_now()"), {}, order_id=None)
        assert await outbox.stage(tx, db.clock, TENANT, [event]) == endpoints.ENDPOINTS_MAX
    found = await rows(db, "SELECT count(DISTINCT endpoint_id) AS count FROM event_deliveries WHERE endpoint_id <> %(id)s", id=gone["id"])
    assert found == [{"count": endpoints.ENDPOINTS_MAX}]
