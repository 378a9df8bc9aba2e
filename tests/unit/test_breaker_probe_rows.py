"""Whole rows of the breaker after probes, controls and bursts (spec/breaker.md sections 5, 8, 10, 11)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain.breaker import BreakerState, Effect, Override, ProbePermit, State
from policy_service.domain.breaker_burst import (
    MAX_CONNECTION_KEYS,
    MAX_PROVIDER_KEYS,
    BurstState,
    accept,
    clear,
    expired,
    suppresses,
)
from policy_service.domain.breaker_controls import (
    clear_override,
    disable,
    force_open,
    forget,
    is_forgettable,
    load_row,
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
from tests.unit.test_breaker_rows import BUSY, OPEN, PERMIT, PROBING, PROFILE, fact, log


# -- probes -------------------------------------------------------------------------------------------------
def test_a_permit_says_who_may_probe_how_long() -> None:
    request = ProbeRequest("q", "r2", "d2")
    moved, answer = acquire(replace(PROBING, permits=()), 1_000, PROFILE, request, log())
    granted = ProbePermit("q", 7, 7, "r2", "d2", 1_000, 2_000)
    assert answer == Acquired(granted)
    assert moved == replace(PROBING, permits=(granted,))


def test_the_same_id_gets_its_permit_again_until_it_expires() -> None:
    again, answer = acquire(PROBING, 1_999, PROFILE, ProbeRequest("p", "r2"), log())
    moved = replace(PERMIT, replica="r2")
    assert (again, answer) == (replace(PROBING, permits=(moved,)), Acquired(moved))
    renewed, answer = acquire(PROBING, 2_000, PROFILE, ProbeRequest("p", "r2"), log())
    granted = ProbePermit("p", 8, 7, "r2", "", 2_000, 3_000)
    assert answer == Acquired(granted)
    assert renewed == replace(PROBING, generation=8, generation_since=2_000, permits=(granted,))


def test_an_expired_permit_loses_its_slot_to_the_next_and_stays_on_record() -> None:
    moved, _ = acquire(PROBING, 2_000, PROFILE, ProbeRequest("q", "r2", "d2"), log())
    assert moved.permits == (replace(PERMIT, reclaimed=True), ProbePermit("q", 8, 7, "r2", "d2", 2_000, 3_000))
    full, refusal = acquire(PROBING, 1_999, PROFILE, ProbeRequest("q"), log())
    assert (full, refusal) == (PROBING, Refused(Refusal.PROBE_IN_FLIGHT, 1))


def test_releasing_frees_the_named_slot_only() -> None:
    two = replace(PROBING, permits=(PERMIT, replace(PERMIT, id="q")))
    assert release_permit(two, "p") == replace(PROBING, permits=(replace(PERMIT, id="q"),))
    reclaimed = replace(PROBING, permits=(replace(PERMIT, reclaimed=True),))
    assert release_permit(reclaimed, "p") == reclaimed


def test_renewing_moves_the_end_of_the_named_permit_only_and_never_back() -> None:
    other = replace(PERMIT, id="q")
    moved, renewed = renew_permit(replace(PROBING, permits=(PERMIT, other)), "p", 1_500, PROFILE)
    assert renewed == replace(PERMIT, expires_at=2_500)
    assert moved == replace(PROBING, permits=(renewed, other))
    assert renew_permit(PROBING, "p", 500, PROFILE) == (PROBING, PERMIT)
    assert renew_permit(PROBING, "none", 500, PROFILE) == (PROBING, None)


@pytest.mark.parametrize(
    ("status", "at", "verdict"),
    [
        (200, 9_999, Verdict.ALIVE), (399, 9_999, Verdict.ALIVE), (199, 0, Verdict.INCONCLUSIVE),
        (400, 1_999, Verdict.ALIVE), (400, 2_000, Verdict.INCONCLUSIVE), (498, 1_999, Verdict.ALIVE),
        (499, 1_999, Verdict.INCONCLUSIVE), (500, 0, Verdict.DOWN), (None, 0, Verdict.INCONCLUSIVE),
    ],
)  # fmt: skip
def test_verdicts_at_their_edges(status: int | None, at: int, verdict: Verdict) -> None:
    assert verdict_of(ProbeAnswer(status, "", False, at), 2_000) is verdict


def test_a_probe_that_finds_it_down_opens_for_a_longer_round() -> None:
    facts = log(1_500)
    held, down = HeldPermit("p", 7), ProbeAnswer(503, "", False, 1_500)
    moved, verdict, effect = judge(PROBING, held, down, Evidence(1_500, "transient"), PROFILE, facts)
    assert (verdict, effect) == (Verdict.DOWN, Effect.COUNTED)
    assert moved == replace(
        PROBING, state=State.OPEN, generation=8, generation_since=1_500, failure_count=4, last_failure_at=1_500,
        last_failure_kind="transient", transient_count=2, open_cycle_count=2, reopen_at=2_500, permits=(),
        last_event_at=1_500, replica_opens=(), ramp_cycles=0, ramp_failures=0, ramp_asked=0, ramp_admitted=0,
        fact_id="e.0",
    )  # fmt: skip
    assert facts.facts == fact(
        1_500, "HALF_OPEN", "OPEN", "probe_down", generation=8, deadline_at=2_500, failure_count=4
    )


def test_a_down_verdict_empties_the_count_of_those_alive() -> None:
    half = replace(PROBING, half_open_alive=1)
    held, down = HeldPermit("p", 7), ProbeAnswer(503, "", False, 1_500)
    moved, *_ = judge(half, held, down, Evidence(1_500, "transient"), PROFILE, log(1_500))
    assert moved.half_open_alive == 0


def test_a_probe_that_finds_it_alive_counts_towards_closing_and_then_closes() -> None:
    profile = replace(PROFILE, successes_to_close=2)
    held, alive = HeldPermit("p", 7), ProbeAnswer(200, "", False, 1_500)
    first, *_ = judge(PROBING, held, alive, Evidence(1_500), profile, log())
    assert first == replace(PROBING, permits=(), half_open_alive=1, last_event_at=1_500)
    facts = log(1_600)
    again = replace(first, permits=(PERMIT,))
    closed, *_ = judge(again, held, alive, Evidence(1_600), profile, facts)
    assert closed == BreakerState(
        "acme", "c1", generation=8, generation_since=1_600, last_failure_at=900, half_open_round=7,
        last_event_at=1_600, fact_id="e.0",
    )  # fmt: skip
    assert facts.facts == fact(1_600, "HALF_OPEN", "CLOSED", "probe_alive", generation=8, failure_count=0)


def test_a_close_begins_the_ramp_with_the_cycles_of_before() -> None:
    profile = replace(PROFILE, successes_to_close=1, slow_start_enabled=True)
    held, alive = HeldPermit("p", 7), ProbeAnswer(200, "", False, 1_500)
    closed, *_ = judge(PROBING, held, alive, Evidence(1_500), profile, log())
    assert (closed.closed_at, closed.ramp_cycles, closed.open_cycle_count) == (1_500, 1, 0)


@pytest.mark.parametrize(
    ("held_generation", "round_", "generation", "has_say"),
    [(7, 7, 7, True), (6, 7, 7, True), (5, 7, 7, False), (6, 6, 7, False), (8, 7, 7, False)],
)
def test_a_local_permit_speaks_for_its_generation_or_the_round_entered_since(
    held_generation: int, round_: int, generation: int, has_say: bool
) -> None:
    row = replace(PROBING, permits=(), generation=generation, half_open_round=round_)
    held, alive = HeldPermit("local", held_generation, is_local=True), ProbeAnswer(200, "", False, 1)
    assert (judge(row, held, alive, Evidence(1_000), PROFILE, log())[2] is Effect.COUNTED) is has_say


def test_without_the_store_one_probe_goes_each_reset_timeout() -> None:
    row, request = replace(PROBING, permits=()), ProbeRequest("q", "r1", "d")
    granted = Acquired(ProbePermit("q", 7, 7, "r1", "d", 1_000, 2_000))
    assert acquire_local(row, 1_000, PROFILE, request, None) == granted
    assert acquire_local(row, 1_000, PROFILE, request, 0) == granted
    assert acquire_local(row, 1_000, PROFILE, request, 1) == Refused(Refusal.PROBE_IN_FLIGHT, 1)
    assert acquire_local(OPEN, 1_500, PROFILE, request, None) == Refused(Refusal.CIRCUIT_OPEN, 500)
    assert acquire_local(BUSY, 1_500, PROFILE, request, 1_499) == Acquired()
    assert acquire_local(replace(OPEN, override=Override.DISABLED), 0, PROFILE, request, None) == Acquired()
    forced = replace(BUSY, override=Override.FORCE_OPEN)
    assert acquire_local(forced, 0, PROFILE, request, None) == Refused(Refusal.FORCED_OPEN)


# -- controls -----------------------------------------------------------------------------------------------
def test_a_reset_keeps_the_name_and_the_generation_alone() -> None:
    facts = log(3_000)
    assert reset(replace(PROBING, half_open_round=7), 3_000, facts) == BreakerState(
        "acme", "c1", generation=8, generation_since=3_000, last_event_at=3_000, fact_id="e.0"
    )
    assert facts.facts == fact(3_000, "HALF_OPEN", "CLOSED", "reset", generation=8, failure_count=0)


def test_a_reset_of_a_forced_breaker_says_that_it_was_forced() -> None:
    facts = log(3_000)
    reset(replace(BUSY, override=Override.FORCE_OPEN), 3_000, facts)
    assert facts.facts == fact(3_000, "force_open", "CLOSED", "reset", generation=7, failure_count=0)


@pytest.mark.parametrize(
    ("act", "override", "reason"),
    [(force_open, Override.FORCE_OPEN, "force_open"), (disable, Override.DISABLED, "disable")],
    ids=["force", "disable"],
)
def test_a_control_freezes_the_state_below_and_voids_permits(act: Any, override: Override, reason: str) -> None:
    facts = log(3_000)
    moved = act(PROBING, 3_000, facts)
    assert moved == replace(
        PROBING, override=override, generation=8, generation_since=3_000, permits=(), last_event_at=3_000, fact_id="e.0"
    )
    assert facts.facts == fact(3_000, "HALF_OPEN", override.value, reason, generation=8, failure_count=3)
    assert act(moved, 4_000, log()) is moved


def test_clearing_a_control_shows_the_state_below_as_time_has_made_it() -> None:
    facts = log(1_500)
    forced = replace(OPEN, override=Override.FORCE_OPEN)
    moved = clear_override(forced, 1_500, facts)
    assert moved.state is State.OPEN
    assert facts.facts == fact(
        1_500, "force_open", "OPEN", "clear_override", generation=7, deadline_at=2_000, failure_count=3
    )
    assert clear_override(forced, 2_000, log()).state is State.HALF_OPEN


def test_a_stored_row_that_says_nonsense_is_repaired_alone_where_it_does() -> None:
    odd = replace(BUSY, state="MELTED", last_failure_kind="gremlins")  # type: ignore[arg-type]
    assert load_row(odd, PROFILE) == replace(BUSY, state=State.CLOSED, last_failure_kind="")
    assert load_row(BUSY, PROFILE) is BUSY
    endless = replace(OPEN, reopen_at=None)
    assert load_row(endless, PROFILE) == replace(OPEN, reopen_at=1_900)
    unknown = replace(OPEN, reopen_at=None, last_failure_at=None)
    assert load_row(unknown, PROFILE) is unknown
    named = replace(BUSY, last_failure_kind="gremlins")
    assert load_row(named, PROFILE).last_failure_kind == ""


def test_a_row_is_forgotten_after_half_an_hour_of_nothing_but_for_its_generation() -> None:
    quiet = replace(BUSY, state=State.CLOSED, failure_count=0, last_failure_at=0)
    assert not is_forgettable(quiet, 1_800_000)
    assert is_forgettable(quiet, 1_800_001)
    assert is_forgettable(replace(quiet, last_failure_at=None), 0)
    assert not is_forgettable(replace(quiet, failure_count=1), 9_000_000)
    assert not is_forgettable(replace(quiet, override=Override.DISABLED), 9_000_000)
    assert not is_forgettable(replace(quiet, state=State.DEGRADED), 9_000_000)
    assert forget([quiet, BUSY], 9_000_000) == [
        BreakerState("acme", "c1", generation=6, generation_since=50, last_event_at=900, fact_id="old.0")
    ]


# -- bursts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("connection", "window"), [("", 10_000), ("c1", 5_000)])
def test_one_failure_speaks_for_its_window_in_both_directions(connection: str, window: int) -> None:
    guard = BurstState("acme", connection, 100_000)
    ends = (100_000 - window, 100_001 - window, 99_999 + window, 100_000 + window)
    assert [suppresses(guard, at) for at in ends] == [False, True, True, False]
    assert not suppresses(BurstState("acme", connection), 0)
    assert expired([guard], 99_999 + window) == []
    assert expired([guard], 100_000 + window) == [guard]


def test_a_burst_moves_forward_only_and_ends_with_a_success_that_began_after_it() -> None:
    guard = BurstState("acme", "c1", 10)
    assert accept(guard, 9) is guard
    assert accept(guard, 11) == BurstState("acme", "c1", 11)
    assert accept(BurstState("acme", "c1"), 5) == BurstState("acme", "c1", 5)
    assert clear(guard, 9) is guard
    assert clear(guard, 10) == BurstState("acme", "c1")
    assert BurstState.default(guard.key) == BurstState("acme", "c1")


def test_the_oldest_bursts_go_first_beyond_the_bounds() -> None:
    network = [BurstState(f"p{n}", "", n) for n in range(MAX_PROVIDER_KEYS + 2)]
    bound = [BurstState("p", f"c{n}", n) for n in range(MAX_CONNECTION_KEYS + 1)]
    assert {guard.key for guard in expired([*network, *bound], -5_000)} == {
        network[0].key, network[1].key, bound[0].key
    }  # fmt: skip
    assert (MAX_PROVIDER_KEYS, MAX_CONNECTION_KEYS) == (1_000, 10_000)


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_each_status_of_a_provider_that_is_down_says_so_of_a_probe(status: int) -> None:
    assert verdict_of(ProbeAnswer(status, "", False, 1_000), 2_000) is Verdict.DOWN


def test_the_open_time_after_a_failed_probe_has_its_jitter_too() -> None:
    profile = replace(PROFILE, reopen_jitter=0.5)
    held, answer = HeldPermit("p", 7), ProbeAnswer(503, "", False, 1_500)
    rows = [judge(PROBING, held, answer, Evidence(1_500, draw=draw), profile, log())[0] for draw in (0.0, 0.5)]
    assert [row.reopen_at for row in rows] == [2_500, 2_750]


def test_within_the_limit_no_breaker_is_too_many() -> None:
    idle = [BreakerState("acme", f"c{n}", generation=2, last_failure_at=n) for n in range(3)]
    assert surplus(idle, 3) == []
    assert surplus(idle, 5) == []
    assert surplus(idle, 2) == [idle[0]]
