"""A service of somebody else's on the layer: one operation of each downstream class, and one that answers what a test tells it.

What its operations did is in the table `acts`, which has no constraint: what is done twice is there twice.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import FastAPI, Request, Response
from pydantic import Field

from ipn_gateway import ids
from ipn_gateway.clock import Clock
from ipn_gateway.db import Database, Transaction, assert_no_transaction
from ipn_gateway.errors import Overloaded, StateConflict, Unauthorized
from ipn_gateway.faults import Faults
from ipn_gateway.fingerprints import Kind
from ipn_gateway.idempotency import Idempotency
from ipn_gateway.operations import STARTED, Advance, Doubt, Downstream, Finished, Operation, Phase, Retry, Step, Work
from ipn_gateway.providers.base import Answer, NoAnswer
from ipn_gateway.transport import Transport
from ipn_gateway.web import bodies, keyed, problems
from ipn_gateway.web.deps import Moment
from ipn_gateway.web.keyed import KeyedCall
from ipn_gateway.web.schemas import Body
from tests import loopback

ACTS: Final = "CREATE TABLE acts (number serial PRIMARY KEY, tenant_id text, operation text, key_id uuid, what text)"
FIELDS: Final[dict[str, Kind]] = {"amount": "decimal", "currency": "json", "due_at": "time", "details": "json"}
PROVIDER_KEY_LENGTH: Final = 30
PROVIDER_SECONDS: Final = 10.0

NOTE: Final = Operation(name="POST /v1/notes", fields=FIELDS, downstream=Downstream.LOCAL, key_required=True)
PING: Final = Operation(name="POST /v1/pings", fields={}, downstream=Downstream.LOCAL)
TOLD: Final = Operation(name="POST /v1/told", fields={}, downstream=Downstream.IDEMPOTENT, key_required=True, headers=("Link", "X-Balance"))
SECRET: Final = Operation(name="POST /v1/secrets", fields={}, downstream=Downstream.LOCAL, key_required=True, secrets=("secret",))
CHARGE: Final = Operation(
    name="POST /v1/charges",
    fields=FIELDS,
    downstream=Downstream.IDEMPOTENT,
    key_required=True,
    money=True,
    phases=(STARTED, "charge", "receipt"),
    intents=frozenset({"charge"}),
    horizon_seconds=86400,
)
PAYOUT: Final = Operation(
    name="POST /v1/payouts",
    fields=FIELDS,
    downstream=Downstream.NONE,
    key_required=True,
    money=True,
    phases=(STARTED, "payout", "receipt"),
    intents=frozenset({"payout"}),
)

Telling = Callable[[Transaction, Work], Awaitable[Step]]


class Declined(StateConflict):
    """The bank declined it."""

    status, title = 402, "Declined"


class Asked(Body):
    """What every operation is asked with; `remark` is not significant."""

    amount: str = Field(default="10.00", pattern=r"^[0-9]{1,9}(\.[0-9]{1,2})?$")
    currency: str = "BDT"
    due_at: Moment | None = None
    details: dict[str, Any] = Field(default_factory=dict)
    remark: str | None = None


@dataclass
class Told:
    """What the operations `POST /v1/told` and `POST /v1/secrets` do: `calls` before its transaction, and `says` in it."""

    says: Telling
    calls: Callable[[Work], Awaitable[Any]] | None = None


def says(finished: Finished) -> Told:
    """Do one thing, and answer so."""

    async def say(tx: Transaction, work: Work) -> Step:
        await act(tx, work, "done")
        return finished

    return Told(say)


def raises(error: BaseException) -> Told:
    """Do one thing, and then raise."""

    async def say(tx: Transaction, work: Work) -> Step:
        await act(tx, work, "done")
        raise error

    return Told(say)


async def tenant(request: Request) -> str:
    """Whoever names a tenant is one."""
    if not (name := request.headers.get("x-tenant")):
        raise Unauthorized
    return name


async def act(tx: Transaction, work: Work, what: str) -> None:
    """Do something of ours."""
    await tx.execute(
        "INSERT INTO acts (tenant_id, operation, key_id, what) VALUES (%(tenant)s, %(operation)s, %(key)s, %(what)s)",
        {"tenant": work.tenant_id, "operation": work.operation, "key": work.key_id, "what": what},
    )


def answered(work: Work, **members: Any) -> Finished:
    """201 with the row's id, and its address."""
    shown = ids.show("act", work.key_id) if work.key_id else "act_none"
    body = json.dumps({"id": shown} | members, ensure_ascii=False, default=str).encode()
    return Finished(201, body, (("Location", f"{work.operation.removeprefix('POST ')}/{shown}"),))


