"""Typed refusals when every target is excluded (spec/diagnostics.md section 4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain.exclusions import REASONS, Exclusion
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.terminal_answer import terminal_answer

NOW = 1_000_000


def excluded(reason: str, remaining_ms: int | None = None) -> Exclusion:
    target = Target(ProviderId("acme"), ConnectionId("c1"), ModelId("m"))
    return Exclusion(target, reason, None if remaining_ms is None else NOW + remaining_ms)


@pytest.mark.parametrize(
    ("strategy", "reasons", "status", "code", "terminal_reason", "retry_after_s"),
    [
        ("weighted", [("model_lockout", 60_000), ("model_lockout", 120_000)], 503, "all_targets_cooling_down",
         "all_targets_cooling_down", 60),
        ("weighted", [("unavailable", None)], 404, "model_not_found", "no_executable_targets", None),
        ("weighted", [("connection_cooldown", 1_200)], 503, "all_targets_cooling_down", "all_targets_cooling_down", 2),
        ("priority", [("circuit_open", 600_000), ("circuit_open", 600_000)], 503, "all_targets_cooling_down",
         "all_targets_cooling_down", 600),
        ("priority", [("circuit_open", 600_000), ("model_lockout", 60_000)], 503, "ALL_TARGETS_SKIPPED",
         "all_targets_skipped", 60),
        ("priority", [("connection_cooldown", 8_000), ("connection_cooldown", 3_000)], 429, "ALL_TARGETS_SKIPPED",
         "all_targets_skipped", 3),
        ("priority", [("unavailable", None)], 503, "ALL_TARGETS_SKIPPED", "all_targets_skipped", None),
        ("priority", [("banned", None), ("expired", None)], 503, "ALL_TARGETS_SKIPPED", "all_targets_skipped", None),
        ("priority", [], 404, "model_not_found", "no_executable_targets", None),
    ],
)  # fmt: skip
def test_the_answer_follows_the_first_matching_row(
    strategy: str,
    reasons: list[tuple[str, int | None]],
    status: int,
    code: str,
    terminal_reason: str,
    retry_after_s: int | None,
) -> None:
    answer = terminal_answer(strategy, [excluded(*r) for r in reasons], NOW)
    assert (answer.http_status, answer.code, answer.terminal_reason, answer.retry_after_s) == (
        status,
        code,
        terminal_reason,
        retry_after_s,
    )


def test_a_retry_hint_of_a_failed_attempt_can_be_the_soonest_return() -> None:
    assert terminal_answer("priority", [excluded("connection_cooldown", 60_000)], NOW, [4_100]).retry_after_s == 5


@given(
    st.sampled_from(["priority", "weighted", "round-robin"]),
    st.lists(st.tuples(st.sampled_from(sorted(REASONS)), st.none() | st.integers(-5_000, 10**9)), max_size=8),
)
def test_no_combination_is_untyped_and_a_retry_after_is_positive(
    strategy: str, reasons: list[tuple[str, int | None]]
) -> None:
    answer = terminal_answer(strategy, [excluded(*r) for r in reasons], NOW)
    assert answer.http_status in (404, 429, 503)
    assert answer.code
    assert answer.terminal_reason
    assert answer.recovery
    assert answer.retry_after_s is None or (answer.retry_after_s >= 1 and answer.http_status != 404)
