"""A short, bounded memory of rows that are read with every request: what was loaded less than a second ago is not loaded again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ipn_gateway.clock import Clock

V = TypeVar("V")


class Recent(Generic[V]):
    """Values by key, each for `seconds`, the least recently used one leaving first. Absence (None) is remembered like a value."""

    def __init__(self, clock: Clock, *, seconds: float, entries_max: int) -> None:
        self._clock = clock
        self._seconds = seconds
        self._entries_max = entries_max
        self._entries: OrderedDict[str, tuple[float, V]] = OrderedDict()
        self._loading: dict[str, asyncio.Future[V]] = {}

    async def get(self, key: str, load: Callable[[], Awaitable[V]]) -> V:
        """The value, loaded when none is fresh; those who ask meanwhile share the load, its failure too."""
        while (entry := self._fresh(key)) is None:
            shared = self._loading.get(key)
            if shared is None:
                return await self._load_for_all(key, load)
            await asyncio.wait([shared])
            if not shared.cancelled():
                return shared.result()
        return entry[1]

    async def _load_for_all(self, key: str, load: Callable[[], Awaitable[V]]) -> V:
        shared = self._loading[key] = asyncio.get_running_loop().create_future()
        try:
            value = await self.reload(key, load)
            shared.set_result(value)
        except Exception as error:
            shared.set_exception(error)
            shared.exception()  # looked at, also when nobody waits
            raise
        finally:
            del self._loading[key]
            shared.cancel()  # of a load that was cancelled, so that the next one who asks loads
        return value

    async def reload(self, key: str, load: Callable[[], Awaitable[V]]) -> V:
        """The value as it is now."""
        began = self._now()
        value = await load()
        self._entries[key] = (began, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)
        return value

    def forget(self, key: str) -> None:
        """Load this one the next time that it is asked for."""
        self._entries.pop(key, None)

    def _fresh(self, key: str) -> tuple[float, V] | None:
        entry = self._entries.get(key)
        if entry is None or self._now() - entry[0] >= self._seconds:
            return None
        self._entries.move_to_end(key)
        return entry

    def _now(self) -> float:
        # Steady, so that a host clock set back keeps nothing alive; the offset lets a test move it.
        return self._clock.monotonic_seconds() + self._clock.offset.total_seconds()
