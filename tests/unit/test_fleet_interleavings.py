"""Interleavings of spec/fleet.md that have no suite of their own, each by the words of its rule."""

from __future__ import annotations

import pytest

from policy_service.application.replica import Replica
from policy_service.domain.breaker import BreakerState, State
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import OPENAI, FakeTime, ask, chosen, failure, make_replica, quick_settings, report, running, select


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def database(moments: FakeTime) -> MemoryDatabase:
    return MemoryDatabase(clock=moments.database)


def member(database: MemoryDatabase, name: str, moments: FakeTime) -> Replica:
    return make_replica(MemoryStore(database), name, time_source=moments, settings=quick_settings(name))


def breaker(database: MemoryDatabase) -> BreakerState:
    row = database.rows[BreakerState.KIND, OPENAI, ""].row
    assert isinstance(row, BreakerState)
    return row


async def open_breaker(replica: Replica) -> None:
    for n in range(12):
        await report(replica, failure(f"burst{n}"))


async def test_a_suppressed_failure_repeated_seven_seconds_later_is_not_counted(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, "r1", moments)) as one, running(member(database, "r2", moments)) as two:
        await report(one, failure("a", report_id="first"))
        moments.ms += 1_000
        suppressed = await report(one, failure("a", report_id="second"))
        assert "suppressed" in suppressed.ignored
        moments.ms += 7_000
        repeated = await report(two, failure("a", report_id="second"))
        assert "duplicate" in repeated.ignored
        assert breaker(database).failure_count == 1


async def test_the_late_failure_of_an_old_generation_does_not_count_after_the_row_went_default_and_opened_anew(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, "r1", moments)) as replica:
        await open_breaker(replica)
        moments.ms += 30_000
        probe = await select(replica, ask("z"))
        await report(replica, failure("z", 200, token=probe.token))
        assert breaker(database).state is State.CLOSED
        late = await select(replica, ask("late"))
        assert chosen(late) == "late"
        assert late.token is not None
        assert late.token.targets[0].generations.breaker == breaker(database).generation > 1
        moments.ms += 31 * 60_000
        await replica.upkeep()
        assert breaker(database).is_default
        await open_breaker(replica)
        opened = breaker(database)
        assert opened.state is State.OPEN
        told = await report(replica, failure("late", token=late.token))
        assert "stale_generation" in told.ignored
        assert breaker(database).failure_count == opened.failure_count
        assert breaker(database).reopen_at == opened.reopen_at
