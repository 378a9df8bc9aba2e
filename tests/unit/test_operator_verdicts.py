"""What an operator's rule says of an answer is what the gateway is told (spec/classification.md steps 20 and 23)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.domain.catalogue import OperatorRule
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.verdict import Verdict, judge
from policy_service.settings.catalogue_file import builtin_catalogue


def told(status: int, *rules: OperatorRule, words: str = "the engine is warming up") -> Verdict:
    catalogue = replace(builtin_catalogue(), operator_rules=rules)
    raw = RawOutcome(provider="openai", status=status, body=f'{{"error": {{"message": "{words}"}}}}')
    return judge(parse_outcome(raw), Policy(catalogue, {}, 1).for_connection("openai", "c"), 0)


def rule(status: int, scope: str, reason: str) -> OperatorRule:
    return OperatorRule("openai", status, "warming up", scope, reason, 15_000, "warm")


@pytest.mark.parametrize("status", [400, 500, 503])
@pytest.mark.parametrize(
    ("scope", "blamed"),
    [("model", "model_lockout"), ("connection", "connection_cooldown")],
    ids=["model", "connection"],
)
@pytest.mark.parametrize(
    ("reason", "named"), [("model_capacity", "overloaded"), ("rate_limit_exceeded", "rate_limit")], ids=str
)
def test_scope_and_reason_of_the_rule_are_told_and_the_request_goes_on(
    status: int, scope: str, blamed: str, reason: str, named: str
) -> None:
    verdict = told(status, rule(status, scope, reason))
    assert (verdict.scope, verdict.reason, verdict.fallback, verdict.rule) == (blamed, named, True, "warm")


def test_without_the_rule_a_bad_request_goes_back_to_the_client() -> None:
    assert (told(400).reason, told(400).fallback) == ("client_error", False)


def test_a_rule_that_names_no_reason_leaves_the_one_of_the_table() -> None:
    assert told(500, rule(500, "connection", "unknown")).reason == "server_error"


def test_the_operator_s_word_stands_also_where_the_table_is_finer() -> None:
    """Of a catalogue's rule a dead key that the table reads as a region stays a region."""
    place = "warming up: not available in your country"
    assert told(403, words=place).reason == "region_blocked"
    assert told(403, rule(403, "connection", "auth_error"), words=place).reason == "auth_error"
