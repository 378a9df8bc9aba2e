"""Admission at selection time, under the guard row: probe permits of HALF_OPEN, slow start, early probes, and giving
back what a later gate refused (spec/breaker.md sections 8 and 12, spec/guards.md section 7). Pure folds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from policy_service.application.breaker_plan import give_back
from policy_service.application.connection_acts import grant_connection_probe, grant_lock_probe
from policy_service.application.events import ProbeRef
from policy_service.application.ports import Scope
from policy_service.domain.breaker import BreakerState, split_name
from policy_service.domain.breaker_controls import load_row
from policy_service.domain.breaker_probe import Acquired, ProbeRequest, Refusal, acquire, find_permit, renew_permit
from policy_service.domain.connection_state import EarlyProbe
from policy_service.domain.facts import Fact, FactLog
from policy_service.domain.ids import DurationMs, Instant, Target
from policy_service.domain.lockout import Place
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.state import StateBook


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer to one acquire over all breaker keys of a target."""

    granted: bool
    probes: tuple[ProbeRef, ...] = ()
    """Permits to carry in the decision; empty where none is needed."""
    expires_at: Instant | None = None
    """Earliest expiry of the permits."""
    decision_id: str = ""
    """Decision that the permits were granted to: an earlier one for a repeated request."""
    reason: Refusal | None = None
    retry_after_ms: DurationMs | None = None
    facts: tuple[Fact, ...] = ()


def acquire_probe(
    book: StateBook,
    target: Target,
    now: Instant,
    policy: ConnectionPolicy,
    request: ProbeRequest,
    facts: FactLog,
) -> Admission:
    """Take what the breakers of `target` demand, the provider's key first; all or nothing.

    Args:
        request: permit id, replica and decision; the id repeated answers with the same permit.
        facts: gets the entry to HALF_OPEN where this act stores it.
    """
    decision_id = ""
    granted: list[ProbeRef] = []
    expiries: list[Instant] = []
    for part in _parts(target, policy):
        row = load_row(book.get(BreakerState, target.provider, part), policy.breaker)
        after, result = acquire(row, now, policy.breaker, _for_part(request, part), facts)
        book.put(after)
        if not isinstance(result, Acquired):
            for ref in granted:
                give_back(book, ref)
            return Admission(
                False, reason=result.reason, retry_after_ms=result.retry_after_ms, facts=tuple(facts.facts)
            )
        if result.permit is not None:
            permit = result.permit
            decision_id = decision_id or permit.decision_id
            granted.append(ProbeRef(permit.id, after.name, permit.generation, permit.round))
            expiries.append(permit.expires_at)
    return Admission(True, tuple(granted), min(expiries, default=None), decision_id, facts=tuple(facts.facts))


def acquire_early(
    book: StateBook, target: Target, now: Instant, policy: ConnectionPolicy, permit_id: str
) -> EarlyProbe | None:
    """Permit to test a long connection block, else a long model lock, of `target`; None where none is due."""
    provider, connection, model = target
    permit = grant_connection_probe(book, provider, connection, policy, permit_id, now)
    if permit is not None or not model:
        return permit
    return grant_lock_probe(book, Place(provider, connection, model, policy.provider), policy, permit_id, now)


def renew_probe(book: StateBook, ref: ProbeRef, now: Instant, policy: Policy) -> Instant | None:
    """Extend a probe permit by one reset timeout from now; its new expiry, None where it no longer holds a slot."""
    provider, part = split_name(ref.breaker_key)
    profile = policy.for_connection(provider, part).breaker
    row, permit = renew_permit(book.get(BreakerState, provider, part), ref.permit_id, now, profile)
    book.put(row)
    return None if permit is None else permit.expires_at


def is_held_for(book: StateBook, ref: ProbeRef, replica: str) -> bool:
    """Was a probe permit handed out by `replica` last? A repeated call may have been given it by another one since."""
    provider, part = split_name(ref.breaker_key)
    permit = find_permit(book.get(BreakerState, provider, part), ref.permit_id)
    return permit is not None and permit.replica == replica and not permit.reclaimed


def hand_over(
    book: StateBook, probes: Sequence[ProbeRef], replica: str, renamed: Callable[[str], str]
) -> tuple[ProbeRef, ...]:
    """Give permits that `replica` holds other ids and decisions, so that no repetition of their request finds them;
    none, and all freed, unless every one of them still holds its slot."""
    held = [ref for ref in probes if is_held_for(book, ref, replica)]
    if len(held) < len(probes):
        for ref in held:
            give_back(book, ref)
        return ()
    return tuple(_renamed(book, ref, renamed) for ref in held)


def _renamed(book: StateBook, ref: ProbeRef, renamed: Callable[[str], str]) -> ProbeRef:
    row = book.get(BreakerState, *split_name(ref.breaker_key))
    permits = tuple(
        replace(p, id=renamed(p.id), decision_id=renamed(p.decision_id)) if p.id == ref.permit_id else p
        for p in row.permits
    )
    book.put(replace(row, permits=permits))
    return replace(ref, permit_id=renamed(ref.permit_id))


def admission_scope(target: Target) -> Scope:
    """Guard row and rows of one target."""
    own = frozenset({(str(target.provider), str(target.connection))}) if target.connection else frozenset()
    return Scope(frozenset({str(target.provider)}), own)


def _parts(target: Target, policy: ConnectionPolicy) -> tuple[str, ...]:
    return ("", target.connection) if policy.breaker.per_connection and target.connection else ("",)


def _for_part(request: ProbeRequest, part: str) -> ProbeRequest:
    """Each key has its own permit; their ids differ by the key."""
    own = f"{request.permit_id}@{part}" if part else request.permit_id
    return ProbeRequest(own, request.replica, request.decision_id)
