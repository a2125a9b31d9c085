"""Running stored notification deliveries again: authenticated anew, one effect at most, one or many, counted first if wanted."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import replays, sources
from ipn_gateway.errors import NotFound, ValidationFailed
from ipn_gateway.sources import Sources
from tests.world import PASSWORD, SOURCE, STORE, TENANT, shown

if TYPE_CHECKING:
    from ipn_gateway.notifications import Receipt
    from tests.world import World

NEW = "Changed@Pass2"


async def replay(world: World, receipt: Receipt, tenant: str = TENANT) -> str:
    assert receipt.delivery_id is not None
    return await replays.replay(world.rt.db, world.rt.sources, tenant, receipt.delivery_id, actor="test", reason="once more")


async def replay_many(world: World, outcome: str = "rejected", **given: Any) -> replays.Replayed:
    bounds = {name: given.pop(name) for name in ("since", "until") if name in given}
    selection = replays.Selection(given.pop("source", SOURCE), outcome, **bounds)
    return await replays.replay_many(world.rt.db, world.rt.sources, TENANT, selection, actor="test", reason="once more", **given)


async def change_password(world: World) -> None:
    """In another process: this one is not told."""
    await sources.patch(world.rt.db, world.rt.vault, TENANT, SOURCE, {"store_passwd": NEW}, actor="test")


def provider_takes(world: World, password: str) -> None:
    """The provider's own answers to questions with it."""
    world.simulator.api.bank.stores = {STORE: password}


async def audited(world: World, action: str = "notification_delivery.replay") -> list[str]:
    return [
        row["target"] for row in await world.rows("SELECT target FROM audit_log WHERE action = %(action)s ORDER BY target", action=action)
    ]


@pytest.mark.case("S111", "B57")
async def test_a_changed_password_loses_no_genuine_notification(world: World) -> None:
    """20 signed with the old and the new one, before and after we are told: all are applied, and the sender is not needed again."""
    bodies = {}
    for number in range(20):
        await world.order(f"ORD-{number}")
        bodies[number] = world.signed(world.pay(f"ORD-{number}"), NEW if number % 2 else PASSWORD)
    provider_takes(world, NEW)  # the provider's validator takes the new one from now on
    early = [await world.notify(bodies[number]) for number in range(10)]
    assert [receipt.error is not None for receipt in early] == [False, True] * 5

    await change_password(world)
    late = [await world.notify(bodies[number]) for number in range(10, 20)]
    await world.drain()
    assert [receipt.error for receipt in late] == [None] * 10
    found = await replay_many(world)
    world.rt.clock.advance(seconds=1)
    await world.drain()

    assert (found.count, found.refused, found.settled, found.next_cursor) == (5, 0, 0, None)
    assert await world.outcomes() == ["applied"] * 20
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'paid'") == 20
    assert await world.value("SELECT count(*) FROM payments") == 20
    assert await audited(world) == sorted(shown(receipt) for receipt in early[1::2])


@pytest.mark.case("S111")
async def test_what_is_forged_is_refused_again(world: World) -> None:
    """A replay believes nothing: the hash is looked at with every secret that authenticates, and nothing changes."""
    await world.order("ORD-1")
    forged = await world.notify(world.signed(world.pay("ORD-1"), "no password of ours"))
    before = (await world.rows("SELECT * FROM notification_deliveries"))[0]

    assert await replay(world, forged) == "refused"
    found = await replay_many(world)
    await world.drain()

    assert (found.count, found.refused) == (0, 1)
    assert (await world.rows("SELECT * FROM notification_deliveries"))[0] == before
    assert await world.status("ORD-1") == "pending"
    assert world.questions == 0
    assert await audited(world) == [shown(forged)]


async def test_a_replaced_secret_authenticates_replays_for_seven_days(world: World) -> None:
    """Then no longer: what is replayed after that is refused, and keeps what it had."""
    await world.order("ORD-1")
    receipt = await world.notify(world.pay("ORD-1", "400.00"))
    await world.drain()
    await change_password(world)

    world.rt.clock.advance(days=6)
    assert await replay(world, receipt) == "put_back"
    provider_takes(world, NEW)
    await world.drain()
    world.rt.clock.advance(days=2)

    assert await replay(world, receipt) == "refused"
    assert await world.outcome(receipt) == ("held", "amount")


async def test_whatever_is_replayed_has_one_effect(world: World) -> None:
    """What wrote the ledger is left as it is; a duplicate stays one; both as often as one likes."""
    await world.order("ORD-1")
    fields = world.pay("ORD-1")
    receipts = [await world.notify(fields) for _ in range(2)]
    await world.drain()

    for _ in range(3):
        results = [await replay(world, receipt) for receipt in receipts]
        await world.drain()

    assert sorted(results) == ["put_back", "settled"]
    assert sorted(await world.outcomes()) == ["applied", "duplicate"]
    assert (await world.counts())["payments"] == (await world.counts())["processed_notifications"] == 1
    assert await world.event_types() == ["order.paid"]


