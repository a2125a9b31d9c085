"""The one place that turns what went wrong into HTTP: `application/problem+json` after RFC 9457, never with a value that was sent."""

from __future__ import annotations

import secrets
import traceback
from typing import TYPE_CHECKING, Any, Final

import psycopg
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from psycopg import errors as pg
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ipn_gateway import logs, validation
from ipn_gateway.db import lost
from ipn_gateway.errors import (
    MEDIA_TYPE,
    CommitUnknown,
    ConfigurationError,
    GatewayError,
    LeaseLost,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    Unauthorized,
    UnsupportedMediaType,
    ValidationFailed,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from fastapi import FastAPI, Request, Response
    from starlette.types import Scope

RETRY_AFTER_SECONDS: Final = 2
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_NEVER_ANSWERED: Final = (ConfigurationError, LeaseLost, CommitUnknown)
_BUSY: Final = (pg.LockNotAvailable, pg.QueryCanceled, pg.SerializationFailure, pg.DeadlockDetected)
_CANNOT_NOW: Final = ("53", "58")  # classes of SQLSTATE: no connection, memory or disk left; what its operating system refuses
_BY_STATUS: Final[Mapping[int, type[GatewayError]]] = {
    401: Unauthorized,
    404: NotFound,
    405: MethodNotAllowed,
    413: PayloadTooLarge,
    415: UnsupportedMediaType,
}


def catalogue() -> dict[str, type[GatewayError]]:
    """Every kind of problem that a client can be answered with, by slug."""
    found: dict[str, type[GatewayError]] = {GatewayError.slug: GatewayError}
    waiting = list(GatewayError.__subclasses__())
    while waiting:
        kind = waiting.pop(0)
        if "slug" in vars(kind) and not issubclass(kind, _NEVER_ANSWERED):
            found.setdefault(kind.slug, kind)
        waiting += kind.__subclasses__()
    return found


def respond(error: GatewayError, headers: Mapping[str, str] | None = None, **members: Any) -> Response:
    """The problem document of an error, with the headers that its status asks for. `members` are added to it."""
    made = {"Content-Language": "en", "Cache-Control": "no-store", **(headers or {})}
    if isinstance(error, Unauthorized):
        made["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (PayloadTooLarge, RequestTimeout)):
        made["Connection"] = "close"  # the rest of the body is not waited for
    wait = error.retry_after_seconds or (RETRY_AFTER_SECONDS if error.status == Overloaded.status else None)
    if wait is not None:
        made.setdefault("Retry-After", str(wait))
    return JSONResponse(error.document() | members, status_code=error.status, headers=made, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Let the app answer with problems, whatever is raised."""
    for kind, handler in _handlers().items():
        app.add_exception_handler(kind, handler)


async def answer(request: Request, error: Exception) -> Response:
    """The problem document for whatever was raised; for who shows it in another form."""
    handler = next(handler for kind, handler in _handlers().items() if isinstance(error, kind))
    return await handler(request, error)


def _handlers() -> Mapping[type[Exception], Callable[[Request, Any], Awaitable[Response]]]:
    return {
        GatewayError: _gateway_error,
        RequestValidationError: _request_invalid,
        HTTPException: _http_error,
        psycopg.Error: _database_error,
        Exception: anything_else,
    }


async def _gateway_error(request: Request, error: GatewayError) -> Response:
    if isinstance(error, CommitUnknown):
        return await _gateway_error(request, Overloaded(transaction=error.context.get("transaction")))
    if isinstance(error, (ConfigurationError, LeaseLost)) or error.slug == GatewayError.slug:
        return await anything_else(request, error)
    if error.context or error.status >= Overloaded.status:
        logs.get("web").warning("request.refused", route=route_of(request.scope), problem=error.slug, **error.context)
    return respond(error)


async def _request_invalid(_: Request, error: RequestValidationError) -> Response:
    """A query parameter or header that does not fit; bodies are read by ourselves."""
    wrong = [(str(part["loc"][-1]), validation.sentence(part)) for part in error.errors()]
    errors = [{"parameter": name, "detail": detail} for name, detail in wrong]
    return respond(ValidationFailed(validation.summary(wrong), errors=errors))


async def _http_error(request: Request, error: HTTPException) -> Response:
    """What the router raises."""
    kind = _BY_STATUS.get(error.status_code)
    if kind is None:
        return await anything_else(request, error)
    headers = {"Allow": ", ".join(_allowed(request))} if kind is MethodNotAllowed else None
    return respond(kind(), headers)


def _allowed(request: Request) -> list[str]:
    """The methods that this address takes; the router's own list has those of one route only."""
    scopes = [(method, {**request.scope, "method": method}) for method in METHODS]
    return [method for method, scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)]


async def _database_error(request: Request, error: psycopg.Error) -> Response:
    if isinstance(error, _BUSY) or lost(error) or (error.sqlstate or "").startswith(_CANNOT_NOW):
        return await _gateway_error(request, Overloaded(sqlstate=error.sqlstate, error_class=type(error).__name__))
    return await anything_else(request, error)


async def anything_else(request: Request, error: Exception) -> Response:
    """A fault of ours: the client gets an incident to ask about, the log what it was."""
    incident = f"inc_{secrets.token_hex(8)}"
    logs.count("requests.failed")
    logs.get("web").error("request.failed", incident=incident, route=route_of(request.scope), **_described(error))
    sentence = f"Something went wrong here; it is recorded as incident {incident}."
    return respond(GatewayError(sentence), incident=incident)


def _described(error: Exception) -> dict[str, Any]:
    """The fault for the log. Where it comes from is said by file and line; drivers' and validators' messages quote values."""
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    described: dict[str, Any] = {"error_class": type(error).__qualname__, "frames": frames[-12:]}
    if isinstance(error, psycopg.Error):
        return described | {"sqlstate": error.sqlstate, "constraint": error.diag.constraint_name}
    if isinstance(error, ValidationError):
        return described | {
            "locations": [".".join(map(str, part["loc"])) for part in error.errors(include_input=False, include_context=False)]
        }
    return described | {"message": str(error)[:500]}


def route_of(scope: Scope) -> str:
    """The template of the route for logs, such as `/v1/orders/{order_id}`; never the address itself."""
    return str(getattr(scope.get("route"), "path", "(none)"))
