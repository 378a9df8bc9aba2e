"""What every store promises (spec/fleet.md sections 2, 4 and 7), held against the memory store and Postgres alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from policy_service.application.ports import Feed, Scope, Store, Unit, UnitRefusedError, UnitResult
from policy_service.domain.breaker import BreakerState
from policy_service.domain.egress import EgressSighting
from policy_service.domain.ids import Instant
from policy_service.domain.state import Key, Row, StateBook
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore
from policy_service.storage.retention import HOUR_MS, Retention
from policy_service.storage.rows import STATE_ROWS
from tests.contract.samples import sample_row
from tests.contract.units import (
    TIMEOUT_MS,
    count_failure,
    fact,
    open_breaker,
    read_breaker,
    record,
    write_breaker,
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two replicas' stores on one database."""

    one: Store
    two: Store


@pytest.fixture(params=["memory", "postgres", "pooled"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """Both kinds of store; `pooled` is Postgres as seen through a pooler in transaction mode."""
    if request.param == "memory":
        database = MemoryDatabase()
        yield Fleet(MemoryStore(database), MemoryStore(database))
        return
    url = request.getfixturevalue("pooled_url" if request.param == "pooled" else "embedded_url")
    options = StoreOptions(has_transaction_pooler=request.param == "pooled")
    stores = [await PostgresStore.connect(url, options) for _ in range(2)]
    yield Fleet(*stores)
    for store in stores:
        await store.close()


def rows_of(feed: Feed) -> dict[Key, Row]:
    """Rows of a feed, the newest version of each."""
    return {row.key: row for _, row in sorted(feed.rows, key=lambda change: change.version)}


async def poll(store: Store, watermark: str) -> Feed:
    return await store.poll(watermark, timeout_ms=TIMEOUT_MS)


async def load(store: Store) -> Feed:
    return await store.load(timeout_ms=TIMEOUT_MS)


async def test_first_failures_of_two_replicas_count_two_in_every_round(fleet: Fleet) -> None:
    for number in range(100):
        provider = f"p{number}"
        for expected in ([1, 2], [3, 4]):  # the guard row is made by the first pair and merely locked by the second
            counts = await asyncio.gather(
                *(store.run(count_failure(provider), timeout_ms=TIMEOUT_MS) for store in (fleet.one, fleet.two))
            )
            assert sorted(committed.value for committed in counts) == expected


async def test_an_absent_row_reads_as_its_default(fleet: Fleet) -> None:
    read = await fleet.one.run(read_breaker("nobody"), timeout_ms=TIMEOUT_MS)
    assert read.value == BreakerState("nobody")
    assert read.rows == ()


async def test_a_unit_reads_the_rows_of_its_scope_only(fleet: Fleet) -> None:
    await fleet.one.run(count_failure("openai", connection="a"), timeout_ms=TIMEOUT_MS)
    beside = await fleet.two.run(read_breaker("openai", "a"), timeout_ms=TIMEOUT_MS)
    within = await fleet.two.run(read_breaker("openai", "a", whole=True), timeout_ms=TIMEOUT_MS)
    assert (beside.value.failure_count, within.value.failure_count) == (0, 1)


async def test_a_unit_of_all_providers_reads_every_row(fleet: Fleet) -> None:
    for provider in ("a", "b", "c"):
        await fleet.one.run(count_failure(provider, connection="x"), timeout_ms=TIMEOUT_MS)

    def reset(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[list[str]]:
        rows = sorted(book.rows(BreakerState), key=lambda row: row.provider)
        for row in rows:
            book.put(BreakerState(row.provider, row.connection, generation=row.generation + 1))
        return UnitResult([row.provider for row in rows])

    done = await fleet.two.run(Unit(Scope(frozenset(), all_providers=True), reset), timeout_ms=TIMEOUT_MS)
    assert done.value == ["a", "b", "c"]
    assert all(row.generation == 2 for _, row in (await load(fleet.one)).rows)


async def test_a_write_outside_the_scope_is_refused(fleet: Fleet) -> None:
    unit = write_breaker(BreakerState("openai", "a", failure_count=1))
    with pytest.raises(UnitRefusedError):
        await fleet.one.run(replace(unit, scope=Scope(frozenset({"openai"}))), timeout_ms=TIMEOUT_MS)
    assert (await load(fleet.one)).rows == ()


async def test_versions_of_a_row_rise_over_the_fleet(fleet: Fleet) -> None:
    versions = []
    for store in (fleet.one, fleet.two, fleet.one):
        committed = await store.run(count_failure(), timeout_ms=TIMEOUT_MS)
        versions.append(committed.rows[0].version)
    assert versions == sorted(set(versions))


async def test_an_answer_is_stored_once_and_its_event_counts_once(fleet: Fleet) -> None:
    first = await fleet.one.run(count_failure(event_id="d/0"), timeout_ms=TIMEOUT_MS)
    again = await fleet.two.run(count_failure(event_id="d/0"), timeout_ms=TIMEOUT_MS)
    assert (first.value, again.value) == (1, 1)
    assert await fleet.two.known_answer("d/0", timeout_ms=TIMEOUT_MS) == b"counted"
    assert await fleet.two.known_answer("d/1", timeout_ms=TIMEOUT_MS) is None


async def test_one_event_reported_for_two_providers_at_once_counts_once(fleet: Fleet) -> None:
    for number in range(20):
        units = [count_failure(f"{provider}{number}", f"d{number}/0") for provider in "ab"]
        await asyncio.gather(
            fleet.one.run(units[0], timeout_ms=TIMEOUT_MS), fleet.two.run(units[1], timeout_ms=TIMEOUT_MS)
        )
    assert sum(row.failure_count for _, row in (await load(fleet.one)).rows if isinstance(row, BreakerState)) == 20


async def test_progress_is_in_the_read_that_shows_its_rows_and_never_falls(fleet: Fleet) -> None:
    for number in (7, 5):
        await fleet.one.run(count_failure(progress=("replica-1", number)), timeout_ms=TIMEOUT_MS)
    assert (await load(fleet.two)).progress == {"replica-1": 7}


async def test_a_default_row_of_the_first_generation_is_gone_and_announced(fleet: Fleet) -> None:
    await fleet.one.run(count_failure(), timeout_ms=TIMEOUT_MS)
    seen = await load(fleet.two)
    await fleet.one.run(write_breaker(BreakerState("openai")), timeout_ms=TIMEOUT_MS)
    assert rows_of(await poll(fleet.two, seen.watermark))["breaker", "openai", ""].is_default
    assert (await load(fleet.two)).rows == ()


async def test_a_default_row_of_a_later_generation_stays_as_a_tombstone(fleet: Fleet) -> None:
    for row in (open_breaker("openai", 3), BreakerState("openai", generation=4)):
        await fleet.one.run(write_breaker(row), timeout_ms=TIMEOUT_MS)
    read = await fleet.two.run(read_breaker("openai"), timeout_ms=TIMEOUT_MS)
    assert read.value.generation == 4
    assert [row.generation for _, row in (await load(fleet.two)).rows] == [4]


async def test_a_poll_brings_every_change_since_the_watermark(fleet: Fleet) -> None:
    seen = await load(fleet.two)
    assert seen.is_full
    await fleet.one.run(write_breaker(open_breaker("a")), timeout_ms=TIMEOUT_MS)
    await fleet.one.run(write_breaker(open_breaker("b")), timeout_ms=TIMEOUT_MS)
    news = await poll(fleet.two, seen.watermark)
    assert not news.is_full
    assert rows_of(news) == {row.key: row for row in (open_breaker("a"), open_breaker("b"))}
    later = await poll(fleet.two, news.watermark)
    assert later.rows == ()


async def test_a_poll_with_a_watermark_of_another_store_is_a_full_load(fleet: Fleet) -> None:
    await fleet.one.run(write_breaker(open_breaker("a")), timeout_ms=TIMEOUT_MS)
    for watermark in ("", "nonsense", "-1"):
        assert (await poll(fleet.two, watermark)).is_full


async def test_a_watermark_older_than_the_pruned_feed_is_a_full_load(fleet: Fleet) -> None:
    old = await load(fleet.two)
    await fleet.one.run(write_breaker(open_breaker("a")), timeout_ms=TIMEOUT_MS)
    recent = await poll(fleet.two, old.watermark)
    dropped = await fleet.one.prune(recent.as_of + 2 * HOUR_MS, timeout_ms=TIMEOUT_MS)
    assert dropped["state_feed"] == 1
    late = await poll(fleet.two, old.watermark)
    assert late.is_full
    assert rows_of(late) == {open_breaker("a").key: open_breaker("a")}
    assert not (await poll(fleet.two, recent.watermark)).is_full


@pytest.mark.parametrize("row_type", STATE_ROWS, ids=lambda row_type: row_type.KIND)
async def test_a_row_of_every_kind_is_written_read_announced_and_loaded(fleet: Fleet, row_type: type[Row]) -> None:
    row = sample_row(row_type)
    guard, connection = row.key[1], getattr(row, "connection", "")
    scope = Scope(frozenset({guard}), frozenset({(guard, connection)}))

    def run(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[Row]:
        found = book.get(row_type, *row.key[1:])
        book.put(row)
        return UnitResult(found)

    seen = await load(fleet.two)
    first = await fleet.one.run(Unit(scope, run), timeout_ms=TIMEOUT_MS)
    again = await fleet.two.run(Unit(scope, run), timeout_ms=TIMEOUT_MS)
    assert (first.value, again.value, again.rows) == (row_type.default(row.key), row, ())
    assert rows_of(await load(fleet.two)) == rows_of(await poll(fleet.two, seen.watermark)) == {row.key: row}


async def test_texts_of_any_kind_come_back(fleet: Fleet) -> None:
    text = "caf\u00e9 \u4e2d \U0001f680 \\u0000 \" ' ; -- $1 %s :x"
    row = BreakerState(text, text, last_failure_kind=text, failure_count=1)
    await fleet.one.run(write_breaker(row), timeout_ms=TIMEOUT_MS)
    assert rows_of(await load(fleet.two)) == {row.key: row}


async def test_the_instant_is_read_after_the_lock_and_never_falls(fleet: Fleet) -> None:
    units = [store.run(count_failure(), timeout_ms=TIMEOUT_MS) for store in (fleet.one, fleet.two) for _ in range(10)]
    done = sorted(await asyncio.gather(*units), key=lambda committed: committed.value)
    instants = [committed.at for committed in done]
    assert instants == sorted(instants)


async def test_an_error_of_the_pure_function_leaves_nothing(fleet: Fleet) -> None:
    def fail(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[None]:
        book.put(open_breaker("openai"))
        raise ArithmeticError("fold")

    with pytest.raises(ArithmeticError):
        await fleet.one.run(Unit(Scope(frozenset({"openai"})), fail), timeout_ms=TIMEOUT_MS)
    assert (await load(fleet.two)).rows == ()


async def test_facts_come_newest_first_in_pages_and_once_each(fleet: Fleet) -> None:
    facts = [fact(f"e{number}.0", number + 1, "openai", f"d{number % 2}") for number in range(5)]
    await fleet.one.run(record(*facts), timeout_ms=TIMEOUT_MS)
    await fleet.two.run(record(*facts[:2]), timeout_ms=TIMEOUT_MS)
    page = await fleet.two.fact_page(limit=3)
    assert [found.id for found in page.facts] == ["e4.0", "e3.0", "e2.0"]
    rest = await fleet.two.fact_page(limit=3, before_id=page.before_id)
    assert [found.id for found in rest.facts] == ["e1.0", "e0.0"]
    assert rest.before_id is None
    assert list(await fleet.two.facts(limit=9, decision_id="d1")) == [facts[3], facts[1]]
    assert await fleet.two.facts(limit=9, provider="other") == ()


async def test_a_catalogue_document_is_imported_once_unless_forced(fleet: Fleet) -> None:
    assert await fleet.one.catalogue(timeout_ms=TIMEOUT_MS) is None
    first = await fleet.one.import_catalogue("{}", "hash-1", force=False, actor="file")
    second = await fleet.two.import_catalogue('{"a": 1}', "hash-2", force=False, actor="file")
    restarted = await fleet.two.import_catalogue("{}", "hash-1", force=False, actor="file")
    assert (first.revision, second.revision, restarted) == (1, 2, second)
    forced = await fleet.two.import_catalogue("{}", "hash-1", force=True, actor="ops")
    assert (forced.revision, forced.document) == (3, "{}")
    assert await fleet.one.catalogue(timeout_ms=TIMEOUT_MS) == forced
    assert (await load(fleet.one)).catalogue_revision == 3


async def test_replicas_that_import_at_once_make_one_revision(fleet: Fleet) -> None:
    stores = [fleet.one, fleet.two] * 3
    made = await asyncio.gather(*(s.import_catalogue("{}", "same", force=False, actor="file") for s in stores))
    assert {revision.revision for revision in made} == {1}


async def test_the_fleet_shares_one_secret_made_on_first_use(fleet: Fleet) -> None:
    first, second = await asyncio.gather(fleet.one.secrets(), fleet.two.secrets())
    assert first == second
    assert [len(secret) for secret in first.values()] == [32]


async def test_pruning_keeps_what_is_young_and_drops_what_is_old(fleet: Fleet) -> None:
    await fleet.one.run(count_failure(event_id="d/0", progress=("r", 1), facts=True), timeout_ms=TIMEOUT_MS)
    await fleet.one.run(write_breaker(BreakerState("azure", generation=2)), timeout_ms=TIMEOUT_MS)
    now = (await load(fleet.one)).as_of
    assert not any((await fleet.one.prune(now, timeout_ms=TIMEOUT_MS)).values())
    dropped = await fleet.one.prune(now + 60 * 24 * HOUR_MS, timeout_ms=TIMEOUT_MS)
    names = ("state_feed", "report_answer", "replica", "fact", "breaker")
    assert [dropped[name] for name in names] == [2, 1, 1, 1, 1]
    assert [row.key[1] for _, row in (await load(fleet.two)).rows] == ["openai"]


async def test_a_pruned_sighting_is_announced(fleet: Fleet) -> None:
    sighting = EgressSighting("openai", "a", "192.0.2.1", seen_at=1)

    def see(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[None]:
        book.put(sighting)
        return UnitResult(None)

    scope = Scope(frozenset({"openai"}), frozenset({("openai", "a")}))
    await fleet.one.run(Unit(scope, see), timeout_ms=TIMEOUT_MS)
    seen = await load(fleet.two)
    dropped = await fleet.one.prune(Retention().sighting_ms + 2, timeout_ms=TIMEOUT_MS)
    assert dropped["egress_sighting"] == 1
    assert rows_of(await poll(fleet.two, seen.watermark))[sighting.key].is_default


async def test_the_clock_reading_lies_between_its_monotonic_instants(fleet: Fleet) -> None:
    sample = await fleet.one.read_clock(timeout_ms=TIMEOUT_MS)
    assert 0 <= sample.received_ms - sample.sent_ms < TIMEOUT_MS
    assert sample.database_ms > 1_700_000_000_000


async def test_statements_are_counted(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    store: Any = fleet.one
    await store.run(count_failure(), timeout_ms=TIMEOUT_MS)
    before = store.statements
    await store.read_clock(timeout_ms=TIMEOUT_MS)
    around = 3 if request.node.callspec.params["fleet"] == "pooled" else 0  # begin, time-outs, commit
    assert store.statements == before + 1 + around
