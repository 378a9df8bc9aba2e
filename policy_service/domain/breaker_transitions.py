"""Transitions of the circuit breaker: counting, opening, degrading, closing, and what time does (spec/breaker.md
sections 6, 7, 9 and the quorum and slow start of section 12). Pure; used by the outcome and admin folds only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from policy_service.domain.breaker import (
    KIND_FIELDS,
    MECHANISM,
    TRANSIENT,
    BreakerState,
    Effect,
    ReplicaOpen,
    State,
    in_ramp,
    is_due,
    kind_count,
    known_kind,
    latest,
    open_ms,
    replica_open_until,
)
from policy_service.domain.facts import FactLog
from policy_service.domain.ids import Instant
from policy_service.domain.profiles import BreakerProfile


@dataclass(frozen=True, slots=True)
class CountedFailure:
    """A failure that passed the trip filter and the de-duplication.

    Args:
        at: instant of the event.
        kind: `rate_limit`, `quota_exhausted` or `transient`.
        replica, connection: reporters, the evidence of the quorum.
        draw: uniform in [0, 1), used for the reopen jitter only.
        now: time of the transaction; None: the event's own instant.
        replicas, connections: how many exist (quorum numbers are lowered to them); None: unknown.
    """

    at: Instant
    kind: str = TRANSIENT
    replica: str = ""
    connection: str = ""
    draw: float = 0.0
    now: Instant | None = None
    replicas: int | None = None
    connections: int | None = None


def enter_half_open(state: BreakerState, now: Instant, facts: FactLog) -> BreakerState:
    """Store what time has done: OPEN whose time is over becomes HALF_OPEN (generation + 1, older permits void)."""
    if state.override or not is_due(state, now):
        return state
    return transition(
        state,
        State.HALF_OPEN,
        now,
        facts,
        "reset_timeout_elapsed",
        half_open_round=state.generation + 1,
        half_open_alive=0,
        permits=(),
        reopen_at=None,
    )


def count_failure(
    state: BreakerState, failure: CountedFailure, profile: BreakerProfile, facts: FactLog
) -> tuple[BreakerState, Effect]:
    """A counted failure without a permit (breaker.md section 6). The generation has been checked by the caller."""
    state = enter_half_open(state, failure.at, facts)
    if state.override:
        return state, Effect.OVERRIDDEN
    if state.state in (State.OPEN, State.HALF_OPEN):
        return state, Effect.IGNORED
    counted = _add_failure(state, failure, profile)
    return _after_failure(counted, state.last_event_at, failure, profile, facts), Effect.COUNTED


def count_success(
    state: BreakerState, at: Instant, response_at: Instant, profile: BreakerProfile, facts: FactLog
) -> tuple[BreakerState, Effect]:
    """A success without a permit (breaker.md section 6).

    Args:
        response_at: first response byte; what came before the newest failure is stale (fleet.md section 3).
    """
    state = enter_half_open(state, at, facts)
    if state.override:
        return state, Effect.OVERRIDDEN
    if state.state in (State.OPEN, State.HALF_OPEN):
        return state, Effect.IGNORED
    if any(at is not None and response_at < at for at in (state.last_failure_at, state.failure_heard_at)):
        return state, Effect.STALE_SUCCESS
    if not state.failure_count and not any(kind_count(state, kind) for kind in KIND_FIELDS):
        return state, Effect.FRESH
    return _subtract(state, at, profile, facts), Effect.COUNTED


def hear_failure(state: BreakerState, at: Instant) -> BreakerState:
    """A failure of a burst that counted already: no count, no time of the de-duplication, but newer than any success
    that began before it. A breaker that admits nothing ignores it (breaker.md section 6)."""
    is_known = at <= max(state.last_failure_at or 0, state.failure_heard_at or 0)
    return state if is_known or state.state in (State.OPEN, State.HALF_OPEN) else replace(state, failure_heard_at=at)


def close(state: BreakerState, at: Instant, profile: BreakerProfile, facts: FactLog, reason: str) -> BreakerState:
    """HALF_OPEN to CLOSED: every counter empty, generation + 1; begins the slow-start ramp where that is on."""
    ramp = {"closed_at": at, "ramp_cycles": state.open_cycle_count} if profile.slow_start_enabled else {}
    return transition(state, State.CLOSED, at, facts, reason, **{**CLEARED, **ramp})


def trip(
    state: BreakerState,
    at: Instant,
    cycles: int,
    profile: BreakerProfile,
    facts: FactLog,
    *,
    reason: str,
    draw: float = 0.0,
) -> BreakerState:
    """To OPEN; `reopen_at` is fixed here and never moves (breaker.md section 7)."""
    reopen_at = _reopen_at(state, at, cycles, profile, draw)
    return transition(
        state,
        State.OPEN,
        at,
        facts,
        reason,
        open_cycle_count=cycles,
        reopen_at=reopen_at,
        half_open_alive=0,
        permits=(),
        replica_opens=(),
        **NO_RAMP,
    )


def transition(
    state: BreakerState, to: State, at: Instant, facts: FactLog, reason: str, **changes: Any
) -> BreakerState:
    """Change the state and write its fact. The generation grows except between CLOSED and DEGRADED."""
    both_admit = {state.state, to} <= {State.CLOSED, State.DEGRADED}
    moved = replace(
        state if both_admit else raise_generation(state, at),
        state=to,
        last_event_at=latest(state.last_event_at, at),
        fact_id=facts.next_id(),
        **changes,
    )
    add_fact(facts, moved, state.state, to, reason)
    return moved


def add_fact(facts: FactLog, after: BreakerState, from_state: str, to_state: str, reason: str) -> None:
    """One fact of the breaker mechanism, with the row's numbers as they stand after the transition."""
    facts.add(
        MECHANISM,
        after.name,
        from_state,
        to_state,
        provider=after.provider,
        connection=after.connection,
        generation=after.generation,
        deadline_at=after.reopen_at if after.state is State.OPEN else None,
        reason=reason,
        failure_count=after.failure_count,
    )


