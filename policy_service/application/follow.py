"""Following the store: the view converges by announcements and polls, the clock learns from each poll.

Lost announcements cost latency, never correctness: the poll interval bounds staleness, and after a broken
subscription everything is loaded anew (spec/fleet.md section 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from policy_service.application.clock import DatabaseClock
from policy_service.application.convergence import Convergence
from policy_service.application.ports import ClockSample, Feed, Store, StoreSlowError, StoreUnavailableError
from policy_service.application.view import View
from policy_service.domain.ids import DurationMs

log = logging.getLogger(__name__)

LOAD_TIMEOUT_MS = 5_000
RESUBSCRIBE_S = 0.5


@dataclass(frozen=True, slots=True)
class FollowSettings:
    """How often and how long."""

    poll_ms: DurationMs = 250
    """Between polls while nothing is announced."""
    gap_ms: DurationMs = 10
    """Between polls at the least: in a storm of announcements one poll brings what several would."""
    poll_timeout_ms: DurationMs = 1_000
    notifications: bool = True


class Follower:
    """Keeps a view up to date.

    Args:
        monotonic_ms: the host's monotonic clock, ms.
        on_advance: called after every poll that moved the view's as-of instant.
        on_revision: called with the newest catalogue revision number whenever it differs from the one in force.
    """

    def __init__(
        self,
        store: Store,
        view: View,
        clock: DatabaseClock,
        incarnation: str,
        *,
        monotonic_ms: Callable[[], float],
        on_revision: Callable[[int], Awaitable[None]],
        on_advance: Callable[[], None] = lambda: None,
        settings: FollowSettings | None = None,
    ) -> None:
        self._store = store
        self._view = view
        self._clock = clock
        self._incarnation = incarnation
        self._monotonic_ms = monotonic_ms
        self._on_revision = on_revision
        self._on_advance = on_advance
        self._settings = settings or FollowSettings()
        self._wake = asyncio.Event()
        self._reload = True
        self._tasks: list[asyncio.Task[None]] = []
        self._failures = 0
        self.polls = 0
        self.convergence = Convergence()
        self.reloads = 0

    @property
    def is_store_away(self) -> bool:
        """True after three failed polls in a row."""
        return self._failures >= 3

    async def start(self) -> None:
        """Load the view once (StoreUnavailableError where that fails), then follow in the background."""
        await self._store_clock()
        await self._step()
        if self._settings.notifications:
            self._tasks.append(asyncio.create_task(self._subscribe(), name="feed-subscription"))
        self._tasks.append(asyncio.create_task(self._loop(), name="feed-poll"))

    async def stop(self) -> None:
        """End the background tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """Poll now."""
        self._wake.set()

    def _lost(self) -> None:
        """The subscription broke: whatever was announced meanwhile is found by a full load."""
        self._reload = True
        self._wake.set()

    async def _loop(self) -> None:
        loop = asyncio.get_running_loop()
        polled = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: it may swallow a cancellation that arrives together with the time-out.
                async with asyncio.timeout(self._settings.poll_ms / 1000):
                    await self._wake.wait()
            await asyncio.sleep(self._settings.gap_ms / 1000 - (loop.time() - polled))
            self._wake.clear()
            polled = loop.time()
            await self.attempt()

    async def attempt(self) -> None:
        """Poll once; a failure is noted, and the next attempt takes account of it."""
        try:
            await self._step()
            self._failures = 0
        except StoreUnavailableError as error:
            self._note_failure(error)
        except Exception:
            log.exception("a poll of the change feed failed")
            self._failures += 1
            await asyncio.sleep(self._settings.poll_ms / 1000)

    def _note_failure(self, error: StoreUnavailableError) -> None:
        """A poll that merely took too long goes on from where it was, with the patience of a load; only then, and where
        the store was away, everything is read anew, which is more work for a store that has too much of it."""
        self._failures += 1
        self._reload |= self._failures > 1 or not isinstance(error, StoreSlowError)
        if self._failures == 3:
            log.warning("the change feed is away, answers come from the last view: %s", error)

    async def _step(self) -> None:
        sent = self._monotonic_ms()
        feed = await self._next_feed()
        received = self._monotonic_ms()
        if not feed.is_full:
            self._clock.learn(ClockSample(feed.as_of, sent, received))
        for version in self._view.apply(feed, self._incarnation):
            if version in feed.written:
                self.convergence.note(self._clock.now() - feed.written[version])
        self.polls += 1
        self._on_advance()
        if feed.catalogue_revision != self._view.policy.revision:
            await self._on_revision(feed.catalogue_revision)

    async def _next_feed(self) -> Feed:
        if self._reload or not self._view.is_loaded:
            feed = await self._store.load(timeout_ms=LOAD_TIMEOUT_MS)
            self._reload = False
            self.reloads += 1
            return feed
        patience_ms = LOAD_TIMEOUT_MS if self._failures else self._settings.poll_timeout_ms
        return await self._store.poll(self._view.watermark, timeout_ms=patience_ms)

    async def _store_clock(self) -> None:
        sent = self._monotonic_ms()
        sample = await self._store.read_clock(timeout_ms=LOAD_TIMEOUT_MS)
        self._clock.learn(ClockSample(sample.database_ms, sent, self._monotonic_ms()))

    async def _subscribe(self) -> None:
        while True:
            broken = asyncio.Event()

            def lost(signal: asyncio.Event = broken) -> None:
                signal.set()
                self._lost()

            try:
                end = await self._store.subscribe(self.wake, lost)
            except StoreUnavailableError:
                await asyncio.sleep(RESUBSCRIBE_S)
                continue
            self._lost()
            try:
                await broken.wait()
            finally:
                await end()
            await asyncio.sleep(RESUBSCRIBE_S)
