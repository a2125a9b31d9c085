"""How often a tenant may call: a moving window per tenant in this process, counted when the caller is known and before anything else.

The rate and the window are the `limits` library's. Where it notes the calls is here, because its own memory goes by the host's clock, which
may be set back, and hands each look to a thread. No call waits for another: nothing is awaited between looking and noting.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from limits import parse
from limits.aio.storage import MovingWindowSupport, Storage
from limits.aio.strategies import MovingWindowRateLimiter

if TYPE_CHECKING:
    from starlette.datastructures import MutableHeaders

    from ipn_gateway.clock import Clock

HEADERS: Final = ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")
"""In every answer to a call with a valid key. Reset is the number of whole seconds until the next call leaves the window."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a tenant stands after a call, which was let through or not."""

    let_through: bool
    calls_max: int
    remaining: int
    reset_seconds: int

    def write(self, headers: MutableHeaders) -> None:
        """Say so in an answer, in place of what a stored one said."""
        headers.update(dict(zip(HEADERS, map(str, (self.calls_max, self.remaining, self.reset_seconds)), strict=True)))


class Limiter:
    """`rate` is IPN_RATE_LIMIT_PER_TENANT, such as 200/second."""

    def __init__(self, rate: str, clock: Clock) -> None:
        self._rate = parse(rate)
        self._calls = Calls(clock)
        self._window = MovingWindowRateLimiter(self._calls)

    async def take(self, tenant_id: str) -> Standing:
        """One more call of a tenant. One that is not let through does not count."""
        let_through = await self._window.hit(self._rate, tenant_id)
        after = await self._window.get_window_stats(self._rate, tenant_id)
        return Standing(let_through, self._rate.amount, after.remaining, max(1, math.ceil(after.reset_time - self._calls.now())))


class Calls(Storage, MovingWindowSupport):
    """When the tenants called, on a steady clock. Holds what was let through within one window; tenants that are idle leave."""

    STORAGE_SCHEME = None

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()  # oldest call first; last the one that was let through last

    def __len__(self) -> int:
        return len(self._times)

    def now(self) -> float:
        """Seconds. The offset lets a test move it."""
        return self._clock.monotonic_seconds() + self._clock.offset.total_seconds()

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Note `amount` calls now, if there is room for them among the `limit` of `expiry` seconds; whether there was."""
        now = self.now()
        self._forget_idle(now - expiry)
        times = self._since(key, now - expiry)
        if len(times) + amount > limit:
            return False
        times.extend([now] * amount)
        self._times[key] = times
        self._times.move_to_end(key)
        return True

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:  # noqa: ARG002 - the library's signature
        """When the oldest call of the last `expiry` seconds was, now if there was none, and how many there were."""
        now = self.now()
        times = self._since(key, now - expiry)
        return (times[0] if times else now), len(times)

    def _since(self, key: str, start: float) -> deque[float]:
        times = self._times.get(key, deque())
        while times and times[0] <= start:
            times.popleft()
        return times

    def _forget_idle(self, start: float) -> None:
        while self._times and not self._since(next(iter(self._times)), start):
            self._times.popitem(last=False)

    async def clear(self, key: str) -> None:
        """Forget a tenant's calls."""
        self._times.pop(key, None)

    async def reset(self) -> int:
        """Forget all calls; of how many tenants."""
        tenants = len(self._times)
        self._times.clear()
        return tenants

    async def check(self) -> bool:
        """Memory is always there."""
        return True

    @property
    def base_exceptions(self) -> tuple[type[Exception], ...]:
        """None: what goes wrong in here is a fault of ours."""
        return ()

    async def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Of other windows than the moving one; not kept."""
        raise NotImplementedError

    async def get(self, key: str) -> int:
        """Of other windows than the moving one; not kept."""
        raise NotImplementedError

    async def get_expiry(self, key: str) -> float:
        """Of other windows than the moving one; not kept."""
        raise NotImplementedError
