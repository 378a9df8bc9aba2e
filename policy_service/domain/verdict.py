"""The public verdict on one failure: where the blame lies, why, and what may still be tried.

One ordered table over guards, classification and error type; its vocabulary is finer than the ladder reasons of
the decision record. It says what an answer means, whatever the settings make of it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from policy_service.domain import classification_conditions as on
from policy_service.domain import signals
from policy_service.domain.classification import classify_reading
from policy_service.domain.decision_record import Classification, Reason
from policy_service.domain.error_types import error_type_of
from policy_service.domain.guards import guard_allows_fallback, local_guard
from policy_service.domain.ids import HintSource, Instant
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.reading import Reading
from policy_service.domain.retry_headers import is_used_up
from policy_service.domain.verdict_values import (
    ACCOUNT,
    CONNECTION,
    MODEL,
    NOBODY,
    PROVIDER,
    Verdict,
    told_by_rule,
)

__all__ = ["LIMIT", "NOBODY", "PROVIDER", "ROWS", "Case", "Row", "Verdict", "judge", "judge_reading", "limit_scope"]

LIMIT: Final = "by_limit"
"""Model or connection, by what the limit is counted on; see `limit_scope`."""
_SHORT_MS: Final = 3_600_000
_DAY_MS: Final = 86_400_000


class Case:
    """One failure with everything that the rows look at."""

    __slots__ = ("error_type", "found", "guard", "reading", "text")

    def __init__(self, reading: Reading, guard: str, found: Classification, error_type: str) -> None:
        self.reading = reading
        self.guard = guard
        self.found = found
        self.error_type = error_type
        self.text = reading.text

    @property
    def status(self) -> int:
        """Status of the outcome, 0 where unknown."""
        return self.reading.status or 0


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. `states_wait`: a wait that the answer states means something here."""

    id: str
    when: Callable[[Case], bool]
    scope: str
    reason: str
    fallback: bool = True
    terminal: str | None = None
    states_wait: bool = True


def judge(outcome: Outcome, policy: ConnectionPolicy, now: Instant) -> Verdict:
    """Public verdict on a failed attempt.

    Args:
        outcome: the attempt, status already restated.
        policy: what applies to its connection.
        now: instant against which absolute times are read, ms.
    """
    reading = Reading(outcome, policy, now)
    return judge_reading(reading, local_guard(outcome, policy), classify_reading(reading))


def judge_reading(reading: Reading, guard: str, found: Classification) -> Verdict:
    """As `judge`, for an outcome that was read and classified already.

    Args:
        guard: name of the local guard that ends the evaluation; empty without one.
        found: what the pipeline says.
    """
    case = Case(reading, guard, found, error_type_of(reading))
    row = next(row for row in ROWS if row.when(case))
    scope = limit_scope(case) if row.scope == LIMIT else row.scope
    fallback = guard_allows_fallback(case.guard) if row.id == _BY_GUARD else row.fallback
    wait = reading.stated_wait_ms if row.states_wait else None
    if found.rule_id and not case.guard and row.terminal is None:
        return told_by_rule(found, scope, row.reason, wait)
    return Verdict(scope, row.reason, fallback, wait, row.terminal, _rule_name(row, case))


def limit_scope(case: Case) -> str:
    """What a limit is counted on: the account or the model."""
    provider = case.reading.policy.provider
    if any(text in case.text for text in provider.account_limit_texts):
        return CONNECTION
    model = case.reading.outcome.model.lower()
    if (
        provider.limits_per_model
        or _is_google(case)
        or (model and (case.reading.policy.counts_per_model or model in case.text))
    ):
        return MODEL
    return MODEL if signals.RATE_OF_MODEL.found_in(case.text) else CONNECTION


def _rule_name(row: Row, case: Case) -> str:
    return case.guard or (case.found.rule if row.id.startswith("by-") else row.id)


# --- conditions ---------------------------------------------------------------------------------------------------
_BY_GUARD: Final = "by-guard"
Condition = Callable[[Case], bool]


def _guard(*names: str) -> Condition:
    return lambda c: c.guard in names


def _rule(*names: str) -> Condition:
    return lambda c: c.found.rule in names


def _type(*names: str) -> Condition:
    return lambda c: c.error_type in names


def _status(*statuses: int) -> Condition:
    return lambda c: c.status in statuses


def _says(family: signals.Family, *statuses: int) -> Condition:
    return lambda c: (not statuses or c.status in statuses) and family.found_in(c.text)


