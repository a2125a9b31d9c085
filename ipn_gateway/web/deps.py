"""What routes are given: the runtime, the caller with its scope, the page that is wanted, and a body that was read within limits."""

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated, Any, Final

from fastapi import Depends, Query, Request, Security
from fastapi.security import HTTPBearer
from pydantic import BeforeValidator
from starlette import types as asgi

from ipn_gateway import paging
from ipn_gateway.errors import (
    ConfigurationError,
    Forbidden,
    PayloadTooLarge,
    RateLimited,
    RequestTimeout,
    Unauthorized,
    UnknownParameter,
    ValidationFailed,
)
from ipn_gateway.runtime import Runtime
from ipn_gateway.tenants import Principal, Scope

BODY_BYTES_MAX: Final = 64 * 1024
BODY_SECONDS_MAX: Final = 10.0
FILTER_LENGTH_MAX: Final = 255

_BEARER: Final = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)", re.IGNORECASE | re.ASCII)


def runtime(request: Request) -> Runtime:
    """The collaborators that the app was created with."""
    found: Runtime = request.app.state.runtime
    return found


async def _runtime(request: Request) -> Runtime:
    return runtime(request)


RuntimeDep = Annotated[Runtime, Depends(_runtime)]


# --- who calls, and how often


async def caller(
    request: Request,
    rt: RuntimeDep,
    _: Annotated[Any, Security(HTTPBearer(auto_error=False, scheme_name="ApiKey", description="an API key, `ipn_…`"))],
) -> Principal:
    """Who calls. Raises `Unauthorized`, and `RateLimited` for a tenant that calls too often; both before anything else is looked at."""
    values = request.headers.getlist("authorization")
    match = _BEARER.fullmatch(values[0]) if len(values) == 1 else None
    principal = await rt.keys.authenticate(match[1]) if match else None
    if principal is None:
        raise Unauthorized
    request.state.principal = principal
    request.state.standing = standing = await request.app.state.limiter.take(principal.tenant_id)
    if not standing.let_through:
        raise RateLimited(retry_after_seconds=standing.reset_seconds)
    return principal


async def tenant_id(principal: Annotated[Principal, Depends(caller)]) -> str:
    """The tenant that calls."""
    return principal.tenant_id


def needs(scope: Scope, *, or_owner: Scope | None = None) -> Callable[..., Awaitable[Principal]]:
    """A dependency: the caller, if its key has the scope, or the one that owns what is read. Then, not before, the query is looked at."""

    async def caller_with_scope(request: Request, principal: Annotated[Principal, Depends(caller)]) -> Principal:
        if principal.scopes.isdisjoint({scope, or_owner}):
            raise Forbidden(f"This call needs the scope {scope}, which the API key lacks.")
        refuse_unknown_parameters(request)
        return principal

    return caller_with_scope


Reader = Annotated[Principal, Depends(needs("read"))]
OrderReader = Annotated[Principal, Depends(needs("read", or_owner="money"))]
AdminReader = Annotated[Principal, Depends(needs("read", or_owner="admin"))]
Writer = Annotated[Principal, Depends(needs("write"))]
Cashier = Annotated[Principal, Depends(needs("money"))]
Admin = Annotated[Principal, Depends(needs("admin"))]


async def open_to_all(request: Request) -> None:
    """A dependency of the routes without a key: their queries are looked at all the same."""
    refuse_unknown_parameters(request)


# --- what is in the query


def refuse_unknown_parameters(request: Request) -> None:
    """Raises `UnknownParameter` for a name that the route does not have, or has once and got twice; `ValidationFailed` for a NUL."""
    if not request.query_params:
        return
    known = _parameters(request.scope["route"].dependant)
    given = [name for name, _ in request.query_params.multi_items()]
    if set(given) - known or len(set(given)) < len(given):
        listed = ", ".join(sorted(known)) or "none"
        raise UnknownParameter(f"This call takes these query parameters, each once: {listed}.")
    for name, value in request.query_params.multi_items():
        if "\0" in value:
            raise ValidationFailed(f"{name}: must not contain NUL", errors=[{"parameter": name, "detail": "must not contain NUL"}])


def _parameters(dependant: Any) -> set[str]:
    """The query parameters of a route and of all that it depends on."""
    return {field.alias for field in dependant.query_params}.union(*(_parameters(part) for part in dependant.dependencies))


def rfc3339(text: Any) -> datetime:
    """An RFC 3339 time with its offset, in UTC. Raises ValueError with a sentence for anything else."""
    if not isinstance(text, str) or not _TIME.fullmatch(text):
        raise ValueError("must be an RFC 3339 time with its offset, such as 2026-07-01T12:00:00Z (in a query, + is written %2B)")
    try:
        return datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("must be a time that exists") from None


Moment = Annotated[datetime, BeforeValidator(rfc3339)]
Since = Annotated[Moment | None, Query(description="RFC 3339; from then on")]
Until = Annotated[Moment | None, Query(description="RFC 3339; before then")]
Text = Annotated[str | None, Query(max_length=FILTER_LENGTH_MAX)]


async def _wanted(
    cursor: Annotated[str | None, Query(max_length=paging.CURSOR_LENGTH_MAX, description="`next_cursor` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=paging.LIMIT_MAX)] = paging.LIMIT_DEFAULT,
) -> paging.Wanted:
    return paging.Wanted(cursor, limit)


WantedDep = Annotated[paging.Wanted, Depends(_wanted)]


# --- what is in the body, and where it comes from


async def read_body(request: Request) -> bytes:
    """The whole body, at most 64 KiB. Raises `PayloadTooLarge` as soon as it is over that, and `RequestTimeout`.

    It has arrived by now: the outermost layer waits for it, at most 10 s.
    """
    if is_too_large(request.scope):
        raise PayloadTooLarge
    body, more = bytearray(), True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestTimeout
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            raise PayloadTooLarge
        more = message.get("more_body", False)
    return bytes(body)


def is_too_large(scope: asgi.Scope) -> bool:
    """Whether a request announces a body that is not taken."""
    announced = dict(scope["headers"]).get(b"content-length", b"")
    return announced.isdigit() and int(announced[:20]) > BODY_BYTES_MAX


def client_address(request: Request) -> str | None:
    """The address of who sent the request: the peer's, or where that is a trusted proxy, the last one in front of our own proxies."""
    peer = request.client.host if request.client else None
    trusted = networks(runtime(request).settings.trusted_proxies)
    if not trusted:
        return peer
    forwarded = [part.strip() for value in request.headers.getlist("x-forwarded-for") for part in value.split(",")]
    while forwarded and peer is not None and _is_in(peer, trusted):
        before = forwarded.pop()
        if _address(before) is None:
            break  # not an address, so what stands before it proves nothing either
        peer = before
    return peer


@cache
def networks(trusted: tuple[str, ...]) -> tuple[IPv4Network | IPv6Network, ...]:
    """The networks of IPN_TRUSTED_PROXIES. Raises `ConfigurationError` for what is neither an address nor a network."""
    try:
        return tuple(ip_network(network, strict=False) for network in trusted)
    except ValueError:
        raise ConfigurationError("IPN_TRUSTED_PROXIES must be addresses or networks, such as 10.0.0.0/8, separated by commas.") from None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """The address, IPv4 inside IPv6 as what it is; None for anything else."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _is_in(text: str, trusted: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    address = _address(text)
    return address is not None and any(address in network for network in trusted)
