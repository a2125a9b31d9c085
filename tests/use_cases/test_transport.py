"""Deliveries to endpoints, against real loopback sockets: nothing of HTTP is mocked here."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ipn_gateway.faults import Faults
from ipn_gateway.guard import CONNECT_TIMEOUT_SECONDS, TooLate
from ipn_gateway.transport import EXCERPT_BYTES, FAILURES, RECEIVED_BYTES_MAX
from tests.loopback import ENDLESS, OK, Names, Server, event, opened, says, serving, tls_contexts

if TYPE_CHECKING:
    from tests.loopback import Answering

DEADLINE_SECONDS = 0.3
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


async def test_an_event_arrives_byte_for_byte() -> None:
    """Body and headers arrive exactly as signed, under our name; a 2xx is `delivered`, with what was answered and by whom."""
    body = bytes(range(256))
    async with serving(says(b"HTTP/1.1 202 Accepted\r\nContent-Length: 4\r\n\r\n\xff\0ok")) as server, opened() as transport:
        outcome = await transport.send(event(server, body))

    head, _, received = server.requests[0].partition(b"\r\n\r\n")
    assert received == body
    assert head.startswith(b"POST /hook HTTP/1.1\r\n")
    assert b"\r\nwebhook-id: evt_1" in head
    assert b"\r\nUser-Agent: ipn-gateway/" in head
    names = [line.partition(b":")[0] for line in head.split(b"\r\n")[1:]]
    assert names == [b"Host", b"User-Agent", b"Accept-Encoding", b"Accept", b"Content-Type", b"webhook-id", b"Content-Length"]
    assert (outcome.kind, outcome.status_code, outcome.error, outcome.address) == ("delivered", 202, None, "127.0.0.1")
    assert outcome.excerpt == f"{REPLACEMENT}{REPLACEMENT}ok"


@pytest.mark.parametrize("status", [101, 204, 299, 300, 304, 400, 404, 410, 429, 500, 503, 999])
async def test_only_2xx_is_success(status: int) -> None:
    """Whatever else a receiver says is a refusal."""
    async with serving(says(b"HTTP/1.1 %d Odd\r\nContent-Length: 0\r\n\r\n" % status)) as server, opened() as transport:
        outcome = await transport.send(event(server))

    assert outcome.kind == ("delivered" if status in {204, 299} else "refused")
    assert (outcome.status_code, outcome.error) == (status, None)


@pytest.mark.case("S118")
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (b"Retry-After: 120", 120),
        (b"Retry-After: 5\r\nretry-after: 7", 7),
        (b"Retry-After: Sun, 01 Mar 2026 12:01:00 GMT", 60),
        (b"Retry-After: soon", None),
        (b"X: y", None),
    ],
)
async def test_a_refusal_may_ask_for_a_later_attempt(headers: bytes, seconds: float | None) -> None:
    """Every `Retry-After` of a refusal is read, dates against the database's time of the attempt."""
    async with serving(says(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n" + headers + b"\r\n\r\n")) as server, opened() as transport:
        outcome = await transport.send(event(server))

    assert outcome.retry_after_seconds == seconds


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(status: int) -> None:
    """H7: a redirect is a refusal; where it points to is never called."""
    async with serving(says(OK)) as elsewhere, opened() as transport:
        moved = f"HTTP/1.1 {status} Moved\r\nLocation: {elsewhere.url}\r\nContent-Length: 0\r\n\r\n".encode()
        async with serving(says(moved)) as server:
            outcome = await transport.send(event(server))

    assert (outcome.kind, outcome.status_code) == ("refused", status)
    assert elsewhere.connections == 0


async def test_a_compressed_answer_is_not_unpacked() -> None:
    """H7: 50 MB of zeros in 50 KB stay 50 KB."""
    bomb = gzip.compress(bytes(50_000_000))
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb
    async with serving(says(answer)) as server, opened() as transport:
        outcome = await transport.send(event(server))

    assert outcome.kind == "delivered"
    assert outcome.excerpt == bomb[:EXCERPT_BYTES].decode(errors="replace").replace("\0", REPLACEMENT)


@pytest.mark.parametrize("secure", [False, True])
async def test_an_endless_answer_is_cut(secure: bool) -> None:
    """H7: 64 KiB are read and 1 KiB kept, then the connection is gone at once, over TLS too; the 2xx before it counts."""

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(ENDLESS)
        await server.drip(writer, b"400\r\n" + b"x" * 1024 + b"\r\n", seconds=0)

    theirs, ours = tls_contexts()
    async with serving(answer, theirs if secure else None) as server, opened(tls=ours) as transport:
        outcome = await transport.send(event(server))
        await server.left()

    assert (outcome.kind, outcome.excerpt) == ("delivered", "x" * EXCERPT_BYTES)


async def test_an_answer_of_exactly_the_limit_is_whole() -> None:
    """64 KiB are read to their end, so the connection is used again."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % RECEIVED_BYTES_MAX + b"x" * RECEIVED_BYTES_MAX
    async with serving(says(answer)) as server, opened() as transport:
        kinds = [(await transport.send(event(server))).kind for _ in range(3)]

    assert kinds == ["delivered"] * 3
    assert server.connections == 1


@pytest.mark.case("B105")
@pytest.mark.parametrize(("status", "kind"), [(200, "delivered"), (500, "refused")])
async def test_a_dripping_body_ends_at_the_deadline(status: int, kind: str) -> None:
    """H3: the total deadline ends a body that never ends; the status line before it has decided."""

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(ENDLESS.replace(b"200", b"%d" % status))
        await server.drip(writer, b"1\r\nx\r\n")

    async with serving(answer) as server, opened(deadline_seconds=DEADLINE_SECONDS) as transport:
        outcome = await transport.send(event(server))

    assert (outcome.kind, outcome.status_code) == (kind, status)
    assert 290 <= outcome.duration_ms < 3000


@pytest.mark.case("B105")
@pytest.mark.parametrize("secure", [False, True])
async def test_dripping_headers_end_at_the_deadline(secure: bool) -> None:
    """H3: bytes that keep coming do not keep the attempt alive; nothing of it is left when the transport closes."""

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await server.drip(writer, b"X-A: b\r\n")

    theirs, ours = tls_contexts()
    async with serving(answer, theirs if secure else None) as server, opened(deadline_seconds=DEADLINE_SECONDS, tls=ours) as transport:
        outcome = await transport.send(event(server))

    assert (outcome.kind, outcome.error, outcome.address) == ("timeout", "total_timeout", "127.0.0.1")
    assert 290 <= outcome.duration_ms < 3000


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_host_that_reads_nothing_ends_at_the_deadline(scheme: str) -> None:
    """H3: a body that cannot be sent and a handshake that is not answered are under the deadline too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # its backlog connects, and nobody reads
        url = f"{scheme}://localhost:{listener.getsockname()[1]}/"
        async with opened(deadline_seconds=DEADLINE_SECONDS) as transport:
            outcome = await transport.send(event(url, bytes(1_000_000)))

    assert outcome.kind == "timeout"


async def test_a_2xx_whose_body_breaks_off_is_delivered() -> None:
    """The receiver has said yes; what became of its words does not matter."""
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart"
    async with serving(says(cut, close=True)) as server, opened() as transport:
        outcome = await transport.send(event(server))

    assert (outcome.kind, outcome.excerpt) == ("delivered", "part")


async def test_a_2xx_before_the_whole_event_was_read_is_delivered() -> None:
    """A receiver that answers early and then reads no more does not hold the attempt up."""

    async def early(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await server.over.wait()

    async with serving(early, reads_bodies=False) as server, opened() as transport:
        outcome = await transport.send(event(server, bytes(1_000_000)))

    assert outcome.kind == "delivered"
    assert outcome.duration_ms < 3000


@pytest.mark.parametrize(
    ("answer", "kind", "error"),
    [
        (b"", "disconnected", "connection_lost"),
        (b"HTTP/1.1 200 OK\r\nContent-", "disconnected", "connection_lost"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "protocol_error", "not_http"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", "protocol_error", "not_http"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n", "protocol_error", "not_http"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok", "protocol_error", "not_http"),
    ],
    ids=["silence", "half a head", "another protocol", "long header", "many headers", "bad length"],
)
async def test_what_is_no_answer_has_its_class(answer: bytes, kind: str, error: str) -> None:
    """H2: closed before it answered, or not HTTP, or too long or too many headers."""
    async with serving(says(answer, close=True)) as server, opened() as transport:
        outcome = await transport.send(event(server))

    assert (outcome.kind, outcome.error, outcome.status_code, outcome.address) == (kind, error, None, "127.0.0.1")


async def test_a_reset_is_a_disconnect() -> None:
    """H2: the request may have been received."""

    async def answer(_: Server, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with serving(answer) as server, opened() as transport:
        outcome = await transport.send(event(server))

    assert (outcome.kind, outcome.error) == ("disconnected", "connection_lost")


async def test_a_refused_connection_never_connected() -> None:
    """H2: nobody listens; the system's word for it is kept, and there is no address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with opened() as transport:
        outcome = await transport.send(event(f"http://127.0.0.1:{port}/"))

    assert (outcome.kind, outcome.error, outcome.address) == ("connect_failed", "not_connected: ECONNREFUSED", None)


async def test_a_certificate_that_nobody_vouches_for_is_refused() -> None:
    """H2: self-signed, so nothing was sent."""
    async with serving(says(OK), tls_contexts()[0]) as server, opened() as transport:
        outcome = await transport.send(event(server))

    assert (outcome.kind, outcome.error) == ("tls_failed", "certificate_refused: self-signed certificate")
    assert server.requests == []


async def test_a_certificate_is_checked_against_the_name() -> None:
    """Trusted, yet made out to another name: which address was connected to does not count."""
    theirs, ours = tls_contexts()
    async with serving(says(OK), theirs) as server, opened(tls=ours) as transport:
        good = await transport.send(event(server))
        bad = await transport.send(event(server.url.replace("localhost", "127.0.0.1")))

    assert (good.kind, good.address) == ("delivered", "127.0.0.1")
    assert bad.kind == "tls_failed"
    assert len(server.requests) == 1


async def test_a_server_without_tls_fails_the_handshake() -> None:
    """H2: https to a port that speaks plain HTTP."""

    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        writer.close()

    listener = await asyncio.start_server(plain, "127.0.0.1", 0)
    async with listener, opened() as transport:
        outcome = await transport.send(event(f"https://localhost:{listener.sockets[0].getsockname()[1]}/"))

    assert outcome.kind == "tls_failed"
    assert (outcome.error or "").startswith("handshake_failed: ")


def closes_kept(piece: bytes = b"", *, reset: bool = False) -> Answering:
    """A connection's first request is answered, on its next one it says `piece` and ends."""
    served: set[asyncio.StreamWriter] = set()

    async def answer(_: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(piece if writer in served else OK)
        await writer.drain()
        if writer in served and reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()
        elif writer in served:
            writer.close()
        served.add(writer)

    return answer


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("secure", [False, True])
async def test_a_kept_connection_that_has_ended_costs_nothing(reset: bool, secure: bool) -> None:
    """H4: a receiver may end an idle connection at any time: the same bytes go once more, over a fresh one, as one attempt."""
    theirs, ours = tls_contexts()
    async with serving(says(OK), theirs if secure else None) as server, opened(tls=ours) as transport:
        server.answer = closes_kept(reset=reset)
        first = await asyncio.gather(*(transport.send(event(server, b"first")) for _ in range(3)))
        then = await transport.send(event(server, b"then"))

    assert [outcome.kind for outcome in [*first, then]] == ["delivered"] * 4
    assert (len(server.requests), server.connections) == (5, 4)
    assert server.requests[3] == server.requests[4]


async def test_a_fresh_connection_that_ends_early_is_no_delivery() -> None:
    """Nor is anything sent a third time: the kept one ended, and the fresh one as well."""

    async def close(_: Server, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with serving(says(OK)) as server, opened() as transport:
        await transport.send(event(server))
        server.answer = close
        outcome = await transport.send(event(server))

    assert (outcome.kind, outcome.address) == ("disconnected", "127.0.0.1")
    assert (len(server.requests), server.connections) == (3, 2)


async def test_a_kept_connection_that_ends_within_an_answer_is_not_repeated() -> None:
    """The first byte says that the request was read."""
    async with serving(says(OK)) as server, opened() as transport:
        server.answer = closes_kept(b"H")
        await transport.send(event(server))
        outcome = await transport.send(event(server))

    assert outcome.kind == "disconnected"
    assert (len(server.requests), server.connections) == (2, 1)


async def test_one_deadline_holds_for_both_connections() -> None:
    """The fresh one has what the kept one has left of it."""
    hangs = closed = 0

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        nonlocal hangs, closed
        if len(server.requests) == 1:
            writer.write(OK)
        elif len(server.requests) == 2:
            closed += 1
            writer.close()
        else:
            hangs += 1
            await server.over.wait()

    async with serving(answer) as server, opened(deadline_seconds=DEADLINE_SECONDS) as transport:
        await transport.send(event(server))
        outcome = await transport.send(event(server))

    assert (outcome.kind, closed, hangs) == ("timeout", 1, 1)
    assert DEADLINE_SECONDS * 1000 - 10 <= outcome.duration_ms < 2 * DEADLINE_SECONDS * 1000


async def test_the_deadline_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not rounded up to a whole second of the loop's clock, by which an attempt might outlive its lease; nor is the limit of connecting."""
    loop, limits = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def noted(when: float, *rest: object, **more: object) -> object:
        limits.append(when - loop.time())
        return call_at(when, *rest, **more)  # type: ignore[arg-type]

    async with serving(says(OK)) as server, opened(deadline_seconds=20.25) as transport:
        monkeypatch.setattr(loop, "call_at", noted)
        outcome = await transport.send(event(server))

    assert outcome.kind == "delivered"
    assert 20.2 < max(limits) <= 20.25
    connecting = [limit for limit in limits if limit < 2 * CONNECT_TIMEOUT_SECONDS]
    assert CONNECT_TIMEOUT_SECONDS - 0.1 < max(connecting) <= CONNECT_TIMEOUT_SECONDS


async def test_a_header_that_would_begin_another_is_not_sent() -> None:
    """Nor a line of its own within it: that is a bug here, and no outcome."""
    async with serving(says(OK)) as server, opened() as transport:
        for value in ("1\r\nX-Evil: 1", "1\nX-Evil: 1", "1\r", "1\0"):
            with pytest.raises(ValueError, match="one line"):
                await transport.send(replace(event(server), headers={"webhook-id": value}))

    assert server.connections == 0


async def test_what_would_outlive_its_lease_is_not_sent() -> None:
    """Neither when it begins too late, nor when the process was frozen while it connected."""
    async with serving(says(OK)) as server, opened(deadline_seconds=2) as transport:
        now = asyncio.get_running_loop().time()
        with pytest.raises(TooLate):
            await transport.send(replace(event(server), ends_by=now + 1.5))
        sent = await transport.send(replace(event(server), ends_by=now + 10))
    assert sent.kind == "delivered"
    assert len(server.requests) == 1


async def test_what_was_frozen_while_it_connected_is_not_sent() -> None:
    """The look-up of the name blocks the whole process beyond the deadline: the connection is made, and nothing is said on it."""
    names = Names(["127.0.0.1"])

    async def frozen(*given: object, **more: object) -> object:
        over = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < over:  # the process stands still
            pass
        return await Names.resolve(names, *given, **more)  # type: ignore[arg-type]

    names.resolve = frozen  # type: ignore[method-assign, assignment]
    async with serving(says(OK)) as server, opened(deadline_seconds=DEADLINE_SECONDS, resolver=names) as transport:
        try:
            outcome = await transport.send(event(server))
        except TooLate:
            outcome = None

    assert outcome is None or outcome.kind == "timeout"
    assert server.requests == []


async def test_cookies_are_not_kept() -> None:
    """H5: what one endpoint sets is not told to the next one on the same host."""
    answer = b"HTTP/1.1 200 OK\r\nSet-Cookie: tenant=one; Path=/\r\nContent-Length: 0\r\n\r\n"
    async with serving(says(answer)) as server, opened() as transport:
        await transport.send(event(server))
        await transport.send(event(server))

    assert len(server.requests) == 2
    assert not any(b"cookie" in request.lower() for request in server.requests)


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve names for us, past the guard."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with serving(says(OK)) as server, opened() as transport:
        outcome = await transport.send(event(server))

    assert outcome.kind == "delivered"


@pytest.mark.case("S66")
async def test_nothing_is_sent_inside_a_transaction() -> None:
    """A call inside a transaction is a bug: it raises, and the endpoint hears nothing."""

    def assert_no_transaction() -> None:
        raise RuntimeError("inside a transaction")

    async with serving(says(OK)) as server, opened(assert_no_transaction=assert_no_transaction) as transport:
        with pytest.raises(RuntimeError, match="inside a transaction"):
            await transport.send(event(server))
        with pytest.raises(RuntimeError, match="inside a transaction"):
            await transport.ask_for(timeout_seconds=5)("GET", server.url)

    assert server.connections == 0


@pytest.mark.parametrize(("point", "sent"), [("transport.send:before", 0), ("transport.send:after", 1)])
async def test_a_test_may_crash_before_and_after_a_delivery(point: str, sent: int) -> None:
    """What a fault point raises comes through, with the request unsent or sent."""

    async def crash() -> None:
        raise SystemError("crash")

    async with serving(says(OK)) as server, opened(faults=Faults({point: crash})) as transport:
        with pytest.raises(SystemError):
            await transport.send(event(server))

    assert len(server.requests) == sent


async def test_many_slow_deliveries_wait_side_by_side() -> None:
    """No limit of the client's own: two hundred endpoints that hang do not hold up the next one."""
    async with serving(says(OK)) as quick, opened() as transport:

        async def hang(server: Server, writer: asyncio.StreamWriter) -> None:
            if len(server.requests) == 200:
                kinds.append((await transport.send(event(quick))).kind)
                server.over.set()
            await server.over.wait()
            writer.write(OK)

        kinds: list[str] = []
        async with serving(hang) as server, asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(transport.send(event(server)))

    assert kinds == ["delivered"]
    assert server.connections == 200


def test_narrow_failures_stand_before_the_wide_ones() -> None:
    """H2: no row of the table is shadowed by an earlier one, or its outcome could never be."""
    classes = [failure for failure, _, _ in FAILURES]

    assert [(wide, narrow) for index, wide in enumerate(classes) for narrow in classes[index + 1 :] if issubclass(narrow, wide)] == []


async def test_the_default_certificates_are_the_systems_and_certifis() -> None:
    """A transport opened with nothing given trusts public authorities and checks names."""
    async with opened(tls=None, resolver=Names(["8.8.8.8"])) as transport:
        context = transport._deliveries.connector._ssl

    assert isinstance(context, ssl.SSLContext)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.cert_store_stats()["x509_ca"] > 50
