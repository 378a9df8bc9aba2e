"""What every store of session pins promises (spec/affinity.md section 3, fleet.md section 6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from policy_service.application.ports_pins import PinKey, PinSeen, PinStore, key_of
from policy_service.domain.affinity import PinRow
from policy_service.storage.memory.pin_store import MemoryPinStore, PinTable
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from policy_service.storage.postgres.pin_store import PostgresPinStore
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore

MS = 5_000
TTL = 3_600_000
SHORT = 400
"""Life of a pin that is to end within the test; long enough to be stored on a busy machine."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two replicas' pins on one database."""

    one: PinStore
    two: PinStore


@pytest.fixture(params=["memory", "postgres", "pooled"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    if request.param == "memory":
        database, table = MemoryDatabase(), PinTable()
        yield Fleet(*(MemoryPinStore(MemoryStore(database), table) for _ in range(2)))
        return
    url = request.getfixturevalue("pooled_url" if request.param == "pooled" else "embedded_url")
    options = StoreOptions(has_transaction_pooler=request.param == "pooled")
    stores = [await PostgresStore.connect(url, options) for _ in range(2)]
    yield Fleet(*map(PostgresPinStore, stores))
    for store in stores:
        await store.close()


def now() -> int:
    return time.time_ns() // 1_000_000


def pin(connection: str = "a", session: str = "s", caller: str = "u", *, ttl: int = TTL, at: int = 0) -> PinRow:
    used = at or now()
    return PinRow(caller, "openai", session, connection, used, used, used + ttl)


async def stored(store: PinStore, row: PinRow) -> PinRow:
    saved = await store.insert(row, timeout_ms=MS)
    assert saved is not None
    assert saved.is_own
    return saved.row


def seen(row: PinRow) -> PinSeen:
    return PinSeen(row.connection_id, row.version)


async def test_a_stored_pin_is_read_by_every_replica_with_its_times(fleet: Fleet) -> None:
    row = await stored(fleet.one, pin())
    found = await fleet.two.find(key_of(row), timeout_ms=MS)
    assert found == row
    assert (row.expires_at - row.last_used_at, row.version > 0) == (TTL, True)


async def test_the_first_writer_wins_and_the_loser_gets_the_winners_row(fleet: Fleet) -> None:
    winner = await stored(fleet.one, pin("a"))
    lost = await fleet.two.insert(pin("b"), timeout_ms=MS)
    assert lost == (winner, False)


async def test_callers_and_providers_do_not_share_a_pin(fleet: Fleet) -> None:
    await stored(fleet.one, pin("a", caller=""))
    await stored(fleet.one, pin("b", caller="u"))
    await stored(fleet.one, replace(pin("c"), provider="codex"))
    found = await fleet.two.find(PinKey("", "openai", "s"), timeout_ms=MS)
    assert found is not None
    assert found.connection_id == "a"


async def test_an_expired_pin_is_absent_and_may_be_replaced(fleet: Fleet) -> None:
    await stored(fleet.one, pin("a", ttl=SHORT))
    await asyncio.sleep(2 * SHORT / 1000)
    assert await fleet.two.find(key_of(pin()), timeout_ms=MS) is None
    assert (await stored(fleet.two, pin("b"))).connection_id == "b"


async def test_a_pin_whose_own_time_is_over_is_not_inserted(fleet: Fleet) -> None:
    assert await fleet.one.insert(pin(at=now() - 2 * TTL), timeout_ms=MS) is None
    assert await fleet.one.find(key_of(pin()), timeout_ms=MS) is None


async def test_a_move_is_conditional_on_what_was_seen(fleet: Fleet) -> None:
    before = await stored(fleet.one, pin("a"))
    moved = await fleet.one.move(pin("b"), seen(before), timeout_ms=MS)
    assert moved is not None
    assert (moved.is_own, moved.row.connection_id, moved.row.version > before.version) == (True, "b", True)
    late = await fleet.two.move(pin("c"), seen(before), timeout_ms=MS)
    assert late == (moved.row, False)


async def test_moving_a_pin_that_is_gone_writes_nothing(fleet: Fleet) -> None:
    assert await fleet.one.move(pin("b"), PinSeen("a", 1), timeout_ms=MS) is None
    assert await fleet.one.find(key_of(pin()), timeout_ms=MS) is None


async def test_a_delete_spares_a_pin_that_was_made_anew_on_the_same_connection(fleet: Fleet) -> None:
    first = await stored(fleet.one, pin("a"))
    assert await fleet.one.delete(key_of(first), seen(first), timeout_ms=MS)
    again = await stored(fleet.two, pin("a"))
    assert not await fleet.one.delete(key_of(first), seen(first), timeout_ms=MS)
    assert await fleet.one.find(key_of(first), timeout_ms=MS) == again


async def test_a_delete_of_a_pin_that_was_never_seen_stored_goes_by_its_connection(fleet: Fleet) -> None:
    row = await stored(fleet.one, pin("a"))
    assert not await fleet.two.delete(key_of(row), PinSeen("b", 0), timeout_ms=MS)
    assert await fleet.two.delete(key_of(row), PinSeen("a", 0), timeout_ms=MS)


async def test_pins_are_deleted_by_provider_and_connection(fleet: Fleet) -> None:
    kept = await stored(fleet.one, pin("b", caller="other"))
    await stored(fleet.one, pin("a"))
    await stored(fleet.one, replace(pin("a"), provider="codex"))
    assert await fleet.two.delete_all("openai", "a", timeout_ms=MS) == 1
    assert await fleet.two.delete_all("codex", "", timeout_ms=MS) == 1
    assert await fleet.two.find(key_of(kept), timeout_ms=MS) == kept
    assert await fleet.two.delete_all("", "", timeout_ms=MS) == 1
    assert await fleet.two.find(key_of(kept), timeout_ms=MS) is None


async def test_a_refresh_slides_the_end_keeps_the_version_and_never_shortens(fleet: Fleet) -> None:
    row = await stored(fleet.one, pin())
    later = row.last_used_at + 15_000
    grown = await fleet.two.refresh(key_of(row), seen(row), later, TTL, timeout_ms=MS)
    assert grown == replace(row, last_used_at=later, expires_at=later + TTL)
    shorter = await fleet.one.refresh(key_of(row), seen(row), later + 15_000, 1_000, timeout_ms=MS)
    assert shorter is not None
    assert shorter.expires_at == later + TTL


async def test_a_refresh_right_after_another_is_not_written(fleet: Fleet) -> None:
    row = await stored(fleet.one, pin())
    assert await fleet.one.refresh(key_of(row), seen(row), row.last_used_at + 14_999, TTL, timeout_ms=MS) == row


async def test_a_refresh_of_a_moved_pin_changes_nothing_and_shows_the_winner(fleet: Fleet) -> None:
    before = await stored(fleet.one, pin("a"))
    moved = await fleet.two.move(pin("b"), seen(before), timeout_ms=MS)
    assert moved is not None
    shown = await fleet.one.refresh(key_of(before), seen(before), now() + 60_000, TTL, timeout_ms=MS)
    assert shown == moved.row


async def test_a_refresh_does_not_raise_the_dead(fleet: Fleet) -> None:
    row = await stored(fleet.one, pin(ttl=SHORT))
    await asyncio.sleep(2 * SHORT / 1000)
    assert await fleet.one.refresh(key_of(row), seen(row), now(), TTL, timeout_ms=MS) is None
    assert await fleet.one.refresh(PinKey("u", "openai", "none"), seen(row), now(), TTL, timeout_ms=MS) is None


async def test_live_pins_count_by_connection(fleet: Fleet) -> None:
    for session, connection, ttl in (("1", "a", TTL), ("2", "a", TTL), ("3", "b", TTL), ("4", "b", SHORT)):
        await stored(fleet.one, pin(connection, session, ttl=ttl))
    await asyncio.sleep(2 * SHORT / 1000)
    assert await fleet.two.count(["a", "b", "c"], timeout_ms=MS) == {"a": 2, "b": 1}


async def test_the_sweep_takes_what_is_over_and_nothing_else(fleet: Fleet) -> None:
    kept = await stored(fleet.one, pin("a", "kept"))
    await stored(fleet.one, pin("a", "over", ttl=SHORT))
    await asyncio.sleep(2 * SHORT / 1000)
    assert await fleet.two.sweep(timeout_ms=MS) == 1
    assert await fleet.two.find(key_of(kept), timeout_ms=MS) == kept


async def test_of_many_writers_at_once_one_wins_and_all_see_it(fleet: Fleet) -> None:
    for number in range(30):
        stores = [fleet.one, fleet.two] * 3
        rows = (pin(f"c{i}", f"race{number}") for i in range(6))
        saved = await asyncio.gather(
            *(store.insert(row, timeout_ms=MS) for store, row in zip(stores, rows, strict=True))
        )
        assert sum(each.is_own for each in saved if each) == 1
        assert len({each.row for each in saved if each}) == 1
