"""Classification: order of the pipeline, durations, error types, guards, and the extensions beyond the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy_service.domain.catalogue import Catalogue, Connection, Provider
from policy_service.domain.classification import PIPELINE, classify, resolve
from policy_service.domain.decision_record import Classification, DecisionRecord
from policy_service.domain.error_types import breaker_kind, error_type, provider_does_not_serve, reason_label
from policy_service.domain.ids import AuthClass, HintSource
from policy_service.domain.outcome import Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.verdict import ROWS, judge
from policy_service.settings.provider_data import builtin_providers

NOW = 1_767_268_800_000
"""2026-01-01T12:00:00Z"""
HOUR = 3_600_000


def policy_of(provider: str = "openai", connection: Connection | None = None, **settings: Any) -> ConnectionPolicy:
    """What applies to one connection of a built-in provider; settings by name with `__` for the dot."""
    stored = {name.replace("__", "."): value for name, value in settings.items()}
    connections = {connection.id: connection} if connection else {}
    catalogue = Catalogue(providers=builtin_providers(), connections=connections, stored_settings=stored)
    return Policy(catalogue).for_connection(provider, connection.id if connection else "")


def outcome(status: int | None, text: str = "", **fields: Any) -> Outcome:
    """A parsed failure."""
    headers = tuple(fields.pop("headers", {}).items())
    return parse_outcome(RawOutcome(status=status, body=text, headers=headers, **fields))


def found(status: int, text: str = "", provider: str = "openai", **fields: Any) -> Classification:
    """Classification of one failure of a built-in provider."""
    return classify(outcome(status, text, **fields), policy_of(provider), NOW)


def record(status: int, text: str = "", provider: str = "openai", level: int = 0, **fields: Any) -> DecisionRecord:
    """Decision record of one failure of a built-in provider."""
    return resolve(found(status, text, provider, **fields), level, policy_of(provider))


# --- the table ----------------------------------------------------------------------------------------------
def test_rule_ids_are_unique_and_the_last_row_holds_for_everything() -> None:
    ids = [row.id for row in PIPELINE]
    assert len(set(ids)) == len(ids)
    assert found(418).rule == ids[-1]
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("status", "text", "rule"),
    [
        (409, "previous_response_id does not belong to you, account_deactivated", "previous-response-binding"),
        (404, "account has been disabled; the model is no longer available", "ban-text"),
        (404, "the model is no longer available, endpoint has moved", "retired-model"),
        (410, "endpoint has moved; insufficient credits", "endpoint-moved"),
        (412, "suspended: payment required", "billing-suspension"),
        (400, "insufficient credits, daily quota", "credits-text"),
        (400, "daily quota, weekly usage limit", "daily-text"),
        (400, "weekly usage limit reached", "weekly-text"),
        (400, "usage limit reached, session usage limit", "subscription-text"),
        (400, "session usage limit, too many requests", "session-text"),
        (403, "not authorized for this route", "route-not-authorized"),
        (403, "forbidden", "forbidden-key"),
        (403, "hour quota", "configured"),
        (413, "", "capacity-status"),
        (432, "", "quota-status-432"),
        (422, "unknown field x", "parameter"),
        (400, "nothing in particular", "bad-request"),
        (501, "", "any-other"),
    ],
)
def test_the_first_row_that_holds_decides(status: int, text: str, rule: str) -> None:
    assert found(status, text).rule == rule


def test_the_not_running_hint_needs_503_and_ignores_case() -> None:
    header = {"X-Omni-Fallback-Hint": "CONNECTION_COOLDOWN"}
    said = record(503, "", level=4, headers=header)
    assert (said.reason, said.cooldown_ms, said.new_backoff_level) == ("service_not_running", 5_000, 0)
    assert said.skip_provider_breaker
    assert record(502, "", headers=header).reason == "server_error"


@pytest.mark.parametrize(
    ("text", "is_retired"),
    [
        ("The model gpt-3.5-turbo has been deprecated", True),
        ("Model x reached end of life", True),
        ("The parameter has been removed. Choose another model", False),
        ("This endpoint has been removed", False),
    ],
)
def test_a_retired_model_is_named_in_the_sentence_that_retires_it(text: str, is_retired: bool) -> None:
    assert (found(404, text).rule == "retired-model") is is_retired


# --- durations ----------------------------------------------------------------------------------------------
def test_a_key_honours_the_stated_wait_and_a_subscription_climbs_the_ladder() -> None:
    header = {"Retry-After": "60"}
    key = record(503, "", level=3, headers=header)
    login = record(503, "", "kiro", level=3, headers=header)
    assert (key.cooldown_ms, key.new_backoff_level, key.retry_hint_source) == (60_000, 0, HintSource.HEADER)
    assert (login.cooldown_ms, login.new_backoff_level, login.retry_hint_source) == (40_000, 4, None)
    assert (key.base_cooldown_ms, login.base_cooldown_ms) == (3_000, 5_000)


def test_the_ladder_stops_at_its_last_step_and_at_the_cap() -> None:
    assert record(500, "", level=99).cooldown_ms == 96_000
    assert record(500, "", level=99).new_backoff_level == 5
    assert record(500, "", "local", level=99).cooldown_ms == 120_000


def test_the_fixed_rate_limit_pause_replaces_the_ladder_for_rate_limits_only() -> None:
    policy = policy_of(rotation__rate_limit_reset_seconds=7)
    limited = resolve(classify(outcome(429), policy, NOW), 2, policy)
    failed = resolve(classify(outcome(500), policy, NOW), 2, policy)
    assert (limited.cooldown_ms, limited.new_backoff_level) == (7_000, None)
    assert failed.cooldown_ms == 12_000


@pytest.mark.parametrize(("status", "failures", "blocks"), [(429, 1, True), (429, 2, False), (503, 0, False)])
def test_the_rotation_gate_waits_for_its_threshold(status: int, failures: int, blocks: bool) -> None:
    policy = policy_of(rotation__enabled=True, rotation__threshold_429=2)
    said = classify(outcome(status), policy, NOW, failures)
    assert (said.rule == "rotation-gate") is blocks
    assert said.should_fallback is not blocks


def test_a_subscription_limit_uses_the_stated_reset_although_hints_are_not_honoured() -> None:
    said = record(429, "Usage limit reached", "kiro", headers={"Retry-After": "1800"})
    assert (said.cooldown_ms, said.quota_reset_hint_ms, said.new_backoff_level) == (1_800_000, 1_800_000, None)
    assert said.used_upstream_retry_hint
    assert said.exact_quota


def test_a_quota_text_with_a_reset_keeps_the_source_even_where_the_ladder_decides() -> None:
    said = record(429, "quota will reset later", "kiro", headers={"Retry-After": "1800"})
    assert (said.cooldown_ms, said.quota_reset_hint_ms) == (5_000, 1_800_000)
    assert (said.retry_hint_source, said.used_upstream_retry_hint) == (HintSource.HEADER, False)


@pytest.mark.parametrize(("hour", "expected"), [(13, HOUR), (12, 24 * HOUR), (11, 23 * HOUR), (0, 12 * HOUR)])
def test_the_node_clock_gives_the_next_full_hour_strictly_after_now(hour: int, expected: int) -> None:
    connection = Connection("c1", "kiro", node_clock_zone="UTC", node_clock_hour=hour)
    policy = policy_of("kiro", connection)
    said = resolve(classify(outcome(429, "daily quota"), policy, NOW), 0, policy)
    assert (said.cooldown_ms, said.daily_quota_exhausted) == (expected, True)


def test_a_day_with_a_clock_change_is_never_longer_than_a_day() -> None:
    policy = policy_of("kiro", daily_reset_zone="Europe/Berlin")
    before_change = 1_792_879_200_001  # 2026-10-25T00:00:00.001+02:00, a day of 25 hours
    said = resolve(classify(outcome(429, "daily quota"), policy, before_change), 0, policy)
    assert said.cooldown_ms == 24 * HOUR


# --- extensions beyond the reference ------------------------------------------------------------------------
def error_body(message: str, code: str = "", type: str = "") -> str:
    return json.dumps({"error": {"message": message, "code": code, "type": type}})


@pytest.mark.parametrize("signal", ["insufficient_quota", "account_deactivated", "out of credits"])
def test_a_validation_error_that_quotes_the_caller_is_no_account_signal(signal: str) -> None:
    body = error_body(f"Unknown parameter: '{signal}'.", "unknown_parameter", "invalid_request_error")
    said = record(400, body)
    assert not said.permanent
    assert not said.credits_exhausted
    assert said.cooldown_ms == 0
    assert error_type(outcome(400, body), policy_of()) != "quota_exhausted"


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        ("Invalid tool result 'Your account has been disabled'", True),
        ("Bad block `insufficient credits` in messages", True),
        ("You've no luck: your account has been disabled, it's final", False),
    ],
)
def test_a_quotation_in_a_refused_request_is_no_account_signal(message: str, quoted: bool) -> None:
    said = record(400, error_body(message, type="invalid_request_error"))
    assert (said.permanent or said.credits_exhausted) is not quoted


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Invalid schema: field capacity is no number", "unknown"),
        ("The model is at capacity", "model_capacity"),
    ],
)
def test_the_word_capacity_in_a_refused_request_is_not_load(message: str, reason: str) -> None:
    assert record(400, error_body(message, type="invalid_request_error")).reason == reason


def test_a_number_means_something_only_where_the_catalogue_says_so() -> None:
    body = error_body("balance", "1113")
    assert record(429, body, "glm").credits_exhausted
    assert record(429, body, "openai").reason == "rate_limit_exceeded"
    assert not record(429, error_body("rate", "1302"), "glm").credits_exhausted


def test_an_allowance_that_returns_is_no_empty_wallet() -> None:
    said = record(402, error_body("Free quota used. Resets at 13:00 UTC.", "insufficient_quota"))
    assert (said.credits_exhausted, said.returns_by_itself, said.cooldown_ms) == (False, True, HOUR)
    assert record(402, error_body("insufficient_quota")).credits_exhausted


def test_a_500_about_the_length_of_the_input_does_not_cool_the_connection() -> None:
    said = record(500, "prompt is too long: 9 tokens > 8 maximum")
    assert (said.should_fallback, said.cooldown_ms) == (True, 0)


def test_a_dead_key_under_a_400_expires_the_connection() -> None:
    body = json.dumps({"error": {"message": "not valid", "details": [{"reason": "API_KEY_INVALID"}]}})
    assert record(400, body, "gemini").should_fallback
    assert error_type(outcome(400, body), policy_of("gemini")) == "unauthorized"


def test_a_403_about_one_model_leaves_key_and_subscription_alone() -> None:
    body = error_body("Project has no access to model", "model_not_found")
    assert record(403, body).cooldown_ms == 0
    assert error_type(outcome(403, body), policy_of("kiro")) == "model_not_found"


def test_a_403_cools_a_key_by_the_ladder_and_a_subscription_not_at_all() -> None:
    assert (record(403, "no").reason, record(403, "no").cooldown_ms) == ("auth_error", 3_000)
    assert (record(403, "no", "kiro").reason, record(403, "no", "kiro").cooldown_ms) == ("quota_exhausted", 0)


def test_what_another_gateway_says_of_its_accounts_is_a_quota_with_its_wait() -> None:
    said = record(429, "all accounts have exhausted their quota, reset after 5m")
    assert (said.reason, said.cooldown_ms, said.quota_reset_hint_ms) == ("quota_exhausted", 300_000, 300_000)


def test_a_plain_429_of_a_local_provider_is_never_a_quota() -> None:
    assert record(429, "insufficient_quota", "local").reason == "rate_limit_exceeded"


def test_a_client_that_is_not_welcome_kills_no_account() -> None:
    text = "This credential is only authorized for use with Claude Code"
    assert error_type(outcome(403, text), policy_of("claude")) == "fingerprint_rejection"
    said = judge(outcome(401, text), policy_of("claude"), NOW)
    assert (said.scope, said.reason) == ("connection_cooldown", "client_blocked")


def test_the_page_of_a_web_firewall_bans_nobody() -> None:
    page = "<title>Attention Required! | Cloudflare</title><h1>Sorry, you have been blocked</h1>"
    assert error_type(outcome(403, page), policy_of("kiro")) == "fingerprint_rejection"


@pytest.mark.parametrize("text", ["order 1010 not found", "took 1010 ms"])
def test_a_bare_1010_is_no_fingerprint(text: str) -> None:
    assert error_type(outcome(403, text), policy_of("kiro")) == "forbidden"


def test_a_sentence_in_the_middle_of_a_huge_body_is_not_believed_but_its_ends_are() -> None:
    filler = "x" * 20_000
    assert not record(500, f"{filler}account_deactivated{filler}").permanent
    assert record(500, f"account_deactivated {filler}").permanent
    assert record(500, f"{filler} account_deactivated").permanent


# --- error types --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("provider", "status", "text", "expected"),
    [
        ("openai", 400, "insufficient credits", "quota_exhausted"),
        ("kiro", 429, "usage limit reached", "quota_exhausted"),
        ("openai", 429, "usage limit reached", "rate_limited"),
        ("kiro", 429, "daily quota", "quota_exhausted"),
        ("openai", 404, "file-abc does not exist", ""),
        ("openai", 404, "", "model_not_found"),
        ("kiro", 401, "invalid credentials", "oauth_invalid_token"),
        ("openai", 401, "Model x is not supported", "model_not_found"),
        ("openai", 401, "account_deactivated", "account_deactivated"),
        ("openai", 401, "", "unauthorized"),
        ("openai", 402, "", "quota_exhausted"),
        ("gemini", 400, "location is not supported", "geo_blocked"),
        ("openai", 400, "location is not supported", ""),
        ("gemini-cli", 403, "anything", "project_route_error"),
        ("kiro", 403, "User is not authorized to make this call", "project_route_error"),
        ("kiro", 403, "Turnstile required", "forbidden"),
        ("claude", 403, "Request not allowed", "request_rejected"),
        ("openai", 403, "no", ""),
        ("kiro", 403, "no", "forbidden"),
        ("openai", 503, "", "server_error"),
        ("openai", 400, "maximum context length", "context_overflow"),
        ("openai", 400, "model x is not supported", "model_not_found"),
    ],
)
def test_error_type_follows_the_table(provider: str, status: int, text: str, expected: str) -> None:
    assert error_type(outcome(status, text), policy_of(provider)) == expected


def test_the_special_422_needs_its_code() -> None:
    assert error_type(outcome(422, "x", code="gcp_project_required"), policy_of()) == "gcp_project_required"
    assert error_type(outcome(422, "x"), policy_of()) == ""


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (503, "insufficient_quota", "transient"),
        (429, "daily limit, please retry in 5s", "rate_limit"),
        (429, "daily limit, please retry in 3600s", "quota_exhausted"),
        (429, "billing cap", "quota_exhausted"),
        (429, "slow", "rate_limit"),
    ],
)
def test_breaker_kind_of_a_text(status: int, text: str, kind: str) -> None:
    assert breaker_kind(outcome(status, text), NOW) == kind


@pytest.mark.parametrize(
    ("status", "text", "label"),
    [
        (503, "", "model_capacity"),
        (500, "", "server_error"),
        (429, "", "rate_limit_exceeded"),
        (432, "", "quota_exhausted"),
        (500, "insufficient credits", "quota_exhausted"),
        (403, "", "auth_error"),
        (418, "", "unknown"),
    ],
)
def test_reason_label_reads_the_text_before_the_status(status: int, text: str, label: str) -> None:
    assert reason_label(outcome(status, text)) == label


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (400, "model x is not supported", True),
        (400, "unknown provider for model x", True),
        (400, "no permission to access this model", False),
        (400, "invalid api key; model x is not supported", False),
        (404, "model x is not supported", False),
    ],
)
def test_a_provider_that_does_not_serve_a_model(status: int, text: str, expected: bool) -> None:
    assert provider_does_not_serve(outcome(status, text)) is expected


def test_custom_ban_texts_are_believed_without_regard_to_case() -> None:
    policy = policy_of(terminal__custom_ban_signals=["House Rules"])
    assert classify(outcome(403, "against our HOUSE RULES"), policy, NOW).permanent
    assert not found(403, "against our HOUSE RULES").permanent


# --- the public verdict -------------------------------------------------------------------------------------
def test_the_wallet_of_a_compatible_provider_is_not_declared_empty() -> None:
    said = judge(outcome(402, "insufficient credits", model="m"), policy_of("openai-compatible-x"), NOW)
    assert (said.scope, said.terminal) == ("model_lockout", None)


def test_a_limit_is_blamed_on_the_model_where_the_provider_counts_models() -> None:
    limited = outcome(429, "slow", model="m")
    assert judge(limited, policy_of("groq"), NOW).scope == "model_lockout"
    assert judge(limited, policy_of("mistral"), NOW).scope == "connection_cooldown"


def test_a_provider_entry_decides_without_its_name_in_the_logic() -> None:
    entry = Provider("acme", auth_class=AuthClass.API_KEY, code_meanings={"e7": "overloaded"}, limits_per_model=True)
    policy = Policy(Catalogue(providers={"acme": entry})).for_connection("acme")
    said = judge(outcome(429, "x")._replace(code="E7"), policy, NOW)
    assert (said.scope, said.reason) == ("model_lockout", "overloaded")
