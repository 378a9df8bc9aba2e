"""Queue admission and what limiters learn (spec/queue_admission.md), beyond the vectors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.domain.gates import Gate, GateBook, Pace, PermitRow, PermitState
from policy_service.domain.ids import AuthClass
from policy_service.domain.line import heartbeat, release, renew, settle
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import (
    FLEET_GATE,
    NO_LIMIT,
    Admission,
    LimiterScope,
    QueueCode,
    Submission,
    admit,
    configured_pace,
    effective_profile,
    effective_wait_ms,
    end_code,
    is_paced,
    limiter_gate,
    limiter_key,
    recover_wedge,
    retry_after_s,
    start_slot_wait_ms,
    wait_budget_ms,
    wedged_since,
)
from policy_service.domain.queue_learning import RateEvidence, is_usable, learn, may_write

KEY = "p:c1"


class Limiter:
    """One limiter as the store keeps it."""

    def __init__(self, profile: QueueProfile, *more: Gate) -> None:
        self.profile = profile
        self.gates = {gate.key: gate for gate in (limiter_gate(KEY, profile), *more)}
        self.rows: dict[tuple[str, str], PermitRow] = {}
        self.tickets = 0

    def book(self) -> GateBook:
        return GateBook(self.gates.values(), self.rows.values(), offer_ms=0)

    def keep(self, book: GateBook) -> None:
        self.rows |= book.changed
        self.gates |= book.changed_gates

    def submit(self, request: str, now: int, **asked: object) -> Admission:
        self.tickets += 1
        submission = replace(Submission(request, f"t-{request}", self.tickets), **asked)  # type: ignore[arg-type]
        book = self.book()
        answer = admit(book, KEY, self.profile, submission, now)
        self.keep(book)
        return answer

    def beat(self, request: str, now: int) -> None:
        book = self.book()
        heartbeat(book, request, "r1", now)
        self.keep(book)

    def settle(self, now: int) -> list[str]:
        book = self.book()
        served = settle(book, now)
        self.keep(book)
        return [row.request_id for row in served]

    def release(self, request: str, now: int) -> None:
        book = self.book()
        release(book, request, now)
        self.keep(book)


def test_starts_are_a_gap_apart() -> None:
    limiter = Limiter(replace(NO_LIMIT, min_time_between_requests_ms=350))
    assert limiter.submit("q1", 0).is_admitted
    assert not limiter.submit("q2", 0).is_admitted
    assert limiter.settle(349) == []
    assert limiter.settle(350) == ["q2"]


def test_the_window_runs_from_the_first_start_after_a_refill() -> None:
    limiter = Limiter(replace(NO_LIMIT, requests_per_minute=1, max_wait_ms=86_400_000))
    assert limiter.submit("q1", 50_000).is_admitted
    limiter.submit("q2", 50_001)
    limiter.beat("q2", 109_000)
    assert limiter.settle(109_999) == []
    assert limiter.settle(110_000) == ["q2"]
    assert limiter.gates[KEY].pace == Pace(0, 1, 170_000, 60_000, 0, 110_000)


def test_the_limit_of_the_fleet_holds_over_limiters() -> None:
    limiter = Limiter(NO_LIMIT, Gate(FLEET_GATE, 1, depth=0))
    assert limiter.submit("q1", 0).is_admitted
    assert not limiter.submit("q2", 1).is_admitted
    limiter.release("q1", 2)
    assert limiter.rows[FLEET_GATE, "q2"].state is PermitState.HELD


def test_a_repeated_submission_is_one_ticket_whatever_budget_it_has_left() -> None:
    limiter = Limiter(replace(NO_LIMIT, concurrent_requests=1, max_queue_depth=1))
    limiter.submit("q1", 0)
    first = limiter.submit("q2", 1)
    again = limiter.submit("q2", 2, remaining_budget_ms=0)
    assert first.row is not None
    assert again.row is not None
    assert again.row.ticket == first.row.ticket


def test_a_ticket_lives_no_longer_than_its_execution_limit_however_it_is_renewed() -> None:
    limiter = Limiter(replace(NO_LIMIT, execution_max_wait_ms=100_000))
    limiter.submit("q1", 0, ttl_ms=60_000)
    book = limiter.book()
    renewed = renew(book, "q1", 50_000).row
    limiter.keep(book)
    assert renewed is not None
    assert renewed.expires_at == 100_000
    limiter.settle(100_000)
    assert end_code(limiter.rows[KEY, "q1"]) is QueueCode.EXECUTION_TIMEOUT


def test_a_ticket_left_without_renewal_is_lost_not_timed_out() -> None:
    limiter = Limiter(replace(NO_LIMIT, execution_max_wait_ms=100_000))
    limiter.submit("q1", 0, ttl_ms=60_000)
    limiter.settle(60_000)
    assert end_code(limiter.rows[KEY, "q1"]) is QueueCode.PERMIT_EXPIRED


def test_the_wait_for_a_static_start_slot_comes_out_of_the_budget() -> None:
    limiter = Limiter(replace(NO_LIMIT, concurrent_requests=1, max_wait_ms=1_000))
    limiter.submit("q1", 0)
    queued = limiter.submit("q2", 0, waited_ms=400).row
    assert queued is not None
    assert queued.deadline_at == 600
    assert limiter.submit("q3", 0, waited_ms=1_000).code is QueueCode.QUEUE_TIMEOUT


@pytest.mark.parametrize(("last", "wait"), [(None, 0), (0, 1_000), (-400, 600), (-5_000, 0)])
def test_static_start_slots_are_a_fixed_spacing_apart(last: int | None, wait: int) -> None:
    assert start_slot_wait_ms(last, 1_000, 0) == wait


def test_a_withdrawn_ticket_is_never_admitted_even_if_a_slot_opens_at_the_same_instant() -> None:
    limiter = Limiter(replace(NO_LIMIT, concurrent_requests=1))
    limiter.submit("q1", 0)
    limiter.submit("q2", 0)
    limiter.release("q2", 10)
    limiter.release("q1", 10)
    assert limiter.rows[KEY, "q2"].state is PermitState.CANCELLED
    assert limiter.settle(10) == []


def test_a_limiter_with_a_reason_to_wait_is_not_wedged() -> None:
    limiter = Limiter(replace(NO_LIMIT, requests_per_minute=1, max_wait_ms=86_400_000, wedge_after_ms=1_000))
    limiter.submit("q1", 0)
    limiter.submit("q2", 0)
    limiter.release("q1", 10)
    limiter.beat("q2", 59_000)
    book = limiter.book()
    assert recover_wedge(book, KEY, limiter.profile, 59_999) == []
    assert recover_wedge(book, KEY, limiter.profile, 60_000) == []
    assert [row.request_id for row in book.rows() if row.state is PermitState.HELD] == ["q2"]


def test_a_limiter_that_runs_something_is_not_wedged() -> None:
    limiter = Limiter(replace(NO_LIMIT, concurrent_requests=2, max_wait_ms=86_400_000, wedge_after_ms=1_000))
    limiter.submit("q1", 0)
    book = limiter.book()
    waiter = replace(limiter.rows[KEY, "q1"], request_id="q2", state=PermitState.WAITING, waiter_seen_at=5_000)
    book.put(replace(waiter, ticket=9, expires_at=None, held_at=None))
    assert wedged_since(book, KEY, 5_000) is None
    book.put(replace(limiter.rows[KEY, "q1"], state=PermitState.RELEASED, ended_at=4_000))
    assert wedged_since(book, KEY, 5_000) == 0


@pytest.mark.parametrize(
    ("pace", "seconds"),
    [
        (Pace(tokens=0, refill_to=1, refill_at=2_001), 2),
        (Pace(tokens=1, refill_to=1, refill_at=1_500), None),
        (Pace(gap_ms=100, last_start_at=950), 1),
        (Pace(gap_ms=100, last_start_at=900), None),
        (None, None),
    ],
)
def test_retry_after_is_the_refill_or_the_end_of_the_gap(pace: Pace | None, seconds: int | None) -> None:
    assert retry_after_s(Gate(KEY, pace=pace), 1_000) == seconds


@pytest.mark.parametrize(
    ("scope", "key"),
    [
        (LimiterScope.CONNECTION, "p:c"),
        (LimiterScope.QUOTA_SCOPE, "p:c:weekly"),
        (LimiterScope.MODEL_FAMILY, "p:c:opus"),
        (LimiterScope.MODEL, "p:c:opus-4"),
    ],
)
def test_a_limiter_is_keyed_by_its_scope(scope: LimiterScope, key: str) -> None:
    assert limiter_key("p", "c", scope, model="opus-4", family="opus", quota_scope="weekly") == key


def test_a_model_without_a_family_is_its_own() -> None:
    assert limiter_key("p", "c", LimiterScope.MODEL_FAMILY, model="m") == "p:c:m"


@pytest.mark.parametrize(
    ("declared", "auth", "auto", "paced"),
    [
        ({}, AuthClass.API_KEY, True, True),
        ({}, AuthClass.OAUTH, True, False),
        ({}, AuthClass.API_KEY, False, False),
        ({"rpm": 10}, AuthClass.OAUTH, False, True),
        ({"rpm": 0, "maxWaitMs": 5}, AuthClass.API_KEY, False, False),
        ({"maxConcurrent": True}, AuthClass.API_KEY, False, False),
    ],
)
def test_a_connection_is_paced_if_it_declares_a_limit_or_is_auto_enabled(
    declared: dict[str, object], auth: AuthClass, auto: bool, paced: bool
) -> None:
    assert is_paced(declared, auth, auto_enable=auto) is paced


def test_positive_overrides_win_and_zero_falls_through() -> None:
    configured = QueueProfile()
    found = effective_profile(
        configured,
        {"rpm": 120, "minTime": 0, "maxConcurrent": 2, "maxWaitMs": 900_000, "executionMaxWaitMs": 0},
        60_000,
    )
    assert (found.requests_per_minute, found.rpm_override) == (120, 120)
    assert (found.min_time_between_requests_ms, found.concurrent_requests) == (350, 2)
    assert (found.max_wait_ms, found.execution_max_wait_ms) == (600_000, 600_000)
    assert effective_profile(configured, {}, 60_000).max_wait_ms == 60_000


@pytest.mark.parametrize(("configured", "expected"), [(0, 1), (0.5, 1), (10**12, 86_400_000)])
def test_wait_budgets_are_clamped_whatever_their_source(configured: float, expected: int) -> None:
    assert effective_wait_ms(configured) == expected


@pytest.mark.parametrize("remaining", [None, float("inf"), float("nan")])
def test_a_caller_budget_that_is_not_finite_bounds_nothing(remaining: float | None) -> None:
    assert wait_budget_ms(30_000, remaining, unbounded_wait=False) == 30_000
    assert wait_budget_ms(30_000, remaining, unbounded_wait=True) is None


def test_a_429_drops_what_was_learned_and_keeps_the_last_start() -> None:
    profile = QueueProfile()
    learned = Pace(3, 100, 99_000, gap_ms=5, last_start_at=40)
    assert learn(learned, profile, RateEvidence(status=429), 50, 30_000) == replace(
        configured_pace(profile), last_start_at=40
    )


def test_queued_tickets_keep_their_order_when_the_limiter_is_rebuilt() -> None:
    limiter = Limiter(replace(NO_LIMIT, concurrent_requests=1))
    for request in ("q1", "q2", "q3"):
        limiter.submit(request, 0)
    pace = limiter.gates[KEY].pace
    assert pace is not None
    rebuilt = learn(pace, limiter.profile, RateEvidence(status=429), 5, 30_000)
    limiter.gates[KEY] = replace(limiter.gates[KEY], pace=rebuilt)
    limiter.release("q1", 10)
    assert limiter.rows[KEY, "q2"].state is PermitState.HELD
    assert limiter.rows[KEY, "q3"].state is PermitState.WAITING


@pytest.mark.parametrize("limit", [0, -0.5, -5, float("nan"), float("inf")])
def test_a_header_limit_that_is_no_rate_teaches_nothing(limit: float) -> None:
    pace = Pace(gap_ms=350)
    assert learn(pace, QueueProfile(), RateEvidence(limit=limit, remaining=1), 0, 30_000) == pace


def test_exactly_a_tenth_left_empties_no_reservoir() -> None:
    pace = Pace(tokens=60, refill_to=60)
    assert learn(pace, QueueProfile(), RateEvidence(limit=70, remaining=7), 0, 30_000).tokens == 60
    assert learn(pace, QueueProfile(), RateEvidence(limit=70, remaining=6.9), 0, 30_000).tokens == 6


def test_a_body_cap_with_a_gap_beyond_the_budget_is_ignored() -> None:
    pace = Pace(gap_ms=350)
    assert learn(pace, QueueProfile(), RateEvidence(body_cap=(1, 60_000)), 0, 30_000).gap_ms == 350
    assert learn(pace, QueueProfile(), RateEvidence(body_cap=(7, 60_000)), 0, 30_000).gap_ms == 8_572


def test_learned_values_are_written_once_a_minute_and_forgotten_after_a_day() -> None:
    assert may_write(None, 0)
    assert not may_write(0, 59_999)
    assert may_write(0, 60_000)
    assert is_usable(0, 86_400_000)
    assert not is_usable(0, 86_400_001)
