"""The line at a set of locked gates: acquire, hand-off, claim, renew, release (spec/concurrency.md 2, fleet.md 5).

Every operation works on a `GateBook`, settles it first, and leaves its writes there; `now` is database time read
after the locks. Nothing here knows what a gate protects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from policy_service.domain.gates import (
    GRANT_AT_ONCE,
    KEEP_ENDED_MS,
    WAITER_LOST_MS,
    Gate,
    GateBook,
    Pace,
    PermitRow,
    PermitState,
)
from policy_service.domain.ids import DurationMs, Instant


@dataclass(frozen=True, slots=True)
class PermitRequest:
    """What an acquire asks for. `ticket` is drawn from the fleet-wide sequence after the gates are locked."""

    request_id: str
    permit_id: str
    gates: tuple[str, ...]
    ticket: int
    ttl_ms: DurationMs = 120_000
    timeout_ms: DurationMs | None = 30_000
    """Longest wait; None: unbounded; 0 or less: never waits."""
    replica: str = ""
    max_held_ms: DurationMs | None = None


class Answer(StrEnum):
    """What an operation found."""

    HELD = "HELD"
    WAITING = "WAITING"
    QUEUE_FULL = "QUEUE_FULL"
    TIMEOUT = "TIMEOUT"
    """Nothing free and the caller does not wait."""
    RENEWED = "RENEWED"
    EXPIRED = "EXPIRED"
    """Renewal of something that is not held any more."""
    RELEASED = "released"
    CANCELLED = "cancelled"
    ALREADY_ENDED = "already_ended"
    UNKNOWN = "unknown"
    """No such row."""


@dataclass(frozen=True, slots=True)
class PermitAnswer:
    """Result of one operation on the book. `row` is a row of the request, where one exists."""

    answer: Answer
    row: PermitRow | None = None
    gate: str = ""
    """The gate whose line is full."""


def settle(book: GateBook, now: Instant) -> list[PermitRow]:
    """First step of every operation: end what time has ended, then give free slots to the line.

    Returns a row of each waiting request that got an offer (or, with GRANT_AT_ONCE, its grant), in ticket order.
    """
    for row in book.rows():
        changed = _settled(row, now)
        if changed is not row:
            book.put(changed)
    _carry_ends(book)
    return hand_off(book, now)


def hand_off(book: GateBook, now: Instant) -> list[PermitRow]:
    """Offer free slots to the head of each line in ticket order. Nobody overtakes, unclaimed offers excepted.

    A request that needs a gate which is not locked here keeps its place; its own replica offers to itself
    (fleet.md section 5), see `needs_own_replica`.
    """
    return [_serve(book, row, now) for row in _line(book, now)]


def needs_own_replica(book: GateBook) -> list[PermitRow]:
    """Waiting requests that need gates which are not locked here; to be woken after a hand-off."""
    waiting = (row for row in book.waiters() if not row.is_offered)
    return [row for row in waiting if not set(row.gates) <= book.gates.keys()]


def acquire(book: GateBook, request: PermitRequest, now: Instant) -> PermitAnswer:
    """Take a permit in every gate of the request, or a place in their lines (concurrency.md 2.2 and 5).

    Idempotent by request id: a live row is returned (a waiting one is thereby heard of), an ended one answers
    ALREADY_ENDED. QUEUE_FULL and TIMEOUT insert nothing, so that a repetition is decided anew.
    """
    settle(book, now)
    if known := [row for row in book.of(request.request_id) if not is_forgotten(row, now)]:
        return _again(book, known[0], request.replica, now)
    if _goes_straight_in(book, request, now):
        _insert(book, request, PermitState.HELD, now)
        return PermitAnswer(Answer.HELD, _hold(book, request.request_id, now))
    full = next((key for key in request.gates if _is_full(book, key)), None)
    if full is not None:
        return PermitAnswer(Answer.QUEUE_FULL, gate=full)
    if request.timeout_ms is not None and request.timeout_ms <= 0:
        return PermitAnswer(Answer.TIMEOUT)
    return PermitAnswer(Answer.WAITING, _insert(book, request, PermitState.WAITING, now))


def claim(book: GateBook, request_id: str, replica: str, now: Instant) -> PermitAnswer:
    """The waiter's replica takes the offered slot; the TTL starts here. Also its heartbeat and its poll."""
    settle(book, now)
    rows = book.of(request_id)
    return _again(book, rows[0], replica, now) if rows else PermitAnswer(Answer.UNKNOWN)


