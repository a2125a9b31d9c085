"""Signatures of outbound events after Standard Webhooks 1.0.0. Pure: chance and time arrive. `receiver` is the other side.

What is signed is `{webhook-id}.{webhook-timestamp}.{body}`, with the bytes that are sent: `v1` is its HMAC-SHA256 under a secret that the
receiver has too, `v1a` its ed25519 signature, which a receiver checks with the public key. While they are being replaced every active
secret and every active key signs, so that a receiver which knows any of them can verify.
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nacl import bindings as sodium

from ipn_gateway.errors import ValidationFailed
from ipn_gateway.receiver import (
    HEADER_ID,
    HEADER_SIGNATURE,
    HEADER_TIMESTAMP,
    PUBLIC_KEY_PREFIX,
    SECRET_BYTES_MAX,
    SECRET_BYTES_MIN,
    SECRET_PREFIX,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PRIVATE_KEY_PREFIX: Final = "whsk_"
SECRET_BYTES: Final = 32
SEED_BYTES: Final = 32
PAIR_BYTES: Final = 64
RANDOM_BYTES: Final = SECRET_BYTES + SEED_BYTES
"""What a new secret with its key pair is made of."""


@dataclass(frozen=True, slots=True)
class SharedSecret:
    """Signs as `v1`."""

    key: bytes = field(repr=False)

    def sign(self, message: bytes) -> str:
        """`v1,<base64>`."""
        return f"v1,{base64.b64encode(hmac.digest(self.key, message, 'sha256')).decode()}"


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """Signs as `v1a`. `pair` is the seed and its public key."""

    pair: bytes = field(repr=False)

    def sign(self, message: bytes) -> str:
        """`v1a,<base64>`."""
        signature = sodium.crypto_sign(message, self.pair)[: sodium.crypto_sign_BYTES]  # libsodium takes two thirds of OpenSSL's time
        return f"v1a,{base64.b64encode(signature).decode()}"


SigningKey = SharedSecret | PrivateKey


@dataclass(frozen=True, slots=True)
class Keys:
    """A new secret and a new key pair, as the standard writes them: `whsec_…`, `whsk_…` and, for everybody to see, `whpk_…`."""

    secret: str = field(repr=False)
    private_key: str = field(repr=False)
    public_key: str


def new_keys(random_bytes: bytes) -> Keys:
    """A secret and a key pair that have nothing in common, from `RANDOM_BYTES` random bytes. Raises ValueError for other lengths."""
    if len(random_bytes) != RANDOM_BYTES:
        raise ValueError(f"a secret and a key pair are made of {RANDOM_BYTES} bytes, not {len(random_bytes)}")
    seed = random_bytes[SECRET_BYTES:]
    public_key, pair = sodium.crypto_sign_seed_keypair(seed)
    return Keys(
        SECRET_PREFIX + base64.b64encode(random_bytes[:SECRET_BYTES]).decode(),
        PRIVATE_KEY_PREFIX + base64.b64encode(pair).decode(),
        PUBLIC_KEY_PREFIX + base64.b64encode(public_key).decode(),
    )


def signing_key(text: str) -> SigningKey:
    """What signs, from a secret (`whsec_…`, 24 to 64 bytes) or a private key (`whsk_…`, seed and public key, 64 bytes).

    Raises ValidationFailed, without repeating it, for what is neither.
    """
    if text.startswith(SECRET_PREFIX):
        secret = _decoded(text.removeprefix(SECRET_PREFIX))
        if SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
            return SharedSecret(secret)
    elif text.startswith(PRIVATE_KEY_PREFIX):
        pair = _decoded(text.removeprefix(PRIVATE_KEY_PREFIX))
        if len(pair) == PAIR_BYTES and pair == sodium.crypto_sign_seed_keypair(pair[:SEED_BYTES])[1]:
            return PrivateKey(pair)
    raise ValidationFailed(
        f"A signing secret is `{SECRET_PREFIX}` and base64 of {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, a private key"
        f" `{PRIVATE_KEY_PREFIX}` and base64 of an ed25519 seed and its public key."
    )


def sign(keys: Sequence[SigningKey], event_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: one signature by each key, in their order, separated by spaces.

    `timestamp` is that of the attempt, in Unix seconds. Raises ValueError when there is no key, and for an id with a dot, which would
    make the signed text ambiguous.
    """
    if not keys or "." in event_id:
        raise ValueError("signing takes at least one key, and an id without a dot")
    message = f"{event_id}.{timestamp}.".encode() + body
    return " ".join(key.sign(message) for key in keys)


def headers(event_id: str, timestamp: int, body: bytes, keys: Sequence[SigningKey]) -> dict[str, str]:
    """The three headers of one attempt. Raises as `sign` does."""
    return {
        HEADER_ID: event_id,
        HEADER_TIMESTAMP: str(timestamp),
        HEADER_SIGNATURE: sign(keys, event_id, timestamp, body),
    }


def _decoded(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:  # also what is not ASCII
        return b""
