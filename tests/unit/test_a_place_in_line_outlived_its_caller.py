"""A caller hung up while the store was slow: its ticket stood in line for 15 s more, its permit until its TTL."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from policy_service.application.giving_back import PAUSES_S, GivingBack, wait_for
from policy_service.application.permit_work import Passage, PermitOutcome
from policy_service.application.permits import LOOKS_WHEN_UNSURE, RELEASE_MS, Permits
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_permits import PermitCommit, PermitUnit
from policy_service.domain.gates import Gate, PermitState
from policy_service.domain.ids import DurationMs
from policy_service.storage.memory.permit_store import MemoryPermits, MemoryPermitStore
from tests.unit.test_permits import Ids, Time, ask, permit_id

T = TypeVar("T")
OTHER = Passage((Gate("other", 1),))


class Slow(MemoryPermitStore):
    """Says that it did not answer in time, whatever became of the transaction; tests say what."""

    def __init__(self, shared: MemoryPermits, replica: str) -> None:
        super().__init__(shared, replica)
        self.cut_off: list[Callable[[], None]] = []
        """Transactions that the server still has to commit."""
        self.cuts = False
        self.failures = 0
        """Calls to come that fail."""

    def _call(self) -> MemoryPermits:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailableError("the server did not answer in time")
        return super()._call()

    async def run(self, unit: PermitUnit[T], *, timeout_ms: DurationMs) -> PermitCommit[T]:
        if not self.cuts:
            return await super().run(unit, timeout_ms=timeout_ms)
        self.cuts = False

        def commit() -> None:
            asyncio.ensure_future(super(Slow, self).run(unit, timeout_ms=timeout_ms))  # noqa: RUF006

        self.cut_off.append(commit)
        raise StoreUnavailableError("the server did not answer in time")


class World:
    """One replica; waits between attempts move the clock."""

    def __init__(self) -> None:
        self.time = Time()
        self.store = Slow(MemoryPermits(self.time.now), "r0")
        self.pauses: list[float] = []
        self.during: dict[int, Callable[[], Any]] = {}
        """What happens in a pause, by its number; waited for where it takes time."""
        self.permits = Permits(
            self.store, self.time, Ids(), "r0", monotonic_ms=self.time.monotonic_ms, pause=self._pause
        )

    async def _pause(self, _stopping: asyncio.Event, longest_s: float) -> None:
        happening = self.during.get(len(self.pauses), lambda: None)()
        if inspect.isawaitable(happening) and not isinstance(happening, asyncio.Task):
            await happening
        self.pauses.append(longest_s)
        self.time.at += round(longest_s * 1000)
        await asyncio.sleep(0)

    async def cancelled_in_line(self) -> None:
        """A call that stood in line and hung up."""
        task: asyncio.Task[PermitOutcome] = asyncio.create_task(self.permits.acquire(ask("w")))
        while ("g", "w") not in self.store.shared.rows:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    def state(self, request_id: str) -> PermitState:
        return self.store.shared.rows["g", request_id].state


@pytest.fixture
def world() -> World:
    return World()


async def test_a_ticket_is_withdrawn_once_the_store_answers_again(world: World) -> None:
    await world.permits.acquire(ask("h"))
    await world.cancelled_in_line()
    world.store.failures = 7
    await world.permits.settled()
    assert world.state("w") is PermitState.CANCELLED
    assert world.pauses == [*PAUSES_S, 2.0, 2.0, 2.0]


async def test_a_permit_is_given_back_once_the_store_answers_again(world: World) -> None:
    held = await world.permits.acquire(ask("h"))
    world.store.failures = 20
    world.permits.release_soon([permit_id(held)])
    await world.permits.settled()
    assert world.state("h") is PermitState.RELEASED


async def test_a_permit_that_has_ended_by_itself_is_not_tried_for_ever(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    held = await world.permits.acquire(ask("h"))
    world.store.failures = 1_000
    began = world.time.at
    with caplog.at_level(logging.WARNING):
        world.permits.release_soon([permit_id(held)])
        await world.permits.settled()
    assert RELEASE_MS <= world.time.at - began <= RELEASE_MS + 2_000
    assert "could not be given back" in caplog.text


async def test_an_acquire_that_was_cut_off_and_committed_later_leaves_no_place_in_line(world: World) -> None:
    """The first look is too early: the server commits what it was sent before the connection was cut."""
    await world.permits.acquire(ask("h"))
    world.store.cuts = True
    world.during[1] = lambda: world.store.cut_off.pop()()
    outcome = await world.permits.acquire(ask("w"))
    assert outcome.refusal is not None
    await world.permits.settled()
    assert world.state("w") is PermitState.CANCELLED


async def test_an_acquire_that_was_cut_off_and_never_committed_is_looked_for_a_few_times(world: World) -> None:
    world.store.cuts = True
    await world.permits.acquire(ask("w"))
    await world.permits.settled()
    assert len(world.pauses) == LOOKS_WHEN_UNSURE - 1


async def test_a_caller_that_comes_again_keeps_its_place(world: World) -> None:
    await world.permits.acquire(ask("h"))
    await world.cancelled_in_line()
    world.store.failures = 1
    calls: list[asyncio.Task[PermitOutcome]] = []
    world.during[0] = lambda: calls.append(asyncio.create_task(world.permits.acquire(ask("w"))))
    await world.permits.settled()
    assert world.state("w") is PermitState.WAITING
    calls[0].cancel()
    await asyncio.wait(calls)
    await world.permits.settled()
    assert world.state("w") is PermitState.CANCELLED


async def test_a_slot_granted_late_is_given_back_although_its_request_goes_on_to_another_account(world: World) -> None:
    await world.permits.acquire(ask("h", passage=OTHER))
    world.store.cuts = True
    world.during[0] = lambda: world.store.cut_off.pop()()
    assert (await world.permits.acquire(ask("w"))).refusal is not None
    waiting = asyncio.create_task(world.permits.acquire(ask("w", passage=OTHER)))
    await world.permits.settled()
    assert world.state("w") is PermitState.RELEASED
    assert world.store.shared.rows["other", "w"].state is PermitState.WAITING
    waiting.cancel()
    await asyncio.wait({waiting})
    await world.permits.settled()


async def test_a_caller_that_came_again_and_has_its_slot_keeps_it(world: World) -> None:
    world.store.cuts = True
    assert (await world.permits.acquire(ask("w"))).refusal is not None
    world.during[0] = lambda: world.permits.acquire(ask("w"))
    await world.permits.settled()
    assert world.state("w") is PermitState.HELD


async def test_what_a_request_gives_back_is_not_its_slot_at_another_account_of_the_same_provider(world: World) -> None:
    one, two = (ask("w", passage=Passage((Gate(name, 1), Gate("shared", 9)))) for name in ("one", "other"))
    world.store.cuts = True
    assert (await world.permits.acquire(one)).refusal is not None
    world.during[0] = lambda: world.permits.acquire(two)
    await world.permits.settled()
    assert world.store.shared.rows["other", "w"].state is PermitState.HELD


async def test_a_slot_at_one_account_does_not_end_the_wait_at_another(world: World) -> None:
    await world.permits.acquire(ask("h", passage=OTHER))
    waiting = asyncio.create_task(world.permits.acquire(ask("w", passage=OTHER)))
    while ("other", "w") not in world.store.shared.rows:
        await asyncio.sleep(0)
    assert (await world.permits.acquire(ask("w"))).is_held
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    await world.permits.settled()


async def test_a_replica_that_stops_tries_once_more_and_no_longer() -> None:
    tries = 0
    giving_back = GivingBack(lambda: 0.0)

    async def refused() -> bool:
        nonlocal tries
        tries += 1
        raise StoreUnavailableError("away")

    giving_back.insist(refused, RELEASE_MS, "a permit")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert tries == 1
    async with asyncio.timeout(1):
        await giving_back.stop()
    assert (tries, giving_back.lost) == (2, 1)


async def test_a_pause_ends_with_the_event() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_for(event, 60))
    await asyncio.sleep(0)
    event.set()
    async with asyncio.timeout(1):
        await waiting
