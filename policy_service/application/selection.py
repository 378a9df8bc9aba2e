"""The opening of a selection: pool, gates, what this request rules out, and the strategy's order. From memory alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policy_service.application.callers import Registry
from policy_service.application.gating import Gated, Gating
from policy_service.application.messages import Candidate, EarlierAttempt, SelectRequest
from policy_service.application.ordering import Ordering
from policy_service.application.overflow_facts import OverflowFacts
from policy_service.application.pin_selection import Pinned
from policy_service.application.pins import PinAnswer
from policy_service.application.pools import Pool, Pools
from policy_service.application.ports import Clock, Entropy
from policy_service.application.stickiness import RouteStickiness
from policy_service.application.view import View
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import ConnectionId, Instant, ModelId, ProviderId, Target
from policy_service.domain.lease_context import is_managed
from policy_service.domain.request_exhaustion import NOTHING, Exhausted, FailedAttempt, exhausted
from policy_service.domain.stickiness import StickyKey


@dataclass(slots=True)
class Selection:
    """One selection under way; positions are entries of its pool."""

    request: SelectRequest
    decision_id: str
    pool: Pool
    gated: Gated
    now: Instant
    order: Sequence[int]
    excluded: Sequence[Exclusion]
    gone: Exhausted = NOTHING
    fresh_rotation: object | None = None
    accounts: dict[int, Target] | None = None
    """Accounts that replace the account strategy's choice, by position."""
    pin: PinAnswer | None = None
    degraded: tuple[str, ...] = ()
    """Why this answer is degraded beyond what the replica knows of its view."""
    sticky: StickyKey | None = None
    """Conversation that this decision belongs to, for route stickiness."""

    def target(self, position: int) -> Target:
        """Target that would serve an entry."""
        chosen = self.accounts.get(position) if self.accounts else None
        return chosen or self.gated.targets[position]

    def choose_account(self, position: int, target: Target) -> None:
        """Let `target` serve an entry instead of the account strategy's choice."""
        if target != self.gated.targets[position]:
            self.accounts = {**(self.accounts or {}), position: target}

    def follow(self, pinned: Pinned) -> None:
        """Take over the order that session affinity gives."""
        self.order, self.pin = pinned.order, pinned.answer
        if pinned.target is not None and self.order:
            self.choose_account(self.order[0], pinned.target)

    def exclude(self, exclusion: Exclusion) -> None:
        """Add one record."""
        self.excluded = (*self.excluded, exclusion)


@dataclass(frozen=True, slots=True)
class Reach:
    """Connections that a caller is kept from: withdrawn by managed keys, or not on its list."""

    hidden: frozenset[str]
    allowed: frozenset[str]
    """Empty: every connection that is not hidden."""

    def barrier(self, connection: str) -> str:
        """Reason that keeps the caller from a connection; empty where nothing does."""
        if connection in self.hidden:
            return "lease_hidden"
        return "lease_not_allowed" if self.allowed and connection and connection not in self.allowed else ""


