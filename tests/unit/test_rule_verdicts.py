"""What a catalogue rule says of an answer is told in the verdict, in each fact and in the trace
(spec/restatement_and_rules.md section 2, classification.md section 3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.application.events import OutcomeEvent
from policy_service.application.report_meaning import meaning_of
from policy_service.application.report_result import ReportResult, fold_report
from policy_service.domain.catalogue import Catalogue, ErrorRule, Provider
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook
from policy_service.settings.provider_data import builtin_providers

BUILTIN = builtin_providers()


def result(provider: str, status: int, message: str, policy: Policy | None = None) -> ReportResult:
    """Answer to one pool attempt that failed with this message."""
    policy = policy or Policy(Catalogue(providers=BUILTIN))
    raw = RawOutcome(
        provider=provider,
        connection="c",
        model="m",
        status=status,
        body=f'{{"error": {{"message": "{message}"}}}}',
        auth_class=AuthClass.API_KEY,
        pool_attempt=True,
    )
    target = Target(ProviderId(provider), ConnectionId("c"), ModelId("m"))
    event = OutcomeEvent(f"{provider}/{status}/{message}", 0, target, parse_outcome(raw), started_at=0)
    return fold_report(StateBook(), replace(event, verdict=meaning_of(event, policy).verdict), policy)


def of_rule(reason: str, *, honored: bool = True, scope: str = "model", status: int = 400) -> ReportResult:
    """Answer where a catalogue rule of a user's own provider matches."""
    rule = ErrorRule(
        "warming", frozenset({status}), body_any=("warming up",), reason=reason, scope=scope, cooldown_ms=9_000
    )
    own = Provider(
        "ours", auth_class=AuthClass.API_KEY, full_text_rules=True, honors_rule_scope=honored, error_rules=(rule,)
    )
    return result("ours", status, "the engine is warming up", Policy(Catalogue(providers={"ours": own})))


@pytest.mark.parametrize(
    ("provider", "status", "message", "scope", "reason", "rule"),
    [
        ("opencode-zen", 400, "endpoint is unavailable", "model", "overloaded", "opencode-endpoint-unavailable"),
        ("opencode-go", 429, "endpoint is unavailable", "model", "overloaded", "opencode-endpoint-unavailable"),
        ("agentrouter", 429, "用户额度不足", "connection", "quota_exhausted", "agentrouter-user-quota-exhausted"),
        ("openrouter", 402, "pay first", "connection", "quota_exhausted", "openrouter-credit-exhausted-402"),
    ],
)  # fmt: skip
def test_reason_and_scope_of_a_built_in_rule_are_told(
    provider: str, status: int, message: str, scope: str, reason: str, rule: str
) -> None:
    told = result(provider, status, message)
    assert (told.scope, told.reason, told.rule, told.rule_id, told.fallback) == (scope, reason, rule, rule, True)


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        ("model_capacity", "overloaded"),
        ("rate_limit_exceeded", "rate_limit"),
        ("quota_exhausted", "quota_exhausted"),
        ("server_error", "server_error"),
        ("not_found", "model_not_found"),
        ("auth_error", "auth_error"),
    ],
)
def test_the_reason_of_a_rule_of_the_users_own_catalogue_is_told(reason: str, named: str) -> None:
    told = of_rule(reason)
    assert (told.reason, told.scope, told.fallback, told.rule) == (named, "model", True, "warming")


def test_a_scope_that_has_no_effect_is_not_told_and_the_request_is_not_blamed() -> None:
    assert of_rule("model_capacity", honored=False).scope == "connection"
    assert of_rule("model_capacity", scope="connection").scope == "connection"


def test_a_finer_reason_of_the_table_stays_and_the_rule_is_named() -> None:
    told = result("agentrouter", 403, "无权访问模型 m")
    assert (told.reason, told.rule_id) == ("model_access_denied", "agentrouter-model-access-denied")


def test_a_terminal_answer_is_judged_before_a_rule() -> None:
    told = of_rule("rate_limit_exceeded", status=403)
    assert told.terminal_state == ""
    banned = result("agentrouter", 400, "用户额度不足, your account has been suspended")
    assert banned.terminal_state == "banned"


def test_every_fact_of_a_failure_names_the_rule_and_its_reason() -> None:
    on = {"provider_cooldown.enabled": True}
    rule = ErrorRule("warming", frozenset({502}), body_any=("warming up",), reason="model_capacity", scope="connection")
    own = Provider("ours", auth_class=AuthClass.API_KEY, full_text_rules=True, error_rules=(rule,))
    policy = Policy(Catalogue(providers={"ours": own}, stored_settings=on))
    told = result("ours", 502, "the engine is warming up", policy)
    assert {fact.mechanism for fact in told.facts} == {"provider_cooldown", "connection"}
    assert {(fact.rule_id, fact.reason) for fact in told.facts} == {("warming", "model_capacity")}
    assert {fact.rule for fact in told.facts} == {"warming"}


def test_a_fact_names_the_rule_that_corrected_the_status() -> None:
    told = result("agentrouter", 403, "用户额度不足")
    assert told.restated_status == 429
    assert {fact.rule_id for fact in told.facts} == {"agentrouter-user-quota-exhausted"}
    assert {fact.restated_status for fact in told.facts} == {429}
