"""A store of gates and permit rows, replicas that wait and claim, and a clock that visits every instant of interest.

Base of the worlds of spec/concurrency.md and spec/queue_admission.md. Every operation goes through a fresh
`GateBook` over the stored rows, as a transaction would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from policy_service.domain.gates import GRANT_AT_ONCE, HEARTBEAT_MS, Gate, GateBook, PermitRow, PermitState
from policy_service.domain.line import claim, heartbeat, next_change_at, settle

Fields = dict[str, Any]
T = TypeVar("T")
_RowKey = tuple[str, str]


class LineWorld:
    """Rows by (gate, request), live replicas, and runs that end by themselves."""

    def __init__(self, offer_ms: int = GRANT_AT_ONCE) -> None:
        self.now = 0
        self.offer_ms = offer_ms
        self.rows: dict[_RowKey, PermitRow] = {}
        self.gates: dict[str, Gate] = {}
        self.dead: set[str] = set()
        self.ticket = 0
        self.run_ends: dict[str, int] = {}
        self.runs_ms: dict[str, int] = {}
        self.peak_held = 0

    # --- transactions ---

    def book(self) -> GateBook:
        """What one transaction locks and reads."""
        return GateBook(self.gates.values(), self.rows.values(), self.offer_ms)

    def transact(self, operation: Callable[[GateBook], T]) -> T:
        """Run one operation and write what it changed; then the live replicas claim what they were offered."""
        answer = self._commit(operation)
        while waiting := self._claimable():
            row = waiting[0]
            self._commit(lambda book, row=row: claim(book, row.request_id, row.replica, self.now))  # type: ignore[misc]
        return answer

    def _commit(self, operation: Callable[[GateBook], T]) -> T:
        book = self.book()
        answer = operation(book)
        before = {key: self.rows.get(key) for key in book.changed}
        self.rows |= book.changed
        self.gates |= book.changed_gates
        for key, row in book.changed.items():
            if before[key] is None or before[key].state is not row.state:  # type: ignore[union-attr]
                self.became(row)
        self.peak_held = max(self.peak_held, sum(row.state is PermitState.HELD for row in self.rows.values()))
        return answer

    def _claimable(self) -> list[PermitRow]:
        offered = [row for row in self.rows.values() if row.is_offered and row.replica not in self.dead]
        return sorted(offered, key=lambda row: row.ticket)

    def became(self, row: PermitRow) -> None:
        """A row changed its state; runs start when they are held."""
        if row.state is PermitState.HELD and row.request_id in self.runs_ms:
            self.run_ends[row.request_id] = self.now + self.runs_ms[row.request_id]
        elif row.state is not PermitState.WAITING:
            self.run_ends.pop(row.request_id, None)

    def draw(self) -> int:
        """Next ticket."""
        self.ticket += 1
        return self.ticket

    def states(self, state: PermitState) -> list[PermitRow]:
        """Rows in one state, in ticket order."""
        return sorted((row for row in self.rows.values() if row.state is state), key=lambda row: row.ticket)

    # --- time ---

    def advance(self, until: int) -> None:
        """Visit every instant up to `until` at which something happens by itself."""
        while (at := self._next_instant()) is not None and at <= until:
            self.now = at
            self._beat()
            self.end_runs()
            self.pass_time()
        self.now = max(self.now, until)

    def pass_time(self) -> None:
        """What a timer does: settle."""
        self.transact(lambda book: settle(book, self.now))

    def end_runs(self) -> None:
        """Runs that are over; worlds release them."""

    def more_instants(self) -> list[int]:
        """Further instants of interest."""
        return []

    def _next_instant(self) -> int | None:
        instants = [*self.run_ends.values(), *self.more_instants(), *self._beats()]
        change = next_change_at(self.book(), self.now)
        later = [at for at in instants if at > self.now] + ([] if change is None else [change])
        return min(later, default=None)

    def _beats(self) -> list[int]:
        waiting = (row for row in self.states(PermitState.WAITING) if row.replica not in self.dead)
        return [row.queued_at + ((self.now - row.queued_at) // HEARTBEAT_MS + 1) * HEARTBEAT_MS for row in waiting]

    def _beat(self) -> None:
        for row in self.states(PermitState.WAITING):
            since = self.now - row.queued_at
            if row.replica not in self.dead and since and since % HEARTBEAT_MS == 0:
                self._commit(lambda book, row=row: heartbeat(book, row.request_id, row.replica, self.now))  # type: ignore[misc]
