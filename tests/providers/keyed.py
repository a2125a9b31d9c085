"""Providers whose key travels in a header, and who say "in progress" in ways of their own. They exist in tests only.

After Adyen (422 or 409 with code 704; keys of at most 64 characters, known for at least 7 days) and Stripe (409 with
`idempotency_key_in_use`; 255 characters, 24 hours).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ipn_gateway.providers import answers, configs
from ipn_gateway.providers.base import (
    Answer,
    Declined,
    NoAnswer,
    NoOutcome,
    ProviderConfig,
    RefundAccepted,
    RefundRequestedBefore,
    Unknown,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.providers.base import Ask, RefundAnswer, RefundRequest

KEY_HEADER: Final = "Idempotency-Key"


class KeyedConfig(ProviderConfig, frozen=True):
    """A merchant with an API key."""

    SECRETS: ClassVar[tuple[str, ...]] = ("api_key",)

    merchant: configs.CleanText
    api_key: configs.CleanSecret
    base_url: configs.Origin

    @property
    def account(self) -> str:
        return self.merchant


@dataclass(frozen=True)
class Error:
    """An error as one provider words it: its status and its code, neither of which means anything without the other."""

    status: int
    code: str


class Keyed:
    """Refunds by POST with our key in a header. What an error means is a table; one that is not in it means nothing."""

    refund_key_length_max: ClassVar[int]
    key_retention_hours: ClassVar[float | None]
    path: ClassVar[str]
    id_member: ClassVar[str]
    IN_PROGRESS: ClassVar[frozenset[Error]]
    DECLINED: ClassVar[frozenset[Error]]

    async def refund(self, ask: Ask, config: Any, request: RefundRequest) -> RefundAnswer:
        got = await ask(
            "POST",
            config.base_url + self.path.format(request.provider_transaction_id),
            form=json.dumps({"amount": int(request.amount.scaleb(2)), "currency": request.currency}).encode(),
            headers={KEY_HEADER: request.key, "Content-Type": "application/json", "X-API-Key": config.api_key.get_secret_value()},
        )
        return NoOutcome(got.cause, sent=got.sent) if isinstance(got, NoAnswer) else self._judged(got)

    def _judged(self, got: Answer) -> RefundAnswer:
        answer = answers.decoded(replace(got, status=200))
        if isinstance(answer, Unknown):
            return NoOutcome(answer.cause)
        refund_id = answers.text(answer, self.id_member)
        if got.status in {200, 201}:
            return RefundAccepted(refund_id) if refund_id else NoOutcome("no_id")
        error = Error(got.status, self.code(answer))
        if error in self.IN_PROGRESS:
            return RefundRequestedBefore()
        return Declined(f"declined_{error.code}") if error in self.DECLINED else NoOutcome(f"status_{got.status}")

    def code(self, answer: Mapping[str, Any]) -> str:
        """Their code of an error; empty when there is none."""
        raise NotImplementedError


class AdyenLike(Keyed):
    """In progress is 422 or 409, and code 704 either way; 409 may be something else."""

    path = "/v71/payments/{}/refunds"
    id_member = "pspReference"
    refund_key_length_max: ClassVar[int] = 64
    key_retention_hours: ClassVar[float | None] = 168
    IN_PROGRESS = frozenset({Error(422, "704"), Error(409, "704")})
    DECLINED = frozenset({Error(422, "137"), Error(422, "167")})

    def code(self, answer: Mapping[str, Any]) -> str:
        return answers.text(answer, "errorCode")


class StripeLike(Keyed):
    """In progress is 409 with a code of its own; 409 with `lock_timeout` is another request on the same object."""

    path = "/v1/refunds?charge={}"
    id_member = "id"
    refund_key_length_max: ClassVar[int] = 255
    key_retention_hours: ClassVar[float | None] = 24
    IN_PROGRESS = frozenset({Error(409, "idempotency_key_in_use")})
    DECLINED = frozenset({Error(400, "charge_already_refunded")})

    def code(self, answer: Mapping[str, Any]) -> str:
        error = answer.get("error")
        return answers.text(error, "code") if isinstance(error, dict) else ""
