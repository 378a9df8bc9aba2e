"""Probe permits of a decision after it was made: renewed while the call goes on, given back when it is not made
(spec/fleet.md section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

from policy_service.application.admission_plan import renew_probe
from policy_service.application.breaker_plan import give_back
from policy_service.application.events import ProbeRef
from policy_service.application.messages import DecisionToken
from policy_service.application.permit_work import PermitChange
from policy_service.application.ports import Scope, Store, Unit, UnitResult
from policy_service.application.probe_acquire import permit_id_of
from policy_service.application.view import View
from policy_service.domain.breaker import BreakerState, split_name
from policy_service.domain.breaker_probe import release_permit
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.early_probe import holds
from policy_service.domain.gates import PermitState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lockout import ModelLockState
from policy_service.domain.pool_guard import PanicState, give_panic_back
from policy_service.domain.state import Row, StateBook

OPERATION_MS: DurationMs = 2_000


class ProbePermits:
    """Renews and gives back. Every call is one guarded unit; StoreUnavailableError where the store is away."""

    def __init__(self, store: Store, view: View) -> None:
        self._store = store
        self._view = view

    async def renew(self, token: DecisionToken) -> Sequence[PermitChange]:
        """Extend every probe permit of a decision by one reset timeout from now."""
        policy = self._view.policy

        def change(book: StateBook, ref: ProbeRef, now: Instant) -> PermitChange:
            until = renew_probe(book, ref, now, policy)
            if until is None:
                return PermitChange(ref.permit_id, PermitState.EXPIRED, code="PERMIT_EXPIRED", already_ended=True)
            return PermitChange(ref.permit_id, PermitState.HELD, until)

        return await self._each(token, change)

    async def release(self, token: DecisionToken) -> Sequence[PermitChange]:
        """Give every probe permit of a decision back at once: its verdict is inconclusive."""

        def change(book: StateBook, ref: ProbeRef, now: Instant) -> PermitChange:
            freed = give_back(book, ref)
            return PermitChange(ref.permit_id, PermitState.RELEASED, already_ended=not freed)

        return await self._each(token, change)

    async def withdraw(self, request_id: str) -> Sequence[PermitChange]:
        """Give back what a SelectTarget of this id was granted and nobody will use: probes, tests of long blocks and
        panic calls, as far as this replica has heard of them."""
        changes: list[PermitChange] = []
        for row in [row for row in self._view.rows.values() if _given_back(row, request_id)[1]]:
            changes += await self._withdraw_from(row, request_id)
        return changes

    async def _withdraw_from(self, row: Row, request_id: str) -> Sequence[PermitChange]:
        guard, *parts = row.key[1:]
        connections = frozenset({(guard, parts[0])}) if parts and parts[0] else frozenset[tuple[str, str]]()

        def run(book: StateBook, _now: Instant, _known: object) -> UnitResult[list[PermitChange]]:
            left, ids = _given_back(book.get(type(row), guard, *parts), request_id)
            book.put(left)
            return UnitResult([PermitChange(permit_id, PermitState.RELEASED) for permit_id in ids])

        committed = await self._store.run(Unit(Scope(frozenset({guard}), connections), run), timeout_ms=OPERATION_MS)
        self._view.apply_committed(committed.rows)
        return committed.value

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


def _given_back(row: Row, request_id: str) -> tuple[Row, tuple[str, ...]]:
    """The row without the permits that it holds for a request, and their ids."""
    if isinstance(row, PanicState):
        return give_panic_back(row, request_id), tuple(each.id for each in row.permits if each.id == request_id)
    if isinstance(row, BreakerState):
        own = permit_id_of(request_id, row.provider)
        held = tuple(each.id for each in row.permits if not each.reclaimed and each.id.partition("@")[0] == own)
        return reduce(release_permit, held, row), held
    if isinstance(row, (ConnectionState, ModelLockState)) and row.early_probe is not None:
        own = permit_id_of(request_id, row.provider)
        return (replace(row, early_probe=None), (own,)) if holds(row.early_probe, own) else (row, ())
    return row, ()
