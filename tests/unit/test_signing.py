"""Signatures after Standard Webhooks, checked against its own library."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from ipn_gateway.clock import Clock
from ipn_gateway.errors import ValidationFailed
from ipn_gateway.signing import SECRET_BYTES, TOLERANCE_SECONDS, Verification, headers, new_secret, sign, verify

OLD, NEW, OTHER = (new_secret(bytes([number]) * SECRET_BYTES) for number in (1, 2, 3))
EVENT = "evt_0123456789abcdef"
SENT = 1_772_366_400
BODY = '{"id":"evt_0123456789abcdef","type":"order.paid","data":{"amount":"12.50","note":"৳"}}'.encode()


def checked(signature: str, *, now: float = SENT, timestamp: str = str(SENT), body: bytes = BODY, event_id: str = EVENT) -> Verification:
    return verify([NEW], event_id=event_id, timestamp=timestamp, signature=signature, body=body, now=now)


def test_a_known_message_has_the_known_signature() -> None:
    """The message and signature that libraries of the standard use in their own tests."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

    signature = sign([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')

    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_receivers_with_the_standard_library_accept_our_messages() -> None:
    """While a secret is replaced, a receiver that knows either one verifies; one that knows neither does not."""
    now = int(Clock().now().timestamp())
    sent = headers(EVENT, now, BODY, [NEW, OLD])

    assert Webhook(NEW).verify(BODY, sent)["type"] == "order.paid"
    assert Webhook(OLD).verify(BODY, sent)["type"] == "order.paid"
    with pytest.raises(WebhookVerificationError):
        Webhook(OTHER).verify(BODY, sent)


@given(body=st.text(max_size=200), event_id=st.from_regex(r"evt_[a-z0-9]{1,40}", fullmatch=True), timestamp=st.integers(0, 2**33))
def test_we_and_the_standard_library_sign_alike(body: str, event_id: str, timestamp: int) -> None:
    """For any message the library's signature is ours, and we accept it."""
    theirs = Webhook(NEW).sign(event_id, datetime.fromtimestamp(timestamp, tz=UTC), body)

    assert sign([NEW], event_id, timestamp, body.encode()) == theirs
    assert checked(theirs, now=timestamp, timestamp=str(timestamp), body=body.encode(), event_id=event_id) == "genuine"


def test_headers_carry_id_timestamp_and_every_signature() -> None:
    """The three names are the standard's; signatures stand in the order of the secrets."""
    sent = headers(EVENT, SENT, BODY, [NEW, OLD])

    assert sent == {
        "webhook-id": EVENT,
        "webhook-timestamp": str(SENT),
        "webhook-signature": f"{sign([NEW], EVENT, SENT, BODY)} {sign([OLD], EVENT, SENT, BODY)}",
    }


def test_one_good_signature_among_others_is_enough() -> None:
    """Versions that we do not know, junk and other secrets' signatures are passed over."""
    good = sign([NEW], EVENT, SENT, BODY)

    assert checked(f"v1a,AAAA v1,%% v1 {sign([OTHER], EVENT, SENT, BODY)} {good}") == "genuine"


@pytest.mark.parametrize(
    "signature",
    ["", "v1,", "v1,AAAA", "v1", ",", "v1,৳", sign([OTHER], EVENT, SENT, BODY), sign([NEW], EVENT, SENT, BODY).replace("v1,", "v1a,")],
)
def test_a_wrong_signature_is_refused(signature: str) -> None:
    """Empty, short, of another secret or of another version: none of them proves anything."""
    assert checked(signature) == "signature_wrong"


def test_a_changed_message_is_refused() -> None:
    """Body, id and time are all signed."""
    signature = sign([NEW], EVENT, SENT, BODY)

    assert checked(signature, body=BODY + b" ") == "signature_wrong"
    assert checked(signature, event_id=EVENT + "0") == "signature_wrong"
    assert checked(signature, timestamp=str(SENT + 1)) == "signature_wrong"
    assert checked(signature, timestamp=f"0{SENT}") == "signature_wrong"


@pytest.mark.parametrize(
    ("seconds", "result"), [(0, "genuine"), (TOLERANCE_SECONDS, "genuine"), (TOLERANCE_SECONDS + 1, "timestamp_outside_tolerance")]
)
def test_a_message_is_genuine_within_the_tolerance_only(seconds: int, result: str) -> None:
    """Five minutes to either side: an old message cannot be played again, a clock may be a little off."""
    signature = sign([NEW], EVENT, SENT, BODY)

    assert checked(signature, now=SENT + seconds) == result
    assert checked(signature, now=SENT - seconds) == result


@pytest.mark.parametrize("timestamp", ["", "now", "-1", "1.5", "1e9", "٣", "9" * 13, f" {SENT}"])
def test_an_unreadable_timestamp_is_refused(timestamp: str) -> None:
    """Only plain digits are a timestamp."""
    assert checked(sign([NEW], EVENT, SENT, BODY), timestamp=timestamp) == "timestamp_unreadable"


@pytest.mark.parametrize("length", [24, 32, 64])
def test_a_new_secret_is_base64_of_the_given_bytes(length: int) -> None:
    """`whsec_` and base64, of the lengths that the standard allows."""
    secret = new_secret(b"\xff" * length)

    assert base64.b64decode(secret.removeprefix("whsec_"), validate=True) == b"\xff" * length


@pytest.mark.parametrize("length", [0, 23, 65])
def test_a_secret_of_another_length_is_never_made(length: int) -> None:
    """Too few bytes could be guessed; the standard's upper end is 64."""
    with pytest.raises(ValueError, match="24 to 64"):
        new_secret(b"\xff" * length)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_AAAA", "whsec_%%", NEW.removeprefix("whsec_"), NEW + "=", "whsec_৳"])
def test_a_malformed_secret_signs_nothing(secret: str) -> None:
    """A secret that is no secret is an error that does not repeat it, never an unsigned or weakly signed message."""
    with pytest.raises(ValidationFailed) as caught:
        sign([secret], EVENT, SENT, BODY)

    assert len(secret) < 10 or secret not in str(caught.value)


@pytest.mark.parametrize(("secrets", "event_id"), [([], EVENT), ([NEW], "evt_1.2")])
def test_nothing_is_sent_unsigned_or_ambiguous(secrets: list[str], event_id: str) -> None:
    """No secret, or an id with the separator in it, is a bug of the caller."""
    with pytest.raises(ValueError, match="at least one secret"):
        sign(secrets, event_id, SENT, BODY)
