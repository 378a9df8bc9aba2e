"""Strategy `round-robin`: a position over the configured list, with an optional sticky target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_STICKY_LIMIT = 3


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotation state of one route on one replica."""

    position: int = 0
    """Configured position from which the next pick starts."""
    sticky: int | None = None
    """Position that is being repeated; None: none."""
    served: int = 0
    """Requests that the sticky target has served in a row."""


def order(
    eligible: Sequence[int], size: int, rotation: Rotation, sticky_limit: int = DEFAULT_STICKY_LIMIT
) -> tuple[list[int], Rotation]:
    """Positions in rotation order and the next state.

    Args:
        eligible: configured positions, ascending.
        size: number of configured targets.
        rotation: state of the route.
        sticky_limit: requests a target serves in a row; <= 1 rotates with every request.
    """
    if not eligible:
        return [], rotation
    if rotation.sticky in eligible and rotation.served < sticky_limit:
        lead = rotation.sticky
        assert lead is not None
        served = rotation.served + 1
    else:
        lead = min(eligible, key=lambda i: (i - rotation.position) % size)
        served = 1
    following = sorted((i for i in eligible if i != lead), key=lambda i: (i - lead) % size)
    return [lead, *following], Rotation((lead + 1) % size, lead, served)
