"""Every wording that the spec lists, one by one, read through what it decides (classification.md, terminal_states.md).

The wordings stand here as the spec has them, not as the families of the code do: one that is lost there fails here.
"""

from __future__ import annotations

import pytest

from policy_service.domain import guards
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.classification import classify
from policy_service.domain.decision_record import Classification
from policy_service.domain.error_types import breaker_kind, error_type, provider_does_not_serve
from policy_service.domain.outcome import Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.reading import Reading
from policy_service.settings.provider_data import builtin_providers

NOW = 1_767_268_800_000
KEY, LOGIN, GOOGLE = "openai", "kiro", "gemini"
POLICY = Policy(Catalogue(providers=builtin_providers()))


def policy_of(provider: str) -> ConnectionPolicy:
    """What applies to a connection of a built-in provider."""
    return POLICY.for_connection(provider, "")


def outcome(status: int, text: str) -> Outcome:
    """A failure whose body is plain text."""
    return parse_outcome(RawOutcome(status=status, body=text))


def found(status: int, text: str, provider: str = KEY) -> Classification:
    """Classification of such a failure."""
    return classify(outcome(status, text), policy_of(provider), NOW)


def listed(text: str) -> list[str]:
    """The wordings of a list written as the spec writes it."""
    return [part for each in text.split("·") if (part := " ".join(each.split()))]


def wordings(text: str) -> pytest.MarkDecorator:
    """One test for each of them."""
    return pytest.mark.parametrize("wording", listed(text))


def gapped(pair: str) -> str:
    """ "A .. B" as a line on which B comes later."""
    return pair.replace("..", "and so on,")


# --- any status -----------------------------------------------------------------------------------------------------
@wordings(
    "account_deactivated · account has been deactivated · account has been disabled · your account has been suspended ·"
    "this account is deactivated · this service has been disabled in this account for violation ·"
    "this service has been disabled in this account"
)
@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_a_ban_text_bans_under_any_status(wording: str, status: int) -> None:
    told = found(status, f"We say: {wording.upper()}!")
    assert (told.rule, told.permanent) == ("ban-text", True)


def test_a_request_to_verify_the_account_is_no_ban() -> None:
    assert not found(403, "verify your account to continue", LOGIN).permanent


@wordings(
    "no longer available · no longer supported · has been retired · has been deprecated · has been discontinued ·"
    "has been removed · has been sunset · reached end of life"
)
def test_a_model_is_retired_under_404_and_410_alone(wording: str) -> None:
    assert [found(status, f"The model z {wording}.").rule for status in (404, 410)] == ["retired-model"] * 2
    assert found(404, f"This endpoint {wording}.").rule != "retired-model"
    assert found(503, f"The model z {wording}.").rule != "retired-model"


@wordings("endpoint has moved · endpoint has been moved · update your base_url · update your base url")
@pytest.mark.parametrize("status", [400, 429, 503])
def test_a_moved_endpoint_is_believed_under_any_status(wording: str, status: int) -> None:
    assert found(status, f"Please: {wording}").rule == "endpoint-moved"


@wordings("spending limit · billing · invoice · payment")
@pytest.mark.parametrize("status", [412, 429, 500])
def test_a_suspension_for_money_empties_the_wallet(wording: str, status: int) -> None:
    for text in (f"suspended, see your {wording}", f"your {wording} is open, hence suspended"):
        told = found(status, text)
        assert (told.rule, told.credits_exhausted, told.fixed_ms) == ("billing-suspension", True, 120_000)


# --- money ----------------------------------------------------------------------------------------------------------
CREDITS = listed(
    "insufficient_quota · billing_hard_limit_reached · exceeded your current quota ·"
    "exceeded your current usage quota · credit_balance_too_low · your credit balance is too low ·"
    "credits exhausted · out of credits · payment required · free tier of the model has been exhausted ·"
    "tier has been exhausted · insufficient balance · insufficient_balance · insufficient account balance ·"
    "insufficient credit balance · insufficient credits · insufficient credit ·"
    "exhausted all your credits · usage balance exhausted"
)


@pytest.mark.parametrize("wording", CREDITS)
def test_a_credits_text_empties_the_wallet(wording: str) -> None:
    told = found(500, f"Sorry: {wording.title()}.")
    assert (told.rule, told.credits_exhausted, told.fixed_ms) == ("credits-text", True, 120_000)


