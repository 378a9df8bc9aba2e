"""Manual controls, repairs of stored rows, and housekeeping of the breaker (spec/breaker.md sections 10, 11). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from policy_service.domain.breaker import (
    KIND_FIELDS,
    BreakerState,
    Override,
    State,
    latest,
    open_ms,
)
from policy_service.domain.breaker_transitions import CLEARED, add_fact, enter_half_open, raise_generation
from policy_service.domain.facts import FactLog
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.profiles import BreakerProfile
from policy_service.domain.state import Key

FORGET_AFTER_MS: DurationMs = 1_800_000
NEVER: Instant = -1
MAX_CACHED_KEYS = 500
"""Rows that views keep at most, as far as idle ones make them more (breaker.md section 11)."""


def reset(state: BreakerState, now: Instant, facts: FactLog) -> BreakerState:
    """CLOSED with everything cleared, the override too; generation + 1. Always stored, always a fact."""
    before = state.override or state.state
    cleared = replace(
        raise_generation(state, now),
        state=State.CLOSED,
        override=Override.NONE,
        last_failure_at=None,
        half_open_round=0,
        last_event_at=latest(state.last_event_at, now),
        fact_id=facts.next_id(),
        **CLEARED,
    )
    add_fact(facts, cleared, before, State.CLOSED, "reset")
    return cleared


def force_open(state: BreakerState, now: Instant, facts: FactLog) -> BreakerState:
    """Refuse every acquire until cleared; the state below is frozen and live permits are void."""
    return _override(state, Override.FORCE_OPEN, now, facts, "force_open")


def disable(state: BreakerState, now: Instant, facts: FactLog) -> BreakerState:
    """Grant every acquire without a permit until cleared; no counter moves."""
    return _override(state, Override.DISABLED, now, facts, "disable")


def clear_override(state: BreakerState, now: Instant, facts: FactLog) -> BreakerState:
    """Back to the state below, refreshed by time."""
    return enter_half_open(_override(state, Override.NONE, now, facts, "clear_override"), now, facts)


def _override(state: BreakerState, wanted: Override, now: Instant, facts: FactLog, reason: str) -> BreakerState:
    if state.override is wanted:
        return state
    before = state.override or state.state
    moved = replace(
        raise_generation(state, now),
        override=wanted,
        permits=(),
        last_event_at=latest(state.last_event_at, now),
        fact_id=facts.next_id(),
    )
    add_fact(facts, moved, before, wanted or state.state, reason)
    return moved


def load_row(row: BreakerState, profile: BreakerProfile) -> BreakerState:
    """Repair a stored row: unknown states and kinds, OPEN without an end. Writes nothing."""
    state, kind = read_state(row.state), row.last_failure_kind
    kind = kind if kind in KIND_FIELDS else ""
    if state is not row.state or kind != row.last_failure_kind:
        row = replace(row, state=state, last_failure_kind=kind)
    if row.state is State.OPEN and row.reopen_at is None and row.last_failure_at is not None:
        row = replace(row, reopen_at=row.last_failure_at + open_ms(profile, row.open_cycle_count, kind))
    return row


def read_state(text: str) -> State:
    """A stored state; one outside the list is CLOSED."""
    if isinstance(text, State):
        return text
    return State(text) if text in State.__members__ else State.CLOSED


def forget(rows: Iterable[BreakerState], now: Instant, surplus: Collection[Key] = ()) -> list[BreakerState]:
    """Rows that hold nothing any more, as the defaults they shrink to (the generation stays).

    Args:
        surplus: keys of `surplus`, which need not wait for their time.
    """
    return [_forgotten(row) for row in rows if is_forgettable(row, now) or (row.key in surplus and _is_idle(row))]


def is_forgettable(row: BreakerState, now: Instant) -> bool:
    """CLOSED with count 0, no control, and no failure for 30 min (breaker.md section 11)."""
    return _is_idle(row) and (_last_heard(row) == NEVER or now - _last_heard(row) > FORGET_AFTER_MS)


def surplus(rows: Iterable[BreakerState], limit: int = MAX_CACHED_KEYS) -> list[BreakerState]:
    """Idle rows beyond the limit, those first that have been idle for the longest time."""
    present = [row for row in rows if not row.is_default]
    idle = sorted(filter(_is_idle, present), key=_last_heard)
    return idle[: max(0, len(present) - limit)]


def _is_idle(row: BreakerState) -> bool:
    return row.state is State.CLOSED and not row.failure_count and not row.override


def _last_heard(row: BreakerState) -> Instant:
    return max(NEVER if at is None else at for at in (row.last_failure_at, row.failure_heard_at))


def _forgotten(row: BreakerState) -> BreakerState:
    return BreakerState(
        row.provider,
        row.connection,
        generation=row.generation,
        generation_since=row.generation_since,
        last_event_at=row.last_event_at,
        fact_id=row.fact_id,
    )
