"""What the commit does with the local spool: reports are secured there before they are acknowledged, and forgotten once
they are committed (spec/fleet.md section 7). A spool that refuses means a report that is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from policy_service.application.events import OutcomeEvent
from policy_service.application.ports import Spool, SpoolFullError

log = logging.getLogger(__name__)

FULL_S = 1.0
"""How long a spool that refused counts as full; then the next report tries it again."""


class Spoolable(Protocol):
    """An event of the queue. `spooled`: it is in the spool, or being written there."""

    spooled: bool

    @property
    def event(self) -> OutcomeEvent: ...

    @property
    def is_settled(self) -> bool:
        """Its commit is known, so that it needs no copy."""
        ...


class Spooling:
    """The spool of one commit.

    Args:
        encode: bytes of an event.
    """

    def __init__(
        self,
        spool: Spool,
        encode: Callable[[OutcomeEvent], bytes],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._encode = encode
        self._monotonic_s = monotonic_s
        self._full_until = float("-inf")
        self._committed: set[str] = set()
        """Committed events that the spool may still hold; removing them is tried again with the next ones."""
        self.written = 0

    @property
    def is_full(self) -> bool:
        """It refused a moment ago."""
        return self._monotonic_s() < self._full_until

    async def write(self, items: Sequence[Spoolable]) -> None:
        """Secure events on the disk.

        Raises:
            SpoolFullError: it has no room; nothing was written.
        """
        fresh = [item for item in items if not (item.spooled or item.is_settled)]
        if not fresh:
            return
        for item in fresh:
            item.spooled = True
        try:
            await self._spool.append([(item.event.event_id, self._encode(item.event)) for item in fresh])
        except BaseException as error:
            for item in fresh:
                item.spooled = False
            if isinstance(error, SpoolFullError):
                self._full_until = self._monotonic_s() + FULL_S
            raise
        self.written += len(fresh)
        await self.forget(item.event.event_id for item in fresh if item.is_settled)

    async def forget(self, event_ids: Iterable[str]) -> None:
        """Drop committed events. A spool that fails here costs only that they are read again after a restart."""
        self._committed.update(event_ids)
        if not self._committed:
            return
        removed = tuple(self._committed)
        try:
            await self._spool.remove(removed)
        except Exception:
            log.exception("%d committed reports cannot be removed from the spool yet", len(removed))
        else:
            self._committed.difference_update(removed)
            self._full_until = float("-inf")


def heard(task: asyncio.Future[None]) -> None:
    """Take note of an error that nobody may be there to hear."""
    if not task.cancelled():
        task.exception()
