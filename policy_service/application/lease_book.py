"""The operations on leases, each as one guarded transaction (spec/leases.md section 4, fleet.md sections 6 and 7).

What an operation does is said by the pure functions of `domain.lease`; here they get their rows, numbers and facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from policy_service.application.ports import Entropy
from policy_service.application.ports_leases import LeaseScope, LeaseSight, LeaseStore, LeaseUnit, LeaseWrites
from policy_service.domain import lease
from policy_service.domain.catalogue import Caller
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lease import Fence, LeaseCall, LeaseResult, LeaseRow, LeaseRules, LeaseState, LeaseStep
from policy_service.domain.lease_context import is_managed

T = TypeVar("T")

EPOCH_STRIDE = 2**32
NO_CAUSE = Cause("", 0)

Operation = Callable[[LeaseSight], LeaseStep]
OnConnection = Callable[[tuple[LeaseRow, ...], LeaseCall, LeaseRules, Instant], LeaseStep]
_GRANTS = (LeaseResult.ACQUIRED, LeaseResult.TRANSITIONED)
NO_GENERATION = 0
"""Remembered in place of a generation: the call took no grant in the end."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Numbers of one connection: lock-delay, and the catalogue revision in which a managed key listed it."""

    lock_delay_ms: DurationMs = 0
    listed_in: int = 0


