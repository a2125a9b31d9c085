"""A strict reading of urlencoded forms: one way to split a body into fields, and bytes kept as they were signed.

Values stay bytes, because a signature covers what was sent and not what a charset makes of it; text is a copy for display.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from ipn_gateway.providers.base import InboundRequest, Malformed

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS_MAX: Final = 100
"""A form has at most this many fields; the fullest notification known has 30."""

MEDIA_TYPES: Final = frozenset({"", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"})
"""What a form may be called: some senders name no type, or a general one."""

NAME: Final = re.compile(rb"[a-z0-9_]{1,64}")
_NAME_BYTES_MAX: Final = 64
_NAMES_MAX: Final = 1000

_CHARSET = re.compile(r";\s*charset\s*=\s*[\"']?([A-Za-z0-9_-]{1,20})", re.IGNORECASE)

# Their label without `-` and `_` -> our codec. A fixed list: these keep ASCII bytes ASCII, and a stranger cannot choose what is imported.
_CODECS: Final = MappingProxyType(
    {
        name.replace("_", "").replace("-", ""): name
        for name in ("utf-8", "ascii", "gbk", "gb2312", "gb18030", "big5", "shift_jis", "euc_jp", "euc_kr")
    }
    | {"usascii": "ascii", "koi8r": "koi8_r", "koi8u": "koi8_u"}
    | {f"iso8859{part}": f"iso8859_{part}" for part in (*range(1, 12), *range(13, 17))}
    | {f"{prefix}{page}": f"cp{page}" for page in range(1250, 1259) for prefix in ("windows", "cp")}
)


@dataclass(frozen=True, slots=True)
class Form:
    """Fields in the order received, each name once. `values` are the bytes after percent-decoding."""

    values: Mapping[str, bytes] = field(repr=False)
    charset: str = "utf-8"

    def text(self, name: str) -> str:
        r"""A field as text, empty when it is absent; bytes that the charset does not know are shown as `\xNN`."""
        return self.values.get(name, b"").decode(self.charset, "backslashreplace")

    def texts(self) -> dict[str, str]:
        """Every field as text, for display."""
        return {name: value.decode(self.charset, "backslashreplace") for name, value in self.values.items()}


@lru_cache(maxsize=1)
def read(request: InboundRequest) -> Form | Malformed:
    """The form in a request, or why there is none: a foreign media type, any Content-Encoding, or one that cannot be read.

    It is the body, and of a GET the query. The last one is remembered, since what a notification says and its signature are read in turn.
    """
    content_type = request.header("content-type") or ""
    if request.header("content-encoding"):
        return Malformed("media_type", "a Content-Encoding is not read")
    if content_type.partition(";")[0].strip().lower() not in MEDIA_TYPES:
        return Malformed("media_type", "the Content-Type is not that of a form")
    written = request.query.encode("latin-1", "replace") if request.method == "GET" else request.body
    values = parse(written)
    return values if isinstance(values, Malformed) else Form(values, charset_of(content_type))


def parse(body: bytes) -> dict[str, bytes] | Malformed:
    """Split a body or query: only `&` separates, blanks are kept, a bare name has an empty value, `+` is a space, empty pieces are nothing.

    A name twice is malformed, whatever its values: signer and reader may pick different ones.
    """
    # Commas are most of what is escaped, in lists of names: read here all at once, which no other escape can be changed by.
    pieces = [piece for piece in body.replace(b"+", b" ").replace(b"%2C", b",").split(b"&") if piece]
    if len(pieces) > FIELDS_MAX:
        return Malformed("unreadable", f"more than {FIELDS_MAX} fields")
    values: dict[str, bytes] = {}
    for piece in pieces:
        written, _, value = piece.partition(b"=")
        if b"%" in piece:
            written, value = unquote_to_bytes(written), unquote_to_bytes(value)
        name = _name(written) if len(written) <= _NAME_BYTES_MAX else None
        if name is None:
            return Malformed("unreadable", "a field name is not made of a-z, 0-9 and _")
        if name in values:
            return Malformed("unreadable", f"the field {name} is repeated")
        values[name] = value
    return values


@lru_cache(maxsize=_NAMES_MAX)
def _name(written: bytes) -> str | None:
    """A field's name, None for what is none. Remembered, since all notifications of a provider have the same ones."""
    return written.decode() if NAME.fullmatch(written) else None


def charset_of(content_type: str) -> str:
    """The codec for display that a Content-Type declares; UTF-8 when it names none, or one that is not known here."""
    match = _CHARSET.search(content_type)
    label = match[1].lower().replace("-", "").replace("_", "") if match else "utf8"
    return _CODECS.get(label, "utf-8")