def raise_generation(state: BreakerState, at: Instant) -> BreakerState:
    """Fence off everything that was decided before `at`."""
    return replace(state, generation=state.generation + 1, generation_since=latest(state.generation_since, at))


def add_evidence(state: BreakerState, at: Instant, kind: str) -> BreakerState:
    """failure_count + 1, kind count + 1; time and kind of the newest failure merge by max."""
    kind = known_kind(kind)
    field = KIND_FIELDS[kind]
    is_newest = state.last_failure_at is None or at >= state.last_failure_at
    changes: dict[str, Any] = {field: getattr(state, field) + 1}
    return replace(
        state,
        failure_count=state.failure_count + 1,
        last_failure_at=latest(state.last_failure_at, at),
        last_failure_kind=kind if is_newest else state.last_failure_kind,
        last_event_at=latest(state.last_event_at, at),
        **changes,
    )


NO_RAMP: dict[str, Any] = {
    "closed_at": None,
    "ramp_cycles": 0,
    "ramp_failures": 0,
    "ramp_asked": 0,
    "ramp_admitted": 0,
}
CLEARED: dict[str, Any] = {
    "failure_count": 0,
    "last_failure_kind": "",
    "failure_heard_at": None,
    "rate_limit_count": 0,
    "quota_exhausted_count": 0,
    "transient_count": 0,
    "open_cycle_count": 0,
    "reopen_at": None,
    "half_open_alive": 0,
    "permits": (),
    "quorum_replicas": (),
    "quorum_connections": (),
    "replica_opens": (),
    **NO_RAMP,
}
"""What a close and a reset empty."""


def _reopen_at(state: BreakerState, at: Instant, cycles: int, profile: BreakerProfile, draw: float) -> Instant:
    duration = open_ms(profile, cycles, state.last_failure_kind)
    # The subtraction keeps a product such as 30 000 x (1 + 0.1 x 0.7) from being rounded up by its binary error.
    return latest(state.last_failure_at, at) + math.ceil(duration * (1 + profile.reopen_jitter * draw) - 1e-3)


def _add_failure(state: BreakerState, failure: CountedFailure, profile: BreakerProfile) -> BreakerState:
    counted = add_evidence(state, failure.at, failure.kind)
    if in_ramp(state, failure.at, profile):
        counted = replace(counted, ramp_failures=counted.ramp_failures + 1)
    if not profile.quorum_enabled:
        return counted
    return replace(
        counted,
        quorum_replicas=_with(counted.quorum_replicas, failure.replica, profile.quorum_min_replicas),
        quorum_connections=_with(counted.quorum_connections, failure.connection, profile.quorum_min_connections),
    )


