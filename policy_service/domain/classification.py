"""Classification: status, headers and body of a failure become one decision record (spec/classification.md).

`classify` runs an ordered table of named rules and reads no state; `resolve` adds the ladder level of the
connection. Restatement and the local guards (`guards`) have run before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from policy_service.domain import classification_conditions as on
from policy_service.domain import rules, signals
from policy_service.domain.classification_conditions import PAYMENT_MS, Condition
from policy_service.domain.daily_reset import DAY_MS
from policy_service.domain.decision_record import Classification, DecisionRecord, Mode, Reason, ladder_step
from policy_service.domain.ids import DurationMs, HintSource, Instant
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.reading import Reading

YEAR_MS: Final = 365 * DAY_MS
HOUR_MS: Final = 3_600_000
SESSION_MS: Final = 5 * HOUR_MS
NOT_RUNNING_MS: Final = 5_000

Result = Callable[[Reading, str], Classification]


@dataclass(frozen=True, slots=True)
class PipelineRule:
    """One row of the pipeline: a stable id, when it holds, what it on.says. `needs_text`: rows 5 to 19."""

    id: str
    when: Condition
    then: Result
    needs_text: bool = False


def classify(outcome: Outcome, policy: ConnectionPolicy, now: Instant, rotation_failures: int = 0) -> Classification:
    """What a failure means, before any state is read.

    Args:
        outcome: the failed attempt, status already restated, local guards already passed.
        policy: what applies to its connection.
        now: instant of the event, ms.
        rotation_failures: failures with this status within the rotation window, this one included (section 6).
    """
    return classify_reading(Reading(outcome, policy, now), rotation_failures)


def classify_reading(reading: Reading, rotation_failures: int = 0) -> Classification:
    """As `classify`, for a caller that has read the outcome already."""
    if rotation_blocks(reading.policy, reading.status, rotation_failures):
        early = next((row for row in _BEFORE_ROTATION if row.when(reading)), _ROTATION)
        return early.then(reading, early.id)
    for claim, row in _rows_under(reading.status, bool(reading.text)):
        if claim(reading):
            return row.then(reading, row.id)
    raise AssertionError("the last row of the pipeline always holds")


def rotation_blocks(policy: ConnectionPolicy, status: int | None, failures: int) -> bool:
    """True if the rotation gate forbids failing over (section 6); never by default."""
    gate = policy.rotation
    if not gate.enabled or status is None or status not in gate.on_status:
        return False
    return not gate.on_status[status] or failures < gate.threshold.get(status, 1)


# --- results ------------------------------------------------------------------------------------------------
def _fixed(reason: Reason, fixed_ms: DurationMs, **extra: Any) -> Result:
    def then(reading: Reading, rule: str) -> Classification:
        return Classification(rule, reason, fixed_ms=fixed_ms, hint=reading.hint, **extra)

    return then


def _ladder(reason: Reason, **extra: Any) -> Result:
    def then(reading: Reading, rule: str) -> Classification:
        return Classification(rule, reason, mode=Mode.LADDER, hint=reading.hint, **extra)

    return then


def _no_fallback(reason: Reason, **extra: Any) -> Result:
    return _fixed(reason, 0, should_fallback=False, **extra)


_GONE_FOR_A_DAY = _fixed(Reason.NOT_FOUND, DAY_MS, quota_reset_hint_ms=DAY_MS, uncapped=True)
_REQUEST_AT_FAULT = _fixed(Reason.MODEL_CAPACITY, 0)


def _credits(reading: Reading, rule: str) -> Classification:
    keeps = reading.policy.provider.credits_text_is_terminal and not reading.policy.provider.passthrough
    empty = keeps or any(text in reading.text for text in reading.policy.provider.wallet_texts)
    return _fixed(Reason.QUOTA_EXHAUSTED, PAYMENT_MS, credits_exhausted=empty, exact_quota=True)(reading, rule)


def _stated_reset(reading: Reading, rule: str, default_ms: DurationMs, **extra: Any) -> Classification:
    stated = reading.hint.wait_ms if reading.hint else None
    return Classification(
        rule,
        Reason.QUOTA_EXHAUSTED,
        fixed_ms=default_ms,
        hint=reading.hint,
        uses_hint_always=True,
        quota_reset_hint_ms=stated,
        **extra,
    )


def _until_stated_reset(default_ms: DurationMs, **extra: Any) -> Result:
    return lambda reading, rule: _stated_reset(reading, rule, default_ms, **extra)


def _daily(reading: Reading, rule: str) -> Classification:
    wait = on.daily_wait(reading) or 0
    return _fixed(Reason.QUOTA_EXHAUSTED, wait, daily_quota_exhausted=True, exact_quota=True)(reading, rule)


def _quota_with_reset(reading: Reading, rule: str) -> Classification:
    stated = reading.hint.wait_ms if reading.hint else None
    return _ladder(Reason.QUOTA_EXHAUSTED, quota_reset_hint_ms=stated)(reading, rule)


def _by_rule_alone(reading: Reading, rule: str) -> Classification:
    """Steps 17 and 18: the rule's own reason, cooldown and scope; without a cooldown the ladder, hints ignored."""
    match = on.rule_of(reading) if reading.status == 403 else on.pre_check_of(reading)
    return _with_match(match, Mode.LADDER, 0, Reason.UNKNOWN, reading, rule, ignore_hint=reading.status == 403)


