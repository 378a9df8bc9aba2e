"""Properties of the fold: batch order is nothing, deadlines never shorten, no success clears newer evidence."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policy_service.application.events import OutcomeEvent, fold_order
from policy_service.application.report_plan import fold
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.ids import AuthClass, ConnectionId, Generations, ModelId, ProviderId, Target
from policy_service.domain.lockout import ModelLockState
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Key, Row, StateBook
from policy_service.settings.provider_data import builtin_providers
from tests.folding import fold_batch

EXAMPLES = max(50, int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200")) // 4)
"""A quarter of what the state machines get: one example folds up to two dozen reports through every mechanism."""
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
STORED = {
    "provider_cooldown.enabled": True,
    "provider_cooldown.api_key.failure_threshold": 3,
    "model_lockout.enabled": True,
    "breaker.api_key.failure_threshold": 4,
    "breaker.api_key.reset_timeout_ms": 5_000,
}
POLICY = Policy(Catalogue(providers=builtin_providers(), stored_settings=STORED))
STATUSES = (200, 200, 408, 429, 429, 500, 503, 503, 502, 529, 401, 403, 404, 499)
PROVIDERS = ("acme", "gemini", "openai")


@st.composite
def events(draw: st.DrawFn, statuses: Sequence[int] = STATUSES, longest: int = 14) -> list[OutcomeEvent]:
    """Reports of a few connections and models within a minute, calls of up to ten seconds."""
    count = draw(st.integers(1, longest))
    return [_event(draw, number, statuses) for number in range(count)]


def _event(draw: st.DrawFn, number: int, statuses: Sequence[int]) -> OutcomeEvent:
    at = draw(st.integers(10_000, 60_000) | st.sampled_from([20_000, 25_000, 30_000]))
    provider, connection = draw(st.sampled_from(PROVIDERS)), draw(st.sampled_from(["c1", "c2", ""]))
    model = draw(st.sampled_from(["m1", "m2"]))
    hint = draw(st.sampled_from([{}, {}, {"retry-after": "30"}]))
    outcome = Outcome(
        draw(st.sampled_from(statuses)),
        provider=provider,
        connection=connection,
        model=model,
        auth_class=AuthClass.API_KEY,
        headers=hint,
        pool_attempt=draw(st.booleans()),
    )
    return OutcomeEvent(
        event_id=f"e{number:03}",
        at=at,
        target=Target(ProviderId(provider), ConnectionId(connection), ModelId(model)),
        outcome=outcome,
        started_at=at - draw(st.integers(0, 10_000)),
        first_byte_at=draw(st.sampled_from([None, at])),
        generations=draw(st.sampled_from([None, Generations(), Generations(2, 1, 1)])),
        replica=draw(st.sampled_from(["r1", "r2"])),
    )


def rows(book: StateBook) -> dict[Key, Row]:
    return dict(book.changes)


@SETTINGS
@given(reports=events(), data=st.data())
def test_arrival_order_within_a_batch_changes_nothing(reports: list[OutcomeEvent], data: st.DataObject) -> None:
    one, other = StateBook(), StateBook()
    first = fold_batch(one, reports, POLICY)
    second = fold_batch(other, data.draw(st.permutations(reports)), POLICY)
    assert rows(one) == rows(other)
    assert first == second


@SETTINGS
@given(reports=events())
def test_folding_a_batch_is_folding_one_by_one_in_order(reports: list[OutcomeEvent]) -> None:
    whole, single = StateBook(), StateBook()
    fold_batch(whole, reports, POLICY)
    for report in sorted(reports, key=fold_order):
        fold(single, report, POLICY)
    assert rows(whole) == rows(single)


@SETTINGS
@given(reports=events(), cut=st.integers(0, 14))
def test_transactions_in_order_add_up_to_one(reports: list[OutcomeEvent], cut: int) -> None:
    ordered = sorted(reports, key=fold_order)
    whole, parts = StateBook(), StateBook()
    fold_batch(whole, ordered, POLICY)
    fold_batch(parts, ordered[:cut], POLICY)
    committed = rows(parts)
    later = StateBook(committed)
    fold_batch(later, ordered[cut:], POLICY)
    assert {**committed, **rows(later)} == rows(whole)


@SETTINGS
@given(reports=events())
def test_replay_of_known_reports_changes_nothing(reports: list[OutcomeEvent]) -> None:
    book = StateBook()
    known = fold_batch(book, reports, POLICY)
    before = rows(book)
    assert fold_batch(book, reports, POLICY, known=known) == {}
    assert rows(book) == before
    doubled = StateBook()
    fold_batch(doubled, [*reports, *reports], POLICY)
    assert rows(doubled) == before


def deadline(row: Row) -> int | None:
    """End of what a row excludes; None where it excludes nothing."""
    if isinstance(row, BreakerState):
        return row.reopen_at if row.state is State.OPEN else None
    if isinstance(row, ConnectionState):
        return row.rate_limited_until
    if isinstance(row, ModelLockState):
        return row.until
    return row.cooling_until if isinstance(row, ProviderCooldownState) else None


def ends_exclusion(row: Row) -> bool:
    """Ways in which a deadline may go: a terminal state, or the end of OPEN."""
    return (isinstance(row, ConnectionState) and row.is_terminal) or (
        isinstance(row, BreakerState) and row.state is State.HALF_OPEN
    )


@SETTINGS
@given(reports=events())
def test_deadlines_shorten_by_success_only(reports: list[OutcomeEvent]) -> None:
    """In arrival order, that is with late events among them."""
    book = StateBook()
    for report in reports:
        before = rows(book)
        fold(book, report, POLICY)
        if report.outcome.is_success:
            continue
        for key, row in before.items():
            ended, now = deadline(row), book.changes[key]
            over = ended is not None and ended <= report.at
            assert over or ended is None or ends_exclusion(now) or (deadline(now) or 0) >= ended


def evidence_at(row: Row) -> int | None:
    """Instant of the newest failure that a row remembers."""
    if isinstance(row, ConnectionState):
        return row.last_error_at
    known: int | None = getattr(row, "last_failure_at", None)
    return known


@SETTINGS
@given(reports=events(), late=events(statuses=(200,), longest=4))
def test_no_success_clears_evidence_newer_than_its_call(reports: list[OutcomeEvent], late: list[OutcomeEvent]) -> None:
    book = StateBook()
    fold_batch(book, reports, POLICY)
    for report in late:
        own = replace(report, event_id=f"late-{report.event_id}", first_byte_at=None)
        before = rows(book)
        fold(book, own, POLICY)
        for key, row in before.items():
            seen = evidence_at(row)
            if seen is not None and own.started_at < seen:
                _keeps(row, book.changes[key])


def _keeps(before: Row, after: Row) -> None:
    if isinstance(before, BreakerState):
        assert isinstance(after, BreakerState)
        assert after.failure_count >= before.failure_count
    else:
        assert deadline(after) == deadline(before)
        assert evidence_at(after) == evidence_at(before)


@SETTINGS
@given(reports=events(statuses=(502, 503)), age=st.integers(1, 2_000))
def test_no_success_sets_aside_a_failure_that_came_after_its_call_began(reports: list[OutcomeEvent], age: int) -> None:
    """Whatever became of that failure: counted, swallowed by a running timer, part of a burst, left to the breaker."""
    book = StateBook()
    current = [replace(each, generations=None, outcome=each.outcome._replace(pool_attempt=True)) for each in reports]
    fold_batch(book, current, POLICY)
    newest = max(current, key=fold_order)
    assume(newest.target.connection)
    success = replace(newest, event_id="success", outcome=newest.outcome._replace(status=200, headers={}))
    began = newest.at - age
    before = rows(book)
    fold(book, replace(success, at=newest.at + 1, started_at=began, first_byte_at=began), POLICY)
    assert {key: _held(row) for key, row in rows(book).items()} == {key: _held(row) for key, row in before.items()}


def _held(row: Row) -> tuple[object, ...]:
    """What a row holds against its key, time's own doings aside."""
    names = ("failure_count", "count", "failures", "backoff_level", "streak", "last_at")
    return deadline(row), *(getattr(row, name, None) for name in names)


