"""The guard in the resolver: names that lead to where we must not go, and names whose servers hang."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import pytest

from ipn_gateway.addresses import AddressBlocked
from ipn_gateway.guard import Guard, Seen, SystemResolver
from tests.loopback import OK, Names, event, opened, says, serving

NAME = "https://hooks.example.com/"


@pytest.mark.parametrize(
    "url",
    [
        "https://10.0.0.1/",
        "https://[fd00::1]/",
        "https://169.254.169.254/latest/meta-data/",
        "https://[::ffff:192.168.0.1]/",
        "https://2130706433/",
        "https://0177.0.0.1/",
        "https://0x7f000001/",
        "https://127.1/",
        "https://127.0.0.1./",
        "https://0.0.0.0/",
        "https://user@hooks.example.com/",
        "http://hooks.example.com/",
        "not a url",
    ],
)
@pytest.mark.parametrize("loopback", [False, True])
async def test_a_url_that_is_not_allowed_is_blocked(url: str, loopback: bool) -> None:
    """H6: a literal address never reaches a resolver, so it is vetted before the call, in each of its notations."""
    names = Names(["8.8.8.8"])
    async with opened(loopback=loopback, resolver=names) as transport:
        outcome = await transport.send(event(url))

    assert (outcome.kind, outcome.error, outcome.address) == ("blocked", "url_not_allowed", None)
    assert names.asked == []


@pytest.mark.parametrize(
    "addresses", [["10.0.0.1"], ["169.254.169.254", "fd00::1"], ["127.0.0.1"], ["::1"], ["64:ff9b::a00:1"], ["fe80::1%1"]]
)
async def test_a_name_that_leads_to_a_private_address_is_blocked(addresses: list[str]) -> None:
    """H6: blocked by the guard, not reported as a DNS failure; which address it was is not told."""
    async with opened(loopback=False, resolver=Names(addresses)) as transport:
        outcome = await transport.send(event(NAME))

    assert (outcome.kind, outcome.error, outcome.address) == ("blocked", "address_not_allowed", None)


async def test_loopback_is_closed_unless_the_setting_opens_it() -> None:
    """Without `IPN_ALLOW_LOOPBACK_ENDPOINTS` a subscriber's URL cannot reach this host, by name or by number."""
    async with serving(says(OK)) as server:
        async with opened(loopback=False) as transport:
            by_name = await transport.send(event(server))
            by_number = await transport.send(event(f"http://127.0.0.1:{server.port}/"))
        async with opened(loopback=True) as transport:
            allowed = await transport.send(event(server))

    assert (by_name.kind, by_number.kind, allowed.kind) == ("blocked", "blocked", "delivered")
    assert server.connections == 1


async def test_what_a_provider_opened_an_endpoint_does_not_get() -> None:
    """H6: a kept connection to loopback, which providers may use, is not used again for a subscriber's URL."""
    async with serving(says(OK)) as server, opened(loopback=False) as transport:
        await transport.ask_for(timeout_seconds=5)("GET", server.url)
        outcome = await transport.send(event(server))

    assert outcome.kind == "blocked"
    assert server.connections == 1


async def test_a_name_is_vetted_at_every_connection() -> None:
    """DNS rebinding: public when it is first asked for, private the next time; each answer is vetted, and none is remembered."""
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    closing = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    async with serving(says(closing)) as server, opened(resolver=names) as transport:
        first = await transport.send(event(server))
        second = await transport.send(event(server))

    assert (first.kind, first.address) == ("delivered", "127.0.0.1")
    assert (second.kind, second.error) == ("blocked", "address_not_allowed")
    assert names.asked == ["localhost", "localhost"]


@pytest.mark.case("B103")
@pytest.mark.parametrize(
    "addresses",
    [
        ["8.8.8.8", "::1"],
        ["8.8.8.8", "10.0.0.5"],
        ["2606:4700::1111", "8.8.8.8", "fd00::1"],
        ["169.254.169.254", "8.8.8.8"],
        ["8.8.8.8", "127.0.0.1"],
        ["8.8.8.8", "64:ff9b::7f00:1"],
    ],
)
async def test_a_name_with_one_private_address_is_blocked(addresses: list[str]) -> None:
    """A second A, an AAAA, whichever comes first: a name that also leads inside is not called at its public address either."""
    names = Names(addresses)
    seen = Seen()
    async with opened(loopback=False, resolver=names) as transport:
        outcome = await transport.send(event(NAME))
        await transport.send(event(NAME), seen=seen)

    assert (outcome.kind, outcome.error, outcome.address) == ("blocked", "address_not_allowed", None)
    assert names.asked == ["hooks.example.com"] * 2
    assert (seen.addresses, seen.refused) == ([], len(addresses))


@pytest.mark.case("B103")
async def test_a_name_that_leads_to_localhost_is_blocked() -> None:
    """A CNAME shows in what comes out at its end: here what the system says of `localhost` is the answer for another name."""

    def look_up(_: str, port: int, *rest: Any) -> list[Any]:
        return socket.getaddrinfo("localhost", port, *rest)

    async with serving(says(OK)) as server, opened(loopback=False, resolver=SystemResolver(look_up)) as transport:
        outcome = await transport.send(event(f"https://hooks.example.com:{server.port}/"))

    assert (outcome.kind, outcome.error) == ("blocked", "address_not_allowed")
    assert server.connections == 0


