"""The rates within which refused deliveries are kept: they weigh bytes, and no number of addresses adds up to a full disk."""

from __future__ import annotations

import pytest

from ipn_gateway import notifications
from ipn_gateway.clock import Clock
from ipn_gateway.notifications import REFUSED_UNIT_BYTES, Floods

pytestmark = pytest.mark.case("S111")

LARGE = 65_000  # sixteen tokens


class Steady(Clock):
    """A clock whose durations pass when the test says so."""

    seconds = 0.0

    def monotonic_seconds(self) -> float:  # type: ignore[override]
        return self.seconds


def kept(floods: Floods, address: str, *, times: int, size_bytes: int = 1, source: str = "shop") -> int:
    return sum(floods.within(source, address, size_bytes) for _ in range(times))


def test_large_ones_cost_more() -> None:
    """One token for each four kibibytes that are begun: of the largest bodies eighteen are kept at once, then one in four seconds."""
    clock = Steady()
    floods = Floods(clock)

    assert kept(floods, "192.0.2.1", times=350, size_bytes=LARGE) == 300 // 16
    clock.seconds = 4.0
    assert kept(floods, "192.0.2.1", times=350, size_bytes=LARGE) == 2
    assert kept(Floods(clock), "192.0.2.1", times=400, size_bytes=REFUSED_UNIT_BYTES) == 300
    assert kept(Floods(clock), "192.0.2.1", times=400, size_bytes=REFUSED_UNIT_BYTES + 1) == 150


def test_many_addresses_share_the_rate_of_the_source() -> None:
    """Twenty addresses or a thousand, what is kept of one source is bounded; another source has its own rate."""
    clock = Steady()
    floods = Floods(clock)
    addresses = [f"10.0.{number // 256}.{number % 256}" for number in range(1000)]

    assert sum(kept(floods, address, times=20) for address in addresses) == notifications.REFUSED_BURST_PER_SOURCE
    assert kept(floods, "192.0.2.1", times=1, source="other") == 1
    clock.seconds = 2.0
    assert sum(kept(floods, address, times=20) for address in addresses) == 2 * notifications.REFUSED_PER_SECOND_PER_SOURCE


def test_what_the_source_refuses_costs_the_address_nothing() -> None:
    """An address that was quiet has its whole burst once the source's rate allows it."""
    clock = Steady()
    floods = Floods(clock)
    for number in range(10):
        kept(floods, f"10.0.0.{number}", times=300)
    assert kept(floods, "192.0.2.1", times=300) == 0

    clock.seconds = 12.0

    assert kept(floods, "192.0.2.1", times=400) == 300


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("a proxy", "a proxy", True),
    ],
)
def test_an_ipv6_sender_is_his_whole_network(one: str, other: str, *, same: bool) -> None:
    """Addresses of one /64 share a rate; IPv4 in IPv6 is IPv4."""
    floods = Floods(Steady())
    kept(floods, one, times=300)

    assert kept(floods, other, times=1) == (not same)


def test_samples_have_a_rate_too() -> None:
    """One in a hundred beyond the rate, but no more bytes than that rate: a long flood of large ones cannot fill the disk either."""
    clock = Steady()
    floods = Floods(clock)

    assert sum(floods.sampled("shop") for _ in range(1000)) == 10
    assert sum(floods.sampled("shop", LARGE) for _ in range(100_000)) == 5
    clock.seconds = 16.0
    assert sum(floods.sampled("shop", LARGE) for _ in range(100_000)) == 1


def test_memory_is_bounded() -> None:
    """The address not seen for longest is forgotten."""
    floods = Floods(Steady())
    for number in range(notifications.ADDRESSES_MAX + 10):
        floods.within(f"source-{number}", "192.0.2.1")

    assert len(floods._by_address._tokens) == len(floods._by_source._tokens) == notifications.ADDRESSES_MAX
