"""The fingerprint of a keyed request: a digest of the declared projection, in one canonical encoding that no two requests share.

What counts is declared beside each operation and published. Everything else (headers, order of members, white space, members that
are not declared) changes nothing, so that a client that writes the same request in another way is answered and not refused.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["json", "decimal", "time", "secret"]
"""How a member is compared: as it stands, as the decimal number that its text or number is, or as the moment that its RFC 3339 text is.

A secret is compared as it stands, through a digest that is slow to compute, so that none can be guessed from what is stored.
"""

KINDS: Final[Mapping[Kind, str]] = {
    "json": "as JSON: numbers by value, members in any order; absent and null differ",
    "decimal": "as a decimal number: 10, 10.0 and 10.00 are equal",
    "time": "as a moment: one in UTC and one with another offset may be equal",
    "secret": "as JSON, through a slow digest, since it holds secrets",
}


_SALT: Final = b"ipn-gateway fingerprint"


def canonical(value: Any) -> str:
    """One text for each JSON value: members sorted, no white space, numbers by value. `parse_float=Decimal` keeps numbers exact.

    After RFC 8785, except that a number is its digits and exponent, which any size of number has. Raises ValueError for NaN and infinities.
    """
    if isinstance(value, dict):
        members = (f"{_text(name)}:{canonical(value[name])}" for name in sorted(value))
        return "{" + ",".join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(canonical(item) for item in value) + "]"
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _number(Decimal(value))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=True)


def _number(value: Decimal) -> str:
    """`1e2` for 100 and 1E+2: digits without trailing zeros, and the exponent. `normalize()` would round to 28 digits."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError("NaN and infinities are no JSON")  # noqa: TRY004 - of a value, not of a type
    written = "".join(map(str, digits)).lstrip("0")
    if not written:
        return "0"
    shorter = written.rstrip("0")
    return f"{'-' if sign else ''}{shorter}e{exponent + len(written) - len(shorter)}"


def _projected(value: Any, kind: Kind) -> Any:
    """A member as it is compared; one that is no decimal and no time (and so was refused or is null) as it stands."""
    if kind == "secret":
        return {"secret": hashlib.scrypt(canonical(value).encode(), salt=_SALT, n=1 << 14, r=8, p=1).hex()}
    if kind == "decimal" and isinstance(value, int | Decimal) and not isinstance(value, bool):
        return {"decimal": Decimal(value)}
    if not isinstance(value, str):
        return value
    try:
        if kind == "decimal" and (number := Decimal(value)).is_finite():
            return {"decimal": number}
        if kind == "time":
            return {"time": datetime.fromisoformat(value.upper()).astimezone(UTC).isoformat()}
    except (ArithmeticError, ValueError, OverflowError):
        pass
    return value


def fingerprint(
    operation: str, fields: Mapping[str, Kind], body: Mapping[str, Any], *, path: Mapping[str, Any], query: Mapping[str, Any]
) -> bytes:
    """SHA-256 of the projection: the operation, the concrete path and query, and those `fields` of the body that are there."""
    members = {name: _projected(body[name], kind) for name, kind in fields.items() if name in body}
    projection = {"operation": operation, "path": dict(path), "query": dict(query), "body": members}
    return hashlib.sha256(canonical(projection).encode()).digest()
