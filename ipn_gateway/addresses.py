"""Which addresses and URLs the gateway may call. Pure: names are resolved elsewhere, and each address that comes out is vetted here.

The tables follow the IANA special-purpose address registries (RFC 6890 and later), taken as a whole: what is not plain public
unicast is refused. They are written out, because what the standard library calls private changes between Python releases.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final
from urllib.parse import urlsplit

from yarl import URL

from ipn_gateway.errors import GatewayError, ValidationFailed

URL_LENGTH_MAX: Final = 2048
HTTPS_PORT: Final = 443
UNPRIVILEGED_PORT_MIN: Final = 1024
"""Endpoints use 443 or a port from here on: mail, shells and other well-known services are no receivers of events."""

_REFUSED_V4: Final = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network; 0.0.0.0 connects to the host itself
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; a metadata service is at 100.100.100.200
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a metadata service at an address that looks public
        "169.254.0.0/16",  # link-local; most metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; a metadata service is at 192.0.0.192
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_PUBLIC_V6: Final = IPv6Network("2000::/3")
_REFUSED_V6: Final = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: leads to an IPv4 address through somebody's relay
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
_NAT64: Final = IPv6Network("64:ff9b::/96")
_LOOPBACK_V4: Final = IPv4Network("127.0.0.0/8")
_LOOPBACK_V6: Final = IPv6Address("::1")

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,254}}$){_LABEL}(?:\.{_LABEL})*\.?")
_ENDS_IN_A_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.*")
"""A host whose last label is a number is an IPv4 address in some notation, never a name."""

_PORT = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::[0-9]*)?")
"""A host and its port in ASCII digits: a sign, or the digits of another script, are read by some parsers only."""

_INSIDE: Final = (
    "home.arpa",  # RFC 8375
    "internal",  # reserved for private use by ICANN, 2024
    "local",  # RFC 6762; also a cluster's own names
    "localdomain",  # what the hosts files of many systems call themselves
)
"""Domains that by rule are in no public DNS, so that such a name can only mean something in the network where we stand."""


def origin(url: str) -> str:
    """What others may be told of a URL of an endpoint: scheme, host and port. The path and the query may hold a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class AddressBlocked(GatewayError):
    """The name leads to no address that the gateway may call."""


def is_allowed(address: str, *, allow_loopback: bool = False) -> bool:
    """Whether the gateway may connect to this numeric address; `allow_loopback` adds 127.0.0.0/8 and ::1, nothing else.

    IPv4 inside IPv6 (mapped, NAT64) is judged as the IPv4 address that it leads to, which is loopback for nobody: `::ffff:127.0.0.1` is
    refused always, since whoever means this host writes it plainly. Whatever is no canonical address is refused.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if _is_loopback(parsed):
        return allow_loopback
    if isinstance(parsed, IPv4Address):
        return _is_public_v4(parsed)
    if parsed.ipv4_mapped is not None:
        return _is_public_v4(parsed.ipv4_mapped)
    if parsed in _NAT64:
        return _is_public_v4(IPv4Address(int(parsed) & 0xFFFF_FFFF))
    return parsed.scope_id is None and parsed in _PUBLIC_V6 and not any(parsed in network for network in _REFUSED_V6)


def _is_loopback(address: IPv4Address | IPv6Address) -> bool:
    return address in _LOOPBACK_V4 if isinstance(address, IPv4Address) else address == _LOOPBACK_V6


def _is_public_v4(address: IPv4Address) -> bool:
    return not any(address in network for network in _REFUSED_V4)


def refusal(url: str, *, allow_loopback: bool = False, any_port: bool = False) -> str | None:
    """Why the gateway does not call this URL, as a sentence; None when it may, if the addresses behind its name are allowed too.

    https only; with `allow_loopback` http too, for loopback addresses, `localhost` and `*.localhost` alone. Those take any port,
    others 443 and 1024 to 65535, or any with `any_port`. A host in numbers must be a canonical, allowed address: `127.1`,
    `0x7f000001` and `2130706433` are neither names nor addresses. Names of the network inside, or without a dot, are none of ours.
    """
    if " " in url or not url.isprintable():
        return "The URL contains a space or a character that is not seen."
    if "\\" in url or "#" in url:
        return "The URL must not contain a backslash or a fragment."
    try:
        authority, parsed = urlsplit(url).netloc, URL(url)
        host, port = (parsed.raw_host or "").lower(), parsed.port
    except ValueError:
        return "The URL cannot be read."
    if "@" in authority or parsed.user is not None or parsed.password is not None:
        return "The URL must not contain a user name or password."
    if not _PORT.fullmatch(authority):
        return "The URL's port cannot be used."
    return _refused_host(host, allow_loopback=allow_loopback) or _refused_way(
        parsed.scheme, port, is_local=allow_loopback and _is_local(host), any_port=any_port
    )


def check_endpoint_url(url: str, *, allow_loopback: bool) -> None:
    """Raise ValidationFailed, with a sentence, for a subscriber's URL that can never be called. Names are vetted at each send."""
    too_long = f"The URL is longer than {URL_LENGTH_MAX} characters." if len(url) > URL_LENGTH_MAX else None
    if sentence := too_long or refusal(url, allow_loopback=allow_loopback):
        if not allow_loopback and refusal(url, allow_loopback=True) is None:
            sentence += " For tries on one machine, IPN_ALLOW_LOOPBACK_ENDPOINTS=true allows it."
        raise ValidationFailed(sentence, errors=[{"pointer": "#/url", "detail": sentence}])


def _refused_host(host: str, *, allow_loopback: bool) -> str | None:
    if ":" in host or _ENDS_IN_A_NUMBER.fullmatch(host):
        return (
            None if is_allowed(host, allow_loopback=allow_loopback) else "The URL's address is not a public one, or not in its usual form."
        )
    if not _NAME.fullmatch(host):
        return "The URL has no valid host name."
    if _is_local(host):
        return None if allow_loopback else "The URL leads to this host itself."
    name = host.rstrip(".")
    if "." not in name or name.endswith(tuple(f".{domain}" for domain in _INSIDE)):
        return "The URL's host name is not a public one."
    return None


def is_loopback(address: str) -> bool:
    """Whether this is a numeric address of this host itself: 127.0.0.0/8 or ::1."""
    try:
        return _is_loopback(ip_address(address))
    except ValueError:
        return False


def is_localhost(name: str) -> bool:
    """Whether the name is `localhost` or under it, which mean this host whatever a resolver says (RFC 6761, 6.3)."""
    return f".{name.rstrip('.').lower()}".endswith(".localhost")


def _is_local(host: str) -> bool:
    """Whether the host is loopback by what it is called."""
    return is_loopback(host) or is_localhost(host)


def _refused_way(scheme: str, port: int | None, *, is_local: bool, any_port: bool) -> str | None:
    if scheme != "https" and not (scheme == "http" and is_local):
        return "The URL must begin with https://."
    if not port:
        return "The URL's port cannot be used."
    if is_local or any_port or port == HTTPS_PORT or port >= UNPRIVILEGED_PORT_MIN:
        return None
    return f"The URL's port must be {HTTPS_PORT}, or {UNPRIVILEGED_PORT_MIN} or higher."
