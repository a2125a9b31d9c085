"""The pull: where a cursor stands, what it cannot miss without being told, and what holds the log back."""

from __future__ import annotations

import asyncio
import contextvars
import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ipn_gateway import event_log, gauges, pull
from ipn_gateway.errors import ConfigurationError, Overloaded, StateConflict
from tests.make import TENANT, Make, ago
from tests.pulling import all_in_view

if TYPE_CHECKING:
    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from ipn_gateway.faults import Faults
    from ipn_gateway.objects import EventPage
    from tests.conftest import Server

BODY = json.dumps({"timestamp": "2026-07-01T12:00:00.000Z", "data": {}}).encode()
LAG = "events_pull_lag_seconds"


async def pulled(db: Database, after: str | None = None, *, limit: int = 50, **filters: Any) -> EventPage:
    async with db.autocommit("test.pull") as tx:
        return await pull.pull(tx, TENANT, after, limit, **filters)


def ids(page: EventPage) -> list[str]:
    return [item.id for item in page.items]


async def run(db: Database, statement: str) -> None:
    async with db.transaction("test.run") as tx:
        await tx.execute(statement)


@pytest.fixture
async def rows(db: Database, clock: Clock) -> Make:
    """Rows of a tenant that exists."""
    make = Make(db, clock)
    await make.tenant(id=TENANT)
    return make


async def events(db: Database, rows: Make, *names: str, **given: Any) -> None:
    for name in names:
        await rows.event(id=name, body=BODY, **given)
    await all_in_view(db)


# Where a cursor stands


@pytest.mark.case("S124")
@pytest.mark.parametrize("changed", ["id = 'evt_b2'", "position = position - 1", "created_at = created_at + interval '1 microsecond'"])
async def test_a_cursor_names_its_event_and_is_refused_without_it(db: Database, rows: Make, changed: str) -> None:
    """Another event at its place, the same one elsewhere, or the same one written anew at the same place: it is another past."""
    await events(db, rows, "evt_a", "evt_b")
    first, second = await pulled(db, limit=1), await pulled(db)

    await run(db, f"UPDATE events SET {changed} WHERE id = 'evt_b'")

    assert ids(await pulled(db, first.next_cursor)) == [ids(await pulled(db))[1]]
    with pytest.raises(StateConflict, match="start again without it"):
        await pulled(db, second.next_cursor)


@pytest.mark.case("S124")
async def test_a_follower_of_a_rare_type_stands_at_the_newest_event_of_all(db: Database, rows: Make) -> None:
    """What it has been shown nothing of is not looked at again, and of its own type it misses nothing."""
    await events(db, rows, "evt_a", "evt_b", type="order.cancelled")
    rare = await pulled(db, event_type="order.paid")
    of_an_order = await pulled(db, order_id="O-1")
    await events(db, rows, "evt_c", "evt_d", type="order.cancelled")

    assert ids(rare) == ids(of_an_order) == []
    assert pull.read(rare.next_cursor).id == pull.read(of_an_order.next_cursor).id == "evt_b"
    rare = await pulled(db, rare.next_cursor, event_type="order.paid")
    assert pull.read(rare.next_cursor).id == "evt_d"
    await events(db, rows, "evt_e", "evt_f", type="order.paid")
    await events(db, rows, "evt_g", type="order.cancelled")
    one = await pulled(db, rare.next_cursor, event_type="order.paid", limit=1)
    rest = await pulled(db, one.next_cursor, event_type="order.paid", limit=1)
    assert ids(one) + ids(rest) == ["evt_e", "evt_f"]
    assert [pull.read(page.next_cursor).id for page in (one, rest)] == ["evt_e", "evt_f"]
    assert pull.read((await pulled(db, rest.next_cursor, event_type="order.paid")).next_cursor).id == "evt_g"


@pytest.mark.case("S124")
async def test_a_cursor_from_the_empty_log_is_good_for_ever(db: Database, rows: Make) -> None:
    """It stands before the first event, and does not change while nothing comes."""
    empty = await pulled(db)
    again = await pulled(db, empty.next_cursor)
    await events(db, rows, "evt_a", "evt_b")

    assert again == empty
    assert ids(await pulled(db, empty.next_cursor)) == ["evt_a", "evt_b"]


# In a database that was restored


@pytest.fixture
async def restored(db: Database, rows: Make) -> list[str]:
    """Events whose positions are those of another cluster, far above the transactions of this one; in the order of the pull."""
    names = [f"evt_{letter}" for letter in "dacb"]
    await events(db, rows, *names)
    await run(db, "UPDATE events SET position = position + 1000000")
    await rows.event_horizon(position=10, deleted_by=3_000_000)
    await run(db, "UPDATE event_log SET system = '1'")
    return names


@pytest.mark.case("S124")
async def test_a_restored_log_is_shown_whole_and_goes_on_behind_its_end(db: Database, rows: Make, restored: list[str]) -> None:
    """Not before somebody has looked: till then nobody gets a cursor in it."""
    with pytest.raises(Overloaded, match="restored"):
        await pulled(db)

    assert await event_log.ensure_continued(db)

    assert ids(await pulled(db)) == restored
    behind = (await pulled(db, limit=3)).next_cursor
    await events(db, rows, "evt_0")
    assert ids(await pulled(db)) == [*restored, "evt_0"]
    assert ids(await pulled(db, behind)) == [restored[-1], "evt_0"]
    assert not await event_log.ensure_continued(db)


