"""For a service that receives our events: whether a webhook is genuine, and whether its event is new.

Made to be copied: it imports nothing of this package, and `cryptography` only where a public key is among the keys. Signatures follow
Standard Webhooks 1.0.0: `v1` is HMAC-SHA256 under a shared secret, `v1a` is ed25519, for which a receiver holds the public key alone.
"""

from __future__ import annotations

import base64
import hmac
import json
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HEADER_ID: Final = "webhook-id"
HEADER_TIMESTAMP: Final = "webhook-timestamp"
HEADER_SIGNATURE: Final = "webhook-signature"

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - a prefix, no secret
SECRET_BYTES_MIN: Final = 24
SECRET_BYTES_MAX: Final = 64
PUBLIC_KEY_PREFIX: Final = "whpk_"
PUBLIC_KEY_BYTES: Final = 32

TOLERANCE_SECONDS: Final = 300
"""How far the timestamp of a genuine message may be from the receiver's time, to either side."""

SIGNATURES_MAX: Final = 32
"""How many signatures of one message are tried; a sender has at most two for each secret that is active."""

_TIMESTAMP_DIGITS_MAX: Final = 12  # so that a time in milliseconds is none in seconds

Reason = Literal["header_missing", "id_unreadable", "timestamp_unreadable", "timestamp_too_old", "timestamp_too_new", "signature_wrong"]


class Rejected(Exception):
    """The request is not a genuine message. `reason` is a word for your log, the text a sentence for whoever reads it."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Message:
    """A genuine message. `id` names its event, in every repeat the same; `sent_at` is the time of this attempt, in Unix seconds."""

    id: str
    sent_at: int
    body: bytes = field(repr=False)

    def event(self) -> dict[str, Any]:
        """The event that the body holds: `id`, `type`, `timestamp` and `data`. Raises ValueError for what is no JSON."""
        event: dict[str, Any] = json.loads(self.body)
        return event


def verify(
    headers: Mapping[str, str], body: bytes, keys: Sequence[str], *, now: float, tolerance_seconds: float = TOLERANCE_SECONDS
) -> Message:
    """The message, when one of `keys` has signed it. Raises `Rejected`, and ValueError for a key that is none or when there is none.

    `headers` are the request's, `body` its bytes as they came, before anything parses them. `keys` are secrets (`whsec_…`) and public keys
    (`whpk_…`), several while one is replaced: one signature by any of them is enough. `now` is the receiver's time in Unix seconds.
    """
    event_id, timestamp, signatures = _read(headers)
    _check_age(timestamp, now, tolerance_seconds)
    signed = f"{event_id}.{timestamp}.".encode() + body
    checks = _checks(keys, signed)
    if not any(fits(given) for version, given in _tried(signatures) for known, fits in checks if version == known):
        raise Rejected("signature_wrong", f"None of the first {SIGNATURES_MAX} signatures is by a key that is known here.")
    return Message(event_id, int(timestamp), body)


def check_keys(keys: Sequence[str]) -> None:
    """For a receiver's start: raises ValueError, without repeating it, for a key that is none, and when there is none at all."""
    _checks(keys, b"")


def _read(headers: Mapping[str, str]) -> tuple[str, str, str]:
    by_name = {name.lower(): value for name, value in headers.items()}
    found = [by_name.get(name, "") for name in (HEADER_ID, HEADER_TIMESTAMP, HEADER_SIGNATURE)]
    if not all(found):
        raise Rejected("header_missing", f"{HEADER_ID}, {HEADER_TIMESTAMP} and {HEADER_SIGNATURE} are all needed.")
    event_id, timestamp, signatures = found
    if "." in event_id or not event_id.isascii():
        raise Rejected("id_unreadable", f"{HEADER_ID} holds the dot that separates it from the time, or is no ASCII.")
    return event_id, timestamp, signatures


def _check_age(timestamp: str, now: float, tolerance_seconds: float) -> None:
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= _TIMESTAMP_DIGITS_MAX):
        raise Rejected("timestamp_unreadable", f"{HEADER_TIMESTAMP} is no time in Unix seconds.")
    ahead = int(timestamp) - now
    if ahead < -tolerance_seconds:
        raise Rejected("timestamp_too_old", f"The message is {-ahead:.0f} seconds old, more than {tolerance_seconds:g}.")
    if ahead > tolerance_seconds:
        raise Rejected("timestamp_too_new", f"The message is dated {ahead:.0f} seconds ahead, more than {tolerance_seconds:g}.")


def _tried(header: str) -> Iterator[tuple[str, bytes]]:
    """Version and bytes of the signatures that are looked at; other versions, and what is no base64, are passed over."""
    items = (item.partition(",") for item in header.split())
    known = [(version, encoded) for version, _, encoded in items if version in {"v1", "v1a"}]
    for version, encoded in known[:SIGNATURES_MAX]:
        try:
            yield version, base64.b64decode(encoded, validate=True)
        except ValueError:  # also what is not ASCII
            continue


def _checks(keys: Sequence[str], signed: bytes) -> list[tuple[str, Callable[[bytes], bool]]]:
    if not keys:
        raise ValueError("verifying takes at least one key")
    return [_check(key, signed) for key in keys]


def _check(key: str, signed: bytes) -> tuple[str, Callable[[bytes], bool]]:
    """The version of a key's signatures, and whether one is of these bytes. Raises ValueError for a key that is none."""
    if key.startswith(SECRET_PREFIX):
        secret = _decoded(key, SECRET_PREFIX)
        if SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
            return "v1", partial(hmac.compare_digest, hmac.digest(secret, signed, "sha256"))
    elif key.startswith(PUBLIC_KEY_PREFIX):
        public_key = _decoded(key, PUBLIC_KEY_PREFIX)
        if len(public_key) == PUBLIC_KEY_BYTES:
            return "v1a", partial(_signed_by, public_key, signed)
    raise ValueError(f"a key is `{SECRET_PREFIX}` or `{PUBLIC_KEY_PREFIX}` and base64 of its bytes")


def _decoded(key: str, prefix: str) -> bytes:
    try:
        return base64.b64decode(key.removeprefix(prefix), validate=True)
    except ValueError:
        return b""


def _signed_by(public_key: bytes, signed: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - who has secrets only needs no library
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


# --- once

TABLE: Final = """
CREATE TABLE IF NOT EXISTS received_events (
    event_id text PRIMARY KEY,
    received_at timestamp with time zone NOT NULL DEFAULT CURRENT_TIMESTAMP
)
"""
"""Which events were acted on. Nothing is ever deleted from it: an event may be sent again at any time, by a person for example."""

_TAKE: Final = "INSERT INTO received_events (event_id) VALUES ({}) ON CONFLICT DO NOTHING"


async def first_time(connection: Any, event_id: str) -> bool:
    """Whether the event is new, which it is for one transaction only: do what it asks for in the same one, then commit.

    `connection` is psycopg's AsyncConnection, or another with its `execute`, inside a transaction. A second delivery that comes at the
    same time waits here until the first has committed, and is then not new; if the first rolls back, the second is new.
    """
    cursor = await connection.execute(_TAKE.format("%s"), (event_id,))
    return bool(cursor.rowcount == 1)


def first_time_sync(connection: Any, event_id: str, *, mark: str = "%s") -> bool:
    """The same on a DB-API connection (PEP 249); `mark` is where its driver wants a parameter: `?` for SQLite."""
    cursor = connection.cursor()
    try:
        cursor.execute(_TAKE.format(mark), (event_id,))
        return bool(cursor.rowcount == 1)
    finally:
        cursor.close()