@pytest.mark.parametrize("host", ["localhost", "LocalHost.", "a.localhost"])
@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "10.0.0.1"])
async def test_localhost_leads_nowhere_else(host: str, address: str) -> None:
    """What may be called in cleartext stays on this host, whatever a resolver says (RFC 6761, 6.3)."""
    with pytest.raises(AddressBlocked):
        await Guard(Names([address]), allow_loopback=True).resolve(host, 80)
    with pytest.raises(AddressBlocked):
        await Guard(Names(["127.0.0.1", address]), allow_loopback=True).resolve(host, 80)


async def test_only_vetted_addresses_are_passed_on() -> None:
    """One look-up, every address of it vetted, and nothing else comes out."""
    names = Names(["8.8.8.8", "2606:4700::1111"], ["10.0.0.1"])

    found = await Guard(names, allow_loopback=False).resolve("hooks.example.com", 443)

    assert [result["host"] for result in found] == ["8.8.8.8", "2606:4700::1111"]
    assert len(names.asked) == 1


async def test_an_attempt_looks_its_name_up_once() -> None:
    """DNS rebinding within an attempt: what was vetted is what is connected to, and nobody asks again in between."""
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    async with serving(says(OK)) as server, opened(resolver=names) as transport:
        url = f"http://rebinds.localhost:{server.port}/"
        outcome = await transport.send(event(url))
        kept = await transport.send(event(url))

    assert (outcome.kind, outcome.address, kept.kind) == ("delivered", "127.0.0.1", "delivered")
    assert names.asked == ["rebinds.localhost"]
    assert server.connections == 1


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0177.0.0.1", "0x7f000001", "017700000001", "0x7f.1"])
async def test_whatever_the_system_reads_as_an_address_is_vetted(host: str) -> None:
    """Should an odd notation get as far as the system, the guard sees the address that comes out of it."""

    def look_up(name: str, port: int, *_: object) -> list[Any]:
        address = socket.inet_ntoa(socket.inet_aton(name))  # getaddrinfo reads numbers by the same function
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    resolver = SystemResolver(look_up)
    with pytest.raises(AddressBlocked):
        await Guard(resolver, allow_loopback=False).resolve(host, 443)
    found = await Guard(resolver, allow_loopback=True).resolve(host, 443)
    await resolver.close()

    assert [result["host"] for result in found] == ["127.0.0.1"]


async def test_the_system_is_asked_for_names() -> None:
    """`localhost`, by the system's own resolver, with the port that was asked for."""
    resolver = SystemResolver()
    found = await Guard(resolver, allow_loopback=True).resolve("localhost", 8443)
    await resolver.close()

    assert {(result["host"], result["port"]) for result in found} <= {("127.0.0.1", 8443), ("::1", 8443)}
    assert found


@pytest.mark.parametrize("failure", [socket.gaierror(socket.EAI_NONAME, "unknown"), UnicodeError("label too long"), OSError(None, "odd")])
async def test_a_name_that_cannot_be_resolved_never_connected(failure: Exception) -> None:
    """H2: an unknown name, and one that cannot even be asked for, are failures of the look-up."""

    def look_up(*_: object) -> list[Any]:
        raise failure

    async with opened(resolver=SystemResolver(look_up)) as transport:
        outcome = await transport.send(event(NAME))
    async with opened(resolver=Names([])) as transport:
        nowhere = await transport.send(event(NAME))

    assert (outcome.kind, outcome.error) == ("connect_failed", "name_not_resolved")
    assert (nowhere.kind, nowhere.error) == ("connect_failed", "name_not_resolved")


@pytest.mark.case("S122")
async def test_a_name_whose_servers_hang_holds_one_thread() -> None:
    """However many deliveries wait for one hanging name, it is looked up once at a time, and other names go on."""
    let_go, asked_once = threading.Event(), threading.Event()
    asked: list[str] = []

    def look_up(host: str, *_: object) -> list[Any]:
        asked.append(host)
        asked_once.set()
        if host == "hangs.example.com":
            let_go.wait(10)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 443))]

    resolver = SystemResolver(look_up)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = [group.create_task(resolver.resolve("hangs.example.com", 443)) for _ in range(500)]
        impatient = group.create_task(resolver.resolve("hangs.example.com", 443))
        await asyncio.to_thread(asked_once.wait, 10)
        other = await resolver.resolve("hooks.example.com", 443)
        impatient.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await impatient
        still_waiting = [task.done() for task in waiting].count(False)
        let_go.set()
    again = await resolver.resolve("hangs.example.com", 443)
    await resolver.close()

    assert other[0]["host"] == again[0]["host"] == "8.8.8.8"
    assert still_waiting == 500
    assert asked == ["hangs.example.com", "hooks.example.com", "hangs.example.com"]
