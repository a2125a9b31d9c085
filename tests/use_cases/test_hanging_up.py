"""How connections out end: at once, on the loop that the gateway runs on, and only when nothing of them is left to be used again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING

import aiohttp
import pytest
import uvloop

from ipn_gateway.guard import UNSEEN_BYTES_MAX, Garbled, NotHttp, Protocol
from ipn_gateway.providers.base import Answer, NoAnswer
from tests.loopback import OK, Names, Server, event, opened, says, serving, tls_contexts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Rude:
    """A TLS server in a thread that never reads what would end a connection politely. `gone` is set when its peer has."""

    def __init__(self, talks: bool) -> None:
        self.talks = talks
        self.gone = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://localhost:{self._listener.getsockname()[1]}/hook"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        plain, _ = self._listener.accept()
        plain.settimeout(10)
        with contextlib.suppress(TimeoutError), tls_contexts()[0].wrap_socket(plain, server_side=True) as connection:
            connection.recv(65536)
            try:
                if self.talks:
                    connection.sendall(HEAD)
                    while True:
                        connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
                while connection.recv(65536):
                    pass
            except (ConnectionError, ssl.SSLError):
                pass
            self.gone.set()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(20)


@contextlib.contextmanager
def rude(*, talks: bool) -> Iterator[Rude]:
    server = Rude(talks)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("talks", [True, False])
def test_who_is_hung_up_on_over_tls_is_gone_at_once(loop: Callable[[], asyncio.AbstractEventLoop], talks: bool) -> None:
    """B105: who answers without end, or not at all, costs nothing beyond its time: nobody waits for it to agree to the end."""

    async def send(server: Rude) -> bool:
        async with opened(tls=tls_contexts()[1], deadline_seconds=0.3) as transport:
            await transport.send(event(server.url))
            return await asyncio.to_thread(server.gone.wait, 3)

    with rude(talks=talks) as server, asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(send(server))


async def test_no_question_leaves_after_its_time() -> None:
    """A verdict may have several; those that have no time left are not sent, and say so."""
    hang = asyncio.Event()

    async def never(_: Server, __: asyncio.StreamWriter) -> None:
        await hang.wait()

    async with serving(never) as slow, serving(says(OK)) as quick, opened() as transport:
        assert isinstance(await transport.ask_for(timeout_seconds=5)("GET", quick.url), Answer)  # its connection is kept
        ask = transport.ask_for(timeout_seconds=0.1)
        found = [await ask("GET", slow.url), await ask("GET", quick.url)]
        hang.set()

    assert found == [NoAnswer("timeout", sent=True), NoAnswer("timeout", sent=False)]
    assert len(quick.requests) == 1


@pytest.mark.parametrize("pieces", [[b"x" * 600_000], [b"1\r\nx\r\n"] * 20_000])
async def test_an_answer_that_comes_faster_than_it_is_read_is_read(pieces: list[bytes]) -> None:
    """The parser keeps back what is too much at once, and goes on with it."""
    protocol = Protocol(asyncio.get_running_loop())
    protocol.set_response_params(read_until_eof=True, auto_decompress=False)
    chunked = len(pieces) > 1
    head = HEAD if chunked else b"HTTP/1.1 200 OK\r\nContent-Length: 600000\r\n\r\n"
    protocol.data_received(head + b"".join(pieces) + (b"0\r\n\r\n" if chunked else b""))
    _, content = await protocol.answer()

    async with asyncio.timeout(5):
        body = await content.read()

    assert len(body) == (20_000 if chunked else 600_000)


@pytest.mark.parametrize(
    "pieces", [[b"HTTP/1.1 204 No Content\r\n\r", b"\nok"], [b"HTTP/1.1 204 No\n\nok"], [b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok!"]]
)
async def test_a_head_counts_however_it_ends(pieces: list[bytes]) -> None:
    """In two pieces, or with bare line feeds: what stands behind it does not undo it."""
    protocol = Protocol(asyncio.get_running_loop())
    protocol.set_response_params(read_until_eof=True, auto_decompress=False)
    for piece in pieces:
        protocol.data_received(piece)

    message, _ = await protocol.answer()

    assert message.code // 100 == 2


@pytest.mark.parametrize("line", [b"\n", b"\r\n", b"HTTP/1.1 100 \n\n"])
async def test_who_answers_with_lines_alone_holds_up_nobody(line: bytes) -> None:
    """The rest is not searched again for each line, which would take minutes; after as much as a head may have, the connection ends."""
    protocol = Protocol(asyncio.get_running_loop())
    protocol.set_response_params(read_until_eof=True, auto_decompress=False)
    protocol.data_received(line * (4_000_000 // len(line)))

    with pytest.raises(NotHttp):
        await protocol.answer()


async def test_a_body_that_breaks_in_what_was_kept_back_is_not_waited_for() -> None:
    """The parser comes to it when the rest has been read."""
    protocol = Protocol(asyncio.get_running_loop())
    protocol.set_response_params(read_until_eof=True, auto_decompress=False)
    protocol.data_received(HEAD + b"1\r\nx\r\n" * 40_000 + b"ZZ\r\n")
    _, content = await protocol.answer()

    async with asyncio.timeout(5):
        with pytest.raises(Garbled):
            await content.read()


async def test_a_repeat_that_does_not_connect_does_not_say_that_nothing_was_sent() -> None:
    """The first copy may have arrived before its connection broke."""
    names = Names(["127.0.0.1"])

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(OK)
        else:
            names.answers = [["127.0.0.2"]]  # nobody listens there
            writer.transport.abort()

    async with serving(answer) as server, opened(resolver=names) as transport:
        outcomes = [await transport.send(event(server)) for _ in range(2)]

    assert [outcome.kind for outcome in outcomes] == ["delivered", "disconnected"]
    assert len(server.requests) == 2


async def test_a_large_request_over_tls_ends_its_connection() -> None:
    """What of it waits below TLS nobody sees: an answer that came before may leave half of it to be sent."""
    theirs, ours = tls_contexts()
    async with serving(says(OK), theirs) as server, opened(tls=ours) as transport:
        for size in (10, 10, UNSEEN_BYTES_MAX + 1, 10):
            await transport.send(event(server, b"x" * size))

    assert server.connections == 2


async def test_what_was_not_sent_is_told_from_what_broke() -> None:
    """A connection that had ended before the request: of a refund that says that it was not asked for."""
    protocol = Protocol(asyncio.get_running_loop())

    with pytest.raises(aiohttp.ClientConnectionResetError) as found:
        protocol.send(b"GET / HTTP/1.1\r\n\r\n")

    assert type(found.value).__name__ == "NotSent"
