"""Strategy `priority` (and `fill-first`): configured order."""

from __future__ import annotations

from collections.abc import Sequence


def order(eligible: Sequence[int]) -> list[int]:
    """Positions as configured. Args: eligible: configured positions, ascending."""
    return list(eligible)
