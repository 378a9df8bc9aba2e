"""Conditions of the classification pipeline (spec/classification.md sections 2 to 4): one claim about an outcome each.

Used by the table of `classification` and, where a claim is shared, by error types, guards and the public verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from policy_service.domain import rules, signals
from policy_service.domain.daily_reset import DAY_MS, until_hour, until_midnight
from policy_service.domain.decision_record import Mode, Reason
from policy_service.domain.ids import DurationMs, HintSource
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.reading import Reading, echoes_request

PAYMENT_MS: Final = 120_000
NOT_FOUND_MS: Final = 120_000
REQUEST_NOT_ALLOWED_MS: Final = 5_000
_FALLBACK_HINT_HEADER: Final = "x-omni-fallback-hint"

_MODEL_CODES: Final = signals.MODEL_CODES | signals.MODEL_CODES_EXTENDED
_BAN: Final = signals.BAN | signals.BAN_EXTENDED

Condition = Callable[[Reading], bool]


@dataclass(frozen=True, slots=True)
class Under:
    """A claim that can hold under some statuses only; who knows the status may ask the `claim` alone."""

    statuses: frozenset[int]
    claim: Condition

    def __call__(self, r: Reading) -> bool:
        """True if the claim holds."""
        return r.status in self.statuses and self.claim(r)


def under(*statuses: int) -> Callable[[Condition], Under]:
    """Bind a claim to statuses."""
    return lambda claim: Under(frozenset(statuses), claim)


def left_to_ask(condition: Condition, status: int | None) -> Condition | None:
    """What of a condition has to be asked under a status; None: it cannot hold."""
    if not isinstance(condition, Under):
        return condition
    return condition.claim if status in condition.statuses else None


def always(_: Reading) -> bool:
    return True


# --- conditions ----------------------------------------------------------------------------------------------
def is_contract_violation(r: Reading) -> bool:
    return r.code == "executor_contract_violation"


def is_foreign_binding(r: Reading) -> bool:
    said = r.status == 409 and "previous_response_id does not belong" in r.text
    return said or r.code == "invalid_previous_response_binding"


@under(503)
def is_not_running(r: Reading) -> bool:
    value = r.outcome.headers.get(_FALLBACK_HINT_HEADER, "")
    return value.strip().lower() == "connection_cooldown"


def is_ban(r: Reading) -> bool:
    custom = r.policy.terminal.custom_ban_signals
    return is_ban_text(r.account_text, custom) or r.meaning == "banned"


def is_ban_text(text: str, custom: tuple[str, ...] = ()) -> bool:
    """Ban wording in lower-case text, the operator's own texts included."""
    return _BAN.found_in(text) or (bool(custom) and any(own.strip() and own.lower() in text for own in custom))


def is_retired_model(r: Reading) -> bool:
    if r.code == "model_decommissioned":
        return True
    return r.status in (404, 410) and signals.is_retired(r.text)


def is_moved(r: Reading) -> bool:
    return signals.MOVED.found_in(r.text)


def is_suspended(r: Reading) -> bool:
    return signals.BILLING_SUSPENSION.found_in(r.account_text)


def metric(r: Reading) -> str:
    """Step 9: which window of the model's quota is spent: `day`, `minute`, or empty where nothing tells."""
    host = r.policy.provider.quota_metrics_host
    if r.status != 429 or host is None or not (r.outcome.model or r.outcome.is_model_untold):
        return ""
    if host in r.text:
        named = named_metric(r.text)
        if named:
            return named
    usage = r.outcome.usage
    if usage is None:
        return ""
    return "day" if usage.day else "minute" if usage.minute or usage.token else ""


@under(429)
def is_day_spent(r: Reading) -> bool:
    return metric(r) == "day"


@under(429)
def is_minute_spent(r: Reading) -> bool:
    return metric(r) == "minute"


def named_metric(text: str) -> str:
    if signals.PER_DAY_METRIC.found_in(text):
        return "day"
    return "minute" if "token_count" in text or "_requests" in text else ""


def is_credits(r: Reading) -> bool:
    return signals.CREDITS.found_in(r.account_text) and r.is_signal_usable


def is_credits_beyond(r: Reading) -> bool:
    told = r.meaning == "credits" or (not is_coded_rate_limit(r) and signals.CREDITS_EXTENDED.found_in(r.account_text))
    return told and rule_of(r) is None


def is_coded_rate_limit(r: Reading) -> bool:
    """A 429 whose code names a rate limit: what its text says of paying is advice."""
    return r.status == 429 and r.code in signals.THROTTLING_CODES


@under(402, 403)
def returns_by_itself(r: Reading) -> bool:
    """An allowance spoken of as spent together with the moment of its return, under a status that means payment."""
    told = "reset" in r.account_text and r.hint is not None and r.hint.source is HintSource.BODY
    return told and rule_of(r) is None


