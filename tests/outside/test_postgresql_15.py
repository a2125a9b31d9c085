"""This tier runs on the oldest PostgreSQL that is promised."""

from __future__ import annotations

from ipn_gateway.db import SERVER_VERSION_MIN


async def test_the_server_is_the_oldest_that_is_supported(db):
    """The SQL suites beside this file ran on PostgreSQL 15, the version below which a start is refused."""
    async with db.autocommit("test.version") as tx:
        version = await tx.value("SELECT current_setting('server_version_num')::int")

    assert version // 10000 == SERVER_VERSION_MIN // 10000 == 15
