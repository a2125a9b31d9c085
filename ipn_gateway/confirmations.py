"""What a provider confirmed, kept with a held notification delivery, so that a person can apply exactly that later."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway.providers.base import Confirmed, Effect

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN: Final = ("order_id", "operation_id", "status", "account", "currency", "provider_transaction_id", "risk", "settled_currency")
_MONEY: Final = ("amount", "settled_amount", "net_amount")


def frozen(verdict: Confirmed) -> dict[str, Any]:
    """As JSON, money as text. The provider's answer is kept beside it, and so is not in it."""
    amounts = {name: getattr(verdict, name) for name in _MONEY}
    return {
        **{name: getattr(verdict, name) for name in _PLAIN},
        **{name: None if amount is None else str(amount) for name, amount in amounts.items()},
        "effect": str(verdict.effect),
        "paid_at": verdict.paid_at.isoformat() if verdict.paid_at else None,
    }


def thawed(kept: Mapping[str, Any], answer: Mapping[str, Any] | None) -> Confirmed:
    """The same again, with the provider's answer."""
    members: dict[str, Any] = {name: kept[name] for name in _PLAIN}
    members |= {name: None if kept[name] is None else Decimal(kept[name]) for name in _MONEY}
    paid_at = datetime.fromisoformat(kept["paid_at"]) if kept["paid_at"] else None
    return Confirmed(**members, effect=Effect(kept["effect"]), paid_at=paid_at, answer=answer or {})