@dataclass(frozen=True)
class Payments:
    """The phases around one call of the provider: begin, call and record, receipt."""

    transport: Transport
    provider_url: str

    def phases(self, operation: Operation, asked: Asked) -> dict[str, Phase]:
        """Of a charge or a payout."""
        point, noun = operation.phases[1], operation.name.rpartition("/")[2]

        async def begin(tx: Transaction, work: Work, _: Any) -> Step:
            await act(tx, work, "begun")
            return Advance(point, {"amount": asked.amount})

        async def call(work: Work) -> Answer | NoAnswer:
            headers = {"Idempotency-Key": work.downstream_key(point, PROVIDER_KEY_LENGTH)}
            form = {"amount": work.progress["amount"]}
            url = f"{self.provider_url}/{noun}"
            return await self.transport.ask("POST", url, form=form, headers=headers, timeout_seconds=PROVIDER_SECONDS)

        async def record(tx: Transaction, work: Work, answer: Answer | NoAnswer) -> Step:
            if isinstance(answer, NoAnswer) and not answer.sent:
                await tx.execute("DELETE FROM acts WHERE key_id = %(key)s", {"key": work.key_id})
                return Retry(STARTED, Overloaded())
            if isinstance(answer, NoAnswer) or answer.status >= 500:
                return Doubt() if operation.downstream is Downstream.NONE else Retry(point, Overloaded())
            if answer.status == Declined.status:
                raise Declined
            await act(tx, work, "recorded")
            return Advance("receipt", {"reference": json.loads(answer.body)["reference"]})

        async def receipt(tx: Transaction, work: Work, _: Any) -> Step:
            await act(tx, work, "receipt")
            return answered(work, **work.progress)

        return {
            STARTED: Phase(f"{noun}.begin", begin),
            point: Phase(f"{noun}.record", record, call),
            "receipt": Phase(f"{noun}.receipt", receipt),
        }


def create(  # noqa: C901 - the routes of an application, defined inside it
    db: Database, transport: Transport, provider_url: str, *, lease_seconds: float = 90, note: Operation = NOTE
) -> FastAPI:
    """The application. `app.state.told` is what `POST /v1/told` does."""
    app = FastAPI()
    problems.install(app)
    payments = Payments(transport, provider_url)

    @app.post("/v1/notes", status_code=201)
    async def write_note(call: Annotated[KeyedCall, keyed.of(note, tenant)], request: Request) -> Response:
        asked = await bodies.read(request, Asked)

        async def write(tx: Transaction, work: Work, _: Any) -> Step:
            await act(tx, work, "noted")
            return answered(work, amount=asked.amount, details=asked.details)

        return await call.drive({STARTED: Phase("notes.write", write)})

    @app.get("/v1/notes")
    async def count_notes() -> int:
        async with db.autocommit("notes.count") as tx:
            return int(await tx.value("SELECT count(*) FROM acts WHERE what = 'noted'"))

    @app.delete("/v1/notes", status_code=204)
    async def delete_notes() -> None:
        async with db.transaction("notes.delete") as tx:
            await tx.execute("DELETE FROM acts WHERE what = 'noted'")

    @app.post("/v1/pings", status_code=201)
    async def ping(call: Annotated[KeyedCall, keyed.of(PING, tenant)]) -> Response:
        async def write(tx: Transaction, work: Work, _: Any) -> Step:
            await act(tx, work, "pinged")
            return answered(work)

        return await call.drive({STARTED: Phase("pings.write", write)})

    @app.post("/v1/told")
    async def do_as_told(call: Annotated[KeyedCall, keyed.of(TOLD, tenant)]) -> Response:
        told: Told = app.state.told

        async def say(tx: Transaction, work: Work, _: Any) -> Step:
            return await told.says(tx, work)

        return await call.drive({STARTED: Phase("told.say", say, told.calls)})

    @app.post("/v1/secrets")
    async def make_secret(call: Annotated[KeyedCall, keyed.of(SECRET, tenant)]) -> Response:
        async def say(tx: Transaction, work: Work, _: Any) -> Step:
            return await app.state.told.says(tx, work)  # type: ignore[no-any-return]

        return await call.drive({STARTED: Phase("secrets.say", say)})

    @app.post("/v1/charges", status_code=201)
    async def charge(call: Annotated[KeyedCall, keyed.of(CHARGE, tenant)], request: Request) -> Response:
        return await call.drive(payments.phases(CHARGE, await bodies.read(request, Asked)))

    @app.post("/v1/payouts", status_code=201)
    async def pay_out(call: Annotated[KeyedCall, keyed.of(PAYOUT, tenant)], request: Request) -> Response:
        return await call.drive(payments.phases(PAYOUT, await bodies.read(request, Asked)))

    app.state.idempotency = Idempotency(db, keyed.declared(app.routes), lease_seconds=lease_seconds, retention_hours=168)
    return app


@contextlib.asynccontextmanager
async def opened(
    database_url: str, provider_url: str, clock: Clock, faults: Faults, *, connections_max: int = 10, **given: Any
) -> AsyncIterator[tuple[FastAPI, Database]]:
    """The application over a database and a transport of its own; what it still does is waited for at the end."""
    async with (
        Database(database_url, clock=clock, faults=faults, connections_max=connections_max) as db,
        loopback.opened(faults=faults, assert_no_transaction=assert_no_transaction) as transport,
    ):
        app = create(db, transport, provider_url, **given)
        yield app, db
        await app.state.idempotency.drained(seconds=15)
