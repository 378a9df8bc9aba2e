"""A probe permit whose answer comes after the selection's budget: neither doubled nor swallowed (docs/adr/0016)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest

from policy_service.application import probe_acquire
from policy_service.application.messages import Dispatch, Reject, SelectAnswer
from policy_service.application.ports import Committed, StoreSlowError, StoreUnavailableError, Unit
from policy_service.application.replica import Replica
from policy_service.domain.breaker import BreakerState, live_permits
from policy_service.domain.ids import DurationMs
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import OPENAI, FakeTime, ask, failure, make_replica, quick_settings, report, running, select

T = TypeVar("T")


class LateStore(MemoryStore):
    """A fake that does at once what it is asked, and answers when the test lets it, or as it is told."""

    def __init__(self, database: MemoryDatabase) -> None:
        super().__init__(database)
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: StoreUnavailableError | None = None

    async def run(self, unit: Unit[T], *, timeout_ms: DurationMs) -> Committed[T]:
        if self.error is not None:
            raise self.error
        committed = await super().run(unit, timeout_ms=timeout_ms)
        await self.answers.wait()
        return committed


class Fleet:
    """One database, one replica whose store is late, and another that is prompt; a breaker that is due for a probe."""

    def __init__(self) -> None:
        self.moments = FakeTime()
        self.database = MemoryDatabase(clock=self.moments.database)
        self.store = LateStore(self.database)
        self.late = self._replica(self.store, "late")
        self.prompt = self._replica(MemoryStore(self.database), "prompt")

    def _replica(self, store: MemoryStore, name: str) -> Replica:
        settings = quick_settings(name)
        return make_replica(
            store,
            name,
            time_source=self.moments,
            settings=replace(settings, select_ms=10, follow=replace(settings.follow, poll_ms=5)),
        )

    @asynccontextmanager
    async def half_open(self) -> AsyncIterator[None]:
        async with running(self.late), running(self.prompt):
            for n in range(12):
                await report(self.prompt, failure(f"burst{n}"))
            self.moments.ms += 30_000
            await self.late.follower._step()
            yield
            self.store.answers.set()

    async def answered_late(self, request_id: str = "", *, is_retry_safe: bool = True) -> SelectAnswer:
        """A selection that runs out of its budget; its grant arrives afterwards."""
        self.store.answers.clear()
        request = ask("z", request_id=request_id)._replace(is_retry_safe=is_retry_safe)
        answer = await select(self.late, request)
        self.store.answers.set()
        while self.late.grants.probes._overdue:
            await asyncio.sleep(0.001)
        return answer

    def held(self) -> list[str]:
        row = self.database.rows[BreakerState.KIND, OPENAI, ""].row
        assert isinstance(row, BreakerState)
        return [permit.id for permit in live_permits(row, self.moments.ms)]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def permits_of(answer: SelectAnswer) -> list[str]:
    assert isinstance(answer.verdict, Dispatch), answer.verdict
    return [permit.permit_id for permit in answer.verdict.permits]


@pytest.mark.parametrize("is_retry_safe", [True, False])
async def test_a_permit_that_came_too_late_serves_the_next_selection_without_the_store(
    fleet: Fleet, is_retry_safe: bool
) -> None:
    async with fleet.half_open():
        assert isinstance((await fleet.answered_late(is_retry_safe=is_retry_safe)).verdict, Reject)
        (held,) = fleet.held()
        before = fleet.store.statements
        fleet.moments.ms += 7
        answer = await select(fleet.late, ask("z"))
        assert permits_of(answer) == [held]
        assert answer.token is not None
        assert answer.token.started_at == fleet.moments.ms
        assert fleet.store.statements == before
        assert isinstance((await select(fleet.late, ask("z"))).verdict, Reject)


async def test_a_repeated_call_is_not_given_the_late_permit_that_somebody_else_uses(fleet: Fleet) -> None:
    async with fleet.half_open():
        await fleet.answered_late("mine")
        (used,) = permits_of(await select(fleet.late, ask("z")))
        for replica in (fleet.late, fleet.prompt):
            assert isinstance((await select(replica, ask("z", request_id="mine"))).verdict, Reject)
        assert fleet.held() == [used]


async def test_the_probe_of_a_late_permit_closes_the_breaker_as_any_other(fleet: Fleet) -> None:
    async with fleet.half_open():
        await fleet.answered_late("mine")
        answer = await select(fleet.late, ask("z"))
        told = await report(fleet.prompt, failure("z", 200, token=answer.token))
        assert [each.to_state for each in told.effects if each.mechanism == "breaker"] == ["CLOSED"]


async def test_a_late_permit_that_nobody_wants_is_given_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_acquire, "KEPT_MS", 20)
    async with fleet.half_open():
        await fleet.answered_late()
        assert fleet.held()
        await fleet.late.grants.settle()
        assert fleet.held() == []
        assert permits_of(await select(fleet.prompt, ask("z")))


async def test_a_late_permit_that_was_voided_meanwhile_serves_nobody(fleet: Fleet) -> None:
    async with fleet.half_open():
        await fleet.answered_late()
        fleet.moments.ms += 31_000
        taken = permits_of(await select(fleet.prompt, ask("z")))
        await fleet.late.follower._step()
        assert isinstance((await select(fleet.late, ask("z"))).verdict, Reject)
        assert fleet.held() == taken


async def test_while_an_answer_is_overdue_others_do_not_queue_up_behind_it(fleet: Fleet) -> None:
    async with fleet.half_open():
        fleet.store.answers.clear()
        await select(fleet.late, ask("z"))
        before = fleet.store.statements
        for _ in range(20):
            assert isinstance((await select(fleet.late, ask("z"))).verdict, Reject)
        assert fleet.store.statements == before


async def test_a_call_that_hung_up_leaves_a_permit_that_the_next_one_uses(fleet: Fleet) -> None:
    async with fleet.half_open():
        fleet.store.answers.clear()
        call = asyncio.create_task(select(fleet.late, ask("z")))
        await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        fleet.store.answers.set()
        await asyncio.sleep(0.001)
        assert len(permits_of(await select(fleet.late, ask("z")))) == len(fleet.held()) == 1


@pytest.mark.parametrize(
    ("error", "goes_alone"), [(StoreSlowError("slow"), False), (StoreUnavailableError("read-only"), True)]
)
async def test_a_store_that_refuses_lets_a_replica_probe_alone_and_one_that_is_slow_does_not(
    fleet: Fleet, error: StoreUnavailableError, goes_alone: bool
) -> None:
    async with fleet.half_open():
        fleet.store.error = error
        verdicts = [type((await select(fleet.late, ask("z"))).verdict) for _ in range(6)]
        assert (Dispatch in verdicts) is goes_alone
        assert fleet.late.grants.probes.local.granted == goes_alone
        fleet.store.error = None