def _both(first: Condition, second: Condition) -> Condition:
    return lambda c: first(c) and second(c)


def _meaning(name: str) -> Condition:
    return lambda c: c.reading.meaning == name


def _either(*conditions: Condition) -> Condition:
    return lambda c: any(condition(c) for condition in conditions)


def _is_network(c: Case) -> bool:
    return bool(c.reading.outcome.network_error) and c.reading.outcome.origin != "upstream"


def _is_content_policy(c: Case) -> bool:
    if c.reading.meaning == "content_policy" or on.is_policy_code(c.reading):
        return True
    believed = c.status in (400, 403, 422, 451) or c.reading.outcome.is_error_in_success
    return believed and signals.CONTENT_POLICY.found_in(c.text)


def _is_empty_wallet(c: Case) -> bool:
    provider = c.reading.policy.provider
    if c.found.credits_exhausted or (c.status == 402 and provider.shared_wallet_402):
        return True
    if c.found.rule in ("credits-text", "credits-beyond"):
        return provider.credits_text_is_terminal
    return c.status == 402 and not c.reading.policy.counts_per_model and c.found.rule == "configured"


def _is_spent_share(c: Case) -> bool:
    """Payment is asked for, but the provider keeps other models or other allowances open."""
    return c.status == 402 or c.found.rule in ("credits-text", "credits-beyond")


def _share_of_connection(c: Case) -> bool:
    return _is_spent_share(c) and (c.found.rule_scope == "connection" or not c.reading.outcome.model)


def _is_dead_login(c: Case) -> bool:
    policy = c.reading.policy
    return c.error_type == "unauthorized" and not policy.provider.web_cookie


def _is_weak_login(c: Case) -> bool:
    """A 401 that speaks of no spent allowance."""
    return c.status == 401 and not _is_quota_decision(c)


def _is_missing_model(c: Case) -> bool:
    """A 404 or 410 that speaks of a model, or whose code does."""
    if c.status not in (404, 410):
        return False
    names_code = c.reading.code in _MODEL_CODES or c.reading.type in _MODEL_CODES
    return (
        names_code
        or any(word in c.text for word in ("model", "deployment", "function '", "no endpoints found"))
        or (bool(c.reading.outcome.model) and "requested entity was not found" in c.text)
    )


_MODEL_CODES: Final = signals.MODEL_CODES | signals.MODEL_CODES_EXTENDED | {"not_found_error"}


def _is_model_refusal(c: Case) -> bool:
    return c.error_type == "model_not_found" and c.status in (400, 401, 403)


def _is_bad_model(c: Case) -> bool:
    return c.found.rule in ("model-code", "model-access") or _is_model_refusal(c)


def _is_coded_model(c: Case) -> bool:
    """A gateway that says by code, under a 5xx, that nobody behind it serves the model."""
    return c.status >= 500 and c.reading.code in signals.MODEL_CODES


def _is_entitlement(c: Case) -> bool:
    """The model is there, the account may not use it."""
    told = signals.MODEL_ENTITLEMENT.found_in(c.text) or c.reading.code == "model_not_supported"
    return told or c.reading.meaning == "entitlement"


def _is_model_denied(c: Case) -> bool:
    return c.status == 401 and on.is_model_denied(c.reading)


def _is_period_quota(c: Case) -> bool:
    """An allowance of a day or longer is spent, or one that the subscription counts."""
    if c.reading.meaning == "period_quota" or _is_window_rejected(c):
        return True
    if c.found.reason == Reason.QUOTA_EXHAUSTED and not _is_google_rate(c):
        return True
    return signals.PERIOD_ALLOWANCE.found_in(c.text) or _is_long_window(c)


def _is_google_rate(c: Case) -> bool:
    """Google calls every rate limit a quota; only a metric per day is one."""
    return _is_google(c) and c.found.rule in ("configured", "quota-with-reset")


def _is_google(c: Case) -> bool:
    return c.reading.type == "resource_exhausted" or "type.googleapis.com" in c.text


def _is_window_rejected(c: Case) -> bool:
    """A window of a day or longer, or one of a subscription, is used up, as the answer's headers say."""
    headers = c.reading.outcome.headers
    return any(
        _is_spent_window(name, value.strip()) for name, value in headers.items() if "limit" in name or "used" in name
    )


def _is_spent_window(name: str, value: str) -> bool:
    if name.startswith("anthropic-ratelimit-unified"):
        return name.endswith("status") and value == "rejected"
    if name.startswith("x-codex-"):
        return name.endswith("-used-percent") and is_used_up(value)
    return "-remaining-" in name and name.endswith(_LONG_WINDOWS) and value == "0"


