"""Session pins in memory: the semantics of the Postgres store in one process (implements `application.ports_pins`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from policy_service.application.ports_pins import PinKey, PinSeen, SavedPin, key_of
from policy_service.domain.affinity import PinRow, live_pins, refreshed
from policy_service.domain.ids import DurationMs, Instant
from policy_service.storage.memory.store import MemoryStore


@dataclass(slots=True)
class PinTable:
    """The table that the replicas of a fleet share."""

    rows: dict[PinKey, PinRow] = field(default_factory=dict)
    version: int = 0
    written: Counter[str] = field(default_factory=Counter)
    """Statements that changed a row, by kind."""

    def put(self, row: PinRow, kind: str) -> PinRow:
        """Store a row under a fresh version."""
        self.version += 1
        stored = replace(row, version=self.version)
        self.rows[key_of(row)] = stored
        self.written[kind] += 1
        return stored


class MemoryPinStore:
    """One replica's pins. An operation runs in one step of the event loop, which makes it one statement."""

    def __init__(self, store: MemoryStore, table: PinTable | None = None) -> None:
        self._store = store
        self.table = table or PinTable()

    def _now(self) -> Instant:
        return self._store.reached().clock()

    def _live(self, key: PinKey, now: Instant) -> PinRow | None:
        row = self.table.rows.get(key)
        return row if row is not None and row.is_live(now) else None

    def _seen(self, key: PinKey, seen: PinSeen) -> PinRow | None:
        row = self.table.rows.get(key)
        if row is None or row.connection_id != seen.connection or seen.version not in (0, row.version):
            return None
        return row

    async def find(self, key: PinKey, *, timeout_ms: DurationMs) -> PinRow | None:
        return self._live(key, self._now())

    async def insert(self, row: PinRow, *, timeout_ms: DurationMs) -> SavedPin | None:
        now = self._now()
        winner = self._live(key_of(row), now)
        if winner is not None:
            return SavedPin(winner, is_own=False)
        return SavedPin(self.table.put(row, "insert"), is_own=True) if now < row.expires_at else None

    async def move(self, row: PinRow, seen: PinSeen, *, timeout_ms: DurationMs) -> SavedPin | None:
        now = self._now()
        if self._seen(key_of(row), seen) is not None:
            return SavedPin(self.table.put(row, "move"), is_own=True)
        winner = self._live(key_of(row), now)
        return None if winner is None else SavedPin(winner, is_own=False)

    async def delete(self, key: PinKey, seen: PinSeen, *, timeout_ms: DurationMs) -> bool:
        self._now()
        if self._seen(key, seen) is None:
            return False
        del self.table.rows[key]
        self.table.written["delete"] += 1
        return True

    async def delete_all(self, provider: str, connection: str, *, timeout_ms: DurationMs) -> int:
        now, rows = self._now(), self.table.rows
        gone = [
            row for row in rows.values() if provider in ("", row.provider) and connection in ("", row.connection_id)
        ]
        for row in gone:
            del rows[key_of(row)]
        return sum(row.is_live(now) for row in gone)

    async def refresh(
        self, key: PinKey, seen: PinSeen, at: Instant, ttl_ms: DurationMs, *, timeout_ms: DurationMs
    ) -> PinRow | None:
        live = self._live(key, self._now())
        if live is not None and self._seen(key, seen) is not None:
            written = refreshed(live, seen.connection, at, ttl_ms)
            if written is not None:
                live = self.table.rows[key] = written
                self.table.written["refresh"] += 1
        return live

    async def count(self, connections: Collection[str], *, timeout_ms: DurationMs) -> Mapping[str, int]:
        now = self._now()
        return live_pins([row for row in self.table.rows.values() if row.connection_id in connections], now)

    async def sweep(self, *, timeout_ms: DurationMs) -> int:
        now = self._now()
        over = [key for key, row in self.table.rows.items() if not row.is_live(now)]
        for key in over:
            del self.table.rows[key]
        return len(over)
