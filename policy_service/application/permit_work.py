"""The pure halves of the permit operations: what each does on locked gates, and what it tells.

Every operation ends by taking the offers that went to calls waiting in this very replica: nobody has to be woken for
them (spec/fleet.md section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from policy_service.application.messages import PermitGrant, PermitKind, PermitRef
from policy_service.application.ports_permits import Locked
from policy_service.domain import line
from policy_service.domain.gates import Gate, GateBook, PermitRow, PermitState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.permits import HTTP_STATUS as PERMIT_STATUS
from policy_service.domain.permits import PermitCode, bounded_seconds, ended_refusal, refusal
from policy_service.domain.permits import retry_after_s as slot_after_s
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import FLEET_GATE as QUEUE_FLEET_GATE
from policy_service.domain.queue_admission import HTTP_STATUS as QUEUE_STATUS
from policy_service.domain.queue_admission import (
    QueueCode,
    Submission,
    admit,
    end_code,
    execution_limit_ms,
    recover_wedge,
)
from policy_service.domain.queue_admission import retry_after_s as start_after_s
from policy_service.domain.queue_learning import RateEvidence, learn, without_stale

QUEUE_TIMEOUT_MS: DurationMs = 30_000
SATURATED = "concurrency_saturated"
QUEUE_SATURATED = "queue_saturated"
STORE_LOST = "store_unavailable"


@dataclass(frozen=True, slots=True)
class Passage:
    """The gates that one dispatch passes together; empty: none."""

    gates: tuple[Gate, ...] = ()
    """Sorted by key, each key once."""
    limiter: str = ""
    """Key of the queue limiter among them; empty: the dispatch is not paced."""
    profile: QueueProfile | None = None
    """Of the limiter."""
    timeout_ms: DurationMs = QUEUE_TIMEOUT_MS
    """Longest wait where the caller names none."""
    revision: int = 0
    """Catalogue revision that the gates come from."""
    start_gate: Gate | None = None
    """Start slots of the provider, waited for before the limiter (queue_admission.md section 3, step 4)."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the gates."""
        return tuple(gate.key for gate in self.gates)

    def kind_of(self, key: str) -> PermitKind:
        """What a permit of the gate is for."""
        return PermitKind.QUEUE if key in (self.limiter, QUEUE_FLEET_GATE) else PermitKind.CONCURRENCY


@dataclass(frozen=True, slots=True)
class PermitAsk:
    """One request for a permit in every gate of a passage."""

    passage: Passage
    request_id: str
    timeout_ms: DurationMs | None = None
    """Longest wait; None: that of the passage; 0 or less: take it now or not at all."""
    ttl_ms: DurationMs = 120_000
    start_timeout_ms: DurationMs | None = None
    store_ms: DurationMs = 2_000
    """Longest time for one transaction."""

    @property
    def budget_ms(self) -> DurationMs:
        """The wait in force."""
        return self.passage.timeout_ms if self.timeout_ms is None else self.timeout_ms


@dataclass(frozen=True, slots=True)
class PermitRefusal:
    """Why no permit was given: an answer, which no mechanism counts against the upstream."""

    code: str
    http_status: int
    gate: str = ""
    depth: int = 0
    retry_after_s: int | None = None
    reason: str = SATURATED


@dataclass(frozen=True, slots=True)
class PermitOutcome:
    """What became of an ask: held (`row`), refused, or ended before."""

    passage: Passage
    row: PermitRow | None = None
    refusal: PermitRefusal | None = None
    ended: PermitState | None = None
    """A permit of this request id has ended before, with this state."""
    at: Instant = 0
    """Database time of the grant or refusal."""
    waited_ms: DurationMs = 0

    @property
    def is_held(self) -> bool:
        """The permit is held."""
        return self.row is not None and self.row.state is PermitState.HELD

    @property
    def is_waiting(self) -> bool:
        """A place in line."""
        return self.row is not None and self.row.state is PermitState.WAITING

    @property
    def grants(self) -> tuple[PermitGrant, ...]:
        """One grant a gate, all with the id of the permit."""
        row = self.row
        if row is None or not self.is_held:
            return ()
        return tuple(
            PermitGrant(row.permit_id, self.passage.kind_of(key), key, row.expires_at or self.at, row.max_held_ms)
            for key in row.gates
        )


@dataclass(frozen=True, slots=True)
class PermitChange:
    """Result of a renewal, release or cancel of one permit."""

    permit_id: str
    state: PermitState | None
    """None: there is no such permit."""
    expires_at: Instant | None = None
    code: str = ""
    already_ended: bool = False


_FOREIGN = ("early:", "pool:")
"""Gates of early-probe and panic permits, which travel in tokens too but are not of the permit store."""


def ids_of(refs: Iterable[PermitRef]) -> tuple[str, ...]:
    """Permits of the permit store among those of a decision, each once."""
    return tuple(dict.fromkeys(ref.permit_id for ref in refs if not ref.gate.startswith(_FOREIGN)))


