"""Watched streams over the reference stores: rhythm of renewals, an absent store, ends of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from policy_service.application import watch_stream
from policy_service.application.errors import InvalidRequestError, OverloadedError
from policy_service.application.events import ProbeRef
from policy_service.application.messages import DecisionToken, TokenTarget
from policy_service.application.messages.token import PinRef
from policy_service.application.permit_work import PermitChange
from policy_service.application.replica import Replica
from policy_service.application.stream_holdings import PermitNews, StreamOpening
from policy_service.application.watch_stream import TOO_SLOW, Told, WatchedCall, watchdog_settings
from policy_service.domain.breaker import breaker_name
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.policy import Policy
from policy_service.domain.watchdog import WatchdogSettings
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.permit_store import MemoryPermitStore
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, make_replica, quick_settings, running, select, target

TTL_MS = 120_000
WATCHDOG = {
    "stream_watchdog.enabled": True,
    "stream_watchdog.warmup_ms": 0,
    "stream_watchdog.window_ms": 1_000,
    "stream_watchdog.min_useful_bytes_per_second": 10,
}
CATALOGUE = replace(
    builtin_catalogue(),
    connections={
        "capped": Connection("capped", "openai", max_concurrent=1),
        "patient": Connection("patient", "openai", settings={"stream_watchdog.window_ms": 5_000}),
    },
    stored_settings=WATCHDOG,
)


@dataclass
class World:
    """One replica, its time, and what a call was told."""

    replica: Replica
    moments: FakeTime
    permits: MemoryPermitStore
    told: list[tuple[int, Told]] = field(default_factory=list)

    def call(self) -> WatchedCall:
        return self.replica.watch.call(lambda number, told: self.told.append((number, told)))

    async def token(self, connection: str) -> DecisionToken:
        answer = await select(self.replica, ask(connection))
        assert answer.token is not None
        return answer.token

    async def progress(self, call: WatchedCall, after_ms: int, number: int = 1) -> int:
        """Progress after a while; how many renewals there have been so far."""
        self.moments.ms += after_ms
        call.progress(number, [(1_000, False)])
        await self.replica.watch.holdings.settled()
        return self.replica.watch.holdings.counters.renewals


@pytest.fixture
async def world() -> AsyncIterator[World]:
    moments = FakeTime()
    replica = make_replica(
        MemoryStore(MemoryDatabase(clock=moments.database)),
        time_source=moments,
        catalogue=CATALOGUE,
        settings=quick_settings("r1"),
    )
    async with running(replica):
        permits = replica.permits._store
        assert isinstance(permits, MemoryPermitStore)
        yield World(replica, moments, permits)


async def test_a_permit_is_renewed_at_a_third_of_its_life_and_not_before(world: World) -> None:
    token, call = await world.token("capped"), world.call()
    call.open(1, StreamOpening(token))

    assert [await world.progress(call, ms) for ms in (TTL_MS // 3 - 1, 1, 1, TTL_MS // 3 - 2, 1)] == [0, 1, 1, 1, 2]
    renewed_at = world.moments.ms
    assert world.told[-1] == (1, PermitNews(token.permits[0].permit_id, renewed_at + TTL_MS))


async def test_a_stream_that_opens_late_renews_with_its_first_progress(world: World) -> None:
    token, call = await world.token("capped"), world.call()
    world.moments.ms += 100_000
    call.open(1, StreamOpening(token))

    assert await world.progress(call, 0) == 1


async def test_a_lapsed_permit_is_told_once_and_not_asked_for_again(world: World) -> None:
    token, call = await world.token("capped"), world.call()
    call.open(1, StreamOpening(token))

    assert await world.progress(call, TTL_MS) == 1
    assert world.told == [(1, PermitNews(token.permits[0].permit_id, None))]
    assert await world.progress(call, TTL_MS) == 1
    assert len(world.told) == 1


async def test_a_permit_that_was_given_back_is_dropped_without_news(world: World) -> None:
    token, call = await world.token("capped"), world.call()
    call.open(1, StreamOpening(token))
    await world.replica.permits.release([token.permits[0].permit_id])

    assert [await world.progress(call, TTL_MS // 3) for _ in range(2)] == [1, 1]
    assert world.told == []


async def test_a_store_that_does_not_answer_is_asked_again_after_a_second(world: World) -> None:
    token, call = await world.token("capped"), world.call()
    call.open(1, StreamOpening(token))
    world.permits.is_away = True
    holdings = world.replica.watch.holdings
    await world.progress(call, TTL_MS // 3)
    await world.progress(call, 999)

    assert (holdings.counters.store_failures, world.told) == (1, [])
    world.permits.is_away = False
    assert await world.progress(call, 1) == 1
    assert world.told[-1][1] == PermitNews(token.permits[0].permit_id, world.moments.ms + TTL_MS)


async def test_a_stream_that_holds_nothing_asks_the_store_for_nothing(world: World) -> None:
    call = world.call()
    call.open(1, StreamOpening(await world.token("patient")))
    world.permits.is_away = True

    assert [await world.progress(call, TTL_MS) for _ in range(3)] == [0, 0, 0]
    assert world.replica.watch.holdings.counters.store_failures == 0


async def test_nothing_is_told_of_a_stream_that_was_closed_meanwhile(world: World) -> None:
    call = world.call()
    call.open(1, StreamOpening(await world.token("capped")))
    world.moments.ms += TTL_MS // 3
    call.progress(1, [])
    call.close(1)
    await world.replica.watch.holdings.settled()

    assert world.told == []
    assert world.replica.watch.holdings.counters.renewals == 0
    assert world.replica.watch.watched == 0


async def test_news_of_a_renewal_under_way_are_not_told_of_a_stream_that_was_closed(world: World) -> None:
    is_asked, may_answer, renew = asyncio.Event(), asyncio.Event(), world.replica.permits.renew

    async def slow(permit_ids: Sequence[str]) -> list[PermitChange]:
        is_asked.set()
        await may_answer.wait()
        return await renew(permit_ids)

    world.replica.permits.renew = slow  # type: ignore[method-assign, assignment]
    call = world.call()
    call.open(1, StreamOpening(await world.token("capped")))
    world.moments.ms += TTL_MS // 3
    call.progress(1, [])
    await is_asked.wait()
    call.close(1)
    may_answer.set()
    await world.replica.watch.holdings.settled()

    assert world.replica.watch.holdings.counters.renewals == 1
    assert world.told == []


async def test_the_verdict_of_a_first_byte_brings_no_permit_back_that_was_lost_meanwhile(world: World) -> None:
    holdings, served = world.replica.watch.holdings, target("capped")
    probe = ProbeRef("p", breaker_name("openai", "capped"), 0, 0)
    token = (await world.token("capped"))._replace(probes=(probe,))
    holding = holdings.begin(StreamOpening(token, served=served), lambda news: None)
    run = holdings._store.run

    async def lapsing(*arguments: Any, **options: Any) -> Any:
        holding.token = holding.token._replace(permits=())
        return await run(*arguments, **options)

    holdings._store.run = lapsing  # type: ignore[method-assign]
    holdings.first_byte(holding)
    await holdings.settled()
    assert token.permits
    assert (holding.token.permits, holding.token.probes) == ((), ())


async def test_events_of_a_chunk_are_judged_one_after_the_other(world: World) -> None:
    call = world.call()
    call.open(1, StreamOpening(await world.token("patient")))
    call.progress(1, [(0, False)])
    world.moments.ms += 1_000
    call.progress(1, [(400, False), (0, False)])
    assert world.told == []
    world.moments.ms += 1_001
    call.progress(1, [(0, False), (400, False)])

    assert world.told == [(1, TOO_SLOW)]


async def test_an_abort_is_ordered_once_and_ends_the_upkeep(world: World) -> None:
    call = world.call()
    assert call.open(1, StreamOpening(await world.token("capped")))
    call.progress(1, [(0, False)])
    world.moments.ms += 1_000
    for _ in range(4):
        call.progress(1, [(0, False), (0, False)])
        world.moments.ms += 1_000
    assert await world.progress(call, TTL_MS) == 0

    assert world.told == [(1, TOO_SLOW)]
    assert (world.replica.watch.aborted, world.replica.watch.watched) == (1, 1)
    call.close(1)
    assert world.replica.watch.watched == 0


async def test_streams_of_one_call_are_judged_apart_and_a_new_call_starts_anew(world: World) -> None:
    token, call, other = await world.token("patient"), world.call(), world.call()
    for number in (1, 2):
        call.open(number, StreamOpening(token, served=target("patient")) if number == 2 else StreamOpening(token))
        call.progress(number, [(0, False)])
    world.moments.ms += 1_000
    other.open(1, StreamOpening(token))
    other.progress(1, [(0, False)])
    call.progress(2, [(0, False)])
    call.progress(1, [(0, False)])

    assert world.told == [(1, TOO_SLOW)]


async def test_the_settings_of_the_connection_win(world: World) -> None:
    policy = world.replica.view.policy

    assert watchdog_settings(policy, None) == WatchdogSettings(True, 0, 1_000, 10, 1)
    assert watchdog_settings(policy, target("patient")).window_ms == 5_000
    assert watchdog_settings(policy, target("nobody")).window_ms == 1_000
    assert watchdog_settings(Policy(Catalogue()), None) == WatchdogSettings()


async def test_switched_off_nothing_is_judged(world: World) -> None:
    world.replica.view.set_policy(Policy(replace(CATALOGUE, stored_settings={})))
    call = world.call()
    assert not call.open(1, StreamOpening(await world.token("patient")))
    for _ in range(3):
        call.progress(1, [(0, False)])
        world.moments.ms += 600_000

    assert world.told == []


async def test_the_first_byte_refreshes_the_pin_of_the_served_connection_once(world: World) -> None:
    heard: list[tuple[str, PinRef, object, int]] = []
    world.replica.pin_reports.first_byte = lambda *given: heard.append(given) or "kept"  # type: ignore[method-assign, func-returns-value]
    pin = PinRef("hash", "openai", "main", 1, 60_000)
    token = DecisionToken("d", world.moments.ms, (TokenTarget(target("main")),), caller_id="me", pin=pin)
    call = world.call()
    call.open(1, StreamOpening(token, served=target("main")))
    call.open(2, StreamOpening(token))
    for number in (1, 1, 2):
        call.progress(number, [], first_byte=True)
    call.progress(1, [])

    assert heard == [("me", pin, target("main"), world.moments.ms)]


async def test_numbers_are_used_once_at_a_time_and_known(world: World) -> None:
    token, call = await world.token("patient"), world.call()
    call.open(1, StreamOpening(token))
    for act in (lambda: call.open(1, StreamOpening(token)), lambda: call.progress(2, []), lambda: call.close(2)):
        with pytest.raises(InvalidRequestError) as caught:
            act()
        assert [problem.path for problem in caught.value.problems] == ["stream_id"]


async def test_a_call_watches_a_bounded_number_of_streams(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_stream, "MAX_STREAMS", 2)
    token, call = await world.token("patient"), world.call()
    for number in (1, 2):
        call.open(number, StreamOpening(token))
    with pytest.raises(OverloadedError):
        call.open(3, StreamOpening(token))
    call.close(1)
    call.open(3, StreamOpening(token))
    call.end()

    assert world.replica.watch.watched == 0
