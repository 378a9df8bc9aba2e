"""What a policy is compiled to at its edges: patterns of provider names, classes, defaults, and rules without an id."""

from __future__ import annotations

import pytest

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.catalogue import Catalogue, Connection, Provider, ProviderDirectory
from policy_service.domain.decision_record import Classification, DecisionRecord, Mode, Reason
from policy_service.domain.gates import KEEP_ENDED_MS, Pace
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome import UsageCounters
from policy_service.domain.policy import Policy
from policy_service.domain.pool_guard import Member
from policy_service.domain.profiles import (
    BreakerProfile,
    EarlyProbeProfile,
    HintProfile,
    LadderProfile,
    LockoutProfile,
    PoolGuardProfile,
    ProviderCooldownProfile,
    QueueProfile,
    RotationProfile,
    SlowFirstOutput,
    TerminalProfile,
    WaitProfile,
)
from policy_service.domain.session_key import first_user_text
from policy_service.domain.settings import SettingSources


@pytest.mark.parametrize(
    ("name", "found"),
    [("xabcx", "*abc*"), ("abc", "*abc*"), ("xbcx", ""), ("xabx", ""), ("local-1", "local-*"), ("local", ""),
    ("alocal-1", "")],
)  # fmt: skip
def test_a_pattern_of_provider_names_matches_its_whole_text(name: str, found: str) -> None:
    directory = ProviderDirectory(
        {each: Provider(id=each, auth_class=AuthClass.LOCAL) for each in ("*abc*", "local-*")}
    )
    assert (directory.get(name).auth_class is AuthClass.LOCAL) is bool(found)


def test_a_longer_pattern_of_provider_names_beats_a_shorter_one() -> None:
    directory = ProviderDirectory({each: Provider(id=each) for each in ("openai-*", "openai-compatible-*", "*a*")})
    assert [directory.get(name).id for name in ("openai-compatible-x", "openai-x", "xax")] == [
        "openai-compatible-*", "openai-*", "*a*"
    ]  # fmt: skip


def test_a_provider_of_a_pattern_goes_by_the_name_that_was_asked_for() -> None:
    policy = Policy(Catalogue({"local-*": Provider(id="local-*", auth_class=AuthClass.LOCAL)}))
    found = policy.for_connection("LOCAL-1", "c").provider
    assert (found.id, found.auth_class) == ("local-1", AuthClass.LOCAL)


@pytest.mark.parametrize(
    ("auth", "reset_ms", "cap_ms"),
    [(AuthClass.NONE, 1_800_000, 120_000), (AuthClass.API_KEY, 30_000, 1_800_000)],
)
def test_a_lock_of_an_unprofiled_connection_keeps_its_count_for_half_an_hour(
    auth: AuthClass, reset_ms: int, cap_ms: int
) -> None:
    policy = Policy(Catalogue(providers={"acme": Provider(id="acme", auth_class=auth)})).for_connection("acme", "c")
    assert policy.lockout.reset_after_ms == reset_ms
    assert policy.ladder.cap_ms == cap_ms


def test_a_given_default_stands_in_for_the_registrys() -> None:
    sources = SettingSources()
    assert sources.resolve("model_lockout.enabled") is False
    assert sources.resolve("model_lockout.enabled", default=True) is True
    assert sources.resolve("model_lockout.enabled", catalogue=True, default=False) is True


def test_a_decision_claims_nothing_that_nobody_said() -> None:
    for made in (
        Classification("r", Reason.UNKNOWN, True, Mode.FIXED, 0),
        DecisionRecord(True, 0, 0, None, "unknown"),
    ):
        claims = {name: getattr(made, name) for name in made._fields if name not in ("should_fallback", "rule")}
        assert [name for name, value in claims.items() if value is True] == []


def test_texts_are_read_four_levels_deep_and_no_deeper() -> None:
    text: object = "hi"
    for _ in range(4):
        text = [text]
    assert first_user_text({"prompt": text}) == "hi"
    assert first_user_text({"prompt": [text]}) == ""