def store_lost(ask: PermitAsk) -> PermitOutcome:
    """The store is away: strict gates refuse."""
    code = PermitCode.STORE_UNAVAILABLE
    gate = ask.passage.gates[0].key if ask.passage.gates else ""
    return PermitOutcome(ask.passage, refusal=PermitRefusal(code, PERMIT_STATUS[code], gate, reason=STORE_LOST))


def known_full(passage: Passage, gate: str, waiting: int, wait_ms: DurationMs | None) -> PermitRefusal:
    """What a caller that does not wait is told without asking: the gate is known to be full."""
    retry_after_s = None if wait_ms is None else bounded_seconds(wait_ms)
    if passage.limiter:
        code = QueueCode.QUEUE_TIMEOUT
        return PermitRefusal(code, QUEUE_STATUS[code], gate, waiting, retry_after_s, QUEUE_SATURATED)
    return PermitRefusal(PermitCode.TIMEOUT, PERMIT_STATUS[PermitCode.TIMEOUT], gate, waiting, retry_after_s)


def acquire(ask: PermitAsk, permit_id: str, replica: str, local: Collection[str]) -> Callable[[Locked], PermitOutcome]:
    """Take a permit or a place in line."""

    def run(locked: Locked) -> PermitOutcome:
        admitted = _admit if ask.passage.limiter else _acquire
        outcome = admitted(locked, ask, permit_id, replica)
        claim_local(locked.book, replica, locked.now, local)
        return outcome

    return run


def _acquire(locked: Locked, ask: PermitAsk, permit_id: str, replica: str) -> PermitOutcome:
    request = line.PermitRequest(
        ask.request_id, permit_id, ask.passage.keys, locked.ticket, ask.ttl_ms, ask.budget_ms, replica
    )
    found = line.acquire(locked.book, request, locked.now)
    if found.answer is line.Answer.ALREADY_ENDED and found.row is not None:
        return PermitOutcome(ask.passage, ended=found.row.state, at=locked.now)
    refused = refusal(found, locked.book, locked.now)
    if refused is None:
        return PermitOutcome(ask.passage, found.row, at=locked.now)
    gate = found.gate or _full_gate(locked, ask.passage)
    told = PermitRefusal(
        refused.code,
        refused.http_status,
        gate,
        locked.book.waiting(gate),
        slot_after_s(locked.book, gate, locked.now),
        refused.reason,
    )
    return PermitOutcome(ask.passage, refusal=told, at=locked.now)


def _full_gate(locked: Locked, passage: Passage) -> str:
    """The gate that kept the request out: one without room, else one with a line."""
    book = locked.book
    full = (key for key in passage.keys if not book.has_room(key, locked.now))
    return next(full, next((key for key in passage.keys if book.waiting(key)), passage.keys[0]))


def _admit(locked: Locked, ask: PermitAsk, permit_id: str, replica: str) -> PermitOutcome:
    _forget_stale(locked, ask.passage)
    if ask.budget_ms <= 0:
        return _admit_now(locked, ask, permit_id, replica)
    profile, key = ask.passage.profile or QueueProfile(), ask.passage.limiter
    submission = Submission(
        ask.request_id,
        permit_id,
        locked.ticket,
        replica,
        remaining_budget_ms=ask.timeout_ms,
        start_timeout_ms=ask.start_timeout_ms,
        ttl_ms=_ttl_ms(ask),
    )
    book = locked.book
    found = admit(book, key, profile, submission, locked.now)
    if found.code is None:
        return PermitOutcome(ask.passage, found.row, at=locked.now)
    return _not_admitted(locked, ask, found.code)


def _forget_stale(locked: Locked, passage: Passage) -> None:
    gate = locked.book.gates[passage.limiter]
    if gate.pace is not None and passage.profile is not None:
        pace = without_stale(gate.pace, passage.profile, locked.now)
        if pace is not gate.pace:
            locked.book.put_gate(replace(gate, pace=pace))


def _admit_now(locked: Locked, ask: PermitAsk, permit_id: str, replica: str) -> PermitOutcome:
    """For a caller that does not stand in line: a start slot that is free now, or nothing."""
    limit = held_longest_ms(ask.passage.profile or QueueProfile(), ask.start_timeout_ms)
    request = line.PermitRequest(
        ask.request_id, permit_id, ask.passage.keys, locked.ticket, _ttl_ms(ask) or limit, 0, replica, limit
    )
    found = line.acquire(locked.book, request, locked.now)
    if found.answer in (line.Answer.HELD, line.Answer.WAITING):
        return PermitOutcome(ask.passage, found.row, at=locked.now)
    return _not_admitted(locked, ask, QueueCode.QUEUE_TIMEOUT)


def _ttl_ms(ask: PermitAsk) -> DurationMs | None:
    """A permit that also holds a concurrency gate is renewed; a mere queue ticket lives for its execution limit."""
    kinds = {ask.passage.kind_of(key) for key in ask.passage.keys}
    return ask.ttl_ms if PermitKind.CONCURRENCY in kinds else None