@SETTINGS
@given(times=st.lists(st.integers(0, 100_000), min_size=1, max_size=12), data=st.data())
def test_counts_of_late_failures_add_whatever_the_order(times: list[int], data: st.DataObject) -> None:
    patient = Policy(Catalogue(stored_settings={"breaker.api_key.failure_threshold": 1_000}))
    book = StateBook()
    for number, at in enumerate(data.draw(st.permutations(times))):
        target = Target(ProviderId("acme"), ConnectionId(f"c{number}"), ModelId(""))
        outcome = Outcome(503, auth_class=AuthClass.API_KEY)
        fold(book, OutcomeEvent(f"e{number}", at, target, outcome, started_at=at), patient)
    row = book.get(BreakerState, "acme", "")
    assert (row.failure_count, row.last_failure_at) == (len(times), max(times))


@SETTINGS
@given(reports=events())
def test_every_exclusion_has_a_fact(reports: list[OutcomeEvent]) -> None:
    book = StateBook()
    facts = [fact for result in fold_batch(book, reports, POLICY).values() for fact in result.facts]
    assert len({fact.id for fact in facts}) == len(facts)
    known: dict[str, Any] = {fact.id: fact for fact in facts}
    for row in rows(book).values():
        if deadline(row) is not None and not row.is_default:
            assert getattr(row, "fact_id", None) in known


@SETTINGS
@given(reports=events())
def test_folding_the_same_event_twice_from_the_same_rows_gives_the_same_facts(reports: list[OutcomeEvent]) -> None:
    assume(len(reports) > 1)
    book = StateBook()
    fold_batch(book, reports[:-1], POLICY)
    one, other = StateBook(rows(book)), StateBook(rows(book))
    assert fold(one, reports[-1], POLICY) == fold(other, reports[-1], POLICY)
