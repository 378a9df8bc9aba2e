"""Which entries of a pool pass gates (a cap, a queue), and which gates those are. Free entries cost one look."""

from __future__ import annotations

from policy_service.application.permit_gates import passage_of
from policy_service.application.permit_work import Passage
from policy_service.application.pools import Pool
from policy_service.application.view import View
from policy_service.domain.ids import Target
from policy_service.domain.permits import QUOTA_SHARE, OnSaturation, fallback_needs_permit


class Passages:
    """Answers for the policy in force."""

    def __init__(self, view: View) -> None:
        self._view = view

    def needed(self, pool: Pool, position: int, target: Target) -> bool:
        """True where a dispatch to `target` takes a permit."""
        if not self._view.policy.has_gates and not pool.caps and "concurrency" not in pool.options:
            return False
        return bool(self.of(pool, position, target).gates)

    def needed_behind(self, pool: Pool, position: int, target: Target) -> bool:
        """True where a fallback to `target` takes a permit: in quota-share only in mode `reject` (section 4.2)."""
        if not self.needed(pool, position, target):
            return False
        mode = OnSaturation(self._view.policy.setting("concurrency.quota_share.on_saturation"))
        is_free = pool.strategy == QUOTA_SHARE and not fallback_needs_permit(mode)
        return not is_free or bool(self.of(pool, position, target).limiter)

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
