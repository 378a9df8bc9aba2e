"""Concurrency permits and queue tickets of this replica: take, wait in line, renew, release (spec/concurrency.md,
spec/queue_admission.md, spec/fleet.md section 5).

A call that waits is woken by the transaction of its own replica that serves it, by an announcement of another
replica, or by a poll every 100 ms of the gates waited for; nothing runs while nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar
from weakref import WeakValueDictionary

from policy_service.application import permit_acts, start_slots
from policy_service.application import permit_work as work
from policy_service.application.gate_loads import GateLoads
from policy_service.application.giving_back import Attempt, GivingBack, Pause, wait_for
from policy_service.application.messages import PermitRef
from policy_service.application.permit_gates import profile_of, reconfigured
from policy_service.application.permit_work import PermitAsk, PermitChange, PermitOutcome
from policy_service.application.ports import Clock, Entropy, StoreUnavailableError
from policy_service.application.ports_permits import GateStatus, PermitCommit, PermitStore, PermitUnit
from policy_service.application.waiting_line import Verdict, Waiter, WaitingLine
from policy_service.domain.facts import Cause
from policy_service.domain.gates import HEARTBEAT_MS, Gate, PermitRow
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.policy import Policy
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_learning import LEARNED_ENTRIES, RateEvidence, may_write
from policy_service.domain.rate_headers import rate_evidence

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.1
OPERATION_MS: DurationMs = 2_000
SLACK_MS: DurationMs = 2_000
"""Beyond its deadline a wait goes on for this long at most, for the store to say how it ended."""
WITHDRAW_MS: DurationMs = 5_000
RELEASE_MS: DurationMs = 120_000
"""For so long a permit is tried to be given back: the default TTL, after which it has ended by itself."""
LOOKS_WHEN_UNSURE = 4
"""An acquire that was cut off may be committed after the first look has found nothing."""
NO_EVIDENCE = RateEvidence()
NO_REVISION = -1
"""Older than every configuration: the gate stays as it is configured."""


class Permits:
    """The use case. One event loop owns it.

    Args:
        replica: name of this replica, written to the tickets of the calls that wait here.
        store_ms: longest time of a transaction that no caller's budget bounds.
        pause: waits between two attempts at giving something back.
    """

    def __init__(
        self,
        store: PermitStore,
        clock: Clock,
        entropy: Entropy,
        replica: str,
        *,
        monotonic_ms: Callable[[], float],
        store_ms: DurationMs = OPERATION_MS,
        pause: Pause = wait_for,
    ) -> None:
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._replica = replica
        self._monotonic_ms = monotonic_ms
        self._store_ms = store_ms
        self._line = WaitingLine()
        self._wake = asyncio.Event()
        self._tending: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._giving_back = GivingBack(monotonic_ms, pause)
        self._gone: WeakValueDictionary[tuple[str, tuple[str, ...]], Waiter] = WeakValueDictionary()
        """Callers that left, by request and gates, until they come again."""
        self._beat_at = 0.0
        self._end_subscription: Callable[[], Awaitable[None]] | None = None
        self.loads = GateLoads(store, monotonic_ms)
        self._learned: dict[str, Instant] = {}

    async def start(self) -> None:
        """Listen for hand-offs of other replicas, and follow the loads of the gates."""
        self._end_subscription = await self._store.subscribe(self.wake)
        self._following = asyncio.create_task(self.loads.follow(), name="gate-loads")

    async def stop(self) -> None:
        """End the background work; calls that still wait lose their place after 15 s unless they come again."""
        if self._end_subscription is not None:
            await self._end_subscription()
        for task in (self._tending, self._following):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self._giving_back.stop()

    async def settled(self) -> None:
        """Wait for withdrawals under way."""
        await self._giving_back.settled()

    def wake(self) -> None:
        """Another replica handed something to a call that waits here."""
        self._wake.set()

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return len(self._line)

    # -- taking ----------------------------------------------------------------------------------------
    async def acquire(self, ask: PermitAsk) -> PermitOutcome:
        """Hold every gate of the passage, waiting in line within the ask's budget.

        A caller that is cancelled leaves the line; a grant that raced the cancel is given back. Without the store
        the outcome is the refusal STORE_UNAVAILABLE.
        """
        if not ask.passage.gates:
            return PermitOutcome(ask.passage, at=self._clock.now())
        if ask.passage.start_gate is None:
            return await self._acquire(ask)
        slot = await self._acquire(start_slots.start_slot(ask, ask.passage.start_gate))
        if slot.refusal is not None:
            return start_slots.without_start_slot(ask, slot)
        self.release_soon([grant.permit_id for grant in slot.grants])  # taken: its start is what counts
        held = await self._acquire(start_slots.after_start_slot(ask, slot.waited_ms))
        return replace(held, waited_ms=held.waited_ms + slot.waited_ms)

    async def _acquire(self, ask: PermitAsk) -> PermitOutcome:
        began = self._monotonic_ms()
        waiter = self._line.join(ask.request_id, ask.passage)
        self._gone.pop(waiter.place, None)
        entering = asyncio.ensure_future(self._enter(ask))
        try:
            outcome = await asyncio.shield(entering)
            if outcome.is_waiting:
                outcome = await self._wait(ask, waiter, began)
        except BaseException as error:
            self._abandon(waiter, entering)
            if not isinstance(error, StoreUnavailableError):
                raise
            return work.store_lost(ask)
        self._line.leave(waiter)
        return outcome

    async def _enter(self, ask: PermitAsk) -> PermitOutcome:
        permit_id = self._entropy.new_id()
        unit = PermitUnit(
            work.acquire(ask, permit_id, self._replica, self._line.ids),
            ask.passage.gates,
            request_ids=(ask.request_id,),
            takes_ticket=True,
            reads_line=bool(ask.passage.limiter),
            revision=ask.passage.revision,
        )
        return (await self._run(unit, ask.store_ms)).value

    async def _wait(self, ask: PermitAsk, waiter: Waiter, began: float) -> PermitOutcome:
        self._tend()
        try:
            async with asyncio.timeout((ask.budget_ms + SLACK_MS) / 1000):
                verdict = await waiter.verdict
        except TimeoutError:
            raise StoreUnavailableError("the store did not say how the wait ended") from None
        return self._served(ask, verdict, round(self._monotonic_ms() - began))

    def _served(self, ask: PermitAsk, verdict: Verdict, waited_ms: DurationMs) -> PermitOutcome:
        if isinstance(verdict, PermitRow):
            return PermitOutcome(ask.passage, verdict, at=verdict.held_at or self._clock.now(), waited_ms=waited_ms)
        return PermitOutcome(ask.passage, refusal=verdict, at=self._clock.now(), waited_ms=waited_ms)

    def _abandon(self, waiter: Waiter, entering: asyncio.Future[PermitOutcome]) -> None:
        """Nobody takes the answer: withdraw the ticket, or give the grant back, once the acquire is through."""
        if self._line.leave(waiter):
            self._gone[waiter.place] = waiter
            attempt = self._withdrawal(waiter, entering)
            self._giving_back.insist(attempt, RELEASE_MS, f"the place in line of request {waiter.request_id}")

    def _withdrawal(self, waiter: Waiter, entering: asyncio.Future[PermitOutcome]) -> Attempt:
        """Attempts to withdraw what `entering` takes; over as soon as the caller comes again for the same gates."""
        looks = 0

        async def attempt() -> bool:
            nonlocal looks
            await asyncio.wait({entering})
            if self._gone.get(waiter.place) is not waiter:
                return True
            found = await self.cancel(waiter.request_id, keys=waiter.passage.keys)
            looks += 1
            return bool(found) or entering.exception() is None or looks >= LOOKS_WHEN_UNSURE

        return attempt

    # -- holding and ending ------------------------------------------------------------------------------
    async def renew(self, permit_ids: Sequence[str], ttl_ms: DurationMs | None = None) -> list[PermitChange]:
        """Extend permits; StoreUnavailableError where the store is away."""
        return [await self._change(permit_id, work.renew(permit_id, ttl_ms)) for permit_id in permit_ids]

    async def release(self, permit_ids: Sequence[str]) -> list[PermitChange]:
        """Give permits back, in any state; each exactly once. StoreUnavailableError where the store is away."""
        local = self._line.ids
        return [
            await self._change(each, work.release(each, self._replica, local)) for each in dict.fromkeys(permit_ids)
        ]

    def release_decision(self, refs: Iterable[PermitRef]) -> None:
        """Give back what a decision holds, in the background: its final report is in."""
        self.release_soon(work.ids_of(refs))

    def release_soon(self, permit_ids: Sequence[str]) -> None:
        """Give permits back in the background; what cannot be given back ends by expiry."""
        if not permit_ids:
            return
        ids = tuple(permit_ids)

        async def attempt() -> bool:
            await self.release(ids)
            return True

        self._giving_back.insist(attempt, RELEASE_MS, f"{len(ids)} permits")

    async def cancel(self, request_id: str, *, keys: Sequence[str] = ()) -> list[PermitChange]:
        """Withdraw a request wherever it waits, or give back what it holds.

        Args:
            keys: all the gates that the permits of this one call must be of; empty: whatever any call of the client
                request has, in any gate.
        """
        return await self.release(await self._store.permits_of(request_id, keys, timeout_ms=WITHDRAW_MS))

    async def _change(self, permit_id: str, run: Callable[..., PermitChange]) -> PermitChange:
        return (await self._run(PermitUnit(run, permit_id=permit_id), self._store_ms)).value

    # -- learning ----------------------------------------------------------------------------------------
    async def learn(self, key: str, profile: QueueProfile, evidence: RateEvidence) -> bool:
        """Take what an answer said about the rate over into a limiter; True where it was written.

        At most every 60 s per limiter, a 429 always: it drops what was learned (spec/queue_admission.md section 5).
        """
        if evidence == NO_EVIDENCE:
            return False
        now = self._clock.now()
        if evidence.status != 429 and not may_write(self._learned.get(key), now):
            return False
        self._learned.pop(key, None)
        self._learned[key] = now
        while len(self._learned) > LEARNED_ENTRIES:
            self._learned.pop(next(iter(self._learned)))
        unit = PermitUnit(work.learned(key, profile, evidence, self._replica, self._line.ids), keys=(key,))
        return (await self._run(unit, self._store_ms)).value

    async def learn_from(self, permit_ids: Sequence[str], headers: Mapping[str, str], policy: Policy) -> None:
        """Take rate headers over into the limiters of permits."""
        for permit_id in permit_ids:
            unit = PermitUnit(lambda locked: tuple(locked.book.gates), permit_id=permit_id)
            for key in (await self._run(unit, self._store_ms)).value:
                profile = profile_of(policy, key)
                if profile is not None:
                    await self.learn(key, profile, rate_evidence(headers, self._clock.now()))

    # -- operating ---------------------------------------------------------------------------------------
    async def block_gate(
        self, key: str, *, for_ms: DurationMs | None, until: Instant | None, actor: str = ""
    ) -> Instant | None:
        """Let nobody in until then; held permits stay. The end in force, None where the gate is open."""
        run = permit_acts.block(key, for_ms, until, self._act_of(actor))
        unit = PermitUnit(run, (Gate(key),), revision=NO_REVISION)
        return (await self._run(unit, self._store_ms)).value

    async def reset_gate(self, key: str, *, actor: str = "") -> int:
        """End everybody who waits at the gate; the number of requests."""
        run = permit_acts.reset(key, self._act_of(actor))
        unit = PermitUnit(run, keys=(key,), waiters_of=(key,), reads_line=True)
        return (await self._run(unit, self._store_ms)).value

    def _act_of(self, actor: str) -> Cause:
        """Who acts; the instant is the transaction's."""
        return Cause(f"admin/{self._entropy.new_id()}", 0, self._replica, actor=actor, reason="operator")

    async def list_gates(self, prefix: str = "") -> Sequence[GateStatus]:
        """Gates with holders, waiters or a block."""
        return await self._store.list(prefix, timeout_ms=self._store_ms)

    async def sweep(self) -> int:
        """Settle the gates that nobody looks after and drop what ended long ago; rows changed or dropped."""
        changed = 0
        for key in await self._store.overdue(timeout_ms=self._store_ms):
            unit = PermitUnit(work.settle(self._replica, self._line.ids), keys=(key,))
            changed += (await self._run(unit, self._store_ms)).value
        return changed + await self._store.prune(timeout_ms=self._store_ms)

    # -- looking after the line --------------------------------------------------------------------------
    async def _run(self, unit: PermitUnit[T], timeout_ms: DurationMs) -> PermitCommit[T]:
        commit = await self._store.run(unit, timeout_ms=timeout_ms)
        self._line.note(commit)
        self.loads.note(commit.counts)
        return commit

    def _tend(self) -> None:
        if self._tending is None or self._tending.done():
            self._beat_at = self._monotonic_ms() + HEARTBEAT_MS
            self._tending = asyncio.create_task(self._keep_tending(), name="permit-line")

    async def _keep_tending(self) -> None:
        while self._line:
            woken = await self._pause()
            try:
                await self.look(woken=woken)
            except StoreUnavailableError as error:
                log.info("the waiting line waits for the store: %s", error)
                await asyncio.sleep(POLL_S)
            except Exception:
                log.exception("looking after the waiting line failed")
                await asyncio.sleep(POLL_S)

    async def _pause(self) -> bool:
        """Until the next poll, an instant that is due, or a wake-up; True for the latter."""
        due_at = self._line.due_at()
        left = POLL_S if due_at is None else min(POLL_S, max(0.001, (due_at - self._clock.now()) / 1000))
        try:
            async with asyncio.timeout(left):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def look(self, *, woken: bool = False) -> None:
        """One round: heartbeat where one is due, then the gates in which something has happened."""
        await self._beat()
        groups = self._line.groups()
        if not groups:
            return
        due = self._line.due_gates(self._clock.now())
        is_all = woken and len(groups) <= WOKEN_GROUPS
        if not is_all:
            due |= await self._ask(groups)
        for keys, waiters in groups.items():
            if is_all or len(keys) > 1 or not due.isdisjoint(keys):
                await self._look_at(keys, waiters)

    async def adopt(self, policy: Policy) -> None:
        """Put a newer configuration in force for those who wait here: a raised cap lets them in at once."""
        for keys, waiters in self._line.groups().items():
            for waiter in waiters:
                waiter.passage = reconfigured(policy, waiter.passage)
            await self._look_at(keys, waiters)

    async def _ask(self, groups: dict[tuple[str, ...], list[Waiter]]) -> frozenset[str]:
        """Gates in which a poll finds something for a call that waits here."""
        of = {waiter.request_id: keys for keys, waiters in groups.items() for waiter in waiters}
        found = await self._store.due(
            tuple(of), sorted({key for keys in groups for key in keys}), timeout_ms=self._store_ms
        )
        return found.gates.union(*(of[request_id] for request_id in found.requests if request_id in of))

    async def _look_at(self, keys: tuple[str, ...], waiters: list[Waiter]) -> None:
        passage = waiters[-1].passage
        ids = tuple(dict.fromkeys(waiter.request_id for waiter in waiters))
        self._line.forget_due(keys)
        unit = PermitUnit(
            work.tend(passage, ids, self._replica),
            passage.gates,
            ended_ids=ids,
            reads_line=bool(passage.limiter),
            revision=passage.revision,
        )
        await self._run(unit, self._store_ms)

    async def _beat(self) -> None:
        if self._monotonic_ms() >= self._beat_at:
            self._beat_at = self._monotonic_ms() + HEARTBEAT_MS
            await self._store.beat(tuple(self._line.ids), timeout_ms=self._store_ms)


WOKEN_GROUPS = 4
"""A wake-up looks at up to this many sets of gates straight away; beyond it asks first."""
