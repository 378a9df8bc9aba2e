"""A poll of the change feed took over a second on a crowded machine. It was thrown away and the whole state asked for,
which took longer still, and was thrown away as well: views were fourteen seconds old while commits went on.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.application.clock import DatabaseClock
from policy_service.application.follow import LOAD_TIMEOUT_MS, Follower, FollowSettings
from policy_service.application.ports import Feed, StoreSlowError, StoreUnavailableError
from policy_service.application.report_result import fold_report
from policy_service.application.view import View
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.ids import DurationMs
from policy_service.domain.policy import Policy
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore

USUAL_MS = FollowSettings().poll_timeout_ms
SLOW, AWAY = StoreSlowError("slow"), StoreUnavailableError("away")


class Faulty(MemoryStore):
    """Notes what it is asked, with which patience; fails as the test says."""

    def __init__(self) -> None:
        super().__init__(MemoryDatabase())
        self.asked: list[tuple[str, DurationMs]] = []
        self.faults: list[StoreUnavailableError] = []

    def _note(self, what: str, timeout_ms: DurationMs) -> None:
        self.asked.append((what, timeout_ms))
        if self.faults:
            raise self.faults.pop(0)

    async def load(self, *, timeout_ms: DurationMs) -> Feed:
        self._note("load", timeout_ms)
        return await super().load(timeout_ms=timeout_ms)

    async def poll(self, watermark: str, *, timeout_ms: DurationMs) -> Feed:
        self._note("poll", timeout_ms)
        return replace(await super().poll(watermark, timeout_ms=timeout_ms), is_full=False)


async def loaded(store: Faulty) -> Follower:
    """A replica's follower after its first load."""

    async def nothing(_: int) -> None: ...

    view = View(Policy(Catalogue()), fold_report)
    clock = DatabaseClock(lambda: 0.0)
    follower = Follower(store, view, clock, "i", monotonic_ms=lambda: 0.0, on_revision=nothing)
    await follower.attempt()
    return follower


async def asked_after(*faults: StoreUnavailableError) -> list[tuple[str, DurationMs]]:
    """What is asked of the store after a load, with these faults and once more."""

    store = Faulty()
    follower = await loaded(store)
    store.asked.clear()
    store.faults.extend(faults)
    for _ in (*faults, None):
        await follower.attempt()
    return store.asked


@pytest.mark.parametrize(
    ("faults", "then"),
    [
        ([], ("poll", USUAL_MS)),
        ([SLOW], ("poll", LOAD_TIMEOUT_MS)),
        ([SLOW, SLOW], ("load", LOAD_TIMEOUT_MS)),
        ([AWAY], ("load", LOAD_TIMEOUT_MS)),
        ([SLOW, AWAY], ("load", LOAD_TIMEOUT_MS)),
    ],
)
async def test_a_slow_poll_goes_on_from_where_it_was(
    faults: list[StoreUnavailableError], then: tuple[str, DurationMs]
) -> None:
    assert (await asked_after(*faults))[-1] == then


async def test_the_usual_patience_is_back_with_the_first_answer() -> None:
    store = Faulty()
    follower = await loaded(store)
    store.faults.append(SLOW)
    for _ in range(3):
        await follower.attempt()
    assert store.asked[-2:] == [("poll", LOAD_TIMEOUT_MS), ("poll", USUAL_MS)]
