"""The models are the schema of record: what the migrations build is what they describe, all the way up and down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlmodel import SQLModel

from ipn_gateway import migrations, retention

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ipn_gateway.db import Database

# Name, kind and definition of everything in the catalogue that belongs to the schema: not the partitions, which come and go.
CATALOGUE = {
    "columns": """
        SELECT c.relname || '.' || a.attname, format_type(a.atttypid, a.atttypmod),
               a.attnotnull, coalesce(pg_get_expr(d.adbin, d.adrelid), '')
          FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
         WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
           AND c.relname <> 'alembic_version' AND a.attnum > 0 AND NOT a.attisdropped""",
    "constraints": """
        SELECT c.relname || '.' || k.conname, k.contype::text, pg_get_constraintdef(k.oid)
          FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
         WHERE c.relnamespace = 'public'::regnamespace AND NOT c.relispartition AND c.relname <> 'alembic_version' AND k.contype <> 'n'""",
    "indexes": """
        SELECT i.relname, pg_get_indexdef(i.oid)
          FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class c ON c.oid = x.indrelid
         WHERE c.relnamespace = 'public'::regnamespace AND NOT c.relispartition AND c.relname <> 'alembic_version'""",
    "partitioning": """
        SELECT partrelid::regclass::text, pg_get_partkeydef(partrelid) FROM pg_partitioned_table""",
}


def catalogue(connection: Connection, kind: str) -> list[tuple[object, ...]]:
    """One part of the schema, sorted."""
    return sorted(tuple(row) for row in connection.exec_driver_sql(CATALOGUE[kind]))


def alembic(connection: Connection):
    """Alembic's configuration on this connection."""
    config = migrations.config()
    config.attributes["connection"] = connection
    return config


@pytest.mark.parametrize("kind", CATALOGUE)
def test_the_migrations_build_what_the_models_describe(kind, database_url, empty_database_url, connect):
    """Column by column and constraint by constraint, checks and partition keys too, as the database itself spells them."""
    with connect(database_url) as migrated, connect(empty_database_url) as described:
        SQLModel.metadata.tables["event_log"].create(described)
        for function in ("ipn_now", "event_position"):
            described.exec_driver_sql(migrated.exec_driver_sql(f"SELECT pg_get_functiondef('{function}'::regproc)").scalar_one())
        SQLModel.metadata.create_all(described)

        assert catalogue(migrated, kind)
        assert catalogue(migrated, kind) == catalogue(described, kind)


def test_alembic_finds_nothing_to_do(database_url, connect):
    """Asked to write the next migration, Alembic has nothing to put into it."""
    with connect(database_url) as migrated:
        command.check(alembic(migrated))


def test_there_is_one_head():
    """Migrations follow each other in one line, so that every database takes the same way; it is read without Alembic too."""
    scripts = ScriptDirectory.from_config(migrations.config())
    revisions = list(scripts.walk_revisions())

    assert len(scripts.get_heads()) == 1
    assert all(not revision.is_merge_point and not revision.is_branch_point for revision in revisions)
    assert migrations.revisions() == tuple(revision.revision for revision in reversed(revisions))


async def test_down_and_up_again(database_url, db, connect):
    """Every migration can be taken back: nothing of ours is left at the bottom, and the way up leads to the same schema."""
    with connect(database_url) as migrated:
        before = {kind: catalogue(migrated, kind) for kind in CATALOGUE}
        command.downgrade(alembic(migrated), "base")
        left = migrated.exec_driver_sql(
            """SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relname NOT LIKE 'alembic_version%%'
               UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"""
        )
        assert left.all() == []

    applied = await migrations.migrate(database_url, db)

    assert tuple(applied) == migrations.revisions()
    with connect(database_url) as migrated:
        assert {kind: catalogue(migrated, kind) for kind in CATALOGUE} == before


async def test_what_is_pending_is_known_before_it_is_applied(empty_database_url, foreign):
    """An empty database lacks every revision; a migrated one lacks none, and migrating it again does nothing."""
    pending = await migrations.pending(foreign)

    assert pending
    assert await migrations.migrate(empty_database_url, foreign) == pending
    assert await migrations.pending(foreign) == []
    assert await migrations.migrate(empty_database_url, foreign) == []


async def test_secrets_from_before_key_pairs_are_kept(empty_database_url, foreign, connect):
    """An installation with endpoints migrates; what is there has no key pair, and processes of the version before can still insert."""
    row = """INSERT INTO endpoint_secrets (tenant_id, id, endpoint_id, ciphertext)
             SELECT tenant_id, gen_random_uuid(), id, 'sealed' FROM endpoints"""
    with connect(empty_database_url) as before:
        command.upgrade(alembic(before), "0003")
        before.exec_driver_sql("INSERT INTO tenants (id) VALUES ('acme')")
        before.exec_driver_sql(
            "INSERT INTO endpoints (tenant_id, id, url, events) VALUES ('acme', gen_random_uuid(), 'https://a.example/', '{*}')"
        )
        before.exec_driver_sql(row)

    await migrations.migrate(empty_database_url, foreign)

    with connect(empty_database_url) as after:
        after.exec_driver_sql(row)
        found = after.exec_driver_sql("SELECT ciphertext, seed_ciphertext, public_key FROM endpoint_secrets").all()
    assert [tuple(one) for one in found] == [(b"sealed", None, None)] * 2


def test_hot_tables_leave_room_on_their_pages(database_url, connect):
    """Rows that are rewritten all the time find room beside their old version, so that no index is touched."""
    with connect(database_url) as migrated:
        rows = migrated.exec_driver_sql("SELECT relname FROM pg_class WHERE 'fillfactor=70' = ANY(reloptions)")
        roomy = {name for (name,) in rows}

    assert roomy >= {"inbox", "event_deliveries", "sweeps", "order_slots"}
    assert not roomy & set(retention.PARTITIONED)


@pytest.mark.case("S97")
def test_what_is_unique_for_ever_is_in_tables_that_are_never_pruned(database_url, connect):
    """The ledger, orders and refund references are plain tables, and no foreign key leads from or to a partitioned one."""
    with connect(database_url) as migrated:
        keys = migrated.exec_driver_sql("SELECT conrelid::regclass::text, confrelid::regclass::text FROM pg_constraint WHERE contype = 'f'")
        referring = {table for pair in keys for table in pair}
        partitioned = {table for table, _ in catalogue(migrated, "partitioning")}
        unique = {name: definition for name, kind, definition in catalogue(migrated, "constraints") if kind in {"p", "u"}}

    assert partitioned == set(retention.PARTITIONED)
    assert not referring & partitioned
    assert unique["processed_notifications.processed_notifications_pkey"] == "PRIMARY KEY (tenant_id, source_id, operation_id, effect)"
    assert unique["orders.orders_pkey"] == "PRIMARY KEY (tenant_id, order_id)"
    assert unique["refunds.refunds_reference_key"] == "UNIQUE (tenant_id, order_id, reference)"


async def test_a_schema_of_a_newer_version_stops_nobody(database_url: str, db: Database) -> None:
    """In the middle of an upgrade a process of the version before starts again: it finds nothing to do, and undoes nothing."""
    async with db.transaction("test.newer") as tx:
        await tx.execute("UPDATE alembic_version SET version_num = '9999'")

    assert await migrations.pending(db) == []
    assert await migrations.migrate(database_url, db) == []
    async with db.autocommit("test.read") as tx:
        assert await tx.value("SELECT version_num FROM alembic_version") == "9999"
