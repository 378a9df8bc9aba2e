"""The calls of this replica that wait in a line: who they are, and when to look after them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from policy_service.application.permit_work import Passage, PermitRefusal, Tended
from policy_service.application.ports_permits import PermitCommit
from policy_service.domain.gates import PermitRow, PermitState
from policy_service.domain.ids import Instant

NEVER: Instant = 1 << 62
Verdict = PermitRow | PermitRefusal
"""What ends a wait: the row that is held now, or why it will not be."""


class Waiter:
    """One call. Two calls of one request id (a caller that repeats itself) are two waiters of one ticket."""

    __slots__ = ("__weakref__", "passage", "request_id", "verdict")

    def __init__(self, request_id: str, passage: Passage) -> None:
        self.request_id = request_id
        self.passage = passage
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    @property
    def place(self) -> tuple[str, tuple[str, ...]]:
        """What tells its ticket from those of the request for other targets."""
        return self.request_id, self.passage.keys

    def tell(self, verdict: Verdict) -> None:
        """End the wait, unless it has ended."""
        if not self.verdict.done():
            self.verdict.set_result(verdict)


class WaitingLine:
    """Waiters by request id."""

    def __init__(self) -> None:
        self._waiters: dict[str, list[Waiter]] = {}
        self._due: dict[str, Instant] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def ids(self) -> Mapping[str, object]:
        """Request ids that wait here; always current."""
        return self._waiters

    def join(self, request_id: str, passage: Passage) -> Waiter:
        """Add a waiter; before its ticket is written, so that no offer is missed."""
        waiter = Waiter(request_id, passage)
        self._waiters.setdefault(request_id, []).append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> bool:
        """Remove a waiter; True if nobody waits for its ticket any more."""
        found = self._waiters.get(waiter.request_id, [])
        if waiter in found:
            found.remove(waiter)
        if not found:
            self._waiters.pop(waiter.request_id, None)
        if not self._waiters:
            self._due.clear()
        return all(each.place != waiter.place for each in found)

    def note(self, commit: PermitCommit[object]) -> None:
        """Take what a transaction of this replica decided about the calls that wait here."""
        for row in commit.rows:
            self._tell_held(row)
        if isinstance(commit.value, Tended):
            self._note_tended(commit.value)
        if self._waiters:
            self._due.update(dict.fromkeys(commit.counts, commit.next_change_at or NEVER))
            self._due.update({row.gate: 0 for row in commit.rows if not row.is_live and self._is_untold(row)})

    def _is_untold(self, row: PermitRow) -> bool:
        """A call waits here for a ticket that has ended, and does not know it yet."""
        return any(not waiter.verdict.done() for waiter in self._waiters.get(row.request_id, ()))

    def _note_tended(self, tended: Tended) -> None:
        for row in tended.rows:
            self._tell_held(row)
        for request_id, refusal in tended.refusals.items():
            for waiter in self._waiters.get(request_id, ()):
                waiter.tell(refusal)

    def _tell_held(self, row: PermitRow) -> None:
        """A slot of the same request at another target, granted late, is none of theirs."""
        if row.state is not PermitState.HELD:
            return
        for waiter in self._waiters.get(row.request_id, ()):
            if waiter.place == (row.request_id, row.gates):
                waiter.tell(row)

    def groups(self) -> dict[tuple[str, ...], list[Waiter]]:
        """Waiters that are not served yet, by the gates they wait for."""
        found: dict[tuple[str, ...], list[Waiter]] = {}
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.verdict.done():
                    found.setdefault(waiter.passage.keys, []).append(waiter)
        return found

    def due_at(self) -> Instant | None:
        """When time alone changes something next, as far as is known."""
        return min(self._due.values(), default=None)

    def due_gates(self, now: Instant) -> frozenset[str]:
        """Gates whose instant has come."""
        return frozenset(key for key, at in self._due.items() if at <= now)

    def forget_due(self, keys: Iterable[str]) -> None:
        """These gates were looked at."""
        for key in keys:
            self._due.pop(key, None)
