"""Probe permits of HALF_OPEN and their verdicts (spec/breaker.md section 8, spec/fleet.md section 3). Pure.

`acquire` and the verdicts run under the guard row of the provider, so that the number of live permits holds over
the whole fleet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from policy_service.domain.breaker import (
    BreakerState,
    Effect,
    Override,
    ProbePermit,
    State,
    latest,
    live_permits,
    ramp_admits,
    ramp_share,
    refresh,
    replica_open_until,
    retry_after_ms,
)
from policy_service.domain.breaker_transitions import add_evidence, close, enter_half_open, trip
from policy_service.domain.facts import FactLog
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.profiles import BreakerProfile

DOWN_STATUSES = frozenset({408, 500, 502, 503, 504})
_RECLAIMED_KEPT = 64
"""Reclaimed permits remembered in one round; the oldest lose their say first."""


class Refusal(StrEnum):
    """Why an acquire was refused."""

    FORCED_OPEN = "forced_open"
    CIRCUIT_OPEN = "circuit_open"
    PROBE_IN_FLIGHT = "probe_in_flight"
    SLOW_START = "slow_start"


class Verdict(StrEnum):
    """What the answer to a probe says."""

    ALIVE = "alive"
    DOWN = "down"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Who asks for a permit. An id that already holds one gets the same permit again."""

    permit_id: str
    replica: str = ""
    decision_id: str = ""


@dataclass(frozen=True, slots=True)
class Acquired:
    """The call may go; `permit` is None where none is needed."""

    permit: ProbePermit | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The call may not go; `retry_after_ms` is None where no time is known."""

    reason: Refusal
    retry_after_ms: DurationMs | None = None


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What a verdict is read from.

    Args:
        status: restated status; None where the report cannot be read.
        exclusion: name of the first test of breaker.md section 4 that fails, tests 1 and 8 left out; "" for none.
        is_network_error: no status line came from the upstream.
        response_at: first byte of the answer, its end where no first byte is reported.
    """

    status: int | None
    exclusion: str
    is_network_error: bool
    response_at: Instant


@dataclass(frozen=True, slots=True)
class HeldPermit:
    """A permit as the reporting decision carries it."""

    permit_id: str
    generation: int
    is_local: bool = False


def verdict_of(answer: ProbeAnswer, expires_at: Instant | None) -> Verdict:
    """Verdict by the first match of breaker.md section 8; `expires_at` None: a permit without an expiry on record."""
    if answer.exclusion or answer.status is None:
        return Verdict.INCONCLUSIVE
    if answer.is_network_error or answer.status in DOWN_STATUSES:
        return Verdict.DOWN
    if 200 <= answer.status < 400:
        return Verdict.ALIVE
    is_prompt = expires_at is None or answer.response_at < expires_at
    if 400 <= answer.status < 499 and is_prompt:
        return Verdict.ALIVE
    return Verdict.INCONCLUSIVE


# --- taking and giving back -------------------------------------------------------------------------------
def acquire(
    state: BreakerState, now: Instant, profile: BreakerProfile, request: ProbeRequest, facts: FactLog
) -> tuple[BreakerState, Acquired | Refused]:
    """May one call go now? Takes a slot in HALF_OPEN and counts the call in a slow-start ramp."""
    state = enter_half_open(state, now, facts)
    if state.override:
        return state, _by_override(state.override)
    if state.state is State.OPEN or replica_open_until(state, now, request.replica):
        return state, Refused(Refusal.CIRCUIT_OPEN, retry_after_ms(state, now, profile, request.replica))
    if state.state is State.HALF_OPEN:
        return _acquire_probe(state, now, profile, request)
    if ramp_share(state, now, profile) >= 1:
        return state, Acquired()
    return _acquire_in_ramp(state, now, profile)


def acquire_local(
    state: BreakerState, now: Instant, profile: BreakerProfile, request: ProbeRequest, last_local_at: Instant | None
) -> Acquired | Refused:
    """Admission without the store: one probe per replica and reset timeout (fleet.md section 3).

    Args:
        state: the newest committed row known; its generation goes into the permit.
        last_local_at: when this replica granted its last local permit for the key.
    """
    seen = refresh(state, now)
    if state.override:
        return _by_override(state.override)
    if seen.state is State.OPEN:
        return Refused(Refusal.CIRCUIT_OPEN, retry_after_ms(state, now, profile))
    if seen.state is not State.HALF_OPEN:
        return Acquired()
    free_at = now if last_local_at is None else last_local_at + math.ceil(profile.reset_timeout_ms)
    if now < free_at:
        return Refused(Refusal.PROBE_IN_FLIGHT, free_at - now)
    return Acquired(_permit(state, now, profile, request))


def release_permit(state: BreakerState, permit_id: str) -> BreakerState:
    """Give a slot back at once: inconclusive. An unknown or reclaimed permit frees nothing."""
    return replace(state, permits=tuple(p for p in state.permits if p.id != permit_id or p.reclaimed))


def renew_permit(
    state: BreakerState, permit_id: str, now: Instant, profile: BreakerProfile
) -> tuple[BreakerState, ProbePermit | None]:
    """Extend a permit that still holds its slot by one reset timeout from now; None where it is void or reclaimed."""
    held = find_permit(state, permit_id)
    if held is None or held.reclaimed:
        return state, None
    renewed = replace(held, expires_at=max(held.expires_at, now + math.ceil(profile.reset_timeout_ms)))
    return replace(state, permits=tuple(renewed if p.id == permit_id else p for p in state.permits)), renewed


