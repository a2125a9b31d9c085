"""Signatures of outbound events after Standard Webhooks 1.0.0, scheme v1 (HMAC-SHA256). Pure: chance and time arrive.

What is signed is `{webhook-id}.{webhook-timestamp}.{body}`, with the bytes that are sent. While a secret is being replaced every
active one signs, so that a receiver which knows either of them can verify.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import TYPE_CHECKING, Final, Literal

from ipn_gateway.errors import ValidationFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 — a prefix, no secret
SECRET_BYTES: Final = 32
SECRET_BYTES_MIN: Final = 24
SECRET_BYTES_MAX: Final = 64
TOLERANCE_SECONDS: Final = 300
"""How far the timestamp of a genuine message may be from the receiver's time, to either side."""

HEADER_ID: Final = "webhook-id"
HEADER_TIMESTAMP: Final = "webhook-timestamp"
HEADER_SIGNATURE: Final = "webhook-signature"

Verification = Literal["genuine", "timestamp_unreadable", "timestamp_outside_tolerance", "signature_wrong"]

_TIMESTAMP_DIGITS_MAX = 12


def new_secret(random_bytes: bytes) -> str:
    """A signing secret, `whsec_` and base64, from 24 to 64 random bytes (we use `SECRET_BYTES`). Raises ValueError for other lengths."""
    if not SECRET_BYTES_MIN <= len(random_bytes) <= SECRET_BYTES_MAX:
        raise ValueError(f"a signing secret has {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, not {len(random_bytes)}")
    return SECRET_PREFIX + base64.b64encode(random_bytes).decode()


def sign(secrets: Sequence[str], event_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: one `v1,<base64>` for each secret, in their order, separated by spaces.

    `timestamp` is that of the attempt, in Unix seconds. Raises ValidationFailed for a malformed secret, ValueError for none at all
    and for an id with a dot, which would make the signed text ambiguous.
    """
    if not secrets or "." in event_id:
        raise ValueError("signing takes at least one secret, and an id without a dot")
    return " ".join(f"v1,{base64.b64encode(_digest(secret, event_id, str(timestamp), body)).decode()}" for secret in secrets)


def headers(event_id: str, timestamp: int, body: bytes, secrets: Sequence[str]) -> dict[str, str]:
    """The three headers of one attempt. Raises as `sign` does."""
    return {
        HEADER_ID: event_id,
        HEADER_TIMESTAMP: str(timestamp),
        HEADER_SIGNATURE: sign(secrets, event_id, timestamp, body),
    }


def verify(
    secrets: Sequence[str],
    *,
    event_id: str,
    timestamp: str,
    signature: str,
    body: bytes,
    now: float,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> Verification:
    """What a receiver does, with the three headers as they came; `now` in Unix seconds. Compares in constant time.

    One signature by one of `secrets` is enough; versions other than v1 are passed over. Raises ValidationFailed for a malformed secret.
    """
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= _TIMESTAMP_DIGITS_MAX):
        return "timestamp_unreadable"
    expected = [_digest(secret, event_id, timestamp, body) for secret in secrets]
    matches = [hmac.compare_digest(ours, theirs) for theirs in _signatures(signature) for ours in expected]
    if not any(matches):
        return "signature_wrong"
    return "genuine" if abs(now - int(timestamp)) <= tolerance_seconds else "timestamp_outside_tolerance"


def _signatures(header: str) -> list[bytes]:
    found = []
    for item in header.split(" "):
        version, _, encoded = item.partition(",")
        if version == "v1":
            try:
                found.append(base64.b64decode(encoded, validate=True))
            except ValueError:  # also what is not ASCII
                continue
    return found


def _digest(secret: str, event_id: str, timestamp: str, body: bytes) -> bytes:
    return hmac.digest(_key(secret), f"{event_id}.{timestamp}.".encode() + body, hashlib.sha256)


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True) if secret.startswith(SECRET_PREFIX) else b""
    except (binascii.Error, ValueError):
        key = b""
    if not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        raise ValidationFailed(f"A signing secret is `{SECRET_PREFIX}` and base64 of {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes.")
    return key
