"""Leases in selection: who sees which connection, and what a managed request does (spec/leases.md section 7).

Pure functions over the candidates that the ordinary filters have judged; runs before affinity and the account
strategy. The claim itself is a store operation (`lease.acquire`, `lease.transition`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from policy_service.domain.catalogue import Caller
from policy_service.domain.ids import Instant
from policy_service.domain.lease import (
    EndReason,
    Fence,
    LeaseCall,
    LeaseResult,
    LeaseRow,
    LeaseRules,
    LeaseStep,
    acquire,
    active_of_owner,
    busy_until,
    fence,
    transition,
)
from policy_service.domain.lease_context import (
    Capacity,
    LeaseCode,
    LeaseContext,
    LeaseRefusal,
    capacity_retry_s,
    fence_refusal,
    is_managed,
)

T = TypeVar("T")


class Blocked(StrEnum):
    """Why the ordinary filters drop a connection, as far as leases are concerned."""

    NO = ""
    COOLING = "cooling"
    MODEL_LOCKED = "model_locked"
    TERMINAL = "terminal"
    EXPIRED = "expired"
    """Terminal state `expired`: needs a new sign-in."""
    QUOTA = "quota"
    """Threshold, exhaustion or a peak-hour block."""
    OTHER = "other"


_BY_MECHANISM = {
    "breaker": Blocked.COOLING,
    "provider_cooldown": Blocked.COOLING,
    "connection_cooldown": Blocked.COOLING,
    "model_lockout": Blocked.MODEL_LOCKED,
    "terminal_state": Blocked.TERMINAL,
    "quota_cutoff": Blocked.QUOTA,
}


def blocked_by(mechanism: str, reason: str = "") -> Blocked:
    """Reading of an exclusion (diagnostics.md section 2); "" is not excluded."""
    if mechanism == "terminal_state" and reason == "expired":
        return Blocked.EXPIRED
    return _BY_MECHANISM.get(mechanism, Blocked.OTHER) if mechanism else Blocked.NO


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connection of the request's pool after the ordinary filters."""

    connection: str
    blocked: Blocked = Blocked.NO


class LeaseReason(StrEnum):
    """Reasons of exclusions with mechanism `lease`."""

    HIDDEN = "lease_hidden"
    HELD = "lease_held"
    NOT_ALLOWED = "lease_not_allowed"


@dataclass(frozen=True, slots=True)
class LeaseExclusion:
    """A connection that leases take away. `until` is when it becomes free at the latest, for held ones."""

    connection: str
    reason: LeaseReason
    until: Instant | None = None


def managed_connections(callers: Iterable[Caller]) -> frozenset[str]:
    """Connections that at least one managed key lists."""
    return frozenset(each for caller in callers if is_managed(caller) for each in caller.allowed_connections)


def hide_managed(connections: Iterable[str], managed: frozenset[str]) -> tuple[LeaseExclusion, ...]:
    """Exclusions for an un-managed caller: every managed connection, leased or not."""
    return tuple(LeaseExclusion(each, LeaseReason.HIDDEN) for each in connections if each in managed)


def fence_first(
    rows: Sequence[LeaseRow], context: LeaseContext, api_key_id: str, forced: str, now: Instant
) -> LeaseRow | LeaseRefusal:
    """The owner's lease, or why a managed request is refused before anything else is looked at.

    Args:
        forced: connection that the request forces, "" where it forces none.
    """
    own = active_of_owner(rows, context.owner_hash, now)
    asked = forced or (own.connection_id if own else "")
    call = LeaseCall(context.owner_hash, api_key_id, context.generation, connection_id=asked)
    refused = fence_refusal(fence(rows, call, now))
    if refused is not None or own is None:
        return refused or LeaseRefusal(LeaseCode.REQUIRED)
    return own


def check_dispatch(rows: Sequence[LeaseRow], call: LeaseCall, now: Instant) -> LeaseRefusal | None:
    """Fence of one provider call (section 8); a dispatch without a connection never passes."""
    if not call.connection_id:
        return LeaseRefusal(LeaseCode.CONNECTION_MISMATCH)
    return fence_refusal(fence(rows, call, now))


class PlanKind(StrEnum):
    """What a managed request does."""

    USE = "use"
    """The leased connection, outright: before affinity and the account strategy."""
    CHOOSE = "choose"
    """Affinity or the account strategy picks among `candidates`, then the claim."""
    CAPACITY = "capacity"
    DEAD_END = "dead_end"


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """Decision on the candidates of a managed caller."""

    kind: PlanKind
    candidates: tuple[str, ...] = ()
    capacity: Capacity | None = None
    invalidate: EndReason | None = None
    """In request mode: end the owner's lease with this reason."""
    code: LeaseCode | None = None
    """In acquire mode at a dead end or without capacity: the answer."""
    exclusions: tuple[LeaseExclusion, ...] = ()


@dataclass(frozen=True, slots=True)
class ManagedRequest:
    """One managed selection. `own` is the owner's active lease (acquire mode: if it has one)."""

    allowed: frozenset[str]
    own: LeaseRow | None = None
    is_acquire: bool = False
    forced: str = ""


