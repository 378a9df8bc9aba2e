"""What a bare status does to connection, model and breaker (classification.md section 8); a wait at steps 12 to 22."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from policy_service.application.events import OutcomeEvent
from policy_service.application.report_meaning import meaning_of
from policy_service.application.report_result import fold_report
from policy_service.domain.breaker import BreakerState
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.classification import classify, resolve
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.decision_record import Classification, DecisionRecord
from policy_service.domain.ids import AuthClass, ConnectionId, HintSource, ModelId, ProviderId, Target
from policy_service.domain.lockout import ModelLockState
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook
from policy_service.settings.provider_data import builtin_providers

POLICY = Policy(Catalogue(providers=builtin_providers()))
KEY, LOGIN, PER_MODEL = "openai", "kiro", "gemini"
HOUR = 3_600_000


def effect(provider: str, status: int, body: str = "") -> str:
    """What one report changes, in one word each: state or timer of the connection, lock of the model, breaker."""
    raw = RawOutcome(provider=provider, connection="c", model="m", status=status, body=body)
    target = Target(ProviderId(provider), ConnectionId("c"), ModelId("m"))
    event = OutcomeEvent("e", 0, target, parse_outcome(raw), started_at=0)
    book = StateBook()
    fold_report(book, replace(event, verdict=meaning_of(event, POLICY).verdict), POLICY)
    return " ".join(word for row in book.changes.values() if (word := _word(row)))


def _word(row: object) -> str:
    if isinstance(row, ConnectionState):
        timed = f"{row.rate_limited_until}@{row.backoff_level}" if row.rate_limited_until else ""
        return timed or (row.test_status if row.test_status != "active" else "errors")
    if isinstance(row, ModelLockState):
        return f"lock:{row.reason}"
    return "breaker" if isinstance(row, BreakerState) and row.failure_count else ""


@pytest.mark.parametrize(
    ("status", "of_a_key", "of_a_login", "per_model"),
    [
        (400, "", "", ""),
        (401, "expired", "expired", "expired"),
        (402, "credits_exhausted", "credits_exhausted", "lock:credits"),
        (403, "errors", "banned", "lock:forbidden"),
        (404, "120000@0", "120000@0", "lock:not_found"),
        (405, "3000@0", "5000@0", "3000@0"),
        (406, "3000@1", "5000@1", "3000@1"),
        (408, "3000@1 breaker", "5000@1 breaker", "3000@1 breaker"),
        (409, "3000@0", "5000@0", "3000@0"),
        (410, "3000@0", "5000@0", "3000@0"),
        (412, "3000@0", "5000@0", "3000@0"),
        (413, "3000@1", "5000@1", "3000@1"),
        (422, "", "", ""),
        (429, "3000@1", "5000@1", "lock:rate_limit_exceeded"),
        (432, "3600000@0", "3600000@0", "3600000@0"),
        (499, "", "", ""),
        (500, "3000@1 breaker", "5000@1 breaker", "errors breaker"),
        (501, "3000@0", "5000@0", "lock:unknown"),
        (502, "3000@1 breaker", "5000@1 breaker", "lock:server_error breaker"),
        (503, "3000@1 breaker", "5000@1 breaker", "lock:server_error breaker"),
        (504, "3000@1 breaker", "5000@1 breaker", "lock:server_error breaker"),
        (505, "3000@0", "5000@0", "lock:unknown"),
        (528, "3000@0", "5000@0", "lock:unknown"),
        (529, "3000@1", "5000@1", "lock:model_capacity"),
        (530, "3000@0", "5000@0", "lock:unknown"),
    ],
)
def test_a_bare_status_does_what_the_summary_says(status: int, of_a_key: str, of_a_login: str, per_model: str) -> None:
    told = [effect(provider, status) for provider in (KEY, LOGIN, PER_MODEL)]
    assert [" ".join(sorted(each.split())) for each in told] == [
        " ".join(sorted(each.split())) for each in (of_a_key, of_a_login, per_model)
    ]


@pytest.mark.parametrize(
    ("provider", "status", "body", "changed"),
    [
        (KEY, 403, "no", "3000@1"),
        (LOGIN, 403, "has not been used in project", "errors"),
        (PER_MODEL, 403, "your account has been suspended", "banned"),
        ("claude", 403, "Request not allowed", "300000@0"),
        (KEY, 410, "the model m has been retired", "lock:not_found"),
        (KEY, 412, "suspended: unpaid invoice", "credits_exhausted"),
        (KEY, 413, "m takes less", "lock:model_capacity"),
        ("nvidia", 410, "", "lock:unknown"),
        (KEY, 409, "previous_response_id does not belong to you", ""),
    ],
)
def test_a_helpful_text_does_what_the_summary_says_beside(provider: str, status: int, body: str, changed: str) -> None:
    assert effect(provider, status, body) == changed


# --- waits that are stated ------------------------------------------------------------------------------------------
def decided(provider: str, status: int, body: str, headers: Sequence[tuple[str, str]] = ()) -> DecisionRecord:
    """Decision on one failure at level 0."""
    applies = POLICY.for_connection(provider, "")
    outcome = parse_outcome(RawOutcome(status=status, body=body, headers=headers))
    return resolve(classify(outcome, applies, 0), 0, applies)


@pytest.mark.parametrize(
    ("status", "body", "unstated"),
    [(429, "weekly usage limit", 24 * HOUR), (429, "usage limit reached", HOUR), (432, "no", HOUR)],
)
def test_a_stated_reset_counts_for_a_login_too(status: int, body: str, unstated: int) -> None:
    """Steps 12, 13 and 22, though the profile honours no hints."""
    told = decided(LOGIN, status, body, [("retry-after", "7200")])
    assert (told.cooldown_ms, told.quota_reset_hint_ms, told.new_backoff_level) == (2 * HOUR, 2 * HOUR, None)
    assert told.retry_hint_source is HintSource.HEADER
    assert decided(LOGIN, status, body).cooldown_ms == unstated


def test_a_weekly_reset_is_at_most_thirty_days_ahead() -> None:
    assert decided(LOGIN, 429, "weekly usage limit", [("retry-after", "9999999")]).cooldown_ms == 30 * 24 * HOUR


def test_a_session_takes_five_hours_whatever_is_stated() -> None:
    assert decided(KEY, 429, "session usage limit", [("retry-after", "60")]).cooldown_ms == 5 * HOUR


def test_a_quota_text_with_a_reset_needs_words_that_count() -> None:
    assert decided(KEY, 429, "hour quota", [("retry-after", "60")]).rule == "configured"
    told = decided(KEY, 429, "hour quota, monthly limit", [("retry-after", "60")])
    assert (told.rule, told.cooldown_ms, told.quota_reset_hint_ms) == ("quota-with-reset", 60_000, 60_000)
    assert decided(KEY, 429, "hour quota, monthly limit").rule == "configured"
    assert decided(KEY, 500, "too many requests, hour quota", [("retry-after", "60")]).rule == "configured"


@pytest.mark.parametrize("body", ["hour quota", "quota has been exceeded"])
def test_a_403_of_a_key_about_a_quota_is_one(body: str) -> None:
    told = decided(KEY, 403, body)
    assert (told.reason, told.cooldown_ms, told.new_backoff_level) == ("quota_exhausted", 3_000, 1)


def test_a_403_of_a_key_about_a_project_takes_the_status() -> None:
    assert (decided(PER_MODEL, 403, "has not been used in project").reason) == "quota_exhausted"


# --- beyond the spec's lists ------------------------------------------------------------------------------------------
def test_an_allowance_of_a_month_under_a_402_ends_no_account() -> None:
    assert (
        effect(LOGIN, 402, '{"message":"You have reached the limit.","reason":"MONTHLY_REQUEST_COUNT"}') == "3600000@0"
    )


@pytest.mark.parametrize("code", [2013, 1027])
def test_a_refused_request_inside_a_200_is_held_against_nobody(code: int) -> None:
    assert effect("minimax", 200, f'{{"base_resp":{{"status_code":{code},"status_msg":"no"}}}}') == ""


def test_a_wording_of_ours_stands_back_behind_a_rule_of_the_provider() -> None:
    body = '{"error":{"message":"用户额度不足","code":"insufficient_user_quota"}}'
    assert effect("agentrouter", 429, body) == "3000@1"
    assert POLICY.for_connection("agentrouter", "").auth_class is AuthClass.API_KEY


# --- the rotation gate and the end of a day ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "text", "code", "rule"),
    [
        (500, "account_deactivated", "executor_contract_violation", "contract-violation"),
        (429, "account_deactivated", "invalid_previous_response_binding", "previous-response-binding"),
        (429, "account_deactivated", "", "rotation-gate"),
        (502, "insufficient credits", "", "rotation-gate"),
        (400, "prompt is too long", "", "rotation-gate"),
        (503, "account_deactivated", "", "ban-text"),
    ],
)
def test_a_gate_that_blocks_stands_before_every_text_and_behind_the_named_codes(
    status: int, text: str, code: str, rule: str
) -> None:
    settings = {f"rotation.on_{each}": False for each in (400, 429, 500, 502)} | {"rotation.enabled": True}
    applies = Policy(Catalogue(providers=builtin_providers(), stored_settings=settings)).for_connection(KEY, "")
    said = classify(parse_outcome(RawOutcome(status=status, body=text, code=code)), applies, 0, 9)
    assert (said.rule, said.should_fallback) == (rule, rule == "ban-text")


def test_tokens_per_day_end_at_the_header_else_at_the_nodes_hour_else_are_no_day() -> None:
    def told(headers: Sequence[tuple[str, str]] = (), **clock: Any) -> Classification:
        connection = Connection("c1", LOGIN, **clock)
        catalogue = Catalogue(providers=builtin_providers(), connections={"c1": connection})
        answer = parse_outcome(RawOutcome(status=429, body="TPD rate limit", headers=headers))
        return classify(answer, Policy(catalogue).for_connection(LOGIN, "c1"), 0)

    clock: dict[str, Any] = {"node_clock_zone": "UTC", "node_clock_hour": 2}
    assert told([("retry-after", "60")], **clock).fixed_ms == 60_000
    assert told([("retry-after", "999999")], **clock).fixed_ms == 24 * HOUR
    assert told(**clock).fixed_ms == 2 * HOUR
    assert [told().rule, told(node_clock_hour=2).rule] == ["configured"] * 2


@pytest.mark.parametrize(
    ("kind", "is_ended"),
    [("key_model_access_denied", False), ("team_model_access_denied", False), ("key_denied", True)],
)
def test_a_relays_key_that_is_not_for_this_model_is_no_dead_key(kind: str, is_ended: bool) -> None:
    body = json.dumps({"error": {"message": "this key may not call m", "type": kind, "code": "401"}})
    assert ("expired" in effect(KEY, 401, body)) is is_ended
