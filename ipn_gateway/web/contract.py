"""`/v1/contract`: what callers may rely on, from the settings and declarations that the code runs on."""

from collections.abc import Sequence
from typing import Any, Final, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field, create_model
from starlette.routing import BaseRoute

from ipn_gateway import attempts, endpoint_health, endpoints, events, guard, idempotency_keys, pull, receiver, schedule, signing
from ipn_gateway.errors import RateLimited
from ipn_gateway.operations import REPLAYED_HEADER
from ipn_gateway.providers import discovered
from ipn_gateway.retention import KEPT
from ipn_gateway.settings import Settings
from ipn_gateway.states import DeliveryOutcome
from ipn_gateway.web import publication, schemas
from ipn_gateway.web.deps import BODY_BYTES_MAX, RuntimeDep, open_to_all
from ipn_gateway.web.limits import HEADERS

router = APIRouter(tags=["service"], dependencies=[Depends(open_to_all)])

VERSION: Final = "1"
RECEIVED_BYTES_MAX: Final = 64 * 1024


@router.get("/v1/contract")
async def contract(request: Request, rt: RuntimeDep) -> dict[str, Any]:
    """The published contract: what is taken in, what is sent when, what a key means, and how long things are kept."""
    return described(rt.settings, request.app.routes)


def described(settings: Settings, routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The contract under these settings; `routes` declare the keyed operations."""
    return {
        "version": VERSION,
        "inbound": _inbound(settings),
        "outbound": _outbound(settings),
        "events": [
            {"type": name, "version": version, "schema": wire_model(name).model_json_schema()} for name, version in events.VERSIONS.items()
        ],
        "idempotency": _idempotency(settings, routes),
        "rate_limit": _rate_limit(settings),
        "retention": _retention(settings),
    }


def _inbound(settings: Settings) -> dict[str, Any]:
    return {
        "path": "/ipn/{source}",
        "method": "POST",
        "body_bytes_max": BODY_BYTES_MAX,
        "checked_in_order": [404, 405, 413, 415, 400, 401],
        "success": "2xx: the notification is stored",
        "delivery_id_header": "X-Delivery-Id",
        "browser_returns": {
            "path": "/return/{source}/{success|fail|cancel}",
            "methods": ["GET", "POST"],
            "wait_seconds": settings.return_wait_seconds,
            "redirect": "303 to the order's return_url, with order_id and status in its query",
        },
        "outcomes": [str(outcome) for outcome in DeliveryOutcome],
        "providers": {
            name: {
                "order_id_length_max": provider.order_id_length_max,
                "effects": {word: str(effect) for word, effect in provider.EFFECTS.items()},
            }
            for name, provider in sorted(discovered().items())
        },
    }


def _outbound(settings: Settings) -> dict[str, Any]:
    return {
        "schedule_seconds": list(settings.retry_schedule),
        "jitter": schedule.JITTER,
        "timeout_seconds": settings.delivery_timeout_seconds,
        "connect_timeout_seconds": guard.CONNECT_TIMEOUT_SECONDS,
        "success": "2xx",
        "signature": {
            "standard": "Standard Webhooks 1.0.0",
            "versions": ["v1", "v1a"],
            "algorithms": {"v1": "HMAC-SHA256", "v1a": "ed25519"},
            "forms": {
                "v1": f"{receiver.SECRET_PREFIX} and base64 of {signing.SECRET_BYTES} bytes: the secret, which both sides have",
                "v1a": f"{receiver.PUBLIC_KEY_PREFIX} and base64 of {receiver.PUBLIC_KEY_BYTES} bytes: the public key",
            },
            "public_keys": "public_key of each of the secrets that GET /v1/endpoints/{endpoint_id} lists",
            "signed": "{webhook-id}.{webhook-timestamp}.{body}",
            "order": "v1 of every active secret, then v1a of every active key, the newest of each first; one that fits is enough",
            "tolerance_seconds": receiver.TOLERANCE_SECONDS,
        },
        "headers": [receiver.HEADER_ID, receiver.HEADER_TIMESTAMP, receiver.HEADER_SIGNATURE],
        "redirects": "not followed",
        "retry_after_seconds_max": schedule.HINT_MAX_SECONDS,
        "breaker": {"failures": attempts.TRYING_FROM, "rest_seconds_max": attempts.REST_SECONDS_MAX},
        "failing": {"warned_after_days": endpoint_health.WARNED_AFTER_DAYS, "disabled_after_days": endpoint_health.DISABLED_AFTER_DAYS},
        "endpoints_max": endpoints.ENDPOINTS_MAX,
        "response_bytes_read": RECEIVED_BYTES_MAX,
        "custom_events": {
            "type_pattern": f"^{events.TYPE_PATTERN}$",
            "type_length_max": events.TYPE_LENGTH_MAX,
            "reserved_families": sorted(events.FAMILIES),
            "data_bytes_max": schemas.EVENT_DATA_BYTES_MAX,
        },
    }


def _idempotency(settings: Settings, routes: Sequence[BaseRoute]) -> dict[str, Any]:
    limits = publication.Limits(settings.idempotency_lease_seconds, settings.idempotency_retention_hours)
    return {
        "convention": publication.CONVENTION,
        "key": publication.key(),
        "replayed": {REPLAYED_HEADER: "true"},
        "statuses": publication.statuses(),
        "retention": publication.retention(limits.retention_hours),
        "region": publication.REGION,
        "open_keys_max": idempotency_keys.OPEN_MAX,
        "downstream": publication.downstream(discovered().values()),
        "operations": publication.published(routes, limits),
    }


def _rate_limit(settings: Settings) -> dict[str, Any]:
    return {
        "per_tenant_and_process": settings.rate_limit_per_tenant,
        "counted": "every call with a valid key, before its scope and its body are looked at; a refused one does not count",
        "refused_with": RateLimited.status,
        "headers": [*HEADERS, "Retry-After"],
        "never_limited": ["/ipn/{source}", "/return/{source}/{success|fail|cancel}"],
    }


def _retention(settings: Settings) -> dict[str, Any]:
    return {
        "processed_notifications": "for ever",
        "notification_deliveries_days": settings.delivery_retention_days,
        "delivery_attempts_days": settings.delivery_retention_days,
        "events_days": settings.event_retention_days,
        "event_deliveries_days": settings.event_retention_days,
        "idempotency_keys_hours": settings.idempotency_retention_hours,
        "tables": {table: kept.told(settings) for table, kept in KEPT.items()},
        "pull": pull.PRUNED,
    }


def wire_model(event_type: str) -> type[BaseModel]:
    """The body of an event of this type, as it is sent."""
    data = events.CATALOGUE[event_type]
    name = "".join(part.capitalize() for part in event_type.replace(".", "_").split("_")) + "Event"
    members: dict[str, Any] = {
        "id": (str, Field(description=f"the same in every attempt; also in `{receiver.HEADER_ID}`")),
        "type": (Literal[event_type], ...),
        "timestamp": (str, Field(description="when it happened", json_schema_extra={"format": "date-time"})),
        "data": (data, ...),
    }
    return create_model(name, __doc__=data.__doc__, **members)