_LONG_WINDOWS: Final = ("-day", "-week", "-month")


def _is_long_window(c: Case) -> bool:
    hint = c.reading.hint
    if hint is not None and hint.source is not HintSource.HEADER and hint.wait_ms >= _DAY_MS:
        return True
    return (hint is None or hint.wait_ms >= _SHORT_MS) and signals.DAY_WINDOW.found_in(c.text)


def _counts_on_model(c: Case) -> bool:
    """The spent allowance is one model's own."""
    model = c.reading.outcome.model.lower()
    if limit_scope(c) != MODEL:
        return False
    return (bool(model) and model in c.text) or not signals.ACCOUNT_ALLOWANCE.found_in(c.text)


def _is_limit(c: Case) -> bool:
    if c.status in (420, 429, 432):
        return True
    return c.found.reason == Reason.RATE_LIMIT_EXCEEDED or _is_quota_decision(c)


def _is_quota_decision(c: Case) -> bool:
    return c.found.reason == Reason.QUOTA_EXHAUSTED and c.found.rule not in ("configured",)


def _is_overload(c: Case) -> bool:
    if c.status == 529 or c.reading.meaning == "overloaded":
        return True
    if c.status == 429 and signals.MINUTE_WINDOW.found_in(c.text):
        return False
    if c.status == 400:
        return c.found.rule == "configured" and signals.CAPACITY_TEXT.found_in(c.text)
    told = signals.OVERLOAD.found_in(c.text) or (c.status >= 498 and signals.SLOW_DOWN.found_in(c.text))
    return told and (c.status >= 498 or c.status == 429)


def _names_the_model(c: Case) -> bool:
    """Load is said of one model, or of a host on which each model has machines of its own."""
    model = c.reading.outcome.model.lower()
    if c.reading.policy.provider.hosts_models or (model and model in c.text):
        return True
    return signals.MODEL_NAMED.found_in(c.text)


def _is_busy_503(c: Case) -> bool:
    return c.status == 503 and not c.text.strip() and c.reading.hint is not None


def _is_overflow(c: Case) -> bool:
    if c.found.rule in ("overflow", "inner-request-error") or c.status == 413:
        return True
    return c.status in (400, 422) and signals.OVERFLOW_CERTAIN.found_in(c.text)


def _is_output_overflow(c: Case) -> bool:
    return c.status in (400, 422) and signals.OUTPUT_TOKENS.found_in(c.text)


def _is_key_of_another(c: Case) -> bool:
    """A gateway in between tells, under a 5xx of its own, that its upstream refuses the key."""
    return c.status >= 500 and on.is_dead_credential(c.reading)


def _always(_: Case) -> bool:
    return True


def _is_key_403(c: Case) -> bool:
    return c.status == 403


