"""What one outcome does to the breakers of its target: probe verdicts, generations, de-duplication, counting
(spec/breaker.md sections 4 to 9 and 12, spec/fleet.md section 3). Pure fold over a `StateBook`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policy_service.application.events import OutcomeEvent, ProbeRef
from policy_service.domain import breaker_burst
from policy_service.domain.breaker import (
    TRANSIENT,
    BreakerState,
    Effect,
    State,
    blocks,
    generation_effect,
    known_kind,
    split_name,
)
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.breaker_controls import load_row
from policy_service.domain.breaker_probe import (
    Evidence,
    HeldPermit,
    ProbeAnswer,
    Verdict,
    judge,
    release_permit,
)
from policy_service.domain.breaker_transitions import (
    CountedFailure,
    count_failure,
    count_success,
    enter_half_open,
    hear_failure,
)
from policy_service.domain.facts import FactLog
from policy_service.domain.guards import BREAKER_TESTS, SkipsBreaker, breaker_exclusion
from policy_service.domain.ids import Instant
from policy_service.domain.outcome import Origin, Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.state import StateBook

NETWORK_EVENT_CODE = "proxy_unreachable"
SUPPRESSED = "suppressed"
LATE = "late"
_NOT_FOR_PROBES = frozenset({"status", "health-check", "same-provider-next"})
_QUIET = frozenset({Effect.COUNTED, Effect.FRESH, Effect.IGNORED, Effect.NONE})


@dataclass(frozen=True, slots=True)
class BreakerCase:
    """One outcome as the breakers see it.

    Args:
        event: the report; `outcome` its outcome after restatement, provider canonical.
        classification: what the failure means; None for a success.
        draw: uniform in [0, 1) for the reopen jitter.
        now: time of the transaction; None: the event's own instant.
        replicas, connections: how many exist, for the quorum; None: unknown.
    """

    event: OutcomeEvent
    outcome: Outcome
    policy: ConnectionPolicy
    classification: SkipsBreaker | None = None
    draw: float = 0.0
    now: Instant | None = None
    replicas: int | None = None
    connections: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Connection parts of the breaker keys of the target: the provider's, and the connection's where it has one."""
        own = self.event.target.connection
        return ("", own) if self.policy.breaker.per_connection and own else ("",)


@dataclass(frozen=True, slots=True)
class BreakerAnswer:
    """What became of the outcome."""

    counted: bool = False
    verdict: Verdict | None = None
    exclusion: str = ""
    """First failing test of the trip filter; empty for an outcome that may count."""
    causes: tuple[str, ...] = ()
    """Why evidence was statistics only."""
    closed: bool = False
    """A probe closed a breaker of the target."""
    fresh: bool = False
    """A success was heard by a breaker that admits traffic."""


def fold_breaker(book: StateBook, case: BreakerCase, facts: FactLog) -> BreakerAnswer:
    """Steps 5 to 7 of the order of evaluation for one outcome (spec/README.md)."""
    for part in case.parts:
        book.put(enter_half_open(_row(book, case, part), case.event.at, facts))
    own, foreign = _split_probes(case)
    judged = [_judge(book, case, part, ref, facts) for part, ref in own]
    for ref in foreign if case.event.final else ():
        give_back(book, ref)
    judged_parts = {part for part, _ in own}
    unspoken = [part for part in case.parts if part not in judged_parts]
    return _merge([*judged, _count(book, case, unspoken, facts)])


def give_back(book: StateBook, ref: ProbeRef) -> bool:
    """Return a permit that brought no evidence: the slot is free at once. False where it held none."""
    row = book.get(BreakerState, *split_name(ref.breaker_key))
    freed = release_permit(row, ref.permit_id)
    book.put(freed)
    return freed != row


def target_blocked(book: StateBook, case: BreakerCase) -> bool:
    """Is any breaker of the target OPEN at the event's instant?"""
    return any(blocks(_row(book, case, part), case.event.at) for part in case.parts)


def is_network_error(outcome: Outcome) -> bool:
    """No status line came from the upstream."""
    if outcome.is_success:
        return False
    is_unreachable = outcome.code.lower() == NETWORK_EVENT_CODE
    return is_unreachable or outcome.origin is Origin.TRANSPORT or bool(outcome.network_error)


def probe_exclusion(outcome: Outcome, classification: SkipsBreaker | None) -> str:
    """First failing test of the trip filter that applies to probes (breaker.md section 8)."""
    tests = (test for test in BREAKER_TESTS if test[0] not in _NOT_FOR_PROBES)
    return next((name for name, fails in tests if fails(outcome, classification)), "")


# --- probes -------------------------------------------------------------------------------------------------
def _split_probes(case: BreakerCase) -> tuple[list[tuple[str, ProbeRef]], list[ProbeRef]]:
    """Permits of the served target by key part, and permits of other targets of the decision."""
    own: list[tuple[str, ProbeRef]] = []
    foreign: list[ProbeRef] = []
    for ref in case.event.probes:
        provider, part = split_name(ref.breaker_key)
        if provider == case.event.target.provider and part in ("", case.event.target.connection):
            own.append((part, ref))
        else:
            foreign.append(ref)
    return own, foreign


