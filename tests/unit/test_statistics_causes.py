"""Reports that are statistics only say why, and are counted by cause (spec/README.md, Facts)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from policy_service.application.replica import Replica
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, failure, make_replica, quick_settings, report, running, select


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
async def replica(moments: FakeTime) -> AsyncIterator[Replica]:
    store = MemoryStore(MemoryDatabase(clock=moments.database))
    async with running(make_replica(store, time_source=moments, settings=quick_settings("r1"))) as made:
        yield made


async def test_a_stale_success_says_so_although_it_changes_nothing(replica: Replica, moments: FakeTime) -> None:
    call = await select(replica, ask("a"))
    moments.ms += 1_000
    await report(replica, failure("a", 429, headers={"retry-after": "60"}))
    moments.ms += 1_000
    answer = await report(replica, failure("a", 200, token=call.token))
    assert answer.ignored == ("stale_success",)
    assert replica.report.ignored == {"stale_success": 1}


async def test_a_burst_and_a_repetition_are_counted_by_their_causes(replica: Replica, moments: FakeTime) -> None:
    await report(replica, failure("a", 503))
    moments.ms += 100
    assert (await report(replica, failure("a", 503))).ignored == ("suppressed",)
    twice = failure("b", 503, report_id="once")
    await report(replica, twice)
    assert (await report(replica, twice)).ignored == ("duplicate",)
    assert replica.report.ignored == {"suppressed": 1, "duplicate": 1}


async def test_a_success_that_counts_is_no_statistics(replica: Replica, moments: FakeTime) -> None:
    await report(replica, failure("a", 503))
    moments.ms += 10_000
    assert (await report(replica, failure("a", 200))).ignored == ()
    assert (await report(replica, failure("untouched", 200))).ignored == ()
    assert not replica.report.ignored