@dataclass(frozen=True, slots=True)
class FenceCheck:
    """A fence verdict, the database instant of it, and the lease that it was judged by."""

    verdict: Fence
    at: Instant
    lease: LeaseRow | None = None


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep ended."""

    expired: int = 0
    withdrawn: int = 0


class LeaseBook:
    """Named operations over the store.

    Args:
        replica: name of this replica, recorded in the facts.
        budget_ms: longest time that an operation waits for the store.
        awaits_failover: the database replicates asynchronously (`store.failover: async`): after a failover no lease
            is granted for the largest TTL, and generations start anew above the epoch.
    """

    def __init__(
        self,
        store: LeaseStore,
        entropy: Entropy,
        replica: str = "",
        *,
        budget_ms: DurationMs = 2_000,
        awaits_failover: bool = False,
    ) -> None:
        self._store = store
        self._entropy = entropy
        self._replica = replica
        self._budget_ms = budget_ms
        self._awaits_failover = awaits_failover

    async def acquire(
        self, call: LeaseCall, terms: LeaseTerms, cause: Cause = NO_CAUSE, event_id: str = ""
    ) -> LeaseStep:
        """A new lease, or the owner's own where two of its calls race; a grant is remembered under `event_id`."""
        return await self._on_connection(call, terms, cause, lease.acquire, event_id)

    async def transition(
        self, call: LeaseCall, terms: LeaseTerms, cause: Cause = NO_CAUSE, event_id: str = ""
    ) -> LeaseStep:
        """Move the owner's lease; remembered as by `acquire`."""
        return await self._on_connection(call, terms, cause, lease.transition, event_id)

    async def renew(self, call: LeaseCall) -> LeaseStep:
        """Extend the lease."""
        return await self._on_owner(call, NO_CAUSE, lambda sight: lease.renew(sight.rows, call, sight.now))

    async def release(self, call: LeaseCall, cause: Cause = NO_CAUSE) -> LeaseStep:
        """End the lease for its owner."""
        return await self._on_owner(call, cause, lambda sight: lease.release(sight.rows, call, sight.now))

    async def invalidate(self, call: LeaseCall, cause: Cause = NO_CAUSE) -> LeaseStep:
        """End the lease for the service."""
        return await self._on_owner(call, cause, lambda sight: lease.invalidate(sight.rows, call, sight.now))

    async def get(self, call: LeaseCall) -> LeaseStep:
        """The active lease of owner, generation and key."""
        sight = await self.look((call.owner_hash,), (), call.generation)
        return lease.get(sight.rows, call, sight.now)

    async def fence(self, call: LeaseCall) -> FenceCheck:
        """May this very call be dispatched?"""
        sight = await self.settled(call.owner_hash, (), call.generation)
        own = lease.active_of_owner(sight.rows, call.owner_hash, sight.now)
        return FenceCheck(lease.fence(sight.rows, call, sight.now), sight.now, own)

    async def release_fenced(self, call: LeaseCall, cause: Cause = NO_CAUSE) -> FenceCheck:
        """End the lease if its fence holds for `call.connection_id`; repeating it is as harmless as the first time."""

        def run(sight: LeaseSight) -> LeaseWrites[FenceCheck]:
            verdict = lease.fence(sight.rows, call, sight.now)
            step = lease.release(sight.rows, call, sight.now)
            was_ours = step.lease is not None and step.lease.connection_id == call.connection_id
            if step.result is not LeaseResult.RELEASED or not was_ours:
                return LeaseWrites(FenceCheck(verdict, sight.now))
            check = FenceCheck(Fence.VALID, sight.now, step.lease)
            return LeaseWrites(check, step.writes, self._facts(sight, step.writes, cause))

        return await self._run(LeaseUnit(LeaseScope((call.owner_hash,), generation=call.generation), run))

    async def tell(self, granted: LeaseRow, event_id: str) -> LeaseRow | None:
        """The present state of what the call `event_id` was granted, for its repetition; from now on nobody takes it
        back. None where it was taken back before."""

        def run(sight: LeaseSight) -> LeaseWrites[LeaseRow | None]:
            if sight.granted != granted.generation:
                return LeaseWrites(None)
            named = (granted.owner_hash, granted.generation)
            rows = (row for row in sight.rows if (row.owner_hash, row.generation) == named)
            return LeaseWrites(max(rows, key=lambda row: row.id), grant=(_told(granted), granted.generation))

        scope = LeaseScope((granted.owner_hash,), generation=granted.generation, event_id=event_id)
        return await self._run(LeaseUnit(scope, run))

    async def take_back(self, granted: LeaseRow, event_id: str, cause: Cause = NO_CAUSE) -> bool:
        """End a lease whose caller left before it was told of it; False where another call of the owner was told of it
        meanwhile, or it is not as it was granted. The call `event_id` then was granted nothing."""
        call = LeaseCall(
            granted.owner_hash, granted.api_key_id, granted.generation, reason=lease.EndReason.CLIENT_CANCELLED
        )

        def run(sight: LeaseSight) -> LeaseWrites[bool]:
            own = lease.active_of_owner(sight.rows, granted.owner_hash, sight.now)
            if sight.granted is not None or own is None or _as_granted(own) != _as_granted(granted):
                return LeaseWrites(value=False)
            step = lease.release(sight.rows, call, sight.now)
            forgotten = (event_id, NO_GENERATION) if event_id else None
            return LeaseWrites(True, step.writes, self._facts(sight, step.writes, cause), forgotten)

        scope = LeaseScope((granted.owner_hash,), generation=granted.generation, event_id=_told(granted))
        return await self._run(LeaseUnit(scope, run))

    async def active(self) -> LeaseSight:
        """Every active lease; lapsed ones that no sweep has met yet are among the rows."""
        return await self._store.look(LeaseScope(everything=True), timeout_ms=self._budget_ms)

    async def look(
        self, owners: Iterable[str], connections: Iterable[str], generation: int = 0, event_id: str = ""
    ) -> LeaseSight:
        """Rows of owners and connections, without locks."""
        scope = LeaseScope(tuple(owners), tuple(connections), generation, event_id=event_id)
        return await self._store.look(scope, timeout_ms=self._budget_ms)

    async def settled(self, owner: str, connections: Iterable[str], generation: int) -> LeaseSight:
        """Rows by which a fence is judged: nothing is under way on the owner's lease."""
        scope = LeaseScope((owner,), tuple(connections), generation)
        return await self._store.settled(scope, timeout_ms=self._budget_ms)

    async def sweep(self, callers: Mapping[str, Caller], revision: int) -> Swept:
        """End what lapsed, and what its key may no longer hold.

        Args:
            callers: registry by id, as of catalogue `revision`; an older one than the store's withdraws nothing.
        """
        expired = await self._run(LeaseUnit(LeaseScope(everything=True), self._expire))
        sight = await self.active()
        if revision < sight.newest_revision:
            return Swept(expired)
        ends = [await self._end(row) for row in _withdrawn(sight, callers)]
        return Swept(expired, sum(ends))

    def _expire(self, sight: LeaseSight) -> LeaseWrites[int]:
        lapsed = lease.expire(sight.rows, sight.now)
        return LeaseWrites(len(lapsed), lapsed, self._facts(sight, lapsed, NO_CAUSE))

    async def _end(self, row: LeaseRow) -> bool:
        """End one active lease for the reason that `row` has; False where it is over already."""
        call = LeaseCall(row.owner_hash, row.api_key_id, row.generation, reason=row.end_reason)
        return (await self.invalidate(call)).result is LeaseResult.INVALIDATED

    def rules(self, sight: LeaseSight, terms: LeaseTerms) -> LeaseRules:
        """Numbers in force at the moment of the check."""
        has_failed_over = self._awaits_failover and sight.epoch > 1
        return LeaseRules(
            terms.lock_delay_ms,
            sight.epoch * EPOCH_STRIDE if has_failed_over else 0,
            sight.listed_at,
            sight.raised_at + lease.TTL_MAX_MS if has_failed_over else None,
        )

    async def _on_connection(
        self, call: LeaseCall, terms: LeaseTerms, cause: Cause, operation: OnConnection, event_id: str
    ) -> LeaseStep:
        scope = LeaseScope((call.owner_hash,), (call.connection_id,), call.generation, terms.listed_in)

        def run(sight: LeaseSight) -> LeaseWrites[LeaseStep]:
            step = operation(sight.rows, call, self.rules(sight, terms), sight.now)
            return replace(self._written(sight, step, cause), grant=_remembered(step, event_id))

        return await self._run(LeaseUnit(scope, run))

    async def _on_owner(self, call: LeaseCall, cause: Cause, operation: Operation) -> LeaseStep:
        return await self._step(LeaseScope((call.owner_hash,), generation=call.generation), cause, operation)

    async def _step(self, scope: LeaseScope, cause: Cause, operation: Operation) -> LeaseStep:
        return await self._run(LeaseUnit(scope, lambda sight: self._written(sight, operation(sight), cause)))

    def _written(self, sight: LeaseSight, step: LeaseStep, cause: Cause) -> LeaseWrites[LeaseStep]:
        return LeaseWrites(step, step.writes, self._facts(sight, step.writes, cause))

    async def _run(self, unit: LeaseUnit[T]) -> T:
        return await self._store.run(unit, timeout_ms=self._budget_ms)

    def _facts(self, sight: LeaseSight, writes: Iterable[LeaseRow], cause: Cause) -> tuple[Fact, ...]:
        """One fact for each beginning and each end; a renewal is none. The owner's hash is not in it."""
        told = [row for row in writes if row.id == lease.NEW_ROW or row.state is not LeaseState.ACTIVE]
        if not told:
            return ()
        log = FactLog(replace(cause, event_id=f"lease/{self._entropy.new_id()}", at=sight.now, replica=self._replica))
        return tuple(_fact(log, row) for row in told)


