"""What a provider adapter is: pure translation between a provider's words and ours.

An adapter touches no database, clock or setting. It reads a request (`assertions`), proves it locally where it can (`authenticate`),
asks the provider through the function it is given (`validate`, `query`), and tells it to move money (`open_session`, `refund`,
`refund_status`). What it finds are values; it raises only for bugs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence  # noqa: TC003 - adapters are read at run time
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003
from decimal import Decimal  # noqa: TC003
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel


class Proof(StrEnum):
    """What the local check of a notification says. Only `REFUSED` is answered 401."""

    PROVED = "proved"
    UNPROVED = "unproved"  # proves nothing either way: the provider decides, from a small budget
    REFUSED = "refused"


class Effect(StrEnum):
    """What a confirmed operation does to an order."""

    PAID = "paid"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUNDED = "refunded"  # money went back, `Confirmed.amount` of it, from the payment that `provider_transaction_id` names
    INFORMATIVE = "informative"  # known, and changes nothing
    UNKNOWN = "unknown"  # a word that the adapter does not know: a person decides


NEGATIVE: frozenset[Effect] = frozenset({Effect.FAILED, Effect.CANCELLED, Effect.EXPIRED})


@dataclass(frozen=True, slots=True)
class InboundRequest:
    """One inbound HTTP request, as received. `headers` keeps order and repeats, with names in lower case.

    The fields of a GET are in `query`, whose characters are the bytes that were sent (latin-1); of a POST they are in `body`.
    """

    method: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = field(repr=False)

    @classmethod
    def stored(cls, via: str, query: str, headers: Iterable[Sequence[str]], body: bytes) -> InboundRequest:
        """The request that was stored. A browser's return without a body carries its fields in the query, which is what GET says."""
        method = "GET" if via.startswith("return/") and not body else "POST"
        return cls(method, query, tuple((name, value) for name, value in headers), body)

    def header(self, name: str) -> str | None:
        """The first value of a header, or None."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class Assertion:
    """What a notification says, before it is believed: for display and for asking, never for effects.

    `operation_id` is the provider's name for the operation where the notification itself carries it (SSLCOMMERZ: `val_id`).
    `amount` and `currency` are those of the order; `fields` are the decoded fields, once each, in the order received. `request` is what
    was read, byte for byte, for a provider that confirms a notification when it is posted back.
    """

    order_id: str
    status: str
    effect: Effect
    operation_id: str | None = None
    amount: Decimal | None = None
    currency: str | None = None
    provider_delivery_id: str | None = None
    copy_id: str | None = None  # the same in every copy of one notification, and in nothing else that the local proof lets through
    fields: Mapping[str, str] = field(default_factory=dict, repr=False)
    alerts: tuple[str, ...] = ()  # well-formed but unusual: kept, alerted on, never read
    request: InboundRequest | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Malformed:
    """The request cannot be read. `reason` is `unreadable` or `media_type`; `detail` says what, without values."""

    reason: Literal["unreadable", "media_type"]
    detail: str
    order_id: str | None = None
    status: str | None = None


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The provider's own view of one operation: the only thing that effects are made from."""

    order_id: str
    operation_id: str
    effect: Effect
    status: str  # their word
    account: str
    amount: Decimal | None  # of the order, in its currency; None where the provider names none (negatives)
    currency: str | None
    provider_transaction_id: str | None = None
    risk: bool = False
    settled_amount: Decimal | None = None
    settled_currency: str | None = None
    net_amount: Decimal | None = None
    paid_at: datetime | None = None  # aware, UTC
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False)  # as received, without credentials


