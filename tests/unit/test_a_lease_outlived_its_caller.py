"""A caller hung up inside AcquireLease: the connection was held for nobody until the lease's TTL was over."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest

from policy_service.application.entropy import SystemEntropy
from policy_service.application.giving_back import GivingBack
from policy_service.application.lease_book import LeaseBook
from policy_service.application.leases import Leases
from policy_service.application.messages.lease import LeaseMessage, LeaseShown, LeaseUnavailable
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_leases import LeaseUnit
from policy_service.domain.ids import DurationMs
from policy_service.domain.lease import EndReason, LeaseState
from policy_service.storage.memory.lease_store import MemoryLeaseStore
from policy_service.storage.memory.store import MemoryStore
from tests.unit.test_leases import World, owner

T = TypeVar("T")
Answer = LeaseShown | LeaseUnavailable


class Slow(MemoryLeaseStore):
    """Units wait until the test lets them go; `failures` of the next ones fail."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.go = asyncio.Event()
        self.go.set()
        self.waiting = 0
        self.failures = 0

    async def run(self, unit: LeaseUnit[T], *, timeout_ms: DurationMs) -> T:
        self.waiting += 1
        await self.go.wait()
        self.waiting -= 1
        if self.failures:
            self.failures -= 1
            raise StoreUnavailableError("away")
        return await super().run(unit, timeout_ms=timeout_ms)


class SlowWorld(World):
    """Two replicas on one slow store."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = self.rows = Slow(self.store)
        self.pauses = 0
        self.giving_back = GivingBack(lambda: float(self.now), self._pause)
        self.leases, self.others = (
            Leases(self.registry, LeaseBook(self.slow, SystemEntropy(n), f"r{n}"), self.offers, self.giving_back)
            for n in range(2)
        )

    async def _pause(self, _stopping: asyncio.Event, longest_s: float) -> None:
        self.pauses += 1
        self.now += round(longest_s * 1000)

    async def hangs_up(self, message: LeaseMessage) -> None:
        """A call that is cancelled while its transaction is under way."""
        self.slow.go.clear()
        call = asyncio.create_task(self.leases.acquire(message))
        while not self.slow.waiting:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()

    async def answered(self) -> None:
        """The transactions under way go on."""
        self.slow.go.set()
        await self.giving_back.settled()


def asked(name: str, request_id: str = "") -> LeaseMessage:
    body = {"action": "acquire", "model": "m"}
    return LeaseMessage(body, owner(name), "k", request_id=request_id or "drawn", is_retry_safe=bool(request_id))


@pytest.fixture
def world() -> SlowWorld:
    return SlowWorld()


async def test_what_a_caller_that_hung_up_was_granted_is_released(world: SlowWorld) -> None:
    await world.hangs_up(asked("o"))
    await world.answered()
    assert world.state_of("o") == (LeaseState.RELEASED, EndReason.CLIENT_CANCELLED)
    assert (await world.held("other")).row.connection_id == "c1"


async def test_it_is_released_once_the_store_answers_again(world: SlowWorld) -> None:
    await world.hangs_up(asked("o"))
    world.slow.go.set()
    while not world.slow.table.rows:
        await asyncio.sleep(0)
    world.slow.failures = 6
    await world.giving_back.settled()
    assert world.pauses == 6
    assert world.state_of("o")[0] is LeaseState.RELEASED


async def test_an_acquire_that_failed_leaves_nothing_to_release(world: SlowWorld) -> None:
    world.slow.failures = 1
    await world.hangs_up(asked("o"))
    await world.answered()
    assert (world.slow.table.rows, world.pauses) == ([], 0)


async def test_a_lease_that_the_owner_had_before_stays(world: SlowWorld) -> None:
    await world.held("o")
    await world.hangs_up(asked("o"))
    await world.answered()
    assert world.state_of("o")[0] is LeaseState.ACTIVE


async def test_a_repetition_that_was_told_of_the_lease_keeps_it(world: SlowWorld) -> None:
    """The first answer is given up, the second try at another replica has it before the first one's replica acts."""
    await world.hangs_up(asked("o", "q1"))
    repetition = asyncio.create_task(world.others.acquire(asked("o", "q1")))
    while world.slow.waiting < 2:
        await asyncio.sleep(0)
    await world.answered()
    answer = await repetition
    assert isinstance(answer, LeaseShown)
    assert answer.row.state is LeaseState.ACTIVE
    assert world.state_of("o")[0] is LeaseState.ACTIVE


async def test_a_repetition_after_the_release_gets_a_lease_of_its_own(world: SlowWorld) -> None:
    await world.hangs_up(asked("o", "q1"))
    await world.answered()
    answer = await world.others.acquire(asked("o", "q1"))
    assert isinstance(answer, LeaseShown)
    assert (answer.row.state, answer.row.generation, answer.reused) == (LeaseState.ACTIVE, 2, False)
