"""Questions to providers, against real loopback sockets, and by respx where the network does not matter."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
from typing import TYPE_CHECKING

import httpx
import pytest
import respx

from ipn_gateway.asking import Question
from ipn_gateway.faults import Faults
from ipn_gateway.providers.base import Answer, NoAnswer
from ipn_gateway.transport import ANSWER_BYTES_MAX, Transport
from tests.loopback import ENDLESS, OK, Names, Server, opened, says, serving, tls_contexts

if TYPE_CHECKING:
    from ipn_gateway.providers.base import Ask

SECRET = "qwerty-passwd"
PARAMS = {"val_id": "1 & 2", "store_passwd": SECRET}


def ask_of(transport: Transport, *, seconds: float = 5) -> Ask:
    return transport.ask_for(timeout_seconds=seconds)


async def test_a_question_by_get_carries_its_parameters() -> None:
    """The answer comes back whole, whatever its status, with its media type in lower case."""
    answer = b"HTTP/1.1 404 No\r\nContent-Type: Application/JSON; charset=utf-8\r\nContent-Length: 2\r\n\r\n{}"
    async with serving(says(answer)) as server, opened(loopback=False) as transport:
        found = await ask_of(transport)("GET", server.url, params=PARAMS)

    assert found == Answer(404, "application/json", b"{}")
    assert server.requests[0].startswith(b"GET /hook?val_id=1+%26+2&store_passwd=qwerty-passwd HTTP/1.1\r\n")
    assert b"user-agent: ipn-gateway/" in server.requests[0].lower()
    assert b"accept-encoding: identity" in server.requests[0].lower()


async def test_a_question_by_post_carries_its_form() -> None:
    """Urlencoded, and a query that the URL has already stays."""
    async with serving(says(OK)) as server, opened() as transport:
        found = await ask_of(transport)("POST", server.url + "?v=4", form={"total_amount": "12.50", "cus_name": "আলী"})

    assert found == Answer(200, "", b"ok")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /hook?v=4 HTTP/1.1\r\n")
    assert b"application/x-www-form-urlencoded" in head
    assert body == b"total_amount=12.50&cus_name=%E0%A6%86%E0%A6%B2%E0%A7%80"


async def test_a_question_adds_its_parameters_to_those_of_the_url() -> None:
    """Neither replaces the other."""
    async with serving(says(OK)) as server, opened() as transport:
        await ask_of(transport)("GET", server.url + "?v=4", params={"val_id": "1"})

    assert server.requests[0].startswith(b"GET /hook?v=4&val_id=1 HTTP/1.1\r\n")


@pytest.mark.case("B29")
async def test_a_form_of_bytes_is_sent_as_it_is() -> None:
    """What a provider wants back must be what it sent: nothing is decoded, ordered or escaped anew."""
    posted = b"cmd=_notify-validate&last_name=Nu%F1ez%80&empty=&bare&plus=a+b%20c&case=%e9%E9"
    async with serving(says(OK)) as server, opened() as transport:
        found = await ask_of(transport)("POST", server.url, form=posted)

    assert found == Answer(200, "", b"ok")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert b"content-type: application/x-www-form-urlencoded\r\n" in head.lower() + b"\r\n"
    assert body == posted


@pytest.mark.parametrize("form", [None, {"a": "b"}, b"{}"])
async def test_headers_of_a_question_are_sent_as_they_are_and_never_logged(
    form: dict[str, str] | bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider's key or token may travel so; one that is given replaces one of ours, and all the others stay."""
    caplog.set_level(logging.DEBUG)
    given = {"X-API-Key": SECRET, "Idempotency-Key": "k" * 64, "content-type": "application/json"}
    async with serving(says(OK, b"junk")) as server, opened() as transport:
        found = await ask_of(transport)("POST", server.url, form=form, headers=given)
        server.answer = says(b"junk", close=True)
        none = await ask_of(transport)("POST", server.url, form=form, headers=given)

    assert found == Answer(200, "", b"ok")
    assert none == NoAnswer("protocol_error")
    lines = server.requests[0].partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]
    sent = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    assert [value for name, value in sent if name == b"x-api-key"] == [SECRET.encode()]
    assert [value for name, value in sent if name == b"idempotency-key"] == [b"k" * 64]
    assert [value for name, value in sent if name == b"content-type"] == [b"application/json"]
    assert dict(sent)[b"user-agent"].startswith(b"ipn-gateway/")
    assert SECRET not in caplog.text + repr((found, none))


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\rb", "a\0b"])
async def test_a_header_of_a_question_is_one_line(value: str) -> None:
    """What would begin another line is a fault of the adapter's, and nothing is sent."""
    async with serving(says(OK)) as server, opened() as transport:
        with pytest.raises(ValueError, match="one line"):
            await ask_of(transport)("GET", server.url, headers={"X-API-Key": value})

    assert server.requests == []


