"""SSLCOMMERZ: the hash of a notification (API v4, Hash Validation), and how much it proves.

A sender lists in `verify_key` which fields the hash covers. It is made of `name=value` for those and for the store's password, sorted by
name and joined by `&`. Nothing is escaped in it, so that one text may be split into fields in several ways.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.providers.base import Proof

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_DIGESTS: Final = {"verify_sign": hashlib.md5, "verify_sign_sha2": hashlib.sha256}
FIELDS: Final = frozenset({*_DIGESTS, "verify_key"})

_PASSWORD_FIELD: Final = "store_passwd"  # noqa: S105 - its name
_NEVER_LISTED: Final = FIELDS | {_PASSWORD_FIELD}
_NEEDED: Final = frozenset(
    {"tran_id", "status", "store_id", "tran_date", "bank_tran_id", "amount", "currency", "currency_type", "currency_amount"}
)
_NEEDED_WHERE_POSTED: Final = frozenset({"val_id", "store_amount", "risk_level"})
_FOLDED: Final = re.compile(rb"&[a-z0-9_]+=")

_LISTS_MAX: Final = 50
_LIST_BYTES_MAX: Final = 1024  # of one that is remembered: three times the longest that is known


def prove(values: Mapping[str, bytes], passwords: Collection[bytes], *, is_payment: bool) -> Proof:
    """What the hash says, made with any of the passwords. `values` are the bytes of the fields as they were signed.

    REFUSED: missing or wrong. UNPROVED: it matches, yet the form leaves room for another reading. PROVED: neither.
    """
    if not values.get("verify_sign") or not values.get("verify_key"):
        return Proof.REFUSED
    listed = _listed(values)
    texts = [_text(values, reading) for reading in listed.readings]
    matches = [_hash_matches(values, text, password) for password in passwords for text in texts]
    if not any(matches):
        return Proof.REFUSED
    return Proof.PROVED if _is_strict(values, listed, is_payment=is_payment) else Proof.UNPROVED


# --- what is listed

_Labelled = list[tuple[str, bytes]]
"""Names in the order in which they are signed, each with what stands before its value."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """What a `verify_key` lists: its names, and its readings, as written and without blanks (PHP library).

    A reading has two parts: what is signed before the password, and what is signed behind it.
    """

    names: frozenset[str]
    each_once: bool
    readings: list[tuple[_Labelled, _Labelled]]


def _read(verify_key: bytes, posted: Collection[str] | None = None) -> _Listed:
    """The readings are of what was `posted` alone, if that is given."""
    written = verify_key.decode("latin-1").split(",")
    names = frozenset(written)
    readings = {names, frozenset(name.strip() for name in written)}
    if posted is not None:
        readings = {reading.intersection(posted) for reading in readings}
    return _Listed(names, len(names) == len(written), [_around_password(reading) for reading in readings])


def _around_password(names: Collection[str]) -> tuple[_Labelled, _Labelled]:
    labelled = [(name, name.encode() + b"=") for name in sorted(names)]
    return [one for one in labelled if one[0] < _PASSWORD_FIELD], [one for one in labelled if one[0] > _PASSWORD_FIELD]


_remembered = lru_cache(maxsize=_LISTS_MAX)(_read)


def _listed(values: Mapping[str, bytes]) -> _Listed:
    """Remembered, since a provider's notifications list the same names time and again.

    Of a list that is longer than any of theirs, only what was posted is sorted: it may have twenty thousand names.
    """
    verify_key = values["verify_key"]
    return _remembered(verify_key) if len(verify_key) <= _LIST_BYTES_MAX else _read(verify_key, values.keys())


# --- what is signed


def _text(values: Mapping[str, bytes], reading: tuple[_Labelled, _Labelled]) -> tuple[bytes, bytes]:
    """The signed text around the password. A name that was not posted is skipped (PHP library)."""
    before, behind = ([label + values[name] for name, label in part if name in values] for part in reading)
    return b"&".join([*before, b"store_passwd="]), b"&".join([b"", *behind])


def _hash_matches(values: Mapping[str, bytes], text: tuple[bytes, bytes], password: bytes) -> bool:
    """Whether `verify_sign`, and `verify_sign_sha2` where it is posted, are made of this text with this password.

    Hexadecimal digits may be of either case. That `verify_sign_sha2` is the same rule with SHA-256 is computed, not documented.
    """
    matches = [_digest_matches(values[sign], digest, text, password) for sign, digest in _DIGESTS.items() if sign in values]
    return all(matches)


def _digest_matches(posted: bytes, digest: Callable[[bytes], Any], text: tuple[bytes, bytes], password: bytes) -> bool:
    # The official libraries drop a trailing `&` of the signed text and the documents do not: either is good.
    whole: bytes = digest(password).hexdigest().encode().join(text)
    made = [digest(signed).hexdigest().encode() for signed in {whole, whole.rstrip(b"&")}]
    matches = [hmac.compare_digest(posted.lower(), one) for one in made]
    return any(matches)


def _is_strict(values: Mapping[str, bytes], listed: _Listed, *, is_payment: bool) -> bool:
    """Whether the signed text can be split in one way only and covers all that is read here: only then a matching hash proves something."""
    regular = listed.each_once and listed.names <= values.keys() and listed.names.isdisjoint(_NEVER_LISTED)
    needed = _NEEDED | (_NEEDED_WHERE_POSTED & values.keys()) | ({"val_id"} if is_payment else set())
    return regular and needed <= listed.names and not _FOLDED.search(b"\n".join(values.values()))
