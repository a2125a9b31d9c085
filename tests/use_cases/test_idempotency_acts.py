"""Keys beside their driving: shown, doubted when abandoned, settled by a person, pruned when their time is over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from ipn_gateway import db as db_module
from ipn_gateway import gauges, idempotency_acts, ids
from ipn_gateway.errors import (
    IdempotencyIndeterminate,
    IdempotencyInProgress,
    NotFound,
    Overloaded,
    PoolExhausted,
    RateLimited,
    StateConflict,
    ValidationFailed,
)
from ipn_gateway.idempotency import CALLING_PER_TENANT, Answer, Idempotency, KeyedRequest
from ipn_gateway.idempotency_acts import Resolution
from ipn_gateway.idempotency_keys import OPEN_MAX
from ipn_gateway.operations import Advance, Downstream, Finished, Operation, Phase, Step, Work
from ipn_gateway.paging import Wanted
from tests.make import TENANT

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database, Transaction

LOCAL = Operation(name="POST /notes", fields={"text": "json"}, downstream=Downstream.LOCAL)
CHARGE = Operation(
    name="POST /charges",
    fields={"amount": "decimal"},
    downstream=Downstream.NONE,
    key_required=True,
    money=True,
    phases=("started", "asking"),
    intents=frozenset({"asking"}),
)
LEASE = 30.0


class Provider:
    """Counts effects by our key; one call may vanish: its effect happens and nobody hears of it."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.vanish = False

    async def charge(self, work: Work) -> str:
        self.keys.append(work.downstream_key("charge", 30))
        if self.vanish:
            raise asyncio.CancelledError
        return "ok"

    def phases(self) -> dict[str, Phase]:
        async def reserve(_: Transaction, __: Work, ___: Any) -> Advance:
            return Advance("asking")

        async def record(_: Transaction, __: Work, outcome: str) -> Finished:
            return Finished(201, f'{{"outcome":"{outcome}"}}'.encode())

        return {"started": Phase("charges.reserve", reserve), "asking": Phase("charges.record", record, self.charge)}


@pytest.fixture
def layer(db: Database) -> Idempotency:
    return Idempotency(db, [LOCAL, CHARGE], lease_seconds=LEASE, retention_hours=168)


async def note(layer: Idempotency, key: str, text: str = "x", tenant: str = TENANT) -> Answer:
    async def commit(_: Transaction, __: Work, ___: Any) -> Finished:
        return Finished(201, f'{{"text":"{text}"}}'.encode())

    return await layer.run(LOCAL, KeyedRequest(tenant, key, {"text": text}), {"started": Phase("notes.add", commit)})


async def charge(layer: Idempotency, provider: Provider, key: str = "k-1") -> Answer:
    return await layer.run(CHARGE, KeyedRequest(TENANT, key, {"amount": "10"}), provider.phases())


async def vanished(layer: Idempotency, provider: Provider, clock: Clock, key: str = "k-1") -> UUID:
    """A charge whose worker died in the call; its lease is over. The key's id."""
    provider.vanish = True
    with pytest.raises(asyncio.CancelledError):
        await charge(layer, provider, key)
    provider.vanish = False
    clock.advance(seconds=LEASE + 1)
    async with layer._db.autocommit("test") as tx:
        found = await tx.value("SELECT id FROM idempotency_keys WHERE key = %(key)s", {"key": key})
    assert isinstance(found, UUID)
    return found


async def resolve(layer: Idempotency, clock: Clock, key_id: UUID, decision: Any, tenant: str = TENANT, **given: Any) -> None:
    async with layer._db.transaction("idempotency_keys.resolve") as tx:
        resolution = Resolution(tenant, key_id, decision, actor="test", reason="looked", **given)
        await idempotency_acts.resolve(tx, clock, layer.operations, resolution)


async def states(db: Database, tenant: str = TENANT, **filters: Any) -> list[tuple[str, str]]:
    async with db.autocommit("test") as tx:
        page = await idempotency_acts.page(tx, tenant, Wanted(), **({"state": None, "key": None, "operation": None} | filters))
    return [(item.key, item.state) for item in page.items]


