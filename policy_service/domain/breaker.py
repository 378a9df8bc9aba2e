"""Provider circuit breaker: its row and every read of it (spec/breaker.md).

Pure. One breaker per canonical provider (optionally one per connection). Transitions live in
`breaker_transitions`, permits and verdicts in `breaker_probe`, manual controls and repairs in `breaker_controls`,
de-duplication in `breaker_burst`. `at` is an event's own instant; `now` the time of the transaction or read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Self

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.profiles import BreakerProfile
from policy_service.domain.state import Key

MECHANISM = "breaker"
TRANSIENT = "transient"
KIND_FIELDS = {
    "rate_limit": "rate_limit_count",
    "quota_exhausted": "quota_exhausted_count",
    TRANSIENT: "transient_count",
}
_CONNECTION_MARK = "::conn::"
_ESCAPE = "%"
"""Begins the name of a provider whose own name would be read as a connection's."""


class State(StrEnum):
    """States of a breaker."""

    CLOSED = "CLOSED"
    DEGRADED = "DEGRADED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"


class Override(StrEnum):
    """Manual controls (breaker.md section 10)."""

    NONE = ""
    FORCE_OPEN = "force_open"
    DISABLED = "disabled"


class Effect(StrEnum):
    """What an outcome did to a breaker; the names that are not `counted` or `fresh` are statistics causes."""

    COUNTED = "counted"
    FRESH = "fresh"
    """A success that was heard but had nothing left to subtract."""
    IGNORED = "ignored"
    """OPEN, or HALF_OPEN without a permit."""
    OVERRIDDEN = "overridden"
    STALE_SUCCESS = "stale_success"
    STALE_GENERATION = "stale_generation"
    FUTURE_GENERATION = "future_generation"
    VOID_PERMIT = "void_permit"
    NONE = ""


@dataclass(frozen=True, slots=True)
class ProbePermit:
    """Right to send one trial call in HALF_OPEN."""

    id: str
    generation: int
    round: int
    """Generation at entry to the HALF_OPEN round in which it was granted."""
    replica: str
    decision_id: str
    granted_at: Instant
    expires_at: Instant
    reclaimed: bool = False
    """The slot was given to somebody else; an alive verdict still counts in the same round."""


@dataclass(frozen=True, slots=True)
class ReplicaOpen:
    """One replica alone treats the key as OPEN: its evidence met no quorum (breaker.md section 12)."""

    replica: str
    until: Instant


@dataclass(frozen=True, slots=True)
class BreakerState:
    """One breaker row. Key parts: provider, and the connection for a per-connection breaker ("" otherwise)."""

    KIND: ClassVar[str] = "breaker"
    provider: str
    connection: str = ""
    state: State = State.CLOSED
    override: Override = Override.NONE
    generation: int = 1
    generation_since: Instant | None = None
    """Instant at which the generation last rose; tells which reports without a number are older."""
    failure_count: int = 0
    last_failure_at: Instant | None = None
    last_failure_kind: str = ""
    rate_limit_count: int = 0
    quota_exhausted_count: int = 0
    transient_count: int = 0
    open_cycle_count: int = 0
    reopen_at: Instant | None = None
    half_open_alive: int = 0
    half_open_round: int = 0
    permits: tuple[ProbePermit, ...] = ()
    last_event_at: Instant | None = None
    quorum_replicas: tuple[str, ...] = ()
    quorum_connections: tuple[str, ...] = ()
    replica_opens: tuple[ReplicaOpen, ...] = ()
    closed_at: Instant | None = None
    """Start of a slow-start ramp; None outside one."""
    ramp_cycles: int = 0
    ramp_failures: int = 0
    ramp_asked: int = 0
    ramp_admitted: int = 0
    fact_id: str = ""
    """Fact of the last transition: the evidence of an exclusion."""
    failure_heard_at: Instant | None = None
    """Newest failure that a burst already counted: an older success subtracts nothing and ends no burst."""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection)

    @property
    def is_default(self) -> bool:
        return self == BreakerState(
            self.provider,
            self.connection,
            generation=self.generation,
            generation_since=self.generation_since,
            last_event_at=self.last_event_at,
            fact_id=self.fact_id,
        )

    @property
    def name(self) -> str:
        """Text form of the key: `<provider>` or `<provider>::conn::<connection>`."""
        return breaker_name(self.provider, self.connection)

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2])


def breaker_name(provider: str, connection: str = "") -> str:
    """Text form of a breaker key (breaker.md section 12)."""
    own = provider
    # A name that ends like the beginning of the mark would end too early as well.
    if (provider + _CONNECTION_MARK).index(_CONNECTION_MARK) < len(provider) or provider.startswith(_ESCAPE):
        own = _ESCAPE + provider.replace("%", "%25").replace(":", "%3A")
    return f"{own}{_CONNECTION_MARK}{connection}" if connection else own


def split_name(name: str) -> tuple[str, str]:
    """(provider, connection) of a text key."""
    own, _, connection = name.partition(_CONNECTION_MARK)
    if own.startswith(_ESCAPE):
        own = own[1:].replace("%3A", ":").replace("%25", "%")
    return own, connection


# --- reads ------------------------------------------------------------------------------------------------
def refresh(state: BreakerState, now: Instant) -> BreakerState:
    """The row as a read shows it at `now`: OPEN whose time is over is HALF_OPEN. Never to be written."""
    if not is_due(state, now):
        return state
    return replace(state, state=State.HALF_OPEN, permits=(), half_open_alive=0)


