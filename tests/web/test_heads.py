"""Request heads over real sockets: what is too long or too slow ends before it costs anything."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from ipn_gateway import heads
from ipn_gateway.heads import HEAD_BYTES_MAX, BoundedHeads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(str(len(body)))).encode())]})
    await send({"type": "http.response.body", "body": str(len(body)).encode()})


class Counted(BoundedHeads):
    """Counts what was read."""

    bytes_read = 0

    def data_received(self, data: bytes) -> None:
        Counted.bytes_read += len(data)
        super().data_received(data)


async def in_pieces(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    """Each is read before the next one is sent."""
    for piece in pieces:
        expected = Counted.bytes_read + len(piece)
        writer.write(piece)
        while Counted.bytes_read < expected:  # noqa: ASYNC110 - a protocol sets no event
            await asyncio.sleep(0)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server with bounded heads."""
    async with serving(echo) as port:
        yield port


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """The port of a server with bounded heads."""
    config = uvicorn.Config(app, http=Counted, ws="none", lifespan="off", log_config=None, access_log=False, port=0, timeout_keep_alive=1)
    server = uvicorn.Server(config)
    setattr(server, "capture_signals", contextlib.nullcontext)  # noqa: B010 - signals are the test runner's
    serving = asyncio.get_running_loop().create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - the server sets no event
        await asyncio.sleep(0)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def exchange(port: int, *parts: bytes) -> bytes:
    """Send the parts, then read to the end of the connection; what a closed connection refuses is not sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(65536):
                received += chunk
                if received.endswith(b"\r\n\r\n" + received.rpartition(b"\r\n\r\n")[2]) and b"HTTP/1.1 200" in received:
                    break
    writer.close()
    return received


async def test_ordinary_requests_pass_one_after_the_other(port: int) -> None:
    """Bodies do not count, however long, and neither do earlier heads of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for length in (0, 200_000, 3):
        writer.write(f"POST / HTTP/1.1\r\nhost: a\r\nx: {'y' * 30_000}\r\ncontent-length: {length}\r\n\r\n".encode() + b"b" * length)
        answer = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(len(str(length)))

        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert body == str(length).encode()
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (HEAD_BYTES_MAX + 1) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 40_000 + b"\r\n",
        b"GET /" + b"y" * 400_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
    ids=["one header", "many headers", "the address"],
)
async def test_a_head_over_the_bound_is_a_431(port: int, head: bytes) -> None:
    """Whether it comes at once or goes on for ever."""
    answer = await exchange(port, head, *[b"z" * 65536] * 20)

    assert answer.startswith(b"HTTP/1.1 431") or answer == b"", answer


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost:"])
async def test_a_head_that_does_not_come_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Nor a connection that sends nothing at all."""
    monkeypatch.setattr(heads, "HEAD_SECONDS_MAX", 0.05)

    answer = await exchange(port, sent)

    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("offer", ["Upgrade: h2c", "upgrade: websocket", "UPGRADE:h2c"])
async def test_an_offer_to_upgrade_is_ignored(port: int, offer: str) -> None:
    """Some clients make it in each request; its body counts, and so does the next request (RFC 9110, 7.8)."""
    head = (
        f"POST / HTTP/1.1\r\nhost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n{offer}\r\nHTTP2-Settings: AAMA\r\ncontent-length: 5\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for body in (b"12345", b"\r\nUpg"):
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        counted = await reader.readexactly(1)

        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert counted == b"5"
    writer.close()


def test_only_the_offer_of_a_head_is_changed() -> None:
    """Neither other headers, nor what follows the head."""
    piece = b"POST / HTTP/1.1\r\nX-Upgrade: 1\r\nUpgrade: h2c\r\nY: upgrade: 2\r\n\r\nz\r\nUpgrade: 3"

    assert heads._disguised(b"", piece) == (piece.replace(b"\r\nUpgrade: h2c", b"\r\n!pgrade: h2c"), b"")


OFFERED = b"POST / HTTP/1.1\r\nhost: a\r\nUpgrade : h2c\r\nup: 1\r\ncontent-length: 5\r\nUPGRADE: x\r\n\r\n"


@pytest.mark.parametrize("size", range(1, len(OFFERED)))
def test_an_offer_that_comes_in_pieces_is_changed_too(size: int) -> None:
    """Of what might be one, so much waits for the next piece; with the end of the head nothing waits."""
    passed, held = b"", b""
    for begun in range(0, len(OFFERED), size):
        now, held = heads._disguised(passed[-3:], held + OFFERED[begun : begun + size])
        passed += now

    assert passed == OFFERED.replace(b"Upgrade", b"!pgrade").replace(b"UPGRADE", b"!PGRADE")
    assert held == b""


async def test_a_request_behind_another_may_begin_in_any_piece(port: int) -> None:
    """The end of its head is found, whatever came with the request before."""
    first, second = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nab", b"cGET / HTTP/1.1\r\nhost: a\r\nUpgrade: h2c\r\n\r\n"
    for cut in range(1, len(second)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(5):
            await in_pieces(writer, first, second[:cut], second[cut:])
            answers = [await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(1) for _ in range(2)]
        writer.close()

        assert [answer[-1:] for answer in answers] == [b"3", b"0"]


async def test_a_request_whose_head_comes_in_pieces_keeps_its_body(port: int) -> None:
    """Byte by byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5):
        await in_pieces(writer, *[bytes([byte]) for byte in OFFERED.replace(b"Upgrade :", b"Upgrade:") + b"12345"])
        answer = await reader.readuntil(b"\r\n\r\n")
        counted = await reader.readexactly(1)
    writer.close()

    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert counted == b"5"


