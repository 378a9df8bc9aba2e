"""Whole entries of the provider cooldown: window, ladder, facts and purge to the last field and millisecond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain import provider_cooldown
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.profiles import ProviderCooldownProfile
from policy_service.domain.provider_cooldown import ProviderCooldownState

PROFILE = ProviderCooldownProfile(
    enabled=True, failure_threshold=2, failure_window_ms=1_000, cooldown_ms=500, min_ms=100, max_ms=350
)
WINDOW = ProviderCooldownState("acme", failures=(900,), last_failure_at=900, last_event_at=950, fact_id="old")
LADDER = ProviderCooldownState("acme", "c", count=1, last_failure_at=900, last_event_at=950, fact_id="old")


def log(at: int) -> FactLog:
    return FactLog(Cause("e", at, reason="cause"))


def fact(at: int, key: str, before: str, after: str, **more: Any) -> list[Fact]:
    known = {"provider": "acme", "reason": "cause", **more}
    return [Fact("e.0", at, "provider_cooldown", key, before, after, **known)]


def fail(entry: ProviderCooldownState, at: int) -> tuple[ProviderCooldownState, list[Fact]]:
    facts = log(at)
    return provider_cooldown.record_failure(entry, at, PROFILE, facts), facts.facts


def test_the_failure_at_the_threshold_cools_the_provider() -> None:
    assert fail(WINDOW, 1_900) == (
        replace(WINDOW, failures=(900, 1_900), cooling_until=2_400, last_failure_at=1_900, last_event_at=1_900,
                fact_id="e.0"),
        fact(1_900, "acme", "idle", "cooling", deadline_at=2_400, failure_count=2),
    )  # fmt: skip
    assert fail(WINDOW, 1_901) == (
        replace(WINDOW, failures=(1_901,), last_failure_at=1_901, last_event_at=1_901), []
    )  # fmt: skip


def test_a_failure_while_cooling_moves_the_end_and_one_that_is_over_moves_nothing() -> None:
    cooling = replace(WINDOW, cooling_until=1_500)
    moved, facts = fail(cooling, 1_100)
    assert (moved.cooling_until, facts[0].from_state) == (1_600, "cooling")
    _, facts = fail(cooling, 1_500)
    assert facts[0].from_state == "idle"
    same, facts = fail(replace(cooling, cooling_until=1_600), 1_100)
    assert (same.cooling_until, same.fact_id, facts) == (1_600, "old", [])


def test_a_cooldown_of_no_length_is_none_and_leaves_no_fact() -> None:
    facts = log(1_900)
    moved = provider_cooldown.record_failure(WINDOW, 1_900, replace(PROFILE, cooldown_ms=0), facts)
    assert (moved.cooling_until, moved.failures, facts.facts) == (None, (900, 1_900), [])


def test_a_late_failure_is_measured_against_the_newest() -> None:
    late, _ = fail(replace(WINDOW, failures=(1_500,), last_failure_at=1_500, last_event_at=1_500), 499)
    assert (late.failures, late.last_failure_at, late.last_event_at) == ((1_500,), 1_500, 1_500)
    within, _ = fail(replace(WINDOW, failures=(1_500,), last_failure_at=1_500, last_event_at=1_500), 500)
    assert (within.failures, within.cooling_until) == ((500, 1_500), 1_000)


def test_a_connection_climbs_its_ladder_and_says_its_count() -> None:
    assert fail(LADDER, 950) == (
        replace(LADDER, count=2, cooling_until=1_150, last_failure_at=950, last_event_at=950, fact_id="e.0"),
        fact(950, "acme:c", "idle", "cooling", connection="c", deadline_at=1_150, failure_count=2),
    )
    assert fail(LADDER, 949)[0].count == 1
    assert fail(replace(LADDER, count=2), 950)[0].cooling_until == 1_300
    first = ProviderCooldownState("acme", "c", last_event_at=950)
    assert fail(first, 900) == (replace(first, last_failure_at=900), [])


def test_the_ladder_ends_after_ten_doublings() -> None:
    profile = replace(PROFILE, max_ms=10**9)
    ends = [
        provider_cooldown.record_failure(replace(LADDER, count=count), 1_000, profile, log(0)).cooling_until
        for count in (9, 10, 11)
    ]
    assert ends == [1_000 + 51_200, 1_000 + 102_400, 1_000 + 102_400]


@pytest.mark.parametrize(("entry", "key"), [(WINDOW, "acme"), (LADDER, "acme:c")])
def test_a_success_or_reset_empties_an_entry_and_says_so_only_if_it_cooled(
    entry: ProviderCooldownState, key: str
) -> None:
    cooling = replace(entry, cooling_until=2_000)
    empty = replace(entry, failures=(), count=0, last_event_at=1_999)
    facts = log(1_999)
    assert provider_cooldown.record_success(cooling, 1_999, 900, facts) == replace(empty, fact_id="e.0")
    assert facts.facts == fact(
        1_999, key, "cooling", "idle", connection=entry.connection, reason="success", failure_count=0
    )
    facts = log(1_999)
    assert provider_cooldown.reset(cooling, 1_999, facts) == replace(empty, fact_id="e.0")
    assert [each.reason for each in facts.facts] == ["reset"]
    facts = log(2_000)
    assert provider_cooldown.reset(cooling, 2_000, facts) == replace(empty, last_event_at=2_000)
    assert facts.facts == []
    assert provider_cooldown.record_success(cooling, 1_999, 899, log(0)) is cooling


def test_an_empty_entry_is_left_alone() -> None:
    empty = ProviderCooldownState("acme", last_failure_at=5)
    assert provider_cooldown.record_success(empty, 9, 9, log(9)) is empty
    assert provider_cooldown.reset(empty, 9, log(9)) is empty
    assert ProviderCooldownState.default(LADDER.key) == ProviderCooldownState("acme", "c")
    assert LADDER.generation == 1
    for spoilt in ({"failures": (1,)}, {"count": 1}, {"cooling_until": 1}):
        assert not replace(empty, **spoilt).is_default


def test_a_connection_without_a_count_cools_nobody() -> None:
    assert provider_cooldown.remaining_ms(replace(WINDOW, cooling_until=1_000), 999) == 1
    assert provider_cooldown.remaining_ms(replace(WINDOW, cooling_until=1_000), 1_000) == 0
    assert provider_cooldown.remaining_ms(replace(LADDER, cooling_until=1_000, count=0), 0) == 0
    assert provider_cooldown.remaining_ms(replace(LADDER, cooling_until=1_000), 0) == 1_000


@pytest.mark.parametrize(
    ("cooldown", "longest", "window", "kept"),
    [(1, 1, 1, 1_800_000), (1, 2_000_000, 1, 2_000_000), (1_000_000, 1, 900_000, 1_900_000)],
)
def test_an_entry_is_kept_as_long_as_it_could_matter(cooldown: int, longest: int, window: int, kept: int) -> None:
    profile = replace(PROFILE, cooldown_ms=cooldown, max_ms=longest, failure_window_ms=window)
    assert provider_cooldown.retention_ms(profile) == kept
    entries = [WINDOW, replace(WINDOW, last_failure_at=None), replace(WINDOW, cooling_until=10**9)]
    assert provider_cooldown.expired(entries, kept, profile) == []
    assert provider_cooldown.expired(entries, kept + 1, profile) == entries[1:2]
    assert provider_cooldown.expired(entries, kept + 901, profile) == entries[:2]
