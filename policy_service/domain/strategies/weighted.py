"""Strategy `weighted`: one draw by weight leads, the others follow by weight descending."""

from __future__ import annotations

from collections.abc import Sequence


def order(eligible: Sequence[int], weights: Sequence[float], draw: float) -> list[int]:
    """Positions with the drawn one first.

    Args:
        eligible: configured positions, ascending.
        weights: weight of every configured target, by position; all 0 among the eligible means uniform.
        draw: uniform in [0, 1).
    """
    if not eligible:
        return []
    lead = _drawn(eligible, [weights[i] for i in eligible], draw)
    rest = sorted((i for i in eligible if i != lead), key=lambda i: -weights[i])
    return [lead, *rest]


def _drawn(eligible: Sequence[int], weights: Sequence[float], draw: float) -> int:
    total = sum(weights)
    if total <= 0:
        return eligible[int(draw * len(eligible))]
    threshold = draw * total
    reached = 0.0
    for position, weight in zip(eligible, weights, strict=True):
        reached += weight
        if threshold < reached:
            return position
    return max(zip(weights, eligible, strict=True))[1]