@pytest.mark.parametrize("provider", ["openai-compatible-x", "anthropic-compatible-x", "nvidia"])
def test_a_credits_text_of_a_gateway_is_not_its_own_wallet(provider: str) -> None:
    told = found(500, "insufficient credits", provider)
    assert (told.rule, told.credits_exhausted) == ("credits-text", False)


@wordings("insufficient balance · exceeded_current_quota")
def test_a_wallet_text_of_moonshot_keeps_the_flag(wording: str) -> None:
    assert found(500, f"out of credits, {wording}", "moonshot").credits_exhausted
    assert not found(500, "out of credits", "moonshot").credits_exhausted


# --- quotas ---------------------------------------------------------------------------------------------------------
@wordings("today's quota · daily quota · try again tomorrow")
def test_a_daily_text_counts_for_a_subscription(wording: str) -> None:
    told = found(429, f"No more: {wording}", LOGIN)
    assert (told.rule, told.daily_quota_exhausted) == ("daily-text", True)


@wordings(
    "weekly usage limit · weekly limit reached · reached your weekly · 1-week quota · week quota ·"
    "weekly/monthly limit · weekly: the quota is exhausted"
)
def test_a_weekly_text_counts_for_any_429(wording: str) -> None:
    told = found(429, f"No more: {wording}")
    assert (told.rule, told.fixed_ms) == ("weekly-text", 86_400_000)


@wordings(
    "usage limit reached · usage limit has been · claude pro usage limit · you've reached your usage limit ·"
    "you have reached your usage limit"
)
def test_a_subscription_text_counts_for_a_subscription(wording: str) -> None:
    told = found(429, f"Oh: {wording}", LOGIN)
    assert (told.rule, told.fixed_ms) == ("subscription-text", 3_600_000)


@wordings("session usage limit · session limit reached · you reached your session, a usage limit")
def test_a_session_text_counts_for_any_429(wording: str) -> None:
    told = found(429, f"Oh: {wording}")
    assert (told.rule, told.fixed_ms) == ("session-text", 18_000_000)


def test_a_session_that_expired_is_no_limit() -> None:
    assert found(429, "session expired, usage limit").rule != "session-text"


LONG_PERIODS = listed(
    "daily .. limit · daily .. quota · per day .. limit · monthly .. limit · monthly .. quota · per month .. limit ·"
    "quota .. exceed · exceed .. quota · insufficient .. quota · billing .. cap · credit .. exhaust · plan .. limit ·"
    "hard limit · out of credits · individual quota reached · enable overages · INSUFFICIENT_G1_CREDITS_BALANCE ·"
    "resource has been exhausted .. reset after · daily free allocation · have exhausted their quota ·"
    "organization TPD rate limit · TPD rate limit · insufficient balance · 限额将在 .. 重置 · 使用上限 · 调用上限 ·"
    '额度已用尽 · 额度已用完 · {"error": "Usage limit reached. "}'
)


@pytest.mark.parametrize("wording", LONG_PERIODS)
def test_a_long_period_makes_the_words_of_a_plain_429_count(wording: str) -> None:
    assert Reading(outcome(429, gapped(wording)), policy_of(KEY), NOW).is_signal_usable
    assert breaker_kind(outcome(429, gapped(wording)), NOW) == "quota_exhausted"


@wordings("too frequent: 请求过于频繁 · limit daily · error: usage limit reached, said somebody")
def test_no_long_period_leaves_a_plain_429_short(wording: str) -> None:
    assert not Reading(outcome(429, wording), policy_of(KEY), NOW).is_signal_usable
    assert breaker_kind(outcome(429, wording), NOW) == "rate_limit"


@wordings(
    "INSUFFICIENT_G1_CREDITS_BALANCE · credit .. exhaust · out of credits · billing .. cap · insufficient .. quota ·"
    "insufficient_quota · individual quota reached · enable overages · daily free allocation · TPD rate limit ·"
    "insufficient balance"
)
def test_a_terminal_quota_is_one_for_the_breaker_whatever_wait_is_stated(wording: str) -> None:
    assert breaker_kind(outcome(429, f"{gapped(wording)}; please retry in 5s"), NOW) == "quota_exhausted"
    assert breaker_kind(outcome(503, gapped(wording)), NOW) == "transient"


def test_a_stated_wait_below_an_hour_makes_a_long_period_short_for_the_breaker() -> None:
    assert breaker_kind(outcome(429, "monthly limit; please retry in 3599s"), NOW) == "rate_limit"
    assert breaker_kind(outcome(429, "monthly limit; please retry in 3600s"), NOW) == "quota_exhausted"


