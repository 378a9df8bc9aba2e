"""Wordings beyond the spec's lists, each by what it decides in a verdict; and kinds of errors inside a 200."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.application.classify import classify_record
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.error_object import ErrorObject
from policy_service.domain.outcome_parsing import network_failure, status_of_kind
from policy_service.domain.policy import Policy
from policy_service.settings.provider_data import builtin_providers

POLICY = Policy(Catalogue(providers=builtin_providers()))


def said(status: int, text: str, provider: str = "acme") -> tuple[Any, Any]:
    """Scope and reason of a plain-text failure of a key."""
    told = classify_record({"provider": provider, "auth": "api_key", "status": status, "body": text}, POLICY, 0)
    return told["scope"], told["reason"]


@pytest.mark.parametrize(
    ("status", "text", "scope", "reason"),
    [
        (403, "the bearer token included in the request is no good", "connection_terminal", "auth_error"),
        (400, "bearer token has expired", "connection_terminal", "auth_error"),
        (403, "unregistered callers", "connection_terminal", "auth_error"),
        (403, "this api key is blocked", "connection_terminal", "auth_error"),
        (403, "api key abc, but somebody else was blocked", "connection_cooldown", "auth_error"),
        (429, "用户已被封禁", "connection_terminal", "auth_error"),
        (429, "your credits are depleted", "connection_terminal", "quota_exhausted"),
        (403, "access was terminated for a violation of the terms", "connection_terminal", "auth_error"),
        (429, "capacity temporarily exceeded", "provider_failure", "overloaded"),
        (503, "no available accounts", "provider_failure", "overloaded"),
        (503, "no available accounts supporting model m", "model_lockout", "overloaded"),
        (503, "no auth available (providers=p, model=m-5)", "model_lockout", "overloaded"),
        (503, "no available model provider", "provider_failure", "overloaded"),
        (403, "we block access from your country", "provider_failure", "region_blocked"),
        (400, "not allowed to use publisher model `p/m`", "model_lockout", "model_access_denied"),
        (400, "m is not available on your current plan", "model_lockout", "model_access_denied"),
        (403, "this key is not allowed to access model m", "model_lockout", "model_access_denied"),
        *((status, text, "model_lockout", "model_access_denied") for status in (400, 403, 404) for text in (
            "no endpoints found matching your data policy", "model use case details have not been submitted",
        )),
        (404, "no access to model x, or there is none", "model_lockout", "model_not_found"),
        (429, "今日额度已用完", "connection_cooldown", "quota_exhausted"),
        (429, "本月额度已用尽", "connection_cooldown", "quota_exhausted"),
        (429, "plan:free-usage-exhausted", "connection_cooldown", "quota_exhausted"),
        (429, "all the included free usage is gone", "connection_cooldown", "quota_exhausted"),
        (503, "loading model", "model_lockout", "overloaded"),
        (503, "model service overloaded", "model_lockout", "overloaded"),
        (429, "the load of the current group is saturated", "model_lockout", "overloaded"),
        (429, "slow down", "connection_cooldown", "rate_limit"),
        (503, "slow down", "provider_failure", "overloaded"),
        (503, "slow_down", "provider_failure", "overloaded"),
        (400, "censorship_blocked", "none", "content_policy"),
        (400, "sensitive words", "none", "content_policy"),
        (403, "sensitive_words_detected", "none", "content_policy"),
        (451, "what the machine outputted is blocked", "none", "content_policy"),
        (422, "cyber_policy_violation", "none", "content_policy"),
        (400, "this request has been flagged", "none", "content_policy"),
        (429, "over the rate limit for this model", "model_lockout", "rate_limit"),
        (429, "rate limit reached for gpt-z", "model_lockout", "rate_limit"),
        *((429, f"rate limit reached for {noun}", "connection_cooldown", "rate_limit")
          for noun in ("requests", "rpm", "TPM", "rpd", "user", "your org", "this key", "key", "tokens")),
        (429, "rate limit reached for rpm-model", "connection_cooldown", "rate_limit"),
        (429, "rate limit reached for rpmodel", "model_lockout", "rate_limit"),
        (403, "no access to the requested model", "model_lockout", "model_access_denied"),
        (403, "model access denied", "model_lockout", "model_access_denied"),
        (403, "model_permission_blocked_org", "model_lockout", "model_access_denied"),
        (400, "model_terms_required", "model_lockout", "model_access_denied"),
        (400, "requires terms acceptance", "model_lockout", "model_access_denied"),
        (500, "out of memory", "model_lockout", "server_error"),
        (500, "runner process has terminated", "model_lockout", "server_error"),
        (400, "out of extra usage", "connection_cooldown", "quota_exhausted"),
        (400, "draw from your extra usage", "connection_cooldown", "quota_exhausted"),
        (403, "quota_exhausted", "connection_cooldown", "quota_exhausted"),
        (429, "individual quota reached", "connection_cooldown", "quota_exhausted"),
        (403, "free trial quota", "connection_cooldown", "quota_exhausted"),
        (403, "exceeded the weekly or so usage quota", "connection_cooldown", "quota_exhausted"),
        (429, "1000 calls / month", "connection_cooldown", "quota_exhausted"),
        (429, "50 calls / day", "connection_cooldown", "quota_exhausted"),
        (429, "5 calls / hour", "connection_cooldown", "rate_limit"),
        *((status, text, "none", "context_overflow") for status in (400, 500) for text in (
            "上下文过长", "greater than the context length", "longer than the maximum model length",
            "the payload size exceeds it", "prompt tokens too long", "max input characters",
            "the model only supports up to 8", "input (14211 tokens) is too large to process",
            "max_tokens must be at least 1, got -7",
            "more than max_seq_len", "exceeds the context window",
        )),
        (400, "top_k must be at least 1, got -7", "none", "client_error"),
        (400, "the picture is too large to process", "none", "client_error"),
        (400, "maximum tokens you requested", "none", "client_error"),
        (400, "max_tokens is too large", "none", "client_error"),
        (400, "max_tokens: 9 > 8", "none", "client_error"),
        (422, "max_tokens here must be less than 8", "none", "client_error"),
        (400, "does not work with the specified model", "model_lockout", "model_not_found"),
        (404, "no such file object", "none", "client_error"),
    ],
)  # fmt: skip
def test_a_wording_has_its_meaning(status: int, text: str, scope: str, reason: str) -> None:
    assert said(status, text) == (scope, reason)


@pytest.mark.parametrize("text", ["usage limit", "usage_limit", "usage quota", "call volume quota", "your account"])
def test_an_allowance_of_the_account_is_no_models_own(text: str) -> None:
    assert said(403, f"monthly quota, {text}", "azure-openai") == ("connection_cooldown", "quota_exhausted")
    assert said(403, "monthly quota", "azure-openai") == ("model_lockout", "quota_exhausted")


@pytest.mark.parametrize(
    ("status", "kinds"),
    [
        (400, "BadRequest InvalidParameter invalid_value unsupported_value unsupported_parameter "
              "data_inspection_failed DataInspectionFailed SensitiveContentDetected OperationNotSupported"),
        (401, "token_revoked invalid_client invalid_authentication_error InvalidApiKey AuthFailure"),
        (402, "billing_error payment_required credits_exhausted insufficient_balance"),
        (403, "permission_error permission_denied forbidden"), (404, "DeploymentNotFound invalid_model"),
        (429, "too_many_tokens_error too_many_requests_error RateLimitReached RequestLimitExceeded"),
        (499, "cancelled"),
        (408, "request_timeout"), (409, "conflict_error"), (413, "request_too_large"), (500, "api_error"),
        (503, "service_unavailable unavailable"), (504, "timeout_error"), (529, "overloaded_error"),
    ],
)  # fmt: skip
def test_an_error_inside_a_200_has_the_status_of_its_kind(status: int, kinds: str) -> None:
    assert {status_of_kind(ErrorObject(type=kind)) for kind in kinds.split()} == {status}
    assert {status_of_kind(ErrorObject(code=kind)) for kind in kinds.split()} == {status}


@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [
        ("invalid_request_error", "insufficient_quota", 429),
        ("server_error", "overloaded_error", 529),
        ("rate_limit_error", "invalid_request_error", 429),
        ("invalid_request_error", "server_error", 400),
        ("server_error", "invalid_request_error", 500),
        ("odd", "Throttling.RateQuota", 429),
        ("", "AuthFailure.SecretIdNotFound", 401),
    ],
)
def test_of_type_and_code_the_more_telling_one_counts(kind: str, code: str, status: int) -> None:
    assert status_of_kind(ErrorObject(type=kind, code=code)) == status


@pytest.mark.parametrize(
    "report",
    ["ERR_CANCELED", "CanceledError: canceled", "CancelledError()", "The user aborted it", "Request was aborted."],
)
def test_who_gave_up_was_the_caller(report: str) -> None:
    assert network_failure(report).status == 499


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"x-codex-primary-used-percent": "100"}, "quota_exhausted"),
        ({"x-codex-secondary-used-percent": "100.0"}, "quota_exhausted"),
        ({"x-codex-primary-used-percent": "104"}, "quota_exhausted"),
        ({"x-codex-primary-used-percent": "99.5"}, "rate_limit"),
        ({"x-codex-primary-used-percent": "all"}, "rate_limit"),
        ({"x-codex-primary-window-minutes": "100"}, "rate_limit"),
        ({"x-ratelimit-remaining-tokens-month": "0"}, "quota_exhausted"),
        ({"x-ratelimit-remaining-requests-week": " 0 "}, "quota_exhausted"),
        ({"x-ratelimit-remaining-requests-day": "0"}, "quota_exhausted"),
        ({"x-ratelimit-remaining-requests-day": "10"}, "rate_limit"),
        ({"x-ratelimit-remaining-requests-minute": "0"}, "rate_limit"),
        ({"x-ratelimit-limit-requests-day": "0"}, "rate_limit"),
    ],
)
def test_a_long_window_that_the_headers_show_as_spent_is_a_quota(headers: dict[str, str], reason: str) -> None:
    told = classify_record({"provider": "acme", "auth": "oauth", "status": 429, "headers": headers}, POLICY, 0)
    assert told["reason"] == reason


@pytest.mark.parametrize(
    ("number", "scope", "reason"),
    [(11202, "connection_cooldown", "rate_limit"), (11201, "connection_cooldown", "quota_exhausted"),
     (10010, "provider_failure", "overloaded"), (10013, "none", "content_policy"), (10907, "none", "client_error")],
)  # fmt: skip
def test_a_number_of_the_providers_own_inside_a_200_has_the_meaning_of_the_catalogue(
    number: int, scope: str, reason: str
) -> None:
    body = f'{{"code": {number}, "message": "refused", "sid": "s"}}'
    told = classify_record({"provider": "spark", "auth": "api_key", "status": 200, "body": body}, POLICY, 0)
    assert (told["scope"], told["reason"]) == (scope, reason)


HELLO = 'data: {"choices":[{"delta":{"content":"Hel"}}]}\n\n'
BROKEN = 'data: {"error":{"message":"Internal server error","type":"server_error"}}\n\n'


@pytest.mark.parametrize(
    ("body", "may_go_on"),
    [(BROKEN, True), (": ping\n\n" + BROKEN, True), (HELLO + BROKEN, False), (BROKEN + HELLO, True)],
    ids=["at once", "after a heartbeat", "after output", "before output"],
)
def test_nothing_is_repeated_once_a_stream_has_begun_to_answer(body: str, may_go_on: bool) -> None:
    record = {"provider": "acme", "auth": "api_key", "status": 200, "body": body}
    told = classify_record(record, POLICY, 0)
    assert (told["scope"], told["reason"]) == ("provider_failure", "server_error")
    assert told["fallback"] is may_go_on