def _by_400_rule(reading: Reading, rule: str) -> Classification:
    return _with_match(on.rule_of(reading), Mode.LADDER, 0, Reason.UNKNOWN, reading, rule)


def _configured(reading: Reading, rule: str) -> Classification:
    reason, mode, fixed_ms = on.configured_row(reading) or (Reason.UNKNOWN, Mode.FIXED, 0)
    return _with_match(on.rule_of(reading), mode, fixed_ms, reason, reading, rule)


def _with_match(
    match: rules.RuleMatch | None,
    mode: Mode,
    fixed_ms: DurationMs,
    reason: str,
    reading: Reading,
    rule: str,
    ignore_hint: bool = False,
) -> Classification:
    """A configured result with the provider's rule laid over it (section 3); no match leaves it as it is."""
    if match is None:
        return Classification(rule, reason, mode=mode, fixed_ms=fixed_ms, hint=reading.hint)
    return Classification(
        rule,
        match.reason,
        mode=mode,
        fixed_ms=fixed_ms,
        hint=reading.hint,
        ignore_hint=ignore_hint or match.cooldown_ms is not None,
        configured_cooldown_ms=match.cooldown_ms,
        rule_id=match.id,
        rule_scope=match.scope,
        rule_scope_honored=match.is_honored,
        rule_by_operator=match.by_operator,
    )


def _base(reading: Reading, rule: str) -> Classification:
    return _fixed(Reason.UNKNOWN, reading.policy.ladder.base_cooldown_ms)(reading, rule)


# --- the table -----------------------------------------------------------------------------------------------------
_BEFORE_ROTATION: Final = (
    PipelineRule(
        "contract-violation",
        on.is_contract_violation,
        _no_fallback(Reason.EXECUTOR_CONTRACT_VIOLATION, skip_provider_breaker=True),
    ),
    PipelineRule(
        "previous-response-binding",
        on.is_foreign_binding,
        _no_fallback(Reason.INVALID_PREVIOUS_RESPONSE_BINDING, skip_provider_breaker=True),
    ),
    PipelineRule(
        "service-not-running",
        on.is_not_running,
        _fixed(Reason.SERVICE_NOT_RUNNING, NOT_RUNNING_MS, new_level=0, skip_provider_breaker=True),
    ),
)
_ROTATION: Final = PipelineRule("rotation-gate", on.always, _no_fallback(Reason.UNKNOWN))

