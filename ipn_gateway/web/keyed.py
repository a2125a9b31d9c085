"""Keyed calls over HTTP: which operation a route is, the key in its header, and the answer with the mark of a repeat.

Authentication, the rate limit and the checks of the request come before; a request that they refuse never reaches the layer.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Annotated, Any, Final

from fastapi import Depends, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from starlette.routing import BaseRoute

from ipn_gateway.db import Transaction
from ipn_gateway.errors import MEDIA_TYPE, ConfigurationError
from ipn_gateway.idempotency import Answer, Idempotency, KeyedRequest
from ipn_gateway.operations import KEY_HEADER, REPLAYED_HEADER, STARTED, Operation, Phase, Step, Work, parse_key
from ipn_gateway.web import deps

PREFIX: Final = "/v1/"


class KeyedCall:
    """One request to an operation, by a tenant. The layer is `app.state.idempotency`.

    Raises `IdempotencyKeyMissing` and `IdempotencyKeyInvalid` when it is made, which is before the body is looked at.
    """

    def __init__(self, request: Request, operation: Operation, tenant_id: str) -> None:
        self.operation = operation
        self._request = request
        self._tenant_id = tenant_id
        self._key = parse_key(request.headers.getlist(KEY_HEADER), required=operation.key_required)

    async def once(self, transaction: str, write: Callable[[Transaction], Awaitable[Step]]) -> Response:
        """Execute an operation that is one transaction of ours. `write` is run again after a lost connection."""

        async def phase(tx: Transaction, _: Work, __: Any) -> Step:
            return await write(tx)

        return await self.drive({STARTED: Phase(transaction, phase)})

    async def around(
        self, transaction: str, act: Callable[[], Awaitable[Any]], shown: Callable[[Transaction, Any], Awaitable[Step]]
    ) -> Response:
        """Execute an act that has transactions of its own and is safe to repeat; `shown` gives the answer from what it gave."""

        async def call(_: Work) -> Any:
            return await act()

        async def phase(tx: Transaction, _: Work, done: Any) -> Step:
            return await shown(tx, done)

        return await self.drive({STARTED: Phase(transaction, phase, call)})

    async def drive(self, phases: Mapping[str, Phase]) -> Response:
        """Execute an operation of several phases. What is compared of the body is what `bodies.read` found."""
        layer: Idempotency = self._request.app.state.idempotency
        members = getattr(self._request.state, "members", None)
        if members is None and self.operation.fields:
            msg = f"{self.operation.name} compares members of the body: read it with bodies.read, or set request.state.members"
            raise RuntimeError(msg)
        keyed = KeyedRequest(
            tenant_id=self._tenant_id,
            key=self._key,
            body=members or {},
            path=self._request.path_params,
            query=dict(self._request.query_params),
        )
        return _respond(await layer.run(self.operation, keyed, phases))


def _respond(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    for name, value in answer.headers:
        response.headers.append(name, value)
    if response.headers.get("content-type") == MEDIA_TYPE:
        response.headers["Content-Language"] = "en"
        response.headers["Cache-Control"] = "no-store"
    if answer.replayed:
        response.headers[REPLAYED_HEADER] = "true"
    return response


def of(operation: Operation, tenant: Callable[..., Any] = deps.tenant_id) -> Any:
    """The dependency that makes a route this operation: `call: Annotated[KeyedCall, keyed.of(CREATE)]`.

    `tenant` is the dependency that authenticates the caller and gives the name that its keys are kept under.
    """

    async def keyed_call(request: Request, tenant_id: Annotated[str, Depends(tenant)]) -> KeyedCall:
        return KeyedCall(request, operation, tenant_id)

    keyed_call.operation = operation  # type: ignore[attr-defined]  # how a route is asked what it is
    return Depends(keyed_call)


def operation_of(route: RouteContext) -> Operation | None:
    """The operation that a route declares, or None."""
    waiting = [route.dependant] if isinstance(route.original_route, APIRoute) else []
    while waiting:
        dependant = waiting.pop()
        found = getattr(dependant.call, "operation", None)
        if isinstance(found, Operation):
            return found
        waiting += dependant.dependencies
    return None


def declared(routes: Sequence[BaseRoute]) -> Iterator[Operation]:
    """The operations of an app. Raises `ConfigurationError` for a POST under `/v1/` that declares none, or another, or that streams."""
    for route in iter_route_contexts(routes):
        operation, path, methods = operation_of(route), str(route.path), route.methods or set()
        if operation is None:
            if "POST" in methods and path.startswith(PREFIX):
                raise ConfigurationError(f"POST {path} declares no operation: add `keyed.of(…)` to its parameters.")
            continue
        if operation.name not in {f"{method} {path}" for method in methods}:
            raise ConfigurationError(f"{path} declares the operation {operation.name}, which is another one.")
        if _streams(route):
            raise ConfigurationError(f"{operation.name} streams its answer, which cannot be stored: it cannot take a key.")
        yield operation


def _streams(route: RouteContext) -> bool:
    assert route.endpoint is not None  # noqa: S101 - it has an operation
    kinds = (getattr(route.response_class, "value", route.response_class), signature(route.endpoint, eval_str=True).return_annotation)
    return any(isinstance(kind, type) and issubclass(kind, (StreamingResponse, FileResponse)) for kind in kinds)
