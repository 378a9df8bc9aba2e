"""The lease store of Postgres when others are in the middle of something (leases.md section 4, fleet.md section 6).

A plain connection plays the other replica: it holds its transaction open at the worst moment.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from policy_service.application.entropy import SystemEntropy
from policy_service.application.lease_book import LeaseBook, LeaseTerms
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_leases import LeaseScope
from policy_service.domain.lease import Fence, LeaseCall, LeaseResult, LeaseState
from policy_service.storage.postgres.lease_store import PostgresLeaseStore, lock_keys
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.beside import driver, eventually
from tests.contract.fault_proxy import Fault, FaultProxy
from tests.contract.test_leases import NO_TERMS, call, owner
from tests.contract.units import TIMEOUT_MS

NOW = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
INSERT = f"""
INSERT INTO lease (owner_hash, api_key_id, provider, connection_id, generation, state, ttl_ms, acquired_at, renewed_at,
  expires_at, ended_at, end_reason)
VALUES ($1, 'k', 'p', $2, 1, $3, 60000, {NOW}, {NOW}, {NOW} + 60000,
  CASE WHEN $3 = 'ACTIVE' THEN NULL ELSE {NOW} END, CASE WHEN $3 = 'ACTIVE' THEN NULL ELSE 'QUOTA_UNAVAILABLE' END)"""


@dataclass
class Desk:
    """A lease book and another replica's open transaction."""

    book: LeaseBook
    rival: Any

    async def while_open(self, work: Any) -> Any:
        """Start `work`, see that it waits for the rival, commit the rival, and return what work says."""
        task = asyncio.ensure_future(work)
        await eventually(self._is_waiting)
        assert not task.done()
        await self.rival.execute("COMMIT")
        return await task

    async def _is_waiting(self) -> bool:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return bool(await self.rival.fetchval(waiting))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[LeaseBook]:
    store = await PostgresStore.connect(url)
    try:
        yield LeaseBook(PostgresLeaseStore(store), SystemEntropy(), "r1", budget_ms=TIMEOUT_MS)
    finally:
        await store.close()


@pytest.fixture
async def desk(embedded_url: str) -> AsyncIterator[Desk]:
    async with opened(embedded_url) as book, driver(embedded_url) as rival:
        yield Desk(book, rival)


async def test_a_renewal_under_way_keeps_a_rival_from_expiring_the_lease(desk: Desk) -> None:
    await desk.book.acquire(call("o", "c"), NO_TERMS)
    await desk.rival.execute(f"UPDATE lease SET expires_at = {NOW} - 1")
    await desk.rival.execute("BEGIN")
    await desk.rival.execute(f"UPDATE lease SET expires_at = {NOW} + 60000")
    step = await desk.while_open(desk.book.acquire(call("p", "c"), NO_TERMS))
    assert step.result is LeaseResult.CONNECTION_BUSY
    assert (await desk.book.fence(call("o", "c", 1))).verdict is Fence.VALID


async def test_a_lease_that_begins_and_ends_meanwhile_still_leaves_its_lock_delay(desk: Desk) -> None:
    """No index tells: the row that decides is not active, and was not there when the acquire began."""
    (key,) = lock_keys(LeaseScope(connections=("c",)))
    await desk.rival.execute("BEGIN")
    await desk.rival.execute("SELECT pg_advisory_xact_lock($1)", key)
    await desk.rival.execute(INSERT, owner("o"), "c", "INVALIDATED")
    step = await desk.while_open(desk.book.acquire(call("p", "c"), LeaseTerms(lock_delay_ms=60_000)))
    assert step.result is LeaseResult.CONNECTION_BUSY


async def test_a_fence_waits_for_an_end_that_was_decided_before_it(desk: Desk) -> None:
    await desk.book.acquire(call("o", "c"), NO_TERMS)
    await desk.rival.execute("BEGIN")
    await desk.rival.execute(f"UPDATE lease SET state = 'RELEASED', ended_at = {NOW}, end_reason = 'OWNER_EXIT'")
    check = await desk.while_open(desk.book.fence(call("o", "c", 1)))
    assert check.verdict is Fence.REQUIRED


async def test_a_fence_does_not_wait_for_other_fences(desk: Desk) -> None:
    await desk.book.acquire(call("o", "c"), NO_TERMS)
    await desk.rival.execute("BEGIN")
    await desk.rival.execute("SELECT id FROM lease FOR SHARE")
    assert (await desk.book.fence(call("o", "c", 1))).verdict is Fence.VALID
    await desk.rival.execute("ROLLBACK")


async def test_a_sweep_waits_for_nobody(desk: Desk) -> None:
    for name in ("o", "p"):
        await desk.book.acquire(call(name, f"on-{name}"), NO_TERMS)
    await desk.rival.execute(f"UPDATE lease SET expires_at = {NOW} - 1")
    await desk.rival.execute("BEGIN")
    await desk.rival.execute(f"UPDATE lease SET expires_at = {NOW} + 60000 WHERE connection_id = 'on-o'")
    assert (await desk.book.sweep({}, revision=-1)).expired == 1
    await desk.rival.execute("COMMIT")
    assert (await desk.book.fence(call("o", "on-o", 1))).verdict is Fence.VALID


@pytest.mark.parametrize(
    ("names", "result"),
    [
        (("rival", "c"), LeaseResult.CONNECTION_BUSY),
        (("o", "elsewhere"), LeaseResult.OWNER_ALREADY_ACTIVE),
    ],
)
async def test_a_writer_that_takes_no_locks_is_met_in_the_index_and_named_as_the_winner(
    desk: Desk, names: tuple[str, str], result: LeaseResult
) -> None:
    await desk.rival.execute("BEGIN")
    await desk.rival.execute(INSERT, owner(names[0]), names[1], "ACTIVE")
    step = await desk.while_open(desk.book.acquire(call("o", "c"), NO_TERMS))
    assert step.result is result


async def test_an_index_that_never_stops_colliding_is_an_unavailable_service(desk: Desk) -> None:
    """Played by an index that the service does not know."""
    await desk.rival.execute("CREATE UNIQUE INDEX one_lease_only ON lease ((true))")
    await desk.book.acquire(call("o", "c"), NO_TERMS)
    with pytest.raises(StoreUnavailableError):
        await desk.book.acquire(call("p", "d"), NO_TERMS)


@pytest.mark.parametrize("fault", list(Fault))
async def test_an_acquire_whose_commit_has_an_unknown_result_is_one_lease(embedded_url: str, fault: Fault) -> None:
    with tempfile.TemporaryDirectory(prefix="pp-") as directory:
        async with FaultProxy(embedded_url, Path(directory)).listening() as proxy, opened(proxy.url) as book:
            await book.acquire(call("first", "x"), NO_TERMS)
            proxy.faults.append(fault)
            step = await book.acquire(call("o", "c"), NO_TERMS)
            assert proxy.seen == [fault]
            assert step.result in (LeaseResult.ACQUIRED, LeaseResult.REUSED)
            rows = (await book.look((owner("o"),), ())).rows
    assert [(row.generation, row.state) for row in rows] == [(1, LeaseState.ACTIVE)]


async def test_a_stuck_lock_costs_the_budget_and_no_more(desk: Desk) -> None:
    (key,) = lock_keys(LeaseScope(owners=(owner("o"),)))
    await desk.rival.execute("BEGIN")
    await desk.rival.execute("SELECT pg_advisory_xact_lock($1)", key)
    desk.book._budget_ms = 150
    with pytest.raises(StoreUnavailableError):
        await desk.book.renew(LeaseCall(owner("o"), "k", 1))
