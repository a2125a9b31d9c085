"""A proxy in front of PostgreSQL that cuts a connection around COMMIT, where nobody can tell whether it happened."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import psycopg.conninfo
import sqlalchemy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Moment = Literal["before", "while", "after", "silent"]
"""Not forwarded at all; forwarded and cut at once, so that the server may still be at it; or cut when the server has answered.

`silent` cuts nothing: the server got it, and nothing is ever heard of it again.
"""


@dataclass
class Proxy:
    """`cut_next` arms it: the next COMMIT of any connection is cut. `cuts` counts those that were, `commits` all that came."""

    database_url: str
    port: int = 0
    cuts: int = 0
    commits: int = 0
    is_closed: bool = False
    _armed: list[Moment | None] = field(default_factory=list)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        """The database's URL by way of the proxy; unencrypted, as it reads along."""
        url = sqlalchemy.make_url(self.database_url)
        query = {name: value for name, value in url.query.items() if name not in {"host", "port"}}
        query |= {"sslmode": "disable", "gssencmode": "disable"}
        return url.set(host="127.0.0.1", port=self.port, query=query).render_as_string(hide_password=False)

    def cut_next(self, moment: Moment, times: int = 1, *, after: int = 0) -> None:
        """Cut the next COMMITs, behind so many that pass."""
        self._armed += [None] * after + [moment] * times

    def disarm(self) -> None:
        """Cut none any more."""
        self._armed.clear()

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """The database is away while the block runs: open connections are cut, new ones too."""
        self.is_closed = True
        await self.left()
        try:
            yield
        finally:
            self.is_closed = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or a COMMIT is cut."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        if self.is_closed:
            writer.transport.abort()
            return
        server_reader, server_writer = await self._connected()
        answers = asyncio.create_task(_pump(server_reader, writer))
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._questions(reader, server_writer, server_reader, answers)
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            for end in (writer, server_writer):
                end.transport.abort()

    async def _questions(
        self,
        reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        answers: asyncio.Task[None],
    ) -> None:
        """Forward what the client says, message by message (PostgreSQL 18, 54.2: a type byte, but for the first, and a length)."""
        server_writer.write(await _message(reader, b""))
        while True:
            message = await _message(reader, await reader.readexactly(1))
            moment = self._fate() if _is_commit(message) else None
            if moment is None:
                server_writer.write(message)
                continue
            self.cuts += 1
            if moment != "before":
                answers.cancel()
                await asyncio.gather(answers, return_exceptions=True)
                server_writer.write(message)
                await server_writer.drain()
            if moment == "after":
                await server_reader.readexactly(1)
            while moment == "silent" and await reader.read(65536):
                pass
            return

    def _fate(self) -> Moment | None:
        """What happens to a COMMIT."""
        self.commits += 1
        return self._armed.pop(0) if self._armed else None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        given = psycopg.conninfo.conninfo_to_dict(self.database_url)
        host, port = str(given.get("host") or "localhost"), str(given.get("port") or 5432)
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, int(port))

    async def left(self) -> None:
        """Cut what is still open and wait until it is."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


async def _message(reader: asyncio.StreamReader, kind: bytes) -> bytes:
    length = await reader.readexactly(4)
    return kind + length + await reader.readexactly(struct.unpack("!I", length)[0] - 4)


def _is_commit(message: bytes) -> bool:
    """As a simple query, or as one that is parsed first, without a name."""
    return message.startswith((b"Q", b"P")) and message[5:].lstrip(b"\0").startswith(b"COMMIT")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.transport.abort()


@contextlib.asynccontextmanager
async def proxying(database_url: str) -> AsyncIterator[Proxy]:
    """A proxy on a free loopback port; at the end every connection through it is gone."""
    proxy = Proxy(database_url)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.left()
        await listener.wait_closed()
