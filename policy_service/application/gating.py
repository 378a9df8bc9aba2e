"""Which entries of a pool may run now: the eligibility gates over the view, kept per route while nothing changes.

A pool's gate result depends on the view and on time alone, so it is kept until the view changes or the next
instant at which time changes an answer. Healthy traffic on a named route therefore does not look at its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policy_service.application.messages import Dispatch, TokenTarget
from policy_service.application.pools import Pool
from policy_service.application.view import View
from policy_service.domain.eligibility import Gate, check_target, early_probe_due, longest_timer
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import Instant, Target
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.pool_guard import Member, judge_pool
from policy_service.domain.profiles import PoolGuardProfile

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
    early: Sequence[int] = ()
    """Excluded positions whose long block may be tested now (early probe)."""
    panic: Sequence[int] = ()
    """Positions to offer although they are excluded, best first; only where nothing is eligible (pool guard)."""
    configured: Dispatch | None = None
    """Dispatch of the eligible in configured order with the default number of fallbacks, made at first use."""


OnOverflow = Callable[[Pool, Sequence[Exclusion]], None]
"""Hears of exclusions that the pool guard leaves without effect, whenever a pool is evaluated anew."""


class Gating:
    """Evaluates pools against the view.

    Args:
        replica: name of this replica, whose own open breakers count too.
    """

    def __init__(self, view: View, replica: str = "", on_overflow: OnOverflow = lambda *_: None) -> None:
        self._view = view
        self._replica = replica
        self._on_overflow = on_overflow

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
        gated = Gated(
            eligible,
            targets,
            frozenset(probing),
            exclusions,
            valid_until,
            view.version,
            [None] * pool.size,
        )
        if exclusions:
            self._soften(gated, pool, now)
        return gated

    def _soften(self, gated: Gated, pool: Pool, now: Instant) -> None:
        """Opt-in guards: exclusions that the pool guard waives, and blocks that may be tested early."""
        if self._view.policy.pool_guard.enabled:
            waived = apply_pool_guard(gated, self._view.policy.pool_guard, now)
            if waived:
                self._on_overflow(pool, waived)
        excluded = {exclusion.target for exclusion in gated.exclusions}
        early: list[int] = []
        for position, target in enumerate(gated.targets):
            policy = self._policy(pool, position, target)
            if target not in excluded or not policy.early_probe.enabled:
                continue
            due = early_probe_due(self._view.provider_rows(target.provider) or {}, target, policy, now)
            if due is not None and due <= now:
                early.append(position)
            elif due is not None:
                gated.valid_until = min(gated.valid_until, due)
        gated.early = early

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
            self._policy(pool, position, target),
            now,
            key=pool.key(position),
            is_disabled=target.connection in policy.disabled_connections,
            allow_cooling=allow_cooling,
            replica=self._replica,
        )

    def _policy(self, pool: Pool, position: int, target: Target) -> ConnectionPolicy:
        return self._view.policy.for_connection(target.provider, target.connection, pool.auth_class(position))

    def longest_timer(self, target: Target, now: Instant) -> Exclusion | None:
        """Timer that holds an excluded target longest; None where no timer does."""
        policy = self._view.policy.for_connection(target.provider, target.connection)
        return longest_timer(self._view.provider_rows(target.provider) or {}, target, policy, now, self._replica)


def _returns_before(one: Exclusion, other: Exclusion | None) -> bool:
    return other is None or (one.until or NEVER) < (other.until or NEVER)


def apply_pool_guard(gated: Gated, profile: PoolGuardProfile, now: Instant) -> Sequence[Exclusion]:
    """Waive soft exclusions beyond the share, and name whom to offer in panic (spec/guards.md section 6).

    Returns the exclusions that were waived.
    """
    by_target = {exclusion.target: exclusion for exclusion in gated.exclusions}
    members = [
        member
        for position, target in enumerate(gated.targets)
        if (member := _member(str(position), by_target.get(target), now)) is not None
    ]
    verdict = judge_pool(members, profile, now)
    waived = {int(name) for name in verdict.not_enforced}
    gated.eligible = sorted({*gated.eligible, *waived}) if waived else gated.eligible
    gone = {gated.targets[position] for position in waived}
    gated.exclusions = [each for each in gated.exclusions if each.target not in gone]
    gated.panic = [int(name) for name in verdict.panic]
    return [exclusion for target, exclusion in by_target.items() if target in gone]


def _member(name: str, exclusion: Exclusion | None, now: Instant) -> Member | None:
    """A pool member as the guard sees it; None for a target that no timer will bring back."""
    if exclusion is None:
        return Member(name)
    if exclusion.reason == "forced_open":
        return Member(name, NEVER, exclusion.since or 0, fixed=True)
    if not exclusion.spec.is_recovery_timer:
        return None
    return Member(name, exclusion.until or now + 1, exclusion.since or 0, exclusion.is_fixed)
