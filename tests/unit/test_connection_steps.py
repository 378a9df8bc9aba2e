"""The failure algorithm: which step decides, what stale and late evidence does, which facts are left
(spec/connection_cooldown.md section 4, fleet.md section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from policy_service.application.connection_case import Attempt
from policy_service.application.connection_plan import ConnectionAnswer, fail_connection, succeed_connection
from policy_service.application.connection_steps import AFTER_TIMER
from policy_service.domain import cooldown
from policy_service.domain.classification import classify
from policy_service.domain.ids import Generations
from policy_service.domain.state import StateBook
from tests.vectors.account_world import AccountWorld

CONNECTION_RULE = {"provider": "openai", "status": 429, "match": "busy", "scope": "connection"}
MODEL_RULE = {"provider": "openai", "status": 400, "match": "parked", "scope": "model"}


def fail(world: AccountWorld, step: Mapping[str, Any], generations: Generations | None = None) -> ConnectionAnswer:
    outcome, attempt = world.outcome(step), world.attempt(step)
    policy = world.profile(outcome.connection)
    book, log = StateBook(world.rows), world.log(step)
    found = classify(outcome, policy, attempt.at)
    at = Attempt(attempt.at, attempt.started_at, generations, attempt.permit_id, attempt.breaker_blocks)
    answer = fail_connection(book, outcome, found, policy, world.policy, at, log)
    world.commit(book, log)
    return answer


@pytest.mark.parametrize(
    ("step", "given", "failure"),
    [
        (1, {"provider": "openai"}, {"status": 404, "text": "file-abc123 does not exist"}),
        (2, {"provider": "openai", "connection": {"test_status": "banned"}}, {"status": 503}),
        (3, {"provider": "openai", "connection": {"rate_limited_until_ms": 9}}, {"status": 503}),
        (5, {"provider": "openai"}, {"status": 400, "text": "model m is not supported"}),
        (7, {"provider": "openai"}, {"status": 503, "call_kind": "health_check"}),
        (8, {"provider": "openai", "operator_rules": [CONNECTION_RULE]}, {"status": 429, "text": "busy"}),
        (9, {"provider": "opencode-go"}, {"status": 429, "text": "rate limit"}),
        (10, {"provider": "openai", "operator_rules": [MODEL_RULE]}, {"status": 400, "text": "parked"}),
        (12, {"provider": "gemini"}, {"status": 503, "text": "account has been disabled"}),
        (12, {"provider": "grok-cli"}, {"status": 402}),
        (13, {"provider": "gemini"}, {"status": 503}),
        (13, {"provider": "gemini"}, {"status": 500}),
        (13, {"provider": "claude"}, {"status": 502}),
        (13, {"provider": "nvidia"}, {"status": 410}),
        (13, {"provider": "openai"}, {"status": 413, "text": "too much for M"}),
        (13, {"provider": "openai"}, {"status": 410, "text": "The model m has been retired"}),
        (14, {"provider": "openai"}, {"status": 400, "text": "no idea"}),
        (15, {"provider": "grok-web"}, {"status": 403, "text": "forbidden"}),
        (16, {"provider": "openai"}, {"status": 401}),
        (17, {"provider": "gemini"}, {"status": 403, "text": "nope"}),
        (18, {"provider": "openai", "connection": {"base_url_is_local": True}}, {"status": 404}),
        (19, {"provider": "codex"}, {"status": 429}),
        (20, {"provider": "openai"}, {"status": 503, "persist": False}),
        (21, {"provider": "openai"}, {"status": 503}),
    ],
)
def test_each_kind_of_failure_is_decided_by_its_step(step: int, given: dict[str, Any], failure: dict[str, Any]) -> None:
    assert fail(AccountWorld(given), {"model": "m", **failure}).step == step


def test_a_limited_family_answers_before_classification() -> None:
    world = AccountWorld({"provider": "codex"})
    fail(world, {"status": 429, "model": "gpt-5"})
    answer = fail(world, {"at_ms": 1_000, "status": 429, "model": "gpt-5.6-luna"})
    assert (answer.step, answer.cooldown_ms) == (4, 4_000)
    assert fail(world, {"at_ms": 1_000, "status": 429, "model": "codex-spark"}).step == 19


def test_the_steps_stand_in_their_normative_order() -> None:
    numbers = [int((step.__doc__ or "").split(":")[0].split(" ")[0]) for step in AFTER_TIMER]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("connection", [{}, {"rate_limited_until_ms": 9_000}])
def test_a_health_check_never_ends_an_account_unless_the_setting_allows(connection: dict[str, int]) -> None:
    check = {"status": 401, "call_kind": "health_check"}
    world = AccountWorld({"provider": "openai", "connection": connection})
    fail(world, check)
    assert world.row().test_status == "active"
    allowed = {"connection.health_check_can_disable": True}
    world = AccountWorld({"provider": "openai", "connection": connection, "settings": allowed})
    fail(world, check)
    assert world.row().test_status == "expired"


def test_a_health_check_records_text_type_and_code_and_leaves_source_and_time_to_the_traffic() -> None:
    world = AccountWorld({"provider": "openai"})
    fail(world, {"status": 502, "origin": "transport"})
    world.failure({"at_ms": 9_000, "status": 503, "text": "being tested", "call_kind": "health_check"})
    row = world.row()
    assert (row.last_error, row.error_code) == ("being tested", "503")
    assert (row.last_error_source, row.last_error_at, row.backoff_level) == ("transport", 0, 1)


def test_while_cooling_a_longer_cooldown_of_a_rule_moves_the_end() -> None:
    rule = {**CONNECTION_RULE, "cooldown_ms": 90_000}
    world = AccountWorld({"provider": "openai", "operator_rules": [rule]})
    fail(world, {"status": 503})
    answer = fail(world, {"at_ms": 1_000, "status": 429, "text": "busy"})
    assert (answer.step, answer.cooldown_ms, answer.fallback) == (3, 90_000, True)
    assert world.row().rate_limited_until == 91_000


def test_while_cooling_a_longer_fixed_time_moves_nothing() -> None:
    world = AccountWorld({"provider": "openai"})
    fail(world, {"status": 503})
    assert fail(world, {"at_ms": 1_000, "status": 404}).cooldown_ms == 2_000
    assert world.row().rate_limited_until == 3_000


# -- stale and late ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("generation", "cause"), [(1, "stale_generation"), (3, "future_generation")])
def test_evidence_of_another_generation_of_the_connection_is_statistics(generation: int, cause: str) -> None:
    world = AccountWorld({"provider": "openai", "connection": {"generation": 2}})
    answer = fail(world, {"status": 401}, Generations(1, generation, 1))
    assert answer.causes == (cause,)
    assert (world.row().test_status, world.writes) == ("active", 0)
    assert not world.facts


def test_an_outcome_may_be_stale_for_the_connection_and_current_for_the_model() -> None:
    world = AccountWorld({"provider": "gemini", "connection": {"generation": 2}})
    fail(world, {"status": 429, "model": "m"}, Generations(1, 1, 1))
    assert world.lock("m", 0) is not None


def test_an_outcome_from_before_a_manual_delete_locks_nothing_again() -> None:
    world = AccountWorld({"provider": "gemini"})
    fail(world, {"status": 429, "model": "m"})
    world.delete({"model": "m", "at_ms": 1})
    answer = fail(world, {"at_ms": 2, "status": 429, "model": "m"}, Generations(1, 1, 1))
    assert answer.causes == ("stale_generation",)
    assert world.lock("m", 2) is None


def test_a_burst_that_arrives_in_reverse_is_as_long_as_one_in_order() -> None:
    world = AccountWorld({"provider": "openai"})
    for at in (2, 1, 0):
        fail(world, {"at_ms": at, "status": 503})
    assert (world.row().rate_limited_until, world.row().backoff_level) == (3_002, 1)


def test_a_late_failure_from_before_the_timer_still_adds_its_own_time() -> None:
    world = AccountWorld({"provider": "openai"})
    fail(world, {"at_ms": 1_000, "status": 503})
    answer = fail(world, {"at_ms": 0, "status": 404})
    assert answer.step == 21
    assert world.row().rate_limited_until == 120_000
    assert world.row().error_code == "503"
    assert world.row().limited_since == 1_000


def test_a_late_failure_without_a_time_of_its_own_leaves_the_newer_timer() -> None:
    world = AccountWorld({"provider": "grok-web"})
    fail(world, {"at_ms": 1_000, "status": 503})
    fail(world, {"at_ms": 0, "status": 401, "text": "unauthorized"})
    assert world.row().rate_limited_until == 6_000


def test_a_late_terminal_failure_still_ends_the_account() -> None:
    world = AccountWorld({"provider": "openai"})
    fail(world, {"at_ms": 1_000, "status": 503})
    fail(world, {"at_ms": 0, "status": 402})
    assert world.row().test_status == "credits_exhausted"


# -- facts ------------------------------------------------------------------------------------------------------------
def test_each_transition_leaves_one_fact_with_its_evidence() -> None:
    world = AccountWorld({"provider": "openai"})
    fail(world, {"status": 429, "headers": {"Retry-After": "60"}})
    (fact,) = world.facts
    assert (fact.mechanism, fact.from_state, fact.to_state) == ("connection", "active", "unavailable")
    assert (fact.reason, fact.hint_source, fact.deadline_at, fact.rule_id) == (
        "rate_limit_exceeded",
        "header",
        60_000,
        None,
    )
    assert world.row().fact_id == fact.id


def test_what_extends_nothing_leaves_no_fact() -> None:
    world = AccountWorld({"provider": "openai"})
    for _ in range(3):
        fail(world, {"status": 503})
    assert len(world.facts) == 1
    gemini = AccountWorld({"provider": "gemini"})
    fail(gemini, {"status": 500, "model": "m"})
    assert not gemini.facts


def test_no_body_text_reaches_a_fact() -> None:
    world = AccountWorld({"provider": "openai"})
    fail(world, {"status": 503, "text": "customer secret sk-1234567890abcdefghijklmnop"})
    assert "secret" not in repr(world.facts)
    assert "sk-1234567890abcdef" not in repr(world.row())


# -- success ----------------------------------------------------------------------------------------------------------
def test_a_success_on_a_clean_connection_writes_nothing() -> None:
    world = AccountWorld({"provider": "openai"})
    world.success({"at_ms": 5})
    assert (world.writes, world.facts) == (0, [])


def test_a_success_of_the_family_lifts_its_pool_and_one_from_before_does_not() -> None:
    world = AccountWorld({"provider": "codex"})
    fail(world, {"at_ms": 1_000, "status": 429, "model": "gpt-5"})
    world.success({"at_ms": 2_000, "started_at_ms": 0, "model": "gpt-5"})
    assert fail(world, {"at_ms": 2_000, "status": 429, "model": "gpt-5"}).step == 4
    world.success({"at_ms": 3_000, "started_at_ms": 2_000, "model": "gpt-5"})
    assert fail(world, {"at_ms": 3_000, "status": 429, "model": "gpt-5"}).step == 19


def test_a_success_of_an_older_generation_clears_nothing() -> None:
    world = AccountWorld({"provider": "openai", "connection": {"generation": 2}})
    fail(world, {"status": 503})
    outcome, book = world.outcome({"status": 200}), StateBook(world.rows)
    attempt = Attempt(10, 10, Generations(1, 1, 1))
    answer = succeed_connection(book, outcome, world.profile(), attempt, world.log({}))
    assert answer.causes == ("stale_generation",)
    assert not book.changes
    assert cooldown.is_cooling(world.row(), 10)


def test_no_model_is_locked_while_the_breaker_blocks() -> None:
    world = AccountWorld({"provider": "gemini", "breaker_state": "OPEN"})
    assert fail(world, {"status": 502, "model": "m"}).step == 13
    assert not world.locks()


def test_a_rotation_gate_that_blocks_keeps_the_account_and_counts_the_failures() -> None:
    settings = {"rotation.enabled": True, "rotation.threshold_500": 2}
    world = AccountWorld({"provider": "openai", "settings": settings})
    first = world.failure({"status": 500})
    assert not first.fallback
    second = world.failure({"at_ms": 1, "status": 500})
    assert second.fallback
    assert world.row().rate_limited_until == 3_001
