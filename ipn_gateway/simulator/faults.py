"""Provider answers that go wrong on request: which, how often, for which order."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ipn_gateway.simulator import connections, sessions
from ipn_gateway.simulator.payments import Answer
from ipn_gateway.simulator.sslcommerz import Json

Path = Literal["init", "validator", "query", "refund", "refund_query"]
Kind = Literal[
    "html",
    "empty",
    "status500",
    "apiconnect",
    "hang",
    "reset",
    "record_then_reset",
    "record_then_hang",
    "record_then_status500",
    "failed",
    "invalid_transaction",
    "processing",
    "pending",
    "element_dict",
    "reversed",
    "fields",
]
_HTML: Final = "<html><head><title>Service unavailable</title></head><body>Please try again later.</body></html>"
_RECORDED: Final = frozenset({"hang", "element_dict", "reversed", "fields"})
"""Kinds under which the provider does what was asked, and answers oddly."""


class Fault(BaseModel):
    """An answer that goes wrong.

    `html`, `empty` (both with status 200), `status500` and `apiconnect` (member `value`, or FAILED) do nothing else;
    `reset` cuts the connection before anything is recorded, `record_then_reset` after it; `hang` answers only when
    released, after `seconds`, or never if the client leaves, in which case nothing is recorded; `record_then_hang` and
    `record_then_status500` do what was asked, and answer that late, or not; `failed`, `invalid_transaction`,
    `processing` and `pending` record nothing and say so, `failed` with `value` as its reason; `element_dict` gives a
    query's element without its list, `reversed` turns the list round; `fields` replaces members of the true answer by
    `fields`, in every element of a list too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    kind: Kind
    times: int | None = Field(default=1, ge=1, description="how many answers; null means until deleted")
    tran_id: str | None = Field(default=None, description="only answers about this order")
    seconds: float = Field(default=60.0, ge=0, le=600, description="how long an answer may hang")
    value: str = Field(default="FAILED", description="what `apiconnect` says, and why `failed` is")
    fields: dict[str, Any] = Field(default_factory=dict, description="members that `fields` replaces; null removes one")


class Faults:
    """The faults that are set, and the answers under them."""

    def __init__(self) -> None:
        """Start with none."""
        self._left: list[tuple[Fault, int | None]] = []
        self._released = asyncio.Event()
        self.hanging = 0

    def add(self, fault: Fault) -> None:
        """Set a fault; earlier ones of the same path are used up first."""
        self._left.append((fault, fault.times))

    def clear(self) -> None:
        """Forget all faults and let every hanging answer go on."""
        self._left.clear()
        self._released.set()
        self._released = asyncio.Event()

    def pending(self) -> list[dict[str, object]]:
        """The faults that are still to happen, with how often."""
        return [fault.model_dump(exclude_defaults=True) | {"times": left} for fault, left in self._left]

    def take(self, path: Path, tran_id: str | None) -> Fault | None:
        """Use up the next fault for this question, if there is one."""
        for index, (fault, left) in enumerate(self._left):
            if fault.path == path and fault.tran_id in {None, tran_id}:
                if left == 1:
                    del self._left[index]
                elif left is not None:
                    self._left[index] = (fault, left - 1)
                return fault
        return None

    async def reply(self, request: Request, path: Path, tran_id: str | None, ask: Callable[[], Answer]) -> Response:
        """The answer to a question. `ask` looks it up; it is recorded unless a fault prevents that."""
        fault = self.take(path, tran_id)
        if fault is None:
            return _json(ask().recorded())
        if fault.kind == "reset":
            return await connections.reset(request)
        if fault.kind == "hang" and not await self._hang(request, fault.seconds):
            return Response(status_code=500)  # the client is gone: nothing is recorded and nothing is sent
        if canned := _canned(fault):
            return canned
        answer = ask()
        if fault.kind.startswith("record_then_"):
            return await self._lost(request, fault, answer.recorded())
        return _json(_reshaped(fault, tran_id, answer.recorded() if fault.kind in _RECORDED else answer.body))

    async def _lost(self, request: Request, fault: Fault, body: Json) -> Response:
        """What was asked is done. A client that waits for an answer that hangs gets it in the end."""
        if fault.kind == "record_then_reset":
            return await connections.reset(request)
        late = fault.kind == "record_then_hang" and await self._hang(request, fault.seconds)
        return _json(body) if late else _internal_error()

    async def _hang(self, request: Request, seconds: float) -> bool:
        self.hanging += 1
        try:
            return await connections.hang(request, self._released, seconds)
        finally:
            self.hanging -= 1


def _json(body: Json) -> Response:
    return Response(json.dumps(body), media_type="application/json")


def _internal_error() -> Response:
    return Response("Internal Server Error", status_code=500, media_type="text/plain")


def _canned(fault: Fault) -> Response | None:
    match fault.kind:
        case "html":
            return Response(_HTML, media_type="text/html")
        case "empty":
            return Response(b"", media_type="application/json")
        case "status500":
            return _internal_error()
        case "apiconnect":
            return _json({"APIConnect": fault.value})
        case _:
            return None


def _reshaped(fault: Fault, tran_id: str | None, body: Json) -> Json:
    match fault.kind if body.get("APIConnect", "DONE") == "DONE" else None:
        case "failed":
            return _failed(fault, body)
        case "invalid_transaction":
            return _unknown(tran_id) if "element" in body else {"status": "INVALID_TRANSACTION", "APIConnect": "DONE"}
        case "processing" | "pending":
            word = fault.kind if fault.path.startswith("refund") else fault.kind.upper()
            return _replaced(body, {"status": word} | ({"val_id": ""} if fault.path == "query" else {}))
        case "element_dict" | "reversed":
            return body | _relisted(fault.kind, body.get("element"))
        case "fields":
            return _replaced(body, fault.fields)
        case _:
            return body


def _failed(fault: Fault, body: Json) -> Json:
    """A refusal, as each call words it."""
    if fault.path == "init":
        return sessions.refused(fault.value)
    if fault.path in {"refund", "refund_query"}:
        refused: Json = {"status": "failed", "refund_ref_id": ""} if fault.path == "refund" else {"status": "cancelled"}
        return body | refused | {"errorReason": fault.value}
    return _replaced(body, {"status": "FAILED"})


def _unknown(tran_id: str | None) -> Json:
    return {"APIConnect": "DONE", "no_of_trans_found": 0, "element": [{"tran_id": tran_id, "status": "INVALID"}]}


def _relisted(kind: Kind, elements: object) -> Json:
    if not isinstance(elements, list):
        return {}
    return {"element": elements[-1] if kind == "element_dict" else elements[::-1]}


def _replaced(body: Json, fields: dict[str, Any]) -> Json:
    """The body with members replaced: in its elements where it has them, else in itself."""
    elements = body.get("element")
    if isinstance(elements, list):
        return body | {"element": [_replaced(element, fields) for element in elements]}
    return {name: value for name, value in (body | fields).items() if value is not None}
