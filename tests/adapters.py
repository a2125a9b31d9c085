"""Providers of other shapes than SSLCOMMERZ's, for the public cases that it cannot show. They exist in tests only.

| case | provider | what SSLCOMMERZ lacks |
| --- | --- | --- |
| B08 | `echopay` | a second provider that tells of the same order |
| B29, B33 | `echopay` | a notification is confirmed by posting the very bytes back |
| B37 | `signpay` | a JSON body under one signature, with nothing to ask |
| B79, B81, B137 | `echopay` | a notification of a refund, with an id of its own |
| B131 | `echopay` | dates with the name of a time zone |
| B139 | `echopay` | a dispute and its end |

`echopay` is after PayPal's classic IPN: without a signature nothing is proved here, and `VERIFIED` to the bytes that were posted back is
the proof.
`signpay` signs its whole body with HMAC-SHA256, as many do.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ipn_gateway.providers import answers, configs, discovered, forms
from ipn_gateway.providers.base import (
    Ack,
    Ask,
    Assertion,
    Confirmed,
    Declined,
    Effect,
    InboundRequest,
    Malformed,
    NoAnswer,
    NoOutcome,
    Proof,
    Provider,
    ProviderConfig,
    RefundAccepted,
    RefundCancelled,
    RefundPending,
    RefundRequest,
    RefundRequestedBefore,
    RefundSucceeded,
    Refuted,
    SessionOpened,
    SessionRequest,
    Unknown,
    Verdict,
)
from tests import loopback

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from decimal import Decimal

COMMAND: Final = b"cmd=_notify-validate&"
ZONES: Final = {"PDT": timezone(timedelta(hours=-7)), "PST": timezone(timedelta(hours=-8))}
SIGNATURE: Final = "x-signature"


class OnlyNotifies:
    """What these providers are not asked for."""

    refund_key_length_max: ClassVar[int] = 64
    key_retention_hours: ClassVar[float | None] = None

    def order_amount_problem(self, amount: Decimal, currency: str) -> str | None:  # noqa: ARG002
        return None

    async def open_session(self, ask: Ask, config: Any, request: SessionRequest) -> SessionOpened | Declined | NoOutcome:  # noqa: ARG002
        return Declined("not_offered")

    async def refund(
        self,
        ask: Ask,  # noqa: ARG002
        config: Any,  # noqa: ARG002
        request: RefundRequest,  # noqa: ARG002
    ) -> RefundAccepted | RefundRequestedBefore | Declined | NoOutcome:
        return Declined("not_offered")

    async def refund_status(
        self,
        ask: Ask,  # noqa: ARG002
        config: Any,  # noqa: ARG002
        provider_refund_id: str,  # noqa: ARG002
        provider_transaction_id: str,  # noqa: ARG002
    ) -> RefundSucceeded | RefundCancelled | RefundPending | NoOutcome:
        return RefundPending()


class EchoConfig(ProviderConfig, frozen=True):
    """An account by its address; there is no secret."""

    business: configs.CleanText
    base_url: configs.Origin

    @property
    def account(self) -> str:
        return self.business


class EchoPay(OnlyNotifies):
    """A form that is posted back. A payment's `txn_id` is its operation; a refund has its own and names the payment's as its parent."""

    name: ClassVar[str] = "echopay"
    Config: ClassVar[type[ProviderConfig]] = EchoConfig
    EFFECTS: ClassVar[Mapping[str, Effect]] = {
        "Completed": Effect.PAID,
        "Failed": Effect.FAILED,
        "Refunded": Effect.REFUNDED,
        "Pending": Effect.INFORMATIVE,
    }
    order_id_length_max: ClassVar[int] = 64
    masked_fields: ClassVar[Sequence[str]] = ("payer_*",)
    ack: ClassVar[Ack] = Ack(body=b"", media_type="text/plain")

    def assertions(self, request: InboundRequest) -> list[Assertion] | Malformed:
        form = forms.read(request)
        if isinstance(form, Malformed):
            return form
        if isinstance(declared := forms.read(replace(request, headers=_charset_header(form))), Malformed):
            return declared
        fields = declared.texts()
        status = fields.get("payment_status", "")
        amount = answers.plain_decimal(fields.get("mc_gross", "").removeprefix("-"))
        if not fields.get("custom") or not status or amount is None:
            return Malformed("unreadable", "order, status or amount is missing")
        alerts = () if _moment(fields) else ("payment_date_unreadable",)
        effect = self.EFFECTS.get(status, Effect.UNKNOWN)
        operation, currency, sent = fields.get("txn_id"), fields.get("mc_currency"), fields.get("ipn_track_id")
        return [Assertion(fields["custom"], status, effect, operation, amount, currency, sent, None, fields, alerts, request)]

    def authenticate(self, request: InboundRequest, configs: Sequence[ProviderConfig]) -> Proof:  # noqa: ARG002 - there is no secret
        return Proof.REFUSED if isinstance(self.assertions(request), Malformed) else Proof.UNPROVED

    async def validate(self, ask: Ask, config: Any, assertion: Assertion) -> Verdict:
        assert assertion.request is not None
        got = await ask("POST", f"{config.base_url}/webscr", form=COMMAND + assertion.request.body)
        if isinstance(got, NoAnswer):
            return Unknown(got.cause)
        if got.body not in {b"VERIFIED", b"INVALID"}:
            return Unknown("not_verified")
        fields = assertion.fields
        if got.body == b"INVALID":
            return Refuted("refuted")
        if fields.get("business") != config.business:
            return Refuted("store_mismatch", final=True)
        return Confirmed(
            order_id=assertion.order_id,
            operation_id=assertion.operation_id or "",
            effect=assertion.effect,
            status=assertion.status,
            account=config.business,
            amount=assertion.amount,
            currency=assertion.currency,
            provider_transaction_id=fields.get("parent_txn_id") or assertion.operation_id,
            paid_at=_moment(fields),
        )

    async def query(self, ask: Ask, config: Any, order_id: str) -> list[Verdict]:  # noqa: ARG002 - it has no query
        return [Unknown("cannot_be_asked")]


def _charset_header(form: forms.Form) -> tuple[tuple[str, str], ...]:
    """The charset is named in a field of the body."""
    return (("content-type", f"application/x-www-form-urlencoded; charset={form.text('charset')}"),)


def _moment(fields: Mapping[str, str]) -> datetime | None:
    """`16:23:34 May 05, 2026 PDT` in UTC; None for a zone that is not known, whatever the rest says."""
    written, _, zone = fields.get("payment_date", "").rpartition(" ")
    try:
        return datetime.strptime(written, "%H:%M:%S %b %d, %Y").replace(tzinfo=ZONES[zone]).astimezone(UTC)
    except (ValueError, KeyError):
        return None


@dataclass
class EchoHost:
    """The provider's side: it knows the bytes that it sent, answers VERIFIED to exactly these, and INVALID to anything else."""

    server: loopback.Server = field(init=False)
    sent: set[bytes] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Its origin."""
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def posted_back(self) -> list[bytes]:
        """The bodies of the questions that it got."""
        return [request.partition(b"\r\n\r\n")[2] for request in self.server.requests]

    async def answer(self, server: loopback.Server, writer: asyncio.StreamWriter) -> None:
        """VERIFIED or INVALID."""
        asked = self.posted_back[-1]
        said = b"VERIFIED" if asked.startswith(COMMAND) and asked.removeprefix(COMMAND) in self.sent else b"INVALID"
        await loopback.says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))(server, writer)


@asynccontextmanager
async def echo_host() -> AsyncIterator[EchoHost]:
    """The provider's side on a loopback socket."""
    host = EchoHost()
    async with loopback.serving(host.answer) as host.server:
        yield host


