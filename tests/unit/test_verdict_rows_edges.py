"""The public verdict row by row: scope, reason, terminal state, fallback and wait (spec/classification.md)."""

from __future__ import annotations

import pytest

from policy_service.domain.catalogue import Catalogue, Provider
from policy_service.domain.ids import ConnectionId, ProviderId
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.verdict import ROWS, Row, Verdict, judge

TABLE = """
abort | none | client_error | - | stop no-wait
own-key-policy | none | rate_limit | - | stop
own-limiter | none | overloaded | - | -
own-timeout | none | network | - | -
local-fault | none | none | - | stop
spare-key | none | auth_error | - | -
request-resource | none | client_error | - | stop
free-tier-removed | model_lockout | quota_exhausted | - | -
input-bound | none | context_overflow | - | no-wait
network | provider_failure | network | - | -
by-ban | connection_terminal | auth_error | banned | -
by-quota-returns | connection_cooldown | quota_exhausted | - | -
burst-402 | connection_cooldown | rate_limit | - | -
by-wallet | connection_terminal | quota_exhausted | credits_exhausted | -
by-share-of-connection | connection_cooldown | quota_exhausted | - | -
by-share-of-model | model_lockout | quota_exhausted | - | -
content-policy | none | content_policy | - | stop no-wait
oversized-for-limit | none | context_overflow | - | no-wait
feature-not-included | none | model_access_denied | - | -
output-too-long | none | client_error | - | no-wait
context-overflow | none | context_overflow | - | no-wait
tool-use-failed | none | server_error | - | no-wait
region | provider_failure | region_blocked | - | -
client-unwelcome | connection_cooldown | client_blocked | - | -
client-blocked | provider_failure | client_blocked | - | -
retired-model | model_lockout | model_not_found | - | no-wait
model-load-failed | model_lockout | server_error | - | -
plan-without-access | connection_cooldown | model_access_denied | - | -
never-offered | model_lockout | model_access_denied | - | no-wait
model-entitlement | model_lockout | model_access_denied | - | -
degraded-model | model_lockout | overloaded | - | -
missing-model | model_lockout | model_not_found | - | -
refused-model | model_lockout | model_access_denied | - | -
unserved-model | model_lockout | model_not_found | - | -
dead-credential | connection_terminal | auth_error | expired | -
by-dead-account | connection_terminal | auth_error | banned | -
weak-login | connection_cooldown | auth_error | - | -
overloaded-model | model_lockout | overloaded | - | -
overloaded-pool | model_lockout | overloaded | - | -
overloaded | provider_failure | overloaded | - | -
by-quota-of-model | model_lockout | quota_exhausted | - | -
by-quota | connection_cooldown | quota_exhausted | - | -
by-rate-limit | by_limit | rate_limit | - | -
project | connection_cooldown | model_access_denied | - | -
forbidden | connection_terminal | auth_error | banned | -
refused-key | connection_cooldown | auth_error | - | -
by-guard | none | client_error | - | stop
request-scoped | none | client_error | - | stop
bad-request | none | client_error | - | stop no-wait
upstream-key | connection_cooldown | auth_error | - | -
server-error | provider_failure | server_error | - | -
other | connection_cooldown | client_error | - | -
"""
"""Name, scope, reason, terminal state; `stop`: no other account is tried; `no-wait`: a stated wait means nothing."""
SAID = [line for line in TABLE.splitlines() if line]


def _said(row: Row) -> str:
    marks = ("" if row.fallback else "stop ") + ("" if row.states_wait else "no-wait")
    return f"{row.id} | {row.scope} | {row.reason} | {row.terminal or '-'} | {marks.strip() or '-'}"


@pytest.mark.parametrize("number", range(len(SAID)))
def test_each_row_says_what_the_table_says_in_its_place(number: int) -> None:
    assert _said(ROWS[number]) == SAID[number]


def test_the_last_row_always_holds_and_there_are_no_more() -> None:
    assert len(ROWS) == len(SAID)
    assert Row("x", ROWS[-1].when, "none", "none") == Row("x", ROWS[-1].when, "none", "none", True, None, True)


