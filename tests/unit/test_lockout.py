"""Keys, writer, decay, slow first output, upkeep and pool lockout of model locks (spec/model_lockout.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.domain import lockout, lockout_keys, lockout_pool, lockout_upkeep
from policy_service.domain.catalogue import Provider
from policy_service.domain.lockout import LockEvidence, LockWrite, ModelLockState, Place
from policy_service.domain.profiles import LockoutProfile, SlowFirstOutput
from policy_service.domain.state import StateBook
from policy_service.settings.provider_data import builtin_providers
from tests.vectors.account_world import AccountWorld, epoch_ms

PROVIDERS = builtin_providers()
OPENAI = PROVIDERS["openai"]
PROFILE = LockoutProfile(reset_after_ms=30_000)
PLACE = Place("openai", "c", "m", OPENAI)
EMPTY = ModelLockState("openai", "c", "exact", "m")


def write(row: ModelLockState, evidence: LockEvidence, at: int, **how: object) -> ModelLockState:
    given = LockWrite(at, PROFILE, 3_000, "UTC")
    return lockout.write_lock(row, evidence, PLACE, replace(given, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("provider", "model", "scoped"),
    [
        ("openai", "gpt-x", "gpt-x"),
        ("codex", "gpt-5.6-luna", "codex"),
        ("codex", "codex-spark", "spark"),
        ("codex", "GPT-Bengalfox-2", "spark"),
        ("antigravity", "gemini-3-pro", "family:gemini"),
        ("antigravity", "antigravity/models/gemini-3-pro", "family:gemini"),
        ("antigravity", "claude-sonnet", "family:claude"),
        ("agy", "cloud-opus", "family:claude"),
        ("agy", "vendor/anthropic-opus", "family:claude"),
        ("antigravity", "gpt-oss", "gpt-oss"),
        ("antigravity", "not-claude-x", "not-claude-x"),
    ],
)
def test_models_of_one_quota_share_a_family(provider: str, model: str, scoped: str) -> None:
    assert lockout_keys.scoped_model(PROVIDERS[provider], model) == scoped


@pytest.mark.parametrize(
    ("status", "reason", "scope", "kind"),
    [
        (429, "rate_limit_exceeded", "exact", "exact"),
        (404, "unknown", None, "bare"),
        (410, "not_found", None, "bare"),
        (429, "rate_limit_exceeded", None, "family"),
        (403, "forbidden", None, "family"),
        (402, "credits", None, "family"),
        (502, "server_error", None, "exact"),
        (400, "model_capacity", None, "exact"),
        (None, "server_error", None, "exact"),
    ],
)
def test_the_failure_chooses_the_key(status: int | None, reason: str, scope: str | None, kind: str) -> None:
    assert lockout_keys.written_kind(status, reason, scope) == kind


def test_a_provider_may_prefer_one_key_and_the_caller_beats_it() -> None:
    place = Place("antigravity", "c", "gemini-x", PROVIDERS["antigravity"])
    assert lockout.key_written(LockEvidence(429, "rate_limit_exceeded"), place)[0] == "exact"
    assert lockout.key_written(LockEvidence(429, "rate_limit_exceeded", scope="family"), place)[0] == "family"


def test_family_and_bare_key_of_a_model_without_family_are_one_place() -> None:
    assert lockout_keys.key_of("bare", OPENAI, "m") == lockout_keys.key_of("family", OPENAI, "m")
    codex = PROVIDERS["codex"]
    assert len(lockout_keys.keys_of(codex, "gpt-5")) == 3
    assert len(lockout_keys.keys_of(OPENAI, "m")) == 2


def test_a_429_and_a_404_of_one_model_share_a_counter_where_the_keys_are_the_same() -> None:
    world = AccountWorld({"provider": "openai"})
    world.record({"model": "m", "status": 429, "base_ms": 1_000})
    world.record({"at_ms": 5, "model": "m", "status": 404, "base_ms": 1_000})
    assert world.count("m") == 2


@pytest.mark.parametrize(
    ("evidence", "duration"),
    [
        (LockEvidence(404, "not_found", exact_ms=86_400_000, uncapped=True), 86_400_000),
        (LockEvidence(429, "rate_limit_exceeded", exact_ms=7_200_000, exact_source="header"), 7_200_000),
        (LockEvidence(429, "r", exact_ms=7_200_000, exact_source="google_rpc_retry_info"), 7_200_000),
        (LockEvidence(429, "rate_limit_exceeded", exact_ms=7_200_000, exact_source="body"), 1_800_000),
        (LockEvidence(429, "rate_limit_exceeded", exact_ms=7_200_000), 1_800_000),
        (LockEvidence(503, "server_error", base_ms=4_000), 4_000),
        (LockEvidence(503, "server_error"), 3_000),
        (LockEvidence(404, "not_found", base_ms=120_000, local=True), 5_000),
    ],
)
def test_the_duration_follows_the_table(evidence: LockEvidence, duration: int) -> None:
    assert write(EMPTY, evidence, 1_000).until == 1_000 + duration


@pytest.mark.parametrize(("status", "base"), [(429, 1_000), (503, 5_000)])
def test_without_any_base_the_status_gives_one(status: int, base: int) -> None:
    assert write(EMPTY, LockEvidence(status, "x"), 0, profile_base_ms=0).until == base


def test_without_a_maximum_the_ladder_ends_at_two_minutes_and_an_exact_value_does_not() -> None:
    unlimited = replace(PROFILE, max_cooldown_ms=None)
    high = replace(EMPTY, failure_count=9, last_failure_at=0, reset_after_ms=60_000)
    assert write(high, LockEvidence(503, "x", base_ms=5_000), 1, profile=unlimited).until == 120_001
    assert write(EMPTY, LockEvidence(503, "x", exact_ms=9_000_000), 1, profile=unlimited).until == 9_000_001


@pytest.mark.parametrize(
    ("now", "zone", "wait"),
    [
        ("2026-01-01T20:00:00Z", "UTC", 4 * 3_600_000),
        ("2026-01-01T20:00:00Z", "America/New_York", 9 * 3_600_000),
        ("2026-01-02T00:00:00Z", "UTC", 24 * 3_600_000),
        ("2026-10-25T00:00:00+02:00", "Europe/Berlin", 25 * 3_600_000),
        ("2026-03-29T00:00:00+01:00", "Europe/Berlin", 23 * 3_600_000),
        ("2026-10-25T00:00:00+02:00", "Antarctica/Troll", 24 * 3_600_000),
    ],
)
def test_a_spent_quota_lasts_until_midnight_of_the_zone(now: str, zone: str, wait: int) -> None:
    at = epoch_ms(now)
    row = write(
        EMPTY, LockEvidence(429, "quota_exhausted"), at, zone=zone, profile=replace(PROFILE, max_cooldown_ms=None)
    )
    assert row.until == at + wait


def test_the_count_grows_within_reset_time_plus_last_lock_and_starts_anew_after() -> None:
    row = write(EMPTY, LockEvidence(503, "x", base_ms=10_000), 0)
    assert write(row, LockEvidence(503, "x", base_ms=10_000), 40_000).failure_count == 2
    assert write(row, LockEvidence(503, "x", base_ms=10_000), 40_001).failure_count == 1


def test_a_second_writer_of_one_outcome_takes_the_later_end_and_counts_nothing() -> None:
    row = write(EMPTY, LockEvidence(503, "x", exact_ms=3_000), 0)
    after = write(row, LockEvidence(503, "x", base_ms=120_000), 0, counts=False)
    assert (after.failure_count, after.until) == (1, 120_000)


def test_late_evidence_adds_to_the_count_and_never_shortens_or_climbs() -> None:
    row = write(EMPTY, LockEvidence(503, "x", base_ms=3_000), 10_000)
    late = write(row, LockEvidence(503, "x", base_ms=3_000), 9_000)
    assert (late.failure_count, late.until, late.last_failure_at) == (2, 13_000, 10_000)
    stated = write(row, LockEvidence(503, "x", exact_ms=60_000, exact_source="header"), 9_000)
    assert stated.until == 69_000


def test_a_lock_holds_up_to_and_including_its_end() -> None:
    row = replace(EMPTY, until=1_000)
    assert lockout.is_locked(row, 1_000)
    assert not lockout.is_locked(row, 1_001)


def test_decay_halves_and_at_zero_frees_the_model() -> None:
    row = replace(EMPTY, until=9_000, failure_count=3, last_failure_at=100)
    half = lockout.decayed(row, 100)
    assert (half.failure_count, half.until) == (1, 9_000)
    assert lockout.decayed(half, 100).is_default
    assert lockout.decayed(row, 99) is row


def test_decay_without_state_reports_nothing_cleared() -> None:
    assert lockout.decay_report([EMPTY], [EMPTY]) == (False, 0)


def test_a_manual_delete_frees_every_key_and_raises_the_generation() -> None:
    rows = [replace(EMPTY, until=9, failure_count=2, generation=3), replace(EMPTY, key_kind="family")]
    after = lockout.deleted(rows)
    assert [row.generation for row in after] == [4, 4]
    assert all(row.is_default for row in after)


def test_the_count_lives_as_long_as_the_longer_lock_that_a_shorter_failure_left_standing() -> None:
    """An hour by header, then a plain failure: the next one after the hour takes the third step, not the first."""
    row = write(EMPTY, LockEvidence(503, "x", exact_ms=3_600_000, exact_source="header"), 0)
    row = write(row, LockEvidence(503, "x", 5_000), 1_000)
    assert (row.until, row.failure_count) == (3_600_000, 2)
    row = write(row, LockEvidence(503, "x", 5_000), 3_600_001)
    assert (row.failure_count, row.until) == (3, 3_600_001 + 20_000)


@pytest.mark.parametrize(
    ("source", "uncapped", "longest"),
    [
        ("header", False, 30 * 86_400_000),
        ("google_rpc_retry_info", False, 86_400_000),
        ("body", False, 1_800_000),
        ("", False, 1_800_000),
        ("", True, 90 * 86_400_000),
    ],
)
def test_no_stated_wait_locks_for_longer_than_its_place_may_state(source: str, uncapped: bool, longest: int) -> None:
    evidence = LockEvidence(429, "x", exact_ms=90 * 86_400_000, exact_source=source, uncapped=uncapped)
    assert write(EMPTY, evidence, 0).until == longest


SLOW = SlowFirstOutput(enabled=True)


def slow_start(row: ModelLockState, at: int) -> ModelLockState:
    return lockout.note_first_output(row, 130_000, at, SLOW)


def test_three_late_first_outputs_within_the_window_lock_the_model_longer_each_time() -> None:
    row, at, ends = EMPTY, 0, []
    for _ in range(4):
        for _ in range(3):
            at += 1_000
            row = slow_start(row, at)
        assert row.until is not None
        ends.append(row.until - at)
        at = row.until
    assert ends == [300_000, 600_000, 900_000, 900_000]


def test_late_first_outputs_that_lie_apart_lock_nothing() -> None:
    row = slow_start(slow_start(slow_start(EMPTY, 0), 300_000), 600_000)
    assert row.until is None


def test_a_prompt_success_clears_events_and_step() -> None:
    row = replace(slow_start(EMPTY, 0), slow_step=2)
    assert lockout.note_first_output(row, 120_000, 5, SLOW).is_default


def test_a_late_first_output_is_a_success_all_the_same_and_halves_the_count() -> None:
    counter = {"model": "m", "failure_count": 4, "last_failure_at_ms": -10_000, "last_cooldown_ms": 1_000}
    settings = {"model_lockout.slow_first_output.enabled": True}
    world = AccountWorld({"provider": "nvidia", "settings": settings, "counter": counter})
    for at, count in ((0, 2), (200_000, 1)):
        world.success({"at_ms": at, "model": "m", "first_output_ms": 130_000})
        assert world.count("m") == count
    world.success({"at_ms": 400_000, "model": "m", "first_output_ms": 130_000})
    locked = world.lock("m", 400_000)
    assert locked is not None
    assert locked.until == 700_000
    world.success({"at_ms": 500_000, "model": "m", "first_output_ms": 130_000})
    assert world.lock("m", 500_000) is not None, "what is late itself lifts no lock"
    world.success({"at_ms": 600_000, "model": "m", "first_output_ms": 100})
    assert world.lock("m", 600_000) is None


@pytest.mark.parametrize("listed", ["nvidia", "NVIDIA", "nim"])
def test_a_provider_may_be_listed_for_slow_first_output_by_any_of_its_names(listed: str) -> None:
    settings = {"model_lockout.slow_first_output.enabled": True, "model_lockout.slow_first_output.providers": [listed]}
    world = AccountWorld({"provider": "nvidia", "settings": settings})
    for at in (0, 200_000, 400_000):
        world.success({"at_ms": at, "model": "m", "first_output_ms": 130_000})
    assert world.lock("m", 400_000) is not None


def test_slow_first_output_works_on_listed_providers_when_switched_on() -> None:
    settings = {"model_lockout.slow_first_output.enabled": True}
    for provider, locked in (("nvidia", True), ("openai", False)):
        world = AccountWorld({"provider": provider, "settings": settings})
        for at in (0, 200_000, 400_000):
            world.success({"at_ms": at, "model": "m", "first_output_ms": 130_000})
        assert (world.lock("m", 400_000) is not None) is locked


def test_the_sweep_drops_what_is_over_and_keeps_what_still_escalates() -> None:
    row = replace(EMPTY, until=10, failure_count=2, last_failure_at=5, reset_after_ms=100, last_cooldown_ms=5)
    assert lockout_upkeep.swept(row, 10) == row
    swept = lockout_upkeep.swept(row, 11)
    assert (swept.until, swept.failure_count) == (None, 2)
    assert lockout_upkeep.swept(row, 111).is_default


def test_a_thousand_active_locks_do_not_take_the_escalation_of_a_model_whose_lock_has_just_ended() -> None:
    active = [replace(EMPTY, model_key=f"a{n}", until=100) for n in range(1_200)]
    counter = replace(EMPTY, failure_count=4, last_failure_at=40)
    assert lockout_upkeep.evictions([*active, counter], 50) == ()


def test_over_the_limit_the_oldest_idle_rows_go_and_never_an_active_lock() -> None:
    active = [replace(EMPTY, model_key=f"a{n}", until=100) for n in range(3)]
    expired = [replace(EMPTY, model_key=f"e{n}", until=n) for n in (5, 3, 4)]
    dropped = lockout_upkeep.evictions([*active, *expired], 50, limit=4)
    assert [row.model_key for row in dropped] == ["e3", "e4"]
    assert lockout_upkeep.evictions(active, 50, limit=1) == ()


def test_the_listing_shows_active_locks_with_the_bare_name() -> None:
    world = AccountWorld({"provider": "codex"})
    world.record({"model": "gpt-5.6-luna", "status": 429, "base_ms": 5_000})
    world.record({"model": "GPT-Other", "status": 502, "base_ms": 1_000})
    listed = lockout_upkeep.listing(world.locks(), 1_001)
    assert [(item.model, item.key_kind, item.remaining_ms) for item in listed] == [("gpt-5.6-luna", "family", 3_999)]


@pytest.mark.parametrize(
    ("status", "hint", "source", "exact", "reason"),
    [
        (429, 0, "", 0, "rate_limit"),
        (403, 0, "", 0, "quota_exhausted"),
        (404, 120_001, "header", 120_001, "not_found"),
        (503, 120_000, "header", 0, "server_error"),
        (502, 0, "", 0, "server_error"),
    ],
)
def test_the_pool_lockout_uses_a_hint_above_its_base(
    status: int, hint: int, source: str, exact: int, reason: str
) -> None:
    evidence = lockout_pool.pool_evidence(status, hint, source, False, replace(PROFILE, pool_enabled=True))
    assert evidence is not None
    assert (evidence.exact_ms, evidence.reason, evidence.base_ms) == (exact, reason, 120_000)


def test_the_pool_lockout_ignores_unlisted_statuses_and_is_off_by_default() -> None:
    assert lockout_pool.pool_evidence(500, 0, "", False, replace(PROFILE, pool_enabled=True)) is None
    assert lockout_pool.pool_evidence(429, 0, "", False, PROFILE) is None


def test_a_spent_quota_without_hint_takes_the_pool_ladder_and_not_midnight() -> None:
    world = AccountWorld({"provider": "openai", "settings": {"model_lockout.enabled": True}})
    world.failure({"status": 403, "text": "hour quota exceeded", "model": "m", "pool_attempt": True})
    lock = world.lock("m", 0)
    assert lock is not None
    assert (lock.until, lock.reason) == (120_000, "quota_exhausted")


def test_a_request_scoped_failure_locks_only_as_a_target_timeout() -> None:
    settings = {"model_lockout.enabled": True}
    for code, locked in (("upstream_empty_response", False), ("combo_target_timeout", True)):
        world = AccountWorld({"provider": "openai", "settings": settings})
        world.failure({"status": 504, "code": code, "model": "m", "pool_attempt": True})
        assert (world.lock("m", 0) is not None) is locked


def test_a_400_about_the_model_locks_it_for_an_hour_in_a_pool() -> None:
    world = AccountWorld({"provider": "gemini", "settings": {"model_lockout.enabled": True}})
    world.failure({"status": 400, "text": "model m is not supported", "model": "m", "pool_attempt": True})
    lock = world.lock("m", 0)
    assert lock is not None
    assert (lock.until, lock.reason) == (3_600_000, "model_capacity")


def test_a_row_keeps_its_place_whatever_kind_it_was_written_as() -> None:
    place = Place("p", "c", "m", Provider("p"))
    row = lockout.lock_row(StateBook(), place, lockout.key_of("bare", place.entry, "m"))
    assert row.key in lockout.lock_keys(place.entry, "p", "c", "m")
    assert ModelLockState.default(row.key) == row


@pytest.mark.parametrize(
    ("provider", "text", "locked"),
    [
        ("openai", "max_tokens must be at most 4096", 0),
        ("openai", "messages must alternate between roles", 0),
        ("openai", "prompt is too long", 0),
        ("openai", "the requested model is not supported", 0),
        ("openai", "nothing to be read from this", 120_000),
        ("openrouter", "the requested model is not supported", 3_600_000),
    ],
)
def test_a_listed_400_locks_no_model_where_the_request_itself_is_to_blame(
    provider: str, text: str, locked: int
) -> None:
    settings = {"model_lockout.enabled": True, "model_lockout.error_codes": [400]}
    world = AccountWorld({"provider": provider, "settings": settings})
    world.failure({"at_ms": 0, "status": 400, "text": text, "model": "m", "pool_attempt": True})
    lock = world.lock("m", 0)
    assert (lock.until if lock else 0) == locked