@pytest.mark.parametrize("stray", [b"\r\n", b"\r\n\r\n", b"\r", b"\n"])
async def test_empty_lines_before_a_request_are_ignored(port: int, stray: bytes) -> None:
    """Before the first one and between two, also behind a body that ends as a line does (RFC 9112, 2.2)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5):
        for _ in range(3):
            await in_pieces(writer, stray, stray + OFFERED.replace(b"Upgrade :", b"Upgrade:") + b"123\r\n")
            answer = await reader.readuntil(b"\r\n\r\n")
            counted = await reader.readexactly(1)

            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert counted == b"5"
    writer.close()


async def test_empty_lines_keep_no_connection_open(port: int) -> None:
    """One that is idle ends in its time, whatever comes that is no request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(8):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(1)
        await in_pieces(writer, b"\r\n", b"\r")

        assert await reader.read() == b""
    writer.close()


async def test_what_follows_a_request_and_is_none_ends_the_connection(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """The answer under way is dropped without an error: its connection is gone."""
    caplog.set_level("WARNING")
    received = await exchange(port, b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n1234567")

    assert b" 400 " in received
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("rest", [b"X-a: v\r\n" * 100_000, b"X-a: " + b"v" * 800_000, b"1;x=" + b"v" * 800_000])
async def test_what_stands_beside_a_body_is_bounded(port: int, rest: bytes) -> None:
    """Fields behind the last chunk, and what a chunk is said to have: of either as much as of a head."""
    last = b"0\r\n" if rest.startswith(b"X") else b""
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"

    answer = await exchange(port, head + last, *[rest[begun : begun + 5_000] for begun in range(0, len(rest), 5_000)])

    assert answer.startswith(b"HTTP/1.1 431") or answer == b"", answer


async def test_fields_behind_a_body_are_left_out() -> None:
    """They say nothing that is asked for, and come when the headers are in use already."""
    seen: list[Any] = []

    async def look(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        seen.extend(scope["headers"])

    async with serving(look) as port:
        head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-a: v\r\n\r\n"
        answer = await exchange(port, head)

    assert answer.endswith(b"3")
    assert seen == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]


FORM = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc"


@pytest.mark.parametrize("then", [b"", b"!garbage\r\n\r\n"])
async def test_who_hangs_up_on_several_answers_is_gone_for_each(then: bytes) -> None:
    """The one under way is told, though others wait behind it: or it would write to a connection that has ended, and raise an incident."""
    begun, told = asyncio.Event(), asyncio.Event()

    async def wait(_scope: Any, receive: Any, _send: Any) -> None:
        await receive()
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    async with serving(wait) as port, asyncio.timeout(5):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(FORM * 3)
        await begun.wait()
        writer.write(then)
        if not then:
            writer.transport.abort()
        await told.wait()
        writer.close()

    assert told.is_set()


async def test_what_stands_behind_an_offer_that_came_through_is_no_request(port: int) -> None:
    """Its request was sent before the answer to another: its body is not read, least of all as a request, and the connection ends."""
    offered = OFFERED.replace(b"Upgrade :", b"Connection: Upgrade\r\nUpgrade:").replace(b"content-length: 5", b"content-length: 40")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5):
        await in_pieces(writer, FORM + offered)
        writer.write(b"GET /other HTTP/1.1\r\nhost: a\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(65536):
                received += chunk
    writer.close()

    assert received.count(b"HTTP/1.1 200") <= 2
