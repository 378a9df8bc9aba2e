"""Order of quota-share targets (spec/concurrency.md section 4.1): pure, with the deficits as explicit state."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policy_service.domain.ids import Instant

ROUTES_KEPT = 200
_TIE = 1e-9
_SHARED_BUCKETS = frozenset({"5h", "7d"})


@dataclass(frozen=True, slots=True)
class Bucket:
    """Last reading of one quota window of a connection; unknown values saturate nothing."""

    name: str
    """`5h`, `7d` or `7d:<bare model>`."""
    percent: float | None
    resets_at: Instant | None


@dataclass(frozen=True, slots=True)
class ShareTarget:
    """One target as the order sees it. `in_flight` counts requests, or held permits where they are more."""

    key: str
    weight: float = 1.0
    cap: int | None = None
    in_flight: int = 0
    model: str = ""
    buckets: tuple[Bucket, ...] = ()

    @property
    def share(self) -> float:
        """Weight, where one that is not positive (or no number) counts as 1."""
        return self.weight if math.isfinite(self.weight) and self.weight > 0 else 1.0

    @property
    def is_at_cap(self) -> bool:
        """In flight at or above the cap."""
        return self.cap is not None and self.cap > 0 and self.in_flight >= self.cap


@dataclass(frozen=True, slots=True)
class ShareOrder:
    """Targets in order of trial, and the deficits to keep for the route."""

    order: tuple[ShareTarget, ...]
    deficits: Mapping[str, float] = field(default_factory=dict)


def is_saturated(target: ShareTarget, now: Instant) -> bool:
    """True if a bucket that concerns the target is full and its reset still ahead."""
    own = f"7d:{bare_model(target.model)}"
    return any(_is_full(bucket, now) for bucket in target.buckets if bucket.name in _SHARED_BUCKETS | {own})


def _is_full(bucket: Bucket, now: Instant) -> bool:
    if bucket.percent is None or bucket.resets_at is None:
        return False
    return bucket.percent >= 100 and bucket.resets_at > now


def bare_model(model: str) -> str:
    """Model without the provider's prefix."""
    return model.rpartition("/")[2]


def order_targets(targets: Sequence[ShareTarget], deficits: Mapping[str, float], now: Instant) -> ShareOrder:
    """Tiers, deficit round-robin over the front tier, power of two choices between its leaders.

    Args:
        targets: in configured order.
        deficits: state of the route by target key; absent keys start at 0.
        now: for the resets of saturated buckets.
    """
    usable, saturated = _tiers(targets, [is_saturated(target, now) for target in targets])
    front, at_cap = _tiers(usable, [target.is_at_cap for target in usable])
    ranked, kept = _round(front, {target.key: deficits.get(target.key, 0.0) for target in targets})
    return ShareOrder((*_two_choices(ranked), *at_cap, *saturated), kept)


def _tiers(
    targets: Sequence[ShareTarget], demoted: Sequence[bool]
) -> tuple[tuple[ShareTarget, ...], tuple[ShareTarget, ...]]:
    """Front and demoted targets; nobody is demoted if nobody would be left."""
    if all(demoted):
        return tuple(targets), ()
    pairs = list(zip(targets, demoted, strict=True))
    return tuple(t for t, back in pairs if not back), tuple(t for t, back in pairs if back)


def _round(front: Sequence[ShareTarget], deficits: dict[str, float]) -> tuple[list[ShareTarget], dict[str, float]]:
    """One round: everybody gains a share, the largest deficit leads and pays 1. A single target plays no round."""
    if len(front) < 2:
        return list(front), deficits
    total = sum(target.share for target in front)
    for target in front:
        deficits[target.key] += target.share / total
    ranked = _by_deficit(front, deficits)
    deficits[ranked[0].key] -= 1.0
    return ranked, deficits


def _by_deficit(front: Sequence[ShareTarget], deficits: Mapping[str, float]) -> list[ShareTarget]:
    """Descending; differences below the tie width keep the order of input."""
    ranked: list[ShareTarget] = []
    for target in front:
        place = next((i for i, other in enumerate(ranked) if _leads(target, other, deficits)), len(ranked))
        ranked.insert(place, target)
    return ranked


def _leads(one: ShareTarget, other: ShareTarget, deficits: Mapping[str, float]) -> bool:
    return deficits[one.key] - deficits[other.key] >= _TIE


def _two_choices(ranked: list[ShareTarget]) -> list[ShareTarget]:
    """The runner-up goes first if it has strictly fewer in flight; the charge stays where it is."""
    if len(ranked) > 1 and ranked[1].in_flight < ranked[0].in_flight:
        return [ranked[1], ranked[0], *ranked[2:]]
    return ranked


class RouteDeficits:
    """Deficits of the routes of one replica; at most 200 routes, the one longest unused goes first."""

    def __init__(self, capacity: int = ROUTES_KEPT) -> None:
        self._capacity = capacity
        self._routes: OrderedDict[str, Mapping[str, float]] = OrderedDict()

    def get(self, route: str) -> Mapping[str, float]:
        """Deficits of a route, empty where none are kept."""
        return self._routes.get(route, {})

    def put(self, route: str, deficits: Mapping[str, float]) -> None:
        """Keep the deficits of a route."""
        self._routes[route] = deficits
        self._routes.move_to_end(route)
        while len(self._routes) > self._capacity:
            self._routes.popitem(last=False)
