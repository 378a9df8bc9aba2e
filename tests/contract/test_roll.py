"""The fleet's roll, held against the memory store and Postgres alike (spec/breaker.md section 12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from policy_service.application.ports import Store
from policy_service.application.ports_fleet import Sighting, Signer
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.units import TIMEOUT_MS, count_failure

ONE, TWO, THREE = (Signer(f"life-{name}", name, "0.1.0") for name in ("one", "two", "three"))
LONG = 60_000


@pytest.fixture(params=["memory", "postgres", "pooled"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(MemoryDatabase())
        return
    url = request.getfixturevalue("pooled_url" if request.param == "pooled" else "embedded_url")
    postgres = await PostgresStore.connect(url, StoreOptions(has_transaction_pooler=request.param == "pooled"))
    yield postgres
    await postgres.close()


async def signed(store: Store, signer: Signer, stands_ms: int = LONG) -> tuple[Sighting, ...]:
    return await store.sign(signer, stands_ms, timeout_ms=TIMEOUT_MS)


async def signers(store: Store, signer: Signer, stands_ms: int = LONG) -> list[Signer]:
    return [each.signer for each in await signed(store, signer, stands_ms)]


async def test_who_signs_sees_itself_first_and_the_others_by_name(store: Store) -> None:
    assert await signers(store, TWO) == [TWO]
    assert await signers(store, THREE) == [THREE, TWO]
    assert await signers(store, ONE) == [ONE, THREE, TWO]
    assert await signers(store, TWO) == [TWO, ONE, THREE]


async def test_a_signature_stands_for_as_long_as_it_says_in_database_time(store: Store) -> None:
    before = (await store.read_clock(timeout_ms=TIMEOUT_MS)).database_ms
    (own,) = await signed(store, ONE, 7_000)
    after = (await store.read_clock(timeout_ms=TIMEOUT_MS)).database_ms
    assert before <= own.seen_at <= after
    assert abs(own.alive_until - own.seen_at - 7_000) <= 1


async def test_who_does_not_sign_again_is_gone_when_its_signature_has_run_out(store: Store) -> None:
    await signed(store, ONE, 50)
    await signed(store, TWO)
    while await signers(store, TWO) != [TWO]:
        await asyncio.sleep(0.01)
    assert await signers(store, ONE, 50) == [ONE, TWO]


async def test_who_signs_off_is_gone_at_once(store: Store) -> None:
    await signed(store, ONE)
    await signed(store, TWO)
    assert await signers(store, ONE, 0) == [TWO]
    assert await signers(store, TWO) == [TWO]


async def test_two_lives_of_one_name_are_two(store: Store) -> None:
    again = Signer("another-life", "one", "0.2.0")
    await signed(store, ONE)
    assert await signers(store, again) == [again, ONE]


async def test_signing_leaves_the_number_of_the_newest_event_alone(store: Store) -> None:
    await store.run(count_failure("acme", "e1", progress=(ONE.incarnation, 7)), timeout_ms=TIMEOUT_MS)
    await signed(store, ONE)
    feed = await store.load(timeout_ms=TIMEOUT_MS)
    assert feed.progress[ONE.incarnation] == 7


async def test_signing_announces_nothing_and_changes_no_row(store: Store) -> None:
    before = await store.load(timeout_ms=TIMEOUT_MS)
    await signed(store, ONE)
    poll = await store.poll(before.watermark, timeout_ms=TIMEOUT_MS)
    assert poll.rows == ()
    assert (await store.load(timeout_ms=TIMEOUT_MS)).rows == before.rows
