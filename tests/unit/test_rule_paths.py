"""Where provider and operator rules are reached, and what a restated answer leaves inside
(spec/restatement_and_rules.md sections 1 and 3 to 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.application.events import OutcomeEvent
from policy_service.application.report_meaning import meaning_of
from policy_service.application.report_result import ReportResult, fold_report
from policy_service.domain.catalogue import Catalogue, OperatorRule, Provider
from policy_service.domain.classification import classify, resolve
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.decision_record import DecisionRecord
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook
from policy_service.settings.provider_data import builtin_providers

ACME = Provider("acme", auth_class=AuthClass.API_KEY)
BUILTIN = builtin_providers()


def rule_for(status: int, match: str = "busy") -> OperatorRule:
    """An operator rule of acme that says nothing but where it looks."""
    return OperatorRule("acme", status, match, "connection", cooldown_ms=77_000)


def decided(status: int, text: str, *rules: OperatorRule, provider: str = "acme") -> DecisionRecord:
    """Decision on one failure of a connection of acme."""
    policy = Policy(Catalogue(providers={**BUILTIN, "acme": ACME}, operator_rules=rules)).for_connection(provider)
    return resolve(classify(parse_outcome(RawOutcome(status=status, body=text)), policy, 0), 0, policy)


def reported(provider: str, status: int, text: str) -> tuple[ReportResult, StateBook]:
    """Answer to one report, and what it changed."""
    raw = RawOutcome(provider=provider, connection="c", model="m", status=status, body=text)
    policy = Policy(Catalogue(providers=BUILTIN))
    target = Target(ProviderId(provider), ConnectionId("c"), ModelId("m"))
    event, book = OutcomeEvent("e", 0, target, parse_outcome(raw), started_at=0), StateBook()
    return fold_report(book, replace(event, verdict=meaning_of(event, policy).verdict), policy), book


# --- where rules are reached -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "text", "step"),
    [
        (500, "account_deactivated", "ban-text"),
        (404, "the model has been retired", "retired-model"),
        (500, "endpoint has moved", "endpoint-moved"),
        (500, "suspended: billing", "billing-suspension"),
        (500, "insufficient credits", "credits-text"),
        (500, "daily quota", "daily-text"),
        (429, "weekly usage limit", "weekly-text"),
        (500, "usage limit reached", "subscription-text"),
        (429, "session usage limit", "session-text"),
        (403, "not authorized for this route", "route-not-authorized"),
    ],
)
def test_a_rule_is_not_reached_where_an_earlier_step_has_decided(status: int, text: str, step: str) -> None:
    told = decided(status, f"busy. {text}", rule_for(status))
    assert (told.rule, told.rule_id) == (step, None)
    assert decided(status, "busy", rule_for(status)).rule_id == "operator-rule-1"


@pytest.mark.parametrize("status", [409, 410, 412, 418, 422, 451, 501, 520, 529])
def test_a_rule_of_another_status_is_reached_where_the_text_is_a_configured_one(status: int) -> None:
    assert decided(status, "busy", rule_for(status)).rule_id is None
    told = decided(status, "busy: too many requests", rule_for(status))
    assert (told.rule_id, told.cooldown_ms, told.reason) == ("operator-rule-1", 77_000, "quota_exhausted")


def test_the_reason_of_an_operator_rule_is_a_spent_quota_unless_it_says_otherwise() -> None:
    assert decided(500, "busy", rule_for(500)).reason == "quota_exhausted"
    assert decided(500, "busy", replace(rule_for(500), reason="server_error")).reason == "server_error"


def test_an_operator_rule_names_its_provider_without_regard_to_case() -> None:
    assert decided(500, "BUSY", replace(rule_for(500, "Busy"), provider="ACME")).rule_id == "operator-rule-1"
    assert decided(500, "busy", replace(rule_for(500), provider="acne")).rule_id is None


def test_the_flags_are_off_for_every_provider_but_one() -> None:
    assert {name for name, each in BUILTIN.items() if each.full_text_rules or each.honors_rule_scope} == {"agentrouter"}


# --- wordings that are ours, beside a rule -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "text", "row"),
    [
        (500, "您的余额不足", "credits-beyond"),
        (402, "spent; resets in 5 hours", "quota-returns"),
        (401, "reached your monthly allowance", "period-quota"),
    ],
)
def test_a_rule_speaks_where_only_a_wording_of_ours_would(status: int, text: str, row: str) -> None:
    assert decided(status, text).rule == row
    told = decided(status, f"busy, {text}", rule_for(status))
    assert (told.rule_id, told.cooldown_ms, told.credits_exhausted) == ("operator-rule-1", 77_000, False)


# --- restatement -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("provider", ["agentrouter", "AgentRouter"])
@pytest.mark.parametrize("status", [400, 403])
def test_what_the_client_is_told_of_a_restated_answer_is_headroom_over_the_timer(provider: str, status: int) -> None:
    answer, book = reported(provider, status, '{"error":{"message":"用户额度不足"}}')
    assert (answer.restated_status, answer.retry_after_ms) == (429, 60_000)
    assert [row.rate_limited_until for row in book.changes.values() if isinstance(row, ConnectionState)] == [3_000]


@pytest.mark.parametrize(("provider", "status", "text"), [
    ("agentrouter", 403, "额度不足, 无权访问模型"),
    ("agentrouter", 500, "额度不足"),
    ("openai", 403, "额度不足"),
])  # fmt: skip
def test_other_answers_pass_through(provider: str, status: int, text: str) -> None:
    answer, _ = reported(provider, status, text)
    assert answer.restated_status is None
