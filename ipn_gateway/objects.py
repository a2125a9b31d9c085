"""The objects that customers see: names and types of their members. What is read into them is in `views`."""

from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema

from ipn_gateway.states import DeliveryOutcome, EventDeliveryStatus, OrderStatus, Trigger

T = TypeVar("T")


def show_time(moment: datetime) -> str:
    """RFC 3339 in UTC, with microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Time = Annotated[datetime, PlainSerializer(show_time), WithJsonSchema({"type": "string", "format": "date-time"})]
Amount = Annotated[str, Field(description="decimal string with the currency's decimals", examples=["100.00"])]
Currency = Annotated[str, Field(description="ISO 4217 code", examples=["BDT"])]


class Shape(BaseModel):
    """What all of them share."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)


class Page(Shape, Generic[T]):
    """One page of a list, newest first (a timeline: oldest first); `next_cursor` is null on the last one."""

    items: list[T]
    next_cursor: str | None


class Source(Shape):
    """A merchant account at a provider. `config` is shown without its secrets."""

    name: str
    provider: str
    mode: str | None
    config: dict[str, Any]
    listener_url: str = Field(description="what the provider is told as IPN URL")
    created_at: Time
    disabled_at: Time | None


class Payment(Shape):
    """A movement of money towards the merchant. `unapplied` is a second payment of a paid order: it waits for a person."""

    payment_id: str
    amount: Amount
    currency: Currency
    settled_amount: Amount | None
    settled_currency: Currency | None
    net_amount: Amount | None
    amount_refunded: Amount
    provider_transaction_id: str
    operation_id: str
    source: str
    status: Literal["applied", "unapplied"]
    paid_at: Time | None
    recorded_at: Time


class Refund(Shape):
    """A movement of money back."""

    refund_id: str
    reference: str
    payment_id: str
    order_id: str
    amount: Amount
    currency: Currency
    status: Literal["pending", "processing", "succeeded", "failed", "indeterminate"]
    provider_refund_id: str | None
    reason: str | None = Field(description="the merchant's, for giving the money back")
    failure: str | None = Field(description="why no money went back: the provider's reason as a short code, or `not_applied`")
    created_at: Time
    updated_at: Time


class AcceptedRefund(Shape):
    """A refund that the provider has accepted. This never changes; how far the refund is, is in its order."""

    refund_id: str
    reference: str
    order_id: str
    payment_id: str
    amount: Amount
    currency: Currency


class Order(Shape):
    """What is owed, and what was paid for it."""

    order_id: str
    source: str
    status: OrderStatus
    reason: str | None
    amount: Amount
    currency: Currency
    amount_paid: Amount
    amount_refunded: Amount
    return_url: str | None
    expires_at: Time | None
    metadata: dict[str, Any]
    payments: list[Payment]
    refunds: list[Refund]
    created_at: Time
    updated_at: Time


class IdempotencyKey(Shape):
    """One client intent: what became of it, without executing anything. The stored answer itself is given to a repeat only."""

    id: str
    operation: str
    key: str
    state: Literal["in_progress", "completed", "indeterminate"]
    recovery_point: str = Field(description="where it stands, or stood last")
    reconciliation_id: str | None = Field(description="of an unknown outcome: the id to resolve it by")
    take_overs: int = Field(ge=0, description="how often another worker took it over from one that died")
    response_status: int | None
    lease_expires_at: Time | None
    indeterminate_at: Time | None
    created_at: Time
    expires_at: Time = Field(description="until then at least a completed one is kept")


class NotificationDelivery(Shape):
    """One inbound HTTP request, and what became of it. `order_id` and the other assertions are what it said, true or not."""

    id: str
    provider_delivery_id: str | None
    source: str
    provider: str
    via: str = Field(description="the route that it came by: ipn, or return/success, return/fail, return/cancel")
    received_at: Time
    order_id: str | None
    operation_id: str | None
    effect: str | None
    asserted_status: str | None
    proof: str = Field(description="what the local check said: proved, unproved, refused, or none")
    outcome: DeliveryOutcome
    reason: str | None
    alerts: list[Any]
    decided_at: Time | None
    attempts: int = Field(description="questions to the provider")
    next_attempt_at: Time | None
    remote_address: str | None
    sha256: str = Field(description="of the raw body, in hexadecimal")
    headers: list[Any] = Field(description="[name, value] pairs in the order received, credentials left out")
    fields: dict[str, str] | None = Field(description="the body's fields, personal ones masked; null where it has none that can be read")
    raw_body_base64: str | None = Field(description="null without the scope audit:raw")
    provider_answer: dict[str, Any] | None
    resolution: Literal["apply", "dismiss"] | None = Field(description="what a person decided about one that waited; null while nobody did")


class Replay(Shape):
    """What a replay of many came to. A dry run counts and changes nothing."""

    source: str
    outcome: DeliveryOutcome
    since: Time | None
    until: Time | None
    dry_run: bool
    count: int = Field(description="deliveries that are run again; of a dry run: that would be")
    refused: int = Field(description="deliveries that are refused again, and stay as they are")
    settled: int = Field(description="deliveries that had their effect, and stay as they are")
    next_cursor: str | None = Field(description="null unless there may be more than the 2,000 that one call looks at: repeat it with this")