def admits(state: BreakerState, now: Instant, profile: BreakerProfile, replica: str = "") -> bool:
    """May a call of `replica` pass now? Takes no slot (the answer of an acquire at this instant)."""
    if state.override:
        return state.override is Override.DISABLED
    seen = refresh(state, now)
    if seen.state is State.OPEN or replica_open_until(seen, now, replica):
        return False
    if seen.state is State.HALF_OPEN:
        return len(live_permits(seen, now)) < profile.half_open_probes
    return ramp_admits(seen, now, profile)


def retry_after_ms(state: BreakerState, now: Instant, profile: BreakerProfile, replica: str = "") -> DurationMs | None:
    """Remaining time of what blocks now; None where nothing blocks or no time is known (forced open)."""
    if state.override or admits(state, now, profile, replica):
        return None
    seen = refresh(state, now)
    if seen.state is State.OPEN:
        return None if seen.reopen_at is None else seen.reopen_at - now
    if local := replica_open_until(seen, now, replica):
        return local - now
    if seen.state is State.HALF_OPEN:
        return min((permit.expires_at - now for permit in live_permits(seen, now)), default=None)
    return _ramp_end(seen, profile) - now


def blocks(state: BreakerState, now: Instant) -> bool:
    """True while the key is OPEN or forced open (model_lockout.md section 4, "breaker first")."""
    return state.override is Override.FORCE_OPEN or (not state.override and refresh(state, now).state is State.OPEN)


def needs_guard(state: BreakerState, now: Instant, profile: BreakerProfile) -> bool:
    """True where a selection must acquire under the guard row: HALF_OPEN, or a slow-start ramp."""
    if state.override:
        return False
    seen = refresh(state, now)
    return seen.state is State.HALF_OPEN or (seen.state is not State.OPEN and ramp_share(seen, now, profile) < 1)


def live_permits(state: BreakerState, now: Instant) -> tuple[ProbePermit, ...]:
    """Permits that hold a slot at `now`: neither expired nor reclaimed."""
    return tuple(permit for permit in state.permits if not permit.reclaimed and now < permit.expires_at)


def replica_open_until(state: BreakerState, now: Instant, replica: str) -> Instant | None:
    """End of the OPEN time that `replica` alone observes; None where it observes none."""
    ends = (entry.until for entry in state.replica_opens if entry.replica == replica and entry.until > now)
    return max(ends, default=None)


def generation_effect(state: BreakerState, generation: int | None, since: Instant) -> Effect:
    """Is evidence without a permit current for this key (breaker.md section 9 rule 2, fleet.md section 2)?

    Args:
        generation: number in the decision token; None where the report carries none for this key.
        since: instant whose generation the report takes where it carries no number.
    """
    if generation is None:
        is_older = state.generation_since is not None and since < state.generation_since
        return Effect.STALE_GENERATION if is_older else Effect.NONE
    if generation > state.generation:
        return Effect.FUTURE_GENERATION
    return Effect.STALE_GENERATION if generation < state.generation else Effect.NONE


def open_ms(profile: BreakerProfile, cycles: int, kind: str) -> DurationMs:
    """OPEN time after `cycles` failed rounds (breaker.md section 7), without jitter."""
    base = profile.reset_timeout_ms
    if profile.kind_hints:
        base = profile.open_ms_by_kind.get(kind, base)
    excess = cycles - profile.backoff_escalation_cycles
    if excess <= 0:
        return math.ceil(base)
    return math.ceil(min(base * (1 << min(int(excess), 60)), base * profile.max_backoff_multiplier))


def ramp_share(state: BreakerState, now: Instant, profile: BreakerProfile) -> float:
    """Share of the asked calls that slow start admits at `now`; 1.0 outside a ramp."""
    if not in_ramp(state, now, profile):
        return 1.0
    left = _ramp_end(state, profile) - now
    elapsed = 1 - left / profile.slow_start_duration_ms
    return max(profile.slow_start_min_share, math.pow(elapsed, 1 / max(profile.slow_start_aggression, 1e-9)))


def ramp_admits(state: BreakerState, now: Instant, profile: BreakerProfile) -> bool:
    """Would slow start let one more call pass?"""
    share = ramp_share(state, now, profile)
    # The subtraction keeps a product such as 0.1 x 30 from being rounded up by its binary error.
    return share >= 1 or state.ramp_admitted + 1 <= math.ceil(share * (state.ramp_asked + 1) - 1e-9)


def known_kind(kind: str) -> str:
    """A failure kind of the list; anything else is `transient`."""
    return kind if kind in KIND_FIELDS else TRANSIENT


def kind_count(state: BreakerState, kind: str) -> int:
    """Net count of the failures of one kind."""
    count: int = getattr(state, KIND_FIELDS[known_kind(kind)])
    return count


def latest(known: Instant | None, at: Instant) -> Instant:
    """The later of two instants; the merge that lets events arrive in any order."""
    return at if known is None else max(known, at)


def is_due(state: BreakerState, now: Instant) -> bool:
    """OPEN whose time is over: it reads as HALF_OPEN and is stored so by the next transaction."""
    return state.state is State.OPEN and (state.reopen_at is None or now >= state.reopen_at)


def _ramp_end(state: BreakerState, profile: BreakerProfile) -> Instant:
    assert state.closed_at is not None
    return state.closed_at + math.ceil(profile.slow_start_duration_ms)


def in_ramp(state: BreakerState, at: Instant, profile: BreakerProfile) -> bool:
    """Is `at` inside the slow-start ramp of the last close?"""
    if state.closed_at is None or not profile.slow_start_enabled:
        return False
    return state.closed_at <= at < _ramp_end(state, profile)
