"""Permits in one process: the semantics of the Postgres permit store without its failures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from policy_service.application.call_ids import is_call_of
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_permits import (
    Due,
    GateCount,
    GateStatus,
    Locked,
    PermitCommit,
    PermitUnit,
    committed,
    taken_over,
)
from policy_service.domain.facts import Fact
from policy_service.domain.gates import WAITER_LOST_MS, Gate, GateBook, PermitRow, PermitState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.line import earliest_expiry, is_forgotten
from policy_service.storage.memory.store import host_clock

T = TypeVar("T")


@dataclass(slots=True)
class StoredGate:
    """A gate with the configuration that it was given last."""

    gate: Gate
    configured: Gate | None
    revision: int


@dataclass(slots=True)
class MemoryPermits:
    """What the replicas of a fleet share."""

    clock: Callable[[], Instant] = host_clock
    gates: dict[str, StoredGate] = field(default_factory=dict)
    rows: dict[tuple[str, str], PermitRow] = field(default_factory=dict)
    ticket: int = 0
    subscribers: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    record: Callable[[Iterable[Fact]], None] = lambda _facts: None
    """Where facts go."""

    def live(self) -> Iterable[PermitRow]:
        """Holders and waiters."""
        return (row for row in self.rows.values() if row.is_live)

    def configure(self, gate: Gate, revision: int) -> None:
        """Take a configuration over unless it is older than the one in force."""
        stored = self.gates.setdefault(gate.key, StoredGate(gate, gate, revision))
        if revision >= stored.revision:
            self.gates[gate.key] = StoredGate(taken_over(stored.gate, stored.configured, gate), gate, revision)


class MemoryPermitStore:
    """One replica's permit store (implements `application.ports_permits.PermitStore`)."""

    def __init__(self, shared: MemoryPermits, replica: str) -> None:
        self.shared = shared
        self._replica = replica
        self.is_away = False
        """Set by tests: every call fails as with an absent database."""
        self.calls = 0

    def _call(self) -> MemoryPermits:
        if self.is_away:
            raise StoreUnavailableError("the store is away")
        self.calls += 1
        return self.shared

    async def run(self, unit: PermitUnit[T], *, timeout_ms: DurationMs) -> PermitCommit[T]:
        shared = self._call()
        for gate in unit.gates:
            shared.configure(gate, unit.revision)
        locked = self._locked(unit)
        commit = committed(unit.run(locked), locked, self._replica)
        shared.rows.update(locked.book.changed)
        for key, gate in locked.book.changed_gates.items():
            shared.gates[key].gate = gate
        shared.record(locked.facts)
        self._wake(commit.wakes)
        return commit

    def _locked(self, unit: PermitUnit[T]) -> Locked:
        shared = self.shared
        found = [row for row in shared.rows.values() if unit.permit_id and row.permit_id == unit.permit_id]
        named = {*unit.request_ids, *(row.request_id for row in found)}
        keys = self._closure(unit, named).union(*(row.gates for row in found)) & shared.gates.keys()
        wanted = named.union(unit.ended_ids)
        rows = (row for row in shared.rows.values() if row.gate in keys and (row.is_live or row.request_id in wanted))
        shared.ticket += unit.takes_ticket
        book = GateBook([shared.gates[key].gate for key in sorted(keys)], rows)
        ticket = shared.ticket if unit.takes_ticket else 0
        return Locked(book, shared.clock(), ticket, found[0].request_id if found else "", [])

    def _closure(self, unit: PermitUnit[T], named: set[str]) -> set[str]:
        """Gates of the unit, and those of the live requests that it concerns."""
        keys = {gate.key for gate in unit.gates}.union(unit.keys, unit.waiters_of)
        concerned = [
            row
            for row in self.shared.live()
            if (row.request_id in named and row.gate in keys)
            or (row.gate in unit.waiters_of and row.state is PermitState.WAITING)
        ]
        return keys.union(*(row.gates for row in concerned))

    def _wake(self, replicas: Iterable[str]) -> None:
        for replica in replicas:
            for wake in tuple(self.shared.subscribers.get(replica, ())):
                wake()

    async def beat(self, request_ids: Sequence[str], *, timeout_ms: DurationMs) -> int:
        shared, heard = self._call(), set()
        for key, row in shared.rows.items():
            if row.request_id in request_ids and row.state is PermitState.WAITING:
                shared.rows[key] = _seen(row, shared.clock(), self._replica)
                heard.add(row.request_id)
        return len(heard)

    async def due(self, request_ids: Sequence[str], gates: Sequence[str], *, timeout_ms: DurationMs) -> Due:
        shared = self._call()
        now = shared.clock()
        own = [row for row in shared.rows.values() if row.request_id in request_ids]
        told = frozenset(row.request_id for row in own if row.state is not PermitState.WAITING or row.is_offered)
        due = {row.gate for row in shared.live() if row.gate in gates and _is_due(row, now)}
        book = GateBook([shared.gates[key].gate for key in gates if key in shared.gates], shared.live())
        unserved = {row.gate for row in book.rows() if row.state is PermitState.WAITING and not row.is_offered}
        due |= {key for key in book.gates if key in unserved and book.has_room(key, now)}
        return Due(told, frozenset(due))

    async def permits_of(self, request_id: str, keys: Sequence[str], *, timeout_ms: DurationMs) -> Sequence[str]:
        rows = self._call().rows.values()
        if keys:
            return sorted({row.permit_id for row in rows if row.request_id == request_id and row.gates == tuple(keys)})
        return sorted({row.permit_id for row in rows if is_call_of(row.request_id, request_id)})

    async def counts(self, *, timeout_ms: DurationMs) -> Mapping[str, GateCount]:
        shared = self._call()
        book = GateBook((), shared.live())
        return {
            key: GateCount(book.held(key), book.waiting(key), earliest_expiry(book.rows(key)))
            for key in {row.gate for row in book.rows()}
        }

    async def list(self, prefix: str, *, timeout_ms: DurationMs) -> Sequence[GateStatus]:
        shared = self._call()
        counts, now = await self.counts(timeout_ms=timeout_ms), shared.clock()
        shown = (
            stored.gate
            for key, stored in sorted(shared.gates.items())
            if key.startswith(prefix) and (key in counts or stored.gate.is_blocked(now))
        )
        return [GateStatus(gate, counts.get(gate.key, GateCount(0, 0))) for gate in shown]

    def _of(self, key: str) -> Iterable[PermitRow]:
        return (row for row in self.shared.live() if row.gate == key)

    async def overdue(self, *, timeout_ms: DurationMs) -> Sequence[str]:
        shared = self._call()
        now = shared.clock()
        return sorted({row.gate for row in shared.live() if _is_due(row, now)})

    async def prune(self, *, timeout_ms: DurationMs) -> int:
        shared = self._call()
        gone = [key for key, row in shared.rows.items() if is_forgotten(row, shared.clock())]
        for key in gone:
            del shared.rows[key]
        return len(gone)

    async def subscribe(self, wake: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        subscribers = self.shared.subscribers.setdefault(self._replica, [])
        subscribers.append(wake)

        async def end() -> None:
            subscribers.remove(wake)

        return end


def _seen(row: PermitRow, now: Instant, replica: str) -> PermitRow:
    return replace(row, waiter_seen_at=now, replica=replica)


def _is_due(row: PermitRow, now: Instant) -> bool:
    if row.state is PermitState.HELD:
        return row.expires_at is not None and row.expires_at <= now
    ends = (row.deadline_at, row.offered_until)
    is_lost = row.waiter_seen_at is not None and row.waiter_seen_at + WAITER_LOST_MS <= now
    return is_lost or any(at is not None and at <= now for at in ends)
