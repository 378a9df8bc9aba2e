"""Whole rows of model locks: what a write, a success, a delete and the upkeep keep and change, to the last field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.domain import lockout, lockout_keys, lockout_pool, lockout_removal, lockout_upkeep
from policy_service.domain.catalogue import Provider
from policy_service.domain.connection_state import EarlyProbe
from policy_service.domain.lockout import (
    Counted,
    Decay,
    FamilyPoolState,
    LockEvidence,
    LockWrite,
    ModelLockState,
    Place,
)
from policy_service.domain.lockout_keys import LockKey
from policy_service.domain.lockout_upkeep import LockListing
from policy_service.domain.profiles import LockoutProfile, SlowFirstOutput
from policy_service.domain.state import StateBook

PROFILE = LockoutProfile(reset_after_ms=30_000)
ACME = Provider(id="acme")
PLACE = Place("acme", "c", "m", ACME)
PROBE = EarlyProbe("e", 1_000, 2_000)
FULL = ModelLockState(
    "acme", "c", "exact", "m", "m", 10_000, 1_000, "server_error", 2, 1_000, 20_000, 9_000, "header", 3, (500,), 1,
    PROBE, 1_500, "f.0", "exact",
)  # fmt: skip
SLOW = SlowFirstOutput(enabled=True, threshold_ms=100, window_ms=1_000, events=2, locks_ms=(5_000, 7_000))
FAILURE = LockEvidence(502, "bad_gateway", 3_000)
HOUR = 3_600_000


def write(row: ModelLockState, evidence: LockEvidence, at: int, profile: LockoutProfile = PROFILE) -> ModelLockState:
    return lockout.write_lock(row, evidence, PLACE, LockWrite(at, profile, 0, "UTC"))


# -- the writer ----------------------------------------------------------------------------------------------
def test_a_failure_within_the_window_takes_the_next_step_and_keeps_what_runs() -> None:
    assert write(FULL, FAILURE, 10_000) == replace(
        FULL, until=22_000, reason="bad_gateway", failure_count=3, last_failure_at=10_000, reset_after_ms=30_000,
        last_cooldown_ms=12_000, hint_source="", last_event_at=10_000,
    )  # fmt: skip


def test_a_lock_that_was_over_begins_anew_without_the_old_probe() -> None:
    written = write(FULL, replace(FAILURE, exact_ms=5_000, exact_source="body"), 10_001)
    assert (written.locked_at, written.until, written.early_probe, written.hint_source) == (
        10_001,
        15_001,
        None,
        "body",
    )
    again = lockout.extend_lock(replace(FULL, locked_at=None), 5_000, 10_001, "x", "y")
    assert again == replace(FULL, until=10_001, locked_at=5_000, reason="x", hint_source="y")
    assert lockout.extend_lock(FULL, 5_000, 10_000, "x") is FULL


def test_a_late_failure_counts_without_climbing_and_leaves_time_and_length() -> None:
    assert write(FULL, FAILURE, 1_499) == replace(
        FULL, failure_count=3, last_failure_at=1_499, reset_after_ms=30_000, last_event_at=1_500
    )
    punctual = write(FULL, FAILURE, 1_500)
    assert (punctual.failure_count, punctual.last_cooldown_ms) == (3, 12_000)


def test_what_was_counted_before_may_only_move_the_end() -> None:
    how = LockWrite(2_000, PROFILE, 0, "UTC", counts=False)
    assert lockout.write_lock(FULL, FAILURE, PLACE, how) == replace(
        FULL, failure_count=2, last_failure_at=2_000, reset_after_ms=30_000, last_event_at=2_000
    )
    fresh = lockout.write_lock(ModelLockState("acme", "c", "exact", "m"), FAILURE, PLACE, how)
    assert (fresh.failure_count, fresh.until) == (0, 5_000)


def test_a_lock_of_the_same_end_does_not_go_on_deciding_how_long_the_count_lives() -> None:
    assert write(FULL, replace(FAILURE, exact_ms=6_000), 4_000).last_cooldown_ms == 6_000
    assert write(FULL, replace(FAILURE, exact_ms=5_999), 4_000).last_cooldown_ms == 9_000


def test_a_lock_of_no_length_lets_the_count_live_for_the_reset_time_alone() -> None:
    none = write(ModelLockState("acme", "c", "exact", "m"), FAILURE, 4_000, replace(PROFILE, max_cooldown_ms=0))
    assert (none.until, none.last_cooldown_ms) == (4_000, 0)


def test_a_day_of_more_than_25_hours_is_taken_for_a_day() -> None:
    """In Troll the day on which summer time ends has 26 hours; it ended at midnight UTC."""
    spent, profile = LockEvidence(429, "quota_exhausted"), LockoutProfile(max_cooldown_ms=None)
    end = 1_792_972_800_000  # 2026-10-26T00:00Z
    for left, length in ((25 * HOUR, 25 * HOUR), (25 * HOUR + 1, 24 * HOUR), (26 * HOUR, 24 * HOUR)):
        at = end - left
        row = lockout.write_lock(FREED, spent, PLACE, LockWrite(at, profile, 0, "Antarctica/Troll"))
        assert row.until == at + length


@pytest.mark.parametrize(
    ("at", "late", "counted"),
    [
        (30_000, False, Counted(3, 3)),
        (30_001, False, Counted(1, 1)),
        (30_000, True, Counted(3, 2)),
        (30_001, True, Counted(1, 1)),
    ],
)
def test_the_window_of_a_count_is_reset_time_plus_last_lock(at: int, late: bool, counted: Counted) -> None:
    assert lockout.count_failure(FULL, at, late) == counted
    assert lockout.count_failure(replace(FULL, failure_count=0), at, late) == Counted(1, 1)
    assert lockout.count_failure(replace(FULL, last_failure_at=None), at, late) == Counted(1, 1)


@pytest.mark.parametrize(
    ("evidence", "step", "longest", "duration"),
    [
        (FAILURE, 1, 1_800_000, 100),
        (FAILURE, 2, 1_800_000, 200),
        (FAILURE, 11, 1_800_000, 102_400),
        (FAILURE, 12, 1_800_000, 102_400),
        (FAILURE, 11, None, 102_400),
        (FAILURE, 2, 150, 150),
        (replace(FAILURE, exact_ms=1), 9, 150, 1),
        (replace(FAILURE, exact_ms=500), 9, 150, 150),
        (replace(FAILURE, exact_ms=500), 9, None, 500),
        (replace(FAILURE, exact_ms=500, uncapped=True), 9, 150, 500),
        (replace(FAILURE, exact_ms=500, exact_source="header"), 9, 150, 500),
        (replace(FAILURE, exact_ms=500, exact_source="text"), 9, 150, 150),
    ],
)
def test_lengths_of_locks(evidence: LockEvidence, step: int, longest: int | None, duration: int) -> None:
    profile = replace(PROFILE, max_cooldown_ms=longest, max_backoff_steps=10)
    assert lockout.lock_duration(evidence, step, profile, 100, 0, "UTC") == duration


def test_without_a_maximum_a_ladder_ends_at_two_minutes() -> None:
    profile = replace(PROFILE, max_cooldown_ms=None)
    assert lockout.lock_duration(FAILURE, 6, profile, 60_000, 0, "UTC") == 120_000
    spent = LockEvidence(429, "quota_exhausted")
    assert lockout.lock_duration(spent, 1, profile, 1_000, 1_000, "UTC") == 86_399_000
    assert lockout.lock_duration(spent, 1, PROFILE, 1_000, 1_000, "UTC") == 1_800_000
    assert lockout.lock_duration(replace(spent, until_midnight=False), 2, PROFILE, 1_000, 0, "UTC") == 2_000


@pytest.mark.parametrize(
    ("evidence", "profile_base", "base"),
    [
        (LockEvidence(404, "x", 1, local=True), 2, 5_000),
        (LockEvidence(500, "x", 1, local=True), 2, 1),
        (LockEvidence(404, "x", 1), 2, 1),
        (LockEvidence(404, "x"), 2, 2),
        (LockEvidence(429, "x"), 0, 1_000),
        (LockEvidence(500, "x"), 0, 5_000),
        (LockEvidence(None, "x"), 0, 5_000),
    ],
)
def test_the_base_is_the_first_that_is_stated(evidence: LockEvidence, profile_base: int, base: int) -> None:
    assert lockout.lock_base(evidence, profile_base) == base


def test_the_longest_lock_in_force_is_shown() -> None:
    rows = [replace(FULL, until=until) for until in (None, 4_999, 5_000, 7_000, 6_000)]
    assert lockout.longest_lock(rows, 5_000) is rows[3]
    assert lockout.longest_lock(rows, 7_000) is rows[3]
    assert lockout.longest_lock(rows, 7_001) is None


def test_the_longest_lock_is_shown_however_early_it_ends() -> None:
    ends = [replace(FULL, until=until) for until in (0, 1)]
    assert lockout.longest_lock(ends, 0) is ends[1]


# -- recovery ------------------------------------------------------------------------------------------------
FREED = ModelLockState(
    "acme", "c", "exact", "m", generation=3, slow_events=(500,), slow_step=1, last_event_at=1_500, fact_id="f.0"
)


def test_a_success_halves_and_at_zero_leaves_slow_events_and_generation() -> None:
    assert lockout.decayed(FULL, 1_000) == replace(FULL, failure_count=1)
    assert lockout.decayed(replace(FULL, failure_count=1), 1_000) == FREED
    assert lockout.decayed(replace(FULL, failure_count=0), 1_000) == FREED
    assert lockout.decayed(FULL, 999) is FULL
    assert lockout.decayed(FREED, 9_000) is FREED


@pytest.mark.parametrize(
    ("before", "after", "report"),
    [
        ([FREED], [FREED], Decay(False, 0)),
        ([FULL, FREED], [FREED, FREED], Decay(True, 0)),
        ([FULL, FULL], [replace(FULL, failure_count=1), FREED], Decay(False, 1)),
        ([replace(FREED, until=5)], [FREED], Decay(True, 0)),
        ([replace(FREED, failure_count=1)], [FREED], Decay(True, 0)),
        ([FULL], [replace(FREED, until=5)], Decay(False, 0)),
        ([], [], Decay(False, 0)),
    ],
)
def test_a_success_reports_over_every_key(
    before: list[ModelLockState], after: list[ModelLockState], report: Decay
) -> None:
    assert lockout.decay_report(before, after) == report


def test_a_delete_empties_every_row_at_one_new_generation() -> None:
    other = ModelLockState("acme", "c", "family", "m", generation=7, last_event_at=2)
    assert lockout.deleted([FULL, other]) == (
        ModelLockState("acme", "c", "exact", "m", generation=8, last_event_at=1_500),
        ModelLockState("acme", "c", "family", "m", generation=8, last_event_at=2),
    )
    assert lockout.generation_of(StateBook({FULL.key: FULL}), PLACE) == 3


def test_where_there_is_no_row_a_delete_makes_none() -> None:
    assert lockout.deleted([]) == ()


def test_absence_of_a_row_and_of_a_pool_timer_is_their_default() -> None:
    assert ModelLockState.default(FULL.key) == ModelLockState("acme", "c", "exact", "m")
    pool = FamilyPoolState("acme", "c", "family:x", 9)
    assert FamilyPoolState.default(pool.key) == FamilyPoolState("acme", "c", "family:x")
    assert pool.generation == 1
    assert not pool.is_default
    for spoilt in ({"until": 1}, {"failure_count": 1}, {"slow_events": (1,)}, {"slow_step": 1}):
        assert not replace(ModelLockState.default(FULL.key), **spoilt).is_default


# -- slow first output ---------------------------------------------------------------------------------------
def test_late_first_outputs_lock_when_enough_lie_within_the_window() -> None:
    free = replace(FREED, slow_step=0, slow_events=())
    assert lockout.note_first_output(FULL, 100, 600, SLOW) == replace(FULL, slow_events=(), slow_step=0)
    one = lockout.note_first_output(free, 101, 600, SLOW)
    assert one == replace(free, slow_events=(600,))
    assert lockout.note_first_output(one, 101, 1_600, SLOW) == replace(free, slow_events=(1_600,))
    locked = lockout.note_first_output(one, 101, 1_599, SLOW)
    assert locked == replace(
        free, slow_step=1, last_failure_at=1_599, written_as="exact", until=6_599, locked_at=1_599,
        reason="slow_first_output",
    )  # fmt: skip
    for step, until in ((1, 8_599), (2, 8_599)):
        assert lockout.note_first_output(replace(one, slow_step=step), 101, 1_599, SLOW).until == until


# -- pool lockout --------------------------------------------------------------------------------------------
POOL = replace(
    PROFILE, pool_enabled=True, base_cooldown_ms=1_000, error_codes=frozenset({403, 404, 408, 429, 499, 500})
)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(429, "rate_limit"), (403, "quota_exhausted"), (404, "not_found"), (408, "server_error"), (500, "server_error"),
    (499, "unknown")],
)  # fmt: skip
def test_the_pool_lockout_names_a_reason_by_status(status: int, reason: str) -> None:
    assert lockout_pool.pool_evidence(status, 0, "", False, POOL) == LockEvidence(
        status, reason, 1_000, until_midnight=False
    )


def test_the_pool_lockout_takes_only_a_hint_that_is_longer_than_its_base() -> None:
    assert lockout_pool.pool_evidence(429, 1_001, "header", False, POOL) == LockEvidence(
        429, "rate_limit", 1_000, 1_001, "header", until_midnight=False
    )
    flat = replace(POOL, use_exponential_backoff=False)
    assert lockout_pool.pool_evidence(429, 1_000, "header", False, flat) == LockEvidence(
        429, "rate_limit", 1_000, 1_000, until_midnight=False
    )
    assert lockout_pool.pool_evidence(400, 5, "header", True, POOL) == LockEvidence(
        400, "model_capacity", exact_ms=3_600_000, uncapped=True
    )
    assert lockout_pool.pool_evidence(400, 5, "header", False, POOL) is None
    assert lockout_pool.pool_evidence(429, 0, "", False, replace(POOL, pool_enabled=False)) is None


# -- keys ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "model", "scoped"),
    [
        ("tier", "acme-CORE-1", "tier:core"),
        ("tier", "acme-premium-1", "tier:premium"),
        ("tier", "acme-x", "tier:standard"),
        ("tier", "core/x", "tier:core"),
        ("google_family", "ACME/models/Gemini-3", "family:gemini"),
        ("google_family", "acme/plain", "plain"),
        ("google_family", "other/vendor/plain", "vendor/plain"),
        ("google_family", "plain", "plain"),
        ("unknown", "m", "m"),
    ],
)
def test_quota_families_by_their_scheme(family: str, model: str, scoped: str) -> None:
    assert lockout_keys.scoped_model(Provider(id="acme", quota_family=family), model) == scoped


def test_the_keys_of_a_model_with_a_family_are_three() -> None:
    codex = Provider(id="acme", quota_family="codex")
    assert lockout_keys.keys_of(codex, " GPT-Spark ") == (
        LockKey("family", "spark"), LockKey("bare", " GPT-Spark "), LockKey("exact", "gpt-spark")
    )  # fmt: skip
    assert lockout_keys.keys_of(ACME, "m") == (LockKey("family", "m"), LockKey("exact", "m"))
    assert lockout.lock_keys(ACME, "acme", "c", "m") == (
        ("model_lock", "acme", "c", "family", "m"), ("model_lock", "acme", "c", "exact", "m")
    )  # fmt: skip


# -- upkeep --------------------------------------------------------------------------------------------------
def test_the_sweep_takes_lock_and_count_each_at_its_own_time() -> None:
    assert lockout_upkeep.swept(FULL, 10_000) is FULL
    assert lockout_upkeep.swept(FULL, 10_001) == replace(FULL, until=None, locked_at=None, early_probe=None)
    assert lockout_upkeep.swept(FULL, 30_000).failure_count == 2
    assert lockout_upkeep.swept(FULL, 30_001) == FREED
    assert lockout_upkeep.swept(replace(FULL, until=99_999), 30_001).failure_count == 2
    counted = replace(FREED, failure_count=1, reset_after_ms=10, last_cooldown_ms=5)
    assert lockout_upkeep.swept(counted, 15) is counted
    assert lockout_upkeep.swept(counted, 16) == FREED
    assert lockout_upkeep.swept(FREED, 99_999) is FREED


def test_beyond_the_limit_the_oldest_idle_rows_go_first() -> None:
    def row(model: str, until: int | None, failed: int | None) -> ModelLockState:
        return ModelLockState("p", "c", "exact", model, until=until, failure_count=1, last_failure_at=failed)

    idle = [row("a", None, 90), row("b", None, 20), row("c", None, None), replace(FREED, until=None)]
    locks = [row("d", 200, 1), row("e", 50, 90), row("f", 40, 95)]
    rows = [*idle, *locks]
    names = [[each.model_key for each in lockout_upkeep.evictions(rows, 100, limit)] for limit in (5, 3, 2, 1, 0)]
    assert names == [[], [], ["f", "c"], ["f", "e", "c", "b"], ["f", "e", "c", "b", "a"]]
    assert lockout_upkeep.LOCK_LIMIT == 1_000
    early = [row("e", None, 1), row("z", None, 0)]
    assert [each.model_key for each in lockout_upkeep.evictions(early, 0, 1)] == ["z"]


def test_a_listing_has_every_field_and_the_first_to_end_on_top() -> None:
    later = replace(FULL, until=10_001, model="", written_as="", connection="b")
    assert lockout_upkeep.listing([later, FULL, FREED], 10_000) == (
        LockListing("acme", "c", "m", "exact", "server_error", 10_000, 0, 2, "header"),
        LockListing("acme", "b", "m", "exact", "server_error", 10_001, 1, 2, "header"),
    )
    same = [replace(FULL, connection=c, model=m) for c, m in (("d", "a"), ("c", "z"), ("c", "y"))]
    assert [(each.connection, each.model) for each in lockout_upkeep.listing(same, 0)] == [
        ("c", "y"), ("c", "z"), ("d", "a")
    ]  # fmt: skip


# -- heard of, and removed -----------------------------------------------------------------------------------
def test_a_failure_is_heard_of_where_there_is_something_to_keep_and_it_is_news() -> None:
    heard = lockout.heard(FULL, 1_001)
    assert heard == replace(FULL, failure_heard_at=1_001)
    assert lockout.heard(FULL, 1_000) is FULL
    assert lockout.heard(heard, 1_001) == heard
    assert lockout.heard(replace(FULL, last_failure_at=None), 1).failure_heard_at == 1
    assert lockout.heard(replace(FULL, last_failure_at=0), 0).failure_heard_at is None
    counting = replace(FULL, until=None)
    assert lockout.heard(counting, 1_001).failure_heard_at == 1_001
    assert lockout.heard(replace(FULL, failure_count=0), 1_001).failure_heard_at == 1_001
    idle = replace(FULL, until=None, failure_count=0)
    assert lockout.heard(idle, 1_001) is idle


def test_an_older_success_than_the_newest_failure_decays_nothing() -> None:
    heard = replace(FULL, failure_heard_at=3_000)
    assert [lockout.is_fresh(heard, at) for at in (2_999, 3_000)] == [False, True]
    assert [lockout.is_fresh(FULL, at) for at in (999, 1_000)] == [False, True]
    assert lockout.decayed(heard, 2_999) is heard
    assert lockout.decayed(heard, 3_000) == replace(heard, failure_count=1)
    assert lockout.released(heard).failure_heard_at is None


def test_a_removed_model_is_locked_for_a_hundred_years_and_keeps_its_first_fact() -> None:
    row = ModelLockState("acme", "c", "family", "m")
    gone = lockout_removal.removed(row, PLACE, 5_000)
    assert gone == replace(
        row, model="m", written_as="bare", until=5_000 + 3_153_600_000_000, locked_at=5_000,
        reason="free_tier_drained", last_failure_at=5_000,
    )  # fmt: skip
    assert lockout_removal.removed(gone, PLACE, 9_000) is gone
    late = lockout_removal.removed(replace(row, last_failure_at=7_000), PLACE, 5_000)
    assert late.last_failure_at == 7_000
    ended = replace(gone, until=None)
    assert lockout_removal.removed(ended, PLACE, 9_000).until == 9_000 + 3_153_600_000_000
