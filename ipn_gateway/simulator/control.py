"""The control API under `/simulator`: set faults, make payments without a browser, send notifications, count calls."""

from dataclasses import asdict
from decimal import Decimal
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from ipn_gateway.simulator.api import ProviderApi
from ipn_gateway.simulator.checkout import Checkout
from ipn_gateway.simulator.faults import Fault
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.payments import Wanted
from ipn_gateway.simulator.sender import Knobs, Reply, Sender
from ipn_gateway.simulator.sslcommerz import CARDS, RATES, Attempt, encode, ipn_fields, sign


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PaymentRequest(_Request):
    """An attempt, made at once. What is left out comes from the order's newest session, where there is one."""

    tran_id: str = Field(min_length=1)
    amount: Decimal | None = Field(default=None, gt=0, max_digits=14, decimal_places=2)
    currency: str | None = None
    status: str = "VALID"
    risk: bool = False
    card: str = "visa"
    error: str | None = None
    values: tuple[str, str, str, str] | None = None
    store_id: str | None = None
    send_ipn: bool = True
    ipn_url: str | None = None


class IpnRequest(_Request):
    """A notification sent again, now, past the knobs; altered and signed anew, or forged."""

    tran_id: str | None = None
    val_id: str | None = None
    overrides: dict[str, str] = Field(default_factory=dict, description="fields to replace or add")
    remove: list[str] = Field(default_factory=list, description="fields to leave out")
    resign: bool = Field(default=True, description="sign what is sent; false keeps the genuine hashes")
    forge: str | None = Field(default=None, description="a kind of forgery, made from the result")
    times: int = Field(default=1, ge=1, le=1000)
    ipn_url: str | None = None


class RefundRequest(_Request):
    """What a refund is from now on."""

    refund_ref_id: str
    status: Literal["processing", "refunded", "cancelled"]


class KnobsRequest(_Request):
    """The sender's knobs: probabilities per notification, and the longest delay."""

    duplicate: float = Field(default=0, ge=0, le=1)
    reorder: float = Field(default=0, ge=0, le=1)
    delay_seconds: float = Field(default=0, ge=0)
    lose: float = Field(default=0, ge=0, le=1)
    forge: float = Field(default=0, ge=0, le=1)


class Control:
    """What the control API does, in words that tests in the same process may use too."""

    def __init__(self, api: ProviderApi, checkout: Checkout, sender: Sender, store_id: str) -> None:
        """`store_id` is the store that payments belong to unless they say otherwise."""
        self.api, self.bank, self.checkout, self.sender = api, api.bank, checkout, sender
        self._store_id = store_id

    def state(self) -> dict[str, object]:
        """How many of everything, counted since the start."""
        return {
            "sessions": len(self.bank.sessions),
            "payments": dict(self.bank.statuses()),
            "inits": {"calls": self.api.inits.total(), "by_tran_id": dict(self.api.inits)},
            "validator": {"calls": self.api.validations.total(), "by_val_id": dict(self.api.validations)},
            "queries": {"calls": self.api.queries.total(), "by_tran_id": dict(self.api.queries)},
            "refunds": {
                "calls": self.api.refund_calls.total(),
                "by_refund_trans_id": dict(self.api.refund_calls),
                "queries": self.api.refund_queries.total(),
                "accepted": len(self.api.refunds.by_ref_id),
                "accepted_by_refund_trans_id": dict(self.api.refunds.accepted()),
            },
            "ipns": self.sender.counts.view(),
            "hanging": self.api.faults.hanging,
            "faults": self.api.faults.pending(),
        }

    def pay(self, asked: PaymentRequest) -> dict[str, str]:
        """Make an attempt, send its notification if wanted, and give the notification's signed fields."""
        attempt = self.bank.attempt(self._wanted(asked))
        fields = self.fields_of(attempt)
        if asked.send_ipn and (url := self._url(asked.ipn_url, attempt)):
            self.sender.send(url, fields)
        return fields

    async def notify(self, asked: IpnRequest) -> list[Reply]:
        """Send the newest fitting attempt's notification, altered as asked, and give the listener's answers."""
        found = self.bank.attempts(tran_id=asked.tran_id, val_id=asked.val_id)
        if not found:
            raise HTTPException(404, "no attempt fits")
        url = self._url(asked.ipn_url, found[-1])
        if not url:
            raise HTTPException(422, "there is no ipn_url")
        body, kind = self._altered(asked, found[-1])
        return [await self.sender.post(url, body, kind=kind) for _ in range(asked.times)]

    def fields_of(self, attempt: Attempt) -> dict[str, str]:
        """The signed fields of an attempt's notification."""
        return sign(ipn_fields(attempt), self.bank.stores[attempt.store_id])

    def _wanted(self, asked: PaymentRequest) -> Wanted:
        store_id = asked.store_id or self._store_id
        session = self.bank.session_for(store_id, asked.tran_id)
        amount = asked.amount or (session.amount if session else None)
        currency = asked.currency or (session.currency if session else "BDT")
        values = asked.values or (session.values if session else ("", "", "", ""))
        if amount is None or currency not in RATES or store_id not in self.bank.stores or asked.card not in CARDS:
            raise HTTPException(422, "amount is missing, or currency, store_id or card is not known")
        return Wanted(
            store_id=store_id,
            tran_id=asked.tran_id,
            amount=amount,
            currency=currency,
            status=asked.status,
            risky=asked.risk,
            card=asked.card,
            error=asked.error,
            values=values,
        )

    def _url(self, asked: str | None, attempt: Attempt) -> str:
        session = self.bank.session_for(attempt.store_id, attempt.tran_id)
        return asked or (session.urls["ipn_url"] if session else "") or self.checkout.ipn_url

    def _altered(self, asked: IpnRequest, attempt: Attempt) -> tuple[bytes, str]:
        fields = self.fields_of(attempt) | asked.overrides
        fields = {name: value for name, value in fields.items() if name not in asked.remove}
        if asked.resign:
            fields = sign(fields, self.bank.stores[attempt.store_id])
        if asked.forge is None:
            return encode(fields), "genuine" if asked.resign and not asked.overrides and not asked.remove else "altered"
        if asked.forge not in FORGERIES:
            raise HTTPException(422, f"forge must be one of {', '.join(FORGERIES)}")
        return encode(FORGERIES[asked.forge](fields)), asked.forge