async def test_a_dead_one_is_asked_about_again_on_the_whole_schedule(world: World) -> None:
    """The provider is back: replayed in bulk, all that died meanwhile are applied."""
    receipts = []
    world.fault("validator", "status500", times=None)
    for number in range(3):
        await world.order(f"ORD-{number}")
        receipts.append(await world.notify(world.pay(f"ORD-{number}")))
    await world.value("UPDATE inbox SET asked = 1000 RETURNING 1")
    await world.drain()
    assert await world.outcomes() == ["dead"] * 3
    world.simulator.api.faults.clear()

    found = await replay_many(world, "dead")
    for _ in range(4):
        world.rt.clock.advance(seconds=2)
        await world.drain()

    assert found.count == 3
    assert await world.outcomes() == ["applied"] * 3


@pytest.mark.case("B52")
async def test_what_was_refuted_under_a_wrong_configuration_is_replayed_together(world: World) -> None:
    """The provider said of all that it knows none; the fault was ours, and no order is failed. Put right, all are applied."""
    world.fault("validator", "invalid_transaction", times=None)
    for number in range(3):
        await world.order(f"ORD-{number}")
        await world.notify(world.pay(f"ORD-{number}"))
    await world.value("UPDATE inbox SET refuted = 100 RETURNING 1")
    await world.drain()
    assert await world.outcomes() == ["rejected"] * 3
    assert await world.value("SELECT count(*) FROM orders WHERE status = 'pending'") == 3
    world.simulator.api.faults.clear()

    found = await replay_many(world)
    world.rt.clock.advance(seconds=1)
    await world.drain()

    assert found.count == 3
    assert await world.outcomes() == ["applied"] * 3


async def test_a_second_payment_that_was_held_is_booked_as_unapplied(world: World) -> None:
    """Held for its amount before the order was paid otherwise: replayed, its money is on record and can be refunded."""
    await world.order("ORD-1")
    part = await world.notify(world.pay("ORD-1", "400.00"))
    await world.drain()
    await world.notify(world.pay("ORD-1"))
    await world.drain()

    await replay(world, part)
    await world.drain()

    assert await world.outcome(part) == ("conflict", "second_payment")
    assert await replay(world, part) == "settled"
    assert await world.outcome(part) == ("conflict", "second_payment")
    assert await world.value("SELECT count(*) FROM payments WHERE status = 'unapplied'") == 1


async def test_one_that_is_due_or_worked_on_is_left_to_the_worker(world: World) -> None:
    """Replaying it disturbs no lease and writes no entry; one that waits for its next question is due at once."""
    await world.order("ORD-1")
    world.fault("validator", "status500")
    receipt = await world.notify(world.pay("ORD-1"))
    assert await replay(world, receipt) == "waiting"
    await world.value(
        "UPDATE inbox SET lease_expires_at = ipn_now() + interval '1 minute', due_at = ipn_now() + interval '1 day' RETURNING 1"
    )
    assert await replay(world, receipt) == "waiting"
    await world.value("UPDATE inbox SET lease_expires_at = NULL, due_at = ipn_now() RETURNING 1")
    await world.drain()
    assert await world.outcome(receipt) == ("received", None)

    assert await replay(world, receipt) == "put_back"
    await world.drain()

    assert await world.outcome(receipt) == ("applied", None)
    assert await audited(world) == [shown(receipt)]


async def test_a_late_worker_does_not_pass_for_the_one_after_a_replay(world: World) -> None:
    """The fence of new work is above any that there was before."""
    await world.order("ORD-1")
    receipt = await world.notify(world.signed(world.pay("ORD-1"), "wrong"))
    await world.value("UPDATE notification_deliveries SET proof = 'proved' RETURNING 1")
    provider_takes(world, "wrong")
    await sources.patch(world.rt.db, world.rt.vault, TENANT, SOURCE, {"store_passwd": "wrong"}, actor="test")

    await replay(world, receipt)

    assert await world.value("SELECT fence FROM inbox") > 1_000_000_000_000


async def test_a_dry_run_counts_and_changes_nothing(world: World) -> None:
    """The same counts as the act, no entry in the audit log, and nothing due."""
    await world.order("ORD-1")
    await world.notify(world.signed(world.pay("ORD-1"), NEW))
    await world.notify(world.signed(world.pay("ORD-1"), "forged"))
    await change_password(world)
    before = await world.rows("SELECT * FROM notification_deliveries ORDER BY id")

    found = await replay_many(world, dry_run=True)

    assert (found.count, found.refused) == (1, 1)
    assert await world.rows("SELECT * FROM notification_deliveries ORDER BY id") == before
    assert await world.value("SELECT count(*) FROM inbox") == 0
    assert await audited(world) == await audited(world, "source.replay") == []
    assert (await replay_many(world)).count == 1
    assert await audited(world, "source.replay") == [SOURCE]


