"""The kit finds what is wrong, rule by rule, and nothing in the gateway that does everything right."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policy_service.cli.conformance.checks import Status
from policy_service.cli.conformance.judge import Result, judge
from policy_service.cli.conformance.rules import load_rules
from tests.conformance.gateway_under_test import CASES, example, record_of
from tests.conformance.mutants import MUTANTS

RULES = {rule.id: rule for rule in load_rules()}
WRONG = [(rule, case, kind) for rule, mutants in MUTANTS.items() for case, kind in mutants]


def test_every_rule_has_a_gateway_that_breaks_it() -> None:
    assert set(MUTANTS) == set(RULES)


AT_ONCE = 6
"""A case is mostly waiting for its gateway."""
ONE_WORKER = pytest.mark.xdist_group("wrong gateways")


async def judged(room: asyncio.Semaphore, rule: str, case: str, kind: type[Any]) -> Result:
    """What one rule says of one wrong gateway."""
    async with room:
        [result] = judge([RULES[rule]], await record_of(kind, CASES[case]))
        return result


async def all_judged() -> list[Result]:
    """Results in the order of `WRONG`."""
    room = asyncio.Semaphore(AT_ONCE)
    return await asyncio.gather(*(judged(room, *wrong) for wrong in WRONG))


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return asyncio.run(all_judged())


@ONE_WORKER
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(WRONG)), ids=[f"{rule}-{case}-{k.__name__}" for rule, case, k in WRONG])
def test_a_gateway_that_breaks_a_rule_is_found(number: int, results: list[Result]) -> None:
    assert results[number].status is Status.FAIL, results[number].findings


@pytest.mark.timeout(180)
async def test_the_example_gateway_keeps_every_rule() -> None:
    results = judge(list(RULES.values()), await record_of(example.Gateway, *CASES.values()))
    assert [(each.rule.id, each.findings) for each in results if each.status is not Status.PASS] == []
