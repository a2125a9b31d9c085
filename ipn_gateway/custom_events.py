"""Events of a tenant's own types: through the same outbox as ours, so with the same signatures, attempts, log and pull.

An event's id is a digest of its type and of the key that it was asked for with: the same intent is the same event, however often it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ipn_gateway import events, ids, logs, outbox
from ipn_gateway.operations import Downstream, Operation

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from ipn_gateway.clock import Clock
    from ipn_gateway.db import Transaction

PUBLISH: Final = Operation(
    name="POST /v1/events", fields={"type": "json", "data": "json", "order_id": "json"}, downstream=Downstream.LOCAL, key_required=True
)


@dataclass(frozen=True, slots=True)
class NewCustomEvent:
    """An event, checked at the edge: its type by `events.is_custom`, its data for what JSON can hold, and for its size."""

    type: str
    data: Mapping[str, Any]
    order_id: str | None = None


async def publish(tx: Transaction, clock: Clock, tenant_id: str, new: NewCustomEvent, *, key_id: UUID) -> str:
    """Stage the event for those whose filter takes it; its id. `key_id` is that of the idempotency key's row."""
    event_id = ids.event_id(tenant_id, new.type, key_id.hex)
    now = await tx.value("SELECT ipn_now()")
    made = events.custom(event_id, new.type, now, new.data, order_id=new.order_id)
    await outbox.stage(tx, clock, tenant_id, [made])
    logs.count("events.published")
    return event_id
