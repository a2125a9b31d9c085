"""Where the gateway may go: addresses, URLs, and the odd ways to write them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ipn_gateway.addresses import check_endpoint_url, is_allowed, refusal
from ipn_gateway.errors import ValidationFailed
from tests import hostile

PUBLIC = ["8.8.8.8", "93.184.216.34", "100.63.255.255", "100.128.0.0", "172.15.0.1", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"]
PRIVATE = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "168.63.129.16", "169.254.169.254", "172.16.0.1",
    "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1",
    "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::2", "::10.0.0.1", "100::1", "64:ff9b:1::1", "2001::1",
    "2001:2::1", "2001:db8::1", "2002:808:808::1", "3fff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1",
    "fe80::1%1", "fec0::1", "ff02::1", "2606:4700::1111%eth0", "::1%lo", "::ffff:127.0.0.1", "::ffff:7f00:1", "::127.0.0.1",
    "2001:0:808:808:0:0:f5ff:fffe",
]  # fmt: skip
LOOPBACK = ["127.0.0.1", "127.255.255.254", "::1", "0:0:0:0:0:0:0:1"]
NO_ADDRESS = [
    "",
    "localhost",
    "127.1",
    "2130706433",
    "0177.0.0.1",
    "0x7f000001",
    "127.0.0.1.",
    "127.0.0.1:80",
    "[::1]",
    "1.2.3.4/32",
    "٨.8.8.8",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    """Plain public unicast is where subscribers are."""
    assert is_allowed(address)


@pytest.mark.case("B101")
@pytest.mark.parametrize("address", PRIVATE)
@pytest.mark.parametrize("allow_loopback", [False, True])
def test_special_addresses_are_refused(address: str, allow_loopback: bool) -> None:
    """Private, shared, link-local, metadata, documentation, multicast, reserved, tunnels: refused, also where loopback is allowed."""
    assert not is_allowed(address, allow_loopback=allow_loopback)


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_is_allowed_only_where_the_policy_says_so(address: str) -> None:
    """127.0.0.0/8 and ::1; the one inside the other is nobody's way to write it."""
    assert not is_allowed(address)
    assert is_allowed(address, allow_loopback=True)


@pytest.mark.parametrize("address", NO_ADDRESS)
def test_what_is_no_canonical_address_is_refused(address: str) -> None:
    """Spellings that only some parsers take are never passed on."""
    assert not is_allowed(address, allow_loopback=True)


@given(address=st.ip_addresses(v=4))
def test_ipv4_inside_ipv6_is_judged_as_what_it_leads_to(address: IPv4Address) -> None:
    """Mapped and NAT64 addresses are no way round the table, and 6to4 is refused altogether."""
    number = int(address)

    assert is_allowed(f"::ffff:{address}") == is_allowed(str(address))
    assert is_allowed(f"64:ff9b::{number >> 16:x}:{number & 0xFFFF:x}") == is_allowed(str(address))
    assert not is_allowed(f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1")


@pytest.mark.parametrize("private", [address for address in PRIVATE + LOOPBACK if "." in address and ":" not in address])
def test_nat64_leads_to_no_private_address(private: str) -> None:
    """A translator on the way must not bring us into our own network, loopback allowed or not."""
    number = int(IPv4Address(private))

    assert not is_allowed(f"64:ff9b::{number >> 16:x}:{number & 0xFFFF:x}", allow_loopback=True)


@given(address=st.ip_addresses(v=6) | st.ip_addresses(v=4))
def test_nothing_that_python_calls_local_is_allowed(address: IPv4Address | IPv6Address) -> None:
    """Our table is at least as strict as the standard library's; IPv4 inside IPv6 is judged above."""
    assume(not str(address).startswith(("::ffff:", "64:ff9b::")))
    local = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )

    assert not (local and is_allowed(str(address)))


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/ipn?x=1",
        "https://hooks.example.com:8443/",
        "https://hooks.example.com:443",
        "https://HOOKS.Example.COM./a",
        "https://xn--zca.example/",
        "https://straße.example/",
        "https://8.8.8.8/hook",
        "https://[2606:4700::1111]:65535/",
        "https://my_host-1.example.com:1024/",
    ],
)
def test_public_https_urls_are_accepted(url: str) -> None:
    """A name or a public address, 443 or an unprivileged port."""
    check_endpoint_url(url, allow_loopback=False)
    check_endpoint_url(url, allow_loopback=True)


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",
        "http://8.8.8.8/",
        "ftp://hooks.example.com/",
        "//hooks.example.com/",
        "hooks.example.com",
        "/hook",
        "",
        "https:///hook",
        "https://",
        "https://user:secret@hooks.example.com/",
        "https://user@hooks.example.com/",
        "https://hooks.example.com:22/",
        "https://hooks.example.com:80/",
        "https://hooks.example.com:0/",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com:x/",
        "https://hooks example.com/",
        "https://hooks.example.com/a b",
        "https://hooks.example.com/\r\nx",
        "https://ho\toks.example.com/",
        "https://hooks..example.com/",
        "https://-hooks.example.com/",
        "https://" + "a" * 64 + ".example.com/",
        "https://" + "a." * 130 + "com/",
        "https://hooks%2eexample.com/",
        "https://[::1",
        "https://evil.example\\@hooks.example.com/",
        "https://hooks.example.com/" + "a" * 2048,
    ],
)
@pytest.mark.parametrize("allow_loopback", [False, True])
def test_other_urls_are_refused(url: str, allow_loopback: bool) -> None:
    """Cleartext, credentials, privileged ports, malformed hosts and control characters: a 422 that names the field."""
    with pytest.raises(ValidationFailed) as caught:
        check_endpoint_url(url, allow_loopback=allow_loopback)

    assert caught.value.errors == [{"pointer": "#/url", "detail": str(caught.value)}]


