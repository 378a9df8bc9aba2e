"""Other readings of the same answer: the provider error type, the breaker kind, the label of listings.

Spec: terminal_states.md section 2 and classification.md sections 4.3 and 5. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from policy_service.domain import classification_conditions as on
from policy_service.domain import signals
from policy_service.domain.decision_record import Reason
from policy_service.domain.guards import is_request_resource
from policy_service.domain.ids import AuthClass, HintSource, Instant
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.profiles import HintProfile
from policy_service.domain.reading import Reading, lowered_text
from policy_service.domain.retry_hints import read_hint

_UNSUPPORTED_MODEL: Final = signals.Family(lines=(("model", "is not supported"),))
_OVERFLOW: Final = signals.OVERFLOW | signals.OVERFLOW_CERTAIN
_SHORT_WAIT_MS: Final = 3_600_000
_REFERENCE_HINTS: Final = HintProfile(extended_texts=False, extended_reset_headers=False)
_RETRY_IN: Final = re.compile(r"please retry in \d+(?:\.\d+)?s")

Row = tuple[frozenset[int] | None, Callable[[Reading], bool], str]


def error_type(outcome: Outcome, policy: ConnectionPolicy, now: Instant = 0) -> str:
    """Provider error type, first match of terminal_states.md section 2; empty where none applies."""
    return error_type_of(Reading(outcome, policy, now))


def error_type_of(reading: Reading) -> str:
    """As `error_type`, for an outcome that has been read."""
    for statuses, holds, name in _ROWS:
        if (statuses is None or reading.status in statuses) and holds(reading):
            return name
    return "server_error" if (reading.status or 0) >= 500 else ""


def _spent(r: Reading) -> bool:
    return has_credits_text(r) or on.is_subscription_text(r.account_text, r.policy)


def has_credits_text(r: Reading) -> bool:
    """A credits signal of any kind, wordings and codes."""
    return signals.CREDITS.found_in(r.account_text) or on.is_credits_beyond(r)


def _is_oauth_or_unknown(r: Reading) -> bool:
    return r.policy.auth_class in (AuthClass.OAUTH, AuthClass.NONE)


def _is_geo(r: Reading) -> bool:
    if signals.GEO_EXTENDED.found_in(r.text):
        return True
    return r.policy.provider.google_surface and signals.GEO.found_in(r.text)


def _is_fingerprint(r: Reading) -> bool:
    return signals.FINGERPRINT.found_in(r.text) or signals.BLOCK_PAGE.found_in(r.text)


def _is_project_problem(r: Reading) -> bool:
    return r.policy.provider.cloud_code or signals.PROJECT_PROBLEM.found_in(r.text)


def _any(texts_of: Callable[[Reading], tuple[str, ...]]) -> Callable[[Reading], bool]:
    return lambda r: any(text in r.text for text in texts_of(r))


def _always(_: Reading) -> bool:
    return True


def _is_key_or_open(r: Reading) -> bool:
    return r.is_api_key or r.policy.provider.no_auth


_S400, _S401, _S402, _S403, _S404, _S422, _S429 = (frozenset({s}) for s in (400, 401, 402, 403, 404, 422, 429))
_ROWS: Final[tuple[Row, ...]] = (
    (_S400 | _S401 | _S402 | _S403, _spent, "quota_exhausted"),
    (_S429, lambda r: _is_oauth_or_unknown(r) and _spent(r), "quota_exhausted"),
    (_S429, lambda r: r.policy.auth_class is AuthClass.OAUTH and signals.DAILY.found_in(r.text), "quota_exhausted"),
    (_S429, _always, "rate_limited"),
    (_S404, lambda r: is_request_resource(r.outcome), ""),
    (_S404, _always, "model_not_found"),
    (_S401, lambda r: signals.OAUTH_INVALID.found_in(r.text), "oauth_invalid_token"),
    (_S401, lambda r: _UNSUPPORTED_MODEL.found_in(r.text), "model_not_found"),
    (_S401, on.is_model_denied, "model_not_found"),
    (_S401, on.is_ban, "account_deactivated"),
    (_S401, on.is_period_quota, "quota_exhausted"),
    (_S400 | _S401 | _S403, lambda r: signals.CLIENT_UNWELCOME.found_in(r.text), "fingerprint_rejection"),
    (_S401, _always, "unauthorized"),
    (_S402, _always, "quota_exhausted"),
    (_S400 | _S403, _is_geo, "geo_blocked"),
    (_S400 | _S403, on.is_dead_credential, "unauthorized"),
    (None, lambda r: r.meaning == "credential", "unauthorized"),
    (_S403, _is_fingerprint, "fingerprint_rejection"),
    (_S403, on.is_ban, "account_deactivated"),
    (_S403, on.is_period_quota, "quota_exhausted"),
    (_S403, on.blames_model_access, "model_not_found"),
    (_S403, _is_project_problem, "project_route_error"),
    (_S403, _any(lambda r: r.policy.provider.route_error_texts), "project_route_error"),
    (_S403, lambda r: signals.BROWSER_BLOCK.found_in(r.text), "forbidden"),
    (_S403, _any(lambda r: r.policy.provider.request_rejected_texts), "request_rejected"),
    (_S403, _is_key_or_open, ""),
    (_S403, _always, "forbidden"),
    (_S422, lambda r: r.code == "gcp_project_required", "gcp_project_required"),
    (_S400, lambda r: _OVERFLOW.found_in(r.text), "context_overflow"),
    (_S400, lambda r: _UNSUPPORTED_MODEL.found_in(r.text), "model_not_found"),
)


def breaker_kind(outcome: Outcome, now: Instant) -> str:
    """Kind of a text for the breaker (classification.md section 5)."""
    if outcome.status != 429:
        return "transient"
    text = lowered_text(outcome)
    if signals.TERMINAL_QUOTA.found_in(text):
        return "quota_exhausted"
    if _states_short_wait(outcome, text, now) or not signals.LONG_PERIOD.found_in(text):
        return "rate_limit"
    return "quota_exhausted"


def _states_short_wait(outcome: Outcome, text: str, now: Instant) -> bool:
    """RetryInfo or "please retry in Ns" below an hour; other hints don't speak about the kind."""
    if "retry" not in text:
        return False
    hint = read_hint({}, outcome.body, outcome.text, now, _REFERENCE_HINTS)
    if hint is None or hint.wait_ms >= _SHORT_WAIT_MS:
        return False
    return hint.source is HintSource.RETRY_INFO or _RETRY_IN.search(text) is not None


