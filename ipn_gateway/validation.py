"""Turning what pydantic found into one `ValidationFailed`: a pointer and a sentence for each field, never the value itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipn_gateway.errors import ValidationFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import ValidationError

_SENTENCES = {"missing": "is required"}


def pointer(*location: int | str) -> str:
    """A JSON pointer in URI fragment form (RFC 6901 section 6), as in RFC 9457's example of `errors`: `#/config/store_id`."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)


def refused(detail: str, *location: int | str) -> ValidationFailed:
    """One field is wrong: `detail` says how, without its value."""
    name = ".".join(str(part) for part in location)
    return ValidationFailed(f"{name}: {detail}" if name else detail, errors=[{"pointer": pointer(*location), "detail": detail}])


def failed(error: ValidationError, *under: int | str) -> ValidationFailed:
    """Every field that `error` names, below `under`."""
    found = error.errors(include_input=False, include_context=False, include_url=False)
    wrong = [{"pointer": pointer(*under, *part["loc"]), "detail": sentence(part["type"], part["msg"])} for part in found]
    return ValidationFailed(
        summary([(".".join(map(str, (*under, *part["loc"]))), sentence(part["type"], part["msg"])) for part in found]), errors=wrong
    )


def sentence(kind: str, message: str) -> str:
    """Pydantic's message in our form."""
    return _SENTENCES.get(kind) or message.removeprefix("Value error, ")


def summary(wrong: Sequence[tuple[str, str]]) -> str:
    """The first thing that is wrong, and how many more there are."""
    name, text = wrong[0]
    more = f" ({len(wrong) - 1} more in `errors`)" if len(wrong) > 1 else ""
    return (f"{name}: {text}" if name else text) + more
