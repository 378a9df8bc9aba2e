"""Transitions, permits, verdicts, controls and options of the circuit breaker, one claim a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.domain import breaker
from policy_service.domain.breaker import BreakerState, Effect, Override, ProbePermit, State
from policy_service.domain.breaker_burst import BurstState, accept, clear, expired, suppresses
from policy_service.domain.breaker_controls import (
    clear_override,
    disable,
    force_open,
    forget,
    load_row,
    read_state,
    reset,
    surplus,
)
from policy_service.domain.breaker_probe import (
    Acquired,
    Evidence,
    HeldPermit,
    ProbeAnswer,
    ProbeRequest,
    Refusal,
    Refused,
    Verdict,
    acquire,
    acquire_local,
    judge,
    release_permit,
    renew_permit,
    verdict_of,
)
from policy_service.domain.breaker_transitions import (
    CountedFailure,
    count_failure,
    count_success,
    enter_half_open,
)
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.profiles import BreakerProfile

PROFILE = BreakerProfile(failure_threshold=3, degradation_threshold=2, reset_timeout_ms=1_000)
CLOSED = BreakerState("acme")
HALF_OPEN = BreakerState(
    "acme", state=State.HALF_OPEN, failure_count=3, last_failure_at=0, generation=3, half_open_round=3
)


def log(at: int = 0) -> FactLog:
    return FactLog(Cause("e", at))


def fail(state: BreakerState, at: int, profile: BreakerProfile = PROFILE, facts: FactLog | None = None) -> BreakerState:
    return count_failure(state, CountedFailure(at), profile, facts or log(at))[0]


def fail_times(count: int, at: int = 0, profile: BreakerProfile = PROFILE) -> BreakerState:
    state = CLOSED
    for _ in range(count):
        state = fail(state, at, profile)
    return state


def take(
    state: BreakerState, now: int, permit_id: str, profile: BreakerProfile = PROFILE, replica: str = "r1"
) -> tuple[BreakerState, Acquired | Refused]:
    return acquire(state, now, profile, ProbeRequest(permit_id, replica), log(now))


def answer(status: int | None, at: int = 0, exclusion: str = "", is_network_error: bool = False) -> ProbeAnswer:
    return ProbeAnswer(status, exclusion, is_network_error, at)


def settle(
    state: BreakerState, permit_id: str, status: int, at: int, profile: BreakerProfile = PROFILE
) -> tuple[BreakerState, Verdict, Effect]:
    return judge(state, HeldPermit(permit_id, state.generation), answer(status, at), Evidence(at), profile, log(at))


# --- counting ---------------------------------------------------------------------------------------------
def test_threshold_opens_and_fixes_the_end_at_the_trip() -> None:
    state = fail_times(3, at=500)
    assert (state.state, state.reopen_at, state.generation) == (State.OPEN, 1_500, 2)


def test_degrading_and_recovering_leave_the_generation_alone() -> None:
    degraded = fail_times(2)
    recovered, effect = count_success(degraded, 5, 5, PROFILE, log())
    assert (degraded.state, degraded.generation) == (State.DEGRADED, 1)
    assert (recovered.state, recovered.generation, effect) == (State.CLOSED, 1, Effect.COUNTED)


def test_consecutive_mode_empties_the_count_on_one_success() -> None:
    profile = replace(PROFILE, count_mode="consecutive")
    recovered, _ = count_success(fail_times(2, profile=profile), 5, 5, profile, log())
    assert (recovered.failure_count, recovered.transient_count, recovered.state) == (0, 0, State.CLOSED)


def test_success_answered_before_the_newest_failure_is_stale() -> None:
    state = fail_times(2, at=100)
    after, effect = count_success(state, 200, 99, PROFILE, log())
    assert (after, effect) == (state, Effect.STALE_SUCCESS)


def test_failure_in_open_changes_no_field() -> None:
    state = fail_times(3)
    after, effect = count_failure(state, CountedFailure(10), PROFILE, log())
    assert (after, effect) == (state, Effect.IGNORED)


def test_unknown_kind_counts_as_transient() -> None:
    state, _ = count_failure(CLOSED, CountedFailure(0, "sunspots"), PROFILE, log())
    assert (state.transient_count, state.last_failure_kind) == (1, "transient")


def test_late_failure_adds_to_the_count_but_keeps_newer_time_and_kind() -> None:
    state, _ = count_failure(CLOSED, CountedFailure(100, "rate_limit"), PROFILE, log())
    late, _ = count_failure(state, CountedFailure(40), PROFILE, log())
    assert (late.failure_count, late.last_failure_at, late.last_failure_kind) == (2, 100, "rate_limit")


def test_late_failure_does_not_trip_when_the_open_time_is_over() -> None:
    state = replace(fail_times(2, at=0), last_event_at=5_000)
    late = fail(state, 10)
    assert (late.state, late.failure_count) == (State.DEGRADED, 3)


def test_late_failure_trips_while_the_open_time_still_runs() -> None:
    state = replace(fail_times(2, at=0), last_event_at=900)
    assert fail(state, 10).state is State.OPEN


def test_spooled_failure_folded_long_after_does_not_trip() -> None:
    state, _ = count_failure(fail_times(2), CountedFailure(10, now=60_000), PROFILE, log())
    assert state.state is State.DEGRADED


def test_reset_timeout_zero_still_trips() -> None:
    state = fail(CLOSED, 5, replace(PROFILE, failure_threshold=1, reset_timeout_ms=0))
    assert (state.state, state.reopen_at) == (State.OPEN, 5)


# --- time -------------------------------------------------------------------------------------------------
def test_open_reads_as_half_open_at_its_very_end_and_is_stored_once_with_one_fact() -> None:
    state = fail_times(3)
    facts = log()
    assert breaker.refresh(state, 999).state is State.OPEN
    assert breaker.refresh(state, 1_000).state is State.HALF_OPEN
    stored = enter_half_open(enter_half_open(state, 1_000, facts), 1_001, facts)
    assert (stored.state, stored.generation, stored.half_open_round) == (State.HALF_OPEN, 3, 3)
    assert [(fact.from_state, fact.to_state) for fact in facts.facts] == [("OPEN", "HALF_OPEN")]


def test_refresh_leaves_the_generation_of_the_committed_row() -> None:
    state = fail_times(3)
    assert breaker.refresh(state, 1_000).generation == state.generation


@pytest.mark.parametrize(("cycles", "seconds"), [(0, 30), (3, 30), (4, 60), (5, 120), (9, 120), (500, 120)])
def test_open_time_doubles_after_the_escalation_and_is_capped(cycles: int, seconds: int) -> None:
    profile = BreakerProfile(reset_timeout_ms=30_000, max_backoff_multiplier=4, backoff_escalation_cycles=3)
    assert breaker.open_ms(profile, cycles, "") == seconds * 1_000


def test_jitter_only_lengthens_and_is_drawn_once() -> None:
    profile = replace(PROFILE, failure_threshold=1, reopen_jitter=0.5)
    state, _ = count_failure(CLOSED, CountedFailure(0, draw=0.5), profile, log())
    assert state.reopen_at == 1_250


# --- permits ----------------------------------------------------------------------------------------------
def test_reclaim_frees_the_slot_and_raises_the_generation() -> None:
    held, _ = take(HALF_OPEN, 0, "p1")
    taken, result = take(held, 1_000, "p2")
    assert isinstance(result, Acquired)
    assert taken.generation == held.generation + 1
    assert [permit.id for permit in breaker.live_permits(taken, 1_000)] == ["p2"]


def test_refused_acquires_never_extend_an_expiry() -> None:
    held, _ = take(HALF_OPEN, 0, "p1")
    after, result = take(held, 999, "p2")
    assert after == held
    assert result == Refused(Refusal.PROBE_IN_FLIGHT, 1)


def test_same_permit_id_gets_the_same_permit_again() -> None:
    held, first = take(HALF_OPEN, 0, "p1")
    again, second = take(held, 5, "p1")
    assert again == held
    assert first == second


def test_alive_verdict_of_a_reclaimed_permit_closes_in_the_same_round() -> None:
    held, _ = take(HALF_OPEN, 0, "p1")
    taken, _ = take(held, 1_000, "p2")
    closed, verdict, effect = settle(taken, "p1", 200, 1_500)
    assert (closed.state, verdict, effect) == (State.CLOSED, Verdict.ALIVE, Effect.COUNTED)


def test_down_verdict_of_a_reclaimed_permit_is_statistics() -> None:
    held, _ = take(HALF_OPEN, 0, "p1")
    taken, _ = take(held, 1_000, "p2")
    after, _, effect = settle(taken, "p1", 503, 1_500)
    assert (after, effect) == (taken, Effect.VOID_PERMIT)


def test_reclaim_of_another_slot_does_not_void_a_valid_permit() -> None:
    profile = replace(PROFILE, half_open_probes=2)
    state, _ = take(HALF_OPEN, 0, "p1", profile)
    state, _ = take(state, 600, "p2", profile)
    state, _ = take(state, 1_000, "p3", profile)
    closed, _, effect = settle(state, "p2", 200, 1_100, profile)
    assert (closed.state, effect) == (State.CLOSED, Effect.COUNTED)


def test_calls_of_45_s_against_a_reset_of_30_s_close_the_breaker() -> None:
    profile = replace(PROFILE, reset_timeout_ms=30_000)
    state, _ = take(HALF_OPEN, 0, "p1", profile)
    state, _ = take(state, 30_000, "p2", profile)
    closed, _, _ = settle(state, "p1", 200, 45_000, profile)
    assert closed.state is State.CLOSED


def test_renewed_permit_outlives_its_first_expiry() -> None:
    held, _ = take(HALF_OPEN, 0, "p1")
    renewed, permit = renew_permit(held, "p1", 900, PROFILE)
    assert permit is not None
    assert permit.expires_at == 1_900
    assert isinstance(take(renewed, 1_500, "p2")[1], Refused)


def test_reclaimed_permit_is_not_renewed() -> None:
    held, _ = take(HALF_OPEN, 0, "p1")
    taken, _ = take(held, 1_000, "p2")
    assert renew_permit(taken, "p1", 1_001, PROFILE) == (taken, None)


def test_released_permit_frees_its_slot_without_a_transition() -> None:
    held, _ = take(HALF_OPEN, 0, "p1")
    assert release_permit(held, "p1").permits == ()


def test_no_permit_survives_the_end_of_its_round() -> None:
    profile = replace(PROFILE, half_open_probes=2)
    state, _ = take(HALF_OPEN, 0, "p1", profile)
    state, _ = take(state, 0, "p2", profile)
    opened, _, _ = settle(state, "p2", 503, 10, profile)
    after, _, effect = settle(opened, "p1", 200, 20, profile)
    assert opened.permits == ()
    assert (after, effect) == (opened, Effect.VOID_PERMIT)


def test_reclaimed_permits_on_record_are_bounded() -> None:
    state = HALF_OPEN
    for turn in range(200):
        state, _ = take(state, turn * 1_000, f"p{turn}")
    assert len(state.permits) == 65


def test_zero_slots_admit_nobody_and_promise_no_time() -> None:
    _, result = take(HALF_OPEN, 0, "p1", replace(PROFILE, half_open_probes=0))
    assert result == Refused(Refusal.PROBE_IN_FLIGHT, None)


# --- verdicts ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, Verdict.ALIVE),
        (304, Verdict.ALIVE),
        (401, Verdict.ALIVE),
        (429, Verdict.ALIVE),
        (408, Verdict.DOWN),
        (499, Verdict.INCONCLUSIVE),
        (504, Verdict.DOWN),
        (501, Verdict.INCONCLUSIVE),
        (None, Verdict.INCONCLUSIVE),
    ],
)
def test_verdict_by_status(status: int | None, verdict: Verdict) -> None:
    assert verdict_of(answer(status, at=5), expires_at=10) is verdict


def test_late_4xx_is_inconclusive_but_late_2xx_is_alive() -> None:
    assert verdict_of(answer(429, at=10), expires_at=10) is Verdict.INCONCLUSIVE
    assert verdict_of(answer(200, at=10), expires_at=10) is Verdict.ALIVE


def test_excluded_outcome_is_inconclusive_whatever_its_status() -> None:
    assert verdict_of(answer(503, exclusion="abort"), 10) is Verdict.INCONCLUSIVE


def test_network_error_is_down() -> None:
    assert verdict_of(answer(520, is_network_error=True), 10) is Verdict.DOWN


# --- probes without the store -----------------------------------------------------------------------------
def test_local_probe_is_one_per_replica_and_reset_timeout() -> None:
    opened = fail_times(3)
    first = acquire_local(opened, 1_000, PROFILE, ProbeRequest("l1"), None)
    second = acquire_local(opened, 1_999, PROFILE, ProbeRequest("l2"), 1_000)
    third = acquire_local(opened, 2_000, PROFILE, ProbeRequest("l3"), 1_000)
    assert isinstance(first, Acquired)
    assert first.permit is not None
    assert second == Refused(Refusal.PROBE_IN_FLIGHT, 1)
    assert isinstance(third, Acquired)


def local_verdict(state: BreakerState, generation: int, status: int, at: int) -> tuple[BreakerState, Effect]:
    held = HeldPermit("local", generation, is_local=True)
    after, _, effect = judge(state, held, answer(status, at), Evidence(at), PROFILE, log(at))
    return after, effect


def test_local_verdict_counts_across_the_entry_to_half_open() -> None:
    opened = fail_times(3)
    after, effect = local_verdict(opened, opened.generation, 200, 1_500)
    assert (after.state, effect) == (State.CLOSED, Effect.COUNTED)


def test_local_verdict_is_statistics_once_the_generation_moved_on() -> None:
    opened = fail_times(3)
    taken, _ = take(opened, 1_000, "p1")
    reclaimed, _ = take(taken, 2_000, "p2")
    after, effect = local_verdict(reclaimed, opened.generation, 503, 2_500)
    assert (after, effect) == (reclaimed, Effect.VOID_PERMIT)


# --- controls ---------------------------------------------------------------------------------------------
def test_control_voids_live_permits_and_freezes_the_state_below() -> None:
    held, _ = take(HALF_OPEN, 0, "p1")
    forced = force_open(held, 10, log())
    after, _, effect = settle(forced, "p1", 200, 20)
    assert forced.permits == ()
    assert (after, effect) == (forced, Effect.OVERRIDDEN)
    assert forced.state is State.HALF_OPEN


def test_control_set_twice_is_one_fact() -> None:
    facts = log()
    forced = force_open(CLOSED, 0, facts)
    assert force_open(forced, 1, facts) is forced
    assert len(facts.facts) == 1


def test_disabled_breaker_counts_nothing_and_admits_everything() -> None:
    off = disable(fail_times(3), 0, log())
    assert fail(off, 1) == off
    assert take(off, 1, "p")[1] == Acquired(None)
    assert breaker.admits(off, 1, PROFILE)


def test_cleared_control_shows_what_time_did_meanwhile() -> None:
    facts = log()
    cleared = clear_override(force_open(fail_times(3), 10, facts), 5_000, facts)
    assert cleared.state is State.HALF_OPEN
    assert [fact.to_state for fact in facts.facts] == ["force_open", "OPEN", "HALF_OPEN"]


def test_reset_clears_the_override_and_fences_off_old_evidence() -> None:
    cleared = reset(force_open(fail_times(3), 10, log()), 20, log())
    assert (cleared.state, cleared.override, cleared.failure_count) == (State.CLOSED, Override.NONE, 0)
    assert breaker.generation_effect(cleared, 1, 20) is Effect.STALE_GENERATION


# --- generations ------------------------------------------------------------------------------------------
def test_report_without_a_number_takes_the_generation_of_its_instant() -> None:
    opened = fail_times(3, at=100)
    assert breaker.generation_effect(opened, None, 99) is Effect.STALE_GENERATION
    assert breaker.generation_effect(opened, None, 100) is Effect.NONE


def test_generation_ahead_of_the_row_is_told_apart() -> None:
    assert breaker.generation_effect(CLOSED, 2, 0) is Effect.FUTURE_GENERATION


# --- loading ----------------------------------------------------------------------------------------------
def test_stored_state_outside_the_list_reads_as_closed() -> None:
    assert read_state("MELTED") is State.CLOSED
    row = replace(CLOSED, last_failure_kind="sunspots")
    assert load_row(row, PROFILE).last_failure_kind == ""


def test_stored_open_without_an_end_gets_one_from_the_last_failure() -> None:
    row = replace(CLOSED, state=State.OPEN, last_failure_at=500)
    assert load_row(row, PROFILE).reopen_at == 1_500


def test_stored_open_without_any_time_reads_as_half_open() -> None:
    row = load_row(replace(CLOSED, state=State.OPEN), PROFILE)
    assert breaker.refresh(row, 0).state is State.HALF_OPEN


def test_quiet_rows_shrink_to_their_generation_after_half_an_hour() -> None:
    row = replace(CLOSED, last_failure_at=0, generation=7)
    assert forget([row], 1_800_000) == []
    assert forget([row], 1_800_001) == [replace(CLOSED, generation=7)]
    heard = replace(row, failure_heard_at=1)
    assert forget([heard], 1_800_001) == []
    assert forget([heard], 1_800_002) == [replace(CLOSED, generation=7)]


def test_idle_rows_beyond_five_hundred_go_the_longest_idle_first() -> None:
    busy = replace(CLOSED, provider="busy", failure_count=1, last_failure_at=0)
    controlled = replace(CLOSED, provider="held", override=Override.DISABLED)
    idle = [replace(CLOSED, provider=f"p{n:03}", last_failure_at=1_000 - n) for n in range(500)]
    assert surplus([*idle[:498], busy, controlled]) == []
    assert [row.provider for row in surplus([*idle, busy, controlled])] == ["p499", "p498"]
    assert surplus([busy] * 600) == []
    oldest = idle[499]
    assert forget([*idle, busy], 1_000, {oldest.key, busy.key}) == [replace(CLOSED, provider="p499")]


# --- options ----------------------------------------------------------------------------------------------
QUORUM = replace(PROFILE, quorum_enabled=True)


def quorum_failures(*reporters: tuple[str, str], replicas: int | None = None) -> BreakerState:
    state = CLOSED
    for at, (replica, connection) in enumerate(reporters):
        failure = CountedFailure(at, replica=replica, connection=connection, replicas=replicas)
        state, _ = count_failure(state, failure, QUORUM, log(at))
    return state


def test_unmet_quorum_opens_for_the_reporting_replica_alone() -> None:
    state = quorum_failures(("r1", "c1"), ("r1", "c1"), ("r1", "c1"))
    assert state.state is State.DEGRADED
    assert not breaker.admits(state, 2, QUORUM, "r1")
    assert breaker.retry_after_ms(state, 2, QUORUM, "r1") == 1_000
    assert breaker.admits(state, 2, QUORUM, "r2")
    assert breaker.admits(state, 1_002, QUORUM, "r1")


def test_quorum_is_met_by_replicas_or_by_connections() -> None:
    assert quorum_failures(("r1", "c1"), ("r1", "c1"), ("r2", "c1")).state is State.OPEN
    assert quorum_failures(("r1", "c1"), ("r1", "c1"), ("r1", "c2")).state is State.OPEN


def test_quorum_is_lowered_to_the_replicas_that_exist() -> None:
    assert quorum_failures(("r1", "c1"), ("r1", "c1"), ("r1", "c1"), replicas=1).state is State.OPEN


RAMP = replace(PROFILE, slow_start_enabled=True, slow_start_duration_ms=10_000)


def closed_in_ramp(cycles: int = 3) -> BreakerState:
    state, _ = take(replace(HALF_OPEN, open_cycle_count=cycles), 0, "p1", RAMP)
    return settle(state, "p1", 200, 0, RAMP)[0]


def test_slow_start_admits_at_most_its_share_and_the_first_call_always() -> None:
    state, admitted = closed_in_ramp(), 0
    for turn in range(100):
        state, result = take(state, 0, f"a{turn}", RAMP)
        admitted += isinstance(result, Acquired)
        assert turn > 0 or admitted == 1
    assert admitted == 10


def test_slow_start_share_grows_with_time_and_ends() -> None:
    state = closed_in_ramp()
    assert breaker.ramp_share(state, 5_000, RAMP) == pytest.approx(0.5)
    assert breaker.ramp_share(state, 10_000, RAMP) == 1.0
    assert not breaker.needs_guard(state, 10_000, RAMP)


def test_failures_inside_the_ramp_reopen_and_continue_the_cycles() -> None:
    state = fail(fail(closed_in_ramp(), 1_000, RAMP), 1_001, RAMP)
    assert (state.state, state.open_cycle_count) == (State.OPEN, 4)


def test_ramp_failures_are_forgotten_when_the_ramp_ends() -> None:
    state = fail(fail(closed_in_ramp(), 1_000, RAMP), 10_000, RAMP)
    assert state.state is State.DEGRADED


# --- de-duplication ---------------------------------------------------------------------------------------
def test_burst_window_is_open_at_its_end_and_symmetric_for_late_failures() -> None:
    guard = accept(BurstState("acme", "c1"), 10_000)
    assert suppresses(guard, 14_999)
    assert not suppresses(guard, 15_000)
    assert suppresses(guard, 5_001)
    assert not suppresses(guard, 5_000)


def test_late_failure_does_not_move_the_burst_time_back() -> None:
    guard = BurstState("acme", "c1", 10_000)
    assert accept(guard, 1_000) == guard


def test_success_answered_before_the_burst_leaves_it() -> None:
    guard = BurstState("acme", "c1", 10_000)
    assert clear(guard, 9_999) == guard
    assert clear(guard, 10_000).is_default


def test_sweep_drops_what_is_past_its_window() -> None:
    fresh, old = BurstState("a", "c1", 10_000), BurstState("a", "c2", 1_000)
    assert expired([fresh, old], 10_001) == [old]


def test_permit_rows_say_who_holds_them() -> None:
    _, result = take(HALF_OPEN, 7, "p1", replica="r9")
    assert isinstance(result, Acquired)
    assert result.permit == ProbePermit("p1", 3, 3, "r9", "", 7, 1_007)
