"""Parts of a selection's answer: what is listed, said and explained, and which permits travel on. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from policy_service.application.granted import Granted
from policy_service.application.messages import (
    Exclusion,
    ExplainedTarget,
    Explanation,
    PermitKind,
    PermitRef,
    Reject,
)
from policy_service.application.permit_work import PermitRefusal
from policy_service.application.pins import PinAnswer
from policy_service.application.pools import Pool
from policy_service.domain import exclusions as gate
from policy_service.domain.ids import Instant, Target


def has_permit(granted: Granted | None, *kinds: PermitKind) -> bool:
    """True where one of the granted permits is of these kinds."""
    return granted is not None and any(permit.kind in kinds for permit in granted.permits)


def permit_refs(granted: Granted | None) -> tuple[PermitRef, ...]:
    """Permits that the final report frees; probes travel on their own."""
    if granted is None:
        return ()
    return tuple(PermitRef(p.permit_id, p.gate) for p in granted.permits if p.kind is not PermitKind.PROBE)


def pool_name(pool: Pool) -> str:
    """Name of the pool over the fleet: the route, or what an inline list names."""
    if pool.route:
        return pool.route
    text = "\x1f".join("\x1e".join(target) for accounts in pool.accounts for target in accounts)
    return f"inline-{hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"


def least(*limits: int | None) -> int | None:
    """Smallest limit that is set; None where none is."""
    return min((limit for limit in limits if limit is not None), default=None)


def rendered(exclusion: gate.Exclusion, now: Instant) -> Exclusion:
    """An exclusion as answers list it."""
    return Exclusion(
        exclusion.target,
        exclusion.spec.mechanism,
        exclusion.reason,
        exclusion.until,
        exclusion.remaining_ms(now),
        exclusion.evidence_id,
        exclusion.stage,
        exclusion.target_key,
    )


def refusal_message(excluded: Iterable[gate.Exclusion], pool: Pool, terminal_reason: str) -> str:
    """One line for people: how many targets are out for which reason."""
    counts: dict[str, int] = {}
    for exclusion in excluded:
        counts[exclusion.reason] = counts.get(exclusion.reason, 0) + 1
    listed = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "no target"
    return f"{terminal_reason}: {listed} of {pool.size} targets"


def explanation(pool: Pool, targets: Sequence[Target], order: Sequence[int], pin: PinAnswer | None) -> Explanation:
    """Order of the strategy, the rule that chose the first target, and what affinity said."""
    listed = tuple(ExplainedTarget(targets[position], pool.key(position)) for position in order)
    return Explanation(
        pool.strategy,
        chosen_by="session pin" if pin is not None and pin.position is not None else f"strategy {pool.strategy}",
        order=listed,
        affinity=str(pin.affinity) if pin else "",
        pin_connection=pin.pin_connection if pin else "",
    )


def gate_refusal(refusal: PermitRefusal, pool: Pool) -> Reject:
    """A gate's own refusal (concurrency.md section 5, queue_admission.md section 4): local, with its own code."""
    return Reject(
        refusal.http_status,
        refusal.code,
        "service_unavailable" if refusal.http_status >= 500 else "rate_limit_error",
        refusal.reason,
        "wait",
        f"{refusal.code}: {refusal.depth} in line at {refusal.gate}",
        refusal.retry_after_s,
        pool_size=pool.size,
        gate=refusal.gate,
        line_depth=refusal.depth,
    )
