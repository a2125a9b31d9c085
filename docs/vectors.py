"""Signed messages with the verdict that a receiver has to come to, for a receiver in any language: `reference/signature-vectors.json`.

Written by `make docs` with the code that signs; a test compares the file with what this would write, and each verdict with `receiver`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import receiver, signing

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD, NEW, OTHER = (signing.new_keys(bytes(range(start, start + signing.RANDOM_BYTES))) for start in (0, 64, 128))
EVENT_ID: Final = "evt_5f1c0c6b7de14a3f9a7f3a4f0f1c2d3e"
NOW: Final = 1_796_054_400
BODY: Final = (
    '{"id":"evt_5f1c0c6b7de14a3f9a7f3a4f0f1c2d3e","type":"order.paid","timestamp":"2026-11-30T16:00:00Z",'
    '"data":{"order_id":"INV-1001","amount":"1250.00","metadata":{"note":"é ৳","weight":10.0,"nested":{"b":[1,null]}}}}'
)


@dataclass(frozen=True, slots=True)
class Vector:
    """One request, the keys that its receiver has, and the reason for which it is refused; none when it is genuine."""

    name: str
    keys: list[str]
    signature: str
    reason: receiver.Reason | None = None
    body: str = BODY
    now: int = NOW
    altered: dict[str, str] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """As JSON; the headers are those of a request, so an empty one is left out."""
        headers = {
            receiver.HEADER_ID: EVENT_ID,
            receiver.HEADER_TIMESTAMP: str(NOW),
            receiver.HEADER_SIGNATURE: self.signature,
        } | self.altered
        return {
            "name": self.name,
            "keys": self.keys,
            "headers": {name: value for name, value in headers.items() if value},
            "body": self.body,
            "now": self.now,
            "genuine": self.reason is None,
            "reason": self.reason,
        }


def text() -> str:
    """The file."""
    document = {
        "about": "Messages after Standard Webhooks 1.0.0 and what a receiver says to them; written by `make docs` from docs/vectors.py. "
        "`body` is the text whose UTF-8 bytes are sent, `now` the receiver's time in Unix seconds, `keys` what it knows. "
        "The words of `reason` are those of ipn_gateway/receiver.py; a receiver may have others.",
        "signed": "{webhook-id}.{webhook-timestamp}.{body}",
        "tolerance_seconds": receiver.TOLERANCE_SECONDS,
        "vectors": [vector.shown() for vector in [*_genuine(), *_rotation(), *_wrong(), *_times()]],
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _sign(*keys: str, event_id: str = EVENT_ID, timestamp: str = str(NOW), body: str = BODY) -> str:
    """Signatures by these keys; of what a sender should not send, too."""
    message = f"{event_id}.{timestamp}.{body}".encode()
    return " ".join(signing.signing_key(key).sign(message) for key in keys)


def _genuine() -> Iterator[Vector]:
    both = _sign(NEW.secret, NEW.private_key)
    yield Vector("v1, with the secret", [NEW.secret], _sign(NEW.secret))
    yield Vector("v1a, with the public key", [NEW.public_key], _sign(NEW.private_key))
    yield Vector("both signatures, with the secret", [NEW.secret], both)
    yield Vector("both signatures, with the public key", [NEW.public_key], both)
    yield Vector("unknown versions first", [NEW.secret, NEW.public_key], f"v0,AAAA v2,{both[3:47]} {both}")
    yield Vector("another key's first, repeated, trailing blank", [NEW.secret], f"{_sign(OTHER.secret)} {both} {both} ")
    yield Vector("junk among them", [NEW.public_key], f"v1 , v1a, v1,%% v1a,AAAA {both}")
    yield Vector(
        "another spelling of the JSON, signed as it is sent", [NEW.secret], _sign(NEW.secret, body='{"a": 10.0}'), body='{"a": 10.0}'
    )


def _rotation() -> Iterator[Vector]:
    during = _sign(NEW.secret, OLD.secret, NEW.private_key, OLD.private_key)
    yield Vector("rotation, with the new secret", [NEW.secret], during)
    yield Vector("rotation, with the old secret", [OLD.secret], during)
    yield Vector("rotation, with the new public key", [NEW.public_key], during)
    yield Vector("rotation, with the old public key", [OLD.public_key], during)
    yield Vector("rotation, with two secrets", [OLD.secret, NEW.secret], during)
    after = _sign(NEW.secret, NEW.private_key)
    yield Vector("after a rotation, with two secrets", [OLD.secret, NEW.secret], after)
    yield Vector("after a rotation, with the old keys", [OLD.secret, OLD.public_key], after, "signature_wrong")


def _wrong() -> Iterator[Vector]:
    keys, genuine = [NEW.secret, NEW.public_key], _sign(NEW.secret, NEW.private_key)
    v1, v1a = genuine.split(" ")
    yield Vector("another's keys", keys, _sign(OTHER.secret, OTHER.private_key), "signature_wrong")
    yield Vector("v1 under the name v1a", keys, v1.replace("v1,", "v1a,"), "signature_wrong")
    yield Vector("v1a under the name v1", keys, v1a.replace("v1a,", "v1,"), "signature_wrong")
    yield Vector("an unknown version only", keys, v1.replace("v1,", "v2,"), "signature_wrong")
    yield Vector("an empty signature", keys, "v1, v1a,", "signature_wrong")
    yield Vector("half a signature", keys, v1[:24], "signature_wrong")
    yield Vector("a changed amount", keys, genuine, "signature_wrong", body=BODY.replace("1250.00", "1.00"))
    yield Vector("a blank more", keys, genuine, "signature_wrong", body=BODY + " ")
    yield Vector("another id", keys, genuine, "signature_wrong", altered={receiver.HEADER_ID: EVENT_ID[:-1] + "f"})
    yield Vector("another time", keys, genuine, "signature_wrong", altered={receiver.HEADER_TIMESTAMP: str(NOW + 1)})
    dotted = f"{EVENT_ID}.1"
    yield Vector("a dot in the id", keys, _sign(NEW.secret, event_id=dotted), "id_unreadable", altered={receiver.HEADER_ID: dotted})
    for name in (receiver.HEADER_ID, receiver.HEADER_TIMESTAMP, receiver.HEADER_SIGNATURE):
        yield Vector(f"no {name}", keys, genuine, "header_missing", altered={name: ""})


def _times() -> Iterator[Vector]:
    keys, genuine = [NEW.secret], _sign(NEW.secret)
    yield Vector("299 seconds old", keys, genuine, now=NOW + 299)
    yield Vector("300 seconds old", keys, genuine, now=NOW + 300)
    yield Vector("301 seconds old", keys, genuine, "timestamp_too_old", now=NOW + 301)
    yield Vector("dated 299 seconds ahead", keys, genuine, now=NOW - 299)
    yield Vector("dated 300 seconds ahead", keys, genuine, now=NOW - 300)
    yield Vector("dated 301 seconds ahead", keys, genuine, "timestamp_too_new", now=NOW - 301)
    yield Vector("dated ten days ahead", keys, genuine, "timestamp_too_new", now=NOW - 864_000)
    yield from (
        Vector(name, keys, _sign(NEW.secret, timestamp=timestamp), reason, altered={receiver.HEADER_TIMESTAMP: timestamp})
        for name, timestamp, reason in _UNREADABLE
    )


_UNREADABLE: Final[list[tuple[str, str, receiver.Reason]]] = [
    ("the time is 0", "0", "timestamp_too_old"),
    ("the time is a text", "2026-11-30T16:00:00Z", "timestamp_unreadable"),
    ("the time is in milliseconds", f"{NOW}000", "timestamp_unreadable"),
    ("the time has a fraction", f"{NOW}.5", "timestamp_unreadable"),
    ("the time has a sign", f"+{NOW}", "timestamp_unreadable"),
]
