"""JSON bodies: strict JSON in, a checked model out. Unknown members are ignored; a repeated one is refused, since readers differ on it."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from ipn_gateway import validation
from ipn_gateway.errors import UnknownParameter, UnsupportedMediaType
from ipn_gateway.web.deps import read_body

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastapi import Request

DEPTH_MAX: Final = 32

Model = TypeVar("Model", bound=BaseModel)


async def read(request: Request, model: type[Model], *, optional: bool = False) -> Model:
    """The body as `model`; with `optional`, no body at all is `{}`. Its members as they came are left in `request.state.members`.

    Raises `PayloadTooLarge`, `RequestTimeout`, `UnsupportedMediaType` for anything but JSON, `UnknownParameter` for a repeated member,
    and `ValidationFailed`.
    """
    data = await read_body(request)
    if not data and optional:
        return _checked(request, model, {})
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in {"", "utf-8"} or request.headers.get("content-encoding"):
        raise UnsupportedMediaType("Send JSON, with `Content-Type: application/json` and without a Content-Encoding.")
    return _checked(request, model, parse(data))


def _checked(request: Request, model: type[Model], members: dict[str, Any]) -> Model:
    request.state.members = members
    try:
        return model.model_validate(members)
    except ValidationError as error:
        raise validation.failed(error) from None


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object; numbers with a point are `Decimal`. Raises `UnknownParameter` for a repeated member, else `ValidationFailed`."""
    try:
        found = json.loads(data.decode(), object_pairs_hook=_each_once, parse_float=Decimal, parse_constant=_refuse_constant)
    except (ValueError, ArithmeticError, RecursionError):
        raise validation.refused("The body is not JSON that can be read.") from None
    if not isinstance(found, dict):
        raise validation.refused("The body must be a JSON object.")
    for text, location in _texts(found):
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise validation.refused("must not contain NUL or half a surrogate pair", *location)
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise UnknownParameter("The body has a JSON member twice in one object.")
    return members


def _refuse_constant(_: str) -> None:
    raise ValueError("NaN and infinities are no JSON")


def _texts(found: dict[str, Any]) -> Iterator[tuple[str, Sequence[str | int]]]:
    """Every text in it, names of members too, and where it stands. Not recursive, and so safe at any depth."""
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(found, ())]
    while waiting:
        value, location = waiting.pop()
        if len(location) > DEPTH_MAX:
            raise validation.refused(f"The body is nested deeper than {DEPTH_MAX} levels.")
        if isinstance(value, str):
            yield value, location
        elif isinstance(value, list):
            waiting += [(item, (*location, place)) for place, item in enumerate(value)]
        elif isinstance(value, dict):
            for name in value:
                yield name, location
            waiting += [(item, (*location, name)) for name, item in value.items()]
