"""The provider's HTTP API: session init, validator, transaction query and refund, each of which may go wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.routing import Route

from ipn_gateway.simulator.connections import form_of
from ipn_gateway.simulator.payments import Answer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from ipn_gateway.simulator.bank import Bank
    from ipn_gateway.simulator.faults import Faults
    from ipn_gateway.simulator.refunds import Refunds

INIT_PATH: Final = "/gwprocess/v4/api.php"
VALIDATOR_PATH: Final = "/validator/api/validationserverAPI.php"
QUERY_PATH: Final = "/validator/api/merchantTransIDvalidationAPI.php"

_WRONG_CREDENTIALS: Final = Answer({"APIConnect": "FAILED"})
_BAD_REQUEST: Final = Answer({"APIConnect": "INVALID_REQUEST"})


@dataclass(slots=True)
class ProviderApi:
    """The routes, and a count of every call that reached them, whatever the answer was."""

    bank: Bank
    refunds: Refunds
    faults: Faults
    public_url: str
    inits: Counter[str] = field(default_factory=Counter)
    validations: Counter[str] = field(default_factory=Counter)
    queries: Counter[str] = field(default_factory=Counter)
    refund_calls: Counter[str] = field(default_factory=Counter)
    refund_queries: Counter[str] = field(default_factory=Counter)

    def routes(self) -> list[Route]:
        """The three addresses of the provider that a merchant's service calls."""
        return [
            Route(INIT_PATH, self.init, methods=["POST"]),
            Route(VALIDATOR_PATH, self.validate, methods=["GET"]),
            Route(QUERY_PATH, self.transactions, methods=["GET"]),
        ]

    async def init(self, request: Request) -> Response:
        """Open a session."""
        form = await form_of(request)
        tran_id = form.get("tran_id", "")
        self.inits[tran_id] += 1
        base_url = self.public_url or str(request.base_url)
        return await self.faults.reply(request, "init", tran_id, lambda: self.bank.open(form, base_url))

    async def validate(self, request: Request) -> Response:
        """Order Validation API. Parameter names are read without regard to case, as plugins write them differently."""
        names = _names(request)
        val_id = names.get("val_id", "")
        self.validations[val_id] += 1
        payment = self.bank.paid(val_id)

        def ask() -> Answer:
            if not self.bank.authenticates(names):
                return _WRONG_CREDENTIALS
            return self.bank.validation(names["store_id"], val_id) if val_id else _BAD_REQUEST

        return await self.faults.reply(request, "validator", payment.attempt.tran_id if payment else None, ask)

    async def transactions(self, request: Request) -> Response:
        """One address for the transaction query, the refund and the question about a refund."""
        names = _names(request)
        if "bank_tran_id" in names or "refund_amount" in names:
            return await self._refund(request, names)
        if "refund_ref_id" in names:
            return await self._refund_query(request, names)
        return await self._query(request, names)

    async def _query(self, request: Request, names: dict[str, str]) -> Response:
        key, tran_id = names.get("sessionkey", ""), names.get("tran_id", "")
        if key in self.bank.sessions:
            tran_id = self.bank.sessions[key].tran_id
        self.queries[tran_id] += 1

        def ask() -> Answer:
            if not self.bank.authenticates(names):
                return _WRONG_CREDENTIALS
            if key:
                return self.bank.by_session(names["store_id"], key)
            return self.bank.by_order(names["store_id"], tran_id) if tran_id else _BAD_REQUEST

        return await self.faults.reply(request, "query", tran_id, ask)

    async def _refund(self, request: Request, names: dict[str, str]) -> Response:
        self.refund_calls[names.get("refund_trans_id", "")] += 1
        payment = self.bank.by_bank_tran_id(names.get("store_id", ""), names.get("bank_tran_id", ""))

        def ask() -> Answer:
            return self.refunds.initiate(payment, names) if self.bank.authenticates(names) else _WRONG_CREDENTIALS

        return await self.faults.reply(request, "refund", payment.attempt.tran_id if payment else None, ask)

    async def _refund_query(self, request: Request, names: dict[str, str]) -> Response:
        ref_id = names["refund_ref_id"]
        self.refund_queries[ref_id] += 1
        refund = self.refunds.by_ref_id.get(ref_id)

        def ask() -> Answer:
            return self.refunds.query(names["store_id"], ref_id) if self.bank.authenticates(names) else _WRONG_CREDENTIALS

        return await self.faults.reply(request, "refund_query", refund.payment.attempt.tran_id if refund else None, ask)


def _names(request: Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.query_params.items()}
