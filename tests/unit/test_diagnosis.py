"""What an attempt says step by step: the first that failed is named, what comes after it was not reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import diagnosis
from ipn_gateway.guard import Seen
from ipn_gateway.transport import Kind, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

URL = "https://subscriber.example/hook"
RESOLVED: Mapping[str, Any] = {"addresses": ["203.0.113.7"], "resolved_at": 10.1}
CONNECTED: Mapping[str, Any] = {
    **RESOLVED,
    "connected_at": 10.3,
    "tls_version": "TLSv1.3",
    "certificate_ends": "Mar  1 12:00:00 2027 GMT",
}


def seen(**given: Any) -> Seen:
    return Seen(began_at=10.0, ended_at=10.5, **given)


def outcome(kind: Kind, error: str | None = None, status: int | None = None) -> Outcome:
    return Outcome(kind, status, error, address="203.0.113.7" if status else None)


def results(url: str, made: Outcome, noted: Seen) -> list[str]:
    return [f"{check.check} {check.status}" for check in diagnosis.checks(url, made, noted)]


@pytest.mark.parametrize(
    ("made", "noted", "failed"),
    [
        (outcome("blocked", "url_not_allowed"), seen(), "url"),
        (outcome("connect_failed", "name_not_resolved"), seen(), "dns"),
        (outcome("blocked", "address_not_allowed"), seen(refused=2, resolved_at=10.1), "dns"),
        (outcome("connect_failed", "connect_timeout"), seen(), "dns"),
        (outcome("connect_failed", "not_connected: ECONNREFUSED"), seen(**RESOLVED), "connect"),
        (outcome("connect_failed", "connect_timeout"), seen(**RESOLVED), "connect"),
        (outcome("timeout", "total_timeout"), seen(**RESOLVED), "connect"),
        (outcome("tls_failed", "certificate_refused: certificate has expired"), seen(**RESOLVED), "tls"),
        (outcome("timeout", "total_timeout"), seen(**CONNECTED), "response"),
        (outcome("disconnected", "connection_lost"), seen(**CONNECTED), "response"),
        (outcome("refused", status=500), seen(**CONNECTED), "response"),
        (outcome("delivered", status=204), seen(**CONNECTED), None),
    ],
)
def test_the_step_that_failed_is_named(made: Outcome, noted: Seen, failed: str | None) -> None:
    """What comes before it passed, and what comes after it was not reached."""
    place = diagnosis.STEPS.index(failed) if failed else len(diagnosis.STEPS)

    expected = ["passed"] * place + ["failed"] * bool(failed) + ["not_reached"] * (len(diagnosis.STEPS) - place - 1)
    assert results(URL, made, noted) == [f"{step} {result}" for step, result in zip(diagnosis.STEPS, expected, strict=True)]


def test_what_does_not_belong_to_a_url_is_skipped() -> None:
    """Nothing is looked up for an address, and http has no TLS."""
    made = outcome("connect_failed", "not_connected: ECONNREFUSED")

    assert results("http://127.0.0.1:80/", made, seen()) == [
        *("url passed", "dns skipped", "connect failed", "tls skipped", "response not_reached")
    ]
    assert results("https://[2606:4700::1111]/", outcome("delivered", status=200), seen(connected_at=10.3))[1] == "dns skipped"


def test_the_details_say_what_there_is_to_do() -> None:
    """Addresses, the version of TLS and the end of the certificate, the status; a redirect is called what it is."""
    passed = {check.check: check for check in diagnosis.checks(URL, outcome("delivered", status=200), seen(**CONNECTED))}
    moved = diagnosis.checks(URL, outcome("refused", status=302), seen(**CONNECTED))[-1]
    untrusted = diagnosis.checks(URL, outcome("tls_failed", "certificate_refused: certificate has expired"), seen(**RESOLVED))[3]

    assert (passed["dns"].detail, passed["dns"].duration_ms) == ("203.0.113.7", 100)
    assert (passed["connect"].detail, passed["connect"].duration_ms) == ("connected to 203.0.113.7", 200)
    assert passed["tls"].detail == "TLSv1.3, certificate valid until Mar  1 12:00:00 2027 GMT"
    assert (passed["response"].detail, passed["response"].duration_ms) == ("answered 200 OK", 200)
    assert moved.detail == "answered 302 Found; redirects are not followed; only 2xx is success"
    assert untrusted.detail == "the certificate is not trusted (certificate has expired)"


@pytest.mark.parametrize(
    ("url", "named"),
    [("http://127.0.0.1:3000/hook", True), ("http://localhost:3000/", True), ("https://10.0.0.7/", False), ("http://shop.example/", False)],
)
def test_a_url_on_this_machine_names_the_setting(url: str, named: bool) -> None:
    """Where a setting would allow it, it is named; elsewhere nothing would."""
    (why, *_) = diagnosis.checks(url, outcome("blocked", "url_not_allowed"), seen())

    assert (why.check, why.status, "IPN_ALLOW_LOOPBACK_ENDPOINTS=true" in why.detail) == ("url", "failed", named)


@pytest.mark.case("B101")
def test_an_address_that_may_not_be_called_is_not_named() -> None:
    """How many a name has is said; what it means in our network is nobody's to learn."""
    blocked = diagnosis.checks(URL, outcome("blocked", "address_not_allowed"), seen(refused=1, resolved_at=10.1))[1]

    assert blocked.detail == "of the 1 address(es) behind the name at least one may not be called"