def _judge(book: StateBook, case: BreakerCase, part: str, ref: ProbeRef, facts: FactLog) -> BreakerAnswer:
    event, outcome = case.event, case.outcome
    # A call that never said when its first byte came counts by its end: the later of the two is the safe reading.
    response_at = event.at if event.first_byte_at is None else event.first_byte_at
    exclusion = probe_exclusion(outcome, case.classification)
    answer = ProbeAnswer(outcome.status, exclusion, is_network_error(outcome), response_at)
    before = _row(book, case, part)
    held = HeldPermit(ref.permit_id, ref.generation, ref.local)
    evidence = Evidence(event.at, _kind(outcome), case.draw)
    after, verdict, effect = judge(before, held, answer, evidence, case.policy.breaker, facts)
    book.put(after)
    closed = after.state is State.CLOSED and before.state is not State.CLOSED
    if closed:
        _end_burst(book, event)
    return BreakerAnswer(
        effect is Effect.COUNTED and verdict is not Verdict.INCONCLUSIVE,
        verdict if effect is Effect.COUNTED else None,
        exclusion,
        _causes(effect),
        closed,
    )


# --- calls without a permit -----------------------------------------------------------------------------------
def _count(book: StateBook, case: BreakerCase, parts: list[str], facts: FactLog) -> BreakerAnswer:
    if case.outcome.is_success:
        return _merge([_success(book, case, part, facts) for part in parts])
    exclusion = breaker_exclusion(case.outcome, case.classification)
    part = _failing_part(case)
    if exclusion or part not in parts:
        return BreakerAnswer(exclusion=exclusion)
    return _failure(book, case, part, facts)


def _failing_part(case: BreakerCase) -> str:
    """Which key a failure counts on: network errors are the provider's, the rest the connection's own."""
    return "" if is_network_error(case.outcome) else case.parts[-1]


def _success(book: StateBook, case: BreakerCase, part: str, facts: FactLog) -> BreakerAnswer:
    event, row = case.event, _row(book, case, part)
    effect = _generation_effect(case, row, part)
    if effect is Effect.NONE:
        after, effect = count_success(row, event.at, event.response_at, case.policy.breaker, facts)
        book.put(after)
    heard = effect in (Effect.COUNTED, Effect.FRESH)
    if heard:
        _end_burst(book, event)
    return BreakerAnswer(effect is Effect.COUNTED, causes=_causes(effect), fresh=heard)


def _failure(book: StateBook, case: BreakerCase, part: str, facts: FactLog) -> BreakerAnswer:
    row = _row(book, case, part)
    effect = Effect.OVERRIDDEN if row.override else _generation_effect(case, row, part)
    if effect is not Effect.NONE:
        return BreakerAnswer(causes=_causes(effect))
    guards = _burst_guards(book, case)
    if any(breaker_burst.suppresses(guard, case.event.at) for guard in guards):
        book.put(hear_failure(row, case.event.at))
        return BreakerAnswer(causes=(SUPPRESSED,))
    for guard in guards:
        book.put(breaker_burst.accept(guard, case.event.at))
    after, effect = count_failure(row, _counted(case, part), case.policy.breaker, facts)
    book.put(after)
    is_late = effect is Effect.COUNTED and row.last_event_at is not None and case.event.at < row.last_event_at
    return BreakerAnswer(effect is Effect.COUNTED, causes=(LATE,) if is_late else ())


def _counted(case: BreakerCase, part: str) -> CountedFailure:
    return CountedFailure(
        at=case.event.at,
        kind=_kind(case.outcome),
        replica=case.event.replica,
        connection=case.event.target.connection,
        draw=case.draw,
        now=case.now,
        replicas=case.replicas,
        connections=1 if part else case.connections,
    )


def _generation_effect(case: BreakerCase, row: BreakerState, part: str) -> Effect:
    """Generation rule of one key. A token carries the provider key's number; the connection's own key goes by the
    start of the attempt, whose generation the decision saw."""
    given = case.event.generations
    if given is None:
        return generation_effect(row, None, case.event.at)
    return generation_effect(row, None if part else given.breaker, case.event.started_at)


def _kind(outcome: Outcome) -> str:
    return known_kind(outcome.failure_kind or TRANSIENT)


# --- de-duplication -------------------------------------------------------------------------------------------
def _burst_guards(book: StateBook, case: BreakerCase) -> list[BurstState]:
    """Guards of one counted failure, the network event's first."""
    provider, connection, _ = case.event.target
    parts = [""] if case.outcome.code.lower() == NETWORK_EVENT_CODE else []
    return [book.get(BurstState, provider, part) for part in (*parts, *filter(None, [connection]))]


def _end_burst(book: StateBook, event: OutcomeEvent) -> None:
    if event.target.connection:
        guard = book.get(BurstState, event.target.provider, event.target.connection)
        book.put(breaker_burst.clear(guard, event.response_at))


# --- shared ---------------------------------------------------------------------------------------------------
def _row(book: StateBook, case: BreakerCase, part: str) -> BreakerState:
    return load_row(book.get(BreakerState, case.event.target.provider, part), case.policy.breaker)


def _causes(effect: Effect) -> tuple[str, ...]:
    return () if effect in _QUIET else (str(effect),)


def _merge(answers: Iterable[BreakerAnswer]) -> BreakerAnswer:
    """One answer for all keys: counted where any counted, the first verdict and exclusion, every cause once."""
    listed = list(answers)
    if len(listed) == 1:
        return listed[0]
    return BreakerAnswer(
        any(answer.counted for answer in listed),
        next((answer.verdict for answer in listed if answer.verdict), None),
        next((answer.exclusion for answer in listed if answer.exclusion), ""),
        tuple(dict.fromkeys(cause for answer in listed for cause in answer.causes)),
        any(answer.closed for answer in listed),
        any(answer.fresh for answer in listed),
    )
