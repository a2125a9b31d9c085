"""`/openapi.json`: the routes as they are, with our problem documents as errors, and the events that we send as `webhooks`.

What an operation promises about its keys stands beside it, as `x-idempotency` and in its description.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from ipn_gateway import __version__, errors, events, receiver
from ipn_gateway.errors import GatewayError
from ipn_gateway.operations import KEY_HEADER, REPLAYED_HEADER, Operation
from ipn_gateway.web import limits, publication
from ipn_gateway.web.contract import wire_model

PROBLEM: Final = {
    "title": "Problem",
    "description": "What went wrong, after RFC 9457. `type` is a page that says what it means.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "examples": ["/problems/validation-failed"]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "description": "one for each field: `pointer` into the body or `parameter` of the query, and `detail`",
            "items": {
                "type": "object",
                "required": ["detail"],
                "properties": {"pointer": {"type": "string"}, "parameter": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
        "incident": {"type": "string", "description": "of a fault of ours: the name to ask about it with"},
        "reconciliation_id": {"type": "string", "description": "of an outcome that is not known: the key's id, to ask about it with"},
    },
}
HEADERS: Final = {
    REPLAYED_HEADER: {
        "description": "`true` on an answer from storage, when nothing was executed; a first answer does not have it",
        "schema": {"type": "string", "enum": ["true"]},
    },
    "Retry-After": {"description": "seconds to wait before the same request is sent again", "schema": {"type": "integer", "minimum": 1}},
    **{
        name: {"description": meaning, "schema": {"type": "integer", "minimum": 0}}
        for name, meaning in zip(
            limits.HEADERS,
            ("calls in a window", "calls that are left in it", "seconds until the next call leaves it"),
            strict=True,
        )
    },
}
DESCRIPTION: Final = (
    "Every payment notification is applied exactly once; every event that follows is delivered, signed and accounted for. "
    "Money is a decimal string with an ISO 4217 code. Times are RFC 3339 in UTC. Lists are newest first, with a cursor. "
    "Errors are problem documents after RFC 9457. `/v1/contract` has schedules, limits and retention. "
    f"POST calls take a key after {publication.CONVENTION}, and each says what that means for it; elsewhere the header has no effect."
)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title,
            version=__version__,
            description=DESCRIPTION,
            routes=app.routes,
            webhooks=app.webhooks.routes,
            tags=app.openapi_tags,
        )
        for path, operations in made["paths"].items():
            for operation in operations.values():
                if isinstance(operation, dict) and "responses" in operation:
                    _describe_errors(path, operation)
        for event_type, sent in made["webhooks"].items():
            sent["post"] |= {"parameters": _SENT_HEADERS, "responses": _ANSWERS, "x-version": events.VERSIONS[event_type]}
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
        layer = app.state.idempotency
        extend(made, app.routes, publication.Limits(layer.lease_seconds, layer.retention_hours))
        app.openapi_schema = made
    return app.openapi_schema


# --- errors

_PROBLEM_CONTENT: Final = {errors.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
_OF_A_BODY: Final[list[type[GatewayError]]] = [errors.RequestTimeout, errors.PayloadTooLarge, errors.UnsupportedMediaType]
_OF_A_CALLER: Final[list[type[GatewayError]]] = [errors.Unauthorized, errors.Forbidden, errors.RateLimited, errors.Overloaded]
_WAITS: Final = frozenset({errors.RateLimited.status, errors.Overloaded.status})


def _describe_errors(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    takes_body = "requestBody" in operation
    if responses.pop("422", None) or takes_body:
        add_problem(responses, errors.ValidationFailed)
    if "400" not in responses:
        add_problem(responses, errors.MalformedNotification if "listener" in operation.get("tags", ()) else errors.UnknownParameter)
    kinds = list(_OF_A_BODY) if takes_body else []
    if "security" in operation:
        kinds += [*_OF_A_CALLER, errors.NotFound] if "{" in path else _OF_A_CALLER
        for status, response in responses.items():
            if status.startswith("2"):
                _add_headers(response, limits.HEADERS)
    for kind in kinds:
        add_problem(responses, kind)
    if errors.RateLimited in kinds:
        _add_headers(responses[str(errors.RateLimited.status)], limits.HEADERS)
    for status, response in responses.items():
        if status.startswith(("4", "5")):
            response.setdefault("content", _PROBLEM_CONTENT)
    operation["responses"] = dict(sorted(responses.items()))


def add_problem(responses: dict[str, Any], kind: type[GatewayError]) -> None:
    """One more problem that an operation may be answered with, beside those of the same status that are described already."""
    said = f"{kind.title} (`/problems/{kind.slug}`)"
    response = dict(responses.get(str(kind.status), {}))
    before = response.get("description")
    response["description"] = f"{before}; or: {said}" if before else said
    response["content"] = {**response.get("content", {}), **_PROBLEM_CONTENT}
    if kind.status in _WAITS:
        _add_headers(response, ["Retry-After"])
    responses[str(kind.status)] = response


def _add_headers(response: dict[str, Any], names: Iterable[str]) -> None:
    listed = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    response["headers"] = {**response.get("headers", {}), **listed}


# --- keys


def extend(document: dict[str, Any], routes: Sequence[BaseRoute], set_to: publication.Limits) -> None:
    """Publish the keyed operations of an app in its OpenAPI document, which FastAPI made of these `routes`."""
    for route, operation in publication.routes_of(routes):
        method, _, path = operation.name.partition(" ")
        described = document["paths"][path][method.lower()]
        _describe_key(described, operation, publication.answers(operation, set_to, publication.successes(route)))
    components = document.setdefault("components", {})
    components["headers"] = {**components.get("headers", {}), **HEADERS}
    components["schemas"] = {**components.get("schemas", {}), "Problem": PROBLEM}


def _describe_key(described: dict[str, Any], operation: Operation, answers: dict[str, Any]) -> None:
    described[publication.EXTENSION] = answers
    described["description"] = f"{described.get('description', '')}\n\n{publication.prose(answers)}".strip()
    described.setdefault("parameters", []).append(_parameter(answers["key"]))
    responses = described["responses"]
    for kind in publication.OF_THE_KEY:
        if kind is errors.IdempotencyKeyMissing and not operation.key_required:
            continue
        if kind is errors.IdempotencyIndeterminate and answers["recovery"]["indeterminate"] is None:
            continue
        add_problem(responses, kind)
    _add_headers(responses[str(errors.IdempotencyInProgress.status)], ["Retry-After"])
    for status in map(str, publication.stored_successes(answers)):
        _add_headers(responses[status], [REPLAYED_HEADER])
    described["responses"] = dict(sorted(responses.items()))


def _parameter(key: dict[str, Any]) -> dict[str, Any]:
    limits_of_it = {"type": "string", "minLength": key["length_min"], "maxLength": key["length_max"], "pattern": key["pattern"]}
    return {
        "name": KEY_HEADER,
        "in": "header",
        "required": key["required"],
        "description": f"{key['length_min']} to {key['length_max']} characters of {key['alphabet']}. Recommended is {key['recommended']}.",
        "schema": limits_of_it,
    }


# --- what is sent

_SENT_HEADERS: Final = [
    {"name": name, "in": "header", "required": True, "description": meaning, "schema": schema}
    for name, meaning, schema in (
        (receiver.HEADER_ID, "the event's id: the same in every attempt, so keep it to act once", {"type": "string"}),
        (
            receiver.HEADER_TIMESTAMP,
            f"when this attempt was made, in Unix seconds; refuse what is more than {receiver.TOLERANCE_SECONDS} seconds off",
            {"type": "string", "pattern": "^[0-9]+$"},
        ),
        (
            receiver.HEADER_SIGNATURE,
            "`v1,…` (HMAC-SHA256) and `v1a,…` (ed25519) of `{webhook-id}.{webhook-timestamp}.{body}`, with blanks between",
            {"type": "string", "examples": ["v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4="]},
        ),
    )
]
_HINT: Final = {
    "Retry-After": {
        "description": "seconds, or an HTTP date: the next attempt waits at least so long, but 24 hours at most",
        "schema": {"type": "string"},
    }
}
_ANSWERS: Final = {
    "2XX": {"description": "Taken: it is done, or safely stored. So is a duplicate"},
    "410": {"description": "The endpoint is gone: it is disabled at once, unless the attempt is a test"},
    "429": {"description": "Too many: tried again, after the wait that it names if that is longer than the schedule's", "headers": _HINT},
    "503": {"description": "Not now: tried again, after the wait that it names if that is longer than the schedule's", "headers": _HINT},
    "default": {
        "description": "Refused: tried again on the schedule that `/v1/contract` has. Redirects are not followed",
        "headers": _HINT,
    },
}


@cache
def webhooks() -> list[BaseRoute]:
    """What is sent to endpoints, declared as routes are."""
    router = APIRouter()
    for name in events.CATALOGUE:
        called = f"send_{name.replace('.', '_')}"
        router.add_api_route(
            name, _subscriber(name), methods=["POST"], name=called, operation_id=called, status_code=204, tags=["webhooks"]
        )
    return router.routes


def _subscriber(name: str) -> Any:
    async def receives(body: Any) -> None:
        """Answer 2xx when you have it; verify `webhook-signature` first. The same `webhook-id` may come again."""

    receives.__annotations__["body"] = wire_model(name)
    return receives
