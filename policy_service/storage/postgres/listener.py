"""Wake-ups by LISTEN on a connection of its own. Losing one costs latency only: the feed is polled as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg

from policy_service.storage.postgres.session import Sessions, connect_arguments
from policy_service.storage.postgres.statements import CHANNEL

RETRY_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class Listener:
    """Keeps one listening connection alive until it is ended."""

    def __init__(
        self,
        sessions: Sessions,
        wake: Callable[[], None],
        lost: Callable[[], None],
        told: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._sessions = sessions
        self._wake = wake
        self._lost = lost
        self._told = told
        self._failures = 0
        self._task = asyncio.create_task(self._keep_listening())

    async def end(self) -> None:
        """Stop listening and close the connection, without calling it lost."""
        self._lost = _ignore
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _keep_listening(self) -> None:
        while True:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._listen()  # an absent server is reported by the polls of the feed
            await asyncio.sleep(RETRY_S[min(self._failures, len(RETRY_S) - 1)])
            self._failures += 1

    async def _listen(self) -> None:
        """Listen until the connection breaks; what was announced before the LISTEN is caught by one wake-up."""
        connection = await self._open()
        broken = asyncio.Event()
        connection.add_termination_listener(lambda _: broken.set())
        try:
            await connection.add_listener(CHANNEL, self._heard)
            self._failures = 0
            self._wake()
            await self._watch(connection, broken)
        finally:
            connection.terminate()
            self._lost()

    def _heard(self, *notification: Any) -> None:
        """A payload is for whoever knows it; one without is a change of the feed."""
        if not self._told(str(notification[-1])):
            self._wake()

    async def _open(self) -> Any:
        engine = self._sessions.engine
        _, arguments = engine.dialect.create_connect_args(self._sessions.url)
        return await asyncpg.connect(**arguments, **connect_arguments(self._sessions.options))

    async def _watch(self, connection: Any, broken: asyncio.Event) -> None:
        """Return when the connection is broken or a heartbeat is not answered (a frozen server says nothing)."""
        pause_s = self._sessions.options.heartbeat_ms / 1000
        while not broken.is_set():
            try:
                await asyncio.wait_for(broken.wait(), pause_s)
            except TimeoutError:
                if not await _is_alive(connection, pause_s):
                    return


async def _is_alive(connection: Any, patience_s: float) -> bool:
    beat = asyncio.ensure_future(connection.execute("SELECT 1"))
    done, _ = await asyncio.wait({beat}, timeout=patience_s)
    if not done:
        connection.terminate()  # ends the beat; cancelling it would ask the frozen server to cancel
        await asyncio.wait({beat})
    return beat.exception() is None


def _ignore() -> None:
    """Nobody is left to be told."""