def renew(book: GateBook, request_id: str, now: Instant, ttl_ms: DurationMs | None = None) -> PermitAnswer:
    """HELD and not lapsed: expires at now + TTL (within its longest life). An ended permit stays ended."""
    settle(book, now)
    rows = book.of(request_id)
    if not rows:
        return PermitAnswer(Answer.UNKNOWN)
    if rows[0].state is not PermitState.HELD:
        return PermitAnswer(Answer.EXPIRED, rows[0])
    ttl = rows[0].ttl_ms if ttl_ms is None else ttl_ms
    return PermitAnswer(Answer.RENEWED, book.update(request_id, lambda row: _extended(row, now, ttl)))


def release(book: GateBook, request_id: str, now: Instant) -> PermitAnswer:
    """Give the slots of all gates back and hand them on; exactly once, a repetition answers ALREADY_ENDED.

    A waiting request is withdrawn (final reports release whatever a decision has).
    """
    settle(book, now)
    return _end(book, request_id, now)


def cancel(book: GateBook, request_id: str, now: Instant) -> PermitAnswer:
    """Leave the line. A grant that raced the cancel is released."""
    return release(book, request_id, now)


def reset(book: GateBook, key: str, now: Instant, state: PermitState = PermitState.RESET) -> list[PermitRow]:
    """End every waiting ticket of a gate with `state`; held permits stay. Returns the rows ended in that gate."""
    settle(book, now)
    waiting = [row for row in book.rows(key) if row.state is PermitState.WAITING]
    for row in waiting:
        book.update(row.request_id, lambda each: _ended(each, state, now))
    return waiting


def block(book: GateBook, key: str, until: Instant, now: Instant) -> bool:
    """Admit nobody before `until`; held permits stay. False (and nothing written) when `until` is past."""
    if until <= now:
        return False
    book.put_gate(replace(book.gates[key], blocked_until=until))
    return True


def heartbeat(book: GateBook, request_id: str, replica: str, now: Instant) -> None:
    """A waiter is alive; also brings one back that missed an offer."""
    book.update(request_id, lambda row: replace(row, waiter_seen_at=now, replica=replica))


def is_forgotten(row: PermitRow, now: Instant) -> bool:
    """An ended row that no repetition will ask about any more."""
    return row.ended_at is not None and now - row.ended_at >= KEEP_ENDED_MS


def next_change_at(book: GateBook, now: Instant) -> Instant | None:
    """Earliest instant after `now` at which time alone changes the book: when to settle next at the latest."""
    instants = [at for row in book.rows() for at in _row_deadlines(row)]
    instants += [at for gate in book.gates.values() for at in _gate_deadlines(gate)]
    return min((at for at in instants if at > now), default=None)


def earliest_expiry(rows: Iterable[PermitRow]) -> Instant | None:
    """When the first of the held permits lapses, unless it is renewed."""
    return min((row.expires_at for row in rows if row.state is PermitState.HELD and row.expires_at), default=None)


# --- transitions of one row ------------------------------------------------------------------------------


def _settled(row: PermitRow, now: Instant) -> PermitRow:
    if row.state is PermitState.HELD:
        return _ended(row, PermitState.EXPIRED, now) if _past(row.expires_at, now) else row
    if row.state is not PermitState.WAITING:
        return row
    if _past(row.deadline_at, now):
        return _ended(row, PermitState.TIMED_OUT, now)
    if row.waiter_seen_at is not None and row.waiter_seen_at + WAITER_LOST_MS <= now:
        return _ended(row, PermitState.WAITER_LOST, now)
    if _past(row.offered_until, now):
        return replace(row, offered_until=None, missed_at=row.offered_until, granted_at=None)
    return row


def _past(deadline: Instant | None, now: Instant) -> bool:
    return deadline is not None and deadline <= now


def _ended(row: PermitRow, state: PermitState, now: Instant) -> PermitRow:
    return replace(row, state=state, ended_at=now, offered_until=None)


def _extended(row: PermitRow, now: Instant, ttl_ms: DurationMs) -> PermitRow:
    expires_at = now + ttl_ms
    if row.max_held_ms is not None and row.held_at is not None:
        expires_at = min(expires_at, row.held_at + row.max_held_ms)
    return replace(row, expires_at=expires_at)


def _granted(row: PermitRow, now: Instant) -> PermitRow:
    granted_at = now if row.granted_at is None else row.granted_at
    held = replace(row, state=PermitState.HELD, granted_at=granted_at, held_at=now, offered_until=None, missed_at=None)
    return _extended(held, now, row.ttl_ms)


def _offered(row: PermitRow, now: Instant, offer_ms: DurationMs) -> PermitRow:
    return replace(row, granted_at=now, offered_until=now + offer_ms)


