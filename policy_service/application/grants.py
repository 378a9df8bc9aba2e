"""Grants: what a selection acquires in the store before it hands a target out.

Probe permits of half-open breakers and places in a slow start, under the provider's guard row. Without the store
one probe per replica and reset timeout goes out all the same, so that an outage of ours never prolongs one of theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from policy_service.application.admission_plan import Admission, acquire_early, acquire_probe, admission_scope
from policy_service.application.breaker_plan import give_back
from policy_service.application.events import ProbeRef
from policy_service.application.messages import (
    PermitGrant,
    PermitKind,
    PermitRef,
    PermitUse,
    SelectRequest,
)
from policy_service.application.permit_gates import FREE
from policy_service.application.permit_work import Passage, PermitAsk, PermitRefusal
from policy_service.application.permits import Permits
from policy_service.application.ports import Clock, Committed, Scope, Store, StoreUnavailableError, Unit, UnitResult
from policy_service.application.view import View
from policy_service.domain.breaker import BreakerState, breaker_name, split_name
from policy_service.domain.breaker_probe import Acquired, ProbeRequest, acquire_local
from policy_service.domain.connection_state import EarlyProbe
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import DurationMs, Instant, Target
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.pool_guard import PanicPermit, PanicState, give_panic_back, take_panic
from policy_service.domain.state import StateBook

log = logging.getLogger(__name__)

T = TypeVar("T")

GIVE_BACK_MS: DurationMs = 2_000
HARD_MS: DurationMs = 200
"""Longest transaction of a gate: an exact cap has no answer without the store, so it gets more time than a probe."""
AWAY_AFTER = 3
"""Acquires in a row without an answer before the store counts as away here too (fleet.md section 4)."""
LOOK_AGAIN_MS: DurationMs = 200
"""Until when a probe is refused whose acquire got no answer."""
PANIC_TTL_MS: DurationMs = 120_000
EARLY = "early:"
PANIC = "pool:"
"""Prefixes of the gates of early-probe and panic permits in tokens."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to one acquire: permits, or the exclusion that the refusal makes."""

    probes: tuple[ProbeRef, ...] = ()
    permits: tuple[PermitGrant, ...] = ()
    at: Instant | None = None
    """Database time of the grant: the start of the decision."""
    refusal: Exclusion | None = None
    permit_use: PermitUse = PermitUse.NOT_NEEDED
    waited_ms: DurationMs = 0
    answer: PermitRefusal | None = None
    """What the gate itself says where it refused."""
    decision_id: str = ""
    """The decision that the permits belong to: for a repeated request that of the first answer (fleet.md section 1)."""


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
        self._local_at: dict[str, Instant] = {}
        self._background: set[asyncio.Future[object]] = set()
        self._unanswered = 0
        self.local_probes = 0
        self.lost = 0

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
            granted = await self.acquire_probe(target, request, held.decision_id or decision_id)
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
        loads = self._permits.loads
        full = [gate.key for gate in passage.gates if loads.is_full(gate.key, gate.limit)]
        if full and line_ms <= 0 and not request.is_retry_safe:
            # Known to be full, and no repeated call that may hold a place already: the transaction would say the same.
            return Granted(refusal=Exclusion(target, "concurrency_cap", loads.of(full[0]).first_end))
        ask = PermitAsk(
            passage,
            _call_id(request),
            timeout_ms=line_ms,
            ttl_ms=self._view.policy.setting("concurrency.permit_ttl_ms"),
            start_timeout_ms=request.start_timeout_ms,
            store_ms=max(self._budget_ms, line_ms, HARD_MS),
        )
        outcome = await self._permits.acquire(ask)
        if outcome.is_held:
            return Granted(
                permits=outcome.grants,
                at=outcome.at,
                permit_use=PermitUse.HELD,
                waited_ms=outcome.waited_ms,
                decision_id=_digest("decision", outcome.grants[0].permit_id),
            )
        refusal = outcome.refusal
        wait_s = refusal.retry_after_s if refusal else None
        until = None if wait_s is None else self._clock.now() + wait_s * 1000
        return Granted(refusal=Exclusion(target, "concurrency_cap", until), answer=refusal)

    async def acquire_probe(self, target: Target, request: SelectRequest, decision_id: str) -> Granted:
        """Acquire what the breakers of `target` demand; a repeated request id gets the same permit again.

        A caller that is cancelled meanwhile leaves no permit behind: a grant that nobody takes is given back.
        """
        policy = self._view.policy.for_connection(target.provider, target.connection)
        probe = ProbeRequest(_permit_id(request.request_id, target), self.replica, decision_id)
        if self._store_away():
            return self._acquire_local(target, policy, probe)
        task = asyncio.ensure_future(self._acquire_stored(target, policy, probe, request.request_id))
        try:
            granted = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._give_back_late)
            raise
        except StoreUnavailableError:
            self._unanswered += 1
            if self._unanswered >= AWAY_AFTER:
                return self._acquire_local(target, policy, probe)
            # Slow is not away: a probe of this replica's own could be one too many for the fleet.
            return Granted(refusal=Exclusion(target, "probe_in_flight", self._clock.now() + LOOK_AGAIN_MS))
        self._unanswered = 0
        return granted

    async def acquire_early(self, target: Target, request: SelectRequest) -> Granted | None:
        """Permit to test a long block early, one per interval in the fleet; None where none is due or at hand."""
        policy = self._view.policy.for_connection(target.provider, target.connection)
        permit_id = _permit_id(request.request_id, target)

        def run(book: StateBook, now: Instant, _known: object) -> UnitResult[EarlyProbe | None]:
            return UnitResult(acquire_early(book, target, now, policy, permit_id))

        committed = await self._try(Unit(admission_scope(target), run))
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

        committed = await self._try(Unit(Scope(frozenset({guard})), run))
        if committed is None or committed.value is None:
            return None
        permit = committed.value
        grant = PermitGrant(permit.id, PermitKind.PANIC, guard, permit.expires_at)
        return Granted(permits=(grant,), at=committed.at)

    def end_panic(self, gate: str, permit_id: str) -> None:
        """The panic call is over; in the background."""

        def run(book: StateBook, _now: Instant, _known: object) -> UnitResult[None]:
            book.put(give_panic_back(book.get(PanicState, gate), permit_id))
            return UnitResult(None)

        self.in_background(self._try(Unit(Scope(frozenset({gate})), run), GIVE_BACK_MS))

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
            self.in_background(self._give_back(held))
        if granted.permit_use is PermitUse.HELD:
            self._permits.release_decision(PermitRef(p.permit_id, p.gate) for p in granted.permits)

    async def settle(self) -> None:
        """Wait for what runs in the background."""
        await asyncio.gather(*self._background, return_exceptions=True)

    # -- with the store ------------------------------------------------------------------------------
    async def _acquire_stored(
        self, target: Target, policy: ConnectionPolicy, probe: ProbeRequest, request_id: str
    ) -> Granted:
        def run(book: StateBook, now: Instant, _known: object) -> UnitResult[Admission]:
            cause = Cause(
                f"select/{probe.decision_id}",
                now,
                self.replica,
                decision_id=probe.decision_id,
                request_id=request_id,
            )
            admission = acquire_probe(book, target, now, policy, probe, FactLog(cause))
            return UnitResult(admission, admission.facts)

        committed = await self._store.run(Unit(admission_scope(target), run), timeout_ms=self._budget_ms)
        self._view.apply_committed(committed.rows)
        return _granted(committed.value, target, committed.at)

    async def _give_back(self, probes: tuple[ProbeRef, ...]) -> None:
        names = [split_name(ref.breaker_key) for ref in probes]
        scope = Scope(frozenset(p for p, _ in names), frozenset(n for n in names if n[1]))

        def run(book: StateBook, _now: Instant, _known: object) -> UnitResult[int]:
            return UnitResult(sum(give_back(book, ref) for ref in probes))

        try:
            committed = await self._store.run(Unit(scope, run), timeout_ms=GIVE_BACK_MS)
        except StoreUnavailableError:
            self.lost += len(probes)
            log.warning("%d unused probe permits could not be given back and end by expiry", len(probes))
        else:
            self._view.apply_committed(committed.rows)

    def _give_back_late(self, task: asyncio.Future[Granted]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.give_back(task.result())

    # -- without the store ---------------------------------------------------------------------------
    def _acquire_local(self, target: Target, policy: ConnectionPolicy, probe: ProbeRequest) -> Granted:
        now = self._clock.now()
        probes: list[ProbeRef] = []
        permits: list[PermitGrant] = []
        keys = ("", target.connection) if policy.breaker.per_connection and target.connection else ("",)
        for part in keys:
            name = breaker_name(target.provider, part)
            row = self._row(target.provider, part)
            result = acquire_local(row, now, policy.breaker, probe, self._local_at.get(name))
            if not isinstance(result, Acquired):
                until = None if result.retry_after_ms is None else now + result.retry_after_ms
                return Granted(refusal=Exclusion(target, result.reason, until, row.fact_id))
            if result.permit is not None:
                permit = result.permit
                probes.append(ProbeRef(permit.id, name, permit.generation, permit.round, local=True))
                permits.append(PermitGrant(permit.id, PermitKind.PROBE, name, permit.expires_at, is_local=True))
        for permit_ref in probes:
            self._local_at[permit_ref.breaker_key] = now
        self.local_probes += bool(probes)
        return Granted(tuple(probes), tuple(permits), now)

    def _row(self, provider: str, part: str) -> BreakerState:
        """The newest committed row: a token never carries the generation of a projection (fleet.md section 2)."""
        known = self._view.committed((BreakerState.KIND, provider, part))
        return known.row if known and isinstance(known.row, BreakerState) else BreakerState(provider, part)


def _call_id(request: SelectRequest) -> str:
    """Id of this call among those of one client request: a repeated call finds its own permit, the next call after a
    wait or a failed attempt asks anew."""
    waits = request.previous.waited.attempts if request.previous else 0
    tried = len(request.earlier_attempts)
    return f"{request.request_id}#{waits}.{tried}" if waits or tried else request.request_id


def _permit_id(request_id: str, target: Target) -> str:
    """Derived from the request, so that a repeated call finds its own permit."""
    return _digest(request_id, target.provider)


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _granted(admission: Admission, target: Target, now: Instant) -> Granted:
    if not admission.granted:
        until = None if admission.retry_after_ms is None else now + admission.retry_after_ms
        return Granted(refusal=Exclusion(target, str(admission.reason), until))
    permits = tuple(
        PermitGrant(ref.permit_id, PermitKind.PROBE, ref.breaker_key, admission.expires_at or now)
        for ref in admission.probes
    )
    return Granted(admission.probes, permits, now, decision_id=admission.decision_id)