@dataclass(frozen=True, slots=True)
class Refuted:
    """The provider does not know it or says that it is not so. `final` means: asking again cannot change it."""

    reason: Literal["refuted", "store_mismatch", "mode_mismatch", "order_mismatch"]
    final: bool = False
    order_id: str | None = None  # that the answer names, when it names another than was asserted
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A negative that the provider does not confirm yet (still open, or only other attempts are listed): ask again for an hour."""

    answer: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Unknown:
    """No verdict: no answer, or none that is clear. Never a failure: asked again on the validation schedule."""

    cause: str  # a short code, such as `timeout`, `status_500`, `not_json`, `api_connect_FAILED`
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False)


Verdict = Confirmed | Refuted | Unconfirmed | Unknown


# --- money that we tell a provider to move: what is asked, and what became of it


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A customer's visit to the provider's payment page.

    `customer` has name, email, phone, address, city, postcode and country; `product` has name, category and profile, the last in the
    provider's words. The customer's browser is sent to one of the first three URLs, the notification is posted to the fourth.
    """

    order_id: str
    amount: Decimal
    currency: str
    customer: Mapping[str, str] = field(repr=False)
    product: Mapping[str, str]
    success_url: str
    fail_url: str
    cancel_url: str
    notification_url: str


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Where to send the customer: an absolute http(s) URL without credentials. Who has it may pay the order."""

    redirect_url: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Declined:
    """A definite no: the provider says that nothing happened, or was not asked. `code` is short and holds no secret."""

    code: str


@dataclass(frozen=True, slots=True)
class NoOutcome:
    """It may have happened. `sent` is False only when the request provably never left, and then it has not."""

    cause: str  # a short code, such as `timeout`, `status_500`, `not_json`, `api_connect_FAILED`
    sent: bool = True


@dataclass(frozen=True, slots=True)
class RefundRequest:
    """Money to give back, of one payment. `key` is ours: the same for the same intent, at most `Provider.refund_key_length_max` long.

    `amount` and `payment_amount` are in `currency`, the order's; `settled_amount` is the whole payment as the provider settled it, in
    `settled_currency`. Both are None where it named none.
    """

    key: str
    order_id: str
    provider_transaction_id: str
    amount: Decimal
    currency: str
    payment_amount: Decimal
    settled_amount: Decimal | None
    settled_currency: str | None
    remarks: str


@dataclass(frozen=True, slots=True)
class RefundAccepted:
    """The provider will give the money back; `provider_refund_id` is what it is asked about until that is done."""

    provider_refund_id: str


@dataclass(frozen=True, slots=True)
class RefundRequestedBefore:
    """The provider has this request already, finished or in progress, and names no id to ask about."""


@dataclass(frozen=True, slots=True)
class RefundSucceeded:
    """The money went back. Final."""


@dataclass(frozen=True, slots=True)
class RefundCancelled:
    """The money did not go back, and will not. Final. `code` is short and holds no secret."""

    code: str


@dataclass(frozen=True, slots=True)
class RefundPending:
    """Not decided yet: ask again."""


SessionAnswer = SessionOpened | Declined | NoOutcome
RefundAnswer = RefundAccepted | RefundRequestedBefore | Declined | NoOutcome
RefundStatus = RefundSucceeded | RefundCancelled | RefundPending | NoOutcome


# --- how a provider is asked


@dataclass(frozen=True, slots=True)
class Answer:
    """What a provider answered: status, lower-case Content-Type without parameters, and at most 1 MiB of body."""

    status: int
    media_type: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """No whole answer came. `sent` is False only when the request provably never left."""

    cause: str
    sent: bool = True


class Ask(Protocol):
    """The way to the provider: one request, one total deadline; credentials in what is sent are never logged."""

    async def __call__(
        self,
        method: Literal["GET", "POST"],
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        form: Mapping[str, str] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer | NoAnswer:
        """Send it and give what came back. A form that is bytes is sent as it is, with the Content-Type of `headers` where that has one."""
        ...


class ProviderConfig(BaseModel, ABC, frozen=True, hide_input_in_errors=True):
    """A source's configuration. A subclass marks its secrets in `SECRETS`; they are write-only and encrypted at rest."""

    SECRETS: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def account(self) -> str:
        """The merchant's name at the provider, never a secret: what `Confirmed.account` says for this source."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The exact answer that a provider demands; None as body means ours (a small JSON object)."""

    status: int = 200
    body: bytes | None = None
    media_type: str = "application/json"


class Provider(Protocol):
    """One payment company. A module of this package ends in `PROVIDER = …()` and is found by that."""

    name: ClassVar[str]
    Config: ClassVar[type[ProviderConfig]]
    EFFECTS: ClassVar[Mapping[str, Effect]]
    order_id_length_max: ClassVar[int]
    refund_key_length_max: ClassVar[int]  # of our key for a refund
    key_retention_hours: ClassVar[float | None]  # how long the provider knows such a key; None where it publishes nothing
    masked_fields: ClassVar[Sequence[str]]  # names, or prefixes ending in `*`, that views never show in full
    ack: ClassVar[Ack]

    def assertions(self, request: InboundRequest) -> list[Assertion] | Malformed:
        """What the notification says, or why it cannot be read. Local and pure."""
        ...

    def authenticate(self, request: InboundRequest, configs: Sequence[ProviderConfig]) -> Proof:
        """The local check, in constant time, against the current configuration and those whose secrets still authenticate."""
        ...

    async def validate(self, ask: Ask, config: Any, assertion: Assertion) -> Verdict:
        """Ask the provider whether the assertion is true."""
        ...

    async def query(self, ask: Ask, config: Any, order_id: str) -> list[Verdict]:
        """Everything that the provider knows about an order: one verdict an attempt, paid ones first; Unknown when it gave none."""
        ...

    def order_amount_problem(self, amount: Decimal, currency: str) -> str | None:
        """A sentence when the provider takes no payment of this amount; None when it does, or when only it can tell."""
        ...

    async def open_session(self, ask: Ask, config: Any, request: SessionRequest) -> SessionAnswer:
        """Open a payment page. Moves no money, so that it may be repeated."""
        ...

    async def refund(self, ask: Ask, config: Any, request: RefundRequest) -> RefundAnswer:
        """Give money back, asked for once. What is not a clear answer about this very request is `NoOutcome`, never `Declined`.

        What a status code means is the provider's own: 409 may say in progress, already done, or something else altogether.
        """
        ...

    async def refund_status(self, ask: Ask, config: Any, provider_refund_id: str, provider_transaction_id: str) -> RefundStatus:
        """How far an accepted refund is. Changes nothing."""
        ...