async def test_many_are_bounded_by_time_and_become_due_one_after_the_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open like every range here, in batches, at a rate, so that nothing new is held up; the next call goes on, behind them."""
    monkeypatch.setattr(replays, "BATCH", 2)
    monkeypatch.setattr(replays, "LOOKED_AT_MAX", 4)
    await world.order("ORD-1")
    receipts = [await world.notify(world.signed(world.pay("ORD-1"), NEW)) for _ in range(7)]
    await change_password(world)
    times = [row["received_at"] for row in await world.rows("SELECT received_at FROM notification_deliveries ORDER BY id")]

    assert (await replay_many(world, since=times[1], until=times[3], dry_run=True)).count == 2
    assert (await replay_many(world, until=times[0], dry_run=True)).count == 0
    first = await replay_many(world)
    second = await replay_many(world, cursor=first.next_cursor)

    assert (first.count, first.next_cursor) == (4, f"{shown(receipts[3])}.4")
    assert (second.count, second.next_cursor) == (3, None)
    assert first + second == replays.Replayed(7, 0, 0, None)
    waits = [row["due_at"] for row in await world.rows("SELECT due_at FROM inbox ORDER BY notification_delivery_id")]
    assert len(waits) == len(receipts)
    assert timedelta(milliseconds=50) < waits[3] - waits[0] < timedelta(milliseconds=1000)
    assert waits == sorted(waits)
    assert (await replay_many(world)).count == 0


@pytest.mark.parametrize("dry_run", [False, True])
async def test_what_is_refused_in_one_moment_keeps_nothing_from_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    """Each is looked at once, however many were received at the same time and stay as they are: the calls come to an end."""
    monkeypatch.setattr(replays, "BATCH", 2)
    monkeypatch.setattr(replays, "LOOKED_AT_MAX", 2)
    for _ in range(5):
        await world.notify(world.signed(world.pay("ORD-1"), "forged"))
    await world.value("UPDATE notification_deliveries SET received_at = (SELECT min(received_at) FROM notification_deliveries) RETURNING 1")

    found, cursors = await replay_many(world, dry_run=dry_run), list[str]()
    while found.next_cursor and len(cursors) < 5:
        cursors.append(found.next_cursor)
        found += await replay_many(world, dry_run=dry_run, cursor=found.next_cursor)

    assert (found.refused, len(cursors)) == (5, 2)


@pytest.mark.parametrize("cursor", ["", "ndl_1.2", f"ndl_{'0' * 32}", f"ndl_{'0' * 32}.-1", f"ndl_{'0' * 32}.٣", f"edl_{'0' * 32}.1"])
async def test_a_cursor_that_no_call_gave_is_refused(world: World, cursor: str) -> None:
    """And nothing is run again."""
    await world.notify(world.signed(world.pay("ORD-1"), "forged"))

    with pytest.raises(ValidationFailed, match="cursor"):
        await replay_many(world, cursor=cursor)
    assert await audited(world, "source.replay") == []


async def test_what_fits_is_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the same bounds as the act; not beyond what can be counted quickly."""
    for _ in range(3):
        await world.notify(world.signed(world.pay("ORD-1"), "forged"))
    last = (await world.rows("SELECT max(received_at) AS at FROM notification_deliveries"))[0]["at"]
    selections = [replays.Selection(SOURCE, "rejected", *bounds) for bounds in ((None, None), (None, last), (last, None))]

    counts = [await replays.how_many(world.rt.db, TENANT, selection) for selection in selections]
    others = await replays.how_many(world.rt.db, "other", selections[0])
    monkeypatch.setattr(replays, "COUNTED_MAX", 2)

    assert (counts, others) == ([3, 2, 1], 0)
    assert await replays.how_many(world.rt.db, TENANT, selections[0]) is None


async def test_only_one_s_own_is_replayed(world: World) -> None:
    """Another tenant's delivery and source are as if they were not there."""
    receipt = await world.notify(world.pay("ORD-1"))
    await world.source("other-shop", tenant="other")

    with pytest.raises(NotFound):
        await replay(world, receipt, "other")
    for name in ("other-shop", "no-shop", "No shop!"):
        with pytest.raises(ValidationFailed, match="source"):
            await replay_many(world, source=name)


async def test_what_could_not_be_read_is_not_read_now(world: World) -> None:
    """A malformed one is read anew, and stays malformed as long as the adapter cannot read it."""
    receipt = await world.notify(b"status=VALID")

    assert await replay(world, receipt) == "refused"
    assert await world.outcome(receipt) == ("malformed", "unreadable")


async def test_another_process_s_password_is_known_to_a_replay_at_once(world: World) -> None:
    """The source is read anew for it, however lately this process looked at it."""
    await world.order("ORD-1")
    receipt = await world.notify(world.signed(world.pay("ORD-1"), NEW))
    accounts = Sources(world.rt.db, world.rt.vault)
    await accounts.get(SOURCE)
    await change_password(world)
    assert receipt.delivery_id is not None

    assert await replays.replay(world.rt.db, accounts, TENANT, receipt.delivery_id, actor="test") == "put_back"