def daily_wait(r: Reading) -> DurationMs | None:
    connection = r.policy.connection
    if signals.TOKENS_PER_DAY.found_in(r.text) and r.hint is not None and r.hint.source is HintSource.HEADER:
        return min(r.hint.wait_ms, DAY_MS)
    if connection.node_clock_zone and connection.node_clock_hour is not None:
        return until_hour(r.now, connection.node_clock_zone, connection.node_clock_hour)
    if signals.TOKENS_PER_DAY.found_in(r.text):
        return None
    return until_midnight(r.now, r.policy.daily_reset_zone)


def is_daily(r: Reading) -> bool:
    return signals.DAILY.found_in(r.account_text) and r.is_signal_usable and daily_wait(r) is not None


def is_weekly(r: Reading) -> bool:
    return signals.is_weekly(r.account_text)


def is_subscription(r: Reading) -> bool:
    return is_subscription_text(r.account_text, r.policy) and r.is_signal_usable


def is_subscription_text(text: str, policy: ConnectionPolicy) -> bool:
    """Subscription wording, the provider's own texts included."""
    own = policy.provider.extra_subscription_texts
    return signals.SUBSCRIPTION.found_in(text) or (bool(own) and any(part in text for part in own))


def is_session(r: Reading) -> bool:
    return signals.is_session_limit(r.account_text)


def is_quota_with_reset(r: Reading) -> bool:
    if r.hint is None:
        return False
    # A gateway in between may wrap the refusal into a 5xx of its own.
    spent = 429 in (r.status, r.outcome.inner_status) and signals.QUOTA_TEXT_EXTENDED.found_in(r.account_text)
    return (spent or text_reason(r.account_text) is Reason.QUOTA_EXHAUSTED) and r.is_signal_usable


def is_period_quota(r: Reading) -> bool:
    if r.meaning == "period_quota":
        return True
    if r.status not in (400, 401, 402, 403):
        return False
    told = "quota_exceeded" in (r.code, r.type) or signals.PERIOD_QUOTA_EXTENDED.found_in(r.account_text)
    return told and rule_of(r) is None


@under(403)
def is_route_refused(r: Reading) -> bool:
    return signals.ROUTE_NOT_AUTHORIZED.found_in(r.text)


@under(400)
def is_400_rule(r: Reading) -> bool:
    return rule_of(r) is not None


def rule_of(r: Reading) -> rules.RuleMatch | None:
    return rules.first_match(r.outcome, r.policy, r.text)


def pre_check_of(r: Reading) -> rules.RuleMatch | None:
    return rules.pre_check_match(r.outcome, r.policy, r.text)


@under(403)
def is_403_rule(r: Reading) -> bool:
    return r.policy.honors_rule_scope and rule_of(r) is not None


@under(429)
def is_429_pre_check(r: Reading) -> bool:
    return pre_check_of(r) is not None


@under(403)
def is_key_403(r: Reading) -> bool:
    return r.is_api_key and not signals.FORBIDDEN_QUOTA_EXCEPTIONS.found_in(r.text)


@under(403)
def is_cloudflare_refusal(r: Reading) -> bool:
    return is_key_403(r) and is_cloudflare_no_retry(r.text)


def is_cloudflare_no_retry(text: str) -> bool:
    """A refusal by Cloudflare that repeating never heals (guards.md section 1)."""
    if signals.CLOUDFLARE_NO_RETRY.found_in(text):
        return True
    return signals.NOT_RETRYABLE.found_in(text) and signals.CLOUDFLARE_OWNER.found_in(text)


@under(403)
def is_model_forbidden(r: Reading) -> bool:
    return blames_model_access(r)


def blames_model_access(r: Reading) -> bool:
    """The answer names a model that this account may not use, by code or by wording."""
    if r.code in _MODEL_CODES or r.type in _MODEL_CODES or r.meaning == "entitlement":
        return True
    return is_model_denied(r) or signals.MODEL_ENTITLEMENT.found_in(r.text)


def is_model_denied(r: Reading) -> bool:
    """A gateway in between says by type (`key_model_access_denied`, `team_...`) that its key is not for this model."""
    return r.type.endswith("model_access_denied")


def is_credential_refusal(r: Reading) -> bool:
    return (r.status in (400, 403) or r.meaning == "credential") and is_dead_credential(r)


def is_dead_credential(r: Reading) -> bool:
    """A structured name says that the key or token is no good."""
    if r.meaning == "credential" or signals.CREDENTIAL_CODES.found_in(r.account_text):
        return True
    return bool(r.type) and signals.CREDENTIAL_CODES.found_in(r.type)


def is_throttled(r: Reading) -> bool:
    """Throttling by structured code under a status that says something else."""
    if r.meaning == "rate_limit":
        return r.status != 429
    return r.status == 400 and (r.code or r.type) in signals.THROTTLING_CODES


def is_overload_code(r: Reading) -> bool:
    return r.meaning == "overloaded" and r.status != 429


def is_refused_by_code(r: Reading) -> bool:
    """The code is about this request, whatever the status: as the catalogue knows it, or by its own name."""
    return r.meaning in ("invalid_request", "content_policy") or is_policy_code(r)


