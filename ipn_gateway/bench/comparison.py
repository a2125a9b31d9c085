"""The shape of every comparison: sides that are measured in turn, and findings that are made of what one turn measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ipn_gateway.errors import GatewayError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from ipn_gateway.bench.stage import Stage

    Figures = Mapping[str, float]
    Side = Callable[[], Awaitable[Figures]]


class Broken(GatewayError):
    """What was measured did not do its job, so its speed says nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A number made of one turn's figures. With a bound it is judged; without one it is told."""

    name: str
    of: Callable[[Figures], float]
    unit: str = "×"
    at_least: float | None = None
    at_most: float | None = None

    @property
    def judged(self) -> bool:
        """Whether there is a target."""
        return self.at_least is not None or self.at_most is not None

    @property
    def target(self) -> str:
        """The target as it is shown."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}" if self.at_most is not None else ""

    def met(self, value: float) -> bool | None:
        """Whether a value meets the target; None where there is none."""
        if not self.judged:
            return None
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def ratio(name: str, over: str, under: str, *, at_least: float | None = None, at_most: float | None = None) -> Finding:
    """One figure divided by another."""
    return Finding(name, lambda figures: figures[over] / figures[under], at_least=at_least, at_most=at_most)


def told(name: str, figure: str, unit: str, *, at_most: float | None = None) -> Finding:
    """A figure itself."""
    return Finding(name, lambda figures: figures[figure], unit, at_most=at_most)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is measured: `sides` opens what is needed and gives what each turn measures, in this order (A B A B).

    `once` is for what takes so long that there is one turn only.
    """

    name: str
    compares: str
    findings: Sequence[Finding]
    sides: Callable[[Stage], AbstractAsyncContextManager[Sequence[Side]]]
    once: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A finding's values, one of each turn."""

    finding: Finding
    values: Sequence[float]

    @property
    def value(self) -> float:
        """The median, which is what is judged."""
        return median(self.values)

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.finding.name,
            "unit": self.finding.unit,
            "value": rounded(self.value),
            "min": rounded(min(self.values)),
            "max": rounded(max(self.values)),
            "target": self.finding.target or None,
            "judged": self.finding.judged,
            "met": self.finding.met(self.value),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a comparison: its findings, and every figure of every turn. `broken` says why there are none."""

    comparison: Comparison
    seconds: float
    found: Sequence[Found] = ()
    turns: Sequence[Figures] = field(default=())
    broken: str | None = None

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.comparison.name,
            "compares": self.comparison.compares,
            "broken": self.broken,
            "seconds": round(self.seconds, 1),
            "findings": [found.shown() for found in self.found],
            "turns": [{name: rounded(value) for name, value in turn.items()} for turn in self.turns],
        }


def rounded(value: float) -> float:
    """Four digits, which is more than a benchmark knows."""
    return float(f"{value:.4g}")
