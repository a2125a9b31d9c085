"""`/v1/contract`: what callers may rely on, from the settings and declarations that the code runs on."""

from typing import Any, Final

from fastapi import APIRouter, Depends
from pydantic import BaseModel, create_model

from ipn_gateway import events, guard, schedule, signing
from ipn_gateway.models import DeliveryOutcome
from ipn_gateway.providers import discovered
from ipn_gateway.settings import Settings
from ipn_gateway.web.deps import BODY_BYTES_MAX, RuntimeDep, open_to_all

router = APIRouter(tags=["service"], dependencies=[Depends(open_to_all)])

VERSION: Final = "1"
RECEIVED_BYTES_MAX: Final = 64 * 1024


@router.get("/v1/contract")
async def contract(rt: RuntimeDep) -> dict[str, Any]:
    """The published contract: what is taken in, what is sent when, and how long things are kept."""
    return described(rt.settings)


def described(settings: Settings) -> dict[str, Any]:
    """The contract under these settings."""
    return {
        "version": VERSION,
        "inbound": _inbound(settings),
        "outbound": _outbound(settings),
        "events": [{"type": name, "schema": wire_model(name).model_json_schema()} for name in events.CATALOGUE],
        "idempotency": {"operations": []},
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
            "versions": ["v1"],
            "signed": "{webhook-id}.{webhook-timestamp}.{body}",
            "tolerance_seconds": signing.TOLERANCE_SECONDS,
        },
        "headers": [signing.HEADER_ID, signing.HEADER_TIMESTAMP, signing.HEADER_SIGNATURE],
        "redirects": "not followed",
        "retry_after_seconds_max": schedule.HINT_MAX_SECONDS,
        "response_bytes_read": RECEIVED_BYTES_MAX,
    }


def _retention(settings: Settings) -> dict[str, Any]:
    return {
        "processed_notifications": "for ever",
        "notification_deliveries_days": settings.delivery_retention_days,
        "delivery_attempts_days": settings.delivery_retention_days,
        "events_days": settings.event_retention_days,
        "event_deliveries_days": settings.event_retention_days,
        "idempotency_keys_hours": settings.idempotency_retention_hours,
    }


def wire_model(event_type: str) -> type[BaseModel]:
    """The body of an event of this type, as it is sent."""
    data = events.CATALOGUE[event_type]
    name = "".join(part.capitalize() for part in event_type.replace(".", "_").split("_")) + "Event"
    return create_model(name, __doc__=data.__doc__, id=(str, ...), type=(str, ...), timestamp=(str, ...), data=(data, ...))
