"""What nobody will use goes back to the store, beside the calls and for as long as it takes.

An attempt that the store refuses, or that cannot be sure, is made again until it is done, until what is to be given
back has ended by itself, or until the replica stops: then once more. Used by `permits` and `lease_book`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from policy_service.application.ports import StoreUnavailableError
from policy_service.domain.ids import DurationMs

log = logging.getLogger(__name__)

PAUSES_S = (0.1, 0.5, 1.0, 2.0)
"""Between attempts; the last one from then on."""

Attempt = Callable[[], Awaitable[bool]]
"""True: nothing is left to give back."""
Pause = Callable[[asyncio.Event, float], Awaitable[None]]


async def wait_for(event: asyncio.Event, longest_s: float) -> None:
    """Until the event, or so long."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=longest_s)
    finally:
        waiting.cancel()


class GivingBack:
    """Attempts under way. One event loop owns it.

    Args:
        monotonic_ms: the host's monotonic clock.
        pause: waits between two attempts, or until the replica stops.
    """

    def __init__(self, monotonic_ms: Callable[[], float], pause: Pause = wait_for) -> None:
        self._monotonic_ms = monotonic_ms
        self._pause = pause
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Future[Any]] = set()
        self.lost = 0
        """Things that ended by themselves before they could be given back."""

    def insist(self, attempt: Attempt, longest_ms: DurationMs, what: str) -> None:
        """Make the attempt until it succeeds, for at most `longest_ms`; `what` names the thing in the log."""
        task = asyncio.ensure_future(self._insist(attempt, longest_ms, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait for everything under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def stop(self) -> None:
        """The same with one more attempt for each: a store that is away must not hold up the end of the replica."""
        self._stopping.set()
        await self.settled()

    async def _insist(self, attempt: Attempt, longest_ms: DurationMs, what: str) -> None:
        ends_at = self._monotonic_ms() + longest_ms
        pauses = iter(PAUSES_S)
        while True:
            is_last = self._stopping.is_set() or self._monotonic_ms() >= ends_at
            if await _succeeds(attempt):
                return
            if is_last:
                break
            await self._pause(self._stopping, next(pauses, PAUSES_S[-1]))
        self.lost += 1
        log.warning("%s could not be given back and ends by itself", what)


async def _succeeds(attempt: Attempt) -> bool:
    try:
        return await attempt()
    except StoreUnavailableError:
        return False
