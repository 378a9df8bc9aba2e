"""Failures that operators reported, one test each, named for the symptom."""

from __future__ import annotations

from typing import Any

from policy_service.application.report_plan import FoldResult
from policy_service.domain import breaker, cooldown, provider_cooldown
from policy_service.domain.breaker import State
from policy_service.domain.breaker_probe import Refusal, Verdict
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.provider_cooldown import ProviderCooldownState
from tests.vectors.world import World

HALF_OPEN = {"state": "HALF_OPEN", "failure_count": 12}


def report(world: World, now: int, status: int, decision: str = "", **step: Any) -> FoldResult:
    return world.report({"status": status, **step}, now, decision)


def connection(world: World, name: str) -> ConnectionState:
    return world.book().get(ConnectionState, world.provider, name)


def test_model_that_always_fails_does_not_burn_every_key() -> None:
    """Case 8: three requests walk three keys of one provider, the model answers 500 each time."""
    world = World({"auth_class": "api_key"})
    for request in range(3):
        for position, key in enumerate(("k1", "k2", "k3")):
            report(
                world,
                request * 20_000 + position * 100,
                500,
                connection=key,
                model="broken",
                pool_attempt=True,
                persist=False,
                next_target_same_provider=position < 2,
            )
    assert world.breaker().failure_count == 3
    for key in ("k1", "k2", "k3"):
        assert not cooldown.is_cooling(connection(world, key), 40_300)


def test_rate_limit_at_the_brink_is_neutral() -> None:
    """Case 9: four of five failures, then a 429."""
    world = World({"auth_class": "none"})
    for turn in range(4):
        report(world, turn, 503, connection=f"c{turn}")
    before = world.breaker()
    result = report(world, 10, 429, connection="c9")
    assert not result.counted
    assert world.breaker() == before


def test_rate_limit_that_held_the_probe_settles_it() -> None:
    """Case 9: the 429 answers the half-open probe."""
    world = World({"auth_class": "api_key", "state": HALF_OPEN})
    assert world.admit({}, "p", 0).probes
    assert report(world, 10, 429, "p").verdict is Verdict.ALIVE
    assert world.breaker().state is State.CLOSED


def test_threshold_zero_is_a_value_and_not_unset() -> None:
    """Case 12: zero in the environment opens, or cools, at the first failure."""
    environment = {
        "POLICY_BREAKER_API_KEY_FAILURE_THRESHOLD": "0",
        "POLICY_PROVIDER_COOLDOWN_API_KEY_FAILURE_THRESHOLD": "0",
    }
    world = World({"auth_class": "api_key", "enabled": True, "env": environment})
    report(world, 0, 503, connection="c1", pool_attempt=True)
    entry = world.book().get(ProviderCooldownState, world.provider, "")
    assert world.breaker().state is State.OPEN
    assert provider_cooldown.is_cooling(entry, 0)


def test_failure_reported_by_two_code_paths_is_one_strike() -> None:
    """Case 13: fallback handler and callback report the same attempt, far enough apart for every guard."""
    world = World({"auth_class": "api_key"})
    world.admit({"connection": "c1"}, "d", 0)
    report(world, 100, 503, "d")
    level = connection(world, "c1").backoff_level
    again = report(world, 20_100, 503, "d")
    assert again.causes == ("duplicate",)
    assert world.breaker().failure_count == 1
    assert connection(world, "c1").backoff_level == level == 1


def test_herd_at_the_end_of_open_sends_one_probe() -> None:
    """Case 14: fifty replicas with nine callers each, the others get a real wait, a lost probe is replaced."""
    world = World({"auth_class": "api_key"})
    for turn in range(12):
        report(world, 0, 503, connection=f"c{turn}")
    herd = [
        world.admit({}, f"h{replica}-{n}", 30_000, replica=f"r{replica}") for replica in range(50) for n in range(9)
    ]
    refused = [admission for admission in herd if not admission.granted]
    assert len(herd) - len(refused) == 1
    assert {(a.reason, a.retry_after_ms) for a in refused} == {(Refusal.PROBE_IN_FLIGHT, 30_000)}
    assert world.admit({}, "later", 60_000).granted


def test_call_from_before_the_outage_does_not_answer_for_the_probe() -> None:
    """Case 15: it neither closes, reopens nor frees the probe."""
    world = World({"auth_class": "api_key"})
    for name in ("slow-success", "slow-failure"):
        world.admit({"connection": name}, name, 0)
    for turn in range(12):
        report(world, 1_000, 503, connection=f"c{turn}")
    world.admit({}, "probe", 31_000)
    before = world.breaker()
    report(world, 32_000, 200, "slow-success", first_byte_at_ms=32_000)
    result = report(world, 33_000, 503, "slow-failure")
    assert result.causes[0] == "stale_generation"
    assert world.breaker() == before
    assert not breaker.admits(before, 33_000, world.profile().breaker)


def test_slow_success_does_not_clear_a_younger_cooldown() -> None:
    """Case 16: A starts at 0, B is refused at 5 s, A ends well at 9 s."""
    world = World({"provider": "openai"})
    world.admit({"connection": "c1"}, "a", 0)
    report(world, 5_000, 429, connection="c1", headers={"Retry-After": "60"})
    result = report(world, 9_000, 200, "a")
    assert connection(world, "c1").rate_limited_until == 65_000
    assert "stale_success" in result.causes
