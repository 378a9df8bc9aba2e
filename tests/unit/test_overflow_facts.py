"""The fact of an exclusion that the pool guard leaves without effect: one for the fleet, never one a request
(spec/guards.md section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from policy_service.application.replica import Replica
from policy_service.domain.facts import Fact
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, failure, make_replica, quick_settings, report, running, select

GUARDED = replace(builtin_catalogue(), stored_settings={"pool_guard.enabled": True})
POOL = ("a", "b", "c", "d")


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def database(moments: FakeTime) -> MemoryDatabase:
    return MemoryDatabase(moments.database)


def member(database: MemoryDatabase, moments: FakeTime, name: str = "r1") -> Replica:
    store = MemoryStore(database)
    return make_replica(store, name, time_source=moments, catalogue=GUARDED, settings=quick_settings(name))


async def excluded(replica: Replica, moments: FakeTime, names: Sequence[str]) -> None:
    for name in names:
        await report(replica, failure(name, 429, headers={"x-none": "1"}))
        moments.ms += 1


async def seen(replica: Replica, names: Sequence[str] = POOL) -> None:
    await select(replica, ask(*names))
    await replica.overflows.settle()


def overflow(database: MemoryDatabase) -> list[Fact]:
    return [fact for fact in database.facts.values() if fact.mechanism == "pool_guard"]


async def test_an_exclusion_beyond_the_share_leaves_one_fact_that_says_which(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, moments)) as replica:
        await excluded(replica, moments, "ab")
        await seen(replica)
        assert overflow(database) == []
        await excluded(replica, moments, "c")
        await seen(replica)
        (fact,) = overflow(database)
    assert (fact.connection, fact.from_state, fact.to_state) == ("c", "connection_cooldown", "not_enforced")
    assert (fact.reason, fact.replica, fact.provider) == ("exclusion_overflow", "r1", "openai")
    assert fact.deadline_at == database.rows[("connection", "openai", "c")].row.rate_limited_until  # type: ignore[attr-defined]


async def test_requests_add_no_fact_and_no_statement(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(member(database, moments)) as replica:
        await excluded(replica, moments, "abc")
        await seen(replica)
        await excluded(replica, moments, ("elsewhere",))
        before = database.version
        for _ in range(50):
            await seen(replica)
        assert database.version == before
    assert len(overflow(database)) == 1


async def test_two_replicas_record_the_same_fact(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(member(database, moments)) as one, running(member(database, moments, "r2")) as two:
        await excluded(one, moments, "abc")
        await two.follower._step()
        await seen(one)
        await seen(two)
    assert len(overflow(database)) == 1


async def test_the_next_exclusion_of_the_same_target_is_another_fact(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, moments)) as replica:
        await excluded(replica, moments, "abc")
        await seen(replica)
        moments.ms += 3_600_000
        await excluded(replica, moments, "abc")
        await seen(replica)
    assert [fact.connection for fact in overflow(database)] == ["c", "c"]


async def test_another_pool_has_a_fact_of_its_own(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(member(database, moments)) as replica:
        await excluded(replica, moments, "abc")
        await seen(replica)
        await seen(replica, (*POOL, "e"))
    assert len({fact.key for fact in overflow(database)}) == 2


async def test_a_fact_that_found_no_store_is_written_at_a_later_look(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    replica = member(database, moments)
    async with running(replica):
        await excluded(replica, moments, "abc")
        assert isinstance(replica.store, MemoryStore)
        replica.store.is_away = True
        await seen(replica)
        replica.store.is_away = False
        assert overflow(database) == []
        await excluded(replica, moments, ("elsewhere",))
        await seen(replica)
    assert len(overflow(database)) == 1