def test_paces_and_ended_rows_have_their_times() -> None:
    assert (Pace().window_ms, KEEP_ENDED_MS) == (60_000, 600_000)
    assert Member("m") == Member("m", None, 0, False)


DEFAULTS: dict[type, dict[str, object]] = {
    BreakerProfile: {
        "failure_threshold": 5, "degradation_threshold": 3, "reset_timeout_ms": 30_000, "max_backoff_multiplier": 16,
        "backoff_escalation_cycles": 3, "half_open_probes": 1, "successes_to_close": 1, "count_mode": "net",
        "kind_hints": False, "open_ms_by_kind": {}, "kind_thresholds": {}, "per_connection": False,
        "reopen_jitter": 0.0, "quorum_enabled": False, "quorum_min_replicas": 2, "quorum_min_connections": 2,
        "slow_start_enabled": False, "slow_start_duration_ms": 30_000, "slow_start_min_share": 0.1,
        "slow_start_aggression": 1.0, "slow_start_failure_budget": 2,
    },
    LadderProfile: {
        "base_cooldown_ms": 5_000, "max_backoff_steps": 15, "honor_upstream_hints": False, "cap_ms": 120_000,
    },
    ProviderCooldownProfile: {
        "enabled": False, "failure_threshold": 15, "failure_window_ms": 1_800_000, "cooldown_ms": 600_000,
        "min_ms": 5_000, "max_ms": 300_000,
    },
    SlowFirstOutput: {
        "enabled": False, "threshold_ms": 120_000, "events": 3, "window_ms": 600_000,
        "locks_ms": (300_000, 600_000, 900_000),
    },
    LockoutProfile: {
        "pool_enabled": False, "error_codes": {403, 404, 429, 502, 503, 504}, "base_cooldown_ms": 120_000,
        "max_cooldown_ms": 1_800_000, "max_backoff_steps": 10, "use_exponential_backoff": True,
        "reset_after_ms": 1_800_000, "slow_first_output": SlowFirstOutput(),
    },
    TerminalProfile: {
        "custom_ban_signals": (), "auto_disable_banned": False, "auto_disable_scope": "all",
        "ambiguous_401_soft": False,
    },
    HintProfile: {"extended_texts": True, "extended_reset_headers": True},
    RotationProfile: {
        "enabled": False, "on_status": {}, "threshold": {}, "window_ms": 120_000, "rate_limit_reset_ms": 0,
    },
    PoolGuardProfile: {"enabled": False, "max_excluded_share": 0.5, "panic_max_in_flight": 1},
    EarlyProbeProfile: {
        "enabled": False, "min_block_ms": 600_000, "interval_ms": 300_000, "include_server_stated": False,
    },
    WaitProfile: {"enabled": True, "max_wait_ms": 90_000, "max_attempts": 5, "budget_ms": 300_000},
    QueueProfile: {
        "requests_per_minute": 60, "min_time_between_requests_ms": 350, "concurrent_requests": 6,
        "max_wait_ms": 30_000, "execution_max_wait_ms": 600_000, "max_queue_depth": 0, "unbounded_wait": False,
        "wedge_after_ms": 60_000, "rpm_override": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("profile", DEFAULTS, ids=lambda each: each.__name__)
def test_profiles_have_the_numbers_of_the_spec_by_default(profile: type) -> None:
    made = profile()
    assert {name: getattr(made, name) for name in profile.__slots__} == DEFAULTS[profile]  # type: ignore[attr-defined]


def test_a_policy_without_a_revision_is_the_first() -> None:
    assert Policy(Catalogue()).revision == 0


def test_counters_of_use_claim_nothing() -> None:
    assert UsageCounters() == UsageCounters(day=False, minute=False, token=False)


def test_a_provider_or_connection_without_flags_has_only_those_of_every_other() -> None:
    both = (Provider(id="x"), Connection("c", "x"))
    flags = [name for made in both for name in made.__slots__ if getattr(made, name) is True]
    assert flags == ["credits_text_is_terminal", "kind_hints_default", "enabled"]