_LABEL_STATUSES: Final = {
    401: Reason.AUTH_ERROR,
    403: Reason.AUTH_ERROR,
    402: Reason.QUOTA_EXHAUSTED,
    432: Reason.QUOTA_EXHAUSTED,
    429: Reason.RATE_LIMIT_EXCEEDED,
    503: Reason.MODEL_CAPACITY,
    529: Reason.MODEL_CAPACITY,
}
_QUOTA_WORDS: Final = signals.CREDITS | signals.DAILY | signals.SUBSCRIPTION


def reason_label(outcome: Outcome) -> str:
    """Reason-only label of listings and pool diagnostics: text first, then status. Never for durations."""
    text = lowered_text(outcome)
    if _QUOTA_WORDS.found_in(text) or signals.is_weekly(text) or signals.is_session_limit(text):
        return Reason.QUOTA_EXHAUSTED
    named = on.text_reason(text) if text else None
    if named is not None:
        return named
    by_status = Reason.SERVER_ERROR if (outcome.status or 0) >= 500 else Reason.UNKNOWN
    return _LABEL_STATUSES.get(outcome.status or 0, by_status)


def provider_does_not_serve(outcome: Outcome) -> bool:
    """True if another account of the provider would answer the same (section 4.3); status 400 only."""
    if outcome.status != 400:
        return False
    text = lowered_text(outcome)
    unserved = signals.MODEL_UNSERVED.found_in(text) or signals.UNKNOWN_PROVIDER_FOR_MODEL.found_in(text)
    return unserved and not signals.CREDENTIAL_FAILURE.found_in(text)
