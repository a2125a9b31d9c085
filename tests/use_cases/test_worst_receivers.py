"""Receivers at their worst, on real sockets: each leaves one attempt that says what happened, and nothing else behind."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from ipn_gateway import transport as transport_module
from ipn_gateway.guard import HEAD_BYTES_MAX
from ipn_gateway.transport import EXCERPT_BYTES
from tests.dispatching import Subscribers, dispatching, received
from tests.loopback import ENDLESS, OK, Names, Server, event, opened, says, serving
from tests.make import ago

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Database
    from tests.loopback import Answering
    from tests.make import Make

SHORT_SECONDS: Final = 0.4
LONG_SECONDS: Final = 15.0
SLOTS: Final = 50
MEMORY_BYTES_MAX: Final = 4 << 20

BOMB: Final = gzip.compress(bytes(50_000_000))
HEAD: Final = b"HTTP/1.1 200 OK\r\n"
NO: Final = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
INTERIM: Final = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"


@pytest.fixture
def subscribers(db: Database, make: Make) -> Subscribers:
    return Subscribers(db, make)


# How they answer


def drips(head: bytes, piece: bytes, *, seconds: float = 0.02) -> Answering:
    """A head, and then the same piece again and again; without a pause where `seconds` is 0."""

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await server.drip(writer, piece, seconds=seconds)

    return answer


def resets(after: bytes = b"") -> Answering:
    """Some of an answer, and then a reset where an end should be."""

    async def answer(_: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(after)
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    return answer


def in_pieces(*pieces: bytes) -> Answering:
    """One answer, each piece of which the client reads before the next is sent."""

    async def answer(_: Server, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            for _turn in range(20):
                await asyncio.sleep(0)

    return answer


@dataclass(frozen=True)
class Worst:
    """How a receiver answers, and the attempt that this makes. `late` are those that last until the deadline."""

    answer: Answering
    outcome: str
    status_code: int | None = None
    error: str | None = None
    excerpt: str | None = None
    late: bool = False


LOST: Final = ("disconnected", None, "connection_lost")
TIMEOUT: Final = ("timeout", None, "total_timeout")
NOT_HTTP: Final = ("protocol_error", None, "not_http")
CUT: Final = HEAD + b"Content-Length: 100\r\n\r\npart"
CHUNKED: Final = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

WORST: Final = {
    # slow
    "never answers": Worst(says(b""), *TIMEOUT, late=True),
    "drips its status line": Worst(drips(b"HTTP/1.1 200 ", b"O", seconds=0.05), *TIMEOUT, late=True),
    "drips headers": Worst(drips(HEAD, b"X-A: b\r\n", seconds=0.05), *TIMEOUT, late=True),
    "drips interim answers": Worst(drips(b"", INTERIM, seconds=SHORT_SECONDS / 4), *TIMEOUT, late=True),
    "drips its body": Worst(drips(ENDLESS, b"1\r\nx\r\n", seconds=0.05), "delivered", 200, late=True),
    "drips a body that refuses": Worst(drips(ENDLESS.replace(b"200", b"503"), b"1\r\nx\r\n", seconds=0.05), "refused", 503, late=True),
    "never ends its body": Worst(says(b"HTTP/1.0 200 OK\r\n\r\nok"), "delivered", 200, None, "ok", late=True),
    # without end
    "endless body": Worst(drips(ENDLESS, b"400\r\n" + b"x" * 1024 + b"\r\n", seconds=0), "delivered", 200, None, "x" * EXCERPT_BYTES),
    "endless body without length": Worst(drips(HEAD + b"\r\n", b"x" * 1024, seconds=0), "delivered", 200, None, "x" * EXCERPT_BYTES),
    "endless status line": Worst(drips(b"HTTP/1.1 200 ", b"O" * 1024, seconds=0), *NOT_HTTP),
    "endless header": Worst(drips(HEAD + b"X: ", b"y" * 1024, seconds=0), *NOT_HTTP),
    "endless headers": Worst(drips(HEAD, b"X: y\r\n" * 100, seconds=0), *NOT_HTTP),
    "endless interim answers": Worst(drips(b"", INTERIM * 100, seconds=0), *NOT_HTTP),
    "endless empty lines": Worst(drips(b"", b"\r\n" * 1000, seconds=0), *NOT_HTTP),
    "endless trailers": Worst(drips(CHUNKED + b"2\r\nok\r\n0\r\n", b"X: y\r\n" * 100, seconds=0), "delivered", 200),
    "endless answers": Worst(drips(b"", OK, seconds=0), "delivered", 200, None, "ok"),
    "a bomb": Worst(
        says(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB),
        "delivered",
        200,
        None,
        BOMB[:EXCERPT_BYTES].decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}"),
    ),
    # broken off
    "closes": Worst(says(b"", close=True), *LOST),
    "closes within headers": Worst(says(HEAD + b"Content-", close=True), *LOST),
    "closes within its body": Worst(says(CUT, close=True), "delivered", 200, None, "part"),
    "closes before its body": Worst(says(HEAD + b"Content-Length: 100\r\n\r\n", close=True), "delivered", 200, None, ""),
    "closes within a chunk": Worst(says(CHUNKED + b"64\r\npart", close=True), "delivered", 200, None, "part"),
    "closes within a refusal": Worst(says(CUT.replace(b"200", b"500"), close=True), "refused", 500, None, "part"),
    "resets": Worst(resets(), *LOST),
    "resets within headers": Worst(resets(HEAD + b"Content-"), *LOST),
    "resets within its body": Worst(resets(CUT), "delivered", 200, None, "part"),
    "resets after an interim answer": Worst(resets(INTERIM), *LOST),
    # no HTTP, or a bad one
    "another protocol": Worst(says(b"SSH-2.0-OpenSSH_9.2\r\n", close=True), *NOT_HTTP),
    "a page without a head": Worst(says(b"<html>ok</html>\n", close=True), *NOT_HTTP),
    "another version": Worst(says(b"HTTP/2 200\r\n\r\n"), *NOT_HTTP),
    "status of two digits": Worst(says(b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n"), *NOT_HTTP),
    "status of four digits": Worst(says(b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n"), *NOT_HTTP),
    "status zero": Worst(says(b"HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n"), "refused", 0, None, ""),
    "status 999": Worst(says(b"HTTP/1.1 999 OK\r\nContent-Length: 0\r\n\r\n"), "refused", 999, None, ""),
    "long status line": Worst(says(b"HTTP/1.1 200 " + b"O" * 10_000 + b"\r\nContent-Length: 0\r\n\r\n"), *NOT_HTTP),
    "two lengths": Worst(says(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok"), *NOT_HTTP),
    "length and chunks": Worst(says(HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"), *NOT_HTTP),
    "negative length": Worst(says(HEAD + b"Content-Length: -1\r\n\r\n"), *NOT_HTTP),
    "endless length": Worst(says(HEAD + b"Content-Length: %d\r\n\r\n" % 10**30), *NOT_HTTP),
    "a chunk that is none": Worst(says(CHUNKED + b"zz\r\n"), "delivered", 200, None, ""),
    "a chunk that is none, later": Worst(in_pieces(CHUNKED, b"2\r\nok\r\n", b"zz\r\n"), "delivered", 200, None),
    "a header with a zero byte": Worst(says(HEAD + b"X: a\0b\r\nContent-Length: 0\r\n\r\n"), *NOT_HTTP),
    "zero bytes and half characters": Worst(says(HEAD + b"Content-Length: 4\r\n\r\n\0\xffok"), "delivered", 200, None, "\ufffd\ufffdok"),
    "changes protocol": Worst(says(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx"), "refused", 101),
    "an encoding that is none": Worst(says(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok"), "delivered", 200, None, "ok"),
    # more than was asked for
    "a body where there is none": Worst(says(b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nok"), "delivered", 204, None, ""),
    "chunks where there is no body": Worst(
        says(b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"), "delivered", 204, None, ""
    ),
    "more body than its length": Worst(says(HEAD + b"Content-Length: 2\r\n\r\nok and more"), "delivered", 200, None, "ok"),
    "interim answers": Worst(says(INTERIM * 100 + OK), "delivered", 200, None, "ok"),
    "interim answers in pieces": Worst(in_pieces(INTERIM, INTERIM[:20], INTERIM[20:] + OK[:20], OK[20:]), "delivered", 200, None, "ok"),
    "too many interim answers": Worst(says(INTERIM * (HEAD_BYTES_MAX // len(INTERIM) + 1) + OK), *NOT_HTTP),
    "lines without returns": Worst(says((INTERIM * 3 + OK).replace(b"\r", b"")), "delivered", 200, None, "ok"),
    "endless lines without returns": Worst(drips(b"", INTERIM.replace(b"\r", b"") * 100, seconds=0), *NOT_HTTP),
    "a refusal and then a success": Worst(says(NO + OK), "refused", 500, None, ""),
    "a success and then a refusal": Worst(says(OK + NO), "delivered", 200, None, "ok"),
}
"""What a receiver may do after it has read an event. The status line decides; without one it is no answer."""


# What is left behind


@contextlib.asynccontextmanager
async def leaving_nothing(running: Any, server: Server) -> AsyncIterator[None]:
    """At the end no slot, no connection and no task of ours is held, and the server sees that its client has gone."""
    before = asyncio.all_tasks()
    yield
    connector = running.dispatcher._transport._deliveries.connector
    assert running.slots.free == SLOTS
    assert not connector._acquired
    kept = [protocol for kept in connector._conns.values() for protocol, _ in kept if protocol.is_connected()]
    assert not any(protocol.should_close for protocol in kept)
    if not kept:
        await server.left()
    async with asyncio.timeout(5):
        await asyncio.gather(*(asyncio.all_tasks() - before - server.tasks), return_exceptions=True)


@pytest.mark.case("B105")
@pytest.mark.parametrize("worst", WORST.values(), ids=WORST)
async def test_each_of_them_is_one_attempt(db: Database, subscribers: Subscribers, worst: Worst) -> None:
    """Outcome, status, error, excerpt, address and time are those of the table; what failed waits for its next attempt."""
    seconds = SHORT_SECONDS if worst.late else LONG_SECONDS
    async with serving(worst.answer) as server, dispatching(db, slots=SLOTS, delivery_timeout_seconds=seconds) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        async with leaving_nothing(running, server):
            assert await running.run_once() == 1

    delivery, (attempt,) = await subscribers.delivery(delivery_id), await subscribers.attempts(delivery_id)
    wanted = {"outcome": worst.outcome, "status_code": worst.status_code, "error": worst.error, "address": "127.0.0.1", "number": 1}
    assert {name: attempt[name] for name in wanted} == wanted
    assert (attempt["response_excerpt"] is None) == (worst.status_code is None)
    assert worst.excerpt is None or attempt["response_excerpt"] == worst.excerpt
    assert (SHORT_SECONDS * 1000 - 10 if worst.late else 0) <= attempt["duration_ms"] < 5000
    assert (delivery["status"], delivery["next_attempt_at"] is None) == (
        ("delivered", True) if worst.outcome == "delivered" else ("pending", False)
    )
    assert len(server.requests) == server.connections == 1


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("secure", [False, True])
async def test_who_hangs_up_at_once_has_no_slot(db: Database, subscribers: Subscribers, reset: bool, secure: bool) -> None:
    """Before the request is read: without TLS it may have been on its way, with it nothing was sent."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    url = f"{'https' if secure else 'http'}://localhost:{listener.sockets[0].getsockname()[1]}/"
    async with listener, dispatching(db, slots=SLOTS) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(url))
        assert await running.run_once() == 1

    (attempt,) = await subscribers.attempts(delivery_id)
    wanted = ("connect_failed", "not_connected: ECONNRESET", None) if secure else ("disconnected", "connection_lost", "127.0.0.1")
    assert (attempt["outcome"], attempt["error"], attempt["address"]) == wanted
    assert (attempt["status_code"], attempt["response_excerpt"]) == (None, None)
    assert attempt["duration_ms"] < 5000
    assert running.slots.free == SLOTS