def plan(
    request: ManagedRequest,
    pool: Sequence[Candidate],
    rows: Sequence[LeaseRow],
    rules: Callable[[str], LeaseRules],
    now: Instant,
) -> LeasePlan:
    """Steps 1, 2, 5 and 6 of section 7.

    Args:
        pool: every connection of the request with the judgement of the ordinary filters, in their order.
        rows: lease rows of the pool's connections (active, and newest ended).
        rules: numbers for one connection (lock-delay, time of listing).
    """
    mine = [each for each in pool if each.connection in request.allowed]
    valid = [each.connection for each in mine if not each.blocked]
    held = {each: until for each in valid if (until := _held_until(request, rows, rules, each, now)) is not None}
    exclusions = _exclusions((each.connection for each in pool if each.connection not in request.allowed), held)
    if request.forced and request.forced not in valid:
        return LeasePlan(PlanKind.DEAD_END, code=LeaseCode.NO_ELIGIBLE_CONNECTION, exclusions=exclusions)
    leased = request.own.connection_id if request.own else ""
    if leased in valid:
        return LeasePlan(PlanKind.USE, (leased,), exclusions=exclusions)
    free = tuple(each for each in valid if each not in held)
    if free:
        return LeasePlan(PlanKind.CHOOSE, free, exclusions=exclusions)
    if valid:
        return _without_capacity(request, [held[each] for each in valid], exclusions, now)
    return _dead_end(request, [each.blocked for each in mine], exclusions)


def _held_until(
    request: ManagedRequest, rows: Sequence[LeaseRow], rules: Callable[[str], LeaseRules], connection: str, now: Instant
) -> Instant | None:
    """When a connection that somebody else holds (or that is in its lock-delay) becomes free; None: free, or own."""
    if request.own is not None and request.own.connection_id == connection:
        return None
    return busy_until(rows, connection, rules(connection), now)


def _exclusions(outside: Iterable[str], held: Mapping[str, Instant]) -> tuple[LeaseExclusion, ...]:
    return (
        *(LeaseExclusion(each, LeaseReason.NOT_ALLOWED) for each in outside),
        *(LeaseExclusion(each, LeaseReason.HELD, until) for each, until in held.items()),
    )


def _without_capacity(
    request: ManagedRequest, free_at: Sequence[Instant], exclusions: tuple[LeaseExclusion, ...], now: Instant
) -> LeasePlan:
    return LeasePlan(
        PlanKind.CAPACITY,
        capacity=Capacity(len(free_at), capacity_retry_s(min(free_at, default=None), now)),
        invalidate=None if request.is_acquire else EndReason.CONNECTION_INELIGIBLE,
        code=LeaseCode.CAPACITY_UNAVAILABLE,
        exclusions=exclusions,
    )


_DEAD_ENDS = (
    (frozenset({Blocked.COOLING}), EndReason.HEALTH_OR_COOLDOWN),
    (frozenset({Blocked.MODEL_LOCKED}), EndReason.MODEL_INELIGIBLE),
    (frozenset({Blocked.TERMINAL, Blocked.EXPIRED}), EndReason.AUTHORIZATION_CHANGED),
    (frozenset({Blocked.QUOTA}), EndReason.QUOTA_UNAVAILABLE),
)
_RETURNS = frozenset({Blocked.COOLING, Blocked.EXPIRED})


def dead_end_reason(blocked: Iterable[Blocked]) -> EndReason:
    """End reason when no allowed connection is policy-valid: what all of them have in common."""
    found = set(blocked)
    common = (reason for kinds, reason in _DEAD_ENDS if found and found <= kinds)
    return next(common, EndReason.CONNECTION_INELIGIBLE)


def _dead_end(request: ManagedRequest, blocked: Sequence[Blocked], exclusions: tuple[LeaseExclusion, ...]) -> LeasePlan:
    waits = bool(blocked) and set(blocked) <= _RETURNS
    return LeasePlan(
        PlanKind.DEAD_END,
        invalidate=None if request.is_acquire else dead_end_reason(blocked),
        code=LeaseCode.ELIGIBILITY_UNAVAILABLE if waits else LeaseCode.NO_ELIGIBLE_CONNECTION,
        exclusions=exclusions,
    )


class ClaimVerdict(StrEnum):
    """What follows from the answer to a claim (step 4)."""

    DISPATCH = "dispatch"
    PICK_AGAIN = "pick_again"
    """Without that connection, and only among the original candidates."""
    STALE = "stale"
    """409 LEASE_FENCE_STALE."""


_CLAIM_VERDICTS = {
    LeaseResult.ACQUIRED: ClaimVerdict.DISPATCH,
    LeaseResult.REUSED: ClaimVerdict.DISPATCH,
    LeaseResult.TRANSITIONED: ClaimVerdict.DISPATCH,
    LeaseResult.CONNECTION_BUSY: ClaimVerdict.PICK_AGAIN,
}


def after_claim(result: LeaseResult) -> ClaimVerdict:
    """Verdict on a claim's result."""
    return _CLAIM_VERDICTS.get(result, ClaimVerdict.STALE)


def claim(
    request: ManagedRequest, rows: Sequence[LeaseRow], call: LeaseCall, rules: LeaseRules, now: Instant
) -> LeaseStep:
    """Take the picked connection: a transition for an owner that holds a lease, else a new lease (step 4 and 6.4)."""
    own = request.own
    if own is None:
        return acquire(rows, call, rules, now)
    move = replace(call, generation=own.generation, reason=EndReason.CONNECTION_INELIGIBLE)
    return transition(rows, move, rules, now)


def rank_for_lease(targets: Sequence[T], serves: Callable[[T], bool]) -> tuple[T, ...]:
    """Targets of a route for a managed request, in the order of its strategy (section 7, Routes).

    Those that the leased connection is eligible for (`serves`); only where there are none, the others.
    """
    return tuple(target for target in targets if serves(target)) or tuple(targets)


class ReportVerdict(StrEnum):
    """What became of the lease part of an outcome report (section 8). The upstream evidence counts either way."""

    APPLIED = "APPLIED"
    REFUSED = "REFUSED"


def judge_report(verdict: Fence) -> ReportVerdict:
    """A report changes the lease only with a valid fence."""
    return ReportVerdict.APPLIED if verdict is Fence.VALID else ReportVerdict.REFUSED
