"""The gate of quota-share routes: strict, or open where it is full, slow or away (spec/concurrency.md section 4.2).

The strategy's own order is not built yet; `configured_order` stands in for it, so that what is shown here is the gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from policy_service.application.messages import (
    Dispatch,
    EarlierAttempt,
    PermitUse,
    Reject,
    SelectAnswer,
    SelectRequest,
)
from policy_service.application.ordering import Ordering
from policy_service.application.pools import Pool
from policy_service.application.replica import Replica
from policy_service.domain.catalogue import Catalogue, Connection, Route, RouteTarget
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.permit_store import MemoryPermitStore
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, failure, make_replica, quick_settings, report, running, select

Sharing = Callable[[str], AbstractAsyncContextManager[Replica]]
"""A replica with the route in one of its modes."""
ROUTE = "qtSd/team"
ON_SATURATION = "concurrency.quota_share.on_saturation"


def catalogue(mode: str) -> Catalogue:
    targets = tuple(RouteTarget(name, "openai", name, "gpt", 1.0) for name in ("one", "two"))
    return replace(
        builtin_catalogue(),
        connections={name: Connection(name, "openai", max_concurrent=1) for name in ("one", "two")},
        routes={ROUTE: Route(ROUTE, "quota-share", targets, {"queue_depth": 1, "queue_timeout_ms": 10_000})},
        stored_settings={ON_SATURATION: mode},
    )


@pytest.fixture(autouse=True)
def configured_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the order of quota-share: as configured."""
    before = Ordering.order

    def order(self: Ordering, pool: Pool, eligible: Sequence[int]) -> object:
        return (eligible, None) if pool.strategy == "quota-share" else before(self, pool, eligible)

    monkeypatch.setattr(Ordering, "order", order)


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def sharing(moments: FakeTime) -> Sharing:
    @asynccontextmanager
    async def started(mode: str) -> AsyncIterator[Replica]:
        store = MemoryStore(MemoryDatabase(clock=moments.database))
        made = make_replica(store, time_source=moments, catalogue=catalogue(mode), settings=quick_settings("r1"))
        async with running(made):
            yield made

    return started


_NUMBERS = iter(range(10_000))


def asked(**fields: Any) -> SelectRequest:
    return SelectRequest(f"q{next(_NUMBERS)}", route=ROUTE)._replace(**fields)


def dispatched(answer: SelectAnswer) -> tuple[str, PermitUse]:
    assert isinstance(answer.verdict, Dispatch), answer.verdict
    return answer.verdict.target.target.connection, answer.verdict.permit_use


async def in_line(replica: Replica) -> asyncio.Task[SelectAnswer]:
    waiting = asyncio.create_task(select(replica, asked()))
    while not replica.permits.loads.of("qsconn:one").waiting:
        await asyncio.sleep(0.001)
    return waiting


@pytest.mark.parametrize("mode", ["proceed", "reject"])
async def test_one_permit_is_held_around_the_dispatch_and_the_next_request_waits_for_it(
    sharing: Sharing, mode: str
) -> None:
    async with sharing(mode) as replica:
        first = await select(replica, asked())
        assert dispatched(first) == ("one", PermitUse.HELD)
        waiting = await in_line(replica)
        await report(replica, failure("one", 200, token=first.token))
        assert dispatched(await waiting) == ("one", PermitUse.HELD)


