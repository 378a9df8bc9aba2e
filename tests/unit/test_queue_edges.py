"""Edges of queue admission: what an answer carries, when a budget is over, whole seconds (spec/queue_admission.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.domain import limit_reset
from policy_service.domain.gates import Gate, GateBook, Pace, PermitRow, PermitState
from policy_service.domain.line import PermitRequest, acquire
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import (
    NO_CONCURRENCY_LIMIT,
    Admission,
    QueueCode,
    Submission,
    admit,
    configured_pace,
    effective_wait_ms,
    limiter_gate,
    retry_after_s,
)

KEY = "p:c1"
PROFILE = QueueProfile(concurrent_requests=1, min_time_between_requests_ms=0, max_wait_ms=1_000)


def book_of(*rows: PermitRow, profile: QueueProfile = PROFILE) -> GateBook:
    return GateBook([limiter_gate(KEY, profile)], rows, offer_ms=0)


def submitted(book: GateBook, request: str, ticket: int, **asked: int) -> Admission:
    return admit(book, KEY, PROFILE, replace(Submission(request, f"t-{request}", ticket), **asked), 0)  # type: ignore[arg-type]


def test_an_admission_carries_ticket_limit_and_length_of_the_queue() -> None:
    book = book_of()
    first = submitted(book, "a", 1)
    assert (first.is_admitted, first.execution_limit_ms, first.queued, first.code) == (True, 600_000, 0, None)
    second = submitted(book, "b", 2)
    assert (second.is_admitted, second.execution_limit_ms, second.queued) == (False, 600_000, 1)
    assert second.row is not None
    assert second.row.deadline_at == 1_000
    third = submitted(book, "c", 3, waited_ms=400)
    assert (third.queued, third.row and third.row.deadline_at) == (2, 600)


@pytest.mark.parametrize(("waited", "code"), [(999, None), (1_000, QueueCode.QUEUE_TIMEOUT)])
def test_a_budget_that_was_waited_away_is_over_at_its_very_end(waited: int, code: QueueCode | None) -> None:
    assert submitted(book_of(), "a", 1, waited_ms=waited).code is code


def test_a_refusal_counts_nobody_and_takes_nothing() -> None:
    assert Admission() == Admission(None, None, 0, 0, None)
    book = book_of()
    refused = submitted(book, "a", 1, waited_ms=1_000)
    assert (refused.queued, refused.row, refused.is_admitted) == (0, None, False)
    assert book.of("a") == []


@pytest.mark.parametrize(
    ("tokens", "refill_at", "now", "seconds"),
    [
        (0, 5_000, 0, 5), (0, 5_001, 0, 6), (0, 999, 0, 1), (0, 1_000, 0, 1), (0, 2_000, 1, 2), (1, 5_000, 0, None),
        (None, 5_000, 0, None),
    ],
)  # fmt: skip
def test_a_refusal_names_whole_seconds(tokens: int | None, refill_at: int, now: int, seconds: int | None) -> None:
    gate = Gate(KEY, 1, depth=0, pace=Pace(tokens, 60, refill_at, 60_000))
    assert retry_after_s(gate, now) == seconds
    assert retry_after_s(Gate(KEY, 1, depth=0), now) is None


def test_the_pace_by_configuration_is_whole() -> None:
    profile = QueueProfile(requests_per_minute=30, min_time_between_requests_ms=7)
    assert configured_pace(profile) == Pace(tokens=30, refill_to=30, window_ms=60_000, gap_ms=7)
    assert NO_CONCURRENCY_LIMIT == 1_000


@pytest.mark.parametrize(
    ("configured", "override", "floor", "effective"),
    [
        (5_000, None, 0, 5_000), (5_000, None, 6_000, 6_000), (0, None, 0, 1), (-5, None, 0, 1),
        (10**9, None, 0, 86_400_000), (5_000, 7_000, 9_000, 7_000), (5_000, 600_001, 0, 600_000),
        (5_000, 0, 0, 5_000), (5_000, True, 0, 5_000), (5_000, 0.5, 0, 1),
    ],
)  # fmt: skip
def test_a_wait_budget_by_its_first_source(configured: float, override: object, floor: int, effective: int) -> None:
    assert effective_wait_ms(configured, override=override, floor=floor) == effective


def test_a_request_for_other_gates_passes_those_who_wait_elsewhere() -> None:
    book = GateBook([Gate("a", 1, depth=0), Gate("b", 1, depth=0)], [])

    def ask(request: str, ticket: int, *gates: str) -> PermitState:
        answer = acquire(book, PermitRequest(request, f"t-{request}", gates, ticket, 60_000, 30_000), 0)
        assert answer.row is not None
        return answer.row.state

    assert ask("first", 1, "a") is PermitState.HELD
    assert ask("second", 2, "a") is PermitState.WAITING
    assert ask("third", 3, "b") is PermitState.HELD
    assert ask("fourth", 4, "a", "b") is PermitState.WAITING
    assert PermitRequest("r", "p", ("a",), 1, 60_000).timeout_ms == 30_000


def test_a_missing_offer_is_remembered_within_its_bounds() -> None:
    assert [limit_reset._not_offered(ms) for ms in (0, 10**12)] == list(limit_reset.NOT_OFFERED_MS)


@pytest.mark.parametrize(
    ("state", "code"),
    [(PermitState.WEDGED, QueueCode.QUEUE_WEDGED), (PermitState.RELEASED, QueueCode.QUEUE_TIMEOUT)],
)
def test_a_request_whose_ticket_ended_is_told_how(state: PermitState, code: QueueCode) -> None:
    ended = PermitRow("t-a", "a", KEY, (KEY,), 1, state, queued_at=0, ttl_ms=60_000)
    assert submitted(book_of(ended), "a", 2).code is code