@pytest.mark.case("S62", "S61")
async def test_what_a_person_saw_is_the_answer_of_every_repeat(layer: Idempotency, clock: Clock, db: Database) -> None:
    """Unknown, it is answered 409 with the id to settle it by, however often; then with what the person says, and never executed again."""
    provider = Provider()
    key_id = await vanished(layer, provider, clock)
    for _ in range(20):
        with pytest.raises(IdempotencyIndeterminate) as told:
            await charge(layer, provider)
        assert told.value.document()["reconciliation_id"] == ids.show(ids.IDEMPOTENCY_KEY, key_id)

    await resolve(layer, clock, key_id, "applied", response=(201, {"seen": "in the panel"}))
    await resolve(layer, clock, key_id, "applied", response=(201, {"seen": "in the panel"}))
    answer = await charge(layer, provider)

    assert (answer.status, answer.body, answer.replayed) == (201, b'{"seen":"in the panel"}', True)
    assert len(provider.keys) == 1
    async with db.autocommit("test") as tx:
        entries = await tx.all(dict, "SELECT actor, action, reason FROM audit_log")
    assert entries == [{"actor": "test", "action": "idempotency_key.applied", "reason": "looked"}]


@pytest.mark.case("S62", "S68", "K19")
async def test_what_did_not_happen_may_be_executed_with_a_new_downstream_key(layer: Idempotency, clock: Clock) -> None:
    """A definite failure frees the key; the provider, which may remember the old one for ever, gets another."""
    provider = Provider()
    key_id = await vanished(layer, provider, clock)
    with pytest.raises(IdempotencyIndeterminate):
        await charge(layer, provider)

    await resolve(layer, clock, key_id, "not_applied")
    answer = await charge(layer, provider)

    assert (answer.status, answer.replayed) == (201, False)
    assert len(provider.keys) == len(set(provider.keys)) == 2


@pytest.mark.case("S62")
async def test_only_what_waits_for_a_person_can_be_settled(layer: Idempotency, clock: Clock, db: Database) -> None:
    """A completed key, another tenant's, and one without its answer: refused, and nothing changes."""
    provider = Provider()
    await note(layer, "n-1")
    async with db.autocommit("test") as tx:
        completed = await tx.value("SELECT id FROM idempotency_keys")
    with pytest.raises(StateConflict):
        await resolve(layer, clock, completed, "not_applied")
    key_id = await vanished(layer, provider, clock)
    await idempotency_acts.doubt_abandoned(db, layer.operations)

    with pytest.raises(ValidationFailed):
        await resolve(layer, clock, key_id, "applied")
    with pytest.raises(NotFound):
        await resolve(layer, clock, key_id, "not_applied", tenant="other")
    assert await states(db) == [("k-1", "indeterminate"), ("n-1", "completed")]


@pytest.mark.case("S59", "S62")
async def test_what_was_abandoned_in_a_call_is_found_without_its_client(layer: Idempotency, clock: Clock, db: Database) -> None:
    """The maintenance role marks it once its lease is over, once; a client that never comes back hides nothing."""
    provider = Provider()
    await vanished(layer, provider, clock)

    marked = [await idempotency_acts.doubt_abandoned(db, layer.operations) for _ in range(2)]

    assert marked == [1, 0]
    assert await states(db, state="indeterminate") == [("k-1", "indeterminate")]


@pytest.mark.case("S140")
async def test_a_tenant_reads_the_state_of_its_own_keys(layer: Idempotency, clock: Clock, db: Database) -> None:
    """By key and by operation, in each of the three states, without executing anything; another tenant sees nothing."""
    provider = Provider()
    await vanished(layer, provider, clock, "k-lost")
    await idempotency_acts.doubt_abandoned(db, layer.operations)
    provider.vanish = True
    with pytest.raises(asyncio.CancelledError):
        await charge(layer, provider, "k-open")
    await note(layer, "n-1")

    assert await states(db, key="k-lost") == [("k-lost", "indeterminate")]
    assert await states(db, operation=CHARGE.name) == [("k-open", "in_progress"), ("k-lost", "indeterminate")]
    assert await states(db, operation=LOCAL.name, key="n-1") == [("n-1", "completed")]
    assert await states(db, "other") == []
    assert len(provider.keys) == 2


