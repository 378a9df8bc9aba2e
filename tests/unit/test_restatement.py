"""Restatement of misleading statuses (spec/restatement_and_rules.md section 1)."""

from __future__ import annotations

from policy_service.application.classify import restated
from policy_service.domain.catalogue import Catalogue, Provider, RestatementRule
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.restatement import Restated, restate
from policy_service.settings.provider_data import builtin_providers

FIRST = RestatementRule("quota", frozenset({400, 403, 429, 200}), 429, ("额度不足", "Spent"), ("denied",), 60_000)
SECOND = RestatementRule("late", frozenset({403}), 503, ("spent", "busy"))
GATE = Provider(id="gate", restatement=(FIRST, SECOND))


def test_the_first_fitting_rule_corrects_the_status_and_states_its_default() -> None:
    assert restate(GATE, 403, "quota SPENT", None, None) == Restated(429, 60_000, "quota", 403)


def test_a_marker_in_the_body_is_found_unescaped() -> None:
    assert restate(GATE, 400, "", {"error": {"message": "用户额度不足"}}, None).rule_id == "quota"


def test_an_exclude_marker_in_the_body_vetoes_the_rule_but_not_the_next_one() -> None:
    assert restate(GATE, 403, "spent", {"why": "DENIED"}, None) == Restated(503, None, "late", 403)


def test_the_upstream_wait_beats_the_default_only_if_positive() -> None:
    assert restate(GATE, 403, "spent", None, 5_000).retry_after_ms == 5_000
    assert restate(GATE, 403, "spent", None, 1).retry_after_ms == 1
    assert restate(GATE, 403, "spent", None, 0).retry_after_ms == 60_000
    assert restate(GATE, 403, "spent", None, -1).retry_after_ms == 60_000


def test_an_untouched_answer_keeps_its_own_wait() -> None:
    assert restate(GATE, 403, "no such thing", None, 5_000) == Restated(403, 5_000)


def test_neither_a_429_nor_a_success_is_restated() -> None:
    assert restate(GATE, 429, "spent", None, None) == Restated(429)
    assert restate(GATE, 200, "spent", None, None) == Restated(200)
    every = Provider(id="gate", restatement=(RestatementRule("all", frozenset(range(100, 600)), 503, ("spent",)),))
    untouched = [status for status in range(100, 600) if restate(every, status, "spent", None, None).rule_id is None]
    assert untouched == [*range(200, 300), 429]


def test_an_untouched_answer_states_no_wait_of_zero() -> None:
    assert restate(GATE, 403, "no such thing", None, 0) == Restated(403, None)
    assert restate(GATE, 403, "no such thing", None, 1) == Restated(403, 1)
    assert restate(GATE, 403, "no such thing", None, -1) == Restated(403, None)


def test_a_body_that_cannot_be_written_out_leaves_the_message_to_judge() -> None:
    circle: list[object] = []
    circle.append(circle)
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for body in (object(), circle, nested):
        assert restate(GATE, 403, "spent", body, None).rule_id == "quota"
        assert restate(GATE, 403, "", body, None).rule_id is None


def test_an_error_inside_a_200_stream_is_not_restated_by_the_command_either() -> None:
    body = '{"error": {"message": "用户额度不足", "code": 403}}'
    applies = Policy(Catalogue(providers=builtin_providers())).for_connection("agentrouter")
    inside = parse_outcome(RawOutcome(status=200, body=body, provider="agentrouter"))
    assert restated(inside, applies).status == 403
    itself = parse_outcome(RawOutcome(status=403, body=body, provider="agentrouter"))
    assert restated(itself, applies).status == 429