async def test_a_newer_dump_in_an_older_copy_of_the_cluster_goes_on_too(db: Database, rows: Make, restored: list[str]) -> None:
    """The identifier is the same there: the positions themselves tell."""
    await run(db, f"UPDATE event_log SET system = {event_log.SERVER}")

    assert await event_log.ensure_continued(db)

    await events(db, rows, "evt_0")
    assert ids(await pulled(db)) == [*restored, "evt_0"]


async def test_processes_that_start_at_once_agree(db: Database, rows: Make, restored: list[str]) -> None:
    """One of them sets the offset, once; the others wait for it and find it set."""
    made = await asyncio.gather(*(event_log.ensure_continued(db) for _ in range(5)))

    await events(db, rows, "evt_0")
    assert sorted(made) == [False, False, False, False, True]
    assert ids(await pulled(db)) == [*restored, "evt_0"]


@pytest.mark.case("S124")
async def test_who_writes_at_that_moment_is_waited_for(db: Database, rows: Make, restored: list[str]) -> None:
    """One that should have been stopped: its event has the old offset, and lies below everything that comes after."""
    async with db.transaction("test.writer") as tx:
        await Make(tx, db.clock).event(id="evt_late", order_id="O-late", body=BODY)
        start = asyncio.get_running_loop().create_task(event_log.ensure_continued(db), context=contextvars.Context())
        while not await tx.value(
            """SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = pg_locks.database AND d.datname = current_database()
                WHERE NOT granted AND relation = 'events'::regclass"""
        ):
            assert not start.done()
    assert await start

    await events(db, rows, "evt_0")
    assert ids(await pulled(db)) == ["evt_late", *restored, "evt_0"]


async def test_a_writer_that_does_not_end_stops_the_start(db: Database, faults: Faults, restored: list[str]) -> None:
    """With a sentence: a gateway that should have been stopped is still at work."""

    async def waits_in_vain() -> None:
        raise psycopg.errors.LockNotAvailable

    faults.on["event_log.continue:statement_1"] = waits_in_vain

    with pytest.raises(ConfigurationError, match="stop every process"):
        await event_log.ensure_continued(db)


async def test_an_event_without_a_position_is_not_written(db: Database, rows: Make) -> None:
    """Without the row that positions are made from nothing is put into the log."""
    await run(db, "DELETE FROM event_log")

    with pytest.raises(psycopg.errors.NotNullViolation):
        await rows.event()
    with pytest.raises(Overloaded):
        await pulled(db)


# Retention


@pytest.mark.case("S124")
async def test_who_begins_again_gets_past_events_that_are_kept_among_deleted_ones(db: Database, rows: Make) -> None:
    """What was deleted before a cursor was given is no news; what is deleted since is."""
    await events(db, rows, "evt_a", "evt_b", "evt_c", "evt_d")
    old = (await pulled(db, limit=1)).next_cursor

    async def delete(name: str) -> None:
        await run(
            db,
            f"""WITH gone AS (DELETE FROM events WHERE id = '{name}' RETURNING *)
                INSERT INTO event_horizons (tenant_id, type, position, event_id, deleted_by)
                SELECT tenant_id, type, position, id, event_position() FROM gone
                ON CONFLICT ON CONSTRAINT event_horizons_pkey DO UPDATE
                   SET position = excluded.position, event_id = excluded.event_id, deleted_by = excluded.deleted_by""",
        )

    await delete("evt_c")
    await _nobody_writes(db)
    with pytest.raises(StateConflict, match="deleted"):
        await pulled(db, old)
    seen: list[str] = []
    cursor: str | None = None
    for _ in range(3):
        page = await pulled(db, cursor, limit=1)
        seen, cursor = [*seen, *ids(page)], page.next_cursor

    assert seen == ["evt_a", "evt_b", "evt_d"]
    page = await pulled(db, limit=1)
    await delete("evt_b")
    with pytest.raises(StateConflict, match="deleted"):
        await pulled(db, page.next_cursor)


async def _nobody_writes(db: Database) -> None:
    """Wait until what has committed is below the horizon."""
    async with asyncio.timeout(15):
        async with db.autocommit("test.horizon") as tx:
            while not await tx.value(f"SELECT {event_log.HORIZON} > (SELECT max(deleted_by) FROM event_horizons)"):
                pass


# What holds the log back


@pytest.mark.case("S124")
async def test_a_writer_in_another_database_holds_the_log_back_and_that_is_shown(db: Database, rows: Make, server: Server) -> None:
    """The answer and the gauge say for how long; afterwards it is 0."""
    await events(db, rows, "evt_a")
    assert (await pulled(db)).lag_seconds == await gauge(db) == 0

    with server.database() as elsewhere, psycopg.connect(elsewhere) as writer:
        writer.execute("CREATE TABLE anything ()")
        for seconds in (500, 400, 0):
            await rows.event(id=f"evt_b{seconds}", body=BODY, created_at=ago(seconds=seconds))
        held = await pulled(db)
        assert ids(held) == ["evt_a"]
        assert held.lag_seconds == pytest.approx(500, abs=60)
        assert await gauge(db) == pytest.approx(500, abs=60)
        writer.rollback()

    await all_in_view(db)
    assert len(ids(await pulled(db, held.next_cursor))) == 3
    assert (await pulled(db)).lag_seconds == await gauge(db) == 0


async def gauge(db: Database) -> float:
    return next(reading.value for reading in await gauges.read(db) if reading.gauge == LAG)
