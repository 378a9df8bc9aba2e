"""Which entries of a pool pass gates (a cap, a queue), and which gates those are. Free entries cost one look."""

from __future__ import annotations

from policy_service.application.permit_gates import passage_of
from policy_service.application.permit_work import Passage
from policy_service.application.pools import Pool
from policy_service.application.view import View
from policy_service.domain.ids import Target


class Passages:
    """Answers for the policy in force."""

    def __init__(self, view: View) -> None:
        self._view = view

    def needed(self, pool: Pool, position: int, target: Target) -> bool:
        """True where a dispatch to `target` takes a permit."""
        if not self._view.policy.has_gates and not pool.caps and "concurrency" not in pool.options:
            return False
        return bool(self.of(pool, position, target).gates)

    def of(self, pool: Pool, position: int, target: Target) -> Passage:
        """Gates of the dispatch; none where it takes no permit."""
        is_rotating = pool.strategy == "round-robin" and pool.route
        return passage_of(
            self._view.policy,
            target,
            strategy=pool.strategy if pool.route else "",
            options=pool.options,
            inline_cap=pool.caps[position] if pool.caps else None,
            auth_class=pool.auth_class(position),
            round_robin_key=f"{pool.route}:{pool.key(position) or position}" if is_rotating else "",
        )
