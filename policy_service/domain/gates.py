"""Gates and their line: slots held under a cap, waiters in ticket order (spec/concurrency.md 2, fleet.md 5).

The building block of concurrency permits and of queue tickets: rows, pacing, and the `GateBook` over the gates
that one operation has locked. The operations on a book are in `line`; what a refusal means to a caller (codes,
HTTP statuses, what to do on saturation) is said by `permits` and `queue_admission`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from policy_service.domain.ids import DurationMs, Instant

WAITER_LOST_MS: DurationMs = 15_000
"""A waiter without a heartbeat for this long has lost its place."""
HEARTBEAT_MS: DurationMs = 5_000
OFFER_MS: DurationMs = 2_000
"""How long a slot is kept for the waiter at the head of the line until its replica claims it."""
PERMIT_TTL_MAX_MS: DurationMs = 1_800_000
"""Largest life of a permit without renewal."""
KEEP_ENDED_MS: DurationMs = 600_000
"""Ended rows are kept this long, so that a repeated acquire learns what became of it."""
GRANT_AT_ONCE: DurationMs = 0
"""In place of an offer time: the hand-off makes the waiter a holder without asking its replica."""


class PermitState(StrEnum):
    """States of a row; every state after HELD is an end and never changes again."""

    WAITING = "WAITING"
    HELD = "HELD"
    RELEASED = "RELEASED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    TIMED_OUT = "TIMED_OUT"
    WAITER_LOST = "WAITER_LOST"
    RESET = "RESET"
    WEDGED = "WEDGED"
    """Queue tickets only: the limiter was stuck (queue_admission.md section 6)."""


LIVE = frozenset({PermitState.WAITING, PermitState.HELD})


@dataclass(frozen=True, slots=True)
class PermitRow:
    """One row per (gate, request_id). A request over several gates has one row in each, equal but for `gate`."""

    permit_id: str
    request_id: str
    gate: str
    gates: tuple[str, ...]
    """All gates of the request, sorted."""
    ticket: int
    """Place in line; one increasing number for all gates of the request."""
    state: PermitState
    queued_at: Instant
    ttl_ms: DurationMs
    replica: str = ""
    deadline_at: Instant | None = None
    """End of waiting; None: unbounded."""
    waiter_seen_at: Instant | None = None
    offered_until: Instant | None = None
    """Set while the head of the line is offered a slot, which it occupies for that time."""
    missed_at: Instant | None = None
    """End of the last unclaimed offer; passed over until the waiter is heard of again."""
    max_held_ms: DurationMs | None = None
    """Longest life of the grant whatever is renewed; None: no such bound."""
    granted_at: Instant | None = None
    """When the slot was given, offered or taken: the order of grants is the order of tickets."""
    held_at: Instant | None = None
    """When the holder took it; TTL and longest life run from here."""
    expires_at: Instant | None = None
    ended_at: Instant | None = None

    @property
    def is_live(self) -> bool:
        """Waiting or held."""
        return self.state in LIVE

    @property
    def is_offered(self) -> bool:
        """Waiting, with a slot kept for it."""
        return self.state is PermitState.WAITING and self.offered_until is not None

    @property
    def is_silent(self) -> bool:
        """Missed its last offer and not heard of since: nobody waits behind it."""
        return self.missed_at is not None and (self.waiter_seen_at or 0) < self.missed_at

    @property
    def occupies_slot(self) -> bool:
        """Counts against the cap. An offer is cleared whenever its row is granted, missed or ended."""
        return self.state is PermitState.HELD or self.offered_until is not None


@dataclass(frozen=True, slots=True)
class Pace:
    """Pacing of starts behind a gate (queue_admission.md): reservoir and gap. `tokens` None: no reservoir."""

    tokens: int | None = None
    refill_to: int = 0
    refill_at: Instant | None = None
    window_ms: DurationMs = 60_000
    gap_ms: DurationMs = 0
    last_start_at: Instant | None = None
    learned_at: Instant | None = None
    """When the upstream last said something that differs from the configuration; None: paced as configured."""

    def refreshed(self, now: Instant) -> Pace:
        """With the refill that is due, taken whole."""
        if self.tokens is None or self.refill_at is None or now < self.refill_at:
            return self
        return replace(self, tokens=self.refill_to, refill_at=None)

    def started(self, now: Instant) -> Pace:
        """After one start; the window to the next refill runs from the first start after the last one."""
        ready = self.refreshed(now)
        if ready.tokens is None:
            return replace(ready, last_start_at=now)
        refill_at = now + ready.window_ms if ready.refill_at is None else ready.refill_at
        return replace(ready, tokens=ready.tokens - 1, refill_at=refill_at, last_start_at=now)

    def allows(self, now: Instant, promised: int) -> bool:
        """True if one more start may happen now, `promised` offers being out already."""
        tokens = self.refreshed(now).tokens
        has_token = tokens is None or tokens > promised
        return has_token and (self.gap_ms <= 0 or (promised == 0 and now >= self.gap_ends_at))

    @property
    def gap_ends_at(self) -> Instant:
        """Earliest next start by the gap alone."""
        return 0 if self.last_start_at is None else self.last_start_at + self.gap_ms


@dataclass(frozen=True, slots=True)
class Gate:
    """Configuration and pacing of one gate as it stands now. `limit` None: no cap."""

    key: str
    limit: int | None = None
    depth: int = 20
    """Most waiters; 0: unlimited."""
    blocked_until: Instant | None = None
    pace: Pace | None = None

    def is_blocked(self, now: Instant) -> bool:
        """Blocked by the operator: admits nobody."""
        return self.blocked_until is not None and now < self.blocked_until


_BY_TICKET = attrgetter("ticket")


class GateBook:
    """Locked gates, the rows read under the lock, and the writes of one operation.

    A request over several gates is seen whole only where all its gates are in the book; an operation of a request
    therefore locks all of them (in sorted order). `offer_ms` is how long a hand-off keeps a slot for its waiter.
    """

    __slots__ = ("_rows", "changed", "changed_gates", "gates", "offer_ms")

    def __init__(self, gates: Iterable[Gate], rows: Iterable[PermitRow] = (), offer_ms: DurationMs = OFFER_MS) -> None:
        self.offer_ms = offer_ms
        self.gates = {gate.key: gate for gate in gates}
        self._rows = {(row.gate, row.request_id): row for row in rows}
        self.changed: dict[tuple[str, str], PermitRow] = {}
        self.changed_gates: dict[str, Gate] = {}

    def put(self, row: PermitRow) -> None:
        """Write one row."""
        self._rows[row.gate, row.request_id] = row
        self.changed[row.gate, row.request_id] = row

    def put_gate(self, gate: Gate) -> None:
        """Write one gate."""
        self.gates[gate.key] = gate
        self.changed_gates[gate.key] = gate

    def rows(self, gate: str | None = None) -> list[PermitRow]:
        """Rows of one gate, or all."""
        return [row for row in self._rows.values() if gate is None or row.gate == gate]

    def of(self, request_id: str) -> list[PermitRow]:
        """Rows of one request in the locked gates, sorted by gate."""
        found = (self._rows.get((gate, request_id)) for gate in sorted(self.gates))
        return [row for row in found if row is not None]

    def waiters(self) -> list[PermitRow]:
        """One row for each waiting request, in ticket order."""
        waiting = (row for row in self._rows.values() if row.state is PermitState.WAITING)
        by_request = {row.request_id: row for row in waiting}
        return sorted(by_request.values(), key=_BY_TICKET)

    def held(self, gate: str) -> int:
        """Permits held of a gate."""
        return sum(row.state is PermitState.HELD for row in self.rows(gate))

    def waiting(self, gate: str) -> int:
        """Length of the line, offers included."""
        return sum(row.state is PermitState.WAITING for row in self.rows(gate))

    def admits(self, key: str, now: Instant) -> bool:
        """What the hand-off goes by; apart from `has_room`, to tell a hand-off at fault from a full gate."""
        return self.has_room(key, now)

    def has_room(self, key: str, now: Instant) -> bool:
        """True if the gate could take one more holder now, its line aside."""
        gate = self.gates[key]
        if gate.is_blocked(now):
            return False
        occupants = [row for row in self.rows(key) if row.occupies_slot]
        if gate.limit is not None and len(occupants) >= gate.limit:
            return False
        return gate.pace is None or gate.pace.allows(now, sum(row.is_offered for row in occupants))

    def update(self, request_id: str, change: Callable[[PermitRow], PermitRow]) -> PermitRow:
        """Apply `change` to every row of a request; returns the first."""
        rows = [change(row) for row in self.of(request_id)]
        for row in rows:
            self.put(row)
        return rows[0]