class Opening:
    """Begins selections. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        view: View,
        clock: Clock,
        entropy: Entropy,
        registry: Registry,
        ordering: Ordering,
        stickiness: RouteStickiness,
        replica: str,
        overflows: OverflowFacts,
    ) -> None:
        self._view = view
        self._clock = clock
        self._entropy = entropy
        self._registry = registry
        self._ordering = ordering
        self._stickiness = stickiness
        self._pools = Pools(view.policy)
        self.gating = Gating(view, replica, overflows.note)

    def begin(self, request: SelectRequest) -> Selection | None:
        """The selection with its order; None where there is nothing to select from.

        Raises:
            UnknownStrategyError: the strategy is none of the known names.
        """
        now = self._clock.now()
        pool = self._pool(request)
        if pool is None or not pool.size:
            return None
        gated = self._gate(pool, request, now)
        s = Selection(request, self._entropy.new_id(), pool, gated, now, gated.eligible, gated.exclusions)
        reach = self._reach(request)
        if request.earlier_attempts or request.forced_connection or reach is not None:
            self._narrow(s, reach)
        s.order, s.fresh_rotation = self._ordering.order(pool, s.order)
        if request.route and request.session.first_user_text:
            self._stick(s)
        return s

    def _stick(self, s: Selection) -> None:
        """The target that served this conversation last goes first (affinity.md section 8)."""
        s.sticky = self._stickiness.key(s.request, s.pool.options)
        first = self._stickiness.prefer(s.sticky, s.order, s.gated.targets, s.now)
        if first is not None:
            s.order = (first, *(position for position in s.order if position != first))

    def eligible_accounts(self, s: Selection, position: int) -> Sequence[Target]:
        """Accounts of an entry that pass the gates."""
        accounts = s.pool.accounts[position]
        if len(accounts) == 1:
            return accounts
        return [t for t in accounts if self.gating.check(t, s.pool, position, s.now).exclusion is None]

    def _pool(self, request: SelectRequest) -> Pool | None:
        if self._pools.policy is not self._view.policy:
            self._pools = Pools(self._view.policy)
        if request.route:
            return self._pools.route(request.route)
        return self._pools.inline(request.candidates, request.strategy, request.strategy_options)

    def _gate(self, pool: Pool, request: SelectRequest, now: Instant) -> Gated:
        if request.traits.allow_cooling:
            return self.gating.evaluate(pool, now, allow_cooling=True)
        return self.gating.of(pool, now)

    # -- what this request rules out -------------------------------------------------------------------
    def _reach(self, request: SelectRequest) -> Reach | None:
        """What the caller is kept from; None, the common case, where nothing is."""
        callers = self._registry.now_in_force
        named = request.caller_id or request.caller_key_sha256
        if not callers.managed and not request.allowed_connections and not (named and callers.any_limited):
            return None
        caller = callers.find(request.caller_id, request.caller_key_sha256) if named else None
        own = frozenset(caller.allowed_connections) if caller else frozenset()
        asked = frozenset(request.allowed_connections)
        hidden = frozenset() if caller is not None and is_managed(caller) else callers.managed
        return Reach(hidden, (own & asked or asked) if own and asked else own | asked)

    def _narrow(self, s: Selection, reach: Reach | None) -> None:
        """Leave out what earlier attempts, a forced connection and the caller's reach rule out."""
        request = s.request
        # After a Wait the sets of exhaustion start afresh (cooldown_wait.md section 3): attempts that the Wait's token
        # counts are not held against their targets any more.
        waited_out = request.previous.attempts_made if request.previous else 0
        s.gone = self._exhausted(request.earlier_attempts[waited_out:])
        kept: list[int] = []
        excluded = list(s.gated.exclusions)
        for position in s.gated.eligible:
            reasons = list(self._ruled_out(s, position, reach))
            if not reasons:
                kept.append(position)
            elif reasons[0]:
                key = s.pool.key(position)
                excluded.append(Exclusion(s.target(position), reasons[0], stage=_stage(reasons[0]), target_key=key))
        s.order, s.excluded = kept, excluded

    def _ruled_out(self, s: Selection, position: int, reach: Reach | None) -> Iterator[str]:
        """Why an entry may not serve this request; an empty reason leaves no record. Another account of an open
        entry may take the place of one that may not."""
        first = self._reason(s, s.gated.targets[position], reach)
        if first is None:
            return
        others = s.pool.accounts[position]
        for target in others if len(others) > 1 else ():
            is_free = self.gating.check(target, s.pool, position, s.now).exclusion is None
            if is_free and self._reason(s, target, reach) is None:
                s.choose_account(position, target)
                return
        yield first

    @staticmethod
    def _reason(s: Selection, target: Target, reach: Reach | None) -> str | None:
        forced = s.request.forced_connection
        if forced and target.connection != forced:
            return ""
        if s.gone.covers(target):
            return "request_exhaustion"
        return (reach.barrier(target.connection) or None) if reach else None

    def _exhausted(self, attempts: Sequence[EarlierAttempt]) -> Exhausted:
        policy = self._view.policy
        return exhausted(
            (FailedAttempt(self._target(a), a.status, a.reason, a.scope, a.code) for a in attempts),
            lambda target: policy.for_connection(target.provider, target.connection).counts_per_model,
        )

    def _target(self, named: Candidate | EarlierAttempt) -> Target:
        canonical = self._view.policy.canonical(named.provider)
        return Target(ProviderId(canonical), ConnectionId(named.connection), ModelId(named.model))


def _stage(reason: str) -> str:
    return "attempt" if reason == "request_exhaustion" else "gate"
