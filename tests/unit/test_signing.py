"""Signatures after Standard Webhooks, checked against its own library and against another sender's published signature."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from ipn_gateway import logs, receiver
from ipn_gateway.clock import Clock
from ipn_gateway.errors import ValidationFailed
from ipn_gateway.signing import RANDOM_BYTES, Keys, SigningKey, headers, new_keys, sign, signing_key

OLD, NEW, OTHER = (new_keys(bytes([number]) * RANDOM_BYTES) for number in (1, 2, 3))
EVENT = "evt_0123456789abcdef"
SENT = 1_772_366_400
BODY = '{"id":"evt_0123456789abcdef","type":"order.paid","data":{"amount":"12.50","note":"৳"}}'.encode()


def both(*given: Keys) -> list[SigningKey]:
    """The secrets, then the private keys."""
    return [signing_key(text) for text in [*(keys.secret for keys in given), *(keys.private_key for keys in given)]]


PUBLISHED = [
    ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
    (
        "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==",
        "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg==",
    ),
]


@pytest.mark.parametrize(("key", "signature"), PUBLISHED, ids=["v1", "v1a"])
def test_a_known_message_has_the_known_signature(key: str, signature: str) -> None:
    """The message that libraries of the standard use in their own tests, and the two signatures that other senders publish for it."""
    made = sign([signing_key(key)], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')

    assert made == signature


def test_a_published_public_key_accepts_the_published_signature() -> None:
    """With the public half of that other sender's pair."""
    given = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": PUBLISHED[1][1],
    }

    message = receiver.verify(given, b'{"test": 2432232314}', ["whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="], now=1614265330)

    assert message.event() == {"test": 2432232314}


def test_receivers_with_the_standard_library_accept_our_messages() -> None:
    """While a secret is replaced, a receiver that knows either one verifies; one that knows neither does not. v1a is passed over."""
    now = int(Clock().now().timestamp())
    sent = headers(EVENT, now, BODY, both(NEW, OLD))

    assert Webhook(NEW.secret).verify(BODY, sent)["type"] == "order.paid"
    assert Webhook(OLD.secret).verify(BODY, sent)["type"] == "order.paid"
    with pytest.raises(WebhookVerificationError):
        Webhook(OTHER.secret).verify(BODY, sent)


@given(body=st.text(max_size=200), event_id=st.from_regex(r"evt_[a-z0-9]{1,40}", fullmatch=True), timestamp=st.integers(0, 2**33))
def test_we_and_the_standard_library_sign_alike(body: str, event_id: str, timestamp: int) -> None:
    """For any message the library's signature is ours, and the receiver's module accepts it."""
    theirs = Webhook(NEW.secret).sign(event_id, datetime.fromtimestamp(timestamp, tz=UTC), body)
    given = {"webhook-id": event_id, "webhook-timestamp": str(timestamp), "webhook-signature": theirs}

    assert sign([signing_key(NEW.secret)], event_id, timestamp, body.encode()) == theirs
    assert receiver.verify(given, body.encode(), [NEW.secret], now=timestamp) == receiver.Message(event_id, timestamp, body.encode())


@given(body=st.binary(max_size=200), event_id=st.from_regex(r"evt_[a-z0-9]{1,40}", fullmatch=True), timestamp=st.integers(0, 2**33))
def test_a_public_key_accepts_what_its_private_key_signed(body: bytes, event_id: str, timestamp: int) -> None:
    """For any message; whoever has another public key does not."""
    sent = headers(event_id, timestamp, body, [signing_key(NEW.private_key)])

    assert receiver.verify(sent, body, [NEW.public_key], now=timestamp).body == body
    with pytest.raises(receiver.Rejected):
        receiver.verify(sent, body, [OLD.public_key], now=timestamp)


def test_headers_carry_id_timestamp_and_every_signature() -> None:
    """The three names are the standard's; signatures stand in the order of the keys, each with its version."""
    keys = both(NEW, OLD)
    sent = headers(EVENT, SENT, BODY, keys)

    signatures = sent["webhook-signature"].split(" ")
    assert sent.keys() == {"webhook-id", "webhook-timestamp", "webhook-signature"}
    assert (sent["webhook-id"], sent["webhook-timestamp"]) == (EVENT, str(SENT))
    assert [one.partition(",")[0] for one in signatures] == ["v1", "v1", "v1a", "v1a"]
    assert signatures == [sign([key], EVENT, SENT, BODY) for key in keys]


def test_new_keys_have_the_forms_of_the_standard() -> None:
    """`whsec_`, `whsk_` (seed and public key) and `whpk_`, base64 each; the secret says nothing about the pair."""
    made = new_keys(bytes(range(RANDOM_BYTES)))
    secret, private, public = (
        base64.b64decode(text.removeprefix(prefix), validate=True)
        for text, prefix in ((made.secret, "whsec_"), (made.private_key, "whsk_"), (made.public_key, "whpk_"))
    )

    assert secret == bytes(range(32))
    assert private == bytes(range(32, 64)) + public
    assert len(public) == receiver.PUBLIC_KEY_BYTES
    assert made.secret not in repr(made)
    assert made.private_key not in repr(made)
    assert private.hex() not in repr(signing_key(made.private_key))


@pytest.mark.parametrize("length", [0, 32, 63, 65])
def test_keys_are_never_made_of_too_little(length: int) -> None:
    """Too few bytes could be guessed, and one half must not serve for both."""
    with pytest.raises(ValueError, match="64 bytes"):
        new_keys(b"\xff" * length)


@pytest.mark.parametrize("length", [24, 32, 64])
def test_a_secret_may_have_any_length_of_the_standard(length: int) -> None:
    """24 to 64 bytes."""
    text = "whsec_" + base64.b64encode(b"\xff" * length).decode()

    assert sign([signing_key(text)], EVENT, SENT, BODY).startswith("v1,")


MALFORMED = [
    *("", "whsec_", "whsec_AAAA", "whsec_%%", NEW.secret.removeprefix("whsec_"), NEW.secret + "=", "whsec_৳"),
    "whsec_" + base64.b64encode(bytes(65)).decode(),
    *("whsk_", "whsk_AAAA", "whsk_৳", "whsk_" + base64.b64encode(bytes(64)).decode(), NEW.private_key[:-4], NEW.public_key),
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_key_signs_nothing(text: str) -> None:
    """What is no key, or no pair, is an error that does not repeat it, never an unsigned or weakly signed message."""
    with pytest.raises(ValidationFailed) as caught:
        signing_key(text)

    assert len(text) < 10 or text not in str(caught.value)


@pytest.mark.parametrize(("keys", "event_id"), [([], EVENT), (both(NEW), "evt_1.2")])
def test_nothing_is_sent_unsigned_or_ambiguous(keys: list[SigningKey], event_id: str) -> None:
    """No key, or an id with the separator in it, is a bug of the caller."""
    with pytest.raises(ValueError, match="at least one key"):
        sign(keys, event_id, SENT, BODY)


def test_what_signs_is_taken_out_of_every_log_line() -> None:
    """A secret or a private key that got into a text is not logged; a public key is."""
    line = logs.redact(f"{NEW.secret}, {NEW.private_key}, {NEW.public_key}")

    assert line == f"[redacted], [redacted], {NEW.public_key}"