# --- the table ------------------------------------------------------------------------------------------------------
ROWS: Final[tuple[Row, ...]] = (
    Row("abort", _guard("abort"), NOBODY, "client_error", fallback=False, states_wait=False),
    Row("own-key-policy", _guard("own-key-policy"), NOBODY, "rate_limit", fallback=False),
    Row("own-limiter", _guard("own-limiter", "own-circuit-open"), NOBODY, "overloaded"),
    Row("own-timeout", _guard("own-timeout"), NOBODY, "network"),
    Row("local-fault", _guard("local-fault"), NOBODY, "none", fallback=False),
    Row("spare-key", _guard("spare-key"), NOBODY, "auth_error"),
    Row("request-resource", _guard("request-resource"), NOBODY, "client_error", fallback=False),
    Row("free-tier-removed", _guard("free-tier-removed"), MODEL, "quota_exhausted"),
    Row("input-bound", _guard("input-bound"), NOBODY, "context_overflow", states_wait=False),
    Row("network", _is_network, PROVIDER, "network"),
    # accounts
    Row("by-ban", lambda c: c.found.permanent, ACCOUNT, "auth_error", terminal="banned"),
    Row("by-quota-returns", _rule("quota-returns"), CONNECTION, "quota_exhausted"),
    Row("burst-402", lambda c: c.status == 402 and c.reading.hint is not None, CONNECTION, "rate_limit"),
    Row("by-wallet", _is_empty_wallet, ACCOUNT, "quota_exhausted", terminal="credits_exhausted"),
    Row("by-share-of-connection", _share_of_connection, CONNECTION, "quota_exhausted"),
    Row("by-share-of-model", _is_spent_share, MODEL, "quota_exhausted"),
    # the request
    Row("content-policy", _is_content_policy, NOBODY, "content_policy", fallback=False, states_wait=False),
    Row(
        "oversized-for-limit",
        _says(signals.TOO_LARGE_FOR_LIMIT, 429),
        NOBODY,
        "context_overflow",
        states_wait=False,
    ),
    Row("feature-not-included", _says(signals.FEATURE_ENTITLEMENT), NOBODY, "model_access_denied"),
    Row("output-too-long", _is_output_overflow, NOBODY, "client_error", states_wait=False),
    Row("context-overflow", _is_overflow, NOBODY, "context_overflow", states_wait=False),
    Row("tool-use-failed", _says(signals.TOOL_USE_FAILED, 400), NOBODY, "server_error", states_wait=False),
    # where the call comes from
    Row("region", _either(_type("geo_blocked"), _status(451)), PROVIDER, "region_blocked"),
    Row("client-unwelcome", _says(signals.CLIENT_UNWELCOME, 400, 401, 403), CONNECTION, "client_blocked"),
    Row("client-blocked", _type("fingerprint_rejection"), PROVIDER, "client_blocked"),
    # models
    Row("retired-model", _rule("retired-model", "endpoint-moved"), MODEL, "model_not_found", states_wait=False),
    Row("model-load-failed", _says(signals.MODEL_LOAD_FAILED), MODEL, "server_error"),
    Row("plan-without-access", _says(signals.PLAN_WITHOUT_ACCESS), CONNECTION, "model_access_denied"),
    Row("never-offered", _says(signals.NEVER_OFFERED, 429), MODEL, "model_access_denied", states_wait=False),
    Row(
        "model-entitlement",
        _either(
            _both(_status(400, 403), _is_entitlement),
            _meaning("entitlement"),
            _is_model_denied,
            _says(signals.MODEL_SETUP, 400, 403, 404),
        ),
        MODEL,
        "model_access_denied",
    ),
    Row("degraded-model", _rule("nim-degraded"), MODEL, "overloaded"),
    Row("missing-model", _is_missing_model, MODEL, "model_not_found"),
    Row("refused-model", _both(_status(403), _is_bad_model), MODEL, "model_access_denied"),
    Row("unserved-model", _either(_is_bad_model, _is_coded_model), MODEL, "model_not_found"),
    # credentials
    Row("dead-credential", _is_dead_login, ACCOUNT, "auth_error", terminal="expired"),
    Row("by-dead-account", _type("account_deactivated"), ACCOUNT, "auth_error", terminal="banned"),
    Row("weak-login", _is_weak_login, CONNECTION, "auth_error"),
    # limits and load
    Row("overloaded-model", _both(_is_overload, _names_the_model), MODEL, "overloaded"),
    Row(
        "overloaded-pool",
        _both(_is_overload, _both(_status(429), lambda c: limit_scope(c) == MODEL)),
        MODEL,
        "overloaded",
    ),
    Row("overloaded", _either(_is_overload, _is_busy_503), PROVIDER, "overloaded"),
    Row(
        "by-quota-of-model",
        lambda c: _is_limit(c) and _is_period_quota(c) and _counts_on_model(c),
        MODEL,
        "quota_exhausted",
    ),
    Row("by-quota", _both(_is_limit, _is_period_quota), CONNECTION, "quota_exhausted"),
    Row("by-rate-limit", _is_limit, LIMIT, "rate_limit"),
    # refusals
    Row(
        "project", _both(_type("project_route_error"), _says(signals.PROJECT_SETUP)), CONNECTION, "model_access_denied"
    ),
    Row("forbidden", _type("forbidden"), ACCOUNT, "auth_error", terminal="banned"),
    Row("refused-key", _is_key_403, CONNECTION, "auth_error"),
    Row(_BY_GUARD, _both(_guard("request-scoped"), lambda c: c.status < 500), NOBODY, "client_error", fallback=False),
    Row("request-scoped", _guard("request-scoped"), NOBODY, "client_error", fallback=False),
    Row(
        "bad-request",
        _either(_status(400, 422), _meaning("invalid_request")),
        NOBODY,
        "client_error",
        fallback=False,
        states_wait=False,
    ),
    # the service
    Row("upstream-key", _is_key_of_another, CONNECTION, "auth_error"),
    Row("server-error", lambda c: c.status >= 500 or c.status in (408, 424), PROVIDER, "server_error"),
    Row("other", _always, CONNECTION, "client_error"),
)
