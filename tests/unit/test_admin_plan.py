"""Acts of operators: what each scope clears, what it leaves, and that old evidence stays out afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.application.admin_plan import (
    CONTROLS,
    RESETTERS,
    SCOPES,
    Selection,
    clear_model_lock,
    control_breaker,
    reset_scopes,
    reset_unit_scope,
)
from policy_service.domain.breaker import BreakerState, Override, State
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.connection_state import BANNED, ConnectionState
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.lockout import FamilyPoolState, ModelLockState
from policy_service.domain.policy import Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Row, StateBook
from policy_service.domain.usage_wall_state import Lane

EVERYTHING = Selection()
OPEN = BreakerState("acme", state=State.OPEN, failure_count=12, reopen_at=30_000, generation=2)
COOLING = ConnectionState("acme", "c1", test_status="unavailable", rate_limited_until=60_000, backoff_level=3)
DEAD = ConnectionState("acme", "c2", test_status=BANNED)
LOCK = ModelLockState("acme", "c1", "family", "m", model="m", until=60_000, failure_count=2)
WINDOW = ProviderCooldownState("acme", failures=(1, 2), cooling_until=60_000)


def book_of(*rows: Row) -> StateBook:
    return StateBook({row.key: row for row in rows})


def log() -> FactLog:
    return FactLog(Cause("act", 100, actor="alice"))


def reset(book: StateBook, *scopes: str, selection: Selection = EVERYTHING, facts: FactLog | None = None) -> int:
    return reset_scopes(book, scopes, selection, 100, facts or log())


def test_breaker_reset_closes_every_key_and_ends_its_bursts() -> None:
    book = book_of(OPEN, BreakerState("other", failure_count=1), BurstState("acme", "c1", 90))
    assert reset(book, "breakers") == 2
    assert book.get(BreakerState, "acme", "").state is State.CLOSED
    assert book.get(BurstState, "acme", "c1").is_default


def test_selection_narrows_a_reset() -> None:
    book = book_of(OPEN, BreakerState("other", failure_count=1))
    assert reset(book, "breakers", selection=Selection("other")) == 1
    assert book.get(BreakerState, "acme", "") == OPEN


def test_breaker_reset_leaves_every_other_mechanism() -> None:
    book = book_of(OPEN, COOLING, DEAD, LOCK, WINDOW)
    reset(book, "breakers")
    assert set(book.changes) == {OPEN.key}


def test_connection_cooldowns_are_reset_without_touching_terminal_states() -> None:
    book = book_of(COOLING, DEAD, FamilyPoolState("acme", "c1", "codex", 60_000))
    assert reset(book, "connection_cooldowns") == 2
    cleared = book.get(ConnectionState, "acme", "c1")
    assert (cleared.test_status, cleared.rate_limited_until, cleared.backoff_level) == ("active", None, 0)
    assert cleared.generation == COOLING.generation + 1
    assert book.get(ConnectionState, "acme", "c2") == DEAD


def test_terminal_states_end_only_when_named() -> None:
    book = book_of(COOLING, DEAD)
    assert reset(book, "terminal_states") == 1
    revived = book.get(ConnectionState, "acme", "c2")
    assert (revived.test_status, revived.generation) == ("active", 2)
    assert book.get(ConnectionState, "acme", "c1") == COOLING


def test_provider_cooldowns_are_emptied() -> None:
    book = book_of(WINDOW, ProviderCooldownState("acme", "c1", count=2, cooling_until=50))
    assert reset(book, "provider_cooldowns") == 2
    assert book.get(ProviderCooldownState, "acme", "").is_default


def test_lock_reset_fences_every_key_of_the_connection() -> None:
    """The keys of one model share the highest generation: the reset key must rise above all of them."""
    fenced = ModelLockState("acme", "c1", "exact", "m", generation=5)
    book = book_of(LOCK, fenced)
    assert reset(book, "model_lockouts") == 1
    row = book.get(ModelLockState, "acme", "c1", "family", "m")
    assert row.is_default
    assert row.generation == 6


def test_reset_of_nothing_changes_nothing() -> None:
    book, facts = book_of(BreakerState("acme", generation=7)), log()
    assert reset(book, *RESETTERS, facts=facts) == 0
    assert not book.changes
    assert not facts.facts


def test_unknown_scope_is_an_error() -> None:
    with pytest.raises(KeyError):
        reset(book_of(), "everything")
    assert set(SCOPES) - set(RESETTERS) == {"affinity_pins", "permits"}


@pytest.mark.parametrize("scope", sorted(RESETTERS))
def test_every_reset_names_its_actor(scope: str) -> None:
    facts = log()
    cooling = ProviderCooldownState("acme", "", (1,), 0, 60_000)
    wall = Lane("acme", "a", budget_spent_until=60_000)
    reset(book_of(OPEN, COOLING, DEAD, LOCK, cooling, wall), scope, facts=facts)
    assert facts.facts
    assert {fact.actor for fact in facts.facts} == {"alice"}


@pytest.mark.parametrize(
    ("control", "override"),
    [("force_open", Override.FORCE_OPEN), ("disable", Override.DISABLED), ("reset", Override.NONE)],
)
def test_control_is_carried_out_on_one_key(control: str, override: Override) -> None:
    book: Any = book_of(OPEN)
    after = control_breaker(book, control, "acme", "", 100, log())
    assert after.override is override
    assert book.get(BreakerState, "acme", "") == after
    assert control in CONTROLS


def test_model_lock_is_cleared_on_every_connection_that_has_it() -> None:
    policy = Policy(Catalogue())
    second = ModelLockState("acme", "c2", "family", "m", model="m", until=60_000, failure_count=1)
    book = book_of(LOCK, second)
    assert clear_model_lock(book, "acme", "", "m", policy, log()) == 2
    assert clear_model_lock(book, "acme", "", "absent", policy, log()) == 0


def test_reset_without_a_provider_locks_everything() -> None:
    assert reset_unit_scope(EVERYTHING).all_providers
    assert reset_unit_scope(Selection("acme")).whole_providers == {"acme"}
