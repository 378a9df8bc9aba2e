"""A failure that counts for nothing is still newer than a success whose call began before it (README, ruling 9), on
every kind of key; it moves nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.application.events import OutcomeEvent
from policy_service.application.report_plan import fold
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.breaker_controls import reset
from policy_service.domain.breaker_transitions import hear_failure
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.lockout import FamilyPoolState, ModelLockState
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook
from policy_service.settings.provider_data import builtin_providers

POLICY = Policy(Catalogue(providers=builtin_providers()))
HOUR = 3_600_000


def folded(
    book: StateBook, status: int, at: int, provider: str = "acme", *, started: int | None = None, **fields: Any
) -> None:
    """One report of connection `c` and model `m`; a success began at `started`."""
    target = Target(ProviderId(provider), ConnectionId(fields.pop("connection", "c")), ModelId("m"))
    outcome = Outcome(status, auth_class=AuthClass.API_KEY, **fields)
    began = at if started is None else started
    event = OutcomeEvent(f"{status}@{at}", at, target, outcome, started_at=began, first_byte_at=began)
    fold(book, event, POLICY)


def connection(book: StateBook, provider: str = "acme") -> ConnectionState:
    return book.get(ConnectionState, provider, "c")


# -- breaker -------------------------------------------------------------------------------------------------
def test_a_failure_of_a_burst_keeps_its_count_and_the_burst_from_an_older_success() -> None:
    book = StateBook()
    folded(book, 503, 1_000)
    folded(book, 503, 3_000)
    row, guard = book.get(BreakerState, "acme", ""), book.get(BurstState, "acme", "c")
    assert (row.failure_count, row.last_failure_at, guard.last_at) == (1, 1_000, 1_000)
    folded(book, 200, 4_000, started=2_999)
    assert book.get(BreakerState, "acme", "").failure_count == 1
    assert book.get(BurstState, "acme", "c").last_at == 1_000
    folded(book, 200, 4_000, started=3_000)
    assert book.get(BreakerState, "acme", "").failure_count == 0
    assert book.get(BurstState, "acme", "c").last_at is None


def test_the_next_failure_counts_when_it_would_have_counted_anyway() -> None:
    book = StateBook()
    for at in (1_000, 5_999, 6_000):
        folded(book, 503, at)
    assert book.get(BreakerState, "acme", "").failure_count == 2


@pytest.mark.parametrize("state", [State.OPEN, State.HALF_OPEN])
def test_a_breaker_that_admits_nothing_hears_nothing(state: State) -> None:
    row = BreakerState("acme", state=state, last_failure_at=1, reopen_at=HOUR)
    assert hear_failure(row, 500) is row


def test_only_news_is_kept_and_a_reset_forgets_it() -> None:
    row = BreakerState("acme", failure_count=1, last_failure_at=1_000)
    heard = hear_failure(row, 1_001)
    assert heard == replace(row, failure_heard_at=1_001)
    assert hear_failure(row, 1_000) is row
    assert hear_failure(heard, 1_001) is heard
    assert reset(heard, 2_000, FactLog(Cause("e", 2_000))).failure_heard_at is None


def test_the_first_failure_of_a_breaker_is_heard_however_early_it_is() -> None:
    assert hear_failure(BreakerState("acme"), 1).failure_heard_at == 1


# -- connection ----------------------------------------------------------------------------------------------
def test_a_failure_within_the_timer_keeps_it_from_an_older_success_and_moves_nothing() -> None:
    book = StateBook()
    folded(book, 503, 1_000)
    before = connection(book)
    folded(book, 503, 2_000)
    after = connection(book)
    assert after == replace(before, failure_heard_at=2_000, last_event_at=2_000)
    folded(book, 200, 2_500, started=1_999)
    assert connection(book) == after
    folded(book, 200, 2_500, started=2_000)
    assert connection(book).is_default


@pytest.mark.parametrize("status", [400, 404, 499])
def test_what_is_no_fault_of_the_connection_is_not_held_against_it(status: int) -> None:
    """A bad request, a missing model of a provider that counts per model, a client that left."""
    book = StateBook()
    folded(book, 503, 1_000, "acme")
    before = connection(book)
    texts = {404: "the model m does not exist"}
    folded(book, status, 2_000, message=texts.get(status, "bad"), text=texts.get(status, "bad"))
    assert connection(book) == before


def test_a_sibling_whose_own_timer_is_longer_hears_of_the_exhausted_address() -> None:
    book = StateBook()
    address: dict[str, Any] = {"egress_address": "192.0.2.1"}
    folded(book, 429, 1_000, "opencode-zen", connection="c", headers={"retry-after": "3600"}, **address)
    folded(book, 429, 2_000, "opencode-zen", connection="d", headers={"retry-after": "60"}, **address)
    row = connection(book, "opencode-zen")
    assert (row.rate_limited_until, row.failure_heard_at) == (1_000 + HOUR, 2_000)


# -- model locks and families --------------------------------------------------------------------------------
def lock(book: StateBook) -> ModelLockState:
    return next(row for row in book.rows(ModelLockState) if row.failure_count or row.until)


def test_a_failure_left_to_the_breaker_keeps_a_lock_from_an_older_success() -> None:
    book = StateBook()
    for at in (1_000, 2_000):
        folded(book, 502, at, "gemini")
    book.put(BreakerState("gemini", state=State.OPEN, reopen_at=HOUR, last_failure_at=2_000))
    before = lock(book)
    assert before.failure_count == 2
    folded(book, 502, 3_000, "gemini")
    assert lock(book) == replace(before, failure_heard_at=3_000)
    folded(book, 200, 4_000, "gemini", started=2_999)
    assert lock(book).failure_count == 2
    folded(book, 200, 4_000, "gemini", started=3_000)
    assert lock(book).failure_count == 1


def test_a_failure_that_a_cooling_connection_swallows_is_heard_by_the_lock_of_its_model() -> None:
    book = StateBook()
    folded(book, 502, 1_000, "gemini")
    cooling = replace(connection(book, "gemini"), test_status="unavailable", rate_limited_until=HOUR)
    book.put(cooling)
    before = lock(book)
    folded(book, 502, 3_000, "gemini")
    assert lock(book) == replace(before, failure_heard_at=3_000)
    assert connection(book, "gemini") == cooling


def test_a_failure_of_a_family_that_waits_already_keeps_its_timer_from_an_older_success() -> None:
    book = StateBook()
    folded(book, 429, 1_000, "codex")
    pool = next(book.rows(FamilyPoolState))
    assert pool.limited_at == 1_000
    folded(book, 429, 2_000, "codex")
    heard = next(book.rows(FamilyPoolState))
    assert (heard.limited_until, heard.limited_at) == (pool.limited_until, 2_000)
    folded(book, 200, 3_000, "codex", started=1_999)
    assert next(book.rows(FamilyPoolState)) == heard
    folded(book, 200, 3_000, "codex", started=2_000)
    assert next(book.rows(FamilyPoolState)).is_default
