"""The Postgres store when something breaks: connections, locks, budgets, callers (spec/fleet.md sections 2 and 4)."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import make_url

from policy_service.application.ports import Scope, Store, StoreUnavailableError, UnitRefusedError
from policy_service.domain.breaker import BreakerState
from policy_service.storage.postgres import schema
from policy_service.storage.postgres.embedded import EmbeddedServer
from policy_service.storage.postgres.session import StoreOptions, database_url
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.beside import driver, eventually, place_for_clusters
from tests.contract.fault_proxy import Fault, FaultProxy
from tests.contract.units import TIMEOUT_MS, count_failure, open_breaker, read_breaker, write_breaker

NAME = "storm"


@pytest.fixture
async def store(embedded_url: str) -> AsyncIterator[PostgresStore]:
    opened = await PostgresStore.connect(embedded_url, StoreOptions(application_name=NAME))
    yield opened
    await opened.close()


@pytest.fixture
async def proxy(embedded_url: str) -> AsyncIterator[FaultProxy]:
    with tempfile.TemporaryDirectory(prefix="pp-") as directory:
        async with FaultProxy(embedded_url, Path(directory)).listening() as listening:
            yield listening


async def failures(store: Store, provider: str = "openai") -> int:
    read = await store.run(read_breaker(provider), timeout_ms=TIMEOUT_MS)
    return read.value.failure_count


@pytest.mark.parametrize("fault", list(Fault))
async def test_a_commit_with_unknown_result_counts_once(proxy: FaultProxy, fault: Fault) -> None:
    behind = await PostgresStore.connect(proxy.url)
    await behind.run(count_failure(event_id="d/0", facts=True), timeout_ms=TIMEOUT_MS)
    proxy.faults.append(fault)
    unit = count_failure(event_id="d/1", progress=("r", 2), facts=True)
    committed = await behind.run(unit, timeout_ms=TIMEOUT_MS)
    assert proxy.seen == [fault]
    assert committed.value == 2
    assert await failures(behind) == 2
    assert len(await behind.facts(limit=9)) == 2
    await behind.close()


async def test_a_deadlocked_unit_is_run_again(embedded_url: str, store: PostgresStore) -> None:
    async with driver(embedded_url) as rival:
        await rival.execute(f"ALTER DATABASE {make_url(embedded_url).database} SET deadlock_timeout = '50ms'")
        fresh = await PostgresStore.connect(embedded_url)
        await fresh.run(replace(count_failure("a"), scope=Scope(frozenset({"a", "b"}))), timeout_ms=TIMEOUT_MS)
        await rival.execute(
            "BEGIN; SET LOCAL deadlock_timeout = '10s'; SELECT 1 FROM guard WHERE provider = 'b' FOR UPDATE"
        )
        unit = replace(count_failure("a", "d/1"), scope=Scope(frozenset({"a", "b"})))
        before = fresh.statements
        running = asyncio.create_task(fresh.run(unit, timeout_ms=TIMEOUT_MS))
        await waiting_for_lock(rival)
        await rival.execute(
            "SELECT 1 FROM guard WHERE provider = 'a' FOR UPDATE"  # granted once the unit was the victim
        )
        await rival.execute("ROLLBACK")
        assert (await running).value == 2
        assert fresh.statements - before > 5, "the unit was never the victim"
        await fresh.close()


async def are_counted(store: Store, units: int) -> bool:
    return await failures(store) == units


async def waiting_for_lock(connection: Any) -> None:
    """Until some backend of the database waits for a row lock."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    await eventually(lambda: connection.fetchval(waiting))


async def test_a_held_guard_costs_the_budget_and_no_more(embedded_url: str, store: PostgresStore) -> None:
    await store.run(count_failure(), timeout_ms=TIMEOUT_MS)
    async with driver(embedded_url) as rival:
        await rival.execute("BEGIN; SELECT 1 FROM guard FOR UPDATE")
        begun = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await store.run(count_failure(), timeout_ms=150)
        assert time.monotonic() - begun < 0.6
        await rival.execute("ROLLBACK")
    assert (await store.run(count_failure(), timeout_ms=TIMEOUT_MS)).value >= 2