def _not_admitted(locked: Locked, ask: PermitAsk, code: QueueCode) -> PermitOutcome:
    book, key, now = locked.book, ask.passage.limiter, locked.now
    if (known := book.of(ask.request_id)) and not known[0].is_live and not line.is_forgotten(known[0], now):
        return PermitOutcome(ask.passage, ended=known[0].state, at=now)
    retry_after_s = start_after_s(book.gates[key], now)
    told = PermitRefusal(code, QUEUE_STATUS[code], key, book.waiting(key), retry_after_s, QUEUE_SATURATED)
    return PermitOutcome(ask.passage, refusal=told, at=now)


def ended(passage: Passage, row: PermitRow, book: GateBook, now: Instant) -> PermitRefusal:
    """What a call is told whose ticket ended while it waited."""
    if passage.limiter:
        queue_code = end_code(row)
        if queue_code is not None:
            retry = start_after_s(book.gates[passage.limiter], now) if passage.limiter in book.gates else None
            return PermitRefusal(queue_code, QUEUE_STATUS[queue_code], passage.limiter, 0, retry, QUEUE_SATURATED)
    told = ended_refusal(row.state, book, row.gate, now)
    if told is None:
        return PermitRefusal(PermitCode.CANCELLED, PERMIT_STATUS[PermitCode.CANCELLED], row.gate, reason="cancelled")
    return PermitRefusal(told.code, told.http_status, row.gate, told.depth, told.retry_after_s, told.reason)


@dataclass(frozen=True, slots=True)
class Tended:
    """Own waiters of a set of gates as they stand, with what those are told whose ticket has ended."""

    rows: tuple[PermitRow, ...]
    refusals: dict[str, PermitRefusal]


def tend(passage: Passage, request_ids: Collection[str], replica: str) -> Callable[[Locked], Tended]:
    """Settle the gates, take the offers of the calls that wait here, and see how each stands."""

    def run(locked: Locked) -> Tended:
        book, now = locked.book, locked.now
        line.settle(book, now)
        if passage.profile is not None and passage.limiter in book.gates:
            recover_wedge(book, passage.limiter, passage.profile, now)
        claim_local(book, replica, now, request_ids)
        rows = tuple(found[0] for request_id in request_ids if (found := book.of(request_id)))
        gone = {row.request_id: ended(passage, row, book, now) for row in rows if not row.is_live}
        return Tended(rows, gone)

    return run


def settle(replica: str, local: Collection[str]) -> Callable[[Locked], int]:
    """Settle gates that nobody looks after; the number of rows that changed."""

    def run(locked: Locked) -> int:
        line.settle(locked.book, locked.now)
        claim_local(locked.book, replica, locked.now, local)
        return len(locked.book.changed)

    return run


def claim_local(book: GateBook, replica: str, now: Instant, local: Collection[str]) -> None:
    """Take every offer that went to a call waiting here."""
    for row in book.waiters():
        if row.is_offered and row.request_id in local and book.gates.keys() >= set(row.gates):
            line.claim(book, row.request_id, replica, now)


def renew(permit_id: str, ttl_ms: DurationMs | None) -> Callable[[Locked], PermitChange]:
    """Extend one permit; one that lapsed stays ended."""

    def run(locked: Locked) -> PermitChange:
        found = line.renew(locked.book, locked.request_id, locked.now, ttl_ms)
        row = found.row
        if row is None:
            return PermitChange(permit_id, None, code=PermitCode.EXPIRED)
        if found.answer is line.Answer.RENEWED:
            return PermitChange(permit_id, row.state, row.expires_at)
        is_spent = end_code(row) is QueueCode.EXECUTION_TIMEOUT
        code = QueueCode.EXECUTION_TIMEOUT if is_spent else PermitCode.EXPIRED
        return PermitChange(permit_id, row.state, code=code, already_ended=not row.is_live)

    return run


def release(permit_id: str, replica: str, local: Collection[str]) -> Callable[[Locked], PermitChange]:
    """End one permit, held or in line, and hand its slots on."""

    def run(locked: Locked) -> PermitChange:
        found = line.release(locked.book, locked.request_id, locked.now)
        claim_local(locked.book, replica, locked.now, local)
        if found.row is None:
            return PermitChange(permit_id, None, already_ended=True)
        return PermitChange(permit_id, found.row.state, already_ended=found.answer is line.Answer.ALREADY_ENDED)

    return run


def learned(
    key: str, profile: QueueProfile, evidence: RateEvidence, replica: str, local: Collection[str]
) -> Callable[[Locked], bool]:
    """Change the pace of a limiter by what an answer said; True where that changes anything."""

    def run(locked: Locked) -> bool:
        book, now = locked.book, locked.now
        gate = book.gates.get(key)
        if gate is None or gate.pace is None:
            return False
        pace = learn(gate.pace, profile, evidence, now, profile.max_wait_ms)
        if pace == gate.pace:
            return False
        book.put_gate(replace(gate, pace=pace))
        line.settle(book, now)
        claim_local(book, replica, now, local)
        return True

    return run


def held_longest_ms(profile: QueueProfile, start_timeout_ms: DurationMs | None) -> DurationMs:
    """Execution limit of a paced dispatch."""
    return execution_limit_ms(profile.execution_max_wait_ms, start_timeout_ms)
