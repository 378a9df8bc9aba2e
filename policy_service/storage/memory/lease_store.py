"""Lease rows in memory: the semantics of the Postgres store in one process (implements `application.ports_leases`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from policy_service.application.ports_leases import GRANT_KEPT_MS, LeaseScope, LeaseSight, LeaseUnit
from policy_service.domain.ids import DurationMs
from policy_service.domain.lease import NEW_ROW, LeaseRow, LeaseState
from policy_service.storage.memory.store import Answer, MemoryStore

T = TypeVar("T")


@dataclass(slots=True)
class LeaseTable:
    """The table that the replicas of a fleet share; `rows[i]` has id i + 1."""

    rows: list[LeaseRow] = field(default_factory=list)
    raised_at: int = 0

    def put(self, row: LeaseRow) -> None:
        """Insert or update one row."""
        if row.id == NEW_ROW:
            self.rows.append(replace(row, id=len(self.rows) + 1))
        else:
            self.rows[row.id - 1] = row

    def check(self) -> None:
        """The unique indexes: one active row per owner and per connection."""
        active = [row for row in self.rows if row.state is LeaseState.ACTIVE]
        for column in ("owner_hash", "connection_id"):
            most = max(Counter(getattr(row, column) for row in active).values(), default=0)
            assert most <= 1, f"two active leases of one {column}"


class MemoryLeaseStore:
    """One replica's lease store. An operation runs in one step of the event loop, which is its lock."""

    def __init__(self, store: MemoryStore, table: LeaseTable | None = None) -> None:
        self._store = store
        self.table = table or LeaseTable()

    async def run(self, unit: LeaseUnit[T], *, timeout_ms: DurationMs) -> T:
        sight = await self.look(unit.scope, timeout_ms=timeout_ms)
        if unit.scope.everything:
            sight = replace(sight, rows=tuple(row for row in sight.rows if row.expires_at <= sight.now))
        written = unit.run(sight)
        for row in written.rows:
            self.table.put(row)
        self.table.check()
        self._store.database.record(written.facts)
        if written.grant:
            event_id, generation = written.grant
            self._store.database.answers[event_id] = Answer(sight.now, str(generation).encode())
        return written.value

    async def look(self, scope: LeaseScope, *, timeout_ms: DurationMs) -> LeaseSight:
        database = self._store.reached()
        stored = {revision.revision: revision.created_at for revision in database.revisions}
        return LeaseSight(
            tuple(self._rows(scope)),
            database.clock(),
            database.epoch,
            self.table.raised_at,
            max(stored, default=0),
            stored.get(scope.listed_in),
            self._granted(scope),
        )

    def _granted(self, scope: LeaseScope) -> int | None:
        database = self._store.database
        answer = database.answers.get(scope.event_id)
        is_kept = answer is not None and answer.written_at > database.clock() - GRANT_KEPT_MS
        return int(answer.body) if is_kept and answer else None

    async def settled(self, scope: LeaseScope, *, timeout_ms: DurationMs) -> LeaseSight:
        return await self.look(scope, timeout_ms=timeout_ms)

    def _rows(self, scope: LeaseScope) -> Iterable[LeaseRow]:
        for row in self.table.rows:
            is_wanted = row.owner_hash in scope.owners or row.connection_id in scope.connections
            if is_wanted or (scope.everything and row.state is LeaseState.ACTIVE):
                yield row
