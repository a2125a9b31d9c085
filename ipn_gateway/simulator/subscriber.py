"""A merchant's service that receives our webhooks: verifies, deduplicates, counts, and misbehaves on request."""

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from standardwebhooks import Webhook, WebhookVerificationError
from standardwebhooks.webhooks import EmptyWebhookSecretError

from ipn_gateway import receiver
from ipn_gateway.simulator import connections
from ipn_gateway.simulator.world import host_time

SLOW_SECONDS: Final = 1.0
HANG_SECONDS: Final = 600.0
_MODE: Final = re.compile(r"ok|slow|hang|reset|lost|status:[2-5][0-9]{2}")


class Mode(BaseModel):
    """How it behaves. `slow` takes `seconds`, then answers; `hang` never answers; `status:<code>` refuses or accepts.

    `reset` cuts the connection before the event is taken in, `lost` after it: the sender cannot tell them apart.
    With `times` it is `ok` again after so many requests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str = Field(default="ok", pattern=rf"^(?:{_MODE.pattern})$")
    seconds: float = Field(default=SLOW_SECONDS, ge=0, le=HANG_SECONDS)
    times: int | None = Field(default=None, ge=1)
    retry_after: str | None = None


class Secrets(BaseModel):
    """What counts from now on: signing secrets (`whsec_…`) and public keys (`whpk_…`), several while one is rotated."""

    model_config = ConfigDict(extra="forbid")

    secrets: list[str]


@dataclass(slots=True)
class Received:
    """Counts and events. `events` holds each event once, in the order in which it first came.

    `altered` counts repeats whose bytes differ from the first: there must never be one.
    """

    received: int = 0
    verified: int = 0
    duplicates: int = 0
    bad_signature: int = 0
    altered: int = 0
    in_flight: int = 0
    in_flight_max: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    events: list[dict[str, object]] = field(default_factory=list)
    bodies: dict[str, bytes] = field(default_factory=dict)

    @property
    def unique(self) -> int:
        """How many different events were taken in."""
        return len(self.bodies)

    def view(self) -> dict[str, object]:
        """As JSON."""
        names = ["received", "verified", "unique", "duplicates", "bad_signature", "altered", "in_flight", "in_flight_max"]
        counts = {name: getattr(self, name) for name in names}
        return counts | {"statuses": dict(self.statuses), "events": self.events}


class Subscriber:
    """The state behind the application; tests in the same process read it as `app.state.subscriber`."""

    def __init__(self, secrets: list[str], *, check_age: bool = True) -> None:
        """Without `check_age` a timestamp may be of any time, for tests that move the sender's clock."""
        self.secrets = secrets
        self.mode = Mode()
        self.received = Received()
        self._check_age = check_age
        self._released = asyncio.Event()
        self._arrived = asyncio.Event()

    def behave(self, mode: Mode) -> None:
        """Change the mode; requests that hang or are slow go on at once."""
        self.mode = mode
        self._released.set()
        self._released = asyncio.Event()

    async def wait_for(self, unique: int, *, seconds: float) -> bool:
        """Wait until so many different events have been taken in; whether they were within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self.received.unique < unique:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    async def take(self, request: Request) -> Response:
        """One webhook, treated as the mode says."""
        body = await request.body()
        self.received.received += 1
        self.received.in_flight += 1
        self.received.in_flight_max = max(self.received.in_flight_max, self.received.in_flight)
        try:
            response = await self._answer(request, body, self._next_mode())
        finally:
            self.received.in_flight -= 1
        self.received.statuses[response.status_code] += 1
        return response

    async def _answer(self, request: Request, body: bytes, mode: Mode) -> Response:
        if mode.mode == "reset":
            return await connections.reset(request)
        if mode.mode in {"slow", "hang"}:
            seconds = mode.seconds if mode.mode == "slow" else HANG_SECONDS
            if not await connections.hang(request, self._released, seconds):
                return Response(status_code=499)  # the sender is gone
        status = int(mode.mode.partition(":")[2] or 200)
        if status >= 300:  # noqa: PLR2004 - a refusal takes nothing in
            return Response(status_code=status, headers={"Retry-After": mode.retry_after} if mode.retry_after else None)
        response = self._take_in(request, body, status)
        return await connections.reset(request) if mode.mode == "lost" else response

    def _take_in(self, request: Request, body: bytes, status: int) -> Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if not any(self._verifies(secret, body, headers) for secret in self.secrets):
            self.received.bad_signature += 1
            return Response("the signature does not match", status_code=401)
        self.received.verified += 1
        event_id = headers["webhook-id"]
        if event_id in self.received.bodies:
            self.received.duplicates += 1
            self.received.altered += self.received.bodies[event_id] != body
        else:
            self.received.bodies[event_id] = body
            self.received.events.append(json.loads(body))
            self._arrived.set()
        return Response(status_code=status)

    def _next_mode(self) -> Mode:
        mode = self.mode
        if mode.times is not None:
            self.mode = mode.model_copy(update={"times": mode.times - 1}) if mode.times > 1 else Mode()
        return mode

    def _verifies(self, secret: str, body: bytes, headers: dict[str, str]) -> bool:
        try:
            if secret.startswith(receiver.PUBLIC_KEY_PREFIX):  # the library knows v1 only
                now = host_time().timestamp() if self._check_age else float(headers["webhook-timestamp"])
                receiver.verify(headers, body, [secret], now=now)
                return True
            webhook = Webhook(secret)
            if self._check_age:
                webhook.verify(body, headers)
                return True
            moment = datetime.fromtimestamp(int(headers["webhook-timestamp"]), UTC)
            expected = webhook.sign(headers["webhook-id"], moment, body.decode())
            return expected in headers["webhook-signature"].split(" ")
        except (WebhookVerificationError, receiver.Rejected, KeyError, ValueError):
            return False


def _check_usable(secrets: list[str]) -> None:
    for secret in secrets:
        if secret.startswith(receiver.PUBLIC_KEY_PREFIX):
            receiver.check_keys([secret])
        else:
            Webhook(secret)  # raises for what is none


def create_subscriber(secret: str | None = None, *, check_age: bool = True) -> FastAPI:
    """The application: `POST /webhooks`, `GET /received`, and `PUT /mode`, `PUT /secrets`, `DELETE /received` to steer it."""
    subscriber = Subscriber([secret] if secret else [], check_age=check_age)
    app = connections.CuttableApp(title="Webhook subscriber")
    app.state.subscriber = subscriber
    app.add_route("/webhooks", subscriber.take, methods=["POST"])

    @app.get("/received")
    async def received() -> dict[str, object]:
        """Counts, and the events in the order in which they first came."""
        return subscriber.received.view()

    @app.delete("/received", status_code=204)
    async def forget() -> Response:
        """Start to count anew; what was received is forgotten, so a repeat counts as new."""
        subscriber.received = Received()
        return Response(status_code=204)

    @app.put("/mode")
    async def set_mode(mode: Mode) -> Mode:
        """Behave differently from now on."""
        subscriber.behave(mode)
        return mode

    @app.put("/secrets", status_code=204)
    async def set_secrets(asked: Secrets) -> Response:
        """Take other signing secrets."""
        try:
            _check_usable(asked.secrets)
        except (ValueError, EmptyWebhookSecretError) as error:
            raise HTTPException(422, "a secret is `whsec_` and base64, a public key `whpk_` and base64") from error
        subscriber.secrets = asked.secrets
        return Response(status_code=204)

    return app
