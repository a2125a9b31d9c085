"""The receiver's module: what is genuine, what is not and why."""

from __future__ import annotations

import ast
import base64
import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import receiver
from ipn_gateway.receiver import SIGNATURES_MAX, TOLERANCE_SECONDS, Message, Rejected, check_keys, verify
from ipn_gateway.signing import RANDOM_BYTES, headers, new_keys, sign, signing_key

if TYPE_CHECKING:
    from collections.abc import Sequence

OLD, NEW, OTHER = (new_keys(bytes([number]) * RANDOM_BYTES) for number in (1, 2, 3))
EVENT = "evt_0123456789abcdef"
SENT = 1_772_366_400
BODY = '{"type": "order.paid", "data": {"amount": 10.0, "note": "é ৳", "nested": {"b": [1, {"a": null}]}}}'.encode()

OLD_V1, NEW_V1, OLD_V1A, NEW_V1A, OTHER_V1, OTHER_V1A = (
    sign([signing_key(text)], EVENT, SENT, BODY)
    for text in (OLD.secret, NEW.secret, OLD.private_key, NEW.private_key, OTHER.secret, OTHER.private_key)
)


def checked(signature: str, *, keys: Sequence[str] = (NEW.secret,), body: bytes = BODY, now: float = SENT, **given: str) -> Message:
    sent = {"webhook-id": EVENT, "webhook-timestamp": str(SENT), "webhook-signature": signature}
    return verify(sent | {f"webhook-{name}": value for name, value in given.items()}, body, keys, now=now)


def refusal(signature: str, **given: Any) -> str:
    with pytest.raises(Rejected) as caught:
        checked(signature, **given)
    return caught.value.reason


def signed_at(timestamp: str) -> str:
    """A signature of whoever has the secret, over any text in the place of the time."""
    message = f"{EVENT}.{timestamp}.".encode() + BODY
    return signing_key(NEW.secret).sign(message)


@pytest.mark.parametrize("key", [NEW.secret, NEW.public_key, OLD.secret, OLD.public_key])
@pytest.mark.case("B98")
def test_any_one_key_of_any_active_one_is_enough(key: str) -> None:
    """During a rotation a receiver may know the old or the new one, the secret or the public key, wherever its signature stands."""
    for signatures in itertools.permutations([OLD_V1, NEW_V1, OLD_V1A, NEW_V1A]):
        assert checked(" ".join(signatures), keys=[key]) == Message(EVENT, SENT, BODY)


