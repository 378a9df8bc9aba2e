"""Strategy `priority` (and `fill-first`): configured order."""

from __future__ import annotations

from collections.abc import Sequence


def order(eligible: Sequence[int]) -> Sequence[int]:
    """Positions as configured, the very sequence given. Args: eligible: configured positions, ascending."""
    return eligible
