"""Settings, read once from `IPN_…` environment variables. Units are in the names; seconds may have decimals."""

import os
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Final, Self

import platformdirs
from cryptography.fernet import Fernet
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ipn_gateway.errors import ConfigurationError

LEASE_PER_TIMEOUT: Final = 1.5
"""A lease is at least this many times the timeout of the work under it, so that it never ends while the work goes on."""

_ORIGIN = re.compile(r"https?://[^\s/@?#]+/?")
_ADDRESS = re.compile(r"https?://[^\s/@?#]+(?:/[^\s/?#]+)*/?")
_RATE = re.compile(r"[1-9][0-9]{0,8}/(?:second|minute|hour)")
_SCHEDULE_ITEM = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:\*([0-9]{1,4}))?")


def parse_schedule(text: object) -> object:
    """`0,5,30*3` as (0.0, 5.0, 30.0, 30.0, 30.0): waits in seconds; `N*K` is N, K times."""
    if not isinstance(text, str):
        return text
    waits: list[float] = []
    for item in text.split(","):
        match = _SCHEDULE_ITEM.fullmatch(item.strip())
        if match is None:
            msg = f"{item.strip()!r} is no wait: write seconds, or seconds*times, separated by commas"
            raise ValueError(msg)
        waits += [float(match[1])] * int(match[2] or 1)
    return tuple(waits)


def _comma_list(text: object) -> object:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if isinstance(text, str) else text


def _secret_list(text: object) -> object:
    return tuple(SecretStr(part.strip()) for part in text.split(",") if part.strip()) if isinstance(text, str) else text


Schedule = Annotated[tuple[float, ...], NoDecode, BeforeValidator(parse_schedule), Field(min_length=1, max_length=1000)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_list)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_secret_list)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class Settings(BaseSettings):
    """Everything that can be set, with its default. Made by `load`, never at import."""

    model_config = SettingsConfigDict(env_prefix="IPN_", frozen=True, extra="ignore", hide_input_in_errors=True)

    database_url: SecretStr | None = Field(None, description="any PostgreSQL ≥ 15; without it the embedded server runs")
    data_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_data_dir("ipn-gateway")),
        description="the embedded server's files, its password and the secret key",
    )
    secret_key: Secrets = Field(
        (), description="url-safe base64 of 32 bytes, encrypts secrets at rest; a comma list rotates, the first encrypts"
    )
    public_url: str | None = Field(None, description="scheme://host[:port][/path] under which providers and browsers reach the service")

    provider_timeout_seconds: Seconds = Field(10, description="total limit of one question to a provider")
    inbox_lease_seconds: Seconds = Field(45, description="how long an inbox worker may work on one notification delivery")
    provider_money_timeout_seconds: Seconds = Field(45, description="total limit of a session init or a refund")
    delivery_timeout_seconds: Seconds = Field(15, description="total limit of one attempt of an event delivery")
    dispatch_lease_seconds: Seconds = Field(45, description="how long a dispatcher may work on one event delivery")
    idempotency_lease_seconds: Seconds = Field(90, description="how long a keyed request may be worked on")

    retry_schedule: Schedule = Field(
        (0, 5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400), description="wait before each attempt of an event delivery"
    )
    validation_schedule: Schedule = Field(
        (0, 5, 30, 120, 600, *[1800] * 144), description="wait before each question while the provider gives no verdict; then `dead`"
    )
    sweep_schedule: Schedule = Field(
        (300, 900, 3600, 21600, 86400), description="when an unpaid order is asked for at its provider, after its creation"
    )
    refuted_schedule: Schedule = Field((60, 300, 540), description="a refuted notification is asked again before it is `rejected`")
    refund_poll_schedule: Schedule = Field(
        (60, 300, 900, 3600, 14400), description="when a refund is asked for; then every 24 h for 30 days"
    )
    parking_hours: float = Field(72, gt=0, le=8760, description="how long a parked notification waits for its order")
    return_wait_seconds: float = Field(5, ge=0, le=60, description="how long a browser return waits for a verdict")

    trusted_proxies: Names = Field((), description="addresses or networks whose X-Forwarded-For is read")
    cors_origins: Names = Field((), description="origins that may call /v1 from a browser")
    allow_loopback_endpoints: bool = Field(default=False, description="http and loopback addresses are allowed as subscriber URLs")
    rate_limit_per_tenant: str = Field("200/second", description="calls to /v1 per tenant and process")
    idempotency_retention_hours: float = Field(168, ge=168, description="how long a stored response is kept")
    delivery_retention_days: float = Field(400, ge=1, description="how long notification deliveries and attempts are kept")
    event_retention_days: float = Field(400, ge=1, description="how long events and event deliveries are kept")
    effect: str | None = Field(None, description="module:object, called after the built-in effect")

    @model_validator(mode="after")
    def _leases_outlive_the_work(self) -> Self:
        for lease, timeout in (
            ("inbox_lease_seconds", "provider_timeout_seconds"),
            ("dispatch_lease_seconds", "delivery_timeout_seconds"),
            ("idempotency_lease_seconds", "provider_money_timeout_seconds"),
        ):
            needed = LEASE_PER_TIMEOUT * getattr(self, timeout)
            if getattr(self, lease) < needed:
                msg = f"IPN_{lease.upper()} must be at least {needed:g}, which is {LEASE_PER_TIMEOUT} × IPN_{timeout.upper()}"
                raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _addresses_are_addresses(self) -> Self:
        if self.public_url and not _ADDRESS.fullmatch(self.public_url):
            raise ValueError(f"IPN_PUBLIC_URL: {self.public_url!r} is no scheme://host[:port][/path]")
        if wrong := [url for url in self.cors_origins if url != "*" and not _ORIGIN.fullmatch(url)]:
            raise ValueError(f"IPN_CORS_ORIGINS: {wrong[0]!r} is no scheme://host[:port]")
        for network in self.trusted_proxies:
            try:
                ip_network(network, strict=False)
            except ValueError:
                raise ValueError(f"IPN_TRUSTED_PROXIES: {network!r} is no address and no network") from None
        return self

    @model_validator(mode="after")
    def _rate_is_a_rate(self) -> Self:
        if not _RATE.fullmatch(self.rate_limit_per_tenant):
            raise ValueError("IPN_RATE_LIMIT_PER_TENANT is a number per second, minute or hour, such as 200/second")
        return self

    @model_validator(mode="after")
    def _secret_keys_are_fernet_keys(self) -> Self:
        for key in self.secret_key:
            try:
                Fernet(key.get_secret_value())
            except ValueError:
                msg = "IPN_SECRET_KEY must be url-safe base64 of 32 bytes, or a comma list of such keys"
                raise ValueError(msg) from None
        return self


def load(**given: object) -> Settings:
    """The settings of this process. Raises `ConfigurationError` with a sentence for each that is wrong."""
    try:
        return Settings(**given)  # type: ignore[arg-type]  # pydantic checks them
    except ValidationError as error:
        sentences = [f"{_variable(part['loc'])}: {part['msg'].removeprefix('Value error, ')}" for part in error.errors(include_input=False)]
        raise ConfigurationError("; ".join(sentences)) from None


def _variable(location: tuple[int | str, ...]) -> str:
    return f"IPN_{str(location[0]).upper()}" if location else "settings"


def unknown_names() -> list[str]:
    """`IPN_…` variables of the environment that no setting reads; a start warns about them."""
    known = {f"IPN_{name.upper()}" for name in Settings.model_fields}
    return sorted(name for name in os.environ if name.startswith("IPN_") and name not in known)