class EndpointSecret(Shape):
    """A signing secret that is active, with its key pair. The secret itself is shown only once, when it is made."""

    id: str
    public_key: str | None = Field(
        examples=["whpk_…"], description="verifies the signatures v1a; null where the secret was made before there were any"
    )
    created_at: Time
    expires_at: Time | None


class Endpoint(Shape):
    """A subscriber's URL."""

    id: str
    url: str
    events: list[str]
    description: str
    status: Literal["enabled", "disabled"]
    disabled_reason: str | None
    max_in_flight: int
    rate_per_second: float | None
    ordered: bool
    failing_since: Time | None = Field(description="since then every attempt has failed; after 5 days of that it is disabled")
    secrets: list[EndpointSecret]
    created_at: Time


def _without_default(schema: dict[str, Any]) -> None:
    """A member that may be absent has no value then."""
    schema.pop("default", None)


class EndpointWithSecret(Endpoint):
    """The answer to create and rotate: the only time that the secret is shown."""

    secret: str = Field(
        default="",
        examples=["whsec_…"],
        description="shown once: a repeat of the call, after its `Idempotency-Key`, has the same answer without it",
        json_schema_extra=_without_default,
    )
    public_key: str = Field(examples=["whpk_…"], description="of the key pair that was made with it")


class Event(Shape):
    """An outbound fact, as it was frozen. `sequence` counts an order's events from 1 without gaps; other types have none."""

    id: str
    type: str
    timestamp: str = Field(json_schema_extra={"format": "date-time"})
    order_id: str | None
    sequence: int | None
    data: dict[str, Any]


class EventPage(Shape):
    """One page of the log of events, oldest first. `next_cursor` is never null: a follower waits there.

    `lag_seconds` is how old the oldest event is that cannot be shown yet, because a transaction that began before it still writes somewhere
    on the database's server; 0 when there is none.
    """

    items: list[Event]
    next_cursor: str
    lag_seconds: float


class Attempt(Shape):
    """One HTTP try of an event delivery."""

    id: str
    number: int
    trigger: Trigger
    started_at: Time
    duration_ms: int
    address: str | None = Field(description="what the URL's name led to; the URL is the one that the endpoint had at `started_at`")
    status_code: int | None
    outcome: Literal["delivered", "refused", "timeout", "connect_failed", "tls_failed", "disconnected", "protocol_error", "blocked"]
    error: str | None
    response_excerpt: str | None


class Check(Shape):
    """What one step of a test says. `skipped` does not belong to this URL, `not_reached` comes after the one that failed."""

    check: Literal["url", "dns", "connect", "tls", "response"]
    status: Literal["passed", "failed", "skipped", "not_reached"]
    detail: str = Field(description="for people")
    duration_ms: int | None = Field(description="TLS is part of connecting")


class EndpointTest(Shape):
    """What a test of an endpoint came to. It is not tried again: one that fails has a cancelled event delivery."""

    endpoint_id: str
    event_id: str
    event_delivery_id: str
    delivered: bool
    failed_check: Literal["url", "dns", "connect", "tls", "response"] | None
    checks: list[Check]
    attempt: Attempt


class Recovery(Shape):
    """What a recovery came to. A dry run counts and changes nothing."""

    endpoint_id: str
    since: Time
    until: Time | None
    dry_run: bool
    matched: int = Field(description="events that fit the endpoint's filter")
    recovered: int = Field(description="event deliveries that become due; of a dry run: that would")
    dead: int = Field(description="of the recovered: had been given up")
    missing: int = Field(description="of the recovered: there was none for the event")
    skipped: int = Field(description="delivered or pending, and left alone")
    next_cursor: str | None = Field(
        description="null unless there may be more than the 2,000 events that one call looks at: repeat it with this"
    )


class EventDelivery(Shape):
    """The obligation to bring one event to one endpoint. `next_attempt_at` is null while the endpoint is disabled."""

    id: str
    event_id: str
    event_type: str
    endpoint_id: str
    order_id: str | None
    status: EventDeliveryStatus
    attempt_count: int
    next_attempt_at: Time | None
    delivered_at: Time | None
    attempts: list[Attempt]


class TimelineItem(Shape):
    """One thing that happened to an order. What else it has depends on `kind`; times and money as everywhere."""

    model_config = ConfigDict(extra="allow")

    at: Time = Field(description="of a sweep: when it is due, which lies ahead")
    kind: Literal["order", "act", "delivery", "verdict", "effect", "payment", "refund", "event", "event_delivery", "attempt", "sweep"]
    id: str = Field(description="the public id of the object; of an effect source/operation/effect, of an order and a sweep the order_id")
    summary: str = Field(description="a sentence")


class Checkout(Shape):
    """The provider's payment page of an order."""

    redirect_url: str = Field(repr=False, description="where to send the customer's browser; whoever has it can pay")
    expires_at: Time = Field(description="until then the same page is given again, then a new one is opened")
