"""What a keyed operation promises, made from its declaration: the five answers, for OpenAPI and the contract, as data and as prose.

The answers are scope, retention, fingerprint, concurrency, and recovery with its repeats. They are the only contract that callers have,
since no standard defines the header. Every number and word comes from what the code runs on, so that none can be out of date.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi.routing import RouteContext, iter_route_contexts
from starlette.routing import BaseRoute

from ipn_gateway import errors, idempotency, idempotency_keys
from ipn_gateway.errors import GatewayError
from ipn_gateway.fingerprints import KINDS
from ipn_gateway.operations import (
    KEPT_HEADERS,
    KEY_HEADER,
    KEY_LENGTH_MAX,
    KEY_PATTERN,
    NEVER_STORED,
    REPLAYED_HEADER,
    Downstream,
    Operation,
    is_stored,
)
from ipn_gateway.providers.base import Provider
from ipn_gateway.web import keyed

CONVENTION: Final = "the widely-used Idempotency-Key convention"
EXTENSION: Final = "x-idempotency"
PROSE: Final = "Idempotency: "
"""How the paragraph begins with which the rendered answers begin, behind what the operation does."""

ALPHABET: Final = "printable ASCII without space, comma, quote and backslash"
START: Final = "first submission: the moment at which the key is claimed, before anything is executed"
REGION: Final = (
    "A key counts in one database, which is one region: every process on it sees the same keys. A deployment with a database of its own "
    "is another region, where the same key is a new request. Where a replica takes over, the keys that it had not received yet "
    "are forgotten: that lag is the window in which a repeat may execute again. Permanent references (an order's id, a refund's "
    "reference), keys to providers that are the same again, and reconciliation cover it."
)

_MEANINGS: Final[Mapping[Downstream, str]] = {
    Downstream.LOCAL: "one transaction of ours and nothing else: it happens whole, with its answer, or not at all",
    Downstream.IDEMPOTENT: "what is done outside of that transaction may safely be done again",
    Downstream.NONE: "a call to somebody else, which must not happen twice, comes between transactions of ours",
}
OF_THE_KEY: Final[Sequence[type[GatewayError]]] = (
    errors.IdempotencyKeyMissing,
    errors.IdempotencyKeyInvalid,
    errors.IdempotencyKeyReused,
    errors.IdempotencyInProgress,
    errors.IdempotencyIndeterminate,
    errors.IdempotencyUnavailable,
)
"""What the key itself answers, whatever the operation is."""

_REFUSED: Final = (400, 413, 415)
_DECIDED: Final = (404, 409, 422, 500)
ON_PURPOSE: Final = "500 only where the operation answered it on purpose; a crash stores nothing"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the layer was set to."""

    lease_seconds: float
    retention_hours: float


def routes_of(routes: Sequence[BaseRoute]) -> Iterator[tuple[RouteContext, Operation]]:
    """The routes that declare an operation, in their order."""
    for route in iter_route_contexts(routes):
        if operation := keyed.operation_of(route):
            yield route, operation


def published(routes: Sequence[BaseRoute], limits: Limits) -> list[dict[str, Any]]:
    """The answers of every operation of an app."""
    return [answers(operation, limits, successes(route)) for route, operation in routes_of(routes)]


def successes(route: RouteContext) -> list[int]:
    """The 2xx that a route answers with."""
    declared = [int(status) for status in route.responses if str(status).startswith("2")]
    return sorted({route.status_code or 200, *declared})


# --- the five answers


def answers(operation: Operation, limits: Limits, succeeds_with: Sequence[int] = (200,)) -> dict[str, Any]:
    """The five answers, what the key may be, and which statuses are stored."""
    return {
        "operation": operation.name,
        "key": key(required=operation.key_required),
        "scope": {
            "unique_per": ["tenant", "operation"],
            "elsewhere": "the same key on another operation, or of another tenant, is another key",
            "region": REGION,
        },
        "retention": retention(operation.retention_hours(limits.retention_hours)),
        "fingerprint": _fingerprint(operation),
        "concurrency": _concurrency(limits),
        "recovery": _recovery(operation, limits) | {"repeat": _repeat(operation)},
        "statuses": statuses(succeeds_with),
    }