@pytest.mark.parametrize(
    ("text", "counts_per_model", "scope"),
    [
        ("slow down", True, "model_lockout"),
        ("slow down, gpt-z", False, "model_lockout"),
        ("slow down", False, "connection_cooldown"),
    ],
)
def test_a_limit_counts_on_the_model_by_the_connection_s_setting_or_by_the_text(
    text: str, counts_per_model: bool, scope: str
) -> None:
    provider = Provider("acme", per_model_quota=counts_per_model)
    policy = Policy(Catalogue(providers={"acme": provider})).for_connection(ProviderId("acme"), ConnectionId("k"))
    assert policy.counts_per_model is counts_per_model
    outcome = parse_outcome(RawOutcome(429, body=text, provider="acme", connection="k", model="gpt-z"))
    assert judge(outcome, policy, 0).scope == scope


def said_of(status: int, text: str, model: str = "gpt-z", provider: Provider | None = None, **headers: str) -> Verdict:
    """Verdict on an answer of the provider `acme`."""
    policy = Policy(Catalogue(providers={"acme": provider or Provider("acme")}))
    wire = [(name.replace("_", "-"), value) for name, value in headers.items()]
    outcome = parse_outcome(RawOutcome(status, headers=wire, body=text, provider="acme", connection="k", model=model))
    return judge(outcome, policy.for_connection(ProviderId("acme"), ConnectionId("k")), 0)


@pytest.mark.parametrize(
    ("status", "text", "model", "rule", "scope"),
    [
        (404, "nothing here", "gpt-z", "other", "connection_cooldown"),
        (404, "no such model", "", "missing-model", "model_lockout"),
        (410, "no such model", "", "missing-model", "model_lockout"),
        (404, "requested entity was not found", "", "other", "connection_cooldown"),
        (404, "requested entity was not found", "gpt-z", "missing-model", "model_lockout"),
        (497, "slow down", "gpt-z", "other", "connection_cooldown"),
        (498, "slow down", "gpt-z", "overloaded", "provider_failure"),
        (503, "overloaded", "gpt-z", "overloaded", "provider_failure"),
        (503, "gpt-z is overloaded", "gpt-z", "overloaded-model", "model_lockout"),
        (403, "no access to model", "gpt-z", "model-entitlement", "model_lockout"),
    ],
)
def test_a_row_holds_for_its_own_answers_only(status: int, text: str, model: str, rule: str, scope: str) -> None:
    verdict = said_of(status, text, model)
    assert (verdict.rule, verdict.scope) == (rule, scope)


def test_a_wait_beside_a_401_makes_no_burst_of_it() -> None:
    assert said_of(401, "who are you", retry_after="5").reason == "auth_error"
    assert said_of(402, "slow", retry_after="5").reason == "rate_limit"


def test_a_401_that_kills_no_login_rests_the_connection() -> None:
    cookie = said_of(401, "who are you", provider=Provider("acme", web_cookie=True))
    token = said_of(401, "request lacks a valid authentication credential")
    assert {(each.rule, each.scope, each.terminal) for each in (cookie, token)} == {
        ("weak-login", "connection_cooldown", None)
    }


def test_google_s_word_alone_counts_on_the_model() -> None:
    body = '{"error": {"status": "RESOURCE_EXHAUSTED", "message": "no"}}'
    assert said_of(429, body, "").scope == "model_lockout"


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        ("weekly usage limit reached for gpt-z", "model_lockout"),
        ("weekly usage limit reached", "connection_cooldown"),
    ],
)
def test_a_spent_allowance_of_the_account_is_the_model_s_where_it_names_it(text: str, scope: str) -> None:
    assert said_of(429, text, provider=Provider("acme", limits_per_model=True)).scope == scope


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("anthropic-ratelimit-unified-7d-status", "rejected", "quota_exhausted"),
        ("anthropic-ratelimit-unified-7d-status", "allowed", "rate_limit"),
        ("anthropic-ratelimit-unified-7d-claim", "rejected", "rate_limit"),
        ("x-window-status", "rejected", "rate_limit"),
    ],
)
def test_a_window_that_a_header_rejects_is_a_spent_allowance(name: str, value: str, reason: str) -> None:
    outcome = parse_outcome(RawOutcome(429, headers=[(name, value)], body="no", provider="acme", connection="k"))
    policy = Policy(Catalogue()).for_connection(ProviderId("acme"), ConnectionId("k"))
    assert judge(outcome, policy, 0).reason == reason
