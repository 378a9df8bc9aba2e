"""The view: this replica's in-memory picture of all non-default state (DESIGN section 3).

A key shows the newest committed row with this replica's own uncommitted events folded on top. Versions decide
between announcements; pending events are dropped up to the number that the store says it has folded, in the
same step in which the rows arrive. Not thread-safe: one event loop owns it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from policy_service.application.events import OutcomeEvent
from policy_service.application.ports import Feed, Versioned
from policy_service.domain.ids import Generations, Instant, Target
from policy_service.domain.policy import Policy
from policy_service.domain.state import Key, Row, StateBook

REFOLD_LIMIT = 64
"""Pending events that are folded again when a row they wrote turns out otherwise than projected (another replica was
there first). With more of them (a storm, a drain after an outage) such a row is shown as committed instead, without
this replica's own pending events on top, so that folding never holds up selections; each commit brings them in."""

Fold = Callable[[StateBook, OutcomeEvent, Policy], object]
Listener = Callable[[], None]


@dataclass(slots=True)
class Pending:
    """An event that this replica has numbered and not yet seen committed."""

    number: int
    event: OutcomeEvent
    after: Mapping[Key, Row]
    """Rows as this event's projection left them."""


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
        self._touches: Counter[Key] = Counter()
        """How many pending events wrote each key."""
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

    def on_change(self, listener: Listener) -> None:
        """Call `listener` after every change."""
        self._listeners.append(listener)

    # -- writing -------------------------------------------------------------------------------------
    def set_policy(self, policy: Policy) -> None:
        """Swap the compiled revision; everything else stays."""
        self.policy = policy
        if len(self._pending) <= REFOLD_LIMIT:
            self._refold()

    def apply(self, feed: Feed, incarnation: str) -> set[int]:
        """Apply one poll or full load: rows, progress of this replica and freshness in one step.

        Returns the versions of rows that were not known here.
        """
        changed: set[Key] = set()
        if feed.is_full:
            changed = set(self._committed)
            newer = {v.row.key: v for v in feed.rows}
            kept = self._unseen_own(newer)
            self._committed = {}
            changed |= self._take((*feed.rows, *kept))
        else:
            changed = self._take(feed.rows)
        expected = self._drop_pending(feed.progress.get(incarnation, 0))
        self._refresh(changed, expected)
        self.as_of = max(self.as_of, feed.as_of)
        self.watermark = feed.watermark
        self._notify(changed)
        return {self._committed[key].version for key in changed if key in self._committed}

    def apply_committed(self, rows: Iterable[Versioned], folded_up_to: int = 0) -> None:
        """Apply the rows of this replica's own commit and drop the events that it folded."""
        changed = self._take(rows)
        expected = self._drop_pending(folded_up_to)
        self._refresh(changed, expected)
        self._notify(changed or set(expected))

    def add_pending(self, number: int, event: OutcomeEvent) -> object:
        """Fold a fresh event on top of the view and keep it until a commit shows it; the fold's result."""
        book = StateBook(self._rows)
        result = self._fold(book, event, self.policy)
        self._project(Pending(number, event, book.changes))
        self._notify(set(book.changes))
        return result

    def remove_pending(self, number: int) -> None:
        """Forget an event that was refused: every key shows what it would without it, as far as pending events are
        folded again at all (`REFOLD_LIMIT`)."""
        gone = [each for each in self._pending if each.number == number]
        self._pending = deque(each for each in self._pending if each.number != number)
        keys = {key for each in gone for key in each.after}
        self._touches.subtract(keys)
        if len(self._pending) <= REFOLD_LIMIT:
            self._refold()
        for key in keys:
            self._uncover(key)
        self._notify(keys)

    def _uncover(self, key: Key) -> None:
        """Show the newest projection of a key that is left, else its committed row."""
        left = (each.after[key] for each in reversed(self._pending) if key in each.after)
        row = next(left, None)
        if row is None:
            self._overlay.pop(key, None)
            del self._touches[key]
        else:
            self._overlay[key] = row
        self._show(key)

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

    def _drop_pending(self, folded_up_to: int) -> dict[Key, Row]:
        """Forget events that are committed; the rows as their projection left them."""
        expected: dict[Key, Row] = {}
        while self._pending and self._pending[0].number <= folded_up_to:
            gone = self._pending.popleft()
            expected.update(gone.after)
            self._touches.subtract(gone.after.keys())
        return expected

    def _refresh(self, changed: set[Key], expected: Mapping[Key, Row]) -> None:
        """Show changed keys. Projections of the remaining events hold while the committed rows beneath them are what
        they were made from; what they only read may have changed, which the next commit puts right."""
        diverged = False
        for key in changed | expected.keys():
            if self._touches[key] <= 0:
                del self._touches[key]
                self._overlay.pop(key, None)
            elif key in changed and expected.get(key) != self._committed_row(key):
                diverged = True
                if len(self._pending) > REFOLD_LIMIT:
                    self._overlay.pop(key, None)
            self._show(key)
        if diverged and len(self._pending) <= REFOLD_LIMIT:
            self._refold()

    def _refold(self) -> None:
        """Fold every pending event anew on top of the committed rows."""
        before, self._overlay = self._overlay, {}
        self._touches.clear()
        for key in before:
            self._show(key)
        pending, self._pending = self._pending, deque()
        for each in pending:
            book = StateBook(self._rows)
            self._fold(book, each.event, self.policy)
            self._project(Pending(each.number, each.event, book.changes))

    def _project(self, pending: Pending) -> None:
        """Show what an event left, on top of everything before it."""
        self._pending.append(pending)
        self._overlay.update(pending.after)
        self._touches.update(pending.after.keys())
        for key in pending.after:
            self._show(key)

    def _committed_row(self, key: Key) -> Row | None:
        known = self._committed.get(key)
        return known.row if known else None

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