def _row_deadlines(row: PermitRow) -> Iterator[Instant]:
    if row.state is PermitState.HELD and row.expires_at is not None:
        yield row.expires_at
    elif row.state is PermitState.WAITING:
        yield from (at for at in (row.deadline_at, row.offered_until) if at is not None)
        if row.waiter_seen_at is not None:
            yield row.waiter_seen_at + WAITER_LOST_MS


def _gate_deadlines(gate: Gate) -> Iterator[Instant]:
    pace = gate.pace or Pace()
    yield from (at for at in (gate.blocked_until, pace.refill_at, pace.gap_ends_at) if at is not None)


def _carry_ends(book: GateBook) -> None:
    """A request that was ended in one gate (a reset) while others were not locked is ended in all of them."""
    ends = {row.request_id: row for row in book.rows() if not row.is_live}
    for row in book.rows():
        end = ends.get(row.request_id)
        if end is not None and row.is_live and end.permit_id == row.permit_id:
            book.put(replace(row, state=end.state, ended_at=end.ended_at, offered_until=None))


# --- the line --------------------------------------------------------------------------------------------


def _line(book: GateBook, now: Instant) -> Iterator[PermitRow]:
    """Waiting requests that may be served now. Consumed lazily: each is served before the next is looked at."""
    closed: set[str] = set()
    for row in book.waiters():
        if row.is_offered or row.is_silent:
            continue
        if closed.isdisjoint(row.gates) and _is_ready(book, row.gates, now):
            yield row
        else:
            closed.update(row.gates)
            if closed >= book.gates.keys():
                return


def _is_ready(book: GateBook, keys: Iterable[str], now: Instant) -> bool:
    return all(key in book.gates and book.admits(key, now) for key in keys)


def _serve(book: GateBook, row: PermitRow, now: Instant) -> PermitRow:
    if book.offer_ms == GRANT_AT_ONCE:
        return _hold(book, row.request_id, now)
    return book.update(row.request_id, lambda each: _offered(each, now, book.offer_ms))


def _hold(book: GateBook, request_id: str, now: Instant) -> PermitRow:
    first = book.update(request_id, lambda row: _granted(row, now))
    for key in first.gates:
        gate = book.gates[key]
        if gate.pace is not None:
            book.put_gate(replace(gate, pace=gate.pace.started(now)))
    return first


def _goes_straight_in(book: GateBook, request: PermitRequest, now: Instant) -> bool:
    """Free slots and nobody ahead in any line."""
    asked = set(request.gates)
    ahead = (row for row in book.waiters() if not (row.is_silent or row.is_offered))
    return not any(asked & set(row.gates) for row in ahead) and _is_ready(book, request.gates, now)


def _is_full(book: GateBook, key: str) -> bool:
    depth = book.gates[key].depth
    return depth > 0 and book.waiting(key) >= depth


def _insert(book: GateBook, request: PermitRequest, state: PermitState, now: Instant) -> PermitRow:
    row = PermitRow(
        permit_id=request.permit_id,
        request_id=request.request_id,
        gate=request.gates[0],
        gates=request.gates,
        ticket=request.ticket,
        state=state,
        queued_at=now,
        ttl_ms=request.ttl_ms,
        replica=request.replica,
        deadline_at=None if request.timeout_ms is None else now + request.timeout_ms,
        waiter_seen_at=now,
        max_held_ms=request.max_held_ms,
    )
    for key in request.gates:
        book.put(replace(row, gate=key))
    return row


def _again(book: GateBook, row: PermitRow, replica: str, now: Instant) -> PermitAnswer:
    """The request is known: what became of it, an open offer taken on the way."""
    if row.state is PermitState.HELD:
        return PermitAnswer(Answer.HELD, row)
    if row.state is not PermitState.WAITING:
        return PermitAnswer(Answer.ALREADY_ENDED, row)
    heartbeat(book, row.request_id, replica, now)
    hand_off(book, now)
    present = book.of(row.request_id)[0]
    if present.is_offered:
        present = _hold(book, row.request_id, now)
    return PermitAnswer(Answer(present.state.value), present)


def _end(book: GateBook, request_id: str, now: Instant) -> PermitAnswer:
    rows = book.of(request_id)
    if not rows:
        return PermitAnswer(Answer.UNKNOWN)
    if not rows[0].is_live:
        return PermitAnswer(Answer.ALREADY_ENDED, rows[0])
    was_held = rows[0].state is PermitState.HELD
    state = PermitState.RELEASED if was_held else PermitState.CANCELLED
    row = book.update(request_id, lambda each: _ended(each, state, now))
    hand_off(book, now)
    return PermitAnswer(Answer.RELEASED if was_held else Answer.CANCELLED, row)