# --- configured texts -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wording", "reason"),
    [
        ("no credentials", "auth_error"),
        ("request not allowed", "rate_limit_exceeded"),
        ("improperly formed request", "model_capacity"),
        ("rate limit", "rate_limit_exceeded"),
        ("too many requests", "rate_limit_exceeded"),
        ("hour quota", "quota_exhausted"),
        ("quota has been exceeded", "quota_exhausted"),
        ("quota exceeded", "quota_exhausted"),
        ("quota will reset", "quota_exhausted"),
        ("exhausted your capacity", "quota_exhausted"),
        ("quota exhausted", "quota_exhausted"),
        ("capacity", "model_capacity"),
        ("overloaded", "model_capacity"),
        ("high demand", "model_capacity"),
    ],
)
@pytest.mark.parametrize("status", [400, 404, 418, 500])
def test_a_configured_text_decides_under_any_status_but_429(wording: str, reason: str, status: int) -> None:
    told = found(status, f"Well, {wording.upper()}!")
    assert (told.rule, told.reason) == ("configured", reason)


def test_the_words_of_a_plain_429_of_a_key_decide_nothing() -> None:
    assert found(429, "overloaded, hour quota, no credentials").reason == "rate_limit_exceeded"
    assert found(429, "overloaded", LOGIN).reason == "model_capacity"


def test_the_order_of_configured_texts_is_priority() -> None:
    assert found(500, "overloaded, quota exceeded, too many requests, no credentials").reason == "auth_error"
    assert found(500, "overloaded, quota exceeded, too many requests").reason == "rate_limit_exceeded"
    assert found(500, "overloaded, quota exceeded").reason == "quota_exhausted"


def test_rate_limit_with_an_underscore_is_no_text_rule() -> None:
    assert found(500, "rate_limit").reason == "server_error"


# --- 400 and 422 ----------------------------------------------------------------------------------------------------
@wordings(
    "input too long · input is too long · context .. too long · context .. exceeded · context .. overflow ·"
    "context .. limit · too many tokens · prompt is too long · context window · maximum context · max .. token ·"
    "token limit · request too large · tokens per minute · tpm"
)
@pytest.mark.parametrize("status", [400, 422])
def test_an_overflow_is_the_requests_own(wording: str, status: int) -> None:
    told = found(status, f"No: {gapped(wording)}")
    assert (told.rule, told.reason, told.fixed_ms, told.should_fallback) == ("overflow", "model_capacity", 0, True)


@wordings(
    "invalid and so on message and so on format · messages must alternate · empty message · empty content ·"
    "message is empty · content is empty · blank function name · empty function name · missing tool-call name ·"
    "missing tool call name"
)
@pytest.mark.parametrize("status", [400, 422])
def test_a_malformed_request_is_its_own(wording: str, status: int) -> None:
    told = found(status, f"No: {wording}")
    assert (told.rule, told.reason, told.fixed_ms) == ("malformed", "model_capacity", 0)


@wordings(
    "max_tokens is illegal · max_tokens must be less · max_tokens is out of range · parameter is illegal ·"
    "extra input is not permitted · additional property not allowed · extra fields are not permitted ·"
    "additional inputs not allowed · unknown field · unrecognized parameter · unexpected input · invalid field ·"
    "invalid parameter · invalid input · unknown parameter · unknown input · unrecognized field · unrecognized input ·"
    "unexpected field · unexpected parameter"
)
@pytest.mark.parametrize("status", [400, 422])
def test_a_parameter_is_the_requests_own(wording: str, status: int) -> None:
    told = found(status, f"No: {wording}")
    assert (told.rule, told.reason, told.fixed_ms) == ("parameter", "model_capacity", 0)


UNSERVED = listed(
    "invalid model · the model z is not available · the model z not found · the model z is not supported ·"
    "the model z is not accessible · the model z does not exist · unsupported model · the model z is unsupported ·"
    "select a different model"
)
ACCESS = listed("access denied to a model · no access to that model · the model wants a permission")
CREDENTIAL_FAILURES = listed(
    "invalid api key · incorrect api key · expired api key · missing api key · revoked api key ·"
    "authentication failed · authentication error · authentication required ·"
    "invalid token · expired token · missing token · revoked token ·"
    "invalid credential · expired credential · missing bearer · revoked bearer · unauthorized · not authenticated"
)