def control_router(control: Control) -> APIRouter:
    """Make the routes of the control API."""
    router = APIRouter(prefix="/simulator", tags=["simulator"])
    _add_payments(router, control)
    _add_faults(router, control)

    @router.get("/state")
    async def state() -> dict[str, object]:
        """Count calls, payments and notifications since the start."""
        return control.state()

    @router.put("/knobs")
    async def knobs(asked: KnobsRequest) -> KnobsRequest:
        """Change how badly the sender behaves from now on."""
        control.sender.knobs = Knobs(**asked.model_dump())
        return asked

    @router.post("/drain")
    async def drain(seconds: Annotated[float, Query(ge=0, le=600)] = 30.0) -> dict[str, bool]:
        """Wait until no notification is left to be sent."""
        return {"drained": await control.sender.drained(seconds=seconds)}

    return router


def _add_payments(router: APIRouter, control: Control) -> None:
    @router.post("/payments", status_code=201)
    async def pay(asked: PaymentRequest) -> dict[str, str]:
        """Make an attempt and give its notification's signed fields."""
        return control.pay(asked)

    @router.get("/payments")
    async def payments(tran_id: Annotated[str | None, Query()] = None) -> list[dict[str, str]]:
        """List the signed notification fields of all attempts, or of one order's, oldest first."""
        return [control.fields_of(attempt) for attempt in control.bank.attempts(tran_id=tran_id)]

    @router.post("/ipn")
    async def ipn(asked: IpnRequest) -> dict[str, object]:
        """Send a notification again, altered or forged, and show what the listener answered."""
        return {"answers": [asdict(answer) for answer in await control.notify(asked)]}

    @router.post("/refunds")
    async def refunds(asked: RefundRequest) -> RefundRequest:
        """Decide a refund."""
        if not control.api.refunds.decide(asked.refund_ref_id, asked.status):
            raise HTTPException(404, "no such refund")
        return asked


def _add_faults(router: APIRouter, control: Control) -> None:
    faults = control.api.faults

    @router.post("/faults", status_code=201)
    async def add_fault(fault: Fault) -> dict[str, object]:
        """Make the next answers of a path go wrong."""
        faults.add(fault)
        return {"faults": faults.pending()}

    @router.delete("/faults", status_code=204)
    async def clear_faults() -> Response:
        """Forget all faults and release the answers that hang."""
        faults.clear()
        return Response(status_code=204)