async def test_a_redirect_is_an_answer() -> None:
    """H7: credentials in the query do not travel to where a redirect points."""
    async with serving(says(OK)) as elsewhere, opened() as transport:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {elsewhere.url}\r\nContent-Length: 0\r\n\r\n".encode()
        async with serving(says(moved)) as server:
            found = await ask_of(transport)("GET", server.url, params=PARAMS)

    assert found == Answer(302, "", b"")
    assert elsewhere.connections == 0


@pytest.mark.parametrize(("extra", "whole"), [(0, True), (1, False)])
async def test_an_answer_has_a_limit(extra: int, whole: bool) -> None:
    """1 MiB is read; one byte more is no answer."""
    length = ANSWER_BYTES_MAX + extra
    async with serving(says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length + b"x" * length)) as server, opened() as transport:
        found = await ask_of(transport)("GET", server.url)

    assert found == (Answer(200, "", b"x" * length) if whole else NoAnswer("too_large"))


@pytest.mark.parametrize("secure", [False, True])
async def test_an_endless_answer_is_cut(secure: bool) -> None:
    """H7: the connection is gone when the limit is reached, over TLS too."""

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(ENDLESS)
        await server.drip(writer, b"4000\r\n" + b"x" * 0x4000 + b"\r\n", seconds=0)

    theirs, ours = tls_contexts()
    async with serving(answer, theirs if secure else None) as server, opened(tls=ours) as transport:
        found = await ask_of(transport)("GET", server.url)

    assert found == NoAnswer("too_large")


async def test_a_compressed_answer_is_not_unpacked() -> None:
    """H7: we ask for none; what comes all the same is no answer, however small it looks."""
    bomb = gzip.compress(bytes(10_000_000))
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb
    async with serving(says(answer)) as server, opened() as transport:
        found = await ask_of(transport)("GET", server.url)

    assert found == NoAnswer("encoded")


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n", ENDLESS])
async def test_what_drips_ends_at_the_deadline(head: bytes) -> None:
    """H3: one limit for the whole question, headers and body; it may have been received."""

    async def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await server.drip(writer, b"1\r\nx\r\n" if head is ENDLESS else b"X-A: b\r\n")

    async with serving(answer) as server, opened() as transport:
        started = asyncio.get_running_loop().time()
        found = await ask_of(transport, seconds=0.3)("GET", server.url)
        took_seconds = asyncio.get_running_loop().time() - started

    assert found == NoAnswer("timeout", sent=True)
    assert 0.3 <= took_seconds < 3


@pytest.mark.case("S59", "S68", "S91")
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("kept", [False, True])
async def test_a_question_whose_connection_breaks_was_sent_once(method: str, kept: bool) -> None:
    """H2, H4: received, and the server closed, on a new connection or a kept one: unknown, and not repeated, since refunds go by GET."""

    async def close(_: Server, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with serving(says(OK) if kept else close) as server, opened() as transport:
        if kept:
            await ask_of(transport)("GET", server.url)
        server.answer = close
        found = await ask_of(transport)(method, server.url, params=PARAMS)  # type: ignore[arg-type]

    assert found == NoAnswer("disconnected", sent=True)
    assert (len(server.requests), server.connections) == (2 if kept else 1, 1)


@pytest.mark.case("S68")
async def test_what_comes_unasked_is_no_answer() -> None:
    """A word that came after the answer to one question, however late, is not what is said to the next: money hangs on it."""
    words = [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + word for word in (b"paid", b"open", b"paid")]
    async with serving(says(words[0], words[1])) as server, opened() as transport:
        first = await ask_of(transport)("GET", server.url)
        server.writers[0].write(words[2])
        for _ in range(50):
            await asyncio.sleep(0)
        second = await ask_of(transport)("GET", server.url)

    assert (first, second) == (Answer(200, "", b"paid"), Answer(200, "", b"open"))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "protocol_error"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", "protocol_error"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\npart", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "protocol_error"),
    ],
    ids=["another protocol", "long header", "cut body", "broken chunk"],
)
async def test_half_an_answer_is_none(answer: bytes, cause: str) -> None:
    """H2: a body that breaks off proves nothing, unlike a delivery's; the question may have been received."""
    async with serving(says(answer, close=True)) as server, opened() as transport:
        found = await ask_of(transport)("GET", server.url, params=PARAMS)

    assert found == NoAnswer(cause, sent=True)


