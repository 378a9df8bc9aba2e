"""Permits on Postgres (implements `application.ports_permits.PermitStore`, spec/fleet.md section 5)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from policy_service.application.call_ids import SUFFIXES
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
from policy_service.domain.gates import PERMIT_TTL_MAX_MS, Gate, GateBook, Pace, PermitRow, PermitState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.storage.codec import RowCodec, clean_text, row_codec
from policy_service.storage.postgres import permit_statements as sql
from policy_service.storage.postgres.errors import AnswerRaceError
from policy_service.storage.postgres.session import Session
from policy_service.storage.postgres.store import PostgresStore
from policy_service.storage.postgres.unit_of_work import record_facts

T = TypeVar("T")

WAKE_PREFIX = "gate:"
WAKE_EVERY_S = 0.02
"""A replica announces hand-offs at most this often (spec/fleet.md section 5)."""
WAKE_MS: DurationMs = 1_000
GATES_KNOWN = 10_000
HEADS = 1_000
_PAYLOAD_CHARS = 7_000
_STATE_AT, _GATES_AT = sql.COLUMNS.index("state"), sql.COLUMNS.index("gates")


@dataclass(frozen=True, slots=True)
class StoredGate:
    """A gate row."""

    gate: Gate
    configured: Gate | None
    revision: int

    def under(self, wanted: Gate | None, revision: int) -> StoredGate:
        """With the configuration of a unit, unless that is older."""
        if wanted is None or revision < self.revision:
            return self
        if self.configured == wanted and self.revision == revision:
            return self
        return StoredGate(taken_over(self.gate, self.configured, wanted), wanted, revision)


@dataclass(slots=True)
class Reach:
    """What a unit locks and reads, as far as it is known."""

    keys: set[str]
    request_ids: set[str]
    request_id: str = ""


class PostgresPermitStore:
    """Permits of one replica; shares the connections of its `PostgresStore`.

    Args:
        awaits_failover: the database replicates asynchronously (`store.failover: async`): after a failover every gate
            is shut for the largest TTL, because holders may be lost with the old server (spec/fleet.md section 7).
    """

    def __init__(self, store: PostgresStore, replica: str, *, awaits_failover: bool = False) -> None:
        self._store = store
        self._awaits_failover = awaits_failover
        self._replica = clean_text(replica)
        self._bell = Bell(self._ring)
        self._made = MadeGates()

    async def run(self, unit: PermitUnit[T], *, timeout_ms: DurationMs) -> PermitCommit[T]:
        further: set[str] = set()
        commit = await self._store.in_session(
            lambda session: self._commit(session, unit, further), timeout_ms=timeout_ms
        )
        if commit.wakes:
            self._bell.ring(commit.wakes)
        return commit

    async def _commit(self, session: Session, unit: PermitUnit[T], further: set[str]) -> PermitCommit[T]:
        """One attempt; leaves in `further` the gates that the next one has to lock as well."""
        await self._made.ensure(session, unit.gates)
        async with session.transaction() as connection:
            reach = await _reach(session, connection, unit, further)
            stored, changed = await _lock(session, connection, unit, reach.keys)
            self._made.check(unit.gates, stored)
            shut_until = await _shut_until(session, connection) if self._awaits_failover else 0
            locked = await _read(session, connection, unit, reach, stored.values(), shut_until)
            if beyond := _beyond(locked, reach):
                further.update(beyond)
                raise AnswerRaceError
            value = unit.run(locked)
            await _write(session, connection, locked, stored, changed)
            if locked.facts:
                await record_facts(session, connection, tuple(locked.facts))
        return committed(value, locked, self._replica)

    async def _ring(self, replicas: frozenset[str]) -> None:
        payload = WAKE_PREFIX + "\n".join(sorted(replicas))
        everybody = WAKE_PREFIX + "*"
        await self._query(sql.WAKE, payload if len(payload) < _PAYLOAD_CHARS else everybody, timeout_ms=WAKE_MS)

    async def _query(self, statement: str, *parameters: Any, timeout_ms: DurationMs) -> Sequence[Any]:
        async def work(session: Session) -> Sequence[Any]:
            async with session.connect() as connection:
                return await session.execute(connection, statement, *parameters)

        return await self._store.in_session(work, timeout_ms=timeout_ms)

    async def beat(self, request_ids: Sequence[str], *, timeout_ms: DurationMs) -> int:
        rows = await self._query(sql.BEAT, list(request_ids), self._replica, timeout_ms=timeout_ms)
        return len({row[0] for row in rows})

    async def due(self, request_ids: Sequence[str], gates: Sequence[str], *, timeout_ms: DurationMs) -> Due:
        rows = await self._query(sql.DUE, list(request_ids), list(gates), timeout_ms=timeout_ms)
        return Due(
            frozenset(name for is_request, name in rows if is_request),
            frozenset(name for is_request, name in rows if not is_request),
        )

    async def permits_of(self, request_id: str, keys: Sequence[str], *, timeout_ms: DurationMs) -> Sequence[str]:
        if keys:
            rows = await self._query(sql.PERMITS_OF_CALL, request_id, list(keys), timeout_ms=timeout_ms)
        else:
            rows = await self._query(sql.PERMITS_OF_REQUEST, request_id, f"^{SUFFIXES}$", timeout_ms=timeout_ms)
        return [row[0] for row in rows]

    async def counts(self, *, timeout_ms: DurationMs) -> Mapping[str, GateCount]:
        rows = await self._query(sql.COUNTS, timeout_ms=timeout_ms)
        return {row[0]: GateCount(*row[1:]) for row in rows}

    async def list(self, prefix: str, *, timeout_ms: DurationMs) -> Sequence[GateStatus]:
        rows = await self._query(sql.LIST, prefix, timeout_ms=timeout_ms)
        return [GateStatus(_gate(row[:7]).gate, GateCount(*row[7:10])) for row in rows]

    async def overdue(self, *, timeout_ms: DurationMs) -> Sequence[str]:
        return [row[0] for row in await self._query(sql.OVERDUE, timeout_ms=timeout_ms)]

    async def prune(self, *, timeout_ms: DurationMs) -> int:
        rows = await self._query(sql.PRUNE_ROWS, timeout_ms=timeout_ms)
        await self._query(sql.PRUNE_GATES, timeout_ms=timeout_ms)
        return int(rows[0][0])

    async def subscribe(self, wake: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        def told(payload: str) -> bool:
            if not payload.startswith(WAKE_PREFIX):
                return False
            names = payload.removeprefix(WAKE_PREFIX).split("\n")
            if self._replica in names or names == ["*"]:
                wake()
            return True

        self._store.listening.append(told)

        async def end() -> None:
            self._store.listening.remove(told)
            await self._bell.end()

        return end


class MadeGates:
    """Keys of gate rows known to exist."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    async def ensure(self, session: Session, gates: Iterable[Gate]) -> None:
        """Make missing rows, in a transaction of its own: one that holds new rows and then locks others out of order
        could deadlock."""
        missing = sorted({gate.key for gate in gates} - self._known)
        if missing:
            async with session.connect() as connection:
                await session.execute(connection, sql.ENSURE_GATES, missing)
            if len(self._known) > GATES_KNOWN:
                self._known.clear()
            self._known.update(missing)

    def check(self, gates: Iterable[Gate], locked: Mapping[str, StoredGate]) -> None:
        """A row that was pruned meanwhile is made anew by the next attempt."""
        gone = {gate.key for gate in gates} - locked.keys()
        if gone:
            self._known -= gone
            raise AnswerRaceError


