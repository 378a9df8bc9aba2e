"""A sweep drops what time has emptied and nothing that still says something."""

from __future__ import annotations

from policy_service.application.upkeep_plan import sweep, upkeep_unit
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.breaker_burst import MAX_CONNECTION_KEYS, BurstState
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.lockout import ModelLockState
from policy_service.domain.policy import Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Row, StateBook

POLICY = Policy(Catalogue())
HOUR = 3_600_000


def book_of(*rows: Row) -> StateBook:
    return StateBook({row.key: row for row in rows})


def test_what_time_has_emptied_goes() -> None:
    book = book_of(
        BreakerState("acme", last_failure_at=0, generation=4),
        BurstState("acme", "c1", 0),
        ProviderCooldownState("acme", failures=(0,), last_failure_at=0),
        ModelLockState("acme", "c1", "family", "m", until=10, failure_count=1, last_failure_at=0),
    )
    assert sweep(book, HOUR, POLICY) == 4
    assert all(row.is_default for row in book.changes.values())
    assert book.get(BreakerState, "acme", "").generation == 4


def test_what_still_says_something_stays() -> None:
    book = book_of(
        BreakerState("acme", state=State.OPEN, failure_count=12, last_failure_at=0, reopen_at=10),
        BreakerState("other", failure_count=1, last_failure_at=0),
        BurstState("acme", "c1", HOUR - 1),
        ProviderCooldownState("acme", failures=(0,), last_failure_at=0, cooling_until=HOUR + 1),
        ModelLockState("acme", "c1", "family", "m", until=HOUR, failure_count=1, last_failure_at=0),
    )
    assert sweep(book, HOUR, POLICY) == 0


def test_idle_breakers_beyond_the_limit_of_the_fleet_go_and_others_stay() -> None:
    rows = [BreakerState(f"p{n:03}", last_failure_at=HOUR) for n in range(502)]
    rows += [BreakerState("open", state=State.OPEN, last_failure_at=0, reopen_at=2 * HOUR)]
    unit = upkeep_unit({row.key: row for row in rows}, HOUR, POLICY)
    assert unit is not None
    assert unit.scope.providers == {"p000", "p001", "p002"}
    book = book_of(*rows[:3])
    assert unit.run(book, HOUR, {}).value == 3
    assert all(row.is_default for row in book.changes.values())


def test_burst_times_are_bounded_oldest_first() -> None:
    many = [BurstState("acme", f"c{n}", HOUR + n) for n in range(MAX_CONNECTION_KEYS + 2)]
    book = book_of(*many)
    assert sweep(book, HOUR, POLICY) == 2
    assert {key[2] for key in book.changes} == {"c0", "c1"}
