"""What callers send: the members of each body, their limits, and how OpenAPI describes them."""

import json
import re
from decimal import Decimal
from typing import Annotated, Any, Final, Literal
from unicodedata import category
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ipn_gateway import events, money, resolutions, sources, validation
from ipn_gateway.endpoints import MAX_IN_FLIGHT_DEFAULT, OVERLAP_SECONDS_DEFAULT, OVERLAP_SECONDS_MAX
from ipn_gateway.operations import is_stored
from ipn_gateway.states import DeliveryOutcome
from ipn_gateway.web.deps import Moment

METADATA_BYTES_MAX: Final = 16 * 1024
EVENT_DATA_BYTES_MAX: Final = 32 * 1024
INTEGER_MAX: Final = 2**63
REASON_LENGTH_MAX: Final = 500
RETURN_URL: Final = re.compile(r"https?://[!-~]+", re.IGNORECASE)


def _currency(code: str) -> str:
    money.exponent(code)
    return code


def _return_url(url: str) -> str:
    try:
        parts = urlsplit(url) if RETURN_URL.fullmatch(url) else None
        usable = parts is not None and bool(parts.hostname) and parts.username is None and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("must be an absolute http or https URL, percent-encoded where needed")
    return url


def _metadata(given: dict[str, Any]) -> dict[str, Any]:
    return _limited(given, METADATA_BYTES_MAX)


def _event_data(given: dict[str, Any]) -> dict[str, Any]:
    return _limited(given, EVENT_DATA_BYTES_MAX)


def _limited(given: dict[str, Any], bytes_max: int) -> dict[str, Any]:
    plain = _plain(given)
    if len(json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()) > bytes_max:
        raise ValueError(f"must be at most {bytes_max // 1024} KiB of JSON")
    assert isinstance(plain, dict)  # noqa: S101 - what is given is an object
    return plain


def _plain(value: Any) -> Any:
    """The same JSON with numbers that every reader can hold: a double that is just this number, or an integer of 64 bits."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):
        return _double(value)
    if isinstance(value, int) and not -INTEGER_MAX <= value < INTEGER_MAX:
        raise ValueError("holds a number that is too large")
    return value


def _double(number: Decimal) -> float:
    """A number that would come out as another one is refused: what is kept, signed and sent is what was given."""
    double = float(number)
    if double in {float("inf"), float("-inf")}:
        raise ValueError("holds a number that is too large")
    if Decimal(repr(double)) != number:
        raise ValueError("holds a number with more digits than a double keeps, which readers would change: send it as a string")
    return double


def _event_filter(wanted: str) -> str:
    if not events.is_filter(wanted):
        raise ValueError("must be an event type, a family such as order.*, or *")
    return wanted


def _custom_type(name: str) -> str:
    if name.partition(".")[0] in events.FAMILIES:
        raise ValueError(
            f"must not begin with {', '.join(f'{family}.' for family in sorted(events.FAMILIES))}, which are the gateway's own"
        )
    if len(name) > events.TYPE_LENGTH_MAX:
        raise ValueError(f"must have at most {events.TYPE_LENGTH_MAX} characters")
    if not events.is_custom(name):
        raise ValueError("must be words of a-z, 0-9 and _ that are joined by dots, such as invoice.sent")
    return name


def _decimal(value: Any) -> Any:
    return Decimal(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _seconds(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value


def _not_blank(text: str) -> str:
    if not text.strip() or any(category(character) in {"Cc", "Cs"} for character in text):
        raise ValueError("must not be blank or contain a control character")
    return text


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("must say why")
    return text


Reason = Annotated[str, Field(max_length=REASON_LENGTH_MAX, description="why; kept in the audit log"), AfterValidator(_said)]
EventFilter = Annotated[str, AfterValidator(_event_filter)]
Rate = Annotated[
    Decimal,
    BeforeValidator(_decimal),
    Field(ge=Decimal("0.001"), le=10_000, max_digits=8, decimal_places=3),
    WithJsonSchema({"type": "number", "minimum": 0.001, "maximum": 10_000, "multipleOf": 0.001}),
]


CONFLICT: Final[dict[int | str, dict[str, Any]]] = {409: {"description": "The state does not allow this"}}
"""What a route that may refuse by state declares."""


def _inlined(schema: Any, models: dict[str, Any]) -> Any:
    """A JSON schema with the models that it refers to in their places: in an OpenAPI document `#/$defs/` leads nowhere."""
    if isinstance(schema, list):
        return [_inlined(item, models) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = models.get(str(schema.get("$ref", "")).removeprefix("#/$defs/"))
    if named is not None:
        return _inlined(named | {name: value for name, value in schema.items() if name != "$ref"}, models)
    return {name: _inlined(value, models) for name, value in schema.items()}


class Body(BaseModel):
    """What all of them share: no conversions, and no value in any message."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)

    @classmethod
    def documented(cls, *, required: bool = True) -> dict[str, Any]:
        """The body as OpenAPI has it, since we read it and not FastAPI."""
        schema = cls.model_json_schema()
        inlined = _inlined(schema, schema.pop("$defs", {}))
        return {"requestBody": {"required": required, "content": {"application/json": {"schema": inlined}}}}