@pytest.mark.case("S94", "S95", "S98")
async def test_only_completed_keys_are_pruned_and_only_after_their_time(layer: Idempotency, clock: Clock, db: Database) -> None:
    """Until it is deleted a key gives its stored answer; afterwards it is a new request. Open ones stay for ever."""
    provider = Provider()
    await vanished(layer, provider, clock)
    await note(layer, "n-1")
    clock.advance(hours=168, seconds=-5)
    assert await idempotency_acts.prune(db) == 0
    clock.advance(seconds=10)
    assert (await note(layer, "n-1")).replayed

    assert await idempotency_acts.prune(db) == 1
    assert not (await note(layer, "n-1")).replayed
    assert await states(db, key="k-1") == [("k-1", "in_progress")]


@pytest.mark.case("S99")
@pytest.mark.timeout(60)
async def test_pruning_goes_in_batches_that_block_no_claim(layer: Idempotency, clock: Clock, db: Database) -> None:
    """Of 20,000 expired keys each statement takes 1,000, and a key claimed while one is being deleted waits for nothing."""
    async with db.transaction("test") as tx:
        await tx.execute(
            """INSERT INTO idempotency_keys (tenant_id, operation, key, id, fingerprint, fingerprint_version, state, response_status,
                                             expires_at)
               SELECT 'shop', 'POST /notes', 'old-' || n, gen_random_uuid(), '', 1, 'completed', 200, ipn_now() - interval '1 day'
                 FROM generate_series(1, 20000) AS n"""
        )
    async with db.transaction("test.pruning") as tx:
        pruned = await tx.execute(idempotency_acts._PRUNE, {"batch": idempotency_acts.PRUNED_AT_ONCE})
        other = asyncio.ensure_future(_outside(note(layer, "n-1")))
        async with asyncio.timeout(5):
            answer = await other
    rest = 0
    while batch := await idempotency_acts.prune(db):
        assert batch <= idempotency_acts.PRUNED_AT_ONCE
        rest += batch

    assert pruned == idempotency_acts.PRUNED_AT_ONCE
    assert answer.status == 201
    assert rest == 19_000


async def _outside(work: Any) -> Any:
    """Away from the transaction of the test itself."""
    db_module._open.set(None)
    return await work


@pytest.mark.case("S139")
async def test_a_tenants_open_keys_are_bounded(layer: Idempotency, db: Database) -> None:
    """One with a thousand open ones is refused a new key before it is claimed, may still repeat its old ones, and others notice nothing."""
    await note(layer, "n-1")
    async with db.transaction("test") as tx:
        await tx.execute(
            """INSERT INTO idempotency_keys (tenant_id, operation, key, id, fingerprint, fingerprint_version, lease_expires_at, expires_at)
               SELECT 'shop', 'POST /notes', 'open-' || n, gen_random_uuid(), '', 1, ipn_now() + interval '1 hour',
                      ipn_now() + interval '8 day'
                 FROM generate_series(1, %(most)s) AS n""",
            {"most": OPEN_MAX},
        )

    with pytest.raises(RateLimited) as told:
        await note(layer, "n-2")
    assert told.value.retry_after_seconds
    assert (await note(layer, "n-1")).replayed
    assert (await note(layer, "n-2", tenant="other")).status == 201
    assert await states(db, key="n-2") == []


@pytest.mark.case("S139")
async def test_what_nobody_comes_back_for_locks_no_tenant_out(layer: Idempotency, db: Database) -> None:
    """A thousand keys whose lease is over are not open any more: they stay, and a new key is claimed beside them."""
    async with db.transaction("test") as tx:
        await tx.execute(
            """INSERT INTO idempotency_keys (tenant_id, operation, key, id, fingerprint, fingerprint_version, lease_expires_at, expires_at)
               SELECT 'shop', 'POST /notes', 'left-' || n, gen_random_uuid(), '', 1, ipn_now() - interval '1 hour',
                      ipn_now() + interval '7 day'
                 FROM generate_series(1, %(most)s) AS n""",
            {"most": OPEN_MAX},
        )

    answer = await note(layer, "n-1")

    assert answer.status == 201


