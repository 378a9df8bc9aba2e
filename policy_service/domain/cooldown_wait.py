"""Waiting out a short cooldown instead of failing (spec/cooldown_wait.md section 3). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.profiles import WaitProfile

MARGIN_MS = 50

_NORMALISED = {
    "rate_limit": "rate_limit",
    "rate_limited": "rate_limit",
    "rate_limit_exceeded": "rate_limit",
    "transient": "transient",
    "overloaded": "overloaded",
    "model_capacity": "overloaded",
    "server_error": "server_error",
    "circuit_open": "circuit_open",
}
"""Reasons worth waiting for; anything else fails closed."""


@dataclass(frozen=True, slots=True)
class WaitBudget:
    """What this request has waited so far, and what its caller allows."""

    attempts: int = 0
    spent_ms: DurationMs = 0
    caller_ms: DurationMs | None = None
    """`wait_budget_ms` of the request; None: no limit of the caller's own."""


@dataclass(frozen=True, slots=True)
class WaitDecision:
    """Wait this long, for this reason."""

    wait_ms: DurationMs
    reason: str


def decide_wait(
    exclusions: Sequence[Exclusion],
    now: Instant,
    profile: WaitProfile,
    budget: WaitBudget,
    largest_hint_ms: DurationMs = 0,
) -> WaitDecision | None:
    """Whether, and how long, a request whose targets are all excluded should wait; None: no.

    The soonest lock decides the reason; of equal ends the target listed first.
    """
    soonest = _soonest(exclusions, now)
    if soonest is None or not profile.effective or budget.attempts >= profile.max_attempts:
        return None
    cause = "circuit_open" if soonest.reason == "circuit_open" else soonest.cause
    reason = _NORMALISED.get(cause)
    remaining = soonest.remaining_ms(now)
    if reason is None or remaining is None:
        return None
    hint = 0 if reason == "circuit_open" else largest_hint_ms
    wait = max(remaining, hint) + MARGIN_MS
    return WaitDecision(wait, reason) if wait <= _allowed(profile, budget) else None


def _soonest(exclusions: Sequence[Exclusion], now: Instant) -> Exclusion | None:
    locked = [e for e in exclusions if e.spec.is_recovery_timer and (e.remaining_ms(now) or 0) > 0]
    return min(locked, key=lambda e: e.until or 0, default=None)


def _allowed(profile: WaitProfile, budget: WaitBudget) -> DurationMs:
    left = min(profile.max_wait_ms, profile.budget_ms - budget.spent_ms)
    return left if budget.caller_ms is None else min(left, budget.caller_ms)
