"""The registry of policy settings: names, variables, reading of values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.settings import (
    ENV_ALIASES,
    REGISTRY,
    SettingSources,
    read_environment,
    read_flag,
    read_stored,
)
from policy_service.settings.resolved import REST_NAMES, resolve
from policy_service.settings.values import refuse


def test_every_default_is_a_value_that_may_be_written() -> None:
    for spec in REGISTRY.values():
        assert spec.default is None or refuse(spec, spec.default, spec.name) is None, spec.name


def test_no_two_settings_share_a_variable_or_a_rest_name() -> None:
    variables = [spec.environment for spec in REGISTRY.values()]
    rest = [spec.rest for spec in REGISTRY.values() if spec.rest]

    assert len(set(variables)) == len(variables)
    assert len(set(rest)) == len(rest) == len(REST_NAMES)


def test_every_setting_says_what_it_means_and_where_it_is_specified() -> None:
    assert [spec.name for spec in REGISTRY.values() if not spec.doc or not spec.spec] == []


def test_the_unit_of_a_setting_is_the_end_of_its_name() -> None:
    names = (
        "queue.max_wait_ms",
        "direct_wait.max_retry_wait_s",
        "rotation.rate_limit_reset_seconds",
        "daily_reset_zone",
    )
    assert [REGISTRY[name].unit for name in names] == ["ms", "s", "s", ""]


def test_exactly_the_listed_older_variables_are_accepted() -> None:
    assert sorted(ENV_ALIASES.values()) == [
        "OMNIROUTE_EMERGENCY_FALLBACK",
        "OMNIROUTE_PROVIDER_BREAKER_API_KEY_COOLDOWN_MS",
        "OMNIROUTE_PROVIDER_BREAKER_API_KEY_FAILURE_THRESHOLD",
        "OMNIROUTE_PROVIDER_BREAKER_API_KEY_FAILURE_WINDOW_MS",
        "OMNIROUTE_PROVIDER_BREAKER_OAUTH_COOLDOWN_MS",
        "OMNIROUTE_PROVIDER_BREAKER_OAUTH_FAILURE_THRESHOLD",
        "OMNIROUTE_PROVIDER_BREAKER_OAUTH_FAILURE_WINDOW_MS",
        "PROVIDER_COOLDOWN_ENABLED",
        "RATE_LIMIT_EXECUTION_MAX_WAIT_MS",
        "RATE_LIMIT_MAX_QUEUE_DEPTH",
        "RATE_LIMIT_MAX_WAIT_MS",
        "STREAM_THROUGHPUT_WATCHDOG_ENABLED",
    ]


@pytest.mark.parametrize("text", ["0", "0.5", "99999999", " 7 ", "1e3"])
def test_an_environment_number_is_taken_as_it_stands(text: str) -> None:
    assert read_environment(REGISTRY["breaker.oauth.failure_threshold"], text) == float(text)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1_000", "0x10", "abc", "1,5", "١٢"])
def test_an_environment_number_that_is_none_is_ignored(text: str) -> None:
    assert read_environment(REGISTRY["breaker.oauth.failure_threshold"], text) is None


@pytest.mark.parametrize(("text", "read"), [("0", 1), ("5", 5), ("90000000", 86_400_000), ("-1", None)])
def test_the_two_queue_budgets_are_clamped_in_the_environment_too(text: str, read: int | None) -> None:
    assert read_environment(REGISTRY["queue.max_wait_ms"], text) == read
    assert read_environment(REGISTRY["queue.execution_max_wait_ms"], text) == read


@pytest.mark.parametrize(("text", "read"), [("200", 200), ("-3", None), ("1.5", None), ("0", None), ("x", None)])
def test_the_tool_limit_of_the_environment_is_a_positive_whole_number(text: str, read: int | None) -> None:
    assert read_environment(REGISTRY["tools.max_limit"], text) == read


@pytest.mark.parametrize(("text", "read"), [("YES", True), ("on", True), ("No", False), ("0", False), ("maybe", None)])
def test_a_feature_flag_reads_yes_and_no_as_well(text: str, read: bool | None) -> None:
    assert read_flag(text) is read


def test_a_switch_of_the_environment_does_not_read_yes() -> None:
    assert read_environment(REGISTRY["cooldown_wait.enabled"], "yes") is None


def test_an_unusable_canonical_variable_leaves_the_older_name_in_force() -> None:
    sources = SettingSources({}, {"POLICY_QUEUE_MAX_WAIT_MS": "soon", "RATE_LIMIT_MAX_WAIT_MS": "9000"})

    assert sources.resolve("queue.max_wait_ms") == 9000


def test_the_legacy_affinity_time_serves_only_where_the_generic_one_is_absent() -> None:
    legacy = SettingSources({"affinity.legacy_ttl_ms": 7000})
    both = SettingSources({"affinity.legacy_ttl_ms": 7000, "affinity.ttl_ms": 0})

    assert legacy.resolve_with_source("affinity.ttl_ms") == (7000, "stored")
    assert both.resolve_with_source("affinity.ttl_ms") == (0, "stored")


def test_provider_cooldown_is_on_when_only_the_environment_says_so() -> None:
    sources = SettingSources({"provider_cooldown.enabled": False}, {"PROVIDER_COOLDOWN_ENABLED": "1"})

    assert (resolve(sources, "provider_cooldown.enabled").value) is True
    assert (resolve(sources, "provider_cooldown.enabled").source) == "environment"


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none(), st.lists(st.integers())))
def test_a_stored_value_is_read_within_its_range_or_not_at_all(raw: object) -> None:
    for name in ("queue.requests_per_minute", "pool_guard.max_excluded_share"):
        spec = REGISTRY[name]
        value = read_stored(spec, raw)
        assert spec.low is not None
        assert spec.high is not None
        assert value is None or (isinstance(value, (int, float)) and spec.low <= value <= spec.high)


@given(st.text(max_size=40))
def test_reading_a_variable_never_fails(text: str) -> None:
    for spec in REGISTRY.values():
        value = read_environment(spec, text)
        assert not isinstance(value, float) or math.isfinite(value)