def key(*, required: bool | None = None) -> dict[str, Any]:
    """What a key may be."""
    limits = {
        "header": KEY_HEADER,
        "length_min": 1,
        "length_max": KEY_LENGTH_MAX,
        "alphabet": ALPHABET,
        "pattern": f"^{KEY_PATTERN}$",
        "quotes": "one pair of double quotes around it is taken off",
        "recommended": "a UUIDv4; keys are stored, so nothing that is personal or secret",
    }
    return limits if required is None else {"required": required} | limits


def retention(hours: float) -> dict[str, Any]:
    """How long an answer is kept, from when, and what comes then."""
    return {
        "hours": hours,
        "starts": START,
        "afterwards": "the same key is a new request, which is executed",
        "never_pruned": "what is in progress or indeterminate",
    }


def _fingerprint(operation: Operation) -> dict[str, Any]:
    return {
        "version": operation.version,
        "path": re.findall(r"{(\w+)", operation.name),
        "query": "every parameter",
        "body": {name: {"compared": kind, "meaning": KINDS[kind]} for name, kind in operation.fields.items()},
        "ignored": "headers, members that are not listed, the order of members, white space",
        "mismatch": _problem(errors.IdempotencyKeyReused),
    }


def _concurrency(limits: Limits) -> dict[str, Any]:
    return {
        "claimed": "in a transaction of its own, before anything is executed; the database decides who is first",
        "in_progress": _problem(errors.IdempotencyInProgress)
        | {"retry_after_seconds_max": idempotency.WAIT_SECONDS, "then": "send the same request with the same key again"},
        "lease_seconds": limits.lease_seconds,
        "open_keys_max": idempotency_keys.OPEN_MAX,
        "too_many_open": _problem(errors.RateLimited),
    }


def _recovery(operation: Operation, limits: Limits) -> dict[str, Any]:
    made: dict[str, Any] = {
        "class": str(operation.downstream),
        "meaning": _MEANINGS[operation.downstream],
        "phases": list(operation.phases),
        "after_a_crash": f"the same request continues behind the last committed phase when its lease of {limits.lease_seconds:g} s is over",
        "disconnect": "a client that goes away stops nothing, and its repeat gets the answer",
        "indeterminate": None,
    }
    if may_be_indeterminate(operation):
        made["indeterminate"] = _problem(errors.IdempotencyIndeterminate) | {
            "retry_after_seconds": idempotency.INDETERMINATE_WAIT_SECONDS,
            "means": "the call may or may not have happened and cannot be repeated safely",
            "then": "keep the key; a person finds out under the problem's reconciliation_id, and the key then answers",
        }
    return made


def may_be_indeterminate(operation: Operation) -> bool:
    """Whether an outcome of this operation may stay unknown."""
    return bool(operation.intents) and (operation.downstream is Downstream.NONE or operation.horizon_seconds is not None)


def _repeat(operation: Operation) -> dict[str, Any]:
    return {
        "gets": "status, body and listed headers of the first answer, and nothing is executed",
        "marked": {REPLAYED_HEADER: "true"},
        "headers": ["Content-Type", *KEPT_HEADERS, *operation.headers],
        "left_out": list(operation.secrets),
        "body_bytes_max": idempotency_keys.RESPONSE_BYTES_MAX,
        "larger_body": idempotency_keys.OMITTED.decode(),
    }


def statuses(succeeds_with: Sequence[int] = (200, 201, 202, 204)) -> dict[str, Any]:
    """Which answers a repeat gets again. A 500 is one that an operation gave on purpose; a crash is none."""
    return {
        "stored": sorted(status for status in {*succeeds_with, *_DECIDED} if is_stored(status)),
        "stored_when": ON_PURPOSE,
        "never_stored": sorted(NEVER_STORED),
        "refused_before_the_key": [*_REFUSED, errors.ValidationFailed.status],
        "never_stored_types": [f"/problems/{kind.slug}" for kind in OF_THE_KEY],
    }


def stored_successes(made: Mapping[str, Any]) -> list[int]:
    """The 2xx of an operation's answers."""
    return [status for status in made["statuses"]["stored"] if status < 300]  # noqa: PLR2004 - the end of the class


