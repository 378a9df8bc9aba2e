"""What the measurement yields: figures with unit, ratio to the echo, goal and whether it was met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, Literal, NamedTuple

ROUNDS: Final = 5
"""Least number of interleaved rounds; a figure is the median over them, so that a busy moment spoils one of five."""


class Goal(NamedTuple):
    """A bound on the ratio to the reference, or on the figure itself."""

    of: Literal["ratio", "service"]
    sign: Literal[">=", "<=", "<"]
    bound: float

    def met(self, figure: Figure) -> bool | None:
        """Whether the figure reaches the goal; None where it has no such value."""
        value = figure.ratio if self.of == "ratio" else figure.service
        if value is None:
            return None
        if self.sign == ">=":
            return value >= self.bound
        return value < self.bound if self.sign == "<" else value <= self.bound

    def text(self) -> str:
        """For people."""
        return f"{'ratio ' if self.of == 'ratio' else ''}{self.sign} {self.bound:g}"


GOALS: Final[dict[str, Goal]] = {
    "select_inline.throughput": Goal("ratio", ">=", 0.65),
    "select_route.throughput": Goal("ratio", ">=", 0.65),
    "select_inline.p50": Goal("ratio", "<=", 1.4),
    "select_route.p50": Goal("ratio", "<=", 1.4),
    "database.statements_per_decision": Goal("service", "<=", 0),
    "classify.p50": Goal("service", "<", 60),
    "tracing.off": Goal("ratio", "<=", 1.02),
}
ENVOY_GOALS: Final[dict[str, Goal]] = {
    "envoy.headers.added_p50": Goal("ratio", "<=", 1.5),
    "envoy.body.added_p50": Goal("ratio", "<=", 1.5),
    "envoy.headers.throughput": Goal("ratio", ">=", 0.7),
    "envoy.body.throughput": Goal("ratio", ">=", 0.7),
}
"""Of `bench --envoy`."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value.

    Args:
        service, reference: medians over the rounds; the reference is the echo, or the same code without what is
            measured; None where there is none.
        ratio: median of the ratios of each round, service over its neighbour.
        rounds: what each round gave, service and reference.
    """

    name: str
    title: str
    unit: str
    service: float
    reference: float | None = None
    ratio: float | None = None
    rounds: tuple[tuple[float, float | None], ...] = ()

    @property
    def goal(self) -> Goal | None:
        """The bound that this figure is held against."""
        return GOALS.get(self.name) or ENVOY_GOALS.get(self.name)

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        return self.goal.met(self) if self.goal else None

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "goal": self.goal.text() if self.goal else None, "met": self.met}


def compared(name: str, title: str, unit: str, pairs: Sequence[tuple[float, float]]) -> Figure:
    """Figure of interleaved rounds: pairs of service and reference, measured next to each other."""
    service, reference = (median(side) for side in zip(*pairs, strict=True))
    ratio = median(ours / theirs for ours, theirs in pairs)
    return Figure(name, title, unit, service, reference, ratio, tuple(pairs))


def alone(name: str, title: str, unit: str, values: Sequence[float]) -> Figure:
    """Figure without a counterpart."""
    return Figure(name, title, unit, median(values), rounds=tuple((value, None) for value in values))
