"""A report that the spool refuses is refused: nowhere to be found, and free to be sent again (fleet.md section 7)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import pytest

from policy_service.application.errors import OverloadedError, SpoolRefusalError
from policy_service.application.messages import ReportAnswer
from policy_service.application.ports import Committed, StoreUnavailableError, Unit
from policy_service.application.replica import Replica
from policy_service.domain.breaker import BreakerState
from policy_service.domain.ids import DurationMs
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import (
    OPENAI,
    FakeTime,
    ListSpool,
    ask,
    chosen,
    failure,
    make_replica,
    quick_settings,
    report,
    running,
    select,
)

T = TypeVar("T")


class HeldStore(MemoryStore):
    """A fake that takes its time over a commit until the test lets it go, and then does it or fails."""

    def __init__(self, database: MemoryDatabase) -> None:
        super().__init__(database)
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.fails = False

    async def run(self, unit: Unit[T], *, timeout_ms: DurationMs) -> Committed[T]:
        await self.goes_on.wait()
        if self.fails:
            raise StoreUnavailableError("the connection broke before the commit")
        return await super().run(unit, timeout_ms=timeout_ms)


class HeldSpool(ListSpool):
    """A fake that answers when the test lets it."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.answers = asyncio.Event()

    async def append(self, entries: Sequence[tuple[str, bytes]]) -> None:
        await self.answers.wait()
        await super().append(entries)


class CountingSpool(ListSpool):
    """A spool that knows how often it was asked."""

    asked = 0

    async def append(self, entries: Sequence[tuple[str, bytes]]) -> None:
        self.asked += 1
        await super().append(entries)


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def store(moments: FakeTime) -> HeldStore:
    return HeldStore(MemoryDatabase(clock=moments.database))


def with_spool(store: HeldStore, moments: FakeTime, limit: int = 0, spool: ListSpool | None = None) -> Replica:
    chosen_spool = spool or ListSpool(limit)
    return make_replica(store, "r1", time_source=moments, settings=quick_settings("r1"), spool=chosen_spool)


async def refused(replica: Replica, name: str) -> None:
    with pytest.raises(OverloadedError) as found:
        await report(replica, failure(name, 401, report_id=name))
    assert (found.value.reason, found.value.retry_after_ms) == ("SPOOL_FULL", 1_000), "no matter of too many calls"
    assert "spool.max_bytes" in found.value.message


async def taken(replica: Replica, name: str) -> ReportAnswer:
    """Send a report until the replica has noticed that its store is back."""
    async with asyncio.timeout(5):
        while True:
            try:
                answer = await report(replica, failure(name, 401, report_id=name))
            except OverloadedError:
                await asyncio.sleep(0.02)
            else:
                assert answer.durable
                return answer


async def test_a_report_that_the_spool_refuses_has_no_effect_here_and_none_later(
    store: HeldStore, moments: FakeTime
) -> None:
    replica = with_spool(store, moments)
    async with running(replica):
        store.is_away = True
        await refused(replica, "a")
        assert replica.commit.queued == 0
        assert chosen(await select(replica, ask("a", "b"))) == "a"
        store.is_away = False
        await taken(replica, "z")
        assert set(store.database.answers) == {"report/z"}


async def test_it_may_be_sent_again_and_counts_once(store: HeldStore, moments: FakeTime) -> None:
    replica = with_spool(store, moments)
    async with running(replica):
        store.is_away = True
        await refused(replica, "a")
        store.is_away = False
        answer = await taken(replica, "a")
        assert "duplicate" not in answer.ignored


async def test_reports_around_a_refused_one_keep_their_effects(store: HeldStore, moments: FakeTime) -> None:
    replica = with_spool(store, moments, limit=2)
    async with running(replica):
        store.is_away = True
        assert not (await report(replica, failure("a", 503))).durable
        assert not (await report(replica, failure("b", 401))).durable
        await refused(replica, "c")
        breaker = replica.view.rows["breaker", OPENAI, ""]
        assert isinstance(breaker, BreakerState)
        assert breaker.failure_count == 1
        assert chosen(await select(replica, ask("b", "c"))) == "c"
        store.is_away = False


async def test_one_that_a_batch_under_way_holds_is_answered_by_the_end_of_that_batch(
    store: HeldStore, moments: FakeTime
) -> None:
    replica = with_spool(store, moments)
    async with running(replica):
        answers = []
        for store.fails in (False, True):
            store.goes_on.clear()
            call = asyncio.create_task(report(replica, failure("a", 401, report_id=f"fails-{store.fails}")))
            await asyncio.sleep(0.1)
            assert not call.done()
            store.goes_on.set()
            answers.append((await asyncio.gather(call, return_exceptions=True))[0])
        committed, withdrawn = answers
        assert isinstance(committed, ReportAnswer)
        assert committed.durable
        assert isinstance(withdrawn, OverloadedError)
        store.fails = False
        await taken(replica, "z")
        assert "report/fails-True" not in store.database.answers


async def test_everybody_who_repeats_a_report_hears_of_its_refusal(store: HeldStore, moments: FakeTime) -> None:
    spool = HeldSpool(limit=0)
    replica = with_spool(store, moments, spool=spool)
    async with running(replica):
        store.is_away = True
        calls = [asyncio.create_task(report(replica, failure("a", 401, report_id="a"))) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in calls)  # nobody is told `durable: false` before it is on the disk
        spool.answers.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in found] == [SpoolRefusalError] * 3
        store.is_away = False


async def test_a_spool_that_refused_is_not_asked_for_every_report(store: HeldStore, moments: FakeTime) -> None:
    spool = CountingSpool(limit=1)
    replica = with_spool(store, moments, spool=spool)
    async with running(replica):
        store.is_away = True
        assert not (await report(replica, failure("first", 401))).durable
        for n in range(20):
            await refused(replica, f"a{n}")
        assert 2 <= spool.asked < 10
        assert replica.commit.counters.refused == 20
        store.is_away = False
