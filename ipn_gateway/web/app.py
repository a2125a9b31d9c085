"""The application: made from a runtime that somebody else opened and will close."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware import Middleware
from fastapi.middleware.cors import CORSMiddleware

from ipn_gateway import __version__
from ipn_gateway.idempotency import Idempotency
from ipn_gateway.slots import Slots
from ipn_gateway.web import (
    checkouts,
    contract,
    deliveries,
    endpoints,
    health,
    idempotency_keys,
    keyed,
    limits,
    listener,
    metrics,
    openapi,
    orders,
    pages,
    problems,
    refunds,
    returns,
    sources,
)
from ipn_gateway.web.deps import networks
from ipn_gateway.web.shield import REQUESTS_MAX, Shield

if TYPE_CHECKING:
    from fastapi.routing import APIRoute
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp

    from ipn_gateway.runtime import Runtime

ROUTERS = (
    listener.router,
    returns.router,
    orders.router,
    checkouts.router,
    refunds.router,
    deliveries.inbound,
    sources.router,
    idempotency_keys.router,
    endpoints.router,
    deliveries.events,
    deliveries.outbound,
    contract.router,
    health.router,
    metrics.router,
    pages.router,
)


class Gateway(FastAPI):
    """FastAPI with one layer around everything else, and our OpenAPI document."""

    def build_middleware_stack(self) -> ASGIApp:
        """The layers, ours outermost."""
        return Shield(super().build_middleware_stack(), self.state.slots, self.state.runtime.clock)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        return openapi.document(self)


def create_app(rt: Runtime) -> FastAPI:
    """The app over `rt`. It can be mounted in another one: it opens and closes nothing. `app.state.slots` drains before `rt` is closed.

    Raises `ConfigurationError` for a setting that only the web role reads, and for a POST that declares no operation.
    """
    networks(rt.settings.trusted_proxies)
    app = Gateway(
        title="ipn-gateway",
        version=__version__,
        openapi_url=None,  # ours, in `pages`
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[Middleware(listener.Ahead)],
        generate_unique_id_function=_operation_id,
    )
    app.state.runtime = rt
    app.state.slots = Slots(REQUESTS_MAX)
    app.state.limiter = limits.Limiter(rt.settings.rate_limit_per_tenant, rt.clock)
    app.state.gauges = metrics.Gauges(rt)
    problems.install(app)
    app.router.routes.extend(_routes())
    app.state.idempotency = Idempotency(
        rt.db,
        keyed.declared(app.routes),
        lease_seconds=rt.settings.idempotency_lease_seconds,
        retention_hours=rt.settings.idempotency_retention_hours,
    )
    app.webhooks.routes.extend(openapi.webhooks())
    if rt.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(rt.settings.cors_origins),
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key"],
            expose_headers=["Location", "Retry-After", "Idempotent-Replayed", *limits.HEADERS],
        )
    return app


@cache
def _routes() -> list[BaseRoute]:
    """The routes, which all apps of a process share: a request finds the app that it came to. To build them is most of the work."""
    router = APIRouter(generate_unique_id_function=_operation_id)
    for part in ROUTERS:
        router.include_router(part)
    return router.routes


def _operation_id(route: APIRoute) -> str:
    return route.name