@pytest.mark.parametrize("wording", UNSERVED + ACCESS)
@pytest.mark.parametrize("status", [400, 422])
def test_access_to_a_model_is_the_requests_own(wording: str, status: int) -> None:
    told = found(status, f"No: {wording}")
    assert (told.rule, told.reason, told.fixed_ms) == ("model-access", "model_capacity", 0)


@pytest.mark.parametrize("failure", CREDENTIAL_FAILURES)
def test_a_credential_failure_takes_the_model_out_of_the_blame(failure: str) -> None:
    assert found(400, f"{failure}: the model z is not supported").rule != "model-access"
    assert not provider_does_not_serve(outcome(400, f"{failure}: the model z is not supported"))


@pytest.mark.parametrize("wording", UNSERVED)
def test_another_account_would_not_serve_the_model_either(wording: str) -> None:
    assert provider_does_not_serve(outcome(400, f"No: {wording}"))
    assert not provider_does_not_serve(outcome(422, f"No: {wording}"))


def test_an_unknown_provider_for_a_model_serves_nobody_and_a_permission_says_nothing() -> None:
    assert provider_does_not_serve(outcome(400, "unknown provider for model z"))
    assert not any(provider_does_not_serve(outcome(400, wording)) for wording in ACCESS)


@wordings("high frequency · high-frequency · non-compliant · too many requests · rate limit · 请求频繁 · 频率过高")
def test_words_of_a_rate_under_a_422_are_a_rate(wording: str) -> None:
    told = found(422, f"No: {wording}")
    assert told.reason == "rate_limit_exceeded"


# --- error types ----------------------------------------------------------------------------------------------------
@wordings(
    "invalid authentication credentials · oauth 2 · login cookie · valid authentication credential ·"
    "invalid credentials · re-authenticate your cline account"
)
def test_an_invalid_oauth_token_is_its_own_type(wording: str) -> None:
    assert error_type(outcome(401, wording.upper()), policy_of(LOGIN)) == "oauth_invalid_token"
    assert error_type(outcome(403, wording), policy_of(LOGIN)) != "oauth_invalid_token"


@wordings(
    "user location is not supported · location is not supported · not supported for the api use ·"
    "region is not supported · unsupported location · not available in your location · not available in your region"
)
def test_a_place_is_refused_by_a_google_surface(wording: str) -> None:
    assert [error_type(outcome(status, wording), policy_of(GOOGLE)) for status in (400, 403)] == ["geo_blocked"] * 2
    assert error_type(outcome(404, wording), policy_of(GOOGLE)) == "model_not_found"


@wordings(
    "browser_signature_banned · fingerprint_rejection · error_code: 1010 · 'error code': 1010 · _cf_chl_opt ·"
    'cdn-cgi/challenge-platform · id="challenge-error-text"'
)
def test_a_fingerprint_is_refused_under_a_403(wording: str) -> None:
    assert error_type(outcome(403, f"<p>{wording}</p>"), policy_of(LOGIN)) == "fingerprint_rejection"


@wordings("has not been used in project · SERVICE_DISABLED · accessNotConfigured · PERMISSION_DENIED · it is disabled")
def test_a_project_problem_is_no_ban(wording: str) -> None:
    assert error_type(outcome(403, f"{wording}!"), policy_of(LOGIN)) == "project_route_error"


@wordings("SENTINEL_BLOCKED · Sentinel says: blocked · Turnstile required")
def test_a_browser_block_ends_a_key_too(wording: str) -> None:
    assert error_type(outcome(403, wording), policy_of(KEY)) == "forbidden"


# --- guards ---------------------------------------------------------------------------------------------------------
@wordings("file · item · response · upload · vector store · vector_store")
@pytest.mark.parametrize("said", ["not found", "does not exist"])
def test_a_resource_of_the_caller_is_nobodys_fault(wording: str, said: str) -> None:
    assert guards.local_guard(outcome(404, f"The {wording} x {said}"), policy_of(KEY)) == "request-resource"
    assert guards.local_guard(outcome(400, f"The {wording} x {said}"), policy_of(KEY)) != "request-resource"


@wordings(
    'error_code: 1010 · browser_signature_banned · {"retryable": false, "type": "cloudflare_error"} ·'
    '{"retryable": false, "type": "owner_action_required"}'
)
def test_cloudflare_says_that_repeating_never_heals(wording: str) -> None:
    told = found(403, wording)
    assert (told.rule, told.reason, told.fixed_ms) == ("cloudflare-no-retry", "auth_error", 0)
    assert found(403, wording.replace("false", "true").replace("1010", "1011").replace("browser_", "")).rule == (
        "forbidden-key"
    )
