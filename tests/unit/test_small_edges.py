"""Single edges of small rules, each where the rule changes its mind."""

from __future__ import annotations

from dataclasses import fields

import pytest

from policy_service.domain import egress
from policy_service.domain.catalogue import Route
from policy_service.domain.classification_conditions import configured_row
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.gates import Gate, GateBook, Pace, PermitRow, PermitState
from policy_service.domain.line import Answer, claim
from policy_service.domain.outcome import Outcome
from policy_service.domain.reading import Reading
from policy_service.domain.request_exhaustion import FailedAttempt, exhausted
from tests.unit.test_classification_edges import policy
from tests.unit.test_gates import place


@pytest.mark.parametrize(
    ("cooldown_ms", "locked_ms"), [(1, 1), (0, egress.DEFAULT_COOLDOWN_MS), (-1, egress.DEFAULT_COOLDOWN_MS)]
)
def test_an_address_is_locked_for_the_stated_time_however_short(cooldown_ms: int, locked_ms: int) -> None:
    assert egress.duration_of(cooldown_ms) == locked_ms


@pytest.mark.parametrize(
    ("status", "kind", "text", "is_load"),
    [
        (400, "invalid_request_error", "capacity", False), (422, "invalid_request_error", "capacity", False),
        (421, "invalid_request_error", "capacity", True), (423, "invalid_request_error", "capacity", True),
        (401, "invalid_request_error", "capacity", True), (400, "other", "capacity", True),
        (400, "invalid_request_error", "over capacity", True), (422, "invalid_request_error", "over capacity", True),
    ],
)  # fmt: skip
def test_any_capacity_in_a_callers_fault_is_no_load_but_words_of_load_are(
    status: int, kind: str, text: str, is_load: bool
) -> None:
    row = configured_row(Reading(Outcome(status, type=kind, text=text, message=text), policy(), 0))
    assert (row is not None and row[0] == "model_capacity") is is_load


def test_a_pace_that_never_started_has_no_gap_to_wait_for() -> None:
    assert Pace(gap_ms=10).gap_ends_at == 0
    assert Pace(gap_ms=10, last_start_at=5).gap_ends_at == 15


def test_a_waiter_of_two_gates_is_told_by_the_row_of_the_first() -> None:
    waiting = PermitRow("t", "a", "g", ("g", "h"), 1, PermitState.WAITING, 0, 60_000, waiter_seen_at=0)
    rows = [waiting, PermitRow("t", "a", "h", ("g", "h"), 1, PermitState.WAITING, 0, 60_000, waiter_seen_at=0)]
    found = claim(GateBook([Gate("g", 0), Gate("h", 0)], rows), "a", "r", 1)
    assert (found.answer, found.row and found.row.gate) == (Answer.WAITING, "g")


def test_an_attempt_that_spent_one_model_does_not_hide_those_behind_it() -> None:
    per_model, whole = place("a", "", "m"), place("b", "", "m")
    attempts = [FailedAttempt(each, 429, "quota_exhausted") for each in (per_model, whole)]
    found = exhausted(attempts, lambda target: target.provider == "a")
    assert found.providers == {"b"}
    assert found.targets == {per_model, whole}


def test_a_fact_says_all_that_its_cause_says() -> None:
    cause = Cause("e", 5, "r", "d", "q", 503, 429, "why", "rule", "text", 700, "op", "row")
    fact = FactLog(cause).add("m", "k", "a", "b")
    assert fact.id == "e.0"
    for each in fields(Cause)[1:]:
        assert getattr(fact, each.name) == getattr(cause, each.name), each.name


def test_a_route_has_options_only_where_some_are_stated() -> None:
    assert Route("r", "priority", ()).options == {}
