"""Port of the permit store: gates with their holders and waiters (spec/concurrency.md, spec/fleet.md section 5).

One transaction for every operation: lock the gates in sorted order; then, in later statements, read database time,
draw a ticket and read the rows; run a pure function on the book; write what it changed; commit; wake the replicas
whose waiters were offered something.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from policy_service.domain.facts import Fact
from policy_service.domain.gates import Gate, GateBook, PermitRow, PermitState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.line import earliest_expiry, needs_own_replica, next_change_at

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Locked(NamedTuple):
    """What a unit works on, its gates being locked."""

    book: GateBook
    now: Instant
    ticket: int
    """Drawn after the locks; 0 where the unit takes none."""
    request_id: str
    """Of the unit's permit; empty where there is no such permit."""
    facts: list[Fact]
    """What the unit wants recorded with its transaction; empty to begin with."""


@dataclass(frozen=True, slots=True)
class PermitUnit(Generic[T_co]):
    """One transaction over gates. `run` is pure and may run more than once."""

    run: Callable[[Locked], T_co]
    gates: tuple[Gate, ...] = ()
    """Locked with this configuration, made where missing; a configuration of an older revision is not taken over."""
    keys: tuple[str, ...] = ()
    """Locked as they are, where they exist."""
    request_ids: tuple[str, ...] = ()
    """Requests that are read wherever they stand in line, and when they have ended."""
    ended_ids: tuple[str, ...] = ()
    """Requests that are read when they have ended."""
    permit_id: str = ""
    """Lock all gates of this permit, and read its rows."""
    waiters_of: tuple[str, ...] = ()
    """Lock also the gates that the waiters of these gates need."""
    takes_ticket: bool = False
    reads_line: bool = False
    """The unit looks at everybody in line; else those far behind may be merely counted in `GateBook.waiting`."""
    revision: int = 0
    """Catalogue revision of `gates`."""


class GateCount(NamedTuple):
    """Live rows of one gate; `waiting` includes offers."""

    held: int
    waiting: int
    first_end: Instant | None = None
    """Earliest expiry of a held permit."""


class GateStatus(NamedTuple):
    """One gate as the operator sees it."""

    gate: Gate
    load: GateCount


@dataclass(frozen=True, slots=True)
class PermitCommit(Generic[T_co]):
    """A committed unit."""

    value: T_co
    at: Instant
    rows: tuple[PermitRow, ...] = ()
    """Rows that it changed."""
    counts: Mapping[str, GateCount] = field(default_factory=dict)
    """Of every locked gate, as committed."""
    next_change_at: Instant | None = None
    """When time alone changes the book next."""
    wakes: frozenset[str] = frozenset()
    """Replicas whose waiters have something to claim or to learn."""


class Due(NamedTuple):
    """What a replica's poll found."""

    requests: frozenset[str]
    """Own waiters that were offered a slot or have ended."""
    gates: frozenset[str]
    """Gates in which time has ended something."""


class PermitStore(Protocol):
    """Every method raises StoreUnavailableError when the store is away or slower than `timeout_ms`."""

    async def run(self, unit: PermitUnit[T], *, timeout_ms: DurationMs) -> PermitCommit[T]:
        """Run one unit; deadlocks, serialization failures and unknown commit results run it again."""
        ...

    async def beat(self, request_ids: Sequence[str], *, timeout_ms: DurationMs) -> int:
        """Heartbeat of the calls that wait here, all in one statement; how many were heard."""
        ...

    async def due(self, request_ids: Sequence[str], gates: Sequence[str], *, timeout_ms: DurationMs) -> Due:
        """What the waiters of this replica have to look after, without any lock."""
        ...

    async def permits_of(self, request_id: str, keys: Sequence[str], *, timeout_ms: DurationMs) -> Sequence[str]:
        """Ids of the permits of one call in exactly these gates, ended ones included; no gates: those of every call of
        the client request (`call_ids`), in any gate."""
        ...

    async def counts(self, *, timeout_ms: DurationMs) -> Mapping[str, GateCount]:
        """Gates with live rows."""
        ...

    async def list(self, prefix: str, *, timeout_ms: DurationMs) -> Sequence[GateStatus]:
        """Gates with live rows or a block, by key."""
        ...

    async def overdue(self, *, timeout_ms: DurationMs) -> Sequence[str]:
        """Gates in which time has ended something that nobody has settled."""
        ...

    async def prune(self, *, timeout_ms: DurationMs) -> int:
        """Drop rows that ended long ago and gates that nobody uses; the number of rows."""
        ...

    async def subscribe(self, wake: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        """Call `wake` when another replica handed a slot to a waiter of this one; returns the way to end it."""
        ...


def committed(value: T, locked: Locked, replica: str) -> PermitCommit[T]:
    """Commit of a unit that ran: counts, the next instant to look, and whom to wake."""
    book = locked.book
    changed = tuple(book.changed.values())
    return PermitCommit(
        value,
        locked.now,
        changed,
        {key: GateCount(book.held(key), book.waiting(key), earliest_expiry(book.rows(key))) for key in book.gates},
        next_change_at(book, locked.now),
        frozenset(_concerned(book, changed)) - {replica, ""},
    )


_TOLD = frozenset({PermitState.TIMED_OUT, PermitState.RESET, PermitState.WEDGED})
"""Ends that a waiting call must hear of."""


def _concerned(book: GateBook, changed: Sequence[PermitRow]) -> set[str]:
    told = {row.replica for row in changed if row.is_offered or row.state in _TOLD}
    if any(not row.is_live for row in changed):
        told |= {row.replica for row in needs_own_replica(book)}
    return told | _next_in_line(book)


def _next_in_line(book: GateBook) -> set[str]:
    """Replicas of the heads of lines whose gate has a new pace or block: they set their timers by it."""
    if not book.changed_gates:
        return set()
    waiting = [row for row in book.waiters() if not (row.is_offered or row.is_silent)]
    heads = (next((row for row in waiting if key in row.gates), None) for key in book.changed_gates)
    return {row.replica for row in heads if row is not None}


def taken_over(stored: Gate, configured: Gate | None, wanted: Gate) -> Gate:
    """`stored` under a new configuration: what has started and what is used up stays so.

    Args:
        configured: the configuration in force, None where there was none.
    """
    if configured == wanted:
        return stored
    pace = wanted.pace
    if pace is not None and stored.pace is not None:
        old = stored.pace
        used = 0 if old.tokens is None else max(0, old.refill_to - old.tokens)
        tokens = None if pace.tokens is None else max(0, pace.tokens - used)
        pace = type(pace)(tokens, pace.refill_to, old.refill_at, pace.window_ms, pace.gap_ms, old.last_start_at)
    return Gate(stored.key, wanted.limit, wanted.depth, stored.blocked_until, pace)
