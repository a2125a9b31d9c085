"""Alembic's environment: the models are the schema of record, the URL is given by who runs it."""

from typing import Any

from alembic import context
from sqlalchemy import Connection, create_engine, pool
from sqlmodel import SQLModel

from ipn_gateway import models, retention  # noqa: F401 - the tables register themselves


def include_object(_item: Any, name: str | None, kind: str, _reflected: object, _compare_to: object) -> bool:
    """Partitions are made by the service, month by month, and are no part of the models."""
    return not (kind == "table" and any((name or "").startswith(f"{table}_2") for table in retention.PARTITIONED))


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        migrate(connection)
        return
    url = context.config.get_main_option("sqlalchemy.url") or context.get_x_argument(as_dictionary=True)["url"]
    with create_engine(url, poolclass=pool.NullPool).connect() as fresh:
        migrate(fresh)


def migrate(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=SQLModel.metadata,
        include_object=include_object,
        compare_type=True,
        compare_server_default=False,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
