"""Load on a fleet while its database is away, and the ways in which a database can be away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import grpc
import psutil

from policy_service.storage.postgres.embedded import EmbeddedServer
from tests.contract.beside import eventually
from tests.fleet.fleet import Database, Replica, ask, told

PROVIDERS = 20
"""Failing providers; each stays below the largest threshold, so that its failures are counted one by one."""
Fault = Callable[[Database], AbstractAsyncContextManager[None]]


# --- load -------------------------------------------------------------------------------------------------
class Blocked:
    """How long this process's event loop could not run its tasks, so far: delay of the load, not of the service.

    A sleeper notes by how much it wakes too late.
    """

    NAP_S = 0.002

    def __init__(self) -> None:
        self._total_s = 0.0
        self._napped_at = time.monotonic()

    async def watch(self) -> None:
        while True:
            self._napped_at = time.monotonic()
            await asyncio.sleep(self.NAP_S)
            self._total_s += self._overdue_s()

    def _overdue_s(self) -> float:
        return max(0.0, time.monotonic() - self._napped_at - self.NAP_S)

    @property
    def total_ms(self) -> float:
        return (self._total_s + self._overdue_s()) * 1000


@dataclass(frozen=True, slots=True)
class Answered:
    """One selection. `took_ms` is without the time in which the caller itself could not run."""

    sent: float
    took_ms: float
    replica: str
    degraded: bool
    age_ms: int


@dataclass
class Load:
    """Selections that need no grant at a steady rate, and now and then the report of a failure."""

    replicas: list[Replica]
    rate: int
    reports_every: int
    answered: list[Answered] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    acknowledged: dict[str, bool] = field(default_factory=dict)
    """Report id to `durable`."""
    refused_reports: int = 0
    blocked: Blocked = field(default_factory=Blocked)
    _calls: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        running = [asyncio.create_task(self._pace()), asyncio.create_task(self.blocked.watch())]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *self._calls, return_exceptions=True)

    async def _pace(self) -> None:
        began, number = time.monotonic(), 0
        while True:
            while number < (time.monotonic() - began) * self.rate:
                number += 1
                self._start(number)
            await asyncio.sleep(0.002)

    def _start(self, number: int) -> None:
        is_report = number % self.reports_every == 0
        turn = number // self.reports_every if is_report else number
        replica = self.replicas[turn % len(self.replicas)]
        task = asyncio.create_task(self._report(replica, number) if is_report else self._select(replica))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _select(self, replica: Replica) -> None:
        sent, blocked_ms = time.monotonic(), self.blocked.total_ms
        try:
            answer = await replica.policy.SelectTarget(ask("healthy", "a", "b"), timeout=30)
        except grpc.aio.AioRpcError as error:
            self.failed.append(f"{replica.name}: {error.code()} {error.details()}")
            return
        took_ms = (time.monotonic() - sent) * 1000 - (self.blocked.total_ms - blocked_ms)
        if answer.WhichOneof("verdict") != "dispatch":
            self.failed.append(f"{replica.name}: {answer.WhichOneof('verdict')}")
        self.answered.append(Answered(sent, took_ms, replica.name, answer.degraded, answer.view_age_ms))

    async def _report(self, replica: Replica, number: int) -> None:
        report_id = f"load-{number}"
        request = told(f"failing{number % PROVIDERS}", f"c{number}", 503, report_id=report_id)
        try:
            answer = await replica.policy.ReportOutcome(request, timeout=30)
        except grpc.aio.AioRpcError:
            self.refused_reports += 1
        else:
            self.acknowledged[report_id] = answer.durable

    def between(self, since: float, until: float) -> list[Answered]:
        """Selections sent in a stretch of time."""
        return [each for each in self.answered if since <= each.sent < until]


async def whole_again(replicas: list[Replica], patience_s: float = 30) -> float:
    """Wait until no replica is degraded and every spool is empty; seconds that took."""
    began = time.monotonic()

    async def are_whole() -> bool:
        return all([await _is_whole(replica) for replica in replicas])

    await eventually(are_whole, patience_s)
    return time.monotonic() - began


async def _is_whole(replica: Replica) -> bool:
    answer = await replica.policy.SelectTarget(ask("healthy", "a"), timeout=10)
    return not answer.degraded and await replica.spooled() == 0


# --- ways to be away ---------------------------------------------------------------------------------------
def processes_of(where: Database) -> list[psutil.Process]:
    """Postmaster first, then its children."""
    assert where.server.pid is not None
    postmaster = psutil.Process(where.server.pid)
    return [postmaster, *postmaster.children(recursive=True)]


def _each(processes: list[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            act(process)


@asynccontextmanager
async def frozen(where: Database) -> AsyncIterator[None]:
    """SIGSTOP to the whole server, SIGCONT in the end."""
    stopped = processes_of(where)
    _each(stopped, psutil.Process.suspend)
    try:
        yield
    finally:
        _each(stopped, psutil.Process.resume)


@asynccontextmanager
async def killed(where: Database) -> AsyncIterator[None]:
    """kill -9 of the whole server; started again in the end, on the same data."""
    dead = processes_of(where)
    _each(dead, psutil.Process.kill)
    await asyncio.to_thread(psutil.wait_procs, dead, 10)
    try:
        yield
    finally:
        where.server = await EmbeddedServer.start(where.server.directory, where.settings)


@asynccontextmanager
async def read_only(where: Database) -> AsyncIterator[None]:
    """Every transaction is read-only, as on a standby after a failover."""
    async with where.beside() as connection:
        await _set_read_only(connection, "on")
        try:
            yield
        finally:
            await connection.execute("SET default_transaction_read_only = off")
            await _set_read_only(connection, "off")


async def _set_read_only(connection: Any, value: str) -> None:
    await connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    await connection.execute("SELECT pg_reload_conf()")


OURS = "FROM pg_stat_activity WHERE application_name LIKE 'policy-service%'"


@asynccontextmanager
async def without_slots(where: Database) -> AsyncIterator[None]:
    """Somebody else holds every connection; ours were ended."""
    async with AsyncExitStack() as held:
        first = await held.enter_async_context(where.beside())
        await _fill(where, held)
        async with asyncio.timeout(20):
            while await first.fetchval(f"SELECT count(pg_terminate_backend(pid)) {OURS}"):
                await _fill(where, held)
        yield


async def _fill(where: Database, held: AsyncExitStack) -> None:
    """Take every connection that is free."""
    with suppress(asyncpg.TooManyConnectionsError):
        while True:
            await held.enter_async_context(where.beside())
