"""The change feed of Postgres: no change is lost, whatever the order of commits (spec/fleet.md section 4)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy_service.application.ports import Feed, Store
from policy_service.domain.breaker import BreakerState
from policy_service.domain.state import Key, Row
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore
from policy_service.storage.retention import HOUR_MS
from policy_service.storage.rows import encode_row
from tests.contract.beside import driver, eventually
from tests.contract.units import TIMEOUT_MS, count_failure, open_breaker, write_breaker

NAME = "feed-test"
ANNOUNCE = """
INSERT INTO state_feed (version, kind, key, row, written_at)
VALUES (nextval('row_version'), $1, $2::text::jsonb, $3::text::jsonb, 0)"""


@pytest.fixture
async def store(embedded_url: str) -> AsyncIterator[PostgresStore]:
    opened = await PostgresStore.connect(embedded_url, StoreOptions(application_name=NAME, heartbeat_ms=200))
    yield opened
    await opened.close()


async def announce(connection: Any, row: BreakerState) -> None:
    """Write one entry of the feed on a connection whose transaction the test controls."""
    await connection.execute(ANNOUNCE, row.KIND, json.dumps(row.key), json.dumps(encode_row(row)))


async def load(store: Store) -> Feed:
    return await store.load(timeout_ms=TIMEOUT_MS)


async def poll(store: Store, watermark: str) -> Feed:
    return await store.poll(watermark, timeout_ms=TIMEOUT_MS)


def keys(feed: Feed) -> set[Key]:
    return {row.key for _, row in feed.rows}


async def test_a_transaction_with_an_older_number_that_commits_late_is_not_lost(
    embedded_url: str, store: PostgresStore
) -> None:
    seen = await load(store)
    async with driver(embedded_url) as slow:
        await slow.execute("BEGIN")
        await announce(slow, open_breaker("slow"))
        await store.run(write_breaker(open_breaker("quick")), timeout_ms=TIMEOUT_MS)
        first = await poll(store, seen.watermark)
        assert keys(first) == {open_breaker("quick").key}, "an open writer stalls nobody"
        again = await poll(store, first.watermark)
        assert keys(again) == set(), "nor does it make every poll bring the same rows"
        await slow.execute("COMMIT")
    second = await poll(store, again.watermark)
    assert keys(second) == {open_breaker("slow").key}
    assert keys(await poll(store, second.watermark)) == set()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(5)), polled=st.sets(st.integers(0, 9)))
def test_every_commit_order_reaches_the_view(embedded_url: str, order: list[int], polled: set[int]) -> None:
    asyncio.run(commits_reach_the_view(embedded_url, order, polled))


async def commits_reach_the_view(url: str, order: list[int], polled: set[int]) -> None:
    """Open transactions in one order, commit them in another, poll in between; every change must arrive."""
    reader = PostgresStore(url)
    feed = await load(reader)
    seen: set[Key] = set()
    writers = [driver(url) for _ in order]
    connections = [await writer.__aenter__() for writer in writers]
    steps = [*((number, "open") for number in range(len(order))), *((number, "commit") for number in order)]
    for place, (number, step) in enumerate(steps):
        if step == "open":
            await connections[number].execute("BEGIN")
            await announce(connections[number], open_breaker(f"p{number}"))
        else:
            await connections[number].execute("COMMIT")
        if place in polled:
            feed = await poll(reader, feed.watermark)
            assert not feed.is_full
            seen |= keys(feed)
    seen |= keys(await poll(reader, feed.watermark))
    for writer in writers:
        await writer.__aexit__(None, None, None)
    await reader.close()
    assert seen == {open_breaker(f"p{number}").key for number in order}


async def test_a_polling_view_equals_the_state_after_concurrent_commits(
    embedded_url: str, store: PostgresStore
) -> None:
    writers = [await PostgresStore.connect(embedded_url) for _ in range(3)]
    feed = await load(store)
    view: dict[Key, tuple[int, Row]] = {}

    async def write(writer: PostgresStore, number: int) -> None:
        for step in range(15):
            await writer.run(count_failure(f"p{(number + step) % 4}"), timeout_ms=TIMEOUT_MS)

    writing = asyncio.gather(*(write(writer, number) for number, writer in enumerate(writers)))
    while feed.rows or not writing.done():
        feed = await poll(store, feed.watermark)
        for version, row in feed.rows:
            view[row.key] = max(view.get(row.key, (0, row)), (version, row), key=lambda change: change[0])
    await writing
    assert {key: row for key, (_, row) in view.items()} == {row.key: row for _, row in (await load(store)).rows}
    for writer in writers:
        await writer.close()


async def test_pruning_spares_what_running_polls_may_ask_for(embedded_url: str, store: PostgresStore) -> None:
    async with driver(embedded_url) as slow:
        await slow.execute("BEGIN; SELECT pg_current_xact_id()")
        seen = await load(store)
        await store.run(write_breaker(open_breaker("quick")), timeout_ms=TIMEOUT_MS)
        dropped = await store.prune(seen.as_of + 2 * HOUR_MS, timeout_ms=TIMEOUT_MS)
        assert dropped["state_feed"] == 0
        news = await poll(store, seen.watermark)
        assert not news.is_full
        assert keys(news) == {open_breaker("quick").key}
        await slow.execute("ROLLBACK")


async def test_another_server_or_timeline_raises_the_epoch_once_and_reloads_every_view(
    embedded_url: str, store: PostgresStore
) -> None:
    seen = await load(store)
    async with driver(embedded_url) as operator:
        await operator.execute("UPDATE fleet SET timeline = timeline + 7")
    successors = [await PostgresStore.connect(embedded_url) for _ in range(2)]
    news = await poll(successors[0], seen.watermark)
    assert (news.is_full, news.epoch) == (True, seen.epoch + 1)
    assert (await poll(successors[1], news.watermark)).is_full is False
    for successor in successors:
        await successor.close()


async def test_a_row_of_an_unknown_kind_or_state_does_not_stop_the_feed(
    embedded_url: str, store: PostgresStore
) -> None:
    seen = await load(store)
    async with driver(embedded_url) as newer:
        await newer.execute(ANNOUNCE, "crystal_ball", '["crystal_ball", "x"]', '{"provider": "x"}')
        future = encode_row(open_breaker("a")) | {"state": "MELTED", "shape": "round"}
        del future["failure_count"]
        await newer.execute(ANNOUNCE, "breaker", '["breaker", "a", ""]', json.dumps(future))
    (change,) = (await poll(store, seen.watermark)).rows
    assert isinstance(change.row, BreakerState)
    assert change.row.state is BreakerState("a").state
    assert change.row.generation == open_breaker("a").generation


async def test_an_announcement_wakes_the_subscriber(store: PostgresStore) -> None:
    wakes = 0

    def wake() -> None:
        nonlocal wakes
        wakes += 1

    async def has_woken() -> bool:
        return wakes > known

    known = 0
    end = await store.subscribe(wake, lambda: None)
    await eventually(has_woken)
    known = wakes
    await store.run(count_failure(), timeout_ms=TIMEOUT_MS)
    await eventually(has_woken)
    await end()


async def test_a_broken_subscription_is_told_and_renewed(embedded_url: str, store: PostgresStore) -> None:
    calls: list[str] = []
    end = await store.subscribe(lambda: calls.append("wake"), lambda: calls.append("lost"))

    async def has_renewed() -> bool:
        return calls[-2:] == ["lost", "wake"]

    async def has_begun() -> bool:
        return calls == ["wake"]

    await eventually(has_begun)
    async with driver(embedded_url) as operator:
        await operator.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
    await eventually(has_renewed)
    await end()
    await asyncio.sleep(0)
    assert calls == ["wake", "lost", "wake"]


async def test_notifications_can_be_off(embedded_url: str) -> None:
    silent = PostgresStore(embedded_url, StoreOptions(notifications=False, application_name="silent"))
    end = await silent.subscribe(lambda: None, lambda: None)
    await silent.run(count_failure(), timeout_ms=TIMEOUT_MS)
    async with driver(embedded_url) as operator:
        listeners = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'silent' AND query LIKE 'LISTEN%'"
        assert await operator.fetchval(listeners) == 0
    await end()
    await silent.close()
