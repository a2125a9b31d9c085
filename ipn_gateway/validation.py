"""Turning what pydantic found into one `ValidationFailed`: a pointer and a sentence for each field, never the value itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.errors import ValidationFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from pydantic import ValidationError

_TEXT: Final = "must be a string"
_NUMBER: Final = "must be a number"
_INTEGER: Final = "must be an integer"
_BOOLEAN: Final = "must be true or false"
_OBJECT: Final = "must be an object"
_ARRAY: Final = "must be an array"
_SENTENCES: Final[Mapping[str, str]] = {
    "missing": "is required",
    "string_type": _TEXT,
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "int_type": _INTEGER,
    "int_parsing": _INTEGER,
    "int_parsing_size": _INTEGER,
    "int_from_float": _INTEGER,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _NUMBER,
    "is_instance_of": _NUMBER,
    "decimal_type": _NUMBER,
    "decimal_parsing": _NUMBER,
    "decimal_max_digits": "must have at most {max_digits} digits",
    "decimal_max_places": "must have at most {decimal_places} decimals",
    "decimal_whole_digits": "must have at most {whole_digits} digits before the point",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "list_type": _ARRAY,
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}
"""What is wrong, by pydantic's word for it, for a reader who sends JSON. `is_instance_of` is how a strict Decimal refuses."""

_OUR_OWN: Final = ("value_error", "assertion_error")
_OTHERWISE: Final = "is not what is expected here"


def pointer(*location: int | str) -> str:
    """A JSON pointer in URI fragment form (RFC 6901 section 6), as in RFC 9457's example of `errors`: `#/config/store_id`."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)


def refused(detail: str, *location: int | str) -> ValidationFailed:
    """One field is wrong: `detail` says how, without its value."""
    name = ".".join(str(part) for part in location)
    return ValidationFailed(f"{name}: {detail}" if name else detail, errors=[{"pointer": pointer(*location), "detail": detail}])


def failed(error: ValidationError, *under: int | str) -> ValidationFailed:
    """Every field that `error` names, below `under`."""
    found = [((*under, *part["loc"]), sentence(part)) for part in error.errors(include_input=False, include_url=False)]
    wrong = [{"pointer": pointer(*location), "detail": detail} for location, detail in found]
    return ValidationFailed(summary([(".".join(map(str, location)), detail) for location, detail in found]), errors=wrong)


def check_span(since: datetime | None, until: datetime | None) -> None:
    """Raises `ValidationFailed` for a span of time that ends before it begins: nothing is in it, which nobody can have meant."""
    if since is not None and until is not None and until <= since:
        raise refused("must be after since", "until")


def sentence(part: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a sentence: in words of JSON, without the value that was given."""
    kind = part["type"]
    if kind in _OUR_OWN:
        return str(part["msg"]).partition(", ")[2]
    limits = {name: str(limit).removeprefix("Decimal('").removesuffix("')") for name, limit in part.get("ctx", {}).items()}
    return _SENTENCES.get(kind, _OTHERWISE).format(**limits)


def summary(wrong: Sequence[tuple[str, str]]) -> str:
    """The first thing that is wrong, and how many more there are."""
    name, text = wrong[0]
    more = f" ({len(wrong) - 1} more in `errors`)" if len(wrong) > 1 else ""
    return (f"{name}: {text}" if name else text) + more
