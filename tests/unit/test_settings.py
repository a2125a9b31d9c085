"""Addresses that settings take, and what is refused."""

from __future__ import annotations

import pytest

from ipn_gateway import settings
from ipn_gateway.errors import ConfigurationError


@pytest.mark.parametrize(
    "url", ["https://pay.example", "http://127.0.0.1:8000/", "https://shop.example/payments", "https://a.example:444/b/c/"]
)
def test_the_outer_address_may_have_a_path(url: str):
    """A gateway that is mounted below one says where it is reached."""
    assert settings.load(public_url=url).public_url == url


@pytest.mark.parametrize(
    "url",
    [
        "pay.example",
        "ftp://pay.example",
        "https://user:password@pay.example",
        "https://pay.example/payments?x=1",
        "https://pay.example/#top",
        "https://pay.example//payments",
        "https://pay.example/a b",
        "*",
    ],
)
def test_what_is_no_outer_address_stops_the_start(url: str):
    """Query, fragment, credentials and what is no address: listener URLs cannot be made from them."""
    with pytest.raises(ConfigurationError, match=r"IPN_PUBLIC_URL: .* is no scheme://host\[:port\]\[/path\]"):
        settings.load(public_url=url)


def test_an_origin_has_no_path():
    """A browser sends none, so one with a path would never match."""
    with pytest.raises(ConfigurationError, match=r"IPN_CORS_ORIGINS: .* is no scheme://host\[:port\]"):
        settings.load(cors_origins=("https://shop.example/payments",))
