"""Waiting out a short cooldown (spec/cooldown_wait.md section 3)."""

from __future__ import annotations

from policy_service.domain.cooldown_wait import WaitBudget, WaitDecision, decide_wait
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.profiles import WaitProfile

NOW = 5_000


def lock(remaining_ms: int, cause: str = "rate_limit", reason: str = "model_lockout") -> Exclusion:
    target = Target(ProviderId("acme"), ConnectionId("c"), ModelId("m"))
    return Exclusion(target, reason, NOW + remaining_ms, cause=cause)


def wait(*locks: Exclusion, hint: int = 0, budget: WaitBudget | None = None) -> WaitDecision | None:
    return decide_wait(locks, NOW, WaitProfile(), budget or WaitBudget(), hint)


def test_the_longer_of_lock_and_hint_plus_a_margin() -> None:
    assert wait(lock(5_000), hint=3_000) == WaitDecision(5_050, "rate_limit")
    assert wait(lock(2_000), hint=60_000) == WaitDecision(60_050, "rate_limit")


def test_exactly_the_maximum_waits_and_a_millisecond_more_does_not() -> None:
    assert wait(lock(89_950)) == WaitDecision(90_000, "rate_limit")
    assert wait(lock(89_951)) is None


def test_the_soonest_lock_decides_the_reason() -> None:
    assert wait(lock(1_000, "quota_exhausted"), lock(3_000)) is None
    assert wait(lock(3_000, "quota_exhausted"), lock(1_000)) == WaitDecision(1_050, "rate_limit")


def test_reasons_that_time_does_not_heal_never_wait() -> None:
    for cause in ("auth_error", "not_found", "quota_exhausted", "", "made_up"):
        assert wait(lock(2_000, cause)) is None


def test_an_open_breaker_passes_the_reason_test_and_ignores_hints() -> None:
    assert wait(lock(2_000, "", "circuit_open"), hint=60_000) == WaitDecision(2_050, "circuit_open")


def test_without_a_known_end_there_is_no_wait_whatever_the_hint() -> None:
    assert wait(hint=1_000) is None


def test_attempts_and_budgets_are_limits() -> None:
    assert wait(lock(1_000), budget=WaitBudget(attempts=5)) is None
    assert wait(lock(1_000), budget=WaitBudget(spent_ms=299_500)) is None
    assert wait(lock(1_000), budget=WaitBudget(caller_ms=1_000)) is None
    assert wait(lock(1_000), budget=WaitBudget(caller_ms=1_050)) is not None


def test_zero_attempts_or_zero_wait_switch_waiting_off() -> None:
    for profile in (WaitProfile(max_attempts=0), WaitProfile(max_wait_ms=0), WaitProfile(enabled=False)):
        assert decide_wait([lock(10)], NOW, profile, WaitBudget()) is None