@pytest.mark.parametrize(
    "signatures",
    [
        f"{OLD_V1} {NEW_V1}",
        f"{NEW_V1} {OLD_V1}",
        f"v9,AAAA v2,{NEW_V1[3:]} {NEW_V1}",
        f"{NEW_V1} {NEW_V1} {NEW_V1}",
        f"{OLD_V1}  {NEW_V1} \t",
        f"v1 v1, ,{NEW_V1[3:]} v1,%% v1a,৳ v1a,AAAA {NEW_V1}",
        f"{NEW_V1} " + " ".join([OTHER_V1] * 499),
        " ".join([f"v2,{NEW_V1[3:]}"] * 499) + f" {NEW_V1}",
        " ".join([OTHER_V1, OTHER_V1A] * (SIGNATURES_MAX // 2))[: -len(OTHER_V1A)] + NEW_V1,
    ],
    ids=["old first", "new first", "unknown first", "repeated", "blanks", "junk", "500, first", "499 unknown, last", "last of the limit"],
)
@pytest.mark.case("B98")
def test_one_good_signature_among_others_is_enough(signatures: str) -> None:
    """Other keys' signatures, versions that are unknown and junk are passed over."""
    assert checked(signatures) == Message(EVENT, SENT, BODY)


@pytest.mark.parametrize("junk", [OTHER_V1, OTHER_V1A, "v1,%%"])
@pytest.mark.case("B98")
def test_only_so_many_signatures_are_tried(junk: str) -> None:
    """A header with 500 entries costs no more than one with 32: what comes later is not looked at."""
    assert refusal(" ".join([junk] * 499) + f" {NEW_V1}") == "signature_wrong"
    assert checked(" ".join([junk] * (SIGNATURES_MAX - 1)) + f" {NEW_V1}")
    assert refusal(" ".join([junk] * SIGNATURES_MAX) + f" {NEW_V1}") == "signature_wrong"


@pytest.mark.parametrize(
    "signature",
    [
        "v1,",
        "v1,AAAA",
        "v1",
        ",",
        "v1,৳",
        "v1a,",
        "v1a,AAAA",
        OTHER_V1,
        OTHER_V1A,
        NEW_V1.replace("v1,", "v1a,"),
        NEW_V1A.replace("v1a", "v1"),
    ],
)
def test_a_wrong_signature_is_refused(signature: str) -> None:
    """Empty, short, of another key or under another version: none of them proves anything."""
    assert refusal(signature, keys=[NEW.secret, NEW.public_key]) == "signature_wrong"


@pytest.mark.case("B95")
@pytest.mark.parametrize(("key", "signature"), [(NEW.secret, NEW_V1), (NEW.public_key, NEW_V1A)])
def test_a_changed_message_is_refused(key: str, signature: str) -> None:
    """Body, id and time are all signed, byte by byte: the same JSON in another spelling is another message."""
    assert refusal(signature, keys=[key], body=BODY + b" ") == "signature_wrong"
    assert refusal(signature, keys=[key], body=BODY.replace(b"10.0", b"10.00")) == "signature_wrong"
    assert refusal(signature, keys=[key], body=BODY.replace("é".encode(), b"\\u00e9")) == "signature_wrong"
    assert refusal(signature, keys=[key], id=EVENT + "0") == "signature_wrong"
    assert refusal(signature, keys=[key], timestamp=str(SENT + 1)) == "signature_wrong"
    assert refusal(signature, keys=[key], timestamp=f"0{SENT}") == "signature_wrong"


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        (0, None),
        (TOLERANCE_SECONDS - 1, None),
        (1 - TOLERANCE_SECONDS, None),
        (TOLERANCE_SECONDS, None),
        (-TOLERANCE_SECONDS, None),
        (TOLERANCE_SECONDS + 1, "timestamp_too_new"),
        (-TOLERANCE_SECONDS - 1, "timestamp_too_old"),
        (10 * 86_400, "timestamp_too_new"),
        (-10 * 86_400, "timestamp_too_old"),
        (-SENT, "timestamp_too_old"),
    ],
)
@pytest.mark.case("B99")
def test_a_message_is_genuine_within_the_tolerance_only(seconds: int, reason: str | None) -> None:
    """Five minutes to either side, however well it is signed: an old message and one for later cannot be played."""
    timestamp = str(SENT + seconds)

    if reason is None:
        assert checked(signed_at(timestamp), timestamp=timestamp).sent_at == SENT + seconds
    else:
        assert refusal(signed_at(timestamp), timestamp=timestamp) == reason


@pytest.mark.parametrize(
    "timestamp", ["now", "2026-03-01T12:00:00Z", f"{SENT}000", f"{SENT}.5", f"-{SENT}", f"+{SENT}", "1e9", "٣", f" {SENT}"]
)
@pytest.mark.case("B99")
def test_an_unreadable_timestamp_is_refused(timestamp: str) -> None:
    """Only plain digits are a time, and one in milliseconds is none, although all of them are well signed."""
    assert refusal(signed_at(timestamp), timestamp=timestamp) == "timestamp_unreadable"