def _problem(kind: type[GatewayError]) -> dict[str, Any]:
    return {"status": kind.status, "type": f"/problems/{kind.slug}"}


def downstream(providers: Iterable[Provider]) -> dict[str, Any]:
    """What keys to providers have to fit: the shortest length and the shortest memory of all of them."""
    each = sorted(providers, key=lambda provider: provider.name)
    memories = [provider.key_retention_hours for provider in each if provider.key_retention_hours is not None]
    return {
        "key_length_max": min(provider.refund_key_length_max for provider in each),
        "key_retention_hours": min(memories, default=None),
        "providers": {
            provider.name: {"key_length_max": provider.refund_key_length_max, "key_retention_hours": provider.key_retention_hours}
            for provider in each
        },
    }


# --- the same for people


def prose(made: Mapping[str, Any]) -> str:
    """The answers in sentences, a paragraph each, as Markdown."""
    return "\n\n".join((_key_said(made), _scope_said(made), _fingerprint_said(made), _recovery_said(made), _repeats_said(made)))


def _key_said(made: Mapping[str, Any]) -> str:
    given = made["key"]
    required = "required" if given["required"] else "optional; without it a repeat is executed again"
    return (
        f"{PROSE}the header `{given['header']}` is {required}. It follows {CONVENTION}; what holds is written here. A key is "
        f"{given['length_min']} to {given['length_max']} characters of {given['alphabet']}; {given['quotes']}. Recommended is "
        f"{given['recommended']}."
    )


def _scope_said(made: Mapping[str, Any]) -> str:
    scope, kept = made["scope"], made["retention"]
    return (
        f"Scope: a key belongs to one {' and one '.join(scope['unique_per'])} (`{made['operation']}`); {scope['elsewhere']}. It counts "
        "in one database, which is one region; `/v1/contract` says what that means.\n\n"
        f"Retention: an answer is kept for {kept['hours']:g} hours from the {kept['starts']}. Afterwards {kept['afterwards']}. "
        f"Never pruned is {kept['never_pruned']}."
    )


def _fingerprint_said(made: Mapping[str, Any]) -> str:
    compared, mismatch = made["fingerprint"], made["fingerprint"]["mismatch"]
    path = "".join(f"`{name}` of the path, " for name in compared["path"])
    members = ", ".join(f"`{name}` ({given['meaning']})" for name, given in compared["body"].items()) or "none"
    return (
        f"Fingerprint: a request is the same if these are: {path}{compared['query']} of the query, and of the body {members}. Ignored are "
        f"{compared['ignored']}. Another request with the same key is answered {mismatch['status']} (`{mismatch['type']}`): a changed "
        "request needs a new key."
    )


def _recovery_said(made: Mapping[str, Any]) -> str:
    waiting, recovery = made["concurrency"]["in_progress"], made["recovery"]
    said = (
        f"Concurrency: while the first request is worked on, the same one is answered {waiting['status']} (`{waiting['type']}`) with "
        f"Retry-After: {waiting['then']}. It never waits for the first.\n\n"
        f"Recovery: {recovery['meaning']}. After a crash, {recovery['after_a_crash']}; {recovery['disconnect']}."
    )
    if unknown := recovery["indeterminate"]:
        said += f" But where {unknown['means']}, it is answered {unknown['status']} (`{unknown['type']}`): {unknown['then']}."
    return said


def _repeats_said(made: Mapping[str, Any]) -> str:
    repeat, listed = made["recovery"]["repeat"], made["statuses"]
    ((marker, value),) = repeat["marked"].items()
    left_out = "".join(f", but for `{name}`, which is shown once" for name in repeat["left_out"])
    stored, never, refused = (", ".join(map(str, listed[name])) for name in ("stored", "never_stored", "refused_before_the_key"))
    return (
        f"Repeats: a repeat gets {repeat['gets']}{left_out}; it is marked `{marker}: {value}`. Of a body of more than "
        f"{repeat['body_bytes_max'] // 1024} KiB a note is kept instead. Stored and repeated are {stored}, where the operation decided "
        f"them ({listed['stored_when']}); never {never}, and "
        f"never what the key itself answers (`/problems/idempotency-…`). What is refused before the key is "
        f"claimed ({refused}) leaves nothing behind: mended, it may use the same key."
    )
