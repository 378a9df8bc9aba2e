"""Replies of a selection: the Dispatch with its token, the Wait, the typed refusal; every one stamped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policy_service.application.freshness import Freshness
from policy_service.application.gating import Gating
from policy_service.application.granted import Granted
from policy_service.application.managed_selection import Claimed
from policy_service.application.messages import (
    Affinity,
    DecisionToken,
    Dispatch,
    PermitKind,
    PermitUse,
    Reject,
    SelectAnswer,
    SelectRequest,
    TokenTarget,
    Wait,
    WaitSpent,
)
from policy_service.application.passages import Passages
from policy_service.application.ports import Entropy
from policy_service.application.selection import Selection
from policy_service.application.selection_answers import (
    explanation,
    has_permit,
    least,
    permit_refs,
    refusal_message,
    rendered,
)
from policy_service.application.view import View
from policy_service.domain.cooldown_wait import WaitBudget, WaitDecision, decide_wait
from policy_service.domain.eligibility import lock_keys
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import Generations, Instant, Target
from policy_service.domain.strategies import DEFAULT_STRATEGY
from policy_service.domain.terminal_answer import terminal_answer

DEFAULT_FALLBACKS = 8
PROBE_SETTLES_MS = 1_000
"""How soon a request that may wait looks again while another call is the probe."""
NO_GENERATIONS = Generations()
NOT_WAITED = WaitSpent()
NO_TARGETS = terminal_answer(DEFAULT_STRATEGY, (), 0)

Headers = tuple[tuple[str, str], ...]


class Replies:
    """Builds answers.

    Args:
        headers: request headers that a target wants set (usage-wall lane).
        list_always: list exclusions on positive answers too (traces want them).
    """

    def __init__(
        self,
        view: View,
        gating: Gating,
        entropy: Entropy,
        freshness: Freshness,
        passages: Passages,
        headers: Callable[[Target, Instant], Headers],
        *,
        list_always: bool,
    ) -> None:
        self._view = view
        self._gating = gating
        self._entropy = entropy
        self._freshness = freshness
        self._passages = passages
        self._headers = headers
        self._list_always = list_always

    # -- dispatch --------------------------------------------------------------------------------------
    def dispatch(
        self, s: Selection, position: int, granted: Granted | None = None, claimed: Claimed | None = None
    ) -> SelectAnswer:
        """Go to the entry at `position`, with what was granted and the lease that was claimed."""
        if granted is not None and granted.decision_id:
            s.decision_id = granted.decision_id
        verdict = self._verdict(s, position, granted, claimed)
        request = s.request
        started = claimed.at if claimed else granted.at if granted and granted.at else s.now
        token = DecisionToken(
            s.decision_id,
            started,
            (verdict.target, *verdict.fallbacks),
            request.request_id,
            request.route,
            request.caller_id,
            granted.probes if granted else (),
            permit_refs(granted),
            lease=claimed.fence if claimed else None,
            pin=s.pin.ref if s.pin else None,
            waited=_waited(request),
            call_kind=request.call_kind,
            is_pool=bool(request.route) or s.pool.size > 1,
            attempts_made=len(request.earlier_attempts),
            policy_revision=self._view.policy.revision,
        )
        return self._answer(s, verdict, token)

    def _verdict(self, s: Selection, position: int, granted: Granted | None, claimed: Claimed | None) -> Dispatch:
        """The Dispatch; that of an undisturbed configured order is kept with the gate result."""
        headers = self._headers(s.target(position), s.now)
        is_plain = s.order is s.gated.eligible and granted is None and claimed is None and s.pin is None
        if not is_plain or headers or s.accounts or s.request.max_fallbacks != DEFAULT_FALLBACKS:
            return self._new_dispatch(s, position, granted, claimed, headers)
        kept = s.gated.configured
        if kept is None:
            kept = s.gated.configured = self._new_dispatch(s, position, None, None, ())
        return kept

    def _new_dispatch(
        self, s: Selection, position: int, granted: Granted | None, claimed: Claimed | None, headers: Headers
    ) -> Dispatch:
        target = self._named(s, position)
        needs_permit = self._passages.needed(s.pool, position, target.target)
        return Dispatch(
            target,
            () if claimed else self._fallbacks(s, position),
            granted.permits if granted else (),
            no_fail_open=claimed is not None or needs_permit,
            is_probe=has_permit(granted, PermitKind.PROBE, PermitKind.EARLY_PROBE),
            is_panic=has_permit(granted, PermitKind.PANIC),
            set_headers=headers,
            affinity=_affinity(s, position),
            permit_use=granted.permit_use if granted else PermitUse.NOT_NEEDED,
            waited_ms=granted.waited_ms if granted else 0,
            lease_transitioned=claimed is not None and claimed.transitioned,
        )

    def _fallbacks(self, s: Selection, chosen: int) -> tuple[TokenTarget, ...]:
        """Those behind the chosen one that need no grant (fleet.md section 1)."""
        limit = s.request.max_fallbacks
        if limit <= 0 or chosen in s.pool.quota_only:
            return ()
        found: list[TokenTarget] = []
        for position in s.order:
            if position == chosen or position in s.gated.probing:
                continue
            target = self._named(s, position)
            if not self._passages.needed_behind(s.pool, position, target.target):
                found.append(target)
                if len(found) == limit:
                    break
        return tuple(found)

    def _named(self, s: Selection, position: int) -> TokenTarget:
        """A target with the generations of the newest committed rows; kept with the gate result."""
        target = s.target(position)
        if target is not s.gated.targets[position]:
            return self._new_name(s, target, position)
        known = s.gated.named[position]
        if known is None:
            known = s.gated.named[position] = self._new_name(s, target, position)
        return known

    def _new_name(self, s: Selection, target: Target, position: int) -> TokenTarget:
        address = self._view.policy.address_of(target.connection)
        return TokenTarget(target, self._generations(s, target, position), s.pool.key(position), address)

    def _generations(self, s: Selection, target: Target, position: int) -> Generations:
        view = self._view
        if view.provider_rows(target.provider) is None:
            return NO_GENERATIONS
        policy = view.policy.for_connection(target.provider, target.connection, s.pool.auth_class(position))
        return view.generations(target, lock_keys(policy, target))

    # -- refusal ---------------------------------------------------------------------------------------
    def refuse(self, s: Selection) -> SelectAnswer:
        """Wait where that is worth it and allowed, else the typed refusal."""
        request = s.request
        hints = [a.retry_hint_ms for a in request.earlier_attempts if a.retry_hint_ms]
        waited = _waited(request)
        wait = self._wait(s, waited, max(hints, default=0))
        if wait is not None:
            return self._wait_answer(s, wait, waited)
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
            attempted=len(request.earlier_attempts),
        )
        return self._answer(s, verdict, None)

    def reject(self, s: Selection, verdict: Reject) -> SelectAnswer:
        """A refusal that a mechanism states itself (lease capacity, queue, line)."""
        return self._answer(s, verdict, None)

    def unresolved(self, request: SelectRequest, now: Instant) -> SelectAnswer:
        """There is nothing to select from (diagnostics.md section 4, row 3)."""
        what = f"route {request.route!r} is not in the catalogue" if request.route else "no candidate is left"
        verdict = Reject(
            NO_TARGETS.http_status,
            NO_TARGETS.code,
            NO_TARGETS.type,
            NO_TARGETS.terminal_reason,
            NO_TARGETS.recovery,
            f"{what}; revision {self._view.policy.revision} is in force",
        )
        return self._stamp(SelectAnswer(self._entropy.new_id(), verdict, None, (), now, request_id=request.request_id))

    def _wait_answer(self, s: Selection, wait: WaitDecision, waited: WaitSpent) -> SelectAnswer:
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

    def _wait(self, s: Selection, waited: WaitSpent, hint_ms: int) -> WaitDecision | None:
        if not s.request.allow_wait:
            return None
        policy = self._view.policy
        profile = policy.route_wait if s.request.route else policy.direct_wait
        caller_ms = least(s.request.wait_budget_ms, s.request.deadline_ms)
        budget = WaitBudget(waited.attempts, waited.spent_ms, caller_ms)
        held = [self._gating.longest_timer(e.target, s.now) or self._probe_wait(e, s.now) for e in s.excluded]
        return decide_wait(held, s.now, profile, budget, hint_ms)

    def _probe_wait(self, exclusion: Exclusion, now: Instant) -> Exclusion:
        """A probe of somebody else is settled soon, as a rule long before its permit expires: look again then.

        Drawn, because everybody who waited for the same breaker was woken by the same instant.
        """
        remaining = exclusion.remaining_ms(now)
        if exclusion.reason != "probe_in_flight" or remaining is None:
            return exclusion
        look_again = now + round(min(remaining, PROBE_SETTLES_MS) * (0.5 + self._entropy.draw() / 2))
        return replace(exclusion, reason="circuit_open", until=look_again)

    # -- every answer ----------------------------------------------------------------------------------
    def _answer(self, s: Selection, verdict: Dispatch | Wait | Reject, token: DecisionToken | None) -> SelectAnswer:
        wanted = s.request.explain or self._list_always or not isinstance(verdict, Dispatch)
        answer = SelectAnswer(
            s.decision_id,
            verdict,
            token,
            tuple(rendered(e, s.now) for e in s.excluded) if wanted else (),
            s.now,
            request_id=s.request.request_id,
            explanation=explanation(s.pool, s.gated.targets, s.order, s.pin) if s.request.explain else None,
            strategy=s.pool.strategy,
            pool_size=s.pool.size,
            excluded_count=len(s.excluded),
        )
        return self._stamp(answer, s.degraded)

    def _stamp(self, answer: SelectAnswer, degraded: tuple[str, ...] = ()) -> SelectAnswer:
        """Revision, age of the view and degradation; every answer carries them."""
        answer.view_age_ms, reasons = self._freshness.stamp(answer.decided_at)
        answer.degraded_reasons = tuple(dict.fromkeys((*reasons, *degraded))) if degraded else reasons
        answer.is_degraded = bool(answer.degraded_reasons)
        answer.policy_revision = self._view.policy.revision
        return answer


def _waited(request: SelectRequest) -> WaitSpent:
    return request.previous.waited if request.previous else NOT_WAITED


def _affinity(s: Selection, position: int) -> Affinity:
    """What affinity did; a pinned account that was refused at the last act is a detour."""
    if s.pin is None:
        return Affinity.NONE
    is_led = s.pin.position is not None and position != s.order[0]
    return Affinity.DETOUR if is_led else s.pin.affinity
