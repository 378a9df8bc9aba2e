"""Grouped commit: reported events become committed transitions (DESIGN section 3, spec/fleet.md section 2).

One batch is in flight per replica; the next starts 20 ms after the start of the last at the earliest. A batch is
one guarded transaction in which the events fold, in order, against locked rows. While the store is away events
wait here in order, acknowledged ones are in the spool as well, and nothing acknowledged is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, cast

from policy_service.application.commit_parts import CommitCounters, CommitLimits, Folding, Item, R, Reported
from policy_service.application.events import OutcomeEvent, fold_order
from policy_service.application.ports import (
    Committed,
    Spool,
    SpoolFullError,
    Store,
    StoreUnavailableError,
    Unit,
    UnitResult,
)
from policy_service.application.spooling import Spooling, heard
from policy_service.application.view import View
from policy_service.domain.facts import Fact
from policy_service.domain.ids import Instant
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook

__all__ = ["CommitLimits", "Folding", "GroupedCommit", "Reported"]

log = logging.getLogger(__name__)

BATCH_LIMIT = 64
"""Reports folded in one transaction. Folding runs on the event loop: a larger batch would hold up selections."""
REMEMBERED = 4_096


class GroupedCommit(Generic[R]):
    """The queue of one replica and the task that commits it.

    Args:
        incarnation: id of this process's life; events are numbered within it.
        replicas: number of replicas alive, None while unknown.
        encode_event: bytes of an event for the spool, `decode_event` the way back.
    """

    def __init__(
        self,
        store: Store,
        view: View,
        spool: Spool,
        folding: Folding[R],
        incarnation: str,
        *,
        encode_event: Callable[[OutcomeEvent], bytes],
        decode_event: Callable[[bytes], OutcomeEvent],
        limits: CommitLimits | None = None,
        replicas: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._replicas = replicas
        self._store = store
        self._view = view
        self._spool = spool
        self._spooling = Spooling(spool, encode_event)
        self._folding = folding
        self.incarnation = incarnation
        self._decode_event = decode_event
        self._limits = limits or CommitLimits()
        self._queue: deque[Item[R]] = deque()
        self._queued_bytes = 0
        self._number = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._recent: dict[str, Item[R] | asyncio.Future[Reported[R]]] = {}
        """What is known by event id: queued events, and only the answers of committed ones, whose bodies would fill
        hundreds of megabytes."""
        self._failures_in_row = 0
        self._in_flight_up_to = 0
        """Number of the newest event that a batch under way holds; 0 between batches."""
        self._batch = asyncio.Lock()
        """Held by the batch under way."""
        self.counters = CommitCounters()

    # -- life ----------------------------------------------------------------------------------------
    async def start(self) -> int:
        """Queue what the spool holds, then start committing. Returns the number of events taken over."""
        adopted = 0
        for event_id, payload in await self._spool.load():
            try:
                event = self._decode_event(payload)
            except ValueError:
                log.exception("a spooled report cannot be read and is left in the spool", extra={"event_id": event_id})
                continue
            self._enqueue(event, spooled=True)
            adopted += 1
        self._task = asyncio.create_task(self._loop(), name="grouped-commit")
        return adopted

    async def stop(self, grace_s: float = 2.0) -> None:
        """Commit what is queued within the grace, spool the rest, end the task."""
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._queue and not self.is_store_away and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait([item.done for item in self._queue], timeout=self._limits.interval_ms / 1000)
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        left = [item for item in self._queue if not item.spooled]
        try:
            await self._write_to_spool(left)
        except SpoolFullError as error:
            log.exception("%d reports that nobody was told of end with this process", len(left))
            for item in left:
                self._refuse(item, error)

    @property
    def is_store_away(self) -> bool:
        """True after three failures of the store in a row, until it answers again."""
        return self._failures_in_row >= self._limits.away_after

    @property
    def queued(self) -> int:
        """Events not committed yet."""
        return len(self._queue)

    # -- reporting -----------------------------------------------------------------------------------
    async def report(self, event: OutcomeEvent) -> Reported[R]:
        """Queue one event and wait for its commit within the budget.

        A repeated event id that is still known here gets the same answer. Cancelling the caller does not take
        the event out of the queue.

        Raises:
            SpoolFullError: the bounds are reached; nothing was recorded.
        """
        known = self._recent.get(event.event_id)
        if known is not None:
            self.counters.duplicates += 1
            if isinstance(known, asyncio.Future):
                return replace(await known, duplicate=True)
            return await self._await(known, duplicate=True)
        self._check_bounds()
        return await self._await(self._enqueue(event), duplicate=False)

    def knows(self, event_id: str) -> bool:
        """True where the event was reported already, as far as this replica remembers."""
        return event_id in self._recent

    def submit(self, event: OutcomeEvent) -> None:
        """Queue an event without waiting for it; SpoolFullError at the bounds."""
        if event.event_id not in self._recent:
            self._check_bounds()
            self._enqueue(event)

    async def _await(self, item: Item[R], *, duplicate: bool) -> Reported[R]:
        # The only event of the queue is what tries an absent store again: it waits for that.
        budget = 0.0 if self.is_store_away and len(self._queue) > 1 else self._limits.report_ms / 1000
        if not item.done.done() and budget:
            await asyncio.wait([item.done], timeout=budget)
        if not item.done.done():
            await self._secure(item)
        if not item.done.done():
            return Reported(item.provisional, durable=False, duplicate=duplicate)
        reported = item.done.result()
        return Reported(reported.result, reported.durable, duplicate or reported.duplicate)

    # -- the spool -----------------------------------------------------------------------------------
    async def _secure(self, item: Item[R]) -> None:
        """Have an event on the disk before anybody is told that it was taken; all who wait for it wait for that."""
        if item.securing is None:
            item.securing = asyncio.ensure_future(self._spool_or_withdraw(item))
            item.securing.add_done_callback(heard)
        await asyncio.shield(item.securing)

    async def _spool_or_withdraw(self, item: Item[R]) -> None:
        try:
            await self._write_to_spool([item])
        except SpoolFullError as error:
            await self._withdraw(item, error)

    async def _withdraw(self, item: Item[R], error: SpoolFullError) -> None:
        """Refused means not recorded: the event leaves the queue and the view. One that a batch under way holds waits
        for the end of that batch, which may have committed it."""
        if item.number > self._in_flight_up_to:
            self._take_back(item, error)
            return
        async with self._batch:
            if not item.done.done():
                self._take_back(item, error)

    def _take_back(self, item: Item[R], error: SpoolFullError) -> None:
        self._queue.remove(item)
        self._queued_bytes -= item.size
        self._recent.pop(item.event.event_id, None)
        self._view.remove_pending(item.number)
        self._refuse(item, error)
        if not self._queue:
            self._wake.clear()

    def _refuse(self, item: Item[R], error: SpoolFullError) -> None:
        self.counters.refused += 1
        if not item.done.done():
            item.done.set_exception(error)
            item.done.exception()  # heard here, because nobody may wait for it

    async def _write_to_spool(self, items: Sequence[Item[R]]) -> None:
        before = self._spooling.written
        await self._spooling.write(items)
        self.counters.spooled += self._spooling.written - before

    def _check_bounds(self) -> None:
        limits = self._limits
        if len(self._queue) >= limits.max_pending or self._queued_bytes >= limits.max_pending_bytes:
            self.counters.refused += 1
            raise SpoolFullError(f"{len(self._queue)} reports wait for the store ({self._queued_bytes} bytes)")
        if self.is_store_away and self._queue and self._spooling.is_full:
            self.counters.refused += 1
            raise SpoolFullError("the spool is full")

    def _enqueue(self, event: OutcomeEvent, *, spooled: bool = False) -> Item[R]:
        self._number += 1
        done: asyncio.Future[Reported[R]] = asyncio.get_running_loop().create_future()
        provisional = cast("R", self._view.add_pending(self._number, event))
        item = Item(self._number, event, provisional, done, 512 + len(event.outcome.text), spooled)
        self._queue.append(item)
        self._queued_bytes += item.size
        self._recent[event.event_id] = item
        while len(self._recent) > REMEMBERED + len(self._queue):
            self._recent.pop(next(iter(self._recent)))
        self._wake.set()
        return item

    # -- committing ----------------------------------------------------------------------------------
    async def _loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            started = loop.time()
            try:
                await self._commit_next()
            except StoreUnavailableError as error:
                await self._store_failed(error)
            except Exception:
                # Nothing may end this task: reports would be taken and never committed.
                log.exception("a step of the commit failed and is tried again")
                await asyncio.sleep(self._limits.retry_ms / 1000)
            await asyncio.sleep(max(0.0, started + self._limits.interval_ms / 1000 - loop.time()))

    async def _store_failed(self, error: StoreUnavailableError) -> None:
        self._failures_in_row += 1
        self.counters.store_failures += 1
        if self._failures_in_row == self._limits.away_after:
            log.warning("the store counts as away: %s", error)
        if self.is_store_away:
            await asyncio.sleep(self._limits.retry_ms / 1000)

    async def _commit_next(self) -> None:
        """Commit the oldest events; they stay queued, in order, until the store says that they are in."""
        async with self._batch:
            batch = [self._queue[i] for i in range(min(len(self._queue), BATCH_LIMIT))]
            if not batch:
                return
            self._in_flight_up_to = batch[-1].number
            try:
                await self._commit_batch(batch)
            finally:
                self._in_flight_up_to = 0

    async def _commit_batch(self, batch: Sequence[Item[R]]) -> None:
        try:
            committed = await self._run(batch)
        except StoreUnavailableError:
            raise
        except Exception:
            log.exception("a batch of %d reports cannot be folded; trying them one by one", len(batch))
            await self._commit_singly(batch)
            return
        await self._settle(batch, committed)

    async def _commit_singly(self, batch: Sequence[Item[R]]) -> None:
        for item in batch:
            try:
                committed = await self._run([item])
            except StoreUnavailableError:
                raise
            except Exception as error:
                log.exception("a report cannot be folded and is set aside", extra={"event_id": item.event.event_id})
                self.counters.failed_folds += 1
                self._leave_queue([item])
                if not item.done.done():
                    item.done.set_exception(error)
            else:
                await self._settle([item], committed)

    async def _run(self, batch: Sequence[Item[R]]) -> Committed[dict[str, Reported[R]]]:
        events = [item.event for item in batch]
        policy = self._view.policy
        unit = Unit(
            scope=self._folding.scope(events, policy),
            run=lambda book, now, known: self._fold_batch(book, events, policy, now, known),
            event_ids=tuple(event.event_id for event in events),
            progress=(self.incarnation, batch[-1].number),
        )
        return await self._store.run(unit, timeout_ms=self._limits.commit_ms)

    def _fold_batch(
        self,
        book: StateBook,
        events: Sequence[OutcomeEvent],
        policy: Policy,
        now: Instant,
        known: Mapping[str, bytes],
    ) -> UnitResult[dict[str, Reported[R]]]:
        """Fold in (instant, id) order; an event whose answer is stored is skipped and gets that answer."""
        folding = self._folding
        answers: dict[str, Reported[R]] = {}
        facts: list[Fact] = []
        fresh: dict[str, bytes] = {}
        for event in sorted(events, key=fold_order):
            if (stored := known.get(event.event_id)) is not None:
                answers[event.event_id] = Reported(folding.decode(stored), durable=True, duplicate=True)
                continue
            result = folding.fold(book, event, policy, now, self._replicas())
            facts.extend(result.facts)
            fresh[event.event_id] = folding.encode(result)
            answers[event.event_id] = Reported(result, durable=True)
        return UnitResult(answers, facts, fresh)

    async def _settle(self, batch: Sequence[Item[R]], committed: Committed[dict[str, Reported[R]]]) -> None:
        if self.is_store_away:
            log.info("the store is back; %d reports are queued", len(self._queue))
        self._failures_in_row = 0
        self._view.apply_committed(committed.rows, batch[-1].number)
        self._leave_queue(batch)
        self.counters.batches += 1
        self.counters.committed += len(batch)
        for item in batch:
            reported = committed.value[item.event.event_id]
            self.counters.duplicates += reported.duplicate
            if not item.done.done():
                item.done.set_result(reported)
        await self._spooling.forget([item.event.event_id for item in batch if item.spooled])

    def _leave_queue(self, batch: Sequence[Item[R]]) -> None:
        for item in batch:
            assert self._queue[0] is item
            self._queue.popleft()
            self._queued_bytes -= item.size
            if item.event.event_id in self._recent:
                self._recent[item.event.event_id] = item.done
        if not self._queue:
            self._wake.clear()
