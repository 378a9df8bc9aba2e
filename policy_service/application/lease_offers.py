"""Which connections a lease may be on: the ordinary gates over every account (spec/leases.md section 7).

A lease is on an account, so that an entry that stands for several accounts offers each of them, not the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from policy_service.application.gating import Gating
from policy_service.application.lease_terms import Offer
from policy_service.application.pools import Pool, Pools
from policy_service.application.ports import Clock
from policy_service.application.view import View
from policy_service.domain.catalogue import Caller, Connection
from policy_service.domain.ids import ConnectionId, Instant, ModelId, ProviderId, Target
from policy_service.domain.policy import Policy
from policy_service.domain.strategies import DEFAULT_STRATEGY


class AccountOffer(NamedTuple):
    """One account of a pool's entry, as the gates judge it."""

    position: int
    offer: Offer
    needs_grant: bool


def account_offers(pool: Pool, gating: Gating, now: Instant) -> list[AccountOffer]:
    """Every account of every entry, in configured order."""
    return [_judged(pool, gating, position, account, now) for position, account in _accounts(pool)]


def _accounts(pool: Pool) -> Iterable[tuple[int, int]]:
    return ((position, account) for position in range(pool.size) for account in range(len(pool.accounts[position])))


def _judged(pool: Pool, gating: Gating, position: int, account: int, now: Instant) -> AccountOffer:
    target = pool.accounts[position][account]
    gate = gating.check(target, pool, position, now)
    return AccountOffer(position, Offer(target, gate.exclusion), gate.exclusion is None and gate.needs_grant)


class ConnectionOffers:
    """Connections for AcquireLease (implements `lease_terms.Offers`).

    The model may name a route. A model that routes name is served by their providers; any other by the providers of
    the allowed connections.
    """

    def __init__(self, view: View, clock: Clock, replica: str = "") -> None:
        self._view = view
        self._clock = clock
        self._gating = Gating(view, replica)
        self._pools = Pools(view.policy)

    def __call__(self, caller: Caller, model: str, allowed: frozenset[str]) -> Sequence[Offer] | None:
        policy = self._view.policy
        if self._pools.policy is not policy:
            self._pools = Pools(policy)
        pool = self._pools.route(model) or _pool_of(policy, model, allowed)
        if not pool.size:
            return None
        return [each.offer for each in account_offers(pool, self._gating, self._clock.now())]


def _pool_of(policy: Policy, model: str, allowed: frozenset[str]) -> Pool:
    """Allowed connections of the providers that serve the model, in order of priority number."""
    serving = _providers(policy, model)
    declared = (policy.catalogue.connections[name] for name in sorted(allowed & policy.catalogue.connections.keys()))
    chosen = [each for each in declared if not serving or policy.canonical(each.provider) in serving]
    return _pool(policy, model, sorted(chosen, key=lambda each: each.priority))


def _providers(policy: Policy, model: str) -> frozenset[str]:
    targets = (target for route in policy.catalogue.routes.values() for target in route.targets)
    return frozenset(policy.canonical(target.provider) for target in targets if target.model == model)


def _pool(policy: Policy, model: str, connections: Sequence[Connection]) -> Pool:
    targets = [
        Target(ProviderId(policy.canonical(each.provider)), ConnectionId(each.id), ModelId(model))
        for each in connections
    ]
    return Pool("", DEFAULT_STRATEGY, [(target,) for target in targets], [1.0] * len(targets))
