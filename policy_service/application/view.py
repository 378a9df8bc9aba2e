"""The view: this replica's in-memory picture of all non-default state (DESIGN section 3).

A key shows the newest committed row with this replica's own uncommitted events folded on top. Versions decide
between announcements; pending events are dropped up to the number that the store says it has folded, in the
same step in which the rows arrive. Not thread-safe: one event loop owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from policy_service.application.events import OutcomeEvent
from policy_service.application.ports import Feed, Versioned
from policy_service.domain.ids import Generations, Instant, Target
from policy_service.domain.policy import Policy
from policy_service.domain.state import Key, Row, StateBook

REFOLD_LIMIT = 1_000
"""With more pending events than this (a drain after an outage) the projection is kept as it is until most of
them are committed: folding all of them again after every batch would stall the loop. The kept projection can
only exclude too much, for as long as the drain lasts."""

Fold = Callable[[StateBook, OutcomeEvent, Policy], object]
Listener = Callable[[], None]


@dataclass(slots=True)
class Pending:
    """An event that this replica has numbered and not yet seen committed."""

    number: int
    event: OutcomeEvent
    touched: tuple[Key, ...] = ()


class View:
    """Rows by key, provider index, pending projection, freshness.

    Args:
        policy: the compiled catalogue revision in force.
        fold: folds one event into a book (the report plan); used for the projection only.
    """

    def __init__(self, policy: Policy, fold: Fold) -> None:
        self.policy = policy
        self._fold = fold
        self._committed: dict[Key, Versioned] = {}
        self._overlay: dict[Key, Row] = {}
        self._rows: dict[Key, Row] = {}
        self._by_provider: dict[str, dict[Key, Row]] = {}
        self._pending: deque[Pending] = deque()
        self._listeners: list[Listener] = []
        self.as_of: Instant = 0
        self.watermark = ""
        self.version = 0
        """Grows with every change that a selection could see."""

    # -- reading -------------------------------------------------------------------------------------
    @property
    def is_loaded(self) -> bool:
        """True once a full load was applied."""
        return bool(self.watermark)

    @property
    def rows(self) -> Mapping[Key, Row]:
        """Non-default rows as a selection sees them."""
        return self._rows

    def provider_rows(self, provider: str) -> Mapping[Key, Row] | None:
        """Non-default rows of one provider; None (the common case) when there is none."""
        return self._by_provider.get(provider)

    def committed(self, key: Key) -> Versioned | None:
        """Newest committed row known, tombstones included; never a projection."""
        return self._committed.get(key)

    def book(self) -> StateBook:
        """A book over the effective rows, for pure questions."""
        return StateBook(self._rows)

    def generations(self, target: Target, lock_keys: Iterable[Key]) -> Generations:
        """Generations of the newest committed rows of a target (fleet.md section 2)."""
        committed = self._committed
        breaker = committed.get(("breaker", target.provider, ""))
        connection = committed.get(("connection", target.provider, target.connection))
        locks = [found.row.generation for key in lock_keys if (found := committed.get(key))]
        return Generations(
            breaker.row.generation if breaker else 1,
            connection.row.generation if connection else 1,
            max(locks, default=1),
        )

    @property
    def pending_count(self) -> int:
        """Events numbered here that no commit has shown yet."""
        return len(self._pending)

    def pending_events(self) -> Iterator[Pending]:
        """Pending events in order."""
        return iter(self._pending)

    def on_change(self, listener: Listener) -> None:
        """Call `listener` after every change."""
        self._listeners.append(listener)

    # -- writing -------------------------------------------------------------------------------------
    def set_policy(self, policy: Policy) -> None:
        """Swap the compiled revision; everything else stays."""
        self.policy = policy
        self._reproject(set())

    def apply(self, feed: Feed, incarnation: str) -> None:
        """Apply one poll or full load: rows, progress of this replica and freshness in one step."""
        changed: set[Key] = set()
        if feed.is_full:
            changed = set(self._committed)
            newer = {v.row.key: v for v in feed.rows}
            kept = self._unseen_own(newer)
            self._committed = {}
            changed |= self._take((*feed.rows, *kept))
        else:
            changed = self._take(feed.rows)
        self._drop_pending(feed.progress.get(incarnation, 0), changed)
        self._refresh(changed)
        self.as_of = max(self.as_of, feed.as_of)
        self.watermark = feed.watermark
        self._notify(changed)

    def apply_committed(self, rows: Iterable[Versioned], folded_up_to: int = 0) -> None:
        """Apply the rows of this replica's own commit and drop the events that it folded."""
        changed = self._take(rows)
        self._drop_pending(folded_up_to, changed)
        self._refresh(changed)
        self._notify(changed)

    def add_pending(self, number: int, event: OutcomeEvent) -> object:
        """Fold a fresh event on top of the view and keep it until a commit shows it; the fold's result."""
        book = StateBook(self._rows)
        result = self._fold(book, event, self.policy)
        self._pending.append(Pending(number, event, tuple(book.changes)))
        if book.changes:
            self._overlay.update(book.changes)
            changed = set(book.changes)
            for key in changed:
                self._show(key)
            self._notify(changed)
        return result

    def _unseen_own(self, loaded: Mapping[Key, Versioned]) -> list[Versioned]:
        """Rows that this replica knows in a newer version than a full load shows (an older snapshot)."""
        return [v for key, v in self._committed.items() if key in loaded and v.version > loaded[key].version]

    def _take(self, rows: Iterable[Versioned]) -> set[Key]:
        changed: set[Key] = set()
        for versioned in rows:
            key = versioned.row.key
            known = self._committed.get(key)
            if known is None or versioned.version > known.version:
                self._committed[key] = versioned
                changed.add(key)
        return changed

    def _drop_pending(self, folded_up_to: int, changed: set[Key]) -> None:
        while self._pending and self._pending[0].number <= folded_up_to:
            changed.update(self._pending.popleft().touched)

    def _refresh(self, changed: set[Key]) -> None:
        """Show changed keys; pending events are folded again only if one of them touches such a key."""
        if self._overlay or self._pending:
            self._reproject(changed)
        else:
            for key in changed:
                self._show(key)

    def _reproject(self, changed: set[Key]) -> None:
        if len(self._pending) > REFOLD_LIMIT:
            for key in changed:
                self._show(key)
            return
        changed |= set(self._overlay)
        self._overlay = {}
        for key in changed:
            self._show(key)
        for pending in self._pending:
            book = StateBook(self._rows)
            self._fold(book, pending.event, self.policy)
            pending.touched = tuple(book.changes)
            self._overlay.update(book.changes)
            for key in book.changes:
                self._show(key)

    def _show(self, key: Key) -> None:
        """Bring the effective row and the provider index of one key up to date."""
        row = self._overlay.get(key)
        if row is None:
            versioned = self._committed.get(key)
            row = versioned.row if versioned else None
        if row is None or (row.is_default and row.generation == 1):
            self._forget(key)
        else:
            self._rows[key] = row
            self._by_provider.setdefault(key[1], {})[key] = row

    def _forget(self, key: Key) -> None:
        self._rows.pop(key, None)
        rows = self._by_provider.get(key[1])
        if rows is not None:
            rows.pop(key, None)
            if not rows:
                del self._by_provider[key[1]]

    def _notify(self, changed: set[Key]) -> None:
        if changed:
            self.version += 1
            for listener in self._listeners:
                listener()
