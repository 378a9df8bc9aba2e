"""SelectTarget: where may this request go now, and why not elsewhere (spec/README.md, order for one selection).

Decided from memory. Only a target whose breaker is half open (or in a slow start) costs a guarded transaction:
its permit is acquired as the last act before the target is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from policy_service.application.freshness import Freshness
from policy_service.application.gating import Gated, Gating
from policy_service.application.grants import Granted, Grants
from policy_service.application.messages import (
    Candidate,
    DecisionToken,
    Dispatch,
    EarlierAttempt,
    PermitKind,
    Reject,
    SelectAnswer,
    SelectRequest,
    TokenTarget,
    Wait,
    WaitSpent,
)
from policy_service.application.ordering import Ordering
from policy_service.application.pools import Pool, Pools
from policy_service.application.ports import Clock, Entropy
from policy_service.application.selection_answers import (
    explanation,
    has_permit,
    least,
    permit_refs,
    pool_name,
    refusal_message,
    rendered,
)
from policy_service.application.view import View
from policy_service.domain import exclusions as gate
from policy_service.domain.cooldown_wait import WaitBudget, WaitDecision, decide_wait
from policy_service.domain.eligibility import lock_keys
from policy_service.domain.ids import ConnectionId, Generations, Instant, ModelId, ProviderId, Target
from policy_service.domain.request_exhaustion import NOTHING, Exhausted, FailedAttempt, exhausted
from policy_service.domain.strategies import DEFAULT_STRATEGY
from policy_service.domain.terminal_answer import terminal_answer

DEFAULT_FALLBACKS = 8
PROBE_SETTLES_MS = 1_000
"""How soon a request that may wait looks again while another call is the probe."""
NO_GENERATIONS = Generations()
NOT_WAITED = WaitSpent()
NO_TARGETS = terminal_answer(DEFAULT_STRATEGY, (), 0)


@dataclass(slots=True)
class _Selection:
    """One selection under way."""

    request: SelectRequest
    decision_id: str
    pool: Pool
    gated: Gated
    now: Instant
    order: Sequence[int]
    excluded: Sequence[gate.Exclusion]
    gone: Exhausted = NOTHING
    fresh_rotation: object | None = None


class SelectTarget:
    """The use case. Not thread-safe: one event loop owns it.

    Args:
        list_always: list exclusions on positive answers too (traces want them).
    """

    def __init__(
        self,
        view: View,
        clock: Clock,
        entropy: Entropy,
        grants: Grants,
        freshness: Freshness,
        *,
        list_always: bool = False,
    ) -> None:
        self._list_always = list_always
        self._view = view
        self._clock = clock
        self._entropy = entropy
        self._grants = grants
        self._freshness = freshness
        self._gating = Gating(view, grants.replica)
        self._ordering = Ordering(entropy)
        self._pools = Pools(view.policy)

    def select_now(self, request: SelectRequest) -> SelectAnswer | None:
        """Answer from memory; None where the first choice needs a grant and `select` must be awaited.

        Raises:
            UnknownStrategyError: the strategy is none of the known names.
        """
        selection = self._begin(request)
        if isinstance(selection, SelectAnswer):
            return selection
        if selection.gated.early or (selection.gated.panic and not selection.order):
            return None
        if not selection.order:
            return self._refuse(selection)
        if selection.order[0] in selection.gated.probing:
            return None
        self._ordering.keep(selection.pool, selection.fresh_rotation)
        return self._dispatch(selection, selection.order[0], None)

    async def select(self, request: SelectRequest) -> SelectAnswer:
        """Answer, acquiring a grant where one is needed. Never waits for the store beyond its budget."""
        selection = self._begin(request)
        if isinstance(selection, SelectAnswer):
            return selection
        return (
            await self._try_early(selection)
            or await self._try_in_order(selection)
            or await self._try_panic(selection)
            or self._refuse(selection)
        )

    async def _try_early(self, s: _Selection) -> SelectAnswer | None:
        """A long block that is due is tested by this request; the others stay its fallbacks."""
        for position in s.gated.early:
            if self._is_ruled_out(s, position):
                continue
            granted = await self._grants.acquire_early(s.gated.targets[position], s.request)
            if granted is not None:
                return self._dispatch(s, position, granted)
        return None

    async def _try_in_order(self, s: _Selection) -> SelectAnswer | None:
        for position in s.order:
            granted: Granted | None = None
            if position in s.gated.probing:
                granted = await self._grants.acquire(s.gated.targets[position], s.request, s.decision_id)
                if granted.refusal is not None:
                    refusal = replace(granted.refusal, target_key=s.pool.key(position))
                    s.excluded = (*s.excluded, refusal)
                    continue
            self._ordering.keep(s.pool, s.fresh_rotation)
            return self._dispatch(s, position, granted)
        return None

    async def _try_panic(self, s: _Selection) -> SelectAnswer | None:
        """Nobody is selectable: offer those whose exclusion ends first, few at a time (guards.md section 6)."""
        offered = [position for position in s.gated.panic if not self._is_ruled_out(s, position)]
        if not offered or s.order:
            return None
        granted = await self._grants.acquire_panic(pool_name(s.pool), s.request)
        return None if granted is None else self._dispatch(s, offered[0], granted)

    @staticmethod
    def _is_ruled_out(s: _Selection, position: int) -> bool:
        target = s.gated.targets[position]
        forced = s.request.forced_connection
        return s.gone.covers(target) or bool(forced and target.connection != forced)

    # -- steps ---------------------------------------------------------------------------------------
    def _begin(self, request: SelectRequest) -> _Selection | SelectAnswer:
        decision_id = self._entropy.new_id()
        now = self._clock.now()
        pool = self._pool(request)
        if pool is None or not pool.size:
            return self._unresolved(request, decision_id, now)
        gated = self._gate(pool, request, now)
        gone, eligible, excluded = self._without_exhausted(request, pool, gated)
        order, rotation = self._ordering.order(pool, eligible, gone)
        return _Selection(request, decision_id, pool, gated, now, order, excluded, gone, rotation)

    def _pool(self, request: SelectRequest) -> Pool | None:
        if self._pools.policy is not self._view.policy:
            self._pools = Pools(self._view.policy)
        if request.route:
            return self._pools.route(request.route)
        return self._pools.inline(request.candidates, request.strategy, request.strategy_options)

    def _gate(self, pool: Pool, request: SelectRequest, now: Instant) -> Gated:
        if request.traits.allow_cooling:
            return self._gating.evaluate(pool, now, allow_cooling=True)
        return self._gating.of(pool, now)

    def _without_exhausted(
        self, request: SelectRequest, pool: Pool, gated: Gated
    ) -> tuple[Exhausted, Sequence[int], Sequence[gate.Exclusion]]:
        """Leave out what earlier attempts of the request and a forced connection rule out."""
        if not request.earlier_attempts and not request.forced_connection:
            return NOTHING, gated.eligible, gated.exclusions
        # After a Wait the sets of exhaustion start afresh (cooldown_wait.md section 3): attempts that the Wait's token
        # counts are not held against their targets any more.
        waited_out = request.previous.attempts_made if request.previous else 0
        gone = self._exhausted(request.earlier_attempts[waited_out:])
        eligible: list[int] = []
        excluded = list(gated.exclusions)
        for position in gated.eligible:
            target = gated.targets[position]
            if request.forced_connection and target.connection != request.forced_connection:
                continue
            if gone.covers(target):
                excluded.append(
                    gate.Exclusion(target, "request_exhaustion", stage="attempt", target_key=pool.key(position))
                )
            else:
                eligible.append(position)
        return gone, eligible, excluded

    def _exhausted(self, attempts: Sequence[EarlierAttempt]) -> Exhausted:
        policy = self._view.policy
        return exhausted(
            (self._failed(attempt) for attempt in attempts),
            lambda target: policy.for_connection(target.provider, target.connection).counts_per_model,
        )

    def _failed(self, attempt: EarlierAttempt) -> FailedAttempt:
        target = self._target(attempt)
        return FailedAttempt(target, attempt.status, attempt.reason, attempt.scope, attempt.code)

    def _target(self, named: Candidate | EarlierAttempt) -> Target:
        canonical = self._view.policy.canonical(named.provider)
        return Target(ProviderId(canonical), ConnectionId(named.connection), ModelId(named.model))

    # -- answers -------------------------------------------------------------------------------------
    def _dispatch(self, s: _Selection, position: int, granted: Granted | None) -> SelectAnswer:
        verdict = self._verdict(s, position, granted)
        request = s.request
        token = DecisionToken(
            s.decision_id,
            granted.at if granted and granted.at else s.now,
            (verdict.target, *verdict.fallbacks),
            request.request_id,
            request.route,
            request.caller_id,
            granted.probes if granted else (),
            permit_refs(granted),
            waited=self._waited(request),
            call_kind=request.call_kind,
            is_pool=bool(request.route) or s.pool.size > 1,
            attempts_made=len(request.earlier_attempts),
            policy_revision=self._view.policy.revision,
        )
        return self._answer(s, verdict, token)

    def _verdict(self, s: _Selection, position: int, granted: Granted | None) -> Dispatch:
        """The Dispatch; that of an undisturbed configured order is kept with the gate result."""
        is_configured = s.order is s.gated.eligible and granted is None
        if not is_configured or s.request.max_fallbacks != DEFAULT_FALLBACKS:
            return self._new_dispatch(s, position, granted)
        kept = s.gated.configured
        if kept is None:
            kept = s.gated.configured = self._new_dispatch(s, position, granted)
        return kept

    def _new_dispatch(self, s: _Selection, position: int, granted: Granted | None) -> Dispatch:
        target = self._named(s, position)
        return Dispatch(
            target,
            self._fallbacks(s, position),
            granted.permits if granted else (),
            no_fail_open=self._view.policy.is_capped(target.target.connection),
            is_probe=has_permit(granted, PermitKind.PROBE, PermitKind.EARLY_PROBE),
            is_panic=has_permit(granted, PermitKind.PANIC),
        )

    def _fallbacks(self, s: _Selection, chosen: int) -> tuple[TokenTarget, ...]:
        """Those behind the chosen one that need no grant (fleet.md section 1)."""
        limit = s.request.max_fallbacks
        if limit <= 0 or chosen in s.pool.quota_only:
            return ()
        found: list[TokenTarget] = []
        is_capped = self._view.policy.is_capped
        for position in s.order:
            if position == chosen or position in s.gated.probing:
                continue
            target = self._named(s, position)
            if not is_capped(target.target.connection):
                found.append(target)
                if len(found) == limit:
                    break
        return tuple(found)

    def _named(self, s: _Selection, position: int) -> TokenTarget:
        """A target with the generations of the newest committed rows."""
        known = s.gated.named[position]
        if known is None:
            target = s.gated.targets[position]
            known = TokenTarget(
                target,
                self._generations(s, target, position),
                s.pool.key(position),
                self._view.policy.address_of(target.connection),
            )
            s.gated.named[position] = known
        return known

    def _generations(self, s: _Selection, target: Target, position: int) -> Generations:
        view = self._view
        if view.provider_rows(target.provider) is None:
            return NO_GENERATIONS
        policy = view.policy.for_connection(target.provider, target.connection, s.pool.auth_class(position))
        return view.generations(target, lock_keys(policy, target))

    def _refuse(self, s: _Selection) -> SelectAnswer:
        """Wait where that is worth it and allowed, else the typed refusal."""
        hints = [a.retry_hint_ms for a in s.request.earlier_attempts if a.retry_hint_ms]
        waited = self._waited(s.request)
        wait = self._wait(s, waited, max(hints, default=0))
        if wait is not None:
            token = DecisionToken(
                s.decision_id,
                s.now,
                request_id=s.request.request_id,
                route=s.request.route,
                caller_id=s.request.caller_id,
                waited=WaitSpent(waited.attempts + 1, waited.spent_ms + wait.wait_ms),
                attempts_made=len(s.request.earlier_attempts),
                is_pool=bool(s.request.route),
                policy_revision=self._view.policy.revision,
            )
            return self._answer(s, Wait(wait.wait_ms, wait.reason, waited.attempts), token)
        answer = terminal_answer(s.pool.strategy, s.excluded, s.now, hints)
        verdict = Reject(
            answer.http_status,
            answer.code,
            answer.type,
            answer.terminal_reason,
            answer.recovery,
            refusal_message(s.excluded, s.pool, answer.terminal_reason),
            answer.retry_after_s,
            pool_size=s.pool.size,
            attempted=len(s.request.earlier_attempts),
        )
        return self._answer(s, verdict, None)

    def _wait(self, s: _Selection, waited: WaitSpent, hint_ms: int) -> WaitDecision | None:
        if not s.request.allow_wait:
            return None
        policy = self._view.policy
        profile = policy.route_wait if s.request.route else policy.direct_wait
        caller_ms = least(s.request.wait_budget_ms, s.request.deadline_ms)
        budget = WaitBudget(waited.attempts, waited.spent_ms, caller_ms)
        held = [self._gating.longest_timer(e.target, s.now) or self._probe_wait(e, s.now) for e in s.excluded]
        return decide_wait(held, s.now, profile, budget, hint_ms)

    def _probe_wait(self, exclusion: gate.Exclusion, now: Instant) -> gate.Exclusion:
        """A probe of somebody else is settled soon, as a rule long before its permit expires: look again then.

        Drawn, because everybody who waited for the same breaker was woken by the same instant.
        """
        remaining = exclusion.remaining_ms(now)
        if exclusion.reason != "probe_in_flight" or remaining is None:
            return exclusion
        look_again = now + round(min(remaining, PROBE_SETTLES_MS) * (0.5 + self._entropy.draw() / 2))
        return replace(exclusion, reason="circuit_open", until=look_again)

    def _unresolved(self, request: SelectRequest, decision_id: str, now: Instant) -> SelectAnswer:
        what = f"route {request.route!r} is not in the catalogue" if request.route else "no candidate is left"
        verdict = Reject(
            NO_TARGETS.http_status,
            NO_TARGETS.code,
            NO_TARGETS.type,
            NO_TARGETS.terminal_reason,
            NO_TARGETS.recovery,
            f"{what}; revision {self._view.policy.revision} is in force",
        )
        return self._stamp(SelectAnswer(decision_id, verdict, None, (), now, request_id=request.request_id))

    def _answer(self, s: _Selection, verdict: Dispatch | Wait | Reject, token: DecisionToken | None) -> SelectAnswer:
        wanted = s.request.explain or self._list_always or not isinstance(verdict, Dispatch)
        listed = s.excluded if wanted else ()
        answer = SelectAnswer(
            s.decision_id,
            verdict,
            token,
            tuple(rendered(e, s.now) for e in listed),
            s.now,
            request_id=s.request.request_id,
            explanation=explanation(s.pool, s.gated.targets, s.order) if s.request.explain else None,
            strategy=s.pool.strategy,
            pool_size=s.pool.size,
            excluded_count=len(s.excluded),
        )
        return self._stamp(answer)

    def _stamp(self, answer: SelectAnswer) -> SelectAnswer:
        """Revision, age of the view and degradation; every answer carries them."""
        answer.view_age_ms, answer.degraded_reasons = self._freshness.stamp(answer.decided_at)
        answer.is_degraded = bool(answer.degraded_reasons)
        answer.policy_revision = self._view.policy.revision
        return answer

    @staticmethod
    def _waited(request: SelectRequest) -> WaitSpent:
        return request.previous.waited if request.previous else NOT_WAITED
