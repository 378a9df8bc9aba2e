"""What one replica remembers of session pins: a bounded cache of rows, and the changes that wait for the store.

Absence is never remembered: a look-up that misses reads the database. A row is trusted for a while; after that a
selection reads it again, so that a pin which another replica moved is followed. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from policy_service.application.ports_pins import PinKey, PinSeen
from policy_service.domain.affinity import PinRow
from policy_service.domain.ids import DurationMs, Instant

ROWS_KEPT = 50_000
CHANGES_KEPT = 20_000
TRUSTED_MS: DurationMs = 5_000
"""Within this time an operator's reset, and a move by another replica, is followed everywhere (operator_surface.md
section 1): an active session costs one look-up in it."""


@dataclass(frozen=True, slots=True)
class PinChange:
    """A change of one pin that is not in the store yet. Without `save` and `refresh_ttl_ms` the pin goes."""

    seen: PinSeen | None
    """Pin that the change is conditional on; None: insert unless a live one exists."""
    save: PinRow | None = None
    """Pin that this replica alone holds."""
    refresh_ttl_ms: DurationMs = 0
    at: Instant = 0

    @property
    def is_eviction(self) -> bool:
        """The pin goes."""
        return self.save is None and not self.refresh_ttl_ms


class PinCache:
    """Least recently used rows by key; (row, instant of reading)."""

    __slots__ = ("_capacity", "_rows")

    def __init__(self, capacity: int = ROWS_KEPT) -> None:
        self._capacity = capacity
        self._rows: OrderedDict[PinKey, tuple[PinRow, Instant]] = OrderedDict()

    def get(self, key: PinKey, now: Instant, trusted_ms: DurationMs | None = TRUSTED_MS) -> PinRow | None:
        """The live row, read at most `trusted_ms` ago (None: whenever)."""
        found = self._rows.get(key)
        if found is None or not found[0].is_live(now):
            return None
        if trusted_ms is not None and now - found[1] > trusted_ms:
            return None
        self._rows.move_to_end(key)
        return found[0]

    def put(self, key: PinKey, row: PinRow, now: Instant) -> None:
        """Remember a row as read, or written, at `now`."""
        self._rows[key] = (row, now)
        self._rows.move_to_end(key)
        while len(self._rows) > self._capacity:
            self._rows.popitem(last=False)

    def drop(self, key: PinKey) -> None:
        """Forget a row."""
        self._rows.pop(key, None)

    def drop_all(self, provider: str, connection: str) -> None:
        """Forget the rows of a provider and connection, empty: any."""
        for key, (row, _) in list(self._rows.items()):
            if provider in ("", row.provider) and connection in ("", row.connection_id):
                del self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)


class PinBacklog:
    """The newest change by pin, oldest pin first. At the bound refreshes go first: they only lose lifetime."""

    __slots__ = ("_capacity", "_changes", "dropped", "on_add")

    def __init__(self, capacity: int = CHANGES_KEPT) -> None:
        self._capacity = capacity
        self._changes: OrderedDict[PinKey, PinChange] = OrderedDict()
        self.dropped = 0
        self.on_add: Callable[[], None] = lambda: None
        """Called after each change, for whoever writes them."""

    def get(self, key: PinKey) -> PinChange | None:
        """Change that waits for a pin."""
        return self._changes.get(key)

    def local(self, key: PinKey, now: Instant) -> PinRow | None:
        """Live pin that this replica alone holds."""
        change = self._changes.get(key)
        row = change.save if change is not None else None
        return row if row is not None and row.is_live(now) else None

    def add(self, key: PinKey, change: PinChange) -> None:
        """Queue a change on top of what waits for the same pin."""
        self._changes[key] = _merged(self._changes.get(key), change)
        if len(self._changes) > self._capacity:
            self._drop_one()
        self.on_add()

    def _drop_one(self) -> None:
        cheap = (key for key, change in self._changes.items() if change.refresh_ttl_ms)
        del self._changes[next(cheap, next(iter(self._changes)))]
        self.dropped += 1

    def first(self) -> tuple[PinKey, PinChange] | None:
        """The oldest change, still queued."""
        return next(iter(self._changes.items()), None)

    def done(self, key: PinKey, change: PinChange) -> None:
        """Take a written change out, unless a newer one took its place meanwhile."""
        if self._changes.get(key) is change:
            del self._changes[key]

    def __len__(self) -> int:
        return len(self._changes)


def _merged(waiting: PinChange | None, change: PinChange) -> PinChange:
    """What two changes of one pin amount to."""
    if waiting is None:
        return change
    if waiting.save is not None:
        return _on_unsaved(waiting, waiting.save, change)
    if change.save is not None and change.seen is None and waiting.is_eviction:
        return replace(change, seen=waiting.seen)
    return waiting if waiting.is_eviction and change.refresh_ttl_ms else change


def _on_unsaved(waiting: PinChange, row: PinRow, change: PinChange) -> PinChange:
    """A pin that is not known to be stored takes the change itself; gone again, it leaves what it had replaced to go.

    Its own insert may be under way, so that one without a predecessor still has its connection's pin deleted.
    """
    if change.save is not None:
        return replace(waiting, save=change.save)
    if change.refresh_ttl_ms:
        until = max(row.expires_at, change.at + change.refresh_ttl_ms)
        return replace(waiting, save=replace(row, last_used_at=max(row.last_used_at, change.at), expires_at=until))
    return PinChange(waiting.seen or PinSeen(row.connection_id, 0))
