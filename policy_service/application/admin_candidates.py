"""Candidates of a route as they stand now, for operators: every account of every entry with what keeps it out.

Read from memory: rotates nothing, acquires nothing, writes nothing. What single requests rule out (earlier attempts,
caller lists, pins) is not part of it; a connection that managed keys list is shown as hidden, as it is to all others.
"""

from __future__ import annotations

from typing import NamedTuple

from policy_service.application.callers import Registry
from policy_service.application.errors import NotFoundError
from policy_service.application.gate_loads import GateLoads
from policy_service.application.gating import Gating
from policy_service.application.lease_offers import AccountOffer, account_offers
from policy_service.application.messages import Exclusion
from policy_service.application.passages import Passages
from policy_service.application.pools import Pool, Pools
from policy_service.application.ports import Clock
from policy_service.application.selection_answers import rendered
from policy_service.application.view import View
from policy_service.domain.exclusions import Exclusion as Excluded
from policy_service.domain.ids import Instant, Target


class CandidateView(NamedTuple):
    """One account of one entry; `exclusion` None: it may serve now."""

    target: Target
    key: str
    exclusion: Exclusion | None


class RouteCandidates(NamedTuple):
    """Candidates in configured order."""

    strategy: str
    candidates: tuple[CandidateView, ...]


class Candidates:
    """The use case.

    Args:
        loads: loads of the gates, for caps that are full.
        replica: name of this replica, whose own open breakers count too.
    """

    def __init__(self, view: View, clock: Clock, registry: Registry, loads: GateLoads, replica: str) -> None:
        self._view = view
        self._clock = clock
        self._registry = registry
        self._loads = loads
        self._gating = Gating(view, replica)
        self._passages = Passages(view)
        self._pools = Pools(view.policy)

    def of_route(self, name: str) -> RouteCandidates:
        """Every candidate of a route; NotFoundError where there is no such route."""
        pool = self._pool(name)
        now = self._clock.now()
        waived = self._waived(pool, now)
        return RouteCandidates(
            pool.strategy,
            tuple(self._shown(pool, each, waived, now) for each in account_offers(pool, self._gating, now)),
        )

    def _pool(self, name: str) -> Pool:
        """Pools of its own: gate results that a listing leaves must not be taken for a selection's."""
        if self._pools.policy is not self._view.policy:
            self._pools = Pools(self._view.policy)
        pool = self._pools.route(name)
        if pool is None:
            raise NotFoundError("the catalogue in force has no route of this name")
        return pool

    def _waived(self, pool: Pool, now: Instant) -> frozenset[tuple[int, Target]]:
        """Targets that serve although a timer excludes them: the pool guard waives it (spec/guards.md section 6)."""
        if not self._view.policy.pool_guard.enabled:
            return frozenset()
        gated = self._gating.evaluate(pool, now)
        return frozenset((position, gated.targets[position]) for position in gated.eligible)

    def _shown(
        self, pool: Pool, each: AccountOffer, waived: frozenset[tuple[int, Target]], now: Instant
    ) -> CandidateView:
        target, gate = each.offer.target, each.offer.exclusion
        if (each.position, target) in waived:
            gate = None
        found = gate or self._barrier(pool, each.position, target)
        return CandidateView(target, pool.key(each.position), None if found is None else rendered(found, now))

    def _barrier(self, pool: Pool, position: int, target: Target) -> Excluded | None:
        """What keeps a target out that passes the gates: a lease's listing, or a gate without room."""
        if target.connection in self._registry.now_in_force.managed:
            return Excluded(target, "lease_hidden", target_key=pool.key(position))
        if not self._passages.needed(pool, position, target):
            return None
        for gate in self._passages.of(pool, position, target).gates:
            if self._loads.is_full(gate.key, gate.limit):
                until = self._loads.of(gate.key).first_end
                return Excluded(target, "concurrency_cap", until, target_key=pool.key(position))
        return None
