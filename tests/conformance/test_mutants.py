"""The kit finds what is wrong, rule by rule, and nothing in the gateway that does everything right."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.cli.conformance.checks import Status
from policy_service.cli.conformance.judge import judge
from policy_service.cli.conformance.rules import load_rules
from tests.conformance.gateway_under_test import CASES, example, record_of
from tests.conformance.mutants import MUTANTS

RULES = {rule.id: rule for rule in load_rules()}
WRONG = [(rule, case, kind) for rule, mutants in MUTANTS.items() for case, kind in mutants]


def test_every_rule_has_a_gateway_that_breaks_it() -> None:
    assert set(MUTANTS) == set(RULES)


@pytest.mark.parametrize(
    ("rule", "case", "kind"), WRONG, ids=[f"{rule}-{case}-{kind.__name__}" for rule, case, kind in WRONG]
)
async def test_a_gateway_that_breaks_a_rule_is_found(rule: str, case: str, kind: type[Any]) -> None:
    [result] = judge([RULES[rule]], await record_of(kind, CASES[case]))
    assert result.status is Status.FAIL, result.findings


@pytest.mark.timeout(180)
async def test_the_example_gateway_keeps_every_rule() -> None:
    results = judge(list(RULES.values()), await record_of(example.Gateway, *CASES.values()))
    assert [(each.rule.id, each.findings) for each in results if each.status is not Status.PASS] == []