async def test_terminated_connections_are_replaced_within_the_call(embedded_url: str, store: PostgresStore) -> None:
    await asyncio.gather(*(store.read_clock(timeout_ms=TIMEOUT_MS) for _ in range(8)))
    async with driver(embedded_url) as rival:
        await rival.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", NAME)
    assert (await store.run(count_failure(event_id="d/0"), timeout_ms=TIMEOUT_MS)).value == 1


async def test_a_read_only_server_is_unavailable(embedded_url: str) -> None:
    async with driver(embedded_url) as rival:
        database = make_url(embedded_url).database
        opened = await PostgresStore.connect(embedded_url)
        await rival.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        await rival.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND datname = current_database()"
        )
    with pytest.raises(StoreUnavailableError, match="read-only"):
        await opened.run(count_failure(), timeout_ms=TIMEOUT_MS)
    await opened.close()


async def test_a_server_without_free_connections_is_unavailable(embedded_url: str) -> None:
    role = f"limited_{os.getpid()}"
    async with driver(embedded_url) as rival:
        await rival.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 0")
        full = PostgresStore(make_url(embedded_url).set(username=role))
        with pytest.raises(StoreUnavailableError, match="too many connections"):
            await full.load(timeout_ms=TIMEOUT_MS)
        await full.close()
        await rival.execute(f"DROP ROLE {role}")


async def test_an_absent_server_is_unavailable_at_once(tmp_path: Path) -> None:
    absent = PostgresStore(f"postgresql://postgres@/postgres?host={tmp_path}")
    begun = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        await absent.load(timeout_ms=TIMEOUT_MS)
    assert time.monotonic() - begun < 1
    await absent.close()


async def test_no_sql_text_passes_outward(embedded_url: str, store: PostgresStore) -> None:
    async with driver(embedded_url) as rival:
        await rival.execute("DROP TABLE breaker")
    with pytest.raises(StoreUnavailableError) as caught:
        await store.run(count_failure("secret-provider"), timeout_ms=TIMEOUT_MS)
    assert str(caught.value) == "a table is missing (SQLSTATE 42P01)"
    assert caught.value.__cause__ is None


async def test_a_unit_that_the_database_refuses_is_told_apart_from_an_absent_store(
    embedded_url: str, store: PostgresStore
) -> None:
    async with driver(embedded_url) as rival:
        await rival.execute("ALTER TABLE breaker ADD CHECK (failure_count < 5)")
    with pytest.raises(UnitRefusedError, match="23514"):
        await store.run(write_breaker(BreakerState("openai", failure_count=9)), timeout_ms=TIMEOUT_MS)


async def test_texts_and_numbers_that_postgres_cannot_hold_do_not_block_a_unit(store: PostgresStore) -> None:
    poisoned = BreakerState("open\x00ai", last_failure_kind="a\x00b\ud800c", failure_count=2**70)
    await store.run(write_breaker(poisoned), timeout_ms=TIMEOUT_MS)
    (stored,) = (await store.load(timeout_ms=TIMEOUT_MS)).rows
    assert stored.row.key == ("breaker", "open\ufffdai", "")
    for _ in range(2):
        event = await store.run(count_failure("a", "d\x00/\ud800"), timeout_ms=TIMEOUT_MS)
        assert event.value == 1


async def test_a_cancelled_caller_neither_loses_its_unit_nor_leaks_a_connection(
    embedded_url: str, store: PostgresStore
) -> None:
    units, cancelled = 300, 0
    for number in range(units):
        caller = asyncio.create_task(store.run(count_failure(event_id=f"d/{number}"), timeout_ms=60_000))
        await asyncio.sleep(0.0005 * (number % 5))
        cancelled += caller.cancel()
        await asyncio.wait({caller})
    assert cancelled > units / 2
    await eventually(lambda: are_counted(store, units))
    async with driver(embedded_url) as rival:
        states = await rival.fetch("SELECT state FROM pg_stat_activity WHERE application_name = $1", NAME)
        assert 0 < len(states) <= StoreOptions().pool_size
        assert {row["state"] for row in states} == {"idle"}
    assert await asyncio.gather(*(store.read_clock(timeout_ms=TIMEOUT_MS) for _ in range(20)))


