"""In-flight entries of one replica (spec/concurrency.md section 3): what orders targets, never a hard limit."""

from __future__ import annotations

from policy_service.domain.ids import DurationMs, Instant

ENTRY_LIFE_MS: DurationMs = 120_000
MAX_ENTRIES = 4_096


class InFlight:
    """Live entries by connection. All entries live equally long, so the oldest ends first."""

    __slots__ = ("_entries", "_peers", "uncounted")

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Instant]] = {}
        self._peers: dict[str, int] = {}
        self.uncounted = 0
        """Dispatches beyond the limit of entries: routed, not counted."""

    def reserve(self, connection: str, entry_id: str, now: Instant) -> bool:
        """Add an entry until now + 120 s; False (and counted as such) where the connection has too many."""
        entries = self._live(connection, now)
        entries.pop(entry_id, None)
        if len(entries) >= MAX_ENTRIES:
            self.uncounted += 1
            return False
        self._entries.setdefault(connection, entries)[entry_id] = now + ENTRY_LIFE_MS
        return True

    def release(self, connection: str, entry_id: str) -> None:
        """Remove an entry; one that is gone or never was changes nothing."""
        entries = self._entries.get(connection)
        if entries is not None and entries.pop(entry_id, None) is not None and not entries:
            del self._entries[connection]

    def own(self, connection: str, now: Instant) -> int:
        """Live entries of this replica."""
        return len(self._live(connection, now))

    def count(self, connection: str, now: Instant, permits_held: int = 0) -> int:
        """Own entries plus the last flushed counts of the others; held permits where they are more."""
        return max(permits_held, self.own(connection, now) + self._peers.get(connection, 0))

    def set_peers(self, counts: dict[str, int]) -> None:
        """Replace the counts that the other replicas flushed last."""
        self._peers = dict(counts)

    def snapshot(self, now: Instant) -> dict[str, int]:
        """Own counts that are not 0, to be flushed."""
        counts = {connection: self.own(connection, now) for connection in list(self._entries)}
        return {connection: count for connection, count in counts.items() if count}

    def _live(self, connection: str, now: Instant) -> dict[str, Instant]:
        entries = self._entries.get(connection, {})
        while entries:
            oldest = next(iter(entries))
            if entries[oldest] > now:
                break
            del entries[oldest]
        return entries
