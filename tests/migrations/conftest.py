"""Databases as the migrations make them, and as the models describe them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import sqlalchemy
from sqlalchemy.dialects.postgresql.base import ischema_names

from ipn_gateway.clock import Clock
from ipn_gateway.db import Database
from ipn_gateway.faults import Faults
from ipn_gateway.models import XID8

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.conftest import Server

    Connect = Callable[[str], AbstractContextManager[sqlalchemy.Connection]]


ischema_names["xid8"] = XID8  # else SQLAlchemy does not know it when it looks at a database


@pytest.fixture
def empty_database_url(server: Server) -> Iterator[str]:
    """The URL of a database with nothing in it."""
    with server.database() as url:
        yield url


@pytest.fixture
async def foreign(empty_database_url: str) -> AsyncIterator[Database]:
    """A database with nothing of ours in it."""
    async with Database(empty_database_url, clock=Clock(), faults=Faults()) as db:
        yield db


@pytest.fixture
def connect() -> Connect:
    """A SQLAlchemy connection as Alembic wants one, closed afterwards; what was done is committed."""

    @contextmanager
    def connecting(url: str) -> Iterator[sqlalchemy.Connection]:
        engine = sqlalchemy.create_engine(sqlalchemy.make_url(url).set(drivername="postgresql+psycopg"), poolclass=sqlalchemy.NullPool)
        with engine.begin() as connection:
            yield connection
        engine.dispose()

    return connecting
