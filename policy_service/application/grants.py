"""Grants: what a selection acquires in the store before it hands a target out, and what it gives back.

Places at gates come from `permits`, probes of half-open breakers from `probe_acquire`; early probes and panic calls
are taken here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from policy_service.application.admission_plan import acquire_early, admission_scope
from policy_service.application.call_ids import call_id
from policy_service.application.connection_acts import free_early_probe
from policy_service.application.gate_loads import GateLoads
from policy_service.application.granted import Granted
from policy_service.application.messages import PermitGrant, PermitKind, PermitRef, PermitUse, SelectRequest
from policy_service.application.permit_gates import FREE
from policy_service.application.permit_work import Passage, PermitAsk, known_full, store_lost
from policy_service.application.permits import Permits
from policy_service.application.ports import Clock, Committed, Scope, Store, StoreUnavailableError, Unit, UnitResult
from policy_service.application.probe_acquire import Probes, digest, permit_id_of
from policy_service.application.view import View
from policy_service.domain.connection_state import EarlyProbe
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import DurationMs, Instant, Target
from policy_service.domain.lockout import Place
from policy_service.domain.pool_guard import PanicPermit, PanicState, give_panic_back, take_panic
from policy_service.domain.state import StateBook

T = TypeVar("T")

GIVE_BACK_MS: DurationMs = 2_000
HARD_MS: DurationMs = 200
"""Longest transaction of a gate: an exact cap has no answer without the store, so it gets more time than a probe."""
LONGEST_MS: DurationMs = 2_000
"""The same for a caller that is ready to wait; longer than this no transaction takes that gets an answer at all."""
PANIC_TTL_MS: DurationMs = 120_000
EARLY = "early:"
PANIC = "pool:"
"""Prefixes of the gates of early-probe and panic permits in tokens."""


class Grants:
    """Acquires and gives back.

    Args:
        replica: name of this replica, recorded with each permit.
        budget_ms: longest time that a selection waits for the store.
        store_away: true while the store counts as away; then it is not asked.
    """

    def __init__(
        self,
        store: Store,
        view: View,
        clock: Clock,
        permits: Permits,
        replica: str,
        *,
        budget_ms: DurationMs,
        store_away: Callable[[], bool],
    ) -> None:
        self._store = store
        self._view = view
        self._clock = clock
        self._permits = permits
        self.replica = replica
        self._budget_ms = budget_ms
        self._store_away = store_away
        self._background: set[asyncio.Future[object]] = set()
        self.probes = Probes(
            store,
            view,
            clock,
            replica,
            budget_ms=budget_ms,
            store_away=store_away,
            in_background=self.in_background,
        )

    @property
    def loads(self) -> GateLoads:
        """How full the gates are, as last seen."""
        return self._permits.loads

    async def acquire(
        self,
        target: Target,
        request: SelectRequest,
        decision_id: str,
        *,
        passage: Passage = FREE,
        probing: bool = False,
        line_ms: DurationMs = 0,
    ) -> Granted:
        """Acquire what a dispatch to `target` demands: its gates first, the probe permit as the last act.

        Args:
            passage: gates of caps and queues; a place in line is kept for at most `line_ms`.
            probing: the breaker is half open, or in a slow start.
        """
        held = await self._pass_gates(target, request, passage, line_ms)
        if held.refusal is not None or not probing:
            return held
        try:
            granted = await self.probes.acquire(target, request, held.decision_id or decision_id)
        except BaseException:
            self.give_back(held)
            raise
        if granted.refusal is not None:
            self.give_back(held)
            return granted
        return replace(
            granted,
            permits=(*held.permits, *granted.permits),
            permit_use=held.permit_use,
            decision_id=held.decision_id or granted.decision_id,
        )

    async def _pass_gates(
        self, target: Target, request: SelectRequest, passage: Passage, line_ms: DurationMs
    ) -> Granted:
        if not passage.gates:
            return Granted()
        full = next((gate.key for gate in passage.gates if self.loads.is_full(gate.key, gate.limit)), None)
        if full is not None and line_ms <= 0 and not request.is_retry_safe:
            # Known to be full, and no repeated call that may hold a place already: the transaction would say the same.
            load = self.loads.of(full)
            wait_ms = None if load.first_end is None else load.first_end - self._clock.now()
            told = known_full(passage, full, load.waiting, wait_ms)
            return Granted(refusal=Exclusion(target, "concurrency_cap", load.first_end), answer=told)
        ask = PermitAsk(
            passage,
            _call_id(request),
            timeout_ms=line_ms,
            ttl_ms=self._view.policy.setting("concurrency.permit_ttl_ms"),
            start_timeout_ms=request.start_timeout_ms,
            store_ms=max(self._budget_ms, HARD_MS, min(line_ms, LONGEST_MS)),
        )
        outcome = store_lost(ask) if self._store_away() else await self._permits.acquire(ask)
        if outcome.is_held:
            return Granted(
                permits=outcome.grants,
                at=outcome.at,
                permit_use=PermitUse.HELD,
                waited_ms=outcome.waited_ms,
                decision_id=digest("decision", outcome.grants[0].permit_id),
            )
        refusal = outcome.refusal
        wait_s = refusal.retry_after_s if refusal else None
        until = None if wait_s is None else self._clock.now() + wait_s * 1000
        return Granted(refusal=Exclusion(target, "concurrency_cap", until), answer=refusal)

    async def acquire_early(self, target: Target, request: SelectRequest) -> Granted | None:
        """Permit to test a long block early, one per interval in the fleet; None where none is due or at hand."""
        policy = self._view.policy.for_connection(target.provider, target.connection)
        permit_id = permit_id_of(request.request_id, target.provider)

        def run(book: StateBook, now: Instant, _known: object) -> UnitResult[EarlyProbe | None]:
            return UnitResult(acquire_early(book, target, now, policy, permit_id))

        def undo(book: StateBook, _now: Instant, _known: object) -> UnitResult[None]:
            free_early_probe(book, Place(*target, policy.provider), permit_id)
            return UnitResult(None)

        scope = admission_scope(target)
        committed = await self._take(request, Unit(scope, run), Unit(scope, undo))
        if committed is None or committed.value is None:
            return None
        permit = committed.value
        gate = f"{EARLY}{target.provider}/{target.connection}"
        return Granted(
            permits=(PermitGrant(permit.id, PermitKind.EARLY_PROBE, gate, permit.expires_at),), at=committed.at
        )

    async def acquire_panic(self, pool: str, request: SelectRequest) -> Granted | None:
        """One of the pool's panic calls; None where all are under way or the store is away."""
        limit = self._view.policy.pool_guard.panic_max_in_flight
        guard = f"{PANIC}{pool}"

        def run(book: StateBook, now: Instant, _known: object) -> UnitResult[PanicPermit | None]:
            wanted = PanicPermit(request.request_id, now + PANIC_TTL_MS)
            state, permit = take_panic(book.get(PanicState, guard), wanted, now, limit)
            book.put(state)
            return UnitResult(permit)

        committed = await self._take(
            request, Unit(Scope(frozenset({guard})), run), _panic_ended(guard, request.request_id)
        )
        if committed is None or committed.value is None:
            return None
        permit = committed.value
        grant = PermitGrant(permit.id, PermitKind.PANIC, guard, permit.expires_at)
        return Granted(permits=(grant,), at=committed.at)

    def end_panic(self, gate: str, permit_id: str) -> None:
        """The panic call is over; in the background."""
        self.in_background(self._try(_panic_ended(gate, permit_id), GIVE_BACK_MS))

    async def _take(self, request: SelectRequest, unit: Unit[T | None], undo: Unit[None]) -> Committed[T | None] | None:
        """Run an optional unit. What a caller that hangs up meanwhile was granted goes back. A repetition of a call may
        have been given the same: then the unit merely ends with its caller, and what it had committed by time."""
        if request.is_retry_safe:
            return await self._try(unit)
        task = asyncio.ensure_future(self._try(unit))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.in_background(self._undone(task, undo))
            raise

    async def _undone(self, task: asyncio.Future[Committed[T | None] | None], undo: Unit[None]) -> None:
        committed = await task
        if committed is not None and committed.value is not None:
            await self._try(undo, GIVE_BACK_MS)

    async def _try(self, unit: Unit[T], timeout_ms: DurationMs | None = None) -> Committed[T] | None:
        """Run an optional unit; None where the store does not answer in time."""
        if self._store_away():
            return None
        try:
            committed = await self._store.run(unit, timeout_ms=timeout_ms or self._budget_ms)
        except StoreUnavailableError:
            return None
        self._view.apply_committed(committed.rows)
        return committed

    def in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Run beside the calls; `settle` waits for it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def give_back(self, granted: Granted) -> None:
        """Return what was granted and not used; in the background, within its own budget."""
        held = tuple(ref for ref in granted.probes if not ref.local)
        if held:
            self.in_background(self.probes.give_back(held))
        if granted.permit_use is PermitUse.HELD:
            self._permits.release_decision(PermitRef(p.permit_id, p.gate) for p in granted.permits)

    async def settle(self) -> None:
        """Wait for what runs in the background."""
        await asyncio.gather(*self._background, return_exceptions=True)


def _panic_ended(gate: str, permit_id: str) -> Unit[None]:
    def run(book: StateBook, _now: Instant, _known: object) -> UnitResult[None]:
        book.put(give_panic_back(book.get(PanicState, gate), permit_id))
        return UnitResult(None)

    return Unit(Scope(frozenset({gate})), run)


def _call_id(request: SelectRequest) -> str:
    waits = request.previous.waited.attempts if request.previous else 0
    return call_id(request.request_id, waits, len(request.earlier_attempts))
