"""Probe permits of a decision after it was made: renewed while the call goes on, given back when it is not made
(spec/fleet.md section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policy_service.application.admission_plan import renew_probe
from policy_service.application.breaker_plan import give_back
from policy_service.application.events import ProbeRef
from policy_service.application.messages import DecisionToken
from policy_service.application.permit_work import PermitChange
from policy_service.application.ports import Scope, Store, Unit, UnitResult
from policy_service.application.view import View
from policy_service.domain.breaker import split_name
from policy_service.domain.gates import PermitState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import StateBook

OPERATION_MS: DurationMs = 2_000


class ProbePermits:
    """Renews and gives back. Every call is one guarded unit; StoreUnavailableError where the store is away."""

    def __init__(self, store: Store, view: View) -> None:
        self._store = store
        self._view = view

    async def renew(self, token: DecisionToken, ttl_ms: DurationMs | None) -> Sequence[PermitChange]:
        """Extend every probe permit of a decision by one reset timeout from now; the asked time does not count."""
        policy = self._view.policy

        def change(book: StateBook, ref: ProbeRef, now: Instant) -> PermitChange:
            until = renew_probe(book, ref, now, policy)
            if until is None:
                return PermitChange(ref.permit_id, PermitState.EXPIRED, code="PERMIT_EXPIRED", already_ended=True)
            return PermitChange(ref.permit_id, PermitState.HELD, until)

        return await self._each(token, change)

    async def release(self, token: DecisionToken, ttl_ms: DurationMs | None) -> Sequence[PermitChange]:
        """Give every probe permit of a decision back at once: its verdict is inconclusive."""

        def change(book: StateBook, ref: ProbeRef, now: Instant) -> PermitChange:
            freed = give_back(book, ref)
            return PermitChange(ref.permit_id, PermitState.RELEASED, already_ended=not freed)

        return await self._each(token, change)

    async def _each(
        self, token: DecisionToken, change: Callable[[StateBook, ProbeRef, Instant], PermitChange]
    ) -> Sequence[PermitChange]:
        held = [ref for ref in token.probes if not ref.local]
        if not held:
            return ()
        names = [split_name(ref.breaker_key) for ref in held]
        scope = Scope(frozenset(provider for provider, _ in names), frozenset(name for name in names if name[1]))

        def run(book: StateBook, now: Instant, _known: object) -> UnitResult[list[PermitChange]]:
            return UnitResult([change(book, ref, now) for ref in held])

        committed = await self._store.run(Unit(scope, run), timeout_ms=OPERATION_MS)
        self._view.apply_committed(committed.rows)
        return committed.value
