"""Ordering: the strategy of a pool over its eligible entries, with the rotation state of this replica."""

from __future__ import annotations

from collections.abc import Sequence

from policy_service.application.errors import UnknownStrategyError
from policy_service.application.pools import Pool
from policy_service.application.ports import Entropy
from policy_service.application.rotation import BoundedStates
from policy_service.domain.strategies import IMPLEMENTED_STRATEGIES, priority, round_robin, weighted
from policy_service.domain.strategies.round_robin import Rotation


class Ordering:
    """Strategy names to pure orderings."""

    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self._rotations: BoundedStates[Rotation] = BoundedStates(Rotation())

    def order(self, pool: Pool, eligible: Sequence[int]) -> tuple[Sequence[int], Rotation | None]:
        """Eligible positions in order of preference, and the rotation to keep if the answer is used.

        Raises:
            UnknownStrategyError: the pool's strategy is none that this release implements.
        """
        name = pool.strategy
        if name in ("priority", "fill-first"):
            return priority.order(eligible), None
        if name == "weighted":
            return weighted.order(eligible, pool.weights, self._entropy.draw()), None
        if name == "round-robin":
            return self._rotate(pool, eligible)
        raise UnknownStrategyError(name, IMPLEMENTED_STRATEGIES)

    def keep(self, pool: Pool, rotation: object | None) -> None:
        """Remember the rotation of a used answer."""
        if isinstance(rotation, Rotation) and pool.route:
            self._rotations.put(pool.route, rotation)

    def _rotate(self, pool: Pool, eligible: Sequence[int]) -> tuple[Sequence[int], Rotation]:
        return round_robin.order(eligible, pool.size, self._rotations.get(pool.route), pool.sticky_limit)