PIPELINE: Final[tuple[PipelineRule, ...]] = (
    *_BEFORE_ROTATION,
    PipelineRule("ban-text", on.is_ban, _fixed(Reason.AUTH_ERROR, YEAR_MS, permanent=True), True),
    PipelineRule("retired-model", on.is_retired_model, _GONE_FOR_A_DAY, True),
    PipelineRule("endpoint-moved", on.is_moved, _GONE_FOR_A_DAY, True),
    PipelineRule(
        "billing-suspension",
        on.is_suspended,
        _fixed(Reason.QUOTA_EXHAUSTED, PAYMENT_MS, credits_exhausted=True, exact_quota=True),
        True,
    ),
    PipelineRule("quota-metric-day", on.is_day_spent, _ladder(Reason.QUOTA_EXHAUSTED), True),
    PipelineRule("quota-metric-minute", on.is_minute_spent, _ladder(Reason.RATE_LIMIT_EXCEEDED), True),
    PipelineRule(
        "quota-returns",
        on.returns_by_itself,
        _until_stated_reset(HOUR_MS, exact_quota=True, returns_by_itself=True),
        True,
    ),
    PipelineRule("credits-text", on.is_credits, _credits, True),
    PipelineRule("credits-beyond", on.is_credits_beyond, _credits, True),
    PipelineRule("daily-text", on.is_daily, _daily, True),
    PipelineRule("weekly-text", on.is_weekly, _until_stated_reset(DAY_MS, exact_quota=True), True),
    PipelineRule("subscription-text", on.is_subscription, _until_stated_reset(HOUR_MS, exact_quota=True), True),
    PipelineRule("session-text", on.is_session, _fixed(Reason.QUOTA_EXHAUSTED, SESSION_MS, exact_quota=True), True),
    PipelineRule("quota-with-reset", on.is_quota_with_reset, _quota_with_reset, True),
    PipelineRule(
        "period-quota",
        on.is_period_quota,
        _until_stated_reset(HOUR_MS, exact_quota=True, returns_by_itself=True),
        True,
    ),
    PipelineRule("route-not-authorized", on.is_route_refused, _no_fallback(Reason.UNKNOWN), True),
    PipelineRule("forbidden-rule", on.is_403_rule, _by_rule_alone, True),
    PipelineRule("pre-check-rule", on.is_429_pre_check, _by_rule_alone, True),
    PipelineRule("credential-code", on.is_credential_refusal, _fixed(Reason.AUTH_ERROR, 0), True),
    PipelineRule("model-forbidden", on.is_model_forbidden, _fixed(Reason.AUTH_ERROR, 0), True),
    PipelineRule("cloudflare-no-retry", on.is_cloudflare_refusal, _fixed(Reason.AUTH_ERROR, 0), True),
    PipelineRule("forbidden-key", on.is_key_403, _ladder(Reason.AUTH_ERROR), True),
    PipelineRule("inner-request-error", on.is_inner_request_error, _REQUEST_AT_FAULT, True),
    PipelineRule("throttling-code", on.is_throttled, _ladder(Reason.RATE_LIMIT_EXCEEDED)),
    PipelineRule("overload-code", on.is_overload_code, _ladder(Reason.MODEL_CAPACITY)),
    PipelineRule(
        "invalid-request-code", on.is_refused_by_code, _no_fallback(Reason.UNKNOWN, skip_provider_breaker=True)
    ),
    PipelineRule("configured", on.is_configured, _configured),
    PipelineRule("capacity-status", on.under(413, 529)(on.always), _ladder(Reason.MODEL_CAPACITY)),
    PipelineRule("quota-status-432", on.under(432)(on.always), _until_stated_reset(HOUR_MS)),
    PipelineRule("provider-rule-400", on.is_400_rule, _by_400_rule),
    PipelineRule("model-code", on.is_structured_model, _REQUEST_AT_FAULT),
    PipelineRule("parameter", on.says(signals.PARAMETER | signals.PARAMETER_EXTENDED), _REQUEST_AT_FAULT),
    PipelineRule("malformed", on.says(signals.MALFORMED), _REQUEST_AT_FAULT),
    PipelineRule("overflow", on.says(signals.OVERFLOW | signals.OVERFLOW_CERTAIN), _REQUEST_AT_FAULT),
    PipelineRule("model-access", on.is_model_access, _REQUEST_AT_FAULT),
    PipelineRule("nim-degraded", on.says(signals.NIM_DEGRADED), _REQUEST_AT_FAULT),
    PipelineRule("rate-words-400", on.says_of_account(signals.RATE_WORDS_400), _ladder(Reason.RATE_LIMIT_EXCEEDED)),
    PipelineRule("bad-request", on.is_bad_request_status, _no_fallback(Reason.UNKNOWN)),
    PipelineRule("any-other", on.always, _base),
)


