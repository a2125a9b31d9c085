"""What each step of one attempt says: which of them failed, in words for the owner of an endpoint. Pure.

An address that may not be called is never named: the owner of a URL must not learn from us what a name means inside our network.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from ipn_gateway.addresses import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ipn_gateway.guard import Seen
    from ipn_gateway.transport import Outcome

Step = Literal["url", "dns", "connect", "tls", "response"]
Result = Literal["passed", "failed", "skipped", "not_reached"]

STEPS: Final[tuple[Step, ...]] = ("url", "dns", "connect", "tls", "response")

_ERRORS: Final = {
    "name_not_resolved": "the name has no address",
    "not_connected": "nothing takes connections there",
    "certificate_refused": "the certificate is not trusted",
    "handshake_failed": "the handshake failed: is TLS spoken there?",
    "connection_lost": "the connection broke before there was an answer",
    "answer_cut": "the connection broke before there was an answer",
    "not_http": "what was answered is no HTTP",
}


_LATE: Final[Mapping[Step, str]] = {
    "dns": "the name was not looked up in time",
    "connect": "no connection in time, TLS included",
    "response": "no answer in time",
}
_NEEDLESS: Final[Mapping[Step, str]] = {"dns": "the URL has an address, no name", "tls": "the URL is http"}


@dataclass(frozen=True, slots=True)
class Check:
    """What one step says. A step that is skipped does not belong to this URL; one that is not reached comes after the one that failed."""

    check: Step
    status: Result
    detail: str
    duration_ms: int | None = None


def checks(url: str, outcome: Outcome, seen: Seen) -> list[Check]:
    """Every step of an attempt on a connection of its own, in order; the first that failed ends it."""
    failed = _failed(url, outcome, seen)
    reached = STEPS.index(failed) if failed else len(STEPS)
    times = dict(_times(url, seen))
    made = []
    for place, step in enumerate(STEPS):
        if step == failed:
            made.append(Check(step, "failed", _why(url, step, outcome, seen), times.get(step)))
        elif _is_needless(step, url):
            made.append(Check(step, "skipped", _NEEDLESS[step]))
        elif place > reached:
            made.append(Check(step, "not_reached", ""))
        else:
            made.append(Check(step, "passed", _passed(step, outcome, seen), times.get(step)))
    return made


def _failed(url: str, outcome: Outcome, seen: Seen) -> Step | None:
    """The step that an outcome means. A connection that was made has its TLS; which of both took too long is not told apart."""
    if outcome.kind == "delivered":
        return None
    if outcome.error == "url_not_allowed":
        return "url"
    if outcome.kind == "tls_failed":
        return "tls"
    if seen.connected_at is not None:
        return "response"
    return "connect" if seen.addresses or _is_needless("dns", url) else "dns"


def _is_needless(step: Step, url: str) -> bool:
    parts = urlsplit(url)
    if step == "tls":
        return parts.scheme != "https"
    try:
        return step == "dns" and bool(ip_address(parts.hostname or ""))
    except ValueError:
        return False


def _why(url: str, step: Step, outcome: Outcome, seen: Seen) -> str:
    code, _, word = (outcome.error or "").partition(": ")
    if step == "url":
        local = "; it is on this machine, which takes IPN_ALLOW_LOOPBACK_ENDPOINTS=true in the process that sends"
        return f"this URL may not be called{'' if refusal(url, allow_loopback=True) else local}"
    if step == "response" and outcome.status_code is not None:
        moved = "; redirects are not followed" if outcome.status_code // 100 == 3 else ""  # noqa: PLR2004 - the class of redirects
        return f"answered {_status(outcome.status_code)}{moved}; only 2xx is success"
    if step == "dns" and seen.refused:
        return f"of the {seen.refused} address(es) behind the name at least one may not be called"
    said = _LATE[step] if code in {"connect_timeout", "total_timeout"} else _ERRORS.get(code, code)
    return f"{said} ({word})" if word else said


def _passed(step: Step, outcome: Outcome, seen: Seen) -> str:
    if step == "dns":
        return ", ".join(seen.addresses)
    if step == "connect":
        return f"connected to {outcome.address}" if outcome.address else "connected"
    if step == "tls":
        until = f", certificate valid until {seen.certificate_ends}" if seen.certificate_ends else ""
        return f"{seen.tls_version or 'TLS'}{until}"
    if step == "response" and outcome.status_code is not None:
        return f"answered {_status(outcome.status_code)}"
    return ""


def _status(code: int) -> str:
    try:
        return f"{code} {HTTPStatus(code).phrase}"
    except ValueError:
        return str(code)


def _times(url: str, seen: Seen) -> Iterator[tuple[Step, int]]:
    """How long each step took, in milliseconds. TLS is part of connecting, for which one limit holds."""
    begun = seen.began_at
    marks: tuple[tuple[Step, float | None], ...] = (("dns", seen.resolved_at), ("connect", seen.connected_at), ("response", seen.ended_at))
    for step, ended in marks:
        if _is_needless(step, url):
            continue
        yield step, round(((seen.ended_at if ended is None else ended) - begun) * 1000)
        if ended is None:
            return
        begun = ended