async def test_closing_waits_for_the_units_of_cancelled_callers(embedded_url: str) -> None:
    closing = await PostgresStore.connect(embedded_url)
    callers = [asyncio.create_task(closing.run(count_failure(), timeout_ms=TIMEOUT_MS)) for _ in range(20)]
    await asyncio.sleep(0)
    for caller in callers:
        caller.cancel()
    await closing.close()
    later = await PostgresStore.connect(embedded_url)
    assert await failures(later) == 20
    await later.close()


@pytest.fixture
def private_server() -> Iterator[EmbeddedServer]:
    """A server of the test's own, to be frozen."""
    with tempfile.TemporaryDirectory(prefix="policy-frozen-", dir=place_for_clusters()) as directory:
        server = EmbeddedServer.open(directory)
        yield server
        server.close()


def signal_server(server: EmbeddedServer, number: signal.Signals) -> None:
    postmaster = psutil.Process(server.pid)
    for process in (postmaster, *postmaster.children()):
        process.send_signal(number)


async def has_no_other_task() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_frozen_server_costs_the_budget_and_comes_back(private_server: EmbeddedServer) -> None:
    await schema.upgrade(private_server.url)
    frozen = await PostgresStore.connect(private_server.url, StoreOptions(application_name=NAME))
    await frozen.run(count_failure(event_id="d/0"), timeout_ms=TIMEOUT_MS)
    signal_server(private_server, signal.SIGSTOP)
    try:
        for _ in range(12):
            begun = time.monotonic()
            with pytest.raises(StoreUnavailableError):
                await frozen.run(count_failure(event_id="d/1"), timeout_ms=100)
            assert time.monotonic() - begun < 0.4
        await eventually(has_no_other_task)
    finally:
        signal_server(private_server, signal.SIGCONT)
    assert (await frozen.run(count_failure(event_id="d/1"), timeout_ms=TIMEOUT_MS)).value == 2
    await frozen.close()


async def test_a_store_on_a_frozen_server_closes_all_the_same(private_server: EmbeddedServer) -> None:
    await schema.upgrade(private_server.url)
    closing = await PostgresStore.connect(private_server.url)
    await asyncio.gather(*(closing.read_clock(timeout_ms=TIMEOUT_MS) for _ in range(4)))
    await closing.subscribe(lambda: None, lambda: None)
    signal_server(private_server, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await schema.check(private_server.url, timeout_ms=200)
        await closing.close()
        assert time.monotonic() - begun < 5
    finally:
        signal_server(private_server, signal.SIGCONT)


async def test_a_store_stays_usable_after_many_refused_units(store: PostgresStore) -> None:
    def fail(*_: object) -> Any:
        raise ArithmeticError

    for _ in range(30):
        with pytest.raises(ArithmeticError):
            await store.run(replace(write_breaker(open_breaker("a")), run=fail), timeout_ms=TIMEOUT_MS)
    assert await failures(store) == 0


@pytest.mark.parametrize(
    ("given", "driver_url"),
    [
        ("postgres://u@h/d", "postgresql+asyncpg://u@h/d"),
        (
            "postgresql://u:p@h:6432/d?sslmode=require",
            "postgresql+asyncpg://u:p@h:6432/d?dsn=postgresql%3A///%3Fsslmode%3Drequire",
        ),
        ("postgresql+asyncpg://u@/d?host=/run/pg", "postgresql+asyncpg://u@/d?host=/run/pg"),
    ],
)
def test_urls_of_other_drivers_are_understood(given: str, driver_url: str) -> None:
    assert database_url(given).render_as_string(hide_password=False).replace("%2F", "/") == driver_url


async def test_parameters_of_libpq_reach_the_driver(embedded_url: str) -> None:
    """One that it knows is obeyed, and only it can tell that another one is none."""
    url = make_url(embedded_url)
    plain = PostgresStore(url.update_query_dict({"sslmode": "disable", "target_session_attrs": "read-write"}))
    wrong = PostgresStore(url.update_query_dict({"sslmode": "loose"}))
    try:
        assert await failures(plain) == 0
        with pytest.raises(StoreUnavailableError, match="the connection failed"):
            await failures(wrong)
    finally:
        await plain.close()
        await wrong.close()