@pytest.mark.case("B101")
@pytest.mark.parametrize("url", hostile.ALWAYS, ids=ascii)
@pytest.mark.parametrize("allow_loopback", [False, True])
def test_no_trick_makes_a_url_one_that_is_called(url: str, allow_loopback: bool) -> None:
    """Private addresses in every notation, names of the network inside, and what two parsers read as two hosts; whatever is set."""
    with pytest.raises(ValidationFailed):
        check_endpoint_url(url, allow_loopback=allow_loopback)


@pytest.mark.parametrize("url", hostile.LOOPBACK, ids=ascii)
def test_this_host_is_called_where_the_setting_says_so(url: str) -> None:
    """And the refusal names the setting, so that a try on one machine does not end in a riddle."""
    with pytest.raises(ValidationFailed, match="IPN_ALLOW_LOOPBACK_ENDPOINTS"):
        check_endpoint_url(url, allow_loopback=False)
    check_endpoint_url(url, allow_loopback=True)


@pytest.mark.parametrize("name", ["hooks.example.com", "internal.example.com", "local.example", "xn--bcher-kva.example", "a.internals"])
def test_a_name_is_inside_by_its_end_only(name: str) -> None:
    """Words that name a network inside are words like others elsewhere."""
    assert refusal(f"https://{name}/") is None


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1", "169.254.169.254", "[fd00::1]", "[::ffff:10.0.0.1]", "[fe80::1%25eth0]", "0.0.0.0", "2130706433",
        "017700000001", "0177.0.0.1", "0x7f000001", "0x7f.0.0.1", "0X7F.1", "127.1", "127.0.1", "127.0.0.1.", "127.0.0.1..",
        "[::]", "10.0.0.1.", "hooks.example.1", "0x", "1.2.3.4.5",
    ],
)  # fmt: skip
@pytest.mark.parametrize("allow_loopback", [False, True])
def test_hosts_in_numbers_must_be_public_canonical_addresses(host: str, allow_loopback: bool) -> None:
    """A literal private address is refused at once, and so is every other notation of an address, whatever it stands for."""
    assert refusal(f"https://{host}/", allow_loopback=allow_loopback) is not None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.8.8.8",
        "[::1]",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "a.localhost",
        "\N{FULLWIDTH DIGIT ONE}27.0.0.1",
        "127。0。0。1",
    ],
)
def test_loopback_urls_are_for_where_the_setting_allows_them(host: str) -> None:
    """With the setting http and any port are allowed on loopback; without it nothing is, over https neither."""
    for url in (f"http://{host}:81/", f"https://{host}:9000/", f"http://{host}/"):
        assert refusal(url) is not None
        assert refusal(url, allow_loopback=True) is None


def test_a_provider_may_use_any_port_but_no_cleartext() -> None:
    """Where a provider listens is not ours to choose; http stays for loopback."""
    assert refusal("https://pay.example.com:81/", allow_loopback=True, any_port=True) is None
    assert refusal("http://127.0.0.1:81/", allow_loopback=True, any_port=True) is None
    assert refusal("http://pay.example.com:81/", allow_loopback=True, any_port=True) is not None
    assert refusal("https://10.0.0.1/", allow_loopback=True, any_port=True) is not None


@given(url=st.text(max_size=80) | st.builds("{}://{}/".format, st.sampled_from(["http", "https"]), st.text(max_size=30)))
def test_no_text_breaks_the_check(url: str) -> None:
    """A URL comes from outside: whatever it is, the answer is a sentence or none."""
    sentence = refusal(url, allow_loopback=True)

    assert sentence is None or sentence.endswith(".")
