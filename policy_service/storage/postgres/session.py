"""Connections of the store: pool, deadlines, statement counts.

Every unit of work runs in a task of its own, apart from the caller's: a cancelled caller neither undoes the unit
nor takes a pooled connection with it. At the deadline the socket is cut; asking a server that hangs to cancel
would hang as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode
from uuid import uuid4
from weakref import WeakSet

from sqlalchemy import URL, event, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from policy_service.application.ports import StoreSlowError
from policy_service.domain.ids import DurationMs
from policy_service.storage.postgres.errors import public_error

T = TypeVar("T")

PLANNING = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}
"""Every statement looks rows up by key: planning anew costs more than running, and a plan made while a table was
empty must serve it when it is full."""

GRACE_S = 0.05
"""Time after the deadline in which a unit's task cleans up before its caller stops waiting."""


CLOSE_PATIENCE_S = 1.0
"""Time for orderly goodbyes to a server when the store is closed."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a replica uses its database. Durations in ms."""

    application_name: str = "policy-service"
    pool_size: int = 8
    """Connections, opened when they are needed and then kept: closing one after use costs its next user a process of
    the server, the planning of every statement and a look at the server's identity."""
    connect_timeout_ms: DurationMs = 2_000
    statement_timeout_ms: DurationMs = 10_000
    lock_timeout_ms: DurationMs = 2_000
    idle_in_transaction_ms: DurationMs = 10_000
    has_transaction_pooler: bool = False
    """True behind a pooler in transaction mode: no named statements, no session settings, no notifications."""
    notifications: bool = True
    heartbeat_ms: DurationMs = 5_000
    """How often the listening connection is tried."""

    def session_settings(self) -> Mapping[str, str]:
        """Settings of every session; a transaction pooler takes the name only."""
        name = {"application_name": self.application_name}
        return name if self.has_transaction_pooler else name | PLANNING | self.time_outs()

    def time_outs(self) -> dict[str, str]:
        """Server-side limits, so that a cut connection does not hold or await a lock for long."""
        return {
            "statement_timeout": str(self.statement_timeout_ms),
            "lock_timeout": str(self.lock_timeout_ms),
            "idle_in_transaction_session_timeout": str(self.idle_in_transaction_ms),
        }

    def limit_transaction(self) -> str:
        """Statement that sets the time-outs for the transaction at hand, for where a session can't have them."""
        settings = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in self.time_outs().items())
        return f"SELECT {settings}"


_OF_THE_ADDRESS = ("host", "port", "dsn")


def database_url(url: str | URL) -> URL:
    """URL with the asyncpg driver; accepts `postgres://`, `postgresql://` and libpq's parameters (TLS, target session).

    The driver reads those from an address of its own only, so that is what they become.
    """
    parsed = make_url(url).set(drivername="postgresql+asyncpg")
    libpq = {name: value for name, value in parsed.query.items() if name not in _OF_THE_ADDRESS}
    own = {"dsn": f"postgresql:///?{urlencode(libpq, doseq=True)}"} if libpq else {}
    return parsed.difference_update_query(list(libpq)).update_query_dict(own)


def connect_arguments(options: StoreOptions) -> dict[str, Any]:
    """Arguments of the driver's connect."""
    arguments: dict[str, Any] = {
        "timeout": options.connect_timeout_ms / 1000,
        "server_settings": dict(options.session_settings()),
    }
    if options.has_transaction_pooler:
        arguments |= {
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": lambda: f"p{uuid4().hex}",
        }
    return arguments


def open_engine(url: URL, options: StoreOptions) -> AsyncEngine:
    """Engine with a bounded pool; contacts nothing."""
    return create_async_engine(
        url,
        pool_size=options.pool_size,
        max_overflow=0,
        pool_use_lifo=True,
        hide_parameters=True,
        connect_args=connect_arguments(options),
    )


