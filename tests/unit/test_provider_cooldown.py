"""Window, ladder, clearing and keeping of the provider cooldown."""

from __future__ import annotations

import pytest

from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.profiles import ProviderCooldownProfile
from policy_service.domain.provider_cooldown import (
    ProviderCooldownState,
    expired,
    is_cooling,
    record_failure,
    record_success,
    records,
    remaining_ms,
    reset,
    retention_ms,
)

PROFILE = ProviderCooldownProfile(True, failure_threshold=3, failure_window_ms=1_000, cooldown_ms=500)
PROVIDER = ProviderCooldownState("acme")
CONNECTION = ProviderCooldownState("acme", "c1")


def log() -> FactLog:
    return FactLog(Cause("e", 0))


def fail(entry: ProviderCooldownState, *times: int, facts: FactLog | None = None) -> ProviderCooldownState:
    for at in times:
        entry = record_failure(entry, at, PROFILE, facts or log())
    return entry


def test_failure_exactly_as_old_as_the_window_still_counts() -> None:
    assert is_cooling(fail(PROVIDER, 0, 0, 1_000), 1_000)
    assert not is_cooling(fail(PROVIDER, 0, 0, 1_001), 1_001)


def test_cooling_ends_exactly_at_its_end() -> None:
    entry = fail(PROVIDER, 0, 0, 0)
    assert remaining_ms(entry, 499) == 1
    assert not is_cooling(entry, 500)


def test_late_failure_joins_the_window_and_cannot_shorten_the_cooling() -> None:
    entry = fail(PROVIDER, 100, 200, 300)
    late = fail(entry, 50)
    assert late.failures == (50, 100, 200, 300)
    assert late.cooling_until == entry.cooling_until == 800


def test_late_failure_climbs_no_step_of_the_connection() -> None:
    entry = fail(CONNECTION, 10_000)
    late = fail(entry, 1_000)
    assert (late.count, late.cooling_until) == (1, entry.cooling_until)


@pytest.mark.parametrize(("failures", "seconds"), [(1, 5), (2, 10), (6, 160), (7, 300), (40, 300)])
def test_connection_ladder_doubles_up_to_its_maximum(failures: int, seconds: int) -> None:
    assert remaining_ms(fail(CONNECTION, *[0] * failures), 0) == seconds * 1_000


def test_success_that_started_before_the_newest_failure_clears_nothing() -> None:
    entry = fail(PROVIDER, 100)
    assert record_success(entry, 200, 99, log()) == entry
    assert record_success(entry, 200, 100, log()).is_default


def test_each_extension_and_the_clearing_leave_a_fact() -> None:
    facts = log()
    entry = fail(CONNECTION, 0, 10, facts=facts)
    record_success(entry, 20, 20, facts)
    assert [(f.from_state, f.to_state) for f in facts.facts] == [
        ("idle", "cooling"),
        ("cooling", "cooling"),
        ("cooling", "idle"),
    ]
    assert facts.facts[0].deadline_at == 5_000


def test_failures_below_the_threshold_leave_no_fact() -> None:
    facts = log()
    fail(PROVIDER, 0, 0, facts=facts)
    assert facts.facts == []


def test_reset_empties_an_entry_and_leaves_an_empty_one_alone() -> None:
    assert reset(fail(PROVIDER, 0), 1, log()).is_default
    assert reset(PROVIDER, 1, log()) is PROVIDER


@pytest.mark.parametrize("provider", ["", "unknown"])
def test_unknown_provider_is_never_recorded(provider: str) -> None:
    assert not records(PROFILE, provider, 503, counts_per_model=False)


def test_quota_and_fault_of_one_model_are_not_the_providers() -> None:
    refused = [records(PROFILE, "gemini", status, counts_per_model=True) for status in (429, 500, 503)]
    assert refused == [False, False, True]
    assert records(PROFILE, "openai", 429, counts_per_model=False)
    assert not records(ProviderCooldownProfile(), "openai", 503, counts_per_model=False)


def test_entries_are_kept_for_the_longest_time_that_could_matter() -> None:
    assert retention_ms(PROFILE) == 1_800_000
    assert retention_ms(ProviderCooldownProfile(True)) == 2_400_000
    old, young = fail(PROVIDER, 0), fail(CONNECTION, 1_000_000)
    assert expired([old, young], 1_800_001, PROFILE) == [old]


def test_long_cooling_entry_is_not_purged() -> None:
    slow = ProviderCooldownProfile(True, failure_threshold=1, failure_window_ms=1, cooldown_ms=9_000_000)
    entry = record_failure(PROVIDER, 0, slow, log())
    assert expired([entry], 2_000_000, PROFILE) == []
