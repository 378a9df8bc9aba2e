"""Whole rows and whole facts of the breaker: what a transition must keep, change and say, to the last field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain import breaker
from policy_service.domain.breaker import BreakerState, Effect, Override, ProbePermit, ReplicaOpen, State
from policy_service.domain.breaker_transitions import CountedFailure, count_failure, count_success, enter_half_open
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.profiles import BreakerProfile, KindThreshold

PROFILE = BreakerProfile(failure_threshold=3, degradation_threshold=2, reset_timeout_ms=1_000)
PERMIT = ProbePermit("p", 7, 7, "r1", "d1", 1_000, 2_000)
BUSY = BreakerState(
    "acme",
    "c1",
    state=State.DEGRADED,
    generation=6,
    generation_since=50,
    failure_count=2,
    last_failure_at=900,
    last_failure_kind="rate_limit",
    rate_limit_count=1,
    quota_exhausted_count=0,
    transient_count=1,
    open_cycle_count=1,
    last_event_at=900,
    quorum_replicas=("r1",),
    quorum_connections=("c1",),
    replica_opens=(ReplicaOpen("r1", 2_000),),
    closed_at=100,
    ramp_cycles=1,
    ramp_failures=2,
    ramp_asked=3,
    ramp_admitted=4,
    fact_id="old.0",
)
OPEN = replace(
    BUSY, state=State.OPEN, failure_count=3, reopen_at=2_000, half_open_alive=1, permits=(PERMIT,), closed_at=None
)
PROBING = replace(OPEN, state=State.HALF_OPEN, reopen_at=None, half_open_alive=0, generation=7, half_open_round=7)


def log(at: int = 0) -> FactLog:
    return FactLog(Cause("e", at, actor="op"))


def fact(at: int, before: str, after: str, reason: str, **more: Any) -> list[Fact]:
    known = {"provider": "acme", "connection": "c1", "actor": "op", "reason": reason, **more}
    return [Fact("e.0", at, "breaker", "acme::conn::c1", before, after, **known)]


# -- reads --------------------------------------------------------------------------------------------------
def test_a_read_shows_a_due_breaker_as_half_open_without_its_old_permits() -> None:
    assert breaker.refresh(OPEN, 1_999) is OPEN
    assert breaker.refresh(OPEN, 2_000) == replace(OPEN, state=State.HALF_OPEN, permits=(), half_open_alive=0)


def test_a_permit_holds_its_slot_up_to_its_expiry() -> None:
    assert breaker.live_permits(PROBING, 1_999) == (PERMIT,)
    assert breaker.live_permits(PROBING, 2_000) == ()
    assert breaker.live_permits(replace(PROBING, permits=(replace(PERMIT, reclaimed=True),)), 1_000) == ()


def test_the_wait_ends_with_the_first_permit_that_ends() -> None:
    two = replace(PROBING, permits=(PERMIT, replace(PERMIT, id="q", expires_at=1_500)), replica_opens=())
    profile = replace(PROFILE, half_open_probes=2)
    assert breaker.retry_after_ms(two, 1_000, profile) == 500
    assert breaker.retry_after_ms(two, 1_600, profile) is None
    assert breaker.admits(two, 1_499, profile) is False
    assert breaker.admits(two, 1_500, profile) is True


def test_an_open_breaker_says_how_long_and_a_forced_one_does_not() -> None:
    assert breaker.retry_after_ms(OPEN, 500, PROFILE) == 1_500
    assert breaker.retry_after_ms(replace(OPEN, override=Override.FORCE_OPEN), 500, PROFILE) is None
    assert breaker.blocks(OPEN, 1_999)
    assert not breaker.blocks(OPEN, 2_000)
    assert breaker.blocks(replace(BUSY, override=Override.FORCE_OPEN), 0)
    assert not breaker.blocks(replace(OPEN, override=Override.DISABLED), 0)


def test_one_replicas_own_open_time_binds_that_replica_until_its_end() -> None:
    closed = replace(BUSY, closed_at=None)
    assert breaker.retry_after_ms(closed, 1_500, PROFILE, "r1") == 500
    assert breaker.admits(closed, 1_999, PROFILE, "r1") is False
    assert breaker.admits(closed, 2_000, PROFILE, "r1") is True
    assert breaker.admits(closed, 1_000, PROFILE, "r2") is True


@pytest.mark.parametrize(
    ("generation", "since", "effect"),
    [
        (5, 0, Effect.STALE_GENERATION),
        (6, 0, Effect.NONE),
        (7, 0, Effect.FUTURE_GENERATION),
        (None, 49, Effect.STALE_GENERATION),
        (None, 50, Effect.NONE),
    ],
)
def test_evidence_belongs_to_a_generation_by_number_or_else_by_time(
    generation: int | None, since: int, effect: Effect
) -> None:
    assert breaker.generation_effect(BUSY, generation, since) is effect
    assert breaker.generation_effect(replace(BUSY, generation_since=None), None, since) is Effect.NONE


@pytest.mark.parametrize(
    ("cycles", "expected"), [(0, 100), (1, 100), (2, 100), (3, 200), (4, 400), (5, 700), (6, 700), (100, 700)]
)
def test_open_time_doubles_after_the_cycles_of_grace_up_to_the_cap(cycles: int, expected: int) -> None:
    profile = BreakerProfile(reset_timeout_ms=100, backoff_escalation_cycles=2, max_backoff_multiplier=7)
    assert breaker.open_ms(profile, cycles, "") == expected


def test_within_the_cycles_of_grace_no_cap_shortens_the_open_time() -> None:
    profile = BreakerProfile(reset_timeout_ms=100, backoff_escalation_cycles=2, max_backoff_multiplier=0)
    assert [breaker.open_ms(profile, cycles, "") for cycles in (1, 2, 3)] == [100, 100, 0]


def test_open_time_doubles_sixty_times_at_most() -> None:
    profile = BreakerProfile(reset_timeout_ms=1, backoff_escalation_cycles=0, max_backoff_multiplier=2**70)
    assert [breaker.open_ms(profile, cycles, "") for cycles in (59, 60, 61)] == [2**59, 2**60, 2**60]


def test_the_shape_of_a_ramp_at_its_edges() -> None:
    profile = replace(
        PROFILE,
        slow_start_enabled=True,
        slow_start_duration_ms=1_000,
        slow_start_min_share=0.1,
        slow_start_aggression=1.0,
    )
    row = BreakerState("acme", closed_at=1_000)
    assert [breaker.in_ramp(row, at, profile) for at in (999, 1_000, 1_999, 2_000)] == [False, True, True, False]
    assert [round(breaker.ramp_share(row, at, profile), 6) for at in (1_000, 1_050, 1_250, 1_500, 2_000)] == [
        0.1, 0.1, 0.25, 0.5, 1.0,
    ]  # fmt: skip
    assert breaker.ramp_share(row, 1_250, replace(profile, slow_start_aggression=2.0)) == 0.5
    assert breaker.ramp_share(row, 1_500, replace(profile, slow_start_aggression=0.5)) == 0.25
    assert breaker.ramp_share(row, 1_500, replace(profile, slow_start_aggression=0.0)) == 0.1
    assert breaker.needs_guard(row, 1_500, profile)
    assert not breaker.needs_guard(row, 2_000, profile)
    assert not breaker.needs_guard(replace(row, override=Override.DISABLED), 1_500, profile)
    assert not breaker.needs_guard(replace(row, state=State.OPEN, reopen_at=9_000), 1_500, profile)
    asked = [breaker.ramp_admits(replace(row, ramp_asked=n, ramp_admitted=1), 1_500, profile) for n in range(5)]
    assert asked == [False, False, True, True, True]
    assert breaker.ramp_admits(replace(row, ramp_asked=29, ramp_admitted=3), 1_000, profile) is False
    refused = replace(row, ramp_asked=1, ramp_admitted=1)
    assert breaker.retry_after_ms(refused, 1_250, profile) == 750


# -- transitions --------------------------------------------------------------------------------------------
def test_time_opens_a_round_and_says_so() -> None:
    facts = log(2_500)
    moved = enter_half_open(OPEN, 2_500, facts)
    expected = replace(
        OPEN, state=State.HALF_OPEN, generation=7, generation_since=2_500, half_open_round=7, half_open_alive=0,
        permits=(), reopen_at=None, last_event_at=2_500, fact_id="e.0",
    )  # fmt: skip
    assert moved == expected
    assert facts.facts == fact(2_500, "OPEN", "HALF_OPEN", "reset_timeout_elapsed", generation=7, failure_count=3)
    frozen = replace(OPEN, override=Override.FORCE_OPEN)
    assert enter_half_open(frozen, 2_500, log()) is frozen


def test_the_failure_at_the_threshold_trips_and_empties_the_round() -> None:
    facts = log(1_000)
    moved, effect = count_failure(BUSY, CountedFailure(1_000, "quota_exhausted"), PROFILE, facts)
    assert effect is Effect.COUNTED
    assert moved == replace(
        BUSY, state=State.OPEN, generation=7, generation_since=1_000, failure_count=3, last_failure_at=1_000,
        last_failure_kind="quota_exhausted", quota_exhausted_count=1, reopen_at=2_000, last_event_at=1_000,
        replica_opens=(), closed_at=None, ramp_cycles=0, ramp_failures=0, ramp_asked=0, ramp_admitted=0, fact_id="e.0",
    )  # fmt: skip
    assert facts.facts == fact(
        1_000, "DEGRADED", "OPEN", "failure_threshold", generation=7, failure_count=3, deadline_at=2_000
    )


def test_a_failure_that_degrades_starts_no_generation() -> None:
    facts = log(10)
    one = replace(BreakerState("acme", "c1"), failure_count=1, last_failure_at=5, transient_count=1)
    moved, _ = count_failure(one, CountedFailure(10), PROFILE, facts)
    assert moved == replace(
        one, state=State.DEGRADED, failure_count=2, last_failure_at=10, last_failure_kind="transient",
        transient_count=2, last_event_at=10, fact_id="e.0",
    )  # fmt: skip
    assert facts.facts == fact(10, "CLOSED", "DEGRADED", "degradation_threshold", failure_count=2)


def test_an_older_failure_counts_but_names_neither_time_nor_kind() -> None:
    quiet = replace(BUSY, failure_count=0)
    moved, _ = count_failure(quiet, CountedFailure(899, "quota_exhausted"), PROFILE, log())
    assert (moved.last_failure_at, moved.last_failure_kind, moved.quota_exhausted_count) == (900, "rate_limit", 1)
    same, _ = count_failure(quiet, CountedFailure(900, "quota_exhausted"), PROFILE, log())
    assert (same.last_failure_at, same.last_failure_kind) == (900, "quota_exhausted")


def test_a_success_that_recovers_subtracts_one_of_everything() -> None:
    facts = log(1_000)
    moved, effect = count_success(BUSY, 1_000, 900, PROFILE, facts)
    assert effect is Effect.COUNTED
    assert moved == replace(
        BUSY, state=State.CLOSED, failure_count=1, rate_limit_count=0, transient_count=0, last_event_at=1_000,
        fact_id="e.0",
    )  # fmt: skip
    assert facts.facts == fact(1_000, "DEGRADED", "CLOSED", "recovered", generation=6, failure_count=1)
    assert count_success(BUSY, 1_000, 899, PROFILE, log()) == (BUSY, Effect.STALE_SUCCESS)


def test_counting_in_a_row_a_success_empties_every_counter() -> None:
    moved, _ = count_success(
        replace(BUSY, rate_limit_count=5), 1_000, 900, replace(PROFILE, count_mode="consecutive"), log()
    )
    assert (moved.failure_count, moved.rate_limit_count, moved.transient_count) == (0, 0, 0)


def test_a_success_with_only_a_kind_left_to_subtract_is_counted() -> None:
    left = replace(BreakerState("acme"), transient_count=1)
    moved, effect = count_success(left, 5, 5, PROFILE, log())
    assert (moved.transient_count, moved.failure_count, effect) == (0, 0, Effect.COUNTED)
    assert count_success(BreakerState("acme"), 5, 5, PROFILE, log())[1] is Effect.FRESH


def test_a_failure_without_quorum_opens_for_its_replica_alone_and_says_so() -> None:
    profile = replace(PROFILE, quorum_enabled=True, quorum_min_replicas=2, quorum_min_connections=2)
    facts = log(1_000)
    moved, _ = count_failure(BUSY, CountedFailure(1_000, "rate_limit", "r1", "c1"), profile, facts)
    assert moved == replace(
        BUSY, failure_count=3, rate_limit_count=2, last_failure_at=1_000, last_event_at=1_000, fact_id="e.0",
        replica_opens=(ReplicaOpen("r1", 2_000),),
    )  # fmt: skip
    assert facts.facts == fact(
        1_000, "DEGRADED", "quorum_not_met", "quorum_not_met", generation=6, deadline_at=2_000, failure_count=3
    )


def test_a_replica_that_fails_again_keeps_its_longer_time_and_others_keep_theirs() -> None:
    profile = replace(PROFILE, quorum_enabled=True, quorum_min_replicas=3, quorum_min_connections=3)
    opens = (ReplicaOpen("r1", 5_000), ReplicaOpen("r2", 1_001), ReplicaOpen("r3", 1_000))
    moved, _ = count_failure(
        replace(BUSY, replica_opens=opens), CountedFailure(1_000, replica="r1", connection="c1"), profile, log()
    )
    assert moved.replica_opens == (ReplicaOpen("r2", 1_001), ReplicaOpen("r1", 5_000))


@pytest.mark.parametrize(
    ("replicas", "connections", "trips"),
    [(None, None, False), (1, None, True), (0, None, True), (None, 1, True), (2, 2, False)],
)
def test_a_quorum_is_lowered_to_what_exists(replicas: int | None, connections: int | None, trips: bool) -> None:
    profile = replace(PROFILE, quorum_enabled=True, quorum_min_replicas=2, quorum_min_connections=2)
    failure = CountedFailure(1_000, "", "r1", "c1", replicas=replicas, connections=connections)
    assert (count_failure(BUSY, failure, profile, log())[0].state is State.OPEN) is trips


def test_a_quorum_among_nobody_still_needs_a_name() -> None:
    profile = replace(PROFILE, quorum_enabled=True, quorum_min_replicas=2, quorum_min_connections=2)
    nobody = replace(BUSY, quorum_replicas=(), quorum_connections=())
    moved, _ = count_failure(nobody, CountedFailure(1_000, replicas=0, connections=0), profile, log())
    assert moved.state is State.DEGRADED


def test_names_of_a_quorum_are_kept_once_and_no_more_than_needed() -> None:
    profile = replace(PROFILE, failure_threshold=99, quorum_enabled=True, quorum_min_replicas=2)
    row = BreakerState("acme")
    for replica in ("", "r1", "r1", "r2", "r3"):
        row, _ = count_failure(row, CountedFailure(1, replica=replica), profile, log())
    assert row.quorum_replicas == ("r1", "r2")


def test_a_late_failure_trips_only_while_its_open_time_lasts() -> None:
    late = [count_failure(BUSY, CountedFailure(1_000, now=now), PROFILE, log())[0].state for now in (1_999, 2_000)]
    assert late == [State.OPEN, State.DEGRADED]


@pytest.mark.parametrize(
    ("rule", "count", "reason"),
    [
        (KindThreshold(2), 1, ""), (KindThreshold(2), 2, "kind_threshold"), (KindThreshold(2, True), 1, ""),
        (KindThreshold(immediate=True), 1, "kind_threshold"), (KindThreshold(), 2, ""),
        (KindThreshold(), 3, "kind_threshold"), (KindThreshold(9), 3, "failure_threshold"),
    ],
)  # fmt: skip
def test_a_kind_has_its_own_threshold_or_the_first_or_the_common_one(
    rule: KindThreshold, count: int, reason: str
) -> None:
    profile = replace(PROFILE, kind_thresholds={"rate_limit": rule})
    facts, row = log(), BreakerState("acme")
    for at in range(count):
        row, _ = count_failure(row, CountedFailure(at, "rate_limit"), profile, facts)
    assert (row.state is State.OPEN) is bool(reason)
    assert not reason or facts.facts[-1].reason == reason
    others, _ = count_failure(BreakerState("acme"), CountedFailure(0, "transient"), profile, log())
    assert others.state is State.CLOSED


def test_jitter_lengthens_the_open_time_but_not_what_a_late_failure_is_judged_by() -> None:
    profile = replace(PROFILE, reopen_jitter=0.5)
    drawn = [count_failure(BUSY, CountedFailure(1_000, draw=draw), profile, log())[0].reopen_at for draw in (0.0, 0.5)]
    assert drawn == [2_000, 2_250]
    late = [count_failure(BUSY, CountedFailure(1_000, draw=0.9, now=now), profile, log())[0] for now in (1_999, 2_000)]
    assert [row.state for row in late] == [State.OPEN, State.DEGRADED]


@pytest.mark.parametrize(("jitter", "draw", "longer"), [(0.1, 0.7, 2_100), (0.2, 0.5, 3_000), (0.3, 0.0, 0)])
def test_a_jitter_without_a_fraction_lasts_no_millisecond_longer(jitter: float, draw: float, longer: int) -> None:
    profile = replace(PROFILE, failure_threshold=1, reset_timeout_ms=30_000, reopen_jitter=jitter)
    opened, _ = count_failure(BreakerState("acme"), CountedFailure(1_000, draw=draw), profile, log())
    assert opened.reopen_at == 1_000 + 30_000 + longer


def test_a_fall_back_to_the_degradation_threshold_recovers_and_one_above_it_does_not() -> None:
    above = replace(BUSY, failure_count=4)
    moved, _ = count_success(above, 1_000, 1_000, PROFILE, log())
    assert (moved.state, moved.failure_count, moved.last_event_at) == (State.DEGRADED, 3, 1_000)
    moved, _ = count_success(moved, 1_001, 1_001, PROFILE, log())
    assert (moved.state, moved.failure_count, moved.last_event_at) == (State.CLOSED, 2, 1_001)
