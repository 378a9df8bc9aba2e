"""Restatement of misleading statuses (spec/restatement_and_rules.md section 1)."""

from __future__ import annotations

from policy_service.domain.catalogue import Provider, RestatementRule
from policy_service.domain.restatement import Restated, restate

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
