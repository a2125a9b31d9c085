"""Loopback servers that misbehave as a test says, and a transport to reach them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp.abc import AbstractResolver
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ipn_gateway import settings
from ipn_gateway.faults import Faults
from ipn_gateway.transport import DeliveryRequest, Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Answering = Callable[["Server", asyncio.StreamWriter], Awaitable[None]]

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Server:
    """A loopback server that keeps what it was sent, whole requests only, and answers as `answer` says, until it is `over`."""

    answer: Answering
    reads_bodies: bool = True
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    port: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())  # type: ignore[arg-type]  # there is one
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                _, _, length = head.lower().partition(b"content-length:")
                length_bytes = int(length.split(b"\r\n")[0] or 0) if self.reads_bodies else 0
                self.requests.append(head + await reader.readexactly(length_bytes))
                await self.answer(self, writer)
        if not writer.is_closing():
            writer.transport.abort()

    async def drip(self, writer: asyncio.StreamWriter, piece: bytes, *, seconds: float = 0.02) -> None:
        """Send `piece` again and again until the client has gone or the test is over."""
        while not self.over.is_set() and not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), seconds)

    async def left(self) -> None:
        """Wait until every client has gone."""
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks)


def says(*pieces: bytes, close: bool = False) -> Answering:
    """The n-th request gets the n-th piece, later ones the last; `close` ends the connection after each."""

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(pieces[min(len(server.requests), len(pieces)) - 1])
        await writer.drain()
        if close:
            writer.close()

    return answer


@contextlib.asynccontextmanager
async def serving(answer: Answering, tls: ssl.SSLContext | None = None, *, reads_bodies: bool = True) -> AsyncIterator[Server]:
    """A server on a free port; at the end its connections are gone and its tasks done."""
    server = Server(answer, reads_bodies)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls, backlog=1000)
    server.port = listener.sockets[0].getsockname()[1]
    server.url = f"{'https' if tls else 'http'}://localhost:{server.port}/hook"
    try:
        yield server
    finally:
        server.over.set()
        listener.close()
        for writer in server.writers:
            writer.transport.abort()
        await server.left()


class Names(AbstractResolver):
    """A resolver whose answers the test gives, one list per look-up; then the last again."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[Any]:
        self.asked.append(host)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [{"hostname": host, "host": address, "port": port, "family": family, "proto": 0, "flags": 0} for address in found]

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def opened(
    *, loopback: bool = True, deadline_seconds: float = 5, faults: Faults | None = None, **given: Any
) -> AsyncIterator[Transport]:
    """A transport that may call loopback endpoints, unless told otherwise."""
    made = settings.load(delivery_timeout_seconds=deadline_seconds, allow_loopback_endpoints=loopback)
    given.setdefault("assert_no_transaction", lambda: None)
    given.setdefault("tls", ssl.create_default_context())
    async with Transport(made, faults or Faults(), **given) as transport:
        yield transport


def event(to: Server | str, body: bytes = b'{"id":"evt_1"}') -> DeliveryRequest:
    """One attempt at `NOW`."""
    url = to if isinstance(to, str) else to.url
    return DeliveryRequest(url, body, {"Content-Type": "application/json", "webhook-id": "evt_1"}, NOW)


@functools.cache
def tls_contexts(host: str = "localhost", *, valid_days: int = 36500) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a self-signed certificate, by default for localhost, and a client's that trusts it. It begins in 2020."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    start = datetime(2020, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, start, start + timedelta(days=valid_days))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "both.pem")
        path.write_bytes(key.private_bytes(*plain) + certificate)
        server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=certificate.decode())