@pytest.mark.parametrize(
    ("reason", "timestamp", "sentence"),
    [
        ("timestamp_too_old", str(SENT - 301), "The message is 301 seconds old, more than 300."),
        ("timestamp_too_new", str(SENT + 301), "The message is dated 301 seconds ahead, more than 300."),
        ("timestamp_unreadable", f"{SENT}000", "webhook-timestamp is no time in Unix seconds."),
    ],
)
@pytest.mark.case("B99")
def test_a_refusal_says_why(reason: str, timestamp: str, sentence: str) -> None:
    """A word for the log and a sentence for a person: a wrong clock is told from a forgery."""
    with pytest.raises(Rejected) as caught:
        checked(signed_at(timestamp), timestamp=timestamp)

    assert (caught.value.reason, str(caught.value)) == (reason, sentence)


@pytest.mark.parametrize("missing", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_header_that_is_missing_is_named(missing: str) -> None:
    """Absent or empty; the names may be written in any case."""
    sent = headers(EVENT, SENT, BODY, [signing_key(NEW.secret)])

    for given in ({name: value for name, value in sent.items() if name != missing}, sent | {missing: ""}):
        with pytest.raises(Rejected, match=missing) as caught:
            verify(given, BODY, [NEW.secret], now=SENT)
        assert caught.value.reason == "header_missing"
    assert verify({name.title(): value for name, value in sent.items()}, BODY, [NEW.secret], now=SENT).id == EVENT


@pytest.mark.parametrize("event_id", ["evt_1.2", f"evt_1.{SENT}", "evt_é"])
def test_an_ambiguous_id_is_refused(event_id: str) -> None:
    """With a dot in the id, one signature would be good for two messages."""
    signature = signing_key(NEW.secret).sign(f"{event_id}.{SENT}.".encode() + BODY)

    assert refusal(signature, id=event_id) == "id_unreadable"


@pytest.mark.parametrize(
    "key",
    ["", "whsec_", "whsec_AAAA", "whsec_%%", NEW.secret.removeprefix("whsec_"), "whpk_", "whpk_AAAA", NEW.public_key[:-4], NEW.private_key],
)
def test_a_key_that_is_none_is_an_error_of_the_receiver(key: str) -> None:
    """It is not taken for a forgery, which would be answered 401 for ever, and not repeated. A private key is none of a receiver's."""
    with pytest.raises(ValueError, match="whsec_") as caught:
        checked(NEW_V1, keys=[key])

    assert len(key) < 12 or key not in str(caught.value)
    with pytest.raises(ValueError, match="whsec_"):
        check_keys([NEW.secret, key])


def test_a_receiver_without_a_key_takes_nothing() -> None:
    """It says so at its start; no list of keys means that nothing is genuine."""
    with pytest.raises(ValueError, match="at least one key"):
        checked(NEW_V1, keys=[])
    with pytest.raises(ValueError, match="at least one key"):
        check_keys([])
    check_keys([NEW.secret, NEW.public_key])


def test_a_message_holds_the_event() -> None:
    """Read from the very bytes that were verified."""
    message = checked(NEW_V1A, keys=[NEW.public_key])

    assert message.event()["data"] == {"amount": 10.0, "note": "é ৳", "nested": {"b": [1, {"a": None}]}}
    assert "order.paid" not in repr(message)


def test_the_module_can_be_copied(tmp_path: Path) -> None:
    """Alone in another folder it works, and with secrets only it asks for nothing but Python."""
    shutil.copy(Path(receiver.__file__), tmp_path / "copied.py")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse((tmp_path / "copied.py").read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import copied
given = {{"webhook-id": {EVENT!r}, "webhook-timestamp": "{SENT}", "webhook-signature": {NEW_V1!r}}}
print(copied.verify(given, {BODY!r}, [{NEW.secret!r}], now={SENT}).id)
print(*(name for name in ("cryptography", "ipn_gateway") if name in sys.modules))
"""

    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)

    assert imported - sys.stdlib_module_names == {"cryptography"}
    assert done.stdout.splitlines() == [EVENT, ""]


def test_public_keys_are_of_the_published_length() -> None:
    """32 bytes, the only length that ed25519 has."""
    assert len(base64.b64decode(NEW.public_key.removeprefix("whpk_"))) == receiver.PUBLIC_KEY_BYTES