@pytest.mark.case("S68")
async def test_never_connected_is_never_sent() -> None:
    """H2: refused, no such name, TLS: the request provably never left."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with opened() as transport, serving(says(OK), tls_contexts()[0]) as server:
        refused = await ask_of(transport)("POST", f"http://127.0.0.1:{port}/", form={"a": "b"})
        untrusted = await ask_of(transport)("GET", server.url)
    async with opened(resolver=Names([])) as transport:
        unknown = await ask_of(transport)("GET", "https://pay.example.com/")

    assert refused == NoAnswer("connect_failed", sent=False)
    assert untrusted == NoAnswer("tls_failed", sent=False)
    assert unknown == NoAnswer("connect_failed", sent=False)
    assert server.requests == []


async def test_cookies_are_not_kept() -> None:
    """H5: two jars are on by default, and both are off: tenants share a provider's host."""
    answer = b"HTTP/1.1 200 OK\r\nSet-Cookie: tenant=one; Path=/\r\nContent-Length: 0\r\n\r\n"
    async with serving(says(answer)) as server, opened() as transport:
        for _ in range(2):
            await ask_of(transport)("GET", server.url)

    assert len(server.requests) == 2
    assert not any(b"cookie" in request.lower() for request in server.requests)


@pytest.mark.parametrize(
    "url",
    [
        "https://10.0.0.1/",
        "https://169.254.169.254/",
        "http://pay.example.com/",
        "https://2130706433/",
        "file:///etc/passwd",
        "https://xn--/",
        "",
        "\x00",
    ],
)
async def test_a_url_that_is_not_allowed_is_not_called(url: str) -> None:
    """The guard's rules hold for providers too; only loopback is open to them."""
    async with opened(loopback=False, resolver=Names(["10.0.0.1"])) as transport:
        found = await ask_of(transport)("GET", url, params=PARAMS)

    assert found == NoAnswer("blocked", sent=False)


async def test_a_name_with_private_addresses_is_not_called() -> None:
    """H6: the guard's own error comes through httpx's API as what it is."""
    async with opened(resolver=Names(["10.0.0.1", "fd00::1"])) as transport:
        found = await ask_of(transport)("GET", "https://pay.example.com/", params=PARAMS)

    assert found == NoAnswer("blocked", sent=False)


async def test_credentials_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of a question is, as httpx would each URL: ours carry passwords in the query."""
    caplog.set_level(logging.DEBUG)
    async with serving(says(OK, b"")) as server, opened() as transport:
        found = await ask_of(transport)("GET", server.url, params=PARAMS)
        server.answer = says(b"junk", close=True)
        none = await ask_of(transport)("GET", server.url, params=PARAMS)

    assert isinstance(found, Answer)
    assert isinstance(none, NoAnswer)
    assert "/hook" not in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in repr((found, none))


def test_credentials_are_never_shown() -> None:
    """A traceback shows what its frames hold, and httpx a whole URL."""
    question = Question("POST", httpx.URL("https://pay.example.com/api"), PARAMS, {"store_passwd": SECRET}, {"X-API-Key": SECRET})

    assert repr(question) == "Question('POST', 'https://pay.example.com/api')"
    assert str(question.url) == "https://pay.example.com/api?val_id=1+%26+2&store_passwd=qwerty-passwd"


@pytest.mark.parametrize(("point", "sent"), [("transport.ask:before", 0), ("transport.ask:after", 1)])
async def test_a_test_may_crash_before_and_after_a_question(point: str, sent: int) -> None:
    """What a fault point raises comes through, with the request unsent or sent."""

    async def crash() -> None:
        raise SystemError("crash")

    async with serving(says(OK)) as server, opened(faults=Faults({point: crash})) as transport:
        with pytest.raises(SystemError):
            await ask_of(transport)("GET", server.url)

    assert len(server.requests) == sent


async def test_respx_can_stand_in_for_a_provider() -> None:
    """H1: `using="httpx"` reaches our transport; what it raises counts as unknown, since it proves nothing about the network."""
    async with opened() as transport:
        with respx.mock(using="httpx") as router:
            route = router.get("https://pay.example.com/validator", params={"val_id": "1"})
            route.side_effect = [httpx.Response(200, json={"status": "VALID"}), httpx.ReadTimeout, httpx.ConnectError]
            found = [await ask_of(transport)("GET", "https://pay.example.com/validator", params={"val_id": "1"}) for _ in range(3)]

    assert found == [
        Answer(200, "application/json", b'{"status":"VALID"}'),
        NoAnswer("timeout", sent=True),
        NoAnswer("disconnected", sent=True),
    ]