def _unfilled(schema: dict[str, Any]) -> None:
    """Of a change: what is left out stays, so no member has a default, and none is required."""
    schema.pop("required", None)
    for member in schema["properties"].values():
        member.pop("default", None)


class NewSource(Body):
    """A merchant account at a provider."""

    name: str = Field(
        description="the slug in the listener URL; never free again", json_schema_extra={"pattern": f"^{sources.NAME.pattern}$"}
    )
    provider: str = Field(examples=["sslcommerz"])
    config: dict[str, Any] = Field(description="what the provider's adapter needs; secrets are write-only")


class SourceChange(Body):
    """What changes in a source's configuration; null takes an optional value away."""

    model_config = ConfigDict(json_schema_extra=_unfilled)

    config: dict[str, Any] = Field(default_factory=dict, description="the members that change; those that are left out stay")


class NewOrder(Body):
    """An order that is to be paid."""

    order_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="the provider's transaction id, unchanged; unique per tenant")
    amount: str = Field(description="decimal string, greater than 0, no finer than the currency", examples=["100.00"])
    currency: Annotated[str, AfterValidator(_currency)] = Field(description="ISO 4217 code", examples=["BDT"])
    source: str = Field(max_length=63, description="the name of one of your sources")
    return_url: Annotated[str, Field(max_length=2000), AfterValidator(_return_url)] | None = None
    expires_at: Moment | None = None
    metadata: Annotated[dict[str, Any], AfterValidator(_metadata)] = Field(default_factory=dict, description="at most 16 KiB of JSON")

    def money(self) -> Decimal:
        """The amount. Raises `ValidationFailed`."""
        try:
            return money.parse(self.amount, self.currency)
        except ValueError as error:
            raise validation.refused(str(error), "amount") from None


class NewEndpoint(Body):
    """A subscription of a URL to events."""

    url: str = Field(description="https; what it leads to is vetted at each send")
    events: Annotated[list[EventFilter], Field(min_length=1, max_length=50)] = Field(
        default_factory=lambda: ["*"], description="event types, of the gateway or your own; families such as `order.*`; or `*`"
    )
    description: str = Field(default="", max_length=500)
    max_in_flight: int = Field(default=MAX_IN_FLIGHT_DEFAULT, ge=1, le=100)
    rate_per_second: Rate | None = None
    ordered: bool = False