async def test_a_full_line_is_passed_without_a_permit_in_mode_proceed(sharing: Sharing) -> None:
    async with sharing("proceed") as replica:
        await select(replica, asked())
        waiting = await in_line(replica)
        answer = await select(replica, asked())
        assert dispatched(answer) == ("one", PermitUse.NONE)
        assert isinstance(answer.verdict, Dispatch)
        assert answer.verdict.no_fail_open
        assert not answer.verdict.permits
        assert replica.select.overflow == 1
        assert replica.permits.loads.of("qsconn:one").held == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_full_line_refuses_in_mode_reject(sharing: Sharing) -> None:
    async with sharing("reject") as replica:
        await select(replica, asked())
        waiting = await in_line(replica)
        refused = (await select(replica, asked())).verdict
        assert isinstance(refused, Reject)
        assert (refused.http_status, refused.code) == (429, "SEMAPHORE_QUEUE_FULL")
        assert (refused.terminal_reason, refused.line_depth) == ("concurrency_saturated", 1)
        assert refused.retry_after_s == 120
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(("mode", "code"), [("proceed", None), ("reject", "SEMAPHORE_TIMEOUT")])
async def test_a_wait_that_ends_goes_on_or_is_refused(
    sharing: Sharing, moments: FakeTime, mode: str, code: str | None
) -> None:
    async with sharing(mode) as replica:
        await select(replica, asked())
        waiting = await in_line(replica)
        moments.ms += 10_000
        answer = await waiting
        if code is None:
            assert dispatched(answer) == ("one", PermitUse.NONE)
        else:
            assert isinstance(answer.verdict, Reject)
            assert answer.verdict.code == code


@pytest.mark.parametrize(("mode", "code"), [("proceed", None), ("reject", "STORE_UNAVAILABLE")])
async def test_a_store_that_is_away_is_done_without_or_refuses(sharing: Sharing, mode: str, code: str | None) -> None:
    async with sharing(mode) as replica:
        stored = replica.permits._store
        assert isinstance(stored, MemoryPermitStore)
        stored.is_away = True
        answer = await select(replica, asked())
        if code is None:
            assert dispatched(answer) == ("one", PermitUse.NONE)
            assert answer.is_degraded
            assert "store_away" in answer.degraded_reasons
        else:
            assert isinstance(answer.verdict, Reject)
            assert (answer.verdict.http_status, answer.verdict.code) == (503, code)


async def test_fallbacks_take_no_permit_in_mode_proceed(sharing: Sharing) -> None:
    async with sharing("proceed") as replica:
        first = await select(replica, asked())
        assert isinstance(first.verdict, Dispatch)
        assert [each.target.connection for each in first.verdict.fallbacks] == ["two"]
        tried = (EarlierAttempt("openai", "one", "gpt", status=503),)
        again = await select(replica, asked(earlier_attempts=tried))
        assert dispatched(again) == ("two", PermitUse.NOT_NEEDED)
        assert replica.select.overflow == 0


async def test_a_fallback_to_a_full_gate_is_counted_in_mode_proceed(sharing: Sharing) -> None:
    async with sharing("proceed") as replica:
        tried = (EarlierAttempt("openai", "two", "gpt", status=503),)
        await select(replica, asked())
        assert dispatched(await select(replica, asked(earlier_attempts=tried))) == ("one", PermitUse.NONE)
        assert replica.select.overflow == 1


async def test_fallbacks_need_their_own_permit_without_waiting_in_mode_reject(sharing: Sharing) -> None:
    async with sharing("reject") as replica:
        first = await select(replica, asked())
        assert isinstance(first.verdict, Dispatch)
        assert first.verdict.fallbacks == ()
        tried = (EarlierAttempt("openai", "one", "gpt", status=503),)
        assert dispatched(await select(replica, asked(earlier_attempts=tried))) == ("two", PermitUse.HELD)
        refused = await select(replica, asked(earlier_attempts=tried, allow_wait=False))
        assert isinstance(refused.verdict, Reject)
        assert [(each.target.connection, each.reason) for each in refused.exclusions] == [
            ("one", "request_exhaustion"),
            ("two", "concurrency_cap"),
        ]


async def test_switched_off_as_a_whole_it_takes_no_permit(sharing: Sharing, moments: FakeTime) -> None:
    off = replace(catalogue("proceed"), stored_settings={"concurrency.quota_share.enabled": False})
    store = MemoryStore(MemoryDatabase(clock=moments.database))
    made = make_replica(store, time_source=moments, catalogue=off, settings=quick_settings("r1"))
    async with running(made) as replica:
        for _ in range(3):
            assert dispatched(await select(replica, asked())) == ("one", PermitUse.NOT_NEEDED)