class Session:
    """Connections of one unit of work, under its deadline."""

    def __init__(self, engine: AsyncEngine, options: StoreOptions, timeout_ms: DurationMs, count: Callable[[], None]):
        self._engine = engine
        self._options = options
        self._count = count
        self._task = asyncio.current_task()
        self._driver: Any = None
        self._loop = asyncio.get_running_loop()
        self.ends_at = self._loop.time() + timeout_ms / 1000
        self._timer = self._loop.call_at(self.ends_at, self._expire)
        self.is_over = False

    def end(self) -> None:
        """Stop the deadline's timer."""
        self._timer.cancel()

    def _expire(self) -> None:
        self.is_over = True
        if self._driver is not None:
            self._driver.terminate()
        elif self._task is not None:
            self._task.cancel()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncConnection]:
        """A connection in autocommit mode: each statement is one round trip.

        Behind a transaction pooler it is a transaction: the driver prepares and executes a statement in two steps, and
        the pooler may send these to two servers.
        """
        if self._options.has_transaction_pooler:
            async with self.transaction() as connection:
                yield connection
            return
        async with self._checked_out() as connection:
            yield await connection.execution_options(isolation_level="AUTOCOMMIT")

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """A READ COMMITTED transaction: committed at the end, rolled back on error."""
        async with self._checked_out() as connection:
            connection = await connection.execution_options(isolation_level="READ COMMITTED")
            self._count()
            async with connection.begin():
                if self._options.has_transaction_pooler:
                    await self.execute(connection, self._options.limit_transaction())
                yield connection
                self._count()

    @asynccontextmanager
    async def _checked_out(self) -> AsyncIterator[AsyncConnection]:
        try:
            async with self._engine.connect() as connection:
                self._driver = (await connection.get_raw_connection()).driver_connection
                yield connection
        finally:
            self._driver = None

    async def execute(self, connection: AsyncConnection, statement: str, *parameters: Any) -> Sequence[Any]:
        """Rows of one statement with `$n` parameters, one round trip."""
        self._count()
        result = await connection.exec_driver_sql(statement, parameters)
        return result.all() if result.returns_rows else ()


class Sessions:
    """The pool of one store, and the tasks that use it."""

    def __init__(self, url: str | URL, options: StoreOptions) -> None:
        self.url = database_url(url)
        self.options = options
        self.engine = open_engine(self.url, options)
        self.statements = 0
        """Statements sent so far, BEGIN and COMMIT included."""
        self.connections = 0
        """Connections opened so far; a new one may lead to another server."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drivers: WeakSet[Any] = WeakSet()
        event.listen(self.engine.sync_engine, "connect", self._note_connection)

    def _note_connection(self, connection: Any, _: object) -> None:
        self.connections += 1
        self._drivers.add(connection.driver_connection)

    def _count(self) -> None:
        self.statements += 1

    async def run(self, work: Callable[[Session], Awaitable[T]], timeout_ms: DurationMs) -> T:
        """Run `work` to its end, whatever becomes of the caller; raises StoreUnavailableError at the deadline."""
        task = self._start(self._run(work, timeout_ms))
        done, _ = await asyncio.wait({task}, timeout=timeout_ms / 1000 + GRACE_S)
        if not done:
            raise StoreSlowError("the server did not answer in time")
        return task.result()

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here, because the caller may be gone

    async def _run(self, work: Callable[[Session], Awaitable[T]], timeout_ms: DurationMs) -> T:
        session = Session(self.engine, self.options, timeout_ms, self._count)
        try:
            return await work(session)
        except (Exception, asyncio.CancelledError) as error:
            raise self._translated(error, session) from None
        finally:
            session.end()

    @staticmethod
    def _translated(error: BaseException, session: Session) -> BaseException:
        if session.is_over:
            return StoreSlowError("the server did not answer in time")
        return public_error(error) or error

    async def close(self) -> None:
        """Wait for running units (each has a deadline), then close every connection; cut those that do not answer."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        closing = asyncio.create_task(self.engine.dispose())
        done, _ = await asyncio.wait({closing}, timeout=CLOSE_PATIENCE_S)
        if not done:
            for driver in tuple(self._drivers):
                driver.terminate()
        await asyncio.wait({closing})