def is_policy_code(r: Reading) -> bool:
    """The structured code or type itself speaks of what the prompt or the answer contains."""
    return signals.CONTENT_POLICY.found_in(r.code) or signals.CONTENT_POLICY.found_in(r.type)


def is_inner_request_error(r: Reading) -> bool:
    """A 5xx that in truth refuses this one request: too long, or named so by the structured type."""
    return (r.status or 0) >= 500 and signals.OVERFLOW_CERTAIN.found_in(r.text)


# --- configured rules (step 20) ----------------------------------------------------------------------------------
TEXT_ROWS: Final[tuple[tuple[signals.Family, Reason, Mode, DurationMs], ...]] = (
    (signals.one_of("no credentials"), Reason.AUTH_ERROR, Mode.FIXED, PAYMENT_MS),
    (signals.one_of("request not allowed"), Reason.RATE_LIMIT_EXCEEDED, Mode.FIXED, REQUEST_NOT_ALLOWED_MS),
    (signals.one_of("improperly formed request"), Reason.MODEL_CAPACITY, Mode.FIXED, 0),
    (signals.RATE_TEXT, Reason.RATE_LIMIT_EXCEEDED, Mode.LADDER, 0),
    (signals.QUOTA_TEXT, Reason.QUOTA_EXHAUSTED, Mode.LADDER, 0),
    (signals.CAPACITY_TEXT, Reason.MODEL_CAPACITY, Mode.LADDER, 0),
)
STATUS_ROWS: Final[dict[int, tuple[Reason, Mode, DurationMs]]] = {
    401: (Reason.AUTH_ERROR, Mode.FIXED, 0),
    402: (Reason.QUOTA_EXHAUSTED, Mode.FIXED, 0),
    403: (Reason.QUOTA_EXHAUSTED, Mode.FIXED, 0),
    404: (Reason.UNKNOWN, Mode.FIXED, NOT_FOUND_MS),
    **dict.fromkeys((406, 408, 500, 502, 503, 504), (Reason.SERVER_ERROR, Mode.LADDER, 0)),
    429: (Reason.RATE_LIMIT_EXCEEDED, Mode.LADDER, 0),
}


def text_reason(text: str) -> Reason | None:
    """Reason of the first configured text rule that lower-case `text` hits, None without one."""
    for family, reason, _, _ in TEXT_ROWS:
        if family.found_in(text):
            return reason
    return None


def configured_row(r: Reading) -> tuple[Reason, Mode, DurationMs] | None:
    by_status = STATUS_ROWS.get(r.status or 0)
    by_text = _row_of_text(r) if r.account_text and not is_about_this_request(r) else None
    # Last, since it costs most: whether words count beside a plain 429.
    return by_text if by_text and by_text != by_status and (r.status != 429 or r.is_signal_usable) else by_status


def _row_of_text(r: Reading) -> tuple[Reason, Mode, DurationMs] | None:
    for family, reason, mode, fixed_ms in TEXT_ROWS:
        if family.found_in(r.account_text) and not (reason is Reason.MODEL_CAPACITY and _blames_request(r)):
            return reason, mode, fixed_ms
    return None


def _blames_request(r: Reading) -> bool:
    """A 400 that is typed as the caller's fault speaks of load only in the words of load, not of any "capacity"."""
    typed = r.status in (400, 422) and r.type == "invalid_request_error"
    return typed and not signals.OVERLOAD.found_in(r.account_text)


def is_about_this_request(r: Reading) -> bool:
    """A 400 or 422 that certainly speaks of its own length says nothing about capacity or rates."""
    return r.status in (400, 422) and signals.OVERFLOW_CERTAIN.found_in(r.text)


def is_configured(r: Reading) -> bool:
    return (r.status or 0) in STATUS_ROWS or configured_row(r) is not None


# --- 400 and 422 (step 24) -----------------------------------------------------------------------------------------
_BAD_REQUEST: Final = (400, 422)
is_bad_request_status: Final = under(*_BAD_REQUEST)(always)


@under(*_BAD_REQUEST)
def is_structured_model(r: Reading) -> bool:
    return names_model(r)


def names_model(r: Reading) -> bool:
    if r.code in signals.MODEL_CODES or r.code in signals.MODEL_CODES_EXTENDED or r.type == "not_found_error":
        return True
    return r.type in signals.MODEL_CODES_EXTENDED or (r.type == "permission_error" and "model" in r.text)


def says(family: signals.Family) -> Condition:
    return under(*_BAD_REQUEST)(lambda r: family.found_in(r.text))


def says_of_account(family: signals.Family) -> Condition:
    return under(*_BAD_REQUEST)(lambda r: family.found_in(r.account_text))


@under(*_BAD_REQUEST)
def is_model_access(r: Reading) -> bool:
    if echoes_request(r.outcome):
        return False
    families = (signals.MODEL_UNSERVED, signals.MODEL_UNSERVED_EXTENDED, signals.MODEL_PERMISSION)
    words = any(family.found_in(r.text) for family in families)
    denied = "access denied" in r.text and "model" in r.text
    return (words or denied) and not signals.CREDENTIAL_FAILURE.found_in(r.text)