def _told(row: LeaseRow) -> str:
    """Key under which is remembered that a further call was told of a lease."""
    return f"lease-told/{row.owner_hash}/{row.generation}"


def _remembered(step: LeaseStep, event_id: str) -> tuple[str, int] | None:
    """A grant under its call; that an owner was told of the lease it has."""
    if step.lease is None:
        return None
    if step.result is LeaseResult.REUSED:
        return _told(step.lease), step.lease.generation
    return (event_id, step.lease.generation) if event_id and step.result in _GRANTS else None


def _as_granted(row: LeaseRow) -> tuple[object, ...]:
    """What a move or a renewal changes."""
    return row.api_key_id, row.connection_id, row.generation, row.renewed_at, row.expires_at


def _fact(log: FactLog, row: LeaseRow) -> Fact:
    is_active = row.state is LeaseState.ACTIVE
    return log.add(
        "lease",
        row.connection_id,
        "" if is_active else LeaseState.ACTIVE.value,
        row.state.value,
        provider=row.provider,
        connection=row.connection_id,
        generation=row.generation,
        deadline_at=row.expires_at if is_active else None,
        reason=row.end_reason.value if row.end_reason else None,
    )


def _withdrawn(sight: LeaseSight, callers: Mapping[str, Caller]) -> Iterable[LeaseRow]:
    for key in sorted({row.api_key_id for row in sight.rows}):
        caller = callers.get(key)
        allowed = caller.allowed_connections if caller else ()
        yield from lease.withdraw(sight.rows, key, is_managed=is_managed(caller), allowed=allowed, now=sight.now)
