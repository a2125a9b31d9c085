"""A strict reading of what providers answer in JSON: whatever is not clear is no verdict, and numbers stay the text that was sent."""

from __future__ import annotations

import json
import re
from decimal import Decimal
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
        value = _storable(json.loads(got.body, parse_float=str, parse_constant=_refuse_constant, object_pairs_hook=_each_once))
    except (ValueError, RecursionError):
        return Unknown("not_json")
    return value if isinstance(value, dict) else Unknown("not_json")


def text(answer: Mapping[str, Any], name: str) -> str:
    """A member that may come as text or number; empty when it is missing, null, of another type, or longer than `TEXT_MAX`."""
    value = answer.get(name)
    found = str(value) if isinstance(value, str | int) else ""
    return found if len(found) <= TEXT_MAX else ""


def plain_decimal(written: str) -> Decimal | None:
    """ASCII digits with at most one point, 12 digits on either side; None for signs, exponents, blanks, grouping, NaN and infinities.

    `Decimal` itself takes `1_000`, `1e3`, ` 1 ` and `NaN`.
    """
    return Decimal(written) if _DECIMAL.fullmatch(written) else None


def amount(answer: Mapping[str, Any], name: str) -> Decimal | None:
    """A member that is money, exactly as written; None when it is no plain decimal number."""
    return plain_decimal(text(answer, name))


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


def is_masked(name: str, masked_fields: Collection[str]) -> bool:
    """Whether a name is one of these, or begins with one that ends in `*`."""
    return any(name.startswith(mask[:-1]) if mask.endswith("*") else name == mask for mask in masked_fields)


def view(answer: Mapping[str, Any], masked_fields: Collection[str]) -> dict[str, Any]:
    """An answer to keep: as received, with the values of `masked_fields` masked at any depth."""
    return {name: _masked(value, masked_fields, name) for name, value in answer.items()}


def _masked(value: Any, masked_fields: Collection[str], name: str) -> Any:
    if value and is_masked(name, masked_fields):
        return MASK
    if isinstance(value, dict):
        return view(value, masked_fields)
    return [_masked(item, masked_fields, name) for item in value] if isinstance(value, list) else value


def _refuse_constant(_: str) -> Never:
    raise ValueError("NaN and infinities are no JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member is repeated")
    return members


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
