"""A strict reading of what providers answer in JSON: whatever is not clear is no verdict, and numbers stay the text that was sent."""

from __future__ import annotations

import json
import re
from datetime import datetime
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Never

from ipn_gateway.providers.base import Answer, NoAnswer, Unknown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

TEXT_MAX: Final = 255
"""Characters of a member that is read; a longer one is none that a provider documents."""

CODE_MAX: Final = 60
"""Characters of a cause code."""

MASK: Final = "***"

_DECIMAL = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")
_DATE_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}")
_WORD = re.compile(r"[a-z]+(?:_[a-z]+)*")
_PUNCTUATION = ".,;:!?()[]{}<>'\"`"
_OK = 200
_DEPTH_MAX = 32


def decoded(got: Answer | NoAnswer) -> dict[str, Any] | Unknown:
    """The JSON object of an answer; Unknown for no answer, another status than 200, an empty body, HTML, and any other JSON."""
    if isinstance(got, NoAnswer):
        return Unknown(got.cause)
    if got.status != _OK:
        return Unknown(f"status_{got.status}")
    if not got.body.strip():
        return Unknown("empty")
    try:
        written = got.body.decode(json.detect_encoding(got.body), "surrogatepass")
        value = _DECODER.decode(written)
        value = value if _is_storable(written) else _storable(value)
    except (ValueError, RecursionError):
        return Unknown("not_json")
    return value if isinstance(value, dict) else Unknown("not_json")


def text(answer: Mapping[str, Any], name: str) -> str:
    """A member that may come as text or number; empty when it is missing, null, of another type, or longer than `TEXT_MAX`."""
    value = answer.get(name)
    if not isinstance(value, str):
        value = str(value) if isinstance(value, int) else ""
    return value if len(value) <= TEXT_MAX else ""


def plain_decimal(written: str) -> Decimal | None:
    """ASCII digits with at most one point, 12 digits on either side; None for signs, exponents, blanks, grouping, NaN and infinities.

    `Decimal` itself takes `1_000`, `1e3`, ` 1 ` and `NaN`.
    """
    return Decimal(written) if _DECIMAL.fullmatch(written) else None


def amount(answer: Mapping[str, Any], name: str) -> Decimal | None:
    """A member that is money, exactly as written; None when it is no plain decimal number."""
    return plain_decimal(text(answer, name))


def date_time(written: str) -> datetime:
    """`2026-01-02 03:04:05`, which says nothing of a zone. Raises ValueError where it is none."""
    if _DATE_TIME.fullmatch(written):
        return datetime.fromisoformat(written)
    return datetime.strptime(written, "%Y-%m-%d %H:%M:%S")  # noqa: DTZ007 - the zone is the caller's to know; also takes `3:04:05`


def code(prefix: str, word: str) -> str:
    """A short cause code from a provider's word, which may go on: `INVALID_SOURCE 192.0.2.1` gives `<prefix>_INVALID_SOURCE`."""
    match = re.match(r"[A-Za-z_]{1,40}", word)
    return f"{prefix}_{match[0] if match else 'missing'}"


def sentence(answer: Mapping[str, Any], name: str) -> str:
    """A member that is prose, of which the first `TEXT_MAX` characters are read; empty when it is none."""
    value = answer.get(name)
    return value[:TEXT_MAX].strip() if isinstance(value, str) else ""


def reason(prefix: str, prose: str, secrets: Collection[str]) -> str:
    """A short cause code from a provider's sentence: `cus_email is wrong: a@b.example` gives `<prefix>_cus_email_is_wrong`.

    Only its plain words are taken, in lower case and from the front; numbers, addresses and the secrets are left out.
    """
    for secret in secrets:
        prose = re.sub(re.escape(secret), " ", prose, flags=re.IGNORECASE)
    words = [word.strip(_PUNCTUATION).lower() for word in prose.split()]
    found = prefix
    for word in filter(_WORD.fullmatch, words):
        if len(found) + len(word) >= CODE_MAX:
            break
        found = f"{found}_{word}"
    return found


def view(answer: Mapping[str, Any], masked_fields: Collection[str]) -> dict[str, Any]:
    """An answer to keep: as received, with the values of `masked_fields` masked at any depth.

    A name is masked that is one of these, or begins with one that ends in `*`.
    """
    return _view(answer, *_masks(tuple(masked_fields)))


@cache
def _masks(masked_fields: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Whole names, and beginnings of names."""
    beginnings = tuple(mask[:-1] for mask in masked_fields if mask.endswith("*"))
    return frozenset(mask for mask in masked_fields if not mask.endswith("*")), beginnings


def _view(answer: Mapping[str, Any], names: frozenset[str], beginnings: tuple[str, ...]) -> dict[str, Any]:
    shown = dict(answer)
    for name, value in answer.items():
        if value and (name in names or name.startswith(beginnings)):
            shown[name] = MASK
        elif not isinstance(value, str):
            shown[name] = _inside(value, names, beginnings)
    return shown


def _inside(value: Any, names: frozenset[str], beginnings: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return _view(value, names, beginnings)
    return [_inside(item, names, beginnings) for item in value] if isinstance(value, list) else value


def _refuse_constant(_: str) -> Never:
    raise ValueError("NaN and infinities are no JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member is repeated")
    return members


_DECODER: Final = json.JSONDecoder(parse_float=str, parse_constant=_refuse_constant, object_pairs_hook=_each_once)


def _is_storable(written: str) -> bool:
    """Whether nothing in this JSON can need `_storable`: ASCII, no character named by its number, too few brackets to be nested deeply."""
    return written.isascii() and "\\u" not in written and written.count("{") + written.count("[") <= _DEPTH_MAX


def _storable(value: Any, depth: int = 0) -> Any:
    """The same JSON without what a database refuses in text: NUL is shown by its symbol, a lone surrogate by a question mark."""
    if depth > _DEPTH_MAX:
        raise ValueError("nested deeper than any answer is")
    if isinstance(value, str):
        return value.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_storable(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_storable(name): _storable(item, depth + 1) for name, item in value.items()}
    return value
