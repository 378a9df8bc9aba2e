"""Who is alive, and what the evidence quorum makes of it (spec/breaker.md section 12)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from policy_service.application.liveness import STANDS_FOR, Liveness
from policy_service.application.ports_fleet import Signer
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.catalogue import Catalogue
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, failure, make_replica, quick_settings, report, running

ME, OTHER = Signer("life-1", "r1", "0.1.0"), Signer("life-2", "r2", "0.1.0")
EVERY_MS = 100
QUORUM = {
    "breaker.quorum.enabled": True,
    "breaker.quorum.min_replicas": 2,
    "breaker.quorum.min_connections": 100,
    "breaker.api_key.failure_threshold": 2,
    "breaker.api_key.degradation_threshold": 1,
}


def fleet_of(count: int) -> tuple[FakeTime, list[Liveness], list[MemoryStore]]:
    time = FakeTime()
    database = MemoryDatabase(time.database)
    stores = [MemoryStore(database) for _ in range(count)]
    signers = (Signer(f"life-{number}", f"r{number}") for number in range(count))
    return time, [Liveness(s, each, every_ms=EVERY_MS) for s, each in zip(stores, signers, strict=True)], stores


def names(liveness: Liveness) -> list[str]:
    return [each.signer.name for each in liveness.sightings]


async def test_nothing_is_known_before_the_first_signature() -> None:
    _, (alone,), _ = fleet_of(1)
    assert alone.count() is None
    await alone.sign()
    assert alone.count() == 1


async def test_a_signature_outlives_lost_rounds_and_no_more() -> None:
    time, (one, two), _ = fleet_of(2)
    await one.sign()
    time.ms += EVERY_MS * STANDS_FOR - 1
    await two.sign()
    assert names(two) == ["r1", "r0"]
    time.ms += 1
    await two.sign()
    assert names(two) == ["r1"]


async def test_a_living_namesake_is_told_apart_from_a_former_life(caplog: pytest.LogCaptureFixture) -> None:
    time = FakeTime()
    database = MemoryDatabase(time.database)
    former, one, two = (Liveness(MemoryStore(database), Signer(f"life-{n}", "r0"), every_ms=EVERY_MS) for n in range(3))
    await former.sign()
    time.ms += 1
    await one.sign()
    time.ms += 1
    await one.sign()
    assert not one.has_namesake
    await two.sign()
    time.ms += 1
    for each in (one, two, one, two):
        time.ms += 1
        await each.sign()
    assert (one.has_namesake, two.has_namesake) == (True, True)
    assert [record.message for record in caplog.records if "--replica" in record.message and "r0" in record.message]
    time.ms += EVERY_MS * STANDS_FOR
    await one.sign()
    assert not one.has_namesake


async def test_two_lives_of_one_name_are_one_replica() -> None:
    """One that was killed and started again, before its old signature has run out."""
    time = FakeTime()
    store = MemoryStore(MemoryDatabase(time.database))
    other = Liveness(store, OTHER, every_ms=EVERY_MS)
    await Liveness(store, ME, every_ms=EVERY_MS).sign()
    time.ms += 1
    reborn = Signer("life-3", "r1", "0.2.0")
    await Liveness(store, reborn, every_ms=EVERY_MS).sign()
    await other.sign()
    assert [each.signer for each in other.sightings] == [OTHER, reborn]


async def test_what_was_read_last_stands_while_the_store_is_away() -> None:
    time, (one, two), (_, away) = fleet_of(2)
    await one.sign()
    await two.sign()
    away.is_away = True
    time.ms += 60_000
    await two.sign()
    assert two.count() == 2


async def test_a_store_that_fails_otherwise_does_not_end_the_signing() -> None:
    class Faulty(MemoryStore):
        async def sign(self, *_: object, **__: object) -> tuple[()]:
            raise RuntimeError("fault injected")

    liveness = Liveness(Faulty(), ME, every_ms=1)
    await liveness.start()
    await asyncio.sleep(0.01)
    assert liveness.count() is None
    await liveness.stop()


async def test_who_stops_signs_off() -> None:
    _, (one, two), _ = fleet_of(2)
    await one.start()
    await two.sign()
    assert two.count() == 2
    await one.stop()
    await two.sign()
    assert two.count() == 1


def catalogue() -> Catalogue:
    return replace(builtin_catalogue(), stored_settings=QUORUM)


async def test_the_quorum_is_lowered_to_the_replicas_that_are_alive() -> None:
    database = MemoryDatabase()
    store = MemoryStore(database)
    settings = replace(quick_settings("r1"), sign_every_ms=3_600_000)
    async with running(make_replica(store, catalogue=catalogue(), settings=settings)) as replica:
        await MemoryStore(database).sign(OTHER, 3_600_000, timeout_ms=1_000)
        await replica.liveness.sign()
        for connection in ("a", "b"):
            await report(replica, failure(connection))
        assert breaker(replica.view.rows).state is State.DEGRADED
        assert [each.replica for each in breaker(replica.view.rows).replica_opens] == ["r1"]
        await MemoryStore(database).sign(OTHER, 0, timeout_ms=1_000)
        await replica.liveness.sign()
        await report(replica, failure("c"))
        assert breaker(replica.view.rows).state is State.OPEN


async def test_the_projection_counts_the_living_as_the_commit_does() -> None:
    store = MemoryStore()
    async with running(make_replica(store, catalogue=catalogue(), settings=quick_settings("r1"))) as replica:
        store.is_away = True
        for connection in ("a", "b"):
            await report(replica, failure(connection))
        assert breaker(replica.view.rows).state is State.OPEN


def breaker(rows: object) -> BreakerState:
    row = rows[("breaker", "openai", "")]  # type: ignore[index]
    assert isinstance(row, BreakerState)
    return row
