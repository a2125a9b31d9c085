"""Types for providers' configurations: text and secrets without control characters, and the origin of a provider's API."""

import re
from ipaddress import ip_address
from typing import Annotated, Final
from unicodedata import category

from pydantic import AfterValidator, Field, SecretStr

_ORIGIN: Final = re.compile(r"(https?)://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?/?")
_PORT_MAX: Final = 65535


def _clean(text: str) -> str:
    """Refuse blank text and control characters: a secret that was cut or wrapped on its way here would refuse every notification."""
    if not text.strip():
        raise ValueError("must not be blank")
    if any(category(character) in {"Cc", "Cs"} for character in text):
        raise ValueError("must not contain a newline or another control character")
    return text


def _clean_secret(secret: SecretStr) -> SecretStr:
    _clean(secret.get_secret_value())
    return secret


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _origin(url: str) -> str:
    match = _ORIGIN.fullmatch(url)
    if match is None or not 1 <= int(match[3] or 443) <= _PORT_MAX:
        raise ValueError("must be scheme://host[:port], with http or https and nothing after it")
    if match[1] == "http" and not _is_loopback(match[2]):
        raise ValueError("must be https; http is for loopback addresses only")
    return url.rstrip("/")


CleanText = Annotated[str, Field(max_length=100), AfterValidator(_clean)]
CleanSecret = Annotated[SecretStr, Field(max_length=255), AfterValidator(_clean_secret)]
Origin = Annotated[str, Field(max_length=255), AfterValidator(_origin)]
"""`scheme://host[:port]`; https, or http on a loopback address."""