class SignConfig(ProviderConfig, frozen=True):
    """A merchant with a shared secret."""

    SECRETS: ClassVar[tuple[str, ...]] = ("secret",)

    merchant: configs.CleanText
    secret: configs.CleanSecret

    @property
    def account(self) -> str:
        return self.merchant


class SignPay(OnlyNotifies):
    """One JSON object in a signed body: the signature covers all of it, so there is nothing to ask."""

    name: ClassVar[str] = "signpay"
    Config: ClassVar[type[ProviderConfig]] = SignConfig
    EFFECTS: ClassVar[Mapping[str, Effect]] = {"captured": Effect.PAID, "pending": Effect.INFORMATIVE}
    order_id_length_max: ClassVar[int] = 64
    masked_fields: ClassVar[Sequence[str]] = ()
    ack: ClassVar[Ack] = Ack()

    def assertions(self, request: InboundRequest) -> list[Assertion] | Malformed:
        try:
            read = json.loads(request.body, parse_float=str)
        except (ValueError, RecursionError):
            return Malformed("unreadable", "this is no JSON")
        fields = {name: text for name, text in read.items() if isinstance(text, str)} if isinstance(read, dict) else {}
        if not {"order", "status", "id", "amount", "currency"} <= fields.keys():
            return Malformed("unreadable", "a member is missing")
        amount, effect = answers.plain_decimal(fields["amount"]), self.EFFECTS.get(fields["status"], Effect.UNKNOWN)
        return [Assertion(fields["order"], fields["status"], effect, fields["id"], amount, fields["currency"], fields=fields)]

    def authenticate(self, request: InboundRequest, configs: Sequence[ProviderConfig]) -> Proof:
        posted = request.header(SIGNATURE) or ""
        secrets = [config.secret.get_secret_value() for config in configs if isinstance(config, SignConfig)]
        matches = [hmac.compare_digest(posted.encode(), signature(request.body, secret).encode()) for secret in secrets]
        return Proof.PROVED if any(matches) else Proof.REFUSED

    async def validate(self, ask: Ask, config: Any, assertion: Assertion) -> Verdict:  # noqa: ARG002 - nothing to ask
        operation = assertion.operation_id or ""
        money = (assertion.amount, assertion.currency)
        return Confirmed(assertion.order_id, operation, assertion.effect, assertion.status, config.merchant, *money, paid_at=None)

    async def query(self, ask: Ask, config: Any, order_id: str) -> list[Verdict]:  # noqa: ARG002 - it has no query
        return [Unknown("cannot_be_asked")]


def signature(body: bytes, secret: str) -> str:
    """What `signpay` puts into its header."""
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


ECHOPAY: Final[Provider] = EchoPay()
SIGNPAY: Final[Provider] = SignPay()
ADAPTERS: Final = (ECHOPAY, SIGNPAY)


@contextmanager
def installed() -> Iterator[None]:
    """Both are found for as long as this lasts, as if their modules were there."""
    found = discovered()
    found.update({adapter.name: adapter for adapter in ADAPTERS})
    try:
        yield
    finally:
        for adapter in ADAPTERS:
            del found[adapter.name]