@pytest.mark.case("S139", "S66")
async def test_a_provider_that_hangs_keeps_the_other_tenants_out_of_nothing(layer: Idempotency) -> None:
    """Of one tenant so many calls may be open, and no more; another tenant's call and a local operation go on beside them."""
    provider, hanging, asked = Provider(), asyncio.Event(), asyncio.Semaphore(0)

    async def hang(_: Work) -> str:
        asked.release()
        await hanging.wait()
        return "late"

    phases = provider.phases() | {"asking": Phase("charges.record", provider.phases()["asking"].commit, hang)}
    calls = [
        asyncio.ensure_future(layer.run(CHARGE, KeyedRequest(TENANT, f"k-{number}", {"amount": "1"}), phases))
        for number in range(CALLING_PER_TENANT)
    ]
    for _ in calls:
        await asked.acquire()

    with pytest.raises(Overloaded):
        await charge(layer, provider, "one-more")
    others = await layer.run(CHARGE, KeyedRequest("other", "k-1", {"amount": "1"}), provider.phases())
    local = await note(layer, "n-1")
    hanging.set()
    answers = await asyncio.gather(*calls)

    assert (others.status, local.status) == (201, 201)
    assert {answer.status for answer in answers} == {201}
    assert (await charge(layer, provider, "one-more")).status == 201


@pytest.mark.case("S59", "S103")
async def test_what_the_provider_said_is_recorded_when_the_database_is_back(layer: Idempotency) -> None:
    """A call that must not be repeated is not thrown away for a moment without connections: its record is tried again within the lease."""
    provider, away = Provider(), [PoolExhausted(), PoolExhausted()]
    record = provider.phases()["asking"]

    async def busy(tx: Transaction, work: Work, outcome: str) -> Step:
        if away:
            raise away.pop()
        return await record.commit(tx, work, outcome)

    phases = provider.phases() | {"asking": Phase(record.transaction, busy, record.call)}
    answer = await layer.run(CHARGE, KeyedRequest(TENANT, "k-1", {"amount": "10"}), phases)

    assert (answer.status, answer.replayed) == (201, False)
    assert (await charge(layer, provider)).replayed
    assert len(provider.keys) == 1


@pytest.mark.case("S55", "S59")
async def test_an_owner_that_is_too_late_is_told_what_is_true(db: Database) -> None:
    """Its call took longer than may be: never that it may be sent again, while the outcome is not known."""
    layer, provider = Idempotency(db, [CHARGE], lease_seconds=0.5, retention_hours=168), Provider()

    async def hang(_: Work) -> str:
        await asyncio.Event().wait()
        return "never"

    phases = provider.phases() | {"asking": Phase("charges.record", provider.phases()["asking"].commit, hang)}
    with pytest.raises((IdempotencyInProgress, IdempotencyIndeterminate)):
        await layer.run(CHARGE, KeyedRequest(TENANT, "k-1", {"amount": "10"}), phases)


@pytest.mark.case("S62")
async def test_a_decision_is_about_one_execution(layer: Idempotency, clock: Clock, db: Database) -> None:
    """Freed and then executed, a key waits for nobody: the old decision is refused, and so is the same one with other evidence."""
    provider = Provider()
    key_id = await vanished(layer, provider, clock)
    await resolve(layer, clock, key_id, "not_applied")
    await resolve(layer, clock, key_id, "not_applied")
    await charge(layer, provider)
    other = await vanished(layer, provider, clock, "k-2")
    await resolve(layer, clock, other, "applied", response=(201, {}), evidence={"seen": "here"})
    await resolve(layer, clock, other, "applied", response=(201, {}), evidence={"seen": "here"})

    with pytest.raises(StateConflict):
        await resolve(layer, clock, key_id, "not_applied")
    with pytest.raises(StateConflict):
        await resolve(layer, clock, other, "applied", response=(201, {}), evidence={"seen": "there"})
    async with db.autocommit("test") as tx:
        assert await tx.value("SELECT count(*) FROM audit_log") == 2


@pytest.mark.case("S94", "S62")
async def test_a_freed_key_that_nobody_uses_again_goes_with_its_time(layer: Idempotency, clock: Clock, db: Database) -> None:
    """It is not abandoned work: no gauge counts it, and after its retention it is deleted."""
    key_id = await vanished(layer, Provider(), clock)
    await resolve(layer, clock, key_id, "not_applied")
    abandoned = {reading.gauge: reading.value for reading in await gauges.read(db)}["idempotency_keys_abandoned"]
    clock.advance(hours=169)

    assert abandoned == 0
    assert await idempotency_acts.prune(db) == 1
    assert await states(db) == []
