"""Named points at which a test makes things go wrong. In production every point does nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass(slots=True)
class Faults:
    """Given to `Database` and `Transport`; `on` maps a point, such as `inbox.apply:before_commit`, to what happens there."""

    on: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)

    async def at(self, point: str) -> None:
        """Do what the test asked for at this point, if anything."""
        if self.on and (action := self.on.get(point)):
            await action()
