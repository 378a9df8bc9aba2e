"""The decision record: what a failure means (spec/classification.md section 1).

`Classification` is what the pipeline finds out without looking at any state; `DecisionRecord` is the same
resolved against the ladder level of the connection, which is read under the row lock.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from policy_service.domain.ids import DurationMs, HintSource, Instant
from policy_service.domain.profiles import LadderProfile


class Hint(NamedTuple):
    """A waiting time stated by the upstream (spec/retry_hints.md); `wait_ms` > 0, rounded up."""

    wait_ms: DurationMs
    source: HintSource
    reset_at: Instant


class Reason(StrEnum):
    """Reasons of a decision record."""

    QUOTA_EXHAUSTED = "quota_exhausted"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    MODEL_CAPACITY = "model_capacity"
    SERVER_ERROR = "server_error"
    AUTH_ERROR = "auth_error"
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"
    SERVICE_NOT_RUNNING = "service_not_running"
    EXECUTOR_CONTRACT_VIOLATION = "executor_contract_violation"
    INVALID_PREVIOUS_RESPONSE_BINDING = "invalid_previous_response_binding"


class Mode(StrEnum):
    """How the duration is found."""

    FIXED = "fixed"
    """`fixed_ms`, level unchanged, hints not looked at."""
    LADDER = "ladder"
    """Hint if honoured, else rotation override (rate limits), else the ladder."""


class Classification(NamedTuple):
    """Verdict of the pipeline on one failure, before any state is read."""

    rule: str
    """Id of the pipeline rule that decided, such as `credits-text`; stable, goes into verdict, fact and trace."""
    reason: str
    should_fallback: bool = True
    mode: Mode = Mode.FIXED
    fixed_ms: DurationMs = 0
    new_level: int | None = None
    """Level that the rule itself sets (0 for the not-running hint); None: by the mode."""
    hint: Hint | None = None
    """Hint found in the answer, whether or not it will be used."""
    ignore_hint: bool = False
    """A rule cooldown or a rule without cooldown at step 17 decides; hints are not looked at."""
    uses_hint_always: bool = False
    """Steps 12, 13 and 22: the stated reset is used whether or not the profile honours hints."""
    permanent: bool = False
    credits_exhausted: bool = False
    daily_quota_exhausted: bool = False
    quota_reset_hint_ms: DurationMs | None = None
    configured_cooldown_ms: DurationMs | None = None
    rule_id: str | None = None
    """Id of the provider or operator rule that matched."""
    rule_scope: str | None = None
    rule_scope_honored: bool = False
    rule_by_operator: bool = False
    exact_quota: bool = False
    """One of the fixed quota durations of steps 8 to 14: an exact value for model locks."""
    uncapped: bool = False
    skip_provider_breaker: bool = False
    ambiguous_auth: bool = False
    returns_by_itself: bool = False
    """The answer states when the allowance is back: no empty wallet, even under a 402."""


class DecisionRecord(NamedTuple):
    """Spec/classification.md section 1, field for field."""

    should_fallback: bool
    cooldown_ms: DurationMs
    base_cooldown_ms: DurationMs
    new_backoff_level: int | None
    reason: str
    permanent: bool = False
    credits_exhausted: bool = False
    daily_quota_exhausted: bool = False
    used_upstream_retry_hint: bool = False
    retry_hint_source: HintSource | None = None
    quota_reset_hint_ms: DurationMs | None = None
    configured_cooldown_ms: DurationMs | None = None
    rule_id: str | None = None
    rule_scope: str | None = None
    rule_scope_honored: bool = False
    exact_quota: bool = False
    uncapped: bool = False
    skip_provider_breaker: bool = False
    ambiguous_auth: bool = False
    returns_by_itself: bool = False
    rule: str = ""


def ladder_step(level: int, profile: LadderProfile) -> tuple[DurationMs, int]:
    """Cooldown at `level` and the next level (connection_cooldown.md section 2); base 0 scales with 1 000."""
    base = profile.base_cooldown_ms or 1_000
    steps = profile.max_backoff_steps
    duration = min(base * 2 ** min(level, steps), profile.cap_ms)
    return duration, min(level + 1, steps)
