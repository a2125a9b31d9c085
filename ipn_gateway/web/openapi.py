"""`/openapi.json`: the routes as they are, with our problem documents as errors, and the events that we send as `webhooks`."""

from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from ipn_gateway import __version__, events
from ipn_gateway.web import problems
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
    },
}
DESCRIPTION: Final = (
    "Every payment notification is applied exactly once; every event that follows is delivered, signed and accounted for. "
    "Money is a decimal string with an ISO 4217 code. Times are RFC 3339 in UTC. Lists are newest first, with a cursor. "
    "Errors are problem documents after RFC 9457. `/v1/contract` has schedules, limits and retention."
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
        for sent in made["webhooks"].values():
            sent["post"]["responses"].pop("422")  # how a subscriber refuses is its own affair
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Problem"] = PROBLEM
        app.openapi_schema = made
    return app.openapi_schema


def _describe_errors(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    statuses = [400]
    if "security" in operation:
        statuses += [401, 403, 503] + ([404] if "{" in path else [])
    if "requestBody" in operation:
        statuses += [408, 413, 415]
    if "422" in responses or "requestBody" in operation:
        statuses.append(422)
    if "409" in responses:
        statuses.append(409)
    kinds = [kind for slug, kind in problems.catalogue().items() if not slug.startswith("idempotency-")]  # no call answers those yet
    known = {kind.status: kind.title for kind in kinds}
    for status in sorted(statuses):
        described = responses[str(status)] if str(status) in responses and status != 422 else {"description": known[status]}  # noqa: PLR2004
        described.setdefault("content", {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}})
        responses[str(status)] = described


def webhooks(app: FastAPI) -> None:
    """Declare what is sent to endpoints."""
    router: APIRouter = app.webhooks
    for name in events.CATALOGUE:
        router.add_api_route(
            name, _subscriber(name), methods=["POST"], name=f"send_{name.replace('.', '_')}", status_code=204, tags=["webhooks"]
        )


def _subscriber(name: str) -> Any:
    async def receives(body: Any) -> None:
        """Answer 2xx when you have it; verify `webhook-signature` first. The same `webhook-id` may come again."""

    receives.__annotations__["body"] = wire_model(name)
    return receives
