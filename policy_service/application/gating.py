"""Which entries of a pool may run now: the eligibility gates over the view, kept per route while nothing changes.

A pool's gate result depends on the view and on time alone, so it is kept until the view changes or the next
instant at which time changes an answer. Healthy traffic on a named route therefore does not look at its targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policy_service.application.messages import Dispatch, TokenTarget
from policy_service.application.pools import Pool
from policy_service.application.view import View
from policy_service.domain.eligibility import Gate, check_target, longest_timer
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import Instant, Target

NEVER: Instant = 1 << 62


@dataclass(slots=True)
class Gated:
    """Result of the gates over one pool."""

    eligible: Sequence[int]
    """Positions that may run, ascending."""
    targets: Sequence[Target]
    """By position: the target that would serve (of an eligible entry the chosen account)."""
    probing: frozenset[int]
    """Eligible positions that need a grant first (breaker HALF_OPEN or in a slow start)."""
    exclusions: Sequence[Exclusion]
    valid_until: Instant
    view_version: int
    named: list[TokenTarget | None]
    """By position: the target as tokens name it, made at first use."""
    configured: Dispatch | None = None
    """Dispatch of the eligible in configured order with the default number of fallbacks, made at first use."""


class Gating:
    """Evaluates pools against the view."""

    def __init__(self, view: View, replica: str = "") -> None:
        self._view = view
        self._replica = replica

    def of(self, pool: Pool, now: Instant) -> Gated:
        """Gate result of a pool, from memory while it holds."""
        kept = pool.gated
        if kept is not None and kept.view_version == self._view.version and now < kept.valid_until:
            return kept
        gated = pool.gated = self.evaluate(pool, now)
        return gated

    def evaluate(self, pool: Pool, now: Instant, allow_cooling: bool = False) -> Gated:
        """Gate every entry of a pool."""
        view = self._view
        disabled = view.policy.disabled_connections
        provider_rows = view.provider_rows
        eligible: list[int] = []
        targets: list[Target] = []
        probing: list[int] = []
        exclusions: list[Exclusion] = []
        valid_until = NEVER
        for position, accounts in enumerate(pool.accounts):
            first = accounts[0]
            if provider_rows(first.provider) is None and first.connection not in disabled:
                eligible.append(position)
                targets.append(first)
                continue
            target, gate = self._first_passing(pool, position, now, allow_cooling)
            valid_until = min(valid_until, gate.changes_at or NEVER)
            targets.append(target)
            if gate.exclusion is not None:
                exclusions.append(gate.exclusion)
                continue
            eligible.append(position)
            if gate.needs_grant:
                probing.append(position)
        return Gated(
            eligible,
            targets,
            frozenset(probing),
            exclusions,
            valid_until,
            view.version,
            [None] * pool.size,
        )

    def _first_passing(self, pool: Pool, position: int, now: Instant, allow_cooling: bool) -> tuple[Target, Gate]:
        """First account that passes; else the one that returns first."""
        best: tuple[Target, Gate] | None = None
        changes_at = NEVER
        for target in pool.accounts[position]:
            gate = self.check(target, pool, position, now, allow_cooling)
            changes_at = min(changes_at, gate.changes_at or NEVER)
            if gate.exclusion is None:
                return target, gate.changing_at(changes_at)
            if best is None or _returns_before(gate.exclusion, best[1].exclusion):
                best = (target, gate)
        assert best is not None
        return best[0], best[1].changing_at(changes_at)

    def check(self, target: Target, pool: Pool, position: int, now: Instant, allow_cooling: bool = False) -> Gate:
        """Gate one target."""
        policy = self._view.policy
        rows = self._view.provider_rows(target.provider)
        return check_target(
            rows or {},
            target,
            policy.for_connection(target.provider, target.connection, pool.auth_class(position)),
            now,
            key=pool.key(position),
            is_disabled=target.connection in policy.disabled_connections,
            allow_cooling=allow_cooling,
            replica=self._replica,
        )

    def longest_timer(self, target: Target, now: Instant) -> Exclusion | None:
        """Timer that holds an excluded target longest; None where no timer does."""
        policy = self._view.policy.for_connection(target.provider, target.connection)
        return longest_timer(self._view.provider_rows(target.provider) or {}, target, policy, now, self._replica)


def _returns_before(one: Exclusion, other: Exclusion | None) -> bool:
    return other is None or (one.until or NEVER) < (other.until or NEVER)
