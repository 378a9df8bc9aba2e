"""What a limiter learns from one answer, whole paces at every edge; statuses and waits of its refusals
(spec/queue_admission.md sections 3 to 6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain.gates import Gate, GateBook, Pace, PermitRow, PermitState
from policy_service.domain.ids import AuthClass
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import (
    HTTP_STATUS,
    NO_LIMIT,
    NO_RESERVOIR,
    OVERRIDE_MAX_MS,
    WAIT_MAX_MS,
    WAIT_MIN_MS,
    LimiterScope,
    QueueCode,
    Submission,
    admit,
    configured_pace,
    effective_profile,
    effective_wait_ms,
    end_code,
    execution_limit_ms,
    is_execution_limit,
    is_line_full,
    is_paced,
    limiter_gate,
    limiter_key,
    recover_wedge,
    retry_after_s,
    start_slot_wait_ms,
    wait_budget_ms,
    wedged_since,
)
from policy_service.domain.queue_learning import (
    HINT_REFILL,
    LEARNED_ENTRIES,
    LEARNED_LIFE_MS,
    LEARNED_WRITE_MS,
    OVER_LIMIT_GAP_MS,
    RateEvidence,
    is_usable,
    learn,
    may_write,
    without_stale,
)

NOW = 1_000_000
PROFILE = QueueProfile(requests_per_minute=60, min_time_between_requests_ms=350)
BEFORE = Pace(tokens=50, refill_to=60, refill_at=NOW + 9_000, window_ms=60_000, gap_ms=350, last_start_at=NOW - 500)
CONFIGURED = Pace(tokens=60, refill_to=60, window_ms=60_000, gap_ms=350, last_start_at=NOW - 500)


def learned(budget_ms: int = 30_000, profile: QueueProfile = PROFILE, **evidence: Any) -> Pace:
    return learn(BEFORE, profile, RateEvidence(**evidence), NOW, budget_ms)


def test_the_numbers_of_learning_are_those_of_the_spec() -> None:
    assert (LEARNED_WRITE_MS, LEARNED_LIFE_MS, LEARNED_ENTRIES) == (60_000, 86_400_000, 2_048)
    assert (HINT_REFILL, OVER_LIMIT_GAP_MS) == (60, 200)
    assert (WAIT_MIN_MS, WAIT_MAX_MS, OVERRIDE_MAX_MS, NO_RESERVOIR) == (1, 86_400_000, 600_000, 9_007_199_254_740_991)


def test_an_answer_that_says_nothing_leaves_the_very_pace() -> None:
    assert learned() is BEFORE
    assert learned(limit=0.0, remaining=5.0, status=200) is BEFORE
    assert learned(remaining=0.0, reset_ms=5) is BEFORE


@pytest.mark.parametrize(
    ("limit", "gap_ms"),
    [(60.0, 990), (1.0, 59_990), (0.5, 119_990), (6_000.0, 0), (6_001.0, 0), (5_999.0, 0), (5_000.0, 2), (7.0, 8_561)],
)
def test_a_limit_sets_the_gap_a_little_below_its_share(limit: float, gap_ms: int) -> None:
    assert learned(limit=limit) == replace(BEFORE, gap_ms=gap_ms, learned_at=NOW)


@pytest.mark.parametrize(
    ("remaining", "reset_ms", "pace"),
    [
        (0.0, None, Pace(0, 100, NOW + 60_000, 60_000, 590, NOW - 500, NOW)),
        (-5.0, None, Pace(0, 100, NOW + 60_000, 60_000, 590, NOW - 500, NOW)),
        (0.0, 5_000, Pace(0, 100, NOW + 5_000, 60_000, 590, NOW - 500, NOW)),
        (9.9, 5_000, Pace(9, 100, NOW + 5_000, 60_000, 590, NOW - 500, NOW)),
        (10.0, 5_000, replace(BEFORE, gap_ms=590, learned_at=NOW)),
        (50.0, 5_000, replace(BEFORE, gap_ms=590, learned_at=NOW)),
        (50.1, 5_000, Pace(None, 60, None, 60_000, 350, NOW - 500, NOW)),
        (100.0, None, Pace(None, 60, None, 60_000, 350, NOW - 500, NOW)),
    ],
)
def test_what_remains_empties_keeps_or_lifts_the_reservoir(remaining: float, reset_ms: int | None, pace: Pace) -> None:
    assert learned(limit=100.0, remaining=remaining, reset_ms=reset_ms) == pace


def test_a_429_restores_the_configuration_unless_it_states_a_wait() -> None:
    assert learned(status=429) == CONFIGURED
    assert learned(status=429, limit=100.0, remaining=0.0) == CONFIGURED
    stated = replace(CONFIGURED, tokens=0, refill_to=60, refill_at=NOW + 7_000, learned_at=NOW)
    assert learned(status=429, body_hint_ms=7_000) == stated
    assert learned(status=428, body_hint_ms=7_000) is BEFORE
    slower = learned(profile=replace(PROFILE, requests_per_minute=30), status=429, body_hint_ms=7_000)
    assert slower.refill_to == HINT_REFILL
    assert learned(status=430, body_hint_ms=7_000) is BEFORE


def test_the_flag_of_a_soft_limit_sets_a_gap_of_its_own() -> None:
    assert learned(over_limit=True) == replace(BEFORE, gap_ms=200, learned_at=NOW)
    assert learned(over_limit=True, limit=100.0) == replace(BEFORE, gap_ms=200, learned_at=NOW)
    assert learned(over_limit=True, body_cap=(10, 60_000)) == replace(BEFORE, gap_ms=6_000, learned_at=NOW)


@pytest.mark.parametrize(
    ("cap", "budget_ms", "gap_ms"),
    [
        ((10, 60_000), 30_000, 6_000), ((7, 60_000), 30_000, 8_572), ((2, 60_000), 30_000, 30_000),
        ((2, 60_000), 29_999, None), ((1_000, 60_000), 30_000, 350), ((1, 1), 30_000, 350), ((0, 60_000), 30_000, None),
        ((-1, 60_000), 30_000, None), ((10, 0), 30_000, None), ((10, -5), 30_000, None), ((0.5, 1_000), 30_000, 2_000),
    ],
)  # fmt: skip
def test_a_cap_of_the_body_sets_the_gap_within_the_budget(
    cap: tuple[float, int], budget_ms: int, gap_ms: int | None
) -> None:
    found = learned(budget_ms, body_cap=cap)
    assert found.gap_ms == (350 if gap_ms is None else gap_ms)
    assert (found is BEFORE) is (gap_ms is None)


def test_a_connection_with_a_rate_of_its_own_ignores_the_cap_of_a_body() -> None:
    assert learned(profile=replace(PROFILE, rpm_override=5), body_cap=(10, 60_000)) is BEFORE


def test_what_was_learned_is_dropped_once_it_is_a_day_old() -> None:
    young, old = replace(BEFORE, learned_at=NOW - 86_400_000), replace(BEFORE, learned_at=NOW - 86_400_001)
    assert without_stale(young, PROFILE, NOW) is young
    assert without_stale(old, PROFILE, NOW) == CONFIGURED
    assert without_stale(BEFORE, PROFILE, NOW) is BEFORE
    assert is_usable(NOW - 86_400_000, NOW)
    assert not is_usable(NOW - 86_400_001, NOW)


@pytest.mark.parametrize(("age", "writes"), [(None, True), (59_999, False), (60_000, True)])
def test_learned_values_are_written_once_a_minute(age: int | None, writes: bool) -> None:
    assert may_write(None if age is None else NOW - age, NOW) is writes


# -- configuration -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rpm", "tokens"), [(60, 60), (NO_RESERVOIR - 1, NO_RESERVOIR - 1), (NO_RESERVOIR, None), (NO_RESERVOIR + 1, None)]
)
def test_a_limiter_without_a_rate_has_no_reservoir(rpm: int, tokens: int | None) -> None:
    assert configured_pace(replace(PROFILE, requests_per_minute=rpm)).tokens == tokens


def test_a_limiter_is_a_gate_with_its_stored_or_configured_pace() -> None:
    assert limiter_gate("k", PROFILE) == Gate("k", 6, 0, None, replace(CONFIGURED, last_start_at=None))
    assert limiter_gate("k", PROFILE, BEFORE) == Gate("k", 6, 0, None, BEFORE)
    assert (NO_LIMIT.requests_per_minute, NO_LIMIT.min_time_between_requests_ms, NO_LIMIT.concurrent_requests) == (
        NO_RESERVOIR, 0, 1_000,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["requests_per_minute", "min_time_between_requests_ms", "concurrent_requests", "max_queue_depth", "rpm", "minTime",
     "maxConcurrent"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("value", "paced"), [(1, True), (0, False), (-1, False), (0.5, True), (True, False), ("5", False)]
)
def test_a_declared_limit_paces_a_connection(name: str, value: object, paced: bool) -> None:
    assert is_paced({name: value}, AuthClass.LOCAL, auto_enable=False) is paced


@pytest.mark.parametrize(
    ("auth", "auto", "active", "paced"),
    [
        (AuthClass.API_KEY, True, True, True), (AuthClass.API_KEY, False, True, False),
        (AuthClass.API_KEY, True, False, False), (AuthClass.OAUTH, True, True, False),
    ],
)  # fmt: skip
def test_an_active_api_key_is_paced_where_that_is_switched_on(
    auth: AuthClass, auto: bool, active: bool, paced: bool
) -> None:
    assert is_paced({"maxWaitMs": 5}, auth, auto_enable=auto, is_active=active) is paced
    assert is_paced({}, AuthClass.API_KEY, auto_enable=True)


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ({"rpm": 5}, {"requests_per_minute": 5, "rpm_override": 5}),
        ({"minTime": 7}, {"min_time_between_requests_ms": 7}),
        ({"maxConcurrent": 2.9}, {"concurrent_requests": 2}), ({"maxWaitMs": 9}, {"max_wait_ms": 9}),
        ({"executionMaxWaitMs": 9}, {"execution_max_wait_ms": 9}), ({"rpm": 0, "minTime": -1, "maxWaitMs": 0}, {}),
        ({"rpm": True, "minTime": "7"}, {}), ({}, {}), ({"maxWaitMs": 700_000}, {"max_wait_ms": 600_000}),
    ],
)  # fmt: skip
def test_a_positive_override_reaches_its_fields(overrides: dict[str, object], changed: dict[str, Any]) -> None:
    assert effective_profile(PROFILE, overrides) == replace(PROFILE, **changed)


def test_the_providers_floor_raises_the_wait_and_never_the_execution() -> None:
    raised = effective_profile(replace(PROFILE, execution_max_wait_ms=5), {}, 40_000)
    assert (raised.max_wait_ms, raised.execution_max_wait_ms) == (40_000, 5)
    assert effective_profile(PROFILE, {"maxWaitMs": 9}, 40_000).max_wait_ms == 9
    assert effective_wait_ms(0, override=1) == 1


@pytest.mark.parametrize(
    ("own", "left", "unbounded", "budget"),
    [
        (1_000, None, False, 1_000), (1_000, 500.9, False, 500), (1_000, 2_000, False, 1_000),
        (1_000, None, True, None),
        (1_000, 2_000, True, 2_000), (1_000, float("inf"), True, None), (1_000, -5, False, -5), (1_000, 0, False, 0),
    ],
)  # fmt: skip
def test_the_smaller_budget_bounds_the_wait(own: int, left: float | None, unbounded: bool, budget: int | None) -> None:
    assert wait_budget_ms(own, left, unbounded_wait=unbounded) == budget


def test_small_rules_at_their_edges() -> None:
    assert [execution_limit_ms(5, given) for given in (None, 4, 6, 0)] == [5, 5, 6, 5]
    assert execution_limit_ms(0, None) == 0
    assert [is_line_full(depth, 2) for depth in (0, 1, 2, 3)] == [False, True, True, False]
    assert [start_slot_wait_ms(last, 100, NOW) for last in (None, NOW - 100, NOW - 99, NOW)] == [0, 0, 1, 100]


@pytest.mark.parametrize(
    ("scope", "more", "key"),
    [
        (LimiterScope.CONNECTION, {}, "p:c"), (LimiterScope.QUOTA_SCOPE, {}, "p:c:q"),
        (LimiterScope.QUOTA_SCOPE, {"quota_scope": ""}, "p:c"), (LimiterScope.MODEL_FAMILY, {}, "p:c:f"),
        (LimiterScope.MODEL_FAMILY, {"family": ""}, "p:c:m"), (LimiterScope.MODEL, {}, "p:c:m"),
        (LimiterScope.MODEL, {"model": ""}, "p:c"),
    ],
)  # fmt: skip
def test_a_limiter_is_keyed_by_scope_with_fallbacks(scope: LimiterScope, more: dict[str, str], key: str) -> None:
    named: dict[str, str] = {"model": "m", "family": "f", "quota_scope": "q"} | more
    assert limiter_key("p", "c", scope, **named) == key


# -- refusals and recovery -----------------------------------------------------------------------------------
STATUSES = {
    "RATE_LIMIT_QUEUE_FULL": 429, "RATE_LIMIT_QUEUE_TIMEOUT": 503, "RATE_LIMIT_QUEUE_WEDGED": 503,
    "RATE_LIMIT_EXECUTION_TIMEOUT": 504, "ABORTED": 499, "WAITER_LOST": 499, "SEMAPHORE_RESET": 503,
    "PERMIT_EXPIRED": 409, "STORE_UNAVAILABLE": 503,
}  # fmt: skip


def test_every_refusal_has_its_status() -> None:
    assert {code.value: HTTP_STATUS[code] for code in QueueCode} == STATUSES


def ticket(request: str = "a", state: PermitState = PermitState.WAITING, **more: Any) -> PermitRow:
    told = {"queued_at": NOW - 100, "ttl_ms": 60_000, "waiter_seen_at": NOW} | more
    return PermitRow(f"t-{request}", request, "k", ("k",), 1, state, **told)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (PermitState.TIMED_OUT, QueueCode.QUEUE_TIMEOUT), (PermitState.WEDGED, QueueCode.QUEUE_WEDGED),
        (PermitState.CANCELLED, QueueCode.ABORTED), (PermitState.WAITER_LOST, QueueCode.WAITER_LOST),
        (PermitState.RESET, QueueCode.RESET), (PermitState.EXPIRED, QueueCode.PERMIT_EXPIRED),
        (PermitState.RELEASED, None), (PermitState.HELD, None), (PermitState.WAITING, None),
    ],
)  # fmt: skip
def test_an_ended_ticket_has_its_code(state: PermitState, code: QueueCode | None) -> None:
    assert end_code(ticket(state=state)) is code


@pytest.mark.parametrize(
    ("held_at", "longest", "expires_at", "reached"),
    [
        (NOW, 100, NOW + 100, True), (NOW, 100, NOW + 101, True), (NOW, 100, NOW + 99, False), (NOW, None, NOW, False),
        (None, 100, NOW, False), (NOW, 100, None, False),
    ],
)  # fmt: skip
def test_a_ticket_that_ran_into_its_limit_is_told_apart(
    held_at: int | None, longest: int | None, expires_at: int | None, reached: bool
) -> None:
    ended = ticket(state=PermitState.EXPIRED, held_at=held_at, max_held_ms=longest, expires_at=expires_at)
    assert is_execution_limit(ended) is reached
    assert end_code(ended) is (QueueCode.EXECUTION_TIMEOUT if reached else QueueCode.PERMIT_EXPIRED)


@pytest.mark.parametrize(
    ("pace", "seconds"),
    [
        (None, None), (Pace(0, 60, NOW + 1), 1), (Pace(0, 60, NOW + 1_001), 2), (Pace(0, 60, NOW), None),
        (Pace(1, 60, NOW + 9_000), None), (Pace(0, 60, None), None), (Pace(gap_ms=2_000, last_start_at=NOW), 2),
        (Pace(gap_ms=2_000, last_start_at=NOW - 2_000), None), (Pace(gap_ms=2_000, last_start_at=NOW - 1_999), 1),
        (Pace(0, 60, NOW + 9_000, gap_ms=2_000, last_start_at=NOW), 9),
        (Pace(0, 60, NOW + 1_000, gap_ms=2_000, last_start_at=NOW), 2),
    ],
)  # fmt: skip
def test_a_refusal_names_the_next_start_in_whole_seconds(pace: Pace | None, seconds: int | None) -> None:
    assert retry_after_s(Gate("k", 1, pace=pace), NOW) == seconds


def submit(line: GateBook, profile: QueueProfile = PROFILE, **more: Any) -> QueueCode | None:
    return admit(line, "k", profile, replace(Submission("new", "t-new", 9), **more), NOW).code


def limiter(*rows: PermitRow, pace: Pace | None = None, limit: int = 1) -> GateBook:
    return GateBook([Gate("k", limit, 0, pace=pace)], rows, 0)


HELD = ticket("h", PermitState.HELD, expires_at=NOW + 60_000)


@pytest.mark.parametrize(
    ("rows", "profile", "asked", "code"),
    [
        ([], {}, {"aborted": True}, QueueCode.ABORTED), ([], {}, {"remaining_budget_ms": 0}, QueueCode.QUEUE_TIMEOUT),
        ([], {}, {"remaining_budget_ms": 1}, None), ([HELD], {}, {"remaining_budget_ms": 1}, None),
        ([HELD, ticket()], {"max_queue_depth": 1}, {}, QueueCode.QUEUE_FULL),
        ([HELD, ticket()], {"max_queue_depth": 2}, {}, None),
        ([HELD, ticket()], {"max_queue_depth": 1}, {"remaining_budget_ms": 0}, QueueCode.QUEUE_TIMEOUT),
        ([HELD, ticket()], {"max_queue_depth": 1}, {"waited_ms": 40_000}, QueueCode.QUEUE_FULL),
        ([], {}, {"waited_ms": 30_000}, QueueCode.QUEUE_TIMEOUT), ([], {}, {"waited_ms": 29_999}, None),
        ([], {"unbounded_wait": True}, {"waited_ms": 90_000}, None),
    ],
)  # fmt: skip
def test_the_first_step_that_refuses_gives_the_code(
    rows: list[PermitRow], profile: dict[str, Any], asked: dict[str, Any], code: QueueCode | None
) -> None:
    assert submit(limiter(*rows), replace(PROFILE, **profile), **asked) is code


def test_a_full_line_says_how_many_wait() -> None:
    refused = admit(limiter(HELD, ticket()), "k", replace(PROFILE, max_queue_depth=1), Submission("n", "t-n", 9), NOW)
    assert (refused.code, refused.queued) == (QueueCode.QUEUE_FULL, 1)


def test_a_refusal_says_when_the_next_start_is() -> None:
    dry = limiter(HELD, ticket(), pace=Pace(0, 60, NOW + 5_000))
    refused = admit(dry, "k", replace(PROFILE, max_queue_depth=1), Submission("n", "t-n", 9), NOW)
    assert refused.retry_after_s == 5


@pytest.mark.parametrize(
    ("limit_ms", "ttl_ms", "start_timeout_ms", "ttl", "longest"),
    [(5_000, None, None, 5_000, 5_000), (5_000, 4_000, None, 4_000, 5_000), (5_000, 6_000, None, 5_000, 5_000),
     (5_000, None, 7_000, 7_000, 7_000)],
)  # fmt: skip
def test_a_ticket_lives_for_its_execution_limit_at_most(
    limit_ms: int, ttl_ms: int | None, start_timeout_ms: int | None, ttl: int, longest: int
) -> None:
    profile = replace(PROFILE, execution_max_wait_ms=limit_ms)
    asked = Submission("new", "t-new", 9, "r1", ttl_ms=ttl_ms, start_timeout_ms=start_timeout_ms)
    admitted = admit(limiter(), "k", profile, asked, NOW)
    assert admitted.row is not None
    assert (admitted.row.ttl_ms, admitted.row.max_held_ms, admitted.row.replica) == (ttl, longest, "r1")
    assert admitted.execution_limit_ms == longest


@pytest.mark.parametrize(
    ("rows", "pace", "since"),
    [
        ([], None, None), ([HELD, ticket()], None, None), ([ticket(offered_until=NOW + 1)], None, None),
        ([ticket(queued_at=NOW - 7)], None, NOW - 7),
        ([ticket(queued_at=NOW - 7), ticket("b", queued_at=NOW - 9)], None, NOW - 9),
        ([ticket(queued_at=NOW - 7)], Pace(last_start_at=NOW - 5), NOW - 5),
        ([ticket(queued_at=NOW - 7)], Pace(last_start_at=NOW - 9), NOW - 7), ([ticket()], Pace(tokens=0), None),
    ],
)  # fmt: skip
def test_a_limiter_is_stuck_since_its_first_waiter_or_its_last_start(
    rows: list[PermitRow], pace: Pace | None, since: int | None
) -> None:
    assert wedged_since(limiter(*rows, pace=pace, limit=2), "k", NOW) == since


class Stuck(GateBook):
    """A fault: the hand-off gives nobody anything though there is room."""

    def admits(self, key: str, now: int) -> bool:
        return False


@pytest.mark.parametrize(("waited", "is_reset"), [(59_999, False), (60_000, True)])
def test_a_stuck_limiter_is_reset_after_its_time(waited: int, is_reset: bool) -> None:
    waiting = ticket(queued_at=NOW - waited)
    learned_pace = replace(CONFIGURED, gap_ms=5, last_start_at=None)
    stuck = Stuck([Gate("k", 1, 0, pace=learned_pace)], [waiting], 0)
    assert bool(recover_wedge(stuck, "k", PROFILE, NOW)) is is_reset
    assert stuck.of("a")[0].state is (PermitState.WEDGED if is_reset else PermitState.WAITING)
    assert stuck.gates["k"].pace == (configured_pace(PROFILE) if is_reset else learned_pace)