class EndpointChange(NewEndpoint):
    """What changes in an endpoint; members that are left out stay."""

    model_config = ConfigDict(json_schema_extra=_unfilled)

    url: str = Field(default="", description="https; what it leads to is vetted at each send")

    def changes(self) -> dict[str, Any]:
        """The members that were given."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class Rotation(Body):
    """How long the old secrets sign beside the new one."""

    overlap_seconds: Annotated[float, BeforeValidator(_seconds)] = Field(default=OVERLAP_SECONDS_DEFAULT, ge=0, le=OVERLAP_SECONDS_MAX)


class Act(Body):
    """A manual act."""

    reason: str | None = Field(default=None, max_length=REASON_LENGTH_MAX)


class ReasonedAct(Body):
    """A manual act that moves money or an order: it needs its reason."""

    reason: Reason


class Evidence(Body):
    """What a person saw at the provider, where the provider confirmed no payment to us."""

    amount: str = Field(description="decimal string, greater than 0, no finer than the currency", examples=["100.00"])
    currency: Annotated[str, AfterValidator(_currency)] = Field(description="ISO 4217 code", examples=["BDT"])
    provider_transaction_id: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_not_blank)] = Field(
        description="the provider's own id of the payment"
    )


class Resolution(ReasonedAct):
    """What is to become of a delivery that waits for a person."""

    decision: Literal["apply", "dismiss"]
    evidence: Evidence | None = Field(default=None, description="needed to apply what the provider did not confirm, and only then")

    def proof(self) -> resolutions.Evidence | None:
        """The evidence. Raises `ValidationFailed`."""
        if self.evidence is None:
            return None
        try:
            amount = money.parse(self.evidence.amount, self.evidence.currency)
        except ValueError as error:
            raise validation.refused(str(error), "evidence", "amount") from None
        return resolutions.Evidence(amount, self.evidence.currency, self.evidence.provider_transaction_id)


class Replay(ReasonedAct):
    """Which deliveries are run again. `reason` is why."""

    source: str = Field(max_length=63, description="the name of one of your sources")
    outcome: Annotated[DeliveryOutcome, Field(strict=False)] = Field(description="what they ended as")
    since: Moment | None = Field(default=None, description="received from then on")
    until: Moment | None = Field(default=None, description="received before then")
    dry_run: bool = Field(default=False, description="count, and change nothing")
    cursor: str | None = Field(default=None, description="`next_cursor` of the answer before; the other members stay as they were")


class Recovery(ReasonedAct):
    """Which events an endpoint is to get after all."""

    since: Moment = Field(description="of events that were written from then on")
    until: Moment | None = Field(default=None, description="and before then")
    dry_run: bool = Field(default=False, description="count, and change nothing")
    cursor: str | None = Field(default=None, description="`next_cursor` of the answer before; the other members stay as they were")


class NewEvent(Body):
    """An event of a type of your own."""

    type: Annotated[str, AfterValidator(_custom_type)] = Field(
        examples=["invoice.sent"],
        description="in a namespace of your own: `order.`, `notification.` and `endpoint.` are the gateway's",
        json_schema_extra={"pattern": f"^{events.TYPE_PATTERN}$", "maxLength": events.TYPE_LENGTH_MAX},
    )
    data: Annotated[dict[str, Any], AfterValidator(_event_data)] = Field(description="any object, at most 32 KiB of JSON")
    order_id: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$", description="the order that it is about, to find it by; it is not sent"
    )


def _storable(status: int) -> int:
    if not is_stored(status):
        raise ValueError("is a status that is never stored")
    return status


class KeyedResponse(Body):
    """The answer that repeats of a key get."""

    status: Annotated[int, Field(ge=200, le=499), AfterValidator(_storable)]
    body: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(default_factory=dict)


class KeyResolution(ReasonedAct):
    """What a person found out about a keyed request whose outcome is not known."""

    decision: Literal["applied", "not_applied"]
    evidence: dict[str, Annotated[str, Field(max_length=255), AfterValidator(_not_blank)]] = Field(
        default_factory=dict, max_length=20, description="what shows it; of a refund: its `provider_refund_id`"
    )
    response: KeyedResponse | None = Field(default=None, description="of an operation that cannot make its answer from the evidence")

    def answer(self) -> tuple[int, Any] | None:
        """Status and body, if they were given."""
        return None if self.response is None else (self.response.status, self.response.body)


# --- checkout

_EMAIL: Final = re.compile(r"[^\s@]{1,64}@[^\s@.]+(?:\.[^\s@.]+)+")


def _email(text: str) -> str:
    if not _EMAIL.fullmatch(text):
        raise ValueError("must be an e-mail address")
    return _not_blank(text)


Line = Annotated[str, Field(max_length=255), AfterValidator(_not_blank)]
Word = Annotated[str, Field(max_length=50), AfterValidator(_not_blank)]


class Customer(Body):
    """Who pays, as the provider wants to know it. It goes there and is not kept here."""

    name: Line
    email: Annotated[str, Field(max_length=254), AfterValidator(_email)]
    phone: Word
    address: Line
    city: Line
    postcode: Word
    country: Line = Field(examples=["Bangladesh"])


class Product(Body):
    """What is paid for."""

    name: Line
    category: Line
    profile: Word = Field(description="in the provider's words", examples=["physical-goods"])


class NewCheckout(Body):
    """A customer who is to be sent to the provider's payment page."""

    customer: Customer
    product: Product


# --- refunds


class NewRefund(Body):
    """Money to give back, of one payment."""

    reference: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="your name for it; refunds once in an order, for ever")
    amount: str = Field(description="decimal string, greater than 0, no finer than the payment's currency", examples=["25.00"])
    reason: Annotated[str, Field(max_length=REASON_LENGTH_MAX, description="why; the provider is told"), AfterValidator(_said)]
    payment_id: str | None = Field(default=None, description="which payment; needed for an unapplied one")

    def money(self, currency: str) -> Decimal:
        """The amount in this currency. Raises `ValidationFailed`."""
        try:
            return money.parse(self.amount, currency)
        except ValueError as error:
            raise validation.refused(str(error), "amount") from None