def find_permit(state: BreakerState, permit_id: str) -> ProbePermit | None:
    """The permit on record, reclaimed ones of the present round included."""
    return next((permit for permit in state.permits if permit.id == permit_id), None)


# --- verdicts ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Evidence:
    """When a verdict fell and of which kind a down one is; `draw` feeds the reopen jitter."""

    at: Instant
    kind: str = ""
    draw: float = 0.0


def judge(
    state: BreakerState,
    held: HeldPermit,
    answer: ProbeAnswer,
    evidence: Evidence,
    profile: BreakerProfile,
    facts: FactLog,
) -> tuple[BreakerState, Verdict, Effect]:
    """Apply the outcome of a probe: the verdict read from it, and COUNTED unless the permit no longer has a say."""
    state = enter_half_open(state, evidence.at, facts)
    permit = find_permit(state, held.permit_id)
    verdict = verdict_of(answer, permit.expires_at if permit else None)
    if state.override or not _has_say(state, held, permit, verdict):
        return state, verdict, Effect.OVERRIDDEN if state.override else Effect.VOID_PERMIT
    freed = replace(state, permits=tuple(p for p in state.permits if p.id != held.permit_id))
    return _apply(freed, verdict, evidence, profile, facts), verdict, Effect.COUNTED


def _has_say(state: BreakerState, held: HeldPermit, permit: ProbePermit | None, verdict: Verdict) -> bool:
    if state.state is not State.HALF_OPEN:
        return False
    if held.is_local and permit is None:
        entered_since = state.generation == state.half_open_round == held.generation + 1
        return state.generation == held.generation or entered_since
    return permit is not None and (not permit.reclaimed or verdict is Verdict.ALIVE)


def _apply(
    state: BreakerState, verdict: Verdict, evidence: Evidence, profile: BreakerProfile, facts: FactLog
) -> BreakerState:
    if verdict is Verdict.INCONCLUSIVE:
        return state
    if verdict is Verdict.DOWN:
        failed = add_evidence(state, evidence.at, evidence.kind)
        cycles = state.open_cycle_count + 1
        return trip(failed, evidence.at, cycles, profile, facts, reason="probe_down", draw=evidence.draw)
    alive = replace(
        state, half_open_alive=state.half_open_alive + 1, last_event_at=latest(state.last_event_at, evidence.at)
    )
    if alive.half_open_alive < profile.successes_to_close:
        return alive
    return close(alive, evidence.at, profile, facts, "probe_alive")


# --- admission --------------------------------------------------------------------------------------------
def _by_override(override: Override) -> Acquired | Refused:
    return Acquired() if override is Override.DISABLED else Refused(Refusal.FORCED_OPEN)


def _acquire_probe(
    state: BreakerState, now: Instant, profile: BreakerProfile, request: ProbeRequest
) -> tuple[BreakerState, Acquired | Refused]:
    held = find_permit(state, request.permit_id)
    if held is not None and not held.reclaimed and now < held.expires_at:
        return _handed_out_again(state, held, request.replica)
    if len(live_permits(state, now)) >= profile.half_open_probes:
        return state, Refused(Refusal.PROBE_IN_FLIGHT, retry_after_ms(state, now, profile))
    reclaimed = _reclaim(state, now)
    permit = _permit(reclaimed, now, profile, request)
    others = (p for p in reclaimed.permits if p.id != permit.id)
    return replace(reclaimed, permits=_bounded((*others, permit))), Acquired(permit)


def _handed_out_again(state: BreakerState, held: ProbePermit, replica: str) -> tuple[BreakerState, Acquired]:
    """The same permit for a repeated call; the replica that hands it out now is the one that may give it back."""
    if held.replica == replica:
        return state, Acquired(held)
    moved = replace(held, replica=replica)
    return replace(state, permits=tuple(moved if p.id == held.id else p for p in state.permits)), Acquired(moved)


def _reclaim(state: BreakerState, now: Instant) -> BreakerState:
    """Expired permits lose their slot; the generation grows by one for each."""
    lost = {p.id for p in state.permits if not p.reclaimed and now >= p.expires_at}
    if not lost:
        return state
    permits = tuple(replace(p, reclaimed=True) if p.id in lost else p for p in state.permits)
    generation = state.generation + len(lost)
    return replace(state, permits=permits, generation=generation, generation_since=latest(state.generation_since, now))


def _permit(state: BreakerState, now: Instant, profile: BreakerProfile, request: ProbeRequest) -> ProbePermit:
    return ProbePermit(
        id=request.permit_id,
        generation=state.generation,
        round=state.half_open_round,
        replica=request.replica,
        decision_id=request.decision_id,
        granted_at=now,
        expires_at=now + math.ceil(profile.reset_timeout_ms),
    )


def _bounded(permits: Iterable[ProbePermit]) -> tuple[ProbePermit, ...]:
    listed = tuple(permits)
    reclaimed = [permit.id for permit in listed if permit.reclaimed]
    dropped = set(reclaimed[:-_RECLAIMED_KEPT])
    return tuple(permit for permit in listed if permit.id not in dropped)


def _acquire_in_ramp(
    state: BreakerState, now: Instant, profile: BreakerProfile
) -> tuple[BreakerState, Acquired | Refused]:
    asked = replace(state, ramp_asked=state.ramp_asked + 1)
    if ramp_admits(state, now, profile):
        return replace(asked, ramp_admitted=asked.ramp_admitted + 1), Acquired()
    return asked, Refused(Refusal.SLOW_START, retry_after_ms(state, now, profile))