@pytest.mark.parametrize("worst", [name for name in WORST if name.startswith("endless") or name == "a bomb"])
async def test_none_of_them_costs_memory(worst: str) -> None:
    """However much comes, a few hundred KiB of it are held at a time, the sender's own buffers in this process among them."""
    async with serving(WORST[worst].answer) as server, opened(deadline_seconds=SHORT_SECONDS) as transport:
        await transport.send(event(server))
        tracemalloc.start()
        try:
            for _ in range(3):
                await transport.send(event(server))
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert peak < MEMORY_BYTES_MAX
    assert kept < MEMORY_BYTES_MAX / 4


# Kept connections


@pytest.mark.case("S91")
async def test_a_kept_connection_that_was_closed_meanwhile_is_not_used(clock: Clock, db: Database, subscribers: Subscribers) -> None:
    """The next attempt takes a new one: each event is sent once, and none fails for it."""
    async with serving(says(OK)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        for _ in range(3):
            await subscribers.deliver(endpoint_id)
            await running.drain()
            server.writers[-1].close()
            await settled()

    ids = [message.id for message in received(server)]
    assert len(ids) == len(set(ids)) == server.connections == 3
    assert await subscribers.statuses(endpoint_id) == {"delivered": 3}


@pytest.mark.parametrize(
    "extra",
    [OK, OK * 100, OK[:20], b"junk", b"\r\n", INTERIM, CHUNKED],
    ids=["an answer", "many", "half of one", "junk", "a line", "an interim one", "an endless one"],
)
async def test_what_comes_unasked_is_no_answer(db: Database, subscribers: Subscribers, extra: bytes) -> None:
    """A success that was said between two events is not taken for what is said to the second, which is refused and stays pending."""
    async with serving(says(OK, NO)) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        (first,) = await subscribers.deliver(endpoint_id)
        await running.drain()
        server.writers[0].write(extra)
        await settled()
        (second,) = await subscribers.deliver(endpoint_id)
        await running.drain()

    made = [(await subscribers.attempts(delivery_id))[0] for delivery_id in (first, second)]
    assert [(attempt["outcome"], attempt["status_code"]) for attempt in made] == [("delivered", 200), ("refused", 500)]
    assert (await subscribers.delivery(second))["status"] == "pending"
    assert len(server.requests) == 2


async def test_a_second_answer_is_for_nobody(db: Database, subscribers: Subscribers) -> None:
    """Whoever answers each event twice, the second time whenever it likes, never gets an event confirmed by the answer to another."""

    async def twice(server: Server, writer: asyncio.StreamWriter) -> None:
        first, second = (OK, NO) if len(server.requests) % 2 else (NO, OK)
        writer.write(first)
        if len(server.requests) % 3:
            await settled()
        writer.write(second)

    async with serving(twice) as server, dispatching(db) as running:
        endpoint_id = await subscribers.endpoint(server)
        ids = []
        for _ in range(12):
            ids += await subscribers.deliver(endpoint_id)
            await running.run_once()
            await settled()

    outcomes = [(await subscribers.attempts(delivery_id))[0]["status_code"] for delivery_id in ids]
    assert outcomes == [200, 500] * 6


async def settled() -> None:
    """Let what was written on this machine arrive and be dealt with."""
    for _ in range(50):
        await asyncio.sleep(0)


# What stands before a connection, and what an answer may ask for


class Stalls(Names):
    """A resolver whose servers never answer for one name."""

    def __init__(self) -> None:
        super().__init__(["127.0.0.1"])
        self.broken_off = 0

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[Any]:
        if host == "stalls.localhost":
            try:
                await asyncio.Event().wait()
            finally:
                self.broken_off += 1
        return await super().resolve(host, port, family)


@pytest.mark.case("B105", "S122")
@pytest.mark.parametrize("connect_seconds", [5.0, 1.0])
async def test_a_name_that_is_never_looked_up_is_given_up(
    db: Database, subscribers: Subscribers, monkeypatch: pytest.MonkeyPatch, connect_seconds: float
) -> None:
    """At the total deadline, or at that of connecting, whichever is first; its slots are free then, and others were sent meanwhile."""
    monkeypatch.setattr(transport_module, "CONNECT_TIMEOUT_SECONDS", connect_seconds)
    names = Stalls()
    async with serving(says(OK)) as quick, dispatching(db, slots=8, resolver=names, delivery_timeout_seconds=1.5) as running:
        stalled, healthy = await subscribers.endpoint("https://stalls.localhost/"), await subscribers.endpoint(quick)
        await subscribers.deliver(stalled, 3, next_attempt_at=ago(hours=1))
        await subscribers.deliver(healthy, 5)
        await running.start_all()
        while (await subscribers.statuses(healthy)).get("pending"):
            await running.free()
        before = await subscribers.rows("delivery_attempts")
        await running.drain()

    late = await subscribers.rows("delivery_attempts", "outcome <> 'delivered'")
    wanted = ("timeout", "total_timeout") if connect_seconds > 1.5 else ("connect_failed", "connect_timeout")
    assert {attempt["outcome"] for attempt in before} == {"delivered"}
    assert [(attempt["outcome"], attempt["error"], attempt["address"]) for attempt in late] == [(*wanted, None)] * 3
    assert all(min(connect_seconds, 1.5) * 1000 - 10 <= attempt["duration_ms"] < 5000 for attempt in late)
    assert (running.slots.free, names.broken_off) == (8, 3)


@pytest.mark.case("S118")
@pytest.mark.parametrize(
    "hint",
    [
        "",
        "soon",
        "-5",
        "+5",
        "5.5",
        "1e3",
        "NaN",
        "Infinity",
        "0x10",
        "\xff",
        "5 seconds",
        "Sun, 99 Mar 2026 99:99:99 GMT",
        "٣",
        "=?utf-8?q?5?=",
    ],
)
async def test_a_hint_that_cannot_be_read_is_none(db: Database, subscribers: Subscribers, hint: str) -> None:
    """The next attempt comes when the schedule says."""
    answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: %s\r\n\r\n" % hint.encode()
    async with serving(says(answer)) as server, dispatching(db) as running:
        (delivery_id,) = await subscribers.deliver(await subscribers.endpoint(server))
        await running.run_once()

    row, (attempt,) = await subscribers.delivery(delivery_id), await subscribers.attempts(delivery_id)
    assert (attempt["outcome"], attempt["status_code"]) == ("refused", 503)
    assert (row["next_attempt_at"] - row["now"]).total_seconds() == pytest.approx(5, abs=2)