@lru_cache(maxsize=1_024)
def _rows_under(status: int | None, has_text: bool) -> tuple[tuple[Condition, PipelineRule], ...]:
    """Rows of the pipeline that can hold under a status, each with what is left to ask."""
    able = [row for row in PIPELINE if has_text or not row.needs_text]
    return tuple((claim, row) for row in able if (claim := on.left_to_ask(row.when, status)) is not None)


# --- resolution against the ladder -------------------------------------------------------------------------------
def resolve(found: Classification, level: int, policy: ConnectionPolicy) -> DecisionRecord:
    """The decision record: durations of connection_cooldown.md section 3, rows 3 to 6.

    Args:
        found: verdict of the pipeline.
        level: ladder level of the connection, read under its lock.
        policy: what applies to the connection.
    """
    duration = _duration(found, level, policy)
    return DecisionRecord(
        should_fallback=found.should_fallback,
        cooldown_ms=duration.cooldown_ms,
        base_cooldown_ms=duration.base_ms,
        new_backoff_level=duration.new_level,
        reason=found.reason,
        permanent=found.permanent,
        credits_exhausted=found.credits_exhausted,
        daily_quota_exhausted=found.daily_quota_exhausted,
        used_upstream_retry_hint=duration.uses_hint,
        retry_hint_source=_source(found, duration),
        quota_reset_hint_ms=found.quota_reset_hint_ms,
        configured_cooldown_ms=found.configured_cooldown_ms,
        rule_id=found.rule_id,
        rule_scope=found.rule_scope,
        rule_scope_honored=found.rule_scope_honored,
        exact_quota=found.exact_quota,
        uncapped=found.uncapped,
        skip_provider_breaker=found.skip_provider_breaker,
        ambiguous_auth=found.ambiguous_auth,
        returns_by_itself=found.returns_by_itself,
        rule=found.rule,
    )


class _Duration(NamedTuple):
    cooldown_ms: DurationMs
    base_ms: DurationMs
    new_level: int | None = None
    uses_hint: bool = False


def _duration(found: Classification, level: int, policy: ConnectionPolicy) -> _Duration:
    if found.configured_cooldown_ms is not None:
        return _Duration(found.configured_cooldown_ms, found.configured_cooldown_ms)
    if found.mode is Mode.FIXED:
        return _fixed_duration(found)
    return _ladder_duration(found, level, policy)


def _fixed_duration(found: Classification) -> _Duration:
    if found.uses_hint_always and found.hint is not None:
        return _Duration(found.hint.wait_ms, found.hint.wait_ms, found.new_level, uses_hint=True)
    return _Duration(found.fixed_ms, found.fixed_ms, found.new_level)


def _ladder_duration(found: Classification, level: int, policy: ConnectionPolicy) -> _Duration:
    base = policy.ladder.base_cooldown_ms
    if found.hint is not None and policy.ladder.honor_upstream_hints and not found.ignore_hint:
        return _Duration(found.hint.wait_ms, base, 0, uses_hint=True)
    override = policy.rotation.rate_limit_reset_ms
    if override > 0 and found.reason == Reason.RATE_LIMIT_EXCEEDED:
        return _Duration(override, base)
    cooldown, new_level = ladder_step(level, policy.ladder)
    return _Duration(cooldown, base, new_level)


def _source(found: Classification, duration: _Duration) -> HintSource | None:
    """Source of the hint that was used, or that the stated quota reset was read from."""
    if found.hint is None or not (duration.uses_hint or found.quota_reset_hint_ms == found.hint.wait_ms):
        return None
    return found.hint.source