def _after_failure(
    counted: BreakerState,
    known_at: Instant | None,
    failure: CountedFailure,
    profile: BreakerProfile,
    facts: FactLog,
) -> BreakerState:
    reason = _opening_reason(counted, failure, profile)
    ramped = in_ramp(counted, failure.at, profile)
    cycles = counted.ramp_cycles + 1 if ramped else counted.open_cycle_count
    if not reason or _would_be_over(counted, known_at, cycles, failure, profile):
        return _degrade(counted, failure.at, profile, facts)
    if reason != "slow_start_failure_budget" and not _has_quorum(counted, failure, profile):
        return _open_for_replica(counted, failure, profile, facts)
    return trip(counted, failure.at, cycles, profile, facts, reason=reason, draw=failure.draw)


def _opening_reason(state: BreakerState, failure: CountedFailure, profile: BreakerProfile) -> str:
    if in_ramp(state, failure.at, profile) and state.ramp_failures >= profile.slow_start_failure_budget:
        return "slow_start_failure_budget"
    rule = profile.kind_thresholds.get(failure.kind)
    if rule is not None:
        fallback = 1 if rule.immediate else profile.failure_threshold
        needed = fallback if rule.threshold is None else rule.threshold
        if kind_count(state, failure.kind) >= needed:
            return "kind_threshold"
    return "failure_threshold" if state.failure_count >= profile.failure_threshold else ""


def _would_be_over(
    state: BreakerState, known_at: Instant | None, cycles: int, failure: CountedFailure, profile: BreakerProfile
) -> bool:
    """A late failure does not trip a breaker whose OPEN time has passed already (fleet.md section 2)."""
    present = max(failure.at, known_at or failure.at, failure.now or failure.at)
    return failure.at < present and _reopen_at(state, failure.at, cycles, profile, 0.0) <= present


def _degrade(state: BreakerState, at: Instant, profile: BreakerProfile, facts: FactLog) -> BreakerState:
    if state.state is State.DEGRADED or state.failure_count < profile.degradation_threshold:
        return state
    return transition(state, State.DEGRADED, at, facts, "degradation_threshold")


def _subtract(state: BreakerState, at: Instant, profile: BreakerProfile, facts: FactLog) -> BreakerState:
    step = 1 if profile.count_mode == "net" else max(state.failure_count, *map(int, _kind_counts(state).values()))
    changes = {field: max(0, count - step) for field, count in _kind_counts(state).items()}
    lower = replace(
        state,
        failure_count=max(0, state.failure_count - step),
        last_event_at=latest(state.last_event_at, at),
        **changes,
    )
    if lower.state is State.DEGRADED and lower.failure_count <= profile.degradation_threshold:
        return transition(lower, State.CLOSED, at, facts, "recovered")
    return lower


def _kind_counts(state: BreakerState) -> dict[str, Any]:
    return {field: getattr(state, field) for field in KIND_FIELDS.values()}


def _with(names: tuple[str, ...], name: str, enough: int) -> tuple[str, ...]:
    """`names` with `name`; no longer than the quorum needs."""
    return names if not name or name in names or len(names) >= enough else (*names, name)


def _has_quorum(state: BreakerState, failure: CountedFailure, profile: BreakerProfile) -> bool:
    if not profile.quorum_enabled:
        return True
    replicas = _lowered(profile.quorum_min_replicas, failure.replicas)
    connections = _lowered(profile.quorum_min_connections, failure.connections)
    return len(state.quorum_replicas) >= replicas or len(state.quorum_connections) >= connections


def _lowered(wanted: int, existing: int | None) -> int:
    return wanted if existing is None else min(wanted, max(1, existing))


def _open_for_replica(
    state: BreakerState, failure: CountedFailure, profile: BreakerProfile, facts: FactLog
) -> BreakerState:
    until = failure.at + math.ceil(profile.reset_timeout_ms)
    kept = tuple(e for e in state.replica_opens if e.replica != failure.replica and e.until > failure.at)
    until = max(until, replica_open_until(state, failure.at, failure.replica) or until)
    alone = replace(state, replica_opens=(*kept, ReplicaOpen(failure.replica, until)), fact_id=facts.next_id())
    facts.add(
        MECHANISM,
        state.name,
        state.state,
        "quorum_not_met",
        provider=state.provider,
        connection=state.connection,
        generation=state.generation,
        deadline_at=until,
        reason="quorum_not_met",
        failure_count=state.failure_count,
    )
    return alone