class Bell:
    """Announces at once, then at most every 20 ms; what comes in between is announced together."""

    def __init__(self, ring: Callable[[frozenset[str]], Awaitable[None]]) -> None:
        self._ring = ring
        self._waiting: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def ring(self, names: Iterable[str]) -> None:
        """Announce soon."""
        self._waiting |= set(names)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        while self._waiting:
            names, self._waiting = frozenset(self._waiting), set()
            try:
                await self._ring(names)
            except StoreUnavailableError:
                return  # the poll of the waiters finds it
            await asyncio.sleep(WAKE_EVERY_S)

    async def end(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


# --- one transaction ---------------------------------------------------------------------------------------


async def _reach(session: Session, connection: AsyncConnection, unit: PermitUnit[Any], further: set[str]) -> Reach:
    """Gates to lock; ids are looked up first, which is safe because a row never changes its gates."""
    keys = {gate.key for gate in unit.gates}.union(unit.keys, unit.waiters_of, further)
    reach = Reach(keys, set(unit.request_ids))
    if not (unit.permit_id or unit.waiters_of):
        return reach
    found = await session.execute(connection, sql.FIND, unit.permit_id, list(unit.waiters_of))
    for permit_id, request_id, gates in found:
        reach.keys.update(gates)
        if permit_id:
            reach.request_id = request_id
            reach.request_ids.add(request_id)
    return reach


async def _lock(
    session: Session, connection: AsyncConnection, unit: PermitUnit[Any], keys: set[str]
) -> tuple[dict[str, StoredGate], set[str]]:
    """Lock the gates; all of them under the unit's configuration, and the keys of those that this changes."""
    found = [_gate(row) for row in await session.execute(connection, sql.LOCK_GATES, list(keys))] if keys else []
    wanted = {gate.key: gate for gate in unit.gates}
    now = {each.gate.key: each.under(wanted.get(each.gate.key), unit.revision) for each in found}
    return now, {each.gate.key for each in found if now[each.gate.key] is not each}


async def _shut_until(session: Session, connection: AsyncConnection) -> Instant:
    """End of the pause after a failover."""
    (record,) = await session.execute(connection, sql.FAILED_OVER)
    return 0 if record[0] is None else int(record[0]) + PERMIT_TTL_MAX_MS


async def _read(
    session: Session,
    connection: AsyncConnection,
    unit: PermitUnit[Any],
    reach: Reach,
    stored: Iterable[StoredGate],
    shut_until: Instant,
) -> Locked:
    gates = [_shut(each.gate, shut_until) for each in stored]
    keys, heads = [gate.key for gate in gates], sql.WHOLE_LINE if unit.reads_line else _heads(gates)
    wanted = list(reach.request_ids), unit.takes_ticket, heads, list(unit.ended_ids)
    records = await session.execute(connection, sql.READ, keys, *wanted)
    now, ticket, behind = records[0][:3]
    rows = (_row(record[3:]) for record in records if record[3] is not None)
    book = PartialBook(gates, rows, json.loads(behind) if behind else {})
    return Locked(book, now, ticket, reach.request_id, [])


def _shut(gate: Gate, until: Instant) -> Gate:
    return replace(gate, blocked_until=max(until, gate.blocked_until or 0)) if until else gate


def _heads(gates: Iterable[Gate]) -> int:
    """How many of a line one hand-off can serve at most."""
    return 1 + max((HEADS if gate.limit is None else min(gate.limit, HEADS) for gate in gates), default=0)


class PartialBook(GateBook):
    """A book without those far behind in line, who are merely counted."""

    __slots__ = ("_behind",)

    def __init__(self, gates: Iterable[Gate], rows: Iterable[PermitRow], behind: Mapping[str, int]) -> None:
        super().__init__(gates, rows)
        self._behind = behind

    def waiting(self, gate: str) -> int:
        """Length of the line."""
        return super().waiting(gate) + self._behind.get(gate, 0)


def _beyond(locked: Locked, reach: Reach) -> set[str]:
    """Gates that a request concerned needs and that are not locked."""
    rows = (row for row in locked.book.rows() if row.is_live and row.request_id in reach.request_ids)
    return {key for row in rows for key in row.gates} - locked.book.gates.keys()


async def _write(
    session: Session, connection: AsyncConnection, locked: Locked, stored: Mapping[str, StoredGate], changed: set[str]
) -> None:
    book = locked.book
    gates = [
        _stored_gate(replace(stored[key], gate=book.gates[key]), locked.now)
        for key in changed | book.changed_gates.keys()
    ]
    rows = list(map(row_codec(PermitRow).encode, book.changed.values()))
    if gates or rows:
        await session.execute(connection, sql.WRITE, json.dumps({"gates": gates, "rows": rows}))


def _row(record: Sequence[Any]) -> PermitRow:
    values = list(record)
    values[_STATE_AT] = PermitState(values[_STATE_AT])
    values[_GATES_AT] = tuple(values[_GATES_AT])
    return PermitRow(*values)


def _gate(record: Sequence[Any]) -> StoredGate:
    key, slots, depth, blocked_until, pace, configured, revision = record
    gate = Gate(key, slots, depth, blocked_until, _decoded(row_codec(Pace), pace))
    return StoredGate(gate, _decoded(row_codec(Gate), configured), revision)


def _decoded(codec: RowCodec[T], text: str | None) -> T | None:
    return None if text is None else codec.decode(json.loads(text))


def _stored_gate(stored: StoredGate, now: Instant) -> dict[str, Any]:
    gate = stored.gate
    return {
        "key": gate.key,
        "slots": gate.limit,
        "depth": gate.depth,
        "blocked_until": gate.blocked_until,
        "pace": None if gate.pace is None else row_codec(Pace).encode(gate.pace),
        "configured": None if stored.configured is None else row_codec(Gate).encode(stored.configured),
        "revision": stored.revision,
        "touched_at": now,
    }
