"""What a keyed operation declares, and the words of its phases. Pure.

An operation is a table of named phases. Each phase may make one foreign call, outside of any transaction, and then commits its local
writes together with the advance to the next recovery point. The declaration is what the code runs on and what is published.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.errors import ConfigurationError, GatewayError, IdempotencyKeyInvalid, IdempotencyKeyMissing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from uuid import UUID

    from pydantic import BaseModel

    from ipn_gateway.db import Transaction
    from ipn_gateway.fingerprints import Kind

KEY_HEADER: Final = "Idempotency-Key"
REPLAYED_HEADER: Final = "Idempotent-Replayed"
KEY_LENGTH_MAX: Final = 255
KEY_PATTERN: Final = r"[!#-+\--\[\]-~]{1,255}"
"""Printable ASCII without space, quote, comma and backslash."""

STARTED: Final = "started"
DOWNSTREAM_KEY_LENGTH_MIN: Final = 26
RETENTION_HOURS_MIN: Final = 24
MONEY_RETENTION_HOURS_MIN: Final = 168

NEVER_STORED: Final = frozenset({401, 403, 408, 429, 502, 503, 504})
"""These say nothing about the operation: the same key may still succeed."""

KEPT_HEADERS: Final = ("Location", "ETag")
"""Beside Content-Type; an operation may declare more. All others are made anew for a repeat."""

_KEY = re.compile(KEY_PATTERN)
_NAME = re.compile(r"(?:POST|PUT|PATCH) /\S*")


def parse_key(values: Sequence[str], *, required: bool) -> str | None:
    """The key of a request from the raw values of its header; one pair of surrounding quotes is removed (the draft's form).

    Raises `IdempotencyKeyMissing`, and `IdempotencyKeyInvalid` for several headers or any other character or length.
    """
    if not values:
        if required:
            raise IdempotencyKeyMissing
        return None
    value = values[0]
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = value[1:-1]
    if len(values) > 1 or not _KEY.fullmatch(value):
        raise IdempotencyKeyInvalid
    return value


class Downstream(StrEnum):
    """What happens beyond our database when an operation is executed again."""

    LOCAL = "local"  # one transaction of ours, and nothing else
    IDEMPOTENT = "idempotent"  # the other side takes our key, or a second call changes nothing that matters
    NONE = "none"  # a second call is a second effect


@dataclass(frozen=True, slots=True)
class Work:
    """What a phase is given. `progress` is what earlier phases handed on; `key_id` is None for a request without a key."""

    tenant_id: str
    operation: str
    key: str = field(repr=False)
    key_id: UUID | None = None
    generation: int = 0
    progress: Mapping[str, Any] = field(default_factory=dict)

    def downstream_key(self, step: str, length_max: int) -> str:
        """Our key for a foreign call: the same for the same intent, whatever is lost here, until a definite failure was recorded.

        Lower-case base32, at most `length_max` characters. Raises `ConfigurationError` where that is too short to be unique.
        """
        if length_max < DOWNSTREAM_KEY_LENGTH_MIN:
            raise ConfigurationError(f"A downstream key needs {DOWNSTREAM_KEY_LENGTH_MIN} characters; this provider takes {length_max}.")
        digest = hashlib.sha256()
        for part in (self.tenant_id, self.operation, self.key, step, str(self.generation)):
            data = part.encode()
            digest.update(len(data).to_bytes(4, "big") + data)
        return base64.b32encode(digest.digest()).decode().lower().rstrip("=")[:length_max]


@dataclass(frozen=True, slots=True)
class Advance:
    """Go on at `point`; `progress` is added to what is handed on."""

    point: str
    progress: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer, stored in the transaction that made it true. Of `headers` those are kept that the operation declares."""

    status: int
    body: bytes = field(default=b"", repr=False)
    headers: tuple[tuple[str, str], ...] = ()
    media_type: str = "application/json"

    @classmethod
    def shown(cls, model: BaseModel, status: int = 200, **headers: str) -> Finished:
        """An object as JSON; `headers` by name, with `_` for `-`."""
        return cls(status, model.model_dump_json().encode(), tuple((name.replace("_", "-"), value) for name, value in headers.items()))


@dataclass(frozen=True, slots=True)
class Retry:
    """Nothing came of it: back to `point`, the key is free at once for the same request, and `error` is answered and not stored."""

    point: str
    error: GatewayError


@dataclass(frozen=True, slots=True)
class Doubt:
    """Whether it happened is not known, and nobody asks again: the key waits for a person, as if its owner had died behind the intent.

    For operations of class `none` only. What `Settlement.indeterminate` writes is part of the same transaction.
    """


Step = Advance | Finished | Retry | Doubt


@dataclass(frozen=True, slots=True)
class Phase:
    """One named transaction, and the foreign call that may precede it.

    `commit` gets the transaction, the work and what `call` gave. A `GatewayError` that it raises undoes the phase and is the answer.
    """

    transaction: str
    commit: Callable[[Transaction, Work, Any], Awaitable[Step]]
    call: Callable[[Work], Awaitable[Any]] | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """What an operation of class `none` writes when its outcome is not known, and when a person has found it out.

    Each is part of the transaction that changes the key. `applied` gets the person's evidence and gives the answer to store. `is_open` says
    of a completed one whether what it accepted is still not known, so that a person may decide.
    """

    indeterminate: Callable[[Transaction, Work], Awaitable[None]]
    applied: Callable[[Transaction, Work, Mapping[str, Any]], Awaitable[Finished]]
    not_applied: Callable[[Transaction, Work], Awaitable[None]]
    is_open: Callable[[Transaction, Work], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of an API: its name is method and route template, with the API's version in it.

    `fields` are the members of the body that make the fingerprint, with how each is compared; path and query always belong to it. When
    they change, `version` goes up and `earlier` keeps the old ones, so that rows of before still find their repeats. `intents` are the
    recovery points behind which a foreign call may have happened. `secrets` are members of the answer that are shown once and not kept.
    `horizon_seconds` is how long the other side remembers our key. Raises `ConfigurationError` for a declaration that cannot be kept.
    """

    name: str
    fields: Mapping[str, Kind]
    downstream: Downstream
    key_required: bool = False
    money: bool = False
    phases: tuple[str, ...] = (STARTED,)
    intents: frozenset[str] = frozenset()
    version: int = 1
    earlier: Mapping[int, Mapping[str, Kind]] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    horizon_seconds: float | None = None
    settlement: Settlement | None = None

    def __post_init__(self) -> None:
        """Refuse what would break a promise later."""
        wrong = (
            (not _NAME.fullmatch(self.name), "its name must be a method and a route template"),
            (not self.phases or self.phases[0] != STARTED, f"its first phase must be {STARTED}"),
            (not self.intents <= set(self.phases), "its intents must be phases"),
            (self.downstream is Downstream.LOCAL and bool(self.intents), "an operation of class local calls nobody"),
            (self.downstream is Downstream.NONE and not self.intents, "an operation of class none needs an intent before its call"),
            (self.downstream is Downstream.NONE and not self.key_required, "an operation of class none needs a key"),
            (len(self.phases) > 1 and not self.key_required, "an operation of several phases needs a key"),
            (self.version in self.earlier, "its earlier projections must not have the number of the present one"),
        )
        for is_wrong, sentence in wrong:
            if is_wrong:
                raise ConfigurationError(f"The operation {self.name!r} is declared wrongly: {sentence}.")

    def projection(self, version: int) -> Mapping[str, Kind] | None:
        """The fields of a version; None for one that this code does not know."""
        return self.fields if version == self.version else self.earlier.get(version)

    def retention_hours(self, wanted: float) -> float:
        """How long a stored answer is kept. Raises `ConfigurationError` where `wanted` is less than may be promised."""
        least = MONEY_RETENTION_HOURS_MIN if self.money else RETENTION_HOURS_MIN
        if wanted < least:
            raise ConfigurationError(f"The answers of {self.name} must be kept for at least {least} hours.")
        return wanted


def is_stored(status: int) -> bool:
    """Whether an error of this status is an answer that a repeat gets too: a deliberate 4xx, or a 500 that a phase returned."""
    return status not in NEVER_STORED
