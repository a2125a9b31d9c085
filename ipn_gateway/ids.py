"""Ids: UUIDv7 made from the time given (RFC 9562 section 5.7), stored as `uuid` and prefixed at the edge.

Event ids are derived instead: a digest of (tenant, type, cause), the same for ever, so that a fact that comes in again
after a loss of data yields the same id.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from uuid import UUID

from ipn_gateway.errors import NotFound

NOTIFICATION_DELIVERY = "ndl"
EVENT_DELIVERY = "edl"
ATTEMPT = "att"
ENDPOINT = "ep"
PAYMENT = "pay"
REFUND = "rfd"
API_KEY = "key"
SECRET = "sec"  # noqa: S105 - a prefix
AUDIT = "aud"
IDEMPOTENCY_KEY = "idk"

DIGITS = 32
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def new(now: datetime) -> UUID:
    """A UUIDv7 of `now`: milliseconds, 12 bits of the fraction (RFC 9562 section 6.2, method 3), and 62 random bits."""
    milliseconds, fraction = divmod((now - EPOCH) // MICROSECOND, 1000)
    chance = int.from_bytes(secrets.token_bytes(8), "big") & (1 << 62) - 1
    return UUID(int=milliseconds << 80 | 0x7 << 76 | (fraction * 4096 // 1000) << 64 | 0b10 << 62 | chance)


def show(prefix: str, value: UUID) -> str:
    """The public form, `prefix_` and 32 hexadecimal digits."""
    return f"{prefix}_{value.hex}"


def read(prefix: str, text: str) -> UUID:
    """The UUID behind a public id. Raises `NotFound`, since an id of another form names nothing."""
    head, _, digits = text.partition("_")
    if head != prefix or len(digits) != DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise NotFound
    return UUID(hex=digits)


def event_id(tenant_id: str, event_type: str, *cause: str) -> str:
    """`evt_` and 32 characters of base32: a digest of tenant, type and cause, each prefixed with its length."""
    digest = hashlib.sha256()
    for part in (tenant_id, event_type, *cause):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "big") + data)
    return "evt_" + base64.b32encode(digest.digest()[:20]).decode().lower()
